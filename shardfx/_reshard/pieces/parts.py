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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..._convert import (
    NOWHERE,
    Factor,
    Made,
    Piece,
    StridedCopy,
    dtypes_of,
    from_start,
    hull,
    once,
    shifted,
    strided_copy,
    swapped,
    within,
)
from ..._ground.boxes import Box, common
from ..._ground.spec import bits
from .part_table import PartGroup, PartTable, tabled_parts
from .senders import Holders, Senders
from .shard_part import Links, ShardPart, divided, least_memory_bytes


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

        groups = []
        for (key, form, is_local), parts in alike.items():
            group = PartGroup(
                key=key,
                form=form,
                memory_bytes=max(part.memory_bytes for part in parts),
                is_local=is_local,
                senders=np.array([part.sender for part in parts], np.int64),
                receivers=np.array([part.receiver for part in parts], np.int64),
                sources=np.array([part.piece.source for part in parts], np.int64),
                targets=np.array([part.piece.target for part in parts], np.int64),
            )
            groups.append(group)
        return groups


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
        leads = []
        for holders in self.replicas:
            least = min(sent.get(device, 0) for device in holders)
            leads += [
                (device, sent[device] - least)
                for device in holders
                if sent.get(device, 0) > least
            ]
        return tuple(leads)


class ShardGrid:
    """The devices that hold each box of an array of `dtype`. The boxes form a grid, as
    under every JAX sharding. `process_of` has the process of each device, and `sent`
    the bytes that it has sent.
    """

    def __init__(
        self,
        dtype: object,
        holders: Holders,
        process_of: Mapping[int, int],
        sent: dict[int, int],
    ):
        self.dtype = dtype
        self.senders = {
            box: Senders(devices, process_of, sent) for box, devices in holders.items()
        }
        self._intervals = [sorted(set(column)) for column in zip(*holders, strict=True)]

    def overlapping(self, box: Box) -> Iterable[Box]:
        """The boxes of the grid that intersect `box`."""
        return it.product(*self.overlapping_intervals(box))

    def overlapping_intervals(self, box: Box) -> list[list[tuple[int, int]]]:
        """For each dimension, the intervals of the grid that intersect that of `box`."""
        columns = []
        for column, (start, stop) in zip(self._intervals, box, strict=True):
            first = bisect.bisect_right(column, start, key=lambda interval: interval[1])
            last = bisect.bisect_left(column, stop, key=lambda interval: interval[0])
            columns.append(column[first:last])
        return columns


class PossiblePart(NamedTuple):
    """A part whose sender is not chosen yet, and the devices that could send it; `None`
    for a part that is not sent.
    """

    part: ShardPart
    senders: Senders | None


# The dtype of an array, and the devices that hold each of its boxes.
Source = tuple[Any, Holders]


def shard_parts(
    target: Made,
    targets: Sequence[tuple[int, Box]],
    sources: Mapping[str, Source],
    process_of: Mapping[int, int],
    sent_before: Iterable[tuple[int, int]] = (),
) -> ShardParts:
    """Decides which device sends which part of its shard to which device, to assemble
    the array `target`.

    A device copies elements that it holds. It receives every other element from one of
    the devices that hold it, which `Senders.choose` chooses. Senders of the largest
    parts are chosen first.

    `targets` has the device and the box of each shard to assemble, and `sources` the
    arrays that are read, by path. `process_of` has the process of each device.
    `sent_before` has pairs of a device and the bytes that it has sent for other arrays.
    """
    sent = dict(sent_before)
    if _is_whole(target):
        (piece,) = target.pieces
        dtype, holders = sources[str(piece.value.path)]
        has_many_shards = len(targets) + len(holders) >= _MANY_SHARDS
        if has_many_shards and _are_disjoint(holders.values()):
            tabled = tabled_parts(piece, targets, dtype, holders, process_of, sent)
            return ShardParts(
                rows=tabled.table, missing=tabled.missing, replicas=tabled.replicas
            )

    # Several paths may have one value, and then share one grid.
    grids: dict[int, ShardGrid] = {}
    for source in sources.values():
        dtype, holders = source
        grids[id(source)] = ShardGrid(dtype, holders, process_of, sent)
    grid_of = {path: grids[id(source)] for path, source in sources.items()}

    parts: list[PossiblePart] = []
    missing: dict[Box, None] = {}
    splits: dict[object, list[PossiblePart]] = {}
    for receiver, box in targets:
        for piece in target.pieces:
            value = piece.value
            if value.path is None or value.scale is not None:
                parts += _not_split(piece, receiver, box)
            else:
                parts += _sent_parts(
                    piece, receiver, box, grid_of[value.path], splits, missing
                )
    replicas = _choose(parts)
    return ShardParts(
        rows=PartList(tuple([entry.part for entry in parts])),
        missing=tuple(missing),
        replicas=replicas,
    )


