"""The layouts one step before or after a layout, each with the cost of the step.

A method whose name ends in `_from` yields the layouts that a step from the given layout reaches. A method whose name
ends in `_into` yields the layouts from which a step reaches the given layout.
 All-to-alls and permutations are the same in both directions.
"""

import functools as ft
import itertools as it
from collections.abc import Iterator

from .layout import End, Holdings, ShardDims
from .prices import STEP, PermutationPrices, Prices


# An all-to-all of more factors keeps their order, because 5 factors already have 120 orders.
_MOST_REORDERED = 4

Priced = Iterator[tuple[ShardDims, float]]


class Neighbours:
    """Lists the layouts that one step reaches from a layout, or from which one step reaches it.

    **Arguments:**

    - `room`: for each dimension, the number that its shard count must divide.
    - `near`: the end whose factors the layouts use.
    - `far`: the other end of the move. If it uses the same factors, its order of them is tried too.
    - `held`: the shards that devices hold under layouts over these factors.
    - `permutations`: the costs of permutations.
    """

    def __init__(self, room: tuple[int, ...], near: End, far: End, held: Holdings, permutations: PermutationPrices):
        self.room, self.held, self.permutations = room, held, permutations
        self.prices = Prices(near)
        self.factors = range(len(near.layout.sizes))
        self.least_pieces = min(near.layout.pieces, far.layout.pieces)
        self.some_are_dearer = self.prices.are_mixed(tuple(self.factors))
        shared = near.coordinates is far.coordinates
        self.far_dims: ShardDims = far.layout.dims if shared else ((),) * len(far.layout.dims)
        self.far_places = {
            factor: (dim, place) for dim, axes in enumerate(self.far_dims) for place, factor in enumerate(axes)
        }
        self._found_ways: dict[tuple[tuple[int, ...], tuple[int, ...]], dict[tuple[int, ...], list[ShardDims]]] = {}

    def slices_from(self, dims: ShardDims) -> Priced:
        """The layouts that a slice reaches: one dimension is sharded over one more free factor."""
        for _, after in self._finer(dims, [(factor,) for factor in self._free(dims)]):
            yield after, STEP

    def slices_into(self, dims: ShardDims) -> Priced:
        """The layouts from which a slice reaches `dims`: one dimension lacks its last factor."""
        for run, before in self._coarser(dims):
            if len(run) == 1:
                yield before, STEP

    def gathers_from(self, dims: ShardDims) -> Priced:
        """The layouts that an all-gather reaches: one dimension loses its last factors.

        If factors have different weights, a gather removes one factor, or several of different weights.
        """
        pieces = self.held.pieces(dims)
        for run, after in self._coarser(dims):
            if len(run) == 1 or not self.some_are_dearer or self.prices.are_mixed(run):
                yield after, self.prices.all_gather(pieces, run) + STEP

    def gathers_into(self, dims: ShardDims) -> Priced:
        """The layouts from which an all-gather reaches `dims`: one dimension is sharded over more free factors."""
        pieces = self.held.pieces(dims)
        for run, before in self._finer(dims, self._runs(self._free(dims))):
            yield before, self.prices.all_gather(pieces * self.held.count(run), run) + STEP

    def _finer(self, dims: ShardDims, runs: list[tuple[int, ...]]) -> Iterator[tuple[tuple[int, ...], ShardDims]]:
        """The layouts in which one dimension is sharded over one more run of factors, each with the run."""
        for dim, axes in enumerate(dims):
            left = self.room[dim] // self.held.count(axes)
            for run in runs:
                if left % self.held.count(run) == 0:
                    yield run, (*dims[:dim], (*axes, *run), *dims[dim + 1 :])

    def _coarser(self, dims: ShardDims) -> Iterator[tuple[tuple[int, ...], ShardDims]]:
        """The layouts in which one dimension lacks its last factors, each with these factors."""
        pieces = self.held.pieces(dims)
        for dim, axes in enumerate(dims):
            for kept in range(len(axes)):
                if pieces // self.held.count(axes[kept:]) >= self.least_pieces:
                    yield axes[kept:], (*dims[:dim], axes[:kept], *dims[dim + 1 :])

    def all_to_alls(self, dims: ShardDims, each: float, spare: float) -> Priced:
        """Yields the layouts that an all-to-all reaches, with its cost plus `each`, if that is below `spare`."""
        pieces = self.held.pieces(dims)
        for kept, moving, gainers in _departures(dims):
            cost = self.prices.all_to_all(pieces, moving) + each
            if cost >= spare:
                continue
            rooms = [self.room[dim] // self.held.count(kept[dim]) for dim in gainers]
            for counts, ways in self._ways(moving, tuple(gainers)).items():
                if any([room % count for room, count in zip(rooms, counts, strict=True)]):
                    continue
                for added in ways:
                    after = list(kept)
                    for dim, factors in zip(gainers, added, strict=True):
                        after[dim] += factors
                    yield tuple(after), cost

    def permutes(self, dims: ShardDims, spare: float) -> Priced:
        """Yields the layouts in which one factor becomes the minor-most of its dimension, with the cost of that
        permute. Costs above `spare` are not exact.
        """
        share = 1 / self.held.pieces(dims)
        for dim, axes in enumerate(dims):
            for place in range(len(axes) - 1):
                after = (*dims[:dim], (*axes[:place], *axes[place + 1 :], axes[place]), *dims[dim + 1 :])
                yield after, self.permutations.cost(self.held.numbers(dims), self.held.numbers(after), share, spare)

    def _free(self, dims: ShardDims) -> list[int]:
        """The factors that shard no dimension in `dims`."""
        used = {axis for axes in dims for axis in axes}
        return [factor for factor in self.factors if factor not in used]

    def _runs(self, free: list[int]) -> list[tuple[int, ...]]:
        """The runs of free factors along which one all-gather may have gathered a dimension.

        A run has several factors only if their weights differ.
        """
        runs: list[tuple[int, ...]] = [(factor,) for factor in free]
        if not self.some_are_dearer:
            return runs
        most = len(free) if len(free) <= _MOST_REORDERED else 2
        some = it.chain.from_iterable(it.permutations(free, length) for length in range(2, most + 1))
        runs += filter(self.prices.are_mixed, some)
        return runs

    def _ways(self, moving: tuple[int, ...], gainers: tuple[int, ...]) -> dict[tuple[int, ...], list[ShardDims]]:
        """All ways to add the factors `moving` to the dimensions `gainers`, grouped by the resulting shard counts."""
        found = self._found_ways.get((moving, gainers))
        if found is None:
            found = self._found_ways[moving, gainers] = {}
            for added in (*_distributions(moving, len(gainers)), *self._far_distribution(moving, gainers)):
                found.setdefault(self.held.counts(added), []).append(added)
        return found

    def _far_distribution(self, moving: tuple[int, ...], gainers: tuple[int, ...]) -> list[ShardDims]:
        """With too many factors to try all assignments, the one assignment of `moving` that the other end of the move
        has; else none.

        An empty list if there are few factors.
        """
        if len(moving) <= _MOST_REORDERED:
            return []
        last = (len(self.far_places), 0)
        added: dict[int, tuple[int, ...]] = dict.fromkeys(gainers, ())
        for factor in sorted(moving, key=lambda factor: self.far_places.get(factor, last)):
            dim = self.far_places[factor][0] if factor in self.far_places else gainers[0]
            added[dim if dim in gainers else gainers[0]] += (factor,)
        return [tuple(added.values())]


def _departures(dims: ShardDims) -> Iterator[tuple[ShardDims, tuple[int, ...], list[int]]]:
    """For each choice of factors to move: the kept factors, the moving factors, and the dimensions that can gain them.

    A dimension either loses some of its minor factors or gains minor factors. A dimension that did both would exchange
    chunks of unequal sizes.
    """
    for lengths in it.product(*[range(len(axes) + 1) for axes in dims]):
        gainers = [dim for dim, length in enumerate(lengths) if not length]
        if gainers and len(gainers) < len(dims):
            cuts = [len(axes) - length for axes, length in zip(dims, lengths, strict=True)]
            moving = tuple([factor for axes, cut in zip(dims, cuts, strict=True) for factor in axes[cut:]])
            yield tuple([axes[:cut] for axes, cut in zip(dims, cuts, strict=True)]), moving, gainers


@ft.lru_cache(maxsize=1024)
def _distributions(moving: tuple[int, ...], gainers: int) -> tuple[ShardDims, ...]:
    """The assignments of the factors `moving` to `gainers` dimensions.

    All assignments and orders for at most four factors; for more, only those that keep their order.
    """
    if len(moving) > _MOST_REORDERED:
        return _distributions_in_order(moving, gainers)
    found: list[ShardDims] = [((),) * gainers]
    for factor in moving:
        found = [
            (*added[:dim], (*added[dim][:place], factor, *added[dim][place:]), *added[dim + 1 :])
            for added in found
            for dim in range(gainers)
            for place in range(len(added[dim]) + 1)
        ]
    return tuple(found)


def _distributions_in_order(moving: tuple[int, ...], gainers: int) -> tuple[ShardDims, ...]:
    """The assignments that put all factors on one dimension, or the first few on one and the rest on another."""
    whole = [tuple(moving if dim == only else () for dim in range(gainers)) for only in range(gainers)]
    halves = [(moving[:cut], moving[cut:]) for cut in range(len(moving))] if gainers > 1 else []
    parted = [
        tuple(head if dim == first else tail if dim == second else () for dim in range(gainers))
        for (head, tail), (first, second) in it.product(halves, it.permutations(range(gainers), 2))
    ]
    return tuple(dict.fromkeys(whole + parted))
