"""Explicit axes beside Auto axes: `python -m benchmarks.explicit models|search|aot`.

`models` constrains the steps of `_zoo.py` by the same rules on a mesh with Auto axes
and on `jax.make_mesh` as it comes. It compares results, types, placement, and the bytes
that a step sends. `aot` does so with libtpu for a slice. `search` searches the twelve
steps of `_explicit_steps.py` in the typed form and in the plain one. `--json FILE`
keeps the results, `--only` takes parts of names.
"""

import argparse
import functools as ft
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import shardfx as sfx

from ._explicit_steps import AXES, STEPS, Form
from ._zoo import small_models


MESH_AXES = ("data", "fsdp", "tensor")
RULES = sfx.AxisRules(
    [
        ("batch", "data"),
        ("embed", "fsdp"),
        ("heads", "tensor"),
        ("kv_heads", "tensor"),
        ("experts", "tensor"),
        ("mlp", "tensor"),
        ("vocab", "tensor"),
        # Of convolutions.
        ("channels", "tensor"),
    ]
)
Row = dict[str, Any]


class Planned(NamedTuple):
    """A step on a mesh: jitted, with its plans."""

    step: Any
    plans: tuple[sfx.ShardPlan, ...]


def planned(step: Any, args: Any, named: sfx.auto.NamedAxes, mesh: Any) -> Planned:
    """The constrained step of a mesh. Results with the structure of an argument, the
    state, lie as it does.
    """
    of_step = [axis.name for axis in named.axes]
    rules = RULES.without(*(name for name in RULES.names if name not in of_step))
    plans = tuple(
        sfx.plan(
            arg,
            mesh,
            names=tree,
            axes=rules,
            unmatched="replicate",
            unused="allow",
        )
        for arg, tree in zip(args, named.names, strict=True)
    )
    constrained = sfx.auto.constrain_step(step, mesh, rules)
    results = len(jax.eval_shape(step, *args))
    shardings = tuple(plan.shardings for plan in plans[:results])
    return Planned(jax.jit(constrained, out_shardings=shardings), plans)


def values_of(args: Any) -> Any:
    """Numbers for structs: small normal ones, moments that are no less than 0, and
    tokens.
    """
    rng = np.random.default_rng(0)

    def value(struct):
        if jnp.issubdtype(struct.dtype, jnp.integer):
            return jnp.asarray(rng.integers(0, 8, struct.shape), struct.dtype)
        return jnp.asarray(rng.normal(size=struct.shape) * 0.1, struct.dtype)

    params, first, second, *data = jax.tree.map(value, args)
    return params, first, jax.tree.map(jnp.square, second), *data


def kinds_of_mesh(size: tuple[int, ...]) -> dict[str, Any]:
    auto = (AxisType.Auto,) * len(size)
    return {
        "Auto": jax.make_mesh(size, MESH_AXES, axis_types=auto),
        "Explicit": jax.make_mesh(size, MESH_AXES),
    }


def compared(step: Any, *args: Any) -> Row:
    names = sfx.auto.name_axes(step, *args)
    values = values_of(args)
    results = {}
    row: Row = {}
    for kind, mesh in kinds_of_mesh((2, 2, 2)).items():
        jitted, plans = planned(step, args, names, mesh)
        placed = tuple(map(sfx.shard, values, plans))
        compiled = jitted.lower(*placed).compile()
        row[f"bytes, {kind}"] = sfx.cost.traffic(compiled, mesh).wire_bytes
        state = compiled(*placed)
        results[kind] = jax.tree.map(np.asarray, state)
        misplaced = [sfx.misplaced(*pair) for pair in zip(state, plans, strict=False)]
        row[f"misplaced, {kind}"] = sum(map(len, misplaced))
        if kind == "Explicit":
            row["types"] = types_are_planned(state, plans)
    differences = jax.tree.map(difference, results["Auto"], results["Explicit"])
    row["difference"] = max(jax.tree.leaves(differences))
    row["bytes"] = row["bytes, Explicit"] / row["bytes, Auto"]
    return row


def difference(left: np.ndarray, right: np.ndarray) -> float:
    return float(np.abs(left - right).max() / (np.abs(left).max() + 1e-30))


def types_are_planned(state: Any, plans: tuple[sfx.ShardPlan, ...]) -> bool:
    """Whether the type of each result has the spec of the plan."""
    return all(
        tree == plan.specs
        for tree, plan in zip(map(sfx.specs_of, state), plans, strict=False)
    )


def of_libtpu(target: str, step: Any, *args: Any) -> Row:
    """The bytes of the compiled steps for a slice of 16 chips, without a TPU."""
    names = sfx.auto.name_axes(step, *args)
    row: Row = {}
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = sfx.MeshSpec({"data": 4, "fsdp": 2, "tensor": 2}, axis_types=kind)
        jitted, plans = planned(step, args, names, mesh)
        structs = tuple(plan.structs for plan in plans)
        compiled = sfx.cost.compile_for(jitted, *structs, target=target)
        row[f"bytes, {kind.name}"] = sfx.cost.traffic(compiled, mesh).wire_bytes
    row["bytes"] = row["bytes, Explicit"] / row["bytes, Auto"]
    return row


def searched(name: str, effort: Any) -> Row:
    """The answers for both forms of a step. Their seconds and bytes are of XLA's
    programs.
    """
    make = STEPS[name]
    row: Row = {}
    answers = {}
    for is_typed in (False, True):
        form = "typed" if is_typed else "plain"
        step, args = make(Form(is_typed))
        begin = time.process_time()
        options: Any = {
            "devices": 8,
            "chip": "v5e",
            "keep": 3,
            "effort": effort,
        }
        if is_typed:
            with jax.set_mesh(jax.make_mesh((4, 2), AXES)):
                found = sfx.auto.search(step, *args, **options)
        else:
            found = sfx.auto.search(step, *args, **options)
        row[f"processor seconds, {form}"] = time.process_time() - begin
        answers[form] = [
            (str(each.mesh), str(each.rules.rules), each.memory_bytes, each.seconds)
            for each in found
        ]
    row["answers"] = answers
    plain = answers["plain"]
    typed = answers["typed"]
    row["same best"] = plain[0][:3] == typed[0][:3]
    row["same"] = [answer[:3] for answer in plain] == [answer[:3] for answer in typed]
    return row


def rows_of(flags: argparse.Namespace) -> dict[str, Callable[[], Row]]:
    if flags.command == "search":
        return {name: lambda name=name: searched(name, flags.effort) for name in STEPS}
    measure = compared
    if flags.command == "aot":
        measure = ft.partial(of_libtpu, flags.slice)
    return {
        name: lambda make=make: measure(*make())
        for name, make in small_models().items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("models", "search", "aot"))
    parser.add_argument("--only", default="", help="parts of names, with commas")
    parser.add_argument("--slice", default="tpu:v5e:4x4", help="for `aot`: 16 chips")
    parser.add_argument("--effort", default="usual", choices=("usual", "least"))
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    rows = {}
    for name, measure in rows_of(flags).items():
        if not any(part in name for part in flags.only.split(",")):
            continue
        rows[name] = measure()
        shown = {key: value for key, value in rows[name].items() if key != "answers"}
        print(name, shown, flush=True)
        if flags.json:
            flags.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
