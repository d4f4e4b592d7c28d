"""Which devices exchange in a collective, by their numbers in the program: all forms in which HLO writes it."""

import math
import re
from typing import NamedTuple

import numpy as np

from .._ground.errors import ProgramError
from ._hlo_text import Instruction


# Arrays of shape (groups, members) of device numbers, one for each size that groups have.
Groups = tuple[np.ndarray, ...]

_LISTED = re.compile(r"replica_groups=\{(\{[\d,{}]*\})\}")
# `[4,2]<=[2,4]T(1,0)`: 0 to 7 in that shape, its axes swapped, in four groups of two.
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
# `mesh['x'=2,'y'=4], device_ids=([2,4]T(1,0)) {'y','x':(1)2}`: whole axes, or parts of them as (what comes before)size,
# of a mesh whose devices are in order, or in that of `device_ids`.
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^)]*(?:\([^)]*\))?)\))? \{([^}]*)\}")
_AXIS = re.compile(r"'([^']*)'=(\d+)")
_USED = re.compile(r"'([^']*)'(?::\((\d+)\)(\d+))?")
_ORDER = re.compile(r"^\[([\d,]+)\](?:T\(([\d,]+)\))?$")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_PAIR = re.compile(r"\{(\d+),(\d+)\}")
# These say in so many words whether their numbers are of devices; others say it by having a channel.
_SAYS_WHOSE = ("all-gather", "all-reduce", "reduce-scatter")


class Numbering(NamedTuple):
    """How a program numbers its devices: first those of the first replica.

    **Arguments:**

    - `replicas`: how often the whole program runs beside itself; JAX has 1, but for `pmap`.
    - `partitions`: how many devices share one.
    """

    replicas: int
    partitions: int

    @property
    def size(self) -> int:
        """How many devices the program runs on."""
        return self.replicas * self.partitions

    def spread(self, instruction: Instruction, kind: str, rows: Groups | None) -> Groups:
        """Groups of replicas, of partitions or of devices, as device numbers; `None` stands for one group of all."""
        has_channel = "channel_id=" in instruction.structure
        if "use_global_device_ids=true" in instruction.structure:
            return self._whole(instruction, rows, self.size)
        if has_channel and kind not in _SAYS_WHOSE:
            within = self._whole(instruction, rows, self.partitions)
            firsts = np.arange(self.replicas) * self.partitions
            return tuple(np.concatenate([first + own for first in firsts]) for own in within)
        within = tuple(own * self.partitions for own in self._whole(instruction, rows, self.replicas))
        parts = np.arange(self.partitions)
        if has_channel:
            return tuple((own[:, :, None] + parts).reshape(len(own), -1) for own in within)
        return tuple(np.concatenate([own + part for part in parts]) for own in within)

    def _whole(self, instruction: Instruction, rows: Groups | None, count: int) -> Groups:
        if rows is None:
            return (np.arange(count)[None],)
        most = max((int(own.max()) for own in rows if own.size), default=0)
        if most >= count:
            raise ProgramError(
                f"a collective names number {most}, and the program has {count} of what it names: "
                f"{self.replicas} replicas of {self.partitions} partitions; pass `mesh=` if the text's first line "
                f"does not count them: {instruction.text:.300}"
            )
        return rows


def groups_of(instruction: Instruction, kind: str, numbering: Numbering) -> Groups:
    """The devices that exchange with each other.

    **Arguments:**

    - `instruction`: a collective.
    - `kind`: what it is.
    - `numbering`: of the devices of the program.

    **Returns:**

    Arrays of shape (groups, members), one for each size that groups have. For a permute one of shape (pairs, 2), sender
    and receiver, those that send to themselves left out.

    **Raises:**

    `ProgramError` for groups that cannot be read, that name a device twice or one that is not there; it shows the line.
    """
    if kind == "collective-permute":
        return numbering.spread(instruction, kind, (_pairs(instruction),))
    rows = _rows(instruction)
    for members in [] if rows is None else [np.concatenate([own.ravel() for own in rows])]:
        if len(set(members.tolist())) < members.size:
            raise ProgramError(f"a collective names a device twice: {instruction.text:.300}")
    return numbering.spread(instruction, kind, rows)


def _pairs(instruction: Instruction) -> np.ndarray:
    # In the attributes of a send or receive they can be in quotes.
    found = _PAIRS.search(instruction.structure) or _PAIRS.search(instruction.attributes.replace('"', ""))
    if found is None:
        raise ProgramError(f"a permute does not say who sends to whom: {instruction.text:.300}")
    pairs = [(int(source), int(target)) for source, target in _PAIR.findall(found[1])]
    return np.array([pair for pair in pairs if pair[0] != pair[1]], dtype=int).reshape(-1, 2)


def _rows(instruction: Instruction) -> Groups | None:
    text = instruction.structure
    if listed := _LISTED.search(text):
        rows = [list(map(int, group.split(","))) for group in listed[1][1:-1].split("},{") if group]
        sizes = dict.fromkeys(map(len, rows))
        return tuple(np.array([row for row in rows if len(row) == size]) for size in sizes)
    if iota := _IOTA.search(text):
        return (_iota(iota[3], iota[4]).reshape(int(iota[1]), int(iota[2])),)
    if mesh := _MESH.search(text):
        return (_mesh_groups(mesh[1], mesh[2], mesh[3]),)
    if "replica_groups={}" in text or "replica_groups=" not in text:
        return None
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
