"""The layouts one step before or after a layout, each with the cost of the step.

A method whose name ends in `_from` yields the layouts that a step from the given layout
reaches. A method whose name ends in `_into` yields the layouts from which a step
reaches it. The other methods serve both directions. A *sub-axis* is a mesh axis or a
part of one; its *weight* is the cost of a byte along it.
"""

import functools as ft
import itertools as it
from collections.abc import Iterator
from typing import NamedTuple

from .layout import Counts, FineLayout, ShardDims, Shards, SubAxes
from .prices import STEP, PermutationPrices, Prices


# An all-to-all of more sub-axes keeps their order, because 5 sub-axes already have 120
# orders.
_MOST_REORDERED = 4

# Layouts, each with the cost of the step.
Priced = Iterator[tuple[ShardDims, float]]


class Neighbours:
    """Lists the layouts that are one step away from a layout, forward or backward.

    They are over the sub-axes of `near`, the layout at one end of the move. `far` is
    the layout at the other end. `max_counts` has a number for each dimension, which the
    number of shards along it must divide.
    """

    def __init__(
        self,
        max_counts: Counts,
        near: FineLayout,
        far: FineLayout,
        shards: Shards,
        permutations: PermutationPrices,
    ):
        self.max_counts = max_counts
        self.shards = shards
        self.permutations = permutations
        self.prices = Prices(near)
        self.sub_axes = range(len(near.layout.sizes))
        self.least_shard_count = min(near.layout.shard_count, far.layout.shard_count)
        self.some_are_dearer = self.prices.are_mixed(tuple(self.sub_axes))
        # The dimension and the place of each sub-axis in the layout `far`, if both ends
        # have the same sub-axes.
        self.far_places: dict[int, tuple[int, int]] = {}
        if near.coordinates is far.coordinates:
            for dim, axes in enumerate(far.layout.dims):
                for place, sub_axis in enumerate(axes):
                    self.far_places[sub_axis] = (dim, place)
        self._assignments_of: dict[
            tuple[SubAxes, tuple[int, ...]], dict[Counts, list[ShardDims]]
        ] = {}

    def slices_from(self, dims: ShardDims) -> Priced:
        """The layouts that a slice reaches from `dims`. In each, one dimension is
        sharded over one more sub-axis.
        """
        runs: list[SubAxes] = [(sub_axis,) for sub_axis in self._free(dims)]
        for _, after in self._finer(dims, runs):
            yield after, STEP

    def slices_into(self, dims: ShardDims) -> Priced:
        """The layouts from which a slice reaches `dims`. In each, one dimension lacks
        its last sub-axis.
        """
        for run, before in self._coarser(dims):
            if len(run) == 1:
                yield before, STEP

    def gathers_from(self, dims: ShardDims) -> Priced:
        """The layouts that an all-gather reaches from `dims`. In each, one or more last
        sub-axes of a dimension no longer shard it. If the mesh has several weights,
        sub-axes that all have one weight are gathered one by one.
        """
        shard_count = self.shards.shard_count(dims)
        for run, after in self._coarser(dims):
            if len(run) == 1 or not self.some_are_dearer or self.prices.are_mixed(run):
                yield after, self.prices.all_gather(shard_count, run) + STEP

    def gathers_into(self, dims: ShardDims) -> Priced:
        """The layouts from which an all-gather reaches `dims`. In each, one dimension
        is sharded over more sub-axes.
        """
        shard_count = self.shards.shard_count(dims)
        for run, before in self._finer(dims, self._runs(self._free(dims))):
            count_before = shard_count * self.shards.count(run)
            yield before, self.prices.all_gather(count_before, run) + STEP

    def _finer(
        self,
        dims: ShardDims,
        runs: list[SubAxes],
    ) -> Iterator[tuple[SubAxes, ShardDims]]:
        """Yields pairs: a group of sub-axes from `runs`, and the layout `dims` with the
        group added to a dimension.
        """
        for dim, axes in enumerate(dims):
            most = self.max_counts[dim] // self.shards.count(axes)
            for run in runs:
                if most % self.shards.count(run) == 0:
                    yield run, (*dims[:dim], (*axes, *run), *dims[dim + 1 :])

    def _coarser(self, dims: ShardDims) -> Iterator[tuple[SubAxes, ShardDims]]:
        """Yields pairs: one or more last sub-axes of a dimension, and the layout `dims`
        without them. Layouts with fewer shards than both ends of the move are left out.
        """
        shard_count = self.shards.shard_count(dims)
        for dim, axes in enumerate(dims):
            for length in range(len(axes)):
                run = axes[length:]
                if shard_count // self.shards.count(run) >= self.least_shard_count:
                    yield run, (*dims[:dim], axes[:length], *dims[dim + 1 :])

    def all_to_alls(self, dims: ShardDims, each: float, limit: float) -> Priced:
        """The layouts that an all-to-all reaches from `dims` for less than `limit`.
        `each` is added to every cost.
        """
        shard_count = self.shards.shard_count(dims)
        for choice in _choices(dims):
            cost = self.prices.all_to_all(shard_count, choice.moving) + each
            if cost >= limit:
                continue
            most_counts = [
                self.max_counts[dim] // self.shards.count(choice.staying[dim])
                for dim in choice.to_dims
            ]
            assignments_by_counts = self._assignments(choice.moving, choice.to_dims)
            for counts, assignments in assignments_by_counts.items():
                pairs = zip(most_counts, counts, strict=True)
                if any([most % count for most, count in pairs]):
                    continue
                for added in assignments:
                    after = list(choice.staying)
                    for dim, sub_axes in zip(choice.to_dims, added, strict=True):
                        after[dim] += sub_axes
                    yield tuple(after), cost

    def permutes(self, dims: ShardDims, limit: float) -> Priced:
        """The layouts that a permutation of shards reaches from `dims`. In each, one
        sub-axis has become the last (minor-most) of its dimension. A cost above `limit`
        may be lower than the true cost.
        """
        share = 1 / self.shards.shard_count(dims)
        for dim, axes in enumerate(dims):
            for place in range(len(axes) - 1):
                new_axes = (*axes[:place], *axes[place + 1 :], axes[place])
                after = (*dims[:dim], new_axes, *dims[dim + 1 :])
                cost = self.permutations.cost(
                    have=self.shards.numbers(dims),
                    want=self.shards.numbers(after),
                    share=share,
                    limit=limit,
                )
                yield after, cost

    def _free(self, dims: ShardDims) -> list[int]:
        used = {axis for axes in dims for axis in axes}
        return [sub_axis for sub_axis in self.sub_axes if sub_axis not in used]

    def _runs(self, free: list[int]) -> list[SubAxes]:
        """The groups of the unused sub-axes `free` that one all-gather can gather: each
        alone, and several if they have different weights. If sub-axes 0 and 1 have the
        weights 1 and 10, they are (0,), (1,), (0, 1) and (1, 0).
        """
        runs: list[SubAxes] = [(sub_axis,) for sub_axis in free]
        if not self.some_are_dearer:
            return runs
        most = len(free) if len(free) <= _MOST_REORDERED else 2
        for length in range(2, most + 1):
            runs += filter(self.prices.are_mixed, it.permutations(free, length))
        return runs

    def _assignments(
        self,
        moving: SubAxes,
        to_dims: tuple[int, ...],
    ) -> dict[Counts, list[ShardDims]]:
        """The ways to add the sub-axes `moving` to the dimensions `to_dims`. A way
        lists the sub-axes that each of the dimensions gets. The key of a way has the
        factor by which the number of shards along each of them grows.
        """
        assignments = self._assignments_of.get((moving, to_dims))
        if assignments is None:
            assignments = {}
            for added in (
                *_all_assignments(moving, len(to_dims)),
                *self._far_assignment(moving, to_dims),
            ):
                counts = self.shards.counts(added)
                assignments.setdefault(counts, []).append(added)
            self._assignments_of[moving, to_dims] = assignments
        return assignments

    def _far_assignment(
        self,
        moving: SubAxes,
        to_dims: tuple[int, ...],
    ) -> list[ShardDims]:
        """Returns a list with one way to add the sub-axes `moving` to the dimensions
        `to_dims`. Each sub-axis goes to the dimension that it shards in the layout
        `far`, or else to the first of `to_dims`. For up to four sub-axes the list is
        empty, because `_all_assignments` has all ways.
        """
        if len(moving) <= _MOST_REORDERED:
            return []
        last = (len(self.far_places), 0)
        in_far_order = sorted(
            moving, key=lambda sub_axis: self.far_places.get(sub_axis, last)
        )
        added: dict[int, SubAxes] = dict.fromkeys(to_dims, ())
        for sub_axis in in_far_order:
            dim, _ = self.far_places.get(sub_axis, (to_dims[0], 0))
            if dim not in added:
                dim = to_dims[0]
            added[dim] += (sub_axis,)
        return [tuple(added.values())]


