import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec as P

from shardfx import (
    AxisRules,
    Code,
    MeshSpec,
    PathRules,
    ShardPlan,
    atomic,
    fsdp,
    plan,
    replicate,
)
from shardfx._plan import differences
from shardfx._plan.replanning import replan
from shardfx.errors import (
    LeafTypeError,
    MeshError,
    PlanMismatchError,
    RuleError,
    SpecError,
    UnknownPathError,
    UnmatchedError,
)


MESH = MeshSpec({"data": 2, "fsdp": 2, "tensor": 2})
AXES = AxisRules([("batch", ("data", "fsdp")), ("embed", "fsdp"), ("mlp", "tensor"), ("heads", "tensor")])
TREE = {"w": jnp.ones((8, 16)), "b": jnp.ones(16), "step": jnp.zeros((), jnp.int32), "act": jnp.tanh, "none": None}
RULES = PathRules([("w", P("fsdp", "tensor")), ("b", P("tensor"))])


def test_a_plan_of_paths():
    made = plan(TREE, MESH, paths=RULES)
    assert made.specs == {"w": P("fsdp", "tensor"), "b": P("tensor"), "step": P(), "act": None, "none": None}
    leaf = made["w"]
    assert (leaf.shape, leaf.dtype, leaf.bytes, leaf.bytes_per_device) == ((8, 16), jnp.float32, 512, 128)
    assert leaf.rule == "paths[0] w" and leaf.reasons == ()
    assert [why.code for why in made["step"].reasons] == [Code.scalar]
    assert made.bytes_total == 512 + 64 + 4 and made.bytes_per_device == 128 + 32 + 4
    assert [leaf.path for leaf in made.leaves] == ["b", "step", "w"]


def test_shardings_and_structs_lie_on_the_mesh_that_there_is():
    abstract = plan(TREE, MESH, paths=RULES)
    assert isinstance(abstract.shardings["w"].mesh, AbstractMesh) and abstract.jax_mesh is None
    assert abstract.structs["w"].sharding == abstract.shardings["w"]
    mesh = MESH.build(jax.devices())
    concrete = plan(TREE, mesh, paths=RULES)
    assert concrete.jax_mesh is mesh and concrete.shardings["w"].mesh is mesh
    assert abstract.on(mesh) == concrete and abstract != concrete and abstract.digest == concrete.digest


def test_names_win_over_paths_and_none_leaves_them_the_choice():
    names = {"w": ("mlp", None), "b": None, "step": (), "act": None, "none": None}
    made = plan(TREE, MESH, paths=PathRules([("b", P("tensor"))]), names=names, axes=AXES)
    assert made["w"].spec == P("tensor") and made["w"].rule == "names" and made["w"].names == ("mlp", None)
    assert made["b"].spec == P("tensor") and made["b"].rule == "paths[0] b"


def test_names_may_be_a_prefix_of_the_tree():
    tree = {"a": {"x": jnp.ones((4, 4)), "y": jnp.ones((4, 4))}, "b": (jnp.ones((4,)), jnp.ones((4,)))}
    made = plan(tree, MESH, names={"a": ("embed", "mlp"), "b": (("mlp",), ("embed",))}, axes=AXES)
    assert made.specs == {"a": {"x": P("fsdp", "tensor"), "y": P("fsdp", "tensor")}, "b": (P("tensor"), P("fsdp"))}


def test_names_of_a_tuple_of_arrays():
    tree = (jnp.ones((4, 4)), jnp.ones((4, 4)))
    made = plan(tree, MESH, names=(("embed", "mlp"), ("mlp", "embed")), axes=AXES)
    assert made.specs == (P("fsdp", "tensor"), P("tensor", "fsdp"))


def test_path_rules_may_give_names():
    made = plan(TREE, MESH, paths=PathRules([("w", ("mlp", "embed")), ("b", ())]), axes=AXES)
    assert made["w"].spec == P("tensor", "fsdp") and made["w"].names == ("mlp", "embed") and made["b"].spec == P()


