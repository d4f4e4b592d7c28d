"""Laws of `lint`, over random rules: what is dead is never applied, and any number of mistakes is found."""

import itertools
import random

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings, strategies as st

import shardfx as sfx
from shardfx import AxisRules, MeshSpec
from shardfx._rules.resolution import attempts
from tests.see.planted import AXES, MESH, NAMES, PLANTED, RULES, TREE


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


# Mistakes that have nothing to do with one another.
TOGETHER = (
    "a name that is misspelled",
    "a unit of no name",
    "a mesh axis that is not there",
    "a rule after one for nothing",
    "names in the wrong order",
    "one name for two axes",
)


@pytest.mark.parametrize("seed", range(6))
def test_mistakes_of_several_kinds_are_all_found(seed):
    chosen = random.Random(seed)
    typo, unit, axis, dead, swap, doubled = (chosen.random() < 0.6 for _ in range(6))
    rules, expected, names = list(AXES.rules), set(), dict[str, tuple[str, ...]]()
    if typo:
        names["layers/1/mlp/down$"] = ("embed", "mpl")
        # Its layer is then not sharded as the others are.
        expected |= {("unknown-name", "name 'mpl'"), ("uneven-layers", "layers/1/mlp/down")}
    if axis:
        rules.append(("vocab", "pipeline"))
        expected.add(("absent-axis", "mesh axis 'pipeline'"))
    if dead:
        at = chosen.randrange(5)
        rules.append((AXES.rules[at][0], (str(AXES.rules[at][1]), "fsdp" if at < 4 else "tensor")))
        told = f"axes.rules[{len(rules) - 1}] {rules[-1][0]!r} -> {'+'.join(rules[-1][1])}"
        expected.add(("dead-rule", told))
    if swap:
        names["layers/2/mlp/up$"] = ("embed", "mlp")
        expected |= {("contradicted-name", "layers/2/mlp/up"), ("uneven-layers", "layers/2/mlp/up")}
    if doubled:
        names["^embed$"] = ("mlp", "embed")
        expected.add(("contradicted-name", "embed, name 'mlp'"))
    axes = AxisRules(rules, units={"headz": 64} if unit else None)
    expected |= {("unknown-name", "units 'headz'")} if unit else set()
    found = sfx.lint(TREE, MESH, names=sfx.auto.renamed(TREE, names, names=NAMES), axes=axes)
    assert {(one.code, one.where) for one in found} == expected, str(found)
    assert [one.bytes for one in found] == sorted((one.bytes for one in found), reverse=True)


@pytest.mark.parametrize("seed", range(4))
def test_mistakes_of_several_path_rules_are_all_found(seed):
    chosen = random.Random(seed)
    expected: set[tuple[str, str]] = set()
    first, last = [], []
    for number in range(chosen.randrange(4)):
        first.append((f"nothing_{number}", jax.P("tensor")))
        expected.add(("unused-rule", f"paths[{number}] 'nothing_{number}'"))
    for number in range(chosen.randrange(3)):
        last.append((f"v_proj|{number}x", jax.P("fsdp")))
        at = len(first) + len(RULES) + number
        expected.add(("shadowed-rule", f"paths[{at}] 'v_proj|{number}x'"))
    mesh = MESH
    if chosen.random() < 0.5:
        mesh = MeshSpec({"pod": 2, **MESH.shape})
        expected.add(("unused-axis", "mesh axis 'pod'"))
    found = sfx.lint(TREE, mesh, paths=sfx.PathRules([*first, *RULES, *last]))
    assert {(one.code, one.where) for one in found} == expected, str(found)


def test_every_kind_of_finding_is_planted():
    from shardfx._see.finding import CODES

    assert {code for planted in PLANTED.values() for code, _ in planted.found} == set(CODES)


SMALL = MeshSpec({"fsdp": 2, "tensor": 2})
MLP_AXES = AxisRules([("mlp", "tensor"), ("embed", "fsdp"), ("kv", None)])


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def mlp(width: int, down: int | None = None) -> dict[str, jax.ShapeDtypeStruct]:
    return {"up": f32(96, width), "down": f32(down or width, 96)}


UP_AND_DOWN = {"up": ("embed", "mlp"), "down": ("mlp", "embed")}
LAYERS = {"layers": [mlp(256)] * 3}
NAMED = {"layers": [UP_AND_DOWN] * 3}

# A tree, its names, and where a contradiction is found.
CASES = {
    "experts of another width": ({**LAYERS, "shared": mlp(100)}, {**NAMED, "shared": UP_AND_DOWN}, []),
    "a tower of another width": (
        {**LAYERS, "eyes": {"up": f32(90, 200), "down": f32(200, 90)}},
        {**NAMED, "eyes": UP_AND_DOWN},
        [],
    ),
    "a name that no axis cuts": (
        {**LAYERS, "q": f32(96, 192), "v": f32(96, 128)},
        {**NAMED, "q": ("embed", "kv"), "v": ("embed", "kv")},
        [],
    ),
    "a product that does not fit": (
        {**LAYERS, "odd": mlp(256, 250)},
        {**NAMED, "odd": UP_AND_DOWN},
        ["odd/down, name 'mlp'"],
    ),
    "a table under another's name": (
        {**LAYERS, "embed": f32(1000, 96)},
        {**NAMED, "embed": ("mlp", "embed")},
        ["embed, name 'mlp'"],
    ),
    "two tables under another's name": (
        {**LAYERS, "embed": f32(1000, 96), "head": f32(96, 1000)},
        {**NAMED, "embed": ("mlp", "embed"), "head": ("embed", "mlp")},
        ["embed, name 'mlp'", "head, name 'mlp'"],
    ),
    "an alias": (
        {**LAYERS, "embed": f32(1000, 96), "more": f32(300, 96)},
        {**NAMED, "embed": ("wide", "embed"), "more": ("wide", "embed")},
        ["more, name 'wide'"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_name_contradicts_where_its_sizes_cannot_be_meant(case):
    tree, names, expected = CASES[case]
    found = sfx.lint(tree, SMALL, names=names, axes=MLP_AXES.with_alias("wide", of="mlp"))
    assert [one.where for one in found if one.code == "contradicted-name"] == expected, str(found)
