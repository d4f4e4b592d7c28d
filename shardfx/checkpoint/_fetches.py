"""The boxes of stored arrays that fill a leaf, and their positions in the leaf's memory."""

import dataclasses
import itertools as it
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from .._convert import (
    Landing,
    Piece,
    chunks,
    fill,
    from_start,
    hull,
    is_only,
    landings,
    scale_box,
    seen,
    shifted,
    strides_of,
    swapped,
    within,
)
from .._ground.boxes import Box
from . import _stores as stores
from ._entry import FileArray, StoreArray, may_change
from ._flight import Unit
from ._reader import COPY_BYTES, Files, spans_of
from ._spans import Span
from ._stores import MissingChunks
from ._wanted import WantedLeaf


# A piece that consists of more boxes than this is read as a whole and divided in memory.
_MOST_LANDINGS = 512


@dataclasses.dataclass(frozen=True)
class Fetch:
    """Boxes of one stored array, in its own order of dimensions, and their positions in a leaf's memory.

    **Arguments:**

    - `entry`: the array.
    - `boxes`: parts of it.
    - `homes`: for each box, the number of the leaf's box that it is part of, and its position in that box's memory;
        `None` if it is all of it.
    """

    entry: FileArray | StoreArray
    boxes: tuple[Box, ...]
    homes: tuple[tuple[int, Landing | None], ...]

    def targets(self, memory: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The memory of each box, as a view with the dimensions of the stored array."""
        return [memory[number] if home is None else seen(memory[number], home) for number, home in self.homes]

    def spans(self, entry: FileArray, dtype: object, gap_bytes: int) -> tuple[Span, ...]:
        """The reads of an array in a file, for memory of a dtype."""
        in_place = dtype == entry.dtype and all(map(_is_in_place, self.boxes, self.homes))
        return spans_of(entry.shape, entry.dtype.itemsize, self.boxes, in_place, gap_bytes)


def _is_in_place(box: Box, home: tuple[int, Landing | None]) -> bool:
    """Whether the bytes of a box have the same order in memory as in the file."""
    if home[1] is None:
        return True
    sizes = [stop - start for start, stop in box]
    pairs = zip(sizes, home[1].strides, strides_of(sizes), strict=True)
    return all(size == 1 or stride == wanted for size, stride, wanted in pairs)


@dataclasses.dataclass(frozen=True)
class Gathered:
    """A piece whose values change while it is read: scaled, cast twice, constant, or scattered in very small runs.

    **Arguments:**

    - `number`: the number of the leaf's box that contains it.
    - `piece`: the piece.
    """

    number: int
    piece: Piece


def fetches(leaf: WantedLeaf, boxes: Sequence[Box]) -> tuple[list[Fetch], list[Gathered]]:
    """The reads that fill `boxes` of a leaf: boxes that are read into place, and pieces that need more than a read."""
    if leaf.pieces is None:
        homes = tuple((number, None) for number in range(len(boxes)))
        return [Fetch(leaf.entries[0], tuple(boxes), homes)], []
    found: dict[str, tuple[list[Box], list[tuple[int, Landing | None]]]] = {}
    gathered = []
    entries = {entry.path: entry for entry in leaf.entries}
    known: dict[object, list[tuple[Landing, ...] | Piece]] = {}
    for piece in leaf.pieces:
        for number, box in enumerate(boxes):
            # The layers of a stack differ only in their position.
            by = from_start(piece, box)
            first = shifted(piece, [-more for more in by])
            key = (number, first.source, first.target, first.factors, is_plain(piece, leaf, entries))
            if key not in known:
                known[key] = list(landed(first, box, key[-1]))
            strides = strides_of([stop - start for start, stop in box])
            offset = sum(more * stride for more, stride in zip(by, strides, strict=True))
            for part in known[key]:
                if isinstance(part, Piece):
                    gathered.append(Gathered(number, shifted(part, by)._replace(value=piece.value)))
                    continue
                own, homes = found.setdefault(str(piece.value.path), ([], []))
                own += [landing.source for landing in part]
                homes += [(number, landing._replace(offset=landing.offset + offset)) for landing in part]
    return [Fetch(entries[path], tuple(own), tuple(homes)) for path, (own, homes) in found.items()], gathered


def landed(piece: Piece, box: Box, is_plain: bool) -> Iterator[tuple[Landing, ...] | Piece]:
    """The parts of a piece within a box: as positions in memory, or as pieces if their values change on the way."""
    for part in within(piece, box):
        few = tuple(it.islice(landings(part, box), _MOST_LANDINGS + 1)) if is_plain else ()
        yield few if 0 < len(few) <= _MOST_LANDINGS else part


def is_plain(piece: Piece, leaf: WantedLeaf, entries: Mapping[str, FileArray | StoreArray]) -> bool:
    """Whether a piece has the file's values in the leaf's dtype."""
    value = piece.value
    if value.path is None or value.scale is not None or not is_only(value.casts, leaf.dtype):
        return False
    return not (leaf.is_cast_by_map and value.casts and may_change(entries[value.path].dtype, leaf.dtype))


def gather(
    files: Files, unit: Unit, one: Gathered, memory: np.ndarray, gap_bytes: int, missing_chunks: MissingChunks
) -> int:
    """Fills a piece, and returns the number of bytes read."""
    entries = {entry.path: entry for entry in unit.leaf.entries}
    read_bytes = 0

    def read(path: str, box: Box) -> np.ndarray:
        nonlocal read_bytes
        entry = entries[path]
        scratch = np.empty([stop - start for start, stop in box], entry.dtype)
        if isinstance(entry, StoreArray):
            read_bytes += stores.read_into(entry, (box,), [scratch], missing_chunks=missing_chunks)
        else:
            read_bytes += files.read(
                entry, spans_of(entry.shape, entry.dtype.itemsize, (box,), True, gap_bytes), (box,), [scratch]
            )
        return scratch

    for piece in _chunks(one.piece, entries[one.piece.value.path] if one.piece.value.path else None):
        fill(memory, unit.kind.boxes[one.number], piece, read)
    return read_bytes


def _chunks(piece: Piece, entry: FileArray | StoreArray | None) -> Sequence[Piece]:
    return [piece] if entry is None else list(chunks(piece, max(1, COPY_BYTES // entry.dtype.itemsize)))


def gathered_fetches(leaf: WantedLeaf, gathered: Sequence[Gathered]) -> list[Fetch]:
    """The fetches that `gather` makes for these pieces."""
    entries = {entry.path: entry for entry in leaf.entries}
    found = []
    for one in gathered:
        value = one.piece.value
        if value.path is None:
            continue
        for piece in _chunks(one.piece, entries[value.path]):
            box = hull(swapped(piece))
            found.append(Fetch(entries[value.path], (box,), ((one.number, None),)))
            if value.scale is not None:
                by = scale_box(box, value.scale)
                found.append(Fetch(entries[value.scale.path], (by,), ((one.number, None),)))
    return found
