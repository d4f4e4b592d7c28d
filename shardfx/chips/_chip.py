"""The memory, arithmetic and network of one accelerator, and the network links of each
mesh axis in a slice.

The extents of a slice are its numbers of chips along each dimension. `axes_on` assigns
each mesh axis to dimensions of the slice, which determines the links of each
collective. The search, which estimates thousands of meshes at once, uses the averages
of `average_network`.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from .._ground.errors import ChipError
from .._ground.spec import DType
from ..topology import wraps


@dataclasses.dataclass(frozen=True)
class Chip:
    """The memory, the arithmetic and the network of one accelerator.

    A chip is plain data. Construct a new one, or change one:
    `dataclasses.replace(chips.find("h100"), name="my h100")`.

    **Arguments:**

    - `name`: the name of the chip, such as "v5p".
    - `hbm_bytes`: the nominal size of its memory (HBM) in bytes.
    - `usable_hbm_bytes`: the bytes of memory that a program may use. The runtime
      reserves the rest.
    - `hbm_bytes_per_second`: the bandwidth between memory and cores.
    - `flops_per_second`: pairs of a dtype's name and the peak rate of dense matrix
      products in this dtype.
    - `link_bytes_per_second`: the bandwidth of one network link in one direction. If a
      switch connects the chips, it is the bandwidth of all links of one chip in one
      direction.
    - `torus_dims`: the number of dimensions of the torus, with two links per chip in
      each dimension; 0 if a switch connects the chips.
    - `island_chips`: the largest number of chips that the torus or the switch connects.
    - `dcn_bytes_per_second`: the bandwidth of a host's data-center network in one
      direction, divided by the number of chips of the host.
    - `devices_per_chip`: the number of JAX devices of one chip.
    - `tile`: the rows and columns of a memory tile. The chip pads the last two
      dimensions of an array to multiples of them. `None` if the chip does not pad.
    - `kinds`: the values of `device.device_kind` for this chip.
    - `host_bytes_per_second`: the bandwidth of a chip's link to the memory of its host in
      one direction; 0 if it is not known.
    - `hop_seconds`: the latency of one hop over a link, whatever the bytes. If a switch
      connects the chips, it is that of one collective.
    - `sources`: pairs of a field's name and the source of its value. The name "*" is
      for all fields that are not named. "secondary" marks a source other than the
      vendor, and "sources differ" gives the value of another source.
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
    host_bytes_per_second: float | int = 0
    hop_seconds: float = 1e-6

    def __post_init__(self):
        for name in (
            "hbm_bytes",
            "usable_hbm_bytes",
            "hbm_bytes_per_second",
            "link_bytes_per_second",
            "dcn_bytes_per_second",
            "island_chips",
            "devices_per_chip",
        ):
            if not getattr(self, name) > 0:
                raise ChipError(
                    f"chip {self.name!r}: `{name}` must be more than 0, not"
                    f" {getattr(self, name)}."
                )
        if self.usable_hbm_bytes > self.hbm_bytes:
            raise ChipError(
                f"chip {self.name!r}: {self.usable_hbm_bytes} usable bytes are more"
                f" than it has ({self.hbm_bytes}); set `usable_hbm_bytes` to what is"
                " left beside the runtime."
            )

    @property
    def links(self) -> int:
        """The number of network links of a chip; 1 if a switch connects the chips."""
        return 2 * self.torus_dims or 1

    @property
    def usable_hbm_bytes_per_device(self) -> int:
        """The bytes of memory that a program may use on one JAX device."""
        return self.usable_hbm_bytes // self.devices_per_chip

    def flops(self, dtype: DType = "bfloat16") -> float | int:
        """The peak rate of floating-point operations of one chip, per second.

        **Arguments:**

        - `dtype`: the dtype of the operands. float16 has the rate of bfloat16. Every
          8-bit float has the rate of "float8", and every 4-bit float has the rate of
          "float4".

        **Raises:**

        `ChipError` for a dtype whose peak rate is not known.

        !!! Example

            ```python
            from shardfx import chips

            assert chips.find("v5p").flops("bfloat16") == 459e12
            ```
        """
        if isinstance(dtype, str) and dtype in ("float8", "float4"):
            name = dtype
        else:
            try:
                dtype_name = jnp.dtype(dtype).name
            except TypeError:
                raise ChipError(
                    f"{dtype!r:.80} is no dtype of JAX; write it as in"
                    f' `chips.find("{self.name}").flops("bfloat16")`.'
                ) from None
            name = re.sub(r"^float([48])_.*", r"float\1", dtype_name)
        if name == "float16":
            name = "bfloat16"
        flops_of_dtype = dict(self.flops_per_second)
        if name not in flops_of_dtype:
            raise ChipError(
                f"chip {self.name!r}: no peak is known for {name}; there are"
                f" {', '.join(flops_of_dtype)}. Add one with "
                "`dataclasses.replace(chip, flops_per_second=(*chip.flops_per_second,"
                f' ("{name}", ...)))`.'
            )
        return flops_of_dtype[name]

    def source(self, field: str) -> str:
        """The source of the value of the field with the name `field`; "" if no source
        is known.
        """
        sources = dict(self.sources)
        return sources.get(field, sources.get("*", ""))


