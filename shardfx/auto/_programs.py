"""The traffic, time and memory of a candidate, from its program."""

import dataclasses
import functools as ft
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import chips
from .._arrays import filter_jit
from .._ground.errors import ProgramError
from .._ground.opcodes import SUMS
from .._ground.spec import entry_axes
from .._plan import ShardPlan, follow
from .._step import (
    Dims,
    Parameter,
    Platform,
    Refutation,
    Step,
    Target,
    parse_hlo,
    step_of,
)
from ..cost import Traffic, TrafficRow, seconds
from ..cost._estimate import (
    LARGEST_DIRECT_MESH,
    LARGEST_SMALL_MESH,
    as_sent,
    extrapolated,
)
from ..cost._kernels import kernel_seconds, kernels_of
from ..cost._live import device_memory
from ..cost._refuted import refutations_of
from ..cost._traffic import read
from ..cost._traffic_rows import largest_first
from ..cost._work import DeviceWork, work_of
from ..topology import MeshSpec
from ._asked import (
    EMULATED,
    TracedStep,
    donated_numbers,
    results_of,
)
from ._candidate import Candidate
from ._classes import Classes
from ._constrain_step import ConstrainableStep, constrain_step, constrainable
from ._core import CostModel


@dataclasses.dataclass(frozen=True)
class _ProgramCosts:
    """The traffic, the computation and the memory of one device's program.
    `least_seconds` is the part of `compute_seconds` that the kernels take whatever
    their work: the sum of their least times. The program takes `memory_bytes` if the
    step donates the arguments that it was jitted to donate, and `least_bytes` if it
    donates every argument that it can. `notes` are those of its work.
    """

    sent: Traffic
    compute_seconds: float
    least_seconds: float
    notes: tuple[str, ...]
    memory_bytes: int | float
    least_bytes: int | float


# Multiplications per cycle of a core's matrix units. The clock rate of a chip follows
# from them and its peak.
_MULTIPLIERS = {"v4": 8 * 128**2, "v5e": 4 * 128**2, "v5p": 8 * 128**2}


def timed(
    candidate: Candidate,
    sent: Traffic,
    compute_seconds: float,
    chip: chips.Chip,
    model: CostModel,
) -> Candidate:
    """The candidate with the traffic and the computation of its program, and an estimate
    of the seconds of one step.

    Communication takes [`shardfx.cost.seconds`][], and some microseconds per collective.
    Collectives of parameters and gradients overlap with a part of the computation;
    collectives of activations do not.
    """
    candidate = dataclasses.replace(candidate, compute_seconds=compute_seconds)
    return with_traffic(candidate, sent, chip, model)


def work_seconds(work: DeviceWork, chip: chips.Chip, model: CostModel) -> float:
    """The seconds of a program's computation: the longer of the floating-point operations
    at the peak rate, and the memory traffic at the memory's bandwidth. If a compiled
    program reports its cycles, they give the time instead.
    """
    peak_flops = float(chip.flops("bfloat16"))
    hbm_bytes_per_second = float(chip.hbm_bytes_per_second) / chip.devices_per_chip
    # A multiplier does two operations, a product and a sum, in each cycle.
    if work.cycles and chip.name in _MULTIPLIERS:
        clock_rate = peak_flops / (2 * _MULTIPLIERS[chip.name])
        return work.cycles / clock_rate
    flops_per_second = peak_flops * (model.compute / chip.devices_per_chip)
    return max(
        work.flops / flops_per_second,
        work.bytes / (hbm_bytes_per_second * model.memory),
    )


def with_traffic(
    candidate: Candidate,
    sent: Traffic,
    chip: chips.Chip,
    model: CostModel,
) -> Candidate:
    """The candidate with the traffic of its program, and the seconds of one step that
    follow from it and from the seconds of computation. Exposed seconds are those of
    collectives that computation waits for, and hidden ones those of collectives that
    overlap with it.
    """
    exposed = 0.0
    hidden = 0.0
    # The latency of gradients' reductions, by their kind, axes and calls. XLA combines
    # reductions that do not wait for each other.
    combined: dict[object, float] = {}
    for row in seconds(sent, chip, candidate.mesh).rows:
        seconds_of_bytes = (row.seconds - row.latency_seconds) / model.network
        if row.traffic.leaf is None:
            exposed += seconds_of_bytes + row.latency_seconds
        elif row.traffic.kind in SUMS:
            hidden += seconds_of_bytes
            key = (row.traffic.kind, row.traffic.axes, row.traffic.calls)
            combined[key] = max(combined.get(key, 0.0), row.latency_seconds)
        else:
            hidden += seconds_of_bytes + row.latency_seconds
    hidden += sum(combined.values())
    beyond_computation = max(0.0, hidden - model.overlap * candidate.compute_seconds)
    return dataclasses.replace(
        candidate,
        seconds=candidate.compute_seconds + exposed + beyond_computation,
        exposed_seconds=exposed,
        hidden_seconds=hidden,
        traffic=largest_first(sent),
    )


