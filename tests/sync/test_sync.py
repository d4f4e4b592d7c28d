"""Transfers between jobs: bit for bit what NumPy makes, each byte sent once, and
nothing written by what is damaged.
"""

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
from sync_jobs import SIZES, Wire, bits, carried, halves, job, mesh, planned, sha256

import shardfx
from shardfx import From, MeshSpec, ShardPlan, TreeMap
from shardfx._convert import target_view
from shardfx._reshard.sync import scheduling, spare
from shardfx.errors import MeshError, PlanFormatError, SyncError
from shardfx.sync import JaxChannel, TransferPlan, plan_transfer, receive, send


ENTRIES = st.sampled_from(
    [(), ("a",), (("b", "a"),), (None, "a"), ("b", "a"), (None, None, "b")]
)


def drawn(draw, tree):
    """A spec for each leaf, corrected to its shape."""
    mesh = MeshSpec(SIZES)
    specs = {}
    for path, leaf in tree.items():
        entries = draw(ENTRIES)
        spec = P(*entries[: leaf.ndim])
        specs[path] = shardfx.correct(spec, leaf.shape, mesh).spec
    return specs


@settings(max_examples=40, deadline=None)
@given(case=maps(), data=st.data())
def test_random_maps_between_random_plans_give_what_numpy_gives(case, data):
    tree_map, arrays = written(case)
    whole = tree_map.apply(arrays)
    limit = data.draw(st.sampled_from([16, 1 << 20]))
    specs = drawn(data.draw, arrays)
    target_specs = drawn(data.draw, whole)
    plan = moved(
        arrays,
        specs=specs,
        tree_map=tree_map,
        target_specs=target_specs,
        memory_limit_bytes=limit,
    )
    # The two jobs plan without the other's devices.
    other = plan_transfer(
        planned(arrays, specs),
        planned(whole, target_specs),
        tree_map,
        memory_limit_bytes=limit,
    )
    assert other.digest == plan.digest
    assert other.to_json() == plan.to_json()


def test_each_byte_is_sent_once_per_process():
    transfer = job()
    arrays, sent_bytes = carried(transfer.plan, transfer.tree, transfer.dst)
    for path, leaf in transfer.tree.items():
        same(bits(arrays[path]), bits(leaf))
        assert arrays[path].dtype == leaf.dtype
        assert arrays[path].sharding == transfer.dst.shardings[path]
    # One process holds every shard of the target: each array crosses once, replicas or
    # not.
    expected_bytes = 0
    for path, leaf in transfer.tree.items():
        leaf_bytes = np.asarray(bits(leaf)).nbytes
        if path == "four":
            # Its elements have half a byte.
            leaf_bytes //= 2
        expected_bytes += leaf_bytes
    assert sent_bytes == expected_bytes


def moved(tree, specs, tree_map, target_specs, memory_limit_bytes=1 << 20):
    """The plan of a transfer through a map, whose arrays arrive as NumPy makes them and
    in as many bytes as planned.
    """
    leaves_by_path = {path: np.asarray(leaf) for path, leaf in tree.items()}
    whole = tree_map.apply(leaves_by_path)
    src = planned(tree, specs, mesh(0))
    dst = planned(whole, target_specs, mesh(4))
    plan = plan_transfer(src, dst, tree_map, memory_limit_bytes=memory_limit_bytes)
    restored = TransferPlan.from_json(plan.to_json())
    sources = jax.device_put(tree, src.shardings)
    arrays, sent_bytes = carried(restored, sources, dst)
    assert sent_bytes == plan.wire_bytes
    for path, leaf in whole.items():
        same(arrays[path], leaf)
        assert arrays[path].sharding == dst.shardings[path]
    return plan


def test_a_cast_is_made_where_it_leaves_fewer_bytes_to_send():
    values = jnp.arange(32, dtype=jnp.float32).reshape(4, 8)
    tree = {"w": values}
    for first, second in (("float32", "bfloat16"), ("bfloat16", "float32")):
        rule = From("w").cast(first).cast(second)
        plan = moved(
            tree,
            specs={"w": P("a")},
            tree_map=TreeMap({"v": rule}),
            target_specs={"v": P(None, "a")},
        )
        assert plan.wire_bytes == 32 * 2


SCALED = [
    ("float8_e4m3fn", "float32", 32 + 4 * 4),  # as it is, with its scales
    ("int4", "bfloat16", 16 + 4 * 4),
    ("int32", "bfloat16", 32 * 2),  # as the product
    ("int8", "int8", 32),
]


@pytest.mark.parametrize("dtype, to, count", SCALED)
def test_what_is_scaled_is_sent_as_what_is_smaller(dtype, to, count):
    values = jnp.arange(32).reshape(4, 8)
    tree = {
        "q": values.astype(dtype),
        "s": jnp.float32([[1, 2], [3, 4]]),
    }
    scaled = From("q").scale("s", block=(2, 4))
    plan = moved(
        tree,
        specs={"q": P("b"), "s": P()},
        tree_map=TreeMap({"w": scaled.cast(to)}),
        target_specs={"w": P("a")},
    )
    assert plan.wire_bytes == count


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
    joined = From.concat([repeated, From("q")], dim=1)
    tree_map = TreeMap({"k": repeated, "kq": joined})
    columns = P(None, ("a", "b"))
    target_specs = {"k": columns, "kq": columns}
    specs = {"k": P("a"), "q": P("b")}
    plan = moved(tree, specs, tree_map, target_specs)
    assert plan.wire_bytes == 4 * (64 + 64 + 8 * 16)
    src = planned(tree, specs)
    dst = planned(tree_map.apply(tree), target_specs)
    # Of two processes each needs half of the heads of `k`; the first half of `kq` is
    # all heads, the second is `q`.
    plan = plan_transfer(src, dst, tree_map, processes=(2, 2))
    assert plan.wire_bytes == 4 * (64 + 64 + 8 * 16)


