"""Mutations of right partitioned programs: what the numbers say beside the judge.

The numbers are the oracle: the mutated text runs on emulated devices, beside the text
before the mutation. Programs whose text does not give the numbers of `jit` do not count.
"""

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from ._data import Case
from ._draws import shapes_between
from ._mutate import UNCHANGED, mutations
from ._numbers import mesh_of
from ._texts import difference, is_whole, placed, run, shards, texts
from ._values import arguments
from ._verdicts import verdict_of_text


LARGER = 256


class Original(NamedTuple):
    """A right program that is mutated: its text, the text before the partitioner, its
    arguments on the devices, what it computes on each device, and other lists of
    arguments.
    """

    text: str
    whole: str
    arguments: list[jax.Array]
    results: list[list[np.ndarray]]
    other_arguments: list[list[jax.Array]]
    devices: int


def original(case: Case, step: Any) -> tuple[Original | None, str]:
    """The partitioned program of a case, whose jitted function is `step`; or `None` and
    why it does not count.
    """
    values = arguments(case.program, shapes_between(case.program)[-1])
    devices = mesh_of(case.layout.mesh).size
    text, whole = texts(case, step, values)
    if not is_whole(text):
        return None, "constants are not written out"
    arrays = placed(case, values)
    results = run(text, arrays, devices)
    if difference(results, shards(step(*arrays))) > UNCHANGED:
        return None, "its text gives other numbers than jit"
    program = Original(
        text=text,
        whole=whole,
        arguments=arrays,
        results=results,
        other_arguments=[
            placed(case, [_larger(array) for array in values]),
            placed(case, [_negative(array) for array in values]),
        ],
        devices=devices,
    )
    return program, ""


def _larger(array: np.ndarray) -> np.ndarray:
    """A softmax is the same whatever is taken off its elements, until they overflow."""
    if array.dtype.kind == "i":
        return array
    return (array * LARGER).astype(array.dtype)


def _negative(array: np.ndarray) -> np.ndarray:
    """Indices from the end on."""
    return ~array if array.dtype.kind == "i" else array


def mutated(case: Case, step: Any, count: int, seed: int) -> list[dict[str, Any]]:
    """Mutations of the case's program, each with what its numbers and the judge say.
    What the judge does not judge needs no numbers, and does not run.
    """
    program, reason = original(case, step)
    if program is None:
        return [{"skipped": reason}]
    before = _judged(program, program.text)
    lines: list[dict[str, Any]] = []
    for mutation in mutations(program.text, program.devices, count, seed):
        line: dict[str, Any] = {
            "kind": mutation.kind,
            "line": mutation.line,
            "name": case.program.name,
            "before": before.get("outcome"),
        }
        verdict = _judged(program, mutation.text)
        if verdict["outcome"] == "not judged":
            lines.append(line | {"verdict": verdict})
            continue
        try:
            results = run(mutation.text, program.arguments, program.devices)
        except Exception as error:  # XLA refuses the text
            lines.append(line | {"refused": str(error)[:200]})
            continue
        changed = difference(results, program.results)
        line["changed"] = float(f"{changed:.3g}")
        if verdict["outcome"] == "refuted" and changed <= UNCHANGED:
            line["changed_otherwise"] = _changed_otherwise(program, mutation.text)
        lines.append(line | {"verdict": verdict})
    return lines


def _changed_otherwise(program: Original, text: str) -> float:
    """How far a mutation changes the results of other arguments, at most."""
    worst = 0.0
    for others in program.other_arguments:
        before = run(program.text, others, program.devices)
        after = run(text, others, program.devices)
        worst = max(worst, difference(after, before))
    return float(f"{worst:.3g}")


def _judged(program: Original, text: str) -> Mapping[str, Any]:
    started = time.process_time()
    verdict = verdict_of_text(text, program.whole)
    return verdict | {"seconds": round(time.process_time() - started, 3)}
