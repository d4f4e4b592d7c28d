"""The door of a sender: a thread that accepts connections, whatever moment it is for
the operating system, and a thread for each connection.

Connections that have not proved that they know the secret are bounded in number. All
threads are daemons, and `close` ends them: a process that ends must not stop a thread
while it lets go of arrays, which would abort the process.
"""

import collections
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from ..._ground.errors import SyncError


_LOG = logging.getLogger("shardfx.sync")
# If more come, the host with the most of them loses the one that waits longest: an
# honest receiver proves the secret within milliseconds, and no other host keeps it out.
MOST_UNPROVED = 64
# The wait after an error of the operating system, such as no free file descriptor.
_RETRY_SECONDS = 0.2
_SECONDS_BETWEEN_LOGS = 30.0

# Answers a connection, and calls its second argument once the peer has proved that it
# knows the secret.
Answer = Callable[[socket.socket, Callable[[], None]], None]


class _Unproved(NamedTuple):
    """The host and the thread of a connection that has not proved the secret."""

    host: str
    thread: threading.Thread


class Door:
    """Accepts connections on `listening` and answers each in a thread. On closing,
    connections that have proved the secret may go on for `grace_seconds`.
    """

    def __init__(self, listening: socket.socket, answer: Answer, grace_seconds: float):
        self._listening = listening
        # What a connection's thread runs, and how long it may go on after `close`.
        self._answer = answer
        self._grace_seconds = grace_seconds
        self._lock = threading.Lock()
        # The threads of connections, in the order of arrival: of those that have yet to
        # prove the secret, and of those that have proved it.
        self._unproved: dict[socket.socket, _Unproved] = {}
        self._proved: dict[socket.socket, threading.Thread] = {}
        self._is_closed = False
        # The earliest time of the next warning, by `time.monotonic`.
        self._next_log = 0.0
        self._accepting = threading.Thread(target=self._accept_all, daemon=True)

    def open(self) -> None:
        """Starts to accept connections."""
        self._accepting.start()

    def close(self) -> None:
        """Stops accepting, and ends all connections."""
        if self._is_closed:
            return
        self._is_closed = True
        # A thread that waits in `accept` is not woken by `close` alone.
        _shut(self._listening)
        self._listening.close()
        self._accepting.join()
        with self._lock:
            unproved = dict(self._unproved)
            proved = dict(self._proved)
        for connection in unproved:
            _shut(connection)
        deadline = time.monotonic() + self._grace_seconds
        threads = [*proved.values(), *[peer.thread for peer in unproved.values()]]
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for connection, thread in proved.items():
            if thread.is_alive():
                _shut(connection)
                thread.join()

    def _accept_all(self) -> None:
        """Accepts connections until the door is closed."""
        while not self._is_closed:
            try:
                connection, (host, *_) = self._listening.accept()
            except OSError as error:
                if not self._is_closed:
                    self._wait_out(error)
                continue
            self._admit(connection, host)

    def _wait_out(self, error: Exception) -> None:
        """Waits after a failure to accept a connection, such as no free file descriptor
        or an aborted connection, having closed the oldest.
        """
        if time.monotonic() >= self._next_log:
            self._next_log = time.monotonic() + _SECONDS_BETWEEN_LOGS
            _LOG.warning("a connection was not accepted (%s); trying again", error)
        with self._lock:
            self._close_oldest()
        time.sleep(_RETRY_SECONDS)

    def _admit(self, connection: socket.socket, host: str) -> None:
        """Starts a thread that answers a connection from `host`. If too many wait to
        prove the secret, one of them is closed for it.
        """
        thread = threading.Thread(target=self._run, args=(connection,), daemon=True)
        with self._lock:
            if len(self._unproved) >= MOST_UNPROVED:
                self._close_oldest()
            self._unproved[connection] = _Unproved(host, thread)
        try:
            thread.start()
        except RuntimeError as error:  # The system has no thread for it.
            with self._lock:
                self._unproved.pop(connection, None)
            connection.close()
            self._wait_out(error)

    def _close_oldest(self) -> None:
        """Closes the oldest connection of the host that has the most among those that
        have not proved the secret, if there are any. The caller has the lock.
        """
        counts = collections.Counter(peer.host for peer in self._unproved.values())
        for host, _ in counts.most_common(1):
            oldest = next(
                connection
                for connection, peer in self._unproved.items()
                if peer.host == host
            )
            # Its thread wakes up, and closes it.
            del self._unproved[oldest]
            _shut(oldest)

    def _run(self, connection: socket.socket) -> None:
        """Answers one connection, and closes it."""

        def mark_proved() -> None:
            with self._lock:
                peer = self._unproved.pop(connection, None)
                if peer is None:
                    raise SyncError("the connection was closed for a newer one.")
                self._proved[connection] = peer.thread

        try:
            with connection:
                self._answer(connection, mark_proved)
        except (OSError, SyncError) as error:
            # The receiver is dead or was refused. The trainer goes on.
            _LOG.info("a connection ended: %s", error)
        finally:
            with self._lock:
                self._unproved.pop(connection, None)
                self._proved.pop(connection, None)


def _shut(connection: socket.socket) -> None:
    """Ends a connection, so that a thread that waits for it wakes up."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # The peer has closed it.
