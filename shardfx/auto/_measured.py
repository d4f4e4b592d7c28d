"""Candidates that are compiled for devices, and run on them if the caller wants it."""

import dataclasses
import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .._arrays import filter_jit
from .._ground.errors import MeshError, OutOfMemoryError
from .._ground.keys import is_key
from .._plan import ShardPlan
from .._step import parse_hlo
from ..cost import compare, compile_for, traffic
from ..cost._compile_for import compiled, memory_of
from ..cost._work import work_of
from ..interop import tpu
from ._asked import SearchOptions
from ._candidate import Candidate, rank
from ._programs import LoweredStep, Tell, jitted, timed, work_seconds


# The number of rounds in which candidates run in turn, and the number of timed steps in
# each turn.
_ROUNDS = 3
_STEPS = 3


class _Compiled(NamedTuple):
    """A candidate with the costs of its compiled program, and the program; `None` for
    one that the compiler refused, since it does not fit.
    """

    candidate: Candidate
    program: Any


def measured(
    lowered: LoweredStep,
    candidates: Sequence[Candidate],
    devices: Sequence[object],
    tell: Tell,
    *,
    runs: bool,
) -> list[Candidate]:
    """The candidates with the traffic, memory and time of their programs, compiled for
    `devices`.

    Candidates that fit in memory come first, the fastest first. With `runs`, candidates
    that fit also run on the devices, in turn, and get the median seconds of their
    steps; the others are left out, unless none fits.
    """
    programs: list[_Compiled] = []
    for number, candidate in enumerate(candidates, start=1):
        tell(f"compiling candidate {number} of {len(candidates)}: {candidate.title}")
        mesh = candidate.mesh.build(devices)
        try:
            if runs:
                plans = [plan.on(mesh) for plan in candidate.plans]
                step = jitted(lowered, candidate, plans)
                program = compiled(step.lower(*lowered.args))
            else:
                step = jitted(lowered, candidate, candidate.plans)
                program = compile_for(step, *lowered.args, target=mesh)
        except OutOfMemoryError as error:
            needed_bytes = max(error.needed_bytes or 0, candidate.limit_bytes + 1)
            too_large = dataclasses.replace(
                candidate,
                by="compile",
                memory_bytes=needed_bytes,
            )
            programs.append(_Compiled(too_large, None))
            continue
        with_costs = _with_costs_of(program, candidate, lowered)
        programs.append(_Compiled(with_costs, program))
    fitting = [each for each in programs if each.candidate.fits]
    if runs and fitting:
        return _run_in_turn(lowered, fitting, devices, tell)
    return sorted([each.candidate for each in programs], key=rank)


def _with_costs_of(
    program: Any,
    candidate: Candidate,
    lowered: LoweredStep,
) -> Candidate:
    """The candidate with the traffic, memory and time of its compiled program.
    `lowered` has the chip, and the assumptions of its times.
    """
    sent = traffic(program, candidate.mesh)
    work = work_of(parse_hlo(program.as_text()))
    compute_seconds = work_seconds(work, lowered.chip, lowered.model)
    with_times = timed(
        candidate=candidate,
        sent=sent,
        compute_seconds=compute_seconds,
        chip=lowered.chip,
        model=lowered.model,
    )
    return dataclasses.replace(
        with_times,
        by="compile",
        memory_bytes=memory_of(program).needed_bytes,
        comparison=compare(candidate.traffic, sent),
    )


