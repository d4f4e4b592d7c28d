"""The protocol of a channel, over which `send` and `receive` carry bytes."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np


@runtime_checkable
class Channel(Protocol):
    """A connection that carries bytes from one sending process to one receiving
    process, in rounds.

    `Sender` and `Receiver` use sockets. A channel over another transport, such as RDMA,
    implements these three methods.

    Both processes have the same plan, so a channel carries bytes only. A piece is a row
    of `uint8`, and a round is a list of pieces that are sent together. The pieces of a
    round arrive in the plan's order, and have at most the plan's `memory_limit_bytes`
    in total. A channel delivers each piece once and unchanged, or raises
    [`shardfx.errors.SyncError`][]. It waits for a dead peer no longer than its
    time-out.
    """

    __module__ = "shardfx.sync"

    def put(self, round: int, pieces: Sequence[np.ndarray]) -> None:
        """Sends the pieces of round number `round`. After the call their memory may be
        overwritten.
        """
        ...

    def get(self, round: int, memories: Sequence[np.ndarray]) -> None:
        """Receives the pieces of round number `round` into `memories`, one for each
        piece. Raises `SyncError` if a piece is damaged.
        """
        ...

    def commit(self, revision: int | None = None) -> int:
        """Ends a transfer. The sender passes the revision that it sent, and the
        receiver's call returns it.
        """
        ...
