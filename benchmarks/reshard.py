"""Moving one array between two shardings: single moves as races, and a census over all pairs of shardings."""

import argparse
import functools as ft
import itertools as it
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from shardfx._collective import choose, live_program, lowered, move, steps_program
from shardfx._hlo import wire_bytes
from shardfx._layout import Layout
from shardfx._redistribute import layout, redistribute
from shardfx._reshard import reshard

from ._case import Case, Entry, Finding, Limit, Race, Rival, Skip, Value, memcpy
from ._machine import fresh_process
from ._runner import Options
from ._simulate import pieces, simulate


SUMMARY = "one array from one sharding to another, against XLA's own program and the field's shard functions"
MESHES = {
    16: ((16,), (4, 4), (2, 8), (8, 2), (2, 2, 4), (4, 2, 2), (2, 4, 2)),
    64: ((64,), (8, 8), (4, 16), (16, 4), (4, 4, 4), (2, 8, 4), (2, 4, 8)),
}
# Case number, source spec, target spec, on a mesh (x=2, y=4).
ALPA = (
    (1, P("x"), P("x")),
    (2, P(), P("x")),
    (3, P(None, "x"), P("x")),
    (4, P(None, ("x", "y")), P(("x", "y"))),
    (5, P("y"), P("x")),
    (9, P(None, "x"), P(None, None, "x")),
)
# Pointers of tuples and scalars are allocations, but no copies of the array.
SLACK_BYTES = 4096


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--census", action="store_true", help="hundreds of pairs instead of dozens")
    parser.add_argument("--pairs", type=int, help="how many pairs the census compiles")
    parser.add_argument("--aot", metavar="tpu:TOPOLOGY", help="census with the TPU compiler, as in tpu:v5e:4x4")


def cases(options: Options) -> list[Entry]:
    flags = options.flags
    if flags.aot:
        return [_census(flags.pairs or (10 if options.quick else 150), flags.aot)]
    pairs = flags.pairs or (8 if options.quick else 400 if flags.census else 60)
    return [
        *([] if flags.census else _races(options)),
        *[_planning(devices, 60 if options.quick else 300) for devices in (16, 64, 512, 4096)],
        _seen_before(),
        *([_all_pairs()] if flags.census else []),
        _census(pairs, None),
    ]


def _races(options: Options) -> list[Entry]:
    count = len(options.devices)
    if count < 8:
        return [Skip("single moves", f"they need 8 devices, and there are {count}")]
    devices = np.array(options.devices[:8])
    mesh = Mesh(devices.reshape(2, 4), ("x", "y"))
    shape = (32 if options.quick else 256, 1024, 128)
    wide, flat = Mesh(devices.reshape(4, 2), ("x", "y")), Mesh(devices, ("z",))
    moves = [(f"alpa case {number}", NamedSharding(mesh, src), NamedSharding(mesh, dst)) for number, src, dst in ALPA]
    moves += [
        ("jax#21562", NamedSharding(wide, P("y", None, "x")), NamedSharding(wide, P(None, ("x", "y")))),
        ("another mesh", NamedSharding(mesh, P("y", "x")), NamedSharding(flat, P(None, None, "z"))),
    ]
    return [
        Case(f"{name}, {math.prod(shape) * 4 // 2**20} MiB", ft.partial(_race, shape, src, dst))
        for name, src, dst in moves
    ]


def _race(shape: tuple[int, ...], src: NamedSharding, dst: NamedSharding) -> Race:
    values = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    plan = redistribute(shape, 32, *_ends(src, dst, len(shape)))

    def right(_: Any, result: jax.Array) -> None:
        assert result.sharding.is_equivalent_to(dst, result.ndim), f"{result.sharding} instead of {dst}"
        for shard in result.addressable_shards:
            np.testing.assert_array_equal(shard.data, values[shard.index])

    return Race(
        rivals=(
            Rival("shardfx", lambda: lambda x: reshard(x, dst), right),
            Rival("shardfx inside jit", lambda: lambda x: move(x, dst), right),
            Rival("jax.jit", lambda: jax.jit(lambda x: x, in_shardings=src, out_shardings=dst), right),
            Rival("jax.device_put", lambda: lambda x: jax.device_put(x, dst), right),
            Rival("eformer", lambda: _eformer(dst), right, ("eformer",)),
            Rival("scalax", lambda: _scalax(dst), right, ("scalax",)),
        ),
        fresh=lambda: jax.block_until_ready(_placed(values, src)),
        byte_count=values.nbytes,
        floor=memcpy(values.nbytes),
        facts={
            "steps": " ".join(step.kind for step in plan.steps) or "none",
            "wire bytes": plan.wire_bytes,
            "lower bound": plan.lower_bound_bytes,
            "program": choose(shape, np.dtype("float32"), src, dst).how,
        },
    )


