"""One accelerator's memory, arithmetic and network, and the links that each mesh axis has in a slice.

There is one model of links. `axes_on` lays mesh axes over the dimensions of a slice, which gives the links of each
collective. `shared` describes the same network by two numbers, for prices of thousands of meshes at once: an axis has
links in proportion to the logarithm of its size.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from .._ground.errors import ChipError
from .._ground.spec import DType
from ..topology import wraps


@dataclasses.dataclass(frozen=True)
class Chip:
    """The memory, the arithmetic and the network of one accelerator.

    It is plain data: make your own, or `dataclasses.replace(chips.find("h100"), name="my h100", ...)`.

    **Arguments:**

    - `name`: such as "v5p".
    - `hbm_bytes`: nominal memory.
    - `usable_hbm_bytes`: bytes that a program may fill. The runtime keeps the rest.
    - `hbm_bytes_per_second`: between memory and cores.
    - `flops_per_second`: pairs of a dtype's name and the peak of products in it; dense, without sparsity.
    - `link_bytes_per_second`: bytes per second of one link in one direction. If a switch joins the chips: of all links
        of a chip, in one direction.
    - `torus_dims`: the number of dimensions of the network, with two links in each; 0 if a switch joins the chips.
    - `island_chips`: the largest number of chips that this network joins.
    - `dcn_bytes_per_second`: bytes per second in one direction of a host's network, divided by the chips of the host.
    - `devices_per_chip`: the number of devices that JAX shows for it.
    - `tile`: the rows and columns to whose multiples the chip pads the last two dimensions of an array; `None` if it
        does not pad.
    - `kinds`: JAX's names for it (`device.device_kind`).
    - `sources`: pairs of a field and where its value is from, "*" for all fields that are not named. "secondary" is
        a source that is not the vendor's; "sources differ" names the other value.
    """

    __module__ = "shardfx.chips"

    name: str
    hbm_bytes: int
    usable_hbm_bytes: int
    hbm_bytes_per_second: float | int
    flops_per_second: tuple[tuple[str, float | int], ...]
    link_bytes_per_second: float | int
    torus_dims: int
    island_chips: int
    dcn_bytes_per_second: float | int
    devices_per_chip: int = 1
    tile: tuple[int, int] | None = None
    kinds: tuple[str, ...] = ()
    sources: tuple[tuple[str, str], ...] = ()

    def __post_init__(self):
        for name in ("hbm_bytes", "usable_hbm_bytes", "hbm_bytes_per_second", "island_chips", "devices_per_chip"):
            if not getattr(self, name) > 0:
                raise ChipError(f"chip {self.name!r}: `{name}` must be more than 0, not {getattr(self, name)}.")
        if self.usable_hbm_bytes > self.hbm_bytes:
            raise ChipError(
                f"chip {self.name!r}: {self.usable_hbm_bytes} usable bytes are more than it has ({self.hbm_bytes}); "
                "set `usable_hbm_bytes` to what is left beside the runtime."
            )

    @property
    def links(self) -> int:
        """The number of links of a chip; 1 if a switch joins the chips."""
        return 2 * self.torus_dims or 1

    @property
    def usable_hbm_bytes_per_device(self) -> int:
        """Bytes that a program may fill on one of JAX's devices."""
        return self.usable_hbm_bytes // self.devices_per_chip

    def flops(self, dtype: DType = "bfloat16") -> float | int:
        """Floating-point operations of one chip per second, at its peak.

        **Arguments:**

        - `dtype`: the dtype of the operands. float16 counts as bfloat16, every kind of fp8 as "float8", of fp4 as
            "float4".

        **Raises:**

        `ChipError` for a dtype whose peak is unknown.

        !!! Example

            ```python
            from shardfx import chips

            assert chips.find("v5p").flops("bfloat16") == 459e12
            ```
        """
        is_group = isinstance(dtype, str) and dtype in ("float8", "float4")
        name = dtype if is_group else re.sub(r"^float([48])_.*", r"float\1", jnp.dtype(dtype).name)
        name = "bfloat16" if name == "float16" else name
        known = dict(self.flops_per_second)
        if name not in known:
            raise ChipError(
                f"chip {self.name!r}: no peak is known for {name}; there are {', '.join(known)}. Add one with "
                f'`dataclasses.replace(chip, flops_per_second=(*chip.flops_per_second, ("{name}", ...)))`.'
            )
        return known[name]

    def source(self, field: str) -> str:
        """The source of a field's value; "" if it has none. The entry "*" of `sources` is for all fields without their
        own.
        """
        told = dict(self.sources)
        return told.get(field, told.get("*", ""))


def near_cube(count: int, dims: int) -> tuple[int, ...]:
    """The most cubic shape of `count` chips in `dims` dimensions, the smallest extent first."""
    if dims == 1:
        return (count,)
    root = round(count ** (1 / dims))
    first = next(size for size in range(max(1, root), 0, -1) if count % size == 0)
    return tuple(sorted((first, *near_cube(count // first, dims - 1))))


class Ring(NamedTuple):
    """The chips of one dimension of a slice that a mesh axis covers. The ring is closed if links join its ends."""

    size: int
    closed: bool

    @property
    def ways(self) -> int:
        """The number of links over which bytes enter a device along the ring: 2 if it is closed, else 1."""
        return 2 if self.closed else 1


class Shared(NamedTuple):
    """The average network of a slice, for mesh axes whose place on the torus is not known: bytes per second along one
    dimension, number of dimensions, devices per island.

    An island is a group of chips that a switch joins; a torus has none.
    """

    bytes_per_second: float
    dims: float
    island_devices: float


def extents_of(chip: Chip, devices: int) -> tuple[int, ...]:
    """The most cubic shape of a slice of `devices` devices."""
    return near_cube(devices // chip.devices_per_chip or 1, chip.torus_dims or 1)


def closed(chip: Chip, extents: Sequence[int]) -> tuple[bool, ...]:
    """For each dimension of a slice, whether it is a ring."""
    return wraps(chip.kinds[0] if chip.kinds else "", extents)


def shared(chip: Chip, extents: Sequence[int]) -> Shared:
    """The average network of a slice. A closed dimension counts twice, since bytes travel in both directions."""
    link = float(chip.link_bytes_per_second)
    if not chip.torus_dims:
        return Shared(link, 0.0, float(chip.island_chips * chip.devices_per_chip))
    long = [Ring(size, ends).ways for size, ends in zip(extents, closed(chip, extents), strict=True) if size > 1]
    return Shared(link * (sum(long) / len(long) if long else 1.0), float(chip.torus_dims), math.inf)


def axes_on(chip: Chip, extents: Sequence[int], sizes: Mapping[str, int]) -> dict[str, tuple[Ring, ...]]:
    """For each mesh axis, the dimensions of a slice that it spans.

    Dimensions are assigned from the last axis to the first, whole dimensions before parts.
    """
    ends, left, cores, found = closed(chip, extents), list(extents), chip.devices_per_chip, {}
    for name in reversed(tuple(sizes)):
        within = math.gcd(sizes[name], cores)
        size, cores = sizes[name] // within, cores // within
        parts: list[Ring] = []
        while size > 1:
            common = [(math.gcd(free, size), free == size == whole) for free, whole in zip(left, extents, strict=True)]
            (taken, _), dim = max(common), common.index(max(common))
            if taken < 2:
                break
            parts.append(Ring(taken, ends[dim] and taken == extents[dim]))
            left[dim] //= taken
            size //= taken
        found[name] = tuple(parts)
    return found
