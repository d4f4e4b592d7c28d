"""The dtype in which a load reads a leaf, and the casts that the user allows."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._ground.errors import CheckpointError, LeafTypeError
from .._ground.spec import DType, dtype_named


# How other libraries shorten the names of dtypes.
_FULL_NAMES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
}
_FULL_NAMES |= {"fp32": "float32", "f32": "float32", "float": "float32"}


def loaded_dtype(planned: Any, stored: Any, asked: Any, what: str) -> DType:
    """The dtype in which a leaf is read, from its dtypes in the plan and in the
    checkpoint. `what` names it in errors.

    Raises `CheckpointError` for a cast that `asked`, the argument `dtype` of `load`,
    does not allow, for a 64-bit dtype that JAX does not hold, and for the loss of an
    imaginary part.
    """
    is_stored_float = jnp.issubdtype(stored, jnp.floating)
    are_floats = is_stored_float and jnp.issubdtype(planned, jnp.floating)
    is_asked_for = asked is not None and asked != "plan" and are_floats
    if asked != "plan" and not is_asked_for and stored != planned:
        raise CheckpointError(
            f'{what} is {stored}, but the plan has {planned}; pass `dtype="plan"` to'
            " cast to the plan's dtypes, or `dtype=...` for all floating-point"
            " arrays."
        )
    dtype = planned
    if is_asked_for:
        dtype = _asked_dtype(asked)
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise CheckpointError(
            f"{what} would be {dtype}, which JAX holds only under"
            ' `jax.config.update("jax_enable_x64", True)`; set it, or plan a 32-bit'
            ' dtype and pass `dtype="plan"`.'
        )
    is_complex = jnp.issubdtype(stored, jnp.complexfloating)
    if is_complex and not jnp.issubdtype(dtype, jnp.complexfloating):
        raise CheckpointError(
            f"{what} is complex and would be cast to {dtype}; its imaginary part would"
            " be lost."
        )
    return np.dtype(dtype)


def _asked_dtype(asked: Any) -> DType:
    """The dtype of the argument `dtype` of `load`. Raises `LeafTypeError` for a value
    that is no dtype.
    """
    fix = "bfloat16"
    if isinstance(asked, str):
        known = dtype_named(asked)
        fix = _FULL_NAMES.get(asked, fix)
    else:
        try:
            known = jnp.dtype(asked)
        except TypeError:
            known = None
    if known is None:
        raise LeafTypeError(
            f"`dtype={asked!r}` is no dtype of JAX; write `dtype={fix!r}`, or"
            ' `dtype="plan"` for the dtypes of the plan.'
        )
    return known
