"""Moving one array between two shardings: single moves as races, and a census over all
pairs of shardings.
"""

import argparse
import functools as ft
import gc
import itertools as it
import math
import random
import statistics
import time
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec as P

from shardfx import chips
from shardfx._reshard.mover import reshard, resharded
from shardfx._reshard.reshard_planning import plan_reshard
from shardfx._reshard.shardings import layout
from shardfx._reshard.steps.layout import StepLayout
from shardfx._reshard.steps.redistribution import redistribute
from shardfx.cost import seconds, traffic
from shardfx.topology._mesh import MeshSpec

from ._case import Apart, Case, Entry, Finding, Limit, Race, Rival, Skip, Value, memcpy
from ._machine import fresh_process
from ._pairs import compiled, placed, simulated
from ._peers import device_put, eformer, scalax, whole_jit
from ._programs import lowered, planned, steps_program
from ._runner import Options
from ._states import equals, state_cases


SUMMARY = (
    "one array from one sharding to another, against XLA's own program and the field's"
    " shard functions"
)


class Alpa(NamedTuple):
    """A case of Alpa's benchmark of resharding, on meshes (x, y)."""

    source: P
    target: P
    sizes: tuple[tuple[int, int], tuple[int, int]] = ((2, 4), (2, 4))
    # A quarter of Alpa's (1024, 1024, 512) along two dimensions each, or as much of
    # (3072, 1024, 170).
    shape: tuple[int, int, int] = (256, 1024, 128)


ALPA = {
    "case 1": Alpa(P("x"), P("x")),
    "case 2": Alpa(P(), P("x")),
    "case 3": Alpa(P(None, "x"), P("x")),
    "case 4": Alpa(P(None, ("x", "y")), P(("x", "y"))),
    "case 5": Alpa(P("y"), P("x")),
    "case 6": Alpa(
        source=P("x"), target=P("x"), sizes=((2, 4), (3, 4)), shape=(768, 1024, 43)
    ),
    "cases 7 and 8": Alpa(source=P("y"), target=P(), sizes=((1, 4), (2, 4))),
    "case 9": Alpa(P(None, "x"), P(None, None, "x")),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--census", action="store_true", help="hundreds of pairs instead of dozens"
    )
    parser.add_argument("--pairs", type=int, help="how many pairs the census compiles")
    parser.add_argument(
        "--all-pairs",
        action="store_true",
        help="compile and run all 33,489 pairs; half an hour",
    )
    parser.add_argument(
        "--chunk",
        type=_part,
        default=(1, 1),
        metavar="I/N",
        help="of --all-pairs, a part alone",
    )
    parser.add_argument(
        "--scalax",
        action="store_true",
        help="race scalax on Llama too; it compiles for minutes",
    )
    parser.add_argument(
        "--aot",
        metavar="tpu:TOPOLOGY",
        help="census with the TPU compiler, as in tpu:v5e:4x4",
    )
    parser.add_argument(
        "--compile-only",
        action="store_true",
        help="the census alone, and none of its programs runs",
    )
    parser.add_argument(
        "--odd",
        action="store_true",
        help="with --aot: arrays whose shards fill no tiles",
    )
    chip_argument(parser)


def chip_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--chip",
        help="predict the time of moves for this chip (default: that of the devices)",
    )


def cases(options: Options) -> list[Entry]:
    flags = options.flags
    if flags.all_pairs:
        return [_every_pair(flags.chunk)]
    if flags.aot:
        pairs = flags.pairs or (10 if options.quick else 150)
        return [_census(pairs, flags.aot, flags.odd)]
    if flags.compile_only:
        pairs = flags.pairs or (10 if options.quick else 150)
        return [
            _census(
                pairs,
                None,
                flags.odd,
                run=False,
            )
        ]
    return _measured_here(options)


def _measured_here(options: Options) -> list[Entry]:
    """The entries whose programs run on the devices of this process."""
    is_census = options.flags.census
    if options.quick:
        pairs = 8
        pairs_of_one_slice = 60
        pairs_of_slices = 30
    else:
        pairs = 400 if is_census else 60
        pairs_of_one_slice = 300
        pairs_of_slices = 100

    entries: list[Entry] = []
    if not is_census:
        entries += _races(options)
    for devices in (16, 64, 512, 4096):
        entries.append(_planning(devices, 1, pairs_of_one_slice))
    for devices, slices in ((16, 4), (512, 4), (4096, 4), (4096, 64)):
        entries.append(_planning(devices, slices, pairs_of_slices))
    entries += [_seen_before(), _planning_a_tree()]
    if is_census:
        entries.append(_simulated())
    entries.append(_census(options.flags.pairs or pairs, None, False))
    return entries


