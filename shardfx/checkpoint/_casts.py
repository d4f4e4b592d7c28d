"""Casting what was read to the dtype that was asked for: as JAX does, but integers stay what they are."""

import functools as ft
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._ground.copying import copy
from .._ground.errors import CheckpointError
from .._ground.text import quoted


@ft.lru_cache(maxsize=256)
def may_change(stored: Any, to: Any) -> bool:
    """Whether the dtype `to` lacks integers that `stored` has, or is one of integers and `stored` has fractions."""
    if jnp.issubdtype(stored, jnp.integer):
        least, most = int(jnp.iinfo(stored).min), int(jnp.iinfo(stored).max)
        if jnp.issubdtype(to, jnp.integer):
            return not jnp.iinfo(to).min <= least <= most <= jnp.iinfo(to).max
        return bool(jnp.issubdtype(to, jnp.floating)) and max(-least, most) > 2 ** (jnp.finfo(to).nmant + 1)
    return bool(jnp.issubdtype(stored, jnp.floating) and jnp.issubdtype(to, jnp.integer))


def fill(view: np.ndarray, values: np.ndarray, name: str) -> None:
    """Writes `values`, of the array `name`, into `view`, cast to its dtype."""
    is_checked = may_change(values.dtype, view.dtype) and values.size > 0
    if is_checked and jnp.issubdtype(view.dtype, jnp.integer):
        _require_range(view.dtype, values, name)
    # As in JAX, what is too large for a smaller floating-point dtype becomes infinite without a word.
    with np.errstate(over="ignore", invalid="ignore"):
        copy(view, values)
        changed = _changed(view, values) if is_checked else None
    if changed is not None and changed.any():
        raise CheckpointError(
            f"array {quoted(name)} holds {values[changed][0]}, which is no number of {view.dtype}; plan a dtype that "
            "has it. Nothing is rounded to an integer, and no integer is rounded."
        )


def _require_range(dtype: Any, values: np.ndarray, name: str) -> None:
    number = int if jnp.issubdtype(values.dtype, jnp.integer) else float
    low, high = number(values.min()), number(values.max())
    least, most = int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max)
    # Written so that NaN, which compares with nothing, is out of range.
    if not (least <= low and high <= most):
        raise CheckpointError(
            f"array {quoted(name)} holds {high if least <= low else low}, and {dtype} goes from {least} to "
            f"{most}; plan a wider dtype for it. 64-bit ones need "
            '`jax.config.update("jax_enable_x64", True)`.'
        )


def _changed(view: np.ndarray, values: np.ndarray) -> np.ndarray | None:
    """Where a number is not what it was; `None` between integers, which are in range by now."""
    if jnp.issubdtype(values.dtype, jnp.floating):
        return np.asarray(values.astype(np.float64) != view.astype(np.float64))
    if jnp.issubdtype(view.dtype, jnp.integer):
        return None
    # Back from a number that the integers lack, machines give what they like.
    floats = view.astype(np.float64)
    top = 2.0 ** int(jnp.iinfo(values.dtype).max).bit_length()
    return np.asarray(~((floats >= -top) & (floats < top)) | (floats.astype(values.dtype) != values))