def _is_whole(target: Made) -> bool:
    """Whether an array is a copy of another array, or of the first elements of it along
    each dimension.
    """
    if len(target.pieces) != 1:
        return False
    piece = target.pieces[0]
    if piece.value.path is None or piece.value.scale is not None:
        return False
    start = (0,) * len(target.shape)
    factors = [
        Factor(size, dim, 1, dim, 1)
        for dim, size in enumerate(target.shape)
        if size != 1
    ]
    is_at_start = piece.source == piece.target == start
    return is_at_start and piece.factors == tuple(factors)


def _are_disjoint(holders: Iterable[Sequence[int]]) -> bool:
    """Whether no device holds two shards."""
    devices = [device for shard in holders for device in shard]
    return len(set(devices)) == len(devices)


def _not_split(piece: Piece, receiver: int, box: Box) -> Iterator[PossiblePart]:
    """Yields the parts in the receiver's `box` of a constant or of a quantised array,
    which are not divided along the shards of a source.
    """
    start = [-low for low, _ in box]
    for inside in within(piece, box):
        yield PossiblePart(
            ShardPart(receiver, receiver, shifted(inside, start), bytes=0), None
        )


def _sent_parts(
    piece: Piece,
    receiver: int,
    box: Box,
    source: ShardGrid,
    splits: dict[object, list[PossiblePart]],
    missing: dict[Box, None],
) -> Iterator[PossiblePart]:
    """Yields the parts of `piece` that `receiver` needs for its `box`, each with its
    possible senders. `splits` is a cache: all entries of a stack are divided like the
    first one.
    """
    # Positions inside the box are relative to the box.
    offset = from_start(piece, box)
    first = shifted(piece, [-step for step in offset])
    key = (
        box,
        first.source,
        first.target,
        first.factors,
        piece.value.casts,
        id(source),
    )
    is_first = key not in splits
    if is_first:
        splits[key] = list(_split(first, box, source, missing))
    for part, senders in splits[key]:
        own_piece = part.piece
        if not is_first or any(offset):
            own_piece = shifted(own_piece, offset)
            own_piece = Piece(
                value=piece.value,
                source=own_piece.source,
                target=own_piece.target,
                factors=own_piece.factors,
            )
        yield PossiblePart(
            ShardPart(receiver, receiver, own_piece, part.bytes, part.bits), senders
        )


def _choose(parts: list[PossiblePart]) -> tuple[tuple[int, ...], ...]:
    """Chooses a sender for each of `parts`, in place. Returns, for each shard that
    several devices could send, these devices.
    """
    replicas: dict[tuple[int, ...], None] = {}
    for number in sorted(
        range(len(parts)), key=lambda number: -parts[number].part.bytes
    ):
        part, senders = parts[number]
        if senders is None or part.receiver in senders.holders:
            continue
        sender = senders.choose(part.receiver, part.bytes)
        parts[number] = PossiblePart(part._replace(sender=sender), senders)
        if len(senders.holders) > 1:
            replicas[tuple(senders.holders)] = None
    return tuple(replicas)


