"""No layout goes wrong without a word: names of another rank, rules that never apply, unknown names and axes."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardfx as sfx
from shardfx import AxisRules, Code, MeshSpec, PathRules, ShardPlan, optional, plan
from shardfx.errors import RuleError, SpecError, UnmatchedError


MESH = MeshSpec({"data": 2, "tensor": 4})
AXES = AxisRules([("batch", "data"), ("mlp", "tensor"), ("embed", None), ("layers", None)])


class Dense(eqx.Module):
    w: jax.Array = sfx.field(names=("mlp", "embed"))

    def __init__(self, key: jax.Array):
        self.w = jax.random.normal(key, (256, 64))


class Bare(eqx.Module):
    layers: Dense


class Named(eqx.Module):
    layers: Dense = sfx.field(stacked=("layers",))


def stacked() -> Dense:
    return eqx.filter_eval_shape(eqx.filter_vmap(Dense), jax.random.split(jax.random.key(0), 8))


# --- one name per dimension


def test_names_of_a_field_do_not_shift_where_layers_are_stacked():
    with pytest.raises(SpecError) as error:
        plan(Bare(stacked()), MESH, axes=AXES)
    for part in ("`layers/w`", "('mlp', 'embed')", "(8, 256, 64)", "(..., 'mlp', 'embed')", "stacked=("):
        assert part in str(error.value)
    assert plan(Named(stacked()), MESH, axes=AXES)["layers/w"].spec == P(None, "tensor")


def test_dots_stand_for_the_dimensions_that_are_not_named():
    tree = {"w": jnp.ones((8, 4, 16))}
    for names, full in (
        ((..., "mlp"), (None, None, "mlp")),
        (("mlp", ...), ("mlp", None, None)),
        (("mlp", ..., "batch"), ("mlp", None, "batch")),
        (("mlp", None, None, ...), ("mlp", None, None)),
        ((...,), (None, None, None)),
        ((), ()),
    ):
        by_name = plan(tree, MESH, names={"w": names}, axes=AXES)
        by_path = plan(tree, MESH, paths=PathRules([("w", names)]), axes=AXES)
        assert by_name["w"].names == by_path["w"].names == full
        assert by_name["w"].spec == by_path["w"].spec == sfx.resolve(full, AXES).spec
        assert ShardPlan.from_json(by_name.to_json()) == by_name


def test_dots_and_empty_names_below_stacked_ones():
    class Norm(eqx.Module):
        scale: jax.Array = sfx.field(names=())
        bias: jax.Array = sfx.field(names=(..., "mlp"))

    class Model(eqx.Module):
        norm: Norm = sfx.field(stacked=("batch",))

    made = plan(Model(Norm(jnp.ones((8, 16)), jnp.ones((8, 4, 16)))), MESH, axes=AXES)
    assert made["norm/scale"].spec == P("data") and made["norm/bias"].spec == P("data", None, "tensor")


@pytest.mark.parametrize("names", [("mlp",), ("mlp", None, None), ("mlp", None, ..., None), (..., "mlp", ...)])
def test_names_of_another_rank_are_an_error_at_every_entry(names):
    tree = {"w": jnp.ones((8, 16))}
    made = plan(tree, MESH, names={"w": ("mlp", None)}, axes=AXES)
    for attempt in (
        lambda: plan(tree, MESH, names={"w": names}, axes=AXES),
        lambda: plan(tree, MESH, paths=PathRules([("w", names)]), axes=AXES),
        lambda: made.sharding(names, (8, 16)),
        lambda: made.replace("w", names),
        lambda: sfx.constrain(tree["w"], names, made),
        lambda: jax.eval_shape(lambda x: sfx.constrain(x, names, made), tree["w"]),
    ):
        with pytest.raises(
            SpecError, match=r"for an array of rank 2, shape \(8, 16\)|it can stand for dimensions in one"
        ):
            attempt()


def test_a_partition_spec_says_nothing_beyond_its_end():
    tree = {"w": jnp.ones((8, 16)), "v": jnp.ones((8, 16))}
    assert plan(tree, MESH, paths=PathRules([(".", P("data"))]))["w"].spec == P("data")
    made = plan(tree, MESH, names={"w": P("mlp"), "v": P()}, axes=AXES)
    assert made["w"].spec == P("tensor") and made["v"].spec == P()


def test_resolve_keeps_the_reading_of_flax():
    assert sfx.resolve(("batch",), AXES).spec == P("data")
    with pytest.raises(SpecError, match="need an array's rank"):
        sfx.resolve(("batch", ...), AXES)


def test_the_error_in_vmap_says_what_works_and_it_does():
    mesh = MESH.build(jax.devices())
    made = plan({"w": jnp.ones((8, 16))}, mesh, names={"w": ("mlp", None)}, axes=AXES)
    x = jnp.ones((4, 8, 16))
    with pytest.raises(SpecError, match=r"Inside `jax.vmap` .* `jax.vmap\(..., spmd_axis_name=...\)`"):
        jax.vmap(lambda x: sfx.constrain(x, ("batch", "mlp", None), made))(x)
    inner = jax.vmap(lambda x: sfx.constrain(x, ("mlp", None), made), spmd_axis_name="data")
    assert jax.jit(inner)(x).sharding.spec == P("data", "tensor")


# --- rules that never apply


TREE = {"mlp": {"wi": jnp.ones((8, 8)), "wo": jnp.ones((8, 8))}, "norm": jnp.ones(8), "act": jnp.tanh}


@pytest.mark.parametrize(
    "rules, message",
    [
        (
            [("mlp", P("data")), ("wi", P("tensor")), ("norm", P())],
            r"rule 1, the regex 'wi', is shadowed: all that it matches \(`mlp/wi`\) goes to rule 0 \('mlp'\)\.",
        ),
        (
            [("wi", P("data")), ("wo", P("data")), ("mlp", P("tensor")), ("norm", P())],
            r"rule 2, .* \(`mlp/wi` and 1 more\) goes to rule 0 \('wi'\) and rule 1 \('wo'\)\.",
        ),
        (
            [(".*", P()), ("norm", P()), ("nrm", P())],
            r"(?s)rule 1, .* rule 0 \('\.\*'\)\.\n  rule 2, .* matches no path",
        ),
    ],
)
def test_rules_that_never_apply_are_named_with_the_one_that_shadows_them(rules, message):
    for unmatched in ("raise", "replicate"):
        with pytest.raises(RuleError, match=message):
            plan(TREE, MESH, paths=PathRules(rules), unmatched=unmatched)
    plan(TREE, MESH, paths=PathRules(rules), unused="allow")
    plan(TREE, MESH, paths=PathRules([(regex, optional(target)) for regex, target in rules]))


def test_rules_shadowed_by_names():
    tree = {"w": jnp.ones((8, 8)), "b": jnp.ones(8)}
    rules = PathRules([("w", P("data")), ("b", P("data"))])
    with pytest.raises(RuleError, match=r"rule 0, .* \(`w`\) goes to the names of the leaves"):
        plan(tree, MESH, paths=rules, names={"w": ("mlp", None), "b": None}, axes=AXES)


@pytest.mark.parametrize("rest", ["", ".", ".*", "^", ".+", "^.*$", "[^/]*"])
def test_the_last_rule_may_be_for_the_rest_and_there_may_be_none(rest):
    plan(TREE, MESH, paths=PathRules([("mlp", P("data")), ("norm", P()), (rest, P())]))


def test_a_rule_that_matches_only_what_is_no_array_is_left_alone():
    plan(TREE, MESH, paths=PathRules([("mlp|norm", P()), ("act", P("data"))]))


def test_optional_changes_nothing_else():
    target = P(None, "data") | sfx.fsdp("tensor")
    tree = {"w": jnp.ones((8, 8))}
    one, two = (plan(tree, MESH, paths=PathRules([("w", what)])) for what in (target, optional(target)))
    assert one == two and optional(optional(P())) == optional(P())
    called = PathRules([("w", optional(lambda path, leaf: P(path[0] and "data")))])
    assert plan(tree, MESH, paths=called)["w"].spec == P("data")
    with pytest.raises(RuleError, match="has the target 'data'"):
        PathRules([("w", optional("data"))])


def test_memory_kinds_that_never_apply():
    kinds = [("mlp", "pinned_host"), ("wi", "device")]
    rules = PathRules([("", P())])
    with pytest.raises(RuleError, match=r"`memory_kinds` entry 1, the regex 'wi', is shadowed: .* rule 0 \('mlp'\)"):
        plan(TREE, MESH, paths=rules, memory_kinds=kinds)
    made = plan(TREE, MESH, paths=rules, memory_kinds=kinds, unused="allow")
    assert made["mlp/wi"].memory_kind == "pinned_host"


# --- names and axes that nobody knows


def test_a_name_that_no_rule_is_about():
    tree = {"w": jnp.ones((8, 16)), "b": jnp.ones(8)}
    names = {"w": ("mpl", None), "b": ("embed",)}
    with pytest.raises(UnmatchedError, match=r"(?s)leaf `w`.*'mpl' \(did you mean 'mlp'\?\)") as error:
        plan(tree, MESH, names=names, axes=AXES)
    assert "`b`" not in str(error.value)
    made = plan(tree, MESH, names=names, axes=AXES, unmatched="replicate")
    assert made["w"].spec == P() and made["w"].reasons[0].code is sfx.Code.unmatched
    assert plan(tree, MESH, names=names, axes=AXES.extend([("mpl", None)]))["w"].reasons == ()
    assert plan(tree, MESH, names=names, axes=AXES.with_alias("mpl", of="mlp"))["w"].spec == P("tensor")


def test_a_name_that_another_mode_has_rules_for_is_no_typing_error():
    rules = AxisRules([("mlp", "tensor")], modes={"decode": [("cache", "data")], "train": []})
    tree = {"w": jnp.ones((8, 16))}
    made = plan(tree, MESH, names={"w": ("cache", "mlp")}, axes=rules, mode="train")
    assert made["w"].spec == P(None, "tensor")
    with pytest.raises(UnmatchedError, match="'chache'"):
        plan(tree, MESH, names={"w": ("chache", "mlp")}, axes=rules, mode="train")


def test_an_alias_of_a_name_without_rules_is_as_unknown_as_that():
    rules = AXES.with_alias("rows", of="btach")
    with pytest.raises(UnmatchedError, match="'rows'"):
        plan({"w": jnp.ones(8)}, MESH, names={"w": ("rows",)}, axes=rules)


def test_a_mesh_axis_that_no_mesh_is_known_to_have():
    tree = {"w": jnp.ones((8, 16))}
    wrong = AXES.prepend([("heads", "tenser")])
    attempts = [
        lambda **kw: plan(tree, MESH, names={"w": ("mlp", None)}, axes=wrong, **kw),
        lambda **kw: plan(tree, MESH, paths=PathRules([("w", P("tenser"))]), **kw),
        lambda **kw: plan(tree, MESH, paths=PathRules([("w", sfx.fsdp("tenser"))]), **kw),
        lambda **kw: plan(tree, MESH, paths=PathRules([("w", lambda path, leaf: P("tenser"))]), **kw),
    ]
    for attempt in attempts:
        with pytest.raises(RuleError, match=r"the mesh axis 'tenser' \(did you mean 'tensor'\?\)"):
            attempt()
        assert attempt(unmatched="replicate").leaves
    other = AXES.prepend([("heads", "pipe")]).extend(axes=["pipe"])
    assert plan(tree, MESH, names={"w": ("mlp", None)}, axes=other)["w"].spec == P("tensor")
    (leaf,) = plan(tree, MESH, paths=PathRules([("w", P("pipe"))], axes=["pipe"])).leaves
    assert leaf.spec == P() and leaf.reasons[0].code is sfx.Code.absent


def test_declared_axes_survive_every_method_and_json():
    rules = AxisRules([("a", "x")], axes=["pod"])
    for made in (
        rules.extend([("b", "y")]),
        rules.prepend([("b", "y")]),
        rules.without("a"),
        rules.with_alias("c", of="a"),
        rules.merge(AxisRules([("b", "y")])),
        AxisRules([("b", "y")]).merge(rules),
    ):
        assert made.axes == ("pod",)
    assert PathRules([("w", P())], axes=("pod",)).prepend([("b", P())]).extend([("c", P())]).axes == ("pod",)
    made = plan({"w": jnp.ones(8)}, MESH, paths=PathRules([("w", P())]), axes=AXES.extend(axes=["pod"]))
    back = ShardPlan.from_json(made.to_json())
    assert back == made and back.axes is not None and back.axes.axes == ("pod",)
    for wrong in ([""], [3], [None]):
        with pytest.raises(RuleError, match="it declares mesh axes by their names"):
            AxisRules(axes=wrong)


def test_an_alias_needs_a_name():
    with pytest.raises(RuleError, match="the alias of 'mlp' has an empty name"):
        AXES.with_alias("", of="mlp")


# --- strict plans


def test_a_plan_remembers_that_it_is_strict():
    tree = {"w": jnp.ones((8, 16))}
    loose = plan(tree, MESH, names={"w": ("mlp", None)}, axes=AXES)
    strict = plan(tree, MESH, names={"w": ("mlp", None)}, axes=AXES, strict=True)
    assert strict.strict and not loose.strict and strict != loose and "strict" not in loose.to_json()
    back = ShardPlan.from_json(strict.to_json())
    assert back == strict and back.strict
    assert sfx._plan.differences(strict, loose) == ("strict is True in one plan, False in the other",)
    derived = [
        sfx.follow(lambda x: x, strict),
        strict.select("w"),
        strict.replace("w", P()),
        ShardPlan.join(a=strict, b=loose),
        sfx.auto.replan(strict, MeshSpec({"data": 1, "tensor": 4})),
        strict.on(MESH.build(jax.devices())),
    ]
    assert all(made.strict for made in derived)


# --- one call for a batch, and a spec by hand


def test_sharding_is_what_constrain_gives():
    mesh = MESH.build(jax.devices())
    made = plan({"w": jnp.ones((8, 16))}, mesh, names={"w": ("mlp", None)}, axes=AXES)
    for shape in ((8, 16), (6, 4), (7, 3)):
        for asked in (("batch", "mlp"), (..., "batch"), (), P("data", "tensor")):
            sharding = made.sharding(asked, shape)
            x = sfx.constrain(jnp.ones(shape), asked, made)
            assert sharding.is_equivalent_to(x.sharding, 2) and sharding.mesh is mesh
            jax.device_put(jnp.ones(shape), sharding)
    assert made.sharding(("batch",)).spec == made.sharding(("batch", ...)).spec == P("data")
    abstract = plan({"w": jnp.ones((8, 16))}, MESH, names={"w": ("mlp", None)}, axes=AXES)
    assert abstract.sharding(("batch",)).mesh == MESH.abstract()


def test_sharding_leaves_out_axes_of_other_meshes():
    rules = AxisRules([("batch", ("pod", "data"))], axes=("pod",))
    made = plan({"w": jnp.ones(8)}, MESH, names={"w": ("batch",)}, axes=rules)
    assert made.sharding(("batch",)).spec == P("data")
    heads = AxisRules([("heads", "tensor")], units={"heads": 16})
    assert plan({}, MESH, axes=heads).sharding(("heads",), (64,)).spec == P("tensor")
    assert plan({}, MESH, axes=heads).sharding(("heads",), (32,)).spec == P()


def test_a_sharding_without_a_shape_cuts_no_head():
    rules = AxisRules([("heads", "tensor"), ("kv", "tensor")], units={"heads": 16, "kv": 16})
    tree = {"q": jnp.ones((8, 128)), "k": jnp.ones((8, 32))}
    made = plan(tree, MESH, names={"q": (None, "heads"), "k": (None, "kv")}, axes=rules)
    assert made.sharding((None, "heads")).spec == P(None, "tensor")
    with pytest.raises(SpecError, match=r"'kv' is made of units of 16, and `tensor` \(4\) may cut .* arrays have 2\."):
        made.sharding((None, "kv"))
    with pytest.raises(SpecError, match=r"no array of the plan has it. Say .*`plan.sharding\(names, shape\)`"):
        plan({}, MESH, axes=rules).sharding(("heads",))
    assert made.sharding((None, "kv"), (8, 32)).spec == P()
    assert plan({}, MeshSpec({"data": 8, "tensor": 1}), axes=rules).sharding(("kv",)).spec == P("tensor")


def test_sharding_says_what_is_wrong():
    made = plan({"w": jnp.ones((8, 16))}, MESH, names={"w": ("mlp", None)}, axes=AXES)
    with pytest.raises(SpecError, match="depends on the rank; pass `shape=`"):
        made.sharding((..., "batch"))
    with pytest.raises(UnmatchedError, match=r"'bacth' \(did you mean 'batch'\?\)"):
        made.sharding(("bacth",))
    assert made.sharding(("bacth",), unmatched="replicate").spec == P()
    with pytest.raises(SpecError, match="`strict=True`, and .* size 7 is not divisible"):
        made.sharding(("batch", None), (7, 2), strict=True)
    with pytest.raises(SpecError, match=r"the plan's mesh .* has no axis 'dta' \(did you mean 'data'\?\)"):
        made.sharding(P("dta"))
    with pytest.raises(RuleError, match="pass `axes|plan with `axes=AxisRules"):
        plan({"w": jnp.ones(8)}, MESH, paths=PathRules([("w", P())])).sharding(("batch",))


def test_replace_by_path_or_regex():
    tree = {"a": {"w": jnp.ones((8, 16)), "w2": jnp.ones((8, 16))}, "s": jnp.ones(()), "f": jnp.tanh}
    made = plan(tree, MESH.build(jax.devices()), paths=PathRules([("a", P("data"))]), axes=AXES)
    one = made.replace("a/w", P(None, "tensor"))
    assert (
        one["a/w"].spec == P(None, "tensor") and one["a/w"].rule == "replaced by hand" and one["a/w2"] == made["a/w2"]
    )
    assert one.jax_mesh is made.jax_mesh and one.specs["f"] is None and made["a/w"].spec == P("data")
    both = made.replace("w", ("mlp", ...))
    assert {both[path].spec for path in ("a/w", "a/w2")} == {P("tensor")} and both["a/w"].names == ("mlp", None)
    assert made.replace("w2", sfx.fsdp(("data", "tensor")))["a/w2"].spec == P(None, ("data", "tensor"))
    assert made.replace("w2", lambda path, leaf: P(None, "data"))["a/w2"].spec == P(None, "data")
    assert made.replace("s", P())["s"].spec == P()
    cut = made.replace("a/w", P(None, "data") | sfx.fsdp(("data", "tensor")))
    assert cut["a/w"].spec == P("tensor", "data") and cut["a/w"].reasons[0].code is sfx.Code.duplicate
    assert ShardPlan.from_json(cut.to_json(), like=tree).on(MESH.build(jax.devices())) == cut
    assert sfx.auto.replan(one, MeshSpec({"data": 2, "tensor": 2}))["a/w"].spec == P(None, "tensor")


def test_replace_says_what_is_wrong():
    made = plan({"w": jnp.ones((8, 16))}, MESH, names={"w": ("mlp", None)}, axes=AXES, strict=True)
    with pytest.raises(sfx.errors.UnknownPathError, match=r"`replace\('v', ...\)`: no array of the plan has this path"):
        made.replace("v", P())
    with pytest.raises(RuleError, match="the path of no array, and no regex that compiles"):
        made.replace("(", P())
    with pytest.raises(SpecError, match=r"leaf `w`: the plan's mesh .* has no axis 'dta' \(did you mean 'data'\?\)"):
        made.replace("w", P("dta"))
    with pytest.raises(UnmatchedError, match="leaf `w`: no rule is about the logical name 'mpl'"):
        made.replace("w", ("mpl", None))
    with pytest.raises(SpecError, match="the plan is strict, and .* would be cut down"):
        made.replace("w", P(None, "data") | sfx.fsdp(("data", "tensor")))
    with pytest.raises(RuleError, match="uses mesh axis `data` twice; use it once"):
        made.replace("w", P("data", "data"))
    with pytest.raises(SpecError, match="has 3 entries, but shape"):
        made.replace("w", P("data", None, "tensor"))


# --- what a second stranger found


def test_a_sharding_says_what_it_dropped():
    axes = AxisRules([("batch", ("data", "tensor")), ("embed", "tensor")])
    made = plan({}, MeshSpec({"data": 2, "tensor": 4}), axes=axes)
    sharding, decision = made.sharding(("batch", "embed"), explain=True)
    assert sharding == made.sharding(("batch", "embed")) and sharding.spec == P(("data", "tensor"))
    assert [(why.dim, why.code) for why in decision.reasons] == [(1, Code.blocked)]
    _, decision = made.sharding(("batch", None), (6, 3), explain=True)
    assert [(why.dim, why.code) for why in decision.reasons] == [(0, Code.indivisible)]


def test_a_sharding_leaves_nothing_to_the_compiler():
    free = AxisRules([("batch", "data"), ("any", P.UNCONSTRAINED)])
    made = plan({"w": jnp.ones((8, 16))}, MESH.build(jax.devices()), names={"w": ("batch", None)}, axes=free)
    for asked in (P(P.UNCONSTRAINED, "tensor"), ("any", "batch")):
        for shape in (None, (8, 16)):
            with pytest.raises(SpecError, match="leaves dim 0 to the compiler .* write `None` there"):
                made.sharding(asked, shape)
        assert sfx.constrain(jnp.ones((8, 16)), asked, made).shape == (8, 16)


def test_follow_is_as_strict_as_its_plan():
    tree = {"w": jnp.ones((8, 16))}
    strict, loose = (plan(tree, MESH, names={"w": ("mlp", None)}, axes=AXES, strict=strict) for strict in (True, False))
    init = lambda params: {"mu": params, "history": jnp.zeros((5, 7)), "one": jnp.zeros((1, 1)), "count": jnp.zeros(())}
    with pytest.raises(SpecError, match=r"(?s)leaf `history`, shape \(5, 7\): no rule covers .*\Z") as error:
        sfx.follow(init, strict)
    assert "`one`" not in str(error.value) and "`count`" not in str(error.value)
    assert sfx.follow(init, loose)["history"].spec == P()
    rest = PathRules([(".*", sfx.replicate)])
    assert sfx.follow(init, strict, paths=rest)["history"].spec == P()
    with pytest.raises(SpecError, match="leaf `history`, .* size 5 is not divisible by `tensor`"):
        sfx.follow(init, strict, paths=PathRules([("history", P("tensor"))]))
    # ZeRO takes what room there is.
    assert sfx.follow(init, strict, over="data", paths=rest)["mu/w"].spec == P("tensor", "data")


def test_trailing_nones_beyond_the_rank():
    """A rule is for arrays of several ranks, so its surplus `None`s say nothing; a spec for one array fits its rank."""
    tree, long = {"w": jnp.ones((8, 16))}, P("tensor", None, None)
    made = plan(tree, MESH.build(jax.devices()), paths=PathRules([("w", long)]))
    assert made["w"].spec == sfx.correct(long, (8, 16), MESH).spec == made.replace("w", long)["w"].spec == P("tensor")
    rules = PathRules([("other", P(None, "tensor", None))])
    assert sfx.follow(lambda _: {"other": jnp.ones((5, 12))}, made, paths=rules)["other"].spec == P(None, "tensor")
    for attempt in (
        lambda: made.sharding(long, (8, 16)),
        lambda: sfx.constrain(tree["w"], long, made),
        lambda: plan(tree, MESH, names={"w": P("mlp", None, None)}, axes=AXES),
    ):
        with pytest.raises(SpecError, match="has 3 entries, but shape|3 logical names"):
            attempt()


def test_mesh_axes_in_the_place_of_names():
    tree = {"a.b": jnp.ones((8, 16))}
    for names in (P("data", "tensor"), {"a.b": P("data", "tensor")}):
        with pytest.raises(UnmatchedError, match=r"'data' is a mesh axis: for mesh axes give PartitionSpecs by path"):
            plan(tree, MESH, names=names, axes=AXES)
        with pytest.raises(
            RuleError, match=r"the names \('data', 'tensor', \.\.\.\) need rules.* For mesh axes give Part"
        ):
            plan(tree, MESH, names=names)
    with pytest.raises(UnmatchedError, match=r"names \('mpl', \.\.\.\): 'mpl'|names \('mpl', None\)"):
        plan(tree, MESH, names=P("mpl"), axes=AXES)
    with pytest.raises(RuleError, match=r"the names \('mlp', \.\.\.\) need rules"):
        plan(tree, MESH, names=("mlp", ...))


def test_the_advice_for_fields_is_for_fields():
    tree = {"w": jnp.ones((2, 8, 16))}
    with pytest.raises(SpecError, match=r"Write `\(\.\.\., 'mlp', None\)` .* `\('mlp', None, \.\.\.\)`") as error:
        plan(tree, MESH, names={"w": ("mlp", None)}, axes=AXES)
    assert "field(" not in str(error.value)


def test_names_that_are_no_prefix_are_shown_by_path_and_without_values():
    tree = {"a": {"w": jnp.ones((8, 16)), "v": [jnp.ones(3)]}}
    with pytest.raises(RuleError, match="at `a` it has a dict with the keys 'w', and the tree has a dict with the key"):
        plan(tree, MESH, names={"a": {"w": ("mlp", None)}}, axes=AXES)
    with pytest.raises(RuleError, match="at `a/v` it has list of 2, and the tree has list of 1"):
        plan(tree, MESH, names={"a": {"w": ("mlp", None), "v": [("mlp",), {}]}}, axes=AXES)
    with pytest.raises(RuleError, match="at its root it has list of 1, and the tree has a dict with the keys 'a'") as e:
        plan(tree, MESH, names=[{}], axes=AXES)
    assert "Array" not in str(e.value)


def test_join_shows_what_differs():
    tree = {"w": jnp.ones((8, 16))}
    explicit = MeshSpec(MESH.shape, axis_types=jax.sharding.AxisType.Explicit)
    one, two = (plan(tree, mesh, paths=PathRules([("w", P())])) for mesh in (MESH, explicit))
    with pytest.raises(
        sfx.errors.PlanMismatchError, match=r"of axis types \(Auto, Auto\) and .* of \(Explicit, Explicit\)"
    ):
        ShardPlan.join(a=one, b=two)
    with pytest.raises(
        sfx.errors.PlanMismatchError, match=r"in their devices \(\[0, 1, .*, 7\] and none\).*`plan.off\(\)`"
    ):
        ShardPlan.join(a=one.on(MESH.build(jax.devices())), b=one)


def test_a_callable_that_fails_is_named_and_chained():
    rules = PathRules([("v", P()), ("w", lambda path, leaf: {"a": P()}[path])])
    with pytest.raises(RuleError, match=r"w is a callable that failed for the path 'w' .*KeyError: 'w'") as e:
        plan({"w": jnp.ones(8), "v": jnp.ones(8)}, MESH, paths=rules)
    assert isinstance(e.value.__cause__, KeyError)


def test_two_arrays_with_one_path():
    tree = {"a": {"b": jnp.ones(8)}, "a/b": jnp.ones(8)}
    with pytest.raises(RuleError, match="two arrays of the tree have the path `a/b`"):
        plan(tree, MESH, paths=PathRules([("a", P("data"))]))
    made = plan({"w": jnp.ones(8)}, MESH, paths=PathRules([("w", P("data"))]))
    with pytest.raises(RuleError, match="two arrays of the tree have the path `a/b`"):
        sfx.follow(lambda _: tree, made)
    assert len(plan({"a": {"b": jnp.tanh}, "a/b": jnp.ones(8)}, MESH, paths=PathRules([("a", P("data"))]))) == 1
