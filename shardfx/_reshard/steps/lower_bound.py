"""Lower bounds on the cost of a path between two layouts, from the bytes that devices
must receive.
"""

import functools as ft
import itertools as it
import math
from typing import Any, Literal, NamedTuple

import numpy as np

from .layout import FineLayout, ShardDims, Shards, SubAxes, link_groups, overlap


class FarDim(NamedTuple):
    """A dimension in the layout at the far end of a move: the index of each device's
    shard along it, and the number of shards.
    """

    shard_index: np.ndarray
    shard_count: int


class LowerBound:
    """A function of a layout `dims` that returns a lower bound on the cost of every
    path between `dims` and `far`.

    `far` is the layout at one end of a move, and `dims` is over the sub-axes of `near`,
    the layout at the other end. If `far_is` is "target", paths lead from `dims` to
    `far`, otherwise from `far` to `dims`.

    The bound is the sum of two costs. First, a device must receive the elements of its
    new shard that are not in its old shard. They count at the cost of the cheapest
    axis. Second, if only dearer axes connect a group of devices to other devices, the
    group must receive the elements that it needs and none of its devices holds. For
    these the bound adds what they cost more over the dearer axes than over the cheapest
    one.
    """

    def __init__(
        self,
        shards: Shards,
        near: FineLayout,
        far: FineLayout,
        far_is: Literal["target", "source"],
    ):
        # `far` is the layout at one end of a move, and `near` the one at the other end.
        # `shards` are those of layouts over the sub-axes of `near`.
        self.shards = shards
        # Whether devices must end with their shards in `far`.
        self.needs_far = far_is == "target"
        far_shards = Shards(far)
        # For each dimension, each device's shard in `far`.
        self.far = [
            FarDim(far_shards.index(axes), far_shards.count(axes))
            for axes in far.layout.dims
        ]
        self.far_shard_count = far.layout.shard_count
        # A division of the devices into groups for each weight (the cost of a byte),
        # in ascending order.
        divisions = link_groups(near)
        self.least_weight = divisions[0].weight
        # Bytes between the groups of a division cost the next higher weight.
        self.group_bounds = [
            _GroupBound(
                shards,
                far=self.far,
                group_of_device=cheaper.numbers,
                extra_weight=dearer.weight - cheaper.weight,
            )
            for cheaper, dearer in it.pairwise(divisions)
        ]
        # The results of `_common_share`.
        self._common_shares: dict[tuple[int, SubAxes], np.ndarray | None] = {}

    def __call__(self, dims: ShardDims) -> float:
        """A lower bound on the cost of every path between the layout `dims` and the
        layout `far`.
        """
        shares = [
            share
            for share in map(self._common_share, range(len(dims)), dims)
            if share is not None
        ]
        if not shares:
            return 0.0
        *others, last = shares
        # A product of arrays and a dot product are faster than a product of all.
        if others:
            common = np.dot(ft.reduce(np.multiply, others), last)
        else:
            common = last.sum()
        # A device must end with its shard in `far`, or in `dims` if paths lead there.
        shard_count = self.far_shard_count
        if not self.needs_far:
            shard_count = self.shards.shard_count(dims)
        missing = max(0.0, 1.0 / shard_count - float(common) / len(last))
        between_groups = sum(
            [group.bound(dims, self.needs_far) for group in self.group_bounds]
        )
        return missing * self.least_weight + between_groups

    def _common_share(self, dim: int, axes: SubAxes) -> np.ndarray | None:
        """For each device, the fraction of the dimension `dim` that its shards in two
        layouts have in common. In one layout the sub-axes `axes` shard the dimension,
        and the other is `far`. `None` if neither shards it.
        """
        key = (dim, axes)
        if key in self._common_shares:
            return self._common_shares[key]
        far = self.far[dim]
        share = None
        if axes or far.shard_count > 1:
            common, size = overlap(
                self.shards.index(axes),
                self.shards.count(axes),
                far.shard_index,
                far.shard_count,
            )
            share = common * (1.0 / size)
        self._common_shares[key] = share
        return share


