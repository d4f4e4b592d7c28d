"""The mesh on which rule sets of other libraries are planned."""

import jax
import jax.numpy as jnp

from shardfx import (
    MeshSpec,
    plan,
)


MESH = MeshSpec({"expert": 2, "tensor": 4})


def struct(shape):
    return jax.ShapeDtypeStruct(tuple(shape), jnp.float32)


def specs_of(tree, rules, mesh=MESH):
    leaves = plan(tree, mesh, paths=rules).leaves
    return {leaf.path: leaf.spec for leaf in leaves}
