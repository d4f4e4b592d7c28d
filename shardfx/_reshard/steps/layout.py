"""`StepLayout`, an array's sharding as plain integers, which the planner of reshard steps reads."""

import dataclasses
import math

import numpy as np

from ..._ground.errors import MeshError


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
    if layout.order is None or like.order is None or layout.order == like.order:
        places = np.arange(layout.size)
    else:
        place = {device: index for index, device in enumerate(layout.order)}
        places = np.asarray([place[device] for device in like.order if device in place])
    if not layout.size == like.size == len(places):
        raise MeshError(
            f"the meshes of a move must have the same devices, but one has {like.size} (axis sizes {like.sizes}) "
            f"and the other {layout.size} (axis sizes {layout.sizes}), and {len(places)} are in both; move between "
            "device sets outside of `jit`."
        )
    return places


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
