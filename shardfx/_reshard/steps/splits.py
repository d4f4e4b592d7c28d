"""The factors that each mesh axis is split into, so that the layouts of both ends of a move can be expressed in them.

An axis of 12 devices can be counted as 2 x 2 x 3, as 2 x 3 x 2 or as 3 x 2 x 2. Two questions are answered here:

1. *In which order?* `order_primes` takes for each axis the order of its primes by which it has most factors in common
   with the other end's axes. Such a factor tells the same devices apart in both meshes.
2. *Which primes belong together?* Every factor more makes the search larger. `join_primes` makes one factor of
   neighbouring primes of an axis, unless something has to tell them apart:
   the other end, if it holds one of them without the other, or in another place;
   or a dimension, if the other end's factors cut it at just that place.

A factor that is split for one end may have to be split at the other end for that reason. So the two ends are looked at
in turn until neither asks for more.

The second step is there for its cost alone. It was measured on random moves: with prime factors only, planning on 192
devices takes 4 times as long in the mean, and on 192 devices in four slices up to 22 seconds, not 0.2.

`refine` expresses both ends of a move in these factors.
"""

import dataclasses
import functools as ft
import itertools as it
import math
import operator
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from .layout import StepLayout, digits, piece_index, positions


# For each mesh axis, the sizes of its factors, major-most first.
Split = Sequence[Sequence[int]]

_MOST_ORDERS = 64


def primes(number: int) -> tuple[int, ...]:
    """The prime factors of `number`, ascending, with multiplicity."""
    found, factor = [], 2
    while factor * factor <= number:
        while number % factor == 0:
            found.append(factor)
            number //= factor
        factor += 1
    return tuple(found + [number] if number > 1 else found)


def order_primes(src: StepLayout, dst: StepLayout, places: Sequence[np.ndarray]) -> list[Split]:
    """For each axis of both meshes, the order of its primes with the most factors in common with the other mesh.

    **Arguments:**

    - `src`, `dst`: the ends.
    - `places`: for both meshes, the position of each device.

    **Returns:**

    The factors of the source's axes and those of the target's.
    """
    if all(len(_orders(size)) == 1 for size in (*src.sizes, *dst.sizes)):
        return [[_orders(size)[0] for size in layout.sizes] for layout in (src, dst)]
    known = [
        [_digit_keys(row, size) for row, size in zip(digits(layout.sizes, place), layout.sizes, strict=True)]
        for layout, place in zip((src, dst), places, strict=True)
    ]
    # The source's axes have as many digits as possible in common with any order of the target's primes; then the
    # target's axes with the chosen orders of the source.
    possible = {key for keys in known[1] for key in keys.values()}
    first = _best_orders(src, known[0], possible, [_counts_on_the_way(dst, dim) for dim in range(len(dst.dims))])
    taken = {keys[digit] for keys, order in zip(known[0], first, strict=True) for digit in _digits_of(order)}
    counts = [_counts_on_the_way(src, dim, first) for dim in range(len(src.dims))]
    return [first, _best_orders(dst, known[1], taken, counts)]


class _Digit(NamedTuple):
    """A factor of an axis: positions along the axis that differ by `stride` differ by one in this factor."""

    stride: int
    size: int


