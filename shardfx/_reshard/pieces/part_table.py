"""The parts of shards as a table: one row of integers for each part. It serves arrays
that move as they are, whose parts are boxes; thousands of devices have millions of
them.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..._convert import Factor, Piece, StridedCopy, dtypes_of, strided_copy
from ..._ground.boxes import Box
from ..._ground.spec import bits
from .integers import firsts, numbered, occurrences, stable_order
from .senders import Holders, Senders
from .shard_part import Links, ShardPart, divided, least_memory_bytes


@dataclasses.dataclass(frozen=True, eq=False)
class PartGroup:
    """Parts of one array that have one shape, so that one program can send them.

    **Arguments:**

    - `key`: the name of the array.
    - `form`: the shape, strides and casts of each part.
    - `memory_bytes`: the memory of a part.
    - `is_local`: whether each device copies its own elements.
    - `senders`, `receivers`: the numbers of the devices of each part.
    - `sources`, `targets`: one row for each part: its position in the sender's shard
      and in the receiver's shard.
    """

    key: str
    form: StridedCopy
    memory_bytes: int
    is_local: bool
    senders: np.ndarray
    receivers: np.ndarray
    sources: np.ndarray
    targets: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class PartTable:
    """The parts of shards from which all devices assemble their shards of an array, as
    a table.

    **Arguments:**

    - `forms`: for each size that parts have, a part at position zero, without sender
      and receiver.
    - `form_numbers`: for each part, the number of its form.
    - `senders`, `receivers`: for each part, the numbers of the two devices.
    - `sources`, `targets`: one row for each part: its position in the sender's shard
      and in the receiver's shard.
    """

    forms: tuple[ShardPart, ...]
    form_numbers: np.ndarray
    senders: np.ndarray
    receivers: np.ndarray
    sources: np.ndarray
    targets: np.ndarray

    @ft.cached_property
    def all(self) -> tuple[ShardPart, ...]:
        """The parts, in the order of the rows."""
        rows = zip(
            self.form_numbers.tolist(),
            self.senders.tolist(),
            self.receivers.tolist(),
            map(tuple, self.sources.tolist()),
            map(tuple, self.targets.tolist()),
            strict=True,
        )
        parts = []
        for number, sender, receiver, source, target in rows:
            form = self.forms[number]
            piece = Piece(form.piece.value, source, target, form.piece.factors)
            parts.append(ShardPart(sender, receiver, piece, form.bytes, form.bits))
        return tuple(parts)

    @ft.cached_property
    def links(self) -> Links:
        """The bytes that devices send each other, in the order of the rows."""
        is_sent = self.senders != self.receivers
        if not is_sent.any():
            return {}
        senders = self.senders[is_sent]
        receivers = self.receivers[is_sent]
        bytes_of_form = np.array([form.bytes for form in self.forms], np.int64)

        span = int(receivers.max()) + 1
        keys, first, number = np.unique(
            senders * span + receivers, return_index=True, return_inverse=True
        )
        totals = np.zeros(len(keys), np.int64)
        np.add.at(totals, number, bytes_of_form[self.form_numbers[is_sent]])
        order = np.argsort(first)
        pairs = zip(
            senders[first[order]].tolist(),
            receivers[first[order]].tolist(),
            strict=True,
        )
        return dict(zip(pairs, totals[order].tolist(), strict=True))

    @property
    def least_memory_bytes(self) -> int:
        """The memory of the smallest parts into which all parts can be divided."""
        return max(map(least_memory_bytes, self.forms), default=0)

    def groups(self, part_bytes: int | None) -> list[PartGroup]:
        """The parts in groups of one shape. Parts of more than `part_bytes` of memory
        are divided; `None` is no limit.
        """
        if not len(self.senders):
            return []
        is_local = self.senders == self.receivers
        kinds = numbered(2 * self.form_numbers + is_local)
        rows_of_kinds = np.split(
            stable_order(kinds.numbers), np.cumsum(np.bincount(kinds.numbers))[:-1]
        )

        sections: dict[tuple[StridedCopy, bool], list[_Section]] = {}
        for rows in sorted(rows_of_kinds, key=lambda rows: rows[0]):
            form = self.forms[self.form_numbers[rows[0]]]
            smaller_parts = [form] if part_bytes is None else divided(form, part_bytes)
            for part in smaller_parts:
                key = (strided_copy(part.piece), bool(is_local[rows[0]]))
                sections.setdefault(key, []).append(_Section(part, rows))

        return [
            self._group(form, is_own, sections_of_form)
            for (form, is_own), sections_of_form in sections.items()
        ]

    def _group(
        self, form: StridedCopy, is_local: bool, sections: Sequence["_Section"]
    ) -> PartGroup:
        rows = np.concatenate([section.rows for section in sections])
        sources = [
            self.sources[section.rows] + np.array(section.part.piece.source, np.int64)
            for section in sections
        ]
        targets = [
            self.targets[section.rows] + np.array(section.part.piece.target, np.int64)
            for section in sections
        ]
        part = sections[0].part
        return PartGroup(
            key=str(part.piece.value.path),
            form=form,
            memory_bytes=part.memory_bytes,
            is_local=is_local,
            senders=self.senders[rows],
            receivers=self.receivers[rows],
            sources=np.concatenate(sources),
            targets=np.concatenate(targets),
        )


class _Section(NamedTuple):
    """The same section of the parts in `rows`: `part` is the section of the part at
    position zero.
    """

    part: ShardPart
    rows: np.ndarray


class TabledParts(NamedTuple):
    """A table of parts, the boxes of the source that no device holds, and the devices of
    each shard that several devices could send.
    """

    table: PartTable
    missing: tuple[Box, ...]
    replicas: tuple[tuple[int, ...], ...]


def tabled_parts(
    piece: Piece,
    targets: Sequence[tuple[int, Box]],
    dtype: object,
    holders: Holders,
    process_of: Mapping[int, int],
    sent: dict[int, int],
) -> TabledParts:
    """Decides which device sends which box of its shard to which device, as
    `shard_parts` does, for a `piece` that copies a whole array.

    `targets` has the device and the box of each shard to assemble, `holders` the
    devices that hold each box of the source, of dtype `dtype`. `process_of` has the
    process of each device, and `sent` the bytes that it has sent.
    """
    rank = len(piece.target)
    source_columns = _columns(list(holders), rank)
    target_columns = _columns([box for _, box in targets], rank)
    overlaps = [
        _overlaps(target, source)
        for target, source in zip(target_columns, source_columns, strict=True)
    ]
    rows = _rows(target_columns, overlaps, len(targets))
    cell_of_row = _cells(rows, overlaps, source_columns, len(holders))

    counts = np.array([len(devices) for devices in holders.values()], np.int64)
    is_held = counts[cell_of_row] > 0
    missing: tuple[Box, ...] = ()
    if not is_held.all():
        missing = _boxes(rows.kept(~is_held), overlaps)
        rows = rows.kept(is_held)
        cell_of_row = cell_of_row[is_held]

    widths = [bits(dtype), *map(bits, dtypes_of(piece.value.casts))]
    sizes = _values_by_part([overlap.sizes for overlap in overlaps], rows)
    forms = _forms(piece, sizes, widths)
    bytes_of_form = np.array([form.bytes for form in forms.parts], np.int64)
    devices = np.array([device for device, _ in targets], np.int64)
    chosen = _senders(
        cell_of_row,
        devices[rows.targets],
        bytes_of_form[forms.numbers],
        list(holders.values()),
        process_of,
        sent,
    )
    table = PartTable(
        forms=forms.parts,
        form_numbers=forms.numbers,
        senders=chosen.senders,
        receivers=devices[rows.targets],
        sources=_values_by_part([overlap.sources for overlap in overlaps], rows),
        targets=_values_by_part([overlap.targets for overlap in overlaps], rows),
    )
    return TabledParts(table=table, missing=missing, replicas=chosen.replicas)


class _Column(NamedTuple):
    """Along one dimension: the starts and stops of the different intervals of some
    boxes, in ascending order, and the number of each box's interval.
    """

    starts: np.ndarray
    stops: np.ndarray
    numbers: np.ndarray


def _columns(boxes: Sequence[Box], rank: int) -> list[_Column]:
    bounds = np.array(boxes, np.int64).reshape(len(boxes), rank, 2)
    columns = []
    for dim in range(rank):
        intervals, numbers = np.unique(bounds[:, dim], axis=0, return_inverse=True)
        column = _Column(
            starts=intervals[:, 0], stops=intervals[:, 1], numbers=numbers.reshape(-1)
        )
        columns.append(column)
    return columns


class _Overlaps(NamedTuple):
    """The overlapping pairs of an interval of the target and one of the source, along
    one dimension. The pairs of one interval of the target are neighbours.

    - `first_pairs`, `counts`: for each interval of the target, its first pair, and how many
      pairs it has.
    - `intervals`: for each pair, the number of the source's interval.
    - `starts`: for each pair, the first common element.
    - `sources`, `targets`: for each pair, the position of this element in the
      source's and in the target's interval.
    - `sizes`: for each pair, the number of common elements.
    """

    first_pairs: np.ndarray
    counts: np.ndarray
    intervals: np.ndarray
    starts: np.ndarray
    sources: np.ndarray
    targets: np.ndarray
    sizes: np.ndarray


def _overlaps(target: _Column, source: _Column) -> _Overlaps:
    low = np.searchsorted(source.stops, target.starts, side="right")
    high = np.searchsorted(source.starts, target.stops, side="left")
    counts = np.where(target.starts < target.stops, np.maximum(high - low, 0), 0)
    first_pairs = np.cumsum(counts) - counts

    target_numbers = np.repeat(np.arange(len(counts)), counts)
    position = np.arange(len(target_numbers)) - first_pairs[target_numbers]
    intervals = low[target_numbers] + position
    starts = np.maximum(target.starts[target_numbers], source.starts[intervals])
    stops = np.minimum(target.stops[target_numbers], source.stops[intervals])
    return _Overlaps(
        first_pairs=first_pairs,
        counts=counts,
        intervals=intervals,
        starts=starts,
        sources=starts - source.starts[intervals],
        targets=starts - target.starts[target_numbers],
        sizes=stops - starts,
    )


class _Rows(NamedTuple):
    """For each part, the number of the shard that it is a part of, and for each
    dimension the number of its pair of overlapping intervals.
    """

    targets: np.ndarray
    pairs: tuple[np.ndarray, ...]

    def kept(self, mask: np.ndarray) -> "_Rows":
        """The rows where `mask` is true."""
        return _Rows(self.targets[mask], tuple(pair[mask] for pair in self.pairs))


def _rows(
    columns: Sequence[_Column], overlaps: Sequence[_Overlaps], count: int
) -> _Rows:
    """The parts of `count` shards, shard by shard. Those of one shard are all
    combinations of its overlaps along each dimension, the last one fastest.
    """
    counts_by_dim = [
        overlap.counts[column.numbers]
        for column, overlap in zip(columns, overlaps, strict=True)
    ]
    parts_of_shard = np.ones(count, np.int64)
    for counts in counts_by_dim:
        parts_of_shard = parts_of_shard * counts
    targets = np.repeat(np.arange(count), parts_of_shard)
    first_parts = np.cumsum(parts_of_shard) - parts_of_shard

    remaining = np.arange(len(targets)) - first_parts[targets]
    pairs: list[np.ndarray] = []
    for dim in reversed(range(len(columns))):
        radix = counts_by_dim[dim][targets]
        interval = columns[dim].numbers[targets]
        pairs.insert(0, overlaps[dim].first_pairs[interval] + remaining % radix)
        remaining = remaining // radix
    return _Rows(targets=targets, pairs=tuple(pairs))


def _cells(
    rows: _Rows, overlaps: Sequence[_Overlaps], columns: Sequence[_Column], count: int
) -> np.ndarray:
    """For each part, the position of its box among the `count` boxes of the source,
    which form a grid.
    """
    if not columns:
        return np.zeros(len(rows.targets), np.int64)
    grid_shape = [len(column.starts) for column in columns]
    cells = np.zeros(grid_shape, np.int64)
    cells[tuple([column.numbers for column in columns])] = np.arange(count)
    index = [
        overlap.intervals[pair]
        for overlap, pair in zip(overlaps, rows.pairs, strict=True)
    ]
    return cells[tuple(index)]


def _values_by_part(values_by_dim: Sequence[np.ndarray], rows: _Rows) -> np.ndarray:
    """One row for each part, with the value of its pair along each dimension."""
    columns = [
        values[pair] for values, pair in zip(values_by_dim, rows.pairs, strict=True)
    ]
    if not columns:
        return np.zeros((len(rows.targets), 0), np.int64)
    return np.stack(columns, axis=1)


def _boxes(rows: _Rows, overlaps: Sequence[_Overlaps]) -> tuple[Box, ...]:
    """The different boxes of the source that the parts read, in the order of the rows."""
    starts = _values_by_part([overlap.starts for overlap in overlaps], rows)
    sizes = _values_by_part([overlap.sizes for overlap in overlaps], rows)
    boxes: dict[Box, None] = {}
    for low, high in zip(starts.tolist(), (starts + sizes).tolist(), strict=True):
        boxes[tuple(zip(low, high, strict=True))] = None
    return tuple(boxes)


class _Forms(NamedTuple):
    """For each size of parts, a part at position zero; and each part's number among
    these.
    """

    parts: tuple[ShardPart, ...]
    numbers: np.ndarray


def _forms(piece: Piece, sizes: np.ndarray, widths: Sequence[int]) -> _Forms:
    """The forms of parts of `piece`. `sizes` has one row for each part, and `widths` the
    bits of an element on its way.
    """
    keys = np.zeros(len(sizes), np.int64)
    for column in sizes.T:
        sizes_of_dim = numbered(column)
        keys = keys * max(1, len(sizes_of_dim.values)) + sizes_of_dim.numbers
    different, numbers = numbered(keys)

    rank = len(piece.target)
    parts = []
    for first in firsts(numbers, len(different)).tolist():
        shape = sizes[first].tolist()
        factors = [
            Factor(size, dim, 1, dim, 1) for dim, size in enumerate(shape) if size != 1
        ]
        form = Piece(
            value=piece.value,
            source=(0,) * rank,
            target=(0,) * rank,
            factors=tuple(factors),
        )
        nbytes = -(-math.prod(shape) * min(widths) // 8)
        part = ShardPart(
            sender=-1, receiver=-1, piece=form, bytes=nbytes, bits=max(widths)
        )
        parts.append(part)
    return _Forms(parts=tuple(parts), numbers=numbers)


class _Chosen(NamedTuple):
    """The sender of each part, and the devices of each shard that several devices could
    send.
    """

    senders: np.ndarray
    replicas: tuple[tuple[int, ...], ...]


def _senders(
    cells: np.ndarray,
    receivers: np.ndarray,
    part_bytes: np.ndarray,
    holders: Sequence[Sequence[int]],
    process_of: Mapping[int, int],
    sent: dict[int, int],
) -> _Chosen:
    """Chooses the sender of each part as `Senders.choose` does, those of the largest
    parts first. A device sends to itself what it holds.

    `cells`, `receivers` and `part_bytes` have, for each part, the number of its shard
    of the source, the receiver, and its bytes. `holders` has the devices of each shard;
    no device holds two.
    """
    # The number -1 stands for the host.
    numbers = np.array([device for devices in holders for device in devices], np.int64)
    counts = np.array([len(devices) for devices in holders], np.int64)
    first_holders = np.cumsum(counts) - counts
    most = max(numbers.max(initial=0), receivers.max(initial=0))
    cell_of_device = np.full(int(most) + 2, -1, np.int64)
    cell_of_device[numbers + 1] = np.repeat(np.arange(len(holders)), counts)

    is_own = cell_of_device[receivers + 1] == cells
    senders = receivers.copy()
    senders[~is_own] = numbers[first_holders[cells[~is_own]]]
    (rows,) = np.nonzero(~is_own & (counts[cells] > 1))
    rows = rows[np.argsort(-part_bytes[rows], kind="stable")]
    if not len(rows):
        return _Chosen(senders=senders, replicas=())

    cells_to_send, cell_numbers = numbered(cells[rows])
    first_rows = firsts(cell_numbers, len(cells_to_send))
    several = [tuple(holders[cell]) for cell in cells_to_send.tolist()]
    replicas = [several[number] for number in np.argsort(first_rows).tolist()]
    if _take_turns(cell_numbers, part_bytes[rows], several, process_of, sent):
        turns = occurrences(cell_numbers) % counts[cells[rows]]
        senders[rows] = numbers[first_holders[cells[rows]] + turns]
        return _Chosen(senders=senders, replicas=tuple(replicas))

    choices = [Senders(devices, process_of, sent) for devices in several]
    for row, number in zip(rows.tolist(), cell_numbers.tolist(), strict=True):
        nbytes = int(part_bytes[row])
        senders[row] = choices[number].choose(int(receivers[row]), nbytes)
    return _Chosen(senders=senders, replicas=tuple(replicas))


def _take_turns(
    cells: np.ndarray,
    part_bytes: np.ndarray,
    holders: Sequence[Sequence[int]],
    process_of: Mapping[int, int],
    sent: Mapping[int, int],
) -> bool:
    """Whether the devices that have sent the fewest bytes take turns: they are in one
    process, have sent equally much before, and send parts of one size.
    """
    if len(set(process_of.values())) > 1:
        return False
    for devices in holders:
        if len({sent.get(device, 0) for device in devices}) > 1:
            return False
    least = np.full(len(holders), np.iinfo(np.int64).max)
    np.minimum.at(least, cells, part_bytes)
    return bool((least[cells] == part_bytes).all())
