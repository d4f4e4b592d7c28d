"""The byte ranges of a row-major array that contain given boxes of it, as reads of
bounded size. Integers only.

A span is the bytes of one read. Bytes between the boxes that no box needs are read too
if there are fewer than `gap_bytes`; otherwise they are skipped. `strides` and
`itemsize` are those of the array, in bytes.
"""

import bisect
import dataclasses
import itertools as it
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from .._convert import offset_of, strides_of
from .._ground.boxes import Box, box_shape, box_start, common, slices, volume


T = TypeVar("T")

# The most runs of one span, however few their bytes.
_MOST_RUNS = 4096

# A box, with its number among the boxes that are read.
NumberedBox = tuple[int, Box]


@dataclasses.dataclass(frozen=True)
class Part:
    """The elements of one box that a span contains.

    **Arguments:**

    - `number`: the number of the box.
    - `index`: the NumPy index of the elements in an array that holds the box.
    - `shape`: the shape of the elements.
    - `offset`: the position of the first element in the span's bytes.
    """

    number: int
    index: tuple[Any, ...]
    shape: tuple[int, ...]
    offset: int


@dataclasses.dataclass(frozen=True)
class Span:
    """The bytes of a file that are read together: one run of bytes, or several runs at
    equal distances.

    **Arguments:**

    - `offset`: the position of the first run, in bytes from the array's first byte.
    - `run_bytes`, `runs`, `step`: the length of a run, how many there are, and the
      bytes from one start to the next.
    - `strides`: the strides of the array's dimensions, in bytes, in memory that holds
      the runs one after another.
    - `parts`: the elements of each box in the span.
    - `is_direct`: whether the parts follow each other without gaps, so that they can be
      read without a copy.
    """

    offset: int
    run_bytes: int
    runs: int
    step: int
    strides: tuple[int, ...]
    parts: tuple[Part, ...]
    is_direct: bool

    @property
    def nbytes(self) -> int:
        """The number of bytes in all runs of the span."""
        return self.run_bytes * self.runs


def spans(
    shape: tuple[int, ...],
    itemsize: int,
    boxes: Sequence[Box],
    *,
    gap_bytes: int,
    run_bytes: int,
    copy_bytes: int,
) -> Iterator[Span]:
    """Yields the spans that contain `boxes` of an array of shape `shape`. The boxes are
    all different.

    Boxes with the same rows, such as the shards of a matrix that is sharded in columns,
    are read together, and no byte of these rows is read twice. A span has at most
    `run_bytes` bytes if it is read without a copy, else `copy_bytes`. A row with more
    bytes than that is read in several spans.
    """
    # In bytes.
    strides = strides_of(shape, itemsize)
    nonempty = [(number, box) for number, box in enumerate(boxes) if volume(box)]
    cut_dim = _last_cut_dim([box for _, box in nonempty], shape)
    for hull, members in _boxes_read_together(nonempty, cut_dim, strides, gap_bytes):
        # With one index before `cut_dim`, each box is contiguous in the file, and the
        # boxes follow each other.
        is_in_place = all(size == 1 for size in box_shape(hull[:cut_dim]))
        limit_bytes = copy_bytes
        if is_in_place:
            limit_bytes = run_bytes
        pieces = _parts_in_runs(
            box=hull,
            dim=0,
            strides=strides,
            itemsize=itemsize,
            gap_bytes=gap_bytes,
            limit_bytes=limit_bytes,
        )
        for piece, row_dim in pieces:
            yield _span_of(
                piece=piece,
                row_dim=row_dim,
                members=members,
                strides=strides,
                itemsize=itemsize,
            )


def _last_cut_dim(boxes: Sequence[Box], shape: tuple[int, ...]) -> int:
    """The last dimension that some box does not cover whole; 0 if there is none."""
    for dim in reversed(range(len(shape))):
        whole = (0, shape[dim])
        if any(box[dim] != whole for box in boxes):
            return dim
    return 0


def _boxes_read_together(
    boxes: list[NumberedBox],
    cut_dim: int,
    strides: tuple[int, ...],
    gap_bytes: int,
) -> Iterator[tuple[Box, list[NumberedBox]]]:
    """Yields groups of boxes that are read together. Each group comes after its
    bounding box.

    `cut_dim` is the last dimension that some box does not cover whole. The boxes of a
    group have equal intervals in the dimensions before `cut_dim`. Along `cut_dim`, the
    gaps between them are shorter than `gap_bytes` bytes.
    """
    if not strides:
        # Arrays of rank 0 have one box.
        if boxes:
            yield (), boxes
        return
    ordered = sorted(boxes, key=lambda numbered: numbered[1])
    for outer, rows in it.groupby(ordered, key=lambda numbered: numbered[1][:cut_dim]):
        members: list[NumberedBox] = []
        start = 0
        end = 0
        inner: Box = ()
        for number, box in rows:
            low, high = box[cut_dim]
            is_far = (low - end) * strides[cut_dim] >= gap_bytes
            if members and is_far:
                yield (*outer, (start, end), *inner), members
                members = []
            if not members:
                start = low
                end = low
            members.append((number, box))
            end = max(end, high)
            inner = box[cut_dim + 1 :]
        yield (*outer, (start, end), *inner), members