def _eformer(dst: NamedSharding) -> Callable[[Any], Any]:
    from eformer.escale import make_shard_and_gather_fns

    return make_shard_and_gather_fns({"x": dst.spec}, dst.mesh)[0]["x"]  # pyright: ignore[reportArgumentType]


def _scalax(dst: NamedSharding) -> Callable[[Any], Any]:
    from scalax.sharding import MeshShardingHelper

    helper = MeshShardingHelper(tuple(dst.mesh.shape.values()), dst.mesh.axis_names)
    return helper.make_shard_and_gather_fns({"x": 0}, {"x": dst.spec})[0]["x"]


def _placed(values: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index].copy())


def _ends(src: NamedSharding, dst: NamedSharding, rank: int) -> tuple[Layout, Layout]:
    return layout(src.mesh, src.spec, rank), layout(dst.mesh, dst.spec, rank)


def all_layouts(sizes: tuple[int, ...], rank: int = 2) -> list[Layout]:
    """Every layout on one mesh: each axis cuts one dimension or none, in every order."""
    found = []
    for where in it.product(range(rank + 1), repeat=len(sizes)):
        groups = [[axis for axis, dim in enumerate(where) if dim == wanted] for wanted in range(rank)]
        found += [Layout(sizes, dims) for dims in it.product(*map(it.permutations, groups))]
    return found


def _planning(devices: int, count: int) -> Finding:
    limit = {16: 20, 64: 200, 512: 200, 4096: 200}[devices]
    return Finding(
        f"planning {count} random moves on {devices:,} devices",
        lambda: _planning_times(devices, count),
        (Limit("worst cold ms of processor time", at_most=limit),),
    )


def _planning_times(devices: int, count: int) -> dict[str, Value]:
    rng, times, ratios = random.Random(devices), [], []
    for _ in range(count):
        rank = rng.choice((2, 2, 3))
        src, dst = _random_layout(rng, devices, rank), _random_layout(rng, devices, rank)
        begin = time.process_time()
        plan = redistribute((65536,) * rank, 16, src, dst)
        times.append(1e3 * (time.process_time() - begin))
        ratios.append(plan.wire_bytes / plan.lower_bound_bytes if plan.lower_bound_bytes else 1.0)
    return {
        "median cold ms": statistics.median(times),
        "worst cold ms of processor time": max(times),
        "mean of wire over lower bound": statistics.mean(ratios),
        "worst wire over lower bound": max(ratios),
    }


def _random_layout(rng: random.Random, devices: int, rank: int) -> Layout:
    """One to three axes of powers of two, each on a random dimension or on none."""
    power = devices.bit_length() - 1
    cuts = [0, *sorted(rng.sample(range(1, power), rng.choice((0, 1, 2, 2)))), power]
    dims: list[list[int]] = [[] for _ in range(rank + 1)]
    for axis in rng.sample(range(len(cuts) - 1), len(cuts) - 1):
        dims[rng.randrange(rank + 1)].append(axis)
    sizes = tuple(2 ** (b - a) for a, b in it.pairwise(cuts))
    return Layout(sizes, tuple(map(tuple, dims[:rank])))


def _seen_before() -> Finding:
    def measure() -> dict[str, Value]:
        order = tuple(random.Random(0).sample(range(4096), 4096))
        src, dst = Layout((16, 256), ((0,), (1,))), Layout((64, 64), ((1,), (0,)), order)
        src = Layout(src.sizes, src.dims, tuple(range(4096)))
        redistribute((65536, 65536), 16, src, dst)
        begin = time.perf_counter()
        for _ in range(1000):
            redistribute((65536, 65536), 16, src, dst)
        return {"us per look-up": 1e3 * (time.perf_counter() - begin)}

    return Finding("a move of 4,096 devices planned before", measure, (Limit("us per look-up", at_most=50),))


