"""Arrays that are not there, of few words, for tests that plan them."""

from typing import Any

import jax
import jax.numpy as jnp


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def leaf(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    """As weights are stored."""
    return jax.ShapeDtypeStruct(shape, dtype)
