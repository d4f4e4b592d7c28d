"""The byte ranges of a row-major array that contain given boxes of it, as reads of
bounded size. Integers only.

A span is the bytes of one read. Bytes between the boxes that no box needs are read too
if there are fewer than `gap_bytes`; otherwise they are skipped. `strides` and
`itemsize` are those of the array, in bytes.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from .._convert import strides_of
from .._ground.boxes import Box, common, slices, volume


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
    strides = strides_of(shape, itemsize)
    wanted = [(number, box) for number, box in enumerate(boxes) if volume(box)]
    cut = max(
        (
            dim
            for _, box in wanted
            for dim in range(len(shape))
            if box[dim] != (0, shape[dim])
        ),
        default=0,
    )
    for hull, members in _groups(wanted, cut, strides, gap_bytes):
        in_place = all(stop - start == 1 for start, stop in hull[:cut])
        limit = run_bytes if in_place else copy_bytes
        for piece, rows in _pieces(hull, 0, strides, itemsize, gap_bytes, limit):
            yield _span(piece, rows, members, strides, itemsize)


def _groups(
    wanted: list[NumberedBox], cut: int, strides: tuple[int, ...], gap_bytes: int
) -> Iterator[tuple[Box, list[NumberedBox]]]:
    """Yields groups of the boxes `wanted` that are read together. Each group comes
    after its bounding box.

    `cut` is the last dimension that some box does not cover whole. The boxes of a group
    have equal intervals in the dimensions before `cut`. Along `cut`, the gaps between
    them are shorter than `gap_bytes` bytes.
    """
    ordered = sorted(wanted, key=lambda numbered: numbered[1])
    for outer, rows in itertools.groupby(
        ordered, key=lambda numbered: numbered[1][:cut]
    ):
        members: list[NumberedBox] = []
        start = reached = 0
        inner: Box = ()
        for number, box in rows:
            low, high = box[cut] if box else (0, 1)
            if members and strides and (low - reached) * strides[cut] >= gap_bytes:
                yield (*outer, (start, reached), *inner), members
                members = []
            if not members:
                start = reached = low
            members.append((number, box))
            reached, inner = max(reached, high), box[cut + 1 :]
        yield ((*outer, (start, reached), *inner) if strides else ()), members


def _pieces(
    box: Box,
    dim: int,
    strides: tuple[int, ...],
    itemsize: int,
    gap_bytes: int,
    limit: int,
) -> Iterator[tuple[Box, int | None]]:
    """Divides a box into parts of at most `limit` bytes, along dimension `dim` and
    those after it.

    Each part comes with the dimension along which it is read in separate runs of bytes;
    `None` if it is one run.
    """
    while dim < len(box) and box[dim][1] - box[dim][0] == 1:
        dim += 1
    if dim == len(box) or _reach(box, dim, strides, itemsize) <= min(limit, gap_bytes):
        # The range is too short for a gap that is worth skipping.
        yield box, None
        return
    start, stop = box[dim]
    one = _reach(box, dim + 1, strides, itemsize)
    has_gaps = strides[dim] - one >= gap_bytes
    if one > limit or (has_gaps and volume(box[dim + 1 :]) * itemsize < one):
        for index in range(start, stop):
            inner = (*box[:dim], (index, index + 1), *box[dim + 1 :])
            yield from _pieces(inner, dim + 1, strides, itemsize, gap_bytes, limit)
        return
    step = max(1, min(limit // one, _MOST_RUNS) if has_gaps else limit // strides[dim])
    for index in range(start, stop, step):
        yield (
            (*box[:dim], (index, min(index + step, stop)), *box[dim + 1 :]),
            dim if has_gaps else None,
        )


def _reach(box: Box, dim: int, strides: tuple[int, ...], itemsize: int) -> int:
    """The bytes from the first to the last element of a box, as if it had one index in
    each dimension before `dim`.
    """
    return (
        sum(
            (stop - start - 1) * stride
            for (start, stop), stride in zip(box[dim:], strides[dim:], strict=True)
        )
        + itemsize
    )


def _span(
    piece: Box,
    rows: int | None,
    members: list[NumberedBox],
    strides: tuple[int, ...],
    itemsize: int,
) -> Span:
    offset, runs, step = _first(piece, strides), 1, 0
    run_bytes = _reach(piece, 0, strides, itemsize)
    if rows is not None:
        # Rows that are read one by one have no gaps between them: the bytes are those
        # of the piece.
        runs, step, run_bytes = (
            piece[rows][1] - piece[rows][0],
            strides[rows],
            _reach(piece, rows + 1, strides, itemsize),
        )
        strides = strides_of(tuple(stop - start for start, stop in piece), itemsize)
    first, parts, is_direct, reached = _first(piece, strides), list[Part](), True, 0
    for number, box in members:
        where = common(piece, box)
        if where is None:
            continue
        shape = tuple([stop - start for start, stop in where])
        part = Part(number, slices(where, box), shape, _first(where, strides) - first)
        parts.append(part)
        nbytes = volume(where) * itemsize
        is_direct &= (
            part.offset == reached and _reach(where, 0, strides, itemsize) == nbytes
        )
        reached += nbytes
    return Span(
        offset,
        run_bytes,
        runs,
        step,
        strides,
        tuple(parts),
        is_direct and reached == run_bytes * runs,
    )


def _first(box: Box, strides: tuple[int, ...]) -> int:
    return sum(start * stride for (start, _), stride in zip(box, strides, strict=True))


def grouped(
    items: Iterable[T], size_of: Callable[[T], int], most: int | float
) -> Iterator[list[T]]:
    """Yields groups of consecutive items whose sizes sum to at most `most`. A larger
    item is a group of its own.
    """
    group: list[T] = []
    total = 0
    for item in items:
        size = size_of(item)
        if group and total + size > most:
            yield group
            group, total = [], 0
        group.append(item)
        total += size
    if group:
        yield group
