"""Random arrays for steps, and their shards on a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P


def cut(x, *spec, mesh):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def some(*shape, dtype=jnp.float32):
    generator = np.random.default_rng(len(shape))
    return generator.standard_normal(shape, np.float32).astype(dtype)
