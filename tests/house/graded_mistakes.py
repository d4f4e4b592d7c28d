"""Mistakes of somebody new, each graded by rule, and the command that prints them.

A row has four texts. `wrong` is the code of the mistake. `named` is the part of it that
the message must name. `write` is a call that the message must tell to write. `right` is
the mended code, which runs. The grade is "fix" if the message has both texts, "half" if
it has one of them, else "none".

`python -m tests.house.graded_mistakes FILE` writes all messages with their grades.
"""

import collections
import functools as ft
import os
import pathlib
import sys
import tempfile
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import shardfx as sfx
from shardfx import AxisRules, MeshSpec, PathRules, checkpoint
from tests.house import graded_calls, graded_plans
from tests.house.graded_row import Row


class Graded(NamedTuple):
    """A row with the message that its mistake gives, and the grade of the message."""

    row: Row
    message: str
    grade: str


ROWS = [*graded_plans.ROWS, *graded_calls.ROWS]


def _step(model, x):
    return (x @ model["w"]).sum()


@ft.lru_cache(maxsize=1)
def _values() -> dict[str, object]:
    spec = MeshSpec({"data": 2, "tensor": 4})
    mesh = spec.build(jax.devices())
    model = {"w": jnp.ones((8, 8)), "b": jnp.ones((8,))}
    rules = PathRules([("w", P("data")), ("b", P())])
    plan = sfx.plan(model, mesh, paths=rules)
    adam = optax.adam(1e-3)
    public_names = {name: getattr(sfx, name) for name in sfx.__all__}
    return {
        **public_names,
        "sfx": sfx,
        "jax": jax,
        "jnp": jnp,
        "np": np,
        "pathlib": pathlib,
        "tempfile": tempfile,
        "AxisType": AxisType,
        "NamedSharding": NamedSharding,
        "P": P,
        "spec": spec,
        "mesh": mesh,
        "model": model,
        "rules": rules,
        "whole": PathRules([(".*", P())]),
        "axes": AxisRules([("embed", "data"), ("mlp", "tensor")]),
        "plan": plan,
        "off": plan.off(),
        "adam": adam,
        "opt": sfx.follow(adam.init, plan),
        "x": jnp.ones((8, 8)),
        "step": _step,
    }


def namespace() -> dict[str, object]:
    """The names that the rows use, with a checkpoint `c` in the current directory."""
    values = _values()
    if not os.path.exists("c"):
        checkpoint.save("c", values["model"])
    return dict(values)


def message_of(row: Row) -> str:
    """The type and the text of the error of a mistake, with its notes; empty if it
    raises none.
    """
    try:
        exec(row.wrong, namespace())
    except Exception as error:
        notes = getattr(error, "__notes__", [])
        return "\n".join([f"{type(error).__name__}: {error}", *notes])
    return ""


def graded(row: Row) -> Graded:
    """The row with its message and the grade by the rule above."""
    message = message_of(row)
    count = (row.named in message) + (row.write in message)
    grade = ("none", "half", "fix")[count]
    return Graded(row, message, grade)


def main(path: str) -> None:
    """Writes all messages with their grades, and prints how many have each grade."""
    directory = pathlib.Path(path).resolve()
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        results = [graded(row) for row in ROWS]
    lines = []
    for number, result in enumerate(results, 1):
        lines.append(
            f"{number}. [{result.grade}] {result.row.wrong}\n{result.message}\n"
        )
    directory.write_text("\n".join(lines))
    print(collections.Counter(result.grade for result in results))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main(sys.argv[1])
