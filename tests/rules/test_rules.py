import inspect
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from jax.sharding import PartitionSpec as P

from shardfx import AxisRules, Code, MeshSpec, atomic, plan, resolve
from shardfx.errors import RuleError, SpecError
from tests.rules.drawn_rules import (
    AB,
    ALIASES,
    ENTRIES,
    MODES,
    NAMES,
    POLICIES,
    RULES,
    U,
    shuffled_names,
)
from tests.specs import canonical, entry_axes


def near(x, y):
    return canonical(x) == canonical(y)


@given(RULES, ENTRIES)
@settings(max_examples=300)
def test_resolve_is_linens_algorithm(rules, entries):
    from flax.linen.spmd import logical_to_mesh_axes

    axis_rules = AxisRules(rules)
    spec = resolve(entries, axis_rules).spec
    expected = logical_to_mesh_axes(tuple(entries), tuple(rules))
    assert near(spec, expected)


@given(RULES, ALIASES, shuffled_names(), POLICIES)
@settings(max_examples=300)
def test_resolve_uses_no_axis_twice_in_any_order_of_names(
    pairs, aliases, names, unmatched
):
    rules = AxisRules(pairs, aliases=aliases)
    entries, moved, order = names
    leaf, two = (
        resolve(entries_in_order, rules, unmatched=unmatched)
        for entries_in_order in (entries, moved)
    )
    used = []
    for entry in leaf.spec:
        if entry is not U:
            for axis in entry_axes(entry):
                used.append(axis)
    assert len(used) == len(set(used))
    missing = len(entries) - len(leaf.spec)
    padded = [*leaf.spec, *[None] * missing]
    spec = P(*[padded[i] for i in order])
    assert near(two.spec, spec)
    place = {}
    for new, old in enumerate(order):
        place[old] = new
    actual = set()
    for why in leaf.reasons:
        actual.add((why.code, place[why.dim or 0], why.axes))
    expected = set()
    for why in two.reasons:
        expected.add((why.code, why.dim, why.axes))
    assert actual == expected


@given(RULES, ENTRIES)
@settings(max_examples=200)
def test_resolve_has_a_reason_for_each_name_without_target(pairs, entries):
    rules = AxisRules(pairs)
    decision = resolve(entries, rules)
    names_with_rules = set()
    for name, _ in pairs:
        names_with_rules.add(name)
    missing = len(entries) - len(decision.spec)
    spec = [*decision.spec, *[None] * missing]
    for dim, entry in enumerate(entries):
        reasons = []
        for why in decision.reasons:
            if why.dim == dim:
                reasons.append(why)
        if entry is None or entry is U:
            assert not reasons
        elif entry not in names_with_rules:
            actual = [(why.code, why.axes) for why in reasons]
            expected = [(Code.unmatched, (entry,))]
            assert actual == expected
        elif spec[dim] is not None:
            assert not reasons
        else:
            # A first rule that says `None` was obeyed; every other way to end with
            # nothing is "blocked".
            first = next(target for name, target in rules.rules if name == entry)
            is_obeyed = first is None
            assert bool(reasons) != is_obeyed
            for why in reasons:
                assert why.code is Code.blocked


XX = {"a": "x", "b": "x"}
FALLBACK = [("a", "x"), ("b", ("x", "y")), ("b", None), ("b", "z")]