def _run_in_turn(
    lowered: LoweredStep,
    programs: Sequence[_Compiled],
    devices: Sequence[object],
    tell: Tell,
) -> list[Candidate]:
    """Runs the programs of candidates in turn. Returns the candidates with the median
    seconds of a step, the fastest first. `programs` has each candidate with its
    compiled program.
    """
    taken_seconds: list[list[float]] = [[] for _ in programs]

    def median_seconds(number: int) -> float:
        """The median of the steps that a candidate has run so far."""
        return statistics.median(taken_seconds[number])

    # Each candidate's arguments are made by the same programs before every run.
    makers = [_makers_of(lowered.args, devices, each.candidate) for each in programs]
    # The candidates that still run, by number.
    order = list(range(len(programs)))
    for turn in range(_ROUNDS):
        for number in order if turn % 2 else reversed(order):
            tell(
                f"running candidate {number + 1} of {len(programs)}, round {turn + 1} of"
                f" {_ROUNDS}"
            )
            program = programs[number].program
            taken_seconds[number] += _run_seconds(program, makers[number])
        # Only the faster half can still contain the fastest.
        remaining = max(2, (len(order) + 1) // 2)
        order = sorted(order, key=median_seconds)[:remaining]

    candidates = []
    for number, each in enumerate(programs):
        with_seconds = dataclasses.replace(
            each.candidate,
            by="run",
            seconds=median_seconds(number),
        )
        candidates.append(with_seconds)
    return sorted(candidates, key=rank)


def devices_for(
    verify: str,
    options: SearchOptions,
    devices: Sequence[object] | None,
) -> tuple[Any, ...]:
    """The devices to compile for: `devices`, or JAX's own devices if it is `None`. Under
    `verify="compile"`, if the caller named a slice and libtpu is installed, the devices
    of this slice replace JAX's own. Raises `MeshError` if JAX has too few.
    """
    if devices is not None:
        return tuple(devices)
    count = options.total
    target = options.target
    can_compile = verify == "compile" and importlib.util.find_spec("libtpu")
    if can_compile and target is not None:
        return tpu.devices_of(target, num_slices=options.targets)
    jax_devices = jax.devices()
    if len(jax_devices) < count:
        raise MeshError(
            f'`verify="{verify}"` needs {count} devices, and there are {len(jax_devices)};'
            f' emulate them with `jax.config.update("jax_num_cpu_devices", {count})`'
            " before JAX is used, or give those of a slice:"
            ' `devices=shardfx.interop.tpu.devices_of("tpu:v5e:4x4")`.'
        )
    return tuple(jax_devices[:count])


def _run_seconds(program: Any, makers: Sequence[Callable[[], PyTree]]) -> list[float]:
    """The seconds of several runs of a compiled program. `makers` make its arguments."""

    def seconds_of_run() -> float:
        """The seconds of one run, without those that make its arrays."""
        # A step may reuse the memory of its arguments.
        values = [make() for make in makers]
        _wait(values)
        begin = time.perf_counter()
        _wait(program(*values))
        return time.perf_counter() - begin

    seconds_of_run()  # the first one is slower
    return [seconds_of_run() for _ in range(_STEPS)]


def _makers_of(
    args: Sequence[PyTree],
    devices: Sequence[object],
    candidate: Candidate,
) -> list[Callable[[], PyTree]]:
    """For each argument of a step, the function that makes it for a candidate."""
    mesh = candidate.mesh.build(devices)
    plans = [plan.on(mesh) for plan in candidate.plans]
    return list(map(_maker_of, args, plans))


def _maker_of(arg: PyTree, plan: ShardPlan) -> Callable[[], PyTree]:
    """A function that returns the argument `arg` with arrays of a constant in the place
    of its `jax.ShapeDtypeStruct`s, sharded by the plan. Its program is compiled once.
    """
    structs, rest = eqx.partition(
        arg, lambda leaf: eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)
    )
    constants = filter_jit(lambda: jax.tree.map(_constant, structs), out_shardings=plan)
    return lambda: eqx.combine(constants(), rest)


def _constant(struct: Any) -> jax.Array:
    """An array of this shape and dtype: a small float, 0, or keys of the seed 0."""
    if is_key(struct.dtype):
        for kind in ("threefry2x32", "rbg", "unsafe_rbg"):
            key = jax.random.key(0, impl=kind)
            if key.dtype == struct.dtype:
                return jnp.broadcast_to(key, struct.shape)
    if jnp.issubdtype(struct.dtype, jnp.inexact):
        return jnp.full(struct.shape, 0.01, struct.dtype)
    return jnp.zeros(struct.shape, struct.dtype)


def _wait(result: PyTree) -> None:
    """Waits until all arrays of a tree are computed."""
    jax.block_until_ready(eqx.filter(result, eqx.is_array))
