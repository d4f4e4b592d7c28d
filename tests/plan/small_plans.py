"""A small tree, its mesh and its rules, that tests of mistakes share."""

from typing import Any

import jax
import jax.numpy as jnp

from shardfx import AxisRules, MeshSpec, PathRules, plan


MESH = MeshSpec({"data": 2, "tensor": 4})
AXES = AxisRules(
    [
        ("batch", "data"),
        ("mlp", "tensor"),
        ("embed", None),
        ("layers", None),
    ]
)
W = jnp.ones((8, 16))
TREE = {"w": W}
NAMES = {"w": ("mlp", None)}
MADE = plan(TREE, MESH, names=NAMES, axes=AXES)
STRICT = plan(TREE, MESH, names=NAMES, axes=AXES, strict=True)
DEVICE_MESH = MESH.build(jax.devices())
ON = MADE.on(DEVICE_MESH)
KV = AxisRules(
    [
        ("heads", "tensor"),
        ("kv", "tensor"),
    ],
    units={"heads": 16, "kv": 16},
)


def ruled(target, tree=TREE, mesh: Any = MESH, **keywords):
    rules = PathRules([("", target)])
    return plan(tree, mesh, paths=rules, **keywords)