@pytest.mark.parametrize(
    "promise, entries, rules, spec, blocked",
    [
        (
            "the spec is canonical",
            ("a", "b", "c"),
            {"a": ["x"], "b": (), "c": None},
            P("x"),
            [],
        ),
        ("a spec may hold the names", P("a", "b"), {"a": ["x"], "b": ()}, P("x"), []),
        (
            "tuples join in order",
            (("b", "a"), "c"),
            {"a": ("x", "y"), "b": "z", "c": "x"},
            P((*"zxy",)),
            [(1, "x")],
        ),
        ("a tuple may hold None", (("b", None),), {"b": "z"}, P("z"), []),
        ("a tuple may be empty", ((),), {"b": "z"}, P(), []),
        ("a member of a tuple is blocked alone", (("a", "b"),), XX, P("x"), [(0, "x")]),
        (
            "unconstrained yields to an axis there",
            (("a", "b"),),
            {"a": U, "b": "x"},
            P("x"),
            [],
        ),
        (
            "unconstrained stays elsewhere",
            (("a",), U, "b"),
            {"a": U, "b": "x"},
            P(U, U, "x"),
            [],
        ),
        ("a fallback may be None", ("a", "b"), FALLBACK, P("x"), [(1, "xy")]),
        (
            "any string is a name",
            ("", None, U),
            {"": "x", "None": "y", "UNCONSTRAINED": "z"},
            P("x", None, U),
            [],
        ),
        (
            "an atomic entry is its name",
            (atomic("a", 4), (atomic("b", 2), "c")),
            {"a": "x", "c": "y"},
            P("x", "y"),
            [],
        ),
    ],
)
def test_entries_resolve(promise, entries, rules, spec, blocked):
    decision = resolve(entries, AxisRules(rules))
    assert decision.spec == spec, promise
    reasons = []
    for why in decision.reasons:
        if why.code is Code.blocked:
            reasons.append(why)
    actual = []
    for why in reasons:
        actual.append((why.dim, "".join(why.axes)))
    assert actual == blocked
    assert not reasons or "`x` is used by `a` on dim 0" in reasons[0].message


SEQ = AxisRules(aliases={"seq": "sp", "len": "seq"})


@pytest.mark.parametrize(
    "promise, entries, rules, unmatched, spec",
    [
        (
            "kept names block rules",
            ("a", "x"),
            AxisRules({"a": "x"}),
            "keep",
            P(None, "x"),
        ),
        (
            "kept names are mesh axes",
            (("x", "y"), "a"),
            AxisRules({"a": "x"}),
            "keep",
            P(("x", "y")),
        ),
        (
            "a kept alias stands for its axis",
            ("len", "seq"),
            SEQ,
            "keep",
            P(None, "sp"),
        ),
        (
            "other names have rules",
            (*"abcd",),
            AxisRules({**XX, "c": None}),
            "unconstrained",
            P("x", None, None, U),
        ),
        ("an axis comes first", (("a", "d"),), AxisRules(XX), "unconstrained", P("x")),
        ("blocked is not unmatched", ("a", "b"), AxisRules(XX), "raise", P("x")),
    ],
)
def test_names_without_a_rule_resolve_by_the_policy(
    promise, entries, rules, unmatched, spec
):
    decision = resolve(entries, rules, unmatched=unmatched)
    assert decision.spec == spec, promise


@pytest.mark.parametrize(
    "promise, entries, mode, spec",
    [
        ("no mode", ("a", "b"), None, P("x", "y")),
        ("an empty mode changes nothing", ("a", "b"), "train", P("x", "y")),
        (
            "a mode comes first, and None is its word",
            ("a", "b"),
            "decode",
            P(None, "x"),
        ),
        ("the base rules come after it", ("a", "b"), "insert", P("x", "z")),
        ("a mode may be alone about a name", ("new",), "decode", P("w")),
        ("an alias shares rules of a mode", ("t",), "insert", P("z")),
        ("a mode may treat an alias by itself", ("s",), "decode", P()),
        ("an alias is looked up late", ("v",), None, P("v")),
    ],
)
def test_modes_come_before_the_base_rules(promise, entries, mode, spec):
    decision = resolve(entries, MODES, mode=mode)
    assert decision.spec == spec, promise
    assert not decision.reasons, promise


def test_a_name_comes_before_its_aliases_in_order():
    axis_rules = AxisRules([("a", "x"), ("a", "y"), ("a", "z")])
    rules = axis_rules.with_alias("z1", "a").with_alias("a1", "z1")
    for names in (("a1", "z1", "a"), ("a", "a1", "z1"), ("z1", "a", "a1")):
        spec = resolve(names, rules).spec
        actual = dict(zip(names, spec, strict=True))
        assert actual == {"a": "x", "z1": "y", "a1": "z"}


