"""The work of a jaxpr's equations, and which of its values depend on some of its
inputs.
"""

import math
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
        count = params["length"] if name == "scan" else 1
        return _work_of_program(params[_PROGRAMS[name]]).times(count)
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
        return Work(_size(largest), _size(largest) * largest.dtype.itemsize)
    return Work(sum(_size(var.aval) for var in equation.outvars))


def total(works: Iterable[Work]) -> Work:
    flops = 0.0
    passed_bytes = 0.0
    for work in works:
        flops += work.flops
        passed_bytes += work.bytes
    return Work(flops, passed_bytes)


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
    return any(
        has_products(inner) for program in programs for inner in opened(program)[0].eqns
    )


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
    variables = {var for var, is_in in zip(jaxpr.invars, inputs, strict=True) if is_in}
    for equation in jaxpr.eqns:
        flags = [
            not isinstance(atom, jex.Literal) and atom in variables
            for atom in equation.invars
        ]
        if not any(flags) or equation.primitive.name == "stop_gradient":
            continue
        results = zip(
            equation.outvars, _dependent_results(equation, flags), strict=True
        )
        variables.update(
            var for var, depends in results if depends and _is_inexact(var.aval)
        )
    return variables


def _dependent_results(equation: jex.JaxprEqn, flags: list[bool]) -> list[bool]:
    """Which results of an equation depend on the operands that are true in `flags`."""
    name = equation.primitive.name
    if name == "cond":
        branches = [
            _results_of_program(branch, flags[1:])
            for branch in equation.params["branches"]
        ]
        return [flags[0] or any(column) for column in zip(*branches, strict=True)]
    if name not in _PROGRAMS:
        return [True] * len(equation.outvars)
    program = equation.params[_PROGRAMS[name]]
    if len(opened(program)[0].invars) != len(flags):
        return [True] * len(equation.outvars)
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
    variables = dependent(jaxpr, flags)
    return [
        not isinstance(atom, jex.Literal) and atom in variables
        for atom in jaxpr.outvars
    ]


def _is_inexact(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)
