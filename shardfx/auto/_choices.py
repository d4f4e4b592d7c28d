"""The meshes and strategies that a plan without rules tries, one after the other."""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ..chips import Chip
from ..topology import MeshSpec


FSDP_AXES = ("fsdp", "zero")
TENSOR = "tensor"


class Choice(NamedTuple):
    """A mesh, and `axes`, its axes that shard weights: first that of tensor parallelism,
    if there is one, then those of FSDP. With `gathers_all`, an array that tensor
    parallelism would leave whole is sharded over all of `axes`, as by FSDP.
    """

    mesh: MeshSpec
    axes: tuple[str, ...]
    gathers_all: bool = False

    @property
    def fsdp(self) -> tuple[str, ...]:
        """The mesh axes of FSDP."""
        return tuple(axis for axis in self.axes if axis != TENSOR)


def switched_devices(chip: Chip) -> float:
    """The number of devices that one switch connects; infinite for a torus."""
    if chip.torus_dims:
        return math.inf
    return float(chip.island_chips * chip.devices_per_chip)


def choices_for(total: int, slices: int, tensor: int, chip: Chip) -> Iterator[Choice]:
    """The meshes and strategies to try on `total` devices of `chip` in `slices` slices:
    data parallelism first, then FSDP on ever more devices. The axis `tensor` has
    `tensor` devices in all of them. If it has more than one, the last mesh comes twice,
    the second time with `gathers_all`. Then FSDP over all axes shards the arrays that
    tensor parallelism leaves whole.
    """
    choice = Choice(MeshSpec({"data": 1}), ())
    island = switched_devices(chip) / tensor
    for fsdp in fsdp_spans(total // tensor, slices, island):
        groups = total // (fsdp.size * tensor)
        spans = {
            "data": Span(groups, slices // fsdp.slices),
            "fsdp": fsdp,
            TENSOR: Span(tensor, slices=1),
        }
        axes = tuple(name for name in (TENSOR, "fsdp") if spans[name].size > 1)
        choice = Choice(_mesh(spans), axes)
        yield choice
    if TENSOR in choice.axes:
        yield choice._replace(gathers_all=True)


class Span(NamedTuple):
    """The number of devices of an axis of a mesh, and that of the slices it spans."""

    size: int
    slices: int


def _mesh(spans: Mapping[str, Span]) -> MeshSpec:
    """The mesh of axes with their spans. Axes of one device are left out."""
    sizes = {name: span.size for name, span in spans.items() if span.size > 1}
    dcn = {name: spans[name].slices for name in sizes if spans[name].slices > 1}
    return MeshSpec(sizes or {"data": 1}, dcn=dcn or None)


def fsdp_spans(groups: int, slices: int, island: float) -> list[Span]:
    """The spans that FSDP may have over `groups` groups of devices in `slices` slices:
    first within a slice, where the network is fast, then of whole slices. `island` is
    the number of groups that one switch connects.
    """
    inner = groups // slices
    spans = []
    for size in divisors(inner):
        is_of_islands = island % size == 0 or size % island == 0
        # A span of another size lies partly behind another switch.
        if inner <= island or size == inner or is_of_islands:
            spans.append(Span(size, slices=1))
    spans += [Span(inner * count, slices=count) for count in divisors(slices)[1:]]
    return spans


def divisors(count: int) -> list[int]:
    """The numbers that divide `count`, in ascending order."""
    return [size for size in range(1, count + 1) if count % size == 0]


def choices_on(mesh: MeshSpec) -> Iterator[Choice]:
    """The strategies to try on the caller's mesh: FSDP over its `fsdp` axes, or data
    parallelism where it has none; then FSDP over all axes.
    """
    axes = tuple(axis for axis, size in mesh.shape.items() if size > 1)
    fsdp_axes = tuple(axis for axis in axes if axis in FSDP_AXES)
    yield Choice(mesh, fsdp_axes)
    if axes != fsdp_axes:
        yield Choice(mesh, axes)
