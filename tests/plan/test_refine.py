"""plan(refine=True) splits an axis if a dimension can use a sub-axis, and changes
nothing else.
"""

import math

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from jax.sharding import NamedSharding, PartitionSpec as P

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


UNITS = {"heads": 128, "kv_heads": 128}
AXES = AxisRules(
    {
        "heads": "tensor",
        "kv_heads": "tensor",
        "mlp": "tensor",
        "embed": "fsdp",
    },
    units=UNITS,
    modes={"decode": [("mlp", ("fsdp", "tensor"))]},
)
NAMES = {"q": ("embed", "heads"), "kv": ("embed", "kv_heads"), "mlp": ("embed", "mlp")}
SHAPES = {"q": (512, 32 * 128), "kv": (512, 8 * 128), "mlp": (512, 2048)}
TREE = {}
for name, shape in SHAPES.items():
    TREE[name] = jax.ShapeDtypeStruct(shape, jnp.float32)
MESH = MeshSpec({"fsdp": 4, "tensor": 16})
PLAIN = plan(TREE, MESH, names=NAMES, axes=AXES)
REFINED = plan(TREE, MESH, names=NAMES, axes=AXES, refine=True)


def test_eight_kv_heads_on_sixteen_devices():
    assert PLAIN["kv"].spec == P("fsdp")
    expected = MESH.split("tensor", {"tensor_0": 8, "tensor_1": 2})
    assert REFINED.mesh == expected
    assert REFINED["kv"].spec == P("fsdp", "tensor_0")
    assert (
        REFINED["q"].spec == REFINED["mlp"].spec == P("fsdp", ("tensor_0", "tensor_1"))
    )
    expected_bytes = PLAIN["kv"].bytes_per_device // 8
    assert REFINED["kv"].bytes_per_device == expected_bytes
    assert REFINED.axes is not None
    rules = dict(REFINED.axes.rules)
    assert rules["mlp"] == (
        "tensor_0",
        "tensor_1",
    )
    expected = (("mlp", ("fsdp", "tensor_0", "tensor_1")),)
    modes = dict(REFINED.axes.modes)
    assert modes["decode"] == expected
    assert REFINED.axes.units == AXES.units
    init = optax.adam(1e-3).init
    state = follow(init, REFINED)
    assert state.mesh == REFINED.mesh
    assert state["0/mu/kv"].spec == REFINED["kv"].spec
    joined = ShardPlan.join(params=REFINED, state=state)
    assert joined.axes == REFINED.axes


def test_nothing_to_refine_gives_the_same_plan():
    mesh = MeshSpec({"fsdp": 4, "tensor": 8})
    sharding_plan = plan(TREE, mesh, names=NAMES, axes=AXES, refine=True)
    plain = plan(TREE, mesh, names=NAMES, axes=AXES)
    assert sharding_plan == plain
    tree = {"bias": jnp.ones(6)}
    rules = PathRules([("bias", P("tensor"))])
    mesh = MeshSpec({"tensor": 4})
    sharding_plan = plan(tree, mesh, paths=rules, refine=True, min_bytes=100)
    actual = sharding_plan.mesh
    assert actual == mesh
    refined = plan(tree, mesh, paths=rules, refine=True)
    bias = refined["bias"]
    spec = bias.spec
    assert spec == P("tensor_0")


def test_a_small_array_of_a_strategy_uses_axes_before_it():
    tree = {"bias": jnp.ones(6)}
    rules = PathRules([("bias", P("tensor") | fsdp("data", min_bytes=100))])
    mesh = MeshSpec({"data": 2, "tensor": 4})
    whole = plan(tree, mesh, paths=rules)
    assert whole["bias"].spec == P()
    assert whole.replan(MeshSpec({"data": 2, "tensor": 3}))["bias"].spec == P("tensor")
    refined = plan(tree, mesh, paths=rules, refine=True)
    assert refined["bias"].spec == P("tensor_0")


def test_reasons_name_the_sub_axes():
    axes = AxisRules([("mlp", "tensor"), ("heads", "tensor")])
    names = {"w": ("heads", "mlp")}
    mesh = MeshSpec({"tensor": 4})
    refined = plan({"w": jnp.ones((8, 6))}, mesh, names=names, axes=axes, refine=True)
    assert refined["w"].spec == P(None, "tensor_0")
    blocked = refined["w"].reasons[0]
    assert blocked.axes == ("tensor_0", "tensor_1")
    assert "`tensor_0` is used by `mlp`" in blocked.message


def test_a_strategy_splits_no_axis_for_a_small_array():
    rules = PathRules([("bias", fsdp("tensor", min_bytes=100))])
    mesh = MeshSpec({"tensor": 4})
    refined = plan({"bias": jnp.ones(6)}, mesh, paths=rules, refine=True)
    assert refined.mesh == mesh


