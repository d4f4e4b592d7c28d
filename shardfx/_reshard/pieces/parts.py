"""The parts of shards that each device needs to assemble its shard of an array. This
file computes with integers only, not with arrays.

Devices are given by numbers. Of the devices that hold a replica of one shard,
`Senders.choose` takes one that sends it.
"""

import bisect
import collections
import dataclasses
import functools as ft
import itertools as it
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..._convert import (
    NOWHERE,
    Factor,
    Made,
    Piece,
    StridedCopy,
    from_start,
    hull,
    once,
    shifted,
    strided_copy,
    swapped,
    whole,
    within,
)
from ..._ground.boxes import Box, box_start, common
from .part_table import PartGroup, PartTable, tabled_parts
from .senders import Holders, Senders
from .shard_part import (
    Links,
    ShardPart,
    bits_on_the_way,
    divided,
    least_memory_bytes,
    unsent,
)


# From so many shards of source and target on, a table is made in less time than a list.
_MANY_SHARDS = 32


@dataclasses.dataclass(frozen=True)
class PartList:
    """Parts of shards of any form, in a tuple; `PartTable` is for boxes."""

    all: tuple[ShardPart, ...]

    @ft.cached_property
    def links(self) -> Links:
        """The bytes that devices send each other, in the order of the receivers,
        without copies within a device.
        """
        links = collections.Counter[tuple[int, int]]()
        for part in self.all:
            if part.sender != part.receiver:
                links[part.sender, part.receiver] += part.bytes
        return dict(links)

    @property
    def least_memory_bytes(self) -> int:
        """The memory of the smallest parts into which all parts can be divided."""
        return max(map(least_memory_bytes, self.all), default=0)

    def groups(self, part_bytes: int | None) -> list[PartGroup]:
        """The parts in groups of one array and one shape, without constants. Parts of
        more than `part_bytes` of memory are divided; `None` is no limit.
        """
        smaller_parts: list[ShardPart] = []
        for part in self.all:
            if part.piece.value.path is None:
                continue
            if part_bytes is None:
                smaller_parts.append(part)
            else:
                smaller_parts += divided(part, part_bytes)

        alike: dict[tuple[str, StridedCopy, bool], list[ShardPart]] = {}
        for part in smaller_parts:
            key = str(part.piece.value.path)
            is_local = part.sender == part.receiver
            kind = (key, strided_copy(part.piece), is_local)
            alike.setdefault(kind, []).append(part)

        return [
            _group(key, form, is_local, parts)
            for (key, form, is_local), parts in alike.items()
        ]


def _group(
    key: str,
    form: StridedCopy,
    is_local: bool,
    parts: Sequence[ShardPart],
) -> PartGroup:
    """The group of `parts`, which are of the array named `key` and have one form.
    `is_local` says whether each device copies its own elements.
    """
    memory_bytes = 0
    senders: list[int] = []
    receivers: list[int] = []
    sources: list[tuple[int, ...]] = []
    targets: list[tuple[int, ...]] = []
    for part in parts:
        memory_bytes = max(memory_bytes, part.memory_bytes)
        senders.append(part.sender)
        receivers.append(part.receiver)
        sources.append(part.piece.source)
        targets.append(part.piece.target)
    return PartGroup(
        key=key,
        form=form,
        memory_bytes=memory_bytes,
        is_local=is_local,
        senders=np.array(senders, np.int64),
        receivers=np.array(receivers, np.int64),
        sources=np.array(sources, np.int64),
        targets=np.array(targets, np.int64),
    )


@dataclasses.dataclass(frozen=True)
class ShardParts:
    """The parts of shards from which all devices assemble their shards of one array. A
    device receives each element that it lacks exactly once.

    `rows` has the parts, receiver by receiver. `missing` are the boxes of the source
    that some device needs and no device holds. `replicas` has, for each shard that
    several devices could send, these devices.
    """

    rows: PartList | PartTable
    missing: tuple[Box, ...] = ()
    replicas: tuple[tuple[int, ...], ...] = ()

    @property
    def all(self) -> tuple[ShardPart, ...]:
        """The parts, receiver by receiver."""
        return self.rows.all

    @property
    def links(self) -> Links:
        """The bytes that devices send each other, in the order of the receivers,
        without copies within a device.
        """
        return self.rows.links

    @ft.cached_property
    def sent_bytes(self) -> dict[int, int]:
        """The bytes that each sender sends, in the order of the device numbers."""
        totals = collections.Counter[int]()
        for (sender, _), count in self.links.items():
            totals[sender] += count
        return dict(sorted(totals.items()))

    @property
    def wire_bytes(self) -> int:
        """The bytes that all devices receive from other devices, in total."""
        return sum(self.links.values())

    def sent_before(self, sent: Mapping[int, int]) -> tuple[tuple[int, int], ...]:
        """Pairs: a device, and how many more bytes it has sent than the device with the
        same shard that has sent the fewest. `sent` has the bytes that each device has
        sent. The choice of senders depends on these differences only.
        """
        leads: list[tuple[int, int]] = []
        for holders in self.replicas:
            sent_bytes = {device: sent.get(device, 0) for device in holders}
            least_bytes = min(sent_bytes.values())
            for device, nbytes in sent_bytes.items():
                if nbytes > least_bytes:
                    leads.append((device, nbytes - least_bytes))
        return tuple(leads)


