"""The collectives of a compiled program: the bytes that each one sends, its replica
groups, and their mesh axes.

HLO has several notations for replica groups, and this module reads all of them. Between
TPU slices, a program has pairs of a `send` and a `recv` instruction, here called
transfers. Each transfer performs a collective between slices, and is read as this
collective.
"""

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Final, Literal, NamedTuple

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from .. import topology
from .._ground.errors import MeshError, ProgramError
from .._ground.opcodes import CONTINUATIONS, WITH_ID_FLAG
from .._ground.text import together
from ..topology import MeshSpec
from .hlo_text import Array, HloModule, Instruction, array_of, arrays_in, parts_of
from .mesh_text import (
    axis_sizes,
    device_ids,
    numbers_in,
    sub_axes_in,
    transposed_iota,
)


def _gathered(size: Fraction, labels: np.ndarray) -> Fraction:
    """The bytes that all devices receive in an all-gather; `CollectiveKind` explains
    the arguments.
    """
    # Bytes from another slice enter a slice once for all of its devices: compilers for
    # TPUs gather hierarchically.
    other_labels = 0
    for row in labels.tolist():
        other_labels += len(set(row)) - 1
    return size * other_labels


def _exchanged(size: Fraction, labels: np.ndarray) -> Fraction:
    """The bytes that all devices receive in an all-to-all; `CollectiveKind` explains
    the arguments.
    """
    have_unequal_labels = labels[:, :, None] != labels[:, None, :]
    return size * int(have_unequal_labels.sum()) / labels.shape[1]


def _permuted(size: Fraction, labels: np.ndarray) -> Fraction:
    """The bytes that all devices receive in a permute of pairs; `CollectiveKind`
    explains the arguments.
    """
    have_unequal_labels = labels[:, 0] != labels[:, -1]
    return size * int(have_unequal_labels.sum())


def _reduced(size: Fraction, labels: np.ndarray) -> Fraction:
    """The bytes that all devices receive in an all-reduce: a reduce-scatter, then an
    all-gather.
    """
    return 2 * _gathered(size, labels)


def _scattered(size: Fraction, labels: np.ndarray) -> Fraction:
    """The bytes that all devices receive in a reduce-scatter, whose result is one
    shard.
    """
    return labels.shape[1] * _gathered(size, labels)


class CollectiveKind(NamedTuple):
    """The properties of a kind of collective, such as an all-gather.

    - `received`: a function that returns the bytes that all devices receive together.
      Its arguments are the bytes of the result on one device, and an array of shape
      (replica groups, members) with a number for each device, such as that of its
      slice. Bytes between two devices count if their numbers differ.
    - `links`: the network links that limit the collective. "rings": all links of the
      replica group. "middle": the links in the middle of the longest ring, since half
      of the bytes cross them. "one": one link.
    - `moves`: whether the collective only moves elements of its operand, without
      arithmetic.
    """

    received: Callable[[Fraction, np.ndarray], Fraction]
    links: Literal["rings", "middle", "one"] = "rings"
    moves: bool = False


KINDS: Final[Mapping[str, CollectiveKind]] = {
    "all-gather": CollectiveKind(_gathered, moves=True),
    "all-reduce": CollectiveKind(_reduced),
    "reduce-scatter": CollectiveKind(_scattered),
    "all-to-all": CollectiveKind(_exchanged, "middle", moves=True),
    "ragged-all-to-all": CollectiveKind(_exchanged, "middle"),
    "collective-permute": CollectiveKind(_permuted, "one", moves=True),
    "collective-broadcast": CollectiveKind(_gathered, moves=True),
}
MOVING: Final = frozenset(name for name, kind in KINDS.items() if kind.moves)
# An instruction that names device groups, or a channel between devices, communicates,
# and its kind must be known.
_COMMUNICATES = re.compile(
    r"\b(replica_groups|source_target_pairs|device_groups|channel_id|collective_id)="
)
# "call-start", which begins work of a TPU's SparseCore, is none.
_NAMES_COLLECTIVE = re.compile(r"\ball-|collective")
# Only the backend configuration of a kernel shows that the kernel itself sends to other
# devices.
_KERNEL_SENDS = re.compile(r'"has_communication":\s*true|"collective_id":\s*"?\d')
# The compiler for GPUs may write a permute as a `send` and a `recv` with this
# attribute.
_HAS_PAIRS = "source_target_pairs="
_SLICED = re.compile(r"\bslice_sizes=\{((?:\{[\d,]*\},?)*)\}")
# Replica groups: arrays of device numbers of shape (groups, members), one array for
# each group size. For a permute, one array of shape (pairs, 2) with senders and
# receivers, without pairs of equal devices.
Groups = tuple[np.ndarray, ...]

