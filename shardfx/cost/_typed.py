"""What to write in a step so that JAX can type it on Explicit axes."""

import dataclasses
import functools as ft
import os.path
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from .._arrays import is_about_types, shardings_of
from .._ground.errors import LeafTypeError, MeshError
from .._ground.spec import entries_of, trimmed
from .._ground.text import first_lines, html_text, plural, table
from .._step import (
    CALLS,
    MARKED_CALLS,
    Frame,
    applied,
    array_leaves,
    carry_of,
    equation_over,
    evaluated,
    frames_of,
    is_library,
    opened,
    over,
    place_text,
    plain_step,
    structs_like,
    without_mesh,
)
from ..topology import MeshSpec


# Equations with programs that give the types of their results.
_PROGRAMS = {
    **CALLS,
    **MARKED_CALLS,
    "scan": "jaxpr",
    "while": "body_jaxpr",
    "cond": "branches",
}
# What to write for a primitive whose function takes a sharding of its result.
_TEXT_BY_PRIMITIVE = {
    "dot_general": "jnp.matmul(..., out_sharding={spec}), or einsum",
    "gather": "x.at[...].get(out_sharding={spec})",
    "reshape": "jax.lax.reshape(..., out_sharding={spec})",
    "conv_general_dilated": "jax.lax.conv_general_dilated(..., out_sharding={spec})",
    "scatter": "x.at[...].add(..., out_sharding={spec}), or set",
}
_TEXT_OF_RESHARD = "jax.sharding.reshard(x, {spec}) of the operands"
_TEXT_OF_CARRY = "jax.sharding.reshard(x, {spec}) of the carry before the loop"
_TEXT_OF_WRAPPER = "shardfx.auto.auto_axes(function, plan, out={spec})"


@dataclasses.dataclass(frozen=True)
class TypedLine:
    """An operation whose result JAX cannot type on Explicit axes.

    **Arguments:**

    - `source`: the innermost line of your own program; `None` if it is not known.
    - `primitive`: JAX's name of the operation.
    - `shape`, `spec`: the shape of its result, and the PartitionSpec to write.
    - `text`: what to write there.
    - `error`: JAX's error.
    """

    __module__ = "shardfx.cost"

    source: Frame | None
    primitive: str
    shape: tuple[int, ...]
    spec: PartitionSpec
    text: str
    error: str


@dataclasses.dataclass(frozen=True)
class TypedStep:
    """The lines of a step to type for Explicit axes, as [`shardfx.cost.typed`][]
    returns them. `str(...)` is a table.

    **Arguments:**

    - `rows`: the lines, in the order of the program.
    - `mesh`: the mesh of the step.
    """

    __module__ = "shardfx.cost"

    rows: tuple[TypedLine, ...]
    mesh: MeshSpec

    def __str__(self) -> str:
        if not self.rows:
            return "JAX types every result of this step on Explicit axes"
        head = f"{plural(len(self.rows), 'line')} to type for Explicit axes:"
        rows = [("line", "operation", "write")]
        rows += [(place_text(row.source), row.primitive, row.text) for row in self.rows]
        return "\n".join([head, *table(rows, right=())])

    __repr__ = first_lines
    _repr_html_ = html_text


