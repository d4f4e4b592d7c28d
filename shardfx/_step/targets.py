"""The slices of TPUs that libtpu compiles for, by the names that users write."""

import math
from typing import NamedTuple

from .. import chips
from ..topology import MeshSpec
from .libtpu import TpuSlice, devices_of_slices


# libtpu's names of chips that have other names here.
LIBTPU_NAMES = {"v7x": "tpu7x"}


class Target(NamedTuple):
    """The slices that libtpu compiles for.

    - `slices`: their name and number.
    - `order`: the ids of their devices in the order of the mesh.
    """

    slices: TpuSlice
    order: tuple[int, ...]


def target_named(name: str, mesh: MeshSpec) -> Target:
    """The slices that a user names, such as "tpu:v5p:4x4x4". Raises `MeshError` if
    there is none of this name, if the mesh would not use every device, or if libtpu is
    not installed.
    """
    parsed = chips.parse_slice(name)
    own_name = LIBTPU_NAMES.get(parsed.chip.name, parsed.chip.name)
    extents = "x".join(map(str, parsed.extents))
    slices = TpuSlice(f"{own_name}:{extents}", math.prod(mesh.dcn_sizes))
    ordered = mesh.order(devices_of_slices(slices)).devices
    return Target(slices, tuple(device.id for device in ordered.flat))
