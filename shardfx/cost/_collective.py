"""What one collective of a compiled program sends and between which devices, read from every form in which HLO writes
it.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Final, Literal, NamedTuple

import numpy as np

from .._ground.errors import ProgramError
from .._ground.text import together
from ._hlo_text import Array, Instruction, arrays_in, parts_of


def _gathered(size: Fraction, members: np.ndarray) -> Fraction:
    # Bytes from other slices enter a slice once for all of its devices, as the compilers for TPUs do it.
    return size * sum(len(set(row)) - 1 for row in members.tolist())


def _exchanged(size: Fraction, members: np.ndarray) -> Fraction:
    return size * int((members[:, :, None] != members[:, None, :]).sum()) / members.shape[1]


class CollectiveKind(NamedTuple):
    """A kind of collective.

    **Arguments:**

    - `received`: the bytes that all devices of the groups take in, by the bytes of a result and the members of each
        group: a row of numbers, which differ where bytes between two members count.
    - `links`: the links that carry it. "rings": all of the group's. "middle": half of it crosses the middle of the
        longest ring. "one": one device sends to another.
    - `moves`: whether its result has the operand's elements and no others, so that the result is the operand elsewhere.
    """

    received: Callable[[Fraction, np.ndarray], Fraction]
    links: Literal["rings", "middle", "one"] = "rings"
    moves: bool = False


KINDS: Final[Mapping[str, CollectiveKind]] = {
    "all-gather": CollectiveKind(_gathered, moves=True),
    "all-reduce": CollectiveKind(lambda size, members: 2 * _gathered(size, members)),
    "reduce-scatter": CollectiveKind(lambda size, members: members.shape[1] * _gathered(size, members)),
    "all-to-all": CollectiveKind(_exchanged, "middle", moves=True),
    "ragged-all-to-all": CollectiveKind(_exchanged, "middle"),
    "collective-permute": CollectiveKind(
        lambda size, members: size * int((members[:, 0] != members[:, -1]).sum()), "one", moves=True
    ),
    "collective-broadcast": CollectiveKind(_gathered, moves=True),
}
MOVING: Final = frozenset(name for name, kind in KINDS.items() if kind.moves)
# An instruction that names device groups, or a channel between devices, communicates, and its kind must be known.
_COMMUNICATES = re.compile(r"\b(replica_groups|source_target_pairs|device_groups|channel_id|collective_id)=")
# A kernel that sends to other devices by itself says so in its backend configuration only.
_KERNEL_SENDS = re.compile(r'"has_communication":\s*true|"collective_id":\s*"?\d')
# These have a channel too: the second halves of asynchronous collectives, and transfers to a host, which no other
# device sees.
_ENDS = ("-done", "-update")
# A GPU's compiler may write a permute as a send and a receive with these pairs.
_HAS_PAIRS = "source_target_pairs="
_SLICED = re.compile(r"\bslice_sizes=\{((?:\{[\d,]*\},?)*)\}")
# Arrays of device numbers with shape (groups, members), one array per group size.
Groups = tuple[np.ndarray, ...]

_LISTED = re.compile(r"replica_groups=\{(\{[\d,{}]*\})\}")
# `[4,2]<=[2,4]T(1,0)`: the numbers 0 to 7 in shape (2, 4), transposed, as four groups of two.
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
# `mesh['x'=2,'y'=4], device_ids=([2,4]T(1,0)) {'y','x':(1)2}`: groups along whole axes, or along sub-axes written as
# (product of the sizes before it)size. The devices of the mesh are in their order, or in that of `device_ids`.
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^)]*(?:\([^)]*\))?)\))? \{([^}]*)\}")
_AXIS = re.compile(r"'([^']*)'=(\d+)")
_USED = re.compile(r"'([^']*)'(?::\((\d+)\)(\d+))?")
_ORDER = re.compile(r"^\[([\d,]+)\](?:T\(([\d,]+)\))?$")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_PAIR = re.compile(r"\{(\d+),(\d+)\}")
# These have an attribute that says whether their numbers are device numbers; in others a channel says so.
_SAYS_WHOSE = ("all-gather", "all-reduce", "reduce-scatter")


class Collective(NamedTuple):
    """One collective of a compiled program, as one execution of it.

    **Arguments:**

    - `kind`: one of `KINDS`.
    - `arrays`: the arrays of its result on one device.
    - `parts`: the bytes of each; of a sum of which a device keeps a part, those of the part.
    - `groups`: arrays of shape (groups, members) of device numbers, one for each size that groups have; for a permute
        one of shape (pairs, 2), sender and receiver, those that send to themselves left out.
    """

    kind: str
    arrays: tuple[Array, ...]
    parts: tuple[Fraction, ...]
    groups: Groups

    @property
    def dtype(self) -> str:
        """The dtype that the collective sends, as HLO writes it; several dtypes are joined by "+"."""
        return "+".join(dict.fromkeys(array.dtype for array in self.arrays))

    @property
    def bytes(self) -> Fraction:
        """The bytes of the whole result on one device."""
        return sum(self.parts, Fraction(0))

    @property
    def group_size(self) -> int:
        """The number of devices in the largest replica group; 2 for a permute."""
        return max(own.shape[1] for own in self.groups)

    def wire_bytes(self, apart: np.ndarray) -> Fraction:
        """The bytes that enter a device from devices with another number in `apart`, as the mean over all devices."""
        received = KINDS[self.kind].received
        return sum((received(self.bytes, apart[own]) for own in self.groups), Fraction(0)) / len(apart)


def collective_of(instruction: Instruction, devices: int) -> Collective | None:
    """The collective that an instruction starts; `None` for an instruction that sends nothing, and for the end of a
    collective.

    **Raises:**

    `ProgramError` for an instruction that exchanges between devices in a way that is not known.
    """
    kind = instruction.opcode.removesuffix("-start")
    if kind == "recv" and _HAS_PAIRS in instruction.attributes:
        kind = "collective-permute"
    elif kind not in KINDS:
        _require_local(instruction)
        return None
    arrays = _arrays(instruction)
    return Collective(kind, arrays, tuple(array.bytes for array in arrays), groups_of(instruction, kind, devices))


def channel_of(instruction: Instruction) -> int | None:
    """The instruction's `channel_id`, by which the compiler tells collectives apart; `None` without one."""
    found = re.search(r"\bchannel_id=(\d+)", instruction.structure)
    return int(found[1]) if found else None


