"""Memory for arrays, at addresses that XLA takes over on a CPU without a copy."""

import itertools as it
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


_ALIGNMENT = 64


def of_numpy(nbytes: int) -> np.ndarray:
    return np.empty(nbytes, np.uint8)


def buffers(
    wanted: Sequence[tuple[tuple[int, ...], Any]], allocate: Callable[[int], np.ndarray] = of_numpy
) -> list[np.ndarray]:
    """Uninitialised arrays of these shapes and dtypes, side by side in one piece of memory that lives while one does.

    `allocate` returns an array of that many bytes, at any address.
    """
    sizes = [-(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for shape, dtype in wanted]
    memory = allocate(sum(sizes) + _ALIGNMENT)
    starts = it.accumulate(sizes, initial=-memory.__array_interface__["data"][0] % _ALIGNMENT)
    return [np.ndarray(shape, dtype, memory, start) for (shape, dtype), start in zip(wanted, starts, strict=False)]
