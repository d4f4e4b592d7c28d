"""Public numbers that the costs are held against: what fits, the worked answers of a
book, step times of recipes.

The numbers and where they are from are in `cost_oracles.json`. Nothing is compiled
here.
"""

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardfx import MeshSpec, chips, filter_jit
from shardfx.cost import Fit, Traffic, estimate, fit, seconds

from . import _cost_book, _cost_deepseek, _cost_maxtext
from ._case import Finding, Limit, Value


DATA: dict[str, Any] = json.loads(
    (Path(__file__).parent / "cost_oracles.json").read_text()
)


def cases() -> list[Finding]:
    """The oracles, in the runner's form."""
    return [
        Finding(
            "oracle: fit boundary of maxtext#4117",
            boundary,
            (
                Limit("worst_against_compiler_percent", at_most=15),
                Limit("counted_or_said_to_be_close", at_least=1),
            ),
        ),
        Finding(
            "oracle: order of maxtext#2579",
            order,
            (Limit("right_order", at_least=1),),
        ),
        *(
            Finding(
                f"oracle: {name}, scaling book",
                measure,
                (Limit("error_percent", at_most=1),),
            )
            for name, measure in (
                ("roofline crossover", lambda: _cost_book.crossovers(DATA["book"])),
                ("gathers", lambda: _cost_book.collectives(DATA["book"])),
                (
                    "70B in training",
                    lambda: _cost_book.training(
                        DATA["book"], DATA["models"]["llama3.1-70b"]
                    ),
                ),
            )
        ),
        Finding(
            "oracle: 70B in serving, scaling book",
            lambda: _cost_book.serving(DATA["book"], DATA["models"]["llama3.1-70b"]),
        ),
        Finding("oracle: 70B on a v5p pod, scaling book", pod),
        Finding("oracle: step times of the TPU recipes", recipes),
    ]


def boundary() -> Mapping[str, Value]:
    """What a step needs that does not fit v4, against the report, and against the
    compiler on this very step.
    """
    published = DATA["boundary"]
    usable = chips.find(published["chip"]).usable_hbm_bytes
    gib_by_step: dict[str, float] = {}
    for name, tiled in (("before", False), ("after", True)):
        gib_by_step[name] = _boundary_fit(published, tiled=tiled).peak_bytes / 2**30
    fitted = _boundary_fit(published, tiled=False)
    total_gib = published["compiler"]["total_gib"].items()
    counted = {int(count): gib for count, gib in total_gib}
    errors = {
        count: (
            100
            * (
                _boundary_fit(published | {"sequences": count}, tiled=False).peak_bytes
                / 2**30
                / gib
                - 1
            )
        )
        for count, gib in counted.items()
    }
    live = published["compiler"]["live_gib"]["7"]
    first, second = sorted(counted)[:2]
    slope = (counted[second] - counted[first]) / (second - first)
    line = counted[first] - slope * (first - published["sequences"])
    return {
        "reported_gib": published["needs_gib"],
        "compiler_gib, on a line from 9 and 10 sequences": round(line, 2),
        "estimated_gib": round(gib_by_step["before"], 2),
        "error_percent": round(
            100 * (gib_by_step["before"] / published["needs_gib"] - 1), 1
        ),
        "mended_gib": round(gib_by_step["after"], 2),
        "compiler_live_gib, before arrays are placed": live,
        "error against that, %": round(100 * (gib_by_step["before"] / live - 1), 1),
        "usable_gib": round(usable / 2**30, 2),
        "basis": fitted.basis,
        "counted_or_said_to_be_close": int(
            fitted.basis == "compiled" or fitted.is_close
        ),
        **{
            f"compiler_gib, {count} sequences": round(gib, 2)
            for count, gib in counted.items()
        },
        "errors against the compiler, %": ", ".join(
            f"{error:+.1f}" for error in errors.values()
        ),
        "worst_against_compiler_percent": round(max(map(abs, errors.values())), 1),
    }


def _boundary_fit(published: Mapping[str, Any], *, tiled: bool) -> Fit:
    plans, step = _cost_maxtext.planned(published, tiled=tiled)
    return _donated(plans, step, published["chip"])


def _donated(plans: Mapping[str, Any], step: Any, chip: str) -> Fit:
    out_shardings = (plans["params"], plans["state"], None)
    jitted = filter_jit(
        step,
        out_shardings=out_shardings,
        donate=("params", "state"),
    )
    structs = [plan.structs for plan in plans.values()]
    return fit(jitted, *structs, chip=chip)


def order() -> Mapping[str, Value]:
    """Three plans of one model on four chips, by the time of their collectives and by
    memory.
    """
    published = DATA["order"]
    values: dict[str, Value] = {}
    ours: dict[str, tuple[float, float]] = {}
    for row in published["rows"]:
        sequences = published["sequences"]
        mesh, plans, step = _cost_deepseek.planned(
            published, row["axes"], sequences=sequences
        )
        structs = [plan.structs for plan in plans.values()]
        sent = estimate(step, *structs, mesh=mesh)
        predicted = seconds(sent, published["chip"], mesh, slice=published["slice"])
        wire = 1e3 * predicted.seconds
        held = _donated(plans, step, published["chip"]).peak_bytes / 1e6
        ours[row["name"]] = (wire, held)
        values |= {
            f"{row['name']}, wire_ms": round(wire),
            f"{row['name']}, measured_ms": row["milliseconds"],
            f"{row['name']}, explicit_ms": row["explicit_milliseconds"],
            f"{row['name']}, megabytes": round(held),
            f"{row['name']}, measured_megabytes": row["megabytes"],
        }
    told_rows = {row["name"]: row for row in published["rows"]}
    by_time = sorted(ours, key=lambda name: ours[name][0])
    measured = sorted(ours, key=lambda name: told_rows[name]["milliseconds"])
    explicit = sorted(ours, key=lambda name: told_rows[name]["explicit_milliseconds"])
    by_memory = sorted(ours, key=lambda name: ours[name][1])
    errors = [
        100 * (ours[name][1] / row["megabytes"] - 1) for name, row in told_rows.items()
    ]
    expected = sorted(ours, key=lambda name: told_rows[name]["megabytes"])
    largest = max(map(abs, errors))
    return {
        **values,
        "order": " < ".join(by_time),
        "right_order": int(by_time == measured == explicit),
        "right_order_of_memory": int(by_memory == expected),
        "worst_memory_error_percent": round(largest, 1),
    }


