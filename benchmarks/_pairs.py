"""All pairs of shardings of a matrix on 16 devices: their plans over NumPy arrays, and
their programs on devices.
"""

import functools as ft
import itertools as it
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from shardfx._reshard.flight import carry_out
from shardfx._reshard.move import move_of
from shardfx._reshard.mover import reshard
from shardfx._reshard.steps.layout import StepLayout
from shardfx._reshard.steps.redistribution import redistribute

from ._case import Value
from ._machine import fresh_process
from ._progress import Progress
from ._simulate import pieces, simulate


MESHES = {
    16: ((16,), (4, 4), (2, 8), (8, 2), (2, 2, 4), (4, 2, 2), (2, 4, 2)),
    64: ((64,), (8, 8), (4, 16), (16, 4), (4, 4, 4), (2, 8, 4), (2, 4, 8)),
}
# Large enough that a copy of everything is told from a shard, and small enough that
# only compiling takes time.
_SHAPE = (128, 128)
# Compiled programs are never given back to the system, so that a process runs only so
# many.
_CHUNKS = 24

_HOW = {"steps": "by steps", "relabel": "nothing to do", "in place": "nothing to do"}
Pair = tuple[StepLayout, StepLayout]


def all_layouts(sizes: tuple[int, ...], rank: int = 2) -> list[StepLayout]:
    """Every layout on one mesh: each axis cuts one dimension or none, in every order."""
    layouts = []
    for where in it.product(range(rank + 1), repeat=len(sizes)):
        groups = [
            [axis for axis, dim in enumerate(where) if dim == position]
            for position in range(rank)
        ]
        layouts += [
            StepLayout(sizes, dims)
            for dims in it.product(*map(it.permutations, groups))
        ]
    return layouts


def every_layout(devices: int) -> list[StepLayout]:
    """The layouts on all meshes of so many devices; 183 on 16."""
    return list(it.chain.from_iterable(map(all_layouts, MESHES[devices])))


def sharding_of(devices: np.ndarray, end: StepLayout) -> NamedSharding:
    """A layout on devices, with mesh axes `a`, `b`, `c`."""
    mesh = Mesh(devices.reshape(end.sizes), tuple("abc"[: len(end.sizes)]))
    spec = P(*[tuple("abc"[axis] for axis in axes) or None for axes in end.dims])
    return NamedSharding(mesh, spec)


