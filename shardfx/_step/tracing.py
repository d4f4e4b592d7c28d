"""The steps that users pass, traced: functions, jitted functions, and traced steps."""

import contextlib
import dataclasses
import functools as ft
import inspect
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax._src import pjit
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from .._ground.errors import LeafTypeError, PlanMismatchError, of_argument
from .._ground.misuse import is_bound
from .._ground.purity import (
    WatchedArguments,
    leaves_arrays,
    may_be_updated,
    raise_if_left,
    raise_if_updated,
)
from .._ground.tree import flatten
from .._plan import ShardPlan
from ..topology import MeshSpec
from .jaxprs import opened
from .step import Step, sharding_of


# The name of an array that a function of `flax.nnx.jit` takes, as "model.states[0][1]".
_OF_MODULE = re.compile(r"(\w+)\.states\[")
# Python's error of a call of `None`.
_CALL_OF_NONE = "'NoneType' object is not callable"
# The beginning of JAX's error for a jitted function inside a traced one.
_INNER_OPTIONS = "`compiler_options` can only be passed to top-level"


@runtime_checkable
class _JaxTraced(Protocol):
    """The traced step that the `trace` method of a function from `jax.jit` or
    `shardfx.filter_jit` returns.
    """

    jaxpr: Any

    def lower(self, *, lowering_platforms: object) -> Any: ...


@runtime_checkable
class FlaxTraced(Protocol):
    """The traced step that `trace` of a function from `flax.nnx.jit` returns. `traced`
    is JAX's traced step, which takes and returns the state of modules.
    """

    traced: Any
    jit_wrapped: Any


@runtime_checkable
class JaxJitted(Protocol):
    """The jitted function that `jax.jit` and `shardfx.filter_jit` return."""

    def trace(self, *args: object) -> Any: ...


@runtime_checkable
class EquinoxJitted(Protocol):
    """The jitted function that `equinox.filter_jit` returns. Its own `lower` takes no
    `jax.ShapeDtypeStruct`. `donate_first` says whether it donates its first argument,
    and `donate_rest` whether it donates the others.
    """

    __wrapped__: Any
    donate_first: bool
    donate_rest: bool


@runtime_checkable
class _BoundMethod(Protocol):
    """A method of an object, or of an Equinox module: the function `__func__`, which is
    called with the object `__self__` first.
    """

    __func__: Any
    __self__: Any


@runtime_checkable
class NamedTrace(Protocol):
    """The traced step that `trace` of a function from `shardfx.filter_jit` returns.
    `traced_call` has that function and its arguments as `function`, `args` and `kwargs`,
    `arrays` has the name and the path of each array, `results` the path of each result,
    `traced` is JAX's traced step, and `mesh` is the mesh of the plans in its shardings,
    if it has any.
    """

    traced_call: Any
    traced: Any
    arrays: tuple[Any, ...]
    results: tuple[Any, ...]
    mesh: MeshSpec | None


def step_of(
    step: object,
    args: Sequence[object],
    mesh: MeshSpec | Mesh | AbstractMesh | None = None,
) -> Step:
    """A traced step, from a function and its arguments or from a step that is traced
    already.

    **Arguments:**

    - `step`: a function; or the result of `jax.jit`, `equinox.filter_jit` or
      `filter_jit`, with its shardings and donation, or a partial function of one; or
      the result of its `.trace`, without `args`.
    - `args`: arrays or structs in any trees. Leaves that are not arrays become
      constants of the program.
    - `mesh`: the mesh of the step. It has the number of slices along each axis, which
      no argument's sharding has.

    **Raises:**

    `LeafTypeError` for a step that is no function; `PlanMismatchError` for a plan that
    is passed as an argument of the step; any error that `step` raises when it is
    traced.
    """
    _raise_at_plans(args)
    mesh = _mesh_of_devices(args) if mesh is None else mesh
    args = jax.tree.map(_without_devices, tuple(args))
    if isinstance(step, FlaxTraced):
        step = step.traced
    if isinstance(step, _JaxTraced):
        if args:
            raise LeafTypeError(
                "`step` is traced already; pass it alone, without arguments."
            )
        return _step_of_traced(step, (), mesh)
    step = _as_partial(step)
    function: Any = step
    if not callable(step):
        raise of_argument(
            LeafTypeError(
                f"`step` must be a function, not {type(step).__name__}; pass the function"
                " that is jitted."
            )
        )
    options = compiler_options_of(step)
    if isinstance(step, EquinoxJitted):
        return _step_of_function(
            step.__wrapped__,
            args,
            mesh,
            donated_first_and_rest=(step.donate_first, step.donate_rest),
            compiler_options=options,
        )
    if isinstance(step, JaxJitted):
        traced = step.trace(*args)
        if isinstance(traced, FlaxTraced):
            return _with_module_paths(traced.traced, tuple(args), mesh)
        inner = inspect.unwrap(function)
        if may_be_updated(args) or leaves_arrays(inner):
            # JAX has traced the function, and does not see what it does besides
            # returning a result. This raises an error for that.
            _step_of_function(inner, args, mesh)
        if isinstance(traced, _JaxTraced):
            return _step_of_traced(traced, tuple(args), mesh)
    # Those of a partial function.
    function = without_compiler_options(function)
    return _step_of_function(
        function,
        args,
        mesh,
        donates_inside=is_jitted(step),
        compiler_options=options,
    )


