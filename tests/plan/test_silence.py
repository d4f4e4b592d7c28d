"""Errors of `plan` for names of another rank, rules that never apply, and unknown names
and axes.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardfx as sfx
from shardfx import AxisRules, Code, MeshSpec, PathRules, ShardPlan, optional, plan
from shardfx.errors import (
    RuleError,
    SpecError,
    UnmatchedError,
)
from tests.plan.small_plans import (
    AXES,
    MADE,
    MESH,
    NAMES,
    ON,
    STRICT,
    TREE,
    W,
    ruled,
)


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
        rules = PathRules([("w", names)])
        sharding_plan = plan(tree, MESH, paths=rules, axes=AXES)
        by_path = sharding_plan["w"]
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
    spec = jax.jit(inner)(x).sharding.spec
    assert spec == P("data", "tensor")


def test_trailing_nones_beyond_the_rank():
    """A rule is for arrays of several ranks, so its surplus `None`s say nothing; a spec
    for one array fits its rank.
    """
    long = P("tensor", None, None)
    leaf = ruled(long)
    expected = sfx.correct(long, (8, 16), MESH).spec
    expected_spec = leaf.replace("w", long)["w"].spec
    assert leaf["w"].spec == expected == expected_spec == P("tensor")
    rules = PathRules([("other", P(None, "tensor", None))])
    followed = sfx.follow(lambda _: {"other": jnp.ones((5, 12))}, leaf, paths=rules)
    spec = followed["other"].spec
    assert spec == P(None, "tensor")
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
    sharding_plan = plan(MLP, MESH, paths=declared)
    expected = plan(MLP, MESH, paths=PathRules(rules), unused="allow")
    assert sharding_plan == expected


@pytest.mark.parametrize("rest", ["", ".", ".*", "^", ".+", "^.*$", "[^/]*"])
def test_the_last_rule_may_match_nothing_or_the_rest(rest):
    rules = PathRules([("mlp", P("data")), ("norm", P()), (rest, P())])
    plan(MLP, MESH, paths=rules)
    rules = PathRules([("mlp|norm", P()), ("act", P("data"))])
    plan(MLP, MESH, paths=rules)


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
    axes = AXES.extend([("mpl", None)])
    reasons = plan(tree, MESH, names=names, axes=axes)["w"].reasons
    assert reasons == ()
    axes = AXES.with_alias("mpl", of="mlp")
    spec = plan(tree, MESH, names=names, axes=axes)["w"].spec
    assert spec == P("tensor")


def test_a_name_with_rules_in_another_mode_is_known():
    modes = {"decode": [("cache", "data")], "train": []}
    rules = AxisRules([("mlp", "tensor")], modes=modes)
    for mode, spec in (("train", P(None, "tensor")), ("decode", P("data", "tensor"))):
        names = {"w": ("cache", "mlp")}
        sharding_plan = plan(TREE, MESH, names=names, axes=rules, mode=mode)["w"]
        actual = sharding_plan.spec
        assert actual == spec
    with pytest.raises(UnmatchedError, match="'chache'"):
        plan(TREE, MESH, names={"w": ("chache", "mlp")}, axes=rules, mode="train")


@pytest.mark.parametrize(
    "target",
    [P("tenser"), sfx.fsdp("tenser"), lambda path, leaf: P("tenser"), ("heads", None)],
)
def test_a_mesh_axis_that_no_mesh_is_known_to_have(target):
    if isinstance(target, tuple):
        rules = [("heads", "tenser")]
    else:
        rules = []
    axes = AXES.prepend(rules)
    with pytest.raises(
        RuleError, match=r"the mesh axis 'tenser' \(did you mean 'tensor'\?\)"
    ):
        ruled(target, axes=axes)
    assert ruled(target, axes=axes, unmatched="replicate").leaves


def test_a_mesh_axis_that_is_declared():
    other = AXES.prepend([("heads", "pipe")]).extend(mesh_axes=["pipe"])
    spec = plan(TREE, MESH, names=NAMES, axes=other)["w"].spec
    assert spec == P("tensor")
    path_rules = PathRules([("w", P("pipe"))], mesh_axes=["pipe"])
    sharding_plan = plan(TREE, MESH, paths=path_rules)
    (leaf,) = sharding_plan.leaves
    assert leaf.spec == P()
    assert leaf.reasons[0].code is Code.absent
    rules = AxisRules([("batch", ("pod", "data"))], mesh_axes=("pod",))
    names = {"w": ("batch", None)}
    sharding_plan = plan(TREE, MESH, names=names, axes=rules)
    cases = (("batch",), P(("pod", "data")))
    specs = {sharding_plan.sharding(asked).spec for asked in cases}
    assert specs == {P("data")}
    replaced = sharding_plan.replace("w", P("pod", "data"))["w"]
    spec = replaced.spec
    assert spec == P(None, "data")
    for lenient in (("bacth", "mlp"), P("tenser", "tensor")):
        spec = MADE.sharding(lenient, unmatched="replicate").spec
        assert spec == P(None, "tensor")


# --- strict plans


def test_a_plan_remembers_that_it_is_strict():
    assert STRICT.strict
    assert not MADE.strict
    assert STRICT != MADE
    assert "strict" not in MADE.to_json()
    assert sfx._plan.differences(STRICT, MADE) == (
        "strict is True in one plan, False in the other",
    )
    actual = sfx._plan.differences(plan({}, MESH, axes=AXES), MADE)
    assert actual == ("leaf `w` is only in the other plan",)
    restored = ShardPlan.from_json(STRICT.to_json())
    followed = sfx.follow(lambda x: x, STRICT)
    joined = ShardPlan.join(a=STRICT, b=MADE)
    mesh = MeshSpec({"data": 1, "tensor": 4})
    for sharding_plan in (
        *(
            restored,
            followed,
            STRICT.select("w"),
        ),
        *(
            STRICT.replace("w", P()),
            joined,
            STRICT.on(MESH.build(jax.devices())),
        ),
        STRICT.replan(mesh),
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
    spec = sfx.follow(init, STRICT, paths=rest)["history"].spec
    assert spec == P()
    rules = [("history", P("tensor"))]
    with pytest.raises(
        SpecError, match="leaf `history`, .* size 5 is not divisible by `tensor`"
    ):
        sfx.follow(init, STRICT, paths=PathRules(rules))
    # ZeRO takes what room there is.
    followed = sfx.follow(init, STRICT, over="data", paths=rest)["mu/w"]
    spec = followed.spec
    assert spec == P("tensor", "data")
