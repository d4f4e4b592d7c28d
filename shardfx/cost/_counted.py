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
from ._live import Memory, device_memory
from ._live.program import FlatProgram, program_of
from ._purpose import ArgumentPurpose, purposes_of
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
        return self.partitioned()

    def partitioned(self, **changed: Any) -> HloModule:
        """The partitioned program of one device, after the compiler's passes. `changed` is passed on to
        `Step.partitioned`.
        """
        return as_compiled(parse_hlo(self.step.partitioned(self.platform, **changed)), self.platform)

    @ft.cached_property
    def memory(self) -> Memory:
        """The bytes that one device holds at the worst moment of the step."""
        return self.memory_of(self.module)

    @ft.cached_property
    def shardings(self) -> StepShardings:
        """The sharding of every array of the step, and where each sharding comes from."""
        return shardings_of(self.step, self.platform)

    @ft.cached_property
    def _program(self) -> FlatProgram:
        return program_of(self.module)

    @ft.cached_property
    def purposes(self) -> tuple[ArgumentPurpose, ...]:
        """The arrays that the step takes, each with its purpose."""
        return purposes_of(self.step, self._program)

    @ft.cached_property
    def shards(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each argument on one device."""
        return tuple(self._program.buffers[value].shape for value in self._program.entry.carried)

    def host_bytes(self, at: int) -> int:
        """The bytes of argument number `at` in the host memory of one device."""
        return bytes_of(Array(self.purposes[at].dtype, self.shards[at]), self.chip.tile)

    def in_group(self, kind: str) -> tuple[int, ...]:
        """The numbers of the arguments of a group. "optimizer" covers all groups whose name begins so."""
        return tuple(at for at, one in enumerate(self.purposes) if one.group.partition(":")[0] == kind)

    def memory_of(self, module: HloModule, *, donated: Sequence[bool] | None = None, remat: bool = False) -> Memory:
        """The bytes that one device holds while it runs this module."""
        taken, returned = self.step.parameters
        return device_memory(
            module,
            donated=[one.donated for one in taken] if donated is None else donated,
            on_host=[one.on_host for one in taken],
            results_on_host=[one.on_host for one in returned],
            tile=self.chip.tile,
            tpu=self.platform == "tpu",
            remat=remat,
        )

    def memory_with(self, module: Module) -> Memory:
        """The bytes that one device would hold if the step's StableHLO module were another one with the same arguments
        and results.
        """
        return self.memory_of(self.partitioned(module=module))

    def under(self, arguments: Sequence[Dims | None]) -> Memory:
        """The bytes that one device holds under other shardings of the arguments. A result that replaces an argument
        gets that argument's sharding.
        """
        results = [one.dims for one in self.step.parameters[1]]
        for one, dims in zip(self.purposes, arguments, strict=True):
            if one.result is not None and results[one.result] is not None and dims is not None:
                results[one.result] = dims
        return self.memory_of(self.partitioned(arguments=arguments, results=results))


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
    - `constraints`: the constraints.
    """

    peak_bytes: int
    constraints: tuple[Wanted, ...]

    @property
    def how(self) -> str:
        """The constraints as code, with the line of each."""
        return "; ".join(f"{one.change} for the {one.where}" for one in self.constraints)

    @property
    def sources(self) -> tuple[Frame, ...]:
        """The lines that the constraints are for."""
        return tuple(dict.fromkeys(one.line for one in self.constraints if one.line))


def saving_constraints(known: StepOnChip) -> Constrained | None:
    """Constraints that save memory: they shard arrays of the worst moment over a mesh axis of the batch that
    propagation gave to another argument.

    **Returns:**

    As few constraints as save nearly as much as all of them; `None` if they save nothing.
    """
    before = known.memory.peak_bytes
    constraints: tuple[Wanted, ...] = ()
    peak = before
    for _ in range(_ROUNDS):
        more = dict.fromkeys((*constraints, *_candidates(known, constraints)))
        memory = _memory_with(known, tuple(more)) if len(more) > len(constraints) else None
        if memory is None or memory.peak_bytes >= peak:
            break
        constraints, peak = tuple(more), memory.peak_bytes
    for one in reversed(constraints) if len(constraints) > 1 else ():
        fewer = tuple(other for other in constraints if other is not one)
        memory = _memory_with(known, fewer)
        if memory is not None and before - memory.peak_bytes >= _NEARLY * (before - peak):
            constraints = fewer
    memory = _memory_with(known, constraints) if constraints else None
    return None if memory is None else Constrained(memory.peak_bytes, constraints)


def _memory_with(known: StepOnChip, constraints: Sequence[Wanted]) -> Memory | None:
    try:
        return known.memory_with(with_constraints(known.step, constraints, known.platform))
    except ProgramError:
        return None


def _candidates(known: StepOnChip, constraints: Sequence[Wanted]) -> Iterator[Wanted]:
    """Constraints for the largest arrays at the worst moment that lack a mesh axis of the batch, although they could be
    sharded over it.
    """
    batch = {known.step.arguments[at].path or known.step.arguments[at].name for at in known.in_group("batch")}
    memory, found = known.memory, known.shardings
    if constraints:
        module = with_constraints(known.step, constraints, known.platform)
        memory, found = known.memory_with(module), shardings_of(known.step, known.platform, module)
    made: dict[Frame | None, list[ArrayRow]] = {}
    for row in found.rows:
        made.setdefault(row.source, []).append(row)
    for line in dict.fromkeys(one.source for one in memory.arrays[:_LARGEST]):
        for row in made.get(line, ()):
            yield from (one for one in found.wanted(row) if one.by in batch)


def with_constraints(step: Step, constraints: Sequence[Wanted], platform: Platform) -> Module:
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
                found.extend((op, result, one) for one in constraints if (line, shape) == (one.line, one.shape))
        for op, result, one in found:
            cut = [[sdy.AxisRefAttr.get(axis) for axis in entry_axes(entry)] for entry in one.spec]
            dims = [sdy.DimensionShardingAttr.get(axes, True) for axes in cut]
            with ir.InsertionPoint.after(op):
                made = sdy.ShardingConstraintOp(result, sdy.TensorShardingAttr.get(mesh, dims))
            result.replace_all_uses_except(made.result, made.operation)
    return clone
