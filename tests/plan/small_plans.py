"""A small tree, its mesh and its rules, that tests of mistakes share."""

from typing import Any

import jax
import jax.numpy as jnp

from shardfx import AxisRules, MeshSpec, PathRules, plan


MESH = MeshSpec({"data": 2, "tensor": 4})
AXES = AxisRules(
    [("batch", "data"), ("mlp", "tensor"), ("embed", None), ("layers", None)]
)
W = jnp.ones((8, 16))
TREE = {"w": W}
NAMES = {"w": ("mlp", None)}
MADE, STRICT = (
    plan(TREE, MESH, names=NAMES, axes=AXES, strict=strict) for strict in (False, True)
)
ON = MADE.on(MESH.build(jax.devices()))
KV = AxisRules([("heads", "tensor"), ("kv", "tensor")], units={"heads": 16, "kv": 16})


def ruled(target, tree=TREE, mesh: Any = MESH, **keywords):
    rules = PathRules([("", target)])
    return plan(tree, mesh, paths=rules, **keywords)
