"""Reads jaxprs: their equations, one equation alone, and the carry of a scan."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax.extend.core as jex


def opened(program: object) -> tuple[Any, Sequence[Any]]:
    """The jaxpr and the constants of a `ClosedJaxpr`. A `Jaxpr` is returned unchanged,
    without constants.
    """
    if isinstance(program, jex.ClosedJaxpr):
        return program.jaxpr, program.consts
    return program, ()


def equations_in(program: object) -> Iterator[jex.JaxprEqn]:
    """Yields the equations of a jaxpr, and of the jaxprs that it contains at any depth.
    `program` may be any parameter of an equation; one without a jaxpr has none.
    """
    if isinstance(program, tuple):
        for part in program:
            yield from equations_in(part)
    elif isinstance(program, jex.ClosedJaxpr | jex.Jaxpr):
        for equation in opened(program)[0].eqns:
            yield equation
            for param in equation.params.values():
                yield from equations_in(param)


def applied(jaxpr: jex.Jaxpr, equation: jex.JaxprEqn, ins: Sequence[Any]) -> list[Any]:
    """Evaluates one equation of a jaxpr for the operands `ins`, and returns its
    results. The operations get the equation's own name stack and source line.
    """
    arrays: dict[Any, Any] = {}
    for atom, array in zip(equation.invars, ins, strict=True):
        if not isinstance(atom, jex.Literal):
            arrays[atom] = array
    alone = jaxpr.replace(
        constvars=[],
        invars=list(arrays),
        outvars=list(equation.outvars),
        eqns=[equation],
        effects=equation.effects,
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    return jex.jaxpr_as_fun(jex.ClosedJaxpr(alone, []))(*arrays.values())


def carry_of(scan: Any) -> tuple[int, int]:
    """For the jaxpr equation of a scan: the index of the carry's first array among the
    operands, and the number of arrays in the carry.
    """
    # The names of a scan's parameters differ between versions of JAX. Arrays that are
    # scanned over have one more dimension outside of the body.
    body, _ = opened(scan.params["jaxpr"])
    unscanned = _of_equal_shape(scan.invars, body.invars)
    carried = _of_equal_shape(scan.outvars, body.outvars)
    return unscanned - carried, carried


def _of_equal_shape(outer: Sequence[Any], inner: Sequence[Any]) -> int:
    """How many arrays have the same shape outside and inside of a loop."""
    count = 0
    for array, array_inside in zip(outer, inner, strict=True):
        count += array.aval.shape == array_inside.aval.shape
    return count