def typed(step: Callable[..., object], *args: object) -> TypedStep:
    """The lines of a step where JAX cannot type a result on Explicit axes, each with the
    `out_sharding=` or the reshard to write.

    For a model that is to be written for Explicit axes for good. The step is traced
    without a mesh. JAX then types each operation, from the shardings of the arguments
    on. Where it cannot, the result keeps its operands' sharding of the leading
    dimensions, such as that of a batch, and is replicated over the other mesh axes.
    Operations of the backward pass need nothing: JAX types them after the forward pass.
    To run a step as it is, use [`shardfx.auto.constrain_step`][].

    **Arguments:**

    - `step`: a function that knows nothing of shardings, or is written for Explicit
      axes; its own shardings are left out.
    - `args`: arrays or structs with shardings, such as `plan.structs`.

    **Returns:**

    A [`shardfx.cost.TypedStep`][]. `print` shows a row for each line.

    **Raises:**

    `LeafTypeError` for a step that is no function; `MeshError` if no argument has a
    sharding; the errors of tracing the step.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import shardfx as sfx
        from jax.sharding import PartitionSpec as P

        def loss(w, x):
            return jnp.sum(jax.nn.relu(x @ w["up"]) @ w["down"])

        mesh = jax.make_mesh((4, 2), ("data", "tensor"))
        rules = [("up", P(None, "tensor")), ("down", P("tensor"))]
        w = {"up": jnp.ones((16, 32)), "down": jnp.ones((32, 16))}
        plan = sfx.plan(w, mesh, paths=sfx.PathRules(rules))
        x = jax.device_put(jnp.ones((8, 16)), jax.NamedSharding(mesh, P("data")))
        print(sfx.cost.typed(loss, plan.structs, x))
        ```
    """
    if not callable(step):
        raise LeafTypeError(
            f"`step` must be a function, not {type(step).__name__}; pass"
            " `typed(step, *args)`."
        )
    leaves = array_leaves(args)
    mesh, specs = _mesh_and_specs(leaves)
    with without_mesh():
        plain = plain_step(step, (args, {}), mesh, alone=False)
        closed = jax.make_jaxpr(plain.run)(*structs_like(leaves, typed=False))
        structs = list(map(ft.partial(_struct, mesh), leaves, specs))
        typer = _Typer(mesh)
        with over(mesh):
            typer.run((), closed, structs)
    return TypedStep(tuple(dict.fromkeys(typer.rows)), MeshSpec.of(mesh))


def _mesh_and_specs(
    leaves: Sequence[Any],
) -> tuple[AbstractMesh, list[PartitionSpec]]:
    """The mesh of some arrays, with Explicit axes, and the spec of each array."""
    meshes: list[AbstractMesh] = []
    specs: list[PartitionSpec] = []
    for sharding in shardings_of(leaves):
        if isinstance(sharding, NamedSharding):
            meshes.append(sharding.mesh.abstract_mesh)
            specs.append(sharding.spec)
        else:
            specs.append(PartitionSpec())
    if not meshes:
        raise MeshError(
            "no argument of the step has a sharding, which JAX needs to type it; pass"
            " arrays on a mesh, or `plan.structs`."
        )
    kinds = dict.fromkeys(meshes[0].axis_names, AxisType.Explicit)
    return meshes[0].update_axis_types(kinds), specs


def _struct(mesh: AbstractMesh, array: Any, spec: PartitionSpec) -> Any:
    """The shape and dtype of an array, sharded by `spec` on a mesh."""
    sharding = NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


