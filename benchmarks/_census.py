"""XLA's own program against the planned steps over random pairs of shardings: memory,
traffic, compile and run time.
"""

import dataclasses
import itertools
import math
import os
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from shardfx import MeshSpec, chips
from shardfx.cost import seconds, traffic

from ._case import Value
from ._pairs import MESHES, emulated, every_layout, placed, sharding_of
from ._programs import lowered, planned, steps_program, wire_bytes


# Pointers of tuples and scalars are allocations, but no copies of the array.
SLACK_BYTES = 4096
# A single move may take this many times as long as XLA's; of those that take longer, so
# many are named.
SLOWER = 1.1
SHOWN = 5
# A program that holds between two of these times the larger shard in temporary memory
# is counted between them.
FACTORS = (0, 0.5, 1, 1.5, 2, 4, 8, 16)
# Arrays whose shards fill no tiles, on 16 or 64 devices: odd widths, GPT-2's
# vocabulary, heads of 80 and of 96.
_ODD = ((6400, 4800), (8256, 4160), (50304, 768), (5120, 64, 80), (4096, 64, 96))


@dataclasses.dataclass(frozen=True)
class Row:
    """A pair of shardings: what XLA's own program costs ("xla") and what the steps do
    ("ours"). `link_seconds` is what `cost.seconds` says of both; it is empty for
    devices without a slice.
    """

    move: str
    steps: str
    shard_bytes: int
    slack_bytes: int
    bound_bytes: int
    temp_bytes: Mapping[str, int]
    wire_bytes: Mapping[str, float]
    compile_seconds: Mapping[str, float]
    link_seconds: Mapping[str, float]
    speedup: float | None

    @property
    def rematerializes(self) -> bool:
        """Whether XLA's program holds more than a step needs."""
        return self.is_above("xla")

    def factor(self, name: str) -> float:
        """How many times the larger shard a program holds in temporary bytes, beside
        what it takes for any size.
        """
        return max(0.0, (self.temp_bytes[name] - self.slack_bytes) / self.shard_bytes)

    def is_above(self, name: str) -> bool:
        """Whether a program takes more than twice the larger shard in temporary bytes."""
        return self.temp_bytes[name] > 2 * self.shard_bytes + self.slack_bytes


def census(
    pairs: int, aot: str | None, odd: bool = False, run: bool = True
) -> Mapping[str, Value]:
    """Compiles, checks and times random pairs of shardings; run in a process of its
    own.

    **Arguments:**

    - `pairs`: how many.
    - `aot`: the compiler that is asked, as in `tpu:v5e:4x4`; or None, and the programs
      run on emulated devices.
    - `odd`: whether shards fill no tiles, instead of those of one large matrix.
    - `run`: whether programs run, which those of a compiler that is asked never do.
    """
    if aot:
        devices = _topology(aot)
        part = chips.parse_slice(aot)
    else:
        devices = emulated(16)
        part = None
    if aot:
        large = ((8192, 8192), jnp.dtype(jnp.bfloat16))
    else:
        large = ((2048, 2048), np.dtype(np.float32))
    if odd:
        dtypes = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))
        kinds = [(shape, dtype) for dtype, shape in itertools.product(dtypes, _ODD)]
    else:
        kinds = [large]
    rng = random.Random(21562)
    rows = []
    layouts = [sharding_of(devices, end) for end in every_layout(len(devices))]
    scratch = _scratch_bytes(devices)
    while len(rows) < pairs:
        shape, dtype = kinds[len(rows) % len(kinds)]
        src = rng.choice(layouts)
        dst = rng.choice(layouts)
        if planned(shape, dtype, src, dst).steps:
            rows.append(
                _row(
                    shape,
                    dtype=dtype,
                    src=src,
                    dst=dst,
                    slack_bytes=SLACK_BYTES + scratch,
                    part=part,
                    run=run and not aot,
                )
            )
    return {"bytes of scratch of a permutation": scratch, **_summary(rows)}


