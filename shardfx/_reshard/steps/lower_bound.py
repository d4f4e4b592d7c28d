"""What devices need and do not have: the traffic that no way from one layout to another can avoid."""

import functools as ft
import math
from fractions import Fraction

import numpy as np

from .factors import World, levels
from .layout import piece_index


Dims = tuple[tuple[int, ...], ...]


class Holdings:
    """Which piece each device holds under layouts of one world, remembered per dimension."""

    def __init__(self, world: World):
        self.sizes = world.layout.sizes
        # Half the bytes, half the time: on thousands of devices the search is bound by these arrays.
        self.coordinates = world.coordinates.astype(np.int32)
        self.devices = world.coordinates.shape[1]
        self._count: dict[tuple[int, ...], int] = {}
        self._index: dict[tuple[int, ...], np.ndarray] = {(): np.zeros(self.devices, np.int32)}
        self._numbers: dict[Dims, np.ndarray] = {}

    def count(self, axes: tuple[int, ...]) -> int:
        """Into how many pieces `axes` cut a dimension."""
        if axes not in self._count:
            self._count[axes] = math.prod([self.sizes[axis] for axis in axes])
        return self._count[axes]

    def counts(self, dims: Dims) -> tuple[int, ...]:
        """Into how many pieces each dimension is cut."""
        return tuple([self.count(axes) for axes in dims])

    def pieces(self, dims: Dims) -> int:
        """Into how many pieces the array is cut."""
        return math.prod([self.count(axes) for axes in dims])

    def index(self, axes: tuple[int, ...]) -> np.ndarray:
        """Which piece of a dimension cut by `axes` each device holds; from that of the axes but the last."""
        if axes not in self._index:
            *outer, last = axes
            self._index[axes] = self.index(tuple(outer)) * np.int32(self.sizes[last]) + self.coordinates[last]
        return self._index[axes]

    def numbers(self, dims: Dims) -> np.ndarray:
        """One number per device for all of its piece, equal in all worlds for equal pieces."""
        if dims not in self._numbers:
            out = np.zeros(self.devices, np.int64)
            for axes in dims:
                if axes:
                    out = out * self.count(axes) + self.index(axes)
            self._numbers[dims] = out
        return self._numbers[dims]


def lacking(ours: World, theirs: World) -> Fraction:
    """What a device needs under `theirs` and does not have under `ours`, as a mean share of the array."""
    common, unit = None, 1
    for mine, wanted in zip(ours.layout.dims, theirs.layout.dims, strict=True):
        if not mine and not wanted:
            continue
        shared, parts = _overlap(*_pieces(ours, mine), *_pieces(theirs, wanted))
        shared = shared.astype(np.int64)
        common, unit = shared if common is None else common * shared, unit * parts
    if common is None:
        return Fraction(0)
    return Fraction(1, theirs.layout.pieces) - Fraction(int(common.sum()), unit * len(common))


class Bound:
    """The least cost of the traffic between layouts of one world and one end of a move.

    What enters a device costs at least what the cheapest bytes do; and what enters a group of devices with no dear
    axis between them, being held by none of them, costs as much as the bytes of such an axis.

    `forward` says that `end` is the target of the layouts, else it is their source.
    """

    def __init__(self, held: Holdings, world: World, end: World, forward: bool):
        self.held, self.forward = held, forward
        self.ends = [_pieces(end, axes) for axes in end.layout.dims]
        self.end_pieces = end.layout.pieces
        self.first, *dearer = levels(world)
        cheaper = [self.first, *dearer]
        self.dearer = [
            _Group(held, self.ends, group, weight - cheap)
            for (cheap, group), (weight, _) in zip(cheaper, dearer, strict=False)
        ]
        self._share: dict[tuple[int, tuple[int, ...]], np.ndarray | None] = {}

    def __call__(self, dims: Dims) -> float:
        """A lower bound on the cost of what remains (forward) or came before (backward)."""
        shares = [share for share in map(self._shared, range(len(dims)), dims) if share is not None]
        if not shares:
            return 0.0
        *others, last = shares
        common = last.sum() if not others else np.dot(ft.reduce(np.multiply, others), last)
        end = self.end_pieces if self.forward else self.held.pieces(dims)
        bound = max(0.0, 1.0 / end - float(common) / len(last)) * self.first[0]
        return bound + sum([group.bound(dims, self.forward) for group in self.dearer])

    def _shared(self, dim: int, axes: tuple[int, ...]) -> np.ndarray | None:
        key = (dim, axes)
        if key not in self._share:
            goal, goals = self.ends[dim]
            if axes or goals > 1:
                shared, parts = _overlap(self.held.index(axes), self.held.count(axes), goal, goals)
                self._share[key] = shared * (1.0 / parts)
            else:
                self._share[key] = None
        return self._share[key]


class _Group:
    """Groups of devices between which a byte costs `extra` more than within them."""

    def __init__(self, held: Holdings, ends: list[tuple[np.ndarray, int]], group: np.ndarray, extra: float):
        self.held, self.group, self.extra = held, group, extra
        self.groups = int(group.max()) + 1
        self.goals = [_Union(group, self.groups, *end) for end in ends]
        self._share: dict[tuple[int, tuple[int, ...]], tuple[np.ndarray, np.ndarray]] = {}

    def bound(self, dims: Dims, forward: bool) -> float:
        """The cost, beyond that of other bytes, of what a group needs and holds nowhere: the mean over devices."""
        need, common = 1.0, 1.0
        for dim, axes in enumerate(dims):
            if axes or self.goals[dim].count > 1:
                own, shared = self._shared(dim, axes)
                need, common = need * (self.goals[dim].share if forward else own), common * shared
        return max(0.0, float(np.mean(need - common))) * self.groups / self.held.devices * self.extra

    def _shared(self, dim: int, axes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        key = (dim, axes)
        if key not in self._share:
            mine = _Union(self.group, self.groups, self.held.index(axes), self.held.count(axes))
            self._share[key] = mine.share, mine.common(self.goals[dim])
        return self._share[key]


class _Union:
    """Which pieces of a dimension, cut into `count`, the devices of each group hold together.

    Only the pieces that some group holds are listed: they are no more than the devices, however many groups there are.
    """

    def __init__(self, group: np.ndarray, groups: int, index: np.ndarray, count: int):
        self.groups, self.count = groups, count
        self.holds = np.zeros(groups * count, bool)
        self.holds[group * count + index] = True
        self.group, self.index = np.divmod(np.flatnonzero(self.holds), count)
        self.share = self._of_dimension(self.group, count)

    def common(self, other: "_Union") -> np.ndarray:
        """What share of the dimension each group holds here and there."""
        fine, coarse = (self, other) if self.count >= other.count else (other, self)
        parts = math.lcm(fine.count, coarse.count)
        step = parts // fine.count
        group, part = fine.group, fine.index
        if step > 1:
            group, part = np.repeat(group, step), np.add.outer(part * step, np.arange(step)).ravel()
        both = coarse.holds[group * coarse.count + part // (parts // coarse.count)]
        return self._of_dimension(group[both], parts)

    def _of_dimension(self, group: np.ndarray, parts: int) -> np.ndarray:
        return np.bincount(group, minlength=self.groups) * (1.0 / parts)


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
