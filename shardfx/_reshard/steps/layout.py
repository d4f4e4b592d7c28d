"""`StepLayout`, which describes an array's sharding by integers, and the shards that
devices hold under it.

A *sub-axis* is a mesh axis or a part of one: an axis of 8 devices may be split into
sub-axes of 2 and 4. A *weight* is the cost of a byte along an axis or a sub-axis: 1
inside a TPU slice (or node), and more between slices. The *mesh order* of a layout is
the row-major order of the devices in its mesh.
"""

import dataclasses
import math
import operator
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from ..._ground.errors import MeshError
from .network import Network


# Indices of sub-axes (mesh axes or parts of them), major first.
SubAxes = tuple[int, ...]
# A layout over sub-axes: for each dimension of the array, the sub-axes that shard it.
ShardDims = tuple[SubAxes, ...]
# The number of shards along each dimension of an array.
Counts = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class StepLayout:
    """An array's sharding: the mesh axis sizes, the devices in mesh order, and the axes
    that shard each dimension.

    **Arguments:**

    - `sizes`: the mesh axis sizes, major first.
    - `dims`: for each dimension of the array, the indices of the mesh axes that shard
      it, major first.
    - `order`: device ids in row-major order of the mesh. It is `None` if the layouts
      before and after a move list their devices in the same order.
    - `weights`: the cost of a byte along each mesh axis; `()` if all cost 1. An axis
      between TPU slices (or nodes) has a weight above 1.
    - `network`: the torus that connects the devices. `None` if a switch connects them,
      if they are not known, or for layouts over parts of mesh axes.
    """

    __module__ = "shardfx.results"

    sizes: tuple[int, ...]
    dims: tuple[tuple[int, ...], ...]
    order: tuple[int, ...] | None = None
    weights: tuple[float, ...] = ()
    network: Network | None = None

    def __post_init__(self):
        # Hashing thousands of ids on each look-up would cost more than the look-up.
        fields = (self.sizes, self.dims, self.order, self.weights, self.network)
        object.__setattr__(self, "_hash", hash(fields))

    def __hash__(self) -> int:
        return object.__getattribute__(self, "_hash")

    @property
    def size(self) -> int:
        """The number of devices in the mesh."""
        return math.prod(self.sizes)

    @property
    def counts(self) -> Counts:
        """The number of shards along each dimension."""
        return tuple([product_of(self.sizes, axes) for axes in self.dims])

    @property
    def shard_count(self) -> int:
        """The number of distinct shards of the array."""
        return math.prod(self.counts)

    def shard_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of one device's shard of an array of `shape`."""
        return tuple(map(operator.floordiv, shape, self.counts))


def product_of(sizes: Sequence[int], axes: Iterable[int]) -> int:
    """The product of the sizes of some axes. `sizes` are the sizes of all axes."""
    return math.prod([sizes[axis] for axis in axes])


def positions(layout: StepLayout, like: StepLayout) -> np.ndarray:
    """Returns the position of each device in the mesh order of `layout`. The result
    lists the devices in the mesh order of `like`: for device ids 0, 1, 2 in `like` and
    2, 0, 1 in `layout` it is [1, 2, 0]. A layout whose `order` is `None` has the mesh
    order of the other. Raises `MeshError` if the two meshes have different devices.
    """
    if layout.order is None or like.order is None or layout.order == like.order:
        device_positions = np.arange(layout.size)
    else:
        position_of = {device: index for index, device in enumerate(layout.order)}
        common = [device for device in like.order if device in position_of]
        device_positions = np.asarray([position_of[device] for device in common])
    if not layout.size == like.size == len(device_positions):
        common_text = ""
        # Without the devices of both meshes nobody knows those in both.
        if layout.order is not None and like.order is not None:
            common_text = f", and {len(device_positions)} are in both"
        raise MeshError(
            f"the meshes of a move must have the same devices, but one has {like.size}"
            f" (axis sizes {like.sizes}) and the other {layout.size} (axis sizes"
            f" {layout.sizes}){common_text}; move between device sets outside of `jit`."
        )
    return device_positions