class ShardGrid:
    """The devices that hold each box of an array of `dtype`. The boxes form a grid, as
    under every JAX sharding. `group_of` has the group of each device, as
    `Senders` says, and `sent` the bytes that it has sent.
    """

    def __init__(
        self,
        dtype: object,
        holders: Holders,
        group_of: Mapping[int, int],
        sent: dict[int, int],
    ):
        # `group_of` and `sent` have the group of each device and the bytes that it has
        # sent. They decide which device sends a box.
        self.dtype = dtype
        # The devices that can send each box.
        self.senders: dict[Box, Senders] = {}
        for box, devices in holders.items():
            self.senders[box] = Senders(devices, group_of, sent)
        # For each dimension, the intervals of all boxes (the keys of `holders`). The
        # boxes of a grid are all combinations of its intervals.
        columns = zip(*holders, strict=True)
        self._intervals = [sorted(set(column)) for column in columns]

    def overlapping(self, box: Box) -> Iterable[Box]:
        """The boxes of the grid that intersect `box`."""
        return it.product(*self.overlapping_intervals(box))

    def overlapping_intervals(self, box: Box) -> list[list[tuple[int, int]]]:
        """For each dimension, the intervals of the grid that intersect that of `box`."""
        columns = []
        for column, (start, stop) in zip(self._intervals, box, strict=True):
            first_number = bisect.bisect_right(column, start, key=_stop_of)
            stop_number = bisect.bisect_left(column, stop, key=_start_of)
            columns.append(column[first_number:stop_number])
        return columns


_start_of: Callable[[tuple[int, int]], int] = operator.itemgetter(0)
_stop_of: Callable[[tuple[int, int]], int] = operator.itemgetter(1)


class PossiblePart(NamedTuple):
    """A part whose sender is not chosen yet, and the devices that could send it; `None`
    for a part that is not sent.
    """

    part: ShardPart
    senders: Senders | None


class Source(NamedTuple):
    """The dtype of an array that is read, and the numbers of the devices that hold each
    of its boxes.
    """

    dtype: Any
    holders: Holders


def shard_parts(
    target: Made,
    targets: Sequence[tuple[int, Box]],
    sources: Mapping[str, Source],
    group_of: Mapping[int, int],
    sent_before: Iterable[tuple[int, int]] = (),
) -> ShardParts:
    """Decides which device sends which part of its shard to which device, to assemble
    the array `target`.

    A device copies elements that it holds. It receives every other element from one of
    the devices that hold it, which `Senders.choose` chooses. Senders of the largest
    parts are chosen first.

    `targets` has the device and the box of each shard to assemble, and `sources` the
    arrays that are read, by path. `group_of` has the group of each device.
    `sent_before` has pairs of a device and the bytes that it has sent for other arrays.
    """
    sent = dict(sent_before)
    if _is_copy_from_start(target):
        (piece,) = target.pieces
        dtype, holders = sources[str(piece.value.path)]
        has_many_shards = len(targets) + len(holders) >= _MANY_SHARDS
        if has_many_shards and _are_disjoint(holders.values()):
            tabled = tabled_parts(
                piece=piece,
                targets=targets,
                dtype=dtype,
                holders=holders,
                group_of=group_of,
                sent=sent,
            )
            return ShardParts(
                rows=tabled.table,
                missing=tabled.missing,
                replicas=tabled.replicas,
            )

    # Several paths may have one value, and then share one grid.
    grids: dict[int, ShardGrid] = {}
    for source in sources.values():
        grid = ShardGrid(
            dtype=source.dtype, holders=source.holders, group_of=group_of, sent=sent
        )
        grids[id(source)] = grid

    parts: list[PossiblePart] = []
    # The boxes of sources that no device holds.
    missing: dict[Box, None] = {}
    # A cache of `_sent_parts`, for pieces that are divided alike.
    splits: dict[object, list[PossiblePart]] = {}
    for receiver, box in targets:
        for piece in target.pieces:
            value = piece.value
            if value.path is None or value.scale is not None:
                parts += _not_split(piece, receiver, box)
            else:
                grid = grids[id(sources[value.path])]
                parts += _sent_parts(
                    piece=piece,
                    receiver=receiver,
                    box=box,
                    source=grid,
                    splits=splits,
                    missing=missing,
                )
    replicas = _choose(parts)
    return ShardParts(
        rows=PartList(tuple([entry.part for entry in parts])),
        missing=tuple(missing),
        replicas=replicas,
    )


