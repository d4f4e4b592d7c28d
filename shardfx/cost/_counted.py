"""The memory of a step on one device: with its own shardings, other shardings, or
additional sharding constraints.

`saving_constraints` finds constraints on activations that are not sharded over the
batch's mesh axes.
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
from .._step import (
    Array,
    Dims,
    Frame,
    HloModule,
    Module,
    Op,
    Platform,
    Programs,
    Step,
    bytes_of,
    lines_of,
    meshes,
    operations,
    own_line,
    parse_hlo,
)
from ._array_rows import ArrayRow, MissedAxis
from ._estimate import DIRECT
from ._libtpu import tpu_program
from ._live import device_memory
from ._live.program import FlatProgram, program_of
from ._memory import Memory
from ._purpose import ArgumentPurpose, purposes_of
from ._refuted import module_of, programs_to_judge
from ._shardings import StepShardings, shardings_of


@dataclasses.dataclass(frozen=True, eq=False)
class StepOnChip:
    """A traced step, and the chip for which its memory is counted.

    - `step`, `chip`: the traced step, and the chip, which determines the compiler and
      the tiles of memory.
    - `function`: the function that was traced; `None` if it is not known.
    - `assigned`: the memory as libtpu assigned it when it compiled the step; `None` if
      it did not.
    """

    step: Step
    chip: chips.Chip
    function: Any = None
    assigned: Memory | None = None

    @property
    def platform(self) -> Platform:
        if self.chip.torus_dims > 0:
            return "tpu"
        return "gpu"

    @ft.cached_property
    def module(self) -> HloModule:
        """The program of one device that XLA's partitioner makes."""
        if self.programs is None:
            return self.partitioned()
        return module_of(self.programs, self.step.mesh.size)

    @ft.cached_property
    def programs(self) -> Programs | None:
        """The step's program before and after the partitioner, if it is to be judged."""
        return programs_to_judge(self.step, self.platform, DIRECT)

    def partitioned(self, **changed: Any) -> HloModule:
        """The program of one device that XLA's partitioner makes of a changed step.
        `changed` has keyword arguments for `Step.partitioned`, such as other shardings.
        """
        return parse_hlo(self.step.partitioned(self.platform, **changed))

    @ft.cached_property
    def memory(self) -> Memory:
        """The memory of one device: as libtpu assigns it, where it can be asked."""
        if self.assigned is not None:
            return self.assigned
        program = tpu_program(self.step, self.chip)
        if program is None:
            return self.foreseen
        return program.memory

    @ft.cached_property
    def foreseen(self) -> Memory:
        """The memory of one device by live ranges in the program of XLA's
        partitioner.
        """
        return self.memory_of(self.module)

    @ft.cached_property
    def shardings(self) -> StepShardings:
        return shardings_of(self.step, self.platform)

    @ft.cached_property
    def _program(self) -> FlatProgram:
        return program_of(self.module)

    @ft.cached_property
    def purposes(self) -> tuple[ArgumentPurpose, ...]:
        return purposes_of(self.step, self._program)

    @ft.cached_property
    def shards(self) -> tuple[tuple[int, ...], ...]:
        """The shape of one shard of each array of the arguments."""
        return tuple(
            self._program.buffers[value].shape for value in self._program.entry.carried
        )

    def host_bytes(self, number: int) -> int:
        """The bytes that one shard of array number `at` of the arguments takes if the
        array is in host memory.
        """
        return bytes_of(
            Array(self.purposes[number].dtype, self.shards[number]), self.chip.tile
        )

    @property
    def parameter_bytes(self) -> int:
        """The bytes of one shard of each parameter in device memory, without tiles, as a
        plan counts them.
        """
        return sum(
            bytes_of(Array(self.purposes[number].dtype, self.shards[number]), None)
            for number in self.in_group("parameters")
            if not self.purposes[number].argument.on_host
        )

    def in_group(self, kind: str) -> tuple[int, ...]:
        """The numbers of those arrays of the arguments whose purpose is `kind`, such as
        "parameters" or "batch". "optimizer" stands for all moments.
        """
        return tuple(
            number
            for number, purpose in enumerate(self.purposes)
            if purpose.group.partition(":")[0] == kind
        )

    def memory_of(
        self,
        module: HloModule,
        *,
        donated: Sequence[bool] | None = None,
        remat: bool = False,
    ) -> Memory:
        """The memory of one device while it runs the program `module`. `donated` says
        which arrays of the arguments are donated, by default as in the step. `remat`
        counts each layer as rematerialized in the backward pass.
        """
        taken, returned = self.step.parameters
        return device_memory(
            module,
            donated=[parameter.donated for parameter in taken]
            if donated is None
            else donated,
            on_host=[parameter.on_host for parameter in taken],
            results_on_host=[parameter.on_host for parameter in returned],
            tile=self.chip.tile,
            remat=remat,
        )

    def memory_with(self, module: Module) -> Memory:
        """The memory of one device if `module` replaces the step's StableHLO module,
        for the same arguments.
        """
        return self._memory_under(module=module)

    def under(self, arguments: Sequence[Dims | None]) -> Memory:
        """The memory of one device if the step's arguments have other shardings.
        `arguments` has, for each of their arrays, the mesh axes of each dimension, or
        `None` if the compiler may choose them. A result that is the new value of an
        array gets the array's sharding, unless the compiler may choose the sharding of
        one of the two.
        """
        results = [parameter.dims for parameter in self.step.parameters[1]]
        for purpose, dims in zip(self.purposes, arguments, strict=True):
            if (
                purpose.result is not None
                and results[purpose.result] is not None
                and dims is not None
            ):
                results[purpose.result] = dims
        return self._memory_under(arguments=arguments, results=results)

    def _memory_under(self, **changed: Any) -> Memory:
        """The memory of one device for a changed step, by the same count as `memory`."""
        program = None
        if self.memory.is_counted:
            program = tpu_program(self.step, self.chip, **changed)
        if program is not None:
            return program.memory
        return self.memory_of(self.partitioned(**changed))