def _all_pairs() -> Finding:
    """Plans every pair of shardings on 16 devices and runs its steps over NumPy arrays."""

    def measure() -> dict[str, Value]:
        ends = [end for sizes in MESHES[16] for end in all_layouts(sizes)]
        array = np.arange(16 * 16).reshape(16, 16)
        right = {end: pieces(array, end, end) for end in ends}
        ratios, wire, bound, most = [], 0, 0, 0
        for src, dst in it.product(ends, ends):
            plan = redistribute(array.shape, 64, src, dst)
            held: Sequence[np.ndarray] = right[src]
            for step in plan.steps:
                held = simulate(array, held, step, src)
            wrong = [index for index, (a, b) in enumerate(zip(held, right[dst], strict=True)) if not (a == b).all()]
            assert not wrong, f"{src} to {dst}: devices {wrong} hold something else"
            wire, bound = wire + plan.wire_bytes, bound + plan.lower_bound_bytes
            most = max(most, len(plan.steps))
            if plan.lower_bound_bytes:
                ratios.append(plan.wire_bytes / plan.lower_bound_bytes)
        return {
            "pairs": len(ends) ** 2,
            "wrong": 0,
            "wire over lower bound": wire / bound,
            "median of the ratio": statistics.median(ratios),
            "worst ratio": max(ratios),
            "most steps": most,
        }

    return Finding("all pairs on 16 devices, simulated", measure, (Limit("wire over lower bound", at_most=1.25),))


def _census(pairs: int, aot: str | None) -> Finding:
    where = f"the {aot.removeprefix('tpu:')} compiler" if aot else "16 emulated CPU devices"
    limits = [
        Limit("shardfx: worst temporary over shard", at_most=2.0 if aot else 3.0),
        Limit("pairs with more wire bytes than XLA", at_most=0),
        Limit("shardfx: wire over lower bound", at_most=1.25),
    ]
    if not aot:
        limits += [
            Limit("speedup where XLA rematerializes (geometric mean)", at_least=3.0),
            Limit("speedup elsewhere (geometric mean)", at_least=1 / 1.1),
        ]
    return Finding(
        f"census of {pairs} random pairs, {where}",
        lambda: fresh_process("benchmarks.reshard:census", {"pairs": pairs, "aot": aot}, timeout_seconds=7200),
        tuple(limits),
    )


def census(pairs: int, aot: str | None) -> Mapping[str, Value]:
    """XLA's program against the chosen one over random pairs of shardings; run in a process of its own."""
    devices = _topology(aot) if aot else _emulated(16)
    shape, dtype = ((8192, 8192), jnp.dtype(jnp.bfloat16)) if aot else ((2048, 2048), np.dtype(np.float32))
    rng, rows = random.Random(21562), []
    ends = [_sharding(devices, end) for sizes in MESHES[len(devices)] for end in all_layouts(sizes)]
    while len(rows) < pairs:
        src, dst = rng.choice(ends), rng.choice(ends)
        choice = choose(shape, dtype, src, dst)
        if choice.how != "none":
            rows.append(_row(shape, dtype, src, dst, run=not aot))
    return _summary(rows)


def _topology(aot: str) -> np.ndarray:
    # Else libtpu looks for a metadata server for minutes, and refuses a second process beside the first.
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    jax.config.update("jax_platforms", "cpu")
    from jax.experimental import topologies

    platform, _, name = aot.partition(":")
    found = topologies.get_topology_desc(platform=platform, topology_name=name).devices
    return np.array(found)[: max(size for size in MESHES if size <= len(found))]


def _emulated(count: int) -> np.ndarray:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)
    return np.array(jax.devices())


def _sharding(devices: np.ndarray, end: Layout) -> NamedSharding:
    mesh = Mesh(devices.reshape(end.sizes), tuple("abc"[: len(end.sizes)]))
    return NamedSharding(mesh, P(*[tuple("abc"[axis] for axis in axes) or None for axes in end.dims]))


