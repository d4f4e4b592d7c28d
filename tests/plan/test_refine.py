"""plan(refine=True): axes split by what dimensions can take, and nothing else changed."""

import math

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from shardfx import (
    AxisRules,
    Code,
    MeshSpec,
    PathRules,
    ShardPlan,
    constrain,
    follow,
    fsdp,
    plan,
    report,
    shard,
)
from shardfx.errors import SpecError


AXES = AxisRules(
    [("heads", "tensor"), ("kv_heads", "tensor"), ("mlp", "tensor"), ("embed", "fsdp")],
    units={"heads": 128, "kv_heads": 128},
    modes={"decode": [("mlp", ("fsdp", "tensor"))]},
)
NAMES = {"q": ("embed", "heads"), "kv": ("embed", "kv_heads"), "mlp": ("embed", "mlp")}
TREE = {
    "q": jax.ShapeDtypeStruct((512, 32 * 128), jnp.float32),
    "kv": jax.ShapeDtypeStruct((512, 8 * 128), jnp.float32),
    "mlp": jax.ShapeDtypeStruct((512, 2048), jnp.float32),
}


def test_eight_kv_heads_on_sixteen_devices():
    mesh = MeshSpec({"fsdp": 4, "tensor": 16})
    before = plan(TREE, mesh, names=NAMES, axes=AXES)
    after = plan(TREE, mesh, names=NAMES, axes=AXES, refine=True)
    assert before["kv"].spec == P("fsdp")
    assert after.mesh == mesh.split("tensor", {"tensor_0": 8, "tensor_1": 2})
    assert after["kv"].spec == P("fsdp", "tensor_0")
    assert after["q"].spec == after["mlp"].spec == P("fsdp", ("tensor_0", "tensor_1"))
    assert after["kv"].bytes_per_device == before["kv"].bytes_per_device // 8
    assert after.axes is not None and dict(after.axes.rules)["mlp"] == ("tensor_0", "tensor_1")
    assert dict(after.axes.modes)["decode"] == (("mlp", ("fsdp", "tensor_0", "tensor_1")),)
    assert after.axes.units == AXES.units
    assert ShardPlan.from_json(after.to_json()) == after


def test_nothing_to_refine_gives_the_same_plan():
    mesh = MeshSpec({"fsdp": 4, "tensor": 8})
    assert plan(TREE, mesh, names=NAMES, axes=AXES, refine=True) == plan(TREE, mesh, names=NAMES, axes=AXES)


def test_small_arrays_do_not_split_axes():
    tree, rules = {"bias": jnp.ones(6)}, PathRules([("bias", P("tensor"))])
    mesh = MeshSpec({"tensor": 4})
    assert plan(tree, mesh, paths=rules, refine=True, min_bytes=100).mesh == mesh
    assert plan(tree, mesh, paths=rules, refine=True)["bias"].spec == P("tensor_0")


def test_names_of_parts_that_are_taken():
    tree, rules = {"w": jnp.ones(6)}, PathRules([("w", P("t"))])
    refined = plan(tree, MeshSpec({"t": 4, "t_1": 2}), paths=rules, refine=True)
    assert refined.mesh.axis_names == ("t__0", "t__1", "t_1")


def test_strategies_take_part_of_an_axis():
    tree, rules = {"w": jnp.ones((12, 5))}, PathRules([("w", fsdp("fsdp"))])
    refined = plan(tree, MeshSpec({"fsdp": 8}), paths=rules, refine=True)
    assert refined["w"].spec == P("fsdp_0") and refined.mesh.axis_sizes == (4, 2)
    assert refined["w"].strategies == (fsdp(("fsdp_0", "fsdp_1")),)


def test_one_axis_is_enough():
    rules = PathRules([("w", P(("a", "b")))])
    refined = plan({"w": jnp.ones(2)}, MeshSpec({"a": 4, "b": 4}), paths=rules, refine=True)
    assert refined.mesh.axis_names == ("a_0", "a_1", "b") and refined["w"].spec == P("a_0")


def test_an_array_that_asked_for_no_part_stays_although_another_layout_came_first():
    rules = PathRules([("w", P(("b", "a"))), ("u", P("a")), ("v", P("b"))])
    tree = {"u": jnp.ones(2), "v": jnp.ones(2), "w": jnp.ones(6)}
    refined = plan(tree, MeshSpec({"a": 6, "b": 4}), paths=rules, refine=True)
    assert refined.mesh.axis_sizes == (2, 3, 2, 2)
    assert refined["w"].spec == P(("a_0", "a_1"))  # not b_0 and a_1, which would do as well


