"""Programs of moves to be compiled and looked at, and how much traffic they cause, read off their HLO text."""

import functools as ft
import math
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from shardfx._ground.spec import bits
from shardfx._reshard.steps.ends import NO_MESH, layouts, untyped
from shardfx._reshard.steps.program import program
from shardfx._reshard.steps.redistribute import Redistribution, redistribute


# What only instructions have that talk to other devices; `send` only begins what a `recv` takes in.
_TALKS = re.compile(r"\b(replica_groups|source_target_pairs|channel_id)=")
_SILENT = re.compile(r" (send|[\w-]+-done)\(")
# `%x = bf16[8,4]{1,0} all-gather(...), replica_groups={{0,1},{2,3}}, ...`, the result maybe a tuple.
_COLLECTIVE = re.compile(
    r"= (?P<result>\(.*?\)|\S+) "
    r"(?P<kind>all-gather|all-to-all|ragged-all-to-all|all-reduce|reduce-scatter|collective-permute|collective-broadcast)"
    r"(?P<start>-start)?\("
)
_ARRAY = re.compile(r"\b(pred|[suf]\d+\w*|bf16|c64|c128)\[([\d,]*)\]")
_LISTED = re.compile(r"replica_groups=\{(\{[\d,{}]*\})\}")
# `replica_groups=[4,2]<=[4,2]T(1,0)`: 0 to 7 in that shape, its axes swapped, in four groups of two.
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
# `replica_groups=mesh['x'=2,'y'=4] {'y','x':(1)2}`: whole axes, or parts of them as (what comes before)size.
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}")
_AXIS = re.compile(r"'([^']*)'=(\d+)")
_USED = re.compile(r"'([^']*)'(?::\((\d+)\)(\d+))?")
_PAIR = re.compile(r"\{(\d+),(\d+)\}")
# Between slices a TPU's host sends and receives: `recv(...), ..._xla_megascale_target={{100000->200000},...},...`, a
# list of pairs or of groups of devices, named by slice * 100000 + device; or `"{1,2}x{0:15}"`, slices x devices.
_TRANSFER = re.compile(
    r'= \((\w+)\[([\d,]*)\].* recv\(.*_xla_megascale_target="?(\{.*?\})"?,_xla_megascale_transfer_type'
)
_SLICE = 100_000
# `%body (arg: (s32[], f32[8])) -> (s32[], f32[8]) {`, and the loops over such: a counter from 0 below a constant.
_COMPUTATION = re.compile(r"(?:ENTRY )?%(\S+) \(.*\{$")
_WHILE = re.compile(r" while\(.*condition=%(?P<condition>[^\s,]+), body=%(?P<body>[^\s,]+)")
_LIMIT = re.compile(r"%(\S+) = s32\[\]\S* constant\((\d+)\)")
_LESS = re.compile(r" compare\([^)]*%([^\s,)]+)\), direction=LT")


def planned(shape: tuple[int, ...], dtype: Any, src: NamedSharding, dst: NamedSharding) -> Redistribution:
    """The planner's steps from one sharding to another."""
    return redistribute(shape, bits(dtype), *layouts(len(shape), untyped(src), untyped(dst)))


def steps_program(shape: tuple[int, ...], dtype: Any, src: NamedSharding, dst: NamedSharding) -> Callable[[Any], Any]:
    """The planned steps as a function to be traced; the meshes list the same devices in the same order."""
    src, dst = untyped(src), untyped(dst)
    like, _ = layouts(len(shape), src, dst)
    return ft.partial(program, src=src, dst=dst, steps=planned(shape, dtype, src, dst).steps, like=like)


def lowered(
    fn: Callable[[Any], Any], shape: tuple[int, ...], dtype: Any, src: NamedSharding, dst: NamedSharding
) -> Any:
    """`fn` lowered for one array that comes in `src` and leaves in `dst`, ready to be compiled and looked at."""
    struct = jax.ShapeDtypeStruct(shape, dtype, sharding=untyped(src))
    with jax.sharding.use_abstract_mesh(NO_MESH), jax.disable_jit(False):
        return jax.jit(fn, in_shardings=untyped(src), out_shardings=untyped(dst)).lower(struct)


def wire_bytes(hlo: str, devices: int, slices: Sequence[int] | np.ndarray | None = None) -> Fraction:
    """Bytes that enter a device over all collectives of a compiled program, the mean over devices.

    **Arguments:**

    - `hlo`: the text of an optimized, partitioned module, as by `compiled.as_text()`.
    - `devices`: how many devices run it.
    - `slices`: for each device the slice it is in: then only bytes that come from another slice count.

    **Returns:**

    The mean as a Fraction: a permute counts only the pairs that move, an all-to-all what each member of a group gets
    from each other one. A gather takes the pieces of other slices in once for all that are in a slice, as the compilers
    for TPUs do.

    **Raises:**

    `ValueError` for an instruction that talks to other devices in a way that is not known here.
    """
    apart = np.arange(devices) if slices is None else np.asarray(slices)
    transfers = _TRANSFER.findall(hlo)
    # With hosts between slices the program is that of one slice, and what differs per slice is in branches.
    entry, own = hlo.find("\nENTRY "), devices // max([1, *[_slice_count(target) for _, _, target in transfers]])
    total, times = Fraction(0), _times(hlo)
    for text, runners in ((hlo[: entry + 1], devices), (hlo[entry + 1 :], own)):
        name = ""
        for line in text.splitlines():
            name = begun[1] if (begun := _COMPUTATION.match(line)) else name
            traffic = _traffic(line, apart, runners)
            for dtype, dims, target in _TRANSFER.findall(line):
                traffic += _transferred(_array_bytes(dtype, dims), target, devices, slices is not None)
            total += traffic * times(name) if traffic else 0
    return total


