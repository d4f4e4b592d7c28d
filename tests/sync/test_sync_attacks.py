"""Attacks on a transfer by a peer on the path that does not know the secret. None of
them makes an engine take a byte that was not published.

A man in the middle passes every byte of a pull on and changes something. The engine
then raises an error, and its arrays are the ones that it had.
"""

import contextlib
import functools as ft
import random
import socket
import struct
import threading
from typing import Any, NamedTuple

import numpy as np
import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf import hkdf
from maps import same
from sync_jobs import SECRET, bits, job, receiver_of, served_by
from wire import Line, frames, handshake, messages

from shardfx import ShardPlan
from shardfx.errors import SyncError
from shardfx.sync import Sender, TransferPlan, receive, send


AUTHENTICATED = handshake.Suite("authenticated", False)
ENDS = handshake.Ends(sender=0, receiver=0)
HELLO_BYTES = len(handshake._HELLO.pack(b"", 0, 0, 0, 0, 0, b"", b""))
# The handshake is a hello and a proof of 32 bytes in each direction.
HANDSHAKE_BYTES = HELLO_BYTES + 32


class Cut(OSError):
    """The man in the middle cuts the connection."""


class Path:
    """A man in the middle: it gives the bytes of each direction to a function, which
    returns what is passed on, and keeps what it saw.
    """

    def __init__(self, address, to_sender=lambda data: data, to_receiver=None):
        self.address = address
        self.changes = {"up": to_sender, "down": to_receiver or (lambda data: data)}
        self.seen = {"up": b"", "down": b""}
        self.server = socket.create_server(("127.0.0.1", 0))
        self.own_address = self.server.getsockname()[:2]
        self.connections = []
        self.threads = [threading.Thread(target=self._serve, daemon=True)]
        self.threads[0].start()

    def _serve(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.server.accept()
                far = socket.create_connection(self.address)
                self.connections += [near, far]
                self.seen = {"up": b"", "down": b""}
                for source, target, name in ((near, far, "up"), (far, near, "down")):
                    pump = (source, target, name)
                    thread = threading.Thread(target=self._pump, args=pump, daemon=True)
                    thread.start()

    def _pump(self, source, target, name):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen[name] += data
                try:
                    target.sendall(self.changes[name](data))
                except Cut:
                    source.shutdown(socket.SHUT_RDWR)
                    target.shutdown(socket.SHUT_RDWR)
                    raise
            target.shutdown(socket.SHUT_WR)

    def close(self):
        with contextlib.suppress(OSError):
            self.server.shutdown(socket.SHUT_RDWR)
        self.server.close()
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self.threads:
            thread.join()
        for connection in self.connections:
            connection.close()


@pytest.fixture(params=[False, True], ids=["authenticated", "encrypted"])
def served(request):
    transfer = job(memory_limit_bytes=32)
    options = {"encrypt": request.param}
    sender = Sender(transfer.plan, SECRET, timeout_seconds=2, **options)
    with contextlib.closing(sender):
        sender.publish(transfer.tree, 1)
        yield served_by(sender, transfer, **options)


def session_pair(suite=AUTHENTICATED):
    """Both ends of a session over a socket pair, after the handshake."""
    sockets = socket.socketpair()
    lines = [Line(connection, 5) for connection in sockets]
    sessions = {}

    def receive_hello():
        sessions["receiver"] = handshake.as_receiver(lines[1], SECRET, suite, ENDS)

    thread = threading.Thread(target=receive_hello)
    thread.start()
    sessions["sender"] = handshake.as_sender(lines[0], SECRET, suite, 0)
    thread.join()
    return sockets, lines, sessions


class Recording(NamedTuple):
    """A whole transfer as the sender writes it, cut into frames, and the keys with
    which a receiver reads them.
    """

    dst: ShardPlan
    plan: TransferPlan
    tree: dict[str, Any]
    frames: list[bytes]
    keys: Any


def recorded(suite=AUTHENTICATED, memory_limit_bytes=32):
    transfer = job(memory_limit_bytes=memory_limit_bytes)
    sockets, lines, sessions = session_pair(suite)
    with sockets[0], sockets[1]:
        writer = frames.FrameLine(lines[0], suite, sessions["sender"].keys)
        channel = frames.SocketChannel(writer)
        send(transfer.plan, transfer.tree, channel, 3, sender=0, receiver=0)
        sockets[0].shutdown(socket.SHUT_WR)
        read = ft.partial(sockets[1].recv, 1 << 16)
        data = b"".join(iter(read, b""))
    return Recording(
        dst=transfer.dst,
        plan=transfer.plan,
        tree=transfer.tree,
        frames=frames_of(data),
        keys=sessions["receiver"].keys,
    )


def frames_of(data):
    header_bytes = frames.HEADER.size
    frames_of_data = []
    while data:
        _, _, length = frames.HEADER.unpack(data[:header_bytes])
        size = header_bytes + length + frames.TAG_BYTES
        frames_of_data.append(data[:size])
        data = data[size:]
    return frames_of_data


def received(data, dst, plan, keys, suite=AUTHENTICATED):
    near, far = socket.socketpair()
    with near, far:
        near.sendall(data)
        near.shutdown(socket.SHUT_WR)
        reader = frames.FrameLine(Line(far, 2), suite, keys)
        channels = {0: frames.SocketChannel(reader)}
        return receive(plan, dst, channels, receiver=0)


@pytest.mark.parametrize("encrypt", [False, True])
def test_altered_frames_are_errors(encrypt):
    """One bit, byte or run of bytes changed, lost or doubled; frames exchanged,
    repeated, left out, cut off, or with another header.
    """
    suite = handshake.Suite("authenticated", encrypt)
    recording = recorded(suite)
    keys = recording.keys
    whole, _ = received(
        b"".join(recording.frames),
        dst=recording.dst,
        plan=recording.plan,
        keys=keys,
        suite=suite,
    )
    for path, leaf in recording.tree.items():
        same(bits(whole[path]), bits(leaf))

    draws = random.Random(0)
    count = 0
    for number in range(300):
        data = altered(recording.frames, number % 10, draws)
        if data.startswith(b"".join(recording.frames)):
            continue  # What follows a commit is not read.
        count += 1
        with pytest.raises((SyncError, OSError)):
            received(
                data,
                dst=recording.dst,
                plan=recording.plan,
                keys=keys,
                suite=suite,
            )
    assert count > 250


def altered(sent, kind, draws):
    parts = list(sent)
    data = b"".join(sent)
    first, second = sorted(draws.sample(range(len(sent)), 2))
    position = draws.randrange(len(data))
    run = data[position : position + draws.choice([1, 4, 20])]
    match kind:
        case 0:
            parts[first], parts[second] = parts[second], parts[first]
        case 1:
            parts.insert(second, parts[first])
        case 2:
            del parts[first]
        case 3:
            return b"".join(sent[:second])
        case 4:
            return data[:position]
        case 5:
            # The bodies are exchanged, and headers and tags stay.
            parts[first] = exchanged(parts[first], draws)
        case 6:
            type, round, length = frames.HEADER.unpack(parts[first][:32])
            changed = draws.choice(
                [(frames.COMMIT, 3, 0), (type, round + 1, length), (type, round, 0)]
            )
            parts[first] = frames.HEADER.pack(*changed) + parts[first][32:]
        case 7:
            flipped = bytes([run[0] ^ 1 << draws.randrange(8)]) + run[1:]
            return data[:position] + flipped + data[position + len(run) :]
        case 8:
            return data[:position] + run + data[position:]
        case _:
            return data[:position] + data[position + len(run) :]
    return b"".join(parts)


def exchanged(frame, draws):
    """The frame with two halves of its body exchanged."""
    body = frame[32:-16]
    middle = draws.randrange(len(body) + 1)
    return frame[:32] + body[middle:] + body[:middle] + frame[-16:]


def test_a_relay_of_the_handshake_cannot_publish():
    """It passes on the four messages of the handshake, and then its own weights."""
    transfer = job()
    with contextlib.closing(Sender(transfer.plan, SECRET, timeout_seconds=2)) as sender:
        sender.publish(transfer.tree, 1)
        forged = frames.HEADER.pack(frames.OFFER, 0, 34)
        forged += struct.pack(">??16sq", True, True, b"r" * 16, 666) + bytes(8)
        state = {"down": 0}

        def to_receiver(data):
            state["down"] += len(data)
            if state["down"] <= HANDSHAKE_BYTES:
                return data
            return forged + bytes(16)

        path = Path(sender.address, to_receiver=to_receiver)
        with contextlib.closing(path):
            receiver = receiver_of(transfer.plan, transfer.dst, sender)
            receiver._addresses = (path.own_address,)
            with pytest.raises(SyncError):
                receiver.pull()
        assert receiver.arrays is None
        assert receiver.revision is None


def test_what_passes_a_path_unchanged_is_taken(served):
    path = Path(served.sender.address)
    with contextlib.closing(path):
        receiver = served.receiver()
        receiver._addresses = (path.own_address,)
        assert receiver.pull(check_content=True)
        same(receiver.arrays["wide"], served.tree["wide"])
    values = np.asarray(served.tree["wide"]).tobytes()[:12]
    # Only the encrypted session hides them.
    assert (values in path.seen["down"]) == (not served.options["encrypt"])
    assert SECRET not in path.seen["up"] + path.seen["down"]


def test_a_replay_of_a_session_is_refused_by_both_sides(served):
    path = Path(served.sender.address)
    with contextlib.closing(path):
        receiver = served.receiver()
        receiver._addresses = (path.own_address,)
        assert receiver.pull(check_content=True)
    seen = dict(path.seen)

    # As the receiver of then, to the sender: it answers with fresh random bytes, and
    # refuses the old proof before it has sent its own.
    with socket.create_connection(served.sender.address, 5) as connection:
        connection.sendall(seen["up"])
        answer = b""
        with contextlib.suppress(OSError):
            while data := connection.recv(1 << 16):
                answer += data
    assert len(answer) == HELLO_BYTES

    # As the sender of then, to a receiver.
    server = socket.create_server(("127.0.0.1", 0))

    def replay():
        connection, _ = server.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(seen["down"])
            while connection.recv(1 << 16):
                pass

    thread = threading.Thread(target=replay)
    thread.start()
    with server:
        fresh = served.receiver()
        fresh._addresses = (server.getsockname()[:2],)
        with pytest.raises(SyncError, match="has another secret"):
            fresh.pull()
        thread.join()
    assert fresh.arrays is None


def test_reflection_is_refused():
    """A peer that sends everything back: hellos, proofs, and later frames."""
    transfer = job()
    server = socket.create_server(("127.0.0.1", 0))

    def mirror():
        connection, _ = server.accept()
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(1 << 16):
                connection.sendall(data)

    thread = threading.Thread(target=mirror)
    thread.start()
    with server, contextlib.closing(Sender(transfer.plan, SECRET)) as sender:
        receiver = receiver_of(transfer.plan, transfer.dst, sender)
        receiver._addresses = (server.getsockname()[:2],)
        with pytest.raises(SyncError, match="is no sender"):
            receiver.pull()
        thread.join()
        with socket.create_connection(sender.address, 5) as connection:
            hello = handshake._Exchange("sender", SECRET, AUTHENTICATED).hello(ENDS)
            connection.sendall(hello)
            connection.sendall(connection.recv(1 << 10))
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1 << 10) in (b"",)

    sockets, lines, sessions = session_pair()
    with sockets[0], sockets[1]:
        frame_line = frames.FrameLine(lines[0], AUTHENTICATED, sessions["sender"].keys)
        frame_line.send(frames.COMMIT, 1)
        sockets[1].sendall(sockets[1].recv(1 << 10))
        with pytest.raises(SyncError, match="is not what the other side sent"):
            frame_line.receive_message(frames.COMMIT)


