"""Pieces carried out in host memory: views of arrays that NumPy copies, and elements
that are scaled, cast and written.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._ground.boxes import Box, volume
from .._ground.copying import copy
from .casts import is_rounded
from .pieces import (
    NOWHERE,
    Arithmetic,
    Factor,
    Piece,
    Scale,
    along,
    changed,
    dense,
    hull,
    is_only,
    rows,
    swapped,
)


_BITS = {
    1: np.dtype("uint8"),
    2: np.dtype("uint16"),
    4: np.dtype("uint32"),
    8: np.dtype("uint64"),
}


def strides_of(shape: Sequence[int], itemsize: int = 1) -> tuple[int, ...]:
    """The strides of a row-major array: in elements, or in bytes if `itemsize` is the
    size of an element.
    """
    return tuple(math.prod(shape[dim + 1 :]) * itemsize for dim in range(len(shape)))


def target_view(
    memory: np.ndarray, piece: Piece, start: Sequence[int] | None = None
) -> np.ndarray:
    """A view of the elements that a piece writes, with one dimension per factor.

    `memory` holds the target, or the part of it that begins at position `start`.
    """
    return _view(
        memory,
        piece.target,
        start,
        [(f.size, f.target_dim, f.target_step) for f in piece.factors],
    )


def source_view(
    memory: np.ndarray, piece: Piece, start: Sequence[int] | None = None
) -> np.ndarray:
    """A view of the elements that a piece reads, with one dimension per factor.

    `memory` holds the source, or the part of it that begins at position `start`.
    """
    return _view(
        memory,
        piece.source,
        start,
        [(f.size, f.source_dim, f.source_step) for f in piece.factors],
    )


def _view(
    memory: np.ndarray,
    place: tuple[int, ...],
    start: Sequence[int] | None,
    factors: Sequence[tuple[int, int, int]],
) -> np.ndarray:
    first = (
        place
        if start is None
        else tuple(at - low for at, low in zip(place, start, strict=True))
    )
    shape = tuple(size for size, _, _ in factors)
    strides = tuple(
        0 if dim == NOWHERE else memory.strides[dim] * step for _, dim, step in factors
    )
    corner = memory[(*[slice(at, None) for at in first], ...)]
    return strided(corner, shape, strides)


def strided(
    memory: np.ndarray, shape: tuple[int, ...], strides: tuple[int, ...]
) -> np.ndarray:
    """A view of `memory` with another shape and other strides in bytes, as NumPy's
    `as_strided` makes it.
    """
    # `as_strided` makes the dtype again from its text. It does not know "<f1", the text
    # of float8_e5m2.
    return np.lib.stride_tricks.as_strided(as_bits(memory), shape, strides).view(
        memory.dtype
    )


def as_bits(view: np.ndarray) -> np.ndarray:
    """The array, or if its dtype is not NumPy's own, a view of it as integers, which
    NumPy copies faster.
    """
    kind = _BITS.get(view.dtype.itemsize)
    return view if kind is None or view.dtype.isbuiltin == 1 else view.view(kind)


class StridedBox(NamedTuple):
    """A box of the source of a piece, and the strided part of memory that its elements
    go to.

    `offset` is the position of the first element in memory, and `strides` has one
    stride per dimension of the box. Both are in elements.
    """

    source: Box
    offset: int
    strides: tuple[int, ...]


def strided_boxes(piece: Piece, box: Box) -> Iterator[StridedBox]:
    """Yields the elements of a piece as boxes of the source, for memory that holds
    `box` of the target.

    The piece is inside of the box. If it copies a source element several times, the
    element is in as many results.
    """
    shape = tuple(stop - start for start, stop in box)
    strides = strides_of(shape)
    for part in _evenly(piece, strides):
        other = swapped(part)
        offset = sum(
            (at - low) * stride
            for at, (low, _), stride in zip(part.target, box, strides, strict=True)
        )
        own = [along(other, dim) for dim in range(len(other.target))]
        # The step of the innermost factor is that of the dimension; the others follow
        # from it.
        inner = [_step(factors[-1], strides) if factors else 0 for factors in own]
        yield StridedBox(hull(other), offset, tuple(inner))


def _step(factor: Factor, strides: Sequence[int]) -> int:
    # The sides are exchanged, so that the source is the memory.
    return (
        0
        if factor.source_dim == NOWHERE
        else strides[factor.source_dim] * factor.source_step
    )


def _evenly(piece: Piece, strides: Sequence[int]) -> Iterator[Piece]:
    other = swapped(piece)
    for factor in other.factors:
        if factor.target_dim == NOWHERE:
            for number in range(factor.size):
                yield from _evenly(
                    swapped(rows(other, factor, number, number + 1)), strides
                )
            return
    for part in dense(other):
        yield from map(swapped, _one_stride(part, strides))


def _one_stride(piece: Piece, strides: Sequence[int]) -> Iterator[Piece]:
    for dim in range(len(piece.target)):
        own = along(piece, dim)
        for outer, inner in zip(own, own[1:], strict=False):
            if _step(outer, strides) != _step(inner, strides) * inner.size:
                for number in range(outer.size):
                    yield from _one_stride(
                        rows(piece, outer, number, number + 1), strides
                    )
                return
    yield piece


def box_view(memory: np.ndarray, one: StridedBox) -> np.ndarray:
    """The strided view of `memory` that the elements of `one` go to. It has the
    dimensions of the source.
    """
    shape = tuple(stop - start for start, stop in one.source)
    strides = tuple(stride * memory.itemsize for stride in one.strides)
    # This takes a third of the time of `strided`, and a load makes thousands of such
    # views.
    return np.ndarray(
        shape,
        memory.dtype,
        memory.reshape(-1).view(np.uint8),
        one.offset * memory.itemsize,
        strides,
    )


# A function that returns a box of a source array, given the path of the array and the
# box.
Read = Callable[[str, Box], np.ndarray]


def fill(memory: np.ndarray, box: Box, piece: Piece, read: Read) -> None:
    """Writes the elements of a piece into `memory`, which holds `box` of the target.
    The piece is inside the box.
    """
    start = [low for low, _ in box]
    there = target_view(memory, piece, start)
    if piece.value.path is None:
        with np.errstate(over="ignore", invalid="ignore"):
            there[...] = constant(piece)
        return
    first = hull(swapped(piece))
    raw = read(piece.value.path, first)
    if piece.value.scale is not None:
        raw = raw.astype(np.float32) * _scales(piece, first, read)
    write(there, source_view(raw, piece, [low for low, _ in first]), piece)


def write(there: np.ndarray, values: np.ndarray, piece: Piece) -> None:
    """Writes `values` into the view `there`, after the casts and arithmetic operations
    of a piece.
    """
    if there.dtype == values.dtype and is_only(piece.value.casts, there.dtype):
        copy(as_bits(there), as_bits(values))
        return
    # As in JAX, a value too large for a smaller floating-point dtype becomes infinite
    # without an error.
    with np.errstate(over="ignore", invalid="ignore"):
        # The last cast happens during the copy, unless NumPy casts in another way than
        # JAX.
        for at, to in enumerate(piece.value.casts, 1):
            is_last = at == len(piece.value.casts)
            if (
                not is_last
                or isinstance(to, Arithmetic)
                or is_rounded(values.dtype, to)
            ):
                values = changed(values, to)
        copy(there, values)


def constant(piece: Piece) -> Any:
    """The constant that fills a piece without a source array, after the piece's casts
    and arithmetic operations.
    """
    value = np.asarray(piece.value.number)
    for to in piece.value.casts:
        value = changed(value, to)
    return value


def _scales(piece: Piece, box: Box, read: Read) -> np.ndarray:
    """The scale of each element in `box` of the source array of a piece."""
    scale = piece.value.scale
    assert scale is not None
    blocks = scale_box(box, scale)
    by = read(scale.path, blocks).astype(np.float32)
    places = [
        np.arange(low, high) // each - first
        for (low, high), each, (first, _) in zip(box, scale.block, blocks, strict=True)
    ]
    return by[np.ix_(*places)] if places else by


def scale_box(box: Box, scale: Scale) -> Box:
    """The box of the scales of all elements in `box`. With blocks of 128, ((100, 300),)
    gives ((0, 3),).
    """
    return tuple(
        (low // each, -(-high // each))
        for (low, high), each in zip(box, scale.block, strict=True)
    )


def chunks(piece: Piece, most: int) -> Iterator[Piece]:
    """Yields parts of a piece, each of which reads a box of at most `most` elements of
    the source, if possible.
    """
    count = volume(hull(swapped(piece)))
    factors = [f for f in piece.factors if f.source_dim != NOWHERE]
    if count <= most or not factors:
        yield piece
        return
    outer = min(factors, key=lambda f: (f.source_dim, -f.source_step))
    step = max(1, outer.size * most // count)
    for start in range(0, outer.size, step):
        yield from chunks(
            rows(piece, outer, start, min(outer.size, start + step)), most
        )