class LoweredStep:
    """A step that is traced and lowered once, to be partitioned by XLA for many
    candidates.

    - `step`, `args`, `words`: the step as the caller gave it, and its arguments as trees
      of `jax.ShapeDtypeStruct`s with their names.
    - `plain`: the step as JAX traced it, without constraints.
    - `leaves`: the paths of arrays by their names in a program, such as "arrays[0]".
    - `results`: for each result, the number of the argument with the same shardings or
      `None`, and the number of its arrays.
    - `platform`: that of the partitioner.
    """

    def __init__(
        self,
        step: Callable[..., object],
        traced: TracedStep,
        chip: chips.Chip,
        model: CostModel,
    ):
        """`step` is the caller's, and `traced` the same step as it was traced. `chip`
        and `model` give the times of its programs. `leaves` has the path of each array
        by its name in the program, and `results`, for each result, the argument whose
        shardings it gets and the number of its arrays.
        """
        self.step = step
        self.args = traced.structs
        self.words = traced.words
        self.leaves = {
            f"arrays[{number}]": array.path
            for number, array in enumerate(traced.arrays)
        }
        self.results = results_of(self.args, traced.out)
        self.chip = chip
        self.model = model
        self.platform: Platform = "gpu"
        if chip.torus_dims:
            self.platform = "tpu"
        elif chip == EMULATED:
            self.platform = "cpu"
        self.plain = traced.step

    @ft.cached_property
    def donated(self) -> tuple[int, ...]:
        """The numbers of the arguments that the step donates."""
        return donated_numbers(self.step, self.args)

    @ft.cached_property
    def donatable(self) -> tuple[int, ...]:
        """The numbers of the arguments that the step donates, or for which it returns
        an updated value.
        """
        return tuple(sorted(self._updated.union(self.donated)))

    @property
    def _updated(self) -> set[int]:
        """The numbers of the arguments for which the step returns an updated value."""
        return {which for which, _ in self.results if which is not None}

    def states(self, classes: Classes) -> tuple[int, ...]:
        """The numbers of the arguments that are an optimizer's state. The arrays of
        such an argument have only dimensions of the model, and the step returns an
        updated value for it.
        """
        arrays = classes.traced.arrays
        members = {arrays[array_number].which for array_number in classes.model_arrays}
        members.discard(classes.model_argument)
        return tuple(sorted(members & self._updated))

    def partitioned(
        self,
        candidate: Candidate,
        *,
        constrained: bool = False,
    ) -> Candidate:
        """`candidate` with the estimated time, the traffic and the memory of
        its partitioned program. With `constrained`, `constrain_step` constrains the
        step. If it does not fit with the arguments that the step donates, it counts
        with all `donatable` ones. Raises `ProgramError` if XLA refuses the program.
        """
        step = self._step_for(candidate, constrained)
        if candidate.mesh.size > LARGEST_DIRECT_MESH:
            costs = self._extrapolated(step, candidate)
        else:
            costs = self._costs_on(step, candidate, candidate.mesh)
        fits = costs.memory_bytes <= candidate.limit_bytes
        memory_bytes = costs.memory_bytes if fits else costs.least_bytes
        return dataclasses.replace(
            timed(
                candidate=candidate,
                sent=costs.sent,
                compute_seconds=costs.compute_seconds,
                chip=self.chip,
                model=self.model,
            ),
            memory_bytes=round(memory_bytes),
            constrained=constrained,
            notes=(*candidate.notes, *costs.notes),
            donated=self.donated if fits else self.donatable,
            results=tuple(which for which, _ in self.results),
        )

    @ft.cached_property
    def constrainable(self) -> ConstrainableStep:
        """The step as it is constrained for all candidates."""
        return constrainable(self.step, self.args)

    def _step_for(self, candidate: Candidate, constrained: bool) -> Step:
        """The step as `candidate` proposes it, perhaps with constraints."""
        if not constrained:
            return self.plain
        constrained_results = ft.partial(
            self.constrainable.results,
            candidate.mesh.abstract(),
            candidate.rules,
        )
        return step_of(lambda *args: constrained_results(args), self.args)

    def refutations(
        self,
        candidate: Candidate,
        target: Target | None = None,
    ) -> tuple[Refutation, ...]:
        """What XLA's partitioner computes wrongly under `candidate`, or libtpu's for the
        slices `target`; nothing for meshes whose programs are extrapolated, and for
        programs that libtpu cannot partition.
        """
        if candidate.mesh.size > LARGEST_DIRECT_MESH:
            return ()
        step = self._step_for(candidate, candidate.constrained)
        arguments, results = self._shardings(step, candidate)
        programs = step.programs(
            self.platform,
            mesh=candidate.mesh,
            arguments=arguments,
            results=results,
        )
        if target is None:
            return refutations_of(programs)
        try:
            text = step.tpu_partitioned(
                target.slices,
                target.order,
                mesh=candidate.mesh,
                arguments=arguments,
                results=results,
            )
        except ProgramError:
            # libtpu is asked for the whole program next, and says why.
            return ()
        return refutations_of(programs, text)

    def _shardings(
        self,
        step: Step,
        candidate: Candidate,
    ) -> tuple[list[Dims | None], list[Dims | None]]:
        """The shardings of the step's arguments and results under `candidate`. For each
        result, `self.results` has the argument whose shardings it gets, and the number
        of its arrays.
        """
        arguments, results = step.parameters
        argument_dims: list[list[Dims]] = []
        for plan in candidate.plans:
            dims = [tuple(map(entry_axes, leaf.spec)) for leaf in plan.leaves]
            argument_dims.append(dims)
        result_dims: list[Sequence[Dims | None]] = []
        for which, count in self.results:
            if which is None:
                result_dims.append([None] * count)
            else:
                result_dims.append(argument_dims[which])
        return _filled(argument_dims, arguments), _filled(result_dims, results)

    def _extrapolated(self, step: Step, candidate: Candidate) -> _ProgramCosts:
        """The costs of `candidate` on a large mesh, from the programs that XLA makes
        for smaller meshes. The costs are the traffic, the memory of one device, and its
        computation: the least times of its kernels, which hardly depend on the mesh,
        are extrapolated apart from the time of their work.
        """
        # By the sizes of the axes of a smaller mesh.
        costs: dict[tuple[int, ...], _ProgramCosts] = {}

        def rows_on(mesh: MeshSpec) -> Sequence[TrafficRow]:
            """The collectives of the program for a smaller mesh, whose costs are kept."""
            costs[mesh.axis_sizes] = self._costs_on(step, candidate, mesh)
            return costs[mesh.axis_sizes].sent.rows

        def numbers_on(sizes: tuple[int, ...]) -> np.ndarray:
            """The numbers of a program that grow with a mesh, in the order of `numbers`."""
            of_mesh = costs[sizes]
            busy_seconds = of_mesh.compute_seconds - of_mesh.least_seconds
            memory = (of_mesh.memory_bytes, of_mesh.least_bytes)
            return np.array([busy_seconds, of_mesh.least_seconds, *memory])

        # It calls `rows_on` for a small mesh first, and then for meshes of which one
        # axis is twice as large.
        sent = extrapolated(candidate.mesh, LARGEST_SMALL_MESH, rows_on)
        sizes, *other_sizes = costs
        first = numbers_on(sizes)
        numbers = first
        # Each doubling of an axis multiplies a number as the first doubling did.
        for doubled in other_sizes:
            axis = _first_difference(sizes, doubled)
            doublings = math.log2(candidate.mesh.axis_sizes[axis] / sizes[axis])
            growth = numbers_on(doubled) / np.where(first, first, 1)
            numbers = numbers * growth**doublings
        busy_seconds, least_seconds, memory_bytes, least_bytes = numbers.tolist()
        return _ProgramCosts(
            sent=sent,
            compute_seconds=busy_seconds + least_seconds,
            least_seconds=least_seconds,
            notes=costs[sizes].notes,
            memory_bytes=memory_bytes,
            least_bytes=least_bytes,
        )

    def _costs_on(
        self,
        step: Step,
        candidate: Candidate,
        mesh: MeshSpec,
    ) -> _ProgramCosts:
        """The costs of the program into which XLA partitions `step` for `mesh`, with
        arguments sharded as in `candidate`.
        """
        arguments, results = self._shardings(step, candidate)
        text = step.partitioned(
            self.platform,
            mesh=mesh,
            arguments=arguments,
            results=results,
        )
        partitioned = dataclasses.replace(parse_hlo(text), partitions=mesh.size)
        module = as_sent(partitioned, self.platform)

        def peak_bytes(donated: Sequence[int]) -> int:
            """The peak bytes of one device if results reuse the memory of the `donated`
            arguments.
            """
            flags = []
            for which, plan in enumerate(candidate.plans):
                flags += [which in donated] * len(plan.leaves)
            memory = device_memory(module, donated=flags, tile=self.chip.tile)
            return memory.peak_bytes

        memory_bytes = peak_bytes(self.donated)
        least_bytes = memory_bytes
        fits = memory_bytes <= candidate.limit_bytes
        # On a smaller mesh than the candidate's, both are extrapolated.
        if not fits or mesh != candidate.mesh:
            least_bytes = peak_bytes(self.donatable)
        work = work_of(partitioned)
        if self.platform == "tpu":
            kernels = kernels_of(partitioned, self.chip.tile)
            compute_seconds = kernel_seconds(kernels, self.chip, self.model.memory)
            idle = [kernel._replace(flops=0.0, bytes=0.0) for kernel in kernels]
            least_seconds = kernel_seconds(idle, self.chip, self.model.memory)
        else:
            least_seconds = 0.0
            compute_seconds = work_seconds(work, self.chip, self.model)
        return _ProgramCosts(
            sent=read(module, mesh, self.leaves),
            compute_seconds=compute_seconds,
            least_seconds=least_seconds,
            notes=work.notes,
            memory_bytes=memory_bytes,
            least_bytes=least_bytes,
        )


