"""The reference channel: sockets with a shared secret, a checksum per piece, and time-outs."""

import hashlib
import hmac
import json
import os
import socket
import struct
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from ..._ground.errors import PlanMismatchError, SyncError
from ..._plan import ShardPlan
from .ends import receive, send
from .transfer import TransferPlan


# The round, -1 for a commit; the bytes that follow, or the revision; their checksum.
_FRAME = struct.Struct(">qqI")
_COMMIT = -1
_NONCE_BYTES = 32
_MOST_TEXT_BYTES = 64 << 20
_LEAST_SECRET_BYTES = 16
Address = tuple[str, int]


class _Sockets:
    """A Channel over one connected socket."""

    def __init__(self, connection: socket.socket):
        self._connection = connection

    def put(self, round: int, pieces: Iterator[np.ndarray]) -> None:
        for piece in pieces:
            raw = _as_bytes(piece)
            self._connection.sendall(_FRAME.pack(round, len(raw), zlib.crc32(raw)))
            self._connection.sendall(raw)

    def get(self, round: int, memories: Iterator[np.ndarray]) -> None:
        for number, memory in enumerate(memories):
            found, count, checksum = self._frame()
            if (found, count) != (round, memory.nbytes):
                raise SyncError(
                    f"piece {number} of round {round} should have {memory.nbytes} bytes; "
                    f"{count} bytes of round {found} came; pull again."
                )
            raw = _as_bytes(memory)
            _read_into(self._connection, raw)
            if zlib.crc32(raw) != checksum:
                raise SyncError(f"piece {number} of round {round} was damaged on its way; pull again.")

    def commit(self, revision: int | None = None) -> int:
        if revision is not None:
            self._connection.sendall(_FRAME.pack(_COMMIT, revision, 0))
            return revision
        found, revision, _ = self._frame()
        if found != _COMMIT:
            raise SyncError(f"the transfer should end here, and a piece of round {found} came; pull again.")
        return revision

    def _frame(self) -> tuple[int, int, int]:
        head = bytearray(_FRAME.size)
        _read_into(self._connection, memoryview(head))
        return _FRAME.unpack(head)


def _as_bytes(memory: np.ndarray) -> memoryview:
    return memory.reshape(-1).view(np.uint8).data


class _Published(NamedTuple):
    revision: int
    arrays: Mapping[str, jax.Array]


