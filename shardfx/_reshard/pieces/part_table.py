"""The parts of shards as a table: one row of integers for each part. It serves arrays
that move as they are, whose parts are boxes; thousands of devices have millions of
them.
"""

import dataclasses
import functools as ft
import itertools as it
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..._convert import Piece, StridedCopy, strided_copy, whole
from ..._ground.boxes import Box
from .integers import firsts, numbered, occurrences, stable_order
from .senders import Holders, Senders
from .shard_part import (
    Links,
    ShardPart,
    bits_on_the_way,
    divided,
    least_memory_bytes,
    unsent,
)


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
            piece = Piece(
                value=form.piece.value,
                source=source,
                target=target,
                factors=form.piece.factors,
            )
            part = ShardPart(
                sender=sender,
                receiver=receiver,
                piece=piece,
                bytes=form.bytes,
                bits=form.bits,
            )
            parts.append(part)
        return tuple(parts)

    @ft.cached_property
    def links(self) -> Links:
        """The bytes that devices send each other, by sender and receiver, in the order
        of the rows. Copies within a device are left out.
        """
        is_sent = self.senders != self.receivers
        if not is_sent.any():
            return {}
        senders = self.senders[is_sent]
        receivers = self.receivers[is_sent]
        part_bytes = _bytes_of(self.forms)[self.form_numbers[is_sent]]

        # A pair of devices as one integer.
        span = int(receivers.max()) + 1
        links, first_rows, link_of_part = np.unique(
            senders * span + receivers,
            return_index=True,
            return_inverse=True,
        )
        link_bytes = np.zeros(len(links), np.int64)
        np.add.at(link_bytes, link_of_part, part_bytes)

        order = np.argsort(first_rows)
        first_rows = first_rows[order]
        devices = zip(
            senders[first_rows].tolist(), receivers[first_rows].tolist(), strict=True
        )
        return dict(zip(devices, link_bytes[order].tolist(), strict=True))

    @property
    def least_memory_bytes(self) -> int:
        """The memory of the smallest parts into which all parts can be divided."""
        return max(map(least_memory_bytes, self.forms), default=0)

    def groups(self, part_bytes: int | None) -> list[PartGroup]:
        """The parts in groups of one shape. Parts of more than `part_bytes` of memory
        are divided into sections; `None` is no limit. A form is a part at position zero
        that stands for all parts of its shape.
        """
        if not len(self.senders):
            return []
        is_local = self.senders == self.receivers
        # A kind is a form, and whether the parts are local.
        kinds = numbered(2 * self.form_numbers + is_local).numbers
        kind_stops = np.cumsum(np.bincount(kinds))
        rows_of_kinds = np.split(stable_order(kinds), kind_stops[:-1])

        sections: dict[tuple[StridedCopy, bool], list[_Section]] = {}
        for rows in sorted(rows_of_kinds, key=lambda rows: rows[0]):
            first_row = rows[0]
            form = self.forms[self.form_numbers[first_row]]
            smaller_parts = [form] if part_bytes is None else divided(form, part_bytes)
            for part in smaller_parts:
                key = (strided_copy(part.piece), bool(is_local[first_row]))
                sections.setdefault(key, []).append(_Section(part, rows))

        return [
            self._group(form, copies_locally, sections_of_form)
            for (form, copies_locally), sections_of_form in sections.items()
        ]

    def _group(
        self,
        form: StridedCopy,
        is_local: bool,
        sections: Sequence["_Section"],
    ) -> PartGroup:
        """The group of the parts in `sections`, all of the form `form`. `is_local` says
        whether each device copies its own elements.
        """
        sources: list[np.ndarray] = []
        targets: list[np.ndarray] = []
        for part, rows in sections:
            # Positions in the table are those of the whole parts.
            source_in_part = np.array(part.piece.source, np.int64)
            target_in_part = np.array(part.piece.target, np.int64)
            sources.append(self.sources[rows] + source_in_part)
            targets.append(self.targets[rows] + target_in_part)
        part = sections[0].part
        all_rows = np.concatenate([section.rows for section in sections])
        return PartGroup(
            key=str(part.piece.value.path),
            form=form,
            memory_bytes=part.memory_bytes,
            is_local=is_local,
            senders=self.senders[all_rows],
            receivers=self.receivers[all_rows],
            sources=np.concatenate(sources),
            targets=np.concatenate(targets),
        )


