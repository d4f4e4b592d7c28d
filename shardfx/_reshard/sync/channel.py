"""What carries the pieces of a transfer from one process to another."""

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import numpy as np


@runtime_checkable
class Channel(Protocol):
    """One direction from a sending to a receiving process; sockets are the reference, RDMA libraries fit.

    Both sides know the plan, so that a channel carries bytes alone: the pieces of a round come in the plan's order.
    A channel delivers each piece once and unharmed or raises [`shardfx.errors.SyncError`][]; it never waits longer than
    its time-out for a peer that is dead.
    """

    def put(self, round: int, pieces: Iterator[np.ndarray]) -> None:
        """Sends the pieces of a round. A piece may be overwritten as soon as the next one is asked for."""
        ...

    def get(self, round: int, memories: Iterator[np.ndarray]) -> None:
        """Fills memory with the pieces of a round. A piece is there, checked, before the next memory is asked for."""
        ...

    def commit(self, revision: int | None = None) -> int:
        """Ends a transfer: the sender gives its revision, and the receiver gets it."""
        ...
