"""Who holds the shards of an array, and which replica sends. Pure: integers only."""

import bisect
import heapq
import itertools as it
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..._ground.boxes import Box


class Senders:
    """The replicas of one shard; gives the nearest, and of those the one that has sent least.

    **Arguments:**

    - `holders`: devices; none where all are lost.
    - `process_of`: the process of each device.
    - `sent`: the bytes that each device has sent; counted up on the way.
    """

    def __init__(self, holders: Sequence[int], process_of: Mapping[int, int], sent: dict[int, int]):
        self.holders = dict.fromkeys(holders)
        self.sent, self._process_of = sent, process_of
        for device in holders:
            sent.setdefault(device, 0)
        self._everywhere = sorted((sent[device], index, device) for index, device in enumerate(holders))
        self._nearby: dict[int | None, list[tuple[int, int, int]]] = {}
        for entry in self._everywhere:
            self._nearby.setdefault(process_of.get(entry[2]), []).append(entry)

    def take(self, receiver: int, count: int) -> int:
        """The device that sends so many bytes to a receiver."""
        heap = self._nearby.get(self._process_of.get(receiver), self._everywhere)
        while heap[0][0] != self.sent[heap[0][2]]:  # it has sent since, another shard or through the other heap
            _, index, device = heap[0]
            heapq.heapreplace(heap, (self.sent[device], index, device))
        _, index, device = heap[0]
        self.sent[device] += count
        heapq.heapreplace(heap, (self.sent[device], index, device))
        return device


class Shards:
    """Who holds which box of an array. The boxes form a grid, as they do under every JAX sharding.

    **Arguments:**

    - `dtype`: of the array.
    - `holders`: the devices that hold each box.
    - `process_of`, `sent`: as of `Senders`.
    """

    def __init__(
        self, dtype: Any, holders: Mapping[Box, Sequence[int]], process_of: Mapping[int, int], sent: dict[int, int]
    ):
        self.dtype = dtype
        self.senders = {box: Senders(devices, process_of, sent) for box, devices in holders.items()}
        self._intervals = [sorted(set(column)) for column in zip(*holders, strict=True)]

    def overlapping(self, box: Box) -> Iterable[Box]:
        """The boxes that share elements with `box`."""
        found = []
        for column, (start, stop) in zip(self._intervals, box, strict=True):
            first = bisect.bisect_right(column, start, key=lambda interval: interval[1])
            last = bisect.bisect_left(column, stop, key=lambda interval: interval[0])
            found.append(column[first:last])
        return it.product(*found)
