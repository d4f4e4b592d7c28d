"""The price of a candidate: the traffic, time and memory of the step's partitioned program under it."""

import dataclasses
import functools as ft
import itertools
import math
import types
from collections.abc import Callable, Sequence

import jax
from jaxtyping import PyTree

from .. import chips
from .._ground.spec import entry_axes
from .._plan import follow
from .._step import Dims, Parameter, Platform, Step, bytecode, step_of
from ..cost import Traffic, TrafficRow, seconds
from ..cost._after import as_compiled
from ..cost._estimate import DIRECT, LARGEST, SIZED, carried_on
from ..cost._hlo_text import HloModule, parse_hlo
from ..cost._live import held as held_by
from ..cost._traffic import read
from ..cost._traffic_rows import largest_first
from ..cost._work import DeviceWork, work_of
from ..topology import MeshSpec
from ._asked import EMULATED, TracedStep
from ._candidate import Candidate
from ._classes import Classes
from ._constrain_step import constrain_step
from ._core import CostModel


@dataclasses.dataclass(frozen=True)
class _Read:
    """The traffic, work and memory of a program. The memory is given with the step's own donation, and with all
    possible donation.
    """

    sent: Traffic
    work: DeviceWork
    held: tuple[int | float, int | float]


# Products per cycle of a core's units, for chips whose clock follows from it.
_UNITS = {"v4": 8 * 128**2, "v5e": 4 * 128**2, "v5p": 8 * 128**2}


def timed(one: Candidate, sent: Traffic, work: DeviceWork, chip: chips.Chip, model: CostModel) -> Candidate:
    """The candidate with the traffic of its program and the estimated seconds of one step.

    This is the only model of time: for a partitioned program, and for a compiled one that does not report its cycles.
    Computation takes the products at the peak rate, or the memory traffic at its bandwidth, whichever is longer.
    Communication takes [`shardfx.cost.seconds`][], and some microseconds per call. Gathers of parameters and sums of
    gradients, which have a leaf in their rows, overlap with a part of the computation; communication of activations
    does not.
    """
    per_device = model.compute / chip.devices_per_chip
    compute = max(
        work.flops / (float(chip.flops("bfloat16")) * per_device),
        work.bytes / (float(chip.hbm_bytes_per_second) / chip.devices_per_chip * model.memory),
    )
    if work.cycles and chip.name in _UNITS:
        compute = work.cycles / (float(chip.flops("bfloat16")) / (2 * _UNITS[chip.name]))
    exposed = hidden = 0.0
    for row in seconds(sent, chip, one.mesh).rows:
        calls = 1 if row.traffic.calls is None else row.traffic.calls
        taken = row.seconds / model.network + calls * model.call_seconds
        if row.traffic.leaf is None:
            exposed += taken
        else:
            hidden += taken
    return dataclasses.replace(
        one,
        seconds=compute + exposed + max(0.0, hidden - model.overlap * compute),
        compute_seconds=compute,
        exposed_seconds=exposed,
        hidden_seconds=hidden,
        traffic=largest_first(sent),
    )