def _split(
    piece: Piece, box: Box, source: ShardGrid, missing: dict[Box, None]
) -> Iterator[PossiblePart]:
    """Yields the parts of the strided copy `piece` that write into `box` of the target,
    each with its possible senders. Each part reads from one shard of the source. If no
    device holds this shard, the part's box in the source is added to `missing` instead.
    """
    widths = [bits(source.dtype), *map(bits, dtypes_of(piece.value.casts))]
    start_of_box = [-low for low, _ in box]
    for inside in within(piece, box):
        reading = swapped(shifted(inside, start_of_box))
        if _is_box(reading):
            yield from _split_box(reading, widths, source, missing)
            continue
        for cell in source.overlapping(hull(reading)):
            if common(hull(reading), cell) is None:
                continue
            senders = source.senders[cell]
            start_of_cell = [low for low, _ in cell]
            to_cell = [-low for low in start_of_cell]
            for in_cell in within(reading, cell):
                part = swapped(shifted(in_cell, to_cell))
                if not senders.holders:
                    missing[hull(shifted(swapped(once(part)), start_of_cell))] = None
                    continue
                nbytes = -(-once(part).elements * min(widths) // 8)
                yield PossiblePart(
                    ShardPart(-1, -1, part, nbytes, max(widths)), senders
                )


def _is_box(reading: Piece) -> bool:
    """Whether a piece writes a box of its target, along each dimension in one loop."""
    dims = {factor.target_dim for factor in reading.factors}
    return len(dims) == len(reading.factors) and all(
        [
            factor.target_dim != NOWHERE
            and factor.source_dim != NOWHERE
            and factor.target_step == 1
            for factor in reading.factors
        ]
    )


class _Overlap(NamedTuple):
    """What a box and a cell of a grid have in common along one dimension: the interval
    of the cell, the position in the cell, and the first and the number of the loop's
    iterations.
    """

    interval: tuple[int, int]
    position: int
    first: int
    size: int


def _split_box(
    reading: Piece, widths: Sequence[int], source: ShardGrid, missing: dict[Box, None]
) -> Iterator[PossiblePart]:
    """`_split` for a piece that reads a box: each shard has one box of it. `reading` is
    the piece with source and target exchanged, and `widths` are the bits of an element
    on its way.
    """
    box = hull(reading)
    columns = [
        _overlaps(column, interval)
        for column, interval in zip(source.overlapping_intervals(box), box, strict=True)
    ]
    factors_by_sizes: dict[tuple[int, ...], tuple[Factor, ...]] = {}
    least_bits = min(widths)
    most_bits = max(widths)
    for overlaps in it.product(*columns):
        senders = source.senders[tuple([overlap.interval for overlap in overlaps])]
        if not senders.holders:
            missing[tuple(map(_interval_of, overlaps))] = None
            continue
        sizes = tuple([overlap.size for overlap in overlaps])
        factors = factors_by_sizes.get(sizes)
        if factors is None:
            factors = _with_sizes(swapped(reading).factors, sizes)
            factors_by_sizes[sizes] = factors
        target = list(reading.source)
        for factor in reading.factors:
            first = overlaps[factor.target_dim].first
            target[factor.source_dim] += first * factor.source_step
        part = Piece(
            value=reading.value,
            source=tuple([overlap.position for overlap in overlaps]),
            target=tuple(target),
            factors=factors,
        )
        nbytes = -(-math.prod(sizes) * least_bits // 8)
        yield PossiblePart(
            part=ShardPart(
                sender=-1, receiver=-1, piece=part, bytes=nbytes, bits=most_bits
            ),
            senders=senders,
        )


def _overlaps(
    column: Iterable[tuple[int, int]], interval: tuple[int, int]
) -> list[_Overlap]:
    """What the intervals of a column of cells have in common with `interval`."""
    low, high = interval
    overlaps = []
    for start, stop in column:
        first = max(low, start)
        size = min(high, stop) - first
        if size > 0:
            overlap = _Overlap(
                interval=(start, stop),
                position=first - start,
                first=first - low,
                size=size,
            )
            overlaps.append(overlap)
    return overlaps


def _interval_of(overlap: _Overlap) -> tuple[int, int]:
    start = overlap.interval[0] + overlap.position
    return start, start + overlap.size


def _with_sizes(
    factors: Iterable[Factor], size_of_dim: Sequence[int]
) -> tuple[Factor, ...]:
    """The factors with the sizes of their dimensions of the source, without those of
    one iteration.
    """
    sized = [factor._replace(size=size_of_dim[factor.source_dim]) for factor in factors]
    return tuple([factor for factor in sized if factor.size != 1])
