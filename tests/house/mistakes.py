# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
"""What the hundred mistakes of users share, and the list of them."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

import shardfx as sfx
from shardfx import (
    AxisRules,
    MeshSpec,
    PathRules,
    checkpoint,
)


SPEC = MeshSpec({"data": 2, "tensor": 4})
MESH = SPEC.build(jax.devices())
OTHER_MESH = MeshSpec({"x": 8}).build(jax.devices())
MODEL = {"w": jnp.ones((8, 8)), "b": jnp.ones((8,))}
RULES = PathRules([("w", P("data")), ("b", P())])
ALL = PathRules([(".*", P())])
PLAN = sfx.plan(MODEL, MESH, paths=RULES)
OFF = sfx.plan(MODEL, SPEC, paths=RULES)
AXES = AxisRules([("embed", "data"), ("mlp", "tensor")])
ADAM = optax.adam(1e-3)
X = jnp.ones((8, 8))


def step(model, x):
    return (x @ model["w"]).sum()


def planned(*rules, **others):
    return sfx.plan(MODEL, MESH, paths=PathRules([*rules, ("b", P())]), **others)


def loaded(tree, **others):
    checkpoint.save("c", MODEL, PLAN)
    plan = sfx.plan(tree, MESH, paths=ALL, unused="allow")
    return checkpoint.load("c", plan, **others)


class Mistake(NamedTuple):
    """What a user calls, and the part of the error that mends it."""

    make: Callable[[], object]
    fix: str


def listing(mistakes: dict[str, Mistake]):
    """The decorator that adds a function to `mistakes`, under its own name or another."""

    def mended_by(fix: str, name: str | None = None):
        def listed(make: Callable[[], object]):
            label = name or make.__name__.replace("_", " ")
            mistakes[label] = Mistake(make, fix)
            return make

        return listed

    return mended_by
