"""Meshes, shardings and states that the tests of moves share."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P


def mesh(sizes, names="ab", order=None, **types):
    if order is None:
        order = np.arange(np.prod(sizes))
    devices = np.asarray(jax.devices())[list(order)]
    axis_names = tuple(names[: len(sizes)])
    return Mesh(devices.reshape(sizes), axis_names, **types)


def sharding(sizes, *entries, order=None, kind=None):
    return NamedSharding(mesh(sizes, order=order), P(*entries), memory_kind=kind)


def host(shape, start=0, dtype=np.float32):
    numbers = start + np.arange(np.prod(shape))
    return numbers.reshape(shape).astype(dtype)


def state(layers=3):
    layer_trees = []
    for number in range(layers):
        w = host((24, 16), number)
        b = host((24,), number)
        layer_trees.append({"w": w, "b": b})
    return {"layers": layer_trees, "step": host(()), "name": "model"}


def put(tree, target):
    def placed(x):
        if isinstance(x, np.ndarray) and x.ndim:
            return jax.device_put(x, target)
        return x

    return jax.tree.map(placed, tree)


def assert_equal(tree, expected):
    def assert_equal_leaves(leaf, expected_leaf):
        np.testing.assert_array_equal(np.asarray(leaf), expected_leaf)

    jax.tree.map(assert_equal_leaves, tree, expected)


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
