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
    donating,
    lines_of,
    meshes,
    operations,
    own_line,
    parse_hlo,
)
from ._array_rows import ArrayRow, MissedAxis
from ._elsewhere import StepElsewhere
from ._estimate import LARGEST_DIRECT_MESH
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

    def __reduce__(self) -> tuple[Any, ...]:
        return StepElsewhere, ()

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
        return programs_to_judge(self.step, self.platform, LARGEST_DIRECT_MESH)

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
        buffers = self._program.buffers
        return tuple(buffers[value].shape for value in self._program.entry.carried)

    def host_bytes(self, number: int) -> int:
        """The bytes that one shard of array number `number` of the arguments takes if
        the array is in host memory.
        """
        return bytes_of(self._shard(number), self.chip.tile)

    def _shard(self, number: int) -> Array:
        return Array(self.purposes[number].dtype, self.shards[number])

    @property
    def parameter_bytes(self) -> int:
        """The bytes of one shard of each parameter in device memory, without tiles, as a
        plan counts them.
        """
        parameter_bytes = 0
        for number in self.in_group("parameters"):
            if not self.purposes[number].argument.on_host:
                parameter_bytes += bytes_of(self._shard(number), None)
        return parameter_bytes

    def in_group(self, kind: str) -> tuple[int, ...]:
        """The numbers of those arrays of the arguments whose purpose is `kind`, such as
        "parameters" or "batch". "optimizer" stands for all moments.
        """
        numbers = []
        for number, purpose in enumerate(self.purposes):
            kind_of_purpose, _, _ = purpose.group.partition(":")
            if kind_of_purpose == kind:
                numbers.append(number)
        return tuple(numbers)

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
        arguments, results = self.step.parameters
        if donated is None:
            donated = [argument.donated for argument in arguments]
        return device_memory(
            module,
            donated=donated,
            on_host=[argument.on_host for argument in arguments],
            results_on_host=[result.on_host for result in results],
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
        _, results = self.step.parameters
        dims_of_results = [result.dims for result in results]
        for purpose, dims in zip(self.purposes, arguments, strict=True):
            number = purpose.result
            if number is None or dims is None:
                continue
            if dims_of_results[number] is not None:
                dims_of_results[number] = dims
        return self._memory_under(arguments=arguments, results=dims_of_results)

    def donating(self, donated: Sequence[bool]) -> Memory:
        """The memory of one device if the step donates the arrays of its arguments that
        are true in `donated`.
        """
        if self.memory.is_counted:
            module = donating(self.step.module(self.platform), donated)
            return self.memory_with(module)
        return self.memory_of(self.module, donated=donated)

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
_LARGEST = 8
_ROUNDS = 3
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
    bytes_before = chip_step.memory.peak_bytes
    constraints: tuple[MissedAxis, ...] = ()
    peak_bytes = bytes_before
    for _ in range(_ROUNDS):
        candidates = _candidates(chip_step, constraints)
        extended = tuple(dict.fromkeys([*constraints, *candidates]))
        if len(extended) == len(constraints):
            break
        memory = _memory_with(chip_step, extended)
        if memory is None or memory.peak_bytes >= peak_bytes:
            break
        constraints = extended
        peak_bytes = memory.peak_bytes

    # Those that were added last are tried first.
    enough_bytes = _NEARLY * (bytes_before - peak_bytes)
    removable = reversed(constraints) if len(constraints) > 1 else ()
    for constraint in removable:
        fewer = tuple(other for other in constraints if other is not constraint)
        memory = _memory_with(chip_step, fewer)
        if memory is not None and bytes_before - memory.peak_bytes >= enough_bytes:
            constraints = fewer
    if not constraints:
        return None
    memory = _memory_with(chip_step, constraints)
    if memory is None:
        return None
    return Constrained(peak_bytes=memory.peak_bytes, constraints=constraints)


def _memory_with(
    chip_step: StepOnChip,
    constraints: Sequence[MissedAxis],
) -> Memory | None:
    """The memory of the step with sharding constraints; `None` if XLA or libtpu cannot
    compile it with them.
    """
    try:
        return chip_step.memory_with(
            with_constraints(chip_step.step, constraints, chip_step.platform)
        )
    except ProgramError:
        return None


def _candidates(
    chip_step: StepOnChip,
    constraints: Sequence[MissedAxis],
) -> Iterator[MissedAxis]:
    """Yields sharding constraints for the largest arrays in memory at the peak, over
    mesh axes of the batch. The peak is that of the step with the constraints
    `constraints`, which are already chosen. A `MissedAxis` is a mesh axis of an
    argument, `missed.by`, that stopped propagating before it shards an array.
    """
    arguments = chip_step.step.arguments
    batch_names = set()
    for number in chip_step.in_group("batch"):
        batch_names.add(arguments[number].path or arguments[number].name)
    if constraints:
        module = with_constraints(chip_step.step, constraints, chip_step.platform)
        memory = chip_step.memory_with(module)
        step_shardings = shardings_of(chip_step.step, chip_step.platform, module)
    else:
        memory = chip_step.memory
        step_shardings = chip_step.shardings
    rows_of: dict[Frame | None, list[ArrayRow]] = {}
    for row in step_shardings.rows:
        rows_of.setdefault(row.source, []).append(row)
    largest = memory.arrays[:_LARGEST]
    for line in dict.fromkeys(array.source for array in largest):
        for row in rows_of.get(line, ()):
            for missed in step_shardings.missed_axes(row):
                if missed.by in batch_names:
                    yield missed


class _ConstrainedValue(NamedTuple):
    """A value of a StableHLO module, the operation that makes it, and its constraint."""

    op: Op
    value: ir.Value
    missed: MissedAxis


def with_constraints(
    step: Step,
    constraints: Sequence[MissedAxis],
    platform: Platform,
) -> Module:
    """A copy of the step's StableHLO module with sharding constraints. Each constraint
    is added to all values that have its source line and its shape.
    """
    module = step.module(platform)
    mesh = _mesh_name(module, dict(step.mesh.shape))
    clone = module.operation.clone()
    with clone.context, ir.Location.unknown(clone.context):
        for op, value, missed in list(_constrained_values(clone, constraints)):
            dims: list[ir.Attribute] = []
            for entry in missed.spec:
                axes = [sdy.AxisRefAttr.get(axis) for axis in entry_axes(entry)]
                dims.append(sdy.DimensionShardingAttr.get(axes, is_closed=True))
            sharding = sdy.TensorShardingAttr.get(mesh, dims)
            with ir.InsertionPoint.after(op):
                constraint = sdy.ShardingConstraintOp(value, sharding)
            value.replace_all_uses_except(constraint.result, constraint.operation)
    return clone


def _mesh_name(module: Module, sizes: dict[str, int]) -> str:
    """The name that a module gives the mesh of these axis sizes."""
    for name, mesh_sizes in meshes(module).items():
        if dict(mesh_sizes) == sizes:
            return name
    raise ValueError(f"the module has no mesh of {sizes}")


def _constrained_values(
    module: Any,
    constraints: Sequence[MissedAxis],
) -> Iterator[_ConstrainedValue]:
    """Yields the values of a module with the line and the shape of a constraint."""
    for op in operations(module):
        if op.name in _NO_ARRAY:
            continue
        line = own_line(lines_of((op.location,)))
        for value in op.results:
            if not isinstance(value.type, ir.RankedTensorType):
                continue
            shape = tuple(value.type.shape)
            for missed in constraints:
                if line == missed.line and shape == missed.shape:
                    yield _ConstrainedValue(op=op, value=value, missed=missed)
