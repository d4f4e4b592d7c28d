"""`Sender` and `Receiver`, which transfer weights over sockets, with a shared secret,
checksums and time-outs.
"""

import contextlib
import hashlib
import hmac
import itertools as it
import json
import os
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np

from ..._ground.errors import PlanMismatchError, SyncError
from ..._plan import ShardPlan
from .endpoints import receive, send
from .transfer import TransferPlan


# A header: the round, or -1 for a commit; the number of bytes that follow, or the
# revision; the checksum of the checksums, or of the revision.
_FRAME = struct.Struct(">qqI")
_COMMIT = -1
_FRAME_BYTES = 1 << 22
# Linux takes 1,024 buffers in one call.
_MOST_PARTS = 512
_ROW_BYTES = 4096
_NONCE_BYTES = 32
_MOST_TEXT_BYTES = 64 << 20
_LEAST_SECRET_BYTES = 16
Address = tuple[str, int]
Memory = bytes | bytearray | memoryview


class _SocketChannel:
    """A `Channel` over one connected socket. Each group of pieces with one header must
    arrive within the time-out, and so must each message. So a peer that sends very
    slowly counts as dead.
    """

    def __init__(self, connection: socket.socket, timeout_seconds: float):
        self._connection, self._timeout = connection, timeout_seconds

    def put(self, round: int, pieces: Sequence[np.ndarray]) -> None:
        for frame in _frames(pieces):
            sums = _checksums(frame)
            self.send(
                _FRAME.pack(
                    round, sum(piece.nbytes for piece in frame), zlib.crc32(sums)
                ),
                sums,
                *_data(frame),
            )

    def get(self, round: int, memories: Sequence[np.ndarray]) -> None:
        for frame in _frames(memories):
            nbytes, sums = (
                sum(memory.nbytes for memory in frame),
                bytearray(4 * len(frame)),
            )
            found, count, checksum = _FRAME.unpack(self.read(_FRAME.size))
            if (found, count) != (round, nbytes):
                raise SyncError(
                    f"{nbytes} bytes of round {round} should come, and {count} bytes of"
                    f" round {found} came; pull again."
                )
            self.fill(sums, *_data(frame))
            if zlib.crc32(sums) != checksum or sums != _checksums(frame):
                raise SyncError(
                    f"a piece of round {round} was damaged on its way; pull again."
                )

    def commit(self, revision: int | None = None) -> int:
        if revision is not None:
            self.send(_FRAME.pack(_COMMIT, revision, zlib.crc32(b"%d" % revision)))
            return revision
        found, sent, checksum = _FRAME.unpack(self.read(_FRAME.size))
        if (found, checksum) != (_COMMIT, zlib.crc32(b"%d" % sent)):
            raise SyncError(
                "the transfer should end here, and something else came; pull again."
            )
        return sent

    def read(self, count: int) -> bytes:
        memory = bytearray(count)
        self.fill(memory)
        return bytes(memory)

    def send(self, *parts: Memory) -> None:
        """Sends the bytes of `parts`, one after another."""
        self._transmit(parts, self._connection.sendmsg)

    def fill(self, *parts: Memory) -> None:
        """Reads bytes from the socket into `parts`, one after another, until all are
        full.
        """
        self._transmit(parts, lambda some: self._connection.recvmsg_into(some)[0])

    def _transmit(
        self, parts: Sequence[Memory], carry: Callable[[list[memoryview]], int]
    ) -> None:
        deadline = time.monotonic() + self._timeout
        left = [memoryview(part) for part in parts][::-1]
        while left:
            self._connection.settimeout(max(0.001, deadline - time.monotonic()))
            count = carry(left[: -_MOST_PARTS - 1 : -1])
            if not count:
                raise ConnectionResetError("the connection ended early")
            while left and count >= len(left[-1]):
                count -= len(left.pop())
            if count:
                left[-1] = left[-1][count:]


def _data(pieces: Sequence[np.ndarray]) -> list[memoryview]:
    return [piece.data for piece in pieces]


def _frames(pieces: Sequence[np.ndarray]) -> Iterator[Sequence[np.ndarray]]:
    """Yields groups of `pieces` (rows of bytes) that are sent with one header and fit
    the processor's cache.
    """
    first, nbytes = 0, 0
    for at, piece in enumerate(pieces):
        if nbytes >= _FRAME_BYTES:
            yield pieces[first:at]
            first, nbytes = at, 0
        nbytes += piece.nbytes
    if first < len(pieces):
        yield pieces[first:]


def _checksums(pieces: Sequence[np.ndarray]) -> bytes:
    return b"".join([_checksum(piece).to_bytes(4) for piece in pieces])


