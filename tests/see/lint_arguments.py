"""Calls of `lint`, and the fixes that it gives, carried out."""

from typing import Any

import equinox as eqx
import jax

import shardfx as sfx
from shardfx.results import Findings


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
        "P": jax.sharding.PartitionSpec,
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


def lint(arguments: dict[str, Any]) -> Findings:
    options = dict(arguments)
    return sfx.lint(options.pop("tree"), **options)


def found_in(text: str) -> list[tuple[str, ...]]:
    """The codes and places of findings that are written as a text."""
    return [tuple(line.split(" ", 1)) for line in text.split("; ")]
