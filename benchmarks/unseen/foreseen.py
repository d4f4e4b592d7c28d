"""How far numbers that are foreseen without libtpu are from libtpu's own:
`python -m benchmarks.unseen.foreseen [group ...]`.

libtpu is asked for the scheduled program and the memory of each step on v5e:4x4, which
takes seconds; nothing is compiled to the end. The numbers are saved after each step in
`benchmarks/results/foreseen-v5e.json`, so that it resumes, and the ranges that hold 95
of 100 steps are printed. `shardfx/cost/_foreseen.py` has them.
"""

import argparse
import json
import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from shardfx import chips
from shardfx._step import Step, step_of
from shardfx.cost._counted import StepOnChip
from shardfx.cost._estimate import estimated
from shardfx.cost._foreseen import TEMPORARIES, WIRE
from shardfx.cost._libtpu import tpu_program
from shardfx.cost._traffic import read

from .. import cost_memory
from . import _open, _sealed, drawn
from ._case import Case, Made
from .judge import mesh_of
from .measure import RESULTS, versions


_CHIP = chips.find("v5e")
_FILE = RESULTS / "foreseen-v5e.json"
_HELD = 0.95
GROUPS: Mapping[str, Sequence[Case]] = {
    "open": _open.CASES,
    "sealed": _sealed.CASES,
    "drawn": drawn.CASES,
    "later": (*_open.CASES, *drawn.LATER),
}


class _Named(NamedTuple):
    """A step with its name and its group."""

    group: str
    name: str
    made: Made


def _steps(groups: Sequence[str], known: Mapping[str, Any]) -> Iterator[_Named]:
    """Yields the steps of groups whose numbers are not known."""
    for group in groups:
        for case in GROUPS.get(group, ()):
            if case.name not in known:
                mesh = mesh_of({"mesh": case.v5e})
                yield _Named(group, case.name, case.make(mesh))
    for row in cost_memory.DATA["rows"] if "study" in groups else ():
        name = cost_memory.name_of(row)
        if name not in known:
            _, made = cost_memory.step_of_row(row)
            yield _Named("study", name, (made.jitted, made.args))


def _record(step: Step) -> dict[str, Any]:
    """libtpu's numbers of a step, and those that are foreseen without it."""
    began = time.perf_counter()
    answer = tpu_program(step, _CHIP)
    assert answer is not None
    memory = answer.memory
    sent = read(answer.module, step.jax_mesh, step.leaves, answer.target.order)
    seconds = time.perf_counter() - began

    foreseen = StepOnChip(step, _CHIP).foreseen
    return {
        "mesh": dict(step.mesh.shape),
        "wire_bytes": sent.wire_bytes,
        "foreseen_wire_bytes": estimated(step, "tpu").wire_bytes,
        "peak_bytes": memory.peak_bytes,
        "foreseen_peak_bytes": foreseen.peak_bytes,
        "temporary_bytes": memory.temporary_bytes,
        "foreseen_temporary_bytes": foreseen.temporary_bytes,
        "on_chip_bytes": memory.on_chip_bytes,
        "out_of_memory": memory.out_of_memory[:200],
        "seconds": round(seconds, 2),
    }


class _Pair(NamedTuple):
    """libtpu's bytes, and the foreseen ones."""

    bytes: int
    foreseen: int


def pairs_of(cases: Mapping[str, Any], number: str) -> list[_Pair]:
    """The pairs of a number, "wire" or "temporary", of all steps that have one."""
    pairs = [
        _Pair(case[f"{number}_bytes"], case[f"foreseen_{number}_bytes"])
        for case in cases.values()
    ]
    return [pair for pair in pairs if pair.foreseen]


def held_range(pairs: Sequence[_Pair], on_chip_bytes: int) -> tuple[float, float]:
    """The narrowest range that holds 95 % of the pairs, by the ratio of its ends.
    libtpu may keep up to `on_chip_bytes` on chip.
    """
    # By the largest factor from below that holds a pair, and the least from above.
    ends = [
        (
            min(1.0, (pair.bytes + on_chip_bytes) / pair.foreseen),
            pair.bytes / pair.foreseen,
        )
        for pair in pairs
    ]
    count = math.ceil(_HELD * len(ends))
    ranges = []
    for least in sorted({below for below, _ in ends}):
        tops = sorted(above for below, above in ends if below >= least)
        if len(tops) >= count:
            ranges.append((least, max(1.0, tops[count - 1])))
    return min(ranges, key=lambda one: one[1] / one[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("groups", nargs="*", default=[*GROUPS, "study"])
    flags = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    # Some drawn steps are among those that XLA computes wrongly.
    warnings.simplefilter("ignore")
    document: dict[str, Any] = {"versions": versions(), "cases": {}}
    if _FILE.exists():
        document = json.loads(_FILE.read_text())
    cases = document["cases"]
    for named in _steps(flags.groups, cases):
        jitted, args = named.made
        cases[named.name] = {"group": named.group, **_record(step_of(jitted, args))}
        _FILE.write_text(json.dumps(document, indent=1) + "\n")
        print(named.name, cases[named.name], flush=True)

    for number, measured in (("wire", WIRE), ("temporary", TEMPORARIES)):
        pairs = pairs_of(cases, number)
        least, most = held_range(pairs, measured.on_chip_bytes)
        print(f"{number}: {len(pairs)} steps, {least:.3f} to {most:.3f}; {measured}")


if __name__ == "__main__":
    main()
