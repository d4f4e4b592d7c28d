"""Transfers between jobs: bit for bit what NumPy makes, each byte sent once, and
nothing written by what is damaged.
"""

import contextlib
import json
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.experimental.transfer import start_transfer_server
from jax.sharding import Mesh, PartitionSpec as P
from maps import maps, same, written

import shardfx
from shardfx import From, MeshSpec, PathRules, TreeMap
from shardfx._convert import target_view
from shardfx._reshard.sync import (
    JaxChannel,
    Receiver,
    Sender,
    from_json,
    plan_transfer,
    receive,
    send,
    to_json,
)
from shardfx._reshard.sync.codec import _checksum
from shardfx._reshard.sync.sockets import _SocketChannel
from shardfx.errors import MeshError, PlanFormatError, PlanMismatchError, SyncError


SECRET = b"sixteen bytes or more"
SIZES = {"a": 2, "b": 2}


class Wire:
    """A channel in memory."""

    def __init__(self):
        self.pieces, self.revision = [], 0

    def put(self, round, pieces):
        self.pieces += [(round, piece.copy()) for piece in pieces]

    def get(self, round, memories):
        for memory in memories:
            number, piece = self.pieces.pop(0)
            assert (number, piece.nbytes) == (round, memory.nbytes)
            memory[...] = piece

    def commit(self, revision: int | None = None) -> int:
        self.revision = self.revision if revision is None else revision
        return self.revision


def mesh(start):
    return Mesh(np.asarray(jax.devices()[start : start + 4]).reshape(2, 2), ("a", "b"))


def planned(tree, specs, where=None):
    structs = {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        for path, leaf in tree.items()
    }
    rules = PathRules(
        [(f"^{path.replace('.', '[.]')}$", spec) for path, spec in specs.items()]
    )
    return shardfx.plan(
        structs, MeshSpec(SIZES) if where is None else where, paths=rules
    )


ENTRIES = st.sampled_from(
    [(), ("a",), (("b", "a"),), (None, "a"), ("b", "a"), (None, None, "b")]
)


def drawn(draw, tree):
    """A spec for each leaf, corrected to its shape."""
    mesh = MeshSpec(SIZES)
    return {
        path: shardfx.correct(P(*draw(ENTRIES)[: leaf.ndim]), leaf.shape, mesh).spec
        for path, leaf in tree.items()
    }


def carried(plan, arrays, dst):
    """What the receiver gets, and the bytes that were put."""
    wires = {sender: Wire() for sender in plan.senders_to(0)}
    for sender, wire in wires.items():
        send(plan, arrays, wire, 7, sender=sender, receiver=0)
    sent = sum(piece.nbytes for wire in wires.values() for _, piece in wire.pieces)
    wires = wires or {0: Wire()}
    if not sent:
        wires[min(wires)].commit(7)
    made, revision = receive(plan, dst, wires, receiver=0)
    assert revision == 7
    return made, sent


@settings(max_examples=40, deadline=None)
@given(case=maps(), data=st.data())
def test_random_maps_between_random_plans_give_what_numpy_gives(case, data):
    made, arrays = written(case)
    whole, limit = made.apply(arrays), data.draw(st.sampled_from([16, 1 << 20]))
    specs = drawn(data.draw, arrays), drawn(data.draw, whole)
    plan = moved(arrays, specs[0], made, specs[1], limit)
    # The two jobs plan without the other's devices.
    other = plan_transfer(
        planned(arrays, specs[0]), planned(whole, specs[1]), made, limit_bytes=limit
    )
    assert other.digest == plan.digest and to_json(other) == to_json(plan)


def tree_of():
    """Odd sizes, rank 0, empty arrays, narrow dtypes and keys."""
    numbers = np.random.default_rng(0)
    arrays = {
        "wide": numbers.normal(size=(8, 6)).astype(np.float32),
        "odd": numbers.normal(size=(3, 5)).astype(jnp.bfloat16),
        "one": np.float32(3),
        "none": np.zeros((0, 4), np.float32),
        "eight": numbers.normal(size=(4, 4)).astype(jnp.float8_e4m3fn),
        "four": numbers.integers(-8, 7, (4, 4)).astype(jnp.int4),
    }
    return {path: jnp.asarray(leaf) for path, leaf in arrays.items()} | {
        "keys": jax.random.split(jax.random.key(0), 4)
    }


def job(processes=(1, 1), **changes):
    """Both plans of the tree as it is, the transfer, and the sender's arrays."""
    tree = tree_of()
    specs = {
        path: P("a") if leaf.ndim and leaf.shape[0] % 2 == 0 else P()
        for path, leaf in tree.items()
    }
    src = planned(tree, specs, mesh(0))
    dst = planned(tree, {**specs, "wide": P("b", "a")}, mesh(4))
    plan = plan_transfer(src, dst, processes=processes, **changes)
    return src, dst, plan, jax.device_put(tree, src.shardings)