def sent_by(instruction: Instruction, result: str) -> tuple[Array, ...]:
    """The arrays in `result`, the type of what an instruction sends.

    **Raises:**

    `ProgramError` that shows the instruction, for an array whose size is not known.
    """
    try:
        found = arrays_in(result)
        # An unknown size would count as zero bytes.
        sum(array.bits for array in found)
    except ProgramError as error:
        raise ProgramError(f"{error}, which is sent by {instruction.text:.300}") from None
    return found


def _arrays(instruction: Instruction) -> tuple[Array, ...]:
    """The arrays of the collective's result on one device."""
    result = instruction.result
    if instruction.opcode == "recv":
        result = parts_of(result)[0]
    elif instruction.opcode.endswith("-start") and (result.startswith("((") or "all-reduce" not in instruction.opcode):
        # The start of an asynchronous collective returns its operands, its results and scratch values.
        result = [*parts_of(result), result][1]
    arrays = sent_by(instruction, result)
    if not arrays:
        raise ProgramError(f"a collective does not say what it sends: {instruction.text:.300}")
    sliced = _SLICED.search(instruction.structure)
    if sliced is None:
        return arrays
    # A permute with slice sizes sends only slices of its arrays.
    shapes = [tuple(int(size) for size in own.split(",") if size) for own in sliced[1].strip("{}").split("},{")]
    return tuple(Array(arrays[min(at, len(arrays) - 1)].dtype, shape) for at, shape in enumerate(shapes))


def _require_local(instruction: Instruction) -> None:
    opcode, text = instruction.opcode, instruction.attributes
    if opcode.endswith(_ENDS) or (opcode in ("send", "recv") and "is_host_transfer=true" in text):
        return
    if opcode == "send" and _HAS_PAIRS in text:
        return  # its bytes count at the receive
    has_channel = _COMMUNICATES.search(text) and _COMMUNICATES.search(instruction.structure)
    is_kernel = opcode == "custom-call" and _KERNEL_SENDS.search(text)
    if has_channel or is_kernel or "all-" in opcode or "collective" in opcode:
        raise ProgramError(
            f"the program has a collective of a kind that is not known, `{opcode}`, so its traffic cannot be counted: "
            f"{instruction.text:.300}"
        )


def groups_of(instruction: Instruction, kind: str, devices: int) -> Groups:
    """The replica groups of a collective in a program for `devices` devices.

    **Returns:**

    Arrays of shape (groups, members), one per group size. For a permute it is one array of shape (pairs, 2) of senders
    and receivers, without devices that send to themselves.

    **Raises:**

    `ProgramError`, with the line, for groups that cannot be read, that name a device twice, or that name a device which
    does not exist.
    """
    is_permute = kind == "collective-permute"
    rows = (_pairs(instruction),) if is_permute else _rows(instruction)
    members = [] if rows is None or is_permute else np.concatenate([*map(np.ravel, rows)]).tolist()
    if len(set(members)) < len(members):
        raise ProgramError(f"a collective names a device twice: {instruction.text:.300}")
    has_channel = "channel_id=" in instruction.structure
    is_of_devices = "use_global_device_ids=true" in instruction.structure
    if is_of_devices or (has_channel and kind not in _SAYS_WHOSE):
        return (np.arange(devices)[None],) if rows is None else _known(rows, instruction, devices)
    # Otherwise the numbers are replica numbers. A program has one replica: all its devices, or each device alone.
    _known(rows or (), instruction, 1)
    return (np.arange(devices).reshape((1, -1) if has_channel else (-1, 1)),)


def groups_by_size(rows: Sequence[Sequence[int]]) -> Groups:
    """Replica groups as arrays, one for each size that the groups have."""
    return tuple(np.array(own) for own in together(rows, len).values())


def _known(rows: Groups, instruction: Instruction, count: int) -> Groups:
    most = max((int(own.max()) for own in rows if own.size), default=0)
    if most >= count:
        raise ProgramError(
            f"a collective names number {most}, and the program has {count} of what it names; pass `mesh=` if the "
            f"text's first line does not count its devices: {instruction.text:.300}"
        )
    return rows


def _pairs(instruction: Instruction) -> np.ndarray:
    # In the attributes of a send or receive the pairs can be in quotes.
    found = _PAIRS.search(instruction.structure) or _PAIRS.search(instruction.attributes.replace('"', ""))
    if found is None:
        raise ProgramError(f"a permute does not say who sends to whom: {instruction.text:.300}")
    pairs = [(int(source), int(target)) for source, target in _PAIR.findall(found[1])]
    return np.array([pair for pair in pairs if pair[0] != pair[1]], dtype=int).reshape(-1, 2)


def _rows(instruction: Instruction) -> Groups | None:
    text = instruction.structure
    if listed := _LISTED.search(text):
        return groups_by_size([[*map(int, group.split(","))] for group in listed[1][1:-1].split("},{") if group])
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