@given(RULES, RULES)
@settings(max_examples=100)
def test_extend_and_prepend_are_concatenation_in_modes_too(one, two):
    first_modes = {"m": one, "n": one}
    second_modes = {"m": two, "o": two}
    parts: list[dict] = [
        {"modes": first_modes, "mesh_axes": ["x"]},
        {"modes": second_modes, "mesh_axes": ["y"]},
    ]
    first = AxisRules(one, **parts[0])
    second = AxisRules(two, **parts[1])
    modes = {"m": [*one, *two], "n": one, "o": two}
    all_pairs = [*one, *two]
    both = AxisRules(
        all_pairs,
        modes=modes,
        mesh_axes=["x", "y"],
    )
    extended = first.extend(two, **parts[1])
    assert extended == both == second.prepend(one, **parts[0])
    # What is declared stays, whatever else changes.
    without_names = both.without(*both.names)
    with_alias = both.with_alias("c2", of="c")
    quantum = AxisRules({"q": "z"})
    merged = both.merge(quantum)
    others = [
        without_names,
        with_alias,
        merged,
    ]
    declared = set()
    for other in others:
        declared.add(other.mesh_axes)
    assert declared == {("x", "y")}


@given(RULES)
@settings(max_examples=100)
def test_last_wins_keeps_the_last_target_where_a_name_came_first(pairs):
    targets = {}
    for name, _ in pairs:
        targets[name] = [target for other, target in pairs if other == name]
    last_targets = []
    for name in AxisRules(pairs).names:
        last_targets.append((name, targets[name][-1]))
    expected = AxisRules(last_targets)
    last_wins = AxisRules.last_wins(pairs)
    assert last_wins == expected


@given(RULES, NAMES)
@settings(max_examples=100)
def test_without_takes_a_name_out_of_everything(pairs, name):
    axis_rules = AxisRules(pairs, modes={"m": pairs}, units={"a": 2})
    rules = axis_rules.extend({name: "x"})
    rule_set = rules.without(name)
    assert name not in rule_set.names
    units = dict(rule_set.units)
    assert name not in units
    expected = tuple(pair for pair in rules.rules if pair[0] != name)
    assert rule_set.rules == expected
    modes = (("m", rule_set.rules),)
    assert rule_set.modes == modes
    axis_rules = AxisRules(units={"a": 2})
    without_unit = axis_rules.without("a")
    aliased = AxisRules(aliases={"a": "b"})
    without_alias = aliased.without("a")
    assert without_unit == without_alias == AxisRules()


@given(RULES, RULES)
@settings(max_examples=200)
def test_merge_keeps_fallbacks_and_refuses_contradictions(one, two):
    mine = AxisRules(one)
    theirs = AxisRules(two)

    def of(rules, name):
        targets = []
        for key, target in rules.rules:
            if key == name:
                targets.append(target)
        return targets

    def begins(long, short):
        beginning = long[: len(short)]
        return beginning == short

    shared = set()
    for name in mine.names:
        if name in theirs.names:
            shared.add(name)
    fits = all(
        begins(of(mine, n), of(theirs, n)) or begins(of(theirs, n), of(mine, n))
        for n in shared
    )
    if not fits:
        with pytest.raises(
            RuleError,
            match=(
                "`merge`: rules map .* on one side and to .* on the other; use `without"
            ),
        ):
            mine.merge(theirs)
        return
    merged = mine.merge(theirs)
    merged_rules = list(merged.rules)
    my_rules = list(mine.rules)
    assert begins(merged_rules, my_rules)
    for name in merged.names:
        my_targets = of(mine, name)
        their_targets = of(theirs, name)
        longer = max(my_targets, their_targets, key=len)
        merged_targets = of(merged, name)
        assert merged_targets == longer
    assert merged.merge(theirs) == merged == merged.merge(mine)


def test_merge_reaches_modes_units_and_aliases():
    axis_rules = AxisRules(
        {"a": "x"}, modes={"m": {"a": "y"}}, units={"a": 2}, aliases={"b": "a"}
    )
    two = AxisRules(
        {"c": "z"}, modes={"m": {"c": "y"}, "n": ()}, units={"c": 3}, aliases={"d": "b"}
    )
    modes = {"m": [("a", "y"), ("c", "y")], "n": ()}
    rules = {"a": "x", "c": "z"}
    units = {"a": 2, "c": 3}
    aliases = {"b": "a", "d": "b"}
    merged = AxisRules(
        rules,
        modes=modes,
        units=units,
        aliases=aliases,
    )
    actual = axis_rules.merge(two)
    assert actual == merged