def bits(leaf):
    return (
        jax.random.key_data(leaf)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        else leaf
    )


def test_each_byte_is_sent_once_per_process():
    src, dst, plan, tree = job()
    found, sent = carried(plan, tree, dst)
    for path, leaf in tree.items():
        same(bits(found[path]), bits(leaf))
        assert (
            found[path].dtype == leaf.dtype
            and found[path].sharding == dst.shardings[path]
        )
    # One process holds every shard of the target: each array crosses once, replicas or
    # not.
    halves = {"four": 1 / 2}
    assert sent == sum(
        np.asarray(bits(leaf)).nbytes * halves.get(path, 1)
        for path, leaf in tree.items()
    )


def moved(tree, specs, made, target_specs, limit_bytes=1 << 20):
    """The plan of a transfer through a map, whose arrays arrive as NumPy makes them and
    in as many bytes as planned.
    """
    whole = made.apply({path: np.asarray(leaf) for path, leaf in tree.items()})
    src, dst = planned(tree, specs, mesh(0)), planned(whole, target_specs, mesh(4))
    plan = plan_transfer(src, dst, made, limit_bytes=limit_bytes)
    found, sent = carried(
        from_json(to_json(plan)), jax.device_put(tree, src.shardings), dst
    )
    assert sent == plan.wire_bytes
    for path, leaf in whole.items():
        same(found[path], leaf)
        assert found[path].sharding == dst.shardings[path]
    return plan


def test_a_cast_is_made_where_it_leaves_fewer_bytes_to_send():
    tree = {"w": jnp.arange(32, dtype=jnp.float32).reshape(4, 8)}
    for first, second in (("float32", "bfloat16"), ("bfloat16", "float32")):
        made = TreeMap({"v": From("w").cast(first).cast(second)})
        assert (
            moved(tree, {"w": P("a")}, made, {"v": P(None, "a")}).wire_bytes == 32 * 2
        )


SCALED = [
    ("float8_e4m3fn", "float32", 32 + 4 * 4),  # as it is, with its scales
    ("int4", "bfloat16", 16 + 4 * 4),
    ("int32", "bfloat16", 32 * 2),  # as the product
    ("int8", "int8", 32),
]


@pytest.mark.parametrize("dtype, to, count", SCALED)
def test_what_is_scaled_is_sent_as_what_is_smaller(dtype, to, count):
    tree = {
        "q": jnp.arange(32).reshape(4, 8).astype(dtype),
        "s": jnp.float32([[1, 2], [3, 4]]),
    }
    made = TreeMap({"w": From("q").scale("s", block=(2, 4)).cast(to)})
    assert moved(tree, {"q": P("b"), "s": P()}, made, {"w": P("a")}).wire_bytes == count


def test_what_a_process_needs_in_several_places_is_sent_once():
    """Heads that are repeated for the devices that share them, next to what is theirs
    alone.
    """
    tree = {
        "k": jnp.arange(64, dtype=jnp.float32).reshape(8, 8),
        "q": jnp.ones((8, 16)),
    }
    repeated = From("k").repeat(2, dim=1, unit=2)
    made = TreeMap({"k": repeated, "kq": From.concat([repeated, From("q")], dim=1)})
    places = {"k": P(None, ("a", "b")), "kq": P(None, ("a", "b"))}
    specs = {"k": P("a"), "q": P("b")}
    assert moved(tree, specs, made, places).wire_bytes == 4 * (64 + 64 + 8 * 16)
    ends = planned(tree, specs), planned(made.apply(tree), places)
    # Of two processes each needs half of the heads of `k`; the first half of `kq` is
    # all heads, the second is `q`.
    assert plan_transfer(*ends, made, processes=(2, 2)).wire_bytes == 4 * (
        64 + 64 + 8 * 16
    )


@pytest.mark.parametrize("receiver", range(4))
def test_a_receivers_part_is_that_of_the_whole_plan(receiver):
    plan, part = job((2, 4))[2], job((2, 4), receiver=receiver)[2]
    assert part.digest == plan.digest and part.senders_to(receiver) == plan.senders_to(
        receiver
    )
    for sender in (-1, 0, 1):
        own, every = ([(s.leaf, p.piece) for steps in one.rounds(sender, receiver) for s in steps for p in s.places]
                      for one in (part, plan))  # fmt: skip
        assert own == every
    from_json(to_json(part))