def _raise_at_plans(args: Sequence[object]) -> None:
    """Raises `PlanMismatchError` if an argument of a step holds a plan."""
    for number, arg in enumerate(args):
        if any(map(_is_plan, jax.tree.leaves(arg, is_leaf=_is_plan))):
            raise PlanMismatchError(
                f"argument {number} is a plan, and a step takes arrays or structs; pass"
                " `plan.structs`, whose shardings are the plan's, or `filter_jit(step,"
                " in_shardings=plans)` with the arguments."
            )


def unwrapped(step: Any) -> Any:
    """The function that a jitted step jits, whose shardings do not count then."""
    return inspect.unwrap(
        step, stop=lambda function: not isinstance(function, JaxJitted)
    )


def is_jitted(step: object) -> bool:
    """Whether a step is what `jax.jit`, `shardfx.filter_jit` or `equinox.filter_jit`
    returned, or a partial function of one.
    """
    return isinstance(_without_arguments(step), JaxJitted | EquinoxJitted)


def compiler_options_of(step: object) -> dict[str, Any]:
    """The `compiler_options` with which a step was jitted by `jax.jit` or
    `equinox.filter_jit`, also one that is called by a partial function; empty for any
    other function.
    """
    info = getattr(_jitted_by_jax(_without_arguments(step)), "_jit_info", None)
    if info is None:
        return {}
    return dict(info.compiler_options_kvs)


def _as_partial(step: Any) -> Any:
    """A method of an object that is jitted, as the partial function of the jitted
    function with the object. Any other step itself.
    """
    if not isinstance(step, _BoundMethod):
        return step
    function = step.__func__
    if not isinstance(function, JaxJitted | EquinoxJitted):
        return step
    return ft.partial(step.__func__, step.__self__)


def _without_arguments(step: Any) -> Any:
    """The function that a partial function calls: a `functools.partial`, an
    `equinox.Partial`, as methods of `equinox.filter_jit` are, or a method that
    `jax.jit` jits. Any other step itself.
    """
    step = _as_partial(step)
    while isinstance(step, ft.partial | eqx.Partial):
        step = _as_partial(step.func)
    return step


def with_copied_arrays(step: Any) -> Any:
    """The step, where a partial function has copies of the arrays with which it calls
    a function, so that none of them is donated. Any other step is returned unchanged.
    """
    step = _as_partial(step)
    if not isinstance(step, ft.partial | eqx.Partial):
        return step
    arrays, others = eqx.partition((step.args, step.keywords), eqx.is_array)
    args, keywords = eqx.combine(jax.tree.map(jnp.copy, arrays), others)
    return type(step)(with_copied_arrays(step.func), *args, **keywords)


def _jitted_by_jax(step: Any) -> Any:
    """The function of `jax.jit` that a function of `equinox.filter_jit` calls; any
    other step itself.
    """
    if isinstance(step, EquinoxJitted):
        return getattr(step, "_cached", step)
    return step


def without_compiler_options(step: Any) -> Any:
    """The step, jitted without its `compiler_options`, with which JAX refuses to call
    it inside a traced function. A step without any is returned unchanged.
    """
    if not compiler_options_of(step):
        return step
    step = _as_partial(step)
    if isinstance(step, ft.partial | eqx.Partial):
        function = without_compiler_options(step.func)
        return type(step)(function, *step.args, **step.keywords)
    # JAX has no public way to jit a function again with its other options. All versions
    # from 0.9 on hold them so.
    jitted = _jitted_by_jax(step)
    info = jitted._jit_info._replace(compiler_options_kvs=())
    jitted_without = pjit._cpp_pjit(jitted._fun, info)
    if isinstance(step, EquinoxJitted):
        step_module: Any = step
        return dataclasses.replace(step_module, _cached=jitted_without)
    return jitted_without