def test_everything_is_part_of_equality_and_hash():
    options: dict[str, Any] = {
        "modes": {"m": ()},
        "units": {"a": 2},
        "aliases": {"b": "a"},
        "mesh_axes": ("q",),
    }
    base = AxisRules({"a": "x"}, **options)
    changes: list[dict[str, Any]] = [
        {"modes": {"n": ()}},
        {"units": {"a": 4}},
        {"aliases": {}},
        {"mesh_axes": ("pod",)},
    ]
    others: list[Any] = []
    for change in changes:
        others.append(AxisRules({"a": "x"}, **options | change))
    unconstrained = AxisRules({"a": U}, **options)
    others += [base, unconstrained]
    assert len(set(others)) == len(others)
    same = AxisRules({"a": "x"}, **options)
    assert base == same


def test_rules_are_static_arguments_of_jit():
    traced = []
    rules = AxisRules({"a": "x"})

    def trace(x, rules):
        return traced.append(resolve(("a",), rules).spec)

    spec = jax.jit(trace)
    renamed = rules.without("a").with_alias("a", "b")
    same = AxisRules([("a", ("x",))])
    for axis_rules in (
        rules,
        same,
        renamed.extend({"b": "y"}),
    ):
        spec(jnp.ones(2), axis_rules)
    assert traced == [P("x"), P("y")]
    assert jax.tree.leaves(rules) == []


def test_lists_tuples_and_mappings_give_equal_rules_that_stay():
    axes = ["x", "y"]
    modes = {"m": [["a", []]]}
    axis_rules = AxisRules({"a": axes, "b": "z"}, modes=modes, units=[("a", 2)])
    axes.append("w")
    modes = [("m", {"a": None})]
    two = AxisRules([["a", ("x", "y")], ("b", ("z",))], modes=modes, units={"a": 2})
    assert axis_rules == two
    assert hash(axis_rules) == hash(two)
    modes = {"m": {"c": None}}
    rules = AxisRules(
        [("b", "x"), ("a", "y"), ("b", "z")],
        modes=modes,
        aliases={"d": "a"},
    )
    assert rules.names == ("b", "a", "c", "d")


@pytest.mark.parametrize(
    "promise, names, units",
    [
        ("an alias has its name's", ("embed", "t"), (1, 128)),
        ("an atomic entry's", ("embed", atomic("kv", 64)), (1, 64)),
        ("the entry's before the rule's", (atomic("heads", 256), None), (256, 1)),
        ("a tuple has the least multiple", (("pair", atomic("b", 4)), U), (12, 1)),
        ("none where all are 1", ("embed", atomic("a", 1)), None),
        ("in the order of a spec", P("heads"), (128, 1)),
    ],
)
def test_units_come_from_atomic_entries_and_from_rules(promise, names, units):
    axis_rules = AxisRules((), units={"heads": 128, "pair": 6})
    rules = axis_rules.with_alias("s", "heads").with_alias("t", "s")
    array = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    mesh = MeshSpec({"x": 2})
    sharding_plan = plan(
        {"w": array},
        mesh,
        names={"w": names},
        axes=rules,
        unmatched="replicate",
    )
    assert sharding_plan["w"].units == units, promise


@pytest.mark.parametrize(
    "rules, message",
    [
        (
            [("a", "x", "y")],
            r"`rules`: \('a', 'x', 'y'\) is no pair that begins with a name",
        ),
        (
            [(1, "x")],
            (
                r"`rules`: \(1, 'x'\) is no pair that begins with a name; write \(name,"
                r" value\)"
            ),
        ),
        ([("a", 1)], r"`rules`: \('a', 1\) has no valid target; use a mesh axis"),
        ([("a", ("x", None))], "has no valid target"),
        ([("a", ("x", ("y",)))], "has no valid target"),
        (
            [("a", ("x", "x"))],
            r"`rules`: \('a', \('x', 'x'\)\) uses mesh axis `x` twice; use it once",
        ),
    ],
    ids=str,
)
def test_malformed_rules(rules, message):
    with pytest.raises(RuleError, match=message):
        AxisRules(rules)
    mode_message = message.replace("`rules`", "`mode 'm'`")
    with pytest.raises(RuleError, match=mode_message):
        AxisRules(modes={"m": rules})


