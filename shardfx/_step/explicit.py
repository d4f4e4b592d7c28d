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

from .._ground.keys import as_keys, raw
from .._ground.purity import is_tracing
from .._ground.tree import is_array_type
from .evaluation import CALLS, evaluated, retraced
from .jaxprs import applied, carry_of, equations_in, opened
from .tracing import unwrapped


# Equations that set the sharding of their operands and change no values.
_LAYOUTS = ("reshard", "mesh_cast", "sharding_constraint")
# Equations whose programs stay as they are.
_OPAQUE = ("shard_map", "pallas_call", "custom_partitioning", "core_map", "run_state")
_SPACES = {
    "pinned_host": jax.memory.Space.Host,
    "unpinned_host": jax.memory.Space.Host,
    "device": jax.memory.Space.Device,
}
# Errors of a step that may come from the mesh on which it is traced: libraries compare
# structs with types, which name it, and compute constants, which a mesh without devices
# does not allow.
_ERRORS_OF_MESH = (AssertionError, TypeError, ValueError)
_NO_MESH = AbstractMesh((), ())


def explicit_mesh(args: PyTree) -> AbstractMesh | None:
    """The mesh with Explicit axes on which a step is traced: that of `jax.set_mesh`, or
    that of the first array or struct in `args` with a sharding on such a mesh. `None`
    if there is none.
    """
    meshes = [jax.sharding.get_abstract_mesh(), *map(_mesh_of, jax.tree.leaves(args))]
    for mesh in meshes:
        if mesh.explicit_axes:
            return mesh
    return None


def _mesh_of(leaf: object) -> AbstractMesh:
    """The mesh in the type of an array or a struct; that of other values is empty."""
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return jax.typeof(leaf).sharding.mesh
    return _NO_MESH


def is_typed(array: object) -> bool:
    """Whether the type of an array says how Explicit axes shard it."""
    return bool(_mesh_of(array).explicit_axes)


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
    # JAX refuses a mesh of another size than that outside, but takes it in place of
    # none.
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
        """The struct of an array; any other leaf unchanged."""
        if not is_array_type(type(leaf)):
            return leaf
        sharding = None
        if typed and not _mesh_of(leaf).empty:
            sharding = jax.typeof(leaf).sharding
        return jax.ShapeDtypeStruct(
            leaf.shape,
            leaf.dtype,
            sharding=sharding,
            # NumPy arrays and typed PRNG keys have no weak type.
            weak_type=getattr(leaf, "weak_type", False),
        )

    return jax.tree.map(struct, args)


def on_auto_axes(
    function: Callable[..., Sequence[Any]],
    mesh: AbstractMesh,
    specs: Sequence[PartitionSpec],
) -> Callable[..., list[Any]]:
    """A function of typed arrays, which runs on Auto axes in place of the Explicit ones
    of `mesh`, and whose results are typed as `specs` say.
    """
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    decorated: Any = jax.sharding.auto_axes(
        function, axes=mesh.explicit_axes, out_sharding=shardings
    )
    return decorated


def _untyped(constant: Any) -> Any:
    """A constant of a step, through the host if its type has Explicit axes. Within
    `jax.set_mesh`, every new array has them.
    """
    if isinstance(constant, Tracer) or not is_typed(constant):
        return constant
    return as_keys(np.asarray(raw(constant)), constant)


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

    def run(self, *arrays: Any) -> list[Any]:
        """The arrays in the step's result, for the arrays in its arguments."""
        if is_tracing() or any(map(is_typed, arrays)):
            return self._evaluated(*arrays)
        with without_mesh():
            # A `shard_map` over a mesh without devices is for `jit`.
            return jax.jit(self._evaluated)(*arrays)

    def _evaluated(self, *arrays: Any) -> list[Any]:
        """The step's results, evaluated without its shardings in the present mesh."""
        mesh = jax.sharding.get_abstract_mesh()
        evaluator = _Unsharder(_NO_MESH if mesh.explicit_axes else mesh)
        consts = list(map(_untyped, self.closed.consts))
        return evaluator.run(self.closed.jaxpr, consts, arrays)

    def result(self, arrays: Sequence[Any]) -> PyTree:
        """The step's result with these arrays."""
        return eqx.combine(
            jax.tree.unflatten(jax.tree.structure(self.out), arrays), self.rest
        )