class Pricer:
    """A step that is traced and lowered once, to be partitioned by XLA for many candidates.

    **Arguments:**

    - `step`: the step to search for.
    - `traced`: its arguments and results.
    - `chip`: the chip of the devices.
    """

    def __init__(self, step: Callable[..., object], traced: TracedStep, chip: chips.Chip, model: CostModel):
        self.step, self.args, self.words = step, traced.structs, traced.words
        self.leaves = {f"kept[{at}]": array.path for at, array in enumerate(traced.arrays)}
        self.results = results_of(self.args, traced.out)
        self.chip, self.model = chip, model
        self.platform: Platform = "tpu" if chip.torus_dims else "cpu" if chip == EMULATED else "gpu"
        self.plain = traced.step

    @ft.cached_property
    def donated(self) -> tuple[int, ...]:
        """The numbers of the arguments that the step donates."""
        if isinstance(self.step, types.FunctionType):
            return ()
        words = [arg.path.split("/")[:2] for arg in step_of(self.step, self.args).arguments if arg.donated]
        known = [word.replace("[", "/").replace("]", "").split("/") for word in self.words]
        return tuple(at for at, word in enumerate(known) if any(one[: len(word)] == word for one in words))

    @ft.cached_property
    def spare(self) -> tuple[int, ...]:
        """The numbers of the arguments that the step donates or returns in a new version."""
        return tuple(sorted({*self.donated, *(which for which, _ in self.results if which is not None)}))

    @ft.cached_property
    def size(self) -> int:
        """Bytes of the step's module."""
        return len(bytecode(self.plain.module(self.platform)))

    def priced(self, one: Candidate, *, constrained: bool = False) -> Candidate:
        """The candidate with the time, the traffic and the memory of its partitioned program.

        **Raises:**

        `ProgramError` if XLA refuses the program.
        """
        step = self._constrained(one) if constrained else self.plain
        read = self._carried_on(step, one) if one.mesh.size > DIRECT else self._read(step, one, one.mesh)
        fits = read.held[0] <= one.limit_bytes
        return dataclasses.replace(
            timed(one, read.sent, read.work, self.chip, self.model),
            memory_bytes=round(read.held[0 if fits else 1]),
            constrained=constrained,
            notes=(*one.notes, *read.work.notes),
            donated=self.donated if fits else self.spare,
            results=tuple(which for which, _ in self.results),
        )

    def _constrained(self, one: Candidate) -> Step:
        constrained = constrain_step(self.step, one.mesh, one.rules)
        return step_of(lambda *args: constrained(*args), self.args)

    def _carried_on(self, step: Step, one: Candidate) -> _Read:
        """The program's numbers on more devices than XLA partitions for, extrapolated from meshes with shorter axes."""
        read: dict[tuple[int, ...], _Read] = {}

        def rows_on(mesh: MeshSpec) -> Sequence[TrafficRow]:
            read[mesh.axis_sizes] = self._read(step, one, mesh)
            return read[mesh.axis_sizes].sent.rows

        def carried(value: Callable[[_Read], int | float]) -> float:
            """A number extrapolated: it changes with each doubling of an axis as it did with the first one."""
            sizes, *others = read
            found = float(value(read[sizes]))
            for other in others if found else ():
                axis = next(at for at, size in enumerate(other) if size != sizes[at])
                times = math.log2(one.mesh.axis_sizes[axis] / sizes[axis])
                found *= (value(read[other]) / value(read[sizes])) ** times
            return found

        sent = carried_on(one.mesh, LARGEST, rows_on)
        work = dataclasses.replace(
            next(iter(read.values())).work,
            flops=carried(lambda one: one.work.flops),
            bytes=carried(lambda one: one.work.bytes),
        )
        return _Read(sent, work, (carried(lambda one: one.held[0]), carried(lambda one: one.held[1])))

    def _read(self, step: Step, one: Candidate, mesh: MeshSpec) -> _Read:
        """The traffic, work and memory of a candidate's program. No other function reads a candidate's program."""
        arguments, results = step.parameters
        dims = [[tuple(map(entry_axes, leaf.spec)) for leaf in plan.leaves] for plan in one.plans]
        out = [[None] * count if which is None else dims[which] for which, count in self.results]
        text = step.partitioned(
            self.platform, mesh=mesh, arguments=_filled(dims, arguments), results=_filled(out, results)
        )
        partitioned = parse_hlo(text)
        module = as_compiled(partitioned, self.platform, without=() if mesh == one.mesh else SIZED)
        sent = read(module, mesh, self.leaves)
        held = self._held(module, one, self.donated)
        enough = held <= one.limit_bytes and mesh == one.mesh
        return _Read(
            sent,
            work_of(partitioned, tpu=self.platform == "tpu"),
            (held, held if enough else self._held(module, one, self.spare)),
        )

    def _held(self, module: HloModule, one: Candidate, donated: Sequence[int]) -> int:
        """Bytes of one device at the worst moment, if results reuse the memory of the `donated` arguments."""
        flags = [which in donated for which, plan in enumerate(one.plans) for _ in plan.leaves]
        return held_by(module, donated=flags, tile=self.chip.tile, tpu=self.platform == "tpu").peak_bytes


def results_of(args: Sequence[PyTree], made: PyTree) -> tuple[tuple[int | None, int], ...]:
    """The argument that each part of the result has the sharding of: one with the same structure, shapes and dtypes.

    **Returns:**

    For each subtree of the step's results, or for all of them together, the index of the argument with its sharding
    (`None` if it is free) and its number of arrays. Of several arguments with the same structure, each is used once, in
    order.
    """
    kinds = [kind_of(arg) for arg in args]
    if kind_of(made) in kinds or not isinstance(made, tuple):
        made = (made,)
    found: list[tuple[int | None, int]] = []
    for part in made:
        kind, taken = kind_of(part), {which for which, _ in found}
        which = next((at for at, own in enumerate(kinds) if own == kind and own[1] and at not in taken), None)
        found.append((which, len(kind[1])))
    return tuple(found)


def kind_of(tree: PyTree) -> tuple[object, list[tuple[tuple[int, ...], str]]]:
    """The structure, shapes and dtypes of a tree, as a key that trees of one sharding share."""
    arrays = jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.ShapeDtypeStruct) else None, tree)
    leaves, treedef = jax.tree.flatten(arrays)
    return treedef, [(leaf.shape, str(leaf.dtype)) for leaf in leaves]


def _filled(dims: Sequence[Sequence[Dims | None]], own: Sequence[Parameter]) -> list[Dims | None]:
    """The entries of specs, with empty ones added for the dimensions that a spec leaves out."""
    pairs = zip(itertools.chain(*dims), own, strict=True)
    return [None if dim is None else (*dim, *[()] * (len(one.shape) - len(dim))) for dim, one in pairs]


def states_of(classes: Classes) -> tuple[int, ...]:
    """The numbers of the arguments that hold an optimizer's state: trees like the model's that the step returns in a
    new version.
    """
    traced = classes.traced
    members = {traced.arrays[argument].which for argument in classes.model} - {classes.main}
    made = traced.out
    results = [kind_of(part) for part in (made if isinstance(made, tuple) else (made,))]
    return tuple(sorted(which for which in members if kind_of(traced.structs[which]) in results))


def zero_1(one: Candidate, states: tuple[int, ...]) -> Candidate | None:
    """The candidate with the optimizer's state sharded over the data axes too; `None` if that changes nothing."""
    axes = tuple(axis for axis, names in one.assignments if names[0] == "batch")
    if not states or not axes or one.state_over:
        return None
    plans = list(one.plans)
    for which in states:
        plans[which] = follow(lambda state: state, plans[which], over=axes)
    saved = sum(one.plans[which].bytes_per_device - plans[which].bytes_per_device for which in states)
    if not saved:
        return None
    return dataclasses.replace(
        one, plans=tuple(plans), memory_bytes=one.memory_bytes - saved, state_over=axes, states=states
    )