def _part(text: str) -> tuple[int, int]:
    index, count = map(int, text.split("/"))
    if not 1 <= index <= count:
        raise argparse.ArgumentTypeError(
            f"{text} is no part; use I/N with I from 1 to N, for example 3/8"
        )
    return index, count


def _races(options: Options) -> list[Entry]:
    if len(options.devices) < 8:
        return single_moves(options)
    most = max(sum(map(math.prod, case.sizes)) for case in ALPA.values())
    return [
        *single_moves(options),
        Apart("Alpa's cases between meshes", "benchmarks.reshard:between_meshes", most),
        *state_cases(options),
    ]


def single_moves(options: Options) -> list[Entry]:
    """Moves of one array on eight devices."""
    count = len(options.devices)
    if count < 8:
        return [Skip("single moves", f"they need 8 devices, and there are {count}")]
    devices = np.array(options.devices[:8])
    mesh = Mesh(devices.reshape(2, 4), ("x", "y"))
    wide = Mesh(devices.reshape(4, 2), ("x", "y"))
    flat = Mesh(devices, ("z",))
    shape = _shape(ALPA["case 1"].shape, options)
    same_mesh = ((2, 4), (2, 4))
    moves = {
        f"Alpa's {number}, one mesh": (
            NamedSharding(mesh, case.source),
            NamedSharding(mesh, case.target),
        )
        for number, case in ALPA.items()
        if case.sizes == same_mesh
    }
    moves["jax#21562"] = (
        NamedSharding(wide, P("y", None, "x")),
        NamedSharding(wide, P(None, ("x", "y"))),
    )
    moves["2x4 to 8 of the same devices"] = (
        NamedSharding(mesh, P("y", "x")),
        NamedSharding(flat, P(None, None, "z")),
    )
    chip = chip_of(options)
    return [_case(name, shape, *layouts, chip) for name, layouts in moves.items()]


def chip_of(options: Options) -> chips.Chip | None:
    """The chip whose times are predicted; `None` if the devices are no known chips."""
    if options.flags.chip is not None:
        return chips.find(options.flags.chip)
    kind = options.devices[0].device_kind
    known = [chip for chip in chips.CHIPS if kind in chip.kinds]
    return known[0] if known else None


def between_meshes(options: Options) -> list[Entry]:
    """Alpa's cases as Alpa runs them: the two meshes have no device in common."""
    entries: list[Entry] = []
    for number, case in ALPA.items():
        if options.quick and case.sizes == ((2, 4), (2, 4)):
            continue
        count = math.prod(case.sizes[0])
        first = options.devices[:count]
        second = options.devices[count : count + math.prod(case.sizes[1])]
        parts = (
            first,
            second,
        )
        source, target = (
            Mesh(np.array(part).reshape(sizes), ("x", "y"))
            for part, sizes in zip(parts, case.sizes, strict=True)
        )
        layouts = NamedSharding(source, case.source), NamedSharding(target, case.target)
        entries.append(
            _case(
                f"Alpa's {number}, two meshes",
                _shape(case.shape, options),
                *layouts,
                chip=None,
            )
        )
    return entries