def _topology(aot: str) -> np.ndarray:
    # Else libtpu looks for a metadata server for minutes, and refuses a second process
    # beside the first.
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    jax.config.update("jax_platforms", "cpu")
    from jax.experimental import topologies

    platform, _, name = aot.partition(":")
    devices = topologies.get_topology_desc(
        platform=platform, topology_name=name
    ).devices
    return np.array(devices)[: max(size for size in MESHES if size <= len(devices))]


def _scratch_bytes(devices: np.ndarray) -> int:
    """What the compiler takes for a collective-permute beside the pieces, whatever
    their size: here 1 MiB.
    """
    count = devices.size
    mesh = Mesh(devices.reshape(-1), ("x",))
    rows = NamedSharding(mesh, P("x"))
    turned = jax.shard_map(
        lambda row: lax.ppermute(
            row, "x", [(position, (position + 1) % count) for position in range(count)]
        ),
        mesh=mesh,
        in_specs=P("x"),
        out_specs=P("x"),
    )
    struct = jax.ShapeDtypeStruct((256 * count, 1024), jnp.float32, sharding=rows)
    compiled = jax.jit(turned).lower(struct).compile()
    memory = compiled.memory_analysis()
    if memory is None:
        return 0
    return max(0, memory.temp_size_in_bytes - 2**20)


def _row(
    shape: tuple[int, ...],
    dtype: Any,
    src: NamedSharding,
    dst: NamedSharding,
    slack_bytes: int,
    *,
    part: chips.Slice | None,
    run: bool,
) -> Row:
    plan = planned(shape, dtype, src, dst)
    jax.clear_caches()
    programs = {}
    taken = {}
    for name, fn in (
        ("xla", lambda x: x),
        ("ours", steps_program(shape, dtype, src, dst)),
    ):
        begin = time.perf_counter()
        programs[name] = lowered(
            fn=fn, shape=shape, dtype=dtype, src=src, dst=dst
        ).compile()
        taken[name] = time.perf_counter() - begin
    row = Row(
        move=f"{dtype}{list(shape)}, {_text(src)} to {_text(dst)}",
        steps=", ".join(step.kind for step in plan.steps),
        shard_bytes=max(math.prod(end.shard_shape(shape)) for end in (src, dst))
        * dtype.itemsize,
        slack_bytes=slack_bytes,
        bound_bytes=plan.lower_bound_bytes,
        temp_bytes={
            name: program.memory_analysis().temp_size_in_bytes
            for name, program in programs.items()
        },
        wire_bytes={
            name: float(wire_bytes(program.as_text(), src.mesh.size))
            for name, program in programs.items()
        },
        compile_seconds=taken,
        link_seconds=_link_seconds(programs, src.mesh, part),
        speedup=None,
    )
    if not run:
        return row
    x = _checked(shape, dtype, src, programs)
    speedup = _speedup(programs, x, 11)
    if speedup < 1 / SLOWER:
        # One bad moment of the machine is no result.
        speedup = _speedup(programs, x, 31)
    return dataclasses.replace(row, speedup=speedup)


def _link_seconds(
    programs: Mapping[str, Any],
    mesh: Any,
    part: chips.Slice | None,
) -> dict[str, float]:
    """The time of each program on the links of the slice `part`."""
    if part is None:
        return {}
    spec = MeshSpec.of(mesh)
    extents = "x".join(map(str, part.extents))
    estimates: dict[str, float] = {}
    for name, program in programs.items():
        sent = traffic(program.as_text(), spec)
        estimates[name] = seconds(sent, part.chip, spec, slice=extents).seconds
    return estimates


def _text(end: NamedSharding) -> str:
    entries = ", ".join("".join(entry or "-") for entry in end.spec)
    sizes = "x".join(str(size) for size in end.mesh.shape.values())
    return f"({entries}) on {sizes}"


def _checked(
    shape: tuple[int, ...], dtype: Any, src: NamedSharding, programs: Mapping[str, Any]
) -> jax.Array:
    """The source, after what each program makes of it was compared with NumPy."""
    values = np.arange(math.prod(shape), dtype=dtype).reshape(shape)
    x = placed(values, src)
    for program in programs.values():
        for shard in program(x).addressable_shards:
            np.testing.assert_array_equal(shard.data, values[shard.index])
    return x


