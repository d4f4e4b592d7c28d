"""`lint` finds exactly the planted mistakes, and each fix removes its finding; laws
over random rules.
"""

import contextlib
import functools as ft
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import PartitionSpec as P

import shardfx as sfx
from shardfx import AxisRules, MeshSpec, PathRules
from shardfx._rules.resolution import attempts
from shardfx._see.finding import CODES
from tests.see.planted import (
    AXES,
    CLEAN,
    MESH,
    NAMES,
    PLANTED,
    RULES,
    TREE,
    leaf,
    moments,
)


def applied(fix: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `lint` after the statements of a fix."""
    recorded = {
        "names": None,
        "paths": None,
        "axes": None,
        "mode": None,
        "memory_kinds": None,
    }
    space = {
        **{name: getattr(sfx, name) for name in sfx.__all__},
        "PartitionSpec": jax.sharding.PartitionSpec,
    }
    space |= {"eqx": eqx, **recorded, **arguments}
    before = dict(space)
    exec(fix, space)
    changed = {
        name: value
        for name, value in space.items()
        if name != "__builtins__" and before.get(name) is not value
    }
    assert changed, f"the fix changes nothing: {fix}"
    return {**arguments, **changed}


def lint(arguments: dict[str, Any]) -> sfx._see.Findings:
    options = dict(arguments)
    return sfx.lint(options.pop("tree"), **options)


def found_in(text: str) -> list[tuple[str, ...]]:
    """The codes and places of findings that are written as a text."""
    return [tuple(line.split(" ", 1)) for line in text.split("; ")]


@pytest.mark.parametrize("clean", CLEAN)
def test_clean_rules_have_no_findings(clean):
    assert lint(CLEAN[clean]) == ()


@pytest.mark.parametrize("planted_code, planted", PLANTED)
def test_lint_finds_a_planted_mistake_and_its_fix_mends_it(planted_code, planted):
    arguments = planted()
    expected = found_in(planted_code)
    findings = lint(arguments)
    assert sorted((reason.code, reason.where) for reason in findings) == sorted(
        expected
    ), str(findings)
    for finding in findings:
        after = lint(applied(finding.fix, arguments))
        assert {other.code for other in after.worst("error")} <= {
            other.code for other in findings.worst("error")
        }, finding.fix
        remaining = [
            other
            for other in after
            if (other.code, other.where) == (finding.code, finding.where)
        ]
        assert not remaining, f"{finding.fix}\n{after}"
    value_by_key = {
        key: value
        for key, value in arguments.items()
        if key not in ("replicated_bytes", "head_dim")
    }
    if not isinstance(value_by_key["tree"], sfx.ShardPlan):
        raises = (
            pytest.raises(ValueError)
            if findings.worst("error")
            else contextlib.nullcontext()
        )
        with raises:
            sfx.plan(value_by_key.pop("tree"), value_by_key.pop("mesh"), **value_by_key)
    for _ in range(20):
        if not findings:
            break
        arguments = applied(findings[0].fix, arguments)
        findings = lint(arguments)
    assert findings == (), f"findings are left: {findings}"


@pytest.mark.parametrize("mistake, planted", PLANTED)
def test_all_fixes_of_a_mistake_hold_together(mistake, planted):
    arguments = planted()
    findings = lint(arguments)
    arguments = applied(findings.fix, arguments)
    after = lint(arguments)
    before = {(finding.code, finding.where) for finding in findings}
    assert not [
        finding for finding in after if (finding.code, finding.where) in before
    ], after
    # A rule for three kinds of arrays, each of which got a rule of its own, is left.
    assert {finding.code for finding in after.worst("error")} <= {"shadowed-rule"}, (
        after
    )
    if after.worst("error"):
        arguments = applied(after.fix, arguments)
    assert not lint(arguments).worst("error")
    options = {
        key: value
        for key, value in arguments.items()
        if key not in ("replicated_bytes", "head_dim")
    }
    if not isinstance(options["tree"], sfx.ShardPlan):
        sfx.plan(options.pop("tree"), options.pop("mesh"), **options)


def test_every_kind_of_finding_is_planted_and_on_the_page():
    assert {
        code for planted_code, _ in PLANTED for code, _ in found_in(planted_code)
    } == set(CODES)
    page = (Path(__file__).parents[2] / "docs" / "look.md").read_text()
    section = page.partition("## Mistakes in rules")[2]
    rows = re.findall(r"^\| `([\w-]+)` \| (.*) \|$", section, re.M)
    assert dict(rows) == dict(CODES)


@pytest.mark.parametrize(
    "spec, how, count",
    [(None, {}, 2 * (8192 + 1)), (P("fsdp"), {"over": "data"}, 8192)],
)
def test_what_zero_would_save_is_told(spec, how, count):
    (finding,) = sfx.lint(moments(spec, **how))
    # Of two moments, or of one, in two pieces that could be eight.
    assert finding.severity == "warning"
    assert finding.bytes == count * 4096 * 4 // 2 * 3 // 4


def test_a_state_that_follows_another_plan_is_told():
    params = {name: leaf(512, 512, dtype=jnp.float32) for name in ("up", "down")}
    mesh = sfx.MeshSpec({"fsdp": 4, "tensor": 2})
    ours = sfx.plan(
        params, mesh, paths=sfx.PathRules.parse("up->fsdp.tensor, down->tensor.fsdp")
    )
    theirs = sfx.plan(
        params, mesh, paths=sfx.PathRules.parse("up->tensor.fsdp, down->tensor.fsdp")
    )
    follow = ft.partial(sfx.follow, optax.adam(1e-3).init)
    assert sfx.lint(sfx.ShardPlan.join(params=ours, opt=follow(ours))) == ()
    plan = sfx.ShardPlan.join(params=ours, opt=follow(theirs))
    findings = sfx.lint(plan)
    assert [(reason.code, reason.where) for reason in findings] == [
        ("optimizer-state", f"opt/0/{moment}/up") for moment in ("mu", "nu")
    ]
    assert findings[0].message.startswith(
        "it lies as P('tensor', 'fsdp'), its parameter as P('fsdp', 'tensor'): "
    )
    for finding in findings:
        plan = applied(finding.fix, {"tree": plan})["tree"]
    assert sfx.lint(plan) == ()


def test_lint_of_a_plan_has_no_findings_about_dead_rules():
    axes = sfx.AxisRules([("embed", "fsdp"), ("embed", "fsdp")])
    names = {"w": ("embed", None)}
    assert sfx.lint(sfx.plan({"w": leaf(512, 512)}, MESH, axes=axes, names=names)) == ()


# A state of each optimizer that is not as its parameter, with a spec that is less than
# it could have.
LESS = {
    "adafactor, rows": (
        optax.adafactor,
        "opt/0/v_row/layers/{}/w",
        jax.P(),
        "nothing",
        "`fsdp`",
    ),
    "adafactor, columns": (
        optax.adafactor,
        "opt/0/v_col/layers/{}/w",
        jax.P(),
        "nothing",
        "`tensor`",
    ),
    "sm3": (optax.sm3, "opt/0/mu/layers/{}/w/1", jax.P(), "nothing", "`tensor`"),
    "l-bfgs": (
        optax.lbfgs,
        "opt/0/diff_params_memory/layers/{}/w",
        P(None, "fsdp"),
        "`fsdp`",
        "`fsdp` and `tensor`",
    ),
}


@pytest.mark.parametrize("which", LESS)
def test_lint_compares_a_state_with_its_parameter(which):
    optimizer, path, spec, less, larger = LESS[which]
    layer = {
        "w": leaf(4096, 8192, dtype=jnp.float32),
        "b": leaf(8192, dtype=jnp.float32),
    }
    params = {"layers": [layer] * 2, "square": leaf(4096, 4096, dtype=jnp.float32)}
    sharding_plan = sfx.plan(
        params, MESH, paths=sfx.PathRules.parse("w|square->fsdp.tensor, b->tensor")
    )
    plan = sfx.ShardPlan.join(
        params=sharding_plan, opt=sfx.follow(optimizer(1e-3).init, sharding_plan)
    )
    assert sfx.lint(plan) == ()
    plan = plan.replace(f"^{path.format('[01]')}$", spec)
    (reason,) = sfx.lint(plan).without("replicated")
    assert (reason.code, reason.where) == ("optimizer-state", path.format("{0..1}")), (
        str(reason)
    )
    assert reason.message.startswith(
        f"it is sharded over {less}, its parameter over {larger}"
    ), reason.message
    assert reason.bytes > 0
    assert sfx.lint(applied(reason.fix, {"tree": plan})["tree"]) == ()


def test_a_module_with_functions_and_names_of_its_own():
    class Dense(eqx.Module):
        weight: jax.ShapeDtypeStruct = sfx.field(names=("mlp", "embd"))
        call: Callable[..., Any] = jnp.tanh

    arguments = {
        "tree": [Dense(leaf(8, 16, dtype=jnp.float32))] * 2,
        "mesh": MESH,
        "axes": AXES,
    }
    (finding,) = lint(arguments)
    assert finding.code == "unknown-name"
    assert finding.where == "name 'embd'"
    assert lint(applied(finding.fix, arguments)) == ()
    # Its names, from outside.
    names = sfx.auto.renamed(arguments["tree"], {".*": ("mlp", "embed")})
    assert lint({**arguments, "names": names}) == ()


def test_severities_follow_the_arguments():
    tree = {"w": leaf(7, 8, dtype=jnp.float32)}
    mesh = MESH
    rules = sfx.PathRules([("w", jax.P("fsdp", "tensor")), ("nothing", jax.P())])
    loose = sfx.lint(tree, mesh, paths=rules, unused="allow")
    assert [(finding.code, finding.severity) for finding in loose] == [
        ("corrected", "warning"),
        ("unused-rule", "warning"),
    ]
    strict = sfx.lint(tree, mesh, paths=rules, strict=True)
    assert [(finding.code, finding.severity) for finding in strict] == [
        ("corrected", "error"),
        ("unused-rule", "error"),
    ]
    assert [reason.code for reason in strict.without("corrected").worst("error")] == [
        "unused-rule"
    ]
    assert repr(strict) == str(strict)
    assert str(sfx.lint(tree, mesh, paths=rules.drop(1))).startswith("1 finding: 1 w")


def test_a_refined_mesh_takes_what_it_can():
    key = {"k": leaf(256, 64, dtype=jnp.float32)}
    mesh = sfx.MeshSpec({"tensor": 4})
    rules = sfx.PathRules([("k", sfx.atomic(jax.P("tensor"), (128, 1)))])
    (finding,) = sfx.lint(key, mesh, paths=rules)
    assert finding.code == "corrected"
    assert finding.severity == "info"
    assert finding.fix == "refine = True"
    assert sfx.lint(key, mesh, paths=rules, refine=True) == ()
    odd = {"k": leaf(7, 64, dtype=jnp.float32)}
    (finding,) = sfx.lint(
        odd, mesh, paths=sfx.PathRules.parse("k->tensor"), refine=True
    )
    arguments = {
        "tree": odd,
        "mesh": mesh,
        "paths": sfx.PathRules.parse("k->tensor"),
        "refine": True,
    }
    assert lint(applied(finding.fix, arguments)) == ()


def test_strange_dtypes_and_sizes():
    tree = {
        "key": jax.random.key(0),
        "numpy": np.ones((4, 4)),
        "int4": leaf(8, 8, dtype=jnp.int4),
    }
    tree |= {"none": leaf(0, 3, dtype=bool), "fp8": leaf(3, 5, dtype=jnp.float8_e4m3fn)}
    findings = sfx.lint(
        tree, MESH, paths=sfx.PathRules.parse("key->replicate, .*->fsdp.tensor")
    )
    assert {(reason.code, reason.where) for reason in findings} == {
        ("corrected", "fp8"),
        ("corrected", "none"),
    }


def test_thousands_of_findings_are_made_fast_and_shown_in_part():
    names = ["".join(letters) for letters in itertools.product("abcdefghij", repeat=3)]
    tree = {name: leaf(7, 8, dtype=jnp.float32) for name in names}
    findings = sfx.lint(tree, MESH, paths=sfx.PathRules.parse(".*->fsdp.tensor"))
    (finding,) = findings  # of one cause
    assert finding.code == "corrected"
    assert finding.where == "mesh axis 'fsdp'"
    assert "1,000 arrays are not divisible by" in finding.message
    again = sfx.lint(
        tree, MESH, paths=sfx.PathRules([("nothing_like_it", sfx.optional(jax.P()))])
    )
    assert sum(reason.code == "unmatched" for reason in again) == 1000
    text = str(again)
    assert text.count("fix:") == 100
    assert text.endswith("and 902 more; `for finding in findings` has them all")
    assert again._repr_html_().count("<tr>") == 101


@pytest.mark.parametrize(
    "roots, count", [(("q", "k", "v"), 0), (("g", "m"), 0), (("params", "m", "v"), 1)]
)
def test_one_letter_is_a_moment_only_beside_the_other(roots, count):
    tree = {root: {"w": leaf(8192, 32768, dtype=jnp.float32)} for root in roots}
    names = {root: {"w": ("embed", "heads")} for root in roots}
    axes = sfx.AxisRules([("heads", "tensor"), ("embed", None), ("batch", "data")])
    findings = sfx.lint(
        tree, sfx.MeshSpec({"data": 2, "tensor": 4}), names=names, axes=axes
    )
    assert [reason.code for reason in findings] == ["optimizer-state"] * count


def test_one_cause_is_one_finding_whose_fix_mends_it():
    tree = {
        name: leaf(64, 64 * size, dtype=jnp.float32)
        for size, name in enumerate("abcdefghi", 1)
    }
    mesh = sfx.MeshSpec({"fsdp": 3, "tensor": 2})
    rules = sfx.PathRules.parse(".*->fsdp.tensor")
    arguments = {"tree": tree, "mesh": mesh, "paths": rules}
    (reason,) = lint(arguments)
    assert reason.code == "corrected"
    assert reason.where == "mesh axis 'fsdp'"
    assert "9 arrays are not divisible by `fsdp` (3)" in reason.message
    assert reason.fix == "paths = paths.replace(0, PartitionSpec(None, 'tensor'))"
    assert [finding.code for finding in lint(applied(reason.fix, arguments))] == [
        "unused-axis"
    ]
    # Of one array alone, too.
    (alone,) = lint({**arguments, "tree": {"a": tree["a"]}})
    assert alone.where == "a"
    assert alone.fix == reason.fix


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
            before = AxisRules([(f"taken_{axis}", axis) for axis in taken]).extend(
                rules
            )
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
    assert dead == {number for number in range(len(rules)) if number not in applied}


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
    expected |= {("unknown-name", "units 'headz'")} if unit else set()
    findings = sfx.lint(
        TREE, MESH, names=sfx.auto.renamed(TREE, names, names=NAMES), axes=axes
    )
    assert {(finding.code, finding.where) for finding in findings} == expected, str(
        findings
    )
    assert [finding.bytes for finding in findings] == sorted(
        (finding.bytes for finding in findings), reverse=True
    )


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
    expected |= {("unused-axis", "mesh axis 'pod'")} if pod else set()
    mesh = MeshSpec({"pod": 2, **MESH.shape}) if pod else MESH
    findings = sfx.lint(TREE, mesh, paths=sfx.PathRules([*first, *RULES, *last]))
    assert {(reason.code, reason.where) for reason in findings} == expected, str(
        findings
    )


SMALL = MeshSpec({"fsdp": 2, "tensor": 2})
MLP_AXES = AxisRules([("mlp", "tensor"), ("embed", "fsdp"), ("kv", None)])


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def mlp(width: int, down: int | None = None) -> dict[str, jax.ShapeDtypeStruct]:
    return {"up": f32(96, width), "down": f32(down or width, 96)}


TABLE = f32(1000, 96)
WIDE = ("wide", "embed")
NAMED = {"up": ("embed", "mlp"), "down": ("mlp", "embed")}
# What is beside three layers of width 256, its names, and where a contradiction is
# found.
CASES: dict[str, tuple[Any, Any, list[str]]] = {
    "experts of another width": ({"shared": mlp(100)}, {"shared": NAMED}, []),
    "a tower of another width": (
        {"eyes": {"up": f32(90, 200), "down": f32(200, 90)}},
        {"eyes": NAMED},
        [],
    ),
    "a name that no axis cuts": (
        {"q": f32(96, 192), "v": f32(96, 128)},
        dict.fromkeys("qv", ("embed", "kv")),
        [],
    ),
    "a product that does not fit": (
        {"odd": mlp(256, 250)},
        {"odd": NAMED},
        ["odd/down, name 'mlp'"],
    ),
    "a table under another's name": (
        {"embed": TABLE},
        {"embed": ("mlp", "embed")},
        ["embed, name 'mlp'"],
    ),
    "two tables under another's name": (
        {"embed": TABLE, "head": f32(96, 1000)},
        {"embed": ("mlp", "embed"), "head": ("embed", "mlp")},
        ["embed, name 'mlp'", "head, name 'mlp'"],
    ),
    "an alias": (
        {"embed": TABLE, "few": f32(300, 96)},
        dict.fromkeys(("embed", "few"), WIDE),
        ["few, name 'wide'"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_name_contradicts_where_its_sizes_cannot_be_meant(case):
    extra, named, expected = CASES[case]
    tree = {"layers": [mlp(256)] * 3, **extra}
    names = {"layers": [NAMED] * 3, **named}
    findings = sfx.lint(
        tree, SMALL, names=names, axes=MLP_AXES.with_alias("wide", of="mlp")
    )
    assert [
        reason.where for reason in findings if reason.code == "contradicted-name"
    ] == expected, str(findings)


@pytest.mark.parametrize(
    "name, shape, head_dim, line",
    [
        ("qkv/weight", (192, 64), 16, "warning inside heads of 16"),
        ("qkv/weight", (192, 64), None, "info inside projections of 64"),
        ("qkv/weight", (192, 64), 8, None),
        ("qkv/weight", (4608, 1536), None, "info inside heads of 128"),
        ("Wqkv/bias", (192,), 16, "warning inside heads of 16"),
        ("wqkv", (192, 64), 16, "warning inside heads of 16"),
        ("qkv_proj/weight", (96, 64), 16, "warning inside heads of 16"),
        ("query_key_value/weight", (192, 64), 16, "warning inside heads of 16"),
        ("kv_proj/weight", (64, 64), 16, "warning inside heads of 16"),
        ("in_proj/weight", (192, 64), 16, "warning inside heads of 16"),
        # Of Mamba: no projections of attention.
        ("in_proj/weight", (296, 64), 16, None),
        ("mixer/norm", (64,), 16, None),
    ],
)
def test_heads_in_fused_projections(name, shape, head_dim, line):
    tree = {"attn": {name: leaf(*shape)}}
    mesh = MeshSpec({"tensor": 8})
    rules = PathRules([(".*", P("tensor"))])
    findings = sfx.lint(tree, mesh, paths=rules, head_dim=head_dim)
    cut = [finding for finding in findings if finding.code == "cut-head"]
    if line is None:
        assert not cut
        return
    (finding,) = cut
    severity, text = line.split(" ", 1)
    assert finding.severity == severity
    assert text in finding.message
    arguments = {"tree": tree, "mesh": mesh, "paths": rules, "head_dim": head_dim}
    after = lint(applied(finding.fix, arguments))
    assert not [reason for reason in after if reason.code == "cut-head"]


def test_heads_in_the_fused_projection_of_gpt2():
    tree = {"c_attn": {"weight": leaf(64, 192), "bias": leaf(192)}}
    rules = PathRules([("weight", P(None, "tensor")), ("bias", P("tensor"))])
    findings = sfx.lint(tree, MeshSpec({"tensor": 8}), paths=rules, head_dim=16)
    assert [reason.code for reason in findings] == ["cut-head"] * 2


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("other", [None, "embed"])
def test_a_fused_projection_is_not_transposed(count, other):
    axes = AxisRules([("heads", "tensor"), ("embed", None)])
    tree = {f"proj{n}": leaf(64, 64) for n in range(count)} | {"qkv": leaf(192, 64)}
    names = {f"proj{n}": (other, "heads") for n in range(count)}
    names["qkv"] = ("heads", other)
    mesh = MeshSpec({"tensor": 4})
    assert sfx.lint(tree, mesh, names=names, axes=axes, head_dim=16) == ()