class LinkGroups(NamedTuple):
    """Groups of devices. A byte between two devices of one group costs at most
    `weight`. `numbers` has the number of each device's group.
    """

    weight: float
    numbers: np.ndarray


def mesh_coordinates(sizes: tuple[int, ...], position: np.ndarray) -> np.ndarray:
    """Returns the coordinates of the devices at the positions `position` in mesh order.
    `sizes` are the sizes of the mesh axes. The result has a row for each mesh axis and
    a column for each device.
    """
    if not sizes:
        return np.zeros((0, len(position)), np.int64)
    return np.stack(np.unravel_index(position, sizes))


def slice_numbers(layout: StepLayout) -> np.ndarray:
    """Returns the number of each device's TPU slice (or node), in mesh order. An axis
    whose weight is above 1 lies between slices.
    """
    between_slices = [axis for axis, weight in enumerate(layout.weights) if weight > 1]
    coordinates = mesh_coordinates(layout.sizes, np.arange(layout.size))
    return shard_index(layout.sizes, coordinates, tuple(between_slices))


def shard_index(
    sizes: tuple[int, ...],
    coordinates: np.ndarray,
    axes: SubAxes,
) -> np.ndarray:
    """Returns the index of each device's shard along a dimension that `axes` shard.
    `coordinates` has a row of device coordinates for each mesh axis, and `sizes` the
    sizes of these axes.
    """
    index = np.zeros(coordinates.shape[1], np.int64)
    for axis in axes:
        index = index * sizes[axis] + coordinates[axis]
    return index


@dataclasses.dataclass(frozen=True, eq=False)
class FineLayout:
    """A `StepLayout` over sub-axes. `coordinates` has a row for each sub-axis: the
    coordinate of each device along it. Its columns are the devices, in the mesh order
    of the layout before the move.
    """

    layout: StepLayout
    coordinates: np.ndarray

    @property
    def keys(self) -> tuple[bytes, ...]:
        """For each sub-axis a key: the coordinates of all devices along it, as bytes.
        Sub-axes of two meshes have equal keys if each device has the same coordinate
        along both.
        """
        return tuple(map(coordinate_key, self.coordinates))


def coordinate_key(coordinates: np.ndarray) -> bytes:
    """The coordinates of all devices along one sub-axis as bytes."""
    return coordinates.astype(np.uint16).tobytes()


def device_coordinates(layout: StepLayout, like: StepLayout) -> np.ndarray:
    """Returns a row of device coordinates for each axis of `layout`, with devices in
    the mesh order of `like`.
    """
    return mesh_coordinates(layout.sizes, positions(layout, like))


def link_groups(fine_layout: FineLayout) -> list[LinkGroups]:
    """Returns one division of the devices into groups for each weight that sub-axes
    have, in ascending order of weights. Two devices are in one group if they differ
    only along sub-axes of this weight or less. So all devices are in one group in the
    last division.
    """
    sizes = fine_layout.layout.sizes
    weights = fine_layout.layout.weights or (1.0,) * len(sizes)
    groups = []
    # A mesh without axes has one device, and one group.
    for weight in sorted(dict.fromkeys(weights)) or [1.0]:
        dearer_axes = tuple(
            [axis for axis, other in enumerate(weights) if other > weight]
        )
        # Devices with the same coordinates along these sub-axes have one number.
        numbers = shard_index(sizes, fine_layout.coordinates, dearer_axes)
        groups.append(LinkGroups(weight, numbers))
    return groups


