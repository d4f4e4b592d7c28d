"""Transfers over sockets: which revision an engine gets, what `publish` refuses, and
what a bad moment does to a sender.
"""

import contextlib
import errno
import itertools
import pickle
import resource
import socket
import struct
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from maps import same
from sync_jobs import (
    SECRET,
    bits,
    job,
    large,
    mesh,
    planned,
    receiver_of,
    sending,
    served_by,
)
from wire import Line, frames, handshake, messages

import shardfx
from shardfx import PathRules
from shardfx._reshard.sync.door import MOST_UNPROVED
from shardfx.errors import MeshError, PlanMismatchError, SyncError
from shardfx.sync import Receiver, Sender, TransferPlan, plan_transfer


@pytest.fixture
def served():
    transfer = job()
    with sending(transfer.plan) as sender:
        yield served_by(sender, transfer)


def test_a_receiver_gets_the_newest_revision_once(served):
    receiver = served.receiver()
    assert not receiver.pull()
    assert receiver.revision is None
    served.sender.publish(served.tree, 3)
    served.sender.publish({**served.tree, "one": served.tree["one"] + 1}, 5)
    assert receiver.pull(check_content=True)
    assert receiver.revision == 5
    assert not receiver.pull()
    same(receiver.arrays["one"], np.float32(4))
    for revision, text in (
        (5, "revision 5 is not above 5"),
        (-1, "is not between 0 and"),
        (1.5, "is no whole number"),
        (True, "is no whole number"),
    ):
        with pytest.raises(SyncError, match=text):
            served.sender.publish(served.tree, revision)


def test_a_restarted_trainer_is_new_and_a_lower_number_is_old():
    transfer = job()
    with sending(transfer.plan) as first:
        first.publish(transfer.tree, 5)
        receiver = receiver_of(transfer.plan, transfer.dst, first)
        assert receiver.pull(check_content=True)
        port = first.address[1]
    for number, run in ((5, None), (3, None), (3, "night"), (4, "night")):
        with sending(transfer.plan, port=port, run=run) as restarted:
            restarted.publish(
                {**transfer.tree, "one": transfer.tree["one"] + number}, number
            )
            assert receiver.pull(check_content=True)
            assert receiver.revision == number
            same(receiver.arrays["one"], np.float32(3 + number))
    with sending(transfer.plan, port=port, run="night") as restarted:
        restarted.publish(transfer.tree, 2)
        assert not receiver.pull()
        assert receiver.revision == 4


class Net(eqx.Module):
    weight: jax.Array
    scale: jax.Array
    act: object = jnp.tanh


@jax.tree_util.register_dataclass
@dataclass
class Pair:
    left: jax.Array
    right: jax.Array


def test_trees_come_back_as_the_tree_of_the_engines_plan():
    nets = {"net": Net(jnp.ones((8, 4)), jnp.float32(2)), "pair": Pair(*jnp.eye(2))}
    rules = PathRules([("weight", P("a")), (".*", P())])
    src = shardfx.plan(nets, mesh(0), paths=rules)
    dst = shardfx.plan(nets, mesh(4), paths=rules)
    plan = plan_transfer(src, dst)
    with sending(plan) as sender:
        receiver = receiver_of(plan, dst, sender)
        by_path = {
            "net/weight": nets["net"].weight * 2,
            "net/scale": nets["net"].scale,
            "pair/left": nets["pair"].left,
            "pair/right": nets["pair"].right,
        }
        for revision, tree in enumerate((nets, by_path)):
            sender.publish(tree, revision)
            assert receiver.pull(check_content=True)
            net = eqx.combine(receiver.arrays["net"], nets["net"])
            assert isinstance(net, Net)
            assert net.act is jnp.tanh
            array = np.full((8, 4), revision + 1, np.float32)
            same(net.weight, array)
            assert isinstance(receiver.arrays["pair"], Pair)
            same(receiver.arrays["pair"].right, np.eye(2, dtype=np.float32)[1])


