"""Candidates measured by their compiled programs or by running them."""

import dataclasses
import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .._arrays import filter_jit
from .._ground.errors import MeshError, OutOfMemoryError
from .._plan import ShardPlan
from ..cost import compare, compile_for, traffic
from ..cost._compile_for import memory_of
from ..cost._hlo_text import parse_hlo
from ..cost._work import work_of
from ..interop import tpu
from ._asked import SearchOptions
from ._candidate import Candidate, rank
from ._constrain_step import constrain_step
from ._priced import Pricer, timed


Tell = Callable[[str], None]
# The number of rounds in which candidates run in turn, and the steps in each turn.
_ROUNDS, _STEPS = 3, 3


def measured(
    pricer: Pricer, ones: Sequence[Candidate], devices: Sequence[object], tell: Tell, *, runs: bool
) -> list[Candidate]:
    """The candidates with the traffic, work and memory of their compiled programs; those that fit first, the fastest
    first.

    If the candidates run, they run in turn on the devices, and each also gets the median seconds of its steps.
    Candidates that do not fit are then left out.
    """
    looked: list[tuple[Candidate, Any]] = []
    for number, one in enumerate(ones, start=1):
        tell(f"compiling candidate {number} of {len(ones)}: {one.title}")
        mesh = one.mesh.build(devices)
        try:
            if runs:
                program = jitted(pricer, one, [plan.on(mesh) for plan in one.plans]).lower(*pricer.args).compile()
            else:
                program = compile_for(jitted(pricer, one, one.plans), *pricer.args, target=mesh)
        except OutOfMemoryError as error:
            held = max(error.needed_bytes or 0, one.limit_bytes + 1)
            looked.append((dataclasses.replace(one, by="compile", memory_bytes=held), None))
            continue
        looked.append((_read(pricer, one, program), program))
    kept = [(one, program) for one, program in looked if one.fits]
    if not runs or not kept:
        return sorted((one for one, _ in looked), key=rank)
    return _ran(pricer, kept, devices, tell)


def _ran(
    pricer: Pricer, kept: Sequence[tuple[Candidate, Any]], devices: Sequence[object], tell: Tell
) -> list[Candidate]:
    """The candidates with the median time of their steps, the fastest first."""
    taken: list[list[float]] = [[] for _ in kept]
    order = list(range(len(kept)))
    for turn in range(_ROUNDS):
        for number in order if turn % 2 else reversed(order):
            tell(f"running candidate {number + 1} of {len(kept)}, round {turn + 1} of {_ROUNDS}")
            taken[number] += _timed(pricer.args, devices, *kept[number])
        # Only the faster half can still contain the fastest.
        order = sorted(order, key=lambda number: statistics.median(taken[number]))[: max(2, (len(order) + 1) // 2)]
    found = [
        dataclasses.replace(one, by="run", seconds=statistics.median(times))
        for (one, _), times in zip(kept, taken, strict=True)
    ]
    return sorted(found, key=rank)


def devices_for(verify: str, asked: SearchOptions, given: Sequence[object] | None) -> tuple[Any, ...]:
    """The devices to compile for: the given ones, those of the slice if libtpu describes it, or JAX's own."""
    count, target = asked.total, asked.target
    if given is not None:
        return tuple(given)
    if verify == "compile" and target is not None and importlib.util.find_spec("libtpu"):
        return tpu.devices_of(target, num_slices=asked.targets)
    known = jax.devices()
    if len(known) < count:
        raise MeshError(
            f'`verify="{verify}"` needs {count} devices, and there are {len(known)}; emulate them with '
            f'`jax.config.update("jax_num_cpu_devices", {count})` before JAX is used, or give those of a slice: '
            '`devices=shardfx.interop.tpu.devices_of("tpu:v5e:4x4")`.'
        )
    return tuple(known[:count])


def _read(pricer: Pricer, one: Candidate, program: Any) -> Candidate:
    """The candidate with the numbers of its compiled program."""
    sent = traffic(program, one.mesh)
    work = work_of(parse_hlo(program.as_text()))
    return dataclasses.replace(
        timed(one, sent, work, pricer.chip, pricer.model),
        by="compile",
        memory_bytes=memory_of(program).needed_bytes,
        comparison=compare(one.traffic, sent),
    )


def jitted(pricer: Pricer, one: Candidate, plans: Sequence[ShardPlan]) -> Any:
    """The step jitted under these plans, as `code()` writes it."""
    step = constrain_step(pricer.step, plans[0].jax_mesh or one.mesh, one.rules) if one.constrained else pricer.step
    results = tuple(None if which is None else plans[which] for which in one.results)
    out = results[0] if len(results) == 1 else results
    return filter_jit(step, in_shardings=tuple(plans), out_shardings=out, donate=one.donated)


def _timed(args: Sequence[PyTree], devices: Sequence[object], one: Candidate, program: Any) -> list[float]:
    """The seconds of several steps. Only the arrays of the candidate at hand are on the devices."""
    plans = [plan.on(one.mesh.build(devices)) for plan in one.plans]
    taken = []
    for turn in range(_STEPS + 1):
        # A step may reuse the memory of its arguments.
        values = [_filled(arg, plan) for arg, plan in zip(args, plans, strict=True)]
        _wait(values)
        begin = time.perf_counter()
        _wait(program(*values))
        taken += [time.perf_counter() - begin] if turn else []
    return taken


def _filled(arg: PyTree, plan: ShardPlan) -> PyTree:
    """Arrays for an argument, each made in its shards. Their values do not matter to the timing."""
    structs, rest = eqx.partition(arg, lambda leaf: eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct))
    make = filter_jit(lambda: jax.tree.map(_value, structs), out_shardings=plan)
    return eqx.combine(make(), rest)


def _value(struct: Any) -> jax.Array:
    if jnp.issubdtype(struct.dtype, jax.dtypes.prng_key):
        made = (jax.random.key(0, impl=kind) for kind in ("threefry2x32", "rbg", "unsafe_rbg"))
        return jnp.broadcast_to(next(key for key in made if key.dtype == struct.dtype), struct.shape)
    if jnp.issubdtype(struct.dtype, jnp.inexact):
        return jnp.full(struct.shape, 0.01, struct.dtype)
    return jnp.zeros(struct.shape, struct.dtype)


def _wait(result: PyTree) -> None:
    jax.block_until_ready(eqx.filter(result, eqx.is_array))
