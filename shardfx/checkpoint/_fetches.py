"""The boxes of stored arrays that fill a leaf, and their positions in the leaf's memory."""

import itertools as it
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

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
from .._ground.boxes import Box, common
from . import _stores as stores
from ._entry import FileArray, StoreArray, may_change
from ._reader import COPY_BYTES, Files, Read, spans_of
from ._spans import Span
from ._stores import MissingChunks
from ._wanted import WantedLeaf


# A piece that consists of more boxes than this is read as a whole and divided in memory.
_MOST_LANDINGS = 512


class Fetch(NamedTuple):
    """Boxes of one stored array, in its own order of dimensions, and their positions in a leaf's memory.

    **Arguments:**

    - `entry`: the array.
    - `boxes`: parts of it.
    - `homes`: for each box, the number of the leaf's box that it is part of, and its position in that box's memory;
        `None` if the boxes are those of the leaf.
    """

    entry: FileArray | StoreArray
    boxes: Sequence[Box]
    homes: Sequence[tuple[int, Landing]] | None

    def targets(self, memory: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """The memory of each box, as a view with the dimensions of the stored array."""
        return memory if self.homes is None else [seen(memory[number], home) for number, home in self.homes]


def spans_into(entry: FileArray, fetch: Fetch, dtype: object, gap_bytes: int) -> tuple[Span, ...]:
    """The reads of an array in a file, for memory of a dtype."""
    in_place = dtype == entry.dtype and (fetch.homes is None or all(map(_is_in_place, fetch.homes)))
    return spans_of(entry.shape, entry.dtype.itemsize, tuple(fetch.boxes), in_place, gap_bytes)


def _is_in_place(home: tuple[int, Landing]) -> bool:
    """Whether the bytes of a box have the same order in memory as in the file."""
    sizes = [stop - start for start, stop in home[1].source]
    pairs = zip(sizes, home[1].strides, strides_of(sizes), strict=True)
    return all(size == 1 or stride == wanted for size, stride, wanted in pairs)


def fetches(leaf: WantedLeaf, boxes: Sequence[Box]) -> tuple[list[Fetch], list[tuple[int, Piece]]]:
    """The reads that fill `boxes` of a leaf, and the pieces whose values change while they are read.

    Such a piece is scaled, cast twice, constant, or scattered in very small runs. Each comes with the number of its
    box.
    """
    if leaf.pieces is None:
        return [Fetch(leaf.entries[0], boxes, None)], []
    entries = {entry.path: entry for entry in leaf.entries}
    homes: dict[str, list[tuple[int, Landing]]] = {}
    gathered = []
    known: dict[object, list[tuple[Landing, ...] | Piece]] = {}
    strides = [strides_of([stop - start for start, stop in box]) for box in boxes]
    for piece in leaf.pieces:
        is_plain, reach = _is_plain(piece, leaf, entries), hull(piece)
        for number, box in enumerate(boxes):
            if common(reach, box) is None:
                continue
            # The layers of a stack differ only in their position.
            by = from_start(piece, box)
            first = shifted(piece, [-more for more in by])
            key = (number, first.source, first.target, first.factors, is_plain)
            if key not in known:
                known[key] = list(_landed(first, box, is_plain))
            offset = sum(more * stride for more, stride in zip(by, strides[number], strict=True))
            for part in known[key]:
                if isinstance(part, Piece):
                    gathered.append((number, shifted(part, by)._replace(value=piece.value)))
                    continue
                own = homes.setdefault(str(piece.value.path), [])
                own += [(number, Landing(one.source, one.offset + offset, one.strides)) for one in part]
    return [Fetch(entries[path], [one.source for _, one in own], own) for path, own in homes.items()], gathered


def _landed(piece: Piece, box: Box, is_plain: bool) -> Iterator[tuple[Landing, ...] | Piece]:
    """The parts of a piece within a box: as positions in memory, or as pieces if their values change on the way."""
    for part in within(piece, box):
        few = tuple(it.islice(landings(part, box), _MOST_LANDINGS + 1)) if is_plain else ()
        yield few if 0 < len(few) <= _MOST_LANDINGS else part


def _is_plain(piece: Piece, leaf: WantedLeaf, entries: Mapping[str, FileArray | StoreArray]) -> bool:
    """Whether a piece has the file's values in the leaf's dtype."""
    value = piece.value
    if value.path is None or value.scale is not None or not is_only(value.casts, leaf.dtype):
        return False
    return not (leaf.is_cast_by_map and value.casts and may_change(entries[value.path].dtype, leaf.dtype))


def gather(
    files: Files,
    leaf: WantedLeaf,
    piece: Piece,
    box: Box,
    memory: np.ndarray,
    gap_bytes: int,
    missing_chunks: MissingChunks,
) -> int:
    """Fills a piece in memory that holds `box` of a leaf, and returns the number of bytes read."""
    entries = {entry.path: entry for entry in leaf.entries}
    read_bytes = 0

    def read(path: str, box: Box) -> np.ndarray:
        nonlocal read_bytes
        entry = entries[path]
        scratch = np.empty([stop - start for start, stop in box], entry.dtype)
        if isinstance(entry, StoreArray):
            read_bytes += stores.read_into(entry, (box,), [scratch], missing_chunks=missing_chunks)
        else:
            spans = spans_of(entry.shape, entry.dtype.itemsize, (box,), True, gap_bytes)
            read_bytes += files.read([Read(entry, span, [scratch]) for span in spans])
        return scratch

    for part in _chunks(piece, entries):
        fill(memory, box, part, read)
    return read_bytes


def _chunks(piece: Piece, entries: Mapping[str, FileArray | StoreArray]) -> Sequence[Piece]:
    if piece.value.path is None:
        return [piece]
    return list(chunks(piece, max(1, COPY_BYTES // entries[piece.value.path].dtype.itemsize)))


def gathered_fetches(leaf: WantedLeaf, gathered: Sequence[tuple[int, Piece]]) -> Iterator[Fetch]:
    """The fetches that `gather` makes for these pieces."""
    entries = {entry.path: entry for entry in leaf.entries}
    for _, whole in gathered:
        for piece in _chunks(whole, entries) if whole.value.path is not None else ():
            box, value = hull(swapped(piece)), piece.value
            yield Fetch(entries[str(value.path)], [box], None)
            if value.scale is not None:
                yield Fetch(entries[value.scale.path], [scale_box(box, value.scale)], None)
