"""The costs of collectives, by which the search compares paths.

A cost is the bytes that a device receives, times the weight of the mesh axis over which they arrive. It is the mean
over devices, as a fraction of the bytes of the whole array. A cost of 0.5 means that each device receives half the
array's bytes over axes of weight 1, or a twentieth of them over axes of weight 10.
"""

import itertools as it

import numpy as np

from .layout import End, levels


# A small cost per step makes the search prefer the path with fewer steps among paths of equal traffic.
STEP = 1e-9
# Among paths with equally many steps, the search prefers a permutation before any all-to-all. A first permutation reads
# the source directly and needs no copy. The TPU compiler may keep one shard of the later steps in on-chip memory.
STEP_BEFORE_PERMUTATION = 1.01 * STEP


class Prices:
    """The costs of collectives along factors of one end's mesh, as fractions of the array times weights."""

    def __init__(self, end: End):
        self.sizes = end.layout.sizes
        self.weights = end.layout.weights or (1.0,) * len(self.sizes)

    def all_to_all(self, pieces: int, group: tuple[int, ...]) -> float:
        """The cost of an all-to-all along the factors `group` for an array of `pieces` shards."""
        left, cost = 1.0, 0.0
        for factor in self._dearest_first(group):
            # Only the bytes that must cross a slow axis do so, once. The rest moves over faster axes.
            cost += left * (1 - 1 / self.sizes[factor]) * self.weights[factor]
            left /= self.sizes[factor]
        return cost / pieces

    def all_gather(self, pieces: int, group: tuple[int, ...]) -> float:
        """The cost of an all-gather along the factors `group` for an array of `pieces` shards."""
        held, cost = 1, 0.0
        for factor in self._dearest_first(group):
            # A shard enters a slice once and is copied inside it.
            cost += held * (self.sizes[factor] - 1) * self.weights[factor]
            held *= self.sizes[factor]
        return cost / pieces

    def are_mixed(self, group: tuple[int, ...]) -> bool:
        """Whether the factors in `group` have different weights."""
        return len({self.weights[factor] for factor in group}) > 1

    def _dearest_first(self, group: tuple[int, ...]) -> list[int]:
        return sorted(group, key=lambda factor: -self.weights[factor])


class PermutationPrices:
    """The costs of permutations of shards among all devices. `asked` counts the expensive computations."""

    def __init__(self, source: End):
        self.levels = levels(source)
        self.asked = 0

    def cost(self, have: np.ndarray, want: np.ndarray, share: float, spare: float) -> float:
        """The cost of the permutation that takes the shards `have` to the shards `want`.

        **Arguments:**

        - `have`, `want`: for each device, the number of the shard that it holds before and after.
        - `share`: the size of one shard as a fraction of the array.
        - `spare`: a limit. If the cost reaches it, the function may return any lower bound that reaches it too.
        """
        moves = have != want
        moving = int(moves.sum())
        if not moving:
            return 0.0
        share /= len(have)
        total = self.levels[0][0] * moving * share
        if len(self.levels) == 1 or total >= spare:
            return total + STEP
        self.asked += 1
        # Each device sends its shard to one other, so a group serves at most as many requests as it has copies.
        span, have, want = int(want.max()) + 1, have[moves], want[moves]
        for (cheap, group), (weight, _) in it.pairwise(self.levels):
            # The size of the multiset intersection of the two sides.
            marked = np.sort(
                np.concatenate([2 * (group[moves] * span + side) + at for at, side in enumerate((have, want))])
            )
            starts = np.flatnonzero(np.diff(marked >> 1, prepend=-1))
            wants = np.add.reduceat(marked & 1, starts)
            near = int(np.minimum(wants, np.diff(starts, append=len(marked)) - wants).sum())
            total += (weight - cheap) * (moving - near) * share
        return total + STEP