def test_publish_refuses_what_was_not_planned(served):
    served.sender.publish(served.tree, 1)
    deleted = served.tree["wide"] + 1
    deleted.delete()
    wide = served.tree["wide"]
    array = np.zeros((8, 6), np.int64)
    struct = jax.ShapeDtypeStruct((8, 6), np.float32)
    for changed, text in (
        ({"wide": wide.astype(jnp.bfloat16)}, "leaf `wide` is bfloat16.8, 6., but"),
        ({"wide": wide.astype(jnp.int32)}, "leaf `wide` is int32.8, 6., but the plan"),
        ({"wide": array}, "leaf `wide` is int64.8, 6., but"),
        ({"wide": wide[:4]}, "leaf `wide` is float32.4, 6., but the plan is for"),
        ({"wide": [wide]}, "leaf `wide` of the plan is not in the tree; did you mean"),
        ({"more": wide}, "leaf `more` is in the tree, but not in the plan"),
        ({"wide": 1.0}, "leaf `wide` of the plan is not in the tree"),
        ({"wide": struct}, "without values"),
        (
            {"keys": bits(served.tree["keys"])},
            "leaf `keys` is uint32.4, 2., but the plan",
        ),
    ):
        with pytest.raises(PlanMismatchError, match=text):
            served.sender.publish(served.tree | changed, 2)
    with pytest.raises(PlanMismatchError, match="leaf `one` of the plan is not in"):
        served.sender.publish(
            {path: x for path, x in served.tree.items() if path != "one"}, 2
        )
    with pytest.raises(SyncError, match="leaf `wide` is deleted or donated; publish"):
        served.sender.publish(served.tree | {"wide": deleted}, 2)
    # Nothing of it was published, and the number is still free.
    receiver = served.receiver()
    assert receiver.pull(check_content=True)
    assert receiver.revision == 1
    served.sender.publish(
        served.tree | {"wide": np.asarray(wide), "one": np.float32(3)}, 2
    )
    assert receiver.pull(check_content=True)
    same(receiver.arrays["wide"], wide)


def test_arrays_may_lie_otherwise_than_planned(served):
    receiver = served.receiver()
    layouts = [P(None, "b"), P(), P(("b", "a"))]
    for revision, spec in enumerate(layouts):
        wide = jax.device_put(served.tree["wide"], jax.NamedSharding(mesh(0), spec))
        single = jax.device_put(served.tree["eight"], jax.devices()[2])
        served.sender.publish({**served.tree, "wide": wide, "eight": single}, revision)
        assert receiver.pull(check_content=True)
        for path, leaf in served.tree.items():
            same(bits(receiver.arrays[path]), bits(leaf))


def test_a_tree_of_empty_leaves_and_constants_is_pulled():
    tree = {"none": jnp.zeros((0, 4)), "also": jnp.zeros((2, 0))}
    specs = {"none": P(), "also": P()}
    src = planned(tree, specs, mesh(0))
    dst = planned(tree, specs, mesh(4))
    plan = plan_transfer(src, dst)
    with sending(plan) as sender:
        receiver = receiver_of(plan, dst, sender)
        assert not receiver.pull()
        sender.publish(tree, 1)
        assert receiver.pull(check_content=True)
        assert not receiver.pull()
        assert receiver.arrays["none"].shape == (0, 4)


def test_another_secret_gets_nothing(served):
    served.sender.publish(served.tree, 1)
    receiver = served.receiver(secret=b"another" * 4)
    with pytest.raises(SyncError, match="do both jobs have the same secret"):
        receiver.pull()
    assert receiver.arrays is None
    assert receiver.revision is None
    secrets: list[Any] = [b"short", "text" * 8]
    for secret, text in zip(secrets, ("has at least 16", "of type str"), strict=True):
        with pytest.raises(SyncError, match=text):
            Sender(served.plan, secret)


def test_a_receiver_that_the_plan_is_not_for_is_refused(served):
    served.sender.publish(served.tree, 1)
    specs = {leaf.path: leaf.spec for leaf in served.dst.content.leaves}
    eight = planned(served.tree, specs | {"eight": P(None, "b")}, mesh(4))
    wide = planned(served.tree, specs | {"wide": P(None, "a")}, mesh(4))
    fewer = planned({"wide": served.tree["wide"]}, {"wide": P()}, mesh(4))
    for other, target, text in (
        (plan_transfer(served.src, eight), eight, "leaf `eight`"),
        (
            plan_transfer(served.src, served.dst, memory_limit_bytes=64),
            served.dst,
            "limits",
        ),
        (served.plan, wide, "leaf `wide` lies in `dst` otherwise"),
        (served.plan, fewer, "is in only one of `dst` and the transfer's plan"),
        (
            job((1, 4), receiver=3).plan,
            served.dst,
            "no part for the receiving process 0",
        ),
        (job((2, 1)).plan, served.dst, "1 addresses for 2 sending processes"),
    ):
        with pytest.raises(PlanMismatchError, match=text):
            receiver_of(other, target, served.sender).pull()
    with pytest.raises(
        MeshError,
        match="`processes` is 3 for 4 devices; give a number that divides them",
    ):
        job((3, 1))


