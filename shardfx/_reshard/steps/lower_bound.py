"""Lower bounds on the cost of a path between two layouts, from the bytes that devices
must receive.
"""

import functools as ft
import math
from typing import Literal

import numpy as np

from .layout import FineLayout, ShardDims, Shards, SubAxes, link_groups, overlap


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
        self.shards, self.needs_far = shards, far_is == "target"
        there = Shards(far)
        self.far = [(there.index(axes), there.count(axes)) for axes in far.layout.dims]
        self.far_shard_count = far.layout.shard_count
        (self.cheapest, _), *_ = cheaper = link_groups(near)
        self.dearer = [
            _GroupBound(shards, self.far, group, weight - less)
            for (less, group), (weight, _) in zip(cheaper, cheaper[1:], strict=False)
        ]
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
        common = (
            last.sum() if not others else np.dot(ft.reduce(np.multiply, others), last)
        )
        wanted = (
            self.far_shard_count if self.needs_far else self.shards.shard_count(dims)
        )
        bound = max(0.0, 1.0 / wanted - float(common) / len(last)) * self.cheapest
        return bound + sum([group.bound(dims, self.needs_far) for group in self.dearer])

    def _common_share(self, dim: int, axes: SubAxes) -> np.ndarray | None:
        """For each device, the fraction of the dimension `dim` that its shards in two
        layouts have in common. In one layout the sub-axes `axes` shard the dimension,
        and the other is `far`. `None` if neither shards it.
        """
        key = (dim, axes)
        if key not in self._common_shares:
            index, count = self.far[dim]
            if axes or count > 1:
                common, parts = overlap(
                    self.shards.index(axes), self.shards.count(axes), index, count
                )
                self._common_shares[key] = common * (1.0 / parts)
            else:
                self._common_shares[key] = None
        return self._common_shares[key]


class _GroupBound:
    """The second cost of a `LowerBound`: that of the elements which groups of devices
    exchange over dearer axes.

    `group` has the number of each device's group. `extra` is what a byte between groups
    costs more than over the next cheaper axis. `far` describes the layout at the far
    end of the move. It has a pair for each dimension: the index of each device's shard
    along it, and the number of shards.
    """

    def __init__(
        self,
        shards: Shards,
        far: list[tuple[np.ndarray, int]],
        group: np.ndarray,
        extra: float,
    ):
        self.shards, self.group, self.extra = shards, group, extra
        self.groups = int(group.max()) + 1
        self.far = [_GroupShards(group, self.groups, *own) for own in far]
        # The fraction of a dimension that each group holds under a layout, and the
        # fraction of it that the group also holds under the far layout.
        self._shares: dict[tuple[int, SubAxes], tuple[np.ndarray, np.ndarray]] = {}

    def bound(self, dims: ShardDims, needs_far: bool) -> float:
        """The additional cost of the bytes that groups of devices must receive from
        other groups, as the mean over devices. With `needs_far`, the move is from the
        layout `dims` to `far`, otherwise from `far` to `dims`.
        """
        need, common = 1.0, 1.0
        for dim, axes in enumerate(dims):
            if not axes and self.far[dim].count == 1:
                continue
            if (dim, axes) not in self._shares:
                here = _GroupShards(
                    self.group,
                    self.groups,
                    self.shards.index(axes),
                    self.shards.count(axes),
                )
                self._shares[dim, axes] = here.share, here.common_share(self.far[dim])
            share, both = self._shares[dim, axes]
            need, common = (
                need * (self.far[dim].share if needs_far else share),
                common * both,
            )
        return (
            max(0.0, float(np.mean(need - common)))
            * self.groups
            / self.shards.devices
            * self.extra
        )


class _GroupShards:
    """The shards along one dimension that each group of devices holds. There are
    `groups` groups and `count` shards. For each device, `group` has the number of its
    group, and `index` the index of its shard.
    """

    def __init__(self, group: np.ndarray, groups: int, index: np.ndarray, count: int):
        self.groups, self.count = groups, count
        self.holds = np.zeros(groups * count, bool)
        self.holds[group * count + index] = True
        self.group, self.index = np.divmod(np.flatnonzero(self.holds), count)
        self.share = np.bincount(self.group, minlength=groups) * (1.0 / count)

    def common_share(self, other: "_GroupShards") -> np.ndarray:
        """For each group, the fraction of the dimension that it holds both under this
        sharding and under `other`.
        """
        fine, coarse = (self, other) if self.count >= other.count else (other, self)
        parts = math.lcm(fine.count, coarse.count)
        step = parts // fine.count
        group, part = fine.group, fine.index
        if step > 1:
            group, part = (
                np.repeat(group, step),
                np.add.outer(part * step, np.arange(step)).ravel(),
            )
        both = coarse.holds[group * coarse.count + part // (parts // coarse.count)]
        return np.bincount(group[both], minlength=self.groups) * (1.0 / parts)