def test_a_name_without_a_rule_replicates_with_a_reason():
    made = plan({"w": jnp.ones((4, 4))}, MESH, names={"w": ("typo", "mlp")}, axes=AXES, unmatched="replicate")
    assert made["w"].spec == P(None, "tensor")
    (why,) = made["w"].reasons
    assert why.code is Code.unmatched and why.dim == 0 and "`typo`" in why.message


def test_units_come_from_names_rules_and_targets():
    tree = {"kv": jnp.ones((6, 4 * 3))}
    mesh = MeshSpec({"tensor": 6})
    by_rule = plan(tree, mesh, names={"kv": (None, "kv")}, axes=AxisRules([("kv", "tensor")], units={"kv": 4}))
    by_name = plan(tree, mesh, names={"kv": (None, atomic("kv", 4))}, axes=AxisRules([("kv", "tensor")]))
    by_path = plan(tree, mesh, paths=PathRules([("kv", atomic(P(None, "tensor"), (1, 4)))]))
    without = plan(tree, mesh, paths=PathRules([("kv", P(None, "tensor"))]))
    assert without["kv"].spec == P(None, "tensor")
    for made in (by_rule, by_name, by_path):
        assert made["kv"].spec == P() and made["kv"].units == (1, 4)
        assert made["kv"].reasons[0].code is Code.unit


def test_strategies_refine_what_comes_before_them():
    tree = {"w": jnp.ones((4, 8)), "v": jnp.ones((4, 8)), "u": jnp.ones((3, 5)), "s": jnp.ones(2)}
    rules = PathRules(
        [
            ("w", P(None, "tensor") | fsdp("data")),
            ("v", ("embed", None) | fsdp("fsdp") | fsdp("data")),
            ("u", fsdp("data")),
            ("s", replicate | fsdp("data", min_bytes=100)),
        ]
    )
    made = plan(tree, MESH, paths=rules, axes=AXES)
    assert made["w"].spec == P("data", "tensor")
    assert made["v"].spec == P("fsdp", "data")
    assert made["u"].spec == P() and made["u"].reasons[0].code is Code.indivisible
    assert made["s"].spec == P() and made["s"].reasons[0].code is Code.small


def test_callables_see_path_and_leaf_and_are_named_by_index():
    tree = {"layers": [{"w": jnp.ones((4, 4))} for _ in range(3)]}
    rules = PathRules([("w", lambda path, leaf: P("data") if path == "layers/1/w" else P(*[None] * leaf.ndim))])
    made = plan(tree, MESH, paths=rules)
    assert [leaf.spec for leaf in made.leaves] == [P(), P("data"), P()]
    assert made.leaves[0].rule == "paths[0] w"
    with pytest.raises(
        RuleError, match=r"paths\[0\] w is a callable that returned 'data'; it must return a PartitionSpec"
    ):
        plan(tree, MESH, paths=PathRules([("w", lambda path, leaf: "data")]))


def test_memory_kinds():
    kinds = [("^b", "pinned_host")]
    made = plan(TREE, MESH, paths=RULES, memory_kinds=kinds)
    assert made["b"].memory_kind == "pinned_host" and made["w"].memory_kind is None
    assert made.shardings["b"].memory_kind == "pinned_host"
    with pytest.raises(RuleError, match="`memory_kinds` entry 0, the regex 'zz', matches no path"):
        plan(TREE, MESH, paths=RULES, memory_kinds=[("zz", "pinned_host")])


def test_modes():
    axes = AxisRules([("kv", "tensor")], modes={"train": [], "decode": [("kv", None)]})
    tree, names = {"w": jnp.ones(4)}, {"w": ("kv",)}
    assert plan(tree, MESH, names=names, axes=axes, mode="train")["w"].spec == P("tensor")
    assert plan(tree, MESH, names=names, axes=axes, mode="decode")["w"].spec == P()
    with pytest.raises(RuleError, match="decode"):
        plan(tree, MESH, names=names, axes=axes, mode="bogus")


def test_unconstrained_is_kept_in_the_spec_and_pinned_in_the_sharding():
    made = plan({"w": jnp.ones((4, 4))}, MESH, paths=PathRules([("w", P(P.UNCONSTRAINED, "data"))]))
    assert made["w"].spec == P(P.UNCONSTRAINED, "data")
    assert made.shardings["w"].spec == P(None, "data")
    assert ShardPlan.from_json(made.to_json())["w"].spec == P(P.UNCONSTRAINED, "data")


