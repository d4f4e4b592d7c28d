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

from shardfx import AxisRules, MeshSpec, PathRules, ShardPlan, SpecError, constrain, follow, fsdp, plan, shard


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


def test_strict_is_about_the_refined_plan():
    rules = PathRules([("w", P("t"))])
    with pytest.raises(SpecError):
        plan({"w": jnp.ones(6)}, MeshSpec({"t": 4}), paths=rules, refine=True, strict=True)


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