class _Choice(NamedTuple):
    """Sub-axes that an all-to-all can move between dimensions.

    **Arguments:**

    - `staying`: the sub-axes that stay in each dimension.
    - `moving`: the sub-axes that move.
    - `to_dims`: the dimensions that can gain them.
    """

    staying: ShardDims
    moving: SubAxes
    to_dims: tuple[int, ...]


def _choices(dims: ShardDims) -> Iterator[_Choice]:
    """Yields each choice of sub-axes that an all-to-all can move between dimensions of
    the layout `dims`. For ((0, 1), ()), where sub-axes 0 and 1 shard dimension 0, in
    one choice (0,) and () stay, (1,) moves, and dimension 1 can gain it. No dimension
    both loses and gains sub-axes, since its chunks would have unequal sizes.
    """
    # How many sub-axes stay in each dimension: first all of them, then fewer.
    kept_counts = it.product(*[range(len(axes), -1, -1) for axes in dims])
    for counts in kept_counts:
        staying: list[SubAxes] = []
        moving: list[int] = []
        to_dims: list[int] = []
        for dim, (axes, count) in enumerate(zip(dims, counts, strict=True)):
            staying.append(axes[:count])
            moving += axes[count:]
            if count == len(axes):
                to_dims.append(dim)
        if to_dims and len(to_dims) < len(dims):
            yield _Choice(tuple(staying), tuple(moving), tuple(to_dims))