def _bytes_of(forms: Sequence[ShardPart]) -> np.ndarray:
    """The bytes that are sent for a part of each form."""
    return np.array([form.bytes for form in forms], np.int64)


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
    group_of: Mapping[int, int],
    sent: dict[int, int],
) -> TabledParts:
    """Decides which device sends which box of its shard to which device, as
    `shard_parts` does, for a `piece` that copies a whole array.

    `targets` has the device and the box of each shard to assemble, `holders` the
    devices that hold each box of the source, of dtype `dtype`. `group_of` has the
    group of each device, and `sent` the bytes that it has sent.

    A part is what a box of the target and a box of the source, a cell, have in common.
    `rows` gives each part by its overlapping intervals along each dimension.
    """
    devices = np.array([device for device, _ in targets], np.int64)
    target_boxes = [box for _, box in targets]
    rank = len(piece.target)
    source_columns = _columns(list(holders), rank)
    target_columns = _columns(target_boxes, rank)
    overlaps = list(map(_overlaps, target_columns, source_columns))
    rows = _rows(target_columns, overlaps, len(targets))
    cell_of_row = _cells(rows, overlaps, source_columns, len(holders))

    is_held = _lengths(list(holders.values()))[cell_of_row] > 0
    missing: tuple[Box, ...] = ()
    if not is_held.all():
        missing = _boxes(rows.kept(~is_held), overlaps)
        rows = rows.kept(is_held)
        cell_of_row = cell_of_row[is_held]

    widths = bits_on_the_way(piece.value, dtype)
    sizes = _values_by_part(rows, overlaps, lambda overlap: overlap.sizes)
    forms = _forms(piece, sizes, widths)
    receivers = devices[rows.shard_numbers]
    chosen = _senders(
        cells=cell_of_row,
        receivers=receivers,
        part_bytes=_bytes_of(forms.parts)[forms.numbers],
        holders=list(holders.values()),
        group_of=group_of,
        sent=sent,
    )
    table = PartTable(
        forms=forms.parts,
        form_numbers=forms.numbers,
        senders=chosen.senders,
        receivers=receivers,
        sources=_values_by_part(
            rows, overlaps, lambda overlap: overlap.starts_in_source
        ),
        targets=_values_by_part(
            rows, overlaps, lambda overlap: overlap.starts_in_target
        ),
    )
    return TabledParts(table=table, missing=missing, replicas=chosen.replicas)


def _lengths(sequences: Sequence[Sequence[object]]) -> np.ndarray:
    """The length of each sequence."""
    return np.array(list(map(len, sequences)), np.int64)


class _Column(NamedTuple):
    """Along one dimension: the starts and stops of the different intervals of some
    boxes, in ascending order, and the number of each box's interval.
    """

    starts: np.ndarray
    stops: np.ndarray
    interval_of_box: np.ndarray


def _columns(boxes: Sequence[Box], rank: int) -> list[_Column]:
    """For each of `rank` dimensions, the different intervals that `boxes` have along
    it, and the number of each box's interval among these.
    """
    bounds = np.array(boxes, np.int64).reshape(len(boxes), rank, 2)
    columns = []
    for dim in range(rank):
        intervals, numbers = np.unique(bounds[:, dim], axis=0, return_inverse=True)
        column = _Column(
            starts=intervals[:, 0],
            stops=intervals[:, 1],
            interval_of_box=numbers.reshape(-1),
        )
        columns.append(column)
    return columns


class _Overlaps(NamedTuple):
    """The overlapping pairs of an interval of the target and one of the source, along
    one dimension. The pairs of one interval of the target are neighbours.

    - `first_pairs`, `pair_counts`: for each interval of the target, the number of its
      first pair, and how many pairs it has.
    - `source_intervals`: for each pair, the number of the source's interval.
    - `starts`: for each pair, the first common element.
    - `starts_in_source`, `starts_in_target`: for each pair, the position of this
      element in the source's and in the target's interval.
    - `sizes`: for each pair, the number of common elements.
    """

    first_pairs: np.ndarray
    pair_counts: np.ndarray
    source_intervals: np.ndarray
    starts: np.ndarray
    starts_in_source: np.ndarray
    starts_in_target: np.ndarray
    sizes: np.ndarray


def _overlaps(target: _Column, source: _Column) -> _Overlaps:
    """The pairs of an interval of `target` and an interval of `source` that overlap
    along one dimension, the pairs of one interval of the target after those of another.
    The intervals of the source lie side by side, so those that overlap one of the
    target are neighbours.
    """
    # Of the source's intervals, the first that overlaps and the first behind it that
    # does not.
    first_intervals = np.searchsorted(source.stops, target.starts, side="right")
    stop_intervals = np.searchsorted(source.starts, target.stops, side="left")
    is_empty = target.starts >= target.stops
    pair_counts = np.maximum(stop_intervals - first_intervals, 0)
    pair_counts[is_empty] = 0
    first_pairs = np.cumsum(pair_counts) - pair_counts

    # For each pair, the numbers of its two intervals.
    target_intervals = np.repeat(np.arange(len(pair_counts)), pair_counts)
    pair_in_target = np.arange(len(target_intervals)) - first_pairs[target_intervals]
    source_intervals = first_intervals[target_intervals] + pair_in_target
    source_starts = source.starts[source_intervals]
    target_starts = target.starts[target_intervals]
    starts = np.maximum(target_starts, source_starts)
    stops = np.minimum(target.stops[target_intervals], source.stops[source_intervals])
    return _Overlaps(
        first_pairs=first_pairs,
        pair_counts=pair_counts,
        source_intervals=source_intervals,
        starts=starts,
        starts_in_source=starts - source_starts,
        starts_in_target=starts - target_starts,
        sizes=stops - starts,
    )


