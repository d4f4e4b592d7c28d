"""The mesh and the plan that states follow in tests."""

import jax.numpy as jnp

from shardfx import (
    AxisRules,
    MeshSpec,
    PathRules,
    plan,
)


SIZES = {"data": 2, "fsdp": 2, "tensor": 2}
MESH = MeshSpec(SIZES)


SMALL = {"a": {"w": jnp.ones((256, 128)), "b": jnp.ones(128)}}
SMALL_PLAN = plan(SMALL, MESH, paths=PathRules.parse("w->fsdp.tensor, b->tensor"))


HEADS = AxisRules([("heads", "tensor"), ("embed", "fsdp")], units={"heads": 4})
