"""Steps on meshes with Explicit axes: the mesh of a step, its form without shardings,
and calls on Auto axes.
"""

import contextlib
import functools as ft
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from .._ground.keys import raw, wrapped
from .._ground.purity import is_tracing
from .._ground.tree import is_array_type
from .evaluation import CALLS, LOOPS, MARKED_CALLS, evaluated, retraced
from .lowered import applied, carry_of, opened
from .tracing import unwrapped


# Equations that set the sharding of their operands and change no values.
_LAYOUTS = ("reshard", "mesh_cast", "sharding_constraint")
# Equations with a function that combines two elements. XLA knows a sum by it, and not
# if its values have shardings.
_COMBINERS = (
    "reduce",
    "reduce_window",
    "scatter",
    "scatter-add",
    "scatter-sub",
    "scatter-mul",
    "scatter-min",
    "scatter-max",
    "select_and_scatter",
)
# Equations whose programs are evaluated anew.
_NESTED = (*LOOPS, *MARKED_CALLS, *_COMBINERS, "custom_linear_solve", "linear_call")
_NO_MESH = AbstractMesh((), ())


def explicit_mesh(args: PyTree) -> AbstractMesh | None:
    """The mesh with Explicit axes on which a step is traced: that of `jax.set_mesh`, or
    that of the first array or struct in `args` with a sharding on such a mesh. `None`
    if there is none.
    """
    meshes = [jax.sharding.get_abstract_mesh(), *map(_mesh_of, jax.tree.leaves(args))]
    for mesh in meshes:
        if mesh is not None and mesh.explicit_axes:
            return mesh
    return None


def _mesh_of(leaf: object) -> AbstractMesh | None:
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return None
    # A tracer has its sharding in its type only.
    is_traced = isinstance(leaf, Tracer)
    sharding = jax.typeof(leaf).sharding if is_traced else leaf.sharding
    if not isinstance(sharding, NamedSharding):
        return None
    return sharding.mesh.abstract_mesh


def is_typed(array: Any) -> bool:
    """Whether the type of an array says how Explicit axes shard it."""
    mesh = _mesh_of(array)
    return mesh is not None and bool(mesh.explicit_axes)


def auto_twin(mesh: AbstractMesh) -> AbstractMesh:
    """The mesh with Auto axes in place of Explicit ones."""
    return mesh.update_axis_types(dict.fromkeys(mesh.explicit_axes, AxisType.Auto))


@contextlib.contextmanager
def without_mesh() -> Iterator[None]:
    """Outside of `jit`: a context without the mesh of `jax.set_mesh`."""
    with jax.set_mesh(Mesh(np.empty((), object), ())):
        yield


@contextlib.contextmanager
def over(mesh: AbstractMesh) -> Iterator[None]:
    """A context with the mesh `mesh`, whatever the size of the mesh outside."""
    # JAX refuses a mesh of another size than that outside, but takes it in place of none.
    with jax.sharding.use_abstract_mesh(_NO_MESH), jax.sharding.use_abstract_mesh(mesh):
        yield


@contextlib.contextmanager
def over_ones(mesh: AbstractMesh) -> Iterator[None]:
    """A context with a mesh of the axes of `mesh` with sizes of 1, where all specs over
    them are allowed, and no type names an axis.
    """
    ones = AbstractMesh(
        (1,) * len(mesh.axis_names), mesh.axis_names, axis_types=mesh.axis_types
    )
    with over(ones), jax.remove_size_one_mesh_axis_from_type(True):
        yield


def structs_like(args: PyTree, *, typed: bool) -> PyTree:
    """`args` with a struct in place of each array, with its sharding if `typed`."""

    def struct(leaf: Any) -> Any:
        if not is_array_type(type(leaf)):
            return leaf
        mesh = _mesh_of(leaf)
        if not typed or mesh is None:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        is_traced = isinstance(leaf, Tracer)
        sharding = jax.typeof(leaf).sharding if is_traced else leaf.sharding
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, sharding.spec)
        )

    return jax.tree.map(struct, args)


