"""What to write in a step so that JAX can type it on Explicit axes."""

import dataclasses
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from .._arrays import is_about_types
from .._ground.errors import MeshError
from .._ground.spec import entries_at, entries_of, trimmed
from .._ground.text import first_lines, html_text, plural, table
from .._step import (
    CALLS,
    MARKED_CALLS,
    Frame,
    applied,
    array_leaves,
    auto_twin,
    carry_of,
    evaluated,
    frames_of,
    is_library,
    opened,
    over,
    place_text,
    plain_step,
    without_mesh,
)
from ..topology import MeshSpec
from ._shardings import StepShardings, shardings


# What to write for a primitive whose function takes a sharding of its result.
_WRITTEN = {
    "dot_general": "jnp.matmul(..., out_sharding={spec}), or einsum",
    "gather": "x.at[...].get(out_sharding={spec})",
    "reshape": "jax.lax.reshape(..., out_sharding={spec})",
    "conv_general_dilated": "jax.lax.conv_general_dilated(..., out_sharding={spec})",
}
_SCATTERED = "x.at[...].add(..., out_sharding={spec}), or set"
_OPERANDS = "jax.sharding.reshard(x, {spec}) of the operands"
_CARRY = "jax.sharding.reshard(x, {spec}) of the carry before the loop"
_WRAPPED = "shardfx.auto.auto_axes(function, plan, out={spec})"


@dataclasses.dataclass(frozen=True)
class TypedLine:
    """An operation whose result JAX cannot type on Explicit axes.

    **Arguments:**

    - `source`: the innermost line of your own program; `None` if it is not known.
    - `primitive`: JAX's name of the operation.
    - `shape`, `spec`: the shape of its result, and the PartitionSpec that Shardy gives
      it on Auto axes.
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
    dimensions, such as that of a batch, or else gets the sharding that Shardy
    propagates to it on Auto axes. Operations of the backward pass need nothing: JAX
    types them after the forward pass. To run a step as it is, use
    [`shardfx.auto.constrain_step`][].

    **Arguments:**

    - `step`: a function that knows nothing of shardings, or is written for Explicit
      axes; its own shardings are left out.
    - `args`: arrays or structs with shardings, such as `plan.structs`.

    **Returns:**

    A [`shardfx.cost.TypedStep`][]. `print` shows a row for each line.

    **Raises:**

    `MeshError` if no argument has a sharding; the errors of tracing the step.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import shardfx as sfx

        def loss(w, x):
            return jnp.sum(jax.nn.relu(x @ w["up"]) @ w["down"])

        mesh = jax.make_mesh((4, 2), ("data", "tensor"))
        rules = [("up", jax.P(None, "tensor")), ("down", jax.P("tensor"))]
        w = {"up": jnp.ones((16, 32)), "down": jnp.ones((32, 16))}
        plan = sfx.plan(w, mesh, paths=sfx.PathRules(rules))
        x = jax.device_put(jnp.ones((8, 16)), jax.NamedSharding(mesh, jax.P("data")))
        print(sfx.cost.typed(loss, plan.structs, x))
        ```
    """
    leaves = array_leaves(args)
    mesh = _mesh_of(leaves)
    explicit = mesh.update_axis_types(dict.fromkeys(mesh.axis_names, AxisType.Explicit))
    with without_mesh():
        plain = plain_step(step, (args, {}), explicit, alone=False)
        untyped = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        closed = jax.make_jaxpr(lambda *arrays: plain.run(arrays))(*untyped)
        specs = list(map(_spec_of, leaves))
        propagated = shardings(
            jex.jaxpr_as_fun(closed), *_structs(untyped, specs, auto_twin(explicit))
        )
        typer = _Typer(explicit, propagated)
        typer.run(closed.jaxpr, closed.consts, _structs(untyped, specs, explicit))
    return TypedStep(tuple(dict.fromkeys(typer.rows)), MeshSpec.of(explicit))


def _mesh_of(leaves: Sequence[Any]) -> AbstractMesh:
    for leaf in leaves:
        sharding = _sharding_of(leaf)
        if isinstance(sharding, NamedSharding):
            return sharding.mesh.abstract_mesh
    raise MeshError(
        "no argument of the step has a sharding, which JAX needs to type it; pass"
        " arrays on a mesh, or `plan.structs`."
    )


def _sharding_of(leaf: Any) -> Any:
    is_placed = isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)
    if is_placed:
        return leaf.sharding
    return None


def _spec_of(leaf: Any) -> PartitionSpec:
    sharding = _sharding_of(leaf)
    if isinstance(sharding, NamedSharding):
        return sharding.spec
    return PartitionSpec()


def _structs(
    structs: Sequence[Any],
    specs: Sequence[PartitionSpec],
    mesh: AbstractMesh,
) -> list[Any]:
    typed_structs = []
    for struct, spec in zip(structs, specs, strict=True):
        sharding = NamedSharding(mesh, spec)
        typed_struct = jax.ShapeDtypeStruct(
            struct.shape, struct.dtype, sharding=sharding
        )
        typed_structs.append(typed_struct)
    return typed_structs


