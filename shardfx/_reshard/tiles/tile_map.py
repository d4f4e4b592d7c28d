"""Which piece of which shard each device has to get, where an array moves to other devices. Pure: integers only."""

import bisect
import collections
import dataclasses
import functools as ft
import heapq
import itertools as it
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ..._ground.boxes import Box, volume


class Tile(NamedTuple):
    """One rectangle of elements that one device takes from one shard.

    **Arguments:**

    - `sender`, `receiver`: devices, by the numbers that the boxes were given with; equal where nothing travels.
    - `box`: start and stop per dimension, in the whole array.
    - `source`: the same elements, counted from the start of the sender's shard.
    - `target`: the same elements, counted from the start of the receiver's shard.
    - `bytes`: of the elements.
    """

    sender: int
    receiver: int
    box: Box
    source: Box
    target: Box
    bytes: int


@dataclasses.dataclass(frozen=True)
class TileMap:
    """How every shard of an array's new layout is put together from shards of its old one.

    Each element enters each device that needs it and does not have it exactly once, so that no other way sends
    fewer bytes.

    **Arguments:**

    - `tiles`: in the order of the targets, and within a target by position.
    - `missing`: boxes that some device needs and none holds.
    - `replicas`: per shard of which there was a choice of senders, the devices that hold it.
    """

    tiles: tuple[Tile, ...]
    missing: tuple[Box, ...] = ()
    replicas: tuple[tuple[int, ...], ...] = ()

    @ft.cached_property
    def links(self) -> dict[tuple[int, int], int]:
        """Bytes per (sender, receiver), in order of the receivers; what a device takes from itself is left out."""
        links: dict[tuple[int, int], int] = collections.Counter()
        for tile in self.tiles:
            if tile.sender != tile.receiver:
                links[tile.sender, tile.receiver] += tile.bytes
        return dict(links)

    @ft.cached_property
    def sent_bytes(self) -> dict[int, int]:
        """Bytes that leave each sender, in order of the device numbers."""
        totals: dict[int, int] = collections.Counter()
        for (sender, _), count in self.links.items():
            totals[sender] += count
        return dict(sorted(totals.items()))

    @property
    def wire_bytes(self) -> int:
        """Bytes that enter all devices together."""
        return sum(self.links.values())

    def sent_before(self, sent: Mapping[int, int]) -> tuple[tuple[int, int], ...]:
        """The senders that have sent more than another replica of their shard, and how much more.

        Of `sent`, bytes by device, nothing else can change the choice of senders.
        """
        leads = []
        for holders in self.replicas:
            least = min(sent.get(device, 0) for device in holders)
            leads += [(device, sent[device] - least) for device in holders if sent.get(device, 0) > least]
        return tuple(leads)


def tile_map(
    itemsize_bits: int,
    sources: Sequence[tuple[int, Box]],
    targets: Sequence[tuple[int, Box]],
    process_of: Mapping[int, int] | None = None,
    sent_before: Iterable[tuple[int, int]] = (),
) -> TileMap:
    """For arbitrary layouts of one array, which target takes which piece of which shard.

    A device takes what it holds itself. Of several other holders those in the receiver's process come first, and
    among them the one that sends least so far.

    **Arguments:**

    - `itemsize_bits`: bits per element.
    - `sources`: device and box of each shard that can be read. The boxes form a grid, as they do under every JAX
        sharding; equal boxes are replicas. Devices that were lost are left out.
    - `targets`: device and box of each shard that is wanted.
    - `process_of`: the process of each device; all in one if not given.
    - `sent_before`: devices and the bytes that they have sent already, of other arrays.

    **Returns:**

    The TileMap.
    """
    holders: dict[Box, list[int]] = {}
    for device, box in sources:
        holders.setdefault(box, []).append(device)
    if not holders:
        return TileMap((), tuple(dict.fromkeys(box for _, box in targets if volume(box))))
    intervals = _grid(holders)
    wanted: dict[Box, list[tuple[int, Box, Box]]] = {}
    missing: dict[Box, None] = {}
    for device, box in targets:
        for cell in _overlapping(intervals, box):
            piece = _intersection(cell, box)
            if cell in holders:
                wanted.setdefault(cell, []).append((device, box, piece))
            elif volume(piece):
                missing[piece] = None
        missing.update(dict.fromkeys(_outside(intervals, box)))
    tiles: list[Tile] = []
    replicas: list[tuple[int, ...]] = []
    sent = dict(sent_before)
    for cell, pieces in wanted.items():
        senders = _Senders(holders[cell], process_of or {}, sent)
        tiles += _assign(cell, pieces, senders, itemsize_bits)
        if len(senders.sent) > 1 and any(receiver not in senders.sent for receiver, _, _ in pieces):
            replicas.append(tuple(holders[cell]))
    order = {device: index for index, (device, _) in enumerate(targets)}
    tiles.sort(key=lambda tile: (order[tile.receiver], tile.box))
    return TileMap(tuple(tiles), tuple(missing), tuple(replicas))


