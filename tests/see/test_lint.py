"""`lint` finds exactly the planted mistakes, and each fix removes its finding; laws
over random rules.
"""

import contextlib
import functools as ft
import itertools
import re
import time
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
from tests.see.lint_arguments import applied, found_in, lint
from tests.see.planted import (
    AXES,
    CLEAN,
    MESH,
    PLANTED,
    moments,
)
from tests.structs import leaf


@pytest.mark.parametrize("clean", CLEAN)
def test_clean_rules_have_no_findings(clean):
    assert lint(CLEAN[clean]) == ()


@pytest.mark.parametrize("planted_code, planted", PLANTED)
def test_lint_finds_a_planted_mistake_and_its_fix_mends_it(planted_code, planted):
    arguments = planted()
    expected = found_in(planted_code)
    findings = lint(arguments)
    actual = sorted((reason.code, reason.where) for reason in findings)
    assert actual == sorted(expected), str(findings)
    for finding in findings:
        after = lint(applied(finding.fix, arguments))
        codes = {other.code for other in after.worst("error")}
        limit = {other.code for other in findings.worst("error")}
        assert codes <= limit, finding.fix
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
        if findings.worst("error"):
            raises = pytest.raises(ValueError)
        else:
            raises = contextlib.nullcontext()
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
    codes = {finding.code for finding in after.worst("error")}
    assert codes <= {"shadowed-rule"}, after
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
    codes = set()
    for planted_code, _ in PLANTED:
        codes.update(code for code, _ in found_in(planted_code))
    assert codes == set(CODES)
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
    joined = sfx.ShardPlan.join(params=ours, opt=follow(ours))
    actual = sfx.lint(joined)
    assert actual == ()
    plan = sfx.ShardPlan.join(params=ours, opt=follow(theirs))
    findings = sfx.lint(plan)
    actual = [(reason.code, reason.where) for reason in findings]
    assert actual == [
        ("optimizer-state", f"opt/0/{moment}/up") for moment in ("mu", "nu")
    ]
    assert findings[0].message.startswith(
        "it lies as P('tensor', 'fsdp'), its parameter as P('fsdp', 'tensor'): "
    )
    for finding in findings:
        plan = applied(finding.fix, {"tree": plan})["tree"]
    assert sfx.lint(plan) == ()


def test_lint_of_a_plan_has_no_findings_about_dead_rules():
    rules = [("embed", "fsdp"), ("embed", "fsdp")]
    axes = sfx.AxisRules(rules)
    names = {"w": ("embed", None)}
    sharding_plan = sfx.plan({"w": leaf(512, 512)}, MESH, axes=axes, names=names)
    findings = sfx.lint(sharding_plan)
    assert findings == ()


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
    opt = sfx.follow(optimizer(1e-3).init, sharding_plan)
    plan = sfx.ShardPlan.join(params=sharding_plan, opt=opt)
    assert sfx.lint(plan) == ()
    plan = plan.replace(f"^{path.format('[01]')}$", spec)
    (reason,) = sfx.lint(plan).without("replicated")
    assert reason.code == "optimizer-state", str(reason)
    assert reason.where == path.format("{0..1}"), str(reason)
    assert reason.message.startswith(
        f"it is sharded over {less}, its parameter over {larger}"
    ), reason.message
    assert reason.bytes > 0
    tree = applied(reason.fix, {"tree": plan})["tree"]
    findings = sfx.lint(tree)
    assert findings == ()


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


def test_a_dimension_of_several_names_gets_one_that_reads():
    axes = sfx.AxisRules([("heads", "tensor"), ("dim", "fsdp"), ("embed", None)])
    arguments = {
        "tree": {"w": leaf(512, 1538)},
        "mesh": sfx.MeshSpec({"fsdp": 2, "tensor": 4}),
        "names": {"w": ("embed", ("heads", "dim"))},
        "axes": axes,
    }
    (finding,) = lint(arguments)
    assert "axes.extend([('heads_dim_1538', 'fsdp')])" in finding.fix
    codes = [other.code for other in lint(applied(finding.fix, arguments))]
    assert "corrected" not in codes


def test_severities_follow_the_arguments():
    tree = {"w": leaf(7, 8, dtype=jnp.float32)}
    mesh = MESH
    rules = sfx.PathRules([("w", jax.P("fsdp", "tensor")), ("nothing", jax.P())])
    loose = sfx.lint(tree, mesh, paths=rules, unused="allow")
    actual = [(finding.code, finding.severity) for finding in loose]
    assert actual == [
        ("corrected", "warning"),
        ("unused-rule", "warning"),
    ]
    strict = sfx.lint(tree, mesh, paths=rules, strict=True)
    actual = [(finding.code, finding.severity) for finding in strict]
    assert actual == [
        ("corrected", "error"),
        ("unused-rule", "error"),
    ]
    codes = [reason.code for reason in strict.without("corrected").worst("error")]
    assert codes == ["unused-rule"]
    assert repr(strict) == str(strict)
    findings = sfx.lint(tree, mesh, paths=rules.drop(1))
    text = str(findings)
    assert text.startswith("1 finding: 1 w")


