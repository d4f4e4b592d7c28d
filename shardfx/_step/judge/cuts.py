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

    def on(self, device: int) -> str:
        """The text of what a device holds: "[4:8]"."""
        parts = []
        for start, length in zip(
            self.starts[device].tolist(), self.lengths, strict=True
        ):
            step = f":{self.step}" if self.step != 1 and length > 1 else ""
            stop = start + (length - 1) * self.step + (1 if self.step > 0 else -1)
            parts.append("nothing" if start == HOLE else f"[{start}:{stop}{step}]")
        return " and ".join(parts) or "nothing"


class Cuts:
    """All cuts of one judge, for its number of devices."""

    def __init__(self, devices: int):
        self.devices = devices
        # The cuts of arrays, by sharding, shape and the shape of a shard.
        self.by_sharding: dict[tuple[object, ...], list[Cut]] = {}
        self._known: dict[object, Cut] = {}
        self._joined: dict[tuple[int, int], Cut | None] = {}
        self._terms: dict[tuple[int, int], tuple[int, ...] | None] = {}

    def made(self, lengths: Sequence[int], starts: np.ndarray, step: int = 1) -> Cut:
        """The cut with these segments, in its canonical form: neighbours that continue
        each other on every device are one segment.
        """
        starts = starts.astype(np.int64, copy=False)
        if sum(lengths) <= 1:
            step = 1
        if len(lengths) > 1:
            lengths, starts = _merged(lengths, starts, step)
        if all(length == 1 for length in lengths):
            step = 1
        key = (tuple(lengths), step, starts.tobytes())
        cut = self._known.get(key)
        if cut is None:
            size = sum(lengths)
            cut = Cut(
                lengths=key[0],
                starts=starts,
                step=step,
                size=size,
                has_holes=bool((starts == HOLE).any()),
                is_first=size == 1 and not starts.any(),
            )
            self._known[key] = cut
        return cut

    def whole(self, size: int) -> Cut:
        return self.made((size,), np.zeros((self.devices, 1), np.int64))

    def from_starts(self, starts: np.ndarray, size: int, step: int = 1) -> Cut:
        """The cut with one segment of `size` positions at each device's start."""
        return self.made((size,), np.asarray(starts).reshape(self.devices, 1), step)

    def holes(self, size: int) -> Cut:
        return self.from_starts(np.full(self.devices, HOLE), size)

    def indices(self, cut: Cut) -> np.ndarray:
        """The index that each position holds: an array (devices, positions)."""
        if cut.size * self.devices > MOST_WRITTEN:
            raise Unjudged("pieces of arrays that are too long to be written out")
        columns = []
        for column, length in enumerate(cut.lengths):
            start = cut.starts[:, column : column + 1]
            within = start + np.arange(length) * cut.step
            columns.append(np.where(start == HOLE, HOLE, within))
        if not columns:
            return np.zeros((self.devices, 0), np.int64)
        return np.concatenate(columns, axis=1)

    def from_indices(self, indices: np.ndarray) -> Cut:
        """The cut whose positions hold these indices, an array (devices, positions)."""
        size = indices.shape[1]
        if size <= 1:
            return self.made((1,) * size, indices)
        ahead, behind = indices[:, 1:], indices[:, :-1]
        are_holes = (ahead == HOLE) & (behind == HOLE)
        are_both = (ahead != HOLE) & (behind != HOLE)
        steps = np.unique((ahead - behind)[are_both])
        step = int(steps[0]) if len(steps) == 1 and steps[0] != 0 else 1
        continues = (are_holes | (are_both & (ahead - behind == step))).all(axis=0)
        firsts = np.concatenate([[0], np.flatnonzero(~continues) + 1])
        lengths = np.diff(np.concatenate([firsts, [size]]))
        return self.made(lengths.tolist(), indices[:, firsts], step)

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
        if not first_cut.has_holes and not other.has_holes:
            return None
        first, second = self.indices(first_cut), self.indices(other)
        has_both = (first != HOLE) & (second != HOLE)
        if (first != second)[has_both].any():
            return None
        return self.from_indices(np.where(has_both, first, HOLE))

    def window(self, cut: Cut, offsets: np.ndarray, size: int, stride: int = 1) -> Cut:
        """The cut of every `stride`-th position from each device's offset."""
        if len(cut.lengths) == 1:
            starts = cut.starts[:, 0]
            moved = np.where(starts == HOLE, HOLE, starts + offsets * cut.step)
            return self.from_starts(moved, size, cut.step * stride)
        indices = self.indices(cut)
        columns = offsets[:, None] + np.arange(size) * stride
        return self.from_indices(np.take_along_axis(indices, columns, axis=1))

    def concatenated(self, cuts: Sequence[Cut]) -> Cut:
        steps = {cut.step for cut in cuts if cut.size > 1}
        if len(steps) > 1:
            rows = [self.indices(cut) for cut in cuts]
            return self.from_indices(np.concatenate(rows, axis=1))
        lengths = [length for cut in cuts for length in cut.lengths]
        starts = np.concatenate([cut.starts for cut in cuts], axis=1)
        if not steps:
            return self.from_indices(starts)
        return self.made(lengths, starts, steps.pop())

    def taken(self, cut: Cut, sources: np.ndarray) -> Cut:
        """The cut after each device received the array of its source; -1 for none."""
        starts = np.where(sources[:, None] < 0, HOLE, cut.starts[sources])
        return self.made(cut.lengths, starts, cut.step)

    def moved(self, cut: Cut, factor: int, offset: int | np.ndarray) -> Cut:
        """The cut in a dimension where index i has the index `factor * i + offset`."""
        shift = np.asarray(offset).reshape(-1, 1)
        starts = np.where(cut.starts == HOLE, HOLE, cut.starts * factor + shift)
        return self.made(cut.lengths, starts, cut.step * factor)

    def is_whole(self, cut: Cut, size: int) -> bool:
        return (
            cut.lengths == (size,)
            and not cut.starts.any()
            and (cut.step == 1 or size == 1)
        )

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
        _, first, owners = np.unique(
            cut.starts, axis=0, return_index=True, return_inverse=True
        )
        runs = []
        masks = []
        for number, device in enumerate(first.tolist()):
            devices = np.flatnonzero(owners.reshape(-1) == number).tolist()
            own_runs = _runs(cut, device)
            if own_runs:
                runs += own_runs
                masks.append(sum(1 << device for device in devices))
        _require_each_once(runs, abs(cut.step), size)
        everywhere = (1 << self.devices) - 1
        return None if masks == [everywhere] else tuple(sorted(masks))


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
    for start, length in zip(cut.starts[device].tolist(), cut.lengths, strict=True):
        if start == HOLE:
            continue
        lowest = start if cut.step > 0 else start + (length - 1) * cut.step
        if lowest < 0:
            raise Unjudged("a sum over positions beyond the dimension")
        first = lowest // step
        runs.append(_Run(offset=lowest % step, start=first, stop=first + length))
    return runs


