"""The reads that fill the leaves of a plan: the boxes of stored arrays, their positions
in a leaf's memory, and counts of their bytes from headers alone.

A part of a leaf that a map scales, casts twice or fills with a constant is read as a
piece, through temporary memory. Gaps of fewer than `gap_bytes` bytes between needed
bytes of a file are read too. `processes` is the number of processes for a plan or
sharding without devices.
"""

import dataclasses
import itertools as it
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from .._convert import (
    Piece,
    StridedBox,
    box_view,
    chunks,
    fill,
    from_start,
    hull,
    is_only,
    scale_box,
    shifted,
    strided_boxes,
    strides_of,
    swapped,
    within,
)
from .._ground.boxes import Box, common
from . import _stores as stores
from ._entry import FileArray, StoreArray, may_change
from ._leaves_to_load import LeafToLoad
from ._opening import Reader
from ._packed import is_packed, raw_box, raw_entry, unpacked
from ._reader import COPY_BYTES, Read, spans_of
from ._spans import Span
from ._stores import MissingChunks


# A piece that consists of more boxes than this is read as a whole and divided in
# memory.
_MOST_BOXES = 512
# The number of a box of a leaf, and the part of that box's memory that is read into.
Destination = tuple[int, StridedBox]
# The number of a box of a leaf, and a piece inside of it that `read_piece` reads.
NumberedPiece = tuple[int, Piece]


