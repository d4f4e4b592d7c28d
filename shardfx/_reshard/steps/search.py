"""The search for the cheapest path between two layouts: a bidirectional A* over slices, all-to-alls, one permutation
and gathers.

**The problem.** An array has one sharding and needs another over the same devices. The search looks for a short
sequence of steps with the least traffic. No step may need more memory than about one shard to read and one shard to
write, so gathering the whole array and slicing it is no solution. Rink et al. 2021
(arXiv 2112.01075) show that four kinds of steps suffice:

- a *slice* keeps a chunk of each shard; it costs nothing;
- an *all-to-all* within replica groups moves factors from one dimension to another;
- a *permutation* sends every device's shard to another device;
- a *gather* (all-gather) concatenates the shards of a replica group on each of its devices.

**The words.**

- *Factor*: a mesh axis or a sub-axis. An axis of 8 devices may be split into factors 2 and 4, each of which can shard
  another dimension. `splits` chooses the factors.
- *Piece*: the shard of the array that a device holds (a tile, in the words of Rink et al.). Several devices may hold
  the same piece.
- *Layout*, here `dims`: for each dimension, the factors that shard it, major first. `((0, 2), ())` shards the rows of
  a matrix over factors 0 and 2, and leaves the columns unsharded.
- *Counts*: the number of shards along each dimension. A permutation keeps them; every other step changes them.
- *Free factor*: a factor that shards no dimension. Devices that differ only in it hold the same piece.
- *Share*: a fraction of the bytes of the whole array. A cost is the share that a device receives, as the mean over
  devices, times the weights.
- *Weight*: the cost of a byte along a factor. Factors between TPU slices (or nodes) have a high weight and are *dear*.
- *Room*: for each dimension, the number that its shard count must divide.
- *Source*, *target*: the two ends of the move. If both use the factors of one mesh, a layout means the same at
  either end. Otherwise only counts and piece numbers can be compared between the ends.
- *Forward side*: the search from the source on. It knows the cost from the source to a layout.
- *Homeward side*: the search from the target back. It knows the cost from a layout to the target.
- *Crossing*: the permutation from a layout of the forward side to one of the homeward side with the same counts. It
  costs nothing if every device already holds the right piece.

**The order of the steps.** A path begins with slices and all-to-alls on the source's factors, crosses over, and ends
with all-to-alls and gathers on the target's. Slices come first and gathers last, since traffic is least while pieces
are small. One crossing is enough as a rule: permutations next to each other are one, and others can be moved together.
The `Problem` allows two exceptions where they can be of use.

**The search.** Both sides hold a heap of layouts by the least that a path through them can cost: what is known to be
paid, and the `LowerBound` of the rest. The cheaper of the two heads is taken. It is *settled*: joined by a crossing to
every layout of the other side with the same counts, and its neighbours go to the heap. Layouts that cannot beat the
best path so far are dropped. When both heaps are empty, or have only such layouts, the path is the cheapest there is.

**The budget.** Some moves have too many layouts to look at. So the search ends after a number of them, with the best
path so far. In order that there is one, the first of two searches never cuts a dimension more finely than the two ends
do together, which leaves few layouts; what its path costs then tells the second one, for which anything is allowed,
where not to look. And if no path at all was met when the budget is used up, layouts come first whose counts are
nearest to the other end's, whatever they cost.
"""

import dataclasses
import heapq
import math
from collections.abc import Callable, Iterator
from typing import Literal

from .layout import End, Holdings, ShardDims, StepLayout, levels
from .lower_bound import LowerBound
from .neighbours import Neighbours
from .prices import STEP, STEP_BEFORE_PERMUTATION, PermutationPrices
from .splits import primes


# Costs that differ by less are equal; the difference comes from the order of additions.
_ROUNDING = 1e-12
_FEW_LAYOUTS = 900
_MOST_LAYOUTS = 3000

Counts = tuple[int, ...]
# The layouts that a path visits over the source's factors, from the source on, and over the target's, to the target.
Route = tuple[list[StepLayout], list[StepLayout]]
# The layouts one step away that are reached for less than a given cost, each with the step's cost.
NextLayouts = Callable[[ShardDims, float], Iterator[tuple[ShardDims, float]]]


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """The input of the search: the layouts before and after a move, over common factors.

    **Arguments:**

    - `room`: how many shards each dimension can have.
    - `source`, `target`: the ends, on factors.
    - `takes_detours`: whether the search also tries to gather before the permutation between the meshes, to slice after
        it, and to permute the factors of a dimension. This helps if factors of different sizes block each other, if
        some cost more than others, and if source and target have no factors in common.
    """

    room: tuple[int, ...]
    source: End
    target: End
    takes_detours: bool = False