def _shape(shape: tuple[int, int, int], options: Options) -> tuple[int, int, int]:
    if options.quick:
        return (shape[0] // 8, *shape[1:])
    return shape


def _case(
    name: str,
    shape: tuple[int, ...],
    src: NamedSharding,
    dst: NamedSharding,
    chip: chips.Chip | None,
) -> Case:
    return Case(
        f"{name}, {math.prod(shape) * 4 // 2**20} MiB",
        ft.partial(_race, shape, src, dst, chip),
    )


def _race(
    shape: tuple[int, ...],
    src: NamedSharding,
    dst: NamedSharding,
    chip: chips.Chip | None,
) -> Race:
    values = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    right = equals(values, dst)
    rivals = [
        Rival("shardfx", lambda: lambda x: reshard(x, dst), right),
        Rival("jax.jit", lambda: whole_jit(src, dst), right),
        Rival("jax.device_put", lambda: device_put(dst), right),
        Rival(
            name="eformer", make=lambda: eformer(dst), check=right, needs=("eformer",)
        ),
        Rival(name="scalax", make=lambda: scalax(dst), check=right, needs=("scalax",)),
    ]
    facts: dict[str, Value] = {"from": _text(src), "to": _text(dst)}
    if src.device_set == dst.device_set:
        # What `reshard` does where devices have memories of their own, and inside `jit`
        # everywhere.
        rivals.insert(
            1,
            Rival(
                "shardfx, its program",
                lambda: lambda x: resharded(x, dst, copies=False),
                right,
            ),
        )
        plan = planned(shape, values.dtype, src, dst)
        facts["shardfx's program"] = (
            ", ".join(step.kind for step in plan.steps) or "nothing to do"
        )
        facts |= {"wire bytes": plan.wire_bytes, "lower bound": plan.lower_bound_bytes}
        if chip is not None:
            facts |= _predicted(
                shape=shape, dtype=values.dtype, src=src, dst=dst, chip=chip
            )
    return Race(
        rivals=tuple(rivals),
        fresh=lambda: jax.block_until_ready(placed(values, src)),
        byte_count=values.nbytes,
        floor=memcpy(values.nbytes),
        facts=facts,
    )


def _predicted(
    shape: tuple[int, ...],
    dtype: np.dtype,
    src: NamedSharding,
    dst: NamedSharding,
    chip: chips.Chip,
) -> dict[str, Value]:
    """What `cost.seconds` says of the programs of two rivals on `chip`, beside which
    their measured times stand.
    """
    mesh = MeshSpec.of(src.mesh)
    programs = {
        "shardfx, its program": steps_program(shape, dtype, src, dst),
        "jax.jit": lambda x: x,
    }
    facts: dict[str, Value] = {}
    for name, program in programs.items():
        compiled = lowered(
            fn=program, shape=shape, dtype=dtype, src=src, dst=dst
        ).compile()
        estimate = seconds(traffic(compiled, mesh), chip, mesh)
        facts[f"predicted_seconds.{name}"] = estimate.seconds
    return facts


def _text(end: NamedSharding) -> str:
    entries = ", ".join(repr(entry) for entry in end.spec)
    return f"P({entries}) on {'x'.join(str(size) for size in end.mesh.shape.values())}"


def _planning(devices: int, slices: int, count: int) -> Finding:
    limit = {16: 20, 64: 200, 512: 200, 4096: 200}[devices]
    where = (
        f"{devices:,} devices"
        if slices == 1
        else f"{devices:,} devices in {slices} slices"
    )
    return Finding(
        f"planning {count} random moves on {where}",
        lambda: _planning_times(devices, slices, count),
        (Limit("worst cold ms of processor time", at_most=limit),),
    )


def _planning_times(devices: int, slices: int, count: int) -> dict[str, Value]:
    rng = random.Random(devices)
    times = []
    ratios = []
    # As in races, planning pays for its own garbage, and not for what earlier cases
    # left.
    gc.collect()
    gc.freeze()
    for _ in range(count):
        rank = rng.choice((2, 2, 3))
        src, dst = (_random_layout(rng, devices, rank, slices) for _ in range(2))
        begin = time.process_time()
        plan = redistribute((65536,) * rank, 16, src, dst)
        times.append(1e3 * (time.process_time() - begin))
        ratios.append(
            plan.wire_bytes / plan.lower_bound_bytes if plan.lower_bound_bytes else 1.0
        )
    gc.unfreeze()
    taken = {
        "median cold ms": statistics.median(times),
        "worst cold ms of processor time": max(times),
    }
    if slices > 1:  # fewer bytes between slices are worth more bytes within
        return taken
    return taken | {
        "mean of wire over lower bound": statistics.mean(ratios),
        "worst wire over lower bound": max(ratios),
    }


def _random_layout(
    rng: random.Random, devices: int, rank: int, slices: int
) -> StepLayout:
    """One to three axes of powers of two, each on a random dimension or on none; and
    one over slices if there are.
    """
    power = (devices // slices).bit_length() - 1
    most_cuts = min(power - 1, rng.choice((0, 1, 2, 2)))
    cuts = [
        0,
        *sorted(rng.sample(range(1, power), most_cuts)),
        power,
    ]
    dims: list[list[int]] = [[] for _ in range(rank + 1)]
    for axis in rng.sample(range(len(cuts) - 1), len(cuts) - 1):
        dims[rng.randrange(rank + 1)].append(axis)
    sizes = tuple(2 ** (b - a) for a, b in it.pairwise(cuts))
    if slices == 1:
        return StepLayout(sizes, tuple(map(tuple, dims[:rank])))
    names = ("slices", *"abc"[: len(sizes)])
    sizes_by_axis: dict[str, int] = dict(zip(names, (slices, *sizes), strict=True))
    mesh = MeshSpec(sizes_by_axis, dcn={"slices": slices})
    cut = [[names[axis + 1] for axis in axes] for axes in dims]
    cut[rng.randrange(rank + 1)].insert(0, "slices")
    return layout(mesh, P(*map(tuple, cut[:rank])), rank)


def _planning_a_tree() -> Finding:
    """A thousand leaves with ten shapes and two moves each, on meshes without devices."""

    def measure() -> dict[str, Value]:
        trainer = AbstractMesh((16,), ("fsdp",))
        server = AbstractMesh((4, 4), ("data", "tensor"))
        layouts = [
            [
                NamedSharding(trainer, P("fsdp")),
                NamedSharding(trainer, P(None, "fsdp")),
            ],
            [
                NamedSharding(server, P(None, "tensor")),
                NamedSharding(server, P("tensor", "data")),
            ],
        ]
        src, dst = (
            [
                jax.ShapeDtypeStruct(
                    (64 + 16 * (leaf % 10), 256),
                    np.float32,
                    sharding=shardings[leaf // 10 % 2],
                )
                for leaf in range(1000)
            ]
            for shardings in layouts
        )
        begin = time.perf_counter()
        moves = plan_reshard(src, dst).moves
        return {"ms": 1e3 * (time.perf_counter() - begin), "distinct moves": moves}

    return Finding(
        "planning a tree of 1,000 leaves", measure, (Limit("ms", at_most=50),)
    )


def _seen_before() -> Finding:
    def measure() -> dict[str, Value]:
        order = tuple(random.Random(0).sample(range(4096), 4096))
        src = StepLayout((16, 256), ((0,), (1,)))
        dst = StepLayout(sizes=(64, 64), dims=((1,), (0,)), order=order)
        src = StepLayout(sizes=src.sizes, dims=src.dims, order=tuple(range(4096)))
        redistribute((65536, 65536), 16, src, dst)
        begin = time.perf_counter()
        for _ in range(1000):
            redistribute((65536, 65536), 16, src, dst)
        return {"us per look-up": 1e3 * (time.perf_counter() - begin)}

    return Finding(
        "a move of 4,096 devices planned before",
        measure,
        (Limit("us per look-up", at_most=50),),
    )


def _simulated() -> Finding:
    return Finding(
        "all pairs on 16 devices, simulated",
        simulated,
        (Limit("wire over lower bound", at_most=1.25),),
    )


def _every_pair(part: tuple[int, int]) -> Finding:
    if part == (1, 1):
        share = ""
    else:
        share = f", part {part[0]} of {part[1]}"
    return Finding(
        f"all pairs on 16 emulated CPU devices, compiled and run{share}",
        ft.partial(compiled, part),
        (Limit("wrong", at_most=0),),
    )


def _census(pairs: int, aot: str | None, odd: bool, run: bool = True) -> Finding:
    where = (
        f"the {aot.removeprefix('tpu:')} compiler" if aot else "16 emulated CPU devices"
    )
    arrays = (", shards that fill no tiles" if odd else "") + (
        "" if run else ", compiled only"
    )
    limits = [
        Limit("shardfx: worst temporary over shard", at_most=2.0 if aot else 3.0),
    ]
    # On a torus the planner takes the fastest path, which may send more bytes.
    if aot:
        limits.append(Limit("pairs with more seconds on links than XLA", at_most=0))
    else:
        limits += [
            Limit("pairs with more wire bytes than XLA", at_most=0),
            Limit("shardfx: wire over lower bound", at_most=1.25),
        ]
    if run and not aot:
        limits += [
            Limit("speedup where XLA rematerializes (geometric mean)", at_least=3.0),
            Limit("speedup elsewhere (geometric mean)", at_least=1 / 1.1),
        ]
    arguments = {"pairs": pairs, "aot": aot, "odd": odd, "run": run}
    return Finding(
        f"census of {pairs} random pairs{arrays}, {where}",
        lambda: fresh_process(
            "benchmarks._census:census",
            arguments,
            timeout_seconds=7200,
        ),
        tuple(limits),
    )
