"""Evaluates the function that makes a state, over structs with shardings."""

import contextlib
import dataclasses
import functools as ft
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jaxtyping import PyTree

from .._ground.errors import LeafTypeError
from .._ground.spec import without_unconstrained
from .._ground.text import plural
from .._ground.tree import Flat
from .leaf import Row
from .shard_plan import ShardPlan


def evaluated(
    init: Callable[..., object],
    plan: ShardPlan,
    args: tuple[object, ...],
) -> tuple[Any, str]:
    """Returns the result of `init(plan, *args)` as ShapeDtypeStructs, and an error of
    JAX as text.

    In the call, the tree of arrays that a plan describes replaces `plan`, and each plan
    in `args`. If JAX can propagate shardings through `init`, the structs have
    shardings, and the text is "". Otherwise the text says why JAX cannot.
    """
    mesh = plan.mesh.abstract()
    explicit = AbstractMesh(
        mesh.axis_sizes,
        mesh.axis_names,
        axis_types=(AxisType.Explicit,) * len(mesh.axis_names),
    )
    arguments = (plan, *args)
    # A state that holds the planned tree needs its leaves that are not arrays, such as
    # activation functions. But an optimizer's `init` accepts only arrays. So `init` is
    # tried with placeholders for these leaves, then with `None`.
    has_others = any(
        isinstance(arg, ShardPlan) and min(arg.content.index, default=0) < 0
        for arg in arguments
    )
    fillers_to_try = (_PLACEHOLDERS, _ABSENT) if has_others else (_ABSENT,)
    # JAX cannot give shardings to every `init` on an Explicit mesh (an ambiguous
    # contraction, a foreign callback). Then only paths and shapes decide.
    *attempts, last = itertools.product((explicit, None), fillers_to_try)
    refused = ""
    for tried_mesh, fillers in attempts:
        try:
            results = _result_structs(init, arguments, tried_mesh, fillers)
        # Any type: JAX's sharding error is not public, and `init` is the user's. The
        # last attempt raises an error that has another cause again.
        except Exception as error:
            if tried_mesh is explicit:
                refused = f"{type(error).__name__}: {_first_sentence(error)}"
            continue
        if tried_mesh is explicit:
            return results, ""
        return results, refused
    last_mesh, last_fillers = last
    with _noting_the_call(len(args)):
        results = _result_structs(init, arguments, last_mesh, last_fillers)
    return results, refused


def _noting_the_call(count: int) -> contextlib.ExitStack:
    """A context manager that adds to an error of an `init` what `follow` called it with:
    a plan and `count` arguments more.
    """

    def note(_kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None or isinstance(error, LeafTypeError):
            return
        error.add_note(
            f"`follow` called `init` with the plan's tree of arrays{_and_others(count)}:"
            " pass `optimizer.init`, and what else it takes after the plan,"
            " `follow(init, plan, *args)`. No array has a value here."
        )

    stack = contextlib.ExitStack()
    stack.push(note)
    return stack


def _and_others(count: int) -> str:
    """The end of a sentence about `count` arguments beside the plan."""
    if not count:
        return " alone"
    return f" and {plural(count, 'argument')} more"


def _first_sentence(error: Exception) -> str:
    """The first sentence of an error's message, at most 160 characters of it."""
    line = str(error).strip().split("\n")[0]
    return line.split(". ")[0].rstrip(".")[:160]


class Number:
    """Stands for a Python number of a planned tree while `init` is evaluated."""


class _Fillers(NamedTuple):
    """What a planned tree has at its leaves that are no arrays, while `init` is
    evaluated.
    """

    other: object
    number: object


_PLACEHOLDERS = _Fillers(object(), Number())

_ABSENT = _Fillers(None, None)


def _structs(
    args: tuple[object, ...],
    mesh: AbstractMesh | None,
    fillers: _Fillers,
) -> list[Any]:
    """Returns `args`, with the tree that a plan describes in the place of each plan:
    structs, with shardings on `mesh` unless it is `None`, and `fillers` at leaves that
    are no arrays.
    """

    def struct(row: Row) -> jax.ShapeDtypeStruct:
        sharding = (
            None
            if mesh is None
            else NamedSharding(mesh, without_unconstrained(row.spec))
        )
        return jax.ShapeDtypeStruct(row.shape, row.dtype, sharding=sharding)

    structs: list[Any] = []
    for arg in args:
        if isinstance(arg, ShardPlan):
            arg = arg.content.tree(list(map(struct, arg.content.rows)), *fillers)
        structs.append(arg)
    return structs


def _result_structs(
    init: Callable[..., object],
    args: tuple[object, ...],
    mesh: AbstractMesh | None,
    fillers: _Fillers,
) -> PyTree:
    """Returns the result of `init(*args)` as ShapeDtypeStructs, with shardings on
    `mesh` unless it is `None`. In the call, the trees of arrays that they describe
    replace the plans in `args`, with `fillers` at leaves that are no arrays.
    """
    structs = _structs(args, mesh, fillers)
    if mesh is None:
        return _structs_of_result(init, structs)
    # JAX 0.11 takes the mesh of arrays that `init` makes from the context.
    with jax.sharding.use_abstract_mesh(mesh):
        return _structs_of_result(init, structs)


def _structs_of_result(init: Callable[..., object], structs: list[Any]) -> PyTree:
    """Returns the result of `init(*structs)` as ShapeDtypeStructs, without running it.
    Leaves that are no arrays stay.
    """
    leaves = jax.tree.leaves(structs)
    if all(isinstance(leaf, jax.ShapeDtypeStruct | jax.Array) for leaf in leaves):
        # `jax.eval_shape` caches its results, Equinox's does not. But it refuses
        # results with leaves that are not arrays, and turns Python numbers into
        # weakly typed arrays. Equinox's handles both cases.
        with contextlib.suppress(TypeError):
            results = jax.eval_shape(init, *structs)
            if not any(leaf.weak_type for leaf in jax.tree.leaves(results)):
                return results
    return eqx.filter_eval_shape(init, *structs)


@dataclasses.dataclass
class ConstantPaths:
    """The paths of the arrays in `flat`, the result of `init(*args)`, that are constants
    of its program: their values do not depend on the planned tree.
    """

    init: Callable[..., object]
    args: tuple[object, ...]
    flat: Flat

    @ft.cached_property
    def paths(self) -> frozenset[str]:
        """The paths of the arrays in `flat`, the result of `init`, that are constants
        of its program; none if the program has other results than these arrays.
        """
        # A second trace is worth it only for the text of a reason.
        structs = _structs(self.args, None, _ABSENT)
        jaxpr = eqx.filter_make_jaxpr(self.init)(*structs)[0].jaxpr
        columns = zip(self.flat.paths, self.flat.is_array, strict=True)
        array_paths = [path for path, is_array in columns if is_array]
        if len(array_paths) != len(jaxpr.outvars):
            return frozenset()
        constants = {id(variable) for variable in jaxpr.constvars}
        constant_paths = []
        for path, variable in zip(array_paths, jaxpr.outvars, strict=True):
            if id(variable) in constants:
                constant_paths.append(path)
        return frozenset(constant_paths)