class _GroupBound:
    """The second cost of a `LowerBound`: that of the elements which groups of devices
    exchange over dearer axes.

    `group_of_device` has the number of each device's group. `extra_weight` is what a
    byte between groups costs more than over the next cheaper axis. `far` describes the
    layout at the far end of the move, dimension by dimension.
    """

    def __init__(
        self,
        shards: Shards,
        far: list[FarDim],
        group_of_device: np.ndarray,
        extra_weight: float,
    ):
        self.shards = shards
        self.group_of_device = group_of_device
        self.extra_weight = extra_weight
        self.group_count = int(group_of_device.max()) + 1
        # For each dimension, the shards that each group holds in the layout `far`.
        self.far = [
            _GroupShards(
                group_of_device,
                self.group_count,
                shard_of_device=dim.shard_index,
                shard_count=dim.shard_count,
            )
            for dim in far
        ]
        # The results of `_group_shares`.
        self._shares: dict[tuple[int, SubAxes], _GroupShares] = {}

    def bound(self, dims: ShardDims, needs_far: bool) -> float:
        """The additional cost of the bytes that groups of devices must receive from
        other groups, as the mean over devices. With `needs_far`, the move is from the
        layout `dims` to `far`, otherwise from `far` to `dims`.
        """
        # For each group, the fractions of the array that it needs, and that it needs
        # and holds.
        needed: Any = 1.0
        common: Any = 1.0
        for dim, axes in enumerate(dims):
            # A dimension that neither layout shards.
            if not axes and self.far[dim].shard_count == 1:
                continue
            shares = self._group_shares(dim, axes)
            needed = needed * (self.far[dim].share if needs_far else shares.held)
            common = common * shares.common
        missing = max(0.0, float(np.mean(needed - common)))
        # All groups together, divided among the devices.
        missing_of_device = missing * self.group_count / self.shards.device_count
        return missing_of_device * self.extra_weight

    def _group_shares(self, dim: int, axes: SubAxes) -> "_GroupShares":
        """The fraction of the dimension `dim` that each group holds if `axes` shard it,
        and the fraction of it that the group also holds in the layout `far`.
        """
        key = (dim, axes)
        if key not in self._shares:
            held = _GroupShards(
                self.group_of_device,
                self.group_count,
                shard_of_device=self.shards.index(axes),
                shard_count=self.shards.count(axes),
            )
            self._shares[key] = _GroupShares(
                held=held.share,
                common=held.common_share(self.far[dim]),
            )
        return self._shares[key]


class _GroupShares(NamedTuple):
    """The fraction of a dimension that each group holds under a layout, and the
    fraction of it that the group also holds under the far layout.
    """

    held: np.ndarray
    common: np.ndarray


class _GroupShards:
    """The shards along one dimension that each group of devices holds. There are
    `group_count` groups and `shard_count` shards. `group_of_device` and
    `shard_of_device` have the number of each device's group, and the index of its
    shard.
    """

    def __init__(
        self,
        group_of_device: np.ndarray,
        group_count: int,
        shard_of_device: np.ndarray,
        shard_count: int,
    ):
        self.group_count = group_count
        self.shard_count = shard_count
        # For each pair of a group and a shard, at `group * shard_count + shard`:
        # whether some device of the group has the shard.
        self.is_held = np.zeros(group_count * shard_count, bool)
        self.is_held[group_of_device * shard_count + shard_of_device] = True
        # The group and the shard of each pair that is held.
        pairs = np.flatnonzero(self.is_held)
        self.held_groups, self.held_shards = np.divmod(pairs, shard_count)
        # The fraction of the dimension that each group holds.
        held_counts = np.bincount(self.held_groups, minlength=group_count)
        self.share = held_counts * (1.0 / shard_count)

    def common_share(self, other: "_GroupShards") -> np.ndarray:
        """For each group, the fraction of the dimension that it holds both under this
        sharding and under `other`.
        """
        fine = self if self.shard_count >= other.shard_count else other
        coarse = other if fine is self else self
        # The dimension is divided into parts, which are shards or fractions of shards
        # in both shardings. `groups` and `parts` list the pairs of a group and a part
        # that it holds under `fine`.
        part_count = math.lcm(fine.shard_count, coarse.shard_count)
        parts_per_shard = part_count // fine.shard_count
        groups = fine.held_groups
        parts = fine.held_shards
        if parts_per_shard > 1:
            groups = np.repeat(groups, parts_per_shard)
            numbers = np.arange(parts_per_shard)
            parts = np.add.outer(parts * parts_per_shard, numbers).ravel()
        coarse_shards = parts // (part_count // coarse.shard_count)
        is_common = coarse.is_held[groups * coarse.shard_count + coarse_shards]
        common_counts = np.bincount(groups[is_common], minlength=self.group_count)
        return common_counts * (1.0 / part_count)
