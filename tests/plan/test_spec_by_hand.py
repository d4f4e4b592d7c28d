from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import shardfx as sfx
from shardfx import AxisRules, Code, MeshSpec, PathRules, ShardPlan, plan
from shardfx.errors import (
    PlanFormatError,
    PlanMismatchError,
    SpecError,
)
from tests.plan.small_plans import AXES, KV, MADE, MESH, ON, TREE, W


# --- one call for a batch, and a spec by hand


@pytest.mark.parametrize("shape", [(8, 16), (6, 4), (7, 3)], ids=str)
@pytest.mark.parametrize(
    "asked", [("batch", "mlp"), (..., "batch"), (), P("data", "tensor")], ids=str
)
def test_sharding_is_what_constrain_gives(asked, shape):
    sharding = ON.sharding(asked, shape)
    x = sfx.constrain(jnp.ones(shape), asked, ON)
    assert sharding.is_equivalent_to(x.sharding, 2)
    assert sharding.mesh is ON.jax_mesh
    jax.device_put(jnp.ones(shape), sharding)


def test_a_sharding_needs_no_shape_where_it_cuts_no_unit():
    spec = MADE.sharding(("batch",)).spec
    expected = MADE.sharding(("batch", ...)).spec
    assert spec == expected == P("data")
    assert MADE.sharding(("batch",)).mesh == MESH.abstract()
    tree = {"q": jnp.ones((8, 128)), "k": jnp.ones((8, 32))}
    names = {"q": (None, "heads"), "k": (None, "kv")}
    sharding_plan = plan(tree, MESH, names=names, axes=KV)
    spec = sharding_plan.sharding((None, "heads")).spec
    assert spec == P(None, "tensor")
    target_sharding = sharding_plan.sharding((None, "kv"), (8, 32))
    spec = target_sharding.spec
    assert spec == P()
    specs = [
        plan({}, MESH, axes=KV).sharding(("kv",), (size,)).spec for size in (64, 32)
    ]
    assert specs == [P("tensor"), P()]
    with pytest.raises(
        SpecError,
        match=(
            r"'kv' is made of units of 16, and `tensor` \(4\) may cut .* arrays"
            r" have 2\."
        ),
    ):
        sharding_plan.sharding((None, "kv"))
    mesh = MeshSpec({"data": 8, "tensor": 1})
    target_sharding = plan({}, mesh, axes=KV).sharding(("kv",))
    spec = target_sharding.spec
    assert spec == P("tensor")


def test_a_sharding_says_what_it_dropped():
    rules = [("batch", ("data", "tensor")), ("embed", "tensor")]
    axes = AxisRules(rules)
    mesh = MeshSpec({"data": 2, "tensor": 4})
    sharding_plan = plan({}, mesh, axes=axes)
    sharding, decision = sharding_plan.sharding(("batch", "embed"), explain=True)
    assert sharding == sharding_plan.sharding(("batch", "embed"))
    assert sharding.spec == P(("data", "tensor"))
    actual = [(why.dim, why.code) for why in decision.reasons]
    assert actual == [(1, Code.blocked)]
    _, decision = sharding_plan.sharding(("batch", None), (6, 3), explain=True)
    actual = [(why.dim, why.code) for why in decision.reasons]
    assert actual == [(0, Code.indivisible)]


@pytest.mark.parametrize(
    "asked", [P(P.UNCONSTRAINED, "tensor"), ("any", "batch")], ids=str
)
def test_a_sharding_leaves_nothing_to_the_compiler(asked):
    rules = [("batch", "data"), ("any", P.UNCONSTRAINED)]
    free = AxisRules(rules)
    names = {"w": ("batch", None)}
    sharding_plan = plan(TREE, MESH.build(jax.devices()), names=names, axes=free)
    for shape in (None, (8, 16)):
        with pytest.raises(
            SpecError, match="leaves dim 0 to the compiler .* write `None` there"
        ):
            sharding_plan.sharding(asked, shape)
    constrained = sfx.constrain(jnp.ones((8, 16)), asked, sharding_plan)
    actual = constrained.shape
    assert actual == (8, 16)


BOTH = ("data", "tensor")


@pytest.mark.parametrize(
    "where, target, path, spec",
    [
        ("a/w", P(None, "tensor"), "a/w", P(None, "tensor")),
        ("w", ("mlp", ...), "a/w2", P("tensor")),
        ("w2", sfx.fsdp(BOTH), "a/w2", P(None, BOTH)),
        ("w2", lambda path, leaf: P(None, "data"), "a/w2", P(None, "data")),
        ("s", P(), "s", P()),
        ("a/w", sfx.atomic(("mlp", None), (8, 1)), "a/w", P()),
        ("a/w", P(None, "data") | sfx.fsdp(BOTH), "a/w", P("tensor", "data")),
    ],
)
def test_replace_by_path_or_regex(where, target, path, spec):
    tree = {
        "a": {"w": jnp.ones((8, 16)), "w2": jnp.ones((8, 16))},
        "s": jnp.ones(()),
        "f": jnp.tanh,
    }
    rules = PathRules([("a", P("data"))])
    sharding_plan = plan(tree, MESH.build(jax.devices()), paths=rules, axes=AXES)
    replaced = sharding_plan.replace(where, target)
    assert replaced[path].spec == spec
    assert replaced[path].rule == "replaced by hand"
    for other in sharding_plan:
        if where not in other:
            assert replaced[other] == sharding_plan[other]
    assert replaced.jax_mesh is sharding_plan.jax_mesh
    assert replaced.specs["f"] is None
    restored = ShardPlan.from_json(replaced.to_json(), like=tree)
    actual = restored.on(MESH.build(jax.devices()))
    assert actual == replaced
    mesh = MeshSpec({"data": 1, "tensor": 4})
    rule = replaced.replan(mesh)[path].rule
    assert rule == "replaced by hand"


