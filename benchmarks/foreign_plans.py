"""Models of other people under plans: `python -m benchmarks.foreign_plans`.

Each model knows nothing of shardings. It trains for a few steps under a plan of path
rules on a mesh of 8 devices, is saved, is loaded on 4 other devices, and trains on.
Its losses are compared with those of the same steps on one device. `estimate`, `fit`,
`lint` and `explain` say what they say of it. `--json FILE` keeps the results,
`--models` takes parts of names.
"""

import argparse
import json
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax

import shardfx as sfx

from ._foreign_base import Model
from ._foreign_others import OTHERS
from .foreign import MOST, STEPS, State, state_of, step_of, trained


RULES = sfx.PathRules([(".*", sfx.fsdp("fsdp") | sfx.fsdp("tensor"))])
ROWS = sfx.PathRules([(".*", sfx.fsdp("data"))])
SIZES = {"data": 2, "fsdp": 2, "tensor": 2}
FEWER = {"data": 1, "fsdp": 4, "tensor": 1}


def state_plan(model: Model, state: State, mesh: Any) -> sfx.ShardPlan[Any]:
    """The plan of a model and of its optimizer's moments, which follow it."""
    model_plan = sfx.plan(model.model, mesh, paths=RULES)

    def init(tree: Any) -> State:
        params = eqx.filter(tree, eqx.is_inexact_array)
        return State(tree, optax.adamw(1e-3).init(params))

    return sfx.follow(init, model_plan)


def on_mesh(model: Model) -> dict[str, Any]:
    """The losses on a mesh and after a move to another, and what the views say."""
    mesh = sfx.MeshSpec(SIZES).build(jax.devices())
    state = state_of(model)
    plan = state_plan(model, state, mesh)
    batch_plan = sfx.plan(model.batch, mesh, paths=ROWS)
    batch = sfx.shard(model.batch, batch_plan)
    step = sfx.filter_jit(
        step_of(model),
        in_shardings=(plan, batch_plan),
        out_shardings=(plan, None),
    )
    placed = sfx.shard(state, plan)
    placed, losses = trained(step, placed, batch)

    fewer = sfx.MeshSpec(FEWER).build(jax.devices()[:4])
    other_plan = state_plan(model, state, fewer)
    other_rows = sfx.plan(model.batch, fewer, paths=ROWS)
    with tempfile.TemporaryDirectory() as folder:
        sfx.checkpoint.save(f"{folder}/c", placed, plan)
        loaded = sfx.checkpoint.load(f"{folder}/c", other_plan)
    moved = eqx.combine(loaded, state)
    other_step = sfx.filter_jit(
        step_of(model),
        in_shardings=(other_plan, other_rows),
        out_shardings=(other_plan, None),
    )
    _, later = other_step(moved, sfx.shard(model.batch, other_rows))
    arrays = plan.structs, batch_plan.structs
    combined = eqx.combine(arrays, (state, model.batch), is_leaf=eqx.is_array)
    estimate = sfx.cost.estimate(step, *combined, compiler="cpu")
    fit = sfx.cost.fit(step, *combined, chip="v5e")
    findings = sfx.lint(model.model, mesh, paths=RULES)
    largest = max(plan.leaves, key=lambda leaf: leaf.bytes)
    return {
        "losses": [*losses, float(later)],
        "misplaced": [str(leaf) for leaf in sfx.misplaced(placed, plan)],
        "wire_bytes": int(estimate.wire_bytes),
        "peak_bytes": int(fit.peak_bytes),
        "findings": sorted({finding.code for finding in findings}),
        "explained": len(str(sfx.explain(plan, largest.path)).splitlines()),
        "sharded": sum(leaf.bytes_per_device < leaf.bytes for leaf in plan.leaves),
        "arrays": len(plan.leaves),
    }


def judged(name: str) -> dict[str, Any]:
    begin = time.perf_counter()
    model = OTHERS[name]()
    single = eqx.filter_jit(step_of(model))
    state, losses = trained(single, state_of(model), model.batch)
    _, later = single(state, model.batch)
    expected = np.array([*losses, float(later)])
    # An error of any kind is the answer that is looked for.
    try:
        row = on_mesh(model)
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"[:600]}
    difference = np.abs(np.array(row["losses"]) - expected) / np.abs(expected)
    row["difference"] = float(difference.max())
    row["seconds"] = time.perf_counter() - begin
    return row


def holds(row: dict[str, Any]) -> bool:
    """Whether a model trained as on one device, before and after its move."""
    return row.get("difference", np.inf) <= MOST and not row["misplaced"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="", help="parts of names, with commas")
    parser.add_argument("--json", type=Path, help="results to add to")
    flags = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    rows = {}
    if flags.json and flags.json.exists():
        rows = json.loads(flags.json.read_text())
    for name in OTHERS:
        if not any(part in name for part in flags.models.split(",")):
            continue
        rows[name] = judged(name)
        print(name, rows[name], flush=True)
        if flags.json:
            flags.json.write_text(json.dumps(rows, indent=1) + "\n")
    count = sum(map(holds, rows.values()))
    print(
        f"{count} of {len(rows)} train, save, load elsewhere and train on; {STEPS} steps"
    )


if __name__ == "__main__":
    main()