def near_cube(count: int, dims: int) -> tuple[int, ...]:
    """The shape of `count` chips in `dims` dimensions that is nearest to a cube. The
    smallest extent comes first.
    """
    if dims == 1:
        return (count,)
    root = round(count ** (1 / dims))
    first = next(size for size in range(max(1, root), 0, -1) if count % size == 0)
    return tuple(sorted((first, *near_cube(count // first, dims - 1))))


class Ring(NamedTuple):
    """The chips along one dimension of a slice over which a mesh axis extends. `size`
    is their number. If the ring is `closed`, a link joins its two ends. Neighbours along
    the mesh axis are `stride` links apart: more than one if another mesh axis takes the
    chips between them.
    """

    size: int
    closed: bool
    stride: int = 1

    @property
    def links(self) -> int:
        """The number of links over which a chip receives bytes along the ring: 2 if the
        ring is closed, else 1.
        """
        return 2 if self.closed else 1


class AverageNetwork(NamedTuple):
    """Averages over the network of a slice, for mesh axes whose dimensions of the slice
    are not known.

    - `bytes_per_second`: the bandwidth of one chip along one dimension of the torus, or
      through the switch.
    - `dims`: the number of dimensions of the torus; 0 if a switch connects the chips.
    - `hops`: the hops of a collective over the whole slice; 0 if a switch connects the
      chips.
    - `island_devices`: the number of devices that one switch connects; infinite for a
      torus.
    """

    bytes_per_second: float
    dims: float
    hops: float
    island_devices: float


def extents_of(chip: Chip, devices: int) -> tuple[int, ...]:
    """The extents of the slice of `devices` devices that is nearest to a cube."""
    return near_cube(devices // chip.devices_per_chip or 1, chip.torus_dims or 1)


def closed(chip: Chip, extents: Sequence[int]) -> tuple[bool, ...]:
    """Whether links connect the two ends of each dimension of a slice with these
    extents.
    """
    return wraps(chip.kinds[0] if chip.kinds else "", extents)


def hops_across(rings: Iterable[Ring]) -> int:
    """The hops from a chip to the one that is farthest away, one dimension after
    another: half of a closed ring, and all of an open one. Between two neighbours of a
    ring there are `stride` hops.
    """
    hops = 0
    for ring in rings:
        steps = ring.size // 2 if ring.closed else ring.size - 1
        hops += steps * ring.stride
    return hops


def rounds_of(kind: str) -> int:
    """How often a collective of this kind crosses its replica group. An all-reduce goes
    there and back.
    """
    return 2 if kind == "all-reduce" else 1


def average_network(chip: Chip, extents: Sequence[int]) -> AverageNetwork:
    """Averages over the network of a slice with `extents` chips along each dimension. A
    closed ring has twice the bandwidth: it sends in both directions.
    """
    link = float(chip.link_bytes_per_second)
    if not chip.torus_dims:
        return AverageNetwork(
            bytes_per_second=link,
            dims=0.0,
            hops=0.0,
            island_devices=float(chip.island_chips * chip.devices_per_chip),
        )
    rings = [
        Ring(size, is_closed)
        for size, is_closed in zip(extents, closed(chip, extents), strict=True)
    ]
    # A dimension of one chip has no links.
    link_counts = [ring.links for ring in rings if ring.size > 1]
    mean_links = 1.0
    if link_counts:
        mean_links = sum(link_counts) / len(link_counts)
    return AverageNetwork(
        bytes_per_second=link * mean_links,
        dims=float(chip.torus_dims),
        hops=float(hops_across(rings)),
        island_devices=math.inf,
    )


def axes_on(
    chip: Chip,
    extents: Sequence[int],
    sizes: Mapping[str, int],
) -> dict[str, tuple[Ring, ...]]:
    """The dimensions of a slice that each mesh axis spans, one `Ring` per dimension.
    `sizes` has the size of each axis. Dimensions are assigned to the last mesh axis
    first, and before them the cores of a chip, which form no ring. An axis gets whole
    dimensions of the slice before parts. For extents (4, 4) and sizes 2 and 8, the
    second axis gets one whole dimension and half of the other. What fits no dimension
    is left out.
    """
    has_ring = closed(chip, extents)
    # Along each dimension, the chips that no axis has got yet.
    remaining = list(extents)
    remaining_cores = chip.devices_per_chip
    axes = {}
    for name in reversed(tuple(sizes)):
        cores = math.gcd(sizes[name], remaining_cores)
        chips = sizes[name] // cores
        remaining_cores //= cores
        rings: list[Ring] = []
        while chips > 1:
            # The most chips that the axis can have along each dimension. Of equal ones,
            # a whole dimension of the slice that is all that the axis lacks.
            choices = [
                (math.gcd(free, chips), free == chips == extent)
                for free, extent in zip(remaining, extents, strict=True)
            ]
            size, _ = max(choices)
            dim = choices.index(max(choices))
            if size < 2:
                break
            is_closed = has_ring[dim] and size == extents[dim]
            # The part of the dimension that later axes got lies between two neighbours.
            stride = extents[dim] // remaining[dim]
            rings.append(Ring(size=size, closed=is_closed, stride=stride))
            remaining[dim] //= size
            chips //= size
        axes[name] = tuple(rings)
    return axes
