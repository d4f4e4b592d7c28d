"""The devices of a program along the axes of its mesh and in slices, and the transfers between slices.

Between hosts of different TPU slices, a program contains transfers as sends and receives.
"""

import itertools
import re
from collections.abc import Sequence

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from .. import topology
from .._ground.errors import MeshError, ProgramError
from ..topology import MeshSpec
from ._collective import Collective, Groups, sent_by
from ._hlo_text import HloModule, Instruction


# Hosts number the devices of several slices: slice * SLICE + device.
SLICE = 100_000
# `..._xla_megascale_target={{100000->200000},...},...`: a list of pairs or of device groups, with numbers slice *
# 100000 + device; or `"{1,2}x{0:15}"`, slices x devices, where devices with the same number form a group.
_TARGET = re.compile(r'_xla_megascale_target="?(\{.*?\})"?,_xla_megascale_transfer_type="(\w+)"')
_KINDS = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
_PRODUCT = re.compile(r"^\{([\d,:]+)\}x\{([\d,:]+)\}$")


class Where:
    """The position of each device of a program in its mesh and in its slice.

    Devices are numbered by position in the mesh. A program over several TPU slices is written for one slice and numbers
    the devices of that slice.

    **Arguments:**

    - `spec`, `mesh`: the mesh, if it is known.
    - `own`: the number of devices that the program counts.
    - `slices`: the number of slices that the program runs on, as far as it says.
    - `ids`: the ids of the mesh's devices, in its order, if they are known.
    """

    def __init__(
        self,
        spec: MeshSpec | None,
        mesh: MeshSpec | Mesh | AbstractMesh | None,
        own: int,
        slices: int = 1,
        ids: Sequence[int] = (),
    ):
        self.devices = own * slices if spec is None else spec.size
        self.names = () if spec is None else spec.axis_names
        sizes = () if spec is None else spec.axis_sizes
        count = np.arange(self.devices)
        self.coordinates = np.stack(np.unravel_index(count, sizes)) if sizes else np.zeros((0, self.devices))
        self.apart, self.slices = count, _slice_numbers(spec, mesh, self.devices)
        if not self.slices.any() and self.devices == own * slices:
            self.slices = count // own
        programs: list[np.ndarray] = [np.flatnonzero(self.slices == number) for number in range(self.slices.max() + 1)]
        if self.devices == own:
            programs = [count]
        if {len(one) for one in programs} != {own}:
            raise MeshError(f"the program runs on {own * slices} devices, and the mesh {spec} has {self.devices}.")
        self.programs = np.stack(programs)
        ids = [device.id for device in mesh.devices.ravel()] if isinstance(mesh, Mesh) else ids
        self.ids = {id_: at for at, id_ in enumerate(ids)}

    def lifted(self, groups: Groups, number: int | None) -> Groups:
        """Replica groups of one slice's device numbers as device ids: of all slices, or only of slice `number`."""
        programs = self.programs if number is None else self.programs[number : number + 1]
        return tuple(np.concatenate([program[own] for program in programs]) for own in groups)

    def numbers(self, names: Sequence[int]) -> dict[int, int]:
        """The device number for each name that hosts use."""
        if all(name in self.ids for name in names):
            return {name: self.ids[name] for name in names}
        first = min(name // SLICE for name in names)
        return {name: int(self.programs[name // SLICE - first, name % SLICE]) for name in names}

    def axes(self, collective: Collective) -> tuple[str, ...]:
        """The mesh axes along which the devices of a replica group differ."""
        found = np.zeros(len(self.names), dtype=bool)
        for own in collective.groups:
            where = self.coordinates[:, own]
            found |= (where != where[:, :, :1]).any(axis=(1, 2))
        return tuple(name for name, differs in zip(self.names, found.tolist(), strict=True) if differs)


def _slice_numbers(spec: MeshSpec | None, mesh: MeshSpec | Mesh | AbstractMesh | None, devices: int) -> np.ndarray:
    if isinstance(mesh, Mesh):
        found = topology.slices(mesh.devices.ravel().tolist())
        number = {id_: at for at, ids in enumerate(found) for id_ in ids}
        return np.array([number[device] for device in range(devices)])
    if spec is None or max(spec.dcn_sizes, default=1) == 1:
        return np.zeros(devices, dtype=int)
    parts = [size // slices for size, slices in zip(spec.axis_sizes, spec.dcn_sizes, strict=True)]
    where = np.stack(np.unravel_index(np.arange(devices), spec.axis_sizes))
    return np.asarray(np.ravel_multi_index(tuple(where // np.array(parts)[:, None]), spec.dcn_sizes))


def is_transfer(instruction: Instruction) -> bool:
    """Whether an instruction receives from another slice. A transfer is counted where it is received."""
    return instruction.opcode == "recv" and "_xla_megascale_target=" in instruction.attributes


def slices_of(module: HloModule) -> int:
    """The number of slices that the transfers of a program span; 1 without transfers."""
    transfers = [
        instruction
        for computation in module.computations.values()
        for instruction in computation.values()
        if is_transfer(instruction)
    ]
    names = {name // SLICE for one in transfers for row in _target(one)[0] for name in row}
    return max(1, max(names, default=1) - min(names, default=1) + 1)


def transfer_of(instruction: Instruction, where: Where) -> Collective:
    """A transfer between slices, as a collective among all devices that take part."""
    target, kind = _target(instruction)
    sent = sent_by(instruction, instruction.result)[0]
    numbers = where.numbers(sorted({name for row in target for name in row}))
    rows = [[numbers[name] for name in row] for row in target]
    counts = dict.fromkeys(map(len, rows))
    groups = tuple(np.array([row for row in rows if len(row) == count]) for count in counts)
    return Collective(kind, (sent,), (sent.bytes,), groups)


def _target(instruction: Instruction) -> tuple[list[list[int]], str]:
    """The groups of devices that exchange, by the names that hosts use, and the kind of the collective."""
    found = _TARGET.search(instruction.attributes)
    if found is None or found[2] not in _KINDS:
        raise ProgramError(f"a transfer between slices does not say what goes whither: {instruction.text:.300}")
    if product := _PRODUCT.match(found[1]):
        slices, devices = (_listed(part) for part in product.groups())
        return [[slice_ * SLICE + device for slice_ in slices] for device in devices], _KINDS[found[2]]
    rows = [[int(name) for name in re.findall(r"\d+", row)] for row in found[1][1:-1].split("},{")]
    return rows, _KINDS[found[2]]


def _listed(text: str) -> list[int]:
    """The numbers in a text such as `0:3,8`, here 0, 1, 2, 3 and 8."""
    ends = [[int(number) for number in part.split(":")] for part in text.split(",")]
    return list(itertools.chain.from_iterable(range(own[0], own[-1] + 1) for own in ends))