def test_arithmetic_with_zeros_of_both_signs():
    tree = {name: jnp.full((4, 4), -0.0) for name in ("v", "w")}
    specs = {"v": P("a"), "w": P("a")}
    src = planned(tree, specs, mesh(0))
    dst = planned(tree, specs, mesh(4))
    tree_map = TreeMap({"v": From("v").plus(-0.0), "w": From("w").plus(0.0)})
    plan = plan_transfer(src, dst, tree_map)
    sources = jax.device_put(tree, src.shardings)
    wire = Wire()
    send(plan, sources, wire, 7, sender=0, receiver=0)
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
    sources = jax.device_put(tree, src.shardings)
    wire = Wire()
    send(plan, sources, wire, 7, sender=0, receiver=0)
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
    processes = (np.int64(2), np.array([0, 0, 1, 1]))
    plan = job(processes, **of_numpy).plan
    assert plan.to_json() == expected.to_json()
    restored = TransferPlan.from_json(plan.to_json())
    assert restored.digest == expected.digest


def test_an_unknown_receiver_is_refused_with_those_there_are():
    with pytest.raises(MeshError, match=r"is 1, and .* `dst` are \{0,2\}; give the"):
        job((2, [0, 0, 2, 2]), receiver=1)
    with pytest.raises(MeshError, match=r"is 4, and .* `dst` are \{0..3\}; give the"):
        job((2, 4), receiver=4)


OTHER_VALUES = [None, -1, 10**30, "x", [], {}, 1.5, True]


def mutated(data, draws):
    """The data with one value changed, removed or added, at a random place."""
    while True:
        if isinstance(data, dict):
            keys = list(data)
        else:
            keys = list(range(len(data)))
        key = draws.choice(keys)
        value = data[key]
        if isinstance(value, dict | list) and value and draws.random() < 0.9:
            data = value
            continue
        match draws.randrange(4):
            case 0:
                del data[key]
            case 1 if isinstance(data, list):
                data.insert(key, data[key])
            case 2 if type(value) is int:
                data[key] += draws.choice([-1, 1, 1 << 40])
            case _:
                data[key] = draws.choice(OTHER_VALUES)
        return


def is_whole(kind):
    """Whether the pieces fill every buffer once: counted element by element."""
    counts_by_buffer = []
    for buffer in kind.buffers:
        shape = [stop - start for start, stop in buffer.box]
        counts_by_buffer.append(np.zeros(shape, int))
    for number in range(len(kind.rows)):
        transfer = kind.transfer(number)
        counts = counts_by_buffer[transfer.buffer]
        target_view(counts, transfer.piece)[...] += 1
    return all((counts == 1).all() for counts in counts_by_buffer)


def test_a_damaged_plan_is_an_error_or_writes_each_element_once():
    """Its checksum made good again, so that the checks behind it are met."""
    plan = job((2, 2)).plan
    draws = random.Random(0)
    plan_json = plan.to_json()
    document = json.loads(plan_json)
    refused = 0
    for _ in range(300):
        content = json.loads(document["plan"])
        mutated(content, draws)
        text = json.dumps(content)
        damaged = {**document, "plan": text, "checksum": sha256(text)}
        try:
            damaged_plan = TransferPlan.from_json(json.dumps(damaged))
        except PlanFormatError:
            refused += 1
            continue
        # What passes may say other names, senders or places to read; every buffer is
        # written whole, nothing beside it.
        assert damaged_plan.digest == plan.digest
        assert all(map(is_whole, damaged_plan.kinds))
    assert refused > 180
    for length in range(0, len(plan_json), 997):
        with pytest.raises(PlanFormatError):
            TransferPlan.from_json(plan_json[:length])


def test_transfer_servers_of_jax_carry_a_plan():
    transfer = job(memory_limit_bytes=64)
    client = jax.devices()[0].client
    any_port = "127.0.0.1:0"
    server = start_transfer_server(client, any_port, [any_port])
    other_server = start_transfer_server(client, any_port, [any_port])
    sending_channel = JaxChannel(server, other_server.address(), 5, timeout_seconds=20)
    channel = JaxChannel(other_server, server.address(), 5, timeout_seconds=20)
    for revision in (3, 4):
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(
                send,
                transfer.plan,
                transfer.tree,
                sending_channel,
                revision,
                sender=0,
                receiver=0,
                check_content=True,
            )
            arrays, received_revision = receive(
                transfer.plan,
                transfer.dst,
                {0: channel},
                receiver=0,
                check_content=True,
            )
            sending.result()
        assert received_revision == revision
        for path, leaf in transfer.tree.items():
            same(bits(arrays[path]), bits(leaf))
    silent_channel = JaxChannel(other_server, server.address(), 6, timeout_seconds=0.2)
    with pytest.raises(SyncError, match="nothing came"):
        silent_channel.get(0, [np.zeros(3, np.uint8)])


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


def test_sources_of_different_rank_that_are_repeated():
    structs = {"stack": jnp.ones((2, 4, 4)), "extra": jnp.ones((4, 4)) * 2}
    parts = [From("stack").at(1), From("extra")]
    repeated = From.concat(parts).repeat(2)
    moved(
        structs,
        specs={"stack": P(None, "a"), "extra": P("b")},
        tree_map=TreeMap({"kv": repeated}),
        target_specs={"kv": P("a")},
    )


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
