"""Which bytes of a row-major array hold given boxes of it, as reads of bounded size. Integers only."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence


# Per dimension the first index and the one after the last.
Box = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Part:
    """What a span gives to one of the boxes.

    **Arguments:**

    - `number`: which of the boxes.
    - `where`: the part of the array, inside the box.
    - `offset`: the bytes from the span's first byte to the part's.
    """

    number: int
    where: Box
    offset: int


@dataclasses.dataclass(frozen=True)
class Span:
    """One stretch of bytes to read.

    **Arguments:**

    - `offset`, `nbytes`: in bytes from the array's first.
    - `parts`: what it gives to which box.
    - `run`: whether the span is one run of bytes to each part, part after part, so that it can be read into place.
    """

    offset: int
    nbytes: int
    parts: tuple[Part, ...]
    run: bool


def strides_of(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The bytes from one index to the next along each dimension of a row-major array."""
    return tuple(math.prod(shape[dim + 1 :]) * itemsize for dim in range(len(shape)))


def whole(shape: tuple[int, ...]) -> Box:
    """The box of the whole array."""
    return tuple((0, size) for size in shape)


def elements(box: Box) -> int:
    """How many elements a box has."""
    return math.prod(stop - start for start, stop in box)


def spans(
    shape: tuple[int, ...], itemsize: int, boxes: Sequence[Box], *, gap_bytes: int, run_bytes: int, copy_bytes: int
) -> Iterator[Span]:
    """The reads that fetch `boxes` of an array, each byte once as far as the boxes share rows.

    Boxes that lie side by side in the same rows, as the shards of a matrix that is cut in columns, are read together.
    Bytes between that no box wants are read along where there are fewer than `gap_bytes` of them, else skipped.

    **Arguments:**

    - `shape`, `itemsize`: of the array.
    - `boxes`: different parts of it.
    - `gap_bytes`: how many unwanted bytes in a row are worth a read of their own; 1 reads none.
    - `run_bytes`, `copy_bytes`: the most that one span has, where its bytes can be read into place, and where they
        must be copied out. One row that is longer, and needs no cutting, is cut at these sizes, too.

    **Returns:**

    Spans in the order of the file, group by group.
    """
    strides = strides_of(shape, itemsize)
    wanted = [(number, box) for number, box in enumerate(boxes) if elements(box)]
    cut = max((dim for _, box in wanted for dim in range(len(shape)) if box[dim] != (0, shape[dim])), default=0)
    for hull, members in _groups(wanted, cut, strides, gap_bytes):
        in_place = all(stop - start == 1 for start, stop in hull[:cut])
        limit = run_bytes if in_place else copy_bytes
        for piece in _pieces(hull, 0, strides, itemsize, gap_bytes, limit):
            yield _span(piece, members, strides, itemsize)


def _groups(
    wanted: list[tuple[int, Box]], cut: int, strides: tuple[int, ...], gap_bytes: int
) -> Iterator[tuple[Box, list[tuple[int, Box]]]]:
    """Boxes of the same rows that are near each other along dimension `cut`, and the hull of each such group."""
    ordered = sorted(wanted, key=lambda numbered: numbered[1])
    for outer, rows in itertools.groupby(ordered, key=lambda numbered: numbered[1][:cut]):
        members: list[tuple[int, Box]] = []
        start = reached = 0
        inner: Box = ()
        for number, box in rows:
            low, high = box[cut] if box else (0, 1)
            if members and (low - reached) * strides[cut] >= gap_bytes:
                yield (*outer, (start, reached), *inner), members
                members = []
            if not members:
                start = reached = low
            members = [*members, (number, box)]
            reached, inner = max(reached, high), box[cut + 1 :]
        yield ((*outer, (start, reached), *inner) if strides else ()), members


def _pieces(box: Box, dim: int, strides: tuple[int, ...], itemsize: int, gap_bytes: int, limit: int) -> Iterator[Box]:
    while dim < len(box) and box[dim][1] - box[dim][0] == 1:
        dim += 1
    if dim == len(box) or _reach(box, dim, strides, itemsize) <= min(limit, gap_bytes):
        # Too short to hold a gap that is worth skipping.
        yield box
        return
    start, stop = box[dim]
    one = _reach(box, dim + 1, strides, itemsize)
    if strides[dim] - one >= gap_bytes or one > limit:
        for index in range(start, stop):
            inner = (*box[:dim], (index, index + 1), *box[dim + 1 :])
            yield from _pieces(inner, dim + 1, strides, itemsize, gap_bytes, limit)
        return
    step = max(1, limit // strides[dim])
    for index in range(start, stop, step):
        yield (*box[:dim], (index, min(index + step, stop)), *box[dim + 1 :])


def _reach(box: Box, dim: int, strides: tuple[int, ...], itemsize: int) -> int:
    """Bytes from the first to the last element of a box, as far as dimensions from `dim` on go."""
    return (
        sum((stop - start - 1) * stride for (start, stop), stride in zip(box[dim:], strides[dim:], strict=True))
        + itemsize
    )


def _span(piece: Box, members: list[tuple[int, Box]], strides: tuple[int, ...], itemsize: int) -> Span:
    first = _first(piece, strides)
    parts = []
    for number, box in members:
        where = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(piece, box, strict=True))
        if all(stop > start for start, stop in where):
            parts.append(Part(number, where, _first(where, strides) - first))
    nbytes = _reach(piece, 0, strides, itemsize)
    lengths = [elements(part.where) * itemsize for part in parts]
    reached = list(itertools.accumulate(lengths, initial=0))
    run = reached[-1] == nbytes and all(
        part.offset == start and _reach(part.where, 0, strides, itemsize) == length
        for part, start, length in zip(parts, reached[:-1], lengths, strict=True)
    )
    return Span(first, nbytes, tuple(parts), run)


def _first(box: Box, strides: tuple[int, ...]) -> int:
    return sum(start * stride for (start, _), stride in zip(box, strides, strict=True))