class _Senders:
    """The replicas of one shard; gives the nearest, and of those the one that has sent least."""

    def __init__(self, holders: list[int], process_of: Mapping[int, int], sent: Mapping[int, int]):
        self.process_of = process_of
        self.sent = {device: sent.get(device, 0) for device in holders}
        self.everywhere = sorted((self.sent[device], index, device) for index, device in enumerate(holders))
        self.nearby: dict[int | None, list[tuple[int, int, int]]] = {}
        for entry in self.everywhere:
            self.nearby.setdefault(process_of.get(entry[2]), []).append(entry)

    def take(self, receiver: int, count: int) -> int:
        heap = self.nearby.get(self.process_of.get(receiver), self.everywhere)
        while heap[0][0] != self.sent[heap[0][2]]:  # it has sent since, through the other heap
            _, index, device = heap[0]
            heapq.heapreplace(heap, (self.sent[device], index, device))
        _, index, device = heap[0]
        self.sent[device] += count
        heapq.heapreplace(heap, (self.sent[device], index, device))
        return device


def _assign(
    cell: Box,
    pieces: list[tuple[int, Box, Box]],
    senders: _Senders,
    itemsize_bits: int,
) -> Iterable[Tile]:
    """Chooses a sender for each piece of one shard, the largest piece first; a device holds one shard only."""
    sized = [(-(-volume(piece) * itemsize_bits // 8), receiver, box, piece) for receiver, box, piece in pieces]
    for count, receiver, box, piece in sorted(sized, key=lambda item: -item[0]):
        if count:
            sender = receiver if receiver in senders.sent else senders.take(receiver, count)
            yield Tile(sender, receiver, piece, _within(piece, cell), _within(piece, box), count)


def _grid(boxes: Iterable[Box]) -> list[list[tuple[int, int]]]:
    """Per dimension the intervals into which the boxes cut it, in order."""
    return [sorted(set(column)) for column in zip(*boxes, strict=True)]


def _overlapping(intervals: list[list[tuple[int, int]]], box: Box) -> Iterable[Box]:
    """The cells of the grid that share elements with `box`."""
    found = []
    for column, (start, stop) in zip(intervals, box, strict=True):
        first = bisect.bisect_right(column, start, key=lambda interval: interval[1])
        last = bisect.bisect_left(column, stop, key=lambda interval: interval[0])
        found.append(column[first:last])
    return it.product(*found)


def _outside(intervals: list[list[tuple[int, int]]], box: Box) -> Iterable[Box]:
    """Slabs of `box` that no cell of the grid reaches, because a whole row of cells was lost."""
    for dim, (column, (start, stop)) in enumerate(zip(intervals, box, strict=True)):
        edge = start
        for low, high in [*column, (stop, stop)]:
            gap = (max(edge, start), min(low, stop))
            if gap[0] < gap[1]:
                slab = (*box[:dim], gap, *box[dim + 1 :])
                if volume(slab):
                    yield slab
            edge = max(edge, high)


def _intersection(a: Box, b: Box) -> Box:
    return tuple((max(s, t), min(e, f)) for (s, e), (t, f) in zip(a, b, strict=True))


def _within(piece: Box, box: Box) -> Box:
    return tuple((start - low, stop - low) for (start, stop), (low, _) in zip(piece, box, strict=True))