def on_auto_axes(
    function: Callable[[list[Any]], Sequence[Any]],
    arrays: Sequence[Any],
    mesh: AbstractMesh,
    specs_of: Callable[[Sequence[Any]], Sequence[PartitionSpec]],
) -> list[Any]:
    """The results of a function of arrays, which is called with Auto axes in place of
    the Explicit ones of `mesh`, as `jax.sharding.auto_axes` calls it.

    `specs_of` gives the specs of the results on `mesh`.
    """
    with jax.sharding.use_abstract_mesh(auto_twin(mesh)):
        # The arrays keep their shardings, which their types no longer say.
        untyped = [jax.sharding.reshard(array, PartitionSpec()) for array in arrays]
        results = function(untyped)

    specs = specs_of(results)
    return [
        jax.sharding.reshard(result, NamedSharding(mesh, spec))
        for result, spec in zip(results, specs, strict=True)
    ]


def _untyped(constant: Any) -> Any:
    """A constant of a step, through the host if its type has Explicit axes. Within
    `jax.set_mesh`, every new array has them.
    """
    if isinstance(constant, Tracer) or not is_typed(constant):
        return constant
    return wrapped(np.asarray(raw(constant)), constant)


class PlainStep(NamedTuple):
    """A step without its shardings.

    - `closed`: the jaxpr of the step as it is traced.
    - `out`: the step's result, with a struct in place of each array and `None` in place
      of all else.
    - `rest`: the parts of the result that are no arrays.
    """

    closed: jex.ClosedJaxpr
    out: PyTree
    rest: PyTree

    def run(self, arrays: Sequence[Any]) -> list[Any]:
        """The arrays in the step's result, for the arrays in its arguments."""
        if not is_tracing() and not any(map(is_typed, arrays)):
            with without_mesh():
                # A `shard_map` over a mesh without devices is for `jit`.
                return jax.jit(self._evaluated)(arrays)
        return self._evaluated(arrays)

    def _evaluated(self, arrays: Sequence[Any]) -> list[Any]:
        mesh = jax.sharding.get_abstract_mesh()
        evaluator = _Unsharder(_NO_MESH if mesh.explicit_axes else mesh)
        consts = list(map(_untyped, self.closed.consts))
        return evaluator.run(self.closed.jaxpr, consts, arrays)

    def result(self, arrays: Sequence[Any]) -> PyTree:
        """The step's result with these arrays."""
        return eqx.combine(
            jax.tree.unflatten(jax.tree.structure(self.out), arrays), self.rest
        )


def plain_step(
    step: Callable[..., PyTree],
    args: PyTree,
    mesh: AbstractMesh,
    *,
    alone: bool,
) -> PlainStep:
    """Traces a step that is written for the Explicit axes of `mesh`, or knows nothing
    of shardings. `args` is a pair of its arguments and its keyword arguments.

    A mesh of the same names with sizes of 1 allows every spec, and no type there names
    an axis. So a step is traced over such a mesh first. A step that names its own mesh
    is traced for that. A step to which a mesh is an obstacle is traced without any.
    With `alone`, the step is for one device; otherwise a `shard_map` must be over
    `mesh`.
    """
    function = unwrapped(step)

    def trace(typed: bool) -> PlainStep:
        positional, named = structs_like(args, typed=typed)
        closed, out, rest = eqx.filter_make_jaxpr(function)(*positional, **named)
        return PlainStep(
            closed=closed,
            out=out,
            rest=rest,
        )

    # The first error that is not raised is the context of one that is.
    try:
        with over_ones(mesh):
            plain = trace(typed=False)
        if alone or mesh.size == 1 or not has_shard_map(plain.closed):
            return plain
        with over(auto_twin(mesh)):
            return trace(typed=False)
    except (AssertionError, TypeError, ValueError):
        with _Attempt(), over(_NO_MESH):
            plain = trace(typed=False)
            if not has_shard_map(plain.closed):
                return plain
        with over(mesh):
            return trace(typed=True)


def may_be_of_mesh(error: BaseException) -> bool:
    """Whether an error may come from the mesh on which a function is traced.

    The mesh is in the types of all values there. JAX refuses some of them, and
    libraries compare structs with the types. JAX also computes no constants on a mesh
    without devices, as solvers do by `jax.ensure_compile_time_eval`.
    """
    kind = type(error)
    # Not of a subclass: errors of this package say what mends them.
    is_plain = kind in (AssertionError, TypeError, ValueError)
    # JAX does not export the classes of these errors.
    return is_plain or kind.__name__ in ("ShardingTypeError", "DuplicateSpecError")


class _Attempt(contextlib.AbstractContextManager[None]):
    """A context whose errors are not raised if they may come from the mesh."""

    def __exit__(self, _kind: object, error: BaseException | None, _: object) -> bool:
        return error is not None and may_be_of_mesh(error)


