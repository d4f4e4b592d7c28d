"""The cheapest path between two layouts: bidirectional A* over slices, exchanges, one permutation and gathers."""

import dataclasses
import functools as ft
import heapq
import itertools as it
import math
from collections.abc import Iterator

import numpy as np

from .factors import World, levels, primes
from .lower_bound import Bound, Dims, Holdings
from .path import Walk, walk


# Per device, its share of the whole array.
_STEP = 1e-9  # among paths of equal traffic the one with fewer steps
# Among those the one whose permutation comes before its exchanges: it then reads the source itself, of which no copy
# is made, and of what follows the TPU compiler may keep one piece on the chip.
_EARLY = 1.01 * _STEP  # an exchange before the permutation
_SLACK = 1e-12
_FEW_LAYOUTS = 900
_MOST_LAYOUTS = 3000
_MOST_REORDERED = 4  # more factors than that move in the order that they have


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """A move to plan: `room` bounds how often each dimension can be cut; two worlds, the ends in their layouts.

    `uncut` lets the search gather before the permutation and slice after it, `any_order` permute the factors of a
    dimension among its other steps too. Both are of use where factors of different sizes block each other, or some
    cost more than others; the first also where the worlds share no factors: pieces that all devices of a group hold
    need not be brought to the places that the other world has for them.
    """

    room: tuple[int, ...]
    ours: World
    theirs: World
    uncut: bool = False
    any_order: bool = False


class _Crossing:
    """What a permutation costs that makes every device's piece the one that it holds on the other side."""

    def __init__(self, ours: World):
        self.levels = levels(ours)
        self.priced = 0  # how many have been looked at closely

    def cost(self, have: np.ndarray, want: np.ndarray, share: float, spare: float) -> float:
        """The cost of pieces that are `share` of the array each; anything above `spare` where it is more."""
        lacking = have != want
        left = int(lacking.sum())
        if not left:
            return 0.0
        share /= len(have)
        total = self.levels[0][0] * left * share
        if len(self.levels) == 1 or total >= spare:
            return total + _STEP
        self.priced += 1
        # Each device gives its piece to one other: of the copies that are wanted nearby only as many as there are.
        span, have, want = int(want.max()) + 1, have[lacking], want[lacking]
        for (cheap, group), (weight, _) in it.pairwise(self.levels):
            near = _shared_count(group[lacking] * span + have, group[lacking] * span + want)
            total += (weight - cheap) * (left - near) * share
        return total + _STEP


def _shared_count(first: np.ndarray, second: np.ndarray) -> int:
    """How many numbers two arrays have in common, each as often as both have it."""
    marked = np.sort(np.concatenate((2 * first, 2 * second + 1)))
    starts = np.flatnonzero(np.diff(marked >> 1, prepend=-1))
    seconds = np.add.reduceat(marked & 1, starts)
    return int(np.minimum(seconds, np.diff(starts, append=len(marked)) - seconds).sum())