def cheapest_route(problem: Problem) -> Route | None:
    """The cheapest path of steps, or the best path found when the budget is used up.

    **Arguments:**

    - `problem`: the move.

    **Returns:**

    The path, or `None` if no steps along these factors lead from one end to the other.
    """
    source, target = problem.source, problem.target
    # The number of layouts to examine takes a fraction of a second: fewer for more devices, and if some axes are slow.
    devices = source.layout.size
    most = _FEW_LAYOUTS if devices <= 16 else min(_MOST_LAYOUTS, max(_FEW_LAYOUTS // 4, 8_000_000 // devices))
    most //= len(levels(source))
    narrow = dataclasses.replace(problem, room=tuple(map(math.lcm, source.layout.counts, target.layout.counts)))
    path, cost, looked = explore(narrow, most // 2, math.inf)
    factors = [prime for size in source.layout.sizes for prime in primes(size)]
    differ = len({*factors}) > 1 or len({*source.layout.weights}) > 1
    takes_detours = differ or source.coordinates is not target.coordinates
    if path is None or ((takes_detours or narrow.room != problem.room) and looked < most):
        wide = dataclasses.replace(problem, takes_detours=takes_detours)
        better, _, _ = explore(wide, most - looked, cost)
        path = better or path
    return path


def explore(problem: Problem, most: int, limit: float) -> tuple[Route | None, float, int]:
    """The best path cheaper than `limit`, its cost, and the number of layouts examined.

    That number is at most about `most`, except if `limit` is infinite and no path was found by then.
    """
    permutations = PermutationPrices(problem.source)
    best = _Best(_side(problem, permutations, "target"), _side(problem, permutations, "source"), permutations, limit)
    for side, end in ((best.forward, problem.source), (best.homeward, problem.target)):
        side.reach(end.layout.dims, 0.0, None, limit)
    while side := best.next_side():
        dims, least = side.pop()
        if least >= best.cost - _ROUNDING or dims in side.settled.get(side.held.counts(dims), ()):
            continue
        _settle(dims, side, best, most)
        _expand(dims, side, best, most, problem.source.coordinates is problem.target.coordinates)
        if best.is_enough(most):
            break
    return _route(problem, best), best.cost, best.looked


def _side(problem: Problem, permutations: PermutationPrices, far_is: Literal["target", "source"]) -> "_Side":
    """The forward side of the search if `far_is` is "target", the homeward side if it is "source"."""
    ends = (problem.source, problem.target)
    near, far = ends if far_is == "target" else ends[::-1]
    held = Holdings(near)
    steps = Neighbours(problem.room, near, far, held, permutations)
    first, early, each = steps.slices_from, steps.gathers_from, STEP_BEFORE_PERMUTATION
    if far_is == "source":
        first, early, each = steps.gathers_into, steps.slices_into, STEP

    def next_layouts(dims: ShardDims, spare: float) -> Iterator[tuple[ShardDims, float]]:
        yield from first(dims)
        if problem.takes_detours:
            yield from early(dims)
            yield from steps.permutes(dims, spare)
        yield from steps.all_to_alls(dims, each, spare)

    return _Side(held, LowerBound(held, near, far, far_is), next_layouts, far.layout.counts)


class _Side:
    """The forward or homeward side of the search: its next steps, its frontier, and its settled layouts.

    The frontier is the layouts that the side has reached, with the cost and the predecessor of each, and a heap of
    those to look at next.

    **Arguments:**

    - `held`: the pieces that devices hold under layouts over this side's factors.
    - `bound`: the lower bound on the cost between a layout and the other side's end.
    - `next_layouts`: yields the layouts one step away, with the cost of the step.
    - `far_counts`: the counts of the other side's end.
    """

    def __init__(self, held: Holdings, bound: LowerBound, next_layouts: NextLayouts, far_counts: Counts):
        self.held, self.bound, self.next_layouts, self.far_counts = held, bound, next_layouts, far_counts
        self.cost: dict[ShardDims, float] = {}
        self.parent: dict[ShardDims, ShardDims | None] = {}
        self.heap: list[tuple[float, float, int, ShardDims]] = []
        self.looked = 0  # the layouts whose lower bound was computed
        self.first_of_counts: dict[Counts, ShardDims] = {}
        self.settled: dict[Counts, dict[ShardDims, None]] = {}  # in the order in which they were

    def reach(
        self, dims: ShardDims, cost: float, parent: ShardDims | None, limit: float, nearest_first: bool = False
    ) -> bool:
        """Adds a layout to the frontier unless no path through it is new and cheaper than `limit`; whether it did.

        With `nearest_first`, layouts whose counts are nearest to the other end's come first, at any cost.
        """
        if cost + _ROUNDING >= min(limit, self.cost.get(dims, math.inf)):
            return False
        self.looked += 1
        estimate = self.bound(dims)
        if cost + estimate >= limit - _ROUNDING:
            return False
        counts, key = self.held.counts(dims), cost + estimate
        self.first_of_counts.setdefault(counts, dims)
        if parent is None:  # both ends are looked at first, since their neighbours may meet
            key = 0.0
        elif nearest_first:
            pairs = zip(counts, self.far_counts, strict=True)
            key = -1 / math.prod([math.lcm(count, far) // math.gcd(count, far) for count, far in pairs])
        self.cost[dims], self.parent[dims] = cost, parent
        heapq.heappush(self.heap, (key, estimate, self.looked, dims))
        return True

    def pop(self) -> tuple[ShardDims, float]:
        """Removes and returns the next layout, with the lower bound on the cost of a path through it."""
        _, estimate, _, dims = heapq.heappop(self.heap)
        return dims, self.cost[dims] + estimate

    def way_to(self, dims: ShardDims) -> list[ShardDims]:
        """The layouts from this side's end to `dims`."""
        way = [dims]
        while (parent := self.parent[way[-1]]) is not None:
            way.append(parent)
        return way[::-1]


@dataclasses.dataclass
class _Best:
    """Both sides of the search and the best path so far: its cost and the layouts before and after the crossing."""

    forward: _Side
    homeward: _Side
    permutations: PermutationPrices
    cost: float
    before: ShardDims | None = None
    after: ShardDims | None = None

    @property
    def looked(self) -> int:
        """The number of layouts and of permutations that were examined."""
        return self.forward.looked + self.homeward.looked + self.permutations.asked

    def is_enough(self, most: int) -> bool:
        return self.looked > most and self.cost < math.inf

    def next_side(self) -> _Side | None:
        """The side whose next layout has the lower key; `None` if both frontiers are empty."""
        sides = [side for side in (self.forward, self.homeward) if side.heap]
        return min(sides, key=lambda side: side.heap[0][:2], default=None)

    def other(self, side: _Side) -> _Side:
        return self.homeward if side is self.forward else self.forward


def _settle(dims: ShardDims, side: _Side, best: _Best, most: int) -> None:
    """Settles a layout, and tries a permutation to each settled layout of the other side that has the same shard
    counts.
    """
    counts, cost = side.held.counts(dims), side.cost[dims]
    side.settled.setdefault(counts, {})[dims] = None
    other = best.other(side)
    for match in other.settled.get(counts, ()):
        if best.cost - cost - other.cost[match] > _ROUNDING and not best.is_enough(most):
            _cross(dims, match, side, best)


def _expand(dims: ShardDims, side: _Side, best: _Best, most: int, same_factors: bool) -> None:
    """Adds the layouts one step away to the frontier, and updates `best` with the paths that they complete."""
    cost = side.cost[dims]
    for after, extra in side.next_layouts(dims, best.cost - cost):
        nearest_first = best.cost == math.inf and best.looked > most
        if side.reach(after, cost + extra, dims, best.cost, nearest_first):
            if same_factors:  # where the other side has reached this layout too, that makes a path
                _meet(after, after, 0.0, best)
            match = best.other(side).first_of_counts.get(side.held.counts(after))
            if best.cost == math.inf and match is not None:  # to get any path
                _cross(after, match, side, best)
        if best.is_enough(most):
            return


def _cross(dims: ShardDims, match: ShardDims, side: _Side, best: _Best) -> None:
    """Updates `best` with the path that permutes shards between the layout `dims` and the other side's layout
    `match`.
    """
    before, after = (dims, match) if side is best.forward else (match, dims)
    spare = best.cost - best.forward.cost[before] - best.homeward.cost[after]
    have, want = best.forward.held.numbers(before), best.homeward.held.numbers(after)
    share = 1 / best.forward.held.pieces(before)
    _meet(before, after, best.permutations.cost(have, want, share, spare), best)


def _meet(before: ShardDims, after: ShardDims, crossing: float, best: _Best) -> None:
    """Updates `best` if the path through the layouts `before` and `after` is cheaper."""
    paid = best.forward.cost.get(before, math.inf)
    total = paid + crossing + best.homeward.cost.get(after, math.inf)
    if total < best.cost - _ROUNDING:
        best.cost, best.before, best.after = total, before, after


def _route(problem: Problem, best: _Best) -> Route | None:
    if best.before is None or best.after is None:
        return None
    forward, homeward = best.forward.way_to(best.before), best.homeward.way_to(best.after)[::-1]
    before, after = (
        [dataclasses.replace(end.layout, dims=dims) for dims in way]
        for end, way in ((problem.source, forward), (problem.target, homeward))
    )
    return before, after
