"""The choice of the device that sends a shard, among those that hold a replica of it."""

import functools as ft
import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..._ground.boxes import Box
from ..._ground.text import together


# The numbers of the devices that hold each box of an array.
Holders = Mapping[Box, Sequence[int]]


class HeapEntry(NamedTuple):
    """A device in a heap of senders: the bytes that it had sent when the entry was
    made, its position among the holders of the shard, and its number. Of devices that
    have sent equally much, the first holder is chosen.
    """

    sent_bytes: int
    position: int
    device: int


class Senders:
    """The devices that hold a replica of one shard, each of which can send it. There
    are none if all are lost. `group_of` has the group of each device: devices of one
    group reach each other faster than others. `sent` has the bytes that each device has
    sent, and `choose` updates it.
    """

    def __init__(
        self,
        holders: Sequence[int],
        group_of: Mapping[int, int],
        sent: dict[int, int],
    ):
        # The numbers of the devices, as keys and in order; the values say nothing.
        self.holders = dict.fromkeys(holders)
        # The bytes that each device has sent, which all shards of all arrays share.
        self.sent = sent
        self._group_of = group_of
        for device in holders:
            sent.setdefault(device, 0)

    @ft.cached_property
    def _heap(self) -> list[HeapEntry]:
        """The devices, the one that has sent the fewest bytes first."""
        heap: list[HeapEntry] = []
        for position, device in enumerate(self.holders):
            heap.append(HeapEntry(self.sent[device], position, device))
        return sorted(heap)

    @ft.cached_property
    def _heap_by_group(self) -> dict[int | None, list[HeapEntry]]:
        """The same devices, a heap for those of each group."""
        return together(self._heap, lambda entry: self._group_of.get(entry.device))

    def choose(self, receiver: int, nbytes: int) -> int:
        """Chooses the device that sends `nbytes` to `receiver`: the one that has sent
        the fewest bytes. If some of the devices are in the receiver's group, it is
        one of these.
        """
        if len(self.holders) == 1:
            (device,) = self.holders
            self.sent[device] += nbytes
            return device
        group = self._group_of.get(receiver)
        heap = self._heap_by_group.get(group, self._heap)
        # An entry is too old if its device has sent other bytes since it was made.
        while (first := heap[0]).sent_bytes != self.sent[first.device]:
            self._renew_first(heap)
        device = heap[0].device
        self.sent[device] += nbytes
        self._renew_first(heap)
        return device

    def _renew_first(self, heap: list[HeapEntry]) -> None:
        """Puts the first device of a heap where the bytes that it has sent by now place
        it.
        """
        _, position, device = heap[0]
        heapq.heapreplace(heap, HeapEntry(self.sent[device], position, device))
