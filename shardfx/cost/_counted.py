"""The memory of a step, partitioned for its own shardings, for other shardings, and with further sharding constraints.

Constraints that shard activations over the batch again are found by the origin of each axis of an array.
"""

import dataclasses
import functools as ft
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy

from .. import chips
from .._ground.errors import ProgramError
from .._ground.spec import entry_axes
from .._step import Dims, Frame, Module, Op, Platform, Step, lines_of, meshes, operations, own_line
from ._after import as_compiled
from ._hlo_text import Array, HloModule, bytes_of, parse_hlo
from ._live import Held, held
from ._live.program import OpenedProgram, program_of
from ._purpose import Taken, taken
from ._shardings import ArrayRow, StepShardings, Wanted, shardings_of


@dataclasses.dataclass(frozen=True, eq=False)
class StepOnChip:
    """A step and the chip on which its memory is counted.

    **Arguments:**

    - `step`: the step, traced once.
    - `chip`: the chip, for its compiler and its tiles.
    - `function`: the traced function; `None` if the step came traced.
    """

    step: Step
    chip: chips.Chip
    function: Any = None

    @property
    def platform(self) -> Platform:
        """The platform whose lowering is partitioned."""
        return "tpu" if self.chip.torus_dims > 0 else "gpu"

    @ft.cached_property
    def module(self) -> HloModule:
        """The program of one device, after the compiler's passes."""
        return self.made()

    def made(self, **changed: Any) -> HloModule:
        """The partitioned program of one device, after the compiler's passes. `changed` is passed on to
        `Step.partitioned`.
        """
        return as_compiled(parse_hlo(self.step.partitioned(self.platform, **changed)), self.platform)

    @ft.cached_property
    def held(self) -> Held:
        """The bytes that one device holds at the worst moment of the step."""
        return self.of(self.module)

    @ft.cached_property
    def shardings(self) -> StepShardings:
        """The sharding of every array of the step, and where each sharding comes from."""
        return shardings_of(self.step, self.platform)

    @ft.cached_property
    def _program(self) -> OpenedProgram:
        return program_of(self.module)

    @ft.cached_property
    def taken(self) -> tuple[Taken, ...]:
        """The arrays that the step takes, each with its purpose."""
        return taken(self.step, self._program)

    @ft.cached_property
    def shards(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each argument on one device."""
        return tuple(self._program.buffers[value].shape for value in self._program.entry.carried)

    def host_bytes(self, at: int) -> int:
        """The bytes of argument number `at` in the host memory of one device."""
        return bytes_of(Array(self.taken[at].dtype, self.shards[at]), self.chip.tile)

    def of_group(self, kind: str) -> tuple[int, ...]:
        """The numbers of the arguments of a group. "optimizer" covers all groups whose name begins so."""
        return tuple(at for at, one in enumerate(self.taken) if one.group.partition(":")[0] == kind)

    def of(self, module: HloModule, *, donated: Sequence[bool] | None = None, recomputes: bool = False) -> Held:
        """The bytes that one device holds while it runs this module."""
        taken, returned = self.step.parameters
        return held(
            module,
            donated=[one.donated for one in taken] if donated is None else donated,
            on_host=[one.on_host for one in taken],
            results_on_host=[one.on_host for one in returned],
            tile=self.chip.tile,
            tpu=self.platform == "tpu",
            recomputes=recomputes,
        )

    def written_as(self, module: Module) -> Held:
        """The bytes that one device would hold if the step's StableHLO module were another one with the same arguments
        and results.
        """
        return self.of(self.made(module=module))

    def under(self, arguments: Sequence[Dims | None]) -> Held:
        """The bytes that one device holds under other shardings of the arguments. A result that replaces an argument
        gets that argument's sharding.
        """
        results = [one.dims for one in self.step.parameters[1]]
        for one, dims in zip(self.taken, arguments, strict=True):
            if one.result is not None and results[one.result] is not None and dims is not None:
                results[one.result] = dims
        return self.of(self.made(arguments=arguments, results=results))


# How many of the largest arrays at the peak are examined, and how many times, since a constraint may show the next
# array.
_LARGEST, _ROUNDS = 8, 3
# A constraint is left out if this share of the saving remains without it.
_NEARLY = 0.98
# Arrays of these operations need no constraint, or are constrained already.
_NO_ARRAY = ("sdy.sharding_constraint", "stablehlo.while", "func.call", "stablehlo.constant")


class Constrained(NamedTuple):
    """Sharding constraints that shard activations over the batch's mesh axes, where propagation did not.

    **Arguments:**

    - `peak_bytes`: the peak of the step with them on one device.
    - `told`: the constraints.
    """

    peak_bytes: int
    told: tuple[Wanted, ...]

    @property
    def how(self) -> str:
        """The constraints as code, with the line of each."""
        return "; ".join(f"{one.change} for the {one.where}" for one in self.told)

    @property
    def sources(self) -> tuple[Frame, ...]:
        """The lines that the constraints are for."""
        return tuple(dict.fromkeys(one.line for one in self.told if one.line))


def constrained(known: StepOnChip) -> Constrained | None:
    """Constraints that save memory: they shard arrays of the worst moment over a mesh axis of the batch that
    propagation gave to another argument.

    **Returns:**

    As few constraints as save nearly as much as all of them; `None` if they save nothing.
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


def _held(known: StepOnChip, told: Sequence[Wanted]) -> Held | None:
    try:
        return known.written_as(with_constraints(known.step, told, known.platform))
    except ProgramError:
        return None


def _lost(known: StepOnChip, told: Sequence[Wanted]) -> Iterator[Wanted]:
    """Constraints for the largest arrays at the worst moment that lack a mesh axis of the batch, although they could be
    sharded over it.
    """
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
    """The step's module with these constraints on the values that the constraints' lines make."""
    module = step.module(platform)
    sizes = dict(step.mesh.shape)
    mesh = next(name for name, own in meshes(module).items() if dict(own) == sizes)
    clone = module.operation.clone()
    found: list[tuple[Op, ir.Value, Wanted]] = []
    with clone.context, ir.Location.unknown(clone.context):
        for op in operations(clone):
            line = own_line(lines_of((op.location,)))
            for result in op.results if op.name not in _NO_ARRAY else ():
                shape = tuple(result.type.shape) if isinstance(result.type, ir.RankedTensorType) else None
                found.extend((op, result, one) for one in told if (line, shape) == (one.line, one.shape))
        for op, result, one in found:
            cut = [[sdy.AxisRefAttr.get(axis) for axis in entry_axes(entry)] for entry in one.spec]
            dims = [sdy.DimensionShardingAttr.get(axes, True) for axes in cut]
            with ir.InsertionPoint.after(op):
                made = sdy.ShardingConstraintOp(result, sdy.TensorShardingAttr.get(mesh, dims))
            result.replace_all_uses_except(made.result, made.operation)
    return clone
