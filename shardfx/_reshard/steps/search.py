"""The search for the cheapest path between two layouts: a bidirectional A* over slices,
all-to-alls, one permutation and all-gathers.

No step may need more memory than about one shard to read and one to write, so gathering
the whole array is no solution. Rink et al. 2021 (arXiv 2112.01075) show that four kinds
of steps suffice:

- a *slice* keeps a chunk of each shard; it costs nothing;
- an *all-to-all* within replica groups moves sub-axes (mesh axes or parts of them) from
  one dimension to another;
- a *permutation* sends every device's shard to another device;
- an *all-gather* concatenates the shards of a replica group on each of its devices.

A path begins with slices and all-to-alls on the source's sub-axes, since traffic is
least while shards are small. Then it has one permutation, the *crossing*, and ends with
all-to-alls and all-gathers on the target's sub-axes. `Problem` allows exceptions.
`prices` defines the cost of a path.

The search has two halves. The *forward half* starts at the source, and the *backward
half* at the target. Each half has a heap of layouts, ordered by a lower bound on the
cost of a path through the layout: the known cost to it, plus the `LowerBound` of the
rest. The search takes the layout with the smallest lower bound, and *settles* it: it
tries a crossing to every settled layout of the other half with the same shard counts,
and adds the neighbours to the heap. Layouts that cannot be on a cheaper path than the
best one so far are dropped.

Some moves have too many layouts, so the search ends after a number of them, with the
best path so far. It runs twice. The first run splits no dimension into more shards than
the least common multiple of its counts in source and target, so it has few layouts. The
second run drops all layouts that cannot beat the first path. If no path was found
within the budget, the layouts whose counts are nearest to those of the other half's
start come first, at any cost.

Another design was tried beside this one: a single exchange of boxes to a layout that is
the target, sharded further, and then all-gathers. By a model of links it takes 1.12
times as long as these steps on a torus, summed over 300 moves, and 0.99 on switches. It
is not used: on a torus, 85 of the moves get slower and 45 faster. The worst, `P("a",
"b")` to `P(None, "a", "b")` on 6x4, takes 4 times as long, since its boxes have several
sizes, and so many rounds, where the factors of two mesh axes differ.
"""

import dataclasses
import heapq
import itertools as it
import math
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from .layout import Counts, FineLayout, ShardDims, Shards, StepLayout, link_groups
from .lower_bound import LowerBound
from .neighbours import Neighbours
from .prices import STEP, STEP_BEFORE_PERMUTATION, PermutationPrices
from .splits import primes


# Costs that differ by less are equal: the difference comes from the order of additions.
_ROUNDING = 1e-12
_FEW_LAYOUTS = 900
_MOST_LAYOUTS = 3000


class Route(NamedTuple):
    """The layouts along a path: over the source's sub-axes, from the source on, and
    over the target's, to the target.
    """

    before: list[StepLayout]
    after: list[StepLayout]


# The layouts one step away that are reached for less than a given cost, each with the
# step's cost.
NextLayouts = Callable[[ShardDims, float], Iterator[tuple[ShardDims, float]]]


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """The input of the search: the layouts before and after a move, over sub-axes.
    `divisible_counts` has a number for each dimension, which the number of shards along
    it must divide.

    With `takes_detours`, the search also tries all-gathers before the crossing, slices
    after it, and permutations of the sub-axes of a dimension. These steps help in three
    cases: sub-axes of different sizes block each other; a byte costs more along some
    sub-axes than along others; source and target have no sub-axes in common.

    A byte of a permutation costs `permute_price` times as much as one of an all-gather,
    and at least as much.
    """

    divisible_counts: Counts
    source: FineLayout
    target: FineLayout
    takes_detours: bool = False
    permute_price: float = 1.0


class Exploration(NamedTuple):
    """The result of `explore`: the cheapest path, its cost, and the number of layouts
    examined.
    """

    route: Route | None
    cost: float
    examined: int


