"""Which arguments of a step are the raw words of PRNG keys, by what the step does with
them. Tokens may be uint32 as well, and have 2 or 4 numbers in a row.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax.extend.core as jex
import numpy as np


_WRAP = "random_wrap"


def raw_keys(jaxpr: Any) -> frozenset[int]:
    """The numbers of the arguments of a jaxpr whose words become a PRNG key, also in
    part, or in a function that the jaxpr calls.
    """
    words = _words(jaxpr, ())
    return frozenset(n for n, var in enumerate(jaxpr.invars) if var in words)


def _words(jaxpr: Any, of_results: Iterable[int]) -> set[Any]:
    """The variables of a jaxpr that hold raw words, if the results with the numbers
    `of_results` do.
    """
    words = {jaxpr.outvars[n] for n in of_results if _may_be(jaxpr.outvars[n])}
    for equation in reversed(jaxpr.eqns):
        if equation.primitive.name == _WRAP:
            words |= set(filter(_may_be, equation.invars))
            continue
        results = [n for n, var in enumerate(equation.outvars) if var in words]
        bodies = list(_bodies(equation.params.values()))
        for body in bodies:
            # The operands of a body are the last ones of its equation.
            operands = equation.invars[-len(body.invars) :]
            words_of_body = _words_of_body(equation, body, results)
            for operand, var in zip(operands, body.invars, strict=False):
                if var in words_of_body and _may_be(operand):
                    words.add(operand)
        if results and not bodies:
            words |= set(filter(_may_be, equation.invars))
    return words


def _words_of_body(equation: Any, body: Any, results: Sequence[int]) -> set[Any]:
    """The variables of a body of an equation that hold raw words. What a loop carries
    holds them at its end if it does at its beginning.
    """
    carried = len(body.outvars)
    first = len(body.invars) - carried
    if equation.primitive.name == "scan":
        carried = equation.params["num_carry"]
        first = equation.params["num_consts"]
    is_loop = equation.primitive.name in ("scan", "while")
    numbers = [n for n in results if n < len(body.outvars)]
    while True:
        words = _words(body, numbers)
        if not is_loop:
            return words
        more = [n for n in range(carried) if body.invars[first + n] in words]
        if set(more) <= set(numbers):
            return words
        numbers = sorted({*numbers, *more})


def _bodies(params: Iterable[object]) -> Iterable[Any]:
    """The jaxprs among the parameters of an equation."""
    for param in params:
        if isinstance(param, jex.ClosedJaxpr):
            yield param.jaxpr
        elif isinstance(param, jex.Jaxpr):
            yield param
        elif isinstance(param, tuple | list):
            yield from _bodies(param)


def _may_be(value: Any) -> bool:
    """Whether a variable, and no literal, holds words of a key."""
    return not isinstance(value, jex.Literal) and value.aval.dtype == np.uint32
