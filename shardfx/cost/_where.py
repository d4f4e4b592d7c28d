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
from ._collective import Collective, Groups, groups_by_size, sent_by
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

    - `mesh`: the mesh, if it is known.
    - `own`: the number of devices in the first line of the program. Some texts do not say it; then it is 1.
    - `slices`: the number of slices that the program runs on, as far as it says.
    - `ids`: the ids of the mesh's devices, in its order, if they are known.
    """

    def __init__(self, mesh: MeshSpec | Mesh | AbstractMesh | None, own: int, slices: int = 1, ids: Sequence[int] = ()):
        spec = MeshSpec({}) if mesh is None else MeshSpec.of(mesh)
        self.own = own = spec.size if mesh is not None and own == 1 else own
        self.devices = own * slices if mesh is None else spec.size
        self.names, self.apart = spec.axis_names, np.arange(self.devices)
        self.slices = np.zeros(self.devices, int)
        self.coordinates = np.zeros((0, self.devices))
        if self.names:
            self.coordinates = np.stack(np.unravel_index(self.apart, spec.axis_sizes))
            parts = np.array(spec.axis_sizes) // np.array(spec.dcn_sizes)
            self.slices = np.ravel_multi_index(tuple(self.coordinates // parts[:, None]), spec.dcn_sizes)
        if isinstance(mesh, Mesh):
            ids = [device.id for device in mesh.devices.ravel()]
            for number, members in enumerate(topology.slices(mesh.devices)):
                self.slices[[*members]] = number
        if not self.slices.any() and self.devices == own * slices:
            self.slices = self.apart // own
        programs = [np.flatnonzero(self.slices == number) for number in range(self.slices.max() + 1)]
        if self.devices == own:
            programs = [self.apart]
        if {len(one) for one in programs} != {own}:
            raise MeshError(f"the program runs on {own * slices} devices, and the mesh {spec} has {self.devices}.")
        self.programs = np.stack(programs)
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
    groups = groups_by_size([[numbers[name] for name in row] for row in target])
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
