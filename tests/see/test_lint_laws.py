import itertools
from typing import Any

import jax
import jax.numpy as jnp
from hypothesis import given, settings, strategies as st

import shardfx as sfx
from shardfx import AxisRules, MeshSpec
from shardfx._rules.resolution import attempts
from tests.see.lint_arguments import found_in
from tests.see.planted import (
    AXES,
    MESH,
    NAMES,
    RULES,
    TREE,
)


MESH_AXES = ("a", "b", "c")
targets = st.one_of(
    st.none(),
    st.sampled_from(MESH_AXES),
    st.permutations(MESH_AXES).map(lambda axes: tuple(axes[:2])),
    st.just(("a", "b", "c")),
)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from("xyz"), targets), min_size=1, max_size=7))
def test_a_rule_is_dead_exactly_if_no_array_uses_it(rules):
    axes = AxisRules(rules)
    leaf = jax.ShapeDtypeStruct((8,), jnp.float32)
    mesh = MeshSpec({"a": 2, "b": 2, "c": 2})
    findings = sfx.lint({"w": leaf}, mesh, names={"w": (None,)}, axes=axes)
    dead = {
        int(trial.where.split("[")[1].split("]")[0])
        for trial in findings
        if trial.code == "dead-rule"
    }
    applied = set()
    # Every set of names that an array may have, with names before all rules that take
    # any of the mesh axes.
    for count in range(len(MESH_AXES) + 1):
        for taken in itertools.combinations(MESH_AXES, count):
            axis_rules = AxisRules([(f"taken_{axis}", axis) for axis in taken])
            before = axis_rules.extend(rules)
            for size in range(1, 4):
                for names in itertools.combinations("xyz", size):
                    tried = attempts(
                        (*[f"taken_{axis}" for axis in taken], *names), before, None
                    )
                    applied |= {
                        trial.number - len(taken)
                        for trial in tried
                        if trial.outcome == "applied"
                    }
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
