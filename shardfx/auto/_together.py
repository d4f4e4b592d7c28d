"""What several roles send of one array at one operation: they share a gather or a sum, so each pays its part of it."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool

from ._layouts import Event, Layout, Layouts


_SUMS = ("all-reduce", "reduce-scatter")


class Together:
    """The events of several roles, and which roles divide what one of them sends.

    Roles act in their order. What is gathered along two axes grows with the first and more with the second; what is
    summed along two is scattered by the first before the second begins, or is summed by both at once: either way a
    device receives `1 - 1 / (a * b)` of it, as a compiler does that joins the two.
    """

    def __init__(self, layouts: Layouts, made: Sequence[Layout]):
        self.scatters = layouts.habits.scatters
        self.cut = np.array([[position >= 0 for position in layout.cuts] for layout in made]).T
        self.moving: dict[tuple[int, int], list[int]] = {}
        self.kinds: dict[tuple[int, int, int], str] = {}
        for number, layout in enumerate(made):
            for place in layout.moved:
                self.moving.setdefault(place, []).append(number)
            for event in layout.events:
                self.kinds[number, event.value, event.operation] = event.kind

    def divides(self, number: int, event: Event) -> Bool[np.ndarray, " roles"]:
        """Which roles divide what this event of role `number` moves."""
        mask = self.cut[event.value].copy()
        # An exchange moves one shard, the others the whole of what the other roles leave.
        mask[number] = event.kind == "all-to-all"
        for other in self.moving.get((event.value, event.operation), ()):
            if other != number:
                mask[other] = self._other(number, event.kind, other, self._kind(other, event))
        return mask

    def factor(self, event: Event) -> int:
        """How often a device receives what an event moves: twice for a sum that is whole on all in the end."""
        return 2 if event.kind == "all-reduce" or (event.kind == "reduce-scatter" and not self.scatters) else 1

    def _kind(self, other: int, event: Event) -> str:
        # Without an event of its own there is a copy that was gathered before.
        return self.kinds.get((other, event.value, event.operation), "copy")

    def _other(self, number: int, kind: str, other: int, its: str) -> bool:
        if kind in _SUMS and its in _SUMS:
            if self.scatters and kind != its:
                return its == "reduce-scatter"
            return other < number
        if its in _SUMS:
            # Sums are made first, in place.
            return its == "reduce-scatter"
        if its == "all-to-all" or kind in _SUMS:
            return True
        return its == "all-gather" and other > number
