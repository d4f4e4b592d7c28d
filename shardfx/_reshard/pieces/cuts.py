"""The pieces of shards that each device takes when an array is assembled from other arrays' shards. Integers only, no
arrays.
"""

import bisect
import collections
import dataclasses
import functools as ft
import heapq
import itertools as it
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..._convert import (
    NOWHERE,
    Arithmetic,
    Factor,
    Made,
    Piece,
    Value,
    dtypes_of,
    from_start,
    hull,
    once,
    rows,
    shifted,
    swapped,
    within,
)
from ..._ground.boxes import Box, common, volume
from ..._ground.spec import bits


class Cut(NamedTuple):
    """One piece of a shard that one device sends to another, or copies within itself.

    **Arguments:**

    - `sender`, `receiver`: the numbers of the two devices; equal if the device copies its own elements.
    - `piece`: the elements, with positions in the sender's shard and in the receiver's. A constant has no source. A
        scaled piece has positions in the whole source array, since it reads two arrays.
    - `bytes`: the bytes sent, if sender and receiver differ.
    - `bits`: bits of an element in its widest dtype: that of the array, of the wire, or of the target.
    """

    sender: int
    receiver: int
    piece: Piece
    bytes: int
    bits: int = 0

    @property
    def room_bytes(self) -> int:
        """Bytes of memory that the piece spans in source or target, whichever is more, gaps between its elements
        included.
        """
        return -(-_extent(self.piece) * self.bits // 8)


@dataclasses.dataclass(frozen=True)
class Cuts:
    """The pieces that assemble every shard of an array, each with its sender and receiver.

    Each element that a device needs and does not have enters it once.

    **Arguments:**

    - `made`: the cuts, receiver by receiver.
    - `missing`: boxes of the source that some device needs and none holds.
    - `replicas`: for each shard with several possible senders, the devices that hold it.
    """

    made: tuple[Cut, ...]
    missing: tuple[Box, ...] = ()
    replicas: tuple[tuple[int, ...], ...] = ()

    @ft.cached_property
    def links(self) -> dict[tuple[int, int], int]:
        """Bytes per (sender, receiver), in the receivers' order. Pieces that a device takes from itself are
        left out.
        """
        links = collections.Counter[tuple[int, int]]()
        for cut in self.made:
            if cut.sender != cut.receiver:
                links[cut.sender, cut.receiver] += cut.bytes
        return dict(links)

    @ft.cached_property
    def sent_bytes(self) -> dict[int, int]:
        """Bytes that leave each sender, in order of the device numbers."""
        totals = collections.Counter[int]()
        for (sender, _), count in self.links.items():
            totals[sender] += count
        return dict(sorted(totals.items()))

    @property
    def wire_bytes(self) -> int:
        """Bytes that enter devices, summed over all of them."""
        return sum(self.links.values())

    def sent_before(self, sent: Mapping[int, int]) -> tuple[tuple[int, int], ...]:
        """The senders that have sent more than another replica of their shard, each with the difference in bytes.

        Nothing else in `sent`, bytes by device, can change the choice of senders.
        """
        leads = []
        for holders in self.replicas:
            least = min(sent.get(device, 0) for device in holders)
            leads += [(device, sent[device] - least) for device in holders if sent.get(device, 0) > least]
        return tuple(leads)


class Senders:
    """The replicas of one shard, any of which can send it. `take` chooses the nearest, and of equally near ones the
    replica that has sent the fewest bytes.

    **Arguments:**

    - `holders`: devices; none where all are lost.
    - `process_of`: the process of each device.
    - `sent`: the bytes that each device has sent, which `take` updates.
    """

    def __init__(self, holders: Sequence[int], process_of: Mapping[int, int], sent: dict[int, int]):
        self.holders = dict.fromkeys(holders)
        self.sent, self._process_of = sent, process_of
        for device in holders:
            sent.setdefault(device, 0)

    @ft.cached_property
    def _everywhere(self) -> list[tuple[int, int, int]]:
        return sorted((self.sent[device], index, device) for index, device in enumerate(self.holders))

    @ft.cached_property
    def _nearby(self) -> dict[int | None, list[tuple[int, int, int]]]:
        found: dict[int | None, list[tuple[int, int, int]]] = {}
        for entry in self._everywhere:
            found.setdefault(self._process_of.get(entry[2]), []).append(entry)
        return found

    def take(self, receiver: int, count: int) -> int:
        """The device that sends `count` bytes to a receiver."""
        if len(self.holders) == 1:
            (device,) = self.holders
            self.sent[device] += count
            return device
        heap = self._nearby.get(self._process_of.get(receiver), self._everywhere)
        while heap[0][0] != self.sent[heap[0][2]]:  # it has sent other bytes since this entry was made
            _, index, device = heap[0]
            heapq.heapreplace(heap, (self.sent[device], index, device))
        _, index, device = heap[0]
        self.sent[device] += count
        heapq.heapreplace(heap, (self.sent[device], index, device))
        return device


class ShardGrid:
    """The devices that hold each box of an array. The boxes form a grid, as under every JAX sharding.

    **Arguments:**

    - `dtype`: the dtype of the array.
    - `holders`: the devices that hold each box.
    - `process_of`, `sent`: as of `Senders`.
    """

    def __init__(
        self, dtype: object, holders: Mapping[Box, Sequence[int]], process_of: Mapping[int, int], sent: dict[int, int]
    ):
        self.dtype = dtype
        self.senders = {box: Senders(devices, process_of, sent) for box, devices in holders.items()}
        self._intervals = [sorted(set(column)) for column in zip(*holders, strict=True)]

    def overlapping(self, box: Box) -> Iterable[Box]:
        """The boxes that have elements in common with `box`."""
        found = []
        for column, (start, stop) in zip(self._intervals, box, strict=True):
            first = bisect.bisect_right(column, start, key=lambda interval: interval[1])
            last = bisect.bisect_left(column, stop, key=lambda interval: interval[0])
            found.append(column[first:last])
        return it.product(*found)


# The dtype of an array, and the devices that hold each box of it.
Held = tuple[Any, Mapping[Box, Sequence[int]]]


def cuts_of(
    made: Made,
    targets: Sequence[tuple[int, Box]],
    sources: Mapping[str, Held],
    process_of: Mapping[int, int],
    sent_before: Iterable[tuple[int, int]] = (),
) -> Cuts:
    """Decides which device sends which piece of a shard to which device, to assemble an array.

    A device takes elements that it holds from itself. Of several other holders, those in the receiver's process come
    first, and among them the one that has sent the fewest bytes. Senders are chosen for the largest pieces first.

    **Arguments:**

    - `made`: the value of the array, as pieces of others.
    - `targets`: device and box of each shard that is wanted.
    - `sources`: by path, the dtype of each array that is read, and the devices that hold each box of it: none if all of
        them are lost.
    - `process_of`: the process of each device.
    - `sent_before`: devices and the bytes that they have sent already, of other arrays.

    **Returns:**

    The Cuts.
    """
    sent = dict(sent_before)
    shards = {id(held): ShardGrid(*held, process_of, sent) for held in sources.values()}
    found: list[tuple[Cut, Senders | None]] = []
    missing: dict[Box, None] = {}
    known: dict[object, list[tuple[Cut, Senders]]] = {}
    for receiver, box in targets:
        start = [-low for low, _ in box]
        for piece in made.pieces:
            if piece.value.path is None or piece.value.scale is not None:
                found += [(Cut(receiver, receiver, shifted(part, start), 0), None) for part in within(piece, box)]
                continue
            source = shards[id(sources[piece.value.path])]
            # All entries of a stack are divided as the first one is. Its position is relative to the box, if it is
            # inside of the box.
            by = from_start(piece, box)
            first = shifted(piece, [-more for more in by])
            key = (box, first.source, first.target, first.factors, piece.value.casts, id(source))
            if key not in known:
                known[key] = list(_cut(first, box, source, missing))
            for cut, senders in known[key]:
                own = Piece(piece.value, *shifted(cut.piece, by)[1:])
                found.append((Cut(receiver, receiver, own, cut.bytes, cut.bits), senders))
    replicas = _choose(found)
    return Cuts(tuple(cut for cut, _ in found), tuple(missing), replicas)


def _choose(found: list[tuple[Cut, Senders | None]]) -> tuple[tuple[int, ...], ...]:
    """Chooses the sender of each cut. Returns, for each shard that several devices could send, these devices."""
    replicas: dict[tuple[int, ...], None] = {}
    for at in sorted(range(len(found)), key=lambda at: -found[at][0].bytes):
        cut, senders = found[at]
        if senders is not None and cut.receiver not in senders.holders:
            found[at] = Cut(senders.take(cut.receiver, cut.bytes), *cut[1:]), senders
            if len(senders.holders) > 1:
                replicas[tuple(senders.holders)] = None
    return tuple(replicas)


def _cut(piece: Piece, box: Box, source: ShardGrid, missing: dict[Box, None]) -> Iterator[tuple[Cut, Senders]]:
    """The cuts of a piece within a box, one for each shard of the source. Boxes that no device holds are added to
    `missing`.
    """
    widths = [bits(source.dtype), *map(bits, dtypes_of(piece.value.casts))]
    for part in within(piece, box):
        part = shifted(part, [-low for low, _ in box])
        for cell in source.overlapping(hull(swapped(part))):
            other = swapped(part)
            if common(hull(other), cell) is None:
                continue
            for own in [swapped(shifted(one, [-low for low, _ in cell])) for one in within(other, cell)]:
                if not source.senders[cell].holders:
                    starts = [low for low, _ in cell]
                    missing[hull(shifted(swapped(once(own)), starts))] = None
                    continue
                size = -(-once(own).elements * min(widths) // 8)
                yield Cut(-1, -1, own, size, max(widths)), source.senders[cell]


def first_casts(casts: Sequence[object], dtype: object) -> int:
    """The number of leading casts that the sender applies: up to the one with the fewest bits per element."""
    sizes = [bits(dtype)]
    for to in casts:
        sizes.append(sizes[-1] if isinstance(to, Arithmetic) else bits(to))
    return sizes.index(min(sizes))


def sent_bits(value: Value, dtype: object) -> int:
    """Bits per element on the wire, after the casts that the sender applies."""
    return min([bits(dtype), *map(bits, dtypes_of(value.casts))])


def _extent(piece: Piece) -> int:
    """The most elements that the piece spans, the gaps between its elements included, in the source or the target."""
    return _extent_of(piece.factors, len(piece.source), len(piece.target))


@ft.lru_cache(maxsize=4096)
def _extent_of(factors: tuple[Factor, ...], here: int, there: int) -> int:
    piece = Piece(Value(None), (0,) * here, (0,) * there, factors)
    return max(piece.elements, volume(hull(piece)), volume(hull(swapped(once(piece)))))


def smaller(cut: Cut, most_bytes: int) -> list[Cut]:
    """A cut divided into cuts of at most `most_bytes` of memory each, as far as that is possible without sending
    elements twice.
    """
    factors = [f for f in cut.piece.factors if f.source_dim != NOWHERE]
    if cut.room_bytes <= most_bytes or not factors:
        return [cut]
    # First along the factor with the largest gaps between its elements; else along the longest factor, which leaves the
    # fewest parts.
    outer = min(factors, key=lambda f: (_extent(rows(cut.piece, f, 0, -(-f.size // 2))), -f.size))
    count = -(-outer.size // max(1, outer.size * most_bytes // cut.room_bytes))
    step = -(-outer.size // max(2, count))
    per = cut.bytes / outer.size
    found = []
    for start in range(0, outer.size, step):
        stop = min(outer.size, start + step)
        part = cut._replace(piece=rows(cut.piece, outer, start, stop), bytes=math.ceil(per * (stop - start)))
        found += smaller(part, most_bytes)
    return found


def least_room_bytes(cut: Cut) -> int:
    """The bytes of memory of the smallest cuts that a cut can be divided into."""
    repeated = tuple(f for f in cut.piece.factors if f.source_dim == NOWHERE)
    return cut._replace(piece=cut.piece._replace(factors=repeated)).room_bytes
