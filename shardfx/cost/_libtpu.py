"""libtpu's own program of a step: the slices for which it is asked, and the module and
the memory that it answers with. The extents of a slice are its chips along each
dimension of the torus.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Sequence
from typing import Any

from .. import chips
from .._ground.errors import MeshError
from .._step import (
    LIBTPU_NAMES,
    HloModule,
    Step,
    Target,
    TpuDumps,
    TpuSlice,
    TpuTexts,
    devices_of_slices,
    is_tupled,
    libtpu_path,
    parse_hlo,
)
from ..chips._chip import extents_of
from ..topology import MeshSpec
from ._allocations import assigned_memory
from ._memory import Memory


INSTALL = "`pip install 'shardfx[aot]'` asks libtpu itself, without a TPU."
# The chip of a step for TPUs if none is named, and the one for larger slices.
_CHIP = "v5e"
_LARGE_CHIP = "v5p"
# The devices of the smallest slice that libtpu describes: one host of 2 x 2 chips.
_DEVICES_OF_HOST = 4
# libtpu compiles larger slices too, but takes minutes.
_MOST_DEVICES = 9216


@dataclasses.dataclass(frozen=True, eq=False)
class TpuAnswer:
    """libtpu's answer about a step.

    - `dumps`: what libtpu dumps.
    - `target`: the slices that it compiled for.
    - `argument_count`: the number of the step's arrays.
    """

    dumps: TpuDumps
    target: Target
    argument_count: int

    @ft.cached_property
    def module(self) -> HloModule:
        """The scheduled program of one device."""
        module = parse_hlo(self.dumps.scheduled)
        return dataclasses.replace(module, partitions=len(self.target.order))

    @ft.cached_property
    def memory(self) -> Memory:
        """The memory of one device in HBM."""
        # All texts at once: the module is among them.
        texts = self.dumps.texts
        return memory_in(texts, self.module, self.argument_count)


def memory_in(texts: TpuTexts, module: HloModule, argument_count: int) -> Memory:
    """The memory of one device in HBM as libtpu assigns it, from its texts and its
    scheduled module.
    """
    tupled = is_tupled(argument_count)
    return assigned_memory(texts, module, argument_count, is_tupled=tupled)


def chip_of(compiler: str, mesh: MeshSpec) -> chips.Chip:
    """The chip that `compiler` names: v5p for "tpu:v5p:4x4x4" and "tpu:v5p". For "tpu",
    it is one that has slices of the mesh's size.
    """
    if compiler != "tpu":
        return chips.find(compiler.removeprefix("tpu:"))
    chip = chips.find(_CHIP)
    devices = mesh.size // math.prod(mesh.dcn_sizes)
    if devices <= chip.island_chips:
        return chip
    return chips.find(_LARGE_CHIP)


@ft.lru_cache(maxsize=256)
def target_of(chip: chips.Chip, mesh: MeshSpec) -> Target | None:
    """The slices on which a step for `mesh` runs on a chip; `None` if libtpu is not
    installed, or has no slices of this size. A target is the slices, and the ids of
    their devices in the order of the mesh.
    """
    if libtpu_path() is None or not chip.torus_dims or mesh.size > _MOST_DEVICES:
        return None
    slice_count = math.prod(mesh.dcn_sizes)
    slice_devices = mesh.size // slice_count
    per_chip = chip.devices_per_chip
    if slice_count == 1 and slice_devices < _DEVICES_OF_HOST:
        return _part_of_host(chip, mesh)
    extents = extents_of(chip, slice_devices)
    # The nearest slice is larger: the chip has none of this size.
    if math.prod(extents) * per_chip != slice_devices:
        return None
    tpu_slices = TpuSlice(_name(chip, extents), slice_count)
    try:
        mesh_devices = mesh.order(devices_of_slices(tpu_slices)).devices
    except MeshError:
        return None
    return Target(tpu_slices, tuple(device.id for device in mesh_devices.flat))


def _part_of_host(chip: chips.Chip, mesh: MeshSpec) -> Target | None:
    """The first devices of the smallest slice, for a mesh that is smaller; `None` if
    libtpu does not know the slice. A target is the slice, and the ids of its devices in
    the order of the mesh.
    """
    extents = (2, 2, 1)[: chip.torus_dims]
    slices = TpuSlice(_name(chip, extents))
    try:
        devices = devices_of_slices(slices)
    except MeshError:
        return None
    return Target(slices, tuple(device.id for device in devices[: mesh.size]))


def _name(chip: chips.Chip, extents: Sequence[int]) -> str:
    """libtpu's name of a slice. The first two extents hold whole hosts of 2 x 2 chips,
    so they are even.
    """
    even_first = sorted(extents, key=lambda extent: extent % 2)
    name = LIBTPU_NAMES.get(chip.name, chip.name)
    return f"{name}:{'x'.join(map(str, even_first))}"


def tpu_program(step: Step, chip: chips.Chip, **changed: Any) -> TpuAnswer | None:
    """libtpu's program of a step on a chip; `None` if it cannot be asked: it is not
    installed, has no such slices, or the step calls back to Python. `changed` has
    keyword arguments of `Step.tpu_dumps`, such as other shardings. Raises
    `ProgramError` with libtpu's own message if it cannot compile the step.
    """
    target = target_of(chip, step.mesh)
    if target is None or step.callbacks:
        return None
    return tpu_answer(step, target, **changed)


def tpu_answer(step: Step, target: Target, **changed: Any) -> TpuAnswer:
    """libtpu's program of a step for slices. `changed` and errors are those of
    `tpu_program`.
    """
    dumps = step.tpu_dumps(target.slices, target.order, **changed)
    arguments, _ = step.parameters
    return TpuAnswer(dumps=dumps, target=target, argument_count=len(arguments))


def why_foreseen(step: Step, chip: chips.Chip) -> str:
    """A sentence that says why libtpu is not asked about a step."""
    if step.callbacks:
        return (
            f"{step.callbacks[0]} calls back to Python, which libtpu does not compile."
        )
    if libtpu_path() is None:
        return f"libtpu is not installed: {INSTALL}"
    return f"libtpu has no slice of {step.mesh.size:,} devices of {chip.name}."