def _checksum(piece: np.ndarray) -> int:
    """The checksum of a row of bytes. The bytes are read as a table of 64-bit words, in
    rows of 4,096 bytes. The checksum is a CRC of the sums of the table's columns, and
    of the bytes after the last whole row. A CRC of all words would take three times as
    long.
    """
    body = len(piece) // _ROW_BYTES * _ROW_BYTES
    words = piece[:body].view(np.uint64).reshape(-1, _ROW_BYTES // 8)
    return zlib.crc32(piece[body:].data, zlib.crc32(np.add.reduce(words, axis=0).data))


class Sender:
    """Serves the newest published arrays of one process of a trainer, over a socket.

    Receivers must know the secret. The arrays are not encrypted. If a receiver dies,
    its connection is dropped.

    **Arguments:**

    - `plan`: the plan of the transfer.
    - `secret`: a secret of at least 16 bytes that both jobs know.
    - `process`: the number of this sending process.
    - `host`, `port`: the address to listen on, by default on 127.0.0.1. Port 0 is any
      free port, and the attribute
        `address` has its number.
    - `timeout_seconds`: the time after which a receiver that neither reads nor writes
      counts as dead.
    """

    __module__ = "shardfx.sync"

    def __init__(
        self,
        plan: TransferPlan,
        secret: bytes,
        *,
        process: int = 0,
        host: str = "127.0.0.1",
        port: int = 0,
        timeout_seconds: float = 30.0,
    ):
        self._plan, self._secret, self._process, self._timeout = (
            plan,
            _checked(secret),
            process,
            timeout_seconds,
        )
        # The newest revision, and its arrays.
        self._newest: tuple[int, Mapping[str, jax.Array]] | None = None
        self._listening = socket.create_server((host, port))
        self.address: Address = self._listening.getsockname()[:2]
        self._is_closed = False
        self._serving = threading.Thread(target=self._serve, daemon=True)
        self._serving.start()

    def publish(self, arrays: Mapping[str, jax.Array], revision: int) -> None:
        """Makes `arrays`, by path, the newest revision (version of all weights).
        `revision` is its number.

        The arrays are not copied, so do not donate them before the next revision is
        published.
        """
        if self._newest is not None and revision <= self._newest[0]:
            raise SyncError(
                f"revision {revision} is not above {self._newest[0]}, which is"
                " published already."
            )
        self._newest = revision, arrays

    def close(self) -> None:
        """Stops listening for receivers."""
        self._is_closed = True
        # A thread that waits in `accept` is not woken by `close` alone.
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._serving.join()

    def _serve(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            # Python waits for this thread when it exits. If it stopped the thread while
            # that releases arrays, the process would abort.
            threading.Thread(
                target=self._answer, args=(connection,), daemon=False
            ).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            line = _SocketChannel(connection, self._timeout)
            try:
                _authenticate(line, self._secret, b"sender", b"receiver")
                self._transfer(line)
            except (OSError, SyncError):
                return  # The receiver is dead or was refused. The trainer continues.

    def _transfer(self, line: _SocketChannel) -> None:
        asked = _get_text(line)
        receiver, have, digest = (
            asked.get("receiver"),
            asked.get("have"),
            asked.get("digest"),
        )
        if not isinstance(receiver, int):
            raise SyncError(f"the receiver says that it is process {receiver!r:.40}.")
        if digest != self._plan.digest:
            _put_text(
                line,
                {"leaves": [(leaf.path, leaf.digest) for leaf in self._plan.leaves]},
            )
            return
        revision, arrays = self._newest or (None, {})
        revision = None if revision == have else revision
        _put_text(line, {"revision": revision})
        if revision is None or _get_text(line).get("take") != revision:
            return
        try:
            send(
                self._plan,
                arrays,
                line,
                revision,
                sender=self._process,
                receiver=receiver,
            )
        except (RuntimeError, KeyError, TypeError, ValueError) as error:
            # An array was donated and is deleted. The closed connection tells the
            # receiver.
            raise SyncError(f"revision {revision} cannot be read: {error}") from error


class Receiver:
    """Receives revisions (versions of all weights) from a trainer's `Sender`s, for one
    process of an inference engine.

    The attributes `arrays` and `revision` have the last revision that arrived as a
    whole.

    **Arguments:**

    - `plan`: the plan of the transfer.
    - `dst`: the engine's plan, made for its devices.
    - `addresses`: the address (host and port) of each sending process.
    - `secret`: the secret of the senders.
    - `process`: the number of this receiving process.
    - `timeout_seconds`: the time after which a silent sender counts as dead.

    **Raises:**

    `PlanMismatchError` if the plan is not for this process, or a sender's address is
    missing.
    """

    __module__ = "shardfx.sync"

    def __init__(
        self,
        plan: TransferPlan,
        dst: ShardPlan,
        addresses: Sequence[Address],
        secret: bytes,
        *,
        process: int = 0,
        timeout_seconds: float = 30.0,
    ):
        if process not in plan.receivers or plan.receiver not in (None, process):
            raise PlanMismatchError(
                f"this plan has no part for the receiving process {process}."
            )
        if len(addresses) <= max(plan.senders):
            raise PlanMismatchError(
                f"{len(addresses)} addresses for {max(plan.senders) + 1} sending"
                " processes."
            )
        self._plan, self._dst, self._addresses, self._secret = (
            plan,
            dst,
            tuple(addresses),
            _checked(secret),
        )
        self._process, self._timeout = process, timeout_seconds
        self.arrays: dict[str, jax.Array] = {}
        self.revision: int | None = None

    def pull(self) -> bool:
        """Receives the newest revision into spare memory, and then replaces `arrays`
        and `revision`.

        **Returns:**

        Whether there was a newer revision.

        **Raises:**

        `SyncError` if a sender is dead, is silent or refuses the connection, or if
        bytes are damaged; `PlanMismatchError`, with the first leaf that differs, if the
        two jobs planned different transfers. `arrays` is then unchanged.
        """
        with contextlib.ExitStack() as stack:
            lines: dict[int, _SocketChannel] = {}
            try:
                for sender in self._plan.senders_to(self._process):
                    connection = socket.create_connection(
                        self._addresses[sender], self._timeout
                    )
                    lines[sender] = _SocketChannel(
                        stack.enter_context(connection), self._timeout
                    )
                    _authenticate(lines[sender], self._secret, b"receiver", b"sender")
                return self._pulled(lines)
            except OSError as error:
                raise SyncError(
                    f"a sender is gone ({error or type(error).__name__}); `arrays` is"
                    f" revision {self.revision}, whole."
                ) from error

    def _pulled(self, lines: Mapping[int, _SocketChannel]) -> bool:
        asked = {
            "receiver": self._process,
            "have": self.revision,
            "digest": self._plan.digest,
        }
        offers = []
        for line in lines.values():
            _put_text(line, asked)
            offer = _get_text(line)
            if "leaves" in offer:
                _raise_mismatch(self._plan, offer["leaves"])
            offers.append(offer.get("revision"))
        if len(set(offers)) > 1:
            raise SyncError(
                f"the senders offer the revisions {offers}; pull again when all have"
                " published."
            )
        if not offers or offers[0] is None:
            return False
        for line in lines.values():
            _put_text(line, {"take": offers[0]})
        self.arrays, self.revision = receive(
            self._plan, self._dst, lines, receiver=self._process
        )
        return True


def _raise_mismatch(plan: TransferPlan, theirs: object) -> None:
    rows = (
        [tuple(row) for row in theirs if isinstance(row, list)]
        if isinstance(theirs, list)
        else []
    )
    ours = [(leaf.path, leaf.digest) for leaf in plan.leaves]
    if rows == ours:
        raise PlanMismatchError(
            "the two jobs planned for other meshes, processes or limits; plan with the"
            " same."
        )
    path = next(
        (own or other)[0] for own, other in it.zip_longest(ours, rows) if own != other
    )
    raise PlanMismatchError(
        f"leaf `{path}` is planned otherwise by the sender; plan both sides from the"
        " same plans and map."
    )


def _checked(secret: bytes) -> bytes:
    if len(secret) < _LEAST_SECRET_BYTES:
        raise SyncError(
            f"a secret of {len(secret)} bytes; take at least {_LEAST_SECRET_BYTES}:"
            " `secrets.token_bytes(32)`."
        )
    return secret


def _authenticate(
    line: _SocketChannel, secret: bytes, own: bytes, other: bytes
) -> None:
    """Proves to the peer that this process knows the secret, and checks the peer's
    proof. Each proof is an HMAC of random bytes (a nonce) from both processes and of
    the prover's role: sender or receiver. `own` is the role of this process, and
    `other` that of the peer.
    """
    mine = os.urandom(_NONCE_BYTES)
    line.send(mine)
    theirs = line.read(_NONCE_BYTES)
    line.send(_proof(secret, own, mine, theirs))
    if not hmac.compare_digest(
        line.read(_NONCE_BYTES), _proof(secret, other, theirs, mine)
    ):
        raise SyncError("the other side has another secret; nothing was sent.")


def _proof(secret: bytes, role: bytes, mine: bytes, theirs: bytes) -> bytes:
    return hmac.new(secret, role + mine + theirs, hashlib.sha256).digest()


def _put_text(line: _SocketChannel, data: Mapping[str, object]) -> None:
    text = json.dumps(data).encode()
    line.send(struct.pack(">I", len(text)), text)


def _get_text(line: _SocketChannel) -> dict[str, object]:
    (count,) = struct.unpack(">I", line.read(4))
    try:
        found = json.loads(line.read(count)) if count <= _MOST_TEXT_BYTES else None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise SyncError(
            "a message that is no JSON object; the other side is no `Sender` or"
            " `Receiver`."
        )
    return found