_LISTED = re.compile(r"replica_groups=\{(\{[\d,{}]*\})\}")
# `[4,2]<=[2,4]T(1,0)`: the numbers 0 to 7 in an array of shape (2, 4), transposed, as
# four groups of two devices.
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
# `mesh['x'=2,'y'=4], device_ids=([2,4]T(1,0)) {'y','x':(1)2}`: groups along mesh axes
# or sub-axes. The text of a sub-axis is (the product of the sizes of the sub-axes
# before it)size. `device_ids` is the order of the mesh's devices.
_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^)]*(?:\([^)]*\))?)\))?"
    r" \{([^}]*)\}"
)
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_PAIR = re.compile(r"\{(\d+),(\d+)\}")


class Collective(NamedTuple):
    """One execution of a collective of a compiled program.

    - `kind`: XLA's name of the kind, a key of `KINDS`.
    - `arrays`: the arrays of the collective's result on one device.
    - `parts`: the bytes of each of these arrays. For a reduce-scatter, these are the
      bytes of one shard.
    - `groups`: the replica groups.
    """

    kind: str
    arrays: tuple[Array, ...]
    parts: tuple[Fraction, ...]
    groups: Groups

    @property
    def dtype(self) -> str:
        """The dtype of the collective's result in HLO's notation; several dtypes are
        separated by "+".
        """
        return "+".join(dict.fromkeys(array.dtype for array in self.arrays))

    @property
    def bytes(self) -> Fraction:
        """The bytes of the collective's whole result on one device."""
        return sum(self.parts, Fraction(0))

    @property
    def group_size(self) -> int:
        """The number of devices in the largest replica group; 2 for a permute."""
        return max(members.shape[1] for members in self.groups)

    def wire_bytes(self, labels: np.ndarray) -> Fraction:
        """The bytes that enter a device, as the mean over all devices. `labels` has a
        number for each device. Bytes between two devices count if their labels differ:
        with slice numbers as labels, these are the bytes between slices.
        """
        received = KINDS[self.kind].received
        total_bytes = Fraction(0)
        for members in self.groups:
            total_bytes += received(self.bytes, labels[members])
        return total_bytes / len(labels)


def collective_of(instruction: Instruction, devices: int) -> Collective | None:
    """The collective that an instruction starts, in a program for `devices` devices;
    `None` if it starts none. Raises `ProgramError` for a collective of an unknown kind.
    """
    kind = instruction.opcode.removesuffix("-start")
    if kind == "recv" and _HAS_PAIRS in instruction.attributes:
        kind = "collective-permute"
    elif kind not in KINDS:
        _require_local(instruction)
        return None
    arrays = _arrays(instruction)
    return Collective(
        kind=kind,
        arrays=arrays,
        parts=tuple(array.bytes for array in arrays),
        groups=groups_of(instruction, kind, devices),
    )


def channel_of(instruction: Instruction) -> int | None:
    """The `channel_id` of an instruction, which identifies its collective; `None` if it
    has no channel.
    """
    match = re.search(r"\bchannel_id=(\d+)", instruction.structure)
    if match is None:
        return None
    return int(match[1])


def _arrays(instruction: Instruction) -> tuple[Array, ...]:
    """The arrays of a collective's result on one device; of a permute of slices, the
    slices. Raises `ProgramError` if there are none.
    """
    opcode = instruction.opcode
    result = instruction.result
    if opcode == "recv":
        result = parts_of(result)[0]
    elif opcode.endswith("-start"):
        # The start of an asynchronous collective returns its operands, its results and
        # scratch values. That of an all-reduce may return its results alone.
        if result.startswith("((") or "all-reduce" not in opcode:
            parts = parts_of(result)
            result = parts[1] if len(parts) > 1 else result
    arrays = arrays_in(result)
    if not arrays:
        raise ProgramError("a collective does not say what it sends")
    sliced = _SLICED.search(instruction.structure)
    if sliced is None:
        return arrays
    # A permute with slice sizes sends only slices of its arrays.
    slices = []
    for number, sizes in enumerate(sliced[1].strip("{}").split("},{")):
        array = arrays[min(number, len(arrays) - 1)]
        slices.append(Array(array.dtype, numbers_in(sizes)))
    return tuple(slices)


