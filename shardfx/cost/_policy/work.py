"""The work of a jaxpr's equations, and which of its values depend on some of its
inputs.
"""

import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.extend.core as jex
import jax.numpy as jnp

from ..._step import CALLS, MARKED_CALLS, carry_of, opened


SCANS = ("scan",)
USERS_CHECKPOINTS = ("checkpoint", "remat", "remat2")
_PROGRAMS: Mapping[str, str] = {
    **CALLS,
    **MARKED_CALLS,
    "scan": "jaxpr",
    "shard_map": "jaxpr",
}
_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")
# Operations that pass over their operands in memory. Elementwise ones are computed
# within the operations that read their results.
_PASSES = (
    "reduce_",
    "arg",
    "sort",
    "top_k",
    "gather",
    "scatter",
    "cum",
    "fft",
    "while",
)
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
    `while` counts as one iteration, a `cond` as its largest branch.
    """
    name = equation.primitive.name
    params = equation.params
    if name in _PROGRAMS:
        work = _work_of_program(params[_PROGRAMS[name]])
        if name == "scan":
            return work.times(params["length"])
        return work
    if name == "cond":
        return max(map(_work_of_program, params["branches"]))
    if name == "while":
        return _work_of_program(params["body_jaxpr"])
    if name in _PRODUCTS:
        return Work(_product_flops(equation))
    if name in _VIEWS:
        return Work()

    if name.startswith(_PASSES):
        avals: list[Any] = [atom.aval for atom in equation.invars]
        largest = max(avals, key=_size)
        elements = _size(largest)
        return Work(flops=elements, bytes=elements * largest.dtype.itemsize)
    return Work(sum(_size(var.aval) for var in equation.outvars))


def total(works: Iterable[Work]) -> Work:
    flops = 0.0
    passed_bytes = 0.0
    for work in works:
        flops += work.flops
        passed_bytes += work.bytes
    return Work(flops=flops, bytes=passed_bytes)


def _work_of_program(program: object) -> Work:
    jaxpr, _ = opened(program)
    return total(map(work_of, jaxpr.eqns))


def has_products(equation: jex.JaxprEqn) -> bool:
    """Whether an equation is a matrix product or a convolution, or contains one."""
    params = equation.params
    name = equation.primitive.name
    if name in _PRODUCTS or name == "pallas_call":
        return True
    programs = params.get("branches", ())
    if name in _PROGRAMS:
        programs = (params[_PROGRAMS[name]],)
    for program in programs:
        jaxpr, _ = opened(program)
        if any(map(has_products, jaxpr.eqns)):
            return True
    return False


def _product_flops(equation: jex.JaxprEqn) -> float:
    """The operations of a product: two for each element of the result and each element
    that is summed.
    """
    avals: list[Any] = [atom.aval for atom in equation.invars[:2]]
    left, right = (aval.shape for aval in avals)
    result = 2.0 * _size(equation.outvars[0].aval)
    params = equation.params
    name = equation.primitive.name
    if name == "conv_general_dilated":
        kernel = params["dimension_numbers"].rhs_spec[1:]
        return result * math.prod(right[dim] for dim in kernel)
    if name == "ragged_dot":
        return result * left[-1]
    numbers: Any = params.get("dimension_numbers")
    if name == "ragged_dot_general":
        numbers = params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    (contracted, _), _ = numbers
    return result * math.prod(left[dim] for dim in contracted)


def _size(aval: Any) -> int:
    return math.prod(getattr(aval, "shape", ()))


def dependent(jaxpr: jex.Jaxpr, inputs: Sequence[bool]) -> set[Any]:
    """The variables of a jaxpr that are floating-point and depend on the inputs that
    are true in `inputs`, with these inputs.
    """
    variables = set(itertools.compress(jaxpr.invars, inputs))
    for equation in jaxpr.eqns:
        flags = _are_in(equation.invars, variables)
        if not any(flags) or equation.primitive.name == "stop_gradient":
            continue
        depend = _dependent_results(equation, flags)
        for var in itertools.compress(equation.outvars, depend):
            if _is_inexact(var.aval):
                variables.add(var)
    return variables


def _are_in(atoms: Sequence[Any], variables: set[Any]) -> list[bool]:
    """For each atom, whether it is one of some variables, and no literal."""
    return [not isinstance(atom, jex.Literal) and atom in variables for atom in atoms]


def _dependent_results(equation: jex.JaxprEqn, flags: list[bool]) -> list[bool]:
    """Which results of an equation depend on the operands that are true in `flags`."""
    name = equation.primitive.name
    all_depend = [True] * len(equation.outvars)
    if name == "cond":
        depends_on_index, *operand_flags = flags
        if depends_on_index:
            return all_depend
        depend = [False] * len(equation.outvars)
        for branch in equation.params["branches"]:
            results = _results_of_program(branch, operand_flags)
            depend = list(map(operator.or_, depend, results))
        return depend
    if name not in _PROGRAMS:
        return all_depend
    program = equation.params[_PROGRAMS[name]]
    jaxpr, _ = opened(program)
    if len(jaxpr.invars) != len(flags):
        return all_depend
    if name != "scan":
        return _results_of_program(program, flags)

    first, carried = carry_of(equation)
    while True:
        results = _results_of_program(program, flags)
        following = list(flags)
        for position in range(carried):
            following[first + position] |= results[position]
        if following == flags:
            return results
        flags = following


def _results_of_program(program: object, flags: Sequence[bool]) -> list[bool]:
    jaxpr, _ = opened(program)
    return _are_in(jaxpr.outvars, dependent(jaxpr, flags))


def _is_inexact(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)
