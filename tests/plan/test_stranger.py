"""What a stranger's first afternoon still found in silence."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import shardfx as sfx
from shardfx import AxisRules, MeshSpec, PathRules
from shardfx.errors import SpecError, UnmatchedError


MIXED = {"x": AxisType.Auto, "y": AxisType.Explicit}


@pytest.fixture
def mixed():
    return MeshSpec({"x": 4, "y": 2}, axis_types=MIXED).build(jax.devices())


@pytest.mark.parametrize("spec", [P(), P("y"), P(None, "y")])
def test_a_move_on_a_mixed_mesh_leaves_no_auto_axis_behind(mixed, spec):
    x = jax.device_put(np.arange(64.0).reshape(8, 8), NamedSharding(mixed, P("x")))
    target = NamedSharding(mixed, spec)
    moved = jax.jit(lambda x: sfx.reshard(x, target))(x)
    assert moved.sharding.is_equivalent_to(target, 2) and np.array_equal(moved, x)


def test_an_order_that_jax_would_turn_around_is_an_error(mixed):
    x = jax.device_put(np.arange(64.0).reshape(8, 8), NamedSharding(mixed, P("x")))
    made = sfx.plan({"w": x}, mixed, paths=PathRules([("w", P(("x", "y")))]))
    strict = sfx.plan({"w": x}, mixed, paths=PathRules([("w", P(("x", "y")))]), strict=True)
    for function in (lambda x: sfx.shard({"w": x}, made), lambda x: sfx.constrain(x, P(("x", "y")), strict)):
        with pytest.raises(SpecError, match=r"puts Explicit axes first inside `jit`; write \('y', 'x'\)"):
            jax.jit(function)(x)
    decisions = []

    def asked(x):
        x, decision = sfx.constrain(x, P(("x", "y")), made, explain=True)
        decisions.append(decision.spec)
        return x

    jax.jit(asked)(x)
    assert decisions == [P(("y", "x"))]
    turned = jax.jit(lambda x: sfx.constrain(x, P(("y", "x")), made))(x)
    assert turned.sharding.is_equivalent_to(NamedSharding(mixed, P(("y", "x"))), 2)


def test_a_spec_longer_than_the_rank_of_an_activation():
    made = sfx.plan(
        {"w": jnp.ones((8, 8))}, MeshSpec({"data": 8}).build(jax.devices()), paths=PathRules.parse("w->data")
    )
    with pytest.raises(SpecError, match="has 3 entries, but shape .* has 2 dimensions.*spmd_axis_name"):
        jax.jit(jax.vmap(lambda x: sfx.constrain(x, P("data", None, None), made)))(jnp.ones((8, 16, 64)))


def test_units_of_a_name_without_a_rule():
    rules = AxisRules([("kv_heads", "tensor")], units={"kv_head": 16})
    with pytest.raises(UnmatchedError, match=r"`units` has 'kv_head' \(did you mean 'kv_heads'\?\)"):
        sfx.plan({"k": jnp.ones((32, 64))}, MeshSpec({"tensor": 8}), names={"k": ("kv_heads", None)}, axes=rules)


def test_a_mesh_axis_in_the_place_of_a_name():
    mesh, rules = MeshSpec({"tensor": 8}).build(jax.devices()), AxisRules([("mlp", "tensor")])
    made = sfx.plan({"w": jnp.ones(8)}, mesh, names={"w": ("mlp",)}, axes=rules)
    with pytest.raises(UnmatchedError, match="is a mesh axis, and no logical name; for mesh axes write"):
        sfx.constrain(jnp.ones((8, 8)), ("tensor", None), made)


@pytest.mark.parametrize("given", [{"names": "mlp"}, {"stacked": "layers"}])
def test_a_string_in_the_place_of_names(given):
    with pytest.raises(SpecError, match="a string is one name"):
        inspect.unwrap(sfx.field)(**given)


def test_a_replaced_spec_cuts_no_unit():
    rules = AxisRules([("kv", "tensor")], units={"kv": 16})
    mesh = MeshSpec({"data": 4, "tensor": 2})
    made = sfx.plan({"k": jnp.ones((32, 7))}, mesh, names={"k": ("kv", None)}, axes=rules)
    assert made["k"].spec == P("tensor")
    replaced = made.replace("k", P("data"))["k"]
    assert replaced.spec == P() and replaced.reasons


def test_meshes_that_differ_in_the_order_of_axes_are_other_meshes():
    explicit = AxisType.Explicit
    turned = MeshSpec({"tensor": 2, "data": 2}, axis_types=explicit).build(jax.devices()[:4])
    mesh = MeshSpec({"data": 2, "tensor": 2}, axis_types=explicit).build(jax.devices()[:4])
    made = sfx.plan({"w": jnp.ones((8, 8))}, mesh, paths=PathRules.parse("w->data"))
    x = jax.device_put(np.ones((8, 8), np.float32), NamedSharding(turned, P("data")))
    with pytest.raises(sfx.errors.PlanMismatchError, match="lies on a mesh"):
        jax.jit(lambda x: sfx.constrain(x, P("data"), made))(x)
