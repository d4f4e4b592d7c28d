"""How much of training steps `shardfx.testing.verify` judges, family by family."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from shardfx import testing
from shardfx.testing._args import with_arrays

from ._families import Subject, subjects


DEVICES = 8
# How far off, over its norm, rounding takes a result in float32, and in narrower dtypes.
# Moments hide most of a gradient's error.
_RIGHT = 1e-4
_RIGHT_NARROW = 0.02
_SMALLEST = 1e-30


class Row(NamedTuple):
    """The steps of one family: how many, what `verify` says of them, and the parts of
    their operations and bytes that it judges.

    `refuted` programs are those whose numbers are wrong; `accused` ones are refuted,
    and their numbers are right.
    """

    family: str
    programs: int
    proved: int
    refuted: int
    accused: int
    operations: int
    judged_operations: int
    bytes: int
    judged_bytes: int


def judged_steps(
    family: str | None, progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """What `verify` says of each step, as JSON holds it."""
    jax.config.update("jax_num_cpu_devices", DEVICES)
    lines = []
    for subject in subjects():
        if family not in (None, subject.family):
            continue
        line = judged_step(subject)
        lines.append(line)
        progress(_text(line))
    return lines


def judged_step(subject: Subject) -> dict[str, Any]:
    """What `verify` says of a step, and if it refutes it, how far off its numbers are."""
    mesh = mesh_of(subject.sizes)
    step, arguments = subject.make(mesh)
    started = time.process_time()
    verdict = testing.verify(step, *arguments, compiler="cpu")
    line: dict[str, Any] = {
        "family": subject.family,
        "name": subject.name,
        "layout": subject.layout,
        "outcome": verdict.outcome,
        "operations": verdict.operations,
        "judged": verdict.judged_operations,
        "bytes": verdict.bytes,
        "judged_bytes": verdict.judged_bytes,
        "seconds": round(time.process_time() - started, 2),
        "reasons": [
            f"{cause.operation}: {cause.reason}" for cause in verdict.unjudged[:4]
        ],
    }
    if not verdict:
        refutation = verdict.refutations[0]
        line["refutation"] = f"{refutation.operation}: {refutation.fault}"
        errors = step_errors(subject)
        worst = max(errors, key=lambda error: error.size / error.allowed)
        line["error"] = f"{worst.size:.2g}"
        line["numbers_right"] = worst.size <= worst.allowed
    return line


class Error(NamedTuple):
    """The difference of a result from that of one device, over its norm, and how large
    rounding makes it.
    """

    size: float
    allowed: float


def step_errors(subject: Subject) -> list[Error]:
    """How far off each result of a step is."""
    step, arguments = subject.make(mesh_of(subject.sizes))
    results = step(*with_arrays(arguments, mild=True))
    alone = dict.fromkeys(subject.sizes, 1)
    step, arguments = subject.make(mesh_of(alone))
    expected = step(*with_arrays(arguments, mild=True))
    pairs = zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True)
    return [_error(result, right) for result, right in pairs]


def _error(result: jax.Array, right: jax.Array) -> Error:
    reference = np.asarray(right, np.float64)
    difference = np.asarray(result, np.float64) - reference
    norm = max(float(np.linalg.norm(reference)), _SMALLEST)
    is_narrow = right.dtype.itemsize < 4
    return Error(
        size=float(np.linalg.norm(difference)) / norm,
        allowed=_RIGHT_NARROW if is_narrow else _RIGHT,
    )


def mesh_of(sizes: Mapping[str, int]) -> Mesh:
    """A mesh of the first devices, with Auto axes of these sizes."""
    shape = tuple(sizes.values())
    count = int(np.prod(shape))
    devices = np.array(jax.devices()[:count]).reshape(shape)
    return Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def _text(line: Mapping[str, Any]) -> str:
    share = line["judged"] / max(1, line["operations"])
    text = f"{line['family']}: {line['name']}, {line['layout']}: {line['outcome']}"
    text += f", {share:.1%} of {line['operations']} operations, {line['seconds']} s"
    for reason in line["reasons"]:
        text += f"\n    {reason}"
    if "refutation" in line:
        text += f"\n    refuted, and {line['error']} off: {line['refutation']}"
    return text


def rows(lines: Iterable[Mapping[str, Any]]) -> list[Row]:
    """One row for each family, and one of all."""
    by_family: dict[str, list[Mapping[str, Any]]] = {}
    everything: list[Mapping[str, Any]] = []
    for line in lines:
        by_family.setdefault(line["family"], []).append(line)
        everything.append(line)
    summed = [_row(family, members) for family, members in by_family.items()]
    return [*summed, _row("all", everything)]


def _row(family: str, lines: Sequence[Mapping[str, Any]]) -> Row:
    outcomes = [line["outcome"] for line in lines]
    accused = sum(bool(line.get("numbers_right")) for line in lines)
    return Row(
        family=family,
        programs=len(lines),
        proved=outcomes.count("proved"),
        refuted=outcomes.count("refuted") - accused,
        accused=accused,
        operations=sum(line["operations"] for line in lines),
        judged_operations=sum(line["judged"] for line in lines),
        bytes=sum(line["bytes"] for line in lines),
        judged_bytes=sum(line["judged_bytes"] for line in lines),
    )


def table(lines: Iterable[Mapping[str, Any]]) -> list[str]:
    """The rows as Markdown."""
    texts = [
        "| family | steps | proved | refuted | accused | operations judged | bytes |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows(lines):
        operations = row.judged_operations / max(1, row.operations)
        judged_bytes = row.judged_bytes / max(1, row.bytes)
        texts.append(
            f"| {row.family} | {row.programs} | {row.proved} | {row.refuted} |"
            f" {row.accused} | {operations:.1%} of {row.operations:,} |"
            f" {judged_bytes:.1%} |"
        )
    return texts


def document(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the results file holds."""
    return {"versions": {"jax": jax.__version__}, "coverage": list(lines)}