class Sender:
    """Serves the newest published arrays of one process of a trainer; a receiver that dies is forgotten.

    It listens on 127.0.0.1 unless told otherwise. The secret admits receivers; what is sent is not encrypted.

    **Arguments:**

    - `plan`: the transfer.
    - `secret`: at least 16 bytes that both jobs know.
    - `process`: which sending process this is.
    - `host`, `port`: where to listen; port 0 is any free one, and `address` says which.
    - `timeout_seconds`: after which a receiver that neither reads nor writes counts as dead.
    """

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
        self._plan, self._secret, self._process, self._timeout = plan, _checked(secret), process, timeout_seconds
        self._newest: _Published | None = None
        self._listening = socket.create_server((host, port))
        self.address: Address = self._listening.getsockname()[:2]
        self._is_closed = False
        threading.Thread(target=self._serve, daemon=True).start()

    def publish(self, arrays: Mapping[str, jax.Array], revision: int) -> None:
        """Makes arrays, by path, the newest revision. They are not copied: do not donate them before the next one."""
        if self._newest is not None and revision <= self._newest.revision:
            raise SyncError(f"revision {revision} is not above {self._newest.revision}, which is published already.")
        self._newest = _Published(revision, arrays)

    def close(self) -> None:
        """Stops listening."""
        self._is_closed = True
        # A thread that waits in `accept` is not woken by `close` alone.
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _serve(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(self._timeout)
            try:
                _shake_hands(connection, self._secret, b"sender", b"receiver")
                self._transfer(connection)
            except (OSError, SyncError):
                return  # The receiver is gone or was refused, and the trainer goes on.

    def _transfer(self, connection: socket.socket) -> None:
        asked = _get_text(connection)
        receiver, have, digest = asked.get("receiver"), asked.get("have"), asked.get("digest")
        if not isinstance(receiver, int):
            raise SyncError(f"the receiver says that it is process {receiver!r:.40}.")
        newest, leaves = self._newest, [(leaf.path, leaf.digest) for leaf in self._plan.leaves]
        if digest != self._plan.digest:
            _put_text(connection, {"leaves": leaves})
            return
        revision = None if newest is None or newest.revision == have else newest.revision
        _put_text(connection, {"revision": revision})
        if newest is None or revision is None or _get_text(connection).get("take") != revision:
            return
        try:
            send(self._plan, newest.arrays, _Sockets(connection), revision, sender=self._process, receiver=receiver)
        except (RuntimeError, KeyError, TypeError, ValueError) as error:
            # What was donated is gone: the receiver learns of it by the end of the connection.
            raise SyncError(f"revision {revision} cannot be read: {error}") from error


class Receiver:
    """Pulls revisions for one process of an engine. `arrays` and `revision` change together, or not at all.

    **Arguments:**

    - `plan`: the transfer.
    - `dst`: the engine's plan, made for its devices.
    - `addresses`: of each sending process.
    - `secret`: the sender's.
    - `process`: which receiving process this is.
    - `timeout_seconds`: after which a sender that is silent counts as dead.
    """

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
        self._plan, self._dst, self._addresses, self._secret = plan, dst, tuple(addresses), _checked(secret)
        self._process, self._timeout = process, timeout_seconds
        self.arrays: dict[str, jax.Array] = {}
        self.revision: int | None = None

    def pull(self) -> bool:
        """Gets the newest revision into spare memory, then makes it `arrays`.

        **Returns:**

        Whether there was a newer revision.

        **Raises:**

        `SyncError` if a sender is dead, silent or refuses, or a piece is damaged; `PlanMismatchError`, with the first
        leaf that differs, if the two jobs planned different transfers. `arrays` is as it was, whole.
        """
        connections: dict[int, socket.socket] = {}
        try:
            for sender in self._plan.senders_to(self._process):
                connections[sender] = socket.create_connection(self._addresses[sender], self._timeout)
                _shake_hands(connections[sender], self._secret, b"receiver", b"sender")
            return self._pulled(connections)
        except OSError as error:
            raise SyncError(
                f"a sender is gone ({error or type(error).__name__}); `arrays` is revision {self.revision}, whole."
            ) from error
        finally:
            for connection in connections.values():
                connection.close()

    def _pulled(self, connections: Mapping[int, socket.socket]) -> bool:
        asked = {"receiver": self._process, "have": self.revision, "digest": self._plan.digest}
        offers = []
        for connection in connections.values():
            _put_text(connection, asked)
            offer = _get_text(connection)
            if "leaves" in offer:
                _raise_mismatch(self._plan, offer["leaves"])
            offers.append(offer.get("revision"))
        if len(set(offers)) > 1:
            raise SyncError(f"the senders offer the revisions {offers}; pull again when all have published.")
        if not offers or offers[0] is None:
            return False
        for connection in connections.values():
            _put_text(connection, {"take": offers[0]})
        channels = {sender: _Sockets(connection) for sender, connection in connections.items()}
        self.arrays, self.revision = receive(self._plan, self._dst, channels, receiver=self._process)
        return True


def _raise_mismatch(plan: TransferPlan, theirs: object) -> None:
    rows = [tuple(row) for row in theirs if isinstance(row, list)] if isinstance(theirs, list) else []
    ours = [(leaf.path, leaf.digest) for leaf in plan.leaves]
    if rows == ours:
        raise PlanMismatchError("the two jobs planned for other meshes, processes or limits; plan with the same.")
    at = next(
        (at for at, pair in enumerate(zip(ours, rows, strict=False)) if pair[0] != pair[1]), min(len(ours), len(rows))
    )
    path = ours[at][0] if at < len(ours) else rows[at][0]
    raise PlanMismatchError(
        f"leaf `{path}` is planned otherwise by the sender; plan both sides from the same plans and map."
    )


def _checked(secret: bytes) -> bytes:
    if len(secret) < _LEAST_SECRET_BYTES:
        raise SyncError(
            f"a secret of {len(secret)} bytes; take at least {_LEAST_SECRET_BYTES}: `secrets.token_bytes(32)`."
        )
    return secret


def _shake_hands(connection: socket.socket, secret: bytes, own: bytes, other: bytes) -> None:
    """Each side proves that it knows the secret, with a number of the other's choice."""
    mine = os.urandom(_NONCE_BYTES)
    connection.sendall(mine)
    theirs = _read(connection, _NONCE_BYTES)
    connection.sendall(_proof(secret, own, mine, theirs))
    if not hmac.compare_digest(_read(connection, _NONCE_BYTES), _proof(secret, other, theirs, mine)):
        raise SyncError("the other side has another secret; nothing was sent.")


def _proof(secret: bytes, role: bytes, mine: bytes, theirs: bytes) -> bytes:
    return hmac.new(secret, role + mine + theirs, hashlib.sha256).digest()


def _put_text(connection: socket.socket, data: Mapping[str, object]) -> None:
    text = json.dumps(data).encode()
    connection.sendall(struct.pack(">I", len(text)) + text)


def _get_text(connection: socket.socket) -> dict[str, object]:
    (count,) = struct.unpack(">I", _read(connection, 4))
    if count > _MOST_TEXT_BYTES:
        raise SyncError(f"a message of {count} bytes; the other side is no `Sender` or `Receiver`.")
    try:
        found = json.loads(_read(connection, count))
    except ValueError as error:
        raise SyncError("a message that is no JSON; the other side is no `Sender` or `Receiver`.") from error
    if not isinstance(found, dict):
        raise SyncError("a message that is no JSON object; the other side is no `Sender` or `Receiver`.")
    return found


def _read(connection: socket.socket, count: int) -> bytes:
    memory = bytearray(count)
    _read_into(connection, memoryview(memory))
    return bytes(memory)


def _read_into(connection: socket.socket, memory: memoryview) -> None:
    while memory:
        count = connection.recv_into(memory)
        if not count:
            raise ConnectionResetError("the connection ended early")
        memory = memory[count:]