def _require_each_once(runs: Sequence[_Run], step: int, size: int) -> None:
    """Raises `Unjudged` unless the runs hold each position of a dimension of `size`
    once.
    """
    if min(step, size) > MOST_WRITTEN:
        raise Unjudged("a sum over elements that are too far apart")
    stops = dict.fromkeys(range(min(step, size)), 0)
    for run in sorted(runs):
        if run.offset >= size or run.stop > -(-(size - run.offset) // step):
            raise Unjudged("a sum over positions beyond the dimension")
        if run.start < stops[run.offset]:
            raise Unjudged("a sum over parts that overlap")
        if run.start > stops[run.offset]:
            raise Unjudged("a sum over parts that do not cover the dimension")
        stops[run.offset] = run.stop
    if any(end < -(-(size - offset) // step) for offset, end in stops.items()):
        raise Unjudged("a sum over parts that do not cover the dimension")


def _merged(
    lengths: Sequence[int], starts: np.ndarray, step: int
) -> tuple[list[int], np.ndarray]:
    merged: list[int] = []
    columns: list[int] = []
    for column, length in enumerate(lengths):
        if not length:
            continue
        if merged:
            before, now = starts[:, columns[-1]], starts[:, column]
            follows = (before != HOLE) & (now == before + merged[-1] * step)
            if (follows | ((before == HOLE) & (now == HOLE))).all():
                merged[-1] += length
                continue
        merged.append(length)
        columns.append(column)
    return merged, np.ascontiguousarray(starts[:, columns])
