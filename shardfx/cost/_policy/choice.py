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
_LEAST_STACKED, _LEAST_OUTSIDE = 0.4, 0.2

# Points that are carried on while values are taken away one by one.
_WIDTH = 8

# Guesses of the border before it is bisected, and exchanges around it.
_MOST_TRIALS, _MOST_EXCHANGES = 4, 3


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
        return frozenset().union(*(one.keys for one in self.recomputations))

    def bytes_of(self, key: ValueKey) -> int:
        """The bytes of a value in one run of its region, on one device."""
        return max(one.bytes_of.get(key, 0) for one in self.recomputations)

    @property
    def stacked_bytes(self) -> int:
        """The bytes that loops keep if nothing is checkpointed. Each iteration writes
        its values into arrays, so compilers cannot compute them again by themselves.
        """
        bodies = [one for one in self.recomputations if one.is_body]
        return sum(one.keeping(one.keys).bytes for one in bodies)

    @property
    def forward(self) -> Work:
        """The work of all regions in the forward pass."""
        return total(one.forward.times(one.count) for one in self.recomputations)

    def keeping(self, keys: Keys) -> Kept:
        """The consequences of keeping the values with these keys in all regions."""
        size = 0
        works: list[Work] = []
        used: set[ValueKey] = set()
        for number, region in enumerate(self.recomputations):
            question = number, keys & region.keys
            if question not in self._known:
                self._known[question] = region.keeping(question[1])
            kept = self._known[question]
            size += kept.bytes
            works.append(kept.work)
            used |= kept.used
        return Kept(size, total(works), frozenset(used))

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
    return Point(allowed, kept, costs.seconds(kept.work))


def frontier(costs: Costs) -> list[Point]:
    """Points from the one that keeps all to the one that keeps nothing. Each needs
    fewer bytes and more time than the point before it.

    A value that is kept is computed again, in turn each of those that are kept, and the
    points are carried on that save most bytes for their time.
    """
    start = point_of(costs, costs.keys)
    points = [start]
    layer = [start]
    while layer:
        smaller = {allowed for point in layer for allowed in _smaller(costs, point)}
        ordered = sorted(smaller, key=sorted)
        layer = _best([point_of(costs, allowed) for allowed in ordered])
        points += layer
        layer = _spread(layer)
    return [start, *_best(points[1:])]


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
    best: list[Point] = []
    for point in sorted(points, key=lambda point: (point.kept.bytes, point.seconds)):
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
    points = frontier(costs)
    stacked = costs.stacked_bytes
    least_bytes = _LEAST_STACKED * stacked
    least_bytes += _LEAST_OUTSIDE * (points[0].kept.bytes - stacked)
    if other_bytes + least_bytes <= budget_bytes:
        plain = try_point(points[0])
        if plain.fits:
            return plain
    best = _border(points[1:], budget_bytes, other_bytes, try_point)
    if not best.fits:
        return best
    limit = best.point.kept.bytes + budget_bytes - best.peak_bytes
    for _ in range(_MOST_EXCHANGES):
        point = improved(costs, best.point, limit)
        if point is best.point:
            break
        trial = try_point(point)
        if trial.fits:
            return trial
        limit = point.kept.bytes - max(trial.peak_bytes - budget_bytes, 1)
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
    first, last = 0, len(points) - 1
    while first <= last:
        room = budget_bytes - other_bytes
        foreseen = [
            number
            for number in range(first, last + 1)
            if points[number].kept.bytes <= room
        ]
        number = min(foreseen, default=last)
        if len(trials) >= _MOST_TRIALS:
            number = (first + last) // 2
        trial = try_point(points[number])
        trials.append(trial)
        other_bytes = trial.peak_bytes - points[number].kept.bytes
        if trial.fits:
            last = number - 1
            is_next_too_large = (
                number == 0
                or points[number - 1].kept.bytes + other_bytes > budget_bytes
            )
            if is_next_too_large:
                break
        else:
            first = number + 1

    fitting = [trial for trial in trials if trial.fits]
    if fitting:
        return min(fitting, key=lambda trial: trial.point.seconds)
    return min(trials, key=lambda trial: trial.peak_bytes)


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
            more = offloaded | {key}
            other = point_of(costs, kept | more)
            rate = (point.seconds - other.seconds) / max(costs.bytes_of(key), 1)
            if rate > best_rate and _is_hidden(costs, more):
                best = other._replace(offloaded=more & other.kept.used)
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
        size = sum(region.bytes_of.get(key, 0) for key in offloaded)
        if size / costs.chip.host_bytes_per_second > costs.seconds(region.forward):
            return False
    return True
