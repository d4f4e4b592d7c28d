"""Errors of `plan` for names of another rank, rules that never apply, and unknown names
and axes.
"""

import inspect
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import shardfx as sfx
from shardfx import AxisRules, Code, MeshSpec, PathRules, ShardPlan, optional, plan
from shardfx.errors import (
    LeafTypeError,
    MeshError,
    PlanMismatchError,
    RuleError,
    SpecError,
    UnknownPathError,
    UnmatchedError,
)


MESH = MeshSpec({"data": 2, "tensor": 4})
AXES = AxisRules(
    [("batch", "data"), ("mlp", "tensor"), ("embed", None), ("layers", None)]
)
W = jnp.ones((8, 16))
TREE = {"w": W}
NAMES = {"w": ("mlp", None)}
MADE, STRICT = (
    plan(TREE, MESH, names=NAMES, axes=AXES, strict=strict) for strict in (False, True)
)
ON = MADE.on(MESH.build(jax.devices()))
KV = AxisRules([("heads", "tensor"), ("kv", "tensor")], units={"heads": 16, "kv": 16})


def ruled(target, tree=TREE, mesh: Any = MESH, **keywords):
    return plan(tree, mesh, paths=PathRules([("", target)]), **keywords)


class Dense(eqx.Module):
    w: jax.Array = sfx.field(names=("mlp", "embed"))
    scale: jax.Array = sfx.field(names=())
    bias: jax.Array = sfx.field(names=(..., "mlp"))


class Bare(eqx.Module):
    layers: Dense


class Named(eqx.Module):
    layers: Dense = sfx.field(stacked=("batch",))


# --- one name per dimension


def test_names_of_a_field_do_not_shift_where_layers_are_stacked():
    stacked = Dense(jnp.ones((8, 256, 64)), jnp.ones(8), jnp.ones((8, 4, 16)))
    with pytest.raises(SpecError) as error:
        plan(Bare(stacked), MESH, axes=AXES)
    for part in (
        "`layers/w`",
        "('mlp', 'embed')",
        "(8, 256, 64)",
        "`...` for the dimensions",
        "field(stacked=...)",
    ):
        assert part in str(error.value)
    sharding_plan = plan(Named(stacked), MESH, axes=AXES)
    assert sharding_plan["layers/w"].spec == P("data", "tensor")
    assert sharding_plan["layers/scale"].spec == P("data")
    assert sharding_plan["layers/bias"].spec == P("data", None, "tensor")


@pytest.mark.parametrize(
    "names, full",
    [
        ((..., "mlp"), (None, None, "mlp")),
        (("mlp", ...), ("mlp", None, None)),
        (("mlp", ..., "batch"), ("mlp", None, "batch")),
        (("mlp", None, None, ...), ("mlp", None, None)),
        ((...,), (None, None, None)),
        ((), ()),
        (P("mlp"), ("mlp", None, None)),
        (P(), (None, None, None)),
    ],
    ids=str,
)
def test_dots_stand_for_dimensions_that_are_not_named(names, full):
    tree = {"w": jnp.ones((8, 4, 16))}
    by_name = plan(tree, MESH, names={"w": names}, axes=AXES)
    assert by_name["w"].spec == sfx.resolve(full, AXES).spec
    assert ShardPlan.from_json(by_name.to_json()) == by_name
    if not isinstance(names, P):
        assert by_name["w"].names == full
        by_path = plan(tree, MESH, paths=PathRules([("w", names)]), axes=AXES)["w"]
        assert by_path.names == full
        assert by_path.spec == by_name["w"].spec


@pytest.mark.parametrize(
    "names", [("mlp",), ("mlp", None, ..., None), (..., "mlp", ...)], ids=str
)
@pytest.mark.parametrize(
    "attempt",
    [
        lambda names: plan(TREE, MESH, names={"w": names}, axes=AXES),
        lambda names: plan(TREE, MESH, paths=PathRules([("w", names)]), axes=AXES),
        lambda names: MADE.sharding(names, (8, 16)),
        lambda names: MADE.replace("w", names),
        lambda names: sfx.constrain(W, names, MADE),
        lambda names: jax.eval_shape(lambda x: sfx.constrain(x, names, MADE), W),
    ],
    ids=["names", "paths", "sharding", "replace", "constrain", "traced"],
)
def test_names_of_another_rank_are_an_error_at_every_entry(names, attempt):
    with pytest.raises(
        SpecError,
        match=(
            r"for an array of rank 2, shape \(8, 16\)|it can stand for dimensions"
            r" in one"
        ),
    ):
        attempt(names)


