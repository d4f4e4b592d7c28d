"""Cuts: for each device, which elements of a dimension of a whole value the positions
of a dimension of its own array hold.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .verdict import Unjudged


# The index of a position that holds no element of the value.
HOLE = -(2**40)
# Cuts are written out, a number for each position and device, up to this size.
MOST_WRITTEN = 2**22


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Cut:
    """What the positions of one dimension hold, on each device.

    The positions are divided into segments, in the same way on each device.

    - `lengths`: the number of positions of each segment.
    - `starts`: an array of shape (devices, segments): the index, in the whole
      dimension, of the first element of a segment. `HOLE` if the segment holds no
      elements.
    - `step`: the distance in the whole dimension between neighbours of a segment.
    - `size`: the number of positions.
    - `has_holes`: whether a segment of a device holds no elements.
    - `is_first`: whether there is one position, and each device holds the first element.

    Equal cuts of one judge are one object, so `is` compares them.
    """

    lengths: tuple[int, ...]
    starts: np.ndarray
    step: int
    size: int
    has_holes: bool
    is_first: bool

    def text_on(self, device: int) -> str:
        """The text of what a device holds: "[4:8]"."""
        starts = self.starts[device].tolist()
        parts = [
            self._segment_text(start, length)
            for start, length in zip(starts, self.lengths, strict=True)
        ]
        return " and ".join(parts) or "nothing"

    def _segment_text(self, start: int, length: int) -> str:
        if start == HOLE:
            return "nothing"
        last = start + (length - 1) * self.step
        stop = last + 1 if self.step > 0 else last - 1
        if self.step == 1 or length == 1:
            return f"[{start}:{stop}]"
        return f"[{start}:{stop}:{self.step}]"


class Cuts:
    """All cuts of one judge, for its number of devices."""

    def __init__(self, devices: int):
        self.devices = devices
        # The cuts of arrays, by sharding, shape and the shape of a shard.
        self.by_sharding: dict[tuple[object, ...], list[Cut]] = {}
        self._known: dict[object, Cut] = {}
        self._joined: dict[tuple[int, int], Cut | None] = {}
        self._terms: dict[tuple[int, int], tuple[int, ...] | None] = {}

    def from_segments(
        self,
        lengths: Sequence[int],
        starts: np.ndarray,
        step: int = 1,
    ) -> Cut:
        """The cut with these segments, in its canonical form: neighbours that continue
        each other on every device are one segment. `starts` and `step` are as in a
        `Cut`.
        """
        starts = starts.astype(np.int64, copy=False)
        size = sum(lengths)
        if size <= 1:
            step = 1
        if len(lengths) > 1:
            lengths, starts = _merged(lengths, starts, step)
        if all(length == 1 for length in lengths):
            step = 1

        key = (tuple(lengths), step, starts.tobytes())
        known_cut = self._known.get(key)
        if known_cut is not None:
            return known_cut

        cut = Cut(
            lengths=tuple(lengths),
            starts=starts,
            step=step,
            size=size,
            has_holes=bool((starts == HOLE).any()),
            is_first=size == 1 and not starts.any(),
        )
        self._known[key] = cut
        return cut

    def whole(self, size: int) -> Cut:
        """The cut of a dimension of which each device holds all."""
        starts = np.zeros((self.devices, 1), np.int64)
        return self.from_segments((size,), starts)

    def from_starts(self, starts: np.ndarray, size: int, step: int = 1) -> Cut:
        """The cut with one segment of `size` positions at each device's start."""
        column = np.asarray(starts).reshape(self.devices, 1)
        return self.from_segments((size,), column, step)

    def holes(self, size: int) -> Cut:
        """The cut whose positions hold no elements."""
        starts = np.full(self.devices, HOLE)
        return self.from_starts(starts, size)

    def indices(self, cut: Cut) -> np.ndarray:
        """The index that each position holds: an array (devices, positions)."""
        if cut.size * self.devices > MOST_WRITTEN:
            raise Unjudged("pieces of arrays that are too long to be written out")
        segments = []
        for column, length in enumerate(cut.lengths):
            start = cut.starts[:, column : column + 1]
            offsets = np.arange(length) * cut.step
            segment = np.where(start == HOLE, HOLE, start + offsets)
            segments.append(segment)
        if not segments:
            return np.zeros((self.devices, 0), np.int64)
        return np.concatenate(segments, axis=1)

    def from_indices(self, indices: np.ndarray) -> Cut:
        """The cut whose positions hold these indices, an array (devices, positions)."""
        size = indices.shape[1]
        if size <= 1:
            return self.from_segments((1,) * size, indices)
        is_hole = indices == HOLE
        are_holes = is_hole[:, 1:] & is_hole[:, :-1]
        are_elements = ~is_hole[:, 1:] & ~is_hole[:, :-1]
        distances = np.diff(indices, axis=1)

        step = 1
        steps = np.unique(distances[are_elements])
        if len(steps) == 1 and steps[0] != 0:
            step = int(steps[0])

        is_next = are_elements & (distances == step)
        continues = (are_holes | is_next).all(axis=0)
        later_firsts = np.flatnonzero(~continues) + 1
        firsts = np.concatenate([[0], later_firsts])
        lengths = np.diff(firsts, append=size)
        return self.from_segments(lengths.tolist(), indices[:, firsts], step)

    def joined(self, first_cut: Cut, other: Cut) -> Cut | None:
        """The cut of an operation's result whose two operands have these cuts. It has
        holes where an operand has holes. `None` if a device holds different elements.
        """
        if first_cut is other:
            return first_cut
        key = (id(first_cut), id(other))
        if key not in self._joined:
            self._joined[key] = self._join(first_cut, other)
        return self._joined[key]

    def _join(self, first_cut: Cut, other: Cut) -> Cut | None:
        """As `joined`, for cuts that are not one object. Equal cuts are, so two of them
        without holes differ.
        """
        if not first_cut.has_holes and not other.has_holes:
            return None
        first = self.indices(first_cut)
        second = self.indices(other)
        has_both = (first != HOLE) & (second != HOLE)
        if (first != second)[has_both].any():
            return None
        indices = np.where(has_both, first, HOLE)
        return self.from_indices(indices)

    def window(self, cut: Cut, offsets: np.ndarray, size: int, stride: int = 1) -> Cut:
        """The cut of every `stride`-th position from each device's offset."""
        if len(cut.lengths) == 1:
            starts = cut.starts[:, 0]
            moved = np.where(starts == HOLE, HOLE, starts + offsets * cut.step)
            return self.from_starts(moved, size, cut.step * stride)
        columns = offsets[:, None] + np.arange(size) * stride
        indices = np.take_along_axis(self.indices(cut), columns, axis=1)
        return self.from_indices(indices)

    def concatenated(self, cuts: Sequence[Cut]) -> Cut:
        """The cuts side by side."""
        steps = {cut.step for cut in cuts if cut.size > 1}
        if len(steps) > 1:
            rows = [self.indices(cut) for cut in cuts]
            indices = np.concatenate(rows, axis=1)
            return self.from_indices(indices)

        starts = np.concatenate([cut.starts for cut in cuts], axis=1)
        if not steps:
            return self.from_indices(starts)
        lengths: list[int] = []
        for cut in cuts:
            lengths += cut.lengths
        return self.from_segments(lengths, starts, steps.pop())

    def split(self, cut: Cut, size: int, whole_size: int | None) -> "Split":
        """The cuts of the two dimensions, the inner one of `size`, into which a reshape
        splits a dimension. Holes
        beyond a dimension of `whole_size` are given the indices that continue those of
        the elements. Raises `Unjudged` if there is no such sum.
        """
        count = cut.size // size
        if len(cut.lengths) == 1 and not cut.has_holes:
            outer = self.from_starts(cut.starts[:, 0], count, cut.step * size)
            inner = self.from_starts(np.zeros(self.devices, np.int64), size, cut.step)
            return Split(outer, inner, is_overflowing=False)
        indices = self.indices(cut)
        continued = _continued(indices, cut.step, whole_size)
        squares = continued.reshape(self.devices, count, size)
        is_overflowing = bool((continued != indices).any())
        return self._in_two(squares, cut.step, is_overflowing)

    def exchanged(
        self,
        cut: Cut,
        senders: np.ndarray,
        whole_size: int | None,
    ) -> "Split":
        """The cuts after each device received what its senders, an array (devices,
        members), hold of a dimension of `whole_size`: those of the dimension that numbers
        the senders, and of the dimension itself. Holes are as in `split`.
        """
        if len(cut.lengths) == 1 and not cut.has_holes:
            outer = self.from_indices(cut.starts[:, 0][senders])
            zeros = np.zeros(self.devices, np.int64)
            inner = self.from_starts(zeros, cut.size, cut.step)
            return Split(outer, inner, is_overflowing=False)
        indices = self.indices(cut)
        continued = _continued(indices, cut.step, whole_size)
        is_overflowing = bool((continued != indices).any())
        return self._in_two(continued[senders], cut.step, is_overflowing)

    def _in_two(self, squares: np.ndarray, step: int, is_overflowing: bool) -> "Split":
        """The cuts of two dimensions whose elements have these indices, an array
        (devices, outer, inner). `step` is the distance between neighbours, if they are.
        """
        _, count, size = squares.shape
        outer_indices = np.full((self.devices, count), HOLE)
        inner_indices = np.full((self.devices, size), HOLE)
        for device, square in enumerate(squares):
            is_element = square != HOLE
            rows = np.flatnonzero(is_element.any(axis=1))
            columns = np.flatnonzero(is_element.any(axis=0))
            if not len(rows):
                # A device that holds nothing has no row, and its columns may be any.
                inner_indices[device] = np.arange(size) * step
                continue
            first_row = square[rows[0], columns]
            first_column = square[rows, columns[0]]
            offset = columns[0] * step
            outer_indices[device, rows] = first_column - offset
            inner_indices[device, columns] = first_row - first_row[0] + offset
        if (_sums(outer_indices, inner_indices) != squares).any():
            raise Unjudged("a reshape of a dimension in pieces")
        outer = self.from_indices(outer_indices)
        inner = self.from_indices(inner_indices)
        return Split(outer, inner, is_overflowing)

    def within(self, cut: Cut, size: int) -> Cut:
        """The cut with holes in the place of indices beyond a dimension of `size`."""
        indices = self.indices(cut)
        is_within = (indices >= 0) & (indices < size)
        return self.from_indices(np.where(is_within, indices, HOLE))

    def merged(self, outer: Cut, inner: Cut) -> Cut:
        """The cut of the dimension into which a reshape merges two of one dimension of
        the value. Raises `Unjudged` if they do not continue each other.
        """
        size = outer.size * inner.size
        is_simple = len(outer.lengths) == len(inner.lengths) == 1
        if is_simple and not outer.has_holes and not inner.has_holes:
            starts = outer.starts[:, 0] + inner.starts[:, 0]
            if inner.size == 1:
                return self.from_starts(starts, size, outer.step)
            if outer.size > 1 and outer.step != inner.step * inner.size:
                raise Unjudged("a reshape that reorders a dimension")
            return self.from_starts(starts, size, inner.step)
        sums = _sums(self.indices(outer), self.indices(inner))
        return self.from_indices(sums.reshape(self.devices, -1))

    def taken(self, cut: Cut, sources: np.ndarray) -> Cut:
        """The cut after each device received the array of its source; -1 for none."""
        gets_nothing = sources[:, None] < 0
        starts = np.where(gets_nothing, HOLE, cut.starts[sources])
        return self.from_segments(cut.lengths, starts, cut.step)

    def is_whole(self, cut: Cut, size: int) -> bool:
        """Whether each device holds all of a dimension of `size`."""
        if cut.lengths != (size,) or cut.starts.any():
            return False
        return cut.step == 1 or size == 1

    def terms(self, cut: Cut, size: int) -> tuple[int, ...] | None:
        """The terms of a sum over a dimension of `size` with this cut: for each part of
        the dimension, the devices that hold it, as a bit mask. `None` if each device
        holds all. Raises `Unjudged` if parts overlap, or do not cover the dimension.
        """
        if self.is_whole(cut, size):
            return None
        key = (id(cut), size)
        if key not in self._terms:
            self._terms[key] = self._terms_of(cut, size)
        return self._terms[key]

    def _terms_of(self, cut: Cut, size: int) -> tuple[int, ...] | None:
        """As `terms`, for a cut that is not whole."""
        # Devices that hold the same, as bit masks, with one device of each mask.
        masks: dict[bytes, int] = {}
        devices: dict[bytes, int] = {}
        for device in range(self.devices):
            part = cut.starts[device].tobytes()
            masks[part] = masks.get(part, 0) | 1 << device
            devices.setdefault(part, device)

        runs: list[_Run] = []
        terms: list[int] = []
        for part, device in devices.items():
            device_runs = _runs(cut, device)
            if device_runs:
                runs += device_runs
                terms.append(masks[part])
        _require_each_once(runs, abs(cut.step), size)

        everywhere = (1 << self.devices) - 1
        return None if terms == [everywhere] else tuple(sorted(terms))