def test_security_is_the_same_on_both_sides_and_named(served, caplog):
    choices: list[dict[str, Any]] = [{"encrypt": True}, {"security": "none"}]
    for options in choices:
        receiver = served.receiver(**options)
        with pytest.raises(SyncError, match="give both the same"):
            receiver.pull()
        with sending(served.plan, **options) as other:
            other.publish(served.tree, 1)
            receiver = receiver_of(served.plan, served.dst, other, **options)
            assert receiver.pull(check_content=True)
            for path, leaf in served.tree.items():
                same(bits(receiver.arrays[path]), bits(leaf))
    assert "has security='none': whoever is on the network" in caplog.text
    with pytest.raises(SyncError, match="is no way to secure a connection"):
        Sender(served.plan, SECRET, security="none", encrypt=True)


def test_a_sender_of_another_process_is_refused():
    transfer = job((2, 1))
    with pytest.raises(SyncError, match="`run` must name this run of the trainer"):
        Sender(transfer.plan, SECRET)
    with contextlib.ExitStack() as stack:
        senders = [
            stack.enter_context(sending(transfer.plan, process=number, run="r"))
            for number in range(2)
        ]
        for sender in senders:
            sender.publish(transfer.tree, 1)
        receiver = receiver_of(transfer.plan, transfer.dst, *senders[::-1])
        with pytest.raises(SyncError, match="is that of the sending process 1, not 0"):
            receiver.pull()


@pytest.mark.parametrize("process", [-1, 2, 1 << 33, "0"])
def test_a_sender_that_the_plan_does_not_have_is_refused(process):
    transfer = job((2, 1))
    text = f"no sending process {process!r}; it has the numbers .0, 1."
    with pytest.raises(PlanMismatchError, match=text):
        Sender(transfer.plan, SECRET, process=process, run="r")


def test_a_sender_of_another_version_is_named():
    transfer = job()
    hello = handshake.Hello(
        version=9,
        suite=1,
        role=1,
        ends=handshake.Ends(0, 0),
        random=bytes(32),
        public_key=bytes(32),
    )
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            connection, _ = server.accept()
            with connection:
                connection.sendall(hello.to_bytes())

        thread = threading.Thread(target=answer)
        thread.start()
        addresses = [server.getsockname()[:2]]
        receiver = Receiver(
            transfer.plan, transfer.dst, addresses, SECRET, timeout_seconds=2
        )
        with pytest.raises(SyncError, match="speaks version 9 of the protocol, and"):
            receiver.pull()
        thread.join()


def test_two_senders_and_one_that_is_behind():
    transfer = job((2, 1))
    with contextlib.ExitStack() as stack:
        senders = [
            stack.enter_context(sending(transfer.plan, process=number, run="r"))
            for number in range(2)
        ]
        receiver = receiver_of(transfer.plan, transfer.dst, *senders)
        for revision in (1, 2):
            for sender in senders:
                sender.publish(transfer.tree, revision)
            assert receiver.pull(check_content=True)
            assert receiver.revision == revision
            for path, leaf in transfer.tree.items():
                same(bits(receiver.arrays[path]), bits(leaf))
        senders[0].publish(transfer.tree, 3)
        with pytest.raises(SyncError, match="offer the revisions"):
            receiver.pull()
        assert receiver.revision == 2


def test_held_arrays_of_older_revisions_are_never_written(served):
    """Memory serves again only when no array is left that lies in it."""
    receiver = served.receiver()
    held = []
    receiver.warm()
    for revision in range(1, 9):
        served.sender.publish(
            {**served.tree, "wide": served.tree["wide"] * 0 + revision}, revision
        )
        assert receiver.pull(check_content=True)
        wide = receiver.arrays["wide"]
        kept = (wide, np.asarray(wide.addressable_data(0)), wide + 0)[revision % 3]
        held.append((revision, kept))
        for number, leaf in held:
            assert (np.asarray(leaf) == number).all()
    held.clear()
    pointers = set()
    for revision in range(9, 15):
        served.sender.publish(served.tree, revision)
        assert receiver.pull(check_content=True)
        wide = receiver.arrays["wide"]
        pointers.add(wide.addressable_data(0).unsafe_buffer_pointer())
    assert len(pointers) <= 3


