"""`StepLayout`, an array's sharding as plain integers, which the planner of reshard steps reads."""

import dataclasses
import math

import numpy as np

from ..._ground.errors import MeshError, SpecError


@dataclasses.dataclass(frozen=True)
class StepLayout:
    """An array's sharding: the mesh axis sizes, the devices in mesh order, and the axes that shard each dimension.

    **Arguments:**

    - `sizes`: the mesh axis sizes, slowest first.
    - `dims`: for each dimension of the array, the indices of the mesh axes that shard it, major first.
    - `order`: device ids in row-major order of the mesh; `None` where both ends of a move list their devices
        in the same order.
    - `weights`: the cost of a byte along each mesh axis; `()` if all cost 1. An axis between slices (or nodes) has
        a weight above 1.
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
        """The number of devices in the mesh."""
        return math.prod(self.sizes)

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of shards along each dimension."""
        return tuple(math.prod(self.sizes[axis] for axis in axes) for axes in self.dims)

    @property
    def pieces(self) -> int:
        """The number of distinct shards of the array."""
        return math.prod(self.counts)

    def piece_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of one device's shard of an array of `shape`."""
        return tuple(size // count for size, count in zip(shape, self.counts, strict=True))


def positions(layout: StepLayout, like: StepLayout) -> np.ndarray:
    """For each device in the mesh order of `like`, its position in the mesh order of `layout`.

    **Arguments:**

    - `layout`, `like`: layouts over the same devices; a layout whose `order` is `None` has the order of the other.

    **Returns:**

    An integer array with one entry per device.

    **Raises:**

    `MeshError` if the devices are not the same.
    """
    if layout.size != like.size:
        raise MeshError(
            f"the meshes of a move must have the same devices, but one has {like.size} (axis sizes {like.sizes}) "
            f"and the other {layout.size} (axis sizes {layout.sizes}); move between device sets with `jax.device_put`."
        )
    if layout.order is None or like.order is None or layout.order == like.order:
        return np.arange(layout.size)
    place = {device: index for index, device in enumerate(layout.order)}
    missing = [device for device in like.order if device not in place]
    if missing:
        raise MeshError(
            f"the meshes of a move must have the same devices, but device {missing[0]} is in one of them alone; "
            "move between device sets with `jax.device_put`."
        )
    return np.asarray([place[device] for device in like.order])


def digits(sizes: tuple[int, ...], position: np.ndarray) -> np.ndarray:
    """The mesh coordinates of devices at `position` in a mesh of `sizes`, with one row per axis."""
    if not sizes:
        return np.zeros((0, len(position)), np.int64)
    return np.stack(np.unravel_index(position, sizes))


def slice_numbers(layout: StepLayout) -> np.ndarray:
    """The slice number of each device, in mesh order. Axes with a weight above 1 run between slices."""
    slow = tuple(axis for axis, weight in enumerate(layout.weights) if weight > 1)
    return piece_index(layout.sizes, digits(layout.sizes, np.arange(layout.size)), slow)


def piece_index(sizes: tuple[int, ...], coordinates: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """The index of the shard that each device holds of a dimension sharded over `axes`."""
    index = np.zeros(coordinates.shape[1], np.int64)
    for axis in axes:
        index = index * sizes[axis] + coordinates[axis]
    return index
