"""Models of other people on Explicit axes: `python -m benchmarks.foreign`.

Each model knows nothing of shardings and trains for a few steps on
`jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"))`, whose axes are Explicit, by
`shardfx.auto.constrain_step` and by `shardfx.auto.auto_axes`. Its losses are compared
with those of the same steps on one device. `--json FILE` keeps the results, `--models`
takes parts of names.
"""

import argparse
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
import optax

import shardfx as sfx

from ._foreign_base import Model
from ._foreign_models import MODELS


STEPS = 4
MOST = 1e-5
WAYS = ("constrain_step", "auto_axes")
AXES = ("data", "fsdp", "tensor")


class Run(NamedTuple):
    """The losses of a few steps, and the paths of the arrays that did not lie as
    planned after them.
    """

    losses: list[float]
    misplaced: list[str]


class State(NamedTuple):
    """What a step updates."""

    model: Any
    moments: Any


def step_of(model: Model) -> Callable[..., Any]:
    """A training step as equinox's users write it."""
    optimizer = optax.adamw(1e-3)

    def step(state: State, batch: tuple[Any, ...]):
        value, grads = eqx.filter_value_and_grad(model.loss)(state.model, *batch)
        params = eqx.filter(state.model, eqx.is_inexact_array)
        updates, moments = optimizer.update(grads, state.moments, params)
        return State(eqx.apply_updates(state.model, updates), moments), value

    return step


def state_of(model: Model) -> State:
    params = eqx.filter(model.model, eqx.is_inexact_array)
    return State(model.model, optax.adamw(1e-3).init(params))


def trained(step: Callable[..., Any], state: Any, batch: Any) -> tuple[Any, list[Any]]:
    losses = []
    for _ in range(STEPS):
        state, value = step(state, batch)
        losses.append(float(value))
    return state, losses


def rules_for(names: sfx.auto.NamedAxes, state: State, plan_of: Any) -> sfx.AxisRules:
    """Rows over `data`, the two axes that shard most bytes over `fsdp` and `tensor`."""
    gains = {}
    for axis in names.axes:
        if axis.name == "batch" or axis.size % 2:
            continue
        alone = sfx.AxisRules([(axis.name, "fsdp")])
        gains[axis.name] = plan_of(state, names.names[0], alone).bytes_per_device
    best = sorted(gains, key=lambda name: gains[name])[:2]
    pairs = [("batch", "data"), *zip(best, ("fsdp", "tensor"), strict=False)]
    return sfx.AxisRules(pairs)


def run_on_mesh(model: Model, way: str) -> Run:
    mesh = jax.make_mesh((2, 2, 2), AXES)
    step = step_of(model)
    state = state_of(model)

    def plan_of(tree, names, axes: sfx.AxisRules) -> sfx.ShardPlan:
        return sfx.plan(
            tree,
            mesh,
            names=names,
            axes=axes,
            unmatched="replicate",
            unused="allow",
        )

    names = sfx.auto.name_axes(step, state, model.batch)
    rules = rules_for(names, state, plan_of)
    plan = plan_of(state, names.names[0], rules)
    batch_plan = plan_of(model.batch, names.names[1], rules)
    if way == "constrain_step":
        typed = sfx.auto.constrain_step(step, mesh, rules)
    else:
        typed = sfx.auto.auto_axes(step, plan, out=(plan.specs, jax.P()))
    state = sfx.shard(state, plan)
    batch = sfx.shard(model.batch, batch_plan)
    state, losses = trained(sfx.filter_jit(typed), state, batch)
    return Run(losses, [str(leaf) for leaf in sfx.misplaced(state, plan)])


def judged(model: Model, ways: list[str]) -> dict[str, Any]:
    begin = time.perf_counter()
    _, losses = trained(eqx.filter_jit(step_of(model)), state_of(model), model.batch)
    row: dict[str, Any] = {"losses": losses}
    for way in ways:
        # An error of any kind is the answer that is looked for.
        try:
            run = run_on_mesh(model, way)
        except Exception as error:
            row[way] = {"error": f"{type(error).__name__}: {error}"[:600]}
            traceback.print_exc()
            continue
        difference = np.abs(np.array(run.losses) / np.array(losses) - 1).max()
        row[way] = {"difference": float(difference), "misplaced": run.misplaced}
    row["seconds"] = time.perf_counter() - begin
    return row


def holds(answer: dict[str, Any]) -> bool:
    return answer.get("difference", np.inf) <= MOST and not answer["misplaced"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="", help="parts of names, with commas")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--json", type=Path, help="results to add to")
    flags = parser.parse_args()
    parts = flags.models.split(",")
    ways = flags.ways.split(",")
    jax.config.update("jax_num_cpu_devices", 8)
    rows = {}
    if flags.json and flags.json.exists():
        rows = json.loads(flags.json.read_text())
    for name in MODELS:
        if not any(part in name for part in parts):
            continue
        try:
            model = MODELS[name]()
        except ImportError as error:
            print(f"{name}: not installed here: {error}", flush=True)
            continue
        row = rows.setdefault(name, {})
        row.update(judged(model, ways))
        print(name, *(f"{way}: {row[way]}" for way in ways), flush=True)
        if flags.json:
            flags.json.write_text(json.dumps(rows, indent=1) + "\n")
    for way in ways:
        count = sum(holds(row.get(way, {})) for row in rows.values())
        print(f"{way}: {count} of {len(rows)} train as on one device")


if __name__ == "__main__":
    main()
