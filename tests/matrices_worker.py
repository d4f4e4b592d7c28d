"""What the processes of a job do to test functions of whole matrices; see `reshard/test_matrices.py`."""

import sys

import jax
import jax.numpy as jnp
import multiprocess_worker
import numpy as np

from shardfx import MeshSpec, PathRules, fsdp, map_matrices, plan, shard


def unit():
    tree = {f"w{at}": np.arange(at, at + 8 * 16, dtype=np.float32).reshape(8, 16) for at in range(5)}
    made = plan(tree, MeshSpec({"fsdp": 8}).build(jax.devices()), paths=PathRules([(".*", fsdp("fsdp"))]))
    mapped = map_matrices(lambda one: one / jnp.linalg.norm(one), made)
    result = jax.jit(mapped, out_shardings=made.shardings)(shard(tree, made))
    for name, one in tree.items():
        for piece in result[name].addressable_shards:
            np.testing.assert_allclose(piece.data, (one / np.linalg.norm(one))[piece.index], rtol=1e-5)
    return "right"


multiprocess_worker.TASKS["unit"] = unit


if __name__ == "__main__":
    multiprocess_worker.main(*sys.argv[1:])