class Fetch(NamedTuple):
    """Boxes to read from one stored array, and their positions in the memory of a leaf.

    A process loads one or more boxes of a leaf, and has memory for each of them.

    **Arguments:**

    - `entry`: the stored array.
    - `boxes`: the boxes of the stored array.
    - `places`: for each of `boxes`, the number of a box of the leaf, and the part of
      its memory that is filled. `None`
        if the leaf is the stored array: `boxes` are then the boxes of the leaf.
    """

    entry: FileArray | StoreArray
    boxes: Sequence[Box]
    places: Sequence[Destination] | None

    def targets(self, memory: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """For each of `boxes`, a view of the memory that it is read into.

        `memory` has an array for each box of the leaf that the process loads.
        """
        return (
            memory
            if self.places is None
            else [box_view(memory[number], place) for number, place in self.places]
        )


def spans_into(
    entry: FileArray, fetch: Fetch, dtype: object, gap_bytes: int
) -> tuple[Span, ...]:
    """The spans of the stored array `entry` to read for `fetch`. Their values go to
    memory of dtype `dtype`.
    """
    in_place = dtype == entry.dtype and (
        fetch.places is None or all(map(_is_in_place, fetch.places))
    )
    return spans_of(
        entry.shape, entry.dtype.itemsize, tuple(fetch.boxes), in_place, gap_bytes
    )


def _is_in_place(place: Destination) -> bool:
    """Whether the elements of a box have the same order at their destination as in the
    file.
    """
    sizes = [stop - start for start, stop in place[1].source]
    pairs = zip(sizes, place[1].strides, strides_of(sizes), strict=True)
    return all(size == 1 or stride == wanted for size, stride, wanted in pairs)


def fetches(
    leaf: LeafToLoad, boxes: Sequence[Box]
) -> tuple[list[Fetch], list[NumberedPiece]]:
    """The reads that fill `boxes` of a leaf, and the pieces that `read_piece` must read
    instead.

    Such a piece needs more than a copy: it is scaled, cast twice or constant, or
    consists of very many small boxes.
    """
    if leaf.pieces is None:
        return list(parts_of(Fetch(leaf.entries[0], boxes, None))), []
    entries = {entry.path: entry for entry in leaf.entries}
    places: dict[str, list[Destination]] = {}
    gathered = []
    known: dict[object, list[tuple[StridedBox, ...] | Piece]] = {}
    strides = [strides_of([stop - start for start, stop in box]) for box in boxes]
    reaches = np.array([hull(piece) for piece in leaf.pieces], int).reshape(
        len(leaf.pieces), len(leaf.shape), 2
    )
    ends = np.array(boxes, int).reshape(len(boxes), 1, len(leaf.shape), 2)
    overlaps = np.maximum(reaches[..., 0], ends[..., 0]) < np.minimum(
        reaches[..., 1], ends[..., 1]
    )
    for number, box in enumerate(boxes):
        for at in np.flatnonzero(overlaps[number].all(-1)):
            piece = leaf.pieces[at]
            is_plain = _is_plain(piece, leaf, entries)
            # The layers of a stack differ only in their position.
            by = from_start(piece, box)
            first = shifted(piece, [-more for more in by])
            key = (number, first.source, first.target, first.factors, is_plain)
            if key not in known:
                known[key] = list(_parts_in(first, box, is_plain))
            offset = sum(
                more * stride for more, stride in zip(by, strides[number], strict=True)
            )
            for part in known[key]:
                if isinstance(part, Piece):
                    gathered.append(
                        (number, shifted(part, by)._replace(value=piece.value))
                    )
                    continue
                own = places.setdefault(str(piece.value.path), [])
                own += [
                    (number, StridedBox(one.source, one.offset + offset, one.strides))
                    for one in part
                ]
    whole = [
        Fetch(entries[path], [one.source for _, one in own], own)
        for path, own in places.items()
    ]
    return [part for fetch in whole for part in parts_of(fetch)], gathered


def parts_of(fetch: Fetch) -> Iterator[Fetch]:
    """Yields the reads of each part of an array that is stored in parts; for other
    arrays, the read itself.
    """
    entry = fetch.entry
    if not isinstance(entry, FileArray) or not entry.parts:
        yield fetch
        return
    places = fetch.places
    if places is None:
        places = [
            (number, StridedBox(box, 0, strides_of([high - low for low, high in box])))
            for number, box in enumerate(fetch.boxes)
        ]
    for part in entry.parts:
        boxes: list[Box] = []
        destinations: list[Destination] = []
        for number, place in places:
            inner = common(place.source, part.box)
            if inner is None:
                continue
            steps = [
                (low - first) * stride
                for (low, _), (first, _), stride in zip(
                    inner, place.source, place.strides, strict=True
                )
            ]
            inside = tuple(
                (low - first, high - first)
                for (low, high), (first, _) in zip(inner, part.box, strict=True)
            )
            offset = place.offset + sum(steps)
            boxes.append(inside)
            destinations.append((number, StridedBox(inside, offset, place.strides)))
        if boxes:
            shape = tuple(high - low for low, high in part.box)
            stored = dataclasses.replace(
                entry, shape=shape, file=part.file, offset=part.offset, parts=()
            )
            yield Fetch(stored, boxes, destinations)


def _parts_in(
    piece: Piece, box: Box, is_plain: bool
) -> Iterator[tuple[StridedBox, ...] | Piece]:
    """Yields the parts of a piece that are inside a box of the leaf.

    If `is_plain`, elements are only copied, and a part is a tuple of boxes of the
    stored array with their positions in memory. Otherwise, or if there are too many
    boxes, a part is a piece.
    """
    for part in within(piece, box):
        few = (
            tuple(it.islice(strided_boxes(part, box), _MOST_BOXES + 1))
            if is_plain
            else ()
        )
        yield few if 0 < len(few) <= _MOST_BOXES else part


def _is_plain(
    piece: Piece, leaf: LeafToLoad, entries: Mapping[str, FileArray | StoreArray]
) -> bool:
    """Whether a piece writes values of the file unchanged, or cast once to the leaf's
    dtype.

    The result is `False` for a cast that the map states and that may change values,
    since `read_piece` alone accepts changed values. `entries` are the stored arrays by
    path.
    """
    value = piece.value
    if (
        value.path is None
        or value.scale is not None
        or not is_only(value.casts, leaf.dtype)
        or is_packed(entries[value.path])
    ):
        return False
    return not (
        leaf.is_cast_by_map
        and value.casts
        and may_change(entries[value.path].dtype, leaf.dtype)
    )


def read_piece(
    files: Reader,
    leaf: LeafToLoad,
    piece: Piece,
    box: Box,
    memory: np.ndarray,
    gap_bytes: int,
    missing_chunks: MissingChunks,
) -> int:
    """Reads a piece into temporary memory, and writes it into `memory`, which holds
    `box` of the leaf.

    The piece's scales and casts are applied in between. Returns the number of bytes
    read.
    """
    entries = {entry.path: entry for entry in leaf.entries}
    read_bytes = 0

    def read_raw(entry: FileArray, box: Box) -> tuple[np.ndarray, np.ndarray]:
        """The elements of a box of a packed tensor, and the bytes that hold them."""
        raw, rows = raw_entry(entry), raw_box(entry, box)
        packed = np.empty([stop - start for start, stop in rows], np.uint8)
        spans = spans_of(raw.shape, 1, (rows,), True, gap_bytes)
        files.read([Read(raw, span, [packed]) for span in spans])
        return unpacked(packed, entry, box), packed

    def read(path: str, box: Box) -> np.ndarray:
        nonlocal read_bytes
        entry = entries[path]
        if isinstance(entry, FileArray) and is_packed(entry):
            raw, packed = read_raw(entry, box)
            read_bytes += packed.nbytes
            return raw
        scratch = np.empty([stop - start for start, stop in box], entry.dtype)
        if isinstance(entry, StoreArray):
            read_bytes += stores.read_into(
                files.where, entry, (box,), [scratch], missing_chunks=missing_chunks
            )
        else:
            for fetch in parts_of(Fetch(entry, (box,), None)):
                part, targets = fetch.entry, fetch.targets([scratch])
                assert isinstance(part, FileArray)
                spans = spans_into(part, fetch, part.dtype, gap_bytes)
                reads = [Read(part, span, targets) for span in spans]
                read_bytes += files.read(reads)
        return scratch

    for part in _chunks(piece, entries):
        fill(memory, box, part, read)
    return read_bytes


def _chunks(
    piece: Piece, entries: Mapping[str, FileArray | StoreArray]
) -> Sequence[Piece]:
    if piece.value.path is None:
        return [piece]
    return list(
        chunks(piece, max(1, COPY_BYTES // entries[piece.value.path].dtype.itemsize))
    )


def gathered_fetches(
    leaf: LeafToLoad, gathered: Sequence[NumberedPiece]
) -> Iterator[Fetch]:
    """Yields the reads that `read_piece` makes for the pieces in `gathered`, to count
    their bytes.
    """
    entries = {entry.path: entry for entry in leaf.entries}
    for _, whole in gathered:
        for piece in _chunks(whole, entries) if whole.value.path is not None else ():
            box, value = hull(swapped(piece)), piece.value
            entry = entries[str(value.path)]
            if isinstance(entry, FileArray) and is_packed(entry):
                yield Fetch(raw_entry(entry), [raw_box(entry, box)], None)
            else:
                yield from parts_of(Fetch(entry, [box], None))
            if value.scale is not None:
                scale = entries[value.scale.path]
                yield from parts_of(Fetch(scale, [scale_box(box, value.scale)], None))