UNTYPED = inspect.unwrap(resolve)
UNIT = r"`units\['a'\]` is .*; a unit is a positive number of elements"
CIRCLE = "circle: 'x' -> 'y' -> 'x'; let one name a logical axis with rules"
UNITS: list[Any] = [0, -1, 1.5, True, None]


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: AxisRules(mesh_axes=[""]), "it declares mesh axes by their names"),
        (lambda: AxisRules(mesh_axes=[None]), "it declares mesh axes by their names"),
        *((lambda unit=unit: AxisRules(units=[("a", unit)]), UNIT) for unit in UNITS),
        (lambda: AxisRules(units=[("a", 1), ("a", 2)]), "`units` gives 'a' twice"),
        (lambda: AxisRules(modes=[("m", ()), ("m", ())]), "`modes` gives 'm' twice"),
        (lambda: AB.with_alias("c", "b"), "`aliases` gives 'c' twice"),
        (lambda: AxisRules(aliases=[("a", 3)]), "'a' cannot be an alias of 3"),
        (lambda: AB.with_alias("", of="a"), "'' cannot be an alias of 'a'"),
        (
            lambda: AB.with_alias("a", "b"),
            r"be an alias of 'b', but has rules; use `rules.without\('a'\)`",
        ),
        (lambda: AxisRules(aliases={"x": "y", "y": "x"}), CIRCLE),
        (
            lambda: AxisRules(aliases={"x": "y", "y": "z"}).with_alias("z", "x"),
            "circle",
        ),
        (
            lambda: AB.without("bb"),
            r"`without\('bb'\)`: there is no rule, unit or alias of that name"
            r" \(did you mean 'b'\?\)",
        ),
        (lambda: AB.without(UNITS[0]), "there is no rule, unit or alias"),
        (
            lambda: AB.merge(AxisRules(modes={"decode": {"a": "z"}})),
            "mode 'decode' map 'a' to",
        ),
        (
            lambda: AB.merge(AxisRules(units={"a": 4})),
            "the unit of 'a' is 2 on one side and 4 on the other",
        ),
        (
            lambda: AB.merge(AxisRules(aliases={"c": "b"})),
            "the alias 'c' is 'a' on one side and 'b' on the other",
        ),
        (
            lambda: AB.merge(AxisRules(aliases={"a": "z"})),
            "'a' is to be an alias of 'z', but has rules",
        ),
        (
            lambda: resolve(("a",), AB, mode="decod"),
            r"have \('train', 'decode'\).*did you mean 'decode'\?",
        ),
        (lambda: resolve(("a",), AxisRules(), mode="train"), "mode 'train' is unknown"),
        # Past the type checker of the tests.
        (
            lambda: UNTYPED(("a",), AB, unmatched="no"),
            'use "replicate", "keep", "unconstrained" or "raise"',
        ),
    ],
)
def test_what_contradicts_itself_is_refused(make, message, as_users_run_it):
    with pytest.raises(RuleError, match=message):
        make()


@pytest.mark.parametrize(
    "entry",
    [1, b"a", ("a", ("b",)), ("a", ["b"]), {"a": "b"}, ("a", U), atomic(("a",), (2,))],
)
def test_other_entries_are_refused(entry):
    rules = AxisRules({"a": "x"})
    with pytest.raises(
        SpecError, match="is no entry of an array's names; use a logical name"
    ):
        resolve([entry], rules)


@pytest.mark.parametrize(
    "entries", ["batch", ("a", "a"), ("a", None, ("b", "a")), ("a", atomic("a", 2))]
)
def test_a_string_and_a_name_twice_are_refused(entries):
    rules = AxisRules({"a": "x"})
    with pytest.raises(
        SpecError,
        match=r"not 'batch'; write `\('batch',\)`|logical name `a` occurs twice in",
    ):
        resolve(entries, rules)
