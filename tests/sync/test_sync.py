"""Transfers between jobs: bit for bit what NumPy makes, each byte sent once, and
nothing written by what is damaged.
"""

import dataclasses
import itertools as it
import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.experimental.transfer import start_transfer_server
from jax.sharding import PartitionSpec as P
from maps import maps, same, written
from sync_jobs import SIZES, bits, halves, job, mesh, planned, sha256

import shardfx
from shardfx import From, MeshSpec, ShardPlan, TreeMap
from shardfx._convert import target_view
from shardfx._reshard.sync import contents, scheduling, spare
from shardfx._reshard.sync.kinds import FIRST_POSITION
from shardfx.errors import MeshError, PlanFormatError, SyncError
from shardfx.sync import JaxChannel, TransferPlan, plan_transfer, receive, send


class Wire:
    """A channel in memory."""

    def __init__(self):
        self.pieces = []
        self.revision = 0

    def put(self, round, pieces):
        self.pieces += [(round, piece.copy()) for piece in pieces]

    def get(self, round, memories):
        for memory in memories:
            number, piece = self.pieces.pop(0)
            assert number == round
            assert piece.nbytes == memory.nbytes
            memory[...] = piece

    def commit(self, revision: int | None = None) -> int:
        if revision is not None:
            self.revision = revision
        return self.revision


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
        send(plan, arrays, wire, 7, sender=sender, receiver=0, check_content=True)
    pieces = it.chain.from_iterable(wire.pieces for wire in wires.values())
    total = sum(piece.nbytes for _, piece in pieces)
    sent = total - len(wires) * len(plan.leaves) * 16  # the sums of the content
    made, revision = receive(plan, dst, wires, receiver=0, check_content=True)
    assert revision == 7
    return made, sent


@settings(max_examples=40, deadline=None)
@given(case=maps(), data=st.data())
def test_random_maps_between_random_plans_give_what_numpy_gives(case, data):
    made, arrays = written(case)
    whole = made.apply(arrays)
    limit = data.draw(st.sampled_from([16, 1 << 20]))
    specs = drawn(data.draw, arrays), drawn(data.draw, whole)
    plan = moved(
        arrays,
        specs=specs[0],
        made=made,
        target_specs=specs[1],
        memory_limit_bytes=limit,
    )
    # The two jobs plan without the other's devices.
    other = plan_transfer(
        planned(arrays, specs[0]),
        planned(whole, specs[1]),
        made,
        memory_limit_bytes=limit,
    )
    assert other.digest == plan.digest
    assert other.to_json() == plan.to_json()


def test_each_byte_is_sent_once_per_process():
    transfer = job()
    found, sent = carried(transfer.plan, transfer.tree, transfer.dst)
    for path, leaf in transfer.tree.items():
        same(bits(found[path]), bits(leaf))
        assert found[path].dtype == leaf.dtype
        assert found[path].sharding == transfer.dst.shardings[path]
    # One process holds every shard of the target: each array crosses once, replicas or
    # not.
    halves = {"four": 1 / 2}
    expected = sum(
        np.asarray(bits(leaf)).nbytes * halves.get(path, 1)
        for path, leaf in transfer.tree.items()
    )
    assert sent == expected


def moved(tree, specs, made, target_specs, memory_limit_bytes=1 << 20):
    """The plan of a transfer through a map, whose arrays arrive as NumPy makes them and
    in as many bytes as planned.
    """
    leaves_by_path = {path: np.asarray(leaf) for path, leaf in tree.items()}
    whole = made.apply(leaves_by_path)
    src = planned(tree, specs, mesh(0))
    dst = planned(whole, target_specs, mesh(4))
    plan = plan_transfer(src, dst, made, memory_limit_bytes=memory_limit_bytes)
    restored = TransferPlan.from_json(plan.to_json())
    arrays = jax.device_put(tree, src.shardings)
    found, sent = carried(restored, arrays, dst)
    assert sent == plan.wire_bytes
    for path, leaf in whole.items():
        same(found[path], leaf)
        assert found[path].sharding == dst.shardings[path]
    return plan


def test_a_cast_is_made_where_it_leaves_fewer_bytes_to_send():
    values = jnp.arange(32, dtype=jnp.float32).reshape(4, 8)
    tree = {"w": values}
    for first, second in (("float32", "bfloat16"), ("bfloat16", "float32")):
        rules = {"v": From("w").cast(first).cast(second)}
        made = TreeMap(rules)
        wire_bytes = moved(tree, {"w": P("a")}, made, {"v": P(None, "a")}).wire_bytes
        assert wire_bytes == 32 * 2


