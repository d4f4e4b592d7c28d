import inspect

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import PartitionSpec as P

from shardfx import AxisRules, Code, atomic, resolve
from shardfx._ground.spec import canonical
from shardfx._rules.resolution import units_of
from shardfx.errors import RuleError, SpecError, UnmatchedError
from shardfx.interop.eformer import axis_names_of


U = P.UNCONSTRAINED
NAMES = st.sampled_from(["a", "b", "c", "d", "e", ""])
AXES = st.sampled_from(["x", "y", "z", "w"])
TARGETS = st.one_of(AXES, st.none(), st.just(U), st.lists(AXES, min_size=2, max_size=3, unique=True).map(tuple))
RULES = st.lists(st.tuples(NAMES, TARGETS), max_size=8)
ENTRIES = st.lists(NAMES, unique=True, max_size=5).flatmap(
    lambda names: st.permutations([*names, None, None, U][: len(names) + 3])
)
POLICIES = st.sampled_from(["replicate", "keep", "unconstrained"])


def near(x, y):
    return canonical(x) == canonical(y)


# --- resolve: against the algorithm's origin, and its laws


@given(RULES, ENTRIES)
@settings(deadline=None, max_examples=300)
def test_resolve_is_linens_algorithm(rules, entries):
    from flax.linen.spmd import logical_to_mesh_axes

    assert near(resolve(entries, AxisRules(rules)).spec, logical_to_mesh_axes(tuple(entries), tuple(rules)))


@st.composite
def shuffled_names(draw):
    """Entries with tuples and aliases among them, the same entries in another order, and the order."""
    names = draw(st.lists(st.sampled_from(["a", "b", "c", "d", "a2", "a3", "b2"]), unique=True, min_size=1))
    cuts = draw(st.lists(st.booleans(), min_size=len(names), max_size=len(names)))
    entries: list = []
    for name, joined in zip(names, cuts, strict=True):
        if joined and entries:
            entries[-1] = (*entries[-1], name) if isinstance(entries[-1], tuple) else (entries[-1], name)
        else:
            entries.append(name)
    order = draw(st.permutations(range(len(entries))))
    return entries, [entries[i] for i in order], order


ALIASES = st.permutations([("a2", "a"), ("a3", "a2"), ("b2", "b")])


@given(RULES, ALIASES, shuffled_names(), POLICIES)
@settings(deadline=None, max_examples=300)
def test_resolve_does_not_depend_on_the_order_of_dimensions(pairs, aliases, names, unmatched):
    rules = AxisRules(pairs, aliases=aliases)
    entries, moved, order = names
    one, two = (resolve(given, rules, unmatched=unmatched) for given in (entries, moved))
    padded = [*one.spec, *[None] * (len(entries) - len(one.spec))]
    assert near(two.spec, P(*[padded[i] for i in order]))
    place = {old: new for new, old in enumerate(order)}
    assert {(why.code, place[why.dim or 0], why.axes) for why in one.reasons} == {
        (why.code, why.dim, why.axes) for why in two.reasons
    }


@given(RULES, shuffled_names(), POLICIES)
@settings(deadline=None, max_examples=200)
def test_resolve_never_uses_an_axis_twice(pairs, names, unmatched):
    spec = resolve(names[0], AxisRules(pairs), unmatched=unmatched).spec
    axes = [axis for entry in spec if entry is not U for axis in (entry if isinstance(entry, tuple) else (entry,))]
    used = [axis for axis in axes if axis is not None]
    assert len(used) == len(set(used))