def test_slices_stay_whole():
    rules = PathRules([("w", P("data"))])
    mesh = MeshSpec({"data": 24}, dcn={"data": 4})
    refined = plan({"w": jnp.ones(6)}, mesh, paths=rules, refine=True)
    # Six of 24 would cut through slices of six devices each: two of the four slices' halves is what fits.
    assert refined.mesh.axis_sizes == (2, 12) and refined.mesh.dcn_sizes == (2, 2)


def test_parts_of_which_neither_divides_the_other():
    tree = {"four": jnp.ones((4, 100)), "six": jnp.ones((6, 100))}
    refined = plan(tree, MeshSpec({"t": 12}), paths=PathRules([(".*", P("t"))]), refine=True)
    assert refined.mesh.axis_sizes == (2, 3, 2)
    assert refined["six"].spec == P(("t_0", "t_1")) and refined["four"].spec == P(("t_0", "t_2"))


def test_no_reason_advises_to_refine_once_that_was_done():
    single = {"q": TREE["q"], "kv": jax.ShapeDtypeStruct((512, 128), jnp.float32)}
    for tree, mesh in ((TREE, {"fsdp": 4, "tensor": 16}), (single, {"fsdp": 4, "tensor": 16})):
        names = {name: NAMES[name] for name in tree}
        plain, refined = (plan(tree, MeshSpec(mesh), names=names, axes=AXES, refine=refine) for refine in (False, True))
        assert "split the mesh axis (`refine=True`)" in report(plain)
        assert "refine" not in report(refined) and "would cut inside a unit; use axes whose product" in report(refined)
        assert [why.code for why in refined["kv"].reasons] == [Code.unit]
        assert ShardPlan.from_json(refined.to_json()) == refined


def test_an_array_that_stays_names_the_parts_in_all_it_asked_for():
    rules = PathRules([("w", P(("b", "a")) | fsdp("c")), ("u", P("a")), ("v", P("b")), ("x", P("c"))])
    tree = {"u": jnp.ones(2), "v": jnp.ones(2), "x": jnp.ones(2), "w": jnp.ones((6, 8))}
    refined = plan(tree, MeshSpec({"a": 6, "b": 4, "c": 4}), paths=rules, refine=True)
    assert refined["w"].spec == P(("a_0", "a_1"), ("c_0", "c_1"))
    assert refined["w"].requested == P(("b_0", "b_1", "a_0", "a_1"))
    assert refined["w"].strategies == (fsdp(("c_0", "c_1")),)


def test_strict_is_about_the_refined_plan():
    rules = PathRules([("w", P("t"))])
    with pytest.raises(SpecError, match=r"dim 0: size 6 is not divisible by `t_0` \(2\) x `t_1` \(2\)"):
        plan({"w": jnp.ones(6)}, MeshSpec({"t": 4}), paths=rules, refine=True, strict=True)


def test_strict_says_how_to_accept_what_refine_left_over():
    mesh = MeshSpec({"fsdp": 4, "tensor": 16})
    with pytest.raises(SpecError) as caught:
        plan(TREE, mesh, names=NAMES, axes=AXES, refine=True, strict=True)
    assert str(caught.value) == (
        "`strict=True`, and these leaves are not sharded as asked:\n"
        "  leaf `kv`, shape (512, 1024): dim 1: 1024 elements are 8 units of 128, and `tensor_0` (8) x `tensor_1` (2) "
        "would cut inside a unit; use axes whose product divides 8\n"
        "`refine=True` has split the mesh into fsdp=4,tensor_0=8,tensor_1=2. If they may be replicated over the "
        "rest, plan on that mesh, made with `MeshSpec.split`, by rules that name the parts; or leave `strict` out."
    )
    parts = ("tensor_0", "tensor_1")
    axes = AxisRules(
        [("heads", parts), ("kv_heads", "tensor_0"), ("mlp", parts), ("embed", "fsdp")], units=dict(AXES.units)
    )
    split = mesh.split("tensor", {"tensor_0": 8, "tensor_1": 2})
    asked = plan(TREE, split, names=NAMES, axes=axes, strict=True)
    assert asked.specs == plan(TREE, mesh, names=NAMES, axes=AXES, refine=True).specs


