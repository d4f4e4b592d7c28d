"""`lint` finds what is planted, and nothing else; and each fix takes its finding away."""

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
from jax.sharding import PartitionSpec as P

import shardfx as sfx
from shardfx._see.finding import CODES
from tests.see.planted import AXES, CLEAN, FOUND, MESH, PLANTED, leaf, moments


def applied(fix: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `lint` after the statements of a fix."""
    known = {"names": None, "paths": None, "axes": None, "mode": None, "memory_kinds": None}
    space = {**{name: getattr(sfx, name) for name in sfx.__all__}, "PartitionSpec": jax.sharding.PartitionSpec}
    space |= {"eqx": eqx, **known, **arguments}
    before = dict(space)
    exec(fix, space)
    changed = {name: value for name, value in space.items() if name != "__builtins__" and before.get(name) is not value}
    assert changed, f"the fix changes nothing: {fix}"
    return {**arguments, **changed}


def lint(arguments: dict[str, Any]) -> sfx._see.Findings:
    given = dict(arguments)
    return sfx.lint(given.pop("tree"), **given)


def found_in(name: str) -> list[tuple[str, ...]]:
    """The codes and places of the findings that a planted mistake must be."""
    texts = FOUND[name]
    return [tuple(text.split(" ", 1)) for text in ([texts] if isinstance(texts, str) else texts)]


@pytest.mark.parametrize("clean", CLEAN)
def test_clean_rules_have_no_findings(clean):
    assert lint(CLEAN[clean]) == ()


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_found_and_nothing_else_and_each_fix_takes_its_finding_away(name):
    arguments, expected = PLANTED[name](), found_in(name)
    found = lint(arguments)
    assert sorted((one.code, one.where) for one in found) == sorted(expected), str(found)
    for one in found:
        after = lint(applied(one.fix, arguments))
        assert {other.code for other in after.worst("error")} <= {other.code for other in found.worst("error")}, one.fix
        left = [other for other in after if (other.code, other.where) == (one.code, one.where)]
        assert not left, f"{one.fix}\n{after}"
    given = {key: value for key, value in arguments.items() if key not in ("replicated_bytes", "head_dim")}
    if not isinstance(given["tree"], sfx.ShardPlan):
        raises = pytest.raises(ValueError) if found.worst("error") else contextlib.nullcontext()
        with raises:
            sfx.plan(given.pop("tree"), given.pop("mesh"), **given)
    for _ in range(20):
        if not found:
            break
        arguments = applied(found[0].fix, arguments)
        found = lint(arguments)
    assert found == (), f"findings are left: {found}"


def test_every_kind_of_finding_is_planted_and_on_the_page():
    assert {code for name in PLANTED for code, _ in found_in(name)} == set(CODES)
    page = (Path(__file__).parents[2] / "docs" / "look.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \| (.*) \|$", page, re.M)
    assert dict(rows) == dict(CODES)


@pytest.mark.parametrize("spec, how, count", [(None, {}, 2 * (8192 + 1)), (P("fsdp"), {"over": "data"}, 8192)])
def test_what_zero_would_save_is_told(spec, how, count):
    (found,) = sfx.lint(moments(spec, **how))
    # Of two moments, or of one, in two pieces that could be eight.
    assert (found.severity, found.bytes) == ("warning", count * 4096 * 4 // 2 * 3 // 4)


def test_a_state_that_follows_another_plan_is_told():
    params = {name: leaf(512, 512, dtype=jnp.float32) for name in ("up", "down")}
    mesh = sfx.MeshSpec({"fsdp": 4, "tensor": 2})
    ours = sfx.plan(params, mesh, paths=sfx.PathRules.parse("up->fsdp.tensor, down->tensor.fsdp"))
    theirs = sfx.plan(params, mesh, paths=sfx.PathRules.parse("up->tensor.fsdp, down->tensor.fsdp"))
    follow = ft.partial(sfx.follow, optax.adam(1e-3).init)
    assert sfx.lint(sfx.ShardPlan.join(params=ours, opt=follow(ours))) == ()
    plan = sfx.ShardPlan.join(params=ours, opt=follow(theirs))
    found = sfx.lint(plan)
    assert [(one.code, one.where) for one in found] == [("optimizer-state", f"opt/0/{at}/up") for at in ("mu", "nu")]
    assert found[0].message.startswith("it lies as P('tensor', 'fsdp'), its parameter as P('fsdp', 'tensor'): ")
    for one in found:
        plan = applied(one.fix, {"tree": plan})["tree"]
    assert sfx.lint(plan) == ()


def test_a_plan_is_what_its_rules_have_made_so_dead_rules_are_no_findings():
    axes, names = sfx.AxisRules([("embed", "fsdp"), ("embed", "fsdp")]), {"w": ("embed", None)}
    assert sfx.lint(sfx.plan({"w": leaf(512, 512)}, MESH, axes=axes, names=names)) == ()


# A state of each optimizer that is not as its parameter, with a spec that is less than it could have.
LESS = {
    "adafactor, rows": (optax.adafactor, "opt/0/v_row/layers/{}/w", jax.P(), "nothing", "`fsdp`"),
    "adafactor, columns": (optax.adafactor, "opt/0/v_col/layers/{}/w", jax.P(), "nothing", "`tensor`"),
    "sm3": (optax.sm3, "opt/0/mu/layers/{}/w/1", jax.P(), "nothing", "`tensor`"),
    "l-bfgs": (
        optax.lbfgs,
        "opt/0/diff_params_memory/layers/{}/w",
        jax.P(None, "fsdp"),
        "`fsdp`",
        "`fsdp` and `tensor`",
    ),
}


@pytest.mark.parametrize("which", LESS)
def test_a_state_of_another_shape_than_its_parameter_is_compared_with_it(which):
    optimizer, path, spec, less, more = LESS[which]
    layer = {"w": leaf(4096, 8192, dtype=jnp.float32), "b": leaf(8192, dtype=jnp.float32)}
    params = {"layers": [layer] * 2, "square": leaf(4096, 4096, dtype=jnp.float32)}
    made = sfx.plan(params, MESH, paths=sfx.PathRules.parse("w|square->fsdp.tensor, b->tensor"))
    plan = sfx.ShardPlan.join(params=made, opt=sfx.follow(optimizer(1e-3).init, made))
    assert sfx.lint(plan) == ()
    plan = plan.replace(f"^{path.format('[01]')}$", spec)
    (found,) = sfx.lint(plan).without("replicated")
    assert (found.code, found.where) == ("optimizer-state", path.format("{0..1}")), str(found)
    assert found.message.startswith(f"it is sharded over {less}, its parameter over {more}"), found.message
    assert found.bytes > 0
    assert sfx.lint(applied(found.fix, {"tree": plan})["tree"]) == ()


def test_a_module_with_functions_and_names_of_its_own():
    class Dense(eqx.Module):
        weight: jax.ShapeDtypeStruct = sfx.field(names=("mlp", "embd"))
        call: Callable[..., Any] = jnp.tanh

    arguments = {"tree": [Dense(leaf(8, 16, dtype=jnp.float32))] * 2, "mesh": MESH, "axes": AXES}
    (found,) = lint(arguments)
    assert (found.code, found.where) == ("unknown-name", "name 'embd'")
    assert lint(applied(found.fix, arguments)) == ()
    # Its names, from outside.
    names = sfx.auto.renamed(arguments["tree"], {".*": ("mlp", "embed")})
    assert lint({**arguments, "names": names}) == ()


def test_severities_follow_the_arguments():
    tree, mesh = {"w": leaf(7, 8, dtype=jnp.float32)}, MESH
    rules = sfx.PathRules([("w", jax.P("fsdp", "tensor")), ("nothing", jax.P())])
    loose = sfx.lint(tree, mesh, paths=rules, unused="allow")
    assert [(one.code, one.severity) for one in loose] == [("corrected", "warning"), ("unused-rule", "warning")]
    strict = sfx.lint(tree, mesh, paths=rules, strict=True)
    assert [(one.code, one.severity) for one in strict] == [("corrected", "error"), ("unused-rule", "error")]
    assert [one.code for one in strict.without("corrected").worst("error")] == ["unused-rule"]
    assert repr(strict) == str(strict) and str(sfx.lint(tree, mesh, paths=rules.drop(1))).startswith("1 finding: 1 w")


def test_a_refined_mesh_takes_what_it_can():
    key = {"k": leaf(256, 64, dtype=jnp.float32)}
    mesh, rules = sfx.MeshSpec({"tensor": 4}), sfx.PathRules([("k", sfx.atomic(jax.P("tensor"), (128, 1)))])
    (found,) = sfx.lint(key, mesh, paths=rules)
    assert (found.code, found.severity, found.fix) == ("corrected", "info", "refine = True")
    assert sfx.lint(key, mesh, paths=rules, refine=True) == ()
    odd = {"k": leaf(7, 64, dtype=jnp.float32)}
    (found,) = sfx.lint(odd, mesh, paths=sfx.PathRules.parse("k->tensor"), refine=True)
    arguments = {"tree": odd, "mesh": mesh, "paths": sfx.PathRules.parse("k->tensor"), "refine": True}
    assert lint(applied(found.fix, arguments)) == ()


def test_strange_dtypes_and_sizes():
    tree = {"key": jax.random.key(0), "numpy": np.ones((4, 4)), "int4": leaf(8, 8, dtype=jnp.int4)}
    tree |= {"none": leaf(0, 3, dtype=bool), "fp8": leaf(3, 5, dtype=jnp.float8_e4m3fn)}
    found = sfx.lint(tree, MESH, paths=sfx.PathRules.parse("key->replicate, .*->fsdp.tensor"))
    assert {(one.code, one.where) for one in found} == {("corrected", "fp8"), ("corrected", "none")}


def test_thousands_of_findings_are_made_fast_and_shown_in_part():
    names = ["".join(letters) for letters in itertools.product("abcdefghij", repeat=3)]
    tree = {name: leaf(7, 8, dtype=jnp.float32) for name in names}
    found = sfx.lint(tree, MESH, paths=sfx.PathRules.parse(".*->fsdp.tensor"))
    (one,) = found  # of one cause
    assert (one.code, one.where) == ("corrected", "mesh axis 'fsdp'")
    assert "1,000 arrays are not divisible by" in one.message
    again = sfx.lint(tree, MESH, paths=sfx.PathRules([("nothing_like_it", sfx.optional(jax.P()))]))
    assert sum(one.code == "unmatched" for one in again) == 1000
    text = str(again)
    assert text.count("fix:") == 100 and text.endswith("and 902 more; `for finding in findings` has them all")
    assert again._repr_html_().count("<tr>") == 101


@pytest.mark.parametrize("roots, count", [(("q", "k", "v"), 0), (("g", "m"), 0), (("params", "m", "v"), 1)])
def test_one_letter_is_a_moment_only_beside_the_other(roots, count):
    tree = {root: {"w": leaf(8192, 32768, dtype=jnp.float32)} for root in roots}
    names = {root: {"w": ("embed", "heads")} for root in roots}
    axes = sfx.AxisRules([("heads", "tensor"), ("embed", None), ("batch", "data")])
    found = sfx.lint(tree, sfx.MeshSpec({"data": 2, "tensor": 4}), names=names, axes=axes)
    assert [one.code for one in found] == ["optimizer-state"] * count


def test_one_cause_is_one_finding_whose_fix_mends_it():
    tree = {name: leaf(64, 64 * size, dtype=jnp.float32) for size, name in enumerate("abcdefghi", 1)}
    mesh, rules = sfx.MeshSpec({"fsdp": 3, "tensor": 2}), sfx.PathRules.parse(".*->fsdp.tensor")
    given = {"tree": tree, "mesh": mesh, "paths": rules}
    (found,) = lint(given)
    assert (found.code, found.where) == ("corrected", "mesh axis 'fsdp'")
    assert "9 arrays are not divisible by `fsdp` (3)" in found.message
    assert found.fix == "paths = paths.replace(0, PartitionSpec(None, 'tensor'))"
    assert [one.code for one in lint(applied(found.fix, given))] == ["unused-axis"]
    # Of one array alone, too.
    (alone,) = lint({**given, "tree": {"a": tree["a"]}})
    assert alone.where == "a" and alone.fix == found.fix
