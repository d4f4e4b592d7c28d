"""Boxes. A box is the index range of a shard in its array: a start and a stop for each
dimension.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, Sharding

from .spec import entries_at, entry_axes


# A half-open index range of an array: `(start, stop)` for each dimension.
# `((0, 4), (8, 16))` is `array[0:4, 8:16]`.
Box = tuple[tuple[int, int], ...]


def as_box(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    """The box that `index` selects from an array of `shape`."""
    return tuple(
        part.indices(size)[:2] for part, size in zip(index, shape, strict=True)
    )


def shard_boxes(sharding: Sharding, shape: tuple[int, ...]) -> dict[Any, Box]:
    """The box of each device's shard of an array of `shape`.

    For an `AbstractMesh` the keys are positions in the mesh, in row-major order.
    """
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        return dict(enumerate(_in_mesh_order(sharding, shape)))
    return {
        device: as_box(index or (), shape)
        for device, index in sharding.devices_indices_map(shape).items()
    }


def boxes_here(sharding: Sharding, shape: tuple[int, ...]) -> dict[Any, Box]:
    """The box of the shard of each device of this process, in an array of `shape`."""
    indices = sharding.addressable_devices_indices_map(shape)
    return {device: as_box(index or (), shape) for device, index in indices.items()}


def volume(box: Box) -> int:
    """The number of elements in a box."""
    return math.prod(stop - start for start, stop in box)


def common(box: Box, other: Box) -> Box | None:
    """The intersection of two boxes, or `None` if it is empty."""
    intersection = tuple(
        [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, other, strict=True)]
    )
    if all([start < stop for start, stop in intersection]):
        return intersection
    return None


def slices(part: Box, box: Box) -> tuple[Any, ...]:
    """The NumPy index of the box `part` in an array that holds the elements of `box`.

    The index ends with an ellipsis, so that it selects a view at rank 0 too.
    """
    part_slices = [
        slice(start - low, stop - low)
        for (start, stop), (low, _) in zip(part, box, strict=True)
    ]
    return (*part_slices, ...)


def first_with(box: Box, shards: Sequence[Box]) -> int | None:
    """The position of the first box in `shards` that contains all of `box`, or `None`."""
    return next(
        (number for number, shard in enumerate(shards) if common(box, shard) == box),
        None,
    )


def read_box(
    box: Box, shards: Sequence[Box], data: Callable[[int], np.ndarray]
) -> np.ndarray | None:
    """The elements of a box: a view of one shard if a shard contains the box, else a
    copy from several shards.

    `data(i)` returns the elements of `shards[i]`. The result is `None` if the shards do
    not cover the box.
    """
    number = first_with(box, shards)
    if number is not None:
        return data(number)[slices(box, shards[number])]
    parts: dict[Box, tuple[Box, int]] = {}
    for source, shard in enumerate(shards):
        both = common(shard, box)
        if both is not None:
            parts[shard] = (both, source)
    if sum(volume(both) for both, _ in parts.values()) < volume(box):
        return None
    array = np.empty([stop - start for start, stop in box], data(0).dtype)
    for shard, (both, source) in parts.items():
        array[slices(both, box)] = data(source)[slices(both, shard)]
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
    buffers = {
        tuple([start for start, _ in box]): device_array
        for box, device_array in zip(boxes, memory, strict=True)
    }

    def shard(index: Any) -> np.ndarray:
        if len(memory) == 1:
            return memory[0]
        return buffers[tuple([part.start or 0 for part in index])]

    return jax.make_array_from_callback(shape, sharding, shard, dtype=dtype)


def _in_mesh_order(sharding: NamedSharding, shape: tuple[int, ...]) -> list[Box]:
    sharding.shard_shape(shape)  # raises where the sharding does not fit
    sizes = dict(sharding.mesh.shape)
    coordinates = np.indices(tuple(sizes.values())).reshape(len(sizes), -1)
    coordinate_of = dict(zip(sizes, coordinates, strict=True))
    entries = entries_at(sharding.spec, len(shape))
    columns = []
    for entry, size in zip(entries, shape, strict=True):
        number = np.zeros(sharding.mesh.size, np.int64)
        count = 1
        for axis in entry_axes(entry):
            number = number * sizes[axis] + coordinate_of[axis]
            count = count * sizes[axis]
        step = size // count
        columns.append([(start, start + step) for start in (number * step).tolist()])
    if columns:
        return list(zip(*columns, strict=True))
    return [()] * sharding.mesh.size