def test_a_dimension_that_fsdp_skips_splits_no_axis():
    rules = PathRules([("layers", fsdp("data", skip_dims=0))])
    mesh = MeshSpec({"data": 16})
    whole = plan({"layers": jnp.ones((8, 5))}, mesh, paths=rules, refine=True)
    assert whole.mesh == mesh
    assert whole["layers"].spec == P()
    cut = plan({"layers": jnp.ones((8, 4))}, mesh, paths=rules, refine=True)
    assert cut["layers"].spec == P(None, "data_0")


BA = {"w": P(("b", "a")), "u": P("a"), "v": P("b")}
BAC = {
    "w": P(("b", "a")) | fsdp("c"),
    "u": P("a"),
    "v": P("b"),
    "x": P("c"),
}


@pytest.mark.parametrize(
    "promise, shapes, mesh, rules, parts, specs",
    [
        (
            "a free name",
            {"w": (6,)},
            "t=4,t_1=2",
            {"w": P("t")},
            "t__0=2,t__1=2,t_1=2",
            {"w": P("t__0")},
        ),
        (
            "part of a strategy's axis",
            {"w": (12, 5)},
            "f=8",
            {"w": fsdp("f")},
            "f_0=4,f_1=2",
            {"w": P("f_0")},
        ),
        (
            "one axis is enough",
            {"w": (2,)},
            "a=4,b=4",
            {"w": P(("a", "b"))},
            "a_0=2,a_1=2,b=4",
            {"w": P("a_0")},
        ),
        # b_0 and a_1 would do as well for w, which asked for no part.
        (
            *(
                "no other layout",
                {"u": (2,), "v": (2,), "w": (6,)},
                "a=6,b=4",
                BA,
                "a_0=2,a_1=3,b_0=2,b_1=2",
            ),
            {"w": P(("a_0", "a_1"))},
        ),
        # Six of 24 would cut through slices of six devices each: two of the four
        # slices' halves is what fits.
        (
            "whole slices",
            {"w": (6,)},
            "t=24(dcn=4)",
            {"w": P("t")},
            "t_0=2(dcn=2),t_1=12(dcn=2)",
            {"w": P("t_0")},
        ),
        (
            *(
                "neither divides the other",
                {"four": (4, 9), "six": (6, 9)},
                "t=12",
                {"": P("t")},
                "t_0=2,t_1=3,t_2=2",
            ),
            {"six": P(("t_0", "t_1")), "four": P(("t_0", "t_2"))},
        ),
        (
            *(
                "all that it asked for",
                {
                    "u": (2,),
                    "v": (2,),
                    "x": (2,),
                    "w": (6, 8),
                },
                "a=6,b=4,c=4",
                BAC,
            ),
            *(
                "a_0=2,a_1=3,b_0=2,b_1=2,c_0=2,c_1=2",
                {"w": P(("a_0", "a_1"), ("c_0", "c_1"))},
            ),
        ),
    ],
)
def test_axes_are_split_by_what_dimensions_take(
    promise, shapes, mesh, rules, parts, specs
):
    tree = {}
    for name, shape in shapes.items():
        tree[name] = jnp.ones(shape)
    mesh_spec = MeshSpec.parse(mesh)
    path_rules = PathRules(rules)
    refined = plan(tree, mesh_spec, paths=path_rules, refine=True)
    mesh_text = str(refined.mesh)
    assert mesh_text == parts, promise
    actual = {}
    for path in specs:
        actual[path] = refined[path].spec
    assert actual == specs, promise
    if rules is BAC:  # what was asked for names the parts, too
        parts_of_axes = P(("b_0", "b_1", "a_0", "a_1"))
        assert refined["w"].requested == parts_of_axes
        strategies = (fsdp(("c_0", "c_1")),)
        assert refined["w"].strategies == strategies


def test_no_reason_advises_to_refine_once_that_was_done():
    struct = jax.ShapeDtypeStruct((512, 128), jnp.float32)
    single = {"q": TREE["q"], "kv": struct}
    for tree in (TREE, single):
        names = {}
        for name in tree:
            names[name] = NAMES[name]
        plain = plan(tree, MESH, names=names, axes=AXES)
        refined = plan(tree, MESH, names=names, axes=AXES, refine=True)
        text_of_plain = report(plain)
        assert "split the mesh axis (`refine=True`)" in text_of_plain
        text_of_refined = report(refined)
        assert "refine" not in text_of_refined
        assert "would cut inside a unit; use axes whose product" in report(refined)
        codes = []
        for why in refined["kv"].reasons:
            codes.append(why.code)
        assert codes == [Code.unit]
        text = refined.to_json()
        assert ShardPlan.from_json(text) == refined