@given(RULES, ENTRIES)
@settings(deadline=None, max_examples=200)
def test_resolve_gives_a_reason_for_exactly_the_names_without_a_target(pairs, entries):
    rules = AxisRules(pairs)
    decision = resolve(entries, rules)
    known = {name for name, _ in pairs}
    spec = [*decision.spec, *[None] * (len(entries) - len(decision.spec))]
    for dim, entry in enumerate(entries):
        found = [why for why in decision.reasons if why.dim == dim]
        if entry is None or entry is U:
            assert not found
        elif entry not in known:
            assert [(why.code, why.axes) for why in found] == [(Code.unmatched, (entry,))]
        elif spec[dim] is not None:
            assert not found
        else:
            # A first rule that says `None` was obeyed; every other way to end with nothing is "blocked".
            first = next(target for name, target in rules.rules if name == entry)
            assert bool(found) != (first is None)
            assert all(why.code is Code.blocked for why in found)


def test_resolve_returns_the_canonical_spec():
    rules = AxisRules({"a": ["x"], "b": (), "c": None})
    assert resolve(("a", "b", "c"), rules).spec == P("x")
    assert resolve((), rules).spec == P()
    assert resolve(P("a", "b"), rules).spec == P("x")


# --- resolve: entries


def test_a_tuple_of_names_joins_their_axes_in_order():
    rules = AxisRules([("a", ("x", "y")), ("b", "z"), ("c", "x")])
    assert resolve((("b", "a"), "c"), rules).spec == P(("z", "x", "y"))
    assert resolve((("b", None),), rules).spec == P("z")
    assert resolve(((),), rules).spec == P()


def test_a_member_of_a_tuple_may_be_blocked_alone():
    decision = resolve((("a", "b"),), AxisRules([("a", "x"), ("b", "x")]))
    assert decision.spec == P("x")
    (why,) = decision.reasons
    assert (why.code, why.dim, why.axes) == (Code.blocked, 0, ("x",))
    assert "`x` is used by `a` on dim 0" in why.message


def test_unconstrained_yields_to_an_axis_on_the_same_dimension():
    rules = AxisRules([("a", U), ("b", "x")])
    assert resolve((("a", "b"),), rules).spec == P("x")
    assert resolve((("a",), U, "b"), rules).spec == P(U, U, "x")


def test_a_fallback_to_none_still_tells_what_was_blocked():
    decision = resolve(("a", "b"), AxisRules([("a", "x"), ("b", ("x", "y")), ("b", None), ("b", "z")]))
    assert decision.spec == P("x")
    assert [(why.code, why.dim, why.axes) for why in decision.reasons] == [(Code.blocked, 1, ("x", "y"))]


def test_any_string_is_a_name():
    rules = AxisRules({"": "x", "None": "y", "UNCONSTRAINED": "z", "('a', 'b')": "w"})
    assert resolve(("", None, U, ("a", "b")), rules).spec == P("x", None, U)


def test_atomic_entries_resolve_as_their_name():
    assert resolve((atomic("a", 4), (atomic("b", 2), "c")), AxisRules({"a": "x", "c": "y"})).spec == P("x", "y")


@pytest.mark.parametrize(
    "entries", [[1], [b"a"], [("a", ("b",))], [("a", ["b"])], [{"a": "b"}], [("a", U)], [atomic(("a",), (2,))]]
)
def test_other_entries_are_refused(entries):
    with pytest.raises(SpecError, match="is no entry of an array's names; use a logical name"):
        resolve(entries, AxisRules({"a": "x"}))


def test_a_bare_string_is_not_taken_for_its_characters():
    with pytest.raises(SpecError, match=r"not 'batch'; write `\('batch',\)`"):
        resolve("batch", AxisRules({"b": "x"}))


def test_a_name_twice_is_refused():
    rules = AxisRules({"a": "x"})
    for entries in (("a", "a"), ("a", None, ("b", "a")), ("a", atomic("a", 2))):
        with pytest.raises(SpecError, match="logical name `a` occurs twice in"):
            resolve(entries, rules)


# --- resolve: policies for names without a rule