class Split(NamedTuple):
    """The cuts of two dimensions of an array along one of the value: the index of an
    element is the sum of what both hold. If it is overflowing, sums may be beyond the
    value.
    """

    outer: Cut
    inner: Cut
    is_overflowing: bool


def _sums(outer: np.ndarray, inner: np.ndarray) -> np.ndarray:
    """The sums of indices, an array (devices, outer, inner); a hole where one is."""
    is_hole = (outer == HOLE)[:, :, None] | (inner == HOLE)[:, None, :]
    return np.where(is_hole, HOLE, outer[:, :, None] + inner[:, None, :])


def _continued(indices: np.ndarray, step: int, size: int | None) -> np.ndarray:
    """The indices of a dimension of `size`, an array (devices, positions), with those
    that continue the elements of a device in the place of holes, where they are beyond
    the dimension. Holes stay if its size is not known.
    """
    if size is None:
        return indices
    continued = indices.copy()
    steps = np.arange(indices.shape[1]) * step
    for row in continued:
        shifts = (row - steps)[row != HOLE]
        if len(shifts) and (shifts == shifts[0]).all():
            places = steps + shifts[0]
            is_beyond = (places < 0) | (places >= size)
            is_replaced = (row == HOLE) & is_beyond
            row[is_replaced] = places[is_replaced]
    return continued


