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
PricedLayouts = Iterator[tuple[ShardDims, float]]


class Neighbours:
    """Lists the layouts that are one step away from a layout, forward or backward.

    They are over the sub-axes of `near`, the layout at one end of the move. `far` is
    the layout at the other end. `divisible_counts` has a number for each dimension,
    which the number of shards along it must divide.
    """

    def __init__(
        self,
        divisible_counts: Counts,
        near: FineLayout,
        far: FineLayout,
        shards: Shards,
        permutations: PermutationPrices,
    ):
        # The neighbours are over the sub-axes of `near`, the layout at one end of the
        # move, and `far` is the layout at the other end.
        # For each dimension a number, which the number of shards along it must divide.
        self.divisible_counts = divisible_counts
        self.shards = shards
        self.permutations = permutations
        # The costs of the steps.
        self.prices = Prices(near)
        self.sub_axes = range(len(near.layout.sizes))
        self.least_shard_count = min(near.layout.shard_count, far.layout.shard_count)
        self.has_several_weights = self.prices.are_mixed(tuple(self.sub_axes))
        # The dimension that each sub-axis shards in the layout `far`, and its place
        # among the sub-axes of this dimension. Empty unless both ends have the same
        # sub-axes.
        self.place_in_far: dict[int, tuple[int, int]] = {}
        if near.coordinates is far.coordinates:
            for dim, axes in enumerate(far.layout.dims):
                for place, sub_axis in enumerate(axes):
                    self.place_in_far[sub_axis] = (dim, place)
        # The results of `_assignments`.
        self._assignments_of: dict[
            tuple[SubAxes, tuple[int, ...]], dict[Counts, list[ShardDims]]
        ] = {}

    def slices_from(self, dims: ShardDims) -> PricedLayouts:
        """The layouts that a slice reaches from `dims`. In each, one dimension is
        sharded over one more sub-axis.
        """
        additions: list[SubAxes] = [(sub_axis,) for sub_axis in self._free(dims)]
        for _, after in self._finer(dims, additions):
            yield after, STEP

    def slices_into(self, dims: ShardDims) -> PricedLayouts:
        """The layouts from which a slice reaches `dims`. In each, one dimension lacks
        its last sub-axis.
        """
        for removed, before in self._coarser(dims):
            if len(removed) == 1:
                yield before, STEP

    def gathers_from(self, dims: ShardDims) -> PricedLayouts:
        """The layouts that an all-gather reaches from `dims`. In each, one or more last
        sub-axes of a dimension no longer shard it. If the mesh has several weights,
        sub-axes that all have one weight are gathered one by one, and `path_along`
        merges these steps.
        """
        shard_count = self.shards.shard_count(dims)
        for removed, after in self._coarser(dims):
            if (
                len(removed) == 1
                or not self.has_several_weights
                or self.prices.are_mixed(removed)
            ):
                yield after, self.prices.all_gather(shard_count, removed) + STEP

    def gathers_into(self, dims: ShardDims) -> PricedLayouts:
        """The layouts from which an all-gather reaches `dims`. In each, one dimension
        is sharded over more sub-axes.
        """
        shard_count = self.shards.shard_count(dims)
        for added, before in self._finer(
            dims, self._gathered_together(self._free(dims))
        ):
            count_before = shard_count * self.shards.count(added)
            yield before, self.prices.all_gather(count_before, added) + STEP

    def _finer(
        self,
        dims: ShardDims,
        additions: list[SubAxes],
    ) -> Iterator[tuple[SubAxes, ShardDims]]:
        """Yields pairs: some sub-axes, an entry of `additions`, and the layout `dims`
        with these sub-axes added to a dimension, minor-most. A dimension gets no more
        shards than `divisible_counts` allows.
        """
        for dim, axes in enumerate(dims):
            most = self.divisible_counts[dim] // self.shards.count(axes)
            for added in additions:
                if most % self.shards.count(added) == 0:
                    yield added, (*dims[:dim], (*axes, *added), *dims[dim + 1 :])

    def _coarser(self, dims: ShardDims) -> Iterator[tuple[SubAxes, ShardDims]]:
        """Yields pairs: one or more last sub-axes of a dimension, and the layout `dims`
        without them. Layouts with fewer shards than both ends of the move are left out.
        """
        shard_count = self.shards.shard_count(dims)
        for dim, axes in enumerate(dims):
            for kept_count in range(len(axes)):
                removed = axes[kept_count:]
                if shard_count // self.shards.count(removed) >= self.least_shard_count:
                    yield removed, (*dims[:dim], axes[:kept_count], *dims[dim + 1 :])

    def all_to_alls(
        self,
        dims: ShardDims,
        step_cost: float,
        limit: float,
    ) -> PricedLayouts:
        """The layouts that an all-to-all reaches from `dims` for less than `limit`.
        `step_cost` is added to the cost of its bytes.
        """
        shard_count = self.shards.shard_count(dims)
        # A choice says which sub-axes move, which stay in each dimension, and which
        # dimensions (`to_dims`) can gain the moving ones.
        for choice in _choices(dims):
            cost = self.prices.all_to_all(shard_count, choice.moving) + step_cost
            if cost >= limit:
                continue
            most_counts = [
                self.divisible_counts[dim] // self.shards.count(choice.staying[dim])
                for dim in choice.to_dims
            ]
            assignments_by_counts = self._assignments(choice.moving, choice.to_dims)
            for counts, assignments in assignments_by_counts.items():
                # The shards along a dimension must not become too many.
                pairs = zip(most_counts, counts, strict=True)
                if any([most % count for most, count in pairs]):
                    continue
                for added_by_dim in assignments:
                    dims_after = list(choice.staying)
                    for dim, sub_axes in zip(choice.to_dims, added_by_dim, strict=True):
                        dims_after[dim] += sub_axes
                    yield tuple(dims_after), cost

    def permutes(self, dims: ShardDims, limit: float) -> PricedLayouts:
        """The layouts that a permutation of shards reaches from `dims`. In each, one
        sub-axis has become the last (minor-most) of its dimension. A cost above `limit`
        may be lower than the true cost.
        """
        share = 1 / self.shards.shard_count(dims)
        for dim, axes in enumerate(dims):
            for position in range(len(axes) - 1):
                new_axes = (*axes[:position], *axes[position + 1 :], axes[position])
                after = (*dims[:dim], new_axes, *dims[dim + 1 :])
                cost = self.permutations.cost(
                    have=self.shards.numbers(dims),
                    want=self.shards.numbers(after),
                    share=share,
                    limit=limit,
                )
                yield after, cost

    def _free(self, dims: ShardDims) -> list[int]:
        """The sub-axes that shard no dimension of the layout `dims`."""
        used = set(it.chain.from_iterable(dims))
        return [sub_axis for sub_axis in self.sub_axes if sub_axis not in used]

    def _gathered_together(self, free: list[int]) -> list[SubAxes]:
        """The sets of the unused sub-axes `free` that one all-gather can gather: each
        alone, and several if they have different weights. If sub-axes 0 and 1 have the
        weights 1 and 10, they are (0,), (1,), (0, 1) and (1, 0).
        """
        additions: list[SubAxes] = [(sub_axis,) for sub_axis in free]
        if not self.has_several_weights:
            return additions
        most = len(free) if len(free) <= _MOST_REORDERED else 2
        for length in range(2, most + 1):
            additions += filter(self.prices.are_mixed, it.permutations(free, length))
        return additions

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
            for added_by_dim in (
                *_all_assignments(moving, len(to_dims)),
                *self._far_assignment(moving, to_dims),
            ):
                counts = self.shards.counts(added_by_dim)
                assignments.setdefault(counts, []).append(added_by_dim)
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
        # Sub-axes that the layout `far` does not have come last, behind its last
        # dimension, so that a gather can remove them.
        last = (len(self.divisible_counts), 0)
        in_far_order = sorted(
            moving, key=lambda sub_axis: self.place_in_far.get(sub_axis, last)
        )
        added_by_dim: dict[int, SubAxes] = dict.fromkeys(to_dims, ())
        for sub_axis in in_far_order:
            dim, _ = self.place_in_far.get(sub_axis, (to_dims[0], 0))
            if dim not in added_by_dim:
                dim = to_dims[0]
            added_by_dim[dim] += (sub_axis,)
        return [tuple(added_by_dim.values())]


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
def _all_assignments(moving: SubAxes, dim_count: int) -> tuple[ShardDims, ...]:
    """The ways to distribute the sub-axes `moving` over `dim_count` dimensions. A way
    lists the sub-axes that each dimension gets. For the sub-axes (0, 1) and one
    dimension the ways are ((0, 1),) and ((1, 0),). For more than four sub-axes, only
    some ways are returned, and in these the sub-axes keep their order.
    """
    if len(moving) > _MOST_REORDERED:
        return _assignments_in_order(moving, dim_count)
    assignments: list[ShardDims] = [((),) * dim_count]
    for sub_axis in moving:
        longer: list[ShardDims] = []
        for added_by_dim in assignments:
            for dim, axes in enumerate(added_by_dim):
                for position in range(len(axes) + 1):
                    new_axes = (*axes[:position], sub_axis, *axes[position:])
                    longer.append(
                        (*added_by_dim[:dim], new_axes, *added_by_dim[dim + 1 :])
                    )
        assignments = longer
    return tuple(assignments)


def _assignments_in_order(moving: SubAxes, dim_count: int) -> tuple[ShardDims, ...]:
    """Some ways to distribute the sub-axes `moving`, in their order, over `dim_count`
    dimensions: all go to one dimension, or the first few to one and the rest to
    another. A way lists the sub-axes that each dimension gets.
    """
    assignments: list[ShardDims] = []
    for dim in range(dim_count):
        added_by_dim: list[SubAxes] = [()] * dim_count
        added_by_dim[dim] = moving
        assignments.append(tuple(added_by_dim))
    for cut in range(1, len(moving)):
        for first, second in it.permutations(range(dim_count), 2):
            added_by_dim = [()] * dim_count
            added_by_dim[first] = moving[:cut]
            added_by_dim[second] = moving[cut:]
            assignments.append(tuple(added_by_dim))
    return tuple(dict.fromkeys(assignments))