def _row(shape: tuple[int, ...], dtype: Any, src: NamedSharding, dst: NamedSharding, *, run: bool) -> dict[str, float]:
    choice = choose(shape, dtype, src, dst)
    jax.clear_caches()
    begin = time.perf_counter()
    theirs = lowered(lambda x: x, shape, dtype, src, dst).compile()
    middle = time.perf_counter()
    ours = theirs
    if choice.how == "steps":
        ours = lowered(steps_program(shape, dtype, src, dst), shape, dtype, src, dst).compile()
    end = time.perf_counter()
    shard = max(math.prod(s.shard_shape(shape)) for s in (src, dst)) * dtype.itemsize
    row = {"shard": float(shard), "bound": float(choice.plan.lower_bound_bytes)}
    row |= {"compile.xla": middle - begin, "compile.ours": end - middle if choice.how == "steps" else middle - begin}
    for name, compiled in (("xla", theirs), ("ours", ours)):
        row[f"temp.{name}"] = compiled.memory_analysis().temp_size_in_bytes
        row[f"wire.{name}"] = float(wire_bytes(compiled.as_text(), src.mesh.size))
    return row | (_times(shape, dtype, src, dst, choice.how) if run else {})


def _times(shape: tuple[int, ...], dtype: Any, src: NamedSharding, dst: NamedSharding, how: str) -> dict[str, float]:
    values = np.arange(math.prod(shape), dtype=dtype).reshape(shape)
    x = _placed(values, src)
    programs = {
        "xla": jax.jit(lambda x: x, in_shardings=src, out_shardings=dst),
        "ours": live_program(shape, dtype, src, dst),
    }
    for program in programs.values():
        for shard in program(x).addressable_shards:
            np.testing.assert_array_equal(shard.data, values[shard.index])
    if how == "xla":
        return {"speedup": 1.0}
    # Each ratio is of two runs side by side, so that whatever else the machine does slows both.
    ratios = []
    for repeat in range(11):
        taken = {}
        for name in sorted(programs, reverse=bool(repeat % 2)):
            begin = time.perf_counter()
            jax.block_until_ready(programs[name](x))
            taken[name] = time.perf_counter() - begin
        ratios.append(taken["xla"] / taken["ours"])
    return {"speedup": statistics.median(ratios)}


def _summary(rows: list[dict[str, float]]) -> dict[str, Value]:
    over = {name: [row for row in rows if row[f"temp.{name}"] > 2 * row["shard"] + SLACK_BYTES] for name in _BOTH}
    bound = sum(row["bound"] for row in rows)
    ratios = [row["wire.ours"] / row["bound"] for row in rows if row["bound"]]
    values: dict[str, Value] = {"pairs": len(rows)}
    for name, text in _BOTH.items():
        worst = max((row[f"temp.{name}"] - SLACK_BYTES) / row["shard"] for row in rows)
        values[f"{text}: share above 2x the shard"] = len(over[name]) / len(rows)
        values[f"{text}: worst temporary over shard"] = max(worst, 0.0)
        values[f"{text}: wire over lower bound"] = sum(row[f"wire.{name}"] for row in rows) / bound
        values[f"{text}: median seconds to compile"] = statistics.median(row[f"compile.{name}"] for row in rows)
    values["shardfx: median of wire over lower bound"] = statistics.median(ratios)
    values["shardfx: worst wire over lower bound"] = max(ratios)
    more = [row for row in rows if row["wire.ours"] > row["wire.xla"] + 1]
    values["pairs with more wire bytes than XLA"] = len(more)
    if "speedup" in rows[0]:
        apart = {True: [], False: []}
        for row in rows:
            apart[row in over["xla"]].append(row["speedup"])
        for rematerializes, text in ((True, "where XLA rematerializes"), (False, "elsewhere")):
            if apart[rematerializes]:
                values[f"speedup {text} (geometric mean)"] = statistics.geometric_mean(apart[rematerializes])
        values["least speedup elsewhere"] = min(apart[False], default=1.0)
    return values


_BOTH = {"xla": "XLA", "ours": "shardfx"}
