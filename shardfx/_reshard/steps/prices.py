"""The costs of collectives, by which the search compares paths.

A cost is the bytes that a device receives, times the weight of the mesh axis over which
they arrive. It is the mean over devices, as a fraction of the bytes of the whole array.
A cost of 0.5 means that each device receives half the array's bytes over axes of weight
1, or a twentieth of them over axes of weight 10.
"""

import itertools as it

import numpy as np

from .layout import FineLayout, SubAxes, link_groups


# A small cost per step makes the search prefer the path with fewer steps among paths of
# equal traffic.
STEP = 1e-9
# Among paths with equally many steps, the search prefers a permutation before any
# all-to-all. A first permutation reads the source directly and needs no copy. The TPU
# compiler may keep one shard of the later steps in on-chip memory.
STEP_BEFORE_PERMUTATION = 1.01 * STEP


class Prices:
    """The costs of collectives along sub-axes (mesh axes or parts of them)."""

    def __init__(self, fine_layout: FineLayout):
        self.sizes = fine_layout.layout.sizes
        self.weights = fine_layout.layout.weights or (1.0,) * len(self.sizes)

    def all_to_all(self, shard_count: int, sub_axes: SubAxes) -> float:
        """The cost of an all-to-all along the sub-axes `sub_axes`, for an array that
        has `shard_count` shards.
        """
        # The part of a shard that is still to be sent.
        share = 1.0
        cost = 0.0
        for sub_axis in self._dearest_first(sub_axes):
            size = self.sizes[sub_axis]
            # Only the bytes that must cross a slow axis do so, once. The rest moves
            # over faster axes.
            sent_share = share * (1 - 1 / size)
            cost += sent_share * self.weights[sub_axis]
            share /= size
        return cost / shard_count

    def all_gather(self, shard_count: int, sub_axes: SubAxes) -> float:
        """The cost of an all-gather along the sub-axes `sub_axes`. Before it the array
        has `shard_count` shards.
        """
        held_shards = 1
        cost = 0.0
        for sub_axis in self._dearest_first(sub_axes):
            # A shard enters a slice once and is copied inside it.
            received_shards = held_shards * (self.sizes[sub_axis] - 1)
            cost += received_shards * self.weights[sub_axis]
            held_shards *= self.sizes[sub_axis]
        return cost / shard_count

    def are_mixed(self, sub_axes: SubAxes) -> bool:
        """Whether some of `sub_axes` have different weights."""
        weights = {self.weights[sub_axis] for sub_axis in sub_axes}
        return len(weights) > 1

    def _dearest_first(self, sub_axes: SubAxes) -> list[int]:
        """The sub-axes, those along which a byte costs most first."""
        return sorted(sub_axes, key=lambda sub_axis: -self.weights[sub_axis])


class PermutationPrices:
    """The costs of permutations, in which each device's shard is sent to another
    device. `cost` computes which bytes go over expensive axes only if the result
    depends on it, since that takes time. `computed` counts such calls of `cost`. A byte
    costs `price` times its weight.
    """

    def __init__(self, source: FineLayout, price: float = 1.0):
        self.link_groups = link_groups(source)
        self.price = price
        self.computed = 0

    def cost(
        self,
        have: np.ndarray,
        want: np.ndarray,
        share: float,
        limit: float,
    ) -> float:
        """Returns the cost of a permutation. `have` and `want` are the numbers of the
        shards that devices hold before and after it. `share` is the size of one shard
        as a fraction of the array. If the permutation costs more than `limit`, the
        result may be any lower bound above `limit`.
        """
        is_moving = have != want
        moving_count = int(is_moving.sum())
        if not moving_count:
            return 0.0
        # What one device's shard adds to the mean over devices, at weight 1. `price` is
        # how much more a byte of a permutation costs than one of an all-gather.
        shard_cost = share * self.price / len(have)
        total = self.link_groups[0].weight * moving_count * shard_cost
        if len(self.link_groups) == 1 or total >= limit:
            return total + STEP
        self.computed += 1
        have = have[is_moving]
        want = want[is_moving]
        for cheaper, dearer in it.pairwise(self.link_groups):
            served_count = _served_inside(cheaper.numbers[is_moving], have, want)
            extra_weight = dearer.weight - cheaper.weight
            total += extra_weight * (moving_count - served_count) * shard_cost
        return total + STEP


def _served_inside(
    group_numbers: np.ndarray,
    have: np.ndarray,
    want: np.ndarray,
) -> int:
    """The number of devices that can receive their shard from a device of their group.
    For each device, `group_numbers` has the number of its group, and `have` and `want`
    the numbers of its shards before and after.

    Each device sends its shard to one other, so a group serves at most as many requests
    as it has copies. So this is the size of the multiset intersection of what devices
    hold and what they need.
    """
    shard_count = int(want.max()) + 1
    # A key is the number of a group and of a shard, in one integer.
    first_shard_of_group = group_numbers * shard_count
    held_keys = 2 * (first_shard_of_group + have)
    # The last bit marks what is needed.
    needed_keys = 2 * (first_shard_of_group + want) + 1
    keys = np.sort(np.concatenate([held_keys, needed_keys]))
    starts = np.flatnonzero(np.diff(keys >> 1, prepend=-1))
    needed = np.add.reduceat(keys & 1, starts)
    held = np.diff(starts, append=len(keys)) - needed
    return int(np.minimum(needed, held).sum())