@ft.lru_cache(maxsize=256)
def _orders(size: int) -> tuple[tuple[int, ...], ...]:
    """The ordered products of primes that give `size`, at most the first 64 of them."""

    def arrange(rest: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if not rest:
            yield ()
        for prime in dict.fromkeys(rest):
            left = list(rest)
            left.remove(prime)
            for tail in arrange(tuple(left)):
                yield (prime, *tail)

    return tuple(it.islice(arrange(primes(size)), _MOST_ORDERS))


def _digits_of(order: Sequence[int]) -> list[_Digit]:
    return [_Digit(math.prod(order[index + 1 :]), prime) for index, prime in enumerate(order)]


def _digit_keys(row: np.ndarray, size: int) -> dict[_Digit, bytes]:
    """Every digit that any order of an axis's primes could have, with its value for each device as bytes."""
    found = dict.fromkeys(digit for order in _orders(size) for digit in _digits_of(order))
    return {digit: (row // digit.stride % digit.size).astype(np.uint16).tobytes() for digit in found}


def _counts_on_the_way(layout: StepLayout, dim: int, split: Split | None = None) -> frozenset[int]:
    """For each prefix of a dimension's axes, or of their factors, the number of shards that the prefix gives."""
    sizes = [(layout.sizes[axis],) if split is None else split[axis] for axis in layout.dims[dim]]
    return frozenset(it.accumulate(it.chain.from_iterable(sizes), operator.mul, initial=1))


def _best_orders(
    layout: StepLayout, known: Sequence[dict[_Digit, bytes]], wanted: set[bytes], counts: Sequence[frozenset[int]]
) -> list[tuple[int, ...]]:
    """For each axis, the order with the most digits among `wanted`, then with the most of the other end's
    shard counts.
    """
    return [
        max(_orders(size), key=ft.partial(_agreement, keys, wanted, *_before(layout, axis, counts)))
        for axis, (size, keys) in enumerate(zip(layout.sizes, known, strict=True))
    ]


def _before(layout: StepLayout, axis: int, counts: Sequence[frozenset[int]]) -> tuple[int, frozenset[int]]:
    """The number of shards that the axes before this one give its dimension, and the other end's shard counts of that
    dimension.
    """
    for axes, theirs in zip(layout.dims, counts, strict=True):
        if axis in axes:
            return math.prod(layout.sizes[other] for other in axes[: axes.index(axis)]), theirs
    return 1, frozenset()


def _agreement(
    keys: dict[_Digit, bytes], wanted: set[bytes], before: int, counts: frozenset[int], order: tuple[int, ...]
) -> tuple[int, int]:
    shared = sum(keys[digit] in wanted for digit in _digits_of(order))
    return shared, sum(before * count in counts for count in it.accumulate(order, operator.mul))


def join_primes(layouts: Sequence[StepLayout], keys: Sequence[Sequence[bytes]], splits: Sequence[Split]) -> list[Split]:
    """Joins neighbouring primes of an axis if neither end of the move needs them separately.

    **Arguments:**

    - `layouts`: the layouts of both ends, on prime factors.
    - `keys`: for both ends, the key of each factor: its value for each device.
    - `splits`: for both meshes, the primes of their axes.

    **Returns:**

    The coarser splits.
    """
    ends = [_Primes(*one) for one in zip(layouts, keys, strict=True)]
    # A factor in `kept` is the last of a group of joined ones, and need not be tested twice.
    kept = [set(it.accumulate(map(len, split), initial=-1)) for split in splits]
    asked = True
    while asked:
        asked = False
        for me, other in ((0, 1), (1, 0)):
            for factor in range(len(keys[me]) - 1):
                if factor not in kept[me] and ends[me].must_end(factor, ends[other], kept[other]):
                    kept[me].add(factor)
                    asked = True
    return [_joined(split, last) for split, last in zip(splits, kept, strict=True)]


class _Primes:
    """The prime factors of one end, each with its key and with the position at which it divides a dimension."""

    def __init__(self, layout: StepLayout, keys: Sequence[bytes]):
        self.keys = keys
        self.factors = {key: factor for factor, key in enumerate(keys)}
        # For each factor that shards a dimension: the dimension, and the number of shards from it and the factors
        # before it.
        self.cuts = {
            factor: (dim, count)
            for dim, axes in enumerate(layout.dims)
            for factor, count in zip(
                axes, it.accumulate((layout.sizes[factor] for factor in axes), operator.mul), strict=True
            )
        }

    def must_end(self, factor: int, other: "_Primes", kept: set[int]) -> bool:
        """Whether a factor must stay separate from the next one, since a factor in the other end's `kept` ends between
        the two.
        """
        return self._is_told_apart(factor, other, kept) or any(
            other.cuts[theirs] == self.cuts.get(factor) for theirs in kept if theirs in other.cuts
        )

    def _is_told_apart(self, factor: int, other: "_Primes", kept: set[int]) -> bool:
        here, after = (other.factors.get(key) for key in self.keys[factor : factor + 2])
        if here is None and after is None:
            return False
        return here is None or after is None or after != here + 1 or here in kept


def _joined(split: Split, kept: set[int]) -> Split:
    factors, out = it.count(), []
    for primes_of_axis in split:
        sizes, size = [], 1
        for prime in primes_of_axis:
            size *= prime
            if next(factors) in kept:
                sizes.append(size)
                size = 1
        out.append(tuple(sizes))
    return out


# Below this number of prime factors the search sees all of them; above it, only those that the two ends need.
_FEW = 6


@dataclasses.dataclass(frozen=True, eq=False)
class End:
    """One end of a move or step: its layout over factors of its mesh, and every device's coordinates in them.

    Both ends of a move number the devices by their position in the source's mesh.
    """

    layout: StepLayout
    coordinates: np.ndarray

    @property
    def keys(self) -> tuple[bytes, ...]:
        """One key per factor. Factors of any two meshes that have the same value on every device have equal keys."""
        return tuple(row.astype(np.uint16).tobytes() for row in self.coordinates)


def coordinates(layout: StepLayout, like: StepLayout) -> np.ndarray:
    """Each device's coordinates in the mesh of `layout`. Devices are numbered by their position in the mesh
    of `like`.
    """
    return digits(layout.sizes, positions(layout, like))


def levels(end: End) -> list[tuple[float, np.ndarray]]:
    """For each weight, from cheap to expensive, the group of each device within which a byte costs at most
    that weight.
    """
    weights = end.layout.weights or (1.0,) * len(end.layout.sizes)
    found = []
    for weight in sorted(dict.fromkeys(weights)) or [1.0]:
        dearer = tuple(axis for axis, other in enumerate(weights) if other > weight)
        found.append((weight, piece_index(end.layout.sizes, end.coordinates, dearer)))
    return found


def refine(src: StepLayout, dst: StepLayout, *, prime: bool = False) -> tuple[End, End]:
    """The two ends of a move, on the factors into which the axes of both meshes are split.

    If every factor of the target's mesh is also one of the source's, both ends are on the source's mesh.

    **Arguments:**

    - `src`, `dst`: layouts over the same devices.
    - `prime`: whether all factors are prime, however many those are. By default neighbouring primes that neither end
        tells apart are one factor, if there are many; but a dimension may have room for one of them and not for all.

    **Returns:**

    The source's end and the target's.
    """
    places = (np.arange(src.size), positions(dst, src))
    splits = order_primes(src, dst, places)
    if not prime and max(sum(map(len, split)) for split in splits) > _FEW:
        ends = [_end(*one) for one in zip((src, dst), splits, places, strict=True)]
        splits = join_primes([end.layout for end in ends], [end.keys for end in ends], splits)
    ours, theirs = _equally_dear(*(_end(*one) for one in zip((src, dst), splits, places, strict=True)))
    factors = {key: factor for factor, key in enumerate(ours.keys)}
    if not all(key in factors for key in theirs.keys):
        return ours, theirs
    rename = [factors[key] for key in theirs.keys]
    dims = tuple(tuple(rename[factor] for factor in axes) for axes in theirs.layout.dims)
    return ours, End(dataclasses.replace(ours.layout, dims=dims), ours.coordinates)


def _end(layout: StepLayout, split: Split, place: np.ndarray) -> End:
    """A layout on the factors of its axes, for devices at the positions `place` of its mesh."""
    sizes = tuple(size for factors in split for size in factors)
    start = [0]
    for factors in split:
        start.append(start[-1] + len(factors))
    dims = tuple(
        tuple(factor for axis in axes for factor in range(start[axis], start[axis + 1])) for axes in layout.dims
    )
    weights = tuple(weight for weight, factors in zip(layout.weights, split, strict=False) for _ in factors)
    return End(StepLayout(sizes, dims, layout.order, weights), digits(sizes, place))


def _equally_dear(ours: End, theirs: End) -> tuple[End, End]:
    """Both ends with consistent weights: a factor has the larger of the weights that the two meshes give it."""
    if not ours.layout.weights and not theirs.layout.weights:
        return ours, theirs
    first, second = (
        End(dataclasses.replace(end.layout, weights=_weights(end, (ours, theirs))), end.coordinates)
        for end in (ours, theirs)
    )
    return first, second


def _weights(end: End, accounts: Sequence[End]) -> tuple[float, ...]:
    sizes = end.layout.sizes
    order = np.lexsort(end.coordinates[::-1]) if sizes else np.arange(1)
    found = [1.0] * len(sizes)
    for account in accounts:
        for axis, weight in enumerate(account.layout.weights):
            grid = account.coordinates[axis][order].reshape(sizes)
            for factor in range(len(sizes)):
                # A step along this factor is also one along the other mesh's axis.
                if weight > found[factor] and (grid != grid.take([0], factor)).any():
                    found[factor] = weight
    return tuple(found)
