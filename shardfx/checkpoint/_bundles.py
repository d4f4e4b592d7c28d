"""Many small arrays of one shape that make up one leaf, read with few reads and written to each box with one copy."""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np

from .._convert import NOWHERE, Landing, Piece, as_bits, hull, shifted, strides_of
from .._ground.boxes import Box, volume
from ._entry import FileArray, fill
from ._fetches import is_plain, landed
from ._reader import Files
from ._wanted import WantedLeaf


# The bytes of an array below which work on it separately takes longer than to copy it twice.
_MOST_BYTES = 1 << 14
_LEAST_COUNT = 32
# The elements that one thread handles at once.
_CHUNK_ELEMENTS = 1 << 19


@dataclasses.dataclass(frozen=True, eq=False)
class Placing:
    """The positions of a part of each of many arrays in a box of a leaf.

    **Arguments:**

    - `number`: the number of the leaf's box.
    - `landing`: the part, and its strides there.
    - `members`, `offsets`: the numbers of the arrays, and the position of each in the box's memory, in elements.
    """

    number: int
    landing: Landing
    members: np.ndarray
    offsets: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Bundle:
    """Arrays of one shape and dtype. This process needs every element of them once.

    **Arguments:**

    - `entries`: the arrays.
    - `placings`: the positions of their parts.
    """

    entries: Sequence[FileArray]
    placings: Sequence[Placing]

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays of the bundle."""
        return len(self.entries) * (self.entries[0].nbytes or 0)


def bundled(leaf: WantedLeaf, boxes: Sequence[Box]) -> tuple[list[Bundle], WantedLeaf]:
    """The bundles of a leaf, and the leaf without the bundles' pieces."""
    if leaf.pieces is None or len(leaf.pieces) < _LEAST_COUNT:
        return [], leaf
    entries = {entry.path: entry for entry in leaf.entries}
    once: dict[str | None, int] = {}
    for piece in leaf.pieces:
        once[piece.value.path] = once.get(piece.value.path, 0) + 1
    groups: dict[object, list[Piece]] = {}
    for piece in leaf.pieces:
        entry = entries.get(str(piece.value.path))
        if not isinstance(entry, FileArray) or once[entry.path] > 1 or not 0 < (entry.nbytes or 0) <= _MOST_BYTES:
            continue
        if piece.elements == math.prod(entry.shape) and is_plain(piece, leaf, entries):
            key = (piece.factors, piece.source, entry.shape, entry.dtype)
            groups.setdefault(key, []).append(piece)
    found, taken = [], set[str | None]()
    for pieces in groups.values():
        placings = _placings(pieces, boxes) if len(pieces) >= _LEAST_COUNT else None
        if placings is not None:
            own = [entries[str(piece.value.path)] for piece in pieces]
            found.append(Bundle([one for one in own if isinstance(one, FileArray)], placings))
            taken.update(piece.value.path for piece in pieces)
    left = tuple([piece for piece in leaf.pieces if piece.value.path not in taken]) if taken else leaf.pieces
    return found, dataclasses.replace(leaf, pieces=left)


def _placings(pieces: Sequence[Piece], boxes: Sequence[Box]) -> list[Placing] | None:
    """The positions of pieces that differ only in name and position; `None` if some are changed while they are read."""
    first = pieces[0]
    if any(factor.source_dim == NOWHERE for factor in first.factors):
        return None
    places = np.array([piece.target for piece in pieces], np.int64).reshape(len(pieces), -1)
    ends = places + np.array([high - low for low, high in hull(first)], np.int64)
    found, covered = [], np.zeros(len(pieces), np.int64)
    for number, box in enumerate(boxes):
        low, high = (np.array([side[at] for side in box], np.int64) for at in (0, 1))
        # In the dimensions where a piece is inside of the box, it is treated as if it began where the box begins.
        by = np.where((low <= places) & (ends <= high), places - low, 0)
        offsets = by @ np.array(strides_of([stop - start for start, stop in box]), np.int64)
        here = np.flatnonzero(np.all((low < ends) & (places < high), axis=1))
        for start, members in _alike((places - by)[here], here):
            parts = list(landed(shifted(first, [a - b for a, b in zip(start, first.target, strict=True)]), box, True))
            for part in parts:
                if isinstance(part, Piece):
                    return None
                for landing in part:
                    found.append(Placing(number, landing, members, offsets[members] + landing.offset))
                    covered[members] += volume(landing.source)
    return found if (covered == first.elements).all() else None


def _alike(rows: np.ndarray, numbers: np.ndarray) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """Each different row, with the numbers of the rows equal to it."""
    if len(rows):
        unique, which = np.unique(rows, axis=0, return_inverse=True)
        for at, row in enumerate(unique.tolist()):
            yield tuple(row), numbers[which.reshape(-1) == at]


def read_bundle(files: Files, bundle: Bundle, memory: Sequence[np.ndarray]) -> int:
    """Reads the arrays of a bundle into the boxes of a leaf, and returns the number of bytes read."""
    entries = bundle.entries
    count = max(1, _CHUNK_ELEMENTS // math.prod(entries[0].shape))
    for start in range(0, len(entries), count):
        stop = min(len(entries), start + count)
        values = files.read_alike(entries[start:stop])
        for one in bundle.placings:
            inside = (one.members >= start) & (one.members < stop)
            if inside.any():
                _put(values[one.members[inside] - start], one, one.offsets[inside], memory[one.number], entries[0].path)
    return bundle.nbytes


def _put(values: np.ndarray, one: Placing, offsets: np.ndarray, memory: np.ndarray, name: str) -> None:
    part = values[(slice(None), *[slice(low, high) for low, high in one.landing.source])]
    if part.dtype != memory.dtype:
        cast = np.empty(part.shape, memory.dtype)
        fill(cast, part, name)
        part = cast
    within = np.zeros((), np.int64)
    for (low, high), stride in zip(one.landing.source, one.landing.strides, strict=True):
        within = within[..., None] + np.arange(high - low) * stride
    places = offsets.reshape(-1, *[1] * within.ndim) + within
    as_bits(memory.reshape(-1))[places] = as_bits(part)
