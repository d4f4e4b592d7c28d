"""Meshes, shardings and states that the tests of moves share."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P


def mesh(sizes, names="ab", order=None, **types):
    devices = np.asarray(jax.devices())[
        np.arange(np.prod(sizes)) if order is None else list(order)
    ]
    return Mesh(devices.reshape(sizes), tuple(names[: len(sizes)]), **types)


def sharding(sizes, *entries, order=None, kind=None):
    return NamedSharding(mesh(sizes, order=order), P(*entries), memory_kind=kind)


def host(shape, start=0, dtype=np.float32):
    return (start + np.arange(np.prod(shape))).reshape(shape).astype(dtype)


def state(layers=3):
    return {
        "layers": [
            {"w": host((24, 16), i), "b": host((24,), i)} for i in range(layers)
        ],
        "step": host(()),
        "name": "model",
    }


def put(tree, target):
    return jax.tree.map(
        lambda x: (
            jax.device_put(x, target) if isinstance(x, np.ndarray) and x.ndim else x
        ),
        tree,
    )


def assert_equal(tree, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a), b), tree, expected
    )


def targets(tree, matrix, vector):
    def target(x):
        if isinstance(x, str) or not x.ndim:
            return None
        if x.ndim == 2:
            return matrix
        return vector

    return jax.tree.map(target, tree)


# plan_reshard


def struct(shape, target, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=target)
