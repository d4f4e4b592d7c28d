"""Equations that hold programs of their own: calls, and what a scan gives to its body."""

from collections.abc import Mapping
from typing import Any

import jax.extend.core as jex
from jax.interpreters import partial_eval


# Primitives that are calls of one jaxpr, and the parameter that holds it.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}


def scan_parts(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many are carried; those behind them are stacked.

    JAX before 0.11 counts them in the equation's parameters; since then these hold the trees of all three.
    """
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carried, _ = params["ft_in"].unpack()
    return len(consts), len(carried)


def without_dead(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """A program without what nothing reads, in its loops and calls too, as compilers leave it out.

    Traces hold such values: the backward pass of a masked attention hands the mask's filling to a loop that does not
    use it, an array as large as all scores. All arguments and results stay.
    """
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    return jex.ClosedJaxpr(jaxpr, closed.consts)
