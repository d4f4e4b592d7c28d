"""Copies between NumPy views whose elements lie in memory in different orders."""

import functools as ft
import itertools as it
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


# The least number of elements of a block along the dimension that is contiguous in the
# target. If a cache line holds more elements than that, a block has as many elements as
# a cache line.
_BLOCK_ROW_ELEMENTS = 16
# A copy of a smaller block takes longer than the block saves.
_LEAST_BLOCK_ELEMENTS = 2048
# The second-level cache of a core has lines of 64 bytes. Lines whose addresses are
# equal modulo 64 KiB share one set, which holds 8 to 16 of them (ways).
_LINE_BYTES = 64
_SET_PERIOD_BYTES = 1 << 16
_LINES_PER_SET = 8


def copy(target: np.ndarray, source: np.ndarray) -> None:
    """Copies `source` into `target`, in blocks if their memory orders differ and blocks
    are faster.
    """
    is_of_equal_rank = target.ndim == source.ndim
    dim = None
    if is_of_equal_rank:
        dim = block_dim(target.shape, target.strides, source.strides)
    copy_along(target, source, dim)


def copy_along(target: np.ndarray, source: np.ndarray, dim: int | None) -> None:
    """Copies `source` into `target` in blocks along the dimension `dim`, or in one step
    if `dim` is `None`.
    """
    if target.dtype != source.dtype:
        source = castable(source, target.dtype)
    if dim is None:
        np.copyto(target, source, casting="unsafe")
        return
    all_of_dims_before = (slice(None),) * dim
    step = max(_BLOCK_ROW_ELEMENTS, _LINE_BYTES // target.itemsize)
    for start in range(0, target.shape[dim], step):
        block = (*all_of_dims_before, slice(start, start + step))
        np.copyto(target[block], source[block], casting="unsafe")


def castable(x: Any, to: np.dtype) -> Any:
    """The NumPy array `x`, in another dtype if NumPy itself has no cast to `to`."""
    between = _dtype_between(x.dtype, to)
    return x if between is None else x.astype(between)


@ft.lru_cache(maxsize=256)
def _dtype_between(stored: np.dtype, to: np.dtype) -> np.dtype | None:
    """The dtype through which NumPy casts from `stored` to `to`; `None` if it needs
    none. Of JAX's dtypes `float8_e8m0fnu` has few casts, and `int4` none to `uint4`.
    """
    try:
        np.zeros(1, stored).astype(to)
    except TypeError:
        are_integers = {stored.name, to.name} == {"int4", "uint4"}
        return np.dtype(np.int8 if are_integers else np.float32)
    return None


def block_dim(
    shape: Sequence[int],
    target_strides: Sequence[int],
    source_strides: Sequence[int],
) -> int | None:
    """The dimension along which a copy in blocks is faster than one step, or `None`.
    Strides are in bytes.

    NumPy fills the target row by row. If the source is transposed, each element of a
    row lies in another cache line of the source, and the next row needs the same lines
    again. A long row needs more lines than the cache holds, so the lines have left the
    cache by then. The rows of a block are so short that their lines stay. A copy of
    16-bit numbers is then 5 times as fast.
    """
    element_count = math.prod(shape)
    if len(shape) < 2 or element_count < 8 * _LEAST_BLOCK_ELEMENTS:
        return None
    row_dim = _contiguous_dim(shape, target_strides)
    column_dim = _contiguous_dim(shape, source_strides)
    if row_dim is None or column_dim is None or row_dim == column_dim:
        return None
    if shape[row_dim] < 2 * _BLOCK_ROW_ELEMENTS:
        return None
    if source_strides[row_dim] == 0:
        # The elements of a row are one element, which lies in one line.
        return None
    # The bytes of cache that each element of a row takes: lines that are 2048 bytes
    # apart use only every 32nd set of the cache.
    row_step = math.gcd(source_strides[row_dim], _SET_PERIOD_BYTES)
    cache_bytes_each = max(_LINE_BYTES, row_step)
    # The lines of a whole row stay in the cache.
    if shape[row_dim] * cache_bytes_each <= _LINES_PER_SET * _SET_PERIOD_BYTES:
        return None
    elements_per_block = element_count // shape[row_dim] * _BLOCK_ROW_ELEMENTS
    is_worth_it = (
        shape[column_dim] >= _BLOCK_ROW_ELEMENTS
        and elements_per_block >= _LEAST_BLOCK_ELEMENTS
    )
    if is_worth_it:
        return row_dim
    return None


def _contiguous_dim(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """The dimension with the smallest positive stride, of those with more than one
    element; `None` if there is none.
    """
    dims = [dim for dim, size in enumerate(shape) if size > 1 and strides[dim] > 0]
    return min(dims, key=lambda dim: strides[dim], default=None)


_ALIGNMENT = 64


def of_numpy(nbytes: int) -> np.ndarray:
    """Uninitialised memory of `nbytes` bytes, as an array."""
    return np.empty(nbytes, np.uint8)


def as_bytes(array: np.ndarray) -> np.ndarray:
    """A view of an array as bytes, from which views of other shapes and dtypes can be
    made.
    """
    flat = array.reshape(-1)
    return flat.view(np.uint8) if flat.size else of_numpy(0)


def aligned(nbytes: int) -> int:
    """`nbytes`, rounded up to where the next array in the same memory may start."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def buffers(
    pairs: Sequence[tuple[tuple[int, ...], Any]],
    allocate: Callable[[int], np.ndarray] = of_numpy,
) -> list[np.ndarray]:
    """An uninitialised NumPy array for each pair of a shape and a dtype, all in one
    allocation.

    `allocate` takes a number of bytes and returns an array of that many bytes, which
    need not be aligned.
    """
    sizes = [aligned(math.prod(shape) * dtype.itemsize) for shape, dtype in pairs]
    memory = allocate(sum(sizes) + _ALIGNMENT)
    # The start of each array, and the end of the last one.
    starts = it.accumulate(
        sizes, initial=-memory.__array_interface__["data"][0] % _ALIGNMENT
    )
    return [
        np.ndarray(shape, dtype, memory, start)
        for (shape, dtype), start in zip(pairs, starts, strict=False)
    ]
