"""Pieces carried out in host memory: views of arrays that NumPy copies, and elements
that are scaled, cast and written.
"""

import itertools as it
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._ground.boxes import Box, box_shape, box_start, volume
from .._ground.copying import copy
from .casts import is_rounded
from .pieces import (
    NOWHERE,
    Arithmetic,
    Factor,
    Operation,
    Piece,
    Scale,
    along,
    changed,
    dense,
    hull,
    is_only,
    iterations,
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


def offset_of(position: Sequence[int], strides: Sequence[int]) -> int:
    """How far an element at `position` is behind the first one, in memory with these
    strides.
    """
    return sum(map(operator.mul, position, strides))


def target_view(
    memory: np.ndarray,
    piece: Piece,
    start: Sequence[int] | None = None,
) -> np.ndarray:
    """A view of the elements that a piece writes, with one dimension per factor.

    `memory` holds the target, or the part of it that begins at position `start`.
    """
    loops = [(f.size, f.target_dim, f.target_step) for f in piece.factors]
    return _view(memory, piece.target, start, loops)


def source_view(
    memory: np.ndarray,
    piece: Piece,
    start: Sequence[int] | None = None,
) -> np.ndarray:
    """A view of the elements that a piece reads, with one dimension per factor.

    `memory` holds the source, or the part of it that begins at position `start`.
    """
    loops = [(f.size, f.source_dim, f.source_step) for f in piece.factors]
    return _view(memory, piece.source, start, loops)


def _view(
    memory: np.ndarray,
    position: tuple[int, ...],
    start: Sequence[int] | None,
    loops: Sequence[tuple[int, int, int]],
) -> np.ndarray:
    """A view of the elements that loops reach from `position` on. A loop has a size, a
    dimension, and a step along this dimension. `memory` holds the array, or the part of
    it that begins at `start`; the view has one dimension per loop.
    """
    if start is not None:
        pairs = zip(position, start, strict=True)
        position = tuple(number - low for number, low in pairs)
    corner = memory[(*[slice(number, None) for number in position], ...)]
    strides = []
    for _, dim, step in loops:
        strides.append(0 if dim == NOWHERE else memory.strides[dim] * step)
    shape = tuple(size for size, _, _ in loops)
    return strided(corner, shape, tuple(strides))


def strided(
    memory: np.ndarray,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> np.ndarray:
    """A view of `memory` with another shape and other strides in bytes, as NumPy's
    `as_strided` makes it.
    """
    # `as_strided` makes the dtype again from its text. It does not know "<f1", the text
    # of float8_e5m2.
    bits = as_bits(memory)
    return np.lib.stride_tricks.as_strided(bits, shape, strides).view(memory.dtype)


def as_bits(array: np.ndarray) -> np.ndarray:
    """The array, or if its dtype is not NumPy's own, a view of it as integers, which
    NumPy copies faster.
    """
    kind = _BITS.get(array.dtype.itemsize)
    if kind is None or array.dtype.isbuiltin == 1:
        return array
    return array.view(kind)


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
    strides = strides_of(box_shape(box))
    for part in _parts_with_one_stride(piece, strides):
        offset = 0
        triples = zip(part.target, box, strides, strict=True)
        for position, (low, _), stride in triples:
            offset += (position - low) * stride

        # With source and target exchanged, its `target` is the source array.
        turned = swapped(part)
        box_strides = []
        for dim in range(len(turned.target)):
            factors = along(turned, dim)
            # The step of the innermost factor is that of the dimension; the others
            # follow from it.
            box_strides.append(_memory_step(factors[-1], strides) if factors else 0)
        yield StridedBox(source=hull(turned), offset=offset, strides=tuple(box_strides))


def _memory_step(factor: Factor, strides: Sequence[int]) -> int:
    """The elements of memory that an iteration moves by, for a piece whose source is
    the memory; 0 for a loop that repeats an element.
    """
    if factor.source_dim == NOWHERE:
        return 0
    return strides[factor.source_dim] * factor.source_step


def _parts_with_one_stride(piece: Piece, strides: Sequence[int]) -> Iterator[Piece]:
    """Yields parts of a piece that copy no source element twice, each with one stride
    of memory per dimension of the source. `strides` has the stride of each dimension of
    the target in its memory, in elements.
    """
    # With source and target exchanged: a loop without a target dimension repeats a
    # source element.
    turned = swapped(piece)
    for factor in turned.factors:
        if factor.target_dim == NOWHERE:
            for number in range(factor.size):
                repetition = swapped(iterations(turned, factor, number, number + 1))
                yield from _parts_with_one_stride(repetition, strides)
            return
    # Each part fills a box of the source without gaps.
    for part in dense(turned):
        yield from map(swapped, _divided_to_one_stride(part, strides))


def _divided_to_one_stride(piece: Piece, strides: Sequence[int]) -> Iterator[Piece]:
    """Yields parts of a piece whose loops along one dimension of the target move
    through memory with one stride: a step of the outer loop is all iterations of the
    inner one. The source of the piece is the memory, in which its dimensions have these
    `strides` in elements.
    """
    for dim in range(len(piece.target)):
        for outer, inner in it.pairwise(along(piece, dim)):
            if (
                _memory_step(outer, strides)
                != _memory_step(inner, strides) * inner.size
            ):
                for number in range(outer.size):
                    row = iterations(piece, outer, number, number + 1)
                    yield from _divided_to_one_stride(row, strides)
                return
    yield piece


def box_view(memory: np.ndarray, box: StridedBox) -> np.ndarray:
    """The strided view of `memory` that the elements of `box` go to. It has the
    dimensions of the source.
    """
    # This takes a third of the time of `strided`, and a load makes thousands of such
    # views.
    item_strides = tuple(stride * memory.itemsize for stride in box.strides)
    memory_bytes = memory.reshape(-1).view(np.uint8)
    return np.ndarray(
        shape=box_shape(box.source),
        dtype=memory.dtype,
        buffer=memory_bytes,
        offset=box.offset * memory.itemsize,
        strides=item_strides,
    )


# A function that returns a box of a source array, given the path of the array and the
# box.
Read = Callable[[str, Box], np.ndarray]


def fill(memory: np.ndarray, box: Box, piece: Piece, read: Read) -> None:
    """Writes the elements of a piece into `memory`, which holds `box` of the target.
    The piece is inside the box. `read` returns the elements of a box of a source array,
    given its path and the box.
    """
    target = target_view(memory, piece, box_start(box))
    if piece.value.path is None:
        with np.errstate(over="ignore", invalid="ignore"):
            target[...] = constant(piece)
        return
    source_box = hull(swapped(piece))
    values = read(piece.value.path, source_box)
    if piece.value.scale is not None:
        scales = _scales(piece, source_box, read)
        values = values.astype(np.float32) * scales
    write(target, source_view(values, piece, box_start(source_box)), piece)


def write(target: np.ndarray, values: np.ndarray, piece: Piece) -> None:
    """Writes `values` into the view `target`, after the casts and arithmetic operations
    of a piece.
    """
    casts = piece.value.casts
    if target.dtype == values.dtype and is_only(casts, target.dtype):
        copy(as_bits(target), as_bits(values))
        return
    # As in JAX, a value too large for a smaller floating-point dtype becomes infinite
    # without an error.
    with np.errstate(over="ignore", invalid="ignore"):
        for number, operation in enumerate(casts, 1):
            is_last = number == len(casts)
            if not is_last or not _casts_in_copy(values, operation):
                values = changed(values, operation)
        copy(target, values)


def _casts_in_copy(values: np.ndarray, operation: Operation) -> bool:
    """Whether a copy casts as an operation does: NumPy makes integers of floats in
    another way than JAX.
    """
    if isinstance(operation, Arithmetic):
        return False
    return not is_rounded(values.dtype, operation)


def constant(piece: Piece) -> Any:
    """The constant that fills a piece without a source array, after the piece's casts
    and arithmetic operations.
    """
    value = np.asarray(piece.value.number)
    for operation in piece.value.casts:
        value = changed(value, operation)
    return value


def _scales(piece: Piece, box: Box, read: Read) -> np.ndarray:
    """The scale of each element in `box` of the source array of a piece. `read` returns
    the elements of a box of an array, given its path and the box.
    """
    scale = piece.value.scale
    assert scale is not None
    blocks = scale_box(box, scale)
    scales = read(scale.path, blocks).astype(np.float32)
    if not box:
        return scales
    # For each dimension, the position in `scales` of the scale of each element.
    positions = []
    triples = zip(box, scale.block, blocks, strict=True)
    for (low, high), block_size, (first, _) in triples:
        block_numbers = np.arange(low, high) // block_size
        positions.append(block_numbers - first)
    return scales[np.ix_(*positions)]


def scale_box(box: Box, scale: Scale) -> Box:
    """The box of the scales of all elements in `box`. With blocks of 128, ((100, 300),)
    gives ((0, 3),).
    """
    pairs = zip(box, scale.block, strict=True)
    return tuple(
        (low // block_size, -(-high // block_size)) for (low, high), block_size in pairs
    )


def chunks(piece: Piece, most: int) -> Iterator[Piece]:
    """Yields parts of a piece, each of which reads a box of at most `most` elements of
    the source, if possible.
    """
    read_elements = volume(hull(swapped(piece)))
    factors = [factor for factor in piece.factors if factor.source_dim != NOWHERE]
    if read_elements <= most or not factors:
        yield piece
        return
    # The outermost loop in the source's memory, cut into `step` iterations at a time.
    outer = min(factors, key=lambda factor: (factor.source_dim, -factor.source_step))
    step = max(1, outer.size * most // read_elements)
    for start in range(0, outer.size, step):
        stop = min(outer.size, start + step)
        yield from chunks(iterations(piece, outer, start, stop), most)
