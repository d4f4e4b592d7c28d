"""How much traffic a compiled program causes, read off its HLO text."""

import math
import re
from collections.abc import Sequence
from fractions import Fraction

import numpy as np


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


def wire_bytes(hlo: str, devices: int, slices: Sequence[int] | np.ndarray | None = None) -> Fraction:
    """Bytes that enter a device over all collectives of a compiled program, the mean over devices.

    **Arguments:**

    - `hlo`: the text of an optimized, partitioned module, as by `compiled.as_text()`.
    - `devices`: how many devices run it.
    - `slices`: for each device the slice it is in: then only bytes that come from another slice count.

    **Returns:**

    The mean as a Fraction: a permute counts only the pairs that move, the others what each member of a group gets from
    each other one.
    """
    apart = np.arange(devices) if slices is None else np.asarray(slices)
    return sum((_traffic(line, apart) for line in hlo.splitlines()), Fraction(0))


def _traffic(line: str, apart: np.ndarray) -> Fraction:
    """What enters a device in one instruction from devices with another number in `apart`."""
    found = _COLLECTIVE.search(line)
    if found is None:
        return Fraction(0)
    kind, sizes = found["kind"], [_array_bytes(*array) for array in _ARRAY.findall(found["result"])]
    if found["start"] and len(sizes) > 1:
        # An asynchronous one names its operands too, and after them what it makes.
        sizes = [max(sizes)] if kind != "all-reduce" else sizes
    size = Fraction(sum(sizes))
    if kind == "collective-permute":
        pairs = _PAIR.findall(line.partition("source_target_pairs=")[2].partition("}}")[0] + "}}")
        return size * sum(bool(apart[int(source)] != apart[int(target)]) for source, target in pairs) / len(apart)
    groups = _groups(line, len(apart))
    members = apart[groups]
    # How many of the others of its group are apart from a device, the mean over devices.
    others = Fraction(int((members[:, :, None] != members[:, None, :]).sum()), groups.size)
    if kind == "all-reduce":
        return 2 * size * others / groups.shape[1]
    return size * others / (1 if kind == "reduce-scatter" else groups.shape[1])


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