def test_kept_names_are_mesh_axes_that_block_rules():
    rules = AxisRules({"a": "x"})
    assert resolve(("x", "y"), rules, unmatched="keep").spec == P("x", "y")
    decision = resolve(("a", "x"), rules, unmatched="keep")
    assert decision.spec == P(None, "x")
    assert [(why.code, why.dim) for why in decision.reasons] == [(Code.blocked, 0)]
    assert resolve((("x", "y"), "a"), rules, unmatched="keep").spec == P(("x", "y"))


def test_a_kept_alias_stands_for_its_axis():
    rules = AxisRules(aliases={"seq": "sp", "len": "seq"})
    assert resolve(("seq",), rules, unmatched="keep").spec == P("sp")
    assert resolve(("len", "seq"), rules, unmatched="keep").spec == P(None, "sp")


def test_unconstrained_policy_concerns_names_without_a_rule_alone():
    rules = AxisRules([("a", "x"), ("b", "x"), ("c", None)])
    assert resolve(("a", "b", "c", "d"), rules, unmatched="unconstrained").spec == P("x", None, None, U)
    assert resolve((("a", "d"),), rules, unmatched="unconstrained").spec == P("x")


def test_raise_names_every_orphan_and_the_nearest_rules():
    rules = AxisRules({"batch": "x", "embed": None})
    assert resolve(("batch", "embed"), rules, unmatched="raise").spec == P("x")
    with pytest.raises(UnmatchedError) as error:
        resolve(("bach", "batch", "zz"), rules, unmatched="raise")
    text = str(error.value)
    assert "`bach` (dim 0) (did you mean 'batch'?), `zz` (dim 2)." in text
    assert "rules.extend([('bach', None)])" in text


def test_blocked_is_not_unmatched():
    assert resolve(("a", "b"), AxisRules([("a", "x"), ("b", "x")]), unmatched="raise").spec == P("x")


def test_unknown_policy():
    with pytest.raises(RuleError, match='use "replicate", "keep", "unconstrained" or "raise"'):
        # Past the type checker of the tests.
        inspect.unwrap(resolve)(("a",), AxisRules(), unmatched="ignore")  # pyright: ignore[reportArgumentType]


# --- modes


def test_modes_come_before_the_base_rules():
    rules = AxisRules(
        [("a", "x"), ("b", "y")], modes={"train": (), "decode": [("a", None), ("b", "x")], "insert": {"b": "z"}}
    )
    assert resolve(("a", "b"), rules).spec == P("x", "y")
    assert resolve(("a", "b"), rules, mode="train").spec == P("x", "y")
    assert resolve(("a", "b"), rules, mode="decode").spec == P(None, "x")
    assert resolve(("a", "b"), rules, mode="insert").spec == P("x", "z")


def test_not_given_and_replicate_differ_in_a_mode():
    rules = AxisRules({"a": "x"}, modes={"silent": (), "replicate": {"a": None}})
    assert resolve(("a",), rules, mode="silent").spec == P("x")
    assert resolve(("a",), rules, mode="replicate").spec == P()
    assert not resolve(("a",), rules, mode="replicate").reasons


def test_a_mode_gives_a_rule_to_a_name_that_has_none_otherwise():
    rules = AxisRules((), modes={"decode": {"a": "x"}})
    assert resolve(("a",), rules, mode="decode").spec == P("x")
    assert resolve(("a",), rules).reasons[0].code is Code.unmatched


def test_unknown_mode_names_the_known_ones():
    rules = AxisRules((), modes={"train": (), "decode": ()})
    with pytest.raises(RuleError, match=r"mode 'decod' is unknown; these rules have \('train', 'decode'\)") as error:
        resolve(("a",), rules, mode="decod")
    assert "did you mean 'decode'?" in str(error.value)
    with pytest.raises(RuleError, match="mode 'train' is unknown"):
        resolve(("a",), AxisRules(), mode="train")


# --- aliases