def has_shard_map(program: object) -> bool:
    """Whether a jaxpr or a program in it has a `shard_map`."""
    if isinstance(program, tuple | list):
        return any(map(has_shard_map, program))
    if not isinstance(program, jex.ClosedJaxpr | jex.Jaxpr):
        return False
    equations = opened(program)[0].eqns
    return any(
        equation.primitive.name == "shard_map"
        or has_shard_map(list(equation.params.values()))
        for equation in equations
    )


class _Unsharder:
    """Evaluates a jaxpr without the shardings in it, in the context of the mesh `mesh`,
    which has no Explicit axes.
    """

    def __init__(self, mesh: AbstractMesh):
        self.mesh = mesh
        self.contexts: dict[tuple[int, AbstractMesh], Any] = {}
        # By the identity of a program: the function that calls of it call.
        self.functions: dict[int, Callable[..., Sequence[Any]]] = {}

    def run(
        self,
        jaxpr: jex.Jaxpr,
        consts: Sequence[Any],
        args: Sequence[Any],
    ) -> list[Any]:
        return evaluated(jaxpr, consts, args, self.rule)

    def rule(
        self,
        jaxpr: jex.Jaxpr,
        equation: jex.JaxprEqn,
        operands: list[Any],
    ) -> Sequence[Any]:
        name = equation.primitive.name
        if name in _LAYOUTS:
            return operands
        if name in CALLS:
            return self.called(equation)(*operands)
        if name == "device_put":
            return list(map(_moved, operands, equation.params["devices"]))
        if name == "shard_map":
            return self.shard_map(jaxpr, equation, operands)

        params = dict(equation.params)
        for key, parameter in params.items():
            if isinstance(parameter, NamedSharding):
                params[key] = None
            elif name in _NESTED:
                params[key] = retraced(parameter, self.run)
        plain = equation.replace(params=params, ctx=self.context(equation, self.mesh))
        if name != "scan":
            return applied(jaxpr, plain, operands)

        forwarded = _forwarded(plain)
        remaining = [n for n in range(len(plain.outvars)) if n not in forwarded]
        # From JAX 0.11 on, a `scan` keeps the structure of its results.
        if "num_carry" in params:
            results = applied(jaxpr, _narrowed(plain, remaining), operands)
        else:
            every_result = applied(jaxpr, plain, operands)
            results = [every_result[n] for n in remaining]
        by_index = dict(zip(remaining, results, strict=True))
        for number, operand in forwarded.items():
            by_index[number] = operands[operand]
        return [by_index[number] for number in range(len(plain.outvars))]

    def called(self, call: jex.JaxprEqn) -> Callable[..., Sequence[Any]]:
        """The function that a call is of, such as a `jax.jit` in the step. Calls of one
        program are of one function, as in the step: it is traced once.
        """
        program = call.params[CALLS[call.primitive.name]]
        if id(program) not in self.functions:

            def function(*operands: Any) -> list[Any]:
                return self.run(*opened(program), operands)

            function.__name__ = call.params.get("name", call.primitive.name)
            self.functions[id(program)] = jax.jit(function)
        return self.functions[id(program)]

    def shard_map(
        self,
        jaxpr: jex.Jaxpr,
        equation: jex.JaxprEqn,
        operands: list[Any],
    ) -> Sequence[Any]:
        """Evaluates a `shard_map`, whose body stays as it is. Its mesh gets Auto axes."""
        mesh = equation.params["mesh"].abstract_mesh
        twin = auto_twin(mesh)
        params = {**equation.params, "mesh": twin}
        context = self.context(equation, twin)
        plain = equation.replace(params=params, ctx=context)
        return applied(jaxpr, plain, operands)

    def context(self, equation: jex.JaxprEqn, mesh: AbstractMesh) -> Any:
        """The context of an equation, such as where it is computed, with another mesh."""
        key = id(equation.ctx), mesh
        if key not in self.contexts:
            with equation.ctx.manager, over(mesh):
                self.contexts[key] = jax.make_jaxpr(jnp.sin)(0.0).jaxpr.eqns[0].ctx
        return self.contexts[key]


