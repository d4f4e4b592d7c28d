"""Constraints that give activations back to the batch, found by where each axis of them comes from."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy

from .._ground.errors import ProgramError
from .._ground.spec import entry_axes
from .._step import Frame, Module, Op, Platform, Step, lines_of, meshes, own_line
from ._counted import Counted
from ._live import Held
from ._shardings import ArrayRow, Wanted, shardings_of


# The largest arrays of the worst moment whose lines are looked at, and how often: a constraint may show the next one.
_LARGEST, _ROUNDS = 8, 3
# A constraint without which nearly as much is saved is not told.
_NEARLY = 0.98
# What a constraint changes nothing of, or is one already.
_NO_ARRAY = ("sdy.sharding_constraint", "stablehlo.while", "func.call", "stablehlo.constant")


class Constrained(NamedTuple):
    """Constraints that give activations back to the batch.

    **Arguments:**

    - `peak_bytes`: what the step then needs on one device.
    - `told`: the constraints.
    """

    peak_bytes: int
    told: tuple[Wanted, ...]

    @property
    def how(self) -> str:
        """As code, with the line of each."""
        return "; ".join(f"{one.change} for the {one.where}" for one in self.told)

    @property
    def sources(self) -> tuple[Frame, ...]:
        """Their lines."""
        return tuple(dict.fromkeys(one.line for one in self.told if one.line))


def constrained(known: Counted) -> Constrained | None:
    """The constraints that save memory where arrays of the worst moment lost the batch's axis to another argument.

    **Returns:**

    As few as save nearly what all do; `None` where they save nothing.
    """
    before = known.held.peak_bytes
    told: tuple[Wanted, ...] = ()
    peak = before
    for _ in range(_ROUNDS):
        more = dict.fromkeys((*told, *_lost(known, told)))
        held = _held(known, tuple(more)) if len(more) > len(told) else None
        if held is None or held.peak_bytes >= peak:
            break
        told, peak = tuple(more), held.peak_bytes
    for one in reversed(told) if len(told) > 1 else ():
        fewer = tuple(other for other in told if other is not one)
        held = _held(known, fewer)
        if held is not None and before - held.peak_bytes >= _NEARLY * (before - peak):
            told = fewer
    held = _held(known, told) if told else None
    return None if held is None else Constrained(held.peak_bytes, told)


def _held(known: Counted, told: Sequence[Wanted]) -> Held | None:
    try:
        return known.written_as(with_constraints(known.step, told, known.platform))
    except ProgramError:
        return None


def _lost(known: Counted, told: Sequence[Wanted]) -> Iterator[Wanted]:
    """What the lines of the largest arrays of the worst moment make without an axis that the batch has."""
    batch = {known.step.arguments[at].path or known.step.arguments[at].name for at in known.of_group("batch")}
    held, found = known.held, known.shardings
    if told:
        module = with_constraints(known.step, told, known.platform)
        held, found = known.written_as(module), shardings_of(known.step, known.platform, module)
    made: dict[Frame | None, list[ArrayRow]] = {}
    for row in found.rows:
        made.setdefault(row.source, []).append(row)
    for line in dict.fromkeys(one.source for one in held.arrays[:_LARGEST]):
        for row in made.get(line, ()):
            yield from (one for one in found.wanted(row) if one.by in batch)


def with_constraints(step: Step, told: Sequence[Wanted], platform: Platform) -> Module:
    """The step's module with these constraints on what their lines make."""
    module = step.module(platform)
    sizes = dict(step.mesh.shape)
    mesh = next(name for name, own in meshes(module).items() if dict(own) == sizes)
    clone = module.operation.clone()
    found: list[tuple[Op, ir.Value, Wanted]] = []

    def look(op: Op) -> ir.WalkResult:
        line = own_line(lines_of((op.location,)))
        for result in op.results if op.name not in _NO_ARRAY else ():
            shape = tuple(result.type.shape) if isinstance(result.type, ir.RankedTensorType) else None
            found.extend((op, result, one) for one in told if (line, shape) == (one.line, one.shape))
        return ir.WalkResult.ADVANCE

    with clone.context, ir.Location.unknown(clone.context):
        clone.walk(look)
        for op, result, one in found:
            cut = [[sdy.AxisRefAttr.get(axis) for axis in entry_axes(entry)] for entry in one.spec]
            dims = [sdy.DimensionShardingAttr.get(axes, True) for axes in cut]
            with ir.InsertionPoint.after(op):
                made = sdy.ShardingConstraintOp(result, sdy.TensorShardingAttr.get(mesh, dims))
            result.replace_all_uses_except(made.result, made.operation)
    return clone
