import itertools
from typing import Any

import jax
import jax.numpy as jnp
from hypothesis import given, settings, strategies as st

import shardfx as sfx
from shardfx import AxisRules, MeshSpec
from tests.see.lint_arguments import found_in
from tests.see.planted import (
    AXES,
    MESH,
    NAMES,
    RULES,
    TREE,
)


MESH_AXES = ("a", "b", "c")
SMALL_MESH = MeshSpec(dict.fromkeys(MESH_AXES, 2))
targets = st.one_of(
    st.none(),
    st.sampled_from(MESH_AXES),
    st.permutations(MESH_AXES).map(lambda axes: tuple(axes[:2])),
    st.just(("a", "b", "c")),
)


def subsets(items):
    """Every subset of some items, in their order."""
    for count in range(len(items) + 1):
        yield from itertools.combinations(items, count)


def applied_rules(rules):
    """The numbers of the rules that some array uses: one with every set of names, and
    with names before all rules that take any of the mesh axes.
    """
    takers = [(f"taken_{axis}", axis) for axis in MESH_AXES]
    axes = AxisRules(takers).extend(rules)
    names_by_path = {}
    for taken in subsets([name for name, _ in takers]):
        for names in subsets(sorted({name for name, _ in rules})):
            names_by_path["/".join(["w", *taken, *names])] = (*taken, *names)
    tree = {}
    for path, names in names_by_path.items():
        tree[path] = jax.ShapeDtypeStruct((8,) * len(names), jnp.float32)
    plan = sfx.plan(tree, SMALL_MESH, names=names_by_path, axes=axes)
    applied = set()
    for path in tree:
        for dim in sfx.explain(plan, path).dims:
            for trial in dim.tried:
                if trial.outcome == "applied":
                    applied.add(trial.number - len(takers))
    return applied


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from("xyz"), targets), min_size=1, max_size=7))
def test_a_rule_is_dead_exactly_if_no_array_uses_it(rules):
    axes = AxisRules(rules)
    leaf = jax.ShapeDtypeStruct((8,), jnp.float32)
    findings = sfx.lint({"w": leaf}, SMALL_MESH, names={"w": (None,)}, axes=axes)
    dead = {
        int(trial.where.split("[")[1].split("]")[0])
        for trial in findings
        if trial.code == "dead-rule"
    }
    applied = applied_rules(rules)
    expected = {number for number in range(len(rules)) if number not in applied}
    assert dead == expected


# Mistakes that have nothing to do with one another: names of some arrays, rules of
# names, and what is found.
TOGETHER: list[tuple[dict[str, tuple[str, ...]], list[Any], str]] = [
    # A layer of which one name is misspelled, or two are swapped, is not sharded as the
    # others are.
    (
        {"layers/1/mlp/down$": ("embed", "mpl")},
        [],
        "unknown-name name 'mpl'; uneven-layers layers/1/mlp/down",
    ),
    (
        {"layers/2/mlp/up$": ("embed", "mlp")},
        [],
        "contradicted-name layers/2/mlp/up; uneven-layers layers/2/mlp/up",
    ),
    ({"^embed$": ("mlp", "embed")}, [], "contradicted-name embed, name 'mlp'"),
    ({}, [("vocab", "pipeline")], "absent-axis mesh axis 'pipeline'"),
    (
        {},
        [("heads", ("tensor", "fsdp"))],
        "dead-rule axes.rules[{}] 'heads' -> tensor+fsdp",
    ),
    (
        {},
        [("embed", ("fsdp", "tensor"))],
        "dead-rule axes.rules[{}] 'embed' -> fsdp+tensor",
    ),
]


@given(st.sets(st.sampled_from(range(len(TOGETHER)))), st.booleans())
def test_mistakes_of_several_kinds_are_all_found(chosen, unit):
    rules = list(AXES.rules)
    expected = set()
    names = {}
    for changed, extra, findings in (TOGETHER[number] for number in sorted(chosen)):
        expected |= set(found_in(findings.replace("[{}]", f"[{len(rules)}]")))
        rules += extra
        names |= changed
    axes = AxisRules(rules, units={"headz": 64} if unit else None)
    if unit:
        expected |= {("unknown-name", "units 'headz'")}
    else:
        expected |= set()
    findings = sfx.lint(
        TREE, MESH, names=sfx.auto.renamed(TREE, names, names=NAMES), axes=axes
    )
    actual = {(finding.code, finding.where) for finding in findings}
    assert actual == expected, str(findings)
    expected_bytes = sorted((finding.bytes for finding in findings), reverse=True)
    assert [finding.bytes for finding in findings] == expected_bytes


@given(st.integers(0, 3), st.integers(0, 2), st.booleans())
def test_mistakes_of_several_path_rules_are_all_found(unused, shadowed, pod):
    first = [(f"nothing_{number}", jax.P("tensor")) for number in range(unused)]
    last = [(f"v_proj|{number}x", jax.P("fsdp")) for number in range(shadowed)]
    expected = {
        ("unused-rule", f"paths[{number}] 'nothing_{number}'")
        for number in range(unused)
    }
    expected |= {
        ("shadowed-rule", f"paths[{unused + len(RULES) + n}] 'v_proj|{n}x'")
        for n in range(shadowed)
    }
    if pod:
        expected |= {("unused-axis", "mesh axis 'pod'")}
    else:
        expected |= set()
    if pod:
        mesh = MeshSpec({"pod": 2, **MESH.shape})
    else:
        mesh = MESH
    rules = sfx.PathRules([*first, *RULES, *last])
    findings = sfx.lint(TREE, mesh, paths=rules)
    actual = {(reason.code, reason.where) for reason in findings}
    assert actual == expected, str(findings)