def test_two_revisions_lie_in_two_places_for_ever(served):
    """JAX lets go of a deleted array's memory later, at its next operation."""
    receiver = served.receiver()
    places = set()
    held = []
    for revision in range(1, 9):
        served.sender.publish(served.tree, revision)
        held.clear()
        held.append(receiver.arrays)
        assert receiver.pull(check_content=True)
        wide = receiver.arrays["wide"].addressable_data(0)
        places.add(wide.unsafe_buffer_pointer())
        del wide
    assert len(places) == 2


def stalled(sender, plan, receiver=0):
    """A receiver that takes the newest revision, and reads nothing of it."""
    connection = socket.create_connection(sender.address, 5)
    suite = handshake.Suite("authenticated", False)
    line = Line(connection, 5)
    session = handshake.as_receiver(line, SECRET, suite, handshake.Ends(0, receiver))
    peer = frames.FrameLine(line, suite, session.keys)
    peer.send(frames.REQUEST, 0, [messages.Request(plan.digest, None).to_bytes()])
    _, body = peer.receive_message(frames.OFFER)
    offer = messages.Offer.from_bytes(body)
    assert offer.revision is not None
    peer.send(frames.TAKE, 0, [messages.Take(offer.revision, False).to_bytes()])
    return connection, frames.SocketChannel(peer)


def test_publish_waits_for_the_revision_that_is_read():
    transfer = large()
    with sending(transfer.plan, timeout_seconds=20) as sender:
        sender.publish(transfer.tree, 1)
        connection, channel = stalled(sender, transfer.plan)
        publishing = threading.Thread(target=sender.publish, args=(transfer.tree, 2))
        with connection:
            publishing.start()
            publishing.join(0.2)
            assert publishing.is_alive()
            # Others get the new revision meanwhile, and this one the old one, whole.
            receiver = receiver_of(
                transfer.plan, transfer.dst, sender, timeout_seconds=20
            )
            assert receiver.pull(check_content=True)
            assert receiver.revision == 2
            for number in range(24):
                channel.get(number, [np.empty(1 << 20, np.uint8)])
            assert channel.commit() == 1
        publishing.join(10)
        assert not publishing.is_alive()


def test_a_withdrawn_revision_says_why():
    transfer = large()
    rounds = iter(range(24))

    def read(channel, count):
        for number in itertools.islice(rounds, count):
            channel.get(number, [np.empty(1 << 20, np.uint8)])

    with sending(transfer.plan, timeout_seconds=2) as sender:
        sender.publish(transfer.tree, 1)
        connection, channel = stalled(sender, transfer.plan)
        with connection:
            begin = time.monotonic()
            publishing = threading.Thread(
                target=sender.publish, args=(transfer.tree, 2)
            )
            publishing.start()
            # Reading lets the sender begin another round, whose time-out ends after the
            # wait of `publish`.
            time.sleep(0.5)
            read(channel, 2)
            publishing.join()
            assert 1 < time.monotonic() - begin < 4
            with pytest.raises(SyncError, match="revision 1 is withdrawn: the trainer"):
                read(channel, 24)
        receiver = receiver_of(transfer.plan, transfer.dst, sender, timeout_seconds=20)
        assert receiver.pull(check_content=True)
        assert receiver.revision == 2


def test_donated_arrays_are_pulled_whole_and_never_crash():
    """The trainer donates the last revision after each `publish`, and deletes each
    tenth one while it may be read.
    """
    transfer = large()
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    done = threading.Event()
    with sending(transfer.plan) as sender:
        receiver = receiver_of(transfer.plan, transfer.dst, sender)
        seen = []

        def pull():
            while not done.is_set():
                # It compares the arrays whole; checksums would leave few pulls.
                if receiver.pull():
                    wide = np.asarray(receiver.arrays["w"])
                    seen.append((int(wide.min()), int(wide.max())))
                    assert seen[-1] == (receiver.revision, receiver.revision)

        pulling = threading.Thread(target=pull)
        wide = transfer.tree["w"]
        sender.publish({"w": wide}, 0)
        pulling.start()
        for revision in range(1, 12):
            array = np.full(wide.shape, revision, np.uint8)
            new = jax.device_put(array, wide.sharding)
            sender.publish({"w": new}, revision)
            if not wide.is_deleted():
                step(wide)  # It was replaced, so it may be donated.
            wide = new
            if revision % 5 == 0:
                new.delete()
        done.set()
        pulling.join(20)
        assert not pulling.is_alive()
        assert len(seen) > 1