def _require_local(instruction: Instruction) -> None:
    """Raises `ProgramError` if an instruction that is no known collective communicates
    between devices.
    """
    opcode = instruction.opcode
    text = instruction.attributes
    # The end of an asynchronous collective has a channel too.
    if opcode.endswith(CONTINUATIONS):
        return
    if opcode in ("send", "recv") and "is_host_transfer=true" in text:
        return
    if opcode == "send" and _HAS_PAIRS in text:
        return  # its bytes count at the receive
    # `structure` has no quoted text, and takes longer to make.
    has_channel = _COMMUNICATES.search(text) and _COMMUNICATES.search(
        instruction.structure
    )
    is_kernel = opcode == "custom-call" and _KERNEL_SENDS.search(text)
    if has_channel or is_kernel or _NAMES_COLLECTIVE.search(opcode):
        raise ProgramError(
            f"the program has a collective of a kind that is not known, `{opcode}`, so"
            " its traffic cannot be counted"
        )


def groups_of(instruction: Instruction, kind: str, devices: int) -> Groups:
    """The replica groups of a collective of this `kind`, in a program for `devices`
    devices. Raises `ProgramError` for groups that cannot be read, that have a device
    twice, or that have an unknown device.
    """
    has_pairs = kind == "collective-permute" or _HAS_PAIRS in instruction.structure
    rows = (_pairs(instruction),) if has_pairs else _listed_groups(instruction)
    members: list[int] = []
    for row in rows or ():
        members += row.ravel().tolist()
    if not has_pairs and len(set(members)) < len(members):
        raise ProgramError("a collective names a device twice")
    has_channel = "channel_id=" in instruction.structure
    has_device_numbers = "use_global_device_ids=true" in instruction.structure
    if kind not in WITH_ID_FLAG:
        has_device_numbers = has_device_numbers or has_channel
    # Otherwise the numbers are replica numbers, and a program has one replica, number
    # 0.
    number_count = devices if has_device_numbers else 1
    largest = max(members, default=0)
    if largest >= number_count:
        raise ProgramError(
            f"a collective names number {largest}, and the program has {number_count}"
            " of what it names; pass `mesh=` if the text's first line does not count its"
            " devices"
        )
    if has_device_numbers and rows is not None:
        return rows
    everyone = np.arange(devices)
    if has_device_numbers or has_channel:
        return (everyone.reshape(1, -1),)
    return (everyone.reshape(-1, 1),)


def groups_by_size(rows: Sequence[Sequence[int]]) -> Groups:
    """Replica groups as one array for each group size."""
    return tuple(np.array(members) for members in together(rows, len).values())


def _pairs(instruction: Instruction) -> np.ndarray:
    """The senders and receivers of a permute, of shape (pairs, 2), without pairs of
    equal devices. Raises `ProgramError` if the instruction names none.
    """
    match = _PAIRS.search(instruction.structure)
    if match is None:
        # The pairs of a `send` or `recv` can be in quotes.
        match = _PAIRS.search(instruction.attributes.replace('"', ""))
    if match is None:
        raise ProgramError("a permute does not say who sends to whom")
    pairs = []
    for source, target in _PAIR.findall(match[1]):
        if int(source) != int(target):
            pairs.append((int(source), int(target)))
    return np.array(pairs, dtype=int).reshape(-1, 2)


def _listed_groups(instruction: Instruction) -> Groups | None:
    """The replica groups that the attributes of a collective list; `None` if they list
    none.
    """
    text = instruction.structure
    if listed := _LISTED.search(text):
        groups = listed[1][1:-1].split("},{")
        return groups_by_size([numbers_in(group) for group in groups if group])
    if iota := _IOTA.search(text):
        grid = transposed_iota(iota[3], iota[4])
        return (grid.reshape(int(iota[1]), int(iota[2])),)
    if mesh := _MESH.search(text):
        return (_mesh_groups(mesh[1], mesh[2], mesh[3]),)
    if "replica_groups={}" in text or "replica_groups=" not in text:
        return None
    raise ProgramError("the groups of a collective cannot be read")


