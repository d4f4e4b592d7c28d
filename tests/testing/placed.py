"""Random arrays for steps, and their shards on a mesh."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P


def cut(x, *spec, mesh):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def some(*shape, dtype=jnp.float32):
    array = jax.random.normal(jax.random.key(len(shape)), shape)
    return array.astype(dtype)