class _Side:
    """One direction of the search: from its own end, with the other end as the goal."""

    def __init__(self, problem: Problem, world: World, goal: World, crossing: _Crossing, forward: bool):
        self.room, self.forward = problem.room, forward
        self.sizes = world.layout.sizes
        self.weights = world.layout.weights or (1.0,) * len(self.sizes)
        self.least = min(world.layout.pieces, goal.layout.pieces)
        self.goal = goal.layout.counts
        self.layered = len(dict.fromkeys(self.weights)) > 1
        self.uncut, self.any_order = problem.uncut, problem.any_order
        self.held = Holdings(world)
        self.bound = Bound(self.held, world, goal, forward)
        self.crossing = crossing
        self.cost: dict[Dims, float] = {}
        self.parent: dict[Dims, Dims] = {}
        self.settled: set[Dims] = set()
        self.seen = 0
        # Factors have a place at the other end only where both ends are on one mesh's factors.
        shared = world.coordinates is goal.coordinates
        self.home = {
            factor: (dim, place)
            for dim, axes in enumerate(goal.layout.dims if shared else ())
            for place, factor in enumerate(axes)
        }
        self.ends = goal.layout.dims if shared else ((),) * len(goal.layout.dims)
        self.heap: list[tuple[float, float, int, Dims]] = []
        self.by_counts: dict[tuple[int, ...], list[Dims]] = {}
        self.earliest: dict[tuple[int, ...], Dims] = {}
        self.ways: dict[tuple[tuple[int, ...], tuple[int, ...]], dict[tuple[int, ...], list[Dims]]] = {}

    def push(self, dims: Dims, cost: float, parent: Dims | None, limit: float, hurry: bool = False) -> bool:
        """Adds a layout to look at, unless no path through it is new and cheaper than `limit`.

        In a `hurry` those are looked at first whose counts are next to the goal's, whatever they cost.
        """
        if cost + _SLACK >= min(limit, self.cost.get(dims, math.inf)):
            return False
        self.seen += 1
        estimate = self.bound(dims)
        if cost + estimate >= limit - _SLACK:
            return False
        self.cost[dims] = cost
        self.earliest.setdefault(self.held.counts(dims), dims)
        if parent is not None:
            self.parent[dims] = parent
        # Both ends are looked at first: what they can reach in one step each may meet.
        key = 0.0 if parent is None else -1 / self._apart(dims) if hurry else cost + estimate
        heapq.heappush(self.heap, (key, estimate, self.seen, dims))
        return True

    def _apart(self, dims: Dims) -> int:
        """The product of what the counts of `dims` and those of the goal do not have in common."""
        pairs = zip(self.held.counts(dims), self.goal, strict=True)
        return math.prod([math.lcm(count, goal) // math.gcd(count, goal) for count, goal in pairs])

    def neighbours(self, dims: Dims, spare: float) -> Iterator[tuple[Dims, float]]:
        """The layouts one step away, each with what the step costs: less than `spare`."""
        yield from self._cuts(dims)
        if self.uncut:
            yield from self._uncut(dims)
        if self.any_order:
            yield from self._reordered(dims, spare)
        pieces = self.held.pieces(dims)
        for kept, moving, gainers in _departures(dims):
            cost = self.exchange_cost(pieces, moving) + (_EARLY if self.forward else _STEP)
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

    def _ways(self, moving: tuple[int, ...], gainers: tuple[int, ...]) -> dict[tuple[int, ...], list[Dims]]:
        """The ways to share factors out among dimensions, by how often each is cut by them."""
        found = self.ways.get((moving, gainers))
        if found is None:
            found = self.ways[moving, gainers] = {}
            for added in (*_shares(moving, len(gainers)), *_homeward(moving, gainers, self.home)):
                found.setdefault(self.held.counts(added), []).append(added)
        return found

    def _cuts(self, dims: Dims) -> Iterator[tuple[Dims, float]]:
        """Free factors more on one dimension: one for a slice forward, some for a gather backward."""
        used = {axis for axes in dims for axis in axes}
        free = [factor for factor in range(len(self.sizes)) if factor not in used]
        pieces = self.held.pieces(dims)
        for dim, axes in enumerate(dims):
            for run in [(factor,) for factor in free] if self.forward else self._runs(dim, axes, free):
                if self.room[dim] % (self.held.count(axes) * self.held.count(run)) == 0:
                    cost = 0.0 if self.forward else self.gather_cost(pieces * self.held.count(run), run)
                    yield (*dims[:dim], (*axes, *run), *dims[dim + 1 :]), cost + _STEP

    def _runs(self, dim: int, axes: tuple[int, ...], free: list[int]) -> list[tuple[int, ...]]:
        """The factors that one gather may have joined a dimension along: several where that is cheaper at once."""
        runs = [(factor,) for factor in free]
        if not self.layered:
            return runs
        most = len(free) if len(free) <= _MOST_REORDERED else 2
        runs += [run for length in range(2, most + 1) for run in it.permutations(free, length) if self._is_mixed(run)]
        rest = self.ends[dim][len(axes) :]
        if len(rest) > most and self.ends[dim][: len(axes)] == axes and self._is_mixed(rest) and {*rest} <= {*free}:
            runs.append(rest)
        return runs

    def _is_mixed(self, run: tuple[int, ...]) -> bool:
        return len({self.weights[factor] for factor in run}) > 1

    def _uncut(self, dims: Dims) -> Iterator[tuple[Dims, float]]:
        """Factors less on one dimension: some for a gather forward, one for a slice backward. Copies get nearer so."""
        pieces = self.held.pieces(dims)
        for dim, axes in enumerate(dims):
            for kept in range(len(axes)):
                run = axes[kept:]
                several = self.forward and (not self.layered or self._is_mixed(run))
                if (several or len(run) == 1) and pieces // self.held.count(run) >= self.least:
                    cost = self.gather_cost(pieces, run) if self.forward else 0.0
                    yield (*dims[:dim], axes[:kept], *dims[dim + 1 :]), cost + _STEP

    def _reordered(self, dims: Dims, spare: float) -> Iterator[tuple[Dims, float]]:
        """One factor of a dimension permuted to its end."""
        share = 1 / self.held.pieces(dims)
        for dim, axes in enumerate(dims):
            for place in range(len(axes) - 1):
                after = (*dims[:dim], (*axes[:place], *axes[place + 1 :], axes[place]), *dims[dim + 1 :])
                yield after, self.crossing.cost(self.held.numbers(dims), self.held.numbers(after), share, spare)

    def exchange_cost(self, pieces: int, group: tuple[int, ...]) -> float:
        """The cost of an all-to-all among pieces of which the array has as many as given."""
        left, cost = 1.0, 0.0
        for factor in self._dearest_first(group):
            # The slow axes are crossed once, by what must cross them; the rest stays on the faster ones.
            cost += left * (1 - 1 / self.sizes[factor]) * self.weights[factor]
            left /= self.sizes[factor]
        return cost / pieces

    def gather_cost(self, pieces: int, group: tuple[int, ...]) -> float:
        """The cost of an all-gather of pieces of which the array has as many as given."""
        held, cost = 1, 0.0
        for factor in self._dearest_first(group):
            # A piece enters a slice once, and is copied within.
            cost += held * (self.sizes[factor] - 1) * self.weights[factor]
            held *= self.sizes[factor]
        return cost / pieces

    def _dearest_first(self, group: tuple[int, ...]) -> list[int]:
        return sorted(group, key=lambda factor: -self.weights[factor])


def _departures(dims: Dims) -> Iterator[tuple[Dims, tuple[int, ...], list[int]]]:
    """How an all-to-all can begin: what stays of each dimension's factors, those that move, where they can go.

    Each dimension loses some of its minor factors, or gains factors at its minor end; one that did both would
    need unequal parts from unequal peers.
    """
    for lengths in it.product(*[range(len(axes) + 1) for axes in dims]):
        gainers = [dim for dim, length in enumerate(lengths) if not length]
        if gainers and len(gainers) < len(dims):
            cuts = [len(axes) - length for axes, length in zip(dims, lengths, strict=True)]
            moving = tuple([factor for axes, cut in zip(dims, cuts, strict=True) for factor in axes[cut:]])
            yield tuple([axes[:cut] for axes, cut in zip(dims, cuts, strict=True)]), moving, gainers


def _homeward(moving: tuple[int, ...], gainers: tuple[int, ...], home: dict[int, tuple[int, int]]) -> list[Dims]:
    """Of the orders that are too many to try, the one in which the factors are at the other end of the move.

    `home` says in which dimension and at which place each is there.
    """
    if len(moving) <= _MOST_REORDERED:
        return []
    order = sorted(moving, key=lambda factor: home.get(factor, (len(home), 0)))
    places = [home[factor][0] if factor in home else -1 for factor in order]
    return [
        tuple(
            tuple(
                f for f, place in zip(order, places, strict=True) if (place if place in gainers else gainers[0]) == dim
            )
            for dim in gainers
        )
    ]


@ft.lru_cache(maxsize=1024)
def _shares(moving: tuple[int, ...], gainers: int) -> tuple[Dims, ...]:
    """The ways to share factors out among dimensions: all of them for few factors, else runs in their order."""
    found: list[Dims] = [((),) * gainers]
    if len(moving) > _MOST_REORDERED:
        runs = [(moving[:cut], moving[cut:]) for cut in range(len(moving))]
        pairs = it.product(runs, it.permutations(range(gainers), 2)) if gainers > 1 else ()
        whole = [tuple(moving if dim == other else () for other in range(gainers)) for dim in range(gainers)]
        split = [
            tuple(head if dim == first else tail if dim == second else () for dim in range(gainers))
            for (head, tail), (first, second) in pairs
        ]
        return tuple(dict.fromkeys(whole + split))
    for factor in moving:
        found = [
            (*share[:dim], (*share[dim][:place], factor, *share[dim][place:]), *share[dim + 1 :])
            for share in found
            for dim in range(gainers)
            for place in range(len(share[dim]) + 1)
        ]
    return tuple(found)


def search(problem: Problem, *, most: int | None = None) -> Walk | None:
    """The cheapest path; where the search is cut short, the best one found.

    **Arguments:**

    - `problem`: the move.
    - `most`: how many layouts to look at before the best path so far is good enough; by default what a
        fraction of a second allows.

    **Returns:**

    The path, or None where no steps of these factors lead from one end to the other.
    """
    most = _budget(problem.ours) if most is None else most
    # No dimension need ever be cut more finely than the two ends do together; a path that respects it is found
    # soon, and what it costs tells the search for a better one where not to look. It leaves half the time for that.
    ends = (problem.ours.layout.counts, problem.theirs.layout.counts)
    narrow = dataclasses.replace(problem, room=tuple(map(math.lcm, *ends)))
    path, cost, looked = explore(narrow, most // 2, math.inf)
    kinds = [prime for size in problem.ours.layout.sizes for prime in primes(size)], problem.ours.layout.weights
    mixed = any(len(dict.fromkeys(kind)) > 1 for kind in kinds)
    uncut = mixed or problem.ours.coordinates is not problem.theirs.coordinates
    wide = dataclasses.replace(problem, uncut=uncut, any_order=mixed)
    if path is None or ((uncut or narrow.room != problem.room) and looked < most):
        better, _, _ = explore(wide, most - looked, cost)
        path = better or path
    return path


def _budget(world: World) -> int:
    """How many layouts to look at: each costs some array operations over all devices, and more with slow axes."""
    devices, kinds = world.layout.size, len(levels(world))
    most = _FEW_LAYOUTS if devices <= 16 else min(_MOST_LAYOUTS, max(_FEW_LAYOUTS // 4, 8_000_000 // devices))
    return most // kinds


def explore(problem: Problem, most: int, limit: float) -> tuple[Walk | None, float, int]:
    """The best path cheaper than `limit`, its cost, and how many layouts were looked at.

    Those are about `most` at most, unless without a limit no path was found among so many.
    """
    crossing = _Crossing(problem.ours)
    ahead = _Side(problem, problem.ours, problem.theirs, crossing, True)
    back = _Side(problem, problem.theirs, problem.ours, crossing, False)
    best = _Meeting(ahead, back, limit)
    shared = problem.ours.coordinates is problem.theirs.coordinates
    ahead.push(problem.ours.layout.dims, 0.0, None, limit)
    back.push(problem.theirs.layout.dims, 0.0, None, limit)
    while ahead.heap or back.heap:
        side = min((ahead, back), key=lambda side: side.heap[0][:2] if side.heap else (math.inf, 0.0))
        _, estimate, _, dims = heapq.heappop(side.heap)
        if side.cost[dims] + estimate >= best.cost - _SLACK or dims in side.settled:
            continue
        _settle(dims, side, best, most)
        for after, extra in side.neighbours(dims, best.cost - side.cost[dims]):
            hurry = best.cost == math.inf and best.looked > most
            if side.push(after, side.cost[dims] + extra, dims, best.cost, hurry):
                if shared:  # both ends are on one mesh's factors: a layout that the other side has met makes a path
                    _meet(after, after, 0.0, best)
                if best.cost == math.inf:
                    _join_first(after, side, best)
            if best.is_enough(most):
                break
        if best.is_enough(most):
            break
    return _walk(problem, best), best.cost, best.looked


@dataclasses.dataclass
class _Meeting:
    """The two sides, and the best path over both so far: its cost, and the layouts beside its permutation."""

    ahead: _Side
    back: _Side
    cost: float
    ours: Dims | None = None
    theirs: Dims | None = None

    @property
    def looked(self) -> int:
        """How many layouts, and permutations between them, were looked at."""
        return self.ahead.seen + self.back.seen + self.ahead.crossing.priced

    def is_enough(self, most: int) -> bool:
        return self.looked > most and self.cost < math.inf


def _settle(dims: Dims, side: _Side, best: _Meeting, most: int) -> None:
    """Joins a layout of one side to all those of the other side that a permutation can make of it."""
    side.settled.add(dims)
    counts, cost = side.held.counts(dims), side.cost[dims]
    side.by_counts.setdefault(counts, []).append(dims)
    other = best.back if side is best.ahead else best.ahead
    for match in other.by_counts.get(counts, ()):
        if best.cost - cost - other.cost[match] > _SLACK and not best.is_enough(most):
            _join(dims, match, side, best)


def _join_first(dims: Dims, side: _Side, best: _Meeting) -> None:
    """Joins a layout to the first of its counts that the other side met: any path tells where not to look."""
    other = best.back if side is best.ahead else best.ahead
    match = other.earliest.get(side.held.counts(dims))
    if match is not None:
        _join(dims, match, side, best)


def _join(dims: Dims, match: Dims, side: _Side, best: _Meeting) -> None:
    """Joins a layout of one side to one of the other by a permutation."""
    ours, theirs = (dims, match) if side is best.ahead else (match, dims)
    spare = best.cost - best.ahead.cost[ours] - best.back.cost[theirs]
    have, want = best.ahead.held.numbers(ours), best.back.held.numbers(theirs)
    _meet(ours, theirs, side.crossing.cost(have, want, 1 / best.ahead.held.pieces(ours), spare), best)


def _meet(ours: Dims, theirs: Dims, between: float, best: _Meeting) -> None:
    total = best.ahead.cost.get(ours, math.inf) + between + best.back.cost.get(theirs, math.inf)
    if total < best.cost - _SLACK:
        best.cost, best.ours, best.theirs = total, ours, theirs


def _walk(problem: Problem, best: _Meeting) -> Walk | None:
    if best.ours is None or best.theirs is None:
        return None
    first = [best.ours]
    while first[-1] in best.ahead.parent:
        first.append(best.ahead.parent[first[-1]])
    last = [best.theirs]
    while last[-1] in best.back.parent:
        last.append(best.back.parent[last[-1]])
    ours, theirs = (
        [dataclasses.replace(world.layout, dims=dims) for dims in states]
        for world, states in ((problem.ours, first[::-1]), (problem.theirs, last))
    )
    return walk(ours, theirs)
