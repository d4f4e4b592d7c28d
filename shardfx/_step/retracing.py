"""The function and the arguments of a step that is traced already, to trace it again
with other shardings.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex

from .._ground.errors import LeafTypeError, of_argument
from .jaxprs import opened
from .tracing import FlaxTraced, NamedTrace, is_traced


class Untraced(NamedTuple):
    """A function, perhaps a jitted one, and its arguments."""

    step: Callable[..., object]
    args: tuple[Any, ...]


def untraced(step: Any, args: Sequence[Any]) -> Untraced:
    """The function and the arguments of a step. Those of a step that `.trace` returned
    are the function and the arguments that were traced; of a trace of `jax.jit`, the
    function evaluates its jaxpr.

    Raises `LeafTypeError` if a traced step comes with arguments, or does not say what
    it was traced with.
    """
    if not is_traced(step):
        return Untraced(step, tuple(args))
    if args:
        raise LeafTypeError(
            "`step` is traced already; pass it alone, without arguments."
        )
    if isinstance(step, FlaxTraced):
        raise _unfit("`flax.nnx.jit` traced it with the states of modules as arguments")
    if isinstance(step, NamedTrace):
        traced_call = step.traced_call
        call = Untraced(traced_call.function, traced_call.args)
        keywords = traced_call.kwargs
    else:
        structs, keywords = jax.tree.map(_struct_of, step.in_avals)
        call = Untraced(_function_of(step), structs)
    if keywords:
        raise _unfit(f"it was traced with keyword arguments ({', '.join(keywords)})")
    return call


def _struct_of(aval: Any) -> jax.ShapeDtypeStruct:
    """The struct of an array that a step was traced with. Raises `LeafTypeError` if its
    type has a sharding.
    """
    if aval.sharding.mesh.explicit_axes:
        raise _unfit(
            "it was traced for Explicit axes, whose shardings are in its types"
        )
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _unfit(why: str) -> Exception:
    """The error for a traced step that cannot be traced again."""
    return of_argument(
        LeafTypeError(
            f"this traced step cannot be traced again with other shardings: {why}; pass"
            " the function and its arguments."
        )
    )


def _function_of(traced: Any) -> Callable[..., object]:
    """A jitted function of positional arguments that evaluates the jaxpr of `traced`, a
    trace of `jax.jit`. It donates the arguments that the traced step donates.
    """
    jaxpr, constants = opened(traced.jaxpr)
    evaluate = jex.jaxpr_as_fun(jex.ClosedJaxpr(jaxpr, constants))
    positional, _ = traced.args_info
    out_tree = traced.out_tree

    def step(*args: Any) -> Any:
        return jax.tree.unflatten(out_tree, evaluate(*jax.tree.leaves(args)))

    step.__name__ = step.__qualname__ = traced.fun_name
    step.__signature__ = _signature(jaxpr, positional)
    donated = []
    for number, argument in enumerate(positional):
        if any(leaf.donated for leaf in jax.tree.leaves(argument)):
            donated.append(number)
    return jax.jit(step, donate_argnums=tuple(donated))


def _signature(jaxpr: Any, args: Sequence[Any]) -> inspect.Signature:
    """The signature of a traced function, whose parameters have the names in JAX's names
    of the arrays: `w` for "w['up']". An argument without arrays gets a name by its
    number. Arguments of one name are collected, as `a` in `def step(w, *a)`.
    """
    array_names = iter(jaxpr.debug_info.arg_names)
    parameters: dict[str, inspect.Parameter] = {}
    for number, arg in enumerate(args):
        words = [re.split(r"[.\[]", next(array_names))[0] for _ in jax.tree.leaves(arg)]
        word = words[0] if words else ""
        if not word.isidentifier():
            word = f"argument_{number}"
        if word in parameters:
            # The first argument of the name, and all after it, are in one tuple.
            collected = inspect.Parameter(word, inspect.Parameter.VAR_POSITIONAL)
            first = list(parameters).index(word)
            alone = list(parameters.values())[:first]
            return inspect.Signature([*alone, collected])
        parameters[word] = inspect.Parameter(word, inspect.Parameter.POSITIONAL_ONLY)
    return inspect.Signature(list(parameters.values()))
