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
    - `is_first_element`: whether there is one position, and each device holds the first
      element.

    Equal cuts of one judge are one object, so `is` compares them.
    """

    lengths: tuple[int, ...]
    starts: np.ndarray
    step: int
    size: int
    has_holes: bool
    is_first_element: bool

    def text_on(self, device: int) -> str:
        """The indices that a device holds, one slice for each segment: "[4:8] and
        [0:2]".
        """
        starts = self.starts[device].tolist()
        segment_texts = [
            self._segment_text(start, length)
            for start, length in zip(starts, self.lengths, strict=True)
        ]
        return " and ".join(segment_texts) or "nothing"

    def _segment_text(self, start: int, length: int) -> str:
        """The indices of one segment as a slice: "[4:8]", or "[7:3:-1]"; "nothing" for
        a hole. `start` is the index of its first element, and `length` the number of
        its positions.
        """
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
        # Each cut, by its lengths, its step and the bytes of its starts.
        self._known: dict[object, Cut] = {}
        # What `joined` returns, by the ids of both cuts.
        self._joined: dict[tuple[int, int], Cut | None] = {}
        # What `terms` returns, by the id of the cut and the size of the dimension.
        self._terms: dict[tuple[int, int], tuple[int, ...] | None] = {}

    def from_segments(
        self,
        lengths: Sequence[int],
        starts: np.ndarray,
        step: int = 1,
    ) -> Cut:
        """The cut with these segments, in its canonical form: neighbours that continue
        each other on every device are one segment. `lengths`, `starts` (an array of
        shape (devices, segments)) and `step` are as in a `Cut`.
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
            is_first_element=size == 1 and not starts.any(),
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
        distances = np.diff(indices, axis=1)
        is_hole = indices == HOLE
        first_distance = int(distances[0, 0])
        # Most arrays are one segment. The other ones take ten times as long.
        if first_distance and (distances == first_distance).all() and not is_hole.any():
            return self.from_segments((size,), indices[:, :1], first_distance)

        are_holes = is_hole[:, 1:] & is_hole[:, :-1]
        are_elements = ~is_hole[:, 1:] & ~is_hole[:, :-1]
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

    def joined(self, first_cut: Cut, second_cut: Cut) -> Cut | None:
        """The cut of an operation's result whose two operands have these cuts. It has
        holes where an operand has holes. `None` if a device holds different elements of
        the two at one position.
        """
        if first_cut is second_cut:
            return first_cut
        key = (id(first_cut), id(second_cut))
        if key not in self._joined:
            self._joined[key] = self._join(first_cut, second_cut)
        return self._joined[key]

    def _join(self, first_cut: Cut, second_cut: Cut) -> Cut | None:
        """As `joined`, for cuts that are not one object. Equal cuts are, so two of them
        without holes differ.
        """
        if not first_cut.has_holes and not second_cut.has_holes:
            return None
        first_indices = self.indices(first_cut)
        second_indices = self.indices(second_cut)
        have_both = (first_indices != HOLE) & (second_indices != HOLE)
        if (first_indices != second_indices)[have_both].any():
            return None
        indices = np.where(have_both, first_indices, HOLE)
        return self.from_indices(indices)

    def window(self, cut: Cut, offsets: np.ndarray, size: int, stride: int = 1) -> Cut:
        """The cut of a slice of a dimension that has the cut `cut`: of `size`
        positions, at every `stride`-th from each device's offset. `offsets` holds a
        position for each device.
        """
        if len(cut.lengths) == 1:
            starts = cut.starts[:, 0]
            window_starts = np.where(starts == HOLE, HOLE, starts + offsets * cut.step)
            return self.from_starts(window_starts, size, cut.step * stride)
        positions = offsets[:, None] + np.arange(size) * stride
        indices = np.take_along_axis(self.indices(cut), positions, axis=1)
        return self.from_indices(indices)

    def concatenated(self, cuts: Sequence[Cut]) -> Cut:
        """The cut of dimensions with these cuts, put side by side."""
        steps = {cut.step for cut in cuts if cut.size > 1}
        if len(steps) > 1:
            index_arrays = [self.indices(cut) for cut in cuts]
            indices = np.concatenate(index_arrays, axis=1)
            return self.from_indices(indices)

        starts = np.concatenate([cut.starts for cut in cuts], axis=1)
        if not steps:
            # Each cut has one position at most, so its starts are its indices.
            return self.from_indices(starts)
        lengths: list[int] = []
        for cut in cuts:
            lengths += cut.lengths
        return self.from_segments(lengths, starts, steps.pop())

    def split(self, cut: Cut, size: int, whole_size: int | None) -> "Split":
        """The cuts of the two dimensions, the inner one of `size`, into which a reshape
        splits a dimension that has the cut `cut`. Each index is the sum of an outer and
        an inner one, as in a `Split`; raises `Unjudged` if there are no such sums.

        `whole_size` is the size of the value's dimension; `None` if it is not known.
        Holes beyond it are given the indices that continue those of the elements, and
        the split is overflowing.
        """
        outer_size = cut.size // size
        if len(cut.lengths) == 1 and not cut.has_holes:
            outer = self.from_starts(cut.starts[:, 0], outer_size, cut.step * size)
            inner = self.from_starts(np.zeros(self.devices, np.int64), size, cut.step)
            return Split(outer, inner, is_overflowing=False)
        indices = self.indices(cut)
        continued_indices = _continued(indices, cut.step, whole_size)
        indices_by_outer = continued_indices.reshape(self.devices, outer_size, size)
        is_overflowing = bool((continued_indices != indices).any())
        return self._in_two(indices_by_outer, cut.step, is_overflowing)

    def exchanged(
        self,
        cut: Cut,
        senders: np.ndarray,
        whole_size: int | None,
    ) -> "Split":
        """The cuts after each device received what its senders hold of a dimension of
        `whole_size` that has the cut `cut`: those of the dimension that numbers the
        senders, and of the dimension itself. `senders` is an array of shape (devices,
        senders of each). Holes are as in `split`.
        """
        if len(cut.lengths) == 1 and not cut.has_holes:
            outer = self.from_indices(cut.starts[:, 0][senders])
            zeros = np.zeros(self.devices, np.int64)
            inner = self.from_starts(zeros, cut.size, cut.step)
            return Split(outer, inner, is_overflowing=False)
        indices = self.indices(cut)
        continued_indices = _continued(indices, cut.step, whole_size)
        is_overflowing = bool((continued_indices != indices).any())
        return self._in_two(continued_indices[senders], cut.step, is_overflowing)

    def _in_two(
        self,
        indices_by_outer: np.ndarray,
        step: int,
        is_overflowing: bool,
    ) -> "Split":
        """The cuts of two dimensions, from the indices of their elements: an array of
        shape (devices, outer, inner). Each index becomes the sum of an outer and an
        inner one. `step` is the distance between the indices of two inner neighbours.
        """
        _, outer_size, inner_size = indices_by_outer.shape
        outer_indices = np.full((self.devices, outer_size), HOLE)
        inner_indices = np.full((self.devices, inner_size), HOLE)
        for device, device_indices in enumerate(indices_by_outer):
            is_element = device_indices != HOLE
            rows = np.flatnonzero(is_element.any(axis=1))
            columns = np.flatnonzero(is_element.any(axis=0))
            if not len(rows):
                # A device that holds nothing has no row, and its columns may be any.
                inner_indices[device] = np.arange(inner_size) * step
                continue
            first_row = device_indices[rows[0], columns]
            first_column = device_indices[rows, columns[0]]
            first_inner = columns[0] * step
            outer_indices[device, rows] = first_column - first_inner
            inner_indices[device, columns] = first_row - first_row[0] + first_inner
        if (_sums(outer_indices, inner_indices) != indices_by_outer).any():
            raise Unjudged("a reshape of a dimension in pieces")
        outer = self.from_indices(outer_indices)
        inner = self.from_indices(inner_indices)
        return Split(outer=outer, inner=inner, is_overflowing=is_overflowing)

    def within(self, cut: Cut, size: int) -> Cut:
        """The cut with holes in the place of indices beyond a dimension of `size`."""
        indices = self.indices(cut)
        is_within = (indices >= 0) & (indices < size)
        return self.from_indices(np.where(is_within, indices, HOLE))

    def merged(self, outer: Cut, inner: Cut) -> Cut:
        """The cut of the dimension into which a reshape merges an outer and an inner
        dimension, whose indices add up to that of one dimension of the value. Raises
        `Unjudged` if they do not continue each other.
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
        # A part is known by its starts, as bytes. Its devices are a bit mask, and one
        # of them stands for all.
        mask_by_part: dict[bytes, int] = {}
        device_by_part: dict[bytes, int] = {}
        for device in range(self.devices):
            part = cut.starts[device].tobytes()
            mask_by_part[part] = mask_by_part.get(part, 0) | 1 << device
            device_by_part.setdefault(part, device)

        runs: list[_Run] = []
        terms: list[int] = []
        for part, device in device_by_part.items():
            device_runs = _runs(cut, device)
            if device_runs:
                runs += device_runs
                terms.append(mask_by_part[part])
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
    """The indices that a device holds of a dimension of `size`, an array of shape
    (devices, positions), after holes beyond the dimension are replaced: `[6, 7, HOLE]`
    of a dimension of 8 is `[6, 7, 8]`. This needs elements that are neighbours at the
    distance `step`. Holes stay if the size is `None`, which is not known.
    """
    if size is None:
        return indices
    continued = indices.copy()
    distances = np.arange(indices.shape[1]) * step
    for row in continued:
        # The index that position 0 has or would have, by each element.
        first_indices = (row - distances)[row != HOLE]
        if len(first_indices) and (first_indices == first_indices[0]).all():
            continued_row = distances + first_indices[0]
            is_beyond = (continued_row < 0) | (continued_row >= size)
            is_replaced = (row == HOLE) & is_beyond
            row[is_replaced] = continued_row[is_replaced]
    return continued


class _Run(NamedTuple):
    """The positions `offset + i * step` of a dimension, for i from `start` to `stop`.
    `offset` is less than `step`.
    """

    offset: int
    start: int
    stop: int


def _runs(cut: Cut, device: int) -> list[_Run]:
    """The elements that each segment of a cut holds on a device, as runs. Elements at
    the distance `step` are neighbours: with the step 2, the indices 5, 7 and 9 are the
    run with the offset 1 from 2 to 5.
    """
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
    """Raises `Unjudged` unless the runs of all devices together hold each index of a
    dimension of `size` once. `step` is the distance of neighbours in a run.
    """
    offset_count = min(step, size)
    if offset_count > MOST_WRITTEN:
        raise Unjudged("a sum over elements that are too far apart")

    stop_by_offset = dict.fromkeys(range(offset_count), 0)
    for run in sorted(runs):
        if run.offset >= size or run.stop > _length(run.offset, step, size):
            raise Unjudged("a sum over positions beyond the dimension")
        if run.start < stop_by_offset[run.offset]:
            raise Unjudged("a sum over parts that overlap")
        if run.start > stop_by_offset[run.offset]:
            raise Unjudged("a sum over parts that do not cover the dimension")
        stop_by_offset[run.offset] = run.stop

    for offset, stop in stop_by_offset.items():
        if stop < _length(offset, step, size):
            raise Unjudged("a sum over parts that do not cover the dimension")


def _length(offset: int, step: int, size: int) -> int:
    """How many indices of a dimension of `size` have this offset: `offset`, `offset +
    step`, ...
    """
    return -(-(size - offset) // step)


def _merged(
    lengths: Sequence[int],
    starts: np.ndarray,
    step: int,
) -> tuple[list[int], np.ndarray]:
    """Segments as `Cuts.from_segments` takes them, without empty ones, and with
    neighbours that continue each other on every device as one. Returns the lengths and
    the starts.
    """
    merged: list[int] = []
    kept_columns: list[int] = []
    for column, length in enumerate(lengths):
        if not length:
            continue
        if merged:
            starts_before = starts[:, kept_columns[-1]]
            starts_here = starts[:, column]
            follows = (starts_before != HOLE) & (
                starts_here == starts_before + merged[-1] * step
            )
            are_holes = (starts_before == HOLE) & (starts_here == HOLE)
            if (follows | are_holes).all():
                merged[-1] += length
                continue
        merged.append(length)
        kept_columns.append(column)
    return merged, np.ascontiguousarray(starts[:, kept_columns])