SCALED = [
    ("float8_e4m3fn", "float32", 32 + 4 * 4),  # as it is, with its scales
    ("int4", "bfloat16", 16 + 4 * 4),
    ("int32", "bfloat16", 32 * 2),  # as the product
    ("int8", "int8", 32),
]


@pytest.mark.parametrize("dtype, to, count", SCALED)
def test_what_is_scaled_is_sent_as_what_is_smaller(dtype, to, count):
    values = jnp.arange(32).reshape(4, 8).astype(dtype)
    tree = {
        "q": values,
        "s": jnp.float32([[1, 2], [3, 4]]),
    }
    rules = {"w": From("q").scale("s", block=(2, 4)).cast(to)}
    made = TreeMap(rules)
    wire_bytes = moved(tree, {"q": P("b"), "s": P()}, made, {"w": P("a")}).wire_bytes
    assert wire_bytes == count


def test_what_a_process_needs_in_several_places_is_sent_once():
    """Heads that are repeated for the devices that share them, next to what is theirs
    alone.
    """
    values = jnp.arange(64, dtype=jnp.float32).reshape(8, 8)
    tree = {
        "k": values,
        "q": jnp.ones((8, 16)),
    }
    repeated = From("k").repeat(2, dim=1, unit=2)
    rules = {"k": repeated, "kq": From.concat([repeated, From("q")], dim=1)}
    made = TreeMap(rules)
    places = {"k": P(None, ("a", "b")), "kq": P(None, ("a", "b"))}
    specs = {"k": P("a"), "q": P("b")}
    wire_bytes = moved(tree, specs, made, places).wire_bytes
    assert wire_bytes == 4 * (64 + 64 + 8 * 16)
    ends = planned(tree, specs), planned(made.apply(tree), places)
    # Of two processes each needs half of the heads of `k`; the first half of `kq` is
    # all heads, the second is `q`.
    wire_bytes = plan_transfer(*ends, made, processes=(2, 2)).wire_bytes
    assert wire_bytes == 4 * (64 + 64 + 8 * 16)


def test_arithmetic_with_zeros_of_both_signs():
    tree = {name: jnp.full((4, 4), -0.0) for name in ("v", "w")}
    specs = {"v": P("a"), "w": P("a")}
    src = planned(tree, specs, mesh(0))
    dst = planned(tree, specs, mesh(4))
    tree_map = TreeMap({"v": From("v").plus(-0.0), "w": From("w").plus(0.0)})
    plan = plan_transfer(src, dst, tree_map)
    wire = Wire()
    send(plan, jax.device_put(tree, src.shardings), wire, 7, sender=0, receiver=0)
    arrays, _ = receive(plan, dst, {0: wire}, receiver=0)
    for path, expected in tree_map.apply(tree).items():
        same(arrays[path], expected)


@pytest.mark.parametrize("operation", ["plus", "pad_to"])
def test_a_leaf_with_zeros_of_both_signs(operation):
    tree = {"v": jnp.full((4, 4), -0.0)}
    if operation == "plus":
        parts = [From("v").plus(zero).cast("bfloat16") for zero in (0.0, -0.0)]
    else:
        parts = [From("v").pad_to(8, value=zero) for zero in (0.0, -0.0)]
    tree_map = TreeMap({"v": From.concat(parts)})
    whole = tree_map.apply(tree)
    src = planned(tree, {"v": P("a")}, mesh(0))
    dst = planned(whole, {"v": P(None, "a")}, mesh(4))
    plan = plan_transfer(src, dst, tree_map)
    wire = Wire()
    send(plan, jax.device_put(tree, src.shardings), wire, 7, sender=0, receiver=0)
    arrays, _ = receive(plan, dst, {0: wire}, receiver=0)
    same(arrays["v"], whole["v"])


def _scheduled(plan, sender, receiver):
    """The pieces of each row of each round, with the numbers of leaves."""
    order = scheduling.schedule(plan, sender, receiver)
    scheduled = []
    for number, entries in enumerate(order.rounds):
        for entry in entries:
            rows_of_kind = order.rows_of_kind[plan.leaves[entry.leaf].kind]
            row = rows_of_kind[entry.number]
            if isinstance(row, scheduling.SentPart):
                transfers = row.transfers_of_buffers
            else:
                transfers = row.transfers
            pieces = [transfer.piece for transfer in transfers]
            scheduled.append((number, entry.leaf, pieces))
    return scheduled


