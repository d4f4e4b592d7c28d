"""The cheapest path between two layouts: bidirectional A* over slices, exchanges, one permutation and gathers."""

import dataclasses
import functools as ft
import heapq
import itertools as it
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Literal

import numpy as np

from ._factors import World, coordinates, levels, primes
from ._layout import Layout, piece_index


# Per device, its share of the whole array.
_STEP = 1e-9  # among paths of equal traffic the one with fewer steps
# Among those the one whose permutation comes before its exchanges: it then reads the source itself, of which no copy
# is made, and of what follows the TPU compiler may keep one piece on the chip.
_EARLY = 1.01 * _STEP  # an exchange before the permutation
_SLACK = 1e-12
_FEW_LAYOUTS = 1200
_MOST_LAYOUTS = 4000
_HASTE = 4.0
_MOST_REORDERED = 4  # more factors than that move in the order that they have

Dims = tuple[tuple[int, ...], ...]
StepKind = Literal["slice", "all_to_all", "permute", "all_gather"]
PathStep = tuple[StepKind, Layout, Layout, Fraction]


@dataclasses.dataclass(frozen=True)
class Path:
    """The steps of a move as (kind, layout before, layout after, traffic as a share of the array)."""

    source: Layout
    target: Layout
    steps: tuple[PathStep, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """A move to plan: `room` bounds how often each dimension can be cut; two worlds, the ends in their layouts.

    `reorder` lets the search permute the factors of a dimension before its other steps too. Only where factors of
    different sizes block each other is that of use.
    """

    room: tuple[int, ...]
    ours: World
    theirs: World
    reorder: bool = False


def missing(ours: World, theirs: World) -> Fraction:
    """What a device needs under `theirs` and does not have under `ours`, as a mean share of the array."""
    common, unit = None, 1
    for mine, wanted in zip(ours.layout.dims, theirs.layout.dims, strict=True):
        if not mine and not wanted:
            continue
        index, count = _pieces(ours, mine)
        goal, goals = _pieces(theirs, wanted)
        shared, parts = _overlap(index, count, goal, goals)
        shared = shared.astype(np.int64)
        common, unit = shared if common is None else common * shared, unit * parts
    if common is None:
        return Fraction(0)
    return Fraction(1, theirs.layout.pieces) - Fraction(int(common.sum()), unit * len(common))


def _pieces(world: World, axes: tuple[int, ...]) -> tuple[np.ndarray, int]:
    sizes = world.layout.sizes
    index = piece_index(sizes, world.coordinates, axes)
    return index.astype(np.int32), math.prod(sizes[axis] for axis in axes)


def _overlap(index: np.ndarray, count: int, goal: np.ndarray, goals: int) -> tuple[np.ndarray, int]:
    """How much of a dimension two pieces share, in parts of which the dimension has as many as returned."""
    parts = math.lcm(count, goals)
    mine, wanted = np.int32(parts // count), np.int32(parts // goals)
    first, second = index * mine, goal * wanted
    shared = np.minimum(first + mine, second + wanted)
    shared -= np.maximum(first, second)
    return np.maximum(shared, 0, out=shared), parts


class _Side:
    """One direction of the search: from its own end, with the other end as the goal."""

    def __init__(self, problem: Problem, world: World, goal: World, forward: bool):
        self.room, self.world, self.goal, self.forward = problem.room, world, goal, forward
        self.reorder = problem.reorder and forward
        self.crossing = _Crossing(problem.ours, problem.theirs)
        self.sizes = world.layout.sizes
        self.weights = world.layout.weights or (1.0,) * len(self.sizes)
        self.floor = min(self.weights, default=1.0)
        self.cost: dict[Dims, float] = {}
        self.parent: dict[Dims, Dims] = {}
        self.settled: set[Dims] = set()
        self.haste, self.seen = 1.0, 0
        # Factors have a place at the other end only where both ends are on one mesh's factors.
        shared = world.coordinates is goal.coordinates
        self.home = {
            factor: (dim, place)
            for dim, axes in enumerate(goal.layout.dims if shared else ())
            for place, factor in enumerate(axes)
        }
        self.heap: list[tuple[float, float, int, Dims]] = []
        self.by_counts: dict[tuple[int, ...], list[Dims]] = {}
        # Half the bytes, half the time: on thousands of devices the search is bound by these arrays.
        self.coordinates = world.coordinates.astype(np.int32)
        self.ends = [_pieces(goal, axes) for axes in goal.layout.dims]
        self._count: dict[tuple[int, ...], int] = {}
        self._index: dict[tuple[int, ...], np.ndarray] = {(): np.zeros(world.coordinates.shape[1], np.int32)}
        self._share: dict[tuple[int, tuple[int, ...]], np.ndarray | None] = {}
        self._tiles: dict[Dims, np.ndarray] = {}

    def count(self, axes: tuple[int, ...]) -> int:
        if axes not in self._count:
            self._count[axes] = math.prod([self.sizes[axis] for axis in axes])
        return self._count[axes]

    def counts(self, dims: Dims) -> tuple[int, ...]:
        return tuple([self.count(axes) for axes in dims])

    def index(self, axes: tuple[int, ...]) -> np.ndarray:
        """Which piece of a dimension cut by `axes` each device holds; from that of the axes but the last."""
        if axes not in self._index:
            *outer, last = axes
            self._index[axes] = self.index(tuple(outer)) * np.int32(self.sizes[last]) + self.coordinates[last]
        return self._index[axes]

    def tiles(self, dims: Dims) -> np.ndarray:
        """One number per device for all of its piece, equal on both sides for equal pieces."""
        if dims not in self._tiles:
            out = np.zeros(self.world.coordinates.shape[1], np.int64)
            for axes in dims:
                if axes:
                    out = out * self.count(axes) + self.index(axes)
            self._tiles[dims] = out
        return self._tiles[dims]

    def estimate(self, dims: Dims) -> float:
        """A lower bound on the traffic that remains (forward) or came before (backward)."""
        shares = [share for share in map(self._shared, range(len(dims)), dims) if share is not None]
        if not shares:
            return 0.0
        *first, last = shares
        common = last.sum() if not first else np.dot(ft.reduce(np.multiply, first), last)
        end = self.goal.layout.pieces if self.forward else math.prod(self.counts(dims))
        return max(0.0, 1.0 / end - float(common) / len(last)) * self.floor

    def _shared(self, dim: int, axes: tuple[int, ...]) -> np.ndarray | None:
        key = (dim, axes)
        if key not in self._share:
            goal, goals = self.ends[dim]
            if axes or goals > 1:
                shared, parts = _overlap(self.index(axes), self.count(axes), goal, goals)
                self._share[key] = shared * (1.0 / parts)
            else:
                self._share[key] = None
        return self._share[key]

    def push(self, dims: Dims, cost: float, parent: Dims | None, limit: float) -> bool:
        """Adds a layout to look at, unless no path through it is new and cheaper than `limit`."""
        if cost + _SLACK >= min(limit, self.cost.get(dims, math.inf)):
            return False
        self.seen += 1
        estimate = self.estimate(dims)
        if cost + estimate >= limit - _SLACK:
            return False
        self.cost[dims] = cost
        if parent is not None:
            self.parent[dims] = parent
        # Both ends are looked at first: what they can reach in one step each may meet.
        key = 0.0 if parent is None else cost + self.haste * estimate
        heapq.heappush(self.heap, (key, estimate, self.seen, dims))
        return True

    def hurry(self, haste: float) -> None:
        """Weighs the remaining traffic more than the traffic so far, which finds some path sooner."""
        self.haste = haste
        self.heap = [
            (self.cost[dims] + haste * estimate, estimate, tick, dims) for _, estimate, tick, dims in self.heap
        ]
        heapq.heapify(self.heap)

    def neighbours(self, dims: Dims, spare: float) -> Iterator[tuple[Dims, float]]:
        """The layouts one step away, each with what the step costs: less than `spare`."""
        yield from self._cuts(dims)
        if self.reorder:
            yield from self._reordered(dims)
        pieces = math.prod(self.counts(dims))
        for kept, moving, gainers in _departures(dims):
            cost = self.exchange_cost(pieces, moving) + (_EARLY if self.forward else _STEP)
            if cost >= spare:
                continue
            rooms = [self.room[dim] // self.count(kept[dim]) for dim in gainers]
            for added in (*_shares(moving, len(gainers)), *_homeward(moving, gainers, self.home)):
                if not any([room % self.count(factors) for room, factors in zip(rooms, added, strict=True)]):
                    after = list(kept)
                    for dim, factors in zip(gainers, added, strict=True):
                        after[dim] += factors
                    yield tuple(after), cost

    def _cuts(self, dims: Dims) -> Iterator[tuple[Dims, float]]:
        """One free factor more on one dimension: a slice forward, a gather backward."""
        used = {axis for axes in dims for axis in axes}
        pieces = math.prod(self.counts(dims))
        for factor, size in enumerate(self.sizes):
            if factor in used:
                continue
            # What an all-gather of this factor alone brings in, had it cut the pieces once more.
            cost = 0.0 if self.forward else (size - 1) / (pieces * size) * self.weights[factor]
            for dim, axes in enumerate(dims):
                if self.room[dim] % (self.count(axes) * size) == 0:
                    yield (*dims[:dim], (*axes, factor), *dims[dim + 1 :]), cost + _STEP

    def _reordered(self, dims: Dims) -> Iterator[tuple[Dims, float]]:
        """One factor of a dimension permuted to its end."""
        share = 1 / math.prod(self.counts(dims))
        for dim, axes in enumerate(dims):
            for place in range(len(axes) - 1):
                after = (*dims[:dim], (*axes[:place], *axes[place + 1 :], axes[place]), *dims[dim + 1 :])
                yield after, self.crossing.cost(self.tiles(dims), self.tiles(after), share)

    def exchange_cost(self, pieces: int, group: tuple[int, ...]) -> float:
        left, cost = 1.0, 0.0
        for factor in sorted(group, key=lambda factor: -self.weights[factor]):
            # The slow axes are crossed once, by what must cross them; the rest stays on the faster ones.
            cost += left * (1 - 1 / self.sizes[factor]) * self.weights[factor]
            left /= self.sizes[factor]
        return cost / pieces


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


def _homeward(moving: tuple[int, ...], gainers: list[int], home: dict[int, tuple[int, int]]) -> list[Dims]:
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


@dataclasses.dataclass
class _Join:
    cost: float
    ours: Dims | None
    theirs: Dims | None


def search(problem: Problem, *, most: int | None = None) -> Path:
    """The cheapest path; where the search is cut short, the best one found.

    **Arguments:**

    - `problem`: the move.
    - `most`: how many layouts to look at before the best path so far is good enough; by default what a
        fraction of a second allows.

    **Returns:**

    The path.
    """
    most = _budget(problem.ours.layout.size) if most is None else most
    # No dimension need ever be cut more finely than the two ends do together; a path that respects it is found
    # soon, and what it costs tells the search for a better one where not to look. It leaves half the time for that.
    ends = (problem.ours.layout.counts, problem.theirs.layout.counts)
    narrow = dataclasses.replace(problem, room=tuple(map(math.lcm, *ends)))
    path, cost, looked = _explore(narrow, most // 2, math.inf)
    mixed = len(dict.fromkeys(prime for size in problem.ours.layout.sizes for prime in primes(size))) > 1
    wide = dataclasses.replace(problem, reorder=mixed)
    if path is None or ((mixed or narrow.room != problem.room) and looked < most):
        better, _, _ = _explore(wide, most - looked, cost)
        path = better or path
    if path is None:
        raise AssertionError("slices, exchanges and gathers lead everywhere; please report this move")
    return path


def _budget(devices: int) -> int:
    """How many layouts to look at: each costs some array operations over all devices."""
    return _FEW_LAYOUTS if devices <= 16 else min(_MOST_LAYOUTS, max(_FEW_LAYOUTS // 4, 10_000_000 // devices))


def _explore(problem: Problem, most: int, limit: float) -> tuple[Path | None, float, int]:
    """The best path cheaper than `limit`, its cost, and how many layouts were looked at."""
    ahead = _Side(problem, problem.ours, problem.theirs, True)
    back = _Side(problem, problem.theirs, problem.ours, False)
    best = _Join(limit, None, None)
    shared = problem.ours.coordinates is problem.theirs.coordinates
    ahead.push(problem.ours.layout.dims, 0.0, None, limit)
    back.push(problem.theirs.layout.dims, 0.0, None, limit)
    while ahead.heap or back.heap:
        side = min((ahead, back), key=lambda side: side.heap[0][:2] if side.heap else (math.inf, 0.0))
        _, estimate, _, dims = heapq.heappop(side.heap)
        if side.cost[dims] + estimate >= best.cost - _SLACK or dims in side.settled:
            continue
        _settle(dims, side, ahead, back, best)
        for after, extra in side.neighbours(dims, best.cost - side.cost[dims]):
            if side.push(after, side.cost[dims] + extra, dims, best.cost) and shared:
                # Where both ends are on one mesh's factors, a layout that the other side has met makes a path at once.
                _join(after, after, 0.0, ahead, back, best)
            if best.cost < math.inf and ahead.seen + back.seen > most:
                break
        looked = ahead.seen + back.seen
        if best.ours is None and limit == math.inf and looked > most // 2 and side.haste == 1.0:
            ahead.hurry(_HASTE)
            back.hurry(_HASTE)
        if looked > most and best.cost < math.inf:
            break
    return _path(problem, ahead, back, best), best.cost, ahead.seen + back.seen


def _settle(dims: Dims, side: _Side, ahead: _Side, back: _Side, best: _Join) -> None:
    """Joins a layout of one side to all those of the other side that a permutation can make of it."""
    side.settled.add(dims)
    counts, cost = side.counts(dims), side.cost[dims]
    side.by_counts.setdefault(counts, []).append(dims)
    other = back if side is ahead else ahead
    for match in other.by_counts.get(counts, ()):
        if cost + other.cost[match] >= best.cost - _SLACK:
            continue
        u, v = (dims, match) if side is ahead else (match, dims)
        _join(u, v, side.crossing.cost(ahead.tiles(u), back.tiles(v), 1 / math.prod(counts)), ahead, back, best)


def _join(u: Dims, v: Dims, between: float, ahead: _Side, back: _Side, best: _Join) -> None:
    total = ahead.cost.get(u, math.inf) + between + back.cost.get(v, math.inf)
    if total < best.cost - _SLACK:
        best.cost, best.ours, best.theirs = total, u, v


class _Crossing:
    """What a permutation costs that makes every device's piece the one that it holds on the other side."""

    def __init__(self, ours: World, theirs: World):
        self.levels = levels(ours, theirs)

    def cost(self, have: np.ndarray, want: np.ndarray, share: float) -> float:
        lacking = have != want
        if not lacking.any():
            return 0.0
        if len(self.levels) == 1:
            return self.levels[0][0] * float(lacking.mean()) * share + _STEP
        total = 0.0
        for weight, group in self.levels:
            near = np.isin(group * (int(want.max()) + 1) + want, group * (int(want.max()) + 1) + have)
            total += weight * float((lacking & near).mean())
            lacking = lacking & ~near
        return total * share + _STEP


def _path(problem: Problem, ahead: _Side, back: _Side, best: _Join) -> Path | None:
    if best.ours is None or best.theirs is None:
        return None
    first = [best.ours]
    while first[-1] in ahead.parent:
        first.append(ahead.parent[first[-1]])
    last = [best.theirs]
    while last[-1] in back.parent:
        last.append(back.parent[last[-1]])
    ahead_of, behind = (
        [dataclasses.replace(world.layout, dims=dims) for dims in states]
        for world, states in ((problem.ours, first[::-1]), (problem.theirs, last))
    )
    pairs = [*it.pairwise(ahead_of), (ahead_of[-1], behind[0]), *it.pairwise(behind)]
    steps: list[PathStep] = []
    for index, (before, after) in enumerate(pairs):
        # From one side to the other any piece may go anywhere, whatever the factors are called.
        kind = "permute" if index == len(first) - 1 else _kind(before, after)
        if steps and kind == steps[-1][0] and _fusible(kind, steps[-1], before, after):
            before = steps.pop()[1]
        share = _share(kind, before, after, problem.ours.layout)
        if share or kind != "permute":
            steps.append((kind, before, after, share))
    return Path(problem.ours.layout, problem.theirs.layout, tuple(steps))


def _kind(before: Layout, after: Layout) -> StepKind:
    if after.pieces != before.pieces:
        return "slice" if after.pieces > before.pieces else "all_gather"
    return "all_to_all" if _changed(before, after) else "permute"


def _share(kind: StepKind, before: Layout, after: Layout, like: Layout) -> Fraction:
    """What enters a device in one step, as a mean share of the array."""
    if kind == "slice":
        return Fraction(0)
    if kind == "all_gather":
        return Fraction(1, after.pieces) - Fraction(1, before.pieces)
    if kind == "all_to_all":
        group = math.prod(before.sizes[factor] for factor in _changed(before, after))
        return Fraction(group - 1, group * before.pieces)
    have, want = (World(end, coordinates(end, like)).held() for end in (before, after))
    return Fraction(int((have != want).sum()), len(have) * before.pieces)


def _changed(before: Layout, after: Layout) -> list[int]:
    places = [{f: dim for dim, axes in enumerate(end.dims) for f in axes} for end in (before, after)]
    return [f for f in range(len(before.sizes)) if places[0].get(f) != places[1].get(f)]


def _fusible(kind: StepKind, earlier: PathStep, before: Layout, after: Layout) -> bool:
    """Whether a step and the one before it, of one kind, are one operation.

    Gathers are if they join one dimension along axes of one weight.
    """
    if kind != "all_gather":
        return kind != "all_to_all"
    factors = [*_changed(earlier[1], earlier[2]), *_changed(before, after)]
    weights = [before.weights[factor] if before.weights else 1.0 for factor in factors]
    pairs = [*zip(earlier[1].dims, earlier[2].dims, strict=True), *zip(before.dims, after.dims, strict=True)]
    dims = [index % len(before.dims) for index, (axes, kept) in enumerate(pairs) if axes != kept]
    return len(dict.fromkeys(weights)) == 1 and len(dict.fromkeys(dims)) == 1
