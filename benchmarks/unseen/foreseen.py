"""How far numbers that are foreseen without libtpu are from libtpu's own:
`python -m benchmarks.unseen.foreseen [group ...]`.

libtpu is asked for the scheduled program and the memory of each step on v5e:4x4, which
takes seconds; nothing is compiled to the end. The numbers are saved after each step in
`benchmarks/results/foreseen-v5e.json`, so that it resumes. Printed are
the ranges in which a further step lies with a probability of 95 %, and how many steps
lie in ranges that were made without them: those of each group in the range of the other
groups, and those of the group "later" in the range of all others.
`shardfx/cost/_foreseen.py` has the ranges.
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
from shardfx.cost._foreseen import TEMPORARIES, WIRE, Range
from shardfx.cost._libtpu import tpu_program
from shardfx.cost._traffic import read

from .. import cost_memory
from . import _open, _sealed, drawn
from ._case import Case, Made
from .judge import mesh_of
from .measure import RESULTS, versions


_CHIP = chips.find("v5e")
_FILE = RESULTS / "foreseen-v5e.json"
# The probability with which a further step may lie outside of a range.
_MISSED = 0.05
# The group of the steps that check the ranges.
LATER = "later"
GROUPS: Mapping[str, Sequence[Case]] = {
    "open": _open.CASES,
    "sealed": _sealed.CASES,
    "drawn": drawn.CASES,
    LATER: (*_open.CASES, *drawn.LATER),
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


class Pair(NamedTuple):
    """libtpu's bytes, and the foreseen ones."""

    bytes: int
    foreseen: int

    def is_in(self, told: Range) -> bool:
        """Whether libtpu's bytes lie in the range that is told for the foreseen ones."""
        least, most = told.of(self.foreseen)
        return least <= self.bytes <= most


def pairs_of(cases: Mapping[str, Any], number: str) -> dict[str, list[Pair]]:
    """The pairs of a number, "wire" or "temporary", of the steps that have one, by their
    groups.
    """
    groups: dict[str, list[Pair]] = {}
    for case in cases.values():
        pair = Pair(case[f"{number}_bytes"], case[f"foreseen_{number}_bytes"])
        if pair.foreseen:
            groups.setdefault(case["group"], []).append(pair)
    return groups


class HeldOut(NamedTuple):
    """How many steps lie in ranges that were made without them.

    - `told`: the range of all steps but the later ones.
    - `held`, `steps`: the number of steps in the ranges, and of all.
    """

    told: Range
    held: int
    steps: int


def held_out(groups: Mapping[str, Sequence[Pair]], on_chip_bytes: int) -> HeldOut:
    """The range of all steps but the later ones, and how many steps lie in ranges that
    were made without their group.
    """
    held = 0
    for checked, pairs in groups.items():
        others = _pairs_outside(groups, checked)
        told = conformal_range(others, on_chip_bytes)
        held += sum(pair.is_in(told) for pair in pairs)
    return HeldOut(
        told=conformal_range(_pairs_outside(groups, LATER), on_chip_bytes),
        held=held,
        steps=sum(map(len, groups.values())),
    )


def _pairs_outside(groups: Mapping[str, Sequence[Pair]], checked: str) -> list[Pair]:
    pairs: list[Pair] = []
    for group, members in groups.items():
        if group not in (checked, LATER):
            pairs += members
    return pairs


def conformal_range(pairs: Sequence[Pair], on_chip_bytes: int) -> Range:
    """The range in which a further step lies with a probability of 95 %, if it is drawn
    as these were. libtpu may keep up to `on_chip_bytes` on chip.

    Of n steps, a further one is as likely below the k-th smallest ratio as k in n + 1,
    and above the k-th largest: split conformal prediction, chapter 1 of Angelopoulos and
    Bates, arXiv:2107.07511.
    """
    count = math.floor(_MISSED / 2 * (len(pairs) + 1))
    # The largest factor from below that holds a pair, and the least from above.
    below = sorted(
        min(1.0, (pair.bytes + on_chip_bytes) / pair.foreseen) for pair in pairs
    )
    above = sorted(max(1.0, pair.bytes / pair.foreseen) for pair in pairs)
    return Range(
        least=math.floor(100 * below[count - 1]) / 100,
        most=math.ceil(100 * above[-count]) / 100,
        steps=len(pairs),
        on_chip_bytes=on_chip_bytes,
    )


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

    for number, told in (("wire", WIRE), ("temporary", TEMPORARIES)):
        measured = held_out(pairs_of(cases, number), told.on_chip_bytes)
        print(f"{number}: {measured}; told is {told}")


if __name__ == "__main__":
    main()
