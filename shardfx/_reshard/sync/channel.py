"""What carries the pieces of a transfer from one process to another."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np


@runtime_checkable
class Channel(Protocol):
    """One direction from a sending to a receiving process; sockets are the reference, RDMA libraries fit.

    Both sides know the plan, so that a channel carries bytes alone. A piece is a row of `uint8`; those of a round come
    in the plan's order, and together they take at most `limit_bytes` of the plan. A channel delivers each piece once
    and unharmed or raises [`shardfx.errors.SyncError`][]; it never waits longer than its time-out for a dead peer.
    """

    def put(self, round: int, pieces: Sequence[np.ndarray]) -> None:
        """Sends the pieces of a round. Their memory may be written again as soon as it returns."""
        ...

    def get(self, round: int, memories: Sequence[np.ndarray]) -> None:
        """Fills memory with the pieces of a round, all of them checked when it returns."""
        ...

    def commit(self, revision: int | None = None) -> int:
        """Ends a transfer: the sender gives its revision, and the receiver gets it."""
        ...
