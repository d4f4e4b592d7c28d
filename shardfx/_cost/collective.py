"""What one collective of a compiled program sends, and between whom."""

import math
import re
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from .._ground.errors import ProgramError
from .hlo_text import Instruction


KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# Whatever names groups of devices or a channel between them communicates, and must be known.
_COMMUNICATES = re.compile(r"\b(replica_groups|source_target_pairs|device_groups|channel_id|collective_id)=")
# These hold a channel too: the ends of what began elsewhere, and transfers to a host that no other device sees.
_ENDS = ("-done", "-update")
_ARRAY = re.compile(r"\b(pred|token|[suf]\d+\w*|bf16|c64|c128)\[([\d,]*)\]")
_LISTED = re.compile(r"replica_groups=\{(\{[\d,{}]*\})\}")
# `[4,2]<=[4,2]T(1,0)`: 0 to 7 in that shape, its axes swapped, in four groups of two.
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
# `mesh['x'=2,'y'=4], device_ids=([2,4]T(1,0)) {'y','x':(1)2}`: whole axes, or parts of them as (what comes before)size,
# of a mesh whose devices are in order, or in that of `device_ids`.
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^)]*(?:\([^)]*\))?)\))? \{([^}]*)\}")
_AXIS = re.compile(r"'([^']*)'=(\d+)")
_USED = re.compile(r"'([^']*)'(?::\((\d+)\)(\d+))?")
_ORDER = re.compile(r"^\[([\d,]+)\](?:T\(([\d,]+)\))?$")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_PAIR = re.compile(r"\{(\d+),(\d+)\}")


class Collective(NamedTuple):
    """One collective, as a compiled program does it once.

    **Arguments:**

    - `kind`: one of `KINDS`.
    - `dtype`: of what it sends, as HLO writes it; several, joined by "+", where it sends several.
    - `parts`: bytes of each array of its result on one device.
    - `groups`: an array of shape (groups, members) of device numbers; for a permute of shape (pairs, 2), sender and
        receiver, those that send to themselves left out.
    """

    kind: str
    dtype: str
    parts: tuple[Fraction, ...]
    groups: np.ndarray

    @property
    def bytes(self) -> Fraction:
        """Of its whole result on one device."""
        return sum(self.parts, Fraction(0))

    @property
    def group_size(self) -> int:
        """How many devices exchange; of a permute the two ends."""
        return self.groups.shape[1]

    def wire_bytes(self, apart: np.ndarray) -> Fraction:
        """Bytes that enter a device from devices with another number in `apart`, the mean over all devices."""
        members = apart[self.groups]
        if self.kind == "collective-permute":
            return self.bytes * int((members[:, 0] != members[:, 1]).sum()) / len(apart)
        if self.kind in ("all-to-all", "ragged-all-to-all"):
            others = Fraction(int((members[:, :, None] != members[:, None, :]).sum()), members.size)
            return self.bytes * others / self.group_size
        # A gather takes the pieces of other slices in once for all that are in a slice, as the compilers for TPUs do.
        rest = Fraction(sum(len(set(row)) - 1 for row in members.tolist()), len(members))
        if self.kind == "all-reduce":
            return 2 * self.bytes * rest / self.group_size
        return self.bytes * rest / (1 if self.kind == "reduce-scatter" else self.group_size)


def collective_of(instruction: Instruction, devices: int) -> Collective | None:
    """The collective that an instruction is; `None` for one that sends nothing, and for the end of one.

    **Raises:**

    `ProgramError` for an instruction that exchanges between devices in a way that is not known.
    """
    kind = instruction.opcode.removesuffix("-start")
    if kind not in KINDS:
        _require_local(instruction)
        return None
    result = instruction.result
    if instruction.opcode.endswith("-start") and kind != "all-reduce":
        result = _of_start(result)
    arrays = [(dtype, _array_bytes(dtype, dims)) for dtype, dims in _ARRAY.findall(result)]
    dtypes = "+".join(dict.fromkeys(dtype for dtype, _ in arrays))
    groups = _pairs(instruction) if kind == "collective-permute" else _groups(instruction, devices)
    return Collective(kind, dtypes, tuple(count for _, count in arrays), groups)