# The number of the largest arrays for which constraints are searched, and the number of
# searches: a constraint can make other arrays the largest.
_LARGEST, _ROUNDS = 8, 3
# A constraint is left out if the others save at least this fraction of the bytes.
_NEARLY = 0.98
# Operations whose results need no constraint, or have one.
_NO_ARRAY = (
    "sdy.sharding_constraint",
    "stablehlo.while",
    "func.call",
    "stablehlo.constant",
)


class Constrained(NamedTuple):
    """Sharding constraints on activations, and the peak memory of a step with them."""

    peak_bytes: int
    constraints: tuple[MissedAxis, ...]


def saving_constraints(chip_step: StepOnChip) -> Constrained | None:
    """Sharding constraints on activations that lower the step's peak memory; `None` if
    no constraint does. A constraint is left out if the others together save almost as
    much.
    """
    before = chip_step.memory.peak_bytes
    constraints: tuple[MissedAxis, ...] = ()
    peak = before
    for _ in range(_ROUNDS):
        extended = dict.fromkeys((*constraints, *_candidates(chip_step, constraints)))
        if len(extended) > len(constraints):
            memory = _memory_with(chip_step, tuple(extended))
        else:
            memory = None
        if memory is None or memory.peak_bytes >= peak:
            break
        constraints, peak = tuple(extended), memory.peak_bytes
    for constraint in reversed(constraints) if len(constraints) > 1 else ():
        fewer = tuple(other for other in constraints if other is not constraint)
        memory = _memory_with(chip_step, fewer)
        if memory is not None and before - memory.peak_bytes >= _NEARLY * (
            before - peak
        ):
            constraints = fewer
    memory = _memory_with(chip_step, constraints) if constraints else None
    if memory is None:
        return None
    return Constrained(memory.peak_bytes, constraints)


def _memory_with(
    chip_step: StepOnChip, constraints: Sequence[MissedAxis]
) -> Memory | None:
    try:
        return chip_step.memory_with(
            with_constraints(chip_step.step, constraints, chip_step.platform)
        )
    except ProgramError:
        return None


def _candidates(
    chip_step: StepOnChip, constraints: Sequence[MissedAxis]
) -> Iterator[MissedAxis]:
    """Yields sharding constraints for the largest arrays in memory at the peak, over
    mesh axes of the batch. The peak is that of the step with the constraints
    `constraints`, which are already chosen.
    """
    batch = {
        chip_step.step.arguments[number].path or chip_step.step.arguments[number].name
        for number in chip_step.in_group("batch")
    }
    memory, step_shardings = chip_step.memory, chip_step.shardings
    if constraints:
        module = with_constraints(chip_step.step, constraints, chip_step.platform)
        memory, step_shardings = (
            chip_step.memory_with(module),
            shardings_of(chip_step.step, chip_step.platform, module),
        )
    rows_of: dict[Frame | None, list[ArrayRow]] = {}
    for row in step_shardings.rows:
        rows_of.setdefault(row.source, []).append(row)
    for line in dict.fromkeys(array.source for array in memory.arrays[:_LARGEST]):
        for row in rows_of.get(line, ()):
            yield from (
                missed
                for missed in step_shardings.missed_axes(row)
                if missed.by in batch
            )


def with_constraints(
    step: Step, constraints: Sequence[MissedAxis], platform: Platform
) -> Module:
    """A copy of the step's StableHLO module with sharding constraints. Each constraint
    is added to all values that have its source line and its shape.
    """
    module = step.module(platform)
    sizes = dict(step.mesh.shape)
    mesh = next(
        name for name, mesh_sizes in meshes(module).items() if dict(mesh_sizes) == sizes
    )
    clone = module.operation.clone()
    places: list[tuple[Op, ir.Value, MissedAxis]] = []
    with clone.context, ir.Location.unknown(clone.context):
        for op in operations(clone):
            line = own_line(lines_of((op.location,)))
            for result in op.results if op.name not in _NO_ARRAY else ():
                if isinstance(result.type, ir.RankedTensorType):
                    shape = tuple(result.type.shape)
                else:
                    shape = None
                places.extend(
                    (op, result, missed)
                    for missed in constraints
                    if (line, shape) == (missed.line, missed.shape)
                )
        for op, result, missed in places:
            cut = [
                [sdy.AxisRefAttr.get(axis) for axis in entry_axes(entry)]
                for entry in missed.spec
            ]
            dims = [sdy.DimensionShardingAttr.get(axes, True) for axes in cut]
            with ir.InsertionPoint.after(op):
                constraint = sdy.ShardingConstraintOp(
                    result, sdy.TensorShardingAttr.get(mesh, dims)
                )
            result.replace_all_uses_except(constraint.result, constraint.operation)
    return clone