@pytest.mark.parametrize("receiver", range(4))
def test_a_receivers_part_is_that_of_the_whole_plan(receiver):
    plan = job((2, 4)).plan
    part = job((2, 4), receiver=receiver).plan
    assert part.digest == plan.digest
    assert part.senders_to(receiver) == plan.senders_to(receiver)
    for sender in (-1, 0, 1):
        assert _scheduled(part, sender, receiver) == _scheduled(plan, sender, receiver)
    TransferPlan.from_json(part.to_json())


def test_numbers_of_numpy_make_the_plan_that_python_s_make():
    numbers = {"receiver": 1, "memory_limit_bytes": 1 << 20}
    of_numpy = {name: np.int64(number) for name, number in numbers.items()}
    expected = job((2, [0, 0, 1, 1]), **numbers).plan
    plan = job((np.int64(2), np.array([0, 0, 1, 1])), **of_numpy).plan
    assert plan.to_json() == expected.to_json()
    assert TransferPlan.from_json(plan.to_json()).digest == expected.digest


def test_an_unknown_receiver_is_refused_with_those_there_are():
    with pytest.raises(MeshError, match=r"is 1, and .* `dst` are \{0,2\}; give the"):
        job((2, [0, 0, 2, 2]), receiver=1)
    with pytest.raises(MeshError, match=r"is 4, and .* `dst` are \{0..3\}; give the"):
        job((2, 4), receiver=4)


def mutated(data, draws):
    """The data with one value changed, removed or added, at a random place."""
    while True:
        if isinstance(data, dict):
            keys = list(data)
        else:
            keys = list(range(len(data)))
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
    plan = job((2, 2)).plan
    draws = random.Random(0)
    text = json.loads(plan.to_json())
    refused = 0
    for _ in range(300):
        body = json.loads(text["plan"])
        mutated(body, draws)
        again = json.dumps(body)
        try:
            encoded = json.dumps({**text, "plan": again, "checksum": sha256(again)})
            found = TransferPlan.from_json(encoded)
        except PlanFormatError:
            refused += 1
            continue
        # What passes may say other names, senders or places to read; every buffer is
        # written whole, nothing beside it.
        assert found.digest == plan.digest
        assert all(map(is_whole, found.kinds))
    assert refused > 180
    for cut in range(0, len(plan.to_json()), 997):
        with pytest.raises(PlanFormatError):
            TransferPlan.from_json(plan.to_json()[:cut])


def test_transfer_servers_of_jax_carry_a_plan():
    transfer = job(memory_limit_bytes=64)
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
            ends = {"sender": 0, "receiver": 0, "check_content": True}
            sending = pool.submit(
                send, transfer.plan, transfer.tree, here, revision, **ends
            )
            found, got = receive(
                transfer.plan, transfer.dst, {0: there}, receiver=0, check_content=True
            )
            sending.result()
        assert got == revision
        for path, leaf in transfer.tree.items():
            same(bits(found[path]), bits(leaf))
    alone = JaxChannel(servers[1], servers[0].address(), 6, timeout_seconds=0.2)
    with pytest.raises(SyncError, match="nothing came"):
        alone.get(0, [np.zeros(3, np.uint8)])


def checked(plan, dst, arrays, receiving_plan=None, swap=False):
    """Sends over channels in memory, with checksums of the content."""
    wires = {sender: Wire() for sender in plan.senders_to(0)}
    for sender, wire in wires.items():
        send(plan, arrays, wire, 7, sender=sender, receiver=0, check_content=True)
    if swap:
        wires = dict(zip(wires, reversed(wires.values()), strict=True))
    plan = receiving_plan or plan
    return receive(plan, dst, wires, receiver=0, check_content=True)[0]


def with_rows(plan, change):
    """The plan with other rows in each of its kinds. Its digest stays the same."""
    kinds = []
    for kind in plan.kinds:
        rows = kind.rows.copy()
        change(kind, rows)
        kinds.append(dataclasses.replace(kind, rows=rows))
    return dataclasses.replace(plan, kinds=tuple(kinds))


def test_content_shows_a_wrong_sender():
    """Every byte is right, and comes from the other process's half: all totals, and
    what is checked for each piece, are right (tpu-inference#3379).
    """
    transfer = halves()
    arrays = jax.device_put(transfer.tree, transfer.src.shardings)
    same(checked(transfer.plan, transfer.dst, arrays)["w"], transfer.tree["w"])
    with pytest.raises(SyncError, match="leaf `w`: its 64 elements have the checksum"):
        checked(transfer.plan, transfer.dst, arrays, swap=True)