class Shards:
    """The shard that each device holds, for any layout over the sub-axes of one mesh.
    Results are cached.
    """

    def __init__(self, fine_layout: FineLayout):
        # The size of each sub-axis.
        self.sizes = fine_layout.layout.sizes
        # For each sub-axis, the coordinate of each device along it. In half the bytes,
        # since on thousands of devices these arrays take the search most of its time.
        self.coordinates = fine_layout.coordinates.astype(np.int32)
        self.device_count = fine_layout.coordinates.shape[1]
        # The results of the methods `count`, `index` and `numbers`.
        self._count: dict[SubAxes, int] = {}
        self._index: dict[SubAxes, np.ndarray] = {
            (): np.zeros(self.device_count, np.int32)
        }
        self._numbers: dict[ShardDims, np.ndarray] = {}

    def count(self, axes: SubAxes) -> int:
        """The number of shards along a dimension that is sharded over `axes`."""
        if axes not in self._count:
            self._count[axes] = product_of(self.sizes, axes)
        return self._count[axes]

    def counts(self, dims: ShardDims) -> Counts:
        """The number of shards along each dimension in the layout `dims`."""
        return tuple([self.count(axes) for axes in dims])

    def shard_count(self, dims: ShardDims) -> int:
        """The number of distinct shards of an array in the layout `dims`."""
        return math.prod([self.count(axes) for axes in dims])

    def index(self, axes: SubAxes) -> np.ndarray:
        """The index of each device's shard along a dimension that is sharded over
        `axes`.
        """
        if axes not in self._index:
            last = axes[-1]
            first_index = self.index(axes[:-1]) * np.int32(self.sizes[last])
            self._index[axes] = first_index + self.coordinates[last]
        return self._index[axes]

    def numbers(self, dims: ShardDims) -> np.ndarray:
        """The number of each device's shard in the layout `dims`. Shards are numbered
        in row-major order of their places in the array. So equal shards have equal
        numbers in any two layouts with the same shard counts.
        """
        if dims not in self._numbers:
            shard_numbers = np.zeros(self.device_count, np.int64)
            for axes in dims:
                if axes:
                    shard_numbers = shard_numbers * self.count(axes) + self.index(axes)
            self._numbers[dims] = shard_numbers
        return self._numbers[dims]


def missing_share(source: FineLayout, target: FineLayout) -> Fraction:
    """Returns the fraction of an array that a device lacks before a move and must
    receive, as the mean over devices.
    """
    shards = Shards(source)
    new_shards = Shards(target)
    # For each device, the elements that its old and its new shard have in common, in an
    # array of `elements` elements.
    common: np.ndarray | None = None
    elements = 1
    for axes, new_axes in zip(source.layout.dims, target.layout.dims, strict=True):
        if not axes and not new_axes:
            continue
        common_in_dim, size = overlap(
            shards.index(axes),
            shards.count(axes),
            new_shards.index(new_axes),
            new_shards.count(new_axes),
        )
        common_in_dim = common_in_dim.astype(np.int64)
        common = common_in_dim if common is None else common * common_in_dim
        elements *= size
    if common is None:
        # No dimension is sharded, before or after: each device holds the whole array.
        return Fraction(0)
    needed = Fraction(1, target.layout.shard_count)
    return needed - Fraction(int(common.sum()), elements * len(common))


def overlap(
    index: np.ndarray,
    count: int,
    other_index: np.ndarray,
    other_count: int,
) -> tuple[np.ndarray, int]:
    """Compares each device's shards in two shardings of one dimension. `index` and
    `other_index` have the index of each device's shard among `count` and `other_count`
    shards. The dimension has as many elements here as the least common multiple of
    these counts. Returns how many elements the two shards of each device have in
    common, and the size of the dimension. With 2 and 3 shards the size is 6, and the
    shards [0, 3) and [0, 2) have 2 elements in common.
    """
    size = math.lcm(count, other_count)
    shard_size = np.int32(size // count)
    other_shard_size = np.int32(size // other_count)
    start = index * shard_size
    other_start = other_index * other_shard_size
    common = np.minimum(start + shard_size, other_start + other_shard_size)
    common -= np.maximum(start, other_start)
    return np.maximum(common, 0, out=common), size
