"""Casts with equal results in NumPy and in JAX."""

import functools as ft
from typing import Any

import jax.numpy as jnp
import numpy as np


def cast_array(x: Any, to: Any) -> Any:
    """A NumPy or JAX array cast to another dtype.

    Floats become integers as in JAX: fractions are cut off, values out of range become
    the nearest integer of the dtype, and NaN becomes 0. For such values, the result of
    NumPy's own `astype` depends on the machine.
    """
    if isinstance(x, np.ndarray | np.generic) and is_rounded(x.dtype, to):
        return _whole(np.asarray(x), np.dtype(to))
    return x.astype(to)


@ft.lru_cache(maxsize=256)
def is_rounded(stored: Any, to: Any) -> bool:
    return bool(
        jnp.issubdtype(stored, jnp.floating) and jnp.issubdtype(to, jnp.integer)
    )


def _whole(x: np.ndarray, to: np.dtype) -> np.ndarray:
    least = int(jnp.iinfo(to).min)
    most = int(jnp.iinfo(to).max)
    floats = x.astype(np.float64)
    # Both ends are powers of two or 0, which float64 represents exactly.
    low = floats <= float(least)
    high = floats >= float(most + 1)
    inside = ~(low | high | np.isnan(floats))
    integers = np.where(inside, floats, 0).astype(np.int64 if least else np.uint64)
    integers[low] = least
    integers[high] = most
    return integers.astype(to)