def test_the_error_of_the_sender_that_failed_is_raised():
    # A round for each row.
    transfer = halves(memory_limit_bytes=32)
    arrays = jax.device_put(transfer.tree, transfer.src.shardings)
    has_failed = threading.Event()

    class Slow(Wire):
        def get(self, round, memories):
            assert has_failed.wait(10)
            # Its rounds go on for so long that the other sender's failure is seen.
            time.sleep(0.05)
            super().get(round, memories)

    class Failing(Wire):
        def get(self, round, memories):
            has_failed.set()
            raise SyncError("the network is down")

    slow = Slow()
    send(transfer.plan, arrays, slow, 7, sender=0, receiver=0)
    with pytest.raises(SyncError, match="the network is down"):
        receive(transfer.plan, transfer.dst, {0: slow, 1: Failing()}, receiver=0)


def test_two_senders_may_ask_for_two_buffers_of_one_leaf(monkeypatch):
    """The second asks while the leaf's buffers are allocated, of which it has one."""
    transfer = halves()
    memory = spare.SpareMemory(transfer.plan, transfer.dst, receiver=0)
    allocate = spare.buffers

    with ThreadPoolExecutor(1) as pool:
        second = []

        def slowly(*arguments):
            for view in allocate(*arguments):
                yield view
                second.append(pool.submit(memory.memory, 0, 1))
                # Time for the other thread to look the leaf up.
                time.sleep(0.05)

        monkeypatch.setattr(spare, "buffers", slowly)
        first = memory.memory(0, 0)
        shapes = {future.result().shape for future in second}
    assert shapes == {first.shape} == {(8, 4)}


def test_receivers_of_one_plan_may_start_at_once(monkeypatch):
    """Another one starts whenever the first looks its layout of memory up."""
    transfer = halves()
    others = [
        planned(transfer.tree, {"w": P(None, "b")}, mesh(start)) for start in (0, 2)
    ]
    another = it.cycle(others)
    hash_of = ShardPlan.__hash__
    assert hash_of is not None

    def interrupted(sharding_plan):
        if sharding_plan is transfer.dst:
            spare.layout_of(transfer.plan, next(another), 0)
        return hash_of(sharding_plan)

    monkeypatch.setattr(ShardPlan, "__hash__", interrupted)
    layout = spare.layout_of(transfer.plan, transfer.dst, 0)
    assert layout.targets[0].sharding == transfer.dst.shardings["w"]


def test_content_shows_a_wrong_offset_on_both_sides():
    transfer = halves()
    arrays = jax.device_put(transfer.tree, transfer.src.shardings)

    def move(kind, rows):
        # The rows of the source are read in another order. Each target is written once.
        rows[:, FIRST_POSITION] = rows[::-1, FIRST_POSITION].copy()

    wrong = with_rows(transfer.plan, move)
    assert wrong.digest == transfer.plan.digest
    assert wrong.wire_bytes == transfer.plan.wire_bytes
    TransferPlan.from_json(wrong.to_json())  # It is whole, as far as bytes go.
    with pytest.raises(SyncError, match="leaf `w`: its 64 elements have the checksum"):
        checked(wrong, transfer.dst, arrays)


def test_content_shows_a_wrong_cast():
    values = jnp.arange(64, dtype=jnp.float32).reshape(8, 8)
    tree = {"w": values * 1e4}
    src = planned(tree, {"w": P("a")}, mesh(0))
    struct = jax.ShapeDtypeStruct((8, 8), jnp.bfloat16)
    structs = {"w": struct}
    dst = planned(structs, {"w": P("b")}, mesh(4))
    tree_map = TreeMap({"w": From("w").cast("bfloat16")})
    plan = plan_transfer(src, dst, tree_map)
    arrays = jax.device_put(tree, src.shardings)
    same(checked(plan, dst, arrays)["w"], np.asarray(tree["w"]).astype(jnp.bfloat16))
    (kind,) = plan.kinds
    (form,) = kind.forms
    through_half = (np.dtype("float16"), *form.value.casts)
    value = form.value._replace(casts=through_half)
    forms = (form._replace(value=value, sender_casts=2),)
    replaced = dataclasses.replace(kind, forms=forms)
    kinds = (replaced,)
    wrong = dataclasses.replace(
        plan,
        kinds=kinds,
    )
    with pytest.raises(SyncError, match="leaf `w`: its 64 elements have the checksum"):
        checked(wrong, dst, arrays)