class _Typer:
    """Types the results of a jaxpr's equations, as structs on the Explicit axes of
    `mesh`, which is the context's mesh, and collects what to write where JAX cannot.
    """

    def __init__(self, mesh: AbstractMesh):
        self.mesh = mesh
        # The lines that JAX cannot type, with what to write.
        self.rows: list[TypedLine] = []

    def run(
        self,
        outer: tuple[jex.JaxprEqn, ...],
        program: object,
        args: Sequence[Any],
    ) -> list[Any]:
        """The types (structs with shardings) of the results of a program within the
        equations `outer`, for arguments of the types `args`.
        """
        jaxpr, consts = opened(program)
        return evaluated(jaxpr, consts, args, ft.partial(self.rule, outer))

    def rule(
        self,
        outer: tuple[jex.JaxprEqn, ...],
        jaxpr: jex.Jaxpr,
        equation: jex.JaxprEqn,
        operands: list[Any],
    ) -> Sequence[Any]:
        """The types of an equation's results, as JAX infers them on Explicit axes from
        the types `operands`. Where it cannot, they are those after what is to be
        written is written. `outer` has the calls and loops around the equation.
        """
        name = equation.primitive.name
        equations = (*outer, equation)
        if name in _PROGRAMS:
            return self.nested(equations, operands)
        if name == "add_any":
            # JAX adds cotangents of one type. One of these may be of a value that is
            # still to be typed.
            return operands[:1]

        located = equation_over(equation, self.mesh)
        try:
            return jax.eval_shape(ft.partial(applied, jaxpr, located), operands)
        # JAX's errors for a sharding that it cannot type are not public.
        except Exception as error:
            if not is_about_types(error):
                raise
            reason = str(error).partition("\n")[0]
            written = ft.partial(self.written, equations, operands, reason)
            return list(map(written, equation.outvars))

    def nested(
        self,
        equations: tuple[jex.JaxprEqn, ...],
        operands: Sequence[Any],
    ) -> list[Any]:
        """The types of the results of a call, a loop or a `cond`, the last of
        `equations`. `_PROGRAMS` has the parameter with the program, or the branches, of
        each of these primitives.
        """
        equation = equations[-1]
        name = equation.primitive.name
        programs = equation.params[_PROGRAMS[name]]
        results: list[Any] = []
        for program in programs if name == "cond" else [programs]:
            invars = opened(program)[0].invars
            # The operands before them choose a branch, or say when a loop ends.
            passed = operands[len(operands) - len(invars) :]
            args = list(map(self.aligned, invars, passed))
            results = self.run(equations, program, args)
        if name == "scan":
            start, count = carry_of(equation)
            for before, after in zip(operands[start:], results[:count], strict=False):
                if _entries(before) != _entries(after):
                    self.add(equations, after, _TEXT_OF_CARRY, "")
        return list(map(self.aligned, equation.outvars, results))

    def aligned(self, var: Any, array: Any) -> Any:
        """The struct of a variable within a call or a loop, from the array that is
        passed to it; or of one outside, from the result within. An array that is
        scanned over has one more dimension outside: the first, which is not sharded.
        """
        entries = (None, *_entries(array))
        rank = len(var.aval.shape)
        spec = PartitionSpec(*entries[len(entries) - rank :])
        return _struct(self.mesh, var.aval, spec)

    def written(
        self,
        equations: tuple[jex.JaxprEqn, ...],
        operands: Sequence[Any],
        reason: str,
        var: Any,
    ) -> Any:
        """The type that a result has if what is to be written is written. It is noted
        in `rows`, with JAX's error as the `reason`. `var` is the result's variable in
        the last of `equations`.
        """
        shape = var.aval.shape
        # "scatter-add" is written as "scatter" is.
        name = equations[-1].primitive.name.partition("-")[0]
        is_elementwise = any(jnp.shape(operand) == shape for operand in operands)
        text = _TEXT_BY_PRIMITIVE.get(
            name, _TEXT_OF_RESHARD if is_elementwise else _TEXT_OF_WRAPPER
        )
        struct = _struct(self.mesh, var.aval, _leading(operands, shape))
        self.add(equations, struct, text, reason)
        return struct

    def add(
        self,
        equations: tuple[jex.JaxprEqn, ...],
        result: jax.ShapeDtypeStruct,
        text: str,
        error: str,
    ) -> None:
        """Notes what to write for a result of the last of `equations`. `text` has the
        place of the spec in braces.
        """
        # JAX types the backward pass after the forward pass, which is to be written.
        if any(map(_is_transposed, equations)):
            return
        spec = trimmed(_entries(result))
        written_spec = f"P({', '.join(map(repr, spec))})"
        self.rows.append(
            TypedLine(
                source=_line_of(equations),
                primitive=equations[-1].primitive.name,
                shape=result.shape,
                spec=spec,
                text=text.format(spec=written_spec),
                error=error,
            )
        )


def _leading(operands: Sequence[Any], shape: tuple[int, ...]) -> PartitionSpec:
    """The sharding of the operand that has most of the leading dimensions of `shape`,
    such as those of the batch.
    """
    best: tuple[object, ...] = ()
    for operand in operands:
        # The longest common beginning of two shapes: it takes any sequences.
        common = os.path.commonprefix([jnp.shape(operand), shape])
        best = max(best, _entries(operand)[: len(common)], key=len)
    return trimmed(best)


def _entries(array: Any) -> tuple[object, ...]:
    """What shards each dimension of an array, as its type says."""
    return entries_of(jax.typeof(array).sharding.spec)


def _is_transposed(equation: jex.JaxprEqn) -> bool:
    """Whether an equation is of the backward pass."""
    return "transpose" in str(equation.source_info.name_stack)


def _line_of(equations: Sequence[jex.JaxprEqn]) -> Frame | None:
    """The innermost line that is not a library's. An operation of a library's own
    function has the line of the call.
    """
    for equation in reversed(equations):
        for frame in frames_of(equation):
            if not is_library(frame):
                return frame
    return None
