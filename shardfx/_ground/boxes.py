"""Boxes. A box is the index range of a shard in its array: a start and a stop for each
dimension.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax._src.interpreters import pxla
from jax.sharding import AbstractMesh, NamedSharding, Sharding

from .spec import entries_at, entry_axes


# A half-open index range of an array: `(start, stop)` for each dimension.
# `((0, 4), (8, 16))` is `array[0:4, 8:16]`.
Box = tuple[tuple[int, int], ...]
# What holds a shard: a device, its number, or a process.
_Holder = TypeVar("_Holder")


def as_box(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    """The box that `index` selects from an array of `shape`."""
    return tuple(
        part.indices(size)[:2] for part, size in zip(index, shape, strict=True)
    )


def shard_boxes(sharding: Sharding, shape: tuple[int, ...]) -> dict[Any, Box]:
    """The box of each device's shard of an array of `shape`: a `(start, stop)` for each
    dimension.

    For an `AbstractMesh` the keys are positions in the mesh, in row-major order.
    """
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        return dict(enumerate(_in_mesh_order(sharding, shape)))
    # JAX's type allows `None` for the index of an array of rank 0.
    return {
        device: as_box(index or (), shape)
        for device, index in sharding.devices_indices_map(shape).items()
    }


def boxes_here(sharding: Sharding, shape: tuple[int, ...]) -> dict[Any, Box]:
    """The box of the shard of each device of this process, in an array of `shape`."""
    indices = sharding.addressable_devices_indices_map(shape)
    return {device: as_box(index or (), shape) for device, index in indices.items()}


def holders_by_box(shards: Iterable[tuple[_Holder, Box]]) -> dict[Box, list[_Holder]]:
    """The devices that hold each box, from the box of each device's shard. Boxes are in
    the order of their first devices.
    """
    holders: dict[Box, list[_Holder]] = {}
    for holder, box in shards:
        holders.setdefault(box, []).append(holder)
    return holders


def first_holder_by_box(shards: Iterable[tuple[_Holder, Box]]) -> dict[Box, _Holder]:
    """The first device that holds each box, from the box of each device's shard."""
    first: dict[Box, _Holder] = {}
    for holder, box in shards:
        first.setdefault(box, holder)
    return first


def whole_box(shape: Sequence[int]) -> Box:
    """The box of all elements of an array of `shape`."""
    return tuple([(0, size) for size in shape])


def box_start(box: Box) -> tuple[int, ...]:
    """The position of the first element of a box."""
    return tuple([start for start, _ in box])


def box_shape(box: Box) -> tuple[int, ...]:
    """The number of elements along each dimension of a box."""
    return tuple([stop - start for start, stop in box])


def box_slices(box: Box) -> tuple[slice, ...]:
    """The NumPy index of a box in the whole array."""
    return tuple([slice(start, stop) for start, stop in box])


def volume(box: Box) -> int:
    """The number of elements in a box."""
    return math.prod(box_shape(box))


def common(box: Box, other: Box) -> Box | None:
    """The intersection of two boxes, or `None` if it is empty."""
    intersection: list[tuple[int, int]] = []
    for (start, stop), (low, high) in zip(box, other, strict=True):
        first = max(start, low)
        end = min(stop, high)
        if first >= end:
            return None
        intersection.append((first, end))
    return tuple(intersection)


def slices(part: Box, box: Box) -> tuple[Any, ...]:
    """The NumPy index of the box `part` in an array that holds the elements of `box`.

    The index ends with an ellipsis, so that it selects a view at rank 0 too.
    """
    index: list[Any] = []
    for (start, stop), low in zip(part, box_start(box), strict=True):
        index.append(slice(start - low, stop - low))
    return (*index, ...)


def first_with(box: Box, shards: Sequence[Box]) -> int | None:
    """The position of the first box in `shards` that contains all of `box`, or `None`."""
    for number, shard in enumerate(shards):
        if common(box, shard) == box:
            return number
    return None