def is_traced(step: object) -> bool:
    """Whether a step is what `.trace` of a jitted function returned."""
    return isinstance(step, _JaxTraced | FlaxTraced)


def _mesh_of_devices(args: Sequence[object]) -> Mesh | None:
    """The mesh of the first array whose mesh has devices; `None` if there is no such
    array.
    """
    for leaf in jax.tree.leaves(args):
        sharding = sharding_of(leaf)
        if sharding is not None and isinstance(sharding.mesh, Mesh):
            return sharding.mesh
    return None


def _without_devices(leaf: Any) -> object:
    """The `jax.ShapeDtypeStruct` of an array on the abstract mesh of its sharding, so
    that lowering needs no device.
    """
    sharding = sharding_of(leaf)
    if sharding is None or not isinstance(sharding.mesh, Mesh):
        return leaf
    abstract = NamedSharding(
        sharding.mesh.abstract_mesh, sharding.spec, memory_kind=sharding.memory_kind
    )
    # Typed PRNG keys have no weak type.
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
    return jax.ShapeDtypeStruct(
        leaf.shape,
        leaf.dtype,
        sharding=abstract,
        weak_type=False if is_key else leaf.weak_type,
    )


def _step_of_traced(traced: Any, args: tuple[object, ...], mesh: Any) -> Step:
    """The step of what `.trace` returned. A trace of `filter_jit` has the paths of its
    arrays, and may have the mesh of its plans.
    """
    if isinstance(traced, NamedTrace):
        return Step(
            traced=traced.traced,
            args=args,
            paths={array.name: array.path for array in traced.arrays},
            given_mesh=traced.mesh if mesh is None else mesh,
            named_results=tuple(result.path for result in traced.results),
        )
    return Step(
        traced=traced,
        args=args,
        paths={},
        given_mesh=mesh,
    )


def _with_module_paths(traced: Any, args: tuple[object, ...], mesh: Any) -> Step:
    """The step of a function of `flax.nnx.jit`. It takes the arrays of each module as
    one list, which are named by their paths in the module.
    """
    argument_names = opened(traced.jaxpr)[0].debug_info.arg_names
    # The word before the first bracket or dot is the name of the argument.
    names_by_argument: dict[str, list[str]] = {}
    for name in argument_names:
        argument_name = re.split(r"[.\[]", name)[0]
        array_names = names_by_argument.setdefault(argument_name, [])
        if _OF_MODULE.match(name):
            array_names.append(name)
    paths: dict[str, str] = {}
    for (argument_name, array_names), arg in zip(
        names_by_argument.items(), args, strict=False
    ):
        array_paths = _paths_of_arrays(arg)
        # Otherwise the arrays have JAX's names.
        if len(array_names) == len(array_paths):
            for name, path in zip(array_names, array_paths, strict=True):
                paths[name] = f"{argument_name}/{path}"
    return Step(
        traced=traced,
        args=args,
        paths=paths,
        given_mesh=mesh,
    )


def _paths_of_arrays(tree: object) -> list[str]:
    """The paths of the arrays in a tree."""
    flat = flatten(tree)
    pairs = zip(flat.paths, flat.is_array, strict=True)
    return [path for path, is_array in pairs if is_array]


def mistakes_noted() -> contextlib.ExitStack:
    """A context manager that adds a note to two errors of a traced step: of a call of
    `None`, which stands in plans and checkpoints where a module has a function; and of
    a call of a function that was jitted with `compiler_options`.
    """

    def note(_kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, TypeError) and str(error) == _CALL_OF_NONE:
            error.add_note(
                "plans and checkpoints hold no functions, such as the activation of a"
                " module, and have None in their place; pass a tree that has them:"
                " `eqx.combine(plan.structs, model)`."
            )
        if isinstance(error, ValueError) and str(error).startswith(_INNER_OPTIONS):
            error.add_note(
                "the step calls a jitted function with `compiler_options`, and is"
                " traced around it; pass the jitted function itself as the step, or jit the"
                " inner function without them."
            )

    stack = contextlib.ExitStack()
    stack.push(note)
    return stack


