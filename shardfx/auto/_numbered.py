"""The evaluation of a jaxpr, equation by equation. The locations of the operations to
which an equation lowers have its number.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jaxtyping import PyTree

from .._step import (
    CALLS,
    LOOPS,
    Operation,
    applied,
    array_leaves,
    evaluated,
    name_stacks,
    opened,
    retraced,
)


# Equations that contain programs, which are evaluated anew.
_NESTED = (*LOOPS, "checkpoint", "remat", "remat2")
_TAG = "shardfx-equation-"
_TAGS = re.compile(_TAG + r"(\d+)")


def run_with(
    change: Callable[[int, str, Sequence[Any]], Sequence[Any]],
    closed: jex.ClosedJaxpr,
    args: Sequence[PyTree],
) -> list[Any]:
    """The results of the step's jaxpr `closed`, with `change` applied to the results of
    each equation. `change` takes the number of the equation, the name of its primitive
    and its results, and returns other results.
    """
    return _Walker(change).run(*opened(closed), array_leaves(args))


class _Walker:
    """Evaluates a jaxpr, each equation in a name scope with the equation's number. The
    function `change` takes the equation's number, the name of its primitive, and its
    results, and returns other results. Equations are numbered in the order of their
    evaluation, those of nested jaxprs included; `count` is the next number.
    """

    def __init__(self, change: Callable[[int, str, Sequence[Any]], Sequence[Any]]):
        self.change = change
        self.count = 0

    def run(
        self,
        jaxpr: jex.Jaxpr,
        consts: Sequence[Any],
        arguments: Sequence[Any],
    ) -> list[Any]:
        """Evaluates a jaxpr, with `change` applied to the results of each equation.
        Returns the jaxpr's results.
        """
        return evaluated(jaxpr, consts, arguments, self.changed_results)

    def changed_results(
        self,
        jaxpr: jex.Jaxpr,
        equation: jex.JaxprEqn,
        operands: list[Any],
    ) -> Sequence[Any]:
        """The results of an equation of `jaxpr`, with `change` applied to them and to
        those of the equations within: a call is inlined, and the body of a loop is
        evaluated anew.
        """
        name = equation.primitive.name
        number = self.count
        self.count += 1
        if name in CALLS:
            results = self.run(*opened(equation.params[CALLS[name]]), operands)
            return self.change(number, name, results)

        if name in _NESTED:
            params = {
                key: retraced(parameter, self.run)
                for key, parameter in equation.params.items()
            }
            equation = equation.replace(params=params)
        with jax.named_scope(f"{_TAG}{number}"):
            results = applied(jaxpr, equation, operands)
        return self.change(number, name, results)


def equation_of(operation: Operation) -> int | None:
    """The number of the equation that a lowered operation belongs to: the innermost one
    of the first of its locations that has a number.
    """
    for name_stack in name_stacks(operation.location):
        numbers = _TAGS.findall(name_stack)
        if numbers:
            return int(numbers[-1])
    return None
