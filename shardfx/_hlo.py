"""How much traffic a compiled program causes, read off its HLO text."""

import math
import re
from fractions import Fraction


# `%x = bf16[8,4]{1,0} all-gather(...), replica_groups={{0,1},{2,3}}, ...`, the result maybe a tuple.
_COLLECTIVE = re.compile(
    r"= (?P<result>\(.*?\)|\S+) "
    r"(?P<kind>all-gather|all-to-all|ragged-all-to-all|all-reduce|reduce-scatter|collective-permute|collective-broadcast)"
    r"(?P<start>-start)?\("
)
_ARRAY = re.compile(r"\b(pred|[suf]\d+\w*|bf16|c64|c128)\[([\d,]*)\]")
_LISTED = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]")
# `replica_groups=mesh['x'=2,'y'=4] {'y','x':(1)2}`: whole axes, or parts of them as (what comes before)size.
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}")
_AXIS = re.compile(r"'([^']*)'=(\d+)")
_USED = re.compile(r"'([^']*)'(?::\(\d+\)(\d+))?")
_PAIR = re.compile(r"\{(\d+),(\d+)\}")


def wire_bytes(hlo: str, devices: int) -> Fraction:
    """Bytes that enter a device over all collectives of a compiled program, the mean over devices.

    **Arguments:**

    - `hlo`: the text of an optimized, partitioned module, as by `compiled.as_text()`.
    - `devices`: how many devices run it.

    **Returns:**

    The mean as a Fraction: a permute counts only the pairs that move, the others by the size of their groups.
    """
    return sum((_traffic(line, devices) for line in hlo.splitlines()), Fraction(0))


def _traffic(line: str, devices: int) -> Fraction:
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
        return size * sum(source != target for source, target in pairs) / devices
    members = _members(line, devices)
    if kind == "all-reduce":
        return 2 * size * (members - 1) / members
    if kind == "reduce-scatter":
        return size * (members - 1)
    return size * (members - 1) / members


def _members(line: str, devices: int) -> int:
    if listed := _LISTED.search(line):
        return listed[1].count(",") + 1
    if iota := _IOTA.search(line):
        return int(iota[2])
    if mesh := _MESH.search(line):
        sizes = dict(_AXIS.findall(mesh[1]))
        return math.prod(int(part or sizes[name]) for name, part in _USED.findall(mesh[2]))
    return devices


def _array_bytes(dtype: str, dims: str) -> Fraction:
    bits = 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0])  # pyright: ignore[reportOptionalSubscript]
    return Fraction(bits * math.prod(int(size) for size in dims.split(",") if size), 8)
