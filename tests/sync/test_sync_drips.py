"""Peers that send a byte now and then, before they proved the secret and behind it: a
pull ends in time with an error that names the peer, and a sender serves the others.
"""

import contextlib
import logging
import socket
import threading
import time

import pytest
from maps import same
from sync_jobs import SECRET, job, receiver_of
from wire import Line, frames, handshake, messages

from shardfx.errors import SyncError
from shardfx.sync import Receiver, Sender


SUITE = handshake.Suite("authenticated", False)
ENDS = handshake.Ends(sender=0, receiver=0)
TIMEOUT_SECONDS = 1.0
# Each byte comes long before the time-out.
PAUSE_SECONDS = 0.05


def drip(connection, data):
    with contextlib.suppress(OSError):
        for position in range(len(data)):
            connection.sendall(data[position : position + 1])
            time.sleep(PAUSE_SECONDS)


def frame(keys, type, body):
    """The bytes of the first frame of a session."""
    near, far = socket.socketpair()
    with near, far:
        frames.FrameLine(Line(near, 5), SUITE, keys).send(type, 0, [body])
        return far.recv(1 << 16)


def hello_only(connection):
    drip(connection, bytes(200))


def silent_before_its_proof(connection):
    line = Line(connection, 5)
    exchange = handshake._Exchange("sender", SECRET, SUITE)
    line.read(handshake._HELLO.size)
    line.send([exchange.hello(ENDS)])
    time.sleep(1.5 * TIMEOUT_SECONDS)


def proved(connection):
    line = Line(connection, 5)
    session = handshake.as_sender(line, SECRET, SUITE, 0)
    revision = messages.Revision(bytes(16), 1)
    offer = messages.Offer(revision, True)
    drip(connection, frame(session.keys, frames.OFFER, offer.to_bytes()))


@pytest.mark.parametrize("behave", [hello_only, silent_before_its_proof, proved])
def test_a_sender_that_drips_is_named_in_time(behave):
    transfer = job()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            connection, _ = server.accept()
            with connection:
                behave(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        address = server.getsockname()[:2]
        receiver = Receiver(
            transfer.plan,
            transfer.dst,
            [address],
            SECRET,
            timeout_seconds=TIMEOUT_SECONDS,
        )
        begin = time.monotonic()
        with pytest.raises(SyncError) as caught:
            receiver.pull()
        # A hello, a proof and an offer may take as long each.
        assert time.monotonic() - begin < 5 * TIMEOUT_SECONDS
        thread.join()
    text = str(caught.value)
    assert f"the sending process 0 at 127.0.0.1:{address[1]} sent " in text
    assert " bytes in 1 s; it hangs, or the network is slow: then give a" in text
    assert text.endswith("`arrays` is still `None`.")


BODY = bytes(12 << 20)
# Longer than a part is under way, and much shorter than all parts.
PART_PAUSE_SECONDS = TIMEOUT_SECONDS / 3


def session_keys(number):
    """Two ends of a session: what one sends under a key, the other expects under it."""
    ours = bytes([1] * 32)
    theirs = bytes([2] * 32)
    keys = [(ours, theirs), (theirs, ours)][number]
    return handshake.SessionKeys(*keys)


@pytest.mark.parametrize("encrypt", [False, True])
def test_a_round_that_drips_has_one_time_out(encrypt):
    suite = handshake.Suite("authenticated", encrypt)
    near, far = socket.socketpair()
    with near, far:
        writer = frames.FrameLine(Line(near, 60), suite, session_keys(0))
        chunks: list[bytes] = []
        reading = threading.Thread(
            target=lambda: chunks.extend(iter(lambda: far.recv(1 << 20), b""))
        )
        reading.start()
        writer.send(frames.ROUND, 0, [BODY])
        near.shutdown(socket.SHUT_WR)
        reading.join()
    data = b"".join(chunks)

    near, far = socket.socketpair()
    with near, far:

        def serve():
            with contextlib.suppress(OSError):
                for start in range(0, len(data), 1 << 20):
                    near.sendall(data[start : start + (1 << 20)])
                    time.sleep(PART_PAUSE_SECONDS)

        thread = threading.Thread(target=serve)
        thread.start()
        line = Line(far, TIMEOUT_SECONDS, "the peer")
        reader = frames.FrameLine(line, suite, session_keys(1))
        header = reader.receive_header()
        begin = time.monotonic()
        with pytest.raises(TimeoutError, match="^the peer sent .* of 12,582,9"):
            reader.receive_body(header, [bytearray(header.length)])
        assert time.monotonic() - begin < 2 * TIMEOUT_SECONDS
        far.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize("encrypt", [False, True])
def test_a_round_that_is_read_slowly_has_one_time_out(encrypt):
    suite = handshake.Suite("authenticated", encrypt)
    near, far = socket.socketpair()
    with near, far:

        def read():
            with contextlib.suppress(OSError):
                while far.recv(1 << 18):
                    time.sleep(PART_PAUSE_SECONDS / 4)

        thread = threading.Thread(target=read)
        thread.start()
        line = Line(near, TIMEOUT_SECONDS, "the peer")
        writer = frames.FrameLine(line, suite, session_keys(0))
        begin = time.monotonic()
        with pytest.raises(TimeoutError, match="^the peer read .* of 12,582,9"):
            writer.send(frames.ROUND, 0, [BODY])
        assert time.monotonic() - begin < 2 * TIMEOUT_SECONDS
        near.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_nobody_at_the_address_is_named():
    transfer = job()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()[:2]
    receiver = Receiver(
        transfer.plan, transfer.dst, [address], SECRET, timeout_seconds=2
    )
    with pytest.raises(SyncError, match=f"0 at 127.0.0.1:{address[1]} does not answer"):
        receiver.pull()


def test_a_peer_that_drips_counts_as_dead():
    with (
        contextlib.closing(Sender(job().plan, SECRET, timeout_seconds=0.5)) as sender,
        socket.create_connection(sender.address) as connection,
        pytest.raises(OSError),
    ):
        for _ in range(100):
            connection.sendall(b"x")
            time.sleep(0.1)


def test_a_receiver_that_drips_is_dropped_in_time(caplog):
    caplog.set_level(logging.INFO, "shardfx.sync")
    transfer = job()
    sender = Sender(transfer.plan, SECRET, timeout_seconds=TIMEOUT_SECONDS)
    try:
        sender.publish(transfer.tree, 1)
        with socket.create_connection(sender.address, 5) as connection:
            line = Line(connection, 5)
            session = handshake.as_receiver(line, SECRET, SUITE, ENDS)
            request = messages.Request(transfer.plan.digest, None)
            data = frame(session.keys, frames.REQUEST, request.to_bytes())
            assert len(data) * PAUSE_SECONDS > 2 * TIMEOUT_SECONDS
            begin = time.monotonic()
            thread = threading.Thread(target=drip, args=(connection, data))
            thread.start()
            # Others are served meanwhile.
            receiver = receiver_of(transfer.plan, transfer.dst, sender)
            assert receiver.pull(check_content=True)
            same(receiver.arrays["wide"], transfer.tree["wide"])
            with contextlib.suppress(ConnectionError):
                assert connection.recv(1) == b""
            assert time.monotonic() - begin < 5 * TIMEOUT_SECONDS
            port = connection.getsockname()[1]
            thread.join()
    finally:
        sender.close()
    expected = f"a connection ended: the receiver at 127.0.0.1:{port} sent "
    assert any(expected in record.getMessage() for record in caplog.records)