def mutated(data, draws):
    """The data with one value changed, removed or added, at a random place."""
    while True:
        keys = list(data) if isinstance(data, dict) else list(range(len(data)))
        key = draws.choice(keys)
        if isinstance(data[key], dict | list) and data[key] and draws.random() < 0.9:
            data = data[key]
            continue
        match draws.randrange(4):
            case 0:
                del data[key]
            case 1 if isinstance(data, list):
                data.insert(key, data[key])
            case 2 if type(data[key]) is int:
                data[key] += draws.choice([-1, 1, 1 << 40])
            case _:
                data[key] = draws.choice([None, -1, 10**30, "x", [], {}, 1.5, True])
        return


def is_whole(kind):
    """Whether the pieces fill every buffer once: counted element by element."""
    counts = [
        np.zeros([stop - start for start, stop in buffer.box], int)
        for buffer in kind.buffers
    ]
    for number in range(len(kind.rows)):
        one = kind.transfer(number)
        target_view(counts[one.buffer], one.piece)[...] += 1
    return all((count == 1).all() for count in counts)


def test_a_damaged_plan_is_an_error_or_writes_each_element_once():
    """Its checksum made good again, so that the checks behind it are met."""
    plan, draws = job((2, 2))[2], random.Random(0)
    text = json.loads(to_json(plan))
    refused = 0
    for _ in range(300):
        body = json.loads(text["plan"])
        mutated(body, draws)
        again = json.dumps(body)
        try:
            found = from_json(
                json.dumps({**text, "plan": again, "checksum": _checksum(again)})
            )
        except PlanFormatError:
            refused += 1
            continue
        # What passes may say other names, senders or places to read; every buffer is
        # written whole, nothing beside it.
        assert found.digest == plan.digest and all(map(is_whole, found.kinds))
    assert refused > 180
    for cut in range(0, len(to_json(plan)), 997):
        with pytest.raises(PlanFormatError):
            from_json(to_json(plan)[:cut])


@pytest.fixture
def served():
    src, dst, plan, tree = job()
    with contextlib.closing(Sender(plan, SECRET, timeout_seconds=2)) as sender:
        yield src, dst, plan, tree, sender


def receiver_of(plan, dst, *senders, secret=SECRET):
    return Receiver(
        plan, dst, [sender.address for sender in senders], secret, timeout_seconds=2
    )


def test_a_receiver_gets_the_newest_revision_once(served):
    _, dst, plan, tree, sender = served
    receiver = receiver_of(plan, dst, sender)
    assert not receiver.pull() and receiver.arrays == {}
    sender.publish(tree, 3)
    sender.publish({**tree, "one": tree["one"] + 1}, 5)
    assert receiver.pull() and receiver.revision == 5 and not receiver.pull()
    same(receiver.arrays["one"], np.float32(4))
    with pytest.raises(SyncError, match="revision 5 is not above 5"):
        sender.publish(tree, 5)


def test_another_secret_gets_nothing(served):
    _, dst, plan, tree, sender = served
    sender.publish(tree, 1)
    receiver = receiver_of(plan, dst, sender, secret=b"another" * 4)
    with pytest.raises(SyncError):
        receiver.pull()
    assert receiver.arrays == {} and receiver.revision is None
    with pytest.raises(SyncError, match="at least 16"):
        Sender(plan, b"short")


def test_a_receiver_that_the_plan_is_not_for_is_refused(served):
    src, dst, plan, tree, sender = served
    sender.publish(tree, 1)
    specs = {leaf.path: leaf.spec for leaf in dst.content.leaves}
    eight, wide = (
        planned(tree, specs | more, mesh(4))
        for more in ({"eight": P(None, "b")}, {"wide": P(None, "a")})
    )
    for other, own, text in (
        (plan_transfer(src, eight), eight, "leaf `eight`"),
        (plan_transfer(src, dst, limit_bytes=64), dst, "limits"),
        (plan, wide, "leaf `wide` lies in `dst` otherwise"),
        (job((1, 4), receiver=3)[2], dst, "no part for the receiving process 0"),
        (job((2, 1))[2], dst, "1 addresses for 2 sending processes"),
    ):
        with pytest.raises(PlanMismatchError, match=text):
            receiver_of(other, own, sender).pull()
    with pytest.raises(
        MeshError,
        match="`processes` is 3 for 4 devices; give a number that divides them",
    ):
        job((3, 1))


