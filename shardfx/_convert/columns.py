"""Many pieces as columns. The experts of a stack are copied in the same way: they differ
in their source arrays and in their positions, and a Python object for each takes longer
than the copy.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload

import numpy as np

from .pieces import Piece, Value, names_of, simplified


@dataclasses.dataclass(frozen=True, eq=False)
class AlikePieces(Sequence[Piece]):
    """A sequence of pieces with equal factors and casts, without scales. A `Piece` is
    made when it is asked for.

    **Arguments:**

    - `first`: the first piece.
    - `paths`: the path of each piece's source array.
    - `sources`, `targets`: the position of each piece in its source and in the target,
      as arrays of shape (pieces, rank).
    """

    first: Piece
    paths: Sequence[str]
    sources: np.ndarray
    targets: np.ndarray

    def __len__(self) -> int:
        return len(self.paths)

    @overload
    def __getitem__(self, number: int) -> Piece: ...

    @overload
    def __getitem__(self, number: slice) -> Sequence[Piece]: ...

    def __getitem__(self, number: int | slice) -> Piece | Sequence[Piece]:
        if isinstance(number, slice):
            return AlikePieces(
                first=self.first,
                paths=self.paths[number],
                sources=self.sources[number],
                targets=self.targets[number],
            )
        return Piece(
            value=self.first.value._replace(path=self.paths[number]),
            source=tuple(self.sources[number].tolist()),
            target=tuple(self.targets[number].tolist()),
            factors=self.first.factors,
        )

    def __iter__(self) -> Iterator[Piece]:
        _, number, scale, casts = self.first.value
        factors = self.first.factors
        sources = map(tuple, self.sources.tolist())
        targets = map(tuple, self.targets.tolist())
        for path, source, target in zip(self.paths, sources, targets, strict=True):
            yield Piece(Value(path, number, scale, casts), source, target, factors)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, tuple | AlikePieces):
            return NotImplemented
        return self is other or tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


class Grouped(NamedTuple):
    """Pieces in groups that are alike, and those with a constant or a scale."""

    alike: list[AlikePieces]
    others: list[Piece]


def in_columns(pieces: Sequence[Piece]) -> Grouped:
    """The pieces in groups that are alike."""
    if isinstance(pieces, AlikePieces):
        return Grouped([pieces], [])
    groups: dict[object, list[Piece]] = {}
    others = []
    for piece in pieces:
        value = piece.value
        if value.path is None or value.scale is not None:
            others.append(piece)
        else:
            # The pieces of a stack have one tuple of factors, which takes long to hash.
            groups.setdefault((id(piece.factors), value.casts), []).append(piece)
    return Grouped([_columns(group) for group in groups.values()], others)


def _columns(pieces: Sequence[Piece]) -> AlikePieces:
    return AlikePieces(
        first=pieces[0],
        paths=[str(piece.value.path) for piece in pieces],
        sources=np.array([piece.source for piece in pieces], np.int64),
        targets=np.array([piece.target for piece in pieces], np.int64),
    )


def all_simplified(pieces: Sequence[Piece]) -> Sequence[Piece]:
    """`simplified` of each piece."""
    if isinstance(pieces, AlikePieces):
        return dataclasses.replace(pieces, first=simplified(pieces.first))
    return tuple(map(simplified, pieces))


def read_paths(pieces: Sequence[Piece]) -> Sequence[str]:
    """The paths of the arrays that the pieces read, also of their scales."""
    if isinstance(pieces, AlikePieces):
        return pieces.paths
    return [path for piece in pieces for path in names_of(piece)]
