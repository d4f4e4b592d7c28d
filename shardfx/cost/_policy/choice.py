"""The choice of what is kept: an order by the bytes that recomputing saves per second,
in which `fit` finds the border, and exchanges of values around it.
"""

import dataclasses
import functools as ft
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from ... import chips
from .recomputation import Kept, Recomputation
from .regions import ValueKey
from .work import Work, total


Keys = frozenset[ValueKey]

# The share of the values that a compiler stores at least if nothing is checkpointed.
# libtpu stored 37 % of those of 48 unrolled layers, and 25 % of those of 4.
_LEAST_KEPT_SHARE = 0.2

# Points that are carried on while values are taken away one by one.
_WIDTH = 8

# Guesses of the border before it is bisected, and exchanges around it.
_MOST_TRIALS = 4
_MOST_EXCHANGES = 3


class Point(NamedTuple):
    """Values that may be kept, and the consequences of keeping them in all regions.

    - `allowed`: the keys of the values that may be kept.
    - `kept`: the keys of those that the backward pass reads, and so are kept.
    - `bytes`: the bytes of these values, on one device.
    - `work`, `seconds`: the work of computing the others again on all devices together,
      and its time.
    - `offloaded`: the keys of the values in `kept` that are on the host.
    """

    allowed: Keys
    kept: Keys
    bytes: int
    work: Work
    seconds: float
    offloaded: Keys = frozenset()


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
    _known_by_region: dict[tuple[Recomputation, Keys], Kept] = dataclasses.field(
        default_factory=dict
    )

    @ft.cached_property
    def keys(self) -> Keys:
        """The keys of all values that can be kept."""
        return frozenset().union(
            *(region.bytes_by_key for region in self.recomputations)
        )

    def bytes_of(self, key: ValueKey) -> int:
        """The bytes of a value in one run of its region, on one device."""
        return max(region.bytes_by_key.get(key, 0) for region in self.recomputations)

    def point(self, allowed: Keys) -> Point:
        """The consequences of keeping the values with these keys in all regions: the
        bytes that they need, and the work of computing the other values again.
        """
        kept_of_regions = [
            self._kept(region, allowed) for region in self.recomputations
        ]
        work = total(kept.work for kept in kept_of_regions)
        return Point(
            allowed=allowed,
            kept=frozenset().union(*(kept.keys for kept in kept_of_regions)),
            bytes=sum(kept.bytes for kept in kept_of_regions),
            work=work,
            seconds=self.seconds(work),
        )

    def _kept(self, region: Recomputation, allowed: Keys) -> Kept:
        keys = allowed.intersection(region.bytes_by_key)
        if (region, keys) not in self._known_by_region:
            self._known_by_region[region, keys] = region.keeping(keys)
        return self._known_by_region[region, keys]

    def seconds(self, work: Work) -> float:
        """The time of some work on all devices together."""
        flops_seconds = work.flops / self.chip.flops()
        memory_seconds = work.bytes / self.chip.hbm_bytes_per_second
        return (flops_seconds + memory_seconds) / self.devices


def frontier(costs: Costs) -> list[Point]:
    """Points from the one that keeps all to the one that keeps nothing. Each needs
    fewer bytes and more time than the point before it.

    From each point, each value that it keeps is computed again instead, one at a time.
    The search goes on from those of the new points that save most bytes for their time.
    """
    start = costs.point(costs.keys)
    points: list[Point] = []
    layer = [start]
    while layer:
        allowed_next: set[Keys] = set()
        for point in layer:
            allowed_next.update(_smaller(costs, point))
        layer = _best(map(costs.point, sorted(allowed_next, key=sorted)))
        points += layer
        layer = _spread(layer)
    # A value can be computed from a larger one, which then is kept in its place.
    smaller_points = [point for point in points if point.bytes < start.bytes]
    return [start, *_best(smaller_points)]


def _smaller(costs: Costs, point: Point) -> Iterator[Keys]:
    """Yields, for each value that a point keeps, two sets of values that may be kept:
    without this value, and without the values that would then be kept in its place too.
    `allowed` of a point are the keys of values that may be kept, and `kept` those of
    them that the backward pass reads.
    """
    for key in point.kept:
        allowed = point.allowed - {key}
        yield allowed
        while exposed := costs.point(allowed).kept - point.kept:
            allowed -= exposed
        yield allowed


