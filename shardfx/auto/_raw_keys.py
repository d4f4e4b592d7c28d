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
    numbers = [n for n in results if n < len(body.outvars)]
    if equation.primitive.name not in ("scan", "while"):
        return _words(body, numbers)
    # What a loop carries and what it closes over has the rank that it has in the body;
    # what a scan iterates over and stacks has one dimension more.
    carried = _of_equal_rank(equation.outvars, body.outvars)
    operands = equation.invars[-len(body.invars) :]
    first = _of_equal_rank(operands, body.invars) - carried
    while True:
        words = _words(body, numbers)
        more = [n for n in range(carried) if body.invars[first + n] in words]
        if set(more) <= set(numbers):
            return words
        numbers = sorted({*numbers, *more})


def _of_equal_rank(values: Sequence[Any], values_of_body: Sequence[Any]) -> int:
    """How many values of an equation have the rank that they have in its body."""
    pairs = zip(values, values_of_body, strict=False)
    return sum(_rank(value) == _rank(inner) for value, inner in pairs)


def _rank(value: Any) -> int:
    # A token has no dimensions.
    return getattr(value.aval, "ndim", 0)


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
    if isinstance(value, jex.Literal):
        return False
    # A token has no dtype.
    return getattr(value.aval, "dtype", None) == np.uint32
