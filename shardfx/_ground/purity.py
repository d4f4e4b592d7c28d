"""What a traced function does beside returning its result: the updates of its arguments
in place, and the traced arrays that it leaves in variables around it.

A jitted function keeps only what it returns. The rest, and all that computes it, is no
part of its program, which would then look too cheap.
"""

import copy
import dataclasses
import functools as ft
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.core import Tracer
from jaxtyping import PyTree

from .errors import ProgramError
from .tree import flatten


def is_tracing() -> bool:
    """Whether JAX is tracing, as inside `jax.jit`, where no array can be put on
    devices.
    """
    probe = np.zeros((), bool)
    return isinstance(jax.device_put(probe), Tracer)


class WatchedArguments:
    """The arguments of a function that is being traced, as they are before its call.

    A function may fill the dicts and lists of its arguments anew, as
    `batch["x"] = batch["x"] / 255`: they are copies that JAX made for the trace.
    """

    def __init__(self, args: PyTree):
        self._args = args
        # Each dict and list among the arguments, with a copy from before the call.
        self._containers: list[tuple[Any, Any]] = []
        # The leaves are held, so that no other object gets the id of one.
        self._leaves = jax.tree.leaves(args, is_leaf=self._visit)

    def _visit(self, node: object) -> bool:
        if type(node) in (dict, list):
            self._containers.append((node, copy.copy(node)))
        return False

    def updated(self, result: PyTree) -> dict[str, Any]:
        """The arrays in objects, such as modules of nnx, that the function put in the
        place of others and that are not in its `result`, by their paths.
        """
        # A function may put new values into the dicts and lists of its arguments.
        new_values: list[object] = []
        for container, copy_before in self._containers:
            new_values += _new_values(container, copy_before)
        # An array in an object is an update unless it was an argument, or is in a dict
        # or list or in the result.
        known_leaves = jax.tree.leaves((self._leaves, new_values, result))
        known_ids = set(map(id, known_leaves))
        flat = flatten(self._args, allow_specs=True)
        updates: dict[str, Any] = {}
        for leaf, path, is_array in zip(
            flat.leaves, flat.paths, flat.is_array, strict=True
        ):
            if is_array and id(leaf) not in known_ids:
                updates[path] = leaf
        return updates


def _new_values(container: Any, before: Any) -> Iterator[object]:
    """Yields the values that a dict or list holds and that its copy `before` does not
    hold at the same place.
    """
    if type(container) is dict:
        pairs = ((value, before.get(key)) for key, value in container.items())
    else:
        pairs = zip(container, [*before, *[None] * len(container)], strict=False)
    for value, old in pairs:
        if value is not old:
            yield value


def raise_if_updated(
    name: str,
    argument_names: Sequence[str],
    watched: WatchedArguments,
    result: PyTree,
) -> None:
    """Raises `ProgramError` if the function called `name` has updated objects among its
    arguments, and hides the new arrays from its `result`.

    `watched` are the arguments as they were before the call, and `argument_names` their
    names.
    """
    updated = [
        _with_argument_name(path, argument_names) for path in watched.updated(result)
    ]
    if not updated:
        return
    others = f" and {len(updated) - 1} more" if len(updated) > 1 else ""
    # The names of the arguments that hold updated objects.
    owners = [*dict.fromkeys(path.partition("/")[0] for path in updated)]
    objects = f"({owners[0]},)" if len(owners) == 1 else f"({', '.join(owners)})"
    raise ProgramError(
        f"`{name}` updates `{updated[0]}`{others} in place, and does not return the new"
        " values: a jitted function keeps only what it returns, so its program lacks"
        " the updates and all that computes them. For modules of nnx use"
        f" `flax.nnx.jit({name})`, or jit a function of their state: `graph, state ="
        f" nnx.split({objects})` outside, and inside `{objects} = nnx.merge(graph,"
        f" state)`, the body of `{name}`, and `return nnx.state({objects}), result`."
    )


def raise_if_left(fn: Callable[..., object], result: PyTree) -> None:
    """Raises `ProgramError` if `fn`, which has been called while it is traced, leaves
    traced arrays in variables that it uses, and hides them from its `result`.
    """
    result_ids = set(map(id, jax.tree.leaves(result)))
    variables = _left_in_variables(fn, result_ids)
    if variables:
        name = getattr(fn, "__name__", type(fn).__name__)
        raise ProgramError(
            f"`{name}` leaves traced arrays in `{'`, `'.join(variables)}`, and does not"
            " return them: a jitted function keeps only what it returns, so its program"
            " lacks all that computes them. Take them as an argument, and return them:"
            f" `return result, {variables[0]}`."
        )


def may_be_updated(args: PyTree) -> bool:
    """Whether some object in the arguments can be updated in place: one that is no
    dict, list or tuple, no Equinox module and no frozen dataclass.
    """
    node_types: set[type] = set()

    def visit(node: object) -> bool:
        node_types.add(type(node))
        return False

    # JAX calls `visit` for every node of the tree, and for every leaf.
    leaves = jax.tree.leaves(args, is_leaf=visit)
    node_types -= set(map(type, leaves))
    return not all(map(_is_fixed, node_types))


def _is_fixed(kind: type) -> bool:
    """Whether objects of a type do not change, or are containers that JAX copies."""
    if issubclass(kind, dict | list | tuple | eqx.Module | types.NoneType):
        return True
    return dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen


def leaves_arrays(fn: Callable[..., object]) -> bool:
    """Whether variables that `fn` uses hold arrays of a trace, which has ended."""
    return bool(_left_in_variables(fn, set()))


def _with_argument_name(path: str, argument_names: Sequence[str]) -> str:
    """The path of an array, with the argument's name in place of its number:
    `model/w` for `0/w` if the first argument is `model`.
    """
    number, slash, rest = path.partition("/")
    position = int(number)
    argument_name = f"args[{position}]"
    if position < len(argument_names):
        argument_name = argument_names[position]
    return f"{argument_name}{slash}{rest}"


def _left_in_variables(fn: Any, returned_ids: set[int]) -> list[str]:
    """The names of the variables around `fn` that hold traced arrays. `returned_ids`
    has the `id` of each array that `fn` returned; these do not count.
    """
    variable_names = []
    for name, value in _variables(fn).items():
        leaves = jax.tree.leaves(_contents(value))
        tracer_ids = [id(leaf) for leaf in leaves if isinstance(leaf, Tracer)]
        if not returned_ids.issuperset(tracer_ids):
            variable_names.append(name)
    return variable_names


def _variables(fn: Any) -> dict[str, object]:
    """The variables around a function that its code names, and the object of a method."""
    fn = inspect.unwrap(fn)
    while isinstance(fn, ft.partial):
        fn = inspect.unwrap(fn.func)
    owner: dict[str, object] = {}
    if isinstance(fn, types.MethodType):
        owner["self"] = fn.__self__
        fn = fn.__func__
    if not isinstance(fn, types.FunctionType):
        return owner
    try:
        variables = inspect.getclosurevars(fn)
    except ValueError:
        # A cell is empty: the function's own name, before it is bound.
        return owner
    return {**variables.globals, **variables.nonlocals, **owner}


def _contents(value: object) -> object:
    """The items of a container or the attributes of an object, as a tree."""
    if isinstance(value, set | frozenset):
        return list(value)
    if isinstance(value, types.ModuleType | type | types.FunctionType | jax.Array):
        return value
    try:
        attributes = vars(value)
    except TypeError:
        return value
    return list(attributes.values())