def test_content_shows_leaves_that_are_exchanged():
    tree = {"v": jnp.ones((4, 4)), "w": jnp.zeros((4, 4))}
    specs = {"v": P("a"), "w": P("a")}
    src = planned(tree, specs, mesh(0))
    dst = planned(tree, specs, mesh(4))
    plan = plan_transfer(src, dst)
    arrays = jax.device_put(tree, src.shardings)
    first, second = plan.leaves
    leaves = (
        first._replace(source_paths=second.source_paths),
        second._replace(source_paths=first.source_paths),
    )
    wrong = dataclasses.replace(
        plan,
        leaves=leaves,
    )
    wire = Wire()
    send(wrong, arrays, wire, 7, sender=0, receiver=0)
    # The sums of the content are those of the right plan.
    right_wire = Wire()
    send(plan, arrays, right_wire, 7, sender=0, receiver=0, check_content=True)
    wire.pieces.append(right_wire.pieces[-1])
    with pytest.raises(SyncError, match=r"leaf `v`: .*\(2 leaves differ\)"):
        receive(plan, dst, {0: wire}, receiver=0, check_content=True)


def test_sums_of_content_are_sent_in_rounds(monkeypatch):
    """A sender that sums a large state is not silent for longer than a time-out."""
    monkeypatch.setattr(contents, "SUM_ROUND_BYTES", 200)
    transfer = job()
    rounds = contents.sum_rounds(transfer.plan)
    assert len(rounds) > 1
    numbers = it.chain.from_iterable(rounds)
    assert list(numbers) == list(range(len(transfer.plan.leaves)))
    arrays, _ = carried(transfer.plan, transfer.tree, transfer.dst)
    for path, leaf in transfer.tree.items():
        same(bits(arrays[path]), bits(leaf))
    wire = Wire()
    send(
        transfer.plan, transfer.tree, wire, 7, sender=0, receiver=0, check_content=True
    )
    assert len({number for number, _ in wire.pieces}) == len(rounds) + 1
    wire.pieces[-1][1][-1] ^= 1
    with pytest.raises(SyncError, match="elements have the checksum"):
        receive(transfer.plan, transfer.dst, {0: wire}, receiver=0, check_content=True)


def test_sources_of_different_rank_that_are_repeated():
    structs = {"stack": jnp.ones((2, 4, 4)), "extra": jnp.ones((4, 4)) * 2}
    parts = [From("stack").at(1), From("extra")]
    repeated = From.concat(parts).repeat(2)
    specs = {"stack": P(None, "a"), "extra": P("b")}
    moved(structs, specs, TreeMap({"kv": repeated}), {"kv": P("a")})


def test_plans_that_would_never_end_are_refused():
    struct = jax.ShapeDtypeStruct((1 << 20, 1 << 20), jnp.float32)
    tree = {"w": struct}
    src = planned(tree, {"w": P("a")})
    dst = planned(tree, {"w": P(None, "a")})
    with pytest.raises(SyncError, match="`w` would be sent in more than 4,194,304"):
        plan_transfer(src, dst, memory_limit_bytes=16)
    small = jax.ShapeDtypeStruct((1 << 16,), jnp.float32)
    small_leaves = {f"w{number}": small for number in range(1000)}
    specs = dict.fromkeys(small_leaves, P("a"))
    with pytest.raises(
        SyncError, match="up to 6,144,000 rows of bytes, and a transfer"
    ):
        plan_transfer(
            planned(small_leaves, specs),
            planned(small_leaves, specs),
            memory_limit_bytes=128,
        )
    wide = MeshSpec({"a": 1 << 21})
    many = planned({"w": tree["w"]}, {"w": P()}, wide)
    with pytest.raises(MeshError, match="a mesh of 2,097,152 devices"):
        plan_transfer(many, dst)
    limits: list[Any] = [0, -1, 1.5, True, 1 << 40]
    for limit in limits:
        with pytest.raises(MeshError, match="give a number of bytes from 1"):
            plan_transfer(src, dst, memory_limit_bytes=limit)


def test_a_schedule_of_too_many_parts_is_refused(monkeypatch):
    struct = jax.ShapeDtypeStruct((1 << 10, 64), jnp.float32)
    tree = {"w": struct}
    src = planned(tree, {"w": P(None, "a")})
    dst = planned(tree, {"w": P("a")})
    plan = plan_transfer(src, dst, memory_limit_bytes=1 << 12)
    monkeypatch.setattr(scheduling, "_MOST_PARTS", 16)
    with pytest.raises(
        SyncError, match="would be sent in more than 16 parts of ranges"
    ):
        scheduling.schedule(plan, 0, 0)