def channel_of(instruction: Instruction) -> int | None:
    """The number by which the compiler tells collectives apart."""
    found = re.search(r"\bchannel_id=(\d+)", instruction.attributes)
    return int(found[1]) if found else None


def _of_start(result: str) -> str:
    """The result among what a collective that only begins gives out: its operands, its results, and what it notes."""
    depth, parts = 0, [""]
    for letter in result[1:-1] if result.startswith("(") else result:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts[1] if len(parts) > 1 else result


def _require_local(instruction: Instruction) -> None:
    opcode = instruction.opcode
    if opcode.endswith(_ENDS) or (opcode in ("send", "recv") and "is_host_transfer=true" in instruction.attributes):
        return
    if "all-" in opcode or "collective" in opcode or _COMMUNICATES.search(instruction.attributes):
        raise ProgramError(
            f"the program has a collective of a kind that is not known, `{opcode}`, so its traffic cannot be counted: "
            f"{instruction.text:.300}"
        )


def _pairs(instruction: Instruction) -> np.ndarray:
    found = _PAIRS.search(instruction.attributes)
    if found is None:
        raise ProgramError(f"a permute does not say who sends to whom: {instruction.text:.300}")
    pairs = [(int(source), int(target)) for source, target in _PAIR.findall(found[1])]
    return np.array([pair for pair in pairs if pair[0] != pair[1]], dtype=int).reshape(-1, 2)


def _groups(instruction: Instruction, devices: int) -> np.ndarray:
    text = instruction.attributes
    if listed := _LISTED.search(text):
        rows = [list(map(int, group.split(","))) for group in listed[1][1:-1].split("},{")]
        if len(set(map(len, rows))) > 1:
            raise ProgramError(f"a collective joins groups of different sizes: {instruction.text:.300}")
        return np.array(rows)
    if iota := _IOTA.search(text):
        return _iota(iota[3], iota[4]).reshape(int(iota[1]), int(iota[2]))
    if mesh := _MESH.search(text):
        return _mesh_groups(mesh[1], mesh[2], mesh[3])
    if "replica_groups={}" in text or "replica_groups=" not in text:
        return np.arange(devices)[None]
    raise ProgramError(f"the groups of a collective cannot be read: {instruction.text:.300}")


def _iota(shape: str, order: str | None) -> np.ndarray:
    sizes = [int(size) for size in shape.split(",")]
    axes = None if order is None else [int(axis) for axis in order.split(",")]
    return np.arange(math.prod(sizes)).reshape(sizes).transpose(axes)


def _mesh_groups(mesh: str, order: str | None, used: str) -> np.ndarray:
    wanted = {name: (int(before or 1), int(part) if part else None) for name, before, part in _USED.findall(used)}
    shape, inside = [], []
    for name, size in _AXIS.findall(mesh):
        before, part = wanted.get(name, (int(size), 1))
        part = int(size) if part is None else part
        inside.append(len(shape) + 1)
        shape += [before, part, int(size) // before // part]
    ids = np.arange(math.prod(shape)) if order is None else _device_ids(order)
    outside = [axis for axis in range(len(shape)) if axis not in inside]
    grid = ids.reshape(shape).transpose(*outside, *inside)
    return grid.reshape(-1, math.prod(shape[axis] for axis in inside))


def _device_ids(order: str) -> np.ndarray:
    if found := _ORDER.match(order):
        return _iota(found[1], found[2]).ravel()
    return np.array([int(number) for number in re.findall(r"\d+", order)])


def _array_bytes(dtype: str, dims: str) -> Fraction:
    if dtype == "token":
        return Fraction(0)
    bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
    return Fraction(bits * math.prod(int(size) for size in dims.split(",") if size), 8)
