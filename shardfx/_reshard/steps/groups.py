"""The replica groups of the steps of a move, and the split of a shard into the chunks
that an all-to-all sends.

All functions number devices by their position in the mesh order of the move's source,
the layout `like`. `split` and `join` take NumPy arrays and traced arrays. A *sub-axis*
is a mesh axis or a part of one.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .layout import (
    ShardDims,
    StepLayout,
    SubAxes,
    device_coordinates,
    product_of,
    shard_index,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Exchange:
    """An all-to-all or an all-gather within replica groups, from one layout of an array
    to another.

    The *moving* sub-axes are those that shard another dimension after it than before,
    or none.

    **Arguments:**

    - `groups`: an integer array of shape `(groups, members)`. Each row lists the
      devices of one replica group, in the order of their shards.
    - `sizes`: the sizes of the moving sub-axes, major first. Their product is the
      number of members of a group.
    - `splits`: for each dimension, the moving sub-axes that shard it after the
      exchange, major first. A sub-axis is given by its index in `sizes`. An all-gather
      has none.
    - `joins`: for each dimension, the moving sub-axes that shard it before the
      exchange, in the same form.
    """

    groups: np.ndarray
    sizes: tuple[int, ...]
    splits: tuple[SubAxes, ...]
    joins: tuple[SubAxes, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """For each dimension, the number of parts that a device joins along it."""
        return tuple([product_of(self.sizes, sub_axes) for sub_axes in self.joins])


def groups_of(layout: StepLayout, sub_axes: SubAxes, like: StepLayout) -> np.ndarray:
    """Returns the replica groups along `sub_axes` of `layout`, as an integer array with
    one row for each group. A row lists devices that differ only in their coordinates
    along these sub-axes, in the order of these coordinates. A device's number is its
    position in the mesh order of the layout `like`.
    """
    # A row of device coordinates for each sub-axis.
    coordinates = device_coordinates(layout, like)
    others = [axis for axis in range(len(layout.sizes)) if axis not in sub_axes]
    # For each device, the number of its group, and its position in the group.
    group = shard_index(layout.sizes, coordinates, tuple(others))
    member = shard_index(layout.sizes, coordinates, sub_axes)
    member_count = product_of(layout.sizes, sub_axes)
    return np.lexsort((member, group)).reshape(-1, member_count)


def all_to_all(source: StepLayout, target: StepLayout, like: StepLayout) -> Exchange:
    """Returns the all-to-all from layout `source` to layout `target`, which have one
    mesh and equally many shards. The replica groups number devices in the mesh order of
    `like`. `splits` and `joins` of the result have, for each dimension, the moving
    sub-axes that shard it only after, and only before the all-to-all.
    """
    # From a sub-axis to the dimension that it shards.
    before = dim_of_sub_axis(source)
    after = dim_of_sub_axis(target)
    # The sub-axes that shard another dimension after it than before.
    moving: list[int] = []
    for sub_axis in before:
        if before[sub_axis] != after[sub_axis]:
            moving.append(sub_axis)
    return Exchange(
        groups=groups_of(source, tuple(moving), like),
        sizes=tuple([source.sizes[sub_axis] for sub_axis in moving]),
        splits=_as_indices(target.dims, moving),
        joins=_as_indices(source.dims, moving),
    )


def _as_indices(dims: ShardDims, moving: Sequence[int]) -> tuple[SubAxes, ...]:
    """For each dimension of a layout `dims`, those sub-axes among `moving` that shard
    it, as indices in `moving`.
    """
    indices_by_dim: list[SubAxes] = []
    for axes in dims:
        moving_axes = filter(moving.__contains__, axes)
        indices_by_dim.append(tuple(map(moving.index, moving_axes)))
    return tuple(indices_by_dim)


def dim_of_sub_axis(layout: StepLayout) -> dict[int, int]:
    """The dimension that each sub-axis shards."""
    dim_of: dict[int, int] = {}
    for dim, axes in enumerate(layout.dims):
        for sub_axis in axes:
            dim_of[sub_axis] = dim
    return dim_of


def split(shard: Any, exchange: Exchange) -> Any:
    """Splits a shard into one chunk for each member of the replica group, stacked along
    a new first dimension. `exchange.splits` has, for each dimension, the sub-axes by
    which it is split, as indices in `exchange.sizes`, the sizes of the sub-axes.
    """
    # Each dimension that is split becomes two: the chunks, whose position is in
    # `front`, and the elements of a chunk.
    shape: list[int] = []
    front: list[int] = []
    for size, sub_axes in zip(shard.shape, exchange.splits, strict=True):
        if sub_axes:
            count = product_of(exchange.sizes, sub_axes)
            front.append(len(shape))
            shape += [count, size // count]
        else:
            shape.append(size)
    others = [position for position in range(len(shape)) if position not in front]
    # The split dimensions move to the front before they are reshaped into sub-axes.
    # Reshaping in place would cost one more copy on TPUs, because the small dimensions
    # do not fill tiles.
    parts = shard.reshape(shape).transpose((*front, *others))
    chunk_shape = parts.shape[len(front) :]
    parts = parts.reshape((math.prod(exchange.sizes), *chunk_shape))

    # Chunks are in the order of the dimensions that are split. Members of a replica
    # group are in the order of `sizes`.
    order: list[int] = []
    for sub_axes in exchange.splits:
        order += sub_axes
    sizes = [exchange.sizes[sub_axis] for sub_axis in order]
    by_sub_axis = parts.reshape((*sizes, *chunk_shape))
    chunk_dims = range(len(order), len(by_sub_axis.shape))
    positions = (*np.argsort(order).tolist(), *chunk_dims)
    return by_sub_axis.transpose(positions).reshape(parts.shape)


def join(parts: Any, exchange: Exchange) -> Any:
    """Joins the chunks that a device received in an exchange, stacked along the first
    dimension, into one shard. It is the inverse of `split`. `exchange.joins` has, for
    each dimension, the sub-axes whose chunks are joined along it.
    """
    chunk_shape = parts.shape[1:]
    by_sub_axis = parts.reshape((*exchange.sizes, *chunk_shape))
    # The sub-axes that are joined along a dimension move in front of it.
    order: list[int] = []
    shape: list[int] = []
    for dim, sub_axes in enumerate(exchange.joins):
        order += [*sub_axes, len(exchange.sizes) + dim]
        shape.append(chunk_shape[dim] * product_of(exchange.sizes, sub_axes))
    return by_sub_axis.transpose(order).reshape(shape)


def kept_parts(source: StepLayout, target: StepLayout, like: StepLayout) -> np.ndarray:
    """Returns which part of its shard each device keeps in a slice step from `source`
    to `target`, which cuts shards into equal parts: an integer array of shape
    `(devices, rank)` with the index of the part along each dimension. The devices are
    in the mesh order of `like`.
    """
    coordinates = device_coordinates(target, like)
    part_numbers: list[np.ndarray] = []
    columns = zip(target.dims, source.counts, target.counts, strict=True)
    for axes, old_count, new_count in columns:
        shard_number = shard_index(target.sizes, coordinates, axes)
        part_numbers.append(shard_number % (new_count // old_count))
    return np.stack(part_numbers, axis=1)


def all_gather(source: StepLayout, target: StepLayout, like: StepLayout) -> Exchange:
    """Returns the all-gather from layout `source` to layout `target`, in which each
    dimension is sharded along the first of the sub-axes that shard it in `source`. The
    replica groups number devices in the mesh order of `like`.
    """
    # The sub-axes along which shards are gathered.
    moving: list[int] = []
    joins = []
    for old_axes, new_axes in zip(source.dims, target.dims, strict=True):
        gathered_axes = old_axes[len(new_axes) :]
        start = len(moving)
        moving += gathered_axes
        joins.append(tuple(range(start, len(moving))))
    return Exchange(
        groups=groups_of(source, tuple(moving), like),
        sizes=tuple([source.sizes[sub_axis] for sub_axis in moving]),
        splits=((),) * len(joins),
        joins=tuple(joins),
    )
