"""A channel over JAX's transfer servers, which move arrays from the devices of one
process to those of another.
"""

import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from ..._ground.errors import SyncError


_POLL_SECONDS = 2e-4


class JaxChannel:
    """A Channel over the transfer servers of `jax.experimental.transfer`. Each process
    has a server and connects to the other process's server.

    The servers neither prove a secret nor authenticate bytes: whoever reaches them can
    read and replace the weights. Take them on a private network, and with
    `check_content=True`, which finds damage and bytes from a wrong place.

    One round (the bytes that are sent together) is on its way at a time. A server does
    not report that its peer is dead, so a round that does not arrive within the
    time-out counts as lost. After an error both processes make a new channel with
    another `session`.

    **Arguments:**

    - `server`: the object that `jax.experimental.transfer.start_transfer_server`
      returned.
    - `address`: the address of the other process's server.
    - `session`: a number below 2**31 that is the same in both processes. No other
      channel of the two servers has it.
    - `device`: the device whose memory holds the bytes of a round; by default this
      process's first device.
    - `timeout_seconds`: the time after which a round counts as lost.
    """

    __module__ = "shardfx.sync"

    def __init__(
        self,
        server: Any,
        address: str,
        session: int,
        *,
        device: Any = None,
        timeout_seconds: float = 30.0,
    ):
        self._server = server
        self._peer = server.connect(address)
        self._session = session
        self._timeout = timeout_seconds
        if device is None:
            device = jax.local_devices()[0]
        self._device = device
        # The number of the next round, and whether the other process has received the
        # last one.
        self._count = 0
        self._is_taken = True

    def put(self, round: int, pieces: Sequence[np.ndarray]) -> None:
        """Sends the bytes of a round. Both sides count rounds themselves."""
        self._give(np.concatenate(pieces))

    def get(self, round: int, memories: Sequence[np.ndarray]) -> None:
        """Receives the bytes of a round into `memories`, one after another."""
        data = self._take(sum(memory.nbytes for memory in memories))
        start = 0
        for memory in memories:
            memory[...] = data[start : start + len(memory)]
            start += len(memory)

    def commit(self, revision: int | None = None) -> int:
        """Sends the number of a revision; without one, receives it. Returns it."""
        if revision is None:
            return int.from_bytes(self._take(8).tobytes())
        self._give(np.frombuffer(revision.to_bytes(8), np.uint8))
        self._settle()
        return revision

    def _give(self, data: np.ndarray) -> None:
        """Offers the bytes of a round, once the other process has the last one. Round
        number n has the number 2 n at the servers, and its receipt 2 n + 1.
        """
        self._settle()
        self._offer(2 * self._count, data)
        self._count += 1
        self._is_taken = False

    def _settle(self) -> None:
        """Waits until the other process has received the last round."""
        if not self._is_taken:
            self._pull(2 * self._count - 1, 1)
            self._is_taken = True

    def _take(self, count: int) -> np.ndarray:
        """The `count` bytes of the next round. Offers the receipt."""
        data = self._pull(2 * self._count, count)
        self._offer(2 * self._count + 1, np.ones(1, np.uint8))
        self._count += 1
        return data

    def _offer(self, number: int, data: np.ndarray) -> None:
        """Lets the other process pull `data` under a number of this session."""
        self._server.await_pull(
            self._session << 32 | number, [jax.device_put(data, self._device)]
        )

    def _pull(self, number: int, count: int) -> np.ndarray:
        """The `count` bytes that the other process offers under `number` of this
        session. Raises `SyncError` if they do not come within the time-out.
        """
        struct = jax.ShapeDtypeStruct(
            (count,), np.uint8, sharding=SingleDeviceSharding(self._device)
        )
        deadline = time.monotonic() + self._timeout
        try:
            (array,) = self._peer.pull(self._session << 32 | number, [struct])
            while not array.is_ready() and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            if array.is_ready():
                return np.asarray(array)
        except RuntimeError as error:
            raise SyncError(f"the other side's server is gone: {error}") from error
        raise SyncError(
            f"nothing came from the other side's server for {self._timeout:g} s; is it"
            " alive?"
        )