def test_a_changed_hello_fails_the_proof(served):
    """Each byte of either hello that both sides may still agree on."""
    for direction in ("up", "down"):
        for position in (0, 9, 10, 11, 15, 19, 20, 40, 60, HELLO_BYTES - 1):
            count = [0]

            def change(data, position=position, count=count):
                start = count[0]
                count[0] += len(data)
                if start <= position < count[0]:
                    changed = bytearray(data)
                    changed[position - start] ^= 1
                    return bytes(changed)
                return data

            keyword = "to_sender" if direction == "up" else "to_receiver"
            path = Path(served.sender.address, **{keyword: change})
            with contextlib.closing(path):
                receiver = served.receiver()
                receiver._addresses = (path.own_address,)
                with pytest.raises(SyncError):
                    receiver.pull()
                assert receiver.arrays is None


def test_a_connection_may_be_cut_behind_any_byte(served):
    """At boundaries of messages and frames, and between them."""
    path = Path(served.sender.address)
    with contextlib.closing(path):
        whole = served.receiver()
        whole._addresses = (path.own_address,)
        assert whole.pull(check_content=True)
    boundaries = {"up": [HELLO_BYTES, HANDSHAKE_BYTES]}
    boundaries["down"] = [*boundaries["up"]]
    for name, offsets in boundaries.items():
        for frame in frames_of(path.seen[name][HANDSHAKE_BYTES:]):
            start = offsets[-1]
            offsets += [start + frames.HEADER.size, start + len(frame)]
        assert offsets.pop() == len(path.seen[name])
        offsets[8:-4] = range(1, offsets[-1], 331)

    for name, offsets in boundaries.items():
        for offset in offsets:
            count = [0]

            def change(data, offset=offset, count=count):
                count[0] += len(data)
                if count[0] > offset:
                    raise Cut
                return data

            keyword = {"up": "to_sender", "down": "to_receiver"}[name]
            path = Path(served.sender.address, **{keyword: change})
            with contextlib.closing(path):
                receiver = served.receiver()
                receiver._addresses = (path.own_address,)
                with pytest.raises(SyncError):
                    receiver.pull(check_content=True)
            assert receiver.arrays is None
    assert served.receiver().pull(check_content=True)