class _Rows(NamedTuple):
    """For each part, the number of the shard that it is a part of, and for each
    dimension the number of its pair of overlapping intervals.
    """

    shard_numbers: np.ndarray
    pairs_by_dim: tuple[np.ndarray, ...]

    def kept(self, mask: np.ndarray) -> "_Rows":
        """The rows where `mask` is true."""
        pairs_by_dim = [pairs[mask] for pairs in self.pairs_by_dim]
        return _Rows(self.shard_numbers[mask], tuple(pairs_by_dim))


def _rows(
    columns: Sequence[_Column],
    overlaps: Sequence[_Overlaps],
    count: int,
) -> _Rows:
    """The parts of `count` shards of the target, shard by shard. `columns` has the
    shards' intervals along each dimension, and `overlaps` the pairs that these form
    with intervals of the source. The parts of one shard are all combinations of its
    pairs along each dimension, the last dimension fastest.
    """
    counts_by_dim: list[np.ndarray] = []
    parts_of_shard = np.ones(count, np.int64)
    for column, overlap in zip(columns, overlaps, strict=True):
        counts = overlap.pair_counts[column.interval_of_box]
        counts_by_dim.append(counts)
        parts_of_shard = parts_of_shard * counts
    shard_numbers = np.repeat(np.arange(count), parts_of_shard)
    first_parts = np.cumsum(parts_of_shard) - parts_of_shard

    # A part's number within its shard, whose digits say which pair it has along each
    # dimension.
    remaining = np.arange(len(shard_numbers)) - first_parts[shard_numbers]
    pairs_by_dim: list[np.ndarray] = []
    for dim in reversed(range(len(columns))):
        radix = counts_by_dim[dim][shard_numbers]
        interval = columns[dim].interval_of_box[shard_numbers]
        first_pairs = overlaps[dim].first_pairs[interval]
        pairs_by_dim.insert(0, first_pairs + remaining % radix)
        remaining = remaining // radix
    return _Rows(shard_numbers, tuple(pairs_by_dim))


def _cells(
    rows: _Rows,
    overlaps: Sequence[_Overlaps],
    columns: Sequence[_Column],
    count: int,
) -> np.ndarray:
    """For each part, the position of the box that it reads among the `count` boxes of
    the source, which form a grid. `columns` has the intervals of these boxes along each
    dimension.
    """
    if not columns:
        return np.zeros(len(rows.shard_numbers), np.int64)
    # For each dimension, the number of each box's interval, and the number of the
    # interval that each part reads.
    grid_shape: list[int] = []
    box_index: list[np.ndarray] = []
    part_index: list[np.ndarray] = []
    for column, overlap, pair in zip(columns, overlaps, rows.pairs_by_dim, strict=True):
        grid_shape.append(len(column.starts))
        box_index.append(column.interval_of_box)
        part_index.append(overlap.source_intervals[pair])
    cells = np.zeros(grid_shape, np.int64)
    cells[tuple(box_index)] = np.arange(count)
    return cells[tuple(part_index)]


def _values_by_part(
    rows: _Rows,
    overlaps: Sequence[_Overlaps],
    values_of: Callable[[_Overlaps], np.ndarray],
) -> np.ndarray:
    """One row for each part, with a value for each dimension: the value that
    `values_of` returns for the part's pair of overlapping intervals.
    """
    columns: list[np.ndarray] = []
    for overlap, pair in zip(overlaps, rows.pairs_by_dim, strict=True):
        columns.append(values_of(overlap)[pair])
    if not columns:
        return np.zeros((len(rows.shard_numbers), 0), np.int64)
    return np.stack(columns, axis=1)


def _boxes(rows: _Rows, overlaps: Sequence[_Overlaps]) -> tuple[Box, ...]:
    """The different boxes of the source that the parts in `rows` read, in the order of
    the rows. `overlaps` has the pairs of overlapping intervals along each dimension.
    """
    starts = _values_by_part(rows, overlaps, lambda overlap: overlap.starts)
    sizes = _values_by_part(rows, overlaps, lambda overlap: overlap.sizes)
    stops = starts + sizes
    boxes: dict[Box, None] = {}
    for box_starts, box_stops in zip(starts.tolist(), stops.tolist(), strict=True):
        boxes[tuple(zip(box_starts, box_stops, strict=True))] = None
    return tuple(boxes)