def _speedup(programs: Mapping[str, Any], x: jax.Array, repeats: int) -> float:
    """The median of ratios, each of two runs side by side, so that whatever else the
    machine does slows both.
    """
    ratios = []
    for repeat in range(repeats):
        taken = {}
        for name in sorted(programs, reverse=bool(repeat % 2)):
            begin = time.perf_counter()
            jax.block_until_ready(programs[name](x))
            taken[name] = time.perf_counter() - begin
        ratios.append(taken["xla"] / taken["ours"])
    return statistics.median(ratios)


def _summary(rows: Sequence[Row]) -> dict[str, Value]:
    bound = sum(row.bound_bytes for row in rows)
    ratios = [
        row.wire_bytes["ours"] / row.bound_bytes for row in rows if row.bound_bytes
    ]
    values: dict[str, Value] = {"pairs": len(rows)}
    for name, text in (("xla", "XLA"), ("ours", "shardfx")):
        total = sum(row.is_above(name) for row in rows)
        values[f"{text}: share above 2x the shard"] = total / len(rows)
        values[f"{text}: worst temporary over shard"] = max(
            row.factor(name) for row in rows
        )
        total = sum(row.wire_bytes[name] for row in rows)
        values[f"{text}: wire over lower bound"] = total / bound
        values[f"{text}: median seconds to compile"] = statistics.median(
            row.compile_seconds[name] for row in rows
        )
    for name, text in (("xla", "XLA"), ("ours", "shardfx")):
        values |= _spread(text, [row.factor(name) for row in rows])
    values["shardfx: median of wire over lower bound"] = statistics.median(ratios)
    values["shardfx: worst wire over lower bound"] = max(ratios)
    values["pairs with more wire bytes than XLA"] = sum(
        row.wire_bytes["ours"] > row.wire_bytes["xla"] + 1 for row in rows
    )
    priced = [row.link_seconds for row in rows if row.link_seconds]
    if priced:
        values["pairs with more seconds on links than XLA"] = sum(
            1.01 * row["xla"] < row["ours"] for row in priced
        )
        values["shardfx: seconds on links over XLA's"] = sum(
            row["ours"] for row in priced
        ) / sum(row["xla"] for row in priced)
    timed = [(row.speedup, row) for row in rows if row.speedup is not None]
    return values | _speedups(timed)


def _spread(text: str, factors: Sequence[float]) -> dict[str, Value]:
    """How many programs hold how much: a count up to the first of `FACTORS`, between
    each two, and above the last.
    """
    total = sum(factor <= FACTORS[0] for factor in factors)
    counts: dict[str, Value] = {f"{text}: pairs at {FACTORS[0]}x": total}
    for low, high in itertools.pairwise((*FACTORS, math.inf)):
        many = sum(low < factor <= high for factor in factors)
        bounds = f"{low}x"
        if high != math.inf:
            bounds += f", up to {high}x"
        counts[f"{text}: pairs above {bounds}"] = many
    return counts


def _speedups(timed: Sequence[tuple[float, Row]]) -> dict[str, Value]:
    values: dict[str, Value] = {}
    for rematerializes, text in (
        (True, "where XLA rematerializes"),
        (False, "elsewhere"),
    ):
        some = [
            speedup for speedup, row in timed if row.rematerializes == rematerializes
        ]
        if some:
            values[f"pairs {text}"] = len(some)
            values[f"speedup {text} (geometric mean)"] = statistics.geometric_mean(some)
            values[f"least speedup {text}"] = min(some)
    slower = [
        (speedup, row)
        for speedup, row in timed
        if speedup < 1 / SLOWER and not row.rematerializes
    ]
    if timed:
        values[f"pairs elsewhere more than {SLOWER}x slower than XLA"] = len(slower)
    for rank, (speedup, row) in enumerate(
        sorted(slower, key=lambda speedup: speedup[0])[:SHOWN], start=1
    ):
        ours, theirs = (row.wire_bytes[name] / 2**20 for name in ("ours", "xla"))
        text = (
            f"{speedup:.2f}, {row.move}: {row.steps}; {ours:.1f} MiB on the wire, XLA"
            f" {theirs:.1f}"
        )
        values[f"slowest elsewhere, {rank}"] = text
    return values