def _step_of_function(
    fn: Callable[..., object],
    args: Sequence[object],
    mesh: Any,
    *,
    donated_first_and_rest: tuple[bool, bool] = (False, False),
    donates_inside: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
) -> Step:
    """Traces `fn`. Leaves that are not arrays become constants of the program, as in
    `equinox.filter_jit`. `donated_first_and_rest` says whether the first argument is
    donated, and whether the others are. With `donates_inside` an array is donated if a
    jitted function that `fn` calls with it donates it. `compiler_options` are those of
    the step.
    """
    flats = [flatten(arg) for arg in args]
    names = argument_names(fn, len(args))
    arrays: list[object] = []
    paths: dict[str, str] = {}
    donated_positions: list[int] = []
    for number, (flat, argument_name) in enumerate(zip(flats, names, strict=True)):
        is_donated = donated_first_and_rest[min(number, 1)]
        leaves = zip(flat.leaves, flat.paths, flat.is_array, strict=True)
        for leaf, path, is_array in leaves:
            if not is_array:
                continue
            if is_donated:
                donated_positions.append(len(arrays))
            paths[f"arrays[{len(arrays)}]"] = (
                f"{argument_name}/{path}" if path else argument_name
            )
            arrays.append(leaf)

    def run(*arrays: object) -> object:
        """The arrays in the result of `fn`, for the arrays in its arguments."""
        remaining_arrays = iter(arrays)
        trees = []
        for flat in flats:
            leaves = []
            for leaf, is_array in zip(flat.leaves, flat.is_array, strict=True):
                leaves.append(next(remaining_arrays) if is_array else leaf)
            trees.append(jax.tree.unflatten(flat.treedef, leaves))
        watched = WatchedArguments(trees)
        _raise_if_one_tuple(fn, trees)
        with mistakes_noted():
            result = fn(*trees)
        raise_if_updated(run.__name__, names, watched, result)
        raise_if_left(fn, result)
        return jax.tree.map(lambda leaf: leaf if _is_array(leaf) else None, result)

    run.__name__ = run.__qualname__ = getattr(fn, "__name__", type(fn).__name__)
    jitted = ft.partial(
        jax.jit,
        run,
        keep_unused=True,
        compiler_options=dict(compiler_options) if compiler_options else None,
    )
    traced = jitted(donate_argnums=tuple(donated_positions)).trace(*arrays)
    if donates_inside and (positions := _donated_inside(traced.jaxpr)):
        # JAX does not trace the inner function again.
        traced = jitted(donate_argnums=positions).trace(*arrays)
    return Step(
        traced=traced,
        args=tuple(args),
        paths=paths,
        given_mesh=mesh,
    )


def _donated_inside(jaxpr: Any) -> tuple[int, ...]:
    """The positions of the arguments of `jaxpr` that a jitted function in it donates."""
    inner = opened(jaxpr)[0]
    # Variables compare by identity. A number that is donated is no variable.
    donated: list[Any] = []
    for equation in inner.eqns:
        is_donated = equation.params.get("donated_invars", ())
        donated += itertools.compress(equation.invars, is_donated)
    donated_ids = set(map(id, donated))
    positions = []
    for position, variable in enumerate(inner.invars):
        if id(variable) in donated_ids:
            positions.append(position)
    return tuple(positions)


def _raise_if_one_tuple(fn: Callable[..., object], args: Sequence[object]) -> None:
    """Raises `LeafTypeError` if the arguments of a step are given as one tuple."""
    if len(args) != 1 or not isinstance(args[0], tuple):
        return
    if not is_bound(fn, args, {}) and is_bound(fn, args[0], {}):
        name = getattr(fn, "__name__", type(fn).__name__)
        raise of_argument(
            LeafTypeError(
                f"the arguments of `{name}` are given as one tuple of"
                f" {len(args[0])}; give them one by one, with a star: `*args`."
            )
        )


def _is_plan(node: object) -> bool:
    return isinstance(node, ShardPlan)


def _is_array(leaf: object) -> bool:
    return flatten([leaf]).is_array == [True]


def argument_names(fn: Callable[..., object], count: int) -> list[str]:
    """The parameter names of the function's first `count` arguments."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        parameters = ()
    names = [
        parameter.name
        for parameter in parameters
        if parameter.kind
        in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    names += [f"args[{number}]" for number in range(len(names), count)]
    return names[:count]
