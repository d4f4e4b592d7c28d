"""Casts with equal results in NumPy and in JAX."""

import functools as ft
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._ground.copying import castable


def cast_array(x: Any, to: Any) -> Any:
    """A NumPy or JAX array cast to another dtype.

    Floats become integers as in JAX: fractions are cut off, values out of range become
    the nearest integer of the dtype, and NaN becomes 0. For such values, the result of
    NumPy's own `astype` depends on the machine.
    """
    if not isinstance(x, np.ndarray | np.generic):
        return x.astype(to)
    if is_rounded(x.dtype, to):
        return _truncated(np.asarray(x), np.dtype(to))
    # As in JAX, a value too large for a smaller floating-point dtype becomes infinite
    # without a warning.
    with np.errstate(over="ignore", invalid="ignore"):
        return castable(x, np.dtype(to)).astype(to)


@ft.lru_cache(maxsize=256)
def is_rounded(stored: Any, to: Any) -> bool:
    """Whether a cast makes integers of floating-point numbers."""
    is_from_float = jnp.issubdtype(stored, jnp.floating)
    return bool(is_from_float and jnp.issubdtype(to, jnp.integer))


def _truncated(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The floating-point numbers of `array` as integers of `dtype`, without their
    fractions; for one out of range, the nearest integer of `dtype`, and 0 for NaN.
    """
    info = jnp.iinfo(dtype)
    least = int(info.min)
    most = int(info.max)
    floats = array.astype(np.float64)
    # Both ends are powers of two or 0, which float64 represents exactly.
    is_low = floats <= float(least)
    is_high = floats >= float(most + 1)
    is_inside = ~(is_low | is_high | np.isnan(floats))

    wide = np.int64
    if least == 0:
        wide = np.uint64
    bounded = np.where(is_inside, floats, 0)
    integers = bounded.astype(wide)
    integers[is_low] = least
    integers[is_high] = most
    return integers.astype(dtype)