def read_box(
    box: Box,
    shards: Sequence[Box],
    data: Callable[[int], np.ndarray],
) -> np.ndarray | None:
    """The elements of a box: a view of one shard if a shard contains the box, else a
    copy from several shards.

    `shards` has the box of each shard; two of these boxes are equal or disjoint.
    `data(i)` returns the elements of `shards[i]`. The result is `None` if the shards do
    not cover the box.
    """
    number_of_container = first_with(box, shards)
    if number_of_container is not None:
        inside_shard = slices(box, shards[number_of_container])
        return data(number_of_container)[inside_shard]
    # Replicas of a shard are read once.
    number_by_shard = {shard: number for number, shard in enumerate(shards)}
    # The intersection of each shard with the box.
    part_by_shard: dict[Box, Box] = {}
    covered_elements = 0
    for shard in number_by_shard:
        part = common(shard, box)
        if part is not None:
            part_by_shard[shard] = part
            covered_elements += volume(part)
    if covered_elements < volume(box):
        return None
    array = np.empty(box_shape(box), data(0).dtype)
    for shard, part in part_by_shard.items():
        elements = data(number_by_shard[shard])
        inside_shard = slices(part, shard)
        array[slices(part, box)] = elements[inside_shard]
    return array


def array_of(
    shape: tuple[int, ...],
    dtype: np.dtype,
    sharding: Sharding,
    boxes: Sequence[Box],
    memory: Sequence[np.ndarray],
) -> jax.Array:
    """A `jax.Array` of this shape, dtype and sharding, made from NumPy arrays.

    `boxes` are the distinct boxes of this process's shards, and `memory` has the
    elements of each. On CPUs the result uses the memory of these arrays.
    """
    # Where this process has no device of the sharding, JAX would still call back for a
    # replicated array.
    if not memory:
        return jax.make_array_from_single_device_arrays(
            shape, sharding, [], dtype=dtype
        )
    memory_by_start = dict(zip(map(box_start, boxes), memory, strict=True))

    def shard(index: Any) -> np.ndarray:
        if len(memory) == 1:
            return memory[0]
        start = tuple([part.start or 0 for part in index])
        return memory_by_start[start]

    return jax.make_array_from_callback(shape, sharding, shard, dtype=dtype)


class ArrayMaker:
    """Makes `jax.Array`s of one shape, dtype and sharding, as `array_of` does, in less
    time for each. `boxes` are the distinct boxes of this process's shards.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype,
        sharding: Sharding,
        boxes: Sequence[Box],
    ):
        """`boxes` are the distinct boxes of this process's shards, in the order in
        which each call gives their elements.
        """
        self._shape = shape
        self._dtype = dtype
        self._sharding = sharding
        self._boxes = boxes
        box_of_device = boxes_here(sharding, shape)
        self._devices = list(box_of_device)
        # For each of the devices, the position of its shard's box in `boxes`.
        self._box_numbers = [boxes.index(box) for box in box_of_device.values()]
        # The abstract value of the first array, which is that of all others.
        self._aval: Any = None

    def __call__(self, memory: Sequence[np.ndarray]) -> Any:
        """The array whose boxes, in the order of `boxes`, have the elements in
        `memory`.
        """
        if self._aval is None:
            array = array_of(
                shape=self._shape,
                dtype=self._dtype,
                sharding=self._sharding,
                boxes=self._boxes,
                memory=memory,
            )
            self._aval = array.aval
            return array
        # JAX has no public way to give many shards to devices without a function that
        # it calls for each. `make_array_from_callback` itself ends in this call, in 0.9
        # to 0.12.
        shards = [memory[number] for number in self._box_numbers]
        return pxla.batched_device_put(
            self._aval, self._sharding, shards, self._devices
        )


def _in_mesh_order(sharding: NamedSharding, shape: tuple[int, ...]) -> list[Box]:
    """The box of the shard at each position of the mesh, in row-major order."""
    sharding.shard_shape(shape)  # raises where the sharding does not fit
    axis_sizes = dict(sharding.mesh.shape)
    sizes = tuple(axis_sizes.values())
    coordinates = np.indices(sizes).reshape(len(axis_sizes), -1)
    coordinates_of_axis = dict(zip(axis_sizes, coordinates, strict=True))
    entries = entries_at(sharding.spec, len(shape))
    intervals_by_dim = []
    for entry, size in zip(entries, shape, strict=True):
        shard_numbers = np.zeros(sharding.mesh.size, np.int64)
        shard_count = 1
        for axis in entry_axes(entry):
            axis_size = axis_sizes[axis]
            shard_numbers = shard_numbers * axis_size + coordinates_of_axis[axis]
            shard_count = shard_count * axis_size
        shard_size = size // shard_count
        starts = shard_numbers * shard_size
        stops = starts + shard_size
        intervals_by_dim.append(zip(starts.tolist(), stops.tolist(), strict=True))
    if intervals_by_dim:
        return list(zip(*intervals_by_dim, strict=True))
    return [()] * sharding.mesh.size