def test_a_replaced_spec_cuts_no_unit():
    mesh = MeshSpec({"data": 4, "tensor": 2})
    names = {"k": ("kv", None)}
    sharding_plan = plan({"k": jnp.ones((32, 7))}, mesh, names=names, axes=KV)
    assert sharding_plan["k"].spec == P("tensor")
    replaced = sharding_plan.replace("k", P("data"))["k"]
    assert replaced.spec == P()
    assert replaced.reasons


class Stack(eqx.Module):
    """Eight layers, stacked, as `jax.vmap` makes them."""

    w: Any = sfx.field(stacked=("layers",))


# Targets after which an array has no strategy that would skip the stacked dimension.
WITHOUT_STRATEGY = {
    "a spec": P(None, "tensor"),
    "replicate": sfx.replicate,
    "names": ("layers", "mlp", None),
}


@pytest.mark.parametrize("target", WITHOUT_STRATEGY.values(), ids=WITHOUT_STRATEGY)
def test_a_strategy_by_hand_shards_no_stacked_layers(target):
    tree = Stack(jax.ShapeDtypeStruct((8, 4, 3), "float32"))
    axes = AxisRules([("layers", None), ("mlp", "tensor")])
    stacked_plan = plan(tree, MESH, paths=PathRules([("w", target)]), axes=axes)
    planned = ShardPlan.from_json(stacked_plan.to_json()).replan(MESH)
    by_hand = planned.replace("w", sfx.fsdp("data"))["w"]
    assert by_hand.stacked == 1
    assert by_hand.spec == P(None, "data")
    again = planned.replace("w", P()).replace("w", sfx.fsdp("data"))
    assert again["w"].spec == P(None, "data")


def test_names_in_a_module_keep_the_stacked_layers_whole():
    class Named(eqx.Module):
        layers: Any = sfx.field(names=("mlp", None), stacked=("layers",))

    tree = Named(jax.ShapeDtypeStruct((8, 4, 3), "float32"))
    axes = AxisRules([("layers", None), ("mlp", "tensor")])
    by_hand = plan(tree, MESH, axes=axes).replace("layers", sfx.fsdp("data"))
    assert by_hand["layers"].spec == P(None, "data")


def test_a_followed_array_keeps_its_stacked_layers_whole():
    tree = Stack(jax.ShapeDtypeStruct((8, 4, 3), "float32"))
    stacked_plan = plan(tree, MESH, paths=PathRules([("w", P())]))
    followed = sfx.follow(lambda tree: {"mu": tree}, stacked_plan)
    by_hand = followed.replace("mu/w", sfx.fsdp("data"))
    assert by_hand["mu/w"].spec == P(None, "data")
    rules = PathRules([("w", sfx.fsdp("data"))])
    others = Stack(jnp.ones((8, 4, 5)))
    by_rule = sfx.follow(lambda tree: {"cache": others}, stacked_plan, paths=rules)
    assert by_rule["cache/w"].spec == P(None, "data")


def test_a_number_of_stacked_dimensions_in_json_is_checked():
    tree = Stack(jax.ShapeDtypeStruct((8, 4, 3), "float32"))
    text = plan(tree, MESH, paths=PathRules([("w", P())])).to_json()
    assert '"stacked":1' in text
    for number in ("4", "-1", "true", '"1"'):
        damaged = text.replace('"stacked":1', f'"stacked":{number}')
        with pytest.raises(PlanFormatError, match="stacked"):
            ShardPlan.from_json(damaged)


# --- meshes that mix Auto and Explicit axes, or turn them around


MIXED = MeshSpec({"x": 4, "y": 2}, axis_types={"y": AxisType.Explicit}).build(
    jax.devices()
)


def test_a_move_on_a_mixed_mesh_leaves_no_auto_axis_behind():
    values = np.arange(64.0).reshape(8, 8)
    x = jax.device_put(values, NamedSharding(MIXED, P("x")))
    target = NamedSharding(MIXED, P(None, "y"))
    moved = jax.jit(lambda x: sfx.reshard(x, target))(x)
    assert moved.sharding.is_equivalent_to(target, 2)
    assert np.array_equal(moved, x)


def test_an_order_that_jax_would_turn_around_is_an_error():
    values = np.arange(64.0).reshape(8, 8)
    x = jax.device_put(values, NamedSharding(MIXED, P("x")))
    rules = PathRules([("w", P(("x", "y")))])
    sharding_plan, strict = (
        plan({"w": x}, MIXED, paths=rules, strict=strict) for strict in (False, True)
    )
    for function in (
        lambda x: sfx.shard({"w": x}, sharding_plan),
        lambda x: sfx.constrain(x, P(("x", "y")), strict),
    ):
        with pytest.raises(
            SpecError,
            match=r"puts Explicit axes first inside `jit`; write \('y', 'x'\)",
        ):
            jax.jit(function)(x)
    decisions = []
    jax.jit(
        lambda x: decisions.append(
            sfx.constrain(x, P(("x", "y")), sharding_plan, explain=True)[1].spec
        )
    )(x)
    assert decisions == [P(("y", "x"))]


def test_the_order_of_axes_distinguishes_meshes():
    mesh = MeshSpec({"tensor": 4, "data": 2})
    turned = mesh.build(jax.devices())
    x = jax.device_put(W, NamedSharding(turned, P("data")))
    with pytest.raises(
        PlanMismatchError,
        match="lies on a mesh tensor=4,data=2, but the plan is for data=2,tensor=4",
    ):
        jax.jit(lambda x: sfx.constrain(x, P("data"), ON))(x)
