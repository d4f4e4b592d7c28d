"""The layouts one step before or after a layout, each with the cost of the step.

A method whose name ends in `_from` yields the layouts that a step from the given layout
reaches. A method whose name ends in `_into` yields the layouts from which a step
reaches it. The other methods serve both directions. A *sub-axis* is a mesh axis or a
part of one; its *weight* is the cost of a byte along it.
"""

import functools as ft
import itertools as it
from collections.abc import Iterator

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
        self.max_counts, self.shards, self.permutations = (
            max_counts,
            shards,
            permutations,
        )
        self.prices = Prices(near)
        self.sub_axes = range(len(near.layout.sizes))
        self.least_shard_count = min(near.layout.shard_count, far.layout.shard_count)
        self.some_are_dearer = self.prices.are_mixed(tuple(self.sub_axes))
        shared = near.coordinates is far.coordinates
        self.far_dims: ShardDims = (
            far.layout.dims if shared else ((),) * len(far.layout.dims)
        )
        self.far_places = {
            sub_axis: (dim, place)
            for dim, axes in enumerate(self.far_dims)
            for place, sub_axis in enumerate(axes)
        }
        self._known: dict[
            tuple[SubAxes, tuple[int, ...]], dict[Counts, list[ShardDims]]
        ] = {}

    def slices_from(self, dims: ShardDims) -> Priced:
        """The layouts that a slice reaches from `dims`. In each, one dimension is
        sharded over one more sub-axis.
        """
        for _, after in self._finer(
            dims, [(sub_axis,) for sub_axis in self._free(dims)]
        ):
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
            yield (
                before,
                self.prices.all_gather(shard_count * self.shards.count(run), run)
                + STEP,
            )

    def _finer(
        self, dims: ShardDims, runs: list[SubAxes]
    ) -> Iterator[tuple[SubAxes, ShardDims]]:
        """Yields pairs: a group of sub-axes from `runs`, and the layout `dims` with the
        group added to a dimension.
        """
        for dim, axes in enumerate(dims):
            left = self.max_counts[dim] // self.shards.count(axes)
            for run in runs:
                if left % self.shards.count(run) == 0:
                    yield run, (*dims[:dim], (*axes, *run), *dims[dim + 1 :])

    def _coarser(self, dims: ShardDims) -> Iterator[tuple[SubAxes, ShardDims]]:
        """Yields pairs: one or more last sub-axes of a dimension, and the layout `dims`
        without them. Layouts with fewer shards than both ends of the move are left out.
        """
        shard_count = self.shards.shard_count(dims)
        for dim, axes in enumerate(dims):
            for kept in range(len(axes)):
                if (
                    shard_count // self.shards.count(axes[kept:])
                    >= self.least_shard_count
                ):
                    yield axes[kept:], (*dims[:dim], axes[:kept], *dims[dim + 1 :])

    def all_to_alls(self, dims: ShardDims, each: float, limit: float) -> Priced:
        """The layouts that an all-to-all reaches from `dims` for less than `limit`.
        `each` is added to every cost.
        """
        shard_count = self.shards.shard_count(dims)
        for kept, moving, to_dims in _choices(dims):
            cost = self.prices.all_to_all(shard_count, moving) + each
            if cost >= limit:
                continue
            limits = [
                self.max_counts[dim] // self.shards.count(kept[dim]) for dim in to_dims
            ]
            for counts, assignments in self._assignments(
                moving, tuple(to_dims)
            ).items():
                if any(
                    [most % count for most, count in zip(limits, counts, strict=True)]
                ):
                    continue
                for added in assignments:
                    after = list(kept)
                    for dim, sub_axes in zip(to_dims, added, strict=True):
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
                after = (
                    *dims[:dim],
                    (*axes[:place], *axes[place + 1 :], axes[place]),
                    *dims[dim + 1 :],
                )
                yield (
                    after,
                    self.permutations.cost(
                        self.shards.numbers(dims),
                        self.shards.numbers(after),
                        share,
                        limit,
                    ),
                )

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
        some = it.chain.from_iterable(
            it.permutations(free, length) for length in range(2, most + 1)
        )
        runs += filter(self.prices.are_mixed, some)
        return runs

    def _assignments(
        self, moving: SubAxes, to_dims: tuple[int, ...]
    ) -> dict[Counts, list[ShardDims]]:
        """The ways to add the sub-axes `moving` to the dimensions `to_dims`. A way
        lists the sub-axes that each of the dimensions gets. The key of a way has the
        factor by which the number of shards along each of them grows.
        """
        found = self._known.get((moving, to_dims))
        if found is None:
            found = self._known[moving, to_dims] = {}
            for added in (
                *_all_assignments(moving, len(to_dims)),
                *self._far_assignment(moving, to_dims),
            ):
                found.setdefault(self.shards.counts(added), []).append(added)
        return found

    def _far_assignment(
        self, moving: SubAxes, to_dims: tuple[int, ...]
    ) -> list[ShardDims]:
        """Returns a list with one way to add the sub-axes `moving` to the dimensions
        `to_dims`. Each sub-axis goes to the dimension that it shards in the layout
        `far`, or else to the first of `to_dims`. For up to four sub-axes the list is
        empty, because `_all_assignments` has all ways.
        """
        if len(moving) <= _MOST_REORDERED:
            return []
        last = (len(self.far_places), 0)
        added: dict[int, SubAxes] = dict.fromkeys(to_dims, ())
        for sub_axis in sorted(
            moving, key=lambda sub_axis: self.far_places.get(sub_axis, last)
        ):
            dim = (
                self.far_places[sub_axis][0]
                if sub_axis in self.far_places
                else to_dims[0]
            )
            added[dim if dim in to_dims else to_dims[0]] += (sub_axis,)
        return [tuple(added.values())]


