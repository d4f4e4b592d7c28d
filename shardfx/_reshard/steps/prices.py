"""What single steps cost: bytes that enter a device, by the weight of the axis over which they come.

A cost is the mean over devices, as a share of the bytes of the whole array: 0.5 says that half an array's bytes enter
each device, or that a tenth of that comes over an axis ten times as dear.
"""

import itertools as it

import numpy as np

from .factors import End, levels


# Among paths of equal traffic the one with fewer steps is taken, so that each step costs a little.
STEP = 1e-9
# Among those the one that permutes before any all-to-all. A permutation that comes first reads the source itself, so
# that no copy of it is made. Of what follows, the TPU compiler may keep one piece on the chip.
STEP_BEFORE_PERMUTATION = 1.01 * STEP


class Prices:
    """What collectives along factors of one end cost."""

    def __init__(self, end: End):
        self.sizes = end.layout.sizes
        self.weights = end.layout.weights or (1.0,) * len(self.sizes)

    def all_to_all(self, pieces: int, group: tuple[int, ...]) -> float:
        """An all-to-all among devices that differ in `group`, of an array in so many pieces."""
        left, cost = 1.0, 0.0
        for factor in self._dearest_first(group):
            # The slow axes are crossed once, by what must cross them; the rest stays on the faster ones.
            cost += left * (1 - 1 / self.sizes[factor]) * self.weights[factor]
            left /= self.sizes[factor]
        return cost / pieces

    def all_gather(self, pieces: int, group: tuple[int, ...]) -> float:
        """An all-gather among devices that differ in `group`, of an array in so many pieces."""
        held, cost = 1, 0.0
        for factor in self._dearest_first(group):
            # A piece enters a slice once, and is copied within.
            cost += held * (self.sizes[factor] - 1) * self.weights[factor]
            held *= self.sizes[factor]
        return cost / pieces

    def are_mixed(self, group: tuple[int, ...]) -> bool:
        """Whether some factors of a group are dearer than others."""
        return len({self.weights[factor] for factor in group}) > 1

    def _dearest_first(self, group: tuple[int, ...]) -> list[int]:
        return sorted(group, key=lambda factor: -self.weights[factor])


class PermutationPrices:
    """What permutations of pieces among all devices cost; `asked` counts those that were looked at closely."""

    def __init__(self, source: End):
        self.levels = levels(source)
        self.asked = 0

    def cost(self, have: np.ndarray, want: np.ndarray, share: float, spare: float) -> float:
        """A permutation after which each device holds another piece.

        **Arguments:**

        - `have`, `want`: per device the number of the piece that it holds before and after.
        - `share`: what one piece is of the array.
        - `spare`: a cost above it need not be right, as long as it is above it.
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
        # Each device gives its piece to one other: of the copies that are wanted nearby only as many as there are.
        span, have, want = int(want.max()) + 1, have[moves], want[moves]
        for (cheap, group), (weight, _) in it.pairwise(self.levels):
            near = _count_in_common(group[moves] * span + have, group[moves] * span + want)
            total += (weight - cheap) * (moving - near) * share
        return total + STEP


def _count_in_common(first: np.ndarray, second: np.ndarray) -> int:
    """How many numbers two arrays have in common, each as often as both have it."""
    marked = np.sort(np.concatenate((2 * first, 2 * second + 1)))
    starts = np.flatnonzero(np.diff(marked >> 1, prepend=-1))
    seconds = np.add.reduceat(marked & 1, starts)
    return int(np.minimum(seconds, np.diff(starts, append=len(marked)) - seconds).sum())