def test_the_error_in_vmap_says_what_works_and_it_does():
    x = jnp.ones((4, 8, 16))
    for names, message in (
        (
            ("batch", "mlp", None),
            r"maps over one, .* `jax.vmap\(..., spmd_axis_name=...\)`",
        ),
        (
            P("data", None, None),
            "has 3 entries, but shape .* has 2 dimensions.*spmd_axis_name",
        ),
    ):
        with pytest.raises(SpecError, match=message):
            jax.vmap(lambda x, names=names: sfx.constrain(x, names, ON))(x)
    inner = jax.vmap(
        lambda x: sfx.constrain(x, ("mlp", None), ON), spmd_axis_name="data"
    )
    assert jax.jit(inner)(x).sharding.spec == P("data", "tensor")


def test_trailing_nones_beyond_the_rank():
    """A rule is for arrays of several ranks, so its surplus `None`s say nothing; a spec
    for one array fits its rank.
    """
    long = P("tensor", None, None)
    leaf = ruled(long)
    assert (
        leaf["w"].spec
        == sfx.correct(long, (8, 16), MESH).spec
        == leaf.replace("w", long)["w"].spec
        == P("tensor")
    )
    rules = PathRules([("other", P(None, "tensor", None))])
    assert sfx.follow(lambda _: {"other": jnp.ones((5, 12))}, leaf, paths=rules)[
        "other"
    ].spec == P(None, "tensor")
    for attempt in (
        lambda: leaf.sharding(long, (8, 16)),
        lambda: sfx.constrain(W, long, leaf),
    ):
        with pytest.raises(SpecError, match="has 3 entries, but shape"):
            attempt()


# --- rules that never apply


MLP = {
    "mlp": {"wi": jnp.ones((8, 8)), "wo": jnp.ones((8, 8))},
    "norm": jnp.ones(8),
    "act": jnp.tanh,
}


@pytest.mark.parametrize(
    "rules, message",
    [
        (
            [("wi", P("data")), ("wo", P("data")), ("mlp", P("tensor")), ("norm", P())],
            (
                r"rule 2, .* \(`mlp/wi` and 1 more\) goes to rule 0 \('wi'\) and rule 1"
                r" \('wo'\)\."
            ),
        ),
        (
            [(".*", P()), ("norm", P()), ("nrm", P())],
            r"(?s)rule 1, the regex 'norm', is shadowed: all that it matches \(`norm`\)"
            r" goes to rule 0 \('\.\*'\)\.\n"
            "  rule 2, .* matches no path of the tree; the nearest path is `norm`",
        ),
    ],
    ids=["by two", "by the rest"],
)
def test_unused_rules_are_named_with_the_rule_that_shadows(rules, message):
    with pytest.raises(RuleError, match=message):
        plan(MLP, MESH, paths=PathRules(rules), unmatched="replicate")
    declared = PathRules(
        [(regex, optional(optional(target))) for regex, target in rules]
    )
    assert plan(MLP, MESH, paths=declared) == plan(
        MLP, MESH, paths=PathRules(rules), unused="allow"
    )


@pytest.mark.parametrize("rest", ["", ".", ".*", "^", ".+", "^.*$", "[^/]*"])
def test_the_last_rule_may_match_nothing_or_the_rest(rest):
    plan(MLP, MESH, paths=PathRules([("mlp", P("data")), ("norm", P()), (rest, P())]))
    plan(MLP, MESH, paths=PathRules([("mlp|norm", P()), ("act", P("data"))]))


# --- names and axes that nobody knows