def test_a_refined_mesh_takes_what_it_can():
    key = {"k": leaf(256, 64, dtype=jnp.float32)}
    mesh = sfx.MeshSpec({"tensor": 4})
    rules = sfx.PathRules([("k", sfx.atomic(jax.P("tensor"), (128, 1)))])
    (finding,) = sfx.lint(key, mesh, paths=rules)
    assert finding.code == "corrected"
    assert finding.severity == "info"
    assert finding.fix == "refine = True"
    findings = sfx.lint(key, mesh, paths=rules, refine=True)
    assert findings == ()
    odd = {"k": leaf(7, 64, dtype=jnp.float32)}
    path_rules = sfx.PathRules.parse("k->tensor")
    (finding,) = sfx.lint(odd, mesh, paths=path_rules, refine=True)
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
    actual = {(reason.code, reason.where) for reason in findings}
    assert actual == {
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
    rules = sfx.PathRules([("nothing_like_it", sfx.optional(jax.P()))])
    again = sfx.lint(tree, MESH, paths=rules)
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
    rules = [("heads", "tensor"), ("embed", None), ("batch", "data")]
    axes = sfx.AxisRules(rules)
    mesh = sfx.MeshSpec({"data": 2, "tensor": 4})
    findings = sfx.lint(tree, mesh, names=names, axes=axes)
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
    assert reason.fix == "paths = paths.replace(0, P(None, 'tensor'))"
    findings = lint(applied(reason.fix, arguments))
    codes = [finding.code for finding in findings]
    assert codes == ["unused-axis"]
    # Of one array alone, too.
    (alone,) = lint({**arguments, "tree": {"a": tree["a"]}})
    assert alone.where == "a"
    assert alone.fix == reason.fix


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"head_dim": 0}, "`head_dim` is the number of elements of an attention head"),
        ({"head_dim": 64.5}, "not 64.5; write it as in `head_dim=128`"),
        ({"head_dim": True}, "`head_dim` is the number of elements"),
        ({"min_bytes": "1MB"}, "`min_bytes` is a number of bytes, not '1MB'"),
        ({"min_bytes": None}, "`min_bytes` is a number of bytes, not None"),
        ({"replicated_bytes": "1MB"}, "`replicated_bytes` is a number of bytes"),
        ({"unmatched": "allow"}, "`unmatched='allow'` is no policy of `lint`; use \"r"),
        ({"unused": "replicate"}, "`unused='replicate'` is no policy of `lint`"),
    ],
)
def test_values_that_an_argument_cannot_have_are_refused(wrong, message):
    tree = {"q_proj": {"weight": jax.ShapeDtypeStruct((256, 256), jnp.float32)}}
    rules = sfx.PathRules.parse("weight->tensor")
    with pytest.raises(sfx.errors.RuleError, match=re.escape(message)):
        sfx.lint(tree, MESH, paths=rules, **wrong)


def test_a_numpy_integer_is_a_width_of_heads():
    tree = {
        "q_proj": {"weight": jax.ShapeDtypeStruct((192, 256), jnp.float32)},
        "k_proj": {"weight": jax.ShapeDtypeStruct((64, 256), jnp.float32)},
    }
    rules = sfx.PathRules.parse("weight->tensor")
    mesh = sfx.MeshSpec({"tensor": 4})
    found = sfx.lint(tree, mesh, paths=rules, head_dim=64)
    assert [finding.code for finding in found] == ["cut-head", "cut-head"]
    head_dim: Any = np.int64(64)
    assert sfx.lint(tree, mesh, paths=rules, head_dim=head_dim) == found


def test_a_name_of_an_empty_dimension_has_no_usual_size():
    tree = {"w": jax.ShapeDtypeStruct((0, 8), jnp.float32)}
    axes = sfx.AxisRules([("rows", "tensor"), ("columns", "fsdp")])
    findings = sfx.lint(tree, MESH, names={"w": ("rows", "columns")}, axes=axes)
    assert "contradicted-name" not in [finding.code for finding in findings]


def test_lint_is_no_product_of_arrays_at_the_root():
    # A checkpoint without branches: each array is a branch, and none is a state.
    tree = {f"layer{number}": {"w": leaf(8, 8)} for number in range(4000)}
    plan = sfx.plan(tree, MESH, paths=sfx.PathRules([("w", sfx.replicate)]))
    begin = time.process_time()
    assert sfx.lint(plan) == ()
    # A product of 4000 arrays takes half a minute; this is no measurement of speed.
    assert time.process_time() - begin < 10
