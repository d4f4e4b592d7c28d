"""Where a step should say that its activations lie along the batch, because compilers lay them out otherwise."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy

from .._ground.errors import ProgramError
from .._step import Frame, Module, Op, is_library, lines_of, meshes, place_text
from ._counted import Counted


# A step that needs more constraints than these is better constrained as a whole: `shardfx.auto.constrain_step`.
_MOST = 6
# Fewer constraints are told where they save nearly as much.
_NEARLY = 0.98
_PRODUCTS = ("stablehlo.dot_general", "stablehlo.convolution", "stablehlo.gather")


class Constrained(NamedTuple):
    """Constraints that keep the activations along the batch.

    **Arguments:**

    - `peak_bytes`: what the step then needs on one device.
    - `how`: as code, with the line of each.
    - `sources`: the lines.
    """

    peak_bytes: int
    how: str
    sources: tuple[Frame, ...]


def constrained(known: Counted, axes: Sequence[str]) -> Constrained | None:
    """The fewest constraints that save nearly what constraints on every product of an activation do.

    A product whose first dimension is the batch's is constrained along it, on the line of the step that it came from,
    in the forward pass and in the backward pass.

    **Arguments:**

    - `axes`: the mesh axes that cut the batch.

    **Returns:**

    The constraints, or `None` where they save nothing.
    """
    sizes = {known.step.arguments[at].shape[0] for at in known.of_group("batch")}
    lines = list(
        dict.fromkeys(line for op in _products(known.step.module(known.platform), sizes) if (line := _line_of(op)))
    )
    before = known.held.peak_bytes
    saved = _saved(known, axes, sizes, lines, before)
    if saved <= 0:
        return None
    for count in range(1, min(_MOST, len(lines)) + 1):
        own = _saved(known, axes, sizes, lines[:count], before) if count < len(lines) else saved
        if own >= _NEARLY * saved:
            code = f"constrain(x, jax.P({_entry(axes)}), plan)"
            told = "; ".join(f"{code} for what {place_text(line)} makes" for line in lines[:count])
            return Constrained(before - own, told, tuple(lines[:count]))
    told = f"constrain_step(step, mesh, rules), which constrains the products of {len(lines)} lines"
    return Constrained(before - saved, told, tuple(lines))


def _saved(known: Counted, axes: Sequence[str], sizes: set[int], lines: Sequence[Frame], before: int) -> int:
    if not lines:
        return 0
    try:
        return before - known.written_as(_with_constraints(known, axes, sizes, set(lines))).peak_bytes
    except ProgramError:
        return 0


def _with_constraints(known: Counted, axes: Sequence[str], sizes: set[int], lines: set[Frame]) -> Module:
    """The step's module with a constraint on each of these products."""
    module = known.step.module(known.platform)
    wanted = dict(known.step.mesh.shape)
    mesh = next(name for name, own in meshes(module).items() if dict(own) == wanted)
    clone = module.operation.clone()
    with clone.context, ir.Location.unknown(clone.context):
        for op in [op for op in _products(clone, sizes) if _line_of(op) in lines]:
            result = op.results[0]
            rank = len(ir.RankedTensorType(result.type).shape)
            cut = [sdy.DimensionShardingAttr.get([sdy.AxisRefAttr.get(axis) for axis in axes], True)]
            cut += [sdy.DimensionShardingAttr.get([], False)] * (rank - 1)
            with ir.InsertionPoint.after(op):
                constraint = sdy.ShardingConstraintOp(result, sdy.TensorShardingAttr.get(mesh, cut))
            result.replace_all_uses_except(constraint.result, constraint.operation)
    return clone


def _products(module: Module, sizes: set[int]) -> Iterator[Op]:
    """The products of a module whose first dimension is the batch's."""
    found: list[Op] = []

    def look(op: Op) -> ir.WalkResult:
        if op.name in _PRODUCTS and len(op.results) == 1:
            shape = ir.RankedTensorType(op.results[0].type).shape
            if len(shape) > 1 and shape[0] in sizes:
                found.append(op)
        return ir.WalkResult.ADVANCE

    module.operation.walk(look)
    yield from found


def _line_of(op: Op) -> Frame | None:
    """The innermost line of the user's own program."""
    return next((frame for frame in lines_of((op.location,)) if not is_library(frame)), None)


def _entry(axes: Sequence[str]) -> str:
    names = [f'"{axis}"' for axis in axes]
    return names[0] if len(names) == 1 else f"({', '.join(names)})"