def test_a_name_that_no_rule_is_about():
    tree = {**TREE, "b": jnp.ones(8)}
    names = {"w": ("mpl", None), "b": ("embed",)}
    with pytest.raises(
        UnmatchedError, match=r"(?s)leaf `w`.*'mpl' \(did you mean 'mlp'\?\)"
    ) as error:
        plan(tree, MESH, names=names, axes=AXES)
    assert "`b`" not in str(error.value)
    sharding_plan = plan(tree, MESH, names=names, axes=AXES, unmatched="replicate")
    (why,) = sharding_plan["w"].reasons
    assert sharding_plan["w"].spec == P()
    assert why.code is Code.unmatched
    assert why.dim == 0
    assert "`mpl`" in why.message
    assert (
        plan(tree, MESH, names=names, axes=AXES.extend([("mpl", None)]))["w"].reasons
        == ()
    )
    assert plan(tree, MESH, names=names, axes=AXES.with_alias("mpl", of="mlp"))[
        "w"
    ].spec == P("tensor")


def test_a_name_with_rules_in_another_mode_is_known():
    rules = AxisRules(
        [("mlp", "tensor")], modes={"decode": [("cache", "data")], "train": []}
    )
    for mode, spec in (("train", P(None, "tensor")), ("decode", P("data", "tensor"))):
        assert (
            plan(TREE, MESH, names={"w": ("cache", "mlp")}, axes=rules, mode=mode)[
                "w"
            ].spec
            == spec
        )
    with pytest.raises(UnmatchedError, match="'chache'"):
        plan(TREE, MESH, names={"w": ("chache", "mlp")}, axes=rules, mode="train")


@pytest.mark.parametrize(
    "target",
    [P("tenser"), sfx.fsdp("tenser"), lambda path, leaf: P("tenser"), ("heads", None)],
)
def test_a_mesh_axis_that_no_mesh_is_known_to_have(target):
    axes = AXES.prepend([("heads", "tenser")] if isinstance(target, tuple) else [])
    with pytest.raises(
        RuleError, match=r"the mesh axis 'tenser' \(did you mean 'tensor'\?\)"
    ):
        ruled(target, axes=axes)
    assert ruled(target, axes=axes, unmatched="replicate").leaves


def test_a_mesh_axis_that_is_declared():
    other = AXES.prepend([("heads", "pipe")]).extend(mesh_axes=["pipe"])
    assert plan(TREE, MESH, names=NAMES, axes=other)["w"].spec == P("tensor")
    (leaf,) = plan(
        TREE, MESH, paths=PathRules([("w", P("pipe"))], mesh_axes=["pipe"])
    ).leaves
    assert leaf.spec == P()
    assert leaf.reasons[0].code is Code.absent
    rules = AxisRules([("batch", ("pod", "data"))], mesh_axes=("pod",))
    sharding_plan = plan(TREE, MESH, names={"w": ("batch", None)}, axes=rules)
    assert {
        sharding_plan.sharding(asked).spec for asked in (("batch",), P(("pod", "data")))
    } == {P("data")}
    assert sharding_plan.replace("w", P("pod", "data"))["w"].spec == P(None, "data")
    for lenient in (("bacth", "mlp"), P("tenser", "tensor")):
        assert MADE.sharding(lenient, unmatched="replicate").spec == P(None, "tensor")


# --- strict plans


def test_a_plan_remembers_that_it_is_strict():
    assert STRICT.strict
    assert not MADE.strict
    assert STRICT != MADE
    assert "strict" not in MADE.to_json()
    assert sfx._plan.differences(STRICT, MADE) == (
        "strict is True in one plan, False in the other",
    )
    assert sfx._plan.differences(plan({}, MESH, axes=AXES), MADE) == (
        "leaf `w` is only in the other plan",
    )
    for sharding_plan in (
        *(
            ShardPlan.from_json(STRICT.to_json()),
            sfx.follow(lambda x: x, STRICT),
            STRICT.select("w"),
        ),
        *(
            STRICT.replace("w", P()),
            ShardPlan.join(a=STRICT, b=MADE),
            STRICT.on(MESH.build(jax.devices())),
        ),
        STRICT.replan(MeshSpec({"data": 1, "tensor": 4})),
    ):
        assert sharding_plan.strict


