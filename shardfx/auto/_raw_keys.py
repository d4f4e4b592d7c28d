"""Which arguments of a step are the raw words of PRNG keys, by what the step does with
them. Tokens may be uint32 as well, and have 2 or 4 numbers in a row.
"""

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import jax.extend.core as jex
import numpy as np


# The primitive that makes a typed key of raw words.
_MAKES_KEYS = "random_wrap"


def raw_keys(jaxpr: Any) -> frozenset[int]:
    """The numbers of the arguments of a jaxpr whose words become a PRNG key, also in
    part, or in a function that the jaxpr calls.
    """
    words = _word_variables(jaxpr, ())
    numbers = [
        number for number, variable in enumerate(jaxpr.invars) if variable in words
    ]
    return frozenset(numbers)


def _word_variables(jaxpr: Any, word_results: Iterable[int]) -> set[Any]:
    """The variables of a jaxpr that hold raw words, if the results with the numbers
    `word_results` do. Raw words are the integers of which a PRNG key is made.
    """
    words: set[Any] = set()
    for number in word_results:
        result = jaxpr.outvars[number]
        if _may_hold_words(result):
            words.add(result)

    for equation in reversed(jaxpr.eqns):
        if equation.primitive.name == _MAKES_KEYS:
            words.update(filter(_may_hold_words, equation.invars))
            continue
        results = [
            number
            for number, variable in enumerate(equation.outvars)
            if variable in words
        ]
        bodies = list(_bodies(equation.params.values()))
        for body in bodies:
            words |= _operands_of_words(equation, body, results)
        if results and not bodies:
            words.update(filter(_may_hold_words, equation.invars))
    return words


def _operands_of_words(equation: Any, body: Any, results: Sequence[int]) -> set[Any]:
    """The operands of an equation that hold raw words in its body, if the results with
    the numbers `results` do. `_operands` gives the operands that `body`, a jaxpr of the
    equation, takes.
    """
    words_of_body = _word_variables_of_body(equation, body, results)
    operands = set()
    # A body without arguments has no operands, where `_operands` returns all.
    for operand, variable in zip(_operands(equation, body), body.invars, strict=False):
        if variable in words_of_body and _may_hold_words(operand):
            operands.add(operand)
    return operands


def _operands(equation: Any, body: Any) -> Sequence[Any]:
    """The operands of an equation that a body takes: its last ones. A branch takes all
    but the index, and a loop's condition only a part.
    """
    return equation.invars[-len(body.invars) :]


def _word_variables_of_body(
    equation: Any,
    body: Any,
    results: Sequence[int],
) -> set[Any]:
    """The variables of a body of an equation that hold raw words. What a loop carries
    holds them at its end if it does at its beginning. Raw words are the integers of
    which a PRNG key is made; the results of the equation with the numbers `results`
    hold them.
    """
    word_results = {number for number in results if number < len(body.outvars)}
    if equation.primitive.name not in ("scan", "while"):
        return _word_variables(body, sorted(word_results))

    # What a loop carries and what it closes over has the rank that it has in the body;
    # what a scan iterates over and stacks has one dimension more.
    carried_count = _of_equal_rank(equation.outvars, body.outvars)
    operands = _operands(equation, body)
    # A scan's operands are what it closes over, what it carries, and what it iterates
    # over, in this order.
    first = _of_equal_rank(operands, body.invars) - carried_count
    carried = body.invars[first : first + carried_count]
    while True:
        words = _word_variables(body, sorted(word_results))
        carried_words = {
            number for number, variable in enumerate(carried) if variable in words
        }
        if carried_words <= word_results:
            return words
        word_results |= carried_words


def _of_equal_rank(values: Sequence[Any], values_of_body: Sequence[Any]) -> int:
    """How many values of an equation have the rank that they have in its body."""
    ranks = map(_rank, values)
    ranks_in_body = map(_rank, values_of_body)
    return sum(map(operator.eq, ranks, ranks_in_body))


def _rank(value: Any) -> int:
    """The number of dimensions of a variable."""
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


def _may_hold_words(value: Any) -> bool:
    """Whether a variable, and no literal, holds words of a key."""
    if isinstance(value, jex.Literal):
        return False
    # A token has no dtype.
    return getattr(value.aval, "dtype", None) == np.uint32
