# pyright: reportArgumentType=false
"""Mistakes that somebody new made, each with a part of the message that has the fix."""

import dataclasses
import itertools
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import shardfx as sfx
from shardfx import AxisRules, MeshSpec, PathRules


MESH = MeshSpec({"data": 8}).build(jax.devices())
RULES = PathRules([(".*", sfx.fsdp("data"))])
MODEL = {"w": jnp.ones((8, 8)), "b": jnp.ones((8,))}
PLAN = sfx.plan(MODEL, MESH, paths=RULES)
ADAM = optax.adam(1e-3)
STATE = ADAM.init(MODEL)
OPT = sfx.follow(ADAM.init, PLAN)
JOINT = {"model": MODEL, "opt": STATE}
# JAX 0.9 names the value, and not its type, which has the fix.
IN_TREE_MAP = "write `plan.shardings`"
if jax.__version_info__ < (0, 10):
    IN_TREE_MAP = "got ShardPlan"


def step(model, opt):
    return model, opt


def swapped():
    return sfx.filter_jit(step, in_shardings=(PLAN, OPT))(STATE, MODEL)


def a_plan_where_jit_takes_shardings():
    return jax.jit(lambda x: x, in_shardings=(PLAN,))(MODEL)


def a_plan_as_in_shardings():
    return jax.jit(lambda x: x, in_shardings=PLAN)(MODEL)


def a_plan_as_out_shardings():
    return jax.jit(lambda x: x, out_shardings=PLAN)(MODEL)


def a_plan_among_out_shardings():
    return jax.jit(step, out_shardings=(PLAN, None))(MODEL, STATE)


def a_plan_mapped_over():
    return jax.tree.map(lambda x, s: x, MODEL, PLAN)


def axis_rules_by_position():
    return sfx.plan(MODEL, MESH, AxisRules([("a", None)]))


def axis_rules_as_paths():
    return sfx.plan(MODEL, MESH, paths=AxisRules([("a", None)]))


def the_plan_of_a_joint_tree_for_a_model():
    return sfx.shard(MODEL, sfx.ShardPlan.join(model=PLAN, opt=OPT))


MISTAKES = {
    "a plan where jit takes shardings": (
        a_plan_where_jit_takes_shardings,
        "write `plan.shardings`",
    ),
    "a plan as in_shardings": (
        a_plan_as_in_shardings,
        "write `plan.shardings`",
    ),
    "a plan as out_shardings": (
        a_plan_as_out_shardings,
        "write `plan.shardings`",
    ),
    "a plan among out_shardings": (
        a_plan_among_out_shardings,
        "write `plan.shardings`",
    ),
    "a plan where device_put takes shardings": (
        lambda: jax.device_put(MODEL, PLAN),
        "write `plan.shardings`",
    ),
    "a plan where filter_shard takes shardings": (
        lambda: eqx.filter_shard(MODEL, PLAN),
        "write `plan.shardings`",
    ),
    "a plan where a constraint takes shardings": (
        lambda: jax.lax.with_sharding_constraint(MODEL, PLAN),
        "write `plan.shardings`",
    ),
    "a plan mapped over": (
        a_plan_mapped_over,
        IN_TREE_MAP,
    ),
    "the form of jax.make_mesh": (
        lambda: MeshSpec((2, 4), ("data", "model")),
        r"write `MeshSpec\(dict\(zip\(names, sizes\)\)\)`",
    ),
    "rules by position": (
        lambda: sfx.plan(MODEL, MESH, RULES),
        r"`plan\(tree, mesh, paths=rules\)`",
    ),
    "axis rules by position": (
        axis_rules_by_position,
        r"`plan\(tree, mesh, axes=rules\)`",
    ),
    "axis rules as paths": (
        axis_rules_as_paths,
        "write `axes=` for them",
    ),
    "path rules as axes": (
        lambda: sfx.plan(MODEL, MESH, axes=RULES),
        "write `paths=` for them",
    ),
    "the plan of a model for an optimizer": (
        lambda: sfx.shard(STATE, PLAN),
        r"state of an optimizer: its plan is `follow\(optimizer.init, plan\)`",
    ),
    "the plan of a model for a joint tree": (
        lambda: sfx.shard(JOINT, PLAN),
        r"`ShardPlan.join\(model=plan, ...\)`",
    ),
    "saving a joint tree under the plan of a model": (
        lambda: sfx.checkpoint.save("unused", JOINT, PLAN),
        r"`ShardPlan.join\(model=plan, ...\)`",
    ),
    "the plan of a joint tree for a model": (
        the_plan_of_a_joint_tree_for_a_model,
        "holds this one, at `model`",
    ),
    "arguments in another order": (
        swapped,
        "The plan of argument 1 fits this argument",
    ),
    "a path that comes second": (
        lambda: sfx.checkpoint.save(MODEL, "unused"),
        r"write `save\(path, tree, plan\)`",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_message_has_the_fix(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, fix = MISTAKES[name]
    with pytest.raises((TypeError, ValueError), match=fix):
        call()
    assert not list(tmp_path.iterdir())


def test_a_report_of_any_width_says_why():
    names = {"w": ("embed", "mlp"), "b": ("mlp",)}
    axes = AxisRules([("embed", "data"), ("mlp", None)])
    plan = sfx.plan(MODEL, MESH, names=names, axes=axes)
    for width in (60, 72, 88, 110, 200):
        text = sfx.report(plan, width=width)
        lines = text.splitlines()
        assert max(map(len, lines[:3])) <= width
        for line in lines[1:3]:
            assert "names (" in line, text


def test_fixes_of_all_findings_without_rules_agree():
    struct = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    shapes = {
        "a": struct,
        "b": jax.ShapeDtypeStruct((4096, 1024), jnp.float32),
        "c": jax.ShapeDtypeStruct((1024, 4096), jnp.float32),
    }
    mesh = MeshSpec({"data": 8, "fsdp": 4})
    findings = sfx.lint(shapes, mesh)
    assert len(findings) == 3
    space = {"PathRules": PathRules, "fsdp": sfx.fsdp, "paths": None}
    for finding in findings:
        exec(finding.fix, space)
    plan = sfx.plan(shapes, mesh, paths=space["paths"])
    entries = set(itertools.chain.from_iterable(leaf.spec for leaf in plan.leaves))
    assert entries - {None} == {"fsdp"}
    assert not sfx.lint(shapes, mesh, paths=space["paths"]).worst("warning")


def test_a_page_shows_the_lines_of_a_fix():
    struct = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    tree = {"w": struct}
    findings = sfx.lint(tree, MeshSpec({"data": 8}))
    finding = findings[0]
    two_lines = dataclasses.replace(finding, fix="paths = 1\naxes = 2")
    page = sfx.html_report(PLAN, findings=(two_lines,))
    assert json.dumps("paths = 1\naxes = 2") in page
