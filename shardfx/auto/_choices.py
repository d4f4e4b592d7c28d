"""The meshes and strategies that a plan without rules tries, one after the other."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ..topology import MeshSpec


FSDP_AXES = ("fsdp", "zero")
TENSOR = "tensor"


class Choice(NamedTuple):
    """A mesh, and the mesh axes that shard weights: first that of tensor parallelism,
    if there is one, then those of FSDP. With `gathers_all`, an array that tensor
    parallelism would leave whole is sharded over all of them, as by FSDP.
    """

    mesh: MeshSpec
    axes: tuple[str, ...]
    gathers_all: bool = False

    @property
    def fsdp(self) -> tuple[str, ...]:
        return tuple(axis for axis in self.axes if axis != TENSOR)


def choices_for(total: int, slices: int, tensor: int) -> Iterator[Choice]:
    """The meshes and strategies to try on `total` devices in `slices` slices: data
    parallelism first, then FSDP on ever more devices. `tensor` devices have the same
    rows.
    """
    mesh = MeshSpec({"data": 1})
    used: tuple[str, ...] = ()
    for size, spanned in fsdp_spans(total // tensor, slices):
        axes = {
            "data": (total // (size * tensor), slices // spanned),
            "fsdp": (size, spanned),
            "tensor": (tensor, 1),
        }
        mesh = _mesh(axes)
        used = tuple(name for name in ("tensor", "fsdp") if axes[name][0] > 1)
        yield Choice(mesh, used)
    if TENSOR in used:
        yield Choice(mesh, used, gathers_all=True)


def _mesh(axes: Mapping[str, tuple[int, int]]) -> MeshSpec:
    """The mesh of axes with their sizes and the number of slices that each spans. Axes
    of one device are left out.
    """
    sizes = {name: size for name, (size, _) in axes.items() if size > 1}
    spans = {name: axes[name][1] for name in sizes if axes[name][1] > 1}
    return MeshSpec(sizes or {"data": 1}, dcn=spans or None)


class Span(NamedTuple):
    """The number of devices of an axis of a mesh, and that of the slices it spans."""

    size: int
    slices: int


def fsdp_spans(groups: int, slices: int) -> list[Span]:
    """The spans that FSDP may have over `groups` groups of devices in `slices` slices:
    first within a slice, where the network is fast, then of whole slices.
    """
    inner = groups // slices
    spans = [Span(size, slices=1) for size in divisors(inner)]
    spans += [Span(inner * count, slices=count) for count in divisors(slices)[1:]]
    return spans


def divisors(count: int) -> list[int]:
    """The numbers that divide `count`, in ascending order."""
    return [size for size in range(1, count + 1) if count % size == 0]


def choices_on(mesh: MeshSpec) -> Iterator[Choice]:
    """The strategies to try on the caller's mesh: FSDP over its `fsdp` axes, or data
    parallelism where it has none; then FSDP over all axes.
    """
    used = tuple(axis for axis, size in mesh.shape.items() if size > 1)
    inner = tuple(axis for axis in used if axis in FSDP_AXES)
    yield Choice(mesh, inner)
    if used and used != inner:
        yield Choice(mesh, used)
