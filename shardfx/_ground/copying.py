"""Copies between views of memory that store their elements in different orders."""

import itertools as it
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


# Elements of a block along the dimension that the target has in a row, at least; a cache line of smaller elements.
_BLOCK = 16
# A block of fewer elements costs more than it saves.
_LEAST_PER_BLOCK = 2048
# The second-level cache of a core has lines of 64 bytes. Lines whose addresses are equal modulo 64 KiB share one set,
# which has 8 to 16 places.
_LINE_BYTES, _SETS_BYTES, _PLACES = 64, 1 << 16, 8


def copy(target: np.ndarray, source: np.ndarray) -> None:
    """Copies `source` into `target`, in blocks if their memory orders differ and blocks are faster."""
    is_alike = target.ndim == source.ndim
    copy_along(target, source, blocked(target.shape, target.strides, source.strides) if is_alike else None)


def copy_along(target: np.ndarray, source: np.ndarray, dim: int | None) -> None:
    """Copies `source` into `target` in blocks along `dim`, as `blocked` chose it; at once if `dim` is `None`."""
    if dim is None:
        np.copyto(target, source, casting="unsafe")
        return
    before, step = (slice(None),) * dim, max(_BLOCK, _LINE_BYTES // target.itemsize)
    for start in range(0, target.shape[dim], step):
        block = (*before, slice(start, start + step))
        np.copyto(target[block], source[block], casting="unsafe")


def blocked(shape: Sequence[int], there: Sequence[int], here: Sequence[int]) -> int | None:
    """The dimension along which a copy is faster in blocks; `None` if blocks gain nothing.

    NumPy copies along a whole row of the target. If the source is transposed, each element of that row lies in another
    cache line. The next row needs the same lines again, and they have left the cache if the row needed more lines than
    it holds. Lines whose addresses differ by a multiple of a large power of two share a few places, so that rows of
    2048 bytes leave it early. A block is short enough that its lines stay: 5 times as fast for 16-bit numbers.

    **Arguments:**

    - `shape`: the shape of the target and of the source.
    - `there`, `here`: the strides of the target and of the source, in bytes.
    """
    count = math.prod(shape)
    if len(shape) < 2 or count < 8 * _LEAST_PER_BLOCK:
        return None
    row, column = _row(shape, there), _row(shape, here)
    if row is None or column is None or row == column or shape[row] < 2 * _BLOCK:
        return None
    apart = max(_LINE_BYTES, math.gcd(here[row], _SETS_BYTES))
    if shape[row] * apart <= _PLACES * _SETS_BYTES:
        return None
    is_worth_it = shape[column] >= _BLOCK and count // shape[row] * _BLOCK >= _LEAST_PER_BLOCK
    return row if is_worth_it else None


def _row(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """The dimension with the smallest stride; `None` if there is none. Sizes of 1 and strides of 0 do not count."""
    long = [dim for dim, size in enumerate(shape) if size > 1 and strides[dim] > 0]
    return min(long, key=lambda dim: strides[dim], default=None)


_ALIGNMENT = 64


def of_numpy(nbytes: int) -> np.ndarray:
    return np.empty(nbytes, np.uint8)


def buffers(
    wanted: Sequence[tuple[tuple[int, ...], Any]], allocate: Callable[[int], np.ndarray] = of_numpy
) -> list[np.ndarray]:
    """Uninitialised arrays of these shapes and dtypes, in one allocation that is freed when no array uses it.

    `allocate` returns an array of that many bytes, at any address.
    """
    sizes = [-(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for shape, dtype in wanted]
    memory = allocate(sum(sizes) + _ALIGNMENT)
    starts = it.accumulate(sizes, initial=-memory.__array_interface__["data"][0] % _ALIGNMENT)
    return [np.ndarray(shape, dtype, memory, start) for (shape, dtype), start in zip(wanted, starts, strict=False)]