def test_an_alias_shares_rules_in_every_mode_and_the_unit():
    rules = AxisRules({"q": "sp"}, modes={"decode": {"q": "dp"}}, units={"q": 128})
    aliased = rules.with_alias("s", "q").with_alias("t", "s")
    for name in ("s", "t"):
        assert resolve((name,), aliased).spec == P("sp")
        assert resolve((name,), aliased, mode="decode").spec == P("dp")
        assert units_of((name,), aliased) == (128,)


def test_the_name_comes_before_its_aliases_and_these_in_order_of_registration():
    rules = AxisRules([("a", "x"), ("a", "y"), ("a", "z")]).with_alias("z1", "a").with_alias("a1", "z1")
    for names in (("a1", "z1", "a"), ("a", "a1", "z1"), ("z1", "a", "a1")):
        spec = resolve(names, rules).spec
        assert dict(zip(names, spec, strict=True)) == {"a": "x", "z1": "y", "a1": "z"}


def test_an_alias_is_looked_up_late():
    rules = AxisRules().with_alias("s", "q")
    assert resolve(("s",), rules).reasons[0].code is Code.unmatched
    assert resolve(("s",), rules.extend({"q": "x"})).spec == P("x")


def test_a_mode_may_treat_an_alias_by_itself():
    rules = AxisRules({"q": "sp"}, modes={"decode": {"q": "dp"}}).with_alias("s", "q")
    special = rules.prepend(modes={"decode": {"s": None}})
    assert resolve(("s",), special).spec == P("sp")
    assert resolve(("s",), special, mode="decode").spec == P()
    assert resolve(("q",), special, mode="decode").spec == P("dp")


def test_alias_of_a_name_that_has_rules():
    with pytest.raises(RuleError, match=r"'a' is to be an alias of 'b', but has rules; use `rules.without\('a'\)`"):
        AxisRules({"a": "x", "b": "y"}).with_alias("a", "b")
    rules = AxisRules({"a": "x", "b": "y"}).without("a").with_alias("a", "b")
    assert resolve(("a",), rules).spec == P("y")


def test_aliases_in_a_circle():
    with pytest.raises(RuleError, match="circle: 'x' -> 'y' -> 'x'"):
        AxisRules(aliases={"x": "y", "y": "x"})
    with pytest.raises(RuleError, match="circle: 'x' -> 'x'"):
        AxisRules().with_alias("x", "x")
    with pytest.raises(RuleError, match="circle"):
        AxisRules().with_alias("a", "b").with_alias("b", "c").with_alias("c", "a")


def test_alias_registered_twice():
    with pytest.raises(RuleError, match="`aliases` gives 'a' twice"):
        AxisRules().with_alias("a", "b").with_alias("a", "c")


# --- new values from old ones


@given(RULES, RULES, ENTRIES)
@settings(deadline=None, max_examples=100)
def test_extend_and_prepend_are_concatenation(one, two, entries):
    both = AxisRules([*one, *two])
    assert AxisRules(one).extend(two) == both == AxisRules(two).prepend(one)
    assert resolve(entries, AxisRules(one).extend(two)) == resolve(entries, both)


def test_extend_and_prepend_reach_into_modes():
    rules = AxisRules({"a": "x"}, modes={"decode": {"a": "y"}})
    assert rules.extend(modes={"decode": {"a": "z"}, "new": ()}).modes == (
        ("decode", (("a", "y"), ("a", "z"))),
        ("new", ()),
    )
    assert rules.prepend({"b": "w"}, modes={"decode": {"a": "z"}}) == AxisRules(
        [("b", "w"), ("a", "x")], modes={"decode": [("a", "z"), ("a", "y")]}
    )


@given(RULES, NAMES)
@settings(deadline=None, max_examples=100)
def test_without_takes_a_name_out_of_everything(pairs, name):
    rules = AxisRules(pairs, modes={"m": pairs}, units={"a": 2}).extend({name: "x"})
    left = rules.without(name)
    assert name not in left.names and name not in dict(left.units)
    assert left.rules == tuple(pair for pair in rules.rules if pair[0] != name)
    assert left.modes == (("m", left.rules),)