@ft.lru_cache(maxsize=1024)
def _all_assignments(moving: SubAxes, to_dims: int) -> tuple[ShardDims, ...]:
    """The ways to distribute the sub-axes `moving` over `to_dims` dimensions; for (0,
    1) and one dimension, ((0, 1),) and ((1, 0),). For more than four sub-axes, only
    some ways are returned, and in these the sub-axes keep their order.
    """
    if len(moving) > _MOST_REORDERED:
        return _assignments_in_order(moving, to_dims)
    assignments: list[ShardDims] = [((),) * to_dims]
    for sub_axis in moving:
        longer: list[ShardDims] = []
        for added in assignments:
            for dim, axes in enumerate(added):
                for place in range(len(axes) + 1):
                    new_axes = (*axes[:place], sub_axis, *axes[place:])
                    longer.append((*added[:dim], new_axes, *added[dim + 1 :]))
        assignments = longer
    return tuple(assignments)


def _assignments_in_order(moving: SubAxes, to_dims: int) -> tuple[ShardDims, ...]:
    """Some ways to distribute the sub-axes `moving`, in their order, over `to_dims`
    dimensions: all go to one dimension, or the first few to one and the rest to
    another.
    """
    assignments: list[ShardDims] = []
    for dim in range(to_dims):
        added: list[SubAxes] = [()] * to_dims
        added[dim] = moving
        assignments.append(tuple(added))
    for cut in range(1, len(moving)):
        for first, second in it.permutations(range(to_dims), 2):
            added = [()] * to_dims
            added[first] = moving[:cut]
            added[second] = moving[cut:]
            assignments.append(tuple(added))
    return tuple(dict.fromkeys(assignments))
