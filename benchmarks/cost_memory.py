"""What `fit` says of memory, against the TPU's compiler and against public numbers."""

import argparse
import dataclasses
import functools as ft
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardfx.cost import compile_for, fit

from . import _cost_oracles, _cost_suggestions
from ._case import Apart, Entry, Finding, Limit, Value
from ._runner import Options
from ._step_plans import LAYOUTS, Layout, Planned, planned
from ._steps import STUDY, STUDY_EXPERTS, Way


SUMMARY = (
    "memory of a step, estimated against the TPU compiler's own count on v5e:4x4;"
    " public numbers as oracles"
)
DATA: dict[str, Any] = json.loads(
    (Path(__file__).parent / "cost_memory.json").read_text()
)
_QUICK = ("fsdp", "tp + sp")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--compile", action="store_true", help="compile anew with libtpu (minutes each)"
    )


def cases(options: Options) -> list[Entry]:
    limits = (
        Limit("arguments_off_percent", at_most=0.01),
        Limit("off_percent", at_most=15),
    )
    rows = [
        row
        for row in DATA["rows"]
        if not options.quick or (row["plan"] in _QUICK and row["remat"])
    ]
    found: list[Entry] = [
        Finding(f"{row['plan']}{_how(row)}", ft.partial(_memory, row, options), limits)
        for row in rows
    ]
    compiled = Apart(
        "suggestions, each compiled", "benchmarks._cost_suggestions:on_eight", 8
    )
    tpu = Finding(
        "suggestions, each compiled for v5e:4x4",
        ft.partial(_cost_suggestions.on_v5e, options),
        (Limit("off_percent, worst", at_most=15),),
    )
    return [*found, compiled, tpu, *_cost_oracles.cases()]


def _how(row: Mapping[str, Any]) -> str:
    told = [f"{row['layers']} layers"] if row["layers"] != STUDY.layers else []
    told += [] if row.get("scan", True) else ["unrolled"]
    told += [] if row["remat"] else ["no remat"]
    return "".join(f", {one}" for one in told)


def _step(row: Mapping[str, Any]) -> tuple[Layout, Planned]:
    layout = LAYOUTS[row["plan"]]
    sizes = dataclasses.replace(
        STUDY_EXPERTS if layout.experts else STUDY, layers=row["layers"]
    )
    return layout, planned(
        sizes, Way(scan=row.get("scan", True), remat=row["remat"]), layout
    )


def _memory(row: Mapping[str, Any], options: Options) -> Mapping[str, Value]:
    _, made = _step(row)
    found = fit(made.jitted, *made.args, chip="v5e")
    counted = _compiled(made) if options.flags.compile else row
    peak = counted["peak"]
    ours = sum(one.bytes for one in found.rows if one.exact and one.group != "results")
    return {
        "compiler_megabytes": round(peak / 1e6, 1),
        "estimated_megabytes": round(found.peak_bytes / 1e6, 1),
        "error_percent": round(100 * (found.peak_bytes / peak - 1), 1),
        "off_percent": round(abs(100 * (found.peak_bytes / peak - 1)), 1),
        "arguments_off_percent": round(abs(100 * (ours / counted["argument"] - 1)), 3),
    }


def _compiled(made: Planned) -> dict[str, int]:
    memory = compile_for(made.jitted, *made.args, target="tpu:v5e:4x4").memory
    return {"argument": memory.argument_size_in_bytes, "peak": memory.needed_bytes}
