"""The work of a jaxpr's equations, and which of its values depend on some of its
inputs.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.extend.core as jex
import jax.numpy as jnp

from ..._step import opened


SCANS = ("scan",)
_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general", "pallas_call")
# Operations that pass over their operands in memory. Elementwise ones are computed
# within the operations that read their results.
_MEMORY_PASSES = ("reduce_", "arg", "sort", "top_k", "gather", "scatter", "cum", "fft")
# Operations that compute nothing.
_VIEWS = (
    "reshape squeeze expand_dims transpose broadcast_in_dim convert_element_type slice"
    " copy name stop_gradient sharding_constraint reshard iota bitcast_convert_type"
).split()


class Work(NamedTuple):
    """The floating-point operations of equations, and the bytes that they pass over in
    memory beside products.
    """

    flops: float = 0.0
    bytes: float = 0.0

    def times(self, count: float) -> "Work":
        return Work(self.flops * count, self.bytes * count)


def work_of(equation: jex.JaxprEqn) -> Work:
    """The work of an equation on all devices together, with that of programs in it. A
    scan counts all its iterations, a `while` one, and a `cond` the branch with the most
    floating-point operations.
    """
    name = equation.primitive.name
    if name in _PRODUCTS:
        return Work(_product_flops(equation))
    if name in _VIEWS:
        return Work()
    if name.startswith(_MEMORY_PASSES):
        # Its time is that of reading its largest operand.
        avals: list[Any] = [atom.aval for atom in equation.invars]
        largest = max(avals, key=_size)
        elements = _size(largest)
        return Work(flops=elements, bytes=elements * largest.dtype.itemsize)

    works_of_programs = [
        total(map(work_of, program.eqns)) for program in _programs(equation)
    ]
    if works_of_programs:
        return max(works_of_programs).times(equation.params.get("length", 1))
    return Work(sum(_size(var.aval) for var in equation.outvars))


def total(works: Iterable[Work]) -> Work:
    """The sum of some works; no work for none."""
    flops = 0.0
    passed_bytes = 0.0
    for work in works:
        flops += work.flops
        passed_bytes += work.bytes
    return Work(flops=flops, bytes=passed_bytes)


def _programs(equation: jex.JaxprEqn) -> Iterator[jex.Jaxpr]:
    """Yields the jaxprs in an equation's parameters."""
    for parameter in equation.params.values():
        parts = parameter if isinstance(parameter, tuple) else (parameter,)
        for part in parts:
            if isinstance(part, jex.Jaxpr | jex.ClosedJaxpr):
                yield opened(part)[0]


def has_products(equation: jex.JaxprEqn) -> bool:
    """Whether an equation is a matrix product or a convolution, or contains one."""
    if equation.primitive.name in _PRODUCTS:
        return True
    inner = (program.eqns for program in _programs(equation))
    return any(map(has_products, itertools.chain.from_iterable(inner)))


def _product_flops(equation: jex.JaxprEqn) -> float:
    """The operations of a product: two for each element of the result and each element
    that is summed.
    """
    params = equation.params
    result_flops = 2.0 * sum(_size(var.aval) for var in equation.outvars)
    numbers: Any = params.get("dimension_numbers")
    if "ragged_dot_dimension_numbers" in params:
        numbers = params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    if numbers is None:  # a kernel
        return result_flops
    left: Any = equation.invars[0].aval
    right: Any = equation.invars[1].aval
    if equation.primitive.name == "conv_general_dilated":
        return result_flops * math.prod(
            right.shape[dim] for dim in numbers.rhs_spec[1:]
        )
    (contracted, _), _ = numbers
    return result_flops * math.prod(left.shape[dim] for dim in contracted)


def _size(aval: Any) -> int:
    return math.prod(getattr(aval, "shape", ()))


def is_var(atom: Any) -> bool:
    return not isinstance(atom, jex.Literal)


def dependent(jaxpr: jex.Jaxpr, inputs: Sequence[bool]) -> set[Any]:
    """The variables of a jaxpr that are floating-point and depend on the inputs that
    are true in `inputs`, with these inputs. All results of an equation depend on each
    of its operands.
    """
    variables = set(itertools.compress(jaxpr.invars, inputs))
    for equation in jaxpr.eqns:
        if equation.primitive.name == "stop_gradient":
            continue
        if not variables.isdisjoint(filter(is_var, equation.invars)):
            variables.update(filter(_is_inexact, equation.outvars))
    return variables


def _is_inexact(var: Any) -> bool:
    dtype = getattr(var.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)
