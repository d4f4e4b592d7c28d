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
    offset_of,
    scale_box,
    shifted,
    strided_boxes,
    strides_of,
    swapped,
    within,
)
from .._ground.boxes import Box, box_shape, common
from . import _stores as stores
from ._entry import FileArray, StoreArray, may_change
from ._leaves_to_load import LeafToLoad
from ._opening import Reader
from ._packed import is_packed, raw_box, raw_entry, unpacked
from ._reader import COPY_BYTES, reads_of, spans_of
from ._spans import Span
from ._stores import MissingChunks
from ._table import by_path


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
    - `destinations`: for each of `boxes`, the number of a box of the leaf, and the part
      of its memory that is filled. `None` if the leaf is the stored array: `boxes` are
      then the boxes of the leaf.
    """

    entry: FileArray | StoreArray
    boxes: Sequence[Box]
    destinations: Sequence[Destination] | None

    def targets(self, memory: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """For each of `boxes`, a view of the memory that it is read into.

        `memory` has an array for each box of the leaf that the process loads.
        """
        if self.destinations is None:
            return memory
        return [
            box_view(memory[number], strided_box)
            for number, strided_box in self.destinations
        ]


def spans_into(
    entry: FileArray,
    fetch: Fetch,
    dtype: object,
    gap_bytes: int,
) -> tuple[Span, ...]:
    """The spans of the stored array `entry` to read for `fetch`. Their values go to
    memory of dtype `dtype`.
    """
    is_in_place = dtype == entry.dtype
    if is_in_place and fetch.destinations is not None:
        is_in_place = all(map(_is_in_place, fetch.destinations))
    return spans_of(
        shape=entry.shape,
        itemsize=entry.dtype.itemsize,
        boxes=tuple(fetch.boxes),
        in_place=is_in_place,
        gap_bytes=gap_bytes,
    )


def _is_in_place(destination: Destination) -> bool:
    """Whether the elements of a box have the same order at their destination as in the
    file.
    """
    _, box = destination
    sizes = box_shape(box.source)
    for size, stride, row_major in zip(
        sizes, box.strides, strides_of(sizes), strict=True
    ):
        if size != 1 and stride != row_major:
            return False
    return True


def fetches(
    leaf: LeafToLoad,
    boxes: Sequence[Box],
) -> tuple[list[Fetch], list[NumberedPiece]]:
    """The reads that fill `boxes` of a leaf, and the pieces that `read_piece` must read
    instead.

    Such a piece needs more than a copy: it is scaled, cast twice or constant, or
    consists of very many small boxes. It comes with the number of its box in `boxes`.
    """
    if leaf.pieces is None:
        fetch = Fetch(entry=leaf.entries[0], boxes=boxes, destinations=None)
        return list(parts_of(fetch)), []
    if not leaf.pieces:
        return [], []
    entries = by_path(leaf.entries)
    # By stored array: the boxes to read of it, each with the number of the leaf's box
    # and the part of that box's memory.
    destinations_by_path: dict[str, list[Destination]] = {}
    gathered: list[NumberedPiece] = []
    # The parts of the first piece of each kind, as if it were at the start of its box.
    parts_by_kind: dict[object, list[tuple[StridedBox, ...] | Piece]] = {}
    overlaps = _overlaps(leaf.pieces, boxes, len(leaf.shape))
    for number, box in enumerate(boxes):
        strides = strides_of(box_shape(box))
        piece_numbers: list[int] = np.flatnonzero(overlaps[number]).tolist()
        for piece_number in piece_numbers:
            piece = leaf.pieces[piece_number]
            is_plain = _is_plain(piece, leaf, entries)
            # The layers of a stack differ only in their position: in their distance
            # from the start of the box, in elements for each dimension.
            distance = from_start(piece, box)
            piece_at_start = shifted(piece, [-steps for steps in distance])
            kind_of_piece = (
                number,
                piece_at_start.source,
                piece_at_start.target,
                piece_at_start.factors,
                is_plain,
            )
            if kind_of_piece not in parts_by_kind:
                parts_by_kind[kind_of_piece] = list(
                    _parts_in(piece_at_start, box, is_plain)
                )
            # The distance in the memory of the box, in elements.
            offset = offset_of(distance, strides)
            for part in parts_by_kind[kind_of_piece]:
                if isinstance(part, Piece):
                    part = shifted(part, distance)._replace(value=piece.value)
                    gathered.append((number, part))
                    continue
                destinations = destinations_by_path.setdefault(
                    str(piece.value.path), []
                )
                for box_at_start in part:
                    box_offset = box_at_start.offset + offset
                    strided_box = StridedBox(
                        source=box_at_start.source,
                        offset=box_offset,
                        strides=box_at_start.strides,
                    )
                    destinations.append((number, strided_box))

    whole_fetches = []
    for path, destinations in destinations_by_path.items():
        sources = [strided_box.source for _, strided_box in destinations]
        fetch = Fetch(entry=entries[path], boxes=sources, destinations=destinations)
        whole_fetches += parts_of(fetch)
    return whole_fetches, gathered


def _overlaps(pieces: Sequence[Piece], boxes: Sequence[Box], rank: int) -> np.ndarray:
    """For each box, whether the bounding box of each piece overlaps it, as an array of
    shape (boxes, pieces). The boxes have `rank` dimensions.
    """
    hulls = np.array([hull(piece) for piece in pieces], int)
    hulls = hulls.reshape(1, len(pieces), rank, 2)
    box_array = np.array(boxes, int)
    intervals = box_array.reshape(len(boxes), 1, rank, 2)
    starts = np.maximum(hulls[..., 0], intervals[..., 0])
    stops = np.minimum(hulls[..., 1], intervals[..., 1])
    return np.all(starts < stops, axis=-1)


def parts_of(fetch: Fetch) -> Iterator[Fetch]:
    """Yields the reads of each part of an array that is stored in parts; for other
    arrays, the read itself.
    """
    entry = fetch.entry
    if not isinstance(entry, FileArray) or not entry.parts:
        yield fetch
        return
    whole_destinations = fetch.destinations
    if whole_destinations is None:
        whole_destinations = []
        for number, box in enumerate(fetch.boxes):
            strides = strides_of(box_shape(box))
            whole = StridedBox(source=box, offset=0, strides=strides)
            whole_destinations.append((number, whole))
    for part in entry.parts:
        destinations: list[Destination] = []
        for number, strided_box in whole_destinations:
            destination = _within_part(strided_box, part.box)
            if destination is not None:
                destinations.append((number, destination))
        if destinations:
            boxes = [strided_box.source for _, strided_box in destinations]
            stored = dataclasses.replace(
                entry,
                shape=box_shape(part.box),
                file=part.file,
                offset=part.offset,
                parts=(),
            )
            yield Fetch(entry=stored, boxes=boxes, destinations=destinations)


def _within_part(strided_box: StridedBox, part_box: Box) -> StridedBox | None:
    """What a part of a stored array has of a box to read: a box of the part, with its
    position in the memory that `strided_box` names for the whole box; `None` if it has
    nothing of it. `part_box` is the part's box of the array.
    """
    common_box = common(strided_box.source, part_box)
    if common_box is None:
        return None
    offset = strided_box.offset
    box_in_part = []
    rows = zip(
        common_box,
        strided_box.source,
        part_box,
        strided_box.strides,
        strict=True,
    )
    for (start, stop), (whole_start, _), (part_start, _), stride in rows:
        offset += (start - whole_start) * stride
        box_in_part.append((start - part_start, stop - part_start))
    return StridedBox(
        source=tuple(box_in_part),
        offset=offset,
        strides=strided_box.strides,
    )


def _parts_in(
    piece: Piece,
    box: Box,
    is_plain: bool,
) -> Iterator[tuple[StridedBox, ...] | Piece]:
    """Yields the parts of a piece that are inside a box of the leaf.

    If `is_plain`, elements are only copied, and a part is a tuple of boxes of the
    stored array with their positions in memory. Otherwise, or if there are too many
    boxes, a part is a piece.
    """
    for part in within(piece, box):
        if not is_plain:
            yield part
            continue
        first_boxes = it.islice(strided_boxes(part, box), _MOST_BOXES + 1)
        boxes = tuple(first_boxes)
        yield boxes if 0 < len(boxes) <= _MOST_BOXES else part


def _is_plain(
    piece: Piece,
    leaf: LeafToLoad,
    entries: Mapping[str, FileArray | StoreArray],
) -> bool:
    """Whether a piece writes values of the file unchanged, or cast once to the leaf's
    dtype.

    The result is `False` for a cast that the map states and that may change values,
    since `read_piece` alone accepts changed values. `entries` are the stored arrays by
    path.
    """
    value = piece.value
    if value.path is None or value.scale is not None:
        return False
    entry = entries[value.path]
    if not is_only(value.casts, leaf.dtype) or is_packed(entry):
        return False
    is_cast_by_map = leaf.is_cast_by_map and bool(value.casts)
    return not (is_cast_by_map and may_change(entry.dtype, leaf.dtype))


@dataclasses.dataclass
class _PieceReader:
    """Reads boxes of the stored arrays `entries` into temporary memory, and counts the
    bytes.
    """

    files: Reader
    entries: Mapping[str, FileArray | StoreArray]
    gap_bytes: int
    missing_chunks: MissingChunks
    read_bytes: int = 0

    def __call__(self, path: str, box: Box) -> np.ndarray:
        """The elements of a box of a stored array."""
        entry = self.entries[path]
        if isinstance(entry, FileArray) and is_packed(entry):
            return self.packed(entry, box)
        memory = np.empty(box_shape(box), entry.dtype)
        if isinstance(entry, StoreArray):
            self.read_bytes += stores.read_into(
                self.files.place,
                entry,
                (box,),
                [memory],
                missing_chunks=self.missing_chunks,
            )
            return memory
        whole = Fetch(entry=entry, boxes=(box,), destinations=None)
        for fetch in parts_of(whole):
            part = fetch.entry
            assert isinstance(part, FileArray)
            targets = fetch.targets([memory])
            spans = spans_into(part, fetch, part.dtype, self.gap_bytes)
            reads = reads_of(part, spans, targets)
            self.read_bytes += self.files.read(reads)
        return memory

    def packed(self, entry: FileArray, box: Box) -> np.ndarray:
        """The elements of a box of a packed tensor."""
        raw_bytes = raw_entry(entry)
        box_of_bytes = raw_box(entry, box)
        memory = np.empty(box_shape(box_of_bytes), np.uint8)
        spans = spans_of(
            shape=raw_bytes.shape,
            itemsize=1,
            boxes=(box_of_bytes,),
            in_place=True,
            gap_bytes=self.gap_bytes,
        )
        self.files.read(reads_of(raw_bytes, spans, [memory]))
        self.read_bytes += memory.nbytes
        return unpacked(memory, entry, box)


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
    entries = by_path(leaf.entries)
    reader = _PieceReader(
        files=files,
        entries=entries,
        gap_bytes=gap_bytes,
        missing_chunks=missing_chunks,
    )
    for part in _chunks(piece, entries):
        fill(memory, box, part, reader)
    return reader.read_bytes


def _chunks(
    piece: Piece,
    entries: Mapping[str, FileArray | StoreArray],
) -> Sequence[Piece]:
    """A piece divided into pieces of at most `COPY_BYTES` stored bytes. A piece with a
    constant reads nothing, and is not divided.
    """
    if piece.value.path is None:
        return [piece]
    itemsize = entries[piece.value.path].dtype.itemsize
    return list(chunks(piece, max(1, COPY_BYTES // itemsize)))


def gathered_fetches(
    leaf: LeafToLoad,
    gathered: Sequence[NumberedPiece],
) -> Iterator[Fetch]:
    """Yields the reads that `read_piece` makes for the pieces in `gathered`, to count
    their bytes.
    """
    entries = by_path(leaf.entries)
    for _, whole in gathered:
        if whole.value.path is None:
            continue
        for piece in _chunks(whole, entries):
            yield from _piece_fetches(piece, entries)


def _piece_fetches(
    piece: Piece,
    entries: Mapping[str, FileArray | StoreArray],
) -> Iterator[Fetch]:
    """Yields the reads of a piece with a source, and of its scales. `entries` are the
    stored arrays by path.
    """
    # The bounding box of the elements in the stored array.
    box = hull(swapped(piece))
    entry = entries[str(piece.value.path)]
    if isinstance(entry, FileArray) and is_packed(entry):
        raw = raw_entry(entry)
        yield Fetch(entry=raw, boxes=[raw_box(entry, box)], destinations=None)
    else:
        yield from parts_of(Fetch(entry=entry, boxes=[box], destinations=None))
    scale = piece.value.scale
    if scale is not None:
        blocks = [scale_box(box, scale)]
        scales = Fetch(entry=entries[scale.path], boxes=blocks, destinations=None)
        yield from parts_of(scales)
