"""What `fit` says of memory, against libtpu's HBM and against public numbers."""

import argparse
import dataclasses
import functools as ft
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardfx.cost import fit

from . import _cost_oracles, _cost_suggestions
from ._case import Apart, Entry, Finding, Limit, Value
from ._runner import Options
from ._step_plans import LAYOUTS, Layout, Planned, planned
from ._steps import STUDY, STUDY_EXPERTS, Way


SUMMARY = (
    "memory of a step, against the HBM that libtpu assigns on v5e:4x4; public numbers"
    " as oracles"
)
DATA: dict[str, Any] = json.loads(
    (Path(__file__).parent / "cost_memory.json").read_text()
)
# libtpu's numbers of these steps, which `benchmarks.unseen.foreseen` asks for.
_ASKED: dict[str, Any] = json.loads(
    (Path(__file__).parent / "results" / "foreseen-v5e.json").read_text()
)["cases"]
_QUICK = ("fsdp", "tp + sp")
_ARGUMENTS = ("parameters", "optimizer", "batch", "KV cache", "other")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ask", action="store_true", help="ask libtpu about each suggestion, too"
    )


def cases(options: Options) -> list[Entry]:
    limits = (
        Limit("arguments_off_percent", at_most=0.01),
        Limit("outside_of_the_expected", at_most=0),
    )
    rows = [
        row
        for row in DATA["rows"]
        if name_of(row) in _ASKED
        and (not options.quick or (row["plan"] in _QUICK and row["remat"]))
    ]
    found: list[Entry] = [
        Finding(name_of(row), ft.partial(_memory, row), limits) for row in rows
    ]
    compiled = Apart(
        "suggestions, each compiled", "benchmarks._cost_suggestions:on_eight", 8
    )
    found.append(compiled)
    if options.flags.ask:
        tpu = Finding(
            "suggestions, each made for v5e:4x4",
            _cost_suggestions.on_v5e,
            (Limit("off_percent, worst", at_most=15),),
        )
        found.append(tpu)
    return [*found, *_cost_oracles.cases()]


def name_of(row: Mapping[str, Any]) -> str:
    """The plan of a step, and how its layers differ from the usual."""
    words = [row["plan"]]
    if row["layers"] != STUDY.layers:
        words.append(f"{row['layers']} layers")
    if not row.get("scan", True):
        words.append("unrolled")
    if not row["remat"]:
        words.append("no remat")
    return ", ".join(words)


def step_of_row(row: Mapping[str, Any]) -> tuple[Layout, Planned]:
    """The layout of a row, and its step."""
    layout = LAYOUTS[row["plan"]]
    sizes = dataclasses.replace(
        STUDY_EXPERTS if layout.experts else STUDY, layers=row["layers"]
    )
    return layout, planned(
        sizes, Way(scan=row.get("scan", True), remat=row["remat"]), layout
    )


def _memory(row: Mapping[str, Any]) -> Mapping[str, Value]:
    """What `fit` says of a step, beside the bytes of HBM that libtpu assigns: the same
    where libtpu is installed.
    """
    _, made = step_of_row(row)
    found = fit(made.jitted, *made.args, chip="v5e")
    hbm = _ASKED[name_of(row)]["peak_bytes"]
    arguments = sum(map(found.bytes_of, _ARGUMENTS))
    least, most = found.expected_bytes
    return {
        "basis": found.basis,
        "libtpu_megabytes": round(hbm / 1e6, 1),
        "fit_megabytes": round(found.peak_bytes / 1e6, 1),
        "error_percent": round(100 * (found.peak_bytes / hbm - 1), 1),
        "outside_of_the_expected": int(not least <= hbm <= most),
        "arguments_off_percent": round(abs(100 * (arguments / row["argument"] - 1)), 3),
    }