def _times(hlo: str) -> Callable[[str], int]:
    """How often a computation runs, by its name: in a loop as often as the loop does."""
    bodies, name, loops = {}, "", {}
    for line in hlo.splitlines():
        name = begun[1] if (begun := _COMPUTATION.match(line)) else name
        bodies.setdefault(name, []).append(line)
        if loop := _WHILE.search(line):
            loops[loop["body"]] = name, loop["condition"]

    def times(name: str) -> int:
        if name not in loops:
            return 1
        outer, condition = loops[name]
        text = "\n".join(bodies.get(condition, ()))
        limits = dict(_LIMIT.findall(text))
        limit = [limits[other] for other in _LESS.findall(text) if other in limits]
        if len(limit) != 1:
            raise ValueError(f"how often does this loop run, whose body talks to other devices? {text}")
        return int(limit[0]) * times(outer)

    return times


def _slice_count(target: str) -> int:
    if "}x{" in target:
        return target.partition("}")[0].count(",") + 1
    return len({int(device) // _SLICE for device in re.findall(r"\d+", target)})


def _transferred(size: Fraction, target: str, devices: int, by_slice: bool) -> Fraction:
    """What enters a device in one transfer between hosts; `by_slice` leaves out what comes from its own slice."""
    unit = _SLICE if by_slice else 1
    if "->" in target:
        pairs = re.findall(r"(\d+)->(\d+)", target)
        return size * sum(int(source) // unit != int(goal) // unit for source, goal in pairs) / devices
    if "}x{" in target:
        return size * (_slice_count(target) - 1) / _slice_count(target)
    groups = np.array([list(map(int, group.split(","))) for group in target[2:-2].split("},{")])
    return size * _others(groups // unit) / groups.shape[1]


def _others(members: np.ndarray) -> Fraction:
    """How many in its row have another number than a member, the mean over all of them."""
    return Fraction(int((members[:, :, None] != members[:, None, :]).sum()), members.size)


def _traffic(line: str, apart: np.ndarray, runners: int) -> Fraction:
    """What enters a device in one instruction from devices with another number in `apart`."""
    found = _COLLECTIVE.search(line)
    if found is None:
        if _TALKS.search(line) and not _SILENT.search(line) and not _TRANSFER.search(line):
            raise ValueError(f"unknown traffic, of which no bytes can be told: {line.strip():.300}")
        return Fraction(0)
    kind, sizes = found["kind"], [_array_bytes(*array) for array in _ARRAY.findall(found["result"])]
    if found["start"] and len(sizes) > 1:
        # An asynchronous one names its operands too, and after them what it makes.
        sizes = [max(sizes)] if kind != "all-reduce" else sizes
    size = Fraction(sum(sizes))
    if kind == "collective-permute":
        pairs = _PAIR.findall(line.partition("source_target_pairs=")[2].partition("}}")[0] + "}}")
        return size * sum(bool(apart[int(source)] != apart[int(target)]) for source, target in pairs) / runners
    members = apart[_groups(line, len(apart))]
    count = members.shape[1]
    if kind in ("all-to-all", "ragged-all-to-all"):
        return size * _others(members) / count
    rest = Fraction(sum(len(set(row)) - 1 for row in members.tolist()), len(members))
    if kind == "all-reduce":
        return 2 * size * rest / count
    return size * rest / (1 if kind == "reduce-scatter" else count)


def _groups(line: str, devices: int) -> np.ndarray:
    """The devices that a collective joins: one group a row."""
    if listed := _LISTED.search(line):
        return np.array([list(map(int, group.split(","))) for group in listed[1][1:-1].split("},{")])
    if iota := _IOTA.search(line):
        shape = [int(size) for size in iota[3].split(",")]
        order = None if iota[4] is None else [int(axis) for axis in iota[4].split(",")]
        return np.arange(math.prod(shape)).reshape(shape).transpose(order).reshape(int(iota[1]), int(iota[2]))
    if mesh := _MESH.search(line):
        return _mesh_groups(mesh[1], mesh[2])
    if "replica_groups=" in line and "replica_groups={}" not in line:
        raise ValueError(f"unknown groups of devices: {line.strip():.300}")
    return np.arange(devices)[None]


def _mesh_groups(mesh: str, used: str) -> np.ndarray:
    wanted = {name: (int(before or 1), int(part) if part else None) for name, before, part in _USED.findall(used)}
    shape, inside = [], []
    for name, size in _AXIS.findall(mesh):
        before, part = wanted.get(name, (int(size), 1))
        part = int(size) if part is None else part
        inside.append(len(shape) + 1)
        shape += [before, part, int(size) // before // part]
    outside = [axis for axis in range(len(shape)) if axis not in inside]
    grid = np.arange(math.prod(shape)).reshape(shape).transpose(*outside, *inside)
    return grid.reshape(-1, math.prod(shape[axis] for axis in inside))


def _array_bytes(dtype: str, dims: str) -> Fraction:
    bits = 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0])  # pyright: ignore[reportOptionalSubscript]
    return Fraction(bits * math.prod(int(size) for size in dims.split(",") if size), 8)
