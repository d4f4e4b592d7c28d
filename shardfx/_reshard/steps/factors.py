"""The factors of mesh axes that resharding works with: fine enough for both ends of a move, and no finer."""

import dataclasses
import functools as ft
import math
from collections.abc import Iterator, Sequence

import numpy as np

from .layout import Layout, digits, piece_index, positions


# Below this many prime factors the search sees all of them; above it, only those that the two ends tell apart.
_FEW = 6
_MOST_ORDERS = 64


@dataclasses.dataclass(frozen=True, eq=False)
class World:
    """One mesh, its axes split into factors: `layout` on the split axes, and each device's coordinates there.

    Both worlds of a move number the devices by their place in the source's mesh.
    """

    layout: Layout
    coordinates: np.ndarray

    @property
    def keys(self) -> tuple[bytes, ...]:
        """Equal for factors that tell the devices apart in the same way, whatever mesh they come from."""
        return tuple(row.astype(np.uint16).tobytes() for row in self.coordinates)

    def held(self) -> np.ndarray:
        """One number for the piece that each device holds, equal for equal pieces of layouts of equal counts."""
        number = np.zeros(self.coordinates.shape[1], np.int64)
        for axes in self.layout.dims:
            count = math.prod(self.layout.sizes[axis] for axis in axes)
            number = number * count + piece_index(self.layout.sizes, self.coordinates, axes)
        return number


def coordinates(layout: Layout, like: Layout) -> np.ndarray:
    """Each device's coordinates in the mesh of `layout`, the devices numbered by their place in that of `like`."""
    return digits(layout.sizes, positions(layout, like))


def levels(world: World) -> list[tuple[float, np.ndarray]]:
    """From cheap to dear: a weight, and per device the group within which a byte costs no more than that."""
    weights = world.layout.weights or (1.0,) * len(world.layout.sizes)
    found = []
    for weight in sorted(dict.fromkeys(weights)) or [1.0]:
        slower = tuple(axis for axis, other in enumerate(weights) if other > weight)
        found.append((weight, piece_index(world.layout.sizes, world.coordinates, slower)))
    return found


def refine(src: Layout, dst: Layout, *, prime: bool = False) -> tuple[World, World]:
    """Splits the axes of both meshes into factors.

    Where every factor of the target's mesh is one of the source's too, both worlds are on the source's mesh.

    **Arguments:**

    - `src`, `dst`: layouts over the same devices.
    - `prime`: into prime factors, however many those are. Else many of them are joined where neither end tells them
        apart; but dimensions may have room for some of them and not for all.

    **Returns:**

    The source's world and the target's.
    """
    places = (np.arange(src.size), positions(dst, src))
    splits = _splits(src, dst, places)
    if not prime and max(sum(map(len, split)) for split in splits) > _FEW:
        splits = _coarse(src, dst, places, splits)
    ours, theirs = _agreed(
        *(_world(layout, split, place) for layout, split, place in zip((src, dst), splits, places, strict=True))
    )
    keys = {key: factor for factor, key in enumerate(ours.keys)}
    if not all(key in keys for key in theirs.keys):
        return ours, theirs
    rename = [keys[key] for key in theirs.keys]
    dims = tuple(tuple(rename[factor] for factor in axes) for axes in theirs.layout.dims)
    return ours, World(dataclasses.replace(ours.layout, dims=dims), ours.coordinates)


def _agreed(ours: World, theirs: World) -> tuple[World, World]:
    """Both worlds with each factor as dear as its dearest step is by either's account."""
    if not ours.layout.weights and not theirs.layout.weights:
        return ours, theirs
    ends = [
        World(dataclasses.replace(end.layout, weights=_weights(end, (ours, theirs))), end.coordinates)
        for end in (ours, theirs)
    ]
    return ends[0], ends[1]


def _weights(world: World, ends: Sequence[World]) -> tuple[float, ...]:
    sizes = world.layout.sizes
    order = np.lexsort(world.coordinates[::-1]) if sizes else np.arange(1)
    found = [1.0] * len(sizes)
    for end in ends:
        for axis, weight in enumerate(end.layout.weights):
            grid = end.coordinates[axis][order].reshape(sizes)
            for factor in range(len(sizes)):
                if weight > found[factor] and (grid != grid.take([0], factor)).any():
                    found[factor] = weight
    return tuple(found)


def _world(layout: Layout, split: Sequence[Sequence[int]], place: np.ndarray) -> World:
    sizes = tuple(size for sizes in split for size in sizes)
    start = [0]
    for parts in split:
        start.append(start[-1] + len(parts))
    dims = tuple(
        tuple(factor for axis in axes for factor in range(start[axis], start[axis + 1])) for axes in layout.dims
    )
    weights = tuple(weight for weight, parts in zip(layout.weights, split, strict=False) for _ in parts)
    return World(Layout(sizes, dims, layout.order, weights), digits(sizes, place))


def primes(number: int) -> tuple[int, ...]:
    """The prime factors of `number`, ascending, each as often as it divides."""
    found, factor = [], 2
    while factor * factor <= number:
        while number % factor == 0:
            found.append(factor)
            number //= factor
        factor += 1
    return tuple(found + [number] if number > 1 else found)


