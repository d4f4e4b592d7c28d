"""XLA's own program against the chosen one over random pairs of shardings: memory, traffic, compile and run time."""

import math
import os
import random
import statistics
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from shardfx._collective import choose, live_program, lowered, steps_program
from shardfx._hlo import wire_bytes

from ._case import Value
from ._pairs import MESHES, emulated, every_layout, placed, sharding_of


# Pointers of tuples and scalars are allocations, but no copies of the array.
SLACK_BYTES = 4096


def census(pairs: int, aot: str | None) -> Mapping[str, Value]:
    """XLA's program against the chosen one over random pairs of shardings; run in a process of its own."""
    devices = _topology(aot) if aot else emulated(16)
    shape, dtype = ((8192, 8192), jnp.dtype(jnp.bfloat16)) if aot else ((2048, 2048), np.dtype(np.float32))
    rng, rows = random.Random(21562), []
    ends = [sharding_of(devices, end) for end in every_layout(len(devices))]
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
    x = placed(values, src)
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