def _choices(dims: ShardDims) -> Iterator[tuple[ShardDims, tuple[int, ...], list[int]]]:
    """Yields each choice of sub-axes that an all-to-all can move between dimensions of
    the layout `dims`. A choice has three values: the sub-axes that stay in each
    dimension, the sub-axes that move, and the dimensions that can gain them. For ((0,
    1), ()), where sub-axes 0 and 1 shard dimension 0, one choice is ((0,), ()), (1,)
    and [1]: sub-axis 1 moves to dimension 1. No dimension both loses and gains
    sub-axes, since its chunks would have unequal sizes.
    """
    for lengths in it.product(*[range(len(axes) + 1) for axes in dims]):
        to_dims = [dim for dim, length in enumerate(lengths) if not length]
        if to_dims and len(to_dims) < len(dims):
            cuts = [
                len(axes) - length for axes, length in zip(dims, lengths, strict=True)
            ]
            moving = tuple(
                [
                    sub_axis
                    for axes, cut in zip(dims, cuts, strict=True)
                    for sub_axis in axes[cut:]
                ]
            )
            yield (
                tuple([axes[:cut] for axes, cut in zip(dims, cuts, strict=True)]),
                moving,
                to_dims,
            )


@ft.lru_cache(maxsize=1024)
def _all_assignments(moving: SubAxes, to_dims: int) -> tuple[ShardDims, ...]:
    """The ways to distribute the sub-axes `moving` over `to_dims` dimensions; for (0,
    1) and one dimension, ((0, 1),) and ((1, 0),). For more than four sub-axes, only
    some ways are returned, and in these the sub-axes keep their order.
    """
    if len(moving) > _MOST_REORDERED:
        return _assignments_in_order(moving, to_dims)
    found: list[ShardDims] = [((),) * to_dims]
    for sub_axis in moving:
        found = [
            (
                *added[:dim],
                (*added[dim][:place], sub_axis, *added[dim][place:]),
                *added[dim + 1 :],
            )
            for added in found
            for dim in range(to_dims)
            for place in range(len(added[dim]) + 1)
        ]
    return tuple(found)


def _assignments_in_order(moving: SubAxes, to_dims: int) -> tuple[ShardDims, ...]:
    """Some ways to distribute the sub-axes `moving`, in their order, over `to_dims`
    dimensions: all go to one dimension, or the first few to one and the rest to
    another.
    """
    whole = [
        tuple(moving if dim == only else () for dim in range(to_dims))
        for only in range(to_dims)
    ]
    halves = (
        [(moving[:cut], moving[cut:]) for cut in range(len(moving))]
        if to_dims > 1
        else []
    )
    parted = [
        tuple(
            head if dim == first else tail if dim == second else ()
            for dim in range(to_dims)
        )
        for (head, tail), (first, second) in it.product(
            halves, it.permutations(range(to_dims), 2)
        )
    ]
    return tuple(dict.fromkeys(whole + parted))
