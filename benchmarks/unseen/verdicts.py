"""What `shardfx.testing.verify` says of the 60 unseen steps under three layouts each,
and whether numbers agree:
`python -m benchmarks.unseen.verdicts --records FILE [--json FILE]`.

The layouts are a step's own axes with other sizes: those for CPUs, those of v5e:4x4,
each of them turned around, all devices on one axis, and half of an axis; the first
three that are different. Numbers on emulated devices beside one device say whether a
refuted program is right, and, after all verdicts, whether a proved one is wrong.

A child process works through the cases. One that takes too long is ended, and so noted.
"""

import argparse
import dataclasses
import json
import math
import select
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from shardfx.errors import ProgramError
from shardfx.testing import check_step
from shardfx.testing._args import with_arrays

from ..faults._coverage import Error, document, judged_step, mesh_of, step_errors
from ..faults._families import Subject
from ..faults._records import add_record, read_records
from . import _open, _sealed
from ._case import Case, Made
from ._one_device import shard_map_on_one_device


_DEVICES = 16
_LAYOUTS = 3
# A step that fixes a size, or writes for one mesh, refuses another.
_REFUSED = (ValueError, TypeError, AssertionError, KeyError, NotImplementedError)


class Question(NamedTuple):
    """What is asked of one step under one layout: its "verdict", or its "numbers"."""

    kind: str
    subject: Subject

    @property
    def key(self) -> tuple[str, str, str]:
        return self.kind, self.subject.name, self.subject.layout


