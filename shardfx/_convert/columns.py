"""Many pieces as columns. The experts of a stack are copied in the same way: they
differ in their source arrays and in their positions, and a Python object for each takes
longer than the copy.
"""

import dataclasses
import functools as ft
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, overload

import numpy as np

from .._ground.spec import DType
from .pieces import Made, Piece, Value, names_of, simplified


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
        """The piece with a number, or the pieces of a slice. A piece is the first one
        with its own path, its position in the source and its position in the target.
        """
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
        """Yields the pieces: the first one, each time with its own path, position in
        the source and position in the target.
        """
        first_value = self.first.value
        number = first_value.number
        scale = first_value.scale
        casts = first_value.casts
        factors = self.first.factors
        sources = map(tuple, self.sources.tolist())
        targets = map(tuple, self.targets.tolist())
        for path, source, target in zip(self.paths, sources, targets, strict=True):
            value = Value(path, number, scale, casts)
            yield Piece(value, source, target, factors)

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
    """The pieces in groups that are alike: with equal factors and casts. Pieces of a
    constant or with a scale are in no group.
    """
    if isinstance(pieces, AlikePieces):
        return Grouped(alike=[pieces], others=[])
    groups: dict[object, list[Piece]] = {}
    others = []
    for piece in pieces:
        value = piece.value
        if value.path is None or value.scale is not None:
            others.append(piece)
        else:
            # The pieces of a stack have one tuple of factors, which takes long to hash.
            # So have arrays of one element, whatever their rank.
            kind = (id(piece.factors), len(piece.source), value.casts)
            groups.setdefault(kind, []).append(piece)
    alike = [_alike_pieces(group) for group in groups.values()]
    return Grouped(alike=alike, others=others)


def _alike_pieces(pieces: Sequence[Piece]) -> AlikePieces:
    """Pieces that are alike, as columns."""
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
    paths: list[str] = []
    for piece in pieces:
        paths += names_of(piece)
    return paths


@dataclasses.dataclass(frozen=True, eq=False)
class AlikeParts:
    """Arrays of one kind that a map makes, each of one piece of the same source array.
    They differ in the position in that array.

    **Arguments:**

    - `paths`: the path of each array.
    - `shape`, `dtype`: those of each array.
    - `first`: the piece that makes the first array.
    - `sources`: the position of each piece in the source array, of shape (arrays,
      rank).
    """

    paths: Sequence[str]
    shape: tuple[int, ...]
    dtype: DType
    first: Piece
    sources: np.ndarray

    def made(self, number: int) -> Made:
        """One of the arrays, by its number."""
        piece = self.first._replace(source=tuple(self.sources[number].tolist()))
        return Made(shape=self.shape, dtype=self.dtype, pieces=(piece,))


class MadeTable(Mapping[str, Made]):
    """The arrays that a map makes, by path. A `Made` is made when it is asked for, if
    its array is one of many parts.

    **Arguments:**

    - `order`: the paths of all arrays.
    - `parts`: the arrays that are parts of one kind.
    - `others`: the other arrays.
    """

    def __init__(
        self,
        order: Sequence[str],
        parts: Sequence[AlikeParts],
        others: Mapping[str, Made],
    ):
        """Sets the fields: the paths of all arrays in order, the arrays that are parts
        of one kind, and the other arrays by path.
        """
        self.order = order
        self.parts = parts
        self.others = others

    def __getitem__(self, path: str) -> Made:
        if path in self.others:
            return self.others[path]
        parts, number = self._parts_and_numbers[path]
        return parts.made(number)

    def __iter__(self) -> Iterator[str]:
        return iter(self.order)

    def __len__(self) -> int:
        return len(self.order)

    @ft.cached_property
    def _parts_and_numbers(self) -> Mapping[str, tuple[AlikeParts, int]]:
        """By path, the parts that have the array, and its number among them."""
        parts_and_numbers = {}
        for parts in self.parts:
            for number, path in enumerate(parts.paths):
                parts_and_numbers[path] = (parts, number)
        return parts_and_numbers


def in_parts(leaves: Mapping[str, Made]) -> MadeTable:
    """The arrays that a map makes, by path. Arrays of one piece are in groups whose
    pieces differ only in the position in the source array.
    """
    if isinstance(leaves, MadeTable):
        return leaves
    groups: dict[object, list[str]] = {}
    others = {}
    for path, leaf in leaves.items():
        if len(leaf.pieces) != 1:
            others[path] = leaf
            continue
        (piece,) = leaf.pieces
        value = piece.value
        if value.path is None or value.scale is not None:
            others[path] = leaf
            continue
        kind = (value, piece.target, id(piece.factors), leaf.shape, leaf.dtype)
        groups.setdefault(kind, []).append(path)
    parts = []
    for paths in groups.values():
        first = leaves[paths[0]]
        positions = [leaves[path].pieces[0].source for path in paths]
        parts_of_kind = AlikeParts(
            paths=paths,
            shape=first.shape,
            dtype=first.dtype,
            first=first.pieces[0],
            sources=np.array(positions, np.int64),
        )
        parts.append(parts_of_kind)
    return MadeTable(order=list(leaves), parts=parts, others=others)