@ft.lru_cache(maxsize=256)
def _orders(size: int) -> tuple[tuple[int, ...], ...]:
    """The ways to write `size` as an ordered product of primes (the first 64 of them)."""

    def arrange(rest: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if not rest:
            yield ()
        for prime in dict.fromkeys(rest):
            left = list(rest)
            left.remove(prime)
            for tail in arrange(tuple(left)):
                yield (prime, *tail)

    found = []
    for order in arrange(primes(size)):
        found.append(order)
        if len(found) == _MOST_ORDERS:
            break
    return tuple(found)


def _splits(src: Layout, dst: Layout, places: Sequence[np.ndarray]) -> list[list[tuple[int, ...]]]:
    """For each axis of both meshes an order of its primes, chosen so that the two have much in common."""
    if all(len(_orders(size)) == 1 for size in (*src.sizes, *dst.sizes)):
        return [[_orders(size)[0] for size in layout.sizes] for layout in (src, dst)]
    axes = [digits(layout.sizes, place) for layout, place in zip((src, dst), places, strict=True)]
    known = [_digit_keys(axes[1], size, axis) for axis, size in enumerate(dst.sizes)]
    wanted = {key for keys in known for key in keys.values()}
    chosen = []
    for layout, other, rows in ((src, dst, axes[0]), (dst, src, axes[1])):
        chains = [_chain(other, dim, chosen[0] if chosen else None) for dim in range(len(other.dims))]
        split = [
            _best_order(layout, axis, _digit_keys(rows, size, axis), wanted, chains)
            for axis, size in enumerate(layout.sizes)
        ]
        chosen.append(split)
        wanted = {
            keys[stride, prime]
            for axis, order in enumerate(split)
            for keys in (_digit_keys(rows, layout.sizes[axis], axis),)
            for stride, prime in _strides(order)
        }
    return chosen


def _digit_keys(rows: np.ndarray, size: int, axis: int) -> dict[tuple[int, int], bytes]:
    """Every prime digit that any order of an axis' primes could have, by its stride and size."""
    places = dict.fromkeys(place for order in _orders(size) for place in _strides(order))
    return {(t, p): (rows[axis] // t % p).astype(np.uint16).tobytes() for t, p in places}


def _strides(order: Sequence[int]) -> list[tuple[int, int]]:
    return [(math.prod(order[index + 1 :]), prime) for index, prime in enumerate(order)]


def _chain(layout: Layout, dim: int, split: Sequence[Sequence[int]] | None) -> frozenset[int]:
    """Into how many pieces the first axes (or factors) cut a dimension, for each number of them."""
    counts, count = [1], 1
    for axis in layout.dims[dim]:
        for size in (layout.sizes[axis],) if split is None else split[axis]:
            count *= size
            counts.append(count)
    return frozenset(counts)


def _best_order(
    layout: Layout,
    axis: int,
    keys: dict[tuple[int, int], bytes],
    wanted: set[bytes],
    chains: Sequence[frozenset[int]],
) -> tuple[int, ...]:
    before, chain = 1, frozenset()
    for dim, axes in enumerate(layout.dims):
        if axis in axes:
            before = math.prod(layout.sizes[other] for other in axes[: axes.index(axis)])
            chain = chains[dim]

    def agreement(order: tuple[int, ...]) -> tuple[int, int]:
        shared = sum(keys[place] in wanted for place in _strides(order))
        cuts = [before * math.prod(order[: index + 1]) for index in range(len(order))]
        return shared, sum(cut in chain for cut in cuts)

    return max(_orders(layout.sizes[axis]), key=agreement)


def _coarse(
    src: Layout, dst: Layout, places: Sequence[np.ndarray], splits: list[list[tuple[int, ...]]]
) -> list[list[tuple[int, ...]]]:
    """Joins neighbouring primes of an axis that neither end of the move tells apart."""
    worlds = [_world(layout, split, place) for layout, split, place in zip((src, dst), splits, places, strict=True)]
    ends = [_axis_ends(split) for split in splits]
    cuts = [set(end) for end in ends]
    index = [{key: factor for factor, key in enumerate(world.keys)} for world in worlds]
    bounds = [_boundaries(world.layout) for world in worlds]
    changed = True
    while changed:
        changed = False
        for me, other in ((0, 1), (1, 0)):
            keys = worlds[me].keys
            for factor in range(len(keys) - 1):
                if factor not in cuts[me] and (
                    _told_apart(keys, factor, index[other], cuts[other])
                    or _cut_in_dims(factor, bounds[me], bounds[other], cuts[other])
                ):
                    cuts[me].add(factor)
                    changed = True
    return [_joined(split, cut) for split, cut in zip(splits, cuts, strict=True)]


def _axis_ends(split: Sequence[Sequence[int]]) -> list[int]:
    ends, last = [], -1
    for parts in split:
        last += len(parts)
        ends.append(last)
    return ends


def _boundaries(layout: Layout) -> dict[int, tuple[int, int]]:
    """For each factor that cuts a dimension: which one, and into how many pieces it and those before it cut it."""
    found = {}
    for dim, axes in enumerate(layout.dims):
        count = 1
        for factor in axes:
            count *= layout.sizes[factor]
            found[factor] = (dim, count)
    return found


def _told_apart(keys: Sequence[bytes], factor: int, index: dict[bytes, int], cuts: set[int]) -> bool:
    here, after = index.get(keys[factor]), index.get(keys[factor + 1])
    if here is None and after is None:
        return False
    return here is None or after is None or after != here + 1 or here in cuts


def _cut_in_dims(
    factor: int, mine: dict[int, tuple[int, int]], theirs: dict[int, tuple[int, int]], cuts: set[int]
) -> bool:
    return factor in mine and any(theirs[other] == mine[factor] for other in cuts if other in theirs)


def _joined(split: Sequence[Sequence[int]], cuts: set[int]) -> list[tuple[int, ...]]:
    out, factor = [], 0
    for parts in split:
        sizes, size = [], 1
        for part in parts:
            size *= part
            if factor in cuts:
                sizes.append(size)
                size = 1
            factor += 1
        out.append(tuple(sizes))
    return out