def test_prng_keys_and_small_types():
    tree = {"key": jax.random.split(jax.random.key(0), 8), "i4": jnp.zeros((7, 3), jnp.int4), "b": jnp.zeros(8, bool)}
    made = plan(tree, MESH, paths=PathRules([("key|b", P("data"))]), unmatched="replicate")
    assert (made["key"].bytes, made["key"].bytes_per_device) == (64, 32)
    assert made["i4"].bytes == 11  # 21 elements of 4 bits
    assert ShardPlan.from_json(made.to_json(), like=tree) == made


def test_numpy_arrays_are_planned_as_jax_will_hold_them():
    made = plan({"x": np.ones((4,), np.float64)}, MESH, paths=PathRules([("x", P("data"))]))
    assert made["x"].dtype == jnp.float32 and made["x"].bytes == 16
    with pytest.raises(LeafTypeError, match="leaf `x`: a NumPy array of dtype object cannot be put on a device"):
        plan({"x": np.array([None])}, MESH, paths=PathRules([("x", P())]))


# What is wrong is said, all of it, before anything is made.


def test_all_unmatched_leaves_are_reported_largest_first():
    tree = {"small": jnp.ones(2), "large": jnp.ones((8, 8)), "known": jnp.ones(3), "s": jnp.ones(())}
    with pytest.raises(UnmatchedError) as error:
        plan(tree, MESH, paths=PathRules([("known", P())]))
    head, *lines = str(error.value).splitlines()
    assert head.startswith("no rule covers 2 of 4 leaves") and 'unmatched="replicate"' in head
    assert lines == [
        "  `large`: float32[8, 8], 256 bytes; the nearest rule is 'known'",
        "  `small`: float32[2], 8 bytes; the nearest rule is 'known'",
    ]
    made = plan(tree, MESH, paths=PathRules([("known", P())]), unmatched="replicate")
    assert made["large"].spec == P() and [why.code for why in made["large"].reasons] == [Code.unmatched]


def test_a_regex_that_matches_nothing_is_an_error_and_a_shadowed_one_is_not():
    with pytest.raises(
        RuleError, match="rule 1, the regex 'wieght', matches no path of the tree; the nearest path is `w`"
    ):
        plan({"w": jnp.ones(2)}, MESH, paths=PathRules([("w", P()), ("wieght", P())]))
    plan({"w": jnp.ones(2)}, MESH, paths=PathRules([("w", P()), (".*", P())]))


def test_all_specs_that_do_not_fit_are_reported():
    with pytest.raises(
        SpecError, match=r"(?s)2 leaves.*leaf `a`: \w+\('data', 'fsdp'\) has 2 entries.*leaf `b`: 2 logical names"
    ):
        plan(
            {"a": jnp.ones(4), "b": jnp.ones(4)},
            MESH,
            paths=PathRules([("a", P("data", "fsdp")), ("b", ("embed", "mlp"))]),
            axes=AXES,
        )


def test_strict_reports_what_would_have_been_dropped():
    with pytest.raises(SpecError, match=r"(?s)`strict=True`.*leaf `w`, shape \(7,\): dim 0: size 7 is not divisible"):
        plan({"w": jnp.ones(7)}, MESH, paths=PathRules([("w", P("data"))]), strict=True)


@pytest.mark.parametrize(
    "keywords, error, message",
    [
        ({"names": {"x": ("embed",)}, "axes": AXES}, RuleError, "`names` is no prefix of the tree"),
        ({"names": {"w": 3}, "axes": AXES}, RuleError, "leaf `w`: `names` holds 3"),
        ({"names": {"w": ("embed", None)}}, RuleError, "pass `axes=AxisRules"),
        ({"paths": PathRules([("w", ("embed", None))])}, RuleError, "pass `axes=AxisRules"),
        ({"paths": PathRules([("w", atomic(P("data"), (1, 1, 4)))])}, SpecError, "the units .* the array has rank 2"),
    ],
)
def test_errors_of_plan(keywords, error, message):
    with pytest.raises(error, match=message):
        plan({"w": jnp.ones((4, 4))}, MESH, **keywords)