def _forwarded(scan: jex.JaxprEqn) -> dict[int, int]:
    """The results of a `scan` that its body takes from an operand as they are: the
    index of the operand for that of the result.

    A weight that the body reshards is a value of its own, which the derivative stores
    for each iteration. Without the `reshard` it is the weight.
    """
    body = scan.params["jaxpr"].jaxpr
    start, carry_count = carry_of(scan)
    first = start + carry_count
    scanned = {
        variable: index for index, variable in enumerate(body.invars) if index >= first
    }
    forwarded = {}
    for index in range(carry_count, len(body.outvars)):
        variable = body.outvars[index]
        if not isinstance(variable, jex.Literal) and variable in scanned:
            forwarded[index] = scanned[variable]
    return forwarded


def _narrowed(scan: jex.JaxprEqn, remaining: Sequence[int]) -> jex.JaxprEqn:
    """A `scan` with only these of its results."""
    closed = scan.params["jaxpr"]
    body = closed.jaxpr.replace(
        outvars=[closed.jaxpr.outvars[n] for n in remaining],
        debug_info=closed.jaxpr.debug_info.with_unknown_names(),
    )
    return scan.replace(
        outvars=[scan.outvars[n] for n in remaining],
        params={**scan.params, "jaxpr": jex.ClosedJaxpr(body, closed.consts)},
    )


def _moved(array: Any, target: object) -> Any:
    """`array` in the memory of the sharding `target`. A target that is no sharding is
    as it was.
    """
    if not isinstance(target, NamedSharding):
        return array if target is None else jax.device_put(array, target)
    if target.memory_kind in ("pinned_host", "unpinned_host"):
        return jax.device_put(array, jax.memory.Space.Host)
    if target.memory_kind is not None:
        return jax.device_put(array, jax.memory.Space.Device)
    return array


def unsharded(step: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """The step without its shardings, for one device.

    A step that is written for Explicit axes, with `out_sharding=` and `reshard`, needs
    a mesh. This is the same step without them, such as for a reference on one device.
    It is traced over a mesh of size 1 with the axes of the step's own mesh, and
    evaluated without the shardings. Programs in loops, in `cond`, in `jax.checkpoint`
    and in functions with derivatives of their own are evaluated so too. A `shard_map`
    is over one device.

    **Arguments:**

    - `step`: a function, also one that `jax.jit` returned. The mesh with its axes is
      that of `jax.set_mesh` where the result is called, or that of the arguments.

    **Returns:**

    A function of the same arguments. It is `step` itself where there is no mesh with
    Explicit axes. Differentiate within `step`: the derivatives that a `custom_vjp` of
    the step defines keep their shardings.

    **Raises:**

    The errors of tracing the step.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import shardfx as sfx

        def step(x, w):
            w = jax.sharding.reshard(w, jax.P(None, "tensor"))
            return jnp.matmul(x, w, out_sharding=jax.P("data", "tensor"))

        with jax.set_mesh(jax.make_mesh((4, 2), ("data", "tensor"))):
            y = sfx.testing.unsharded(step)(jnp.ones((3, 5)), jnp.ones((5, 7)))
        assert y.shape == (3, 7)  # sizes that no mesh of 8 devices divides
        ```
    """

    @ft.wraps(step)
    def plain(*args: PyTree, **kwargs: PyTree) -> PyTree:
        mesh = explicit_mesh((args, kwargs))
        if mesh is None:
            return step(*args, **kwargs)

        arrays = array_leaves((args, kwargs))
        if not any(map(is_typed, arrays)):
            return one_device_form(step, mesh)(*args, **kwargs)

        def replicated(results: Sequence[Any]) -> list[PartitionSpec]:
            return [PartitionSpec() for _ in results]

        traced = plain_step(step, (args, kwargs), mesh, alone=False)
        return traced.result(on_auto_axes(traced.run, arrays, mesh, replicated))

    return plain


def one_device_form(
    step: Callable[..., PyTree],
    mesh: AbstractMesh,
) -> Callable[..., PyTree]:
    """The step without its shardings, which are over the Explicit axes of `mesh`."""

    @ft.wraps(step)
    def plain(*args: PyTree, **kwargs: PyTree) -> PyTree:
        traced = plain_step(step, (args, kwargs), mesh, alone=True)
        return traced.result(traced.run(array_leaves((args, kwargs))))

    return plain


def array_leaves(tree: PyTree) -> list[Any]:
    """The arrays and structs among the leaves of a tree."""
    return [leaf for leaf in jax.tree.leaves(tree) if is_array_type(type(leaf))]