# The points of X25519 with which every key shares 0: https://cr.yp.to/ecdh.html#validate
SMALL_ORDER = (
    0,
    1,
    325606250916557431795983626356110631294008115727848805560023387167927233504,
    39382357235489614581723060781553021112529911719440698176882885853963445705823,
    2**255 - 20,
    2**255 - 19,
    2**255 - 18,
)


@pytest.mark.parametrize("point", SMALL_ORDER)
def test_public_keys_that_share_nothing_are_refused(point):
    for role in ("sender", "receiver"):
        exchange = handshake._Exchange(role, SECRET, AUTHENTICATED)
        exchange.hello(ENDS)
        other = {"sender": 2, "receiver": 1}[role]
        hello = handshake.Hello(
            version=handshake.VERSION,
            suite=1,
            role=other,
            ends=ENDS,
            random=bytes(32),
            public_key=point.to_bytes(32, "little"),
        )
        with pytest.raises(SyncError, match="the other side sent no public key"):
            exchange.keys(hello.to_bytes())


def test_secrets_that_begin_alike_have_nothing_in_common():
    """A secret that is another one's beginning, or that ends in what both share."""
    shared = bytes(range(32))
    transcript = bytes(32)
    secrets = [SECRET, SECRET + b"\0", SECRET + shared, SECRET[:-1]]
    keys = [handshake._Keys(secret, shared, transcript) for secret in secrets]
    proofs = {key.proof("sender") for key in keys}
    proofs |= {key.proof("receiver") for key in keys}
    assert len(proofs) == 2 * len(secrets)


