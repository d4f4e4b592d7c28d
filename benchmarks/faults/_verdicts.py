"""What `shardfx.testing.verify` and `check_step` say of a case."""

import re
from typing import Any

import jax

from shardfx import testing

from ._data import Case
from ._draws import shapes_between
from ._numbers import mesh_of, sharded, sharding
from ._values import arguments


_OPCODE = re.compile(r"\(([\w-]+)\)")
_EQUATION = re.compile(r"first equation that differs: `([\w-]+)`")


def verdict(case: Case) -> dict[str, Any]:
    """The verdict on a case, as JSON holds it. An error of `verify` is a verdict of its
    own, "failed".
    """
    try:
        judged = testing.verify(sharded(case), *structs(case))  # pyright: ignore[reportAttributeAccessIssue]
    except Exception as error:  # whatever it is, it is a fault of `verify`
        return {
            "outcome": "failed",
            "message": f"{type(error).__name__}: {error}"[:400],
        }
    return told(judged)


def verdict_of_text(text: str, whole: str) -> dict[str, Any]:
    """The verdict on a partitioned text, by the text of the whole program."""
    from shardfx._step import judged  # pyright: ignore[reportAttributeAccessIssue]

    try:
        return told(judged(text, whole))
    except Exception as error:  # whatever it is, it is a fault of the judge
        return {
            "outcome": "failed",
            "message": f"{type(error).__name__}: {error}"[:400],
        }


def told(judged: Any) -> dict[str, Any]:
    """A verdict as JSON holds it."""
    data: dict[str, Any] = {
        "outcome": judged.outcome,
        "operations": judged.operations,
        "judged": judged.judged_operations,
        "bytes": judged.bytes,
        "judged_bytes": judged.judged_bytes,
    }
    if judged.refutations:
        data["refutation"] = _refutation(judged.refutations[0])
    if judged.unjudged:
        data["reasons"] = [one.reason[:120] for one in judged.unjudged[:3]]
        data["unjudged"] = [one.operation for one in judged.unjudged[:3]]
    return data


def _refutation(refutation: Any) -> dict[str, str]:
    opcode = _OPCODE.search(refutation.operation)
    return {
        "operation": refutation.operation,
        "opcode": opcode[1] if opcode else refutation.operation,
        "fault": refutation.fault,
    }


def structs(case: Case) -> list[jax.ShapeDtypeStruct]:
    """The arguments of a case as structs on its mesh."""
    mesh = mesh_of(case.layout.mesh)
    given = arguments(case.program, shapes_between(case.program)[-1])
    return [
        jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding(mesh, spec))
        for array, spec in zip(given, case.layout.arguments, strict=True)
    ]


def explanation(case: Case) -> dict[str, Any]:
    """What refutes the case, and the first equation that differs."""
    data: dict[str, Any] = {}
    if "verify" in dir(testing):
        refutation = verdict(case).get("refutation")
        if refutation:
            data["refutation"] = refutation
    mesh = mesh_of(case.layout.mesh)
    given = arguments(case.program, shapes_between(case.program)[-1])
    placed = [
        jax.device_put(array, sharding(mesh, spec))
        for array, spec in zip(given, case.layout.arguments, strict=True)
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