def test_a_mesh_of_unknown_size_is_refused():
    with pytest.raises(MeshError, match=r"call `.fit\(device_count\)` first"):
        plan(TREE, MeshSpec({"data": -1}), paths=RULES)


def test_unknown_paths_name_the_near_ones():
    made = plan(TREE, MESH, paths=RULES)
    with pytest.raises(UnknownPathError, match="the plan has no leaf `stop`; did you mean `step`?"):
        made["stop"]
    one, two = (plan(tree, MESH, unmatched="replicate") for tree in ({"b/c": jnp.ones(2)}, {"c": jnp.ones(2)}))
    twice = ShardPlan.join(**{"a": one, "a/b": two})
    with pytest.raises(UnknownPathError, match="several leaves have the path `a/b/c`"):
        twice["a/b/c"]


# Values: equality, hashes, JSON.


def test_equal_plans_share_a_trace_and_different_meshes_do_not():
    traces = []

    @jax.jit
    def run(made, x):
        traces.append(made)
        return x * 2

    made = plan(TREE, MESH, paths=RULES)
    again = ShardPlan.from_json(made.to_json())
    for equal in (made, again, ShardPlan.from_json(made.to_json(), like=TREE)):
        run(equal, 1.0)
    assert len(traces) == 1 and again == made and hash(again) == hash(made)
    devices = np.array(jax.devices()).reshape(2, 2, 2)
    run(made.on(Mesh(devices, MESH.axis_names)), 1.0)
    run(made.on(Mesh(devices[::-1], MESH.axis_names)), 1.0)
    assert len(traces) == 3


def test_json_brings_back_the_tree():
    tree = {"l": [jnp.ones(2), (jnp.ones(2), None)], "d": {1: jnp.ones(2), 10: jnp.ones(3)}, "e": {}, "s": "text"}
    made = plan(tree, MESH, unmatched="replicate")
    again = ShardPlan.from_json(made.to_json())
    assert again == made and again.specs == made.specs
    assert jax.tree.structure(again.specs) == jax.tree.structure(made.specs)


def test_json_of_a_module_needs_a_like_to_be_a_module_again():
    mlp = eqx.nn.MLP(4, 4, 8, 1, key=jax.random.key(0))
    made = plan(mlp, MESH, paths=PathRules.parse("weight->fsdp,bias->None"))
    again = ShardPlan.from_json(made.to_json())
    assert again.specs["layers"][0]["weight"] == P("fsdp")
    assert jax.tree.structure(ShardPlan.from_json(made.to_json(), like=mlp).specs) == jax.tree.structure(made.specs)
    assert again["layers/0/weight"] == made["layers/0/weight"]


def test_json_keeps_axis_types_modes_rules_and_reasons():
    mesh = MeshSpec({"data": 2, "tensor": 4}, axis_types={"tensor": AxisType.Explicit}, dcn={"data": 2})
    axes = AxisRules([("e", ("data", "tensor"))], modes={"m": [("e", P.UNCONSTRAINED)]}, units={"e": 2}).with_alias(
        "f", "e"
    )
    made = plan({"w": jnp.ones((6, 4))}, mesh, names={"w": ("f", None)}, axes=axes)
    again = ShardPlan.from_json(made.to_json())
    assert again.mesh == mesh and again.axes == axes and again["w"] == made["w"] and again["w"].reasons


@pytest.fixture(scope="module")
def text():
    return plan(TREE, MESH, paths=RULES).to_json()


def edited(text, change):
    data = json.loads(text)
    change(data)
    return json.dumps(data)


def test_an_edit_without_digest_is_accepted(text):
    changed = edited(text, lambda d: (d.pop("digest"), d["rows"][0].update(memory_kind="pinned_host")))
    assert ShardPlan.from_json(changed).leaves[0].memory_kind == "pinned_host"


