"""Trees that are moved through a map, by copies and by programs."""

import jax
import numpy as np
from jax.sharding import Mesh
from maps import same


def mesh(start, stop, *sizes):
    devices = np.asarray(jax.devices()[start:stop]).reshape(sizes)
    return Mesh(devices, ("a", "b")[: len(sizes)])


MESHES = {
    "all": (0, 8, 2, 4),
    "first": (0, 4, 2, 2),
    "last": (4, 8, 2, 2),
    "six": (2, 8, 2, 3),
}


def placed(array, sharding):
    return jax.make_array_from_callback(
        array.shape, sharding, lambda index: array[index]
    )


def equal(tree, whole, target):
    assert tree.keys() == whole.keys()
    for path, array in whole.items():
        same(tree[path], array)
        assert tree[path].sharding == target[path].sharding
        assert tree[path].committed