class _Forms(NamedTuple):
    """For each size of parts, a part at position zero; and each part's number among
    these.
    """

    parts: tuple[ShardPart, ...]
    numbers: np.ndarray


def _forms(piece: Piece, sizes: np.ndarray, widths: Sequence[int]) -> _Forms:
    """The forms of parts of `piece`: for each size that parts have, a part at position
    zero. `sizes` has one row for each part, its size along each dimension. `widths` are
    the bits of an element in each dtype on its way.
    """
    # Parts of one size have one key.
    keys = np.zeros(len(sizes), np.int64)
    for column in sizes.T:
        sizes_of_dim = numbered(column)
        keys = keys * max(1, len(sizes_of_dim.values)) + sizes_of_dim.numbers
    different, numbers = numbered(keys)

    parts = []
    for first_row in firsts(numbers, len(different)).tolist():
        shape = sizes[first_row].tolist()
        # The piece that copies a whole array of this shape.
        (form,) = whole(piece.value, shape)
        parts.append(unsent(form, math.prod(shape), widths))
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
    group_of: Mapping[int, int],
    sent: dict[int, int],
) -> _Chosen:
    """Chooses the sender of each part as `Senders.choose` does, those of the largest
    parts first. A device sends to itself what it holds.

    `cells`, `receivers` and `part_bytes` have, for each part, the number of its shard
    of the source, the receiver, and its bytes. `holders` has the devices of each shard;
    no device holds two. `group_of` and `sent` are those of `Senders`.
    """
    all_holders = list(it.chain.from_iterable(holders))
    holder_numbers = np.array(all_holders, np.int64)
    counts = _lengths(holders)
    first_holders = np.cumsum(counts) - counts
    last_device = max(holder_numbers.max(initial=0), receivers.max(initial=0))
    # The number -1 stands for the host, so a device has the entry behind its number.
    # Devices that hold nothing have -1.
    cell_of_device = np.full(int(last_device) + 2, -1, np.int64)
    cell_numbers = np.arange(len(holders))
    cell_of_device[holder_numbers + 1] = np.repeat(cell_numbers, counts)

    is_sent = cell_of_device[receivers + 1] != cells
    # Of a shard that one device holds, this device is the sender.
    senders = receivers.copy()
    senders[is_sent] = holder_numbers[first_holders[cells[is_sent]]]
    (rows,) = np.nonzero(is_sent & (counts[cells] > 1))
    rows = rows[np.argsort(-part_bytes[rows], kind="stable")]
    if not len(rows):
        return _Chosen(senders=senders, replicas=())

    # The shards that several devices could send, numbered.
    cells_to_send, cell_numbers = numbered(cells[rows])
    replicas = [tuple(holders[cell]) for cell in cells_to_send.tolist()]
    if _can_take_turns(
        cells=cell_numbers,
        part_bytes=part_bytes[rows],
        holders=replicas,
        group_of=group_of,
        sent=sent,
    ):
        row_cells = cells[rows]
        turns = occurrences(cell_numbers) % counts[row_cells]
        senders[rows] = holder_numbers[first_holders[row_cells] + turns]
    else:
        choices = [Senders(devices, group_of, sent) for devices in replicas]
        for row, number in zip(rows.tolist(), cell_numbers.tolist(), strict=True):
            nbytes = int(part_bytes[row])
            senders[row] = choices[number].choose(int(receivers[row]), nbytes)

    by_first_row = np.argsort(firsts(cell_numbers, len(cells_to_send)))
    in_order = [replicas[number] for number in by_first_row.tolist()]
    return _Chosen(senders=senders, replicas=tuple(in_order))


def _can_take_turns(
    cells: np.ndarray,
    part_bytes: np.ndarray,
    holders: Sequence[Sequence[int]],
    group_of: Mapping[int, int],
    sent: Mapping[int, int],
) -> bool:
    """Whether the holders of each shard send its parts in turn, as they do if the one
    that has sent the fewest bytes is chosen each time: they are in one group, have sent
    equally much before, and send parts of one size. `cells` and `part_bytes` have the
    shard and the bytes of each part.
    """
    if len(set(group_of.values())) > 1:
        return False
    for devices in holders:
        sent_bytes = {sent.get(device, 0) for device in devices}
        if len(sent_bytes) > 1:
            return False
    least_bytes = np.full(len(holders), np.iinfo(np.int64).max)
    np.minimum.at(least_bytes, cells, part_bytes)
    return bool((least_bytes[cells] == part_bytes).all())