def pod() -> Mapping[str, Value]:
    """70B on 8,960 chips: pure fsdp waits for its wires; about 2,048 x 4 does not."""
    published = DATA["book"]["training"]
    chip = chips.find(published["chip"])
    compute = (
        6
        * published["parameters"]
        * published["tokens"]
        / published["chips"]
        / chip.flops("bfloat16")
    )
    wire_over_compute: dict[str, float] = {}
    for tensor in (1, 2, 4, 5, 7, 10, 16, 20):
        shards = published["chips"] // tensor
        mesh = MeshSpec({"fsdp": shards, "tensor": tensor})
        # Gathered in the forward pass, and again in the backward pass, and the
        # gradients scattered: 2 bytes each.
        weights = 3 * 2 * published["parameters"] / tensor * (shards - 1) / shards
        # Four gathers and four scatters of the activations in each layer, forward and
        # backward.
        activation_bytes = (
            8
            * published["layers"]
            * 2
            * published["tokens"]
            / shards
            * published["width"]
        )
        acts = activation_bytes * (tensor - 1) / tensor
        weights_row = _cost_book.row("all-gather", int(weights), shards, ("fsdp",))
        acts_row = _cost_book.row("all-gather", int(acts), tensor, ("tensor",))
        rows = (
            weights_row,
            acts_row,
        )
        sent = Traffic(rows, published["chips"])
        times = seconds(sent, chip, mesh, slice=published["slice"])
        wire_over_compute[f"{shards} x {tensor}"] = times.seconds / compute
    best = min(wire_over_compute, key=lambda name: wire_over_compute[name])
    assert wire_over_compute[f"{published['chips']} x 1"] > 1, (
        "the book: pure fsdp is bound by communication"
    )
    fully_sharded = wire_over_compute[f"{published['chips']} x 1"]
    return {
        "pure_fsdp_wire_over_compute": round(fully_sharded, 2),
        "best": best,
        "best_wire_over_compute": round(wire_over_compute[best], 2),
        "book_best": "about 2048 x 4",
    }


def recipes() -> Mapping[str, Value]:
    """Step times from arithmetic and one efficiency per generation; each generation
    held out in turn.

    A generation has one efficiency and a peak for each dtype: what is computed in fp8
    is held against the peak of fp8.
    """
    rows = DATA["recipes"]["rows"]
    ideal = [_ideal_seconds(row) for row in rows]
    efficiency = {
        name: statistics.median(
            least / row["seconds"]
            for least, row in zip(ideal, rows, strict=True)
            if row["chip"] == name
        )
        for name in sorted({row["chip"] for row in rows})
    }
    errors_percent = [
        _error(least / efficiency[row["chip"]], row)
        for least, row in zip(ideal, rows, strict=True)
    ]
    held: dict[str, list[float]] = {}
    for least, row in zip(ideal, rows, strict=True):
        others = statistics.mean(
            value for name, value in efficiency.items() if name != row["chip"]
        )
        error = _error(least / others, row)
        held.setdefault(row["chip"], []).append(error)
    by_dtype: dict[str, list[float]] = {}
    for least, row in zip(ideal, rows, strict=True):
        by_dtype.setdefault(f"{row['chip']}.{row['dtype']}", []).append(
            least / row["seconds"]
        )
    values: dict[str, Value] = {
        "rows": len(rows),
        "generations": len(efficiency),
        **{f"efficiency.{name}": round(value, 3) for name, value in efficiency.items()},
        **{
            f"efficiency.{name} alone": round(statistics.median(each), 3)
            for name, each in by_dtype.items()
        },
        "median_error_percent": round(statistics.median(map(abs, errors_percent)), 1),
        "largest_error_percent": round(max(map(abs, errors_percent)), 1),
    }
    for name, errors in held.items():
        values[f"held_out.{name}.median_error_percent"] = round(
            statistics.median(map(abs, errors)), 1
        )
        values[f"held_out.{name}.largest_error_percent"] = round(
            max(map(abs, errors)), 1
        )
    return values


def _error(predicted: float, row: Mapping[str, Any]) -> float:
    return 100 * (predicted / row["seconds"] - 1)


def _ideal_seconds(row: Mapping[str, Any]) -> float:
    """Products of parameters and of causal attention at the chip's peak; remat is not
    counted, as in MFU.
    """
    model = DATA["models"][row["model"]]
    heads_count = model["heads"] + model["kv_heads"]
    heads = model["width"] * model["head_dim"] * 2 * heads_count
    layer = heads + 3 * model["width"] * model["hidden"]
    parameters = model["layers"] * layer + model["width"] * model["vocab"]
    attention = 6 * model["layers"] * row["length"] * model["heads"] * model["head_dim"]
    flops_per_token = 6 * parameters + attention
    flops = flops_per_token * row["batch"] * row["length"] / row["chips"]
    return flops / chips.find(row["chip"]).flops(row["dtype"])
