"""A connected socket from which and to which whole messages go, within a time-out."""

import socket
import time
from collections.abc import Callable, Sequence


# Linux takes 1,024 buffers in one call.
_MOST_BUFFERS = 512
_SEND_BUFFER_BYTES = 4 << 20

Memory = bytes | bytearray | memoryview


class Message:
    """A message of `length` bytes that passes in several calls, and the time at which
    all of it must have passed.
    """

    def __init__(self, length: int, timeout_seconds: float):
        self.length = length
        self.passed = 0
        self.deadline = time.monotonic() + timeout_seconds


class Line:
    """A connected socket. Each message ends within the time-out, however slowly the
    peer sends or reads; then a call raises `TimeoutError`. If the peer ends the
    connection, it raises `ConnectionResetError`. Both errors name `peer`. Each call is
    a message of its own, unless it is given one.
    """

    def __init__(
        self,
        connection: socket.socket,
        timeout_seconds: float,
        peer: str = "the other side",
    ):
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self._connection = connection
        self._peer = peer
        self.set_timeout(timeout_seconds)

    def set_timeout(self, timeout_seconds: float) -> None:
        """Changes the time-out of later calls."""
        self._timeout = timeout_seconds
        self._wait_seconds = timeout_seconds
        self._connection.settimeout(timeout_seconds)

    def message(self, length: int) -> Message:
        """A message of `length` bytes for several calls, which begins now."""
        return Message(length, self._timeout)

    def send(self, parts: Sequence[Memory], message: Message | None = None) -> None:
        """Sends the bytes of `parts`, one after another."""
        self._transmit(parts, message, self._connection.sendmsg, "read")

    def fill(self, parts: Sequence[Memory], message: Message | None = None) -> None:
        """Reads bytes into `parts`, one after another, until all are full."""
        self._transmit(parts, message, self._receive, "sent")

    def read(self, count: int) -> bytes:
        """Reads `count` bytes."""
        memory = bytearray(count)
        self.fill([memory])
        return bytes(memory)

    def _receive(self, parts: list[memoryview]) -> int:
        """Reads some bytes into `parts`. Returns how many; 0 at the stream's end."""
        return self._connection.recvmsg_into(parts)[0]

    def _transmit(
        self,
        parts: Sequence[Memory],
        message: Message | None,
        carry: Callable[[list[memoryview]], int],
        verb: str,
    ) -> None:
        """Carries all parts by calls of `carry`, which takes buffers and returns how many
        bytes it carried. `verb` says what the peer did with the bytes. `message` has
        the bytes that passed and the deadline; without it, the parts are a message.
        """
        # The next part stands last.
        remaining = [memoryview(part) for part in parts if len(part)]
        remaining.reverse()
        if message is None:
            message = self.message(sum(map(len, remaining)))
        try:
            self._carry_all(remaining, message, carry)
        except TimeoutError as error:
            raise TimeoutError(
                f"{self._peer} {verb} {message.passed:,} of {message.length:,} bytes in"
                f" {self._timeout:g} s; it hangs, or the network is slow: then give a"
                " longer `timeout_seconds`"
            ) from error
        except ConnectionError as error:
            why = f" ({error.strerror})" if error.strerror else ""
            raise ConnectionResetError(
                f"{self._peer} ended the connection{why}"
            ) from error

    def _carry_all(
        self,
        remaining: list[memoryview],
        message: Message,
        carry: Callable[[list[memoryview]], int],
    ) -> None:
        """Calls `carry`, which returns how many bytes it carried, until none of the
        parts in `remaining` is left. The first one stands last; `remaining` is emptied.
        """
        while remaining:
            self._wait_at_most(message.deadline - time.monotonic())
            # The next parts, at most `_MOST_BUFFERS`, in the order of sending.
            next_parts = remaining[: -_MOST_BUFFERS - 1 : -1]
            carried_bytes = carry(next_parts)
            if not carried_bytes:
                raise ConnectionResetError
            message.passed += carried_bytes
            while remaining and carried_bytes >= len(remaining[-1]):
                carried_bytes -= len(remaining.pop())
            if carried_bytes:
                remaining[-1] = remaining[-1][carried_bytes:]

    def _wait_at_most(self, seconds: float) -> None:
        """Bounds the wait of the next call. A system call is saved while the bound is
        about what it was.
        """
        if seconds <= 0:
            raise TimeoutError
        if seconds < self._wait_seconds / 2 or seconds > self._wait_seconds:
            self._wait_seconds = seconds
            self._connection.settimeout(seconds)