def cheapest_route(problem: Problem) -> Route | None:
    """Returns the layouts along the cheapest path from the source to the target of a
    move. If the search ends before it has examined all layouts, the path is the best
    one found so far. `None` if no steps along these sub-axes lead from source to
    target.

    The first run tries few layouts: no dimension has more shards than the least common
    multiple of its counts in source and target. The second run tries all layouts whose
    paths can be cheaper than the first path. It is left out if it has nothing more to
    try, or if the first run has used up the number of layouts.
    """
    source = problem.source.layout
    target = problem.target.layout
    most_layouts = _most_layouts(problem.source)
    narrow = dataclasses.replace(
        problem, divisible_counts=tuple(map(math.lcm, source.counts, target.counts))
    )
    first_run = explore(narrow, most_layouts // 2, limit=math.inf)

    prime_sizes = set(it.chain.from_iterable(map(primes, source.sizes)))
    # Detours are all-gathers before the crossing, slices after it, and permutations.
    are_sub_axes_unequal = len(prime_sizes) > 1 or len({*source.weights}) > 1
    has_other_sub_axes = problem.source.coordinates is not problem.target.coordinates
    takes_detours = are_sub_axes_unequal or has_other_sub_axes
    is_wider = takes_detours or narrow.divisible_counts != problem.divisible_counts
    has_layouts_left = first_run.examined < most_layouts
    if first_run.route is not None and not (is_wider and has_layouts_left):
        return first_run.route
    wide = dataclasses.replace(problem, takes_detours=takes_detours)
    second_run = explore(wide, most_layouts - first_run.examined, limit=first_run.cost)
    return second_run.route or first_run.route


def _most_layouts(source: FineLayout) -> int:
    """The number of layouts that the search examines in a fraction of a second: fewer
    for more devices, since each layout takes arrays with an element for each device,
    and fewer if some axes are slow, since each weight takes such arrays.
    """
    devices = source.layout.size
    most = _FEW_LAYOUTS
    if devices > 16:
        most = min(_MOST_LAYOUTS, max(_FEW_LAYOUTS // 4, 8_000_000 // devices))
    return most // len(link_groups(source))


def explore(problem: Problem, most_layouts: int, limit: float) -> Exploration:
    """Searches for the cheapest path whose cost is below `limit`, among about
    `most_layouts` layouts. If `limit` is infinite, it goes on until it has found some
    path.
    """
    permutations = PermutationPrices(problem.source, problem.permute_price)
    state = _State(
        forward=_half(problem, permutations, "target"),
        backward=_half(problem, permutations, "source"),
        permutations=permutations,
        most_layouts=most_layouts,
        cost=limit,
    )
    state.forward.reach(problem.source.layout.dims, 0.0, None, limit)
    state.backward.reach(problem.target.layout.dims, 0.0, None, limit)
    has_same_sub_axes = problem.source.coordinates is problem.target.coordinates
    # `state.cost` is the cost of the best path so far.
    while half := state.next_half():
        dims, least_cost = half.pop()
        if least_cost >= state.cost - _ROUNDING or half.has_settled(dims):
            continue
        _settle(dims, half, state)
        _expand(dims, half, state, has_same_sub_axes)
        if state.is_enough():
            break
    return Exploration(
        route=_route(problem, state), cost=state.cost, examined=state.examined
    )


def _half(
    problem: Problem,
    permutations: PermutationPrices,
    far_is: Literal["target", "source"],
) -> "_Half":
    """Returns the half that searches for the end `far_is` of the move: the forward half
    for "target", the backward half for "source".
    """
    is_forward = far_is == "target"
    near = problem.source if is_forward else problem.target
    far = problem.target if is_forward else problem.source
    shards = Shards(near)
    steps = Neighbours(
        divisible_counts=problem.divisible_counts,
        near=near,
        far=far,
        shards=shards,
        permutations=permutations,
    )
    # Most moves need only slices before the crossing, all-gathers after it, and
    # all-to-alls. All-gathers before it and slices after it are detours.
    if is_forward:
        usual = steps.slices_from
        detours = steps.gathers_from
        step_cost = STEP_BEFORE_PERMUTATION
    else:
        usual = steps.gathers_into
        detours = steps.slices_into
        step_cost = STEP

    def next_layouts(
        dims: ShardDims,
        limit: float,
    ) -> Iterator[tuple[ShardDims, float]]:
        yield from usual(dims)
        if problem.takes_detours:
            yield from detours(dims)
            yield from steps.permutes(dims, limit)
        yield from steps.all_to_alls(dims, step_cost, limit)

    return _Half(
        shards,
        bound=LowerBound(shards=shards, near=near, far=far, far_is=far_is),
        next_layouts=next_layouts,
        far_counts=far.layout.counts,
    )


class _HeapEntry(NamedTuple):
    """A layout in the heap. `key` orders the heap, then `estimate`, the lower bound on
    the cost from the layout to the other half's start, then `number`, the order in
    which layouts were reached.
    """

    key: float
    estimate: float
    number: int
    dims: ShardDims


class _Half:
    """One half of the search. It keeps each layout that it has reached, with the cost
    of the path to it and the layout before it on this path, and the heap of layouts to
    examine next.

    `bound` is the lower bound on the cost from a layout to the start of the other half,
    and `far_counts` has the shard counts of that start. `next_layouts` yields the
    layouts one step away.
    """

    def __init__(
        self,
        shards: Shards,
        bound: LowerBound,
        next_layouts: NextLayouts,
        far_counts: Counts,
    ):
        self.shards = shards
        # The lower bound on the cost from a layout to the other half's start, the
        # layouts one step away from a layout, and the shard counts of that start.
        self.bound = bound
        self.next_layouts = next_layouts
        self.far_counts = far_counts
        # For each layout that was reached, the cost of the path to it, and the layout
        # before it on this path.
        self.cost_to: dict[ShardDims, float] = {}
        self.parent_of: dict[ShardDims, ShardDims | None] = {}
        self.heap: list[_HeapEntry] = []
        # The number of layouts whose lower bound was computed.
        self.examined = 0
        # For each shard counts, the layout with them that was reached first.
        self.first_of_counts: dict[Counts, ShardDims] = {}
        # For each shard counts, the settled layouts with them, in the order of settling.
        self.settled: dict[Counts, dict[ShardDims, None]] = {}

    def reach(
        self,
        dims: ShardDims,
        cost: float,
        parent: ShardDims | None,
        limit: float,
        nearest_first: bool = False,
    ) -> bool:
        """Adds the layout `dims` to the heap if a path through it can cost less than
        `limit`, the cost of the best path so far. Returns whether it was added. A
        layout that was reached before at the same or less `cost` is not added.

        `parent` is the layout before it on the path; `None` at the start. With
        `nearest_first`, the heap is ordered by how near shard counts are to
        `far_counts`, instead of by the lower bound.
        """
        if cost + _ROUNDING >= min(limit, self.cost_to.get(dims, math.inf)):
            return False
        self.examined += 1
        estimate = self.bound(dims)
        if cost + estimate >= limit - _ROUNDING:
            return False
        counts = self.shards.counts(dims)
        self.first_of_counts.setdefault(counts, dims)
        key = cost + estimate
        if parent is None:
            # Source and target come first, since their neighbours may meet.
            key = 0.0
        elif nearest_first:
            # Negative, so that these layouts come before all that are ordered by cost.
            key = -1 / self._distance(counts)
        self.cost_to[dims] = cost
        self.parent_of[dims] = parent
        heapq.heappush(self.heap, _HeapEntry(key, estimate, self.examined, dims))
        return True

    def _distance(self, counts: Counts) -> int:
        """How far shard counts are from those of the other half's start: the product of
        the factors in which they differ; 1 if equal.
        """
        pairs = zip(counts, self.far_counts, strict=True)
        return math.prod(
            [math.lcm(count, far) // math.gcd(count, far) for count, far in pairs]
        )

    def has_settled(self, dims: ShardDims) -> bool:
        """Whether a layout was taken from the heap of this half."""
        return dims in self.settled.get(self.shards.counts(dims), ())

    def pop(self) -> tuple[ShardDims, float]:
        """Removes the first layout from the heap. Returns it, and a lower bound on the
        cost of any path through it.
        """
        entry = heapq.heappop(self.heap)
        return entry.dims, self.cost_to[entry.dims] + entry.estimate

    def layouts_to(self, dims: ShardDims) -> list[ShardDims]:
        """Returns the layouts on the path from the layout at which this half starts to
        `dims`.
        """
        layouts = [dims]
        while (parent := self.parent_of[layouts[-1]]) is not None:
            layouts.append(parent)
        return layouts[::-1]


@dataclasses.dataclass
class _State:
    """The state of the search: both halves, and the `cost` of the best path so far,
    which crosses from `before`, a layout of the forward half, to `after`, a layout of
    the backward half. Both are `None` while there is no path. `most_layouts` is the
    number of layouts after which the search ends.
    """

    forward: _Half
    backward: _Half
    permutations: PermutationPrices
    most_layouts: int
    cost: float
    before: ShardDims | None = None
    after: ShardDims | None = None

    @property
    def examined(self) -> int:
        """The number of layouts whose lower bound was computed, plus the number of
        permutations whose bytes over expensive axes were computed: both take time.
        """
        return (
            self.forward.examined + self.backward.examined + self.permutations.computed
        )

    def is_enough(self) -> bool:
        """Whether the search has a path, and has examined `most_layouts` layouts."""
        return self.examined > self.most_layouts and self.cost < math.inf

    def next_half(self) -> _Half | None:
        """The half whose first layout has the smaller lower bound; `None` if the heaps
        of both are empty.
        """
        halves = [half for half in (self.forward, self.backward) if half.heap]
        return min(
            halves,
            key=lambda half: (half.heap[0].key, half.heap[0].estimate),
            default=None,
        )

    def other(self, half: _Half) -> _Half:
        """The half that is not `half`."""
        return self.backward if half is self.forward else self.forward


def _settle(dims: ShardDims, half: _Half, state: _State) -> None:
    """Tries a crossing (a permutation from one half to the other) from the layout
    `dims`, just taken from the heap of `half`, to each settled layout of the other half
    with the same shard counts. The cheapest path so far is kept in `state`.
    """
    counts = half.shards.counts(dims)
    half.settled.setdefault(counts, {})[dims] = None
    cost = half.cost_to[dims]
    other = state.other(half)
    for match in other.settled.get(counts, ()):
        is_cheaper = state.cost - cost - other.cost_to[match] > _ROUNDING
        if is_cheaper and not state.is_enough():
            _cross(dims, match, half, state)


def _expand(
    dims: ShardDims,
    half: _Half,
    state: _State,
    has_same_sub_axes: bool,
) -> None:
    """Adds the layouts one step away from `dims`, a layout of `half`, to the heap, and
    completes paths through them. With `has_same_sub_axes`, both halves have the same
    sub-axes, so a layout that both reach completes a path.
    """
    cost = half.cost_to[dims]
    other = state.other(half)
    for after, step_cost in half.next_layouts(dims, state.cost - cost):
        # Without a path after so many layouts, any path will do.
        nearest_first = state.cost == math.inf and state.examined > state.most_layouts
        is_reached = half.reach(
            dims=after,
            cost=cost + step_cost,
            parent=dims,
            limit=state.cost,
            nearest_first=nearest_first,
        )
        if is_reached:
            if has_same_sub_axes:
                # If the other half has reached this layout too, a path is complete.
                _meet(after, after, 0.0, state)
            match = other.first_of_counts.get(half.shards.counts(after))
            if state.cost == math.inf and match is not None:
                # The first path found, whatever its cost, is a limit for the others.
                _cross(after, match, half, state)
        if state.is_enough():
            return


def _cross(dims: ShardDims, match: ShardDims, half: _Half, state: _State) -> None:
    """Updates `state` if the path with a crossing between `dims` and `match` is cheaper
    than the best one so far. `dims` is a layout of `half`, and `match` is one of the
    other half.
    """
    is_forward = half is state.forward
    before = dims if is_forward else match
    after = match if is_forward else dims
    shards = state.forward.shards
    crossing_cost = state.permutations.cost(
        have=shards.numbers(before),
        want=state.backward.shards.numbers(after),
        share=1 / shards.shard_count(before),
        limit=state.cost
        - state.forward.cost_to[before]
        - state.backward.cost_to[after],
    )
    _meet(before, after, crossing_cost, state)


def _meet(before: ShardDims, after: ShardDims, crossing: float, state: _State) -> None:
    """Updates `state` if the path that crosses from `before`, a layout of the forward
    half, to `after`, a layout of the backward half, is cheaper than the best one so
    far. The crossing costs `crossing`.
    """
    cost_before = state.forward.cost_to.get(before, math.inf)
    cost_after = state.backward.cost_to.get(after, math.inf)
    total = cost_before + crossing + cost_after
    if total < state.cost - _ROUNDING:
        state.cost = total
        state.before = before
        state.after = after


def _route(problem: Problem, state: _State) -> Route | None:
    """The layouts along the best path of `state`; `None` if it has no path."""
    if state.before is None or state.after is None:
        return None
    source = problem.source.layout
    target = problem.target.layout
    forward = state.forward.layouts_to(state.before)
    backward = reversed(state.backward.layouts_to(state.after))
    return Route(
        before=[dataclasses.replace(source, dims=dims) for dims in forward],
        after=[dataclasses.replace(target, dims=dims) for dims in backward],
    )
