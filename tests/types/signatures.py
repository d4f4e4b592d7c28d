"""What type checkers see of functions that give back what they get. Nothing runs:
`tests/types/check.py` reads it.
"""

from typing import Any, assert_type

import equinox as eqx
import jax
import numpy as np

import shardfx as sfx


class Model(eqx.Module):
    weight: jax.Array

    @sfx.filter_jit
    def scaled(self, by: float) -> jax.Array:
        return self.weight * by

    @sfx.filter_jit(donate="none")
    def shifted(self, by: float = 1.0) -> jax.Array:
        return self.weight + by


@sfx.filter_jit(donate="all")
def doubled(x: jax.Array) -> jax.Array:
    return 2 * x


def step(
    model: Model, batch: dict[str, jax.Array], *, rate: float = 0.1
) -> tuple[Model, jax.Array]:
    return model, batch["x"] * rate


def functions(model: Model, batch: dict[str, jax.Array], plan: sfx.ShardPlan) -> None:
    jitted = sfx.filter_jit(step, in_shardings=(plan,), donate=(0,))
    assert_type(jitted(model, batch, rate=0.2), tuple[Model, jax.Array])
    decorated = sfx.filter_jit(out_shardings=plan)(step)
    assert_type(decorated(model, batch), tuple[Model, jax.Array])
    compiled = jitted.lower(model, batch).compile()
    assert_type(compiled(model, batch), tuple[Model, jax.Array])
    traced = jitted.trace(model, batch).lower().compile()
    assert_type(traced(model, batch), tuple[Model, jax.Array])
    assert_type(doubled(batch["x"]), jax.Array)
    assert_type(model.scaled(2.0), jax.Array)
    assert_type(model.shifted(), jax.Array)


def trees(model: Model, batch: dict[str, jax.Array], plan: sfx.ShardPlan) -> None:
    assert_type(sfx.shard(model, plan), Model)
    assert_type(sfx.shard(batch, plan), dict[str, jax.Array])
    assert_type(sfx.reshard(model, plan), Model)
    moved = sfx.reshard((model, batch), plan, donate=True)
    assert_type(moved, tuple[Model, dict[str, jax.Array]])
    assert_type(sfx.gather(model), Model)
    assert_type(sfx.checkpoint.load("path", model), Model)
    assert_type(sfx.checkpoint.load("path", plan), Any)
    model_plan = sfx.plan(model, plan.mesh, paths=None)
    assert_type(model_plan, sfx.ShardPlan[Model])
    assert_type(model_plan.shardings, Model)
    assert_type(model_plan.structs, Model)
    assert_type(sfx.auto.plan(model, 8).shardings, Model)
    assert_type(sfx.checkpoint.load("path", model_plan), Model)


def arrays(
    array: jax.Array,
    host: np.ndarray,
    struct: jax.ShapeDtypeStruct,
    plan: sfx.ShardPlan,
) -> None:
    assert_type(sfx.shard(array, plan), jax.Array)
    assert_type(sfx.shard(host, plan), jax.Array)
    assert_type(sfx.reshard(host, plan), jax.Array)
    assert_type(sfx.constrain(array, ("batch",), plan), jax.Array)
    assert_type(sfx.constrain(host, None, plan), jax.Array)
    assert_type(sfx.checkpoint.load("path", struct), jax.Array)
    assert_type(sfx.checkpoint.load("path", {"w": struct}), dict[str, jax.Array])


class Dense(eqx.Module):
    weight: jax.Array = sfx.field(names=("mlp", "embed"))
    scale: float
    bias: jax.Array | None = sfx.field(names=("mlp",), default=None)


def fields(array: jax.Array) -> None:
    # A field with names and without a default is required, and fields without a default
    # may follow it.
    assert_type(Dense(array, 1.0), Dense)
    assert_type(Dense(array, 1.0, array).bias, jax.Array | None)
    assert_type(Dense(weight=array, scale=1.0).weight, jax.Array)