def test_without_an_unknown_name():
    with pytest.raises(RuleError, match=r"`without\('bach'\)`: no rule has that name \(did you mean 'batch'\?\)"):
        AxisRules({"batch": "x"}).without("bach")
    assert AxisRules(units={"a": 2}).without("a") == AxisRules()
    assert AxisRules(aliases={"a": "b"}).without("a") == AxisRules()


@given(RULES, RULES)
@settings(deadline=None, max_examples=200)
def test_merge_keeps_fallbacks_and_refuses_contradictions(one, two):
    mine, theirs = AxisRules(one), AxisRules(two)

    def of(rules, name):
        return [target for key, target in rules.rules if key == name]

    def begins(long, short):
        return long[: len(short)] == short

    shared = {name for name in mine.names if name in theirs.names}
    fits = all(begins(of(mine, n), of(theirs, n)) or begins(of(theirs, n), of(mine, n)) for n in shared)
    if not fits:
        with pytest.raises(RuleError, match="`merge`: rules map .* on one side and to .* on the other; use `without"):
            mine.merge(theirs)
        return
    merged = mine.merge(theirs)
    assert begins(list(merged.rules), list(mine.rules))
    for name in merged.names:
        assert of(merged, name) == max(of(mine, name), of(theirs, name), key=len)
    assert merged.merge(theirs) == merged == merged.merge(mine)


def test_merge_reaches_modes_units_and_aliases():
    one = AxisRules({"a": "x"}, modes={"m": {"a": "y"}}, units={"a": 2}, aliases={"b": "a"})
    two = AxisRules({"c": "z"}, modes={"m": {"c": "y"}, "n": ()}, units={"c": 3}, aliases={"d": "b"})
    assert one.merge(two) == AxisRules(
        [("a", "x"), ("c", "z")],
        modes={"m": [("a", "y"), ("c", "y")], "n": ()},
        units={"a": 2, "c": 3},
        aliases={"b": "a", "d": "b"},
    )
    with pytest.raises(RuleError, match="mode 'm' map 'a' to"):
        one.merge(AxisRules(modes={"m": {"a": "z"}}))
    with pytest.raises(RuleError, match="the unit of 'a' is 2 on one side and 4 on the other"):
        one.merge(AxisRules(units={"a": 4}))
    with pytest.raises(RuleError, match="the alias 'b' is 'a' on one side and 'c' on the other"):
        one.merge(AxisRules(aliases={"b": "c"}))
    with pytest.raises(RuleError, match="'a' is to be an alias of 'z', but has rules"):
        one.merge(AxisRules(aliases={"a": "z"}))


@given(RULES)
@settings(deadline=None, max_examples=100)
def test_last_wins_is_a_dictionary(pairs):
    rules = AxisRules.last_wins(pairs)
    assert dict(rules.rules) == dict(AxisRules(pairs).rules)
    assert len(rules.rules) == len(dict(pairs))
    assert AxisRules.last_wins(rules.rules) == rules


# --- values


def test_lists_tuples_and_mappings_give_equal_rules():
    one = AxisRules({"a": ["x", "y"], "b": "z"}, modes={"m": [["a", []]]}, units=[("a", 2)])
    two = AxisRules([["a", ("x", "y")], ("b", ("z",))], modes=[("m", {"a": None})], units={"a": 2})
    assert one == two and hash(one) == hash(two)


def test_everything_is_part_of_equality_and_hash():
    base = AxisRules({"a": "x"}, modes={"m": ()}, units={"a": 2}, aliases={"b": "a"})
    others = [
        base.extend({"a": "y"}),
        base.extend(modes={"n": ()}),
        base.without("b"),
        AxisRules({"a": "x"}, modes={"m": ()}, units={"a": 4}, aliases={"b": "a"}),
        AxisRules({"a": U}, modes={"m": ()}, units={"a": 2}, aliases={"b": "a"}),
    ]
    for i, other in enumerate([base, *others]):
        assert sum(bool(other == one) for one in [base, *others]) == 1, i
    assert len({hash(rules) for rules in (base, *others)}) == len(others) + 1


