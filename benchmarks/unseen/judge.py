"""Estimates of every case against what compilers made of it:
`python -m benchmarks.unseen.judge cpu|v5e [group ...]`.

The oracle is `benchmarks/results/unseen-*.json`, which `measure` wrote; for memory it
is the HBM of `benchmarks/results/foreseen-v5e.json`, which `foreseen` wrote. Cases that
are more than a thousandth off are listed, largest first, with the bytes of each kind
that differ.
"""

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

from shardfx.cost import estimate, fit

from ._case import Case
from .measure import GROUPS, RESULTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("platform", choices=("cpu", "v5e"))
    parser.add_argument("groups", nargs="*")
    parser.add_argument(
        "--memory", action="store_true", help="judge `fit` by v5e's HBM, not traffic"
    )
    parser.add_argument(
        "--quiet", action="store_true", help="print the sums of each group alone"
    )
    flags = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    oracle = "foreseen-v5e" if flags.memory else f"unseen-{flags.platform}"
    recorded = json.loads((RESULTS / f"{oracle}.json").read_text())["cases"]
    groups = ["open", "sealed"] if flags.memory else [*GROUPS]
    for group in flags.groups or groups:
        began = time.perf_counter()
        judge = held if flags.memory else sent
        verdicts = [
            (case.name, *judge(case, flags.platform, recorded[case.name]))
            for case in GROUPS[group]
        ]
        for name, off, why in sorted(verdicts, key=lambda verdict: -verdict[1]):
            if off > 0.001 and not flags.quiet:
                print(f"{name:46} {100 * off:8.1f} %  {why}")
        print(
            f"{group}: {summed([off for _, off, _ in verdicts])};"
            f" {time.perf_counter() - began:.0f} s"
        )


def sent(case: Case, platform: str, recorded: Mapping[str, Any]) -> tuple[float, str]:
    """How far off the wire bytes of a case are, and where."""
    step, args = case.make(mesh_of(recorded))
    estimated = estimate(step, *args, compiler="cpu" if platform == "cpu" else "tpu")
    ours = estimated.by("kind")
    theirs = recorded["by_kind"]
    kinds = [
        kind for kind in {**ours, **theirs} if ours.get(kind, 0) != theirs.get(kind, 0)
    ]
    why = ", ".join(
        f"{kind} {ours.get(kind, 0):,} not {theirs.get(kind, 0):,}" for kind in kinds
    )
    return off_by(estimated.wire_bytes, recorded["wire_bytes"]), why


def held(case: Case, platform: str, recorded: Mapping[str, Any]) -> tuple[float, str]:
    """How far off the HBM of a case is."""
    step, args = case.make(mesh_of(recorded))
    ours = fit(step, *args, chip=platform).peak_bytes
    hbm = recorded["peak_bytes"]
    return off_by(ours, hbm), f"{ours:,} not {hbm:,}"


def mesh_of(recorded: Mapping[str, Any]) -> AbstractMesh:
    """The mesh of a case, without devices."""
    sizes = recorded["mesh"]
    return AbstractMesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )


def off_by(ours: float, theirs: float) -> float:
    """The share by which a number is off; of what should be nothing, all or none."""
    return abs(ours - theirs) / theirs if theirs else float(ours != 0)


def summed(offs: list[float]) -> str:
    """The middle, the ninth decile and the worst."""
    ranked = sorted(offs)
    within = sum(off <= 0.01 for off in offs)
    return (
        f"{len(offs)} cases, median {100 * statistics.median(offs):.2f} %, 90th"
        f" percentile {100 * ranked[int(0.9 * len(ranked))]:.2f} %, worst"
        f" {100 * ranked[-1]:.1f} %, {within} within 1 %"
    )


if __name__ == "__main__":
    main()
