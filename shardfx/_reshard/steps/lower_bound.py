"""Lower bounds on the traffic between two layouts: the bytes that devices need and do not hold."""

import functools as ft
import math
from typing import Literal

import numpy as np

from .layout import End, Holdings, ShardDims, levels, overlap


class LowerBound:
    """A lower bound on the cost of moving from a layout to the target, or from the source to the layout.

    Two things must be paid for, whatever the steps are. A device has to receive the elements that it needs and does not
    hold; each such byte costs at least as much as one over the cheapest axis. And a group of devices that only
    expensive axes connect to the others has to receive the elements that one of its devices needs and none of them
    holds. Each such byte costs the difference between the expensive axes and the cheapest one.

    **Arguments:**

    - `held`: the shards that devices hold under layouts over one end's factors.
    - `near`: that end; its axes say what bytes cost.
    - `far`: the other end.
    - `far_is`: "target" if the move leads from the layout to the far end, "source" if it leads from the far end to the
        layout.
    """

    def __init__(self, held: Holdings, near: End, far: End, far_is: Literal["target", "source"]):
        self.held, self.needs_far = held, far_is == "target"
        there = Holdings(far)
        self.far = [(there.index(axes), there.count(axes)) for axes in far.layout.dims]
        self.far_pieces = far.layout.pieces
        (self.cheapest, _), *_ = cheaper = levels(near)
        self.dearer = [
            _GroupBound(held, self.far, group, weight - less)
            for (less, group), (weight, _) in zip(cheaper, cheaper[1:], strict=False)
        ]
        self._common_shares: dict[tuple[int, tuple[int, ...]], np.ndarray | None] = {}

    def __call__(self, dims: ShardDims) -> float:
        """The least cost of a path between the layout `dims` and the far end of the move, which `far_is` names."""
        shares = [share for share in map(self._common_share, range(len(dims)), dims) if share is not None]
        if not shares:
            return 0.0
        *others, last = shares
        common = last.sum() if not others else np.dot(ft.reduce(np.multiply, others), last)
        wanted = self.far_pieces if self.needs_far else self.held.pieces(dims)
        bound = max(0.0, 1.0 / wanted - float(common) / len(last)) * self.cheapest
        return bound + sum([group.bound(dims, self.needs_far) for group in self.dearer])

    def _common_share(self, dim: int, axes: tuple[int, ...]) -> np.ndarray | None:
        """The fraction of a dimension that each device holds both in this layout and at the far end of the move.

        `None` if neither end shards the dimension.
        """
        key = (dim, axes)
        if key not in self._common_shares:
            index, count = self.far[dim]
            if axes or count > 1:
                common, parts = overlap(self.held.index(axes), self.held.count(axes), index, count)
                self._common_shares[key] = common * (1.0 / parts)
            else:
                self._common_shares[key] = None
        return self._common_shares[key]


class _GroupBound:
    """The term of the lower bound for groups of devices: a byte from another group costs `extra` more."""

    def __init__(self, held: Holdings, far: list[tuple[np.ndarray, int]], group: np.ndarray, extra: float):
        self.held, self.group, self.extra = held, group, extra
        self.groups = int(group.max()) + 1
        self.far = [_HeldByGroups(group, self.groups, *pieces) for pieces in far]
        # The fraction of a dimension that each group holds in a layout, and the fraction that it also holds at the far
        # end.
        self._shares: dict[tuple[int, tuple[int, ...]], tuple[np.ndarray, np.ndarray]] = {}

    def bound(self, dims: ShardDims, needs_far: bool) -> float:
        """The extra cost of the bytes that a group needs and none of its devices holds, on average per device."""
        need, common = 1.0, 1.0
        for dim, axes in enumerate(dims):
            if not axes and self.far[dim].count == 1:
                continue
            if (dim, axes) not in self._shares:
                here = _HeldByGroups(self.group, self.groups, self.held.index(axes), self.held.count(axes))
                self._shares[dim, axes] = here.share, here.share_in_common(self.far[dim])
            share, both = self._shares[dim, axes]
            need, common = need * (self.far[dim].share if needs_far else share), common * both
        return max(0.0, float(np.mean(need - common))) * self.groups / self.held.devices * self.extra


class _HeldByGroups:
    """The shards of a dimension, out of `count`, that the devices of each group hold between them.

    Only pairs of a group and a shard that it holds are listed, so there are at most as many as devices.
    """

    def __init__(self, group: np.ndarray, groups: int, index: np.ndarray, count: int):
        self.groups, self.count = groups, count
        self.holds = np.zeros(groups * count, bool)
        self.holds[group * count + index] = True
        self.group, self.index = np.divmod(np.flatnonzero(self.holds), count)
        self.share = np.bincount(self.group, minlength=groups) * (1.0 / count)

    def share_in_common(self, other: "_HeldByGroups") -> np.ndarray:
        """For each group, the fraction of the dimension that it holds in both `self` and `other`."""
        fine, coarse = (self, other) if self.count >= other.count else (other, self)
        parts = math.lcm(fine.count, coarse.count)
        step = parts // fine.count
        group, part = fine.group, fine.index
        if step > 1:
            group, part = np.repeat(group, step), np.add.outer(part * step, np.arange(step)).ravel()
        both = coarse.holds[group * coarse.count + part // (parts // coarse.count)]
        return np.bincount(group[both], minlength=self.groups) * (1.0 / parts)
