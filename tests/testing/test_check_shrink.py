"""`check_step(..., shrink=True)`: the sizes that it gives to the arguments of a step."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

from shardfx import MeshSpec
from shardfx.testing import check_step


def test_unequal_sizes_do_not_shrink_to_equal_ones():
    mesh = MeshSpec({"d": 2}).abstract()
    seen = []
    x = jax.ShapeDtypeStruct((64, 4), jnp.float32, sharding=NamedSharding(mesh, P("d")))

    def step(x):
        seen.append(x.shape)
        # The size 4 cannot shrink.
        return jnp.sum(x.reshape(x.shape[0], 2, 2), axis=1)

    assert check_step(step, x, shrink=True)
    assert seen[-1] == (8, 4)