def _first_difference(sizes: Sequence[int], other_sizes: Sequence[int]) -> int:
    """The number of the first mesh axis whose size differs."""
    for axis, (size, other_size) in enumerate(zip(sizes, other_sizes, strict=True)):
        if size != other_size:
            return axis
    raise ValueError(f"{sizes} equals {other_sizes}")


def _filled(
    dims: Sequence[Sequence[Dims | None]],
    parameters: Sequence[Parameter],
) -> list[Dims | None]:
    """The mesh axes of each dimension of each array, with `()` for trailing dimensions
    that a spec leaves out.

    `dims` has a sequence for each argument of the step, with an entry for each array in
    it: the mesh axes of each dimension, or `None` if the compiler may choose the
    sharding. `parameters` are the arrays in the same order.
    """
    filled: list[Dims | None] = []
    for axes, parameter in zip(itertools.chain(*dims), parameters, strict=True):
        if axes is not None:
            missing_dims = len(parameter.shape) - len(axes)
            axes = tuple(axes) + ((),) * missing_dims
        filled.append(axes)
    return filled


def zero_1(candidate: Candidate, states: tuple[int, ...]) -> Candidate | None:
    """The candidate under ZeRO-1: the mesh axes of the batch also shard `states`, the
    arguments with optimizer state. The result is `None` if these axes cannot shard them
    further.
    """
    axes = tuple(axis for axis, names in candidate.assignments if names[0] == "batch")
    if not states or not axes or candidate.state_over:
        return None
    plans = list(candidate.plans)
    for which in states:
        plans[which] = follow(lambda state: state, plans[which], over=axes)
    saved = sum(
        candidate.plans[which].bytes_per_device - plans[which].bytes_per_device
        for which in states
    )
    if not saved:
        return None
    return dataclasses.replace(
        candidate,
        plans=tuple(plans),
        memory_bytes=candidate.memory_bytes - saved,
        state_over=axes,
        states=states,
    )


# Receives a line of text for each program.
Tell = Callable[[str], None]


def jitted(
    lowered: LoweredStep,
    candidate: Candidate,
    plans: Sequence[ShardPlan],
) -> Any:
    """The step, jitted as in the code of `candidate`, with the shardings of `plans`,
    one for each argument. `candidate.results` has, for each result, the argument whose
    plan it gets, or `None`.
    """
    mesh = plans[0].jax_mesh or candidate.mesh
    step = lowered.step
    if candidate.constrained:
        step = constrain_step(step, mesh, candidate.rules)
    results = []
    for which in candidate.results:
        results.append(None if which is None else plans[which])
    # A step with one result does not return a tuple.
    out_shardings = tuple(results)
    if len(results) == 1:
        out_shardings = results[0]
    return filter_jit(
        step,
        in_shardings=tuple(plans),
        out_shardings=out_shardings,
        donate=candidate.donated,
    )
