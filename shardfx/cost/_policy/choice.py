"""The choice of what is kept: an order by the bytes that recomputing saves per second,
in which `fit` finds the border, and exchanges of values around it.
"""

import dataclasses
import functools as ft
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ... import chips
from .recomputation import Kept, Recomputation
from .regions import ValueKey
from .work import Work, total


Keys = frozenset[ValueKey]

# The shares of the values within loops, and of those outside, that a compiler stores at
# least if nothing is checkpointed. libtpu stored 37 % of those of 48 unrolled layers,
# and 25 % of those of 4.
_LEAST_STACKED = 0.4
_LEAST_OUTSIDE = 0.2

# Points that are carried on while values are taken away one by one.
_WIDTH = 8

# Guesses of the border before it is bisected, and exchanges around it.
_MOST_TRIALS = 4
_MOST_EXCHANGES = 3


@dataclasses.dataclass(frozen=True, eq=False)
class Costs:
    """The costs of keeping the same values in several regions.

    - `recomputations`: the different regions.
    - `chip`: the chip that computes them.
    - `devices`: the number of devices that share the work.
    """

    recomputations: tuple[Recomputation, ...]
    chip: chips.Chip
    devices: int
    _known: dict[tuple[int, Keys], Kept] = dataclasses.field(default_factory=dict)

    @ft.cached_property
    def keys(self) -> Keys:
        """The keys of all values that can be kept."""
        keys: set[ValueKey] = set()
        for region in self.recomputations:
            keys |= region.keys
        return frozenset(keys)

    def bytes_of(self, key: ValueKey) -> int:
        """The bytes of a value in one run of its region, on one device."""
        return max(region.bytes_of.get(key, 0) for region in self.recomputations)

    @property
    def stacked_bytes(self) -> int:
        """The bytes that loops keep if nothing is checkpointed. Each iteration writes
        its values into arrays, so compilers cannot compute them again by themselves.
        """
        stacked_bytes = 0
        for region in self.recomputations:
            if region.is_body:
                stacked_bytes += region.keeping(region.keys).bytes
        return stacked_bytes

    @property
    def forward(self) -> Work:
        """The work of all regions in the forward pass."""
        return total(
            region.forward.times(region.count) for region in self.recomputations
        )

    def keeping(self, keys: Keys) -> Kept:
        """The consequences of keeping the values with these keys in all regions."""
        kept_bytes = 0
        works: list[Work] = []
        used: set[ValueKey] = set()
        for number, region in enumerate(self.recomputations):
            kept_keys = keys & region.keys
            kept = self._known.get((number, kept_keys))
            if kept is None:
                kept = region.keeping(kept_keys)
                self._known[number, kept_keys] = kept
            kept_bytes += kept.bytes
            works.append(kept.work)
            used |= kept.used
        return Kept(bytes=kept_bytes, work=total(works), used=frozenset(used))

    def seconds(self, work: Work) -> float:
        """The time of some work on all devices together."""
        flops_per_second = self.chip.flops()
        bytes_per_second = self.chip.hbm_bytes_per_second
        seconds = work.flops / flops_per_second + work.bytes / bytes_per_second
        return seconds / self.devices


class Point(NamedTuple):
    """Values that may be kept, and the consequences of keeping them. Those in
    `offloaded` are on the host.
    """

    allowed: Keys
    kept: Kept
    seconds: float
    offloaded: Keys = frozenset()


def point_of(costs: Costs, allowed: Keys) -> Point:
    kept = costs.keeping(allowed)
    return Point(allowed=allowed, kept=kept, seconds=costs.seconds(kept.work))


def frontier(costs: Costs) -> list[Point]:
    """Points from the one that keeps all to the one that keeps nothing. Each needs
    fewer bytes and more time than the point before it.

    A value that is kept is computed again, in turn each of those that are kept, and the
    points are carried on that save most bytes for their time.
    """
    start = point_of(costs, costs.keys)
    points: list[Point] = []
    layer = [start]
    while layer:
        smaller: set[Keys] = set()
        for point in layer:
            smaller.update(_smaller(costs, point))
        layer_points = [
            point_of(costs, allowed) for allowed in sorted(smaller, key=sorted)
        ]
        layer = _best(layer_points)
        points += layer
        layer = _spread(layer)
    return [start, *_best(points)]


def _smaller(costs: Costs, point: Point) -> Iterator[Keys]:
    """Yields the values that may be kept if one more is computed again; and if those
    are too that would be kept in its place.
    """
    for key in point.kept.used:
        allowed = point.allowed - {key}
        yield allowed
        while exposed := costs.keeping(allowed).used - point.kept.used:
            allowed -= exposed
        yield allowed


def _best(points: Sequence[Point]) -> list[Point]:
    """The points for which no other has fewer bytes and as little time, the one with
    most bytes first.
    """
    by_bytes = sorted(points, key=lambda point: (point.kept.bytes, point.seconds))
    best: list[Point] = []
    for point in by_bytes:
        if not best or point.seconds < best[-1].seconds:
            best.append(point)
    best.reverse()
    return best