def test_strict_says_nothing_of_parts_where_no_axis_was_split():
    tree, rules = {"w": jnp.ones(5)}, PathRules([("w", P("t"))])
    with pytest.raises(SpecError, match="use axes whose product divides 5$"):
        plan(tree, MeshSpec({"t": 4}), paths=rules, refine=True, strict=True)


sizes = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24])


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(sizes, sizes), min_size=1, max_size=5),
    st.lists(st.sampled_from([("t",), ("d", "t"), ("t", "d"), ("d",), ()]), min_size=10, max_size=10),
    st.sampled_from([2, 4, 6, 8, 16]),
    st.sampled_from([1, 2, 3]),
)
def test_refining_saves_memory_and_moves_nothing_else(shapes, wanted, t, d):
    tree = {f"w{i}": jax.ShapeDtypeStruct(shape, jnp.float32) for i, shape in enumerate(shapes)}
    specs = []
    for first, second in zip(wanted[::2], wanted[1::2], strict=True):
        specs.append(P(first or None, tuple(axis for axis in second if axis not in first) or None))
    rules = PathRules([(f"w{i}", specs[i]) for i in range(len(shapes))])
    mesh = MeshSpec({"d": d, "t": t})
    before, after = (plan(tree, mesh, paths=rules, refine=refine) for refine in (False, True))
    assert math.prod(after.mesh.axis_sizes) == math.prod(mesh.axis_sizes)
    assert after.bytes_per_device <= before.bytes_per_device
    for old, new in zip(before.leaves, after.leaves, strict=True):
        assert new.bytes_per_device <= old.bytes_per_device
        if not old.reasons:
            shards = [
                NamedSharding(made.mesh.abstract(), leaf.spec).shard_shape(leaf.shape)
                for made, leaf in ((before, old), (after, new))
            ]
            assert shards[0] == shards[1]


def test_refined_and_plain_arrays_mix_in_one_jit_and_keep_their_place():
    rules = PathRules([("kv", P(None, "tensor")), (".*", P("data", "tensor"))])
    tree = {"kv": jnp.arange(32.0).reshape(16, 2), "w": jnp.arange(128.0).reshape(8, 16)}
    mesh = MeshSpec({"data": 2, "tensor": 4}).build(jax.devices())
    plain, refined = (plan(tree, mesh, paths=rules, refine=refine) for refine in (False, True))
    assert refined.jax_mesh is not None and refined.mesh.axis_sizes == (2, 2, 2)
    assert list(refined.jax_mesh.devices.flat) == list(mesh.devices.flat)
    assert refined.shardings["w"].is_equivalent_to(plain.shardings["w"], 2)
    placed, other = shard(tree, refined), shard(tree, plain)
    out = jax.jit(lambda a, b: constrain(a["w"] @ b["kv"], P("data", "tensor_0"), refined))(other, placed)
    np.testing.assert_array_equal(out, np.asarray(tree["w"]) @ np.asarray(tree["kv"]))
    assert out.sharding.is_equivalent_to(NamedSharding(refined.jax_mesh, P("data", "tensor_0")), 2)


def test_names_resolve_on_the_refined_mesh_inside_jit():
    axes = AxisRules([("batch", "data"), ("kv_heads", "tensor")])
    tree = {"kv": jnp.ones((4, 2))}
    mesh = MeshSpec({"data": 2, "tensor": 4}).build(jax.devices())
    refined = plan(tree, mesh, names={"kv": ("batch", "kv_heads")}, axes=axes, refine=True)
    out = jax.jit(lambda x: constrain(x, ("batch", "kv_heads"), refined))(jnp.ones((4, 2)))
    assert out.sharding.spec == P("data", "tensor_0")


def test_optimizer_state_follows_a_refined_plan():
    refined = plan(TREE, MeshSpec({"fsdp": 4, "tensor": 16}), names=NAMES, axes=AXES, refine=True)
    state = follow(optax.adam(1e-3).init, refined)
    assert state.mesh == refined.mesh and state["0/mu/kv"].spec == refined["kv"].spec
    assert ShardPlan.join(params=refined, state=state).axes == refined.axes


def test_explicit_axes_stay_explicit():
    mesh = MeshSpec({"t": 4}, axis_types=AxisType.Explicit)
    refined = plan({"w": jnp.ones(6)}, mesh, paths=PathRules([("w", P("t"))]), refine=True)
    assert refined.mesh.axis_types == (AxisType.Explicit, AxisType.Explicit)
