"""Arrays onto devices, on one process and on many."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding


def is_tracing() -> bool:
    """Whether JAX records what is computed, as inside `jax.jit`: nothing can be put on devices then."""
    return isinstance(jax.device_put(np.zeros((), bool)), Tracer)


def placed(leaves: list[Any], shardings: list[Any]) -> list[Any]:
    if all(sharding.is_fully_addressable for sharding in shardings):
        return jax.device_put(leaves, shardings)
    return [_placed_across(leaf, sharding) for leaf, sharding in zip(leaves, shardings, strict=True)]


def _placed_across(leaf: Any, sharding: NamedSharding) -> Any:
    """One array on a mesh of several processes, from one that is global already or whole on each process."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = _placed_across(jax.random.key_data(leaf), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    whole = np.asarray(leaf)
    # Without a dtype, a process that owns no device of the sharding could not tell.
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index], dtype=whole.dtype)