def _mesh_groups(mesh: str, order: str | None, used: str) -> np.ndarray:
    """The replica groups along mesh axes, from the three parts of `_MESH`.

    `mesh` lists the axes with their sizes, as `'x'=2,'y'=4`. `order` is the order of
    the device numbers, as `[4,2]T(1,0)` or a list; `None` for their own. `used` lists
    the axes along which the members of a group differ, as `'y','x':(1)2`.
    """
    sub_axes = {sub_axis.axis: sub_axis for sub_axis in sub_axes_in(used)}
    # Each axis as three dimensions: before, within and behind its sub-axis.
    shape: list[int] = []
    inner_dims: list[int] = []
    for name, size in axis_sizes(mesh).items():
        major = size
        minor = 1
        if name in sub_axes:
            sub_axis = sub_axes[name]
            major = sub_axis.outer_size
            minor = sub_axis.size or size
        inner_dims.append(len(shape) + 1)
        shape += [major, minor, size // major // minor]
    ids = np.arange(math.prod(shape)) if order is None else device_ids(order)
    outer_dims = [axis for axis in range(len(shape)) if axis not in inner_dims]
    grid = ids.reshape(shape).transpose(*outer_dims, *inner_dims)
    group_size = math.prod(shape[axis] for axis in inner_dims)
    return grid.reshape(-1, group_size)


# Transfers between slices number devices as slice * SLICE + device.
SLICE = 100_000
# `..._xla_megascale_target={{100000->200000},...},...`: a list of pairs or of device
# groups. Or `"{1,2}x{0:15}"`, slices x devices: the devices with one number in all
# slices form a group.
_TARGET = re.compile(
    r'_xla_megascale_target="?(\{.*?\})"?,_xla_megascale_transfer_type="(\w+)"'
)
_KINDS = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
_PRODUCT = re.compile(r"^\{([\d,:]+)\}x\{([\d,:]+)\}$")


class DevicePositions:
    """The position in the mesh, and the slice, of each device that runs a program.

    A program over several TPU slices is written for one slice: its device numbers are
    positions in that slice. In any other program, a device's number is its position in
    the mesh.

    - `mesh`: the mesh; `None` if it is not known.
    - `slice_devices`: the number of devices in the program's first line; 1 if the line
      does not have it.
    - `slices`: the numbers of the slices in the program's text.
    - `ids`: the ids of the devices in the order of the mesh; empty if they are not
      known.

    In the order of the mesh, `device_numbers` counts the devices, `slice_numbers` has
    the slice of each, and `coordinates` the position of each along each mesh axis.
    `positions_by_slice` has a row for each slice: the position in the mesh of each
    device number of the program.
    """

    def __init__(
        self,
        mesh: MeshSpec | Mesh | AbstractMesh | None,
        slice_devices: int,
        slices: range = range(1),
        ids: Sequence[int] = (),
    ):
        """The arguments are those of the class: the mesh, the devices of one slice in
        the program's first line, the numbers of the program's slices, and the ids of
        the devices in the order of the mesh.
        """
        spec = MeshSpec({}) if mesh is None else MeshSpec.of(mesh)
        # The text does not say the number, or each slice has one device.
        if mesh is not None and slice_devices == 1:
            slice_devices = max(1, spec.size // len(slices))
        program_devices = slice_devices * len(slices)
        self.first_slice = slices.start
        self.slice_devices = slice_devices
        self.device_count = program_devices if mesh is None else spec.size
        self.axis_names = spec.axis_names
        self.device_numbers = np.arange(self.device_count)
        self.slice_numbers: np.ndarray = np.zeros(self.device_count, int)
        self.coordinates = np.zeros((0, self.device_count))
        if self.axis_names:
            self.coordinates = np.stack(
                np.unravel_index(self.device_numbers, spec.axis_sizes)
            )
            size_in_slice = np.array(spec.axis_sizes) // np.array(spec.dcn_sizes)
            slice_coordinates = tuple(self.coordinates // size_in_slice[:, None])
            slice_numbers = np.ravel_multi_index(slice_coordinates, spec.dcn_sizes)
            self.slice_numbers = np.asarray(slice_numbers)
        if isinstance(mesh, Mesh):
            ids = [device.id for device in mesh.devices.ravel()]
            # The devices say to which slice each belongs.
            for number, members in enumerate(topology.slices(mesh.devices)):
                self.slice_numbers[list(members)] = number
        # The mesh says nothing of slices: it has the devices of one after another.
        if not self.slice_numbers.any() and self.device_count == program_devices:
            self.slice_numbers = self.device_numbers // slice_devices
        positions_by_slice = [self.device_numbers]
        if self.device_count != slice_devices:
            positions_by_slice = []
            for number in range(self.slice_numbers.max() + 1):
                is_in_slice = self.slice_numbers == number
                positions_by_slice.append(np.flatnonzero(is_in_slice))
        if set(map(len, positions_by_slice)) != {slice_devices}:
            raise MeshError(
                f"the program runs on {program_devices} devices, and the mesh"
                f" {spec} has {self.device_count}."
            )
        self.positions_by_slice = np.stack(positions_by_slice)
        self.position_by_id = {id_: position for position, id_ in enumerate(ids)}

    def in_mesh(self, groups: Groups, number: int | None) -> Groups:
        """Converts replica groups of positions in one slice to groups of positions in
        the mesh. The result has the groups of slice `number`, or of every slice if
        `number` is `None`. If two slices have the positions 0 to 3 and 4 to 7 in the
        mesh, {0,1} is {4,5} for slice 1, and {0,1},{4,5} for `None`.
        """
        slices = self.positions_by_slice
        if number is not None:
            slices = slices[number : number + 1]
        groups_in_mesh = []
        for members in groups:
            members_by_slice = [positions[members] for positions in slices]
            groups_in_mesh.append(np.concatenate(members_by_slice))
        return tuple(groups_in_mesh)

    def numbers_of(self, ids: Sequence[int]) -> dict[int, int]:
        """For each device id in `ids`, the device's position in the mesh. `ids` are
        from the text of a transfer.
        """
        if all(id_ in self.position_by_id for id_ in ids):
            return {id_: self.position_by_id[id_] for id_ in ids}
        numbers = {}
        for id_ in ids:
            slice_number, device = divmod(id_, SLICE)
            row = slice_number - self.first_slice
            numbers[id_] = int(self.positions_by_slice[row, device])
        return numbers

    def axes(self, collective: Collective) -> tuple[str, ...]:
        """The mesh axes along which the devices of a collective's replica group
        differ.
        """
        differs = np.zeros(len(self.axis_names), dtype=bool)
        for group in collective.groups:
            members = self.coordinates[:, group]
            differs |= (members != members[:, :, :1]).any(axis=(1, 2))
        return tuple(itertools.compress(self.axis_names, differs.tolist()))


def is_transfer(instruction: Instruction) -> bool:
    """Whether an instruction is the `recv` of a transfer. The bytes of a transfer count
    at its `recv`.
    """
    return (
        instruction.opcode == "recv"
        and "_xla_megascale_target=" in instruction.attributes
    )


def slices_of(module: HloModule) -> range:
    """The numbers of the TPU slices between which a program has transfers: often 1 and
    2. One slice, number 0, if it has none.
    """
    slices: set[int] = set()
    for computation in module.computations.values():
        for instruction in filter(is_transfer, computation.values()):
            for group in _target(instruction).groups:
                slices.update(id_ // SLICE for id_ in group)
    if not slices:
        return range(1)
    return range(min(slices), max(slices) + 1)


def transfer_of(instruction: Instruction, positions: DevicePositions) -> Collective:
    """The collective that a transfer performs. `instruction` is its `recv`."""
    target = _target(instruction)
    array = array_of(instruction)
    ids = set(itertools.chain.from_iterable(target.groups))
    numbers = positions.numbers_of(sorted(ids))
    groups = [[numbers[id_] for id_ in group] for group in target.groups]
    return Collective(
        kind=target.kind,
        arrays=(array,),
        parts=(array.bytes,),
        groups=groups_by_size(groups),
    )


class _Target(NamedTuple):
    """The groups of device ids that a transfer connects, and the kind of its
    collective.
    """

    groups: list[list[int]]
    kind: str


def _target(instruction: Instruction) -> _Target:
    """What a transfer connects, from its `recv`. Raises `ProgramError` if the `recv`
    does not name it.
    """
    match = _TARGET.search(instruction.attributes)
    if match is None or match[2] not in _KINDS:
        raise ProgramError(
            "a transfer between slices does not say what goes whither:"
            f" {instruction.text:.300}"
        )
    groups: list[list[int]] = []
    if product := _PRODUCT.match(match[1]):
        slices, devices = map(_numbers_and_ranges, product.groups())
        for device in devices:
            groups.append([number * SLICE + device for number in slices])
    else:
        for row in match[1][1:-1].split("},{"):
            groups.append(list(map(int, re.findall(r"\d+", row))))
    return _Target(groups=groups, kind=_KINDS[match[2]])


def _numbers_and_ranges(text: str) -> list[int]:
    """The numbers in a text that lists numbers and ranges: 0, 1, 2, 3 and 8 for the
    text `0:3,8`.
    """
    numbers: list[int] = []
    for part in text.split(","):
        bounds = list(map(int, part.split(":")))
        numbers += range(bounds[0], bounds[-1] + 1)
    return numbers