def test_follow_is_as_strict_as_its_plan():
    init = lambda params: {
        "mu": params,
        "history": jnp.zeros((5, 7)),
        "one": jnp.zeros((1, 1)),
        "count": jnp.zeros(()),
    }
    with pytest.raises(
        SpecError, match=r"(?s)leaf `history`, shape \(5, 7\): no rule covers .*\Z"
    ) as error:
        sfx.follow(init, STRICT)
    assert "`one`" not in str(error.value)
    assert "`count`" not in str(error.value)
    assert sfx.follow(init, MADE)["history"].spec == P()
    rest = PathRules([(".*", sfx.replicate)])
    assert sfx.follow(init, STRICT, paths=rest)["history"].spec == P()
    with pytest.raises(
        SpecError, match="leaf `history`, .* size 5 is not divisible by `tensor`"
    ):
        sfx.follow(init, STRICT, paths=PathRules([("history", P("tensor"))]))
    # ZeRO takes what room there is.
    assert sfx.follow(init, STRICT, over="data", paths=rest)["mu/w"].spec == P(
        "tensor", "data"
    )


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
    assert (
        MADE.sharding(("batch",)).spec
        == MADE.sharding(("batch", ...)).spec
        == P("data")
    )
    assert MADE.sharding(("batch",)).mesh == MESH.abstract()
    tree = {"q": jnp.ones((8, 128)), "k": jnp.ones((8, 32))}
    sharding_plan = plan(
        tree, MESH, names={"q": (None, "heads"), "k": (None, "kv")}, axes=KV
    )
    assert sharding_plan.sharding((None, "heads")).spec == P(None, "tensor")
    assert sharding_plan.sharding((None, "kv"), (8, 32)).spec == P()
    assert [
        plan({}, MESH, axes=KV).sharding(("kv",), (size,)).spec for size in (64, 32)
    ] == [P("tensor"), P()]
    with pytest.raises(
        SpecError,
        match=(
            r"'kv' is made of units of 16, and `tensor` \(4\) may cut .* arrays"
            r" have 2\."
        ),
    ):
        sharding_plan.sharding((None, "kv"))
    assert plan({}, MeshSpec({"data": 8, "tensor": 1}), axes=KV).sharding(
        ("kv",)
    ).spec == P("tensor")


def test_a_sharding_says_what_it_dropped():
    axes = AxisRules([("batch", ("data", "tensor")), ("embed", "tensor")])
    sharding_plan = plan({}, MeshSpec({"data": 2, "tensor": 4}), axes=axes)
    sharding, decision = sharding_plan.sharding(("batch", "embed"), explain=True)
    assert sharding == sharding_plan.sharding(("batch", "embed"))
    assert sharding.spec == P(("data", "tensor"))
    assert [(why.dim, why.code) for why in decision.reasons] == [(1, Code.blocked)]
    _, decision = sharding_plan.sharding(("batch", None), (6, 3), explain=True)
    assert [(why.dim, why.code) for why in decision.reasons] == [(0, Code.indivisible)]


@pytest.mark.parametrize(
    "asked", [P(P.UNCONSTRAINED, "tensor"), ("any", "batch")], ids=str
)
def test_a_sharding_leaves_nothing_to_the_compiler(asked):
    free = AxisRules([("batch", "data"), ("any", P.UNCONSTRAINED)])
    sharding_plan = plan(
        TREE, MESH.build(jax.devices()), names={"w": ("batch", None)}, axes=free
    )
    for shape in (None, (8, 16)):
        with pytest.raises(
            SpecError, match="leaves dim 0 to the compiler .* write `None` there"
        ):
            sharding_plan.sharding(asked, shape)
    assert sfx.constrain(jnp.ones((8, 16)), asked, sharding_plan).shape == (8, 16)


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
    sharding_plan = plan(
        tree, MESH.build(jax.devices()), paths=PathRules([("a", P("data"))]), axes=AXES
    )
    replaced = sharding_plan.replace(where, target)
    assert replaced[path].spec == spec
    assert replaced[path].rule == "replaced by hand"
    assert all(
        replaced[other] == sharding_plan[other]
        for other in sharding_plan
        if where not in other
    )
    assert replaced.jax_mesh is sharding_plan.jax_mesh
    assert replaced.specs["f"] is None
    assert (
        ShardPlan.from_json(replaced.to_json(), like=tree).on(MESH.build(jax.devices()))
        == replaced
    )
    assert (
        replaced.replan(MeshSpec({"data": 1, "tensor": 4}))[path].rule
        == "replaced by hand"
    )


