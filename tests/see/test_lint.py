"""`lint` finds what is planted, and nothing else; and each fix takes its finding away."""

from typing import Any

import equinox as eqx
import jax
import pytest

import shardfx as sfx
from tests.see.planted import CLEAN, PLANTED


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


def lint(arguments: dict[str, Any]) -> sfx.Findings:
    given = dict(arguments)
    return sfx.lint(given.pop("tree"), **given)


@pytest.mark.parametrize("clean", CLEAN)
def test_clean_rules_have_no_findings(clean):
    assert lint(CLEAN[clean]) == ()


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_found_and_nothing_else(name):
    found = lint(PLANTED[name].make())
    assert sorted((one.code, one.where) for one in found) == sorted(PLANTED[name].found), str(found)


@pytest.mark.parametrize("name", PLANTED)
def test_each_fix_takes_its_finding_away(name):
    arguments = PLANTED[name].make()
    for one in lint(arguments):
        after = lint(applied(one.fix, arguments))
        left = [other for other in after if (other.code, other.where) == (one.code, one.where)]
        assert not left, f"{one.fix}\n{after}"


@pytest.mark.parametrize("name", PLANTED)
def test_fixes_one_after_the_other_leave_nothing(name):
    arguments = PLANTED[name].make()
    found = lint(arguments)
    for _ in range(20):
        if not found:
            break
        arguments = applied(found[0].fix, arguments)
        found = lint(arguments)
    assert found == (), f"findings are left: {found}"


@pytest.mark.parametrize("name", [name for name in PLANTED if "a moment" not in name])
def test_an_error_is_found_exactly_where_plan_raises(name):
    arguments = PLANTED[name].make()
    found = lint(arguments)
    given = {key: value for key, value in arguments.items() if key not in ("replicated_bytes", "head_dim")}
    tree, mesh = given.pop("tree"), given.pop("mesh")
    if any(one.severity == "error" for one in found):
        with pytest.raises(ValueError):
            sfx.plan(tree, mesh, **given)
    else:
        sfx.plan(tree, mesh, **given)