def test_like_must_be_the_planned_tree(text):
    with pytest.raises(PlanMismatchError, match=r"leaf `w` is float32\[8, 15\], but the plan is for float32\[8, 16\]"):
        ShardPlan.from_json(text, like={**TREE, "w": jnp.ones((8, 15))})
    with pytest.raises(PlanMismatchError, match="1 array more, 0 missing.*the plan has no `extra`"):
        ShardPlan.from_json(text, like={**TREE, "extra": jnp.ones(2)})
    with pytest.raises(PlanMismatchError, match="leaf `w` is str 'x', but the plan has an array"):
        ShardPlan.from_json(text, like={**TREE, "w": "x"})


def test_on_refuses_another_mesh():
    made = plan(TREE, MESH, paths=RULES)
    with pytest.raises(PlanMismatchError, match="the plan is for the mesh data=2,fsdp=2,tensor=2, not for x=8"):
        made.on(MeshSpec({"x": 8}).build(jax.devices()))
    explicit = MeshSpec(dict(MESH.shape), axis_types=AxisType.Explicit).build(jax.devices())
    with pytest.raises(PlanMismatchError, match=r"axis types \(Auto, Auto, Auto\), this one \(Explicit"):
        made.on(explicit)


def test_join():
    one = plan({"w": jnp.ones((4, 2))}, MESH, paths=PathRules.parse("w->data"))
    two = plan(jnp.ones(4), MESH, paths=PathRules.parse(".*->fsdp"))
    both = ShardPlan.join(z=one, a=two, n=plan([None], MESH))
    assert both.specs == {"a": P("fsdp"), "n": [None], "z": {"w": P("data")}}
    assert [leaf.path for leaf in both.leaves] == ["a", "z/w"]
    assert both.bytes_total == one.bytes_total + two.bytes_total
    again = ShardPlan.join(z=ShardPlan.from_json(one.to_json()), a=two, n=plan([None], MESH))
    assert again == both
    with pytest.raises(PlanMismatchError, match="the plans `a` and `b` differ in their mesh"):
        ShardPlan.join(a=one, b=plan({"w": jnp.ones(2)}, MeshSpec({"x": 2}), unmatched="replicate"))
    with pytest.raises(PlanMismatchError, match="needs at least one plan"):
        ShardPlan.join()


def test_select():
    made = plan(TREE, MESH, paths=RULES)
    chosen = made.select("^w$")
    assert chosen.specs == {"w": P("fsdp", "tensor"), "b": None, "step": None, "act": None, "none": None}
    assert [leaf.path for leaf in chosen.leaves] == ["w"] and chosen.bytes_total == 512
    with pytest.raises(RuleError, match="matches no path of the plan"):
        made.select("nothing")
    with pytest.raises(RuleError, match="does not compile"):
        made.select("(")


def test_differences():
    one, two = (plan(TREE, MESH, paths=PathRules([("w", P(axis)), ("b", P())])) for axis in ("data", "fsdp"))
    assert differences(one, one) == ()
    lines = differences(one, two)
    assert [line.split("(")[0].rsplit(" ", 1)[0] for line in lines[:2]] == [
        "leaf `w`: requested is",
        "leaf `w`: spec is",
    ]
    fewer = plan({"w": TREE["w"]}, MESH, paths=PathRules([("w", P("data"))]))
    assert "leaf `b` is only in one plan" in differences(one, fewer)
    assert "leaf `b` is only in the other plan" in differences(fewer, one)


def test_repr_is_short():
    assert (
        repr(plan(TREE, MESH, paths=RULES))
        == "ShardPlan(3 arrays, mesh data=2,fsdp=2,tensor=2, 580 bytes, 164 per device)"
    )


def test_what_was_too_small_stays_replicated_on_another_mesh():
    tree = {"w": jnp.ones((8, 8)), "b": jnp.ones(8), "v": jnp.ones(4)}
    rules = PathRules([("w", P("data")), ("b", P("data")), ("v", fsdp("data"))])
    made = plan(tree, MeshSpec({"data": 2}), paths=rules, min_bytes=64)
    again = replan(made, MeshSpec({"data": 4}))
    assert again.specs == {"w": P("data"), "b": P(), "v": P()} and again["w"].bytes_per_device == 64
    assert again == plan(tree, MeshSpec({"data": 4}), paths=rules, min_bytes=64)