def _best(points: Iterable[Point]) -> list[Point]:
    """The points than which no other needs both fewer bytes and less time, the one with
    most bytes first.
    """
    best: list[Point] = []
    for point in sorted(points, key=lambda point: (point.bytes, point.seconds)):
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
    """The point of least time that exchanges lead to from `point`, with at most
    `limit_bytes` kept. An exchange takes one value or two: each that may be kept is
    then computed again, and each that is not may be kept.
    """
    values = sorted(costs.keys)
    exchanges = [{key} for key in values]
    exchanges += map(set, itertools.combinations(values, 2))
    while True:
        best = point
        for exchange in exchanges:
            other = costs.point(point.allowed ^ exchange)
            if other.bytes <= limit_bytes and other.seconds < best.seconds:
                best = other
        if best is point:
            return point
        point = best


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
    trial_of: Callable[[Point], Trial],
) -> Trial:
    """The trial of least time that fits; if none fits, the one of least memory.

    `trial_of` asks for the memory of a point. `other_bytes` is a first guess of the
    memory that is not for kept values, and `budget_bytes` is all memory.
    """
    keeping_all, *points = frontier(costs)
    least_bytes = other_bytes + _LEAST_KEPT_SHARE * keeping_all.bytes
    if least_bytes <= budget_bytes or not points:
        # It fits perhaps: a compiler stores a part of what may be kept.
        plain = trial_of(keeping_all)
        if plain.fits or not points:
            return plain
    best = _border(points, budget_bytes, other_bytes, trial_of)
    if not best.fits:
        return best
    # What the best point keeps, and what is free beside it.
    limit_bytes = best.point.bytes + budget_bytes - best.peak_bytes
    for _ in range(_MOST_EXCHANGES):
        point = improved(costs, best.point, limit_bytes)
        if point is best.point:
            break
        trial = trial_of(point)
        if trial.fits:
            return trial
        excess_bytes = max(trial.peak_bytes - budget_bytes, 1)
        limit_bytes = point.bytes - excess_bytes
    return best


def _border(
    points: Sequence[Point],
    budget_bytes: float,
    other_bytes: float,
    trial_of: Callable[[Point], Trial],
) -> Trial:
    """The trial of the first of `points` that fits; if none fits, that of least memory.
    `points` are a frontier, with most bytes first.

    The bytes of the values that a point keeps foresee its memory: the other memory is
    that of the point tried before. It is less if a value is kept whose computation takes
    memory itself, so the point that keeps more than the first one that fits is tried too.
    """
    trials: list[Trial] = []
    while points:
        # The point to try: a guess by its bytes at first, and then the middle one.
        number = len(points) // 2
        if len(trials) < _MOST_TRIALS:
            limit_bytes = budget_bytes - other_bytes
            number = sum(point.bytes > limit_bytes for point in points[:-1])
        trial = trial_of(points[number])
        trials.append(trial)
        other_bytes = trial.peak_bytes - trial.point.bytes
        if trial.fits:
            points = points[:number]
        else:
            points = points[number + 1 :]

    fitting = [trial for trial in trials if trial.fits]
    if fitting:
        return min(fitting, key=lambda trial: trial.point.seconds)
    return min(trials, key=lambda trial: trial.peak_bytes)


def with_offloads(costs: Costs, point: Point) -> Point:
    """The point, with values on the host in place of computing them again, as far as
    the layers that compute them take as long as the link to the host.

    The value goes first that saves most time per byte. A point is a set of values that
    are kept, with its costs.
    """
    kept = point.kept
    while True:
        best = point
        best_rate = 0.0
        for key in sorted(costs.keys - kept - point.offloaded):
            offloaded = point.offloaded | {key}
            other = costs.point(kept | offloaded)
            saved_seconds = point.seconds - other.seconds
            rate = saved_seconds / max(costs.bytes_of(key), 1)
            if rate > best_rate and _is_hidden(costs, offloaded):
                best = other._replace(offloaded=offloaded & other.kept)
                best_rate = rate
        if best is point:
            return point
        point = best


def _is_hidden(costs: Costs, offloaded: Keys) -> bool:
    """Whether the link to the host takes the values of each layer (`region`) in the
    time of the layer's forward pass. `offloaded` has the keys of values of all layers.
    """
    for region in costs.recomputations:
        sent_bytes = sum(region.bytes_by_key.get(key, 0) for key in offloaded)
        link_seconds = sent_bytes / costs.chip.host_bytes_per_second
        if link_seconds > costs.seconds(region.forward):
            return False
    return True
