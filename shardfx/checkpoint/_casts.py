"""Casting what was read to the dtype that was asked for: as JAX does, but no integer changes its value."""

import functools as ft
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._ground.copying import copy
from .._ground.errors import CheckpointError
from .._ground.text import quoted


@ft.lru_cache(maxsize=256)
def may_overflow(stored: Any, to: Any) -> bool:
    """Whether a number of the dtype `stored` can be one that the integers of the dtype `to` lack."""
    if not jnp.issubdtype(to, jnp.integer):
        return False
    if jnp.issubdtype(stored, jnp.integer):
        return not jnp.iinfo(to).min <= jnp.iinfo(stored).min <= jnp.iinfo(stored).max <= jnp.iinfo(to).max
    return bool(jnp.issubdtype(stored, jnp.floating))


def fill(view: np.ndarray, values: np.ndarray, name: str) -> None:
    """Writes `values`, of the array `name`, into `view`, cast to its dtype."""
    if may_overflow(values.dtype, view.dtype) and values.size:
        number = int if jnp.issubdtype(values.dtype, jnp.integer) else float
        low, high = number(values.min()), number(values.max())
        least, most = int(jnp.iinfo(view.dtype).min), int(jnp.iinfo(view.dtype).max)
        # Written so that NaN, which compares with nothing, is out of range.
        if not (least <= low and high <= most):
            raise CheckpointError(
                f"array {quoted(name)} holds {high if least <= low else low}, and {view.dtype} goes from {least} to "
                f"{most}; plan a wider dtype for it. 64-bit ones need "
                '`jax.config.update("jax_enable_x64", True)`.'
            )
    # As in JAX, what is too large for a smaller floating-point dtype becomes infinite without a word.
    with np.errstate(over="ignore", invalid="ignore"):
        copy(view, values)
