"""Laws of `lint`, over random rules: what is dead is never applied, and any number of mistakes is found."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings, strategies as st

import shardfx as sfx
from shardfx import AxisRules, MeshSpec
from shardfx._rules.resolution import attempts
from tests.see.planted import AXES, MESH, NAMES, RULES, TREE


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
    found = sfx.lint({"w": leaf}, mesh, names={"w": (None,)}, axes=axes)
    dead = {int(one.where.split("[")[1].split("]")[0]) for one in found if one.code == "dead-rule"}
    applied = set()
    # Every set of names that an array may have, with names before all rules that take any of the mesh axes.
    for count in range(len(MESH_AXES) + 1):
        for taken in itertools.combinations(MESH_AXES, count):
            before = AxisRules([(f"taken_{axis}", axis) for axis in taken]).extend(rules)
            for size in range(1, 4):
                for names in itertools.combinations("xyz", size):
                    tried = attempts((*[f"taken_{axis}" for axis in taken], *names), before, None)
                    applied |= {one.number - len(taken) for one in tried if one.outcome == "applied"}
    assert dead == {number for number in range(len(rules)) if number not in applied}


# Mistakes that have nothing to do with one another: names of some arrays, rules of names, and what is found.
TOGETHER: tuple[tuple[dict[str, tuple[str, ...]], list[Any], set[tuple[str, str]]], ...] = (
    # A layer of which one name is misspelled, or two are swapped, is not sharded as the others are.
    (
        {"layers/1/mlp/down$": ("embed", "mpl")},
        [],
        {("unknown-name", "name 'mpl'"), ("uneven-layers", "layers/1/mlp/down")},
    ),
    (
        {"layers/2/mlp/up$": ("embed", "mlp")},
        [],
        {("contradicted-name", "layers/2/mlp/up"), ("uneven-layers", "layers/2/mlp/up")},
    ),
    ({"^embed$": ("mlp", "embed")}, [], {("contradicted-name", "embed, name 'mlp'")}),
    ({}, [("vocab", "pipeline")], {("absent-axis", "mesh axis 'pipeline'")}),
    ({}, [("heads", ("tensor", "fsdp"))], {("dead-rule", "axes.rules[{}] 'heads' -> tensor+fsdp")}),
    ({}, [("embed", ("fsdp", "tensor"))], {("dead-rule", "axes.rules[{}] 'embed' -> fsdp+tensor")}),
)


@given(st.sets(st.sampled_from(range(len(TOGETHER)))), st.booleans())
def test_mistakes_of_several_kinds_are_all_found(chosen, unit):
    rules, expected, names = list(AXES.rules), set(), {}
    for changed, more, found in (TOGETHER[number] for number in sorted(chosen)):
        expected |= {(code, where.replace("[{}]", f"[{len(rules)}]")) for code, where in found}
        rules += more
        names |= changed
    axes = AxisRules(rules, units={"headz": 64} if unit else None)
    expected |= {("unknown-name", "units 'headz'")} if unit else set()
    found = sfx.lint(TREE, MESH, names=sfx.auto.renamed(TREE, names, names=NAMES), axes=axes)
    assert {(one.code, one.where) for one in found} == expected, str(found)
    assert [one.bytes for one in found] == sorted((one.bytes for one in found), reverse=True)


@given(st.integers(0, 3), st.integers(0, 2), st.booleans())
def test_mistakes_of_several_path_rules_are_all_found(unused, shadowed, pod):
    first = [(f"nothing_{number}", jax.P("tensor")) for number in range(unused)]
    last = [(f"v_proj|{number}x", jax.P("fsdp")) for number in range(shadowed)]
    expected = {("unused-rule", f"paths[{number}] 'nothing_{number}'") for number in range(unused)}
    expected |= {("shadowed-rule", f"paths[{unused + len(RULES) + n}] 'v_proj|{n}x'") for n in range(shadowed)}
    expected |= {("unused-axis", "mesh axis 'pod'")} if pod else set()
    mesh = MeshSpec({"pod": 2, **MESH.shape}) if pod else MESH
    found = sfx.lint(TREE, mesh, paths=sfx.PathRules([*first, *RULES, *last]))
    assert {(one.code, one.where) for one in found} == expected, str(found)


SMALL = MeshSpec({"fsdp": 2, "tensor": 2})
MLP_AXES = AxisRules([("mlp", "tensor"), ("embed", "fsdp"), ("kv", None)])


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def mlp(width: int, down: int | None = None) -> dict[str, jax.ShapeDtypeStruct]:
    return {"up": f32(96, width), "down": f32(down or width, 96)}


TABLE, NAMED = f32(1000, 96), {"up": ("embed", "mlp"), "down": ("mlp", "embed")}
# What is beside three layers of width 256, its names, and where a contradiction is found.
CASES: dict[str, tuple[Any, Any, list[str]]] = {
    "experts of another width": ({"shared": mlp(100)}, {"shared": NAMED}, []),
    "a tower of another width": ({"eyes": {"up": f32(90, 200), "down": f32(200, 90)}}, {"eyes": NAMED}, []),
    "a name that no axis cuts": (
        {"q": f32(96, 192), "v": f32(96, 128)},
        {"q": ("embed", "kv"), "v": ("embed", "kv")},
        [],
    ),
    "a product that does not fit": ({"odd": mlp(256, 250)}, {"odd": NAMED}, ["odd/down, name 'mlp'"]),
    "a table under another's name": ({"embed": TABLE}, {"embed": ("mlp", "embed")}, ["embed, name 'mlp'"]),
    "two tables under another's name": (
        {"embed": TABLE, "head": f32(96, 1000)},
        {"embed": ("mlp", "embed"), "head": ("embed", "mlp")},
        ["embed, name 'mlp'", "head, name 'mlp'"],
    ),
    "an alias": (
        {"embed": TABLE, "few": f32(300, 96)},
        {"embed": ("wide", "embed"), "few": ("wide", "embed")},
        ["few, name 'wide'"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_name_contradicts_where_its_sizes_cannot_be_meant(case):
    more, named, expected = CASES[case]
    tree, names = {"layers": [mlp(256)] * 3, **more}, {"layers": [NAMED] * 3, **named}
    found = sfx.lint(tree, SMALL, names=names, axes=MLP_AXES.with_alias("wide", of="mlp"))
    assert [one.where for one in found if one.code == "contradicted-name"] == expected, str(found)
