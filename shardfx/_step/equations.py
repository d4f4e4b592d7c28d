"""One equation of a jaxpr: carried out by itself, and the lines that it came from."""

from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex

from .lines import Frame


def opened(given: object) -> tuple[Any, Sequence[Any]]:
    """The jaxpr and the constants of one that may be closed."""
    return (given.jaxpr, given.consts) if isinstance(given, jex.ClosedJaxpr) else (given, ())


def applied(jaxpr: Any, equation: Any, ins: Sequence[Any]) -> list[Any]:
    """One equation carried out, with the name and the line that it came from."""
    known = {atom: array for atom, array in zip(equation.invars, ins, strict=True) if not isinstance(atom, jex.Literal)}
    alone = jaxpr.replace(
        constvars=[],
        invars=[*known],
        outvars=[*equation.outvars],
        eqns=[equation],
        effects=equation.effects,
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    return jex.jaxpr_as_fun(jex.ClosedJaxpr(alone, []))(*known.values())


def carry_of(scan: Any) -> tuple[int, int]:
    """Where the carry of a scan begins in what it takes, and how many arrays it has.

    The parameters that say so have other names with each JAX. What is taken or made by turns has a dimension more.
    """
    inner = opened(scan.params["jaxpr"])[0]
    taken = sum(a.aval.shape == b.aval.shape for a, b in zip(scan.invars, inner.invars, strict=True))
    carried = sum(a.aval.shape == b.aval.shape for a, b in zip(scan.outvars, inner.outvars, strict=True))
    return taken - carried, carried


def frames_of(equation: Any) -> tuple[Frame, ...]:
    """The lines of an equation and of the calls around it, the innermost first."""
    traceback = equation.source_info.traceback
    frames = () if traceback is None else traceback.frames
    return tuple(Frame(one.file_name, one.line_num, one.function_name) for one in frames)