def test_strict_says_how_to_accept_what_refine_left_over():
    text = (
        "`refine=True` has split the mesh into fsdp=4,tensor_0=8,tensor_1=2. .* by"
        " rules that name the parts; or"
    )
    why = (
        r"leaf `kv`, shape \(512, 1024\): dim 1: 1024 elements are 8 units of 128, and"
        r" `tensor_0` \(8\) x `tensor_1`"
    )
    with pytest.raises(SpecError, match=rf"(?s){text} .*{why}"):
        plan(
            TREE,
            MESH,
            names=NAMES,
            axes=AXES,
            refine=True,
            strict=True,
        )
    parts = ("tensor_0", "tensor_1")
    rules = {
        "heads": parts,
        "kv_heads": "tensor_0",
        "mlp": parts,
        "embed": "fsdp",
    }
    axes = AxisRules(
        rules,
        units=UNITS,
    )
    split = MESH.split("tensor", {"tensor_0": 8, "tensor_1": 2})
    sharding_plan = plan(TREE, split, names=NAMES, axes=axes, strict=True)
    specs = sharding_plan.specs
    assert specs == REFINED.specs


sizes = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24])


@settings(max_examples=100)
@given(
    st.lists(st.tuples(sizes, sizes), min_size=1, max_size=5),
    st.lists(
        st.sampled_from([("t",), ("d", "t"), ("t", "d"), ("d",), ()]),
        min_size=10,
        max_size=10,
    ),
    st.sampled_from([2, 4, 6, 8, 16]),
    st.sampled_from([1, 2, 3]),
)
def test_refining_saves_memory_and_moves_nothing_else(shapes, dims, t, d):
    tree = {}
    for i, shape in enumerate(shapes):
        tree[f"w{i}"] = jax.ShapeDtypeStruct(shape, jnp.float32)
    specs = []
    for first, second in zip(dims[::2], dims[1::2], strict=True):
        rest = tuple(axis for axis in second if axis not in first)
        spec = P(
            first or None,
            rest or None,
        )
        specs.append(spec)
    rules_by_path = []
    for i in range(len(shapes)):
        rules_by_path.append((f"w{i}", specs[i]))
    rules = PathRules(rules_by_path)
    mesh = MeshSpec({"d": d, "t": t})
    before = plan(tree, mesh, paths=rules)
    after = plan(tree, mesh, paths=rules, refine=True)
    actual = math.prod(after.mesh.axis_sizes)
    assert actual == math.prod(mesh.axis_sizes)
    assert after.bytes_per_device <= before.bytes_per_device
    for old, new in zip(before.leaves, after.leaves, strict=True):
        assert new.bytes_per_device <= old.bytes_per_device
        if not old.reasons:
            shards = [
                NamedSharding(sharding_plan.mesh.abstract(), leaf.spec).shard_shape(
                    leaf.shape
                )
                for sharding_plan, leaf in ((before, old), (after, new))
            ]
            assert shards[0] == shards[1]


def test_refined_and_plain_arrays_mix_in_one_jit():
    columns = P(None, "tensor")
    rules = PathRules([("kv", columns), (".*", P("data", "tensor"))])
    axes = AxisRules([("batch", "data"), ("kv_heads", "tensor")])
    values = jnp.arange(32.0).reshape(16, 2)
    weights = jnp.arange(128.0).reshape(8, 16)
    tree = {
        "kv": values,
        "w": weights,
    }
    spec_of_mesh = MeshSpec({"data": 2, "tensor": 4})
    mesh = spec_of_mesh.build(jax.devices())
    plain = plan(tree, mesh, paths=rules, axes=axes)
    refined = plan(tree, mesh, paths=rules, axes=axes, refine=True)
    assert refined.jax_mesh is not None
    assert refined.mesh.axis_sizes == (2, 2, 2)
    actual = list(refined.jax_mesh.devices.flat)
    expected = list(mesh.devices.flat)
    assert actual == expected
    _, refined_sharding, *_ = jax.tree.leaves(refined.shardings)
    _, plain_sharding, *_ = jax.tree.leaves(plain.shardings)
    assert refined_sharding.is_equivalent_to(plain_sharding, 2)
    placed = shard(tree, refined)
    other = shard(tree, plain)
    for names in (P("data", "tensor_0"), ("batch", "kv_heads")):
        out = jax.jit(
            lambda a, b, names=names: constrain(a["w"] @ b["kv"], names, refined)
        )(other, placed)
        assert out.sharding.spec == P("data", "tensor_0")
    weights_by_host = np.asarray(tree["w"])
    values_by_host = np.asarray(tree["kv"])
    np.testing.assert_array_equal(out, weights_by_host @ values_by_host)