def test_a_donated_revision_cannot_be_pulled(served):
    _, dst, plan, tree, sender = served
    sender.publish(tree, 1)
    receiver = receiver_of(plan, dst, sender)
    assert receiver.pull()
    lost = {**tree, "wide": tree["wide"] + 1}
    sender.publish(lost, 2)
    lost["wide"].delete()
    with pytest.raises(SyncError, match="revision 1, whole"):
        receiver.pull()
    same(receiver.arrays["wide"], tree["wide"])
    sender.publish(tree, 3)
    assert receiver.pull() and receiver.revision == 3


def test_arrays_of_an_older_revision_are_never_written(served):
    """Memory serves again only when no array is left that lies in it."""
    _, dst, plan, tree, sender = served
    receiver, held = receiver_of(plan, dst, sender), []
    for revision in range(1, 9):
        sender.publish({**tree, "wide": tree["wide"] * 0 + revision}, revision)
        assert receiver.pull()
        own = receiver.arrays["wide"]
        held.append(
            (
                revision,
                (own, np.asarray(own.addressable_data(0)), own + 0)[revision % 3],
            )
        )
        assert all((np.asarray(leaf) == number).all() for number, leaf in held)
    held.clear()
    pointers = set()
    for revision in range(9, 15):
        sender.publish(tree, revision)
        assert receiver.pull()
        pointers.add(
            receiver.arrays["wide"].addressable_data(0).unsafe_buffer_pointer()
        )
    assert len(pointers) <= 3


def test_two_senders_and_one_that_is_behind():
    _, dst, plan, tree = job((2, 1))
    with contextlib.ExitStack() as closing:
        made = [
            Sender(plan, SECRET, process=number, timeout_seconds=2)
            for number in range(2)
        ]
        senders = [closing.enter_context(contextlib.closing(sender)) for sender in made]
        receiver = receiver_of(plan, dst, *senders)
        for revision in (1, 2):
            for sender in senders:
                sender.publish(tree, revision)
            assert receiver.pull() and receiver.revision == revision
            for path, leaf in tree.items():
                same(bits(receiver.arrays[path]), bits(leaf))
        senders[0].publish(tree, 3)
        with pytest.raises(SyncError, match="offer the revisions"):
            receiver.pull()
        assert receiver.revision == 2


def test_damaged_pieces_are_errors():
    """What goes over a socket, with one byte or run of bytes changed, lost, doubled or
    cut off.
    """
    _, dst, plan, tree = job(limit_bytes=64)
    ends, draws = socket.socketpair(), random.Random(0)
    with ends[0], ends[1]:
        send(plan, tree, _SocketChannel(ends[0], 2), 3, sender=0, receiver=0)
        ends[0].shutdown(socket.SHUT_WR)
        sent = b"".join(iter(lambda: ends[1].recv(1 << 16), b""))
    for number in range(300):
        at, count = draws.randrange(len(sent)), draws.choice([1, 1, 4, 20])
        part = sent[at : at + count]
        changed = [
            bytes([part[0] ^ 1 << draws.randrange(8)]) + part[1:],
            b"",
            part * 2,
            part[::-1] + b"\0",
        ][number % 4]
        damaged = sent[:at] + changed + sent[at + count :] if number % 5 else sent[:at]
        if damaged[: len(sent)] == sent:
            continue
        here, there = socket.socketpair()
        with here, there:
            here.sendall(damaged)
            here.shutdown(socket.SHUT_WR)
            with pytest.raises((SyncError, OSError)):
                receive(plan, dst, {0: _SocketChannel(there, 2)}, receiver=0)


def test_a_peer_that_drips_counts_as_dead():
    with contextlib.closing(Sender(job()[2], SECRET, timeout_seconds=0.5)) as sender:
        with (
            socket.create_connection(sender.address) as connection,
            pytest.raises(OSError),
        ):
            for _ in range(100):
                connection.sendall(b"x")
                time.sleep(0.1)


def test_transfer_servers_of_jax_carry_a_plan():
    _, dst, plan, tree = job(limit_bytes=64)
    client = jax.devices()[0].client
    servers = [
        start_transfer_server(client, "127.0.0.1:0", ["127.0.0.1:0"]) for _ in range(2)
    ]
    here, there = (
        JaxChannel(servers[at], servers[1 - at].address(), 5, timeout_seconds=20)
        for at in range(2)
    )
    for revision in (3, 4):
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(
                send, plan, tree, here, revision, sender=0, receiver=0
            )
            found, got = receive(plan, dst, {0: there}, receiver=0)
            sending.result()
        assert got == revision
        for path, leaf in tree.items():
            same(bits(found[path]), bits(leaf))
    alone = JaxChannel(servers[1], servers[0].address(), 6, timeout_seconds=0.2)
    with pytest.raises(SyncError, match="nothing came"):
        alone.get(0, [np.zeros(3, np.uint8)])