def emulated(count: int) -> np.ndarray:
    """So many devices that the CPU plays, in a process that has none yet."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)
    return np.array(jax.devices())


def placed(values: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """An array that has never been read: each shard is a new copy."""
    return jax.make_array_from_callback(
        values.shape, sharding, lambda index: values[index].copy()
    )


def simulated() -> dict[str, Value]:
    """Plans every pair and runs its steps over NumPy arrays, by the definition of each
    collective.
    """
    layouts = every_layout(16)
    array = np.arange(16 * 16).reshape(16, 16)
    right = {end: pieces(array, end, end) for end in layouts}
    ratios = []
    wire = 0
    bound = 0
    most = 0
    for src, dst in it.product(layouts, layouts):
        plan = redistribute(array.shape, 64, src, dst)
        held: Sequence[np.ndarray] = right[src]
        for step in plan.steps:
            held = simulate(array, held, step, src)
        wrong = [
            index
            for index, (a, b) in enumerate(zip(held, right[dst], strict=True))
            if not (a == b).all()
        ]
        assert not wrong, f"{src} to {dst}: devices {wrong} hold something else"
        wire = wire + plan.wire_bytes
        bound = bound + plan.lower_bound_bytes
        most = max(most, len(plan.steps))
        if plan.lower_bound_bytes:
            ratios.append(plan.wire_bytes / plan.lower_bound_bytes)
    return {
        "pairs": len(layouts) ** 2,
        "wrong": 0,
        "wire over lower bound": wire / bound,
        "median of the ratio": statistics.median(ratios),
        "worst ratio": max(ratios),
        "most steps": most,
    }


def compiled(part: tuple[int, int]) -> dict[str, Value]:
    """Runs every pair on emulated devices and compares with NumPy, bit by bit.

    **Arguments:**

    - `part`: which share of the pairs, `(1, 1)` for all of them, `(3, 8)` for the third
      eighth.

    **Returns:**

    How many pairs, how many of them wrong, and what was compiled.

    **Raises:**

    `AssertionError` that names the pairs with wrong values or another sharding than
    asked for.
    """
    index, count = part
    chunks = max(_CHUNKS // count, 1)
    progress = Progress("reshard: all pairs", chunks)
    begin = time.perf_counter()
    runs = []
    for chunk in range(chunks):
        progress.begin(f"chunk {chunk + 1}")
        arguments = {"chunk": (index - 1) * chunks + chunk, "chunks": chunks * count}
        runs.append(
            fresh_process(
                "benchmarks._pairs:run_chunk", arguments, timeout_seconds=36000
            )
        )
        progress.end("; ".join(runs[-1]["wrong"]))
    wrong = list(it.chain.from_iterable(run["wrong"] for run in runs))
    assert not wrong, f"{len(wrong)} pairs: {'; '.join(wrong[:10])}"
    totals = {
        key: sum(run[key] for run in runs)
        for key in runs[0]
        if key not in ("wrong", "mappings")
    }
    return {
        "pairs": totals.pop("pairs"),
        "wrong": len(wrong),
        "pairs of distinct placements": totals.pop("distinct"),
        **totals,
        "most mappings of a process": max(run["mappings"] for run in runs),
        "minutes": (time.perf_counter() - begin) / 60,
    }


def run_chunk(chunk: int, chunks: int) -> Mapping[str, Any]:
    """In a process of its own: each of `chunks` takes every so many of the distinct
    pairs, and all that equal them.

    Every pair goes through `reshard`, which on the CPU copies between the shards in its
    memory, and through the programs that accelerators run, compiled here for the CPU.
    """
    # LLVM takes half of the time, and what is tested is neither its work nor its speed.
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
    )
    devices = emulated(16)
    layouts = every_layout(16)
    shardings = {end: sharding_of(devices, end) for end in layouts}
    # Every element has bits of its own, many are NaN.
    bits = np.arange(_SHAPE[0] * _SHAPE[1], dtype=np.uint32) * np.uint32(2654435761)
    values = bits.view(np.float32).reshape(_SHAPE)
    totals: dict[str, int] = dict.fromkeys(
        (*_HOW.values(), "pairs", "distinct", "programs of steps compiled"), 0
    )
    wrong: list[str] = []
    for pairs in it.chain.from_iterable(
        map(_by_steps, _by_placement(layouts)[chunk::chunks])
    ):
        src, dst = (shardings[end] for end in pairs[0])
        move = move_of(_SHAPE, values.dtype, src, dst, copies=False)
        ways: dict[str, Callable[[jax.Array], jax.Array]] = {
            "programs": ft.partial(carry_out, move)
        }
        totals["distinct"] += 1
        totals["pairs"] += len(pairs)
        totals[_HOW[move.how]] += len(pairs)
        totals["programs of steps compiled"] += not move.idle
        for source, there in pairs:
            asked = (shardings[source], shardings[there])
            wrong += _wrong_ways(values, asked, (src, dst), ways)
    count = len(Path("/proc/self/maps").read_text().splitlines())
    return totals | {
        "wrong": wrong,
        "mappings": count,
    }


def _by_placement(layouts: Sequence[StepLayout]) -> list[list[Pair]]:
    """The pairs whose shards are the same on both sides, under whatever names of meshes
    and axes.
    """
    small = np.arange(16 * 16).reshape(16, 16)
    held = {
        end: tuple(piece.tobytes() for piece in pieces(small, end, end))
        for end in layouts
    }
    pairs_by_placement: dict[Any, list[Pair]] = {}
    for src, dst in it.product(layouts, layouts):
        pairs_by_placement.setdefault((held[src], held[dst]), []).append((src, dst))
    return list(pairs_by_placement.values())


def _by_steps(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """Of these, the pairs for which the same steps are planned, so that one program is
    that of all.
    """
    pairs_by_steps: dict[Any, list[Pair]] = {}
    for src, dst in pairs:
        steps = redistribute(_SHAPE, 32, src, dst).steps
        pairs_by_steps.setdefault(steps, []).append((src, dst))
    return list(pairs_by_steps.values())


def _wrong_ways(
    values: np.ndarray,
    asked: tuple[NamedSharding, NamedSharding],
    shared: tuple[NamedSharding, NamedSharding],
    ways: Mapping[str, Callable[[jax.Array], jax.Array]],
) -> list[str]:
    """What is wrong with a pair, way by way. The programs are those of the first pair
    that equals it: the shards are the same, and `reshard` changes the names on either
    side.
    """
    src, dst = asked
    results = {"reshard": reshard(placed(values, src), dst)}
    for name, move in ways.items():
        tree = move(reshard(placed(values, src), shared[0]))
        results[name] = reshard(tree, dst)
    return [
        f"{src.mesh.shape} {src.spec} to {dst.mesh.shape} {dst.spec} by {name}"
        for name, result in results.items()
        if not _is_right(values, result, dst)
    ]


def _is_right(values: np.ndarray, result: jax.Array, dst: NamedSharding) -> bool:
    expected = dst.devices_indices_map(values.shape)
    return (
        result.sharding == dst
        and len(result.addressable_shards) == len(expected)
        and all(
            np.array_equal(
                np.asarray(shard.data).view(np.uint32),
                values[expected[shard.device]].view(np.uint32),
            )
            for shard in result.addressable_shards
        )
    )