class _Typer:
    """Types the results of a jaxpr's equations, as structs on the Explicit axes of
    `mesh`, and collects what to write where JAX cannot.
    """

    def __init__(self, mesh: AbstractMesh, propagated: StepShardings):
        self.mesh = mesh
        # The lines that JAX cannot type, with what to write.
        self.rows: list[TypedLine] = []
        self.line: Frame | None = None
        # Whether the equation, or a loop around it, is of the backward pass.
        self.is_backward = False
        self.specs: dict[tuple[Frame | None, tuple[int, ...]], PartitionSpec] = {}
        for row in propagated.rows:
            if row.phase != "backward":
                self.specs.setdefault(
                    (row.source, row.shape), trimmed(entries_of(row.spec), row.spec)
                )
        # The context of an equation that is traced on `mesh`.
        with over(mesh):
            self.context = jax.make_jaxpr(jnp.sin)(0.0).jaxpr.eqns[0].ctx

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
        outer_line = self.line
        is_outer_backward = self.is_backward
        # An operation of a library's own function has the line of the call.
        self.line = _line_of(equation) or outer_line
        self.is_backward = is_outer_backward or _is_transposed(equation)
        results = self.results(jaxpr, equation, operands)
        self.line = outer_line
        self.is_backward = is_outer_backward
        return results

    def results(
        self,
        jaxpr: jex.Jaxpr,
        equation: jex.JaxprEqn,
        operands: list[Any],
    ) -> Sequence[Any]:
        """The types of an equation's results."""
        name = equation.primitive.name
        params = equation.params
        calls = {**CALLS, **MARKED_CALLS}
        if name in calls:
            return self.run(*opened(params[calls[name]]), operands)
        if name == "scan":
            return self.scan(equation, operands)
        if name == "cond":
            branches = list(map(opened, params["branches"]))
            results = [self.run(*branch, operands[1:]) for branch in branches]
            return results[0]
        if name == "while":
            start = params["cond_nconsts"]
            return self.run(*opened(params["body_jaxpr"]), operands[start:])

        if name == "add_any":
            # JAX adds cotangents of one type. One of these may be of a value that is
            # still to be typed.
            return operands[:1]
        located = equation.replace(ctx=self.context)

        def run(*arrays: Any) -> list[Any]:
            return applied(jaxpr, located, arrays)

        try:
            with over(self.mesh):
                return jax.eval_shape(run, *operands)
        # JAX's errors for a sharding that it cannot type are not public.
        except Exception as error:
            if not is_about_types(error):
                raise
            written = ft.partial(self.written, equation, operands, error=error)
            return list(map(written, equation.outvars))

    def scan(self, equation: jex.JaxprEqn, operands: list[Any]) -> list[Any]:
        first, carried = carry_of(equation)
        unscanned = operands[: first + carried]
        slices = []
        specs = []
        for struct in operands[first + carried :]:
            entries = list(_spec_of(struct))
            specs.append(PartitionSpec(*entries[1:]))
            slices.append(jax.ShapeDtypeStruct(struct.shape[1:], struct.dtype))
        args = [*unscanned, *_structs(slices, specs, self.mesh)]
        results = self.run(*opened(equation.params["jaxpr"]), args)
        for before, after in zip(operands[first:], results[:carried], strict=False):
            if _trimmed(before) != _trimmed(after):
                text = _CARRY.format(spec=_written_spec(_trimmed(after)))
                self.add(equation, after.shape, _trimmed(after), text, "")

        length = equation.params["length"]
        stacks = []
        specs = []
        for struct in results[carried:]:
            shape = (length, *struct.shape)
            stacks.append(jax.ShapeDtypeStruct(shape, struct.dtype))
            specs.append(PartitionSpec(None, *_spec_of(struct)))
        return [*results[:carried], *_structs(stacks, specs, self.mesh)]

    def written(
        self,
        equation: jex.JaxprEqn,
        operands: Sequence[Any],
        var: Any,
        error: Exception,
    ) -> Any:
        """The type that a result has if what is to be written is written."""
        shape = var.aval.shape
        spec = _leading(operands, shape)
        if not any(spec):
            # Propagation may also cut a batch's features, as FSDP's weights are cut.
            spec = self.specs.get((self.line, shape), spec)
        name = equation.primitive.name
        text = _WRITTEN.get(name, _WRAPPED)
        if name.startswith("scatter"):
            text = _SCATTERED
        elif any(jnp.shape(operand) == shape for operand in operands):
            text = _WRITTEN.get(name, _OPERANDS)
        reason = str(error).partition("\n")[0]
        self.add(equation, shape, spec, text.format(spec=_written_spec(spec)), reason)
        return _structs([var.aval], [spec], self.mesh)[0]

    def add(
        self,
        equation: jex.JaxprEqn,
        shape: tuple[int, ...],
        spec: PartitionSpec,
        text: str,
        error: str,
    ) -> None:
        # JAX types the backward pass after the forward pass, which is to be written.
        if self.is_backward:
            return
        self.rows.append(
            TypedLine(
                source=self.line,
                primitive=equation.primitive.name,
                shape=shape,
                spec=spec,
                text=text,
                error=error,
            )
        )


def _leading(operands: Sequence[Any], shape: tuple[int, ...]) -> PartitionSpec:
    """The sharding of the operand that has most of the leading dimensions of `shape`,
    such as those of the batch.
    """
    best: tuple[object, ...] = ()
    for operand in operands:
        entries = []
        pairs = zip(jnp.shape(operand), shape, _entries(operand), strict=False)
        for size, size_of_result, entry in pairs:
            if size != size_of_result:
                break
            entries.append(entry)
        best = max(best, tuple(entries), key=len)
    return trimmed(best)


def _entries(operand: Any) -> tuple[object, ...]:
    return entries_at(_spec_of(operand), len(jnp.shape(operand)))


def _is_transposed(equation: jex.JaxprEqn) -> bool:
    return "transpose" in str(equation.source_info.name_stack)


def _trimmed(struct: Any) -> PartitionSpec:
    spec = _spec_of(struct)
    return trimmed(entries_of(spec), spec)


def _written_spec(spec: PartitionSpec) -> str:
    return f"P({', '.join(map(repr, spec))})"


def _line_of(equation: jex.JaxprEqn) -> Frame | None:
    frames = [frame for frame in frames_of(equation) if not is_library(frame)]
    if frames:
        return frames[0]
    return None