def _parts_in_runs(
    box: Box,
    dim: int,
    strides: tuple[int, ...],
    itemsize: int,
    gap_bytes: int,
    limit_bytes: int,
) -> Iterator[tuple[Box, int | None]]:
    """Divides a box into parts of at most `limit_bytes` bytes, along dimension `dim`
    and those after it. The box has one index in each dimension before `dim`.

    Each part comes with the dimension along which it is read in separate runs of bytes;
    `None` if it is one run. The row of an index is what the box has of the dimensions
    after `dim`. `strides` are in bytes.
    """
    while dim < len(box) and box[dim][1] - box[dim][0] == 1:
        dim += 1
    if dim == len(box) or _reach(box, dim, strides, itemsize) <= min(
        limit_bytes, gap_bytes
    ):
        # The range is too short for a gap that is worth skipping.
        yield box, None
        return
    start, stop = box[dim]
    outer = box[:dim]
    inner = box[dim + 1 :]
    row_bytes = _reach(box, dim + 1, strides, itemsize)
    # Gaps between two rows that are worth skipping, and bytes that no box needs within
    # a row.
    has_gaps = strides[dim] - row_bytes >= gap_bytes
    has_inner_gaps = volume(inner) * itemsize < row_bytes
    if row_bytes > limit_bytes or (has_gaps and has_inner_gaps):
        for index in range(start, stop):
            box_at_index = (*outer, (index, index + 1), *inner)
            yield from _parts_in_runs(
                box=box_at_index,
                dim=dim + 1,
                strides=strides,
                itemsize=itemsize,
                gap_bytes=gap_bytes,
                limit_bytes=limit_bytes,
            )
        return
    if has_gaps:
        index_count = max(1, min(limit_bytes // row_bytes, _MOST_RUNS))
    else:
        index_count = max(1, limit_bytes // strides[dim])
    row_dim = None
    if has_gaps:
        row_dim = dim
    for index in range(start, stop, index_count):
        rows_stop = min(index + index_count, stop)
        yield (*outer, (index, rows_stop), *inner), row_dim


def _reach(box: Box, dim: int, strides: tuple[int, ...], itemsize: int) -> int:
    """The bytes from the first to the last element of a box, as if it had one index in
    each dimension before `dim`.
    """
    reach = itemsize
    for size, stride in zip(box_shape(box[dim:]), strides[dim:], strict=True):
        reach += (size - 1) * stride
    return reach


def _span_of(
    piece: Box,
    row_dim: int | None,
    members: list[NumberedBox],
    strides: tuple[int, ...],
    itemsize: int,
) -> Span:
    """The span of `piece`, a part of the bounding box of the boxes `members`. Along
    `row_dim` it is read in separate runs; `None` if it is one run.
    """
    offset = _first_byte(piece, strides)
    runs = 1
    step = 0
    run_bytes = _reach(piece, 0, strides, itemsize)
    if row_dim is not None:
        # Rows that are read one by one have no gaps between them: the bytes are those
        # of the piece.
        start, stop = piece[row_dim]
        runs = stop - start
        step = strides[row_dim]
        run_bytes = _reach(piece, row_dim + 1, strides, itemsize)
        strides = strides_of(box_shape(piece), itemsize)

    first = _first_byte(piece, strides)
    parts: list[Part] = []
    # The bytes of the parts so far, and whether these follow each other without gaps.
    part_bytes = 0
    is_direct = True
    for number, box in members:
        inside = common(piece, box)
        if inside is None:
            continue
        part = Part(
            number=number,
            index=slices(inside, box),
            shape=box_shape(inside),
            offset=_first_byte(inside, strides) - first,
        )
        parts.append(part)
        nbytes = volume(inside) * itemsize
        is_dense = _reach(inside, 0, strides, itemsize) == nbytes
        is_direct = is_direct and is_dense and part.offset == part_bytes
        part_bytes += nbytes
    return Span(
        offset=offset,
        run_bytes=run_bytes,
        runs=runs,
        step=step,
        strides=strides,
        parts=tuple(parts),
        is_direct=is_direct and part_bytes == run_bytes * runs,
    )


def _first_byte(box: Box, strides: tuple[int, ...]) -> int:
    return offset_of(box_start(box), strides)


def ranges_of(
    sizes: Sequence[int],
    most_size: int | float,
) -> Iterator[tuple[int, int]]:
    """Yields the start and the stop of groups of consecutive items, as `grouped` makes
    them of items with these sizes.
    """
    ends = list(it.accumulate(sizes))
    start = 0
    while start < len(sizes):
        before = ends[start] - sizes[start]
        stop_within_limit = bisect.bisect_right(ends, before + most_size, start)
        stop = max(start + 1, stop_within_limit)
        yield start, stop
        start = stop


def grouped(
    items: Iterable[T],
    size_of: Callable[[T], int],
    most_size: int | float,
) -> Iterator[list[T]]:
    """Yields groups of consecutive items whose sizes sum to at most `most_size`. A
    larger item is a group of its own.
    """
    group: list[T] = []
    total = 0
    for member in items:
        size = size_of(member)
        if group and total + size > most_size:
            yield group
            group = []
            total = 0
        group.append(member)
        total += size
    if group:
        yield group
