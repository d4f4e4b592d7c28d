"""What tests of plans without rules share."""

from typing import Any

import jax

import shardfx as sfx


def struct(*shape: int, dtype: Any = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def by_code(auto_plan: sfx.auto.AutoPlan, tree: Any) -> sfx.ShardPlan:
    module: dict[str, Any] = {}
    exec(auto_plan.code(), module)
    return module["plan_of"](tree)


def state_per_device(sharding_plan: sfx.ShardPlan) -> int:
    """Parameters, gradients and two moments, written down without the planner."""
    return sum(4 * leaf.bytes_per_device for leaf in sharding_plan.leaves)


def tokens(rows: int, length: int) -> jax.ShapeDtypeStruct:
    return struct(rows, length, dtype="int32")
