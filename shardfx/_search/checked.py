"""Candidates after a closer look: by the estimate of each operation, by the compiled program, or by the clock."""

import dataclasses
import functools as ft
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .. import chips
from .._arrays import filter_jit
from .._cost import Traffic, compare, compile_for, seconds as seconds_of, traffic
from .._cost.estimate import Compiler, Prepared
from .._cost.work import work_of
from .._ground.errors import MeshError, OutOfMemoryError
from .._plan import ShardPlan
from ..interop import tpu
from .asked import Asked
from .candidate import Candidate, Check
from .core import CostModel
from .emulated import EMULATED
from .lay_out import lay_out


Progress = Callable[[str], None]
# What compiles a step for a candidate.
ProgramOf = Callable[[Candidate, Any], Any]
# In how many rounds candidates are run in turn, and how many steps each turn has.
_ROUNDS, _STEPS = 3, 3
# A program that sends so many times what was expected is compiled again with the step laid out.
_ASTRAY = 1.1
# Products that a core's units make in one cycle, for the chips whose clock this tells.
_UNITS = {"v4": 8 * 128**2, "v5e": 4 * 128**2, "v5p": 8 * 128**2}


@dataclasses.dataclass(frozen=True)
class Verifier:
    """Compiles the candidates of one step for the same devices, and runs them if that is asked for.

    - `step`, `args`: what is searched for.
    - `devices`: what is compiled for.
    - `chip`, `model`: by which bytes and operations become seconds.
    - `cache`: a directory that keeps programs, or `None`.
    - `progress`: is told what is being done.
    - `laid_out`: whether each candidate is compiled as [`shardfx.lay_out`][] makes it; else those are whose programs
        send clearly more than they should.
    - `smaller`: the same candidate in less memory, estimated, for one whose program does not fit; or `None`.
    """

    step: Any
    args: tuple[Any, ...]
    devices: tuple[Any, ...]
    chip: chips.Chip
    model: CostModel
    cache: Any
    progress: Progress
    laid_out: bool = False
    smaller: Callable[[Candidate], Candidate | None] = lambda _: None

    @ft.cached_property
    def prepared(self) -> Prepared:
        """The step, ready to be estimated operation by operation."""
        return Prepared(self.step, self.args)

    def compiled(self, candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
        """The candidates with what their programs send, compute and hold; the fastest first."""
        return in_order(one for one, _ in self.looked_at(candidates))

    def ran(self, candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
        """The candidates with the median of their steps' seconds, all in turn on the devices; the fastest first."""

        def program_of(one: Candidate, step: Any) -> Any:
            plans = self._placed(one)
            out = _as_they_came(self.step, self.args, plans)
            return filter_jit(step, in_shardings=plans, out_shardings=out).lower(*self.args).compile()

        looked = list(self.looked_at(candidates, program_of))
        # What does not fit cannot run.
        kept = [(one, program) for one, program in looked if fits(one)]
        taken: list[list[float]] = [[] for _ in kept]
        order = list(range(len(kept)))
        for turn in range(_ROUNDS):
            for number in order if turn % 2 else reversed(order):
                self.progress(f"running candidate {number + 1} of {len(kept)}, round {turn + 1} of {_ROUNDS}")
                taken[number] += self._timed(*kept[number])
            # Only the faster half can still be the fastest.
            order = sorted(order, key=lambda number: statistics.median(taken[number]))[: max(2, (len(order) + 1) // 2)]
        found = [
            with_check(one, dataclasses.replace(one.checks[-1], by="run", seconds=statistics.median(times)))
            for (one, _), times in zip(kept, taken, strict=True)
        ]
        # Those that were run in the last round stand first: the others had fewer steps, and might have had better luck.
        last = in_order(found[number] for number in order)
        others = in_order(one for at, one in enumerate(found) if at not in order)
        return (*last, *others) or fitting([one for one, _ in looked])

    def looked_at(
        self, candidates: Sequence[Candidate], program_of: ProgramOf | None = None
    ) -> Iterator[tuple[Candidate, Any]]:
        """Each candidate with its program: as it is, or laid out where the compiler does worse than was expected.

        There is no program where the compiler says that it takes more memory than a device has.
        """
        # Where the compiler went astray once, though the estimate of each operation did not see it, it does so again.
        surprised = False
        for number, one in enumerate(candidates, start=1):
            told = f"compiling candidate {number} of {len(candidates)}"
            foreseen = one.checks[0].wire_bytes > _ASTRAY * one.wire_bytes
            laid_out = self.laid_out or ((foreseen or surprised) and not _is_data(one))
            self.progress(f"{told}{', laid out' * laid_out}: {one.title}")
            looked, program = self._look(one, laid_out=laid_out, program_of=program_of)
            if not self.laid_out and (program is None or _is_astray(looked)):
                surprised |= not laid_out
                self.progress(f"{told}, {'as it is' if laid_out else 'laid out'}: {one.title}")
                other, its = self._look(one, laid_out=not laid_out, program_of=program_of)
                # The one that fits; of two that are as fast, the one that asks for nothing.
                if _rank(other) < _rank(looked):
                    looked, program = other, its
            less = None if fits(looked) else self.smaller(one)
            if less is not None:
                self.progress(f"{told}, in less memory: {less.title}")
                other, its = self._look(less, laid_out=looked.laid_out, program_of=program_of)
                if fits(other):
                    looked, program = other, its
            yield looked, program

    def look(self, one: Candidate, *, laid_out: bool) -> Candidate:
        """One candidate with what its program sends, computes and holds."""
        return self._look(one, laid_out=laid_out)[0]

    def _look(self, one: Candidate, *, laid_out: bool, program_of: ProgramOf | None = None) -> tuple[Candidate, Any]:
        step = lay_out(self.step, one.mesh.build(self.devices), one.rules) if laid_out else self.step
        marked = dataclasses.replace(one, laid_out=laid_out)
        try:
            program = (program_of or self._program_of)(one, step)
        except OutOfMemoryError as error:
            return with_check(marked, _refused(marked, error)), None
        return with_check(marked, self._check(marked, program)), program

    def _program_of(self, one: Candidate, step: Any) -> Any:
        return compile_for(
            step,
            one.plans,
            one.mesh.build(self.devices),
            args=self.args,
            out_shardings=_as_they_came(self.step, self.args, one.plans),
            cache=self.cache,
            progress=lambda _: None,
        )

    def _placed(self, made: Candidate) -> tuple[ShardPlan, ...]:
        mesh = made.mesh.build(self.devices)
        return tuple(plan.on(mesh) for plan in made.plans)

    def _timed(self, made: Candidate, program: Any) -> list[float]:
        """The seconds of some steps, on arrays that only this turn has: those of one candidate are there at a time."""
        values = [_filled(arg, plan) for arg, plan in zip(self.args, self._placed(made), strict=True)]
        _wait(program(*values))
        taken = []
        for _ in range(_STEPS):
            begin = time.perf_counter()
            _wait(program(*values))
            taken.append(time.perf_counter() - begin)
        return taken

    def _check(self, made: Candidate, program: Any) -> Check:
        """What a compiled program says."""
        compiler: Compiler = "tpu" if self.devices[0].platform == "tpu" else "cpu"
        memory, text = program.memory_analysis(), program.as_text()
        outputs = max(0, memory.output_size_in_bytes - memory.argument_size_in_bytes)
        # A training step gives its state's memory to the new state.
        held = memory.argument_size_in_bytes + memory.temp_size_in_bytes + outputs
        found = traffic(program, made.mesh)
        compute = self._compute_seconds(made, text)
        sending = seconds_of(found, self.chip, made.mesh).seconds / self.model.network
        sending += sum(row.calls or 1 for row in found.rows) * self.model.call_seconds
        return Check(
            by="compile",
            wire_bytes=float(found.wire_bytes),
            memory_bytes=held,
            seconds=_step_seconds(made, compute, sending, self.model.overlap),
            axis_bytes=_by_axes(found),
            compute_seconds=compute,
            # The estimate of each operation follows the step as it is written.
            comparison=None if made.laid_out else compare(self.prepared.under(made.plans, compiler=compiler), found),
        )

    def _compute_seconds(self, made: Candidate, text: str) -> float:
        """By the compiler's cycles where it tells them; else by products, or the candidate's own if that is longer."""
        work = work_of(text)
        clock = _clock(self.chip)
        if work.cycles and clock:
            return work.cycles / clock
        return max(made.compute_seconds, work.flops / _peak(self.chip, self.model))


def as_priced(made: Candidate) -> Check:
    """The candidate by the search's own estimate, for a step that is laid out as it was priced."""
    return Check(
        by="search",
        wire_bytes=made.wire_bytes,
        memory_bytes=made.memory_bytes,
        seconds=made.seconds,
        axis_bytes=tuple(
            ((axis,), sum(row.wire_bytes for row in made.traffic if row.axis == axis)) for axis in made.mesh.shape
        ),
        compute_seconds=made.compute_seconds,
    )


def estimated(step: Prepared, made: Candidate, chip: chips.Chip, model: CostModel) -> Check:
    """The candidate by the estimate of every operation of the step as it is written; see [`shardfx.estimate`][]."""
    found, flops = step.worked(made.plans, compiler="tpu" if chip.torus_dims else "cpu" if chip == EMULATED else "gpu")
    if made.wire_bytes:
        sending = (made.exposed_seconds + made.hidden_seconds) * found.wire_bytes / made.wire_bytes
    else:
        sending = seconds_of(found, chip, made.mesh).seconds / model.network
    compute = max(made.compute_seconds, flops / _peak(chip, model))
    return Check(
        by="estimate",
        wire_bytes=float(found.wire_bytes),
        memory_bytes=None,
        seconds=_step_seconds(made, compute, sending, model.overlap),
        axis_bytes=_by_axes(found),
        compute_seconds=compute,
    )


def with_check(one: Candidate, check: Check) -> Candidate:
    """The candidate with one more look at it."""
    return dataclasses.replace(one, checks=(*one.checks, check))


def in_order(found: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """By the last look at each."""
    return tuple(sorted(found, key=lambda one: one.checks[-1].seconds))


def promised(one: Candidate) -> float:
    """Seconds by the better of two estimates: of the step as it is, and laid out as it was priced."""
    return min(one.seconds, one.checks[0].seconds)


def promising(found: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """By what they promise: which of the two a program will be like shows once it is compiled."""
    return tuple(sorted(found, key=promised))


def fits(one: Candidate) -> bool:
    """Whether its memory is within the limit by the last look."""
    return (one.checks[-1].memory_bytes or 0) <= one.limit_bytes


def fitting(found: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Those whose memory is within the limit by the last look; where none is, the one that takes least."""
    return tuple(filter(fits, found)) or tuple(sorted(found, key=lambda one: one.checks[-1].memory_bytes or 0)[:1])


def devices_for(verify: Any, asked: Asked, given: Sequence[Any] | None) -> tuple[Any, ...]:
    """The devices to compile for: those that were given, the slice's where libtpu describes it, or JAX's own."""
    count, target = asked.total, asked.target
    if not isinstance(verify, str):
        for_these = tuple(verify)
        if len(for_these) != count:
            raise MeshError(f"`verify` has {len(for_these)} devices, but the search is for {count}; give as many.")
        return for_these
    if verify not in ("compile", "run"):
        raise MeshError(f'`verify={verify!r}` is not "compile", "run", or the devices to compile for.')
    if given is not None:
        return tuple(given)
    if verify == "compile" and target is not None and has_libtpu():
        return tpu.devices_of(target, num_slices=asked.targets)
    known = jax.devices()
    if len(known) < count:
        raise MeshError(
            f'`verify="{verify}"` needs {count} devices, and there are {len(known)}; emulate them with '
            f'`jax.config.update("jax_num_cpu_devices", {count})` before JAX is used, or give those of a slice: '
            '`verify=shardfx.interop.tpu.devices_of("tpu:v5e:4x4")`.'
        )
    return tuple(known[:count])


def has_libtpu() -> bool:
    """Whether the TPU's compiler is installed."""
    return importlib.util.find_spec("libtpu") is not None


def _refused(made: Candidate, error: OutOfMemoryError) -> Check:
    """A look at a candidate whose program the compiler refuses: there is nothing to read but that it does not fit."""
    held = max(error.needed_bytes or 0, made.limit_bytes + 1)
    return dataclasses.replace(as_priced(made), by="compile", memory_bytes=held)


def _rank(one: Candidate) -> tuple[bool, float, bool]:
    return not fits(one), one.checks[-1].seconds, one.laid_out


def _is_astray(looked: Candidate) -> bool:
    """Whether a program sends clearly more than it should: laid out, than was priced; else, than it could at best."""
    best = looked.wire_bytes if looked.laid_out else min(looked.wire_bytes, looked.checks[0].wire_bytes)
    return looked.checks[-1].wire_bytes > _ASTRAY * best


def _is_data(one: Candidate) -> bool:
    """Whether no parameter is cut: then the compiler has nothing to get wrong."""
    return all(names == ("batch",) for _, names in one.roles)


def _step_seconds(made: Candidate, compute: float, sending: float, overlap: float) -> float:
    """Computation, and of the sending what it does not hide: as large a part of it can be hidden as estimated."""
    whole = made.exposed_seconds + made.hidden_seconds
    hidden = sending * made.hidden_seconds / whole if whole else 0.0
    return compute + (sending - hidden) + max(0.0, hidden - overlap * compute)


def _peak(chip: chips.Chip, model: CostModel) -> float:
    """Operations of products in a second of one device."""
    return float(chip.flops("bfloat16")) / chip.devices_per_chip * model.compute


def _by_axes(found: Traffic) -> tuple[tuple[tuple[str, ...], float], ...]:
    sums: dict[tuple[str, ...], float] = {}
    for row in found.rows:
        sums[row.axes] = sums.get(row.axes, 0.0) + row.wire_bytes
    return tuple(sums.items())


def _clock(chip: chips.Chip) -> float:
    """Cycles per second of a TPU's core, from its peak: each of its units makes 128 x 128 products in a cycle."""
    units = _UNITS.get(chip.name)
    return float(chip.flops("bfloat16")) / (units * 2) if units else 0.0


def _as_they_came(step: Any, args: Sequence[Any], plans: Sequence[ShardPlan]) -> Any:
    """The plans of the results: those that have the structure and shapes of an argument leave as it came."""
    made = eqx.filter_eval_shape(step, *args)
    shapes = [_shapes(arg) for arg in args]

    def of(result: Any) -> Any:
        found = _shapes(result)
        return plans[shapes.index(found)] if found in shapes else None

    if (whole := of(made)) is not None:
        return whole
    return tuple(map(of, made)) if isinstance(made, tuple) else None


def _shapes(tree: Any) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, [(leaf.shape, leaf.dtype) for leaf in leaves if _is_shaped(leaf)]


def _is_shaped(leaf: Any) -> bool:
    return eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def _filled(arg: Any, plan: ShardPlan) -> Any:
    """Arrays for an argument, each made in its shards. What they hold does not matter to the clock."""
    structs, rest = eqx.partition(arg, _is_shaped)
    make = filter_jit(lambda: jax.tree.map(_value, structs), out_shardings=plan)
    return eqx.combine(make(), rest)


def _value(struct: Any) -> jax.Array:
    if jnp.issubdtype(struct.dtype, jax.dtypes.prng_key):
        made = (jax.random.key(0, impl=kind) for kind in ("threefry2x32", "rbg", "unsafe_rbg"))
        return jnp.broadcast_to(next(key for key in made if key.dtype == struct.dtype), struct.shape)
    if jnp.issubdtype(struct.dtype, jnp.inexact):
        return jnp.full(struct.shape, 0.01, struct.dtype)
    return jnp.zeros(struct.shape, struct.dtype)


def _wait(result: Any) -> None:
    jax.block_until_ready(eqx.filter(result, eqx.is_array))