def test_a_replaced_spec_cuts_no_unit():
    mesh = MeshSpec({"data": 4, "tensor": 2})
    sharding_plan = plan(
        {"k": jnp.ones((32, 7))}, mesh, names={"k": ("kv", None)}, axes=KV
    )
    assert sharding_plan["k"].spec == P("tensor")
    replaced = sharding_plan.replace("k", P("data"))["k"]
    assert replaced.spec == P()
    assert replaced.reasons


# --- every mistake has its words


def named(names, axes: AxisRules | None = AXES, tree: Any = TREE, **keywords):
    return plan(tree, MESH, names=names, axes=axes, **keywords)


BARE_FIELD = inspect.unwrap(sfx.field)  # past the type checker of the tests
OTHER = ruled(P(), mesh=MeshSpec(MESH.shape, axis_types=AxisType.Explicit))
JOINED = ShardPlan.join(**{"a": ruled(P(), {"b/c": W}), "a/b": ruled(P(), {"c": W})})
UNITS = AxisRules(AXES.rules, units={"mpl": 4})
DEEP = {"a": {"w": jnp.ones((8, 16)), "v": [jnp.ones(3)]}}
TWICE = {"a": {"b": jnp.ones(8)}, "a/b": jnp.ones(8)}
FSDP = P(None, "data") | sfx.fsdp(("data", "tensor"))
AXIS = "'data' is a mesh axis: for mesh axes give PartitionSpecs by path"
RULES = r"the names \('data', 'tensor', \.\.\.\) need rules.* For mesh axes give Part"


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: sfx.resolve(("batch", ...), AXES), SpecError, "need an array's rank"),
        (
            lambda: MADE.sharding((..., "batch")),
            SpecError,
            "depends on the rank; pass `shape=`",
        ),
        (
            lambda: STRICT.sharding(P("data"), (7, 2)),
            SpecError,
            "`strict=True`, and .* 7 is not divisible",
        ),
        (
            lambda: MADE.sharding(ON.shardings["w"]),
            SpecError,
            r"pass `sharding.spec`, or use `reshard\(x, sharding\)`",
        ),
        (
            lambda: MADE.sharding(P("dta")),
            SpecError,
            r"the plan's mesh .* has no axis 'dta' \(did you mean 'data'\?\)",
        ),
        (
            lambda: ruled(P()).sharding(("batch",)),
            RuleError,
            "pass `axes|plan with `axes=AxisRules",
        ),
        (
            lambda: named(None, KV, {}).sharding(("kv",)),
            SpecError,
            r"no array .* has it. Say .*\(names, shape\)`",
        ),
        (
            lambda: STRICT.replace("v", P()),
            UnknownPathError,
            r"`replace\('v', ...\)`: no array of the plan has this",
        ),
        (
            lambda: STRICT.replace("w", P("dta")),
            SpecError,
            r"leaf `w`: .* no axis 'dta' \(did you mean 'data'\?\)",
        ),
        (
            lambda: STRICT.replace("w", ("mpl", None)),
            UnmatchedError,
            "`w`: no rule for the logical names `mpl` .dim 0",
        ),
        (
            lambda: STRICT.replace("w", P("data", "data")),
            RuleError,
            "uses mesh axis `data` twice; use it once",
        ),
        (
            lambda: STRICT.replace("w", FSDP),
            SpecError,
            "the plan is strict, and .* would be cut down",
        ),
        (
            lambda: named(NAMES, paths=PathRules([("w", P())])),
            RuleError,
            r"\(`w`\) goes to the names of the leaves",
        ),
        (
            lambda: named({"w": ("rows", None)}, AXES.with_alias("rows", of="btach")),
            UnmatchedError,
            "'rows'",
        ),
        (
            lambda: named(NAMES, UNITS),
            UnmatchedError,
            r"`units`: 'mpl' \(did you mean 'mlp'\?\)",
        ),
        (lambda: BARE_FIELD(names="mlp"), SpecError, "a string is one name"),
        (lambda: named(P("data", "tensor")), UnmatchedError, AXIS),
        (lambda: named({"w": P("data", "tensor")}, None), RuleError, RULES),
        (lambda: named(P("mpl")), UnmatchedError, r"names \('mpl', (\.\.\.|None)\)"),
        (
            lambda: named(("mlp", ...), None),
            RuleError,
            r"the names \('mlp', \.\.\.\) need rules",
        ),
        (lambda: named({"w": 3}), RuleError, "leaf `w`: `names` holds 3"),
        (lambda: ruled(("embed", None)), RuleError, "pass `axes=AxisRules"),
        (
            lambda: ruled(lambda *_: "data"),
            RuleError,
            r"paths\[0\] .* returned 'data'; it must return a PartitionS",
        ),
        (
            lambda: ruled(P(), mesh=MeshSpec({"data": -1})),
            MeshError,
            r"call `.fit\(device_count\)` first",
        ),
        (
            lambda: named({"a": {"w": None}}, tree=DEEP),
            RuleError,
            "at `a` it has a dict with the keys 'w', and the",
        ),
        (
            lambda: named([{}], tree=DEEP),
            RuleError,
            "no prefix .* root it has a list with the keys '0', and the tree",
        ),
        (
            lambda: ruled(P(), {"f": len}),
            LeafTypeError,
            "no arrays: it is of type dict, and its leaf `f` is",
        ),
        (
            lambda: ruled(P("data"), TWICE),
            RuleError,
            "two arrays of the tree have the path `a/b`",
        ),
        (
            lambda: ShardPlan.join(a=MADE, b=OTHER),
            PlanMismatchError,
            r"`a` and `b` differ in `mesh`.*AxisType.Explicit",
        ),
        (
            lambda: MADE.on(OTHER.mesh.build(jax.devices())),
            PlanMismatchError,
            "not for .*Explicit.* plan again",
        ),
        (lambda: MADE["ww"], UnknownPathError, r"no leaf `ww`; did you mean `w`\?"),
        (
            lambda: JOINED["a/b/c"],
            UnknownPathError,
            "several leaves have the path `a/b/c`",
        ),
        (
            lambda: ShardPlan.join(a=ON, b=MADE),
            PlanMismatchError,
            r"\(\[\[0, 1, .*, 7\]\] and None\).*`plan.off\(\)`",
        ),
    ],
)
def test_a_mistake_is_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_callable_that_fails_is_named_and_chained():
    rules = PathRules([("v", P()), ("w", lambda path, leaf: {"a": P()}[path])])
    with pytest.raises(
        RuleError, match=r"w is a callable that failed for the path 'w' .*KeyError: 'w'"
    ) as e:
        plan({"w": jnp.ones(8), "v": jnp.ones(8)}, MESH, paths=rules)
    assert isinstance(e.value.__cause__, KeyError)


# --- meshes that mix Auto and Explicit axes, or turn them around


MIXED = MeshSpec({"x": 4, "y": 2}, axis_types={"y": AxisType.Explicit}).build(
    jax.devices()
)


def test_a_move_on_a_mixed_mesh_leaves_no_auto_axis_behind():
    x = jax.device_put(np.arange(64.0).reshape(8, 8), NamedSharding(MIXED, P("x")))
    target = NamedSharding(MIXED, P(None, "y"))
    moved = jax.jit(lambda x: sfx.reshard(x, target))(x)
    assert moved.sharding.is_equivalent_to(target, 2)
    assert np.array_equal(moved, x)


def test_an_order_that_jax_would_turn_around_is_an_error():
    x = jax.device_put(np.arange(64.0).reshape(8, 8), NamedSharding(MIXED, P("x")))
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
    turned = MeshSpec({"tensor": 4, "data": 2}).build(jax.devices())
    x = jax.device_put(W, NamedSharding(turned, P("data")))
    with pytest.raises(
        PlanMismatchError,
        match="lies on a mesh tensor=4,data=2, but the plan is for data=2,tensor=4",
    ):
        jax.jit(lambda x: sfx.constrain(x, P("data"), ON))(x)