def _is_copy_from_start(target: Made) -> bool:
    """Whether an array is a copy of another array, or of the first elements of it along
    each dimension.
    """
    if len(target.pieces) != 1:
        return False
    value = target.pieces[0].value
    if value.path is None or value.scale is not None:
        return False
    return tuple(target.pieces) == whole(value, target.shape)


def _are_disjoint(holders: Iterable[Sequence[int]]) -> bool:
    """Whether no device holds two shards."""
    devices = list(it.chain.from_iterable(holders))
    return len(set(devices)) == len(devices)


def _not_split(piece: Piece, receiver: int, box: Box) -> Iterator[PossiblePart]:
    """Yields the parts in the receiver's `box` of a constant or of a quantised array,
    which are not divided along the shards of a source.
    """
    # The part of the piece inside the box, with its position in the receiver's shard.
    for inside in within(piece, box):
        in_shard = _counted_from(box_start(box), inside)
        # Nothing is sent: the receiver stands for the sender too.
        part = ShardPart(
            sender=receiver,
            receiver=receiver,
            piece=in_shard,
            bytes=0,
        )
        yield PossiblePart(part, senders=None)


def _counted_from(origin: Sequence[int], piece: Piece) -> Piece:
    """A piece with its position in the target counted from `origin`."""
    return shifted(piece, [-distance for distance in origin])


def _sent_parts(
    piece: Piece,
    receiver: int,
    box: Box,
    source: ShardGrid,
    splits: dict[object, list[PossiblePart]],
    missing: dict[Box, None],
) -> Iterator[PossiblePart]:
    """Yields the parts of `piece` that `receiver` needs for its `box`, each with its
    possible senders. `source` has the devices that hold each box of the array that is
    read. Boxes that no device holds are added to `missing`.

    Pieces that differ only in where they start inside the box are divided alike, such
    as the entries of a stack. So a piece is divided as if it started where the box
    does, `splits` keeps the parts, and these are then shifted.
    """
    offset = from_start(piece, box)
    piece_at_start = _counted_from(offset, piece)
    key = (
        box,
        piece_at_start.source,
        piece_at_start.target,
        piece_at_start.factors,
        piece.value.casts,
        id(source),
    )
    is_new = key not in splits
    if is_new:
        splits[key] = list(_split(piece_at_start, box, source, missing))
    for part, senders in splits[key]:
        sent_piece = part.piece
        # Parts that were divided for an earlier piece have its source.
        if not is_new or any(offset):
            in_shard = shifted(sent_piece, offset)
            sent_piece = Piece(
                value=piece.value,
                source=in_shard.source,
                target=in_shard.target,
                factors=in_shard.factors,
            )
        # `_choose` replaces the sender if the receiver lacks the part.
        sent_part = ShardPart(
            sender=receiver,
            receiver=receiver,
            piece=sent_piece,
            bytes=part.bytes,
            bits=part.bits,
        )
        yield PossiblePart(sent_part, senders)


def _choose(parts: list[PossiblePart]) -> tuple[tuple[int, ...], ...]:
    """Chooses a sender for each of `parts`, in place. Returns, for each shard that
    several devices could send, these devices.
    """
    replicas: dict[tuple[int, ...], None] = {}
    largest_first = sorted(
        range(len(parts)), key=lambda number: -parts[number].part.bytes
    )
    for number in largest_first:
        part, senders = parts[number]
        # A device does not send to itself what it holds.
        if senders is None or part.receiver in senders.holders:
            continue
        sender = senders.choose(part.receiver, part.bytes)
        parts[number] = PossiblePart(part._replace(sender=sender), senders)
        if len(senders.holders) > 1:
            replicas[tuple(senders.holders)] = None
    return tuple(replicas)


