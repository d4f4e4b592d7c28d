"""What `shardfx.testing.verify` and `check_step` say of a case."""

import re
from typing import Any

import jax

from shardfx import testing
from shardfx._step import Programs, Step, judged, step_of

from ._data import Case
from ._draws import shapes_between
from ._numbers import mesh_of, sharded, sharding
from ._values import arguments


_OPCODE = re.compile(r"\(([\w-]+)\)")
# The judge catches the errors of its rules. They are its faults all the same.
_BROKEN = re.compile(r"^the rule of .* failed|^.* failed: \w+Error")
_EQUATION = re.compile(r"first equation that differs: `([\w-]+)`")


def traced_step(case: Case) -> Step:
    """The step of a case, to be traced and lowered once for its verdict and its numbers."""
    traced = sharded(case).trace(*structs(case))
    return step_of(traced, (), mesh_of(case.layout.mesh))


def verdict(case: Case, step: Step | None = None) -> dict[str, Any]:
    """The verdict of `shardfx.testing.verify` on a case, as JSON holds it. An error of
    `verify` is a verdict of its own, "failed". `step` is the traced step, if there is
    one already.
    """
    try:
        traced = traced_step(case) if step is None else step
        said = judged(traced.programs("cpu"))
    except Exception as error:  # whatever it is, it is a fault of `verify`
        return {
            "outcome": "failed",
            "message": f"{type(error).__name__}: {error}"[:400],
        }
    return told(said)


def verdict_of_text(text: str, whole: str) -> dict[str, Any]:
    """The verdict on a partitioned text, by the text of the whole program."""
    try:
        return told(judged(Programs(whole=whole, partitioned=text)))
    except Exception as error:  # whatever it is, it is a fault of the judge
        return {
            "outcome": "failed",
            "message": f"{type(error).__name__}: {error}"[:400],
        }


def told(said: testing.Verdict) -> dict[str, Any]:
    """A verdict as JSON holds it."""
    data: dict[str, Any] = {
        "outcome": said.outcome,
        "operations": said.operations,
        "judged": said.judged_operations,
        "bytes": said.bytes,
        "judged_bytes": said.judged_bytes,
    }
    if said.refutations:
        data["refutation"] = _refutation(said.refutations[0])
    broken = [cause.reason for cause in said.unjudged if _BROKEN.search(cause.reason)]
    if broken:
        data["outcome"] = "failed"
        data["message"] = broken[0][:400]
    if said.unjudged:
        data["reasons"] = [cause.reason[:120] for cause in said.unjudged[:3]]
        data["unjudged"] = [cause.operation for cause in said.unjudged[:3]]
    return data


def _refutation(refutation: testing.Refutation) -> dict[str, str]:
    opcode = _OPCODE.search(refutation.operation)
    return {
        "operation": refutation.operation,
        "opcode": opcode[1] if opcode else refutation.operation,
        "fault": refutation.fault,
    }


def structs(case: Case) -> list[jax.ShapeDtypeStruct]:
    """The arguments of a case as structs on its mesh."""
    mesh = mesh_of(case.layout.mesh)
    values = arguments(case.program, shapes_between(case.program)[-1])
    return [
        jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding(mesh, spec))
        for array, spec in zip(values, case.layout.arguments, strict=True)
    ]


def explanation(case: Case) -> dict[str, Any]:
    """What refutes the case, and the first equation that differs."""
    judged_case = verdict(case)
    data: dict[str, Any] = {"verify": judged_case["outcome"]}
    if "refutation" in judged_case:
        data["refutation"] = judged_case["refutation"]
    mesh = mesh_of(case.layout.mesh)
    values = arguments(case.program, shapes_between(case.program)[-1])
    placed = [
        jax.device_put(array, sharding(mesh, spec))
        for array, spec in zip(values, case.layout.arguments, strict=True)
    ]
    try:
        checked = testing.check_step(sharded(case), *placed)
    except Exception as error:  # a step that `check_step` refuses, as `shard_map`
        return data | {"check": f"{type(error).__name__}: {error}"[:200]}
    equation = _EQUATION.search(" ".join(checked.story))
    data["check"] = "right" if checked else "wrong"
    if equation is not None:
        data["equation"] = equation[1]
    return data