def test_a_used_plan_pickles(served):
    served.sender.publish(served.tree, 1)
    receiver = served.receiver()
    assert receiver.pull(check_content=True)
    again = pickle.loads(pickle.dumps(served.plan))
    assert isinstance(again, TransferPlan)
    assert again.to_json() == served.plan.to_json()
    assert receiver_of(again, served.dst, served.sender).pull(check_content=True)


def test_peers_without_the_secret_keep_nobody_out(served):
    served.sender.publish(served.tree, 1)
    count_before = threading.active_count()
    peers = [socket.create_connection(served.sender.address) for _ in range(200)]
    time.sleep(0.1)
    assert threading.active_count() - count_before <= MOST_UNPROVED + 4
    begin = time.monotonic()
    assert served.receiver().pull(check_content=True)
    assert time.monotonic() - begin < 2
    # Garbage instead of a hello ends a connection, and nothing else.
    for peer in peers:
        with contextlib.suppress(OSError):
            peer.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        peer.close()
    assert served.receiver().pull(check_content=True)


def test_many_peers_of_one_host_keep_no_other_host_out(served):
    """They come between an honest receiver's connection and its proof."""
    served.sender.publish(served.tree, 1)
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(
            socket.create_connection(served.sender.address, 5)
        )
        address = ("127.0.0.2", 0)
        peers = []
        for _ in range(3 * MOST_UNPROVED):
            peer = socket.create_connection(
                served.sender.address, 5, source_address=address
            )
            peers.append(stack.enter_context(peer))
        with contextlib.suppress(ConnectionResetError):
            # The last one that is closed for a newer one.
            assert peers[2 * MOST_UNPROVED - 1].recv(1) == b""
        line = Line(connection, 5)
        suite = handshake.Suite("authenticated", False)
        ends = handshake.Ends(sender=0, receiver=0)
        session = handshake.as_receiver(line, SECRET, suite, ends)
        frame_line = frames.FrameLine(line, suite, session.keys)
        request = messages.Request(served.plan.digest, None)
        frame_line.send(frames.REQUEST, 0, [request.to_bytes()])
        _, body = frame_line.receive_message(frames.OFFER)
        assert messages.Offer.from_bytes(body).is_new


def test_connections_that_are_aborted_are_no_end(served, monkeypatch, caplog):
    """Before they are accepted, and while they are."""
    served.sender.publish(served.tree, 1)
    reset_on_close = struct.pack("ii", 1, 0)
    for _ in range(50):
        peer = socket.create_connection(served.sender.address)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset_on_close)
        peer.close()
    assert served.receiver().pull(check_content=True)

    accept = socket.socket.accept
    aborted = []

    def accept_the_second(listening):
        if not aborted:
            aborted.append(True)
            accept(listening)[0].close()
            raise ConnectionAbortedError(errno.ECONNABORTED, "aborted")
        return accept(listening)

    # The accepting thread is in the original call once more.
    monkeypatch.setattr(socket.socket, "accept", accept_the_second)
    for _ in range(2):
        socket.create_connection(served.sender.address).close()
    receiver = served.receiver()
    assert receiver.pull(check_content=True)
    assert aborted
    assert "a connection was not accepted" in caplog.text


def test_a_moment_without_descriptors_is_no_end(served, caplog):
    served.sender.publish(served.tree, 1)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    peers = []
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        with open("/dev/null") as lowest_free:
            used = lowest_free.fileno()
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 4, limits[1]))
        with contextlib.suppress(OSError):
            for _ in range(10):
                peers.append(socket.create_connection(served.sender.address))
                time.sleep(0.02)
        # The last free descriptor is the peer's, and none is left to accept it with.
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 5, limits[1]))
        peers.append(socket.create_connection(served.sender.address))
        time.sleep(0.5)
        for peer in peers:
            peer.close()
    assert "a connection was not accepted" in caplog.text
    served.sender.publish(served.tree, 2)
    receiver = served.receiver()
    assert receiver.pull(check_content=True)
    assert receiver.revision == 2


def test_a_sender_without_cryptography_names_the_extra(monkeypatch):
    name = "cryptography.hazmat.primitives.asymmetric.x25519"
    monkeypatch.setitem(sys.modules, name, None)
    plan = job().plan
    with pytest.raises(SyncError, match=r"pip install 'shardfx\[sync\]'"):
        Sender(plan, SECRET)
    _, dst, plan, tree = job()
    with sending(plan, security="none") as sender:
        sender.publish(tree, 1)
        assert receiver_of(plan, dst, sender, security="none").pull(check_content=True)