def _split(
    piece: Piece,
    box: Box,
    source: ShardGrid,
    missing: dict[Box, None],
) -> Iterator[PossiblePart]:
    """Yields the parts of the strided copy `piece` that write into `box` of the target,
    each with its possible senders. Each part reads from one shard of `source`. If no
    device holds this shard, the part's box in the source is added to `missing` instead.
    """
    widths = bits_on_the_way(piece.value, source.dtype)
    for inside in within(piece, box):
        in_shard = _counted_from(box_start(box), inside)
        # With source and target exchanged, `within` divides by boxes of the source.
        reading = swapped(in_shard)
        if _is_box(reading):
            yield from _split_box(reading, widths, source, missing)
            continue
        for cell in source.overlapping(hull(reading)):
            if common(hull(reading), cell) is None:
                continue
            senders = source.senders[cell]
            for in_cell in within(reading, cell):
                if not senders.holders:
                    missing[_source_box(in_cell)] = None
                    continue
                part = swapped(_counted_from(box_start(cell), in_cell))
                yield PossiblePart(unsent(part, once(part).elements, widths), senders)


def _source_box(reading: Piece) -> Box:
    """The box of the source that a piece reads; `reading` is the piece with source and
    target exchanged.
    """
    return hull(swapped(once(swapped(reading))))


def _is_box(reading: Piece) -> bool:
    """Whether a piece writes a box of its target, along each dimension in one loop."""
    dims: set[int] = set()
    for factor in reading.factors:
        repeats = NOWHERE in (factor.source_dim, factor.target_dim)
        if repeats or factor.target_step != 1 or factor.target_dim in dims:
            return False
        dims.add(factor.target_dim)
    return True


class _Overlap(NamedTuple):
    """What a box and a cell of a grid (the box of a shard of the source) have in common
    along one dimension.

    - `cell_interval`: the interval of the cell, its start and stop in the source.
    - `start_in_cell`, `start_in_box`: the first common element, counted from the start
      of the cell and from the start of the box.
    - `size`: the number of common elements.
    """

    cell_interval: tuple[int, int]
    start_in_cell: int
    start_in_box: int
    size: int


def _split_box(
    reading: Piece,
    widths: Sequence[int],
    source: ShardGrid,
    missing: dict[Box, None],
) -> Iterator[PossiblePart]:
    """`_split` for a piece that reads a box: each shard has one box of it. `reading` is
    the piece with source and target exchanged, and `widths` are the bits of an element
    on its way. Boxes of shards of `source` that no device holds are added to `missing`.
    """
    box = hull(reading)
    # For each dimension, what the box has in common with the shards' intervals.
    columns = list(map(_overlaps, source.overlapping_intervals(box), box))
    factors_by_sizes: dict[tuple[int, ...], tuple[Factor, ...]] = {}
    for overlaps in it.product(*columns):
        cell = tuple([overlap.cell_interval for overlap in overlaps])
        senders = source.senders[cell]
        if not senders.holders:
            missing[tuple(map(_interval_of, overlaps))] = None
            continue
        sizes = tuple([overlap.size for overlap in overlaps])
        factors = factors_by_sizes.get(sizes)
        if factors is None:
            factors = _with_sizes(swapped(reading).factors, sizes)
            factors_by_sizes[sizes] = factors
        # The part's position in the array that is assembled.
        target = list(reading.source)
        for factor in reading.factors:
            first = overlaps[factor.target_dim].start_in_box
            target[factor.source_dim] += first * factor.source_step
        part = Piece(
            value=reading.value,
            source=tuple([overlap.start_in_cell for overlap in overlaps]),
            target=tuple(target),
            factors=factors,
        )
        yield PossiblePart(unsent(part, math.prod(sizes), widths), senders)


def _overlaps(
    column: Iterable[tuple[int, int]],
    interval: tuple[int, int],
) -> list[_Overlap]:
    """What each interval in `column`, that of a cell along one dimension, has in common
    with the box's `interval`. Intervals are pairs of start and stop.
    """
    low, high = interval
    overlaps = []
    for start, stop in column:
        first = max(low, start)
        size = min(high, stop) - first
        if size > 0:
            overlap = _Overlap(
                cell_interval=(start, stop),
                start_in_cell=first - start,
                start_in_box=first - low,
                size=size,
            )
            overlaps.append(overlap)
    return overlaps


def _interval_of(overlap: _Overlap) -> tuple[int, int]:
    """The common elements as an interval of the whole source."""
    start = overlap.cell_interval[0] + overlap.start_in_cell
    return start, start + overlap.size


def _with_sizes(
    factors: Iterable[Factor],
    size_of_dim: Sequence[int],
) -> tuple[Factor, ...]:
    """The factors (loops of a piece), each with the size in `size_of_dim` of the
    source's dimension along which it moves. Factors of one iteration are left out.
    """
    sized: list[Factor] = []
    for factor in factors:
        size = size_of_dim[factor.source_dim]
        if size != 1:
            sized.append(factor._replace(size=size))
    return tuple(sized)