def test_frames_of_another_session_are_refused():
    recording = recorded()
    other = recorded()
    with pytest.raises(SyncError, match="is not what the other side sent"):
        received(b"".join(recording.frames), recording.dst, recording.plan, other.keys)


def test_keys_change_before_a_counter_ends(monkeypatch):
    monkeypatch.setattr(frames, "FRAMES_PER_KEY", 2)
    recording = recorded()
    keys = recording.keys
    assert len(recording.frames) > 6
    whole, revision = received(
        b"".join(recording.frames), recording.dst, recording.plan, keys
    )
    assert revision == 3
    same(whole["wide"], recording.tree["wide"])
    counter = frames._Counter(keys.to_receive)
    pairs = [counter.next() for _ in range(7)]
    assert len({*pairs}) == 7
    assert len({key for key, _ in pairs}) == 4
    # The frame two places on has the same nonce, and another key.
    recording.frames[0], recording.frames[2] = recording.frames[2], recording.frames[0]
    with pytest.raises(SyncError):
        received(b"".join(recording.frames), recording.dst, recording.plan, keys)


def test_keys_are_those_of_rfc_5869():
    info = f"shardfx sync {handshake.VERSION}: a label".encode()
    derivation = hkdf.HKDF(hashes.SHA256(), 32, salt=b"salt", info=info)
    expected = derivation.derive(b"key")
    root = handshake.extracted(b"salt", b"key")
    assert handshake.expanded(root, "a label") == expected
    assert handshake.expanded(root, "a label", 16) == expected[:16]


def test_messages_of_another_size_are_refused_unread():
    suite = AUTHENTICATED
    sockets, lines, sessions = session_pair()
    with sockets[0], sockets[1]:
        writer = frames.FrameLine(lines[1], suite, sessions["receiver"].keys)
        reader = frames.FrameLine(lines[0], suite, sessions["sender"].keys)
        for type, length in (
            (frames.REQUEST, 1 << 40),
            (99, 8),
            (frames.GONE, 1 << 30),
        ):
            sockets[1].sendall(frames.HEADER.pack(type, 0, length))
            with pytest.raises(SyncError, match="came where the protocol has another"):
                reader.receive_message(frames.REQUEST)
        writer.send(frames.REQUEST, 0, [b"[" * 200_000])
        _, body = reader.receive_message(frames.REQUEST)
        with pytest.raises(SyncError, match="a message of 200,000 bytes came where"):
            messages.Request.from_bytes(body)