def traced(step: Callable[..., PyTree], args: PyTree, *, typed: bool) -> PlainStep:
    """Traces a step in the context's mesh, for `args`, a pair of its arguments and its
    keyword arguments. The arguments have their shardings in their types if `typed`.
    """
    positional, named = structs_like(args, typed=typed)
    trace = eqx.filter_make_jaxpr(unwrapped(step))
    closed, out, rest = trace(*positional, **named)
    return PlainStep(closed=closed, out=out, rest=rest)


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
    is traced for that. A step to which a mesh is an obstacle, such as one that computes
    constants while it is traced, is traced without any. With `alone`, the step is for
    one device; otherwise a `shard_map` must be over `mesh`.
    """
    # The first error that is not raised is the context of one that is.
    try:
        with over_ones(mesh):
            plain = traced(step, args, typed=False)
        if alone or mesh.size == 1 or not _has_shard_map(plain):
            return plain
        with over(auto_twin(mesh)):
            return traced(step, args, typed=False)
    except _ERRORS_OF_MESH:
        with contextlib.suppress(*_ERRORS_OF_MESH), over(_NO_MESH):
            plain = traced(step, args, typed=False)
            if not _has_shard_map(plain):
                return plain
        with over(mesh):
            return traced(step, args, typed=True)


def _has_shard_map(step: PlainStep) -> bool:
    """Whether the jaxpr of a step has a `shard_map` at any depth."""
    equations = equations_in(step.closed)
    return any(equation.primitive.name == "shard_map" for equation in equations)


@ft.lru_cache(maxsize=256)
def _context_over(context: Any, mesh: AbstractMesh) -> Any:
    """The context of an equation, such as where it is computed, with another mesh."""
    with context.manager, over(mesh):
        return jax.make_jaxpr(jnp.sin)(0.0).jaxpr.eqns[0].ctx


def equation_over(equation: jex.JaxprEqn, mesh: AbstractMesh) -> jex.JaxprEqn:
    """The equation, to be evaluated in the context of another mesh."""
    return equation.replace(ctx=_context_over(equation.ctx, mesh))


class _Unsharder:
    """Evaluates a jaxpr without the shardings in it, in the context of the mesh `mesh`,
    which has no Explicit axes.
    """

    def __init__(self, mesh: AbstractMesh):
        self.mesh = mesh
        # Takes a jaxpr, its constants and its arguments.
        self.run = ft.partial(evaluated, rule=self.rule)
        # By the identity of a program: the function that calls of it call.
        self.functions: dict[int, Callable[..., Sequence[Any]]] = {}

    def rule(
        self,
        jaxpr: jex.Jaxpr,
        equation: jex.JaxprEqn,
        operands: list[Any],
    ) -> Sequence[Any]:
        """The results of an equation without the shardings in it, of `operands`. An
        equation that only changes a layout has its operands as results.
        """
        name = equation.primitive.name
        if name in _LAYOUTS:
            return operands
        if name in CALLS:
            return self.function_of_call(equation)(*operands)

        mesh = self.mesh
        params = dict(equation.params)
        if name == "shard_map":
            mesh = auto_twin(params["mesh"].abstract_mesh)
            params["mesh"] = mesh
        elif name not in _OPAQUE:
            params = {key: self.plain_parameter(param) for key, param in params.items()}
        plain_equation = equation_over(equation.replace(params=params), mesh)
        if name != "scan":
            return applied(jaxpr, plain_equation, operands)

        # Results that the body only passes on are operands of the scan.
        forwarded = _forwarded(plain_equation)
        result_count = len(plain_equation.outvars)
        remaining = [n for n in range(result_count) if n not in forwarded]
        # From JAX 0.11 on, a `scan` keeps the structure of its results.
        if "num_carry" in params:
            results = applied(jaxpr, _narrowed(plain_equation, remaining), operands)
        else:
            every_result = applied(jaxpr, plain_equation, operands)
            results = [every_result[n] for n in remaining]
        results_by_index = dict(zip(remaining, results, strict=True))
        for result, operand in forwarded.items():
            results_by_index[result] = operands[operand]
        return [results_by_index[number] for number in range(result_count)]

    def function_of_call(self, call: jex.JaxprEqn) -> Callable[..., Sequence[Any]]:
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

    def plain_parameter(self, parameter: Any) -> Any:
        """A parameter of an equation without shardings. One that says where to put an
        array says the memory.
        """
        if isinstance(parameter, NamedSharding):
            return _SPACES.get(parameter.memory_kind or "")
        if type(parameter) is tuple:
            return tuple(map(self.plain_parameter, parameter))
        return retraced(parameter, self.run)


def _forwarded(scan: jex.JaxprEqn) -> dict[int, int]:
    """The results of a `scan` that its body takes from an operand as they are: the
    index of the operand for that of the result.

    A weight that the body reshards is a value of its own, which the derivative stores
    for each iteration. Without the `reshard` it is the weight.
    """
    body = scan.params["jaxpr"].jaxpr
    carry_start, carry_count = carry_of(scan)
    first_scanned = carry_start + carry_count
    scanned = {
        variable: index
        for index, variable in enumerate(body.invars)
        if index >= first_scanned
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


def unsharded(
    step: Callable[..., PyTree],
    *,
    mesh: AbstractMesh | None = None,
) -> Callable[..., PyTree]:
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
    - `mesh`: the mesh with its axes, if neither tells it.

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
        from jax.sharding import PartitionSpec as P

        def step(x, w):
            w = jax.sharding.reshard(w, P(None, "tensor"))
            return jnp.matmul(x, w, out_sharding=P("data", "tensor"))

        with jax.set_mesh(jax.make_mesh((4, 2), ("data", "tensor"))):
            y = sfx.testing.unsharded(step)(jnp.ones((3, 5)), jnp.ones((5, 7)))
        assert y.shape == (3, 7)  # sizes that no mesh of 8 devices divides
        ```
    """

    @ft.wraps(step)
    def plain(*args: PyTree, **kwargs: PyTree) -> PyTree:
        """The result of the step, without its shardings."""
        step_mesh = mesh or explicit_mesh((args, kwargs))
        if step_mesh is None:
            return step(*args, **kwargs)

        arrays = array_leaves((args, kwargs))
        is_alone = not any(map(is_typed, arrays))
        traced_step = plain_step(step, (args, kwargs), step_mesh, alone=is_alone)
        run = traced_step.run
        if not is_alone:
            results = array_leaves(traced_step.out)
            run = on_auto_axes(run, step_mesh, [PartitionSpec()] * len(results))
        return traced_step.result(run(*arrays))

    return plain


def array_leaves(tree: PyTree) -> list[Any]:
    """The arrays and structs among the leaves of a tree."""
    return [leaf for leaf in jax.tree.leaves(tree) if is_array_type(type(leaf))]