def _spread(points: list[Point]) -> list[Point]:
    """At most `_WIDTH` of the points, spread evenly."""
    if len(points) <= _WIDTH:
        return points
    step = (len(points) - 1) / (_WIDTH - 1)
    return [points[round(number * step)] for number in range(_WIDTH)]


def improved(costs: Costs, point: Point, limit_bytes: float) -> Point:
    """The point of least time that single values and pairs of them lead to from
    `point`, with at most `limit_bytes` kept.
    """
    candidates = sorted(costs.keys)
    while True:
        best = point
        for allowed in _exchanges(point.allowed, candidates):
            other = point_of(costs, allowed)
            if other.kept.bytes <= limit_bytes and other.seconds < best.seconds:
                best = other
        if best is point:
            return point
        point = best


def _exchanges(allowed: Keys, candidates: Sequence[ValueKey]) -> Iterator[Keys]:
    for key in candidates:
        yield allowed ^ {key}
    for pair in itertools.combinations(candidates, 2):
        yield allowed ^ set(pair)


class Trial(NamedTuple):
    """A point with its peak memory on one device, which may be foreseen, and whether it
    fits.
    """

    point: Point
    peak_bytes: int
    fits: bool
    is_counted: bool


def chosen(
    costs: Costs,
    budget_bytes: float,
    other_bytes: float,
    try_point: Callable[[Point], Trial],
) -> Trial:
    """The trial of least time that fits; if none fits, the one of least memory.

    `try_point` asks for the memory of a point. `other_bytes` is a first guess of the
    memory that is not for kept values.
    """
    keeping_all, *points = frontier(costs)
    stacked_bytes = costs.stacked_bytes
    outside_bytes = keeping_all.kept.bytes - stacked_bytes
    least_bytes = _LEAST_STACKED * stacked_bytes + _LEAST_OUTSIDE * outside_bytes
    if other_bytes + least_bytes <= budget_bytes:
        plain = try_point(keeping_all)
        if plain.fits:
            return plain
    best = _border(points, budget_bytes, other_bytes, try_point)
    if not best.fits:
        return best
    limit_bytes = best.point.kept.bytes + budget_bytes - best.peak_bytes
    for _ in range(_MOST_EXCHANGES):
        point = improved(costs, best.point, limit_bytes)
        if point is best.point:
            break
        trial = try_point(point)
        if trial.fits:
            return trial
        excess_bytes = max(trial.peak_bytes - budget_bytes, 1)
        limit_bytes = point.kept.bytes - excess_bytes
    return best


def _border(
    points: Sequence[Point],
    budget_bytes: float,
    other_bytes: float,
    try_point: Callable[[Point], Trial],
) -> Trial:
    """The trial of the first point that fits; if none fits, that of least memory.

    The bytes of the values that a point keeps foresee its memory: the other memory is
    that of the point tried before.
    """
    trials: list[Trial] = []
    first = 0
    last = len(points) - 1
    while first <= last:
        if len(trials) < _MOST_TRIALS:
            limit_bytes = budget_bytes - other_bytes
            number = _first_within(points, first, last, limit_bytes)
        else:
            number = (first + last) // 2
        point = points[number]
        trial = try_point(point)
        trials.append(trial)
        other_bytes = trial.peak_bytes - point.kept.bytes
        if not trial.fits:
            first = number + 1
            continue
        last = number - 1
        if number == 0 or points[last].kept.bytes + other_bytes > budget_bytes:
            break

    fitting = [trial for trial in trials if trial.fits]
    if fitting:
        return min(fitting, key=lambda trial: trial.point.seconds)
    return min(trials, key=lambda trial: trial.peak_bytes)


def _first_within(
    points: Sequence[Point],
    first: int,
    last: int,
    limit_bytes: float,
) -> int:
    """The number of the first point from `first` on that keeps at most `limit_bytes`;
    `last` if none does.
    """
    for number in range(first, last):
        if points[number].kept.bytes <= limit_bytes:
            return number
    return last


def with_offloads(costs: Costs, point: Point) -> Point:
    """The point, with values on the host in place of computing them again, as far as
    the layers that compute them take as long as the link to the host.

    The value goes first that saves most time per byte.
    """
    kept = point.kept.used
    offloaded: Keys = frozenset()
    while True:
        best = point
        best_rate = 0.0
        for key in sorted(costs.keys - kept - offloaded):
            larger = offloaded | {key}
            other = point_of(costs, kept | larger)
            saved_seconds = point.seconds - other.seconds
            rate = saved_seconds / max(costs.bytes_of(key), 1)
            if rate > best_rate and _is_hidden(costs, larger):
                best = other._replace(offloaded=larger & other.kept.used)
                best_rate = rate
        if best is point:
            return point
        point = best
        offloaded = point.offloaded


def _is_hidden(costs: Costs, offloaded: Keys) -> bool:
    """Whether the link to the host takes the values of each layer in the time in which
    the layer is computed.
    """
    for region in costs.recomputations:
        sent_bytes = sum(region.bytes_of.get(key, 0) for key in offloaded)
        link_seconds = sent_bytes / costs.chip.host_bytes_per_second
        if link_seconds > costs.seconds(region.forward):
            return False
    return True