class _Run(NamedTuple):
    """The positions `offset + i * step` of a dimension, for i from `start` to `stop`.
    `offset` is less than `step`.
    """

    offset: int
    start: int
    stop: int


def _runs(cut: Cut, device: int) -> list[_Run]:
    """What the segments of a cut hold on a device."""
    step = abs(cut.step)
    runs = []
    starts = cut.starts[device].tolist()
    for start, length in zip(starts, cut.lengths, strict=True):
        if start == HOLE:
            continue
        last = start + (length - 1) * cut.step
        lowest = min(start, last)
        if lowest < 0:
            raise Unjudged("a sum over positions beyond the dimension")
        first = lowest // step
        run = _Run(offset=lowest % step, start=first, stop=first + length)
        runs.append(run)
    return runs


def _require_each_once(runs: Sequence[_Run], step: int, size: int) -> None:
    """Raises `Unjudged` unless the runs hold each position of a dimension of `size`
    once.
    """
    count = min(step, size)
    if count > MOST_WRITTEN:
        raise Unjudged("a sum over elements that are too far apart")

    stops = dict.fromkeys(range(count), 0)
    for run in sorted(runs):
        if run.offset >= size or run.stop > _length(run.offset, step, size):
            raise Unjudged("a sum over positions beyond the dimension")
        if run.start < stops[run.offset]:
            raise Unjudged("a sum over parts that overlap")
        if run.start > stops[run.offset]:
            raise Unjudged("a sum over parts that do not cover the dimension")
        stops[run.offset] = run.stop

    for offset, stop in stops.items():
        if stop < _length(offset, step, size):
            raise Unjudged("a sum over parts that do not cover the dimension")


def _length(offset: int, step: int, size: int) -> int:
    """How many positions of a dimension have this offset."""
    return -(-(size - offset) // step)


def _merged(
    lengths: Sequence[int],
    starts: np.ndarray,
    step: int,
) -> tuple[list[int], np.ndarray]:
    """Segments as `Cuts.from_segments` takes them, without empty ones, and with
    neighbours that continue each other on every device as one.
    """
    merged: list[int] = []
    columns: list[int] = []
    for column, length in enumerate(lengths):
        if not length:
            continue
        if merged:
            before = starts[:, columns[-1]]
            now = starts[:, column]
            follows = (before != HOLE) & (now == before + merged[-1] * step)
            are_holes = (before == HOLE) & (now == HOLE)
            if (follows | are_holes).all():
                merged[-1] += length
                continue
        merged.append(length)
        columns.append(column)
    return merged, np.ascontiguousarray(starts[:, columns])
