"""Evaluates jaxprs equation by equation.

Every evaluator of the package is a rule for one equation, which `evaluated` applies in
turn. The tables say which equations hold programs.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.extend.core as jex
from jax.core import Tracer

from .jaxprs import opened


# Equations that call one program, with the parameter that holds it. The program may
# take the place of the call.
CALLS: Mapping[str, str] = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
}
# Equations that call one program and say something about it: which values are computed
# again, how it is differentiated, and that it is evaluated as it is.
MARKED_CALLS: Mapping[str, str] = {
    "checkpoint": "jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "eval_jaxpr": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
LOOPS = ("scan", "while", "cond")


@runtime_checkable
class Program(Protocol):
    """What `evaluated` reads of a jaxpr. Its equations are any objects with `invars`
    and `outvars`.
    """

    @property
    def constvars(self) -> Sequence[Any]: ...

    @property
    def invars(self) -> Sequence[Any]: ...

    @property
    def outvars(self) -> Sequence[Any]: ...

    @property
    def eqns(self) -> Sequence[Any]: ...


# Takes a jaxpr, one of its equations, and the values of the equation's operands.
# Returns the values of the equation's results.
Rule = Callable[[Any, Any, list[Any]], Sequence[Any]]


def value_of_literal(literal: jex.Literal) -> Any:
    """The number of a literal in a jaxpr."""
    return literal.val


def evaluated(
    jaxpr: Program,
    consts: Sequence[Any],
    args: Sequence[Any],
    rule: Rule,
    literal: Callable[[jex.Literal], Any] = value_of_literal,
) -> list[Any]:
    """The results of a jaxpr, whose equations `rule` evaluates.

    A value is whatever the rule returns, such as an array, or an array with a number.
    `consts` and `args` are the values of the jaxpr's constants and arguments. `literal`
    makes a value of a literal.
    """
    values: dict[object, Any] = {}
    values.update(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))

    def value_of(atom: Any) -> Any:
        if isinstance(atom, jex.Literal):
            return literal(atom)
        return values[atom]

    for equation in jaxpr.eqns:
        operands = list(map(value_of, equation.invars))
        results = rule(jaxpr, equation, operands)
        values.update(zip(equation.outvars, results, strict=True))
    return list(map(value_of, jaxpr.outvars))


def struct_of(var: Any) -> jax.ShapeDtypeStruct:
    """A struct of a jaxpr's variable, without a sharding."""
    aval = var.aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def typed_struct_of(var: Any) -> jax.ShapeDtypeStruct:
    """A struct of a jaxpr's variable, with the sharding over Explicit axes that the
    variable's type says.
    """
    aval = var.aval
    sharding = None
    if aval.sharding.mesh.explicit_axes:
        sharding = aval.sharding
    return jax.ShapeDtypeStruct(
        aval.shape,
        aval.dtype,
        weak_type=aval.weak_type,
        sharding=sharding,
    )


def retraced(
    parameter: Any,
    run: Callable[[jex.Jaxpr, Sequence[Any], Sequence[Any]], Sequence[Any]],
    struct_of: Callable[[Any], jax.ShapeDtypeStruct] = struct_of,
) -> Any:
    """A parameter of an equation, with each jaxpr in it traced again as `run` evaluates
    it. Parameters without jaxprs are returned unchanged, and so are jaxprs whose
    constants are operands of the equation.

    `run` takes a jaxpr, its constants and its arguments. `struct_of` gives the struct
    of an argument from its variable in the jaxpr.
    """
    if isinstance(parameter, tuple):
        parts = [retraced(part, run, struct_of) for part in parameter]
        kind = type(parameter)
        if kind is tuple:
            return tuple(parts)
        return kind(*parts)
    if not isinstance(parameter, jex.ClosedJaxpr | jex.Jaxpr):
        return parameter

    jaxpr, consts = opened(parameter)
    # lineax has such jaxprs in the parameters of its solves. In JAX 0.12 they keep the
    # tracers of the trace that made them.
    is_open = len(consts) < len(jaxpr.constvars)
    if is_open or any(isinstance(const, Tracer) for const in consts):
        return parameter
    structs = map(struct_of, jaxpr.invars)
    closed = jax.make_jaxpr(lambda *args: run(jaxpr, consts, args))(*structs)
    if isinstance(parameter, jex.ClosedJaxpr):
        return closed
    return closed.jaxpr


def manual_axes_of(shard_map: jex.JaxprEqn) -> tuple[str, ...]:
    """The mesh axes that a `shard_map` makes Manual, in the order of its mesh."""
    params = shard_map.params
    # The name of the parameter differs between versions of JAX.
    key = "manual_axes"
    if "newly_manual_axes" in params:
        key = "newly_manual_axes"
    return tuple(name for name in params["mesh"].axis_names if name in params[key])
