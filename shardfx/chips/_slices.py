"""Slices of accelerators: so many chips along each dimension of their network, where such slices exist."""

import math
from typing import NamedTuple

from .._ground.errors import MeshError
from ._chip import Chip


class Slice(NamedTuple):
    """So many chips of one kind along each dimension of their network; along one where a switch joins them."""

    chip: Chip
    extents: tuple[int, ...]

    @property
    def chips(self) -> int:
        """How many chips it has."""
        return math.prod(self.extents)

    @property
    def devices(self) -> int:
        """How many devices JAX shows for it."""
        return self.chips * self.chip.devices_per_chip

    @property
    def name(self) -> str:
        """What it is called: `tpu:v5e:4x4`, or `h100:8`."""
        return f"{'tpu:' * (self.chip.torus_dims > 0)}{self.chip.name}:{'x'.join(map(str, self.extents))}"


def existing(made: Slice, text: str) -> Slice:
    """The slice, if there are such; `text` is what it was called."""
    chip, dims, extents = made.chip, made.chip.torus_dims or 1, made.extents
    if len(extents) != dims:
        kind = f"{dims} dimensions" if dims > 1 else "1 dimension"
        raise MeshError(
            f"slice {text!r:.60}: {chip.name} has {kind}, as in {'x'.join('4' * dims)}, and this has {len(extents)}."
        )
    # A pod of two dimensions is a square; larger ones have more room in one dimension than in another.
    longest = math.isqrt(chip.island_chips) if dims == 2 else chip.island_chips
    if chip.torus_dims and (made.chips > chip.island_chips or max(extents) > longest):
        pod = "x".join([str(longest)] * dims) if dims == 2 else f"{chip.island_chips:,} chips"
        raise MeshError(
            f"slice {text!r:.60} has {made.chips:,} chips, and a pod of {chip.name} is {pod}; take several slices, as "
            f'`"{Slice(chip, near_cube(min(64, chip.island_chips), dims)).name}*2"`.'
        )
    return made


def near_cube(count: int, dims: int) -> tuple[int, ...]:
    """The extents of so many chips that differ least, smallest first."""
    if dims == 1:
        return (count,)
    root = round(count ** (1 / dims))
    first = next(size for size in range(max(1, root), 0, -1) if count % size == 0)
    return tuple(sorted((first, *near_cube(count // first, dims - 1))))
