"""The steps between successive layouts, the bytes that enter a device in each, and their cost in the search.

A cost is the bytes that enter a device, weighted by the axis over which they come: the mean over devices, as a fraction
of the bytes of the whole array. 0.5 means that half of an array's bytes enter each device, or a twentieth over an axis
of weight ten.
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
    """One step, and the traffic that enters a device in it: the mean over devices, as a fraction of the array.

    **Arguments:**

    - `kind`: the kind of step; see `MoveStep`.
    - `source`, `target`: the layouts before and after.
    - `wire_share`: all that enters.
    - `dcn_share`: the part of it that comes from other slices.
    """

    kind: StepKind
    source: StepLayout
    target: StepLayout
    wire_share: Fraction
    dcn_share: Fraction


# The steps from one layout to another.
Path = tuple[PathStep, ...]


def path_along(before: Sequence[StepLayout], after: Sequence[StepLayout]) -> Path:
    """The steps along layouts of the source's mesh, then across to the target's mesh, then along layouts of that mesh.

    The step across is a permutation, or a slice if every device already holds the elements of its later shard.

    **Arguments:**

    - `before`: layouts on the source's factors, from the source on.
    - `after`: layouts on the target's factors, up to the target.

    **Returns:**

    The steps, with neighbouring steps of one kind joined if they are one operation.
    """
    pairs = [*it.pairwise(before), (before[-1], after[0]), *it.pairwise(after)]
    steps: list[PathStep] = []
    for index, (source, target) in enumerate(pairs):
        # From one mesh to the other any shard may go anywhere, whatever the factors are called.
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
    """The traffic that enters a device in one step, and the part of it that comes from another slice."""
    if kind == "slice":
        return Fraction(0), Fraction(0)
    if kind == "permute":
        senders = permutation(source, target, like)
        slices = slice_numbers(like)
        moved = [int((ids[senders] != ids).sum()) for ids in (np.arange(len(senders)), slices)]
        return Fraction(moved[0], len(senders) * source.pieces), Fraction(moved[1], len(senders) * source.pieces)
    factors = _changed(source, target)
    members = math.prod(source.sizes[factor] for factor in factors)
    near = math.prod(source.sizes[factor] for factor in factors if not source.weights or source.weights[factor] <= 1)
    if kind == "all_gather":
        # A shard enters a slice once, and is copied within the slice.
        return Fraction(members - 1, source.pieces), Fraction(members // near - 1, source.pieces)
    return Fraction(members - 1, members * source.pieces), Fraction(members - near, members * source.pieces)


def _changed(source: StepLayout, target: StepLayout) -> list[int]:
    """The factors that shard another dimension afterwards, or none."""
    places = [{f: dim for dim, axes in enumerate(end.dims) for f in axes} for end in (source, target)]
    return [f for f in range(len(source.sizes)) if places[0].get(f) != places[1].get(f)]


def _are_one(kind: StepKind, earlier: PathStep, source: StepLayout, target: StepLayout) -> bool:
    """Whether a step from `source` to `target` and the previous step of the same kind are one operation.

    Two all-to-alls never are; slices and permutations always are. Two gathers are one if they join the same dimension
    and are along factors of the same mesh. They may be along factors of two meshes: then a permutation lay between
    them that moved nothing and was left out, so that the first gather's target is not the second one's source.
    """
    if kind != "all_gather":
        return kind != "all_to_all"
    if earlier.target != source:
        return False
    pairs = [*zip(earlier.source.dims, earlier.target.dims, strict=True), *zip(source.dims, target.dims, strict=True)]
    return len({index % len(source.dims) for index, (have, kept) in enumerate(pairs) if have != kept}) == 1


# Of paths with equal traffic, the one with fewer steps is taken, so each step costs a little.
STEP = 1e-9
# Of those, the path that permutes before any all-to-all. A permutation that comes first reads the source itself, so
# that no copy of it is made. Of later steps, the TPU compiler may keep one shard on the chip.
STEP_BEFORE_PERMUTATION = 1.01 * STEP


class Prices:
    """The costs of collectives along factors of one end."""

    def __init__(self, end: End):
        self.sizes = end.layout.sizes
        self.weights = end.layout.weights or (1.0,) * len(self.sizes)

    def all_to_all(self, pieces: int, group: tuple[int, ...]) -> float:
        """The cost of an all-to-all among devices that differ in `group`, of an array in `pieces` shards."""
        left, cost = 1.0, 0.0
        for factor in self._dearest_first(group):
            # Only bytes that must cross the slow axes do so, once; the others stay on the faster ones.
            cost += left * (1 - 1 / self.sizes[factor]) * self.weights[factor]
            left /= self.sizes[factor]
        return cost / pieces

    def all_gather(self, pieces: int, group: tuple[int, ...]) -> float:
        """The cost of an all-gather among devices that differ in `group`, of an array in `pieces` shards."""
        held, cost = 1, 0.0
        for factor in self._dearest_first(group):
            # A shard enters a slice once, and is copied within the slice.
            cost += held * (self.sizes[factor] - 1) * self.weights[factor]
            held *= self.sizes[factor]
        return cost / pieces

    def are_mixed(self, group: tuple[int, ...]) -> bool:
        """Whether bytes along some factors of a group cost more than along others."""
        return len({self.weights[factor] for factor in group}) > 1

    def _dearest_first(self, group: tuple[int, ...]) -> list[int]:
        return sorted(group, key=lambda factor: -self.weights[factor])


class PermutationPrices:
    """The costs of permutations of shards among all devices. `asked` counts the permutations priced exactly."""

    def __init__(self, source: End):
        self.levels = levels(source)
        self.asked = 0

    def cost(self, have: np.ndarray, want: np.ndarray, share: float, spare: float) -> float:
        """The cost of a permutation after which each device holds another shard.

        **Arguments:**

        - `have`, `want`: for each device, the number of its shard before and after.
        - `share`: the fraction of the array in one shard.
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
        # Each device sends its shard to one other device, so that a nearby copy serves only as many receivers as there
        # are copies.
        span, have, want = int(want.max()) + 1, have[moves], want[moves]
        for (cheap, group), (weight, _) in it.pairwise(self.levels):
            near = _count_in_common(group[moves] * span + have, group[moves] * span + want)
            total += (weight - cheap) * (moving - near) * share
        return total + STEP


def _count_in_common(first: np.ndarray, second: np.ndarray) -> int:
    """The number of values that two arrays have in common, with multiplicity."""
    marked = np.sort(np.concatenate((2 * first, 2 * second + 1)))
    starts = np.flatnonzero(np.diff(marked >> 1, prepend=-1))
    seconds = np.add.reduceat(marked & 1, starts)
    return int(np.minimum(seconds, np.diff(starts, append=len(marked)) - seconds).sum())