def layouts(case: Case) -> list[Mapping[str, int]]:
    """The sizes of a step's mesh axes under each layout."""
    proposed: list[Mapping[str, int]] = [case.cpu, case.v5e]
    for sizes in (case.cpu, case.v5e):
        turned = reversed(tuple(sizes.values()))
        proposed.append(dict(zip(sizes, turned, strict=True)))
    for axis in case.cpu:
        devices = math.prod(case.cpu.values())
        proposed.append({**dict.fromkeys(case.cpu, 1), axis: devices})
    for axis, size in case.cpu.items():
        if size % 2 == 0:
            proposed.append({**case.cpu, axis: size // 2})
    different: list[Mapping[str, int]] = []
    for sizes in proposed:
        if dict(sizes) not in different:
            different.append(dict(sizes))
    return different


def subjects(case: Case) -> Iterator[Subject]:
    """A step under each of its layouts."""
    for sizes in layouts(case):
        layout = ",".join(f"{axis}={size}" for axis, size in sizes.items())
        yield Subject("unseen", case.name, layout, sizes, case.make)


def questions(lines: Sequence[Mapping[str, Any]]) -> Iterator[Question]:
    """What is not answered yet. `lines` has the answers, and gets more meanwhile."""
    cases = (*_open.CASES, *_sealed.CASES)
    for case in cases:
        for subject in subjects(case):
            of_case = [line for line in verdicts(lines) if line["name"] == case.name]
            if len(of_case) == _LAYOUTS:
                break
            question = Question("verdict", subject)
            if question.key not in answered(lines):
                yield question
    by_name = {case.name: case for case in cases}
    judged = [line for line in verdicts(lines) if line["outcome"] != "not judged"]
    # What is refuted first, and then the smallest programs.
    order = lambda line: (line["outcome"] == "proved", line["bytes"])
    for line in sorted(judged, key=order):
        for subject in subjects(by_name[line["name"]]):
            question = Question("numbers", subject)
            is_judged = subject.layout == line["layout"]
            if is_judged and question.key not in answered(lines):
                yield question


def answered(lines: Sequence[Mapping[str, Any]]) -> set[tuple[str, str, str]]:
    """The keys of the questions that are answered."""
    return {(line["kind"], line["name"], line["layout"]) for line in lines}


def verdicts(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The lines of steps that `verify` judged."""
    return [line for line in lines if "outcome" in line]


def answer(question: Question) -> dict[str, Any]:
    """The line that answers a question."""
    kind, name, layout = question.key
    line = {"kind": kind, "name": name, "layout": layout}
    try:
        if kind == "verdict":
            return line | judged_step(question.subject)
        return line | compared_numbers(question.subject)
    except _REFUSED as error:
        return line | {"refused": f"{type(error).__name__}: {error}"[:300]}
    except jax.errors.JaxRuntimeError as error:
        return line | {"refused": f"XLA: {error}"[:300]}


def compared_numbers(subject: Subject) -> dict[str, str]:
    """Whether the numbers of a step are right beside those of a mesh of one device, in
    its own dtypes or in float64, or else by `check_step`.
    """
    try:
        compared = numbers(step_errors(subject))
        if compared["numbers"] == "right":
            return compared
        # Some steps make much of a rounding error, such as a simulation.
        compared = numbers(wide_step_errors(subject))
    except _REFUSED:
        # A step with a `shard_map` by hand can have no form for a mesh of one device,
        # and another fixes a dtype.
        return checked_numbers(subject)
    if compared["numbers"] == "right":
        return compared | {"dtype": "float64"}
    return checked_numbers(subject)


def wide_step_errors(subject: Subject) -> list[Error]:
    """How far off each result of a step is if all its floats are float64."""

    def in_float64(mesh: Mesh) -> Made:
        step, arguments = subject.make(mesh)
        return step, jax.tree.map(_wide_struct, arguments)

    with jax.enable_x64(True):
        return step_errors(dataclasses.replace(subject, make=in_float64))


def _wide_struct(struct: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    if jnp.issubdtype(struct.dtype, np.floating):
        return struct.update(dtype=np.float64)
    return struct


def numbers(errors: Sequence[Error]) -> dict[str, str]:
    """Whether the numbers of a step are "right", "wrong", or "not finite": NaN beside
    NaN says nothing.
    """
    if not all(math.isfinite(error.size) for error in errors):
        return {"numbers": "not finite"}
    worst = max(errors, key=lambda error: error.size / error.allowed)
    is_right = worst.size <= worst.allowed
    return {
        "numbers": "right" if is_right else "wrong",
        "error": f"{worst.size:.2g}",
    }


def checked_numbers(subject: Subject) -> dict[str, str]:
    """Whether the numbers of a step are right by `check_step`, which measures how far
    rounding goes. The error is the largest over that.
    """
    mesh = mesh_of(subject.sizes)
    step, arguments = subject.make(mesh)
    with mock.patch.object(jax, "shard_map", shard_map_on_one_device):
        reference, _ = subject.make(mesh)
    # Arguments that are all positive make some steps divide by zero.
    for mild in (True, False):
        arrays = with_arrays(arguments, mild=mild)
        try:
            checked = check_step(step, *arrays)
        except ProgramError:
            checked = check_step(step, *arrays, reference=reference)
        if checked.is_finite:
            break
    else:
        return {"numbers": "not finite"}
    smallest = np.finfo(np.float64).tiny
    ratios = [
        output.difference / max(output.allowed, smallest) for output in checked.outputs
    ]
    is_right = all(output.is_right for output in checked.outputs)
    return {
        "numbers": "right" if is_right else "wrong",
        "error": f"{max(ratios):.2g} of rounding",
    }


def work(records: Path, minutes: float) -> None:
    """Answers questions, and adds each answer to `records`. Prints a line before and
    after each, for the process that waits.
    """
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", _DEVICES)
    lines = read_records(records)
    deadline = time.monotonic() + 60 * minutes
    for question in questions(lines):
        if time.monotonic() > deadline:
            return
        print(json.dumps(question.key), flush=True)
        line = answer(question)
        lines.append(line)
        add_record(records, line)
        jax.clear_caches()


def wait(records: Path, minutes: float, seconds: float) -> bool:
    """Starts a child process that works, and ends it if a question takes more than
    `seconds`. Returns whether the child ended by itself.
    """
    command = [sys.executable, "-m", "benchmarks.unseen.verdicts", "--child"]
    command += ["--records", str(records), "--minutes", str(minutes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        key: Sequence[str] = ()
        while True:
            if not select.select([child.stdout], [], [], seconds)[0]:
                child.kill()
                why = f"longer than {seconds:.0f} s"
                break
            text = child.stdout.readline()
            if text:
                key = json.loads(text)
                print(*key, flush=True)
                continue
            if child.wait() == 0:
                return True
            why = f"the process ended with {child.returncode}"
            break
    if not key or tuple(key) in answered(read_records(records)):
        raise RuntimeError(why)
    kind, name, layout = key
    add_record(records, {"kind": kind, "name": name, "layout": layout, "refused": why})
    return False


def summary(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """The counts of outcomes and numbers, and a line for each mistake."""
    judged = verdicts(lines)
    outcomes = Counter(line["outcome"] for line in judged)
    said = Counter(line["numbers"] for line in lines if "numbers" in line)
    texts = [
        f"{len({line['name'] for line in judged})} steps, {len(judged)} layouts:"
        f" {dict(outcomes)}; numbers of these: {dict(said)}"
    ]
    for line in mistakes(lines):
        what = "refuted, and right"
        if line["numbers"] == "wrong":
            what = "proved, and wrong"
        texts.append(f"{what}: {line['name']}, {line['layout']}: {line['error']} off")
    return texts


def mistakes(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The numbers of right programs that are refuted, and of wrong ones that are
    proved.
    """
    wrong_answer = {"refuted": "right", "proved": "wrong"}
    outcome_of = {
        (line["name"], line["layout"]): line["outcome"] for line in verdicts(lines)
    }
    found = []
    for line in lines:
        if "numbers" in line:
            outcome = outcome_of[line["name"], line["layout"]]
            if line["numbers"] == wrong_answer[outcome]:
                found.append(line)
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.unseen.verdicts", description=__doc__
    )
    add_option = parser.add_argument
    add_option("--records", type=Path, required=True, help="the answers so far")
    add_option("--json", type=Path, help="where the results go")
    add_option("--minutes", type=float, default=60, help="how long questions begin")
    add_option("--seconds", type=float, default=240, help="the most for a question")
    add_option("--child", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args(arguments)
    if flags.child:
        work(flags.records, flags.minutes)
        return 0
    deadline = time.monotonic() + 60 * flags.minutes
    while (minutes := (deadline - time.monotonic()) / 60) > 0:
        if wait(flags.records, minutes, flags.seconds):
            break
    lines = read_records(flags.records)
    print("\n".join(summary(lines)))
    if flags.json is not None:
        flags.json.write_text(json.dumps(document(lines), indent=1) + "\n")
    return int(bool(mistakes(lines)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