def test_rules_cross_a_jit_boundary_as_arguments_and_retrace_when_they_differ():
    traced = []

    @jax.jit
    def spec(x, rules):
        traced.append(resolve(("a",), rules).spec)
        return x

    rules = AxisRules({"a": "x"})
    spec(jnp.ones(2), rules)
    spec(jnp.ones(2), AxisRules([("a", ("x",))]))
    spec(jnp.ones(2), rules.without("a").with_alias("a", "b").extend({"b": "y"}))
    assert traced == [P("x"), P("y")]
    assert jax.tree.leaves(rules) == []


def test_a_list_that_is_changed_later_changes_nothing():
    axes = ["x"]
    rules = AxisRules([("a", axes)])
    axes.append("y")
    assert resolve(("a",), rules).spec == P("x")


def test_names_are_listed_in_order_of_appearance():
    rules = AxisRules([("b", "x"), ("a", "y"), ("b", "z")], modes={"m": {"c": None}}, aliases={"d": "a"})
    assert rules.names == ("b", "a", "c", "d")


# --- units


def test_units_come_from_atomic_entries_and_from_rules():
    rules = AxisRules((), units={"heads": 128, "pair": 6})
    assert units_of(("embed", "heads"), rules) == (1, 128)
    assert units_of(("embed", atomic("kv", 64)), rules) == (1, 64)
    assert units_of((atomic("heads", 256), ("pair", atomic("b", 4)), None, U), rules) == (256, 12, 1, 1)
    assert units_of(("embed", None, atomic("a", 1)), rules) is None
    assert units_of((), rules) is None
    assert units_of(P("heads"), rules) == (128,)


# --- what cannot be a rule


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([("a", "x", "y")], r"`rules`: \('a', 'x', 'y'\) is no pair that begins with a name"),
        ([(1, "x")], r"`rules`: \(1, 'x'\) is no pair that begins with a name; write \(name, value\)"),
        (["ab"], "`rules`: 'ab' is no pair"),
        ([("a", 1)], r"`rules`: \('a', 1\) has no valid target; use a mesh axis"),
        ([("a", ("x", None))], "has no valid target"),
        ([("a", {"x", "y"})], "has no valid target"),
        ([("a", ("x", ("y",)))], "has no valid target"),
        ([("a", ("x", "x"))], r"`rules`: \('a', \('x', 'x'\)\) uses mesh axis `x` twice; use it once"),
    ],
)
def test_malformed_rules(rules, message):
    with pytest.raises(RuleError, match=message):
        AxisRules(rules)
    with pytest.raises(RuleError, match=message.replace("`rules`", "`mode 'm'`")):
        AxisRules(modes={"m": rules})


@pytest.mark.parametrize("unit", [0, -1, 1.5, True, None])
def test_malformed_units(unit):
    with pytest.raises(RuleError, match=r"`units\['a'\]` is .*; a unit is a positive number of elements"):
        AxisRules(units=[("a", unit)])


def test_what_is_given_twice():
    with pytest.raises(RuleError, match="`units` gives 'a' twice"):
        AxisRules(units=[("a", 1), ("a", 2)])
    with pytest.raises(RuleError, match="`modes` gives 'm' twice"):
        AxisRules(modes=[("m", ()), ("m", ())])
    with pytest.raises(RuleError, match="the alias 'a' is of 3"):
        AxisRules(aliases=[("a", 3)])


def test_axes_of_a_resolved_spec_are_ordered():
    spec = resolve((("b", "a"), "c"), AxisRules([("a", "x"), ("b", "y"), ("c", "z")])).spec
    assert axis_names_of(spec) == ("y", "x", "z")
