"""Where the pieces of an array lie, as plain integers: what the step planner of resharding reads."""

import dataclasses
import functools as ft
import math
from collections.abc import Mapping

import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from ._errors import MeshError, SpecError
from ._mesh import MeshSpec
from ._spec import entry_axes


@dataclasses.dataclass(frozen=True)
class Layout:
    """An array's placement: mesh axis sizes, the devices in mesh order, and the axes that cut each dimension.

    **Arguments:**

    - `sizes`: the mesh axis sizes, slowest first.
    - `dims`: per dimension of the array the indices of the mesh axes that cut it, major first.
    - `order`: device ids in row-major order of the mesh; `None` where both ends of a move list their devices
        in the same order.
    - `weights`: the cost of a byte along each mesh axis; `()` where all cost 1.
    """

    sizes: tuple[int, ...]
    dims: tuple[tuple[int, ...], ...]
    order: tuple[int, ...] | None = None
    weights: tuple[float, ...] = ()

    def __post_init__(self):
        used = [axis for axes in self.dims for axis in axes]
        if len(set(used)) < len(used) or not all(0 <= axis < len(self.sizes) for axis in used):
            raise SpecError(
                f"layout dims {self.dims} must name each of {len(self.sizes)} mesh axes at most once; "
                "write the axes of each dimension as indices into `sizes`."
            )
        if self.order is not None and (len(self.order) != self.size or len(set(self.order)) != self.size):
            raise MeshError(
                f"a mesh of axis sizes {self.sizes} has {self.size} devices, but its order lists "
                f"{len(set(self.order))} different ids; give every device once."
            )
        if len(self.weights) not in (0, len(self.sizes)) or not all(weight > 0 for weight in self.weights):
            raise MeshError(f"weights {self.weights} must be positive, one per mesh axis of {self.sizes}, or `()`.")
        # Hashing thousands of ids on each look-up would cost more than the look-up.
        object.__setattr__(self, "_hash", hash((self.sizes, self.dims, self.order, self.weights)))

    def __hash__(self) -> int:
        return object.__getattribute__(self, "_hash")

    @property
    def size(self) -> int:
        """How many devices there are."""
        return math.prod(self.sizes)

    @property
    def counts(self) -> tuple[int, ...]:
        """Into how many pieces each dimension is cut."""
        return tuple(math.prod(self.sizes[axis] for axis in axes) for axes in self.dims)

    @property
    def pieces(self) -> int:
        """How many different pieces the array is cut into."""
        return math.prod(self.counts)


def layout(
    mesh: MeshSpec | Mesh | AbstractMesh,
    spec: PartitionSpec,
    rank: int,
    *,
    weights: Mapping[str, float] | None = None,
) -> Layout:
    """The [`shardfx.Layout`][] of an array of `rank` dimensions under `spec`.

    **Arguments:**

    - `mesh`: only a `jax.sharding.Mesh` has a device order; the others leave it open.
    - `spec`: its UNCONSTRAINED entries count as not sharded.
    - `rank`: how many dimensions the array has.
    - `weights`: the cost of a byte along a mesh axis, 1 for those left out.

    **Returns:**

    A Layout, cached: equal arguments give the same object.

    **Raises:**

    `SpecError` for a spec longer than the rank, or one that names an axis the mesh lacks.
    """
    return _layout(mesh, spec, rank, tuple(sorted((weights or {}).items())))


@ft.lru_cache(maxsize=4096)
def _layout(
    mesh: MeshSpec | Mesh | AbstractMesh, spec: PartitionSpec, rank: int, weights: tuple[tuple[str, float], ...]
) -> Layout:
    names = tuple(mesh.axis_names)
    entries = tuple(entry_axes(entry) for entry in spec.partitions)
    if any(entries[rank:]):
        raise SpecError(f"{spec} has more entries than the array's {rank} dimensions; drop those at the end.")
    for axis in (axis for axes in entries for axis in axes):
        if axis not in names:
            raise SpecError(f"{spec} names mesh axis `{axis}`, but the mesh has {names}; use one of those.")
    dims = tuple(tuple(names.index(axis) for axis in axes) for axes in entries[:rank])
    cost = dict(weights)
    return Layout(
        sizes=tuple(mesh.shape[name] for name in names),
        dims=dims + ((),) * (rank - len(dims)),
        order=_ids(mesh) if isinstance(mesh, Mesh) else None,
        weights=tuple(cost.get(name, 1.0) for name in names) if cost else (),
    )


@ft.lru_cache(maxsize=256)
def _ids(mesh: Mesh) -> tuple[int, ...]:
    return tuple(device.id for device in mesh.devices.flat)


def tiles(layout: Layout, position: np.ndarray) -> np.ndarray:
    """Which piece along each dimension every device holds.

    **Arguments:**

    - `layout`: where the pieces lie.
    - `position`: per device, its place in the row-major order of the layout's mesh.

    **Returns:**

    An integer array of shape `(rank, devices)`.
    """
    digits = np.unravel_index(position, layout.sizes) if layout.sizes else ()
    out = np.zeros((len(layout.dims), len(position)), np.int64)
    for dim, axes in enumerate(layout.dims):
        for axis in axes:
            out[dim] = out[dim] * layout.sizes[axis] + digits[axis]
    return out
