"""The network between chips: which links a mesh axis has, by the extents of a slice.

There is one model. `axes_on` lays mesh axes over the dimensions of a slice, which gives each collective its links.
`shared` is the same network as two numbers, for prices of thousands of meshes at once: an axis has links in
proportion to the logarithm of its size.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..topology import wraps
from ._chip import Chip
from ._find import near_cube


class Ring(NamedTuple):
    """A part of a dimension of a slice that a mesh axis takes; closed where links join its ends."""

    size: int
    closed: bool

    @property
    def ways(self) -> int:
        """From how many sides bytes enter a device."""
        return 2 if self.closed else 1


class Shared(NamedTuple):
    """A network for one axis among several: bytes per second of one dimension, dimensions, devices of an island.

    An island is what a switch joins; a torus has none.
    """

    bytes_per_second: float
    dims: float
    island_devices: float


def extents_of(chip: Chip, devices: int) -> tuple[int, ...]:
    """The slice of so many devices whose extents differ least."""
    return near_cube(devices // chip.devices_per_chip or 1, chip.torus_dims or 1)


def closed(chip: Chip, extents: Sequence[int]) -> tuple[bool, ...]:
    """Which dimensions of a slice are rings."""
    return wraps(chip.kinds[0] if chip.kinds else "", extents)


def shared(chip: Chip, extents: Sequence[int]) -> Shared:
    """The network of a slice, dimensions taken alike: one that is a ring has twice the bytes of one that is not."""
    link = float(chip.link_bytes_per_second)
    if not chip.torus_dims:
        return Shared(link, 0.0, float(chip.island_chips * chip.devices_per_chip))
    long = [Ring(size, ends).ways for size, ends in zip(extents, closed(chip, extents), strict=True) if size > 1]
    return Shared(link * (sum(long) / len(long) if long else 1.0), float(chip.torus_dims), math.inf)


def axes_on(chip: Chip, extents: Sequence[int], sizes: Mapping[str, int]) -> dict[str, tuple[Ring, ...]]:
    """Along which dimensions of a slice each mesh axis lies.

    From the last axis to the first, each takes what is left of the dimensions, whole ones first.
    """
    ends, left, cores, found = closed(chip, extents), list(extents), chip.devices_per_chip, {}
    for name in reversed(tuple(sizes)):
        within = math.gcd(sizes[name], cores)
        size, cores = sizes[name] // within, cores // within
        parts: list[Ring] = []
        while size > 1:
            whole = [dim for dim, free in enumerate(left) if free == size == extents[dim]]
            some = [dim for dim, free in enumerate(left) if free > 1 and math.gcd(free, size) > 1]
            if not whole and not some:
                break
            dim = whole[0] if whole else max(some, key=lambda dim: math.gcd(left[dim], size))
            taken = math.gcd(left[dim], size)
            parts.append(Ring(taken, ends[dim] and taken == extents[dim]))
            left[dim] //= taken
            size //= taken
        found[name] = tuple(parts)
    return found
