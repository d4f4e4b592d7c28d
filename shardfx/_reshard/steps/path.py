"""The steps along a path of layouts, the bytes that a device receives in each, and the cost that the search uses.

A cost is the bytes that a device receives, times the weight of the mesh axis over which they arrive. It is the mean
over devices, as a fraction of the bytes of the whole array. A cost of 0.5 means that each device receives half the
array's bytes over axes of weight 1, or a twentieth of them over axes of weight 10.
"""

import itertools as it
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal, NamedTuple

import numpy as np

from .groups import permutation
from .layout import StepLayout, slice_numbers
from .splits import End, levels


StepKind = Literal["slice", "all_to_all", "permute", "all_gather"]


class PathStep(NamedTuple):
    """One step of a path, with the bytes that a device receives in it.

    Both fractions are means over devices, relative to the bytes of the whole array.

    **Arguments:**

    - `kind`: the collective; see `MoveStep`.
    - `source`, `target`: the layouts before and after.
    - `wire_share`: the fraction received from all other devices.
    - `dcn_share`: the fraction received from devices of other slices.
    """

    kind: StepKind
    source: StepLayout
    target: StepLayout
    wire_share: Fraction
    dcn_share: Fraction


# The steps from one layout to another.
Path = tuple[PathStep, ...]


def path_along(before: Sequence[StepLayout], after: Sequence[StepLayout]) -> Path:
    """The steps of a path that visits the layouts `before`, then the layouts `after`.

    The step from the source's mesh to the target's mesh is a permutation, or a slice if each device already holds its
    next shard.

    **Arguments:**

    - `before`: layouts over the source's factors, beginning with the source.
    - `after`: layouts over the target's factors, ending with the target.

    **Returns:**

    The steps. Neighbouring steps of one kind are merged where one operation can do both.
    """
    pairs = [*it.pairwise(before), (before[-1], after[0]), *it.pairwise(after)]
    steps: list[PathStep] = []
    for index, (source, target) in enumerate(pairs):
        # The two meshes number their factors differently, so the step between them may be any permutation.
        crosses = index == len(before) - 1 and target.pieces == source.pieces
        kind = "permute" if crosses else _kind(source, target)
        if steps and kind == steps[-1].kind and _are_one(kind, steps[-1], source, target):
            source = steps.pop().source
        step = PathStep(kind, source, target, *_shares(kind, source, target, before[0]))
        if step.wire_share or kind != "permute":
            steps.append(step)
    return tuple(steps)


def _kind(source: StepLayout, target: StepLayout) -> StepKind:
    if target.pieces != source.pieces:
        return "slice" if target.pieces > source.pieces else "all_gather"
    return "all_to_all" if _changed(source, target) else "permute"


def _shares(kind: StepKind, source: StepLayout, target: StepLayout, like: StepLayout) -> tuple[Fraction, Fraction]:
    """The fractions of the array that a device receives in one step: in total, and from other slices."""
    if kind == "slice":
        return Fraction(0), Fraction(0)
    if kind == "permute":
        senders = permutation(source, target, like)
        moved = [int((ids[senders] != ids).sum()) for ids in (np.arange(len(senders)), slice_numbers(like))]
        return Fraction(moved[0], len(senders) * source.pieces), Fraction(moved[1], len(senders) * source.pieces)
    factors = _changed(source, target)
    members = math.prod(source.sizes[factor] for factor in factors)
    near = math.prod(source.sizes[factor] for factor in factors if not source.weights or source.weights[factor] <= 1)
    if kind == "all_gather":
        # A shard enters a slice once and is copied inside it.
        return Fraction(members - 1, source.pieces), Fraction(members // near - 1, source.pieces)
    return Fraction(members - 1, members * source.pieces), Fraction(members - near, members * source.pieces)


def _changed(source: StepLayout, target: StepLayout) -> list[int]:
    """The factors that do not shard the same dimension in `target` as in `source`."""
    places = [{f: dim for dim, axes in enumerate(end.dims) for f in axes} for end in (source, target)]
    return [f for f in range(len(source.sizes)) if places[0].get(f) != places[1].get(f)]


def _are_one(kind: StepKind, earlier: PathStep, source: StepLayout, target: StepLayout) -> bool:
    """Whether a step from `source` to `target` and the previous step of the same kind are one operation.

    Two all-to-alls never are; slices and permutations always are. Two gathers are one if they join the same dimension
    and are along factors of the same mesh. Gathers along factors of two meshes become neighbours if the
    permutation between them moves nothing and is left out. Then the first gather's target is not
    the second gather's source.
    """
    if kind != "all_gather":
        return kind != "all_to_all"
    if earlier.target != source:
        return False
    pairs = [*zip(earlier.source.dims, earlier.target.dims, strict=True), *zip(source.dims, target.dims, strict=True)]
    return len({index % len(source.dims) for index, (have, kept) in enumerate(pairs) if have != kept}) == 1


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
