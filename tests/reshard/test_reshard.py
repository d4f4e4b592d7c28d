from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec as P
from moves import both_ways, through_programs

from shardfx import plan_reshard, reshard
from shardfx._reshard.mover import job_of
from shardfx.errors import LeafTypeError, MoveError
from tests.reshard.layouts import (
    assert_equal,
    host,
    mesh,
    put,
    sharding,
    state,
    targets,
)


@both_ways
def test_a_tree_moves_to_a_tree_of_shardings(move):
    source = put(state(), sharding((8,), "a"))
    expected = targets(source, sharding((2, 4), "b", "a"), sharding((2, 4)))
    # Copies in the host's memory need no room.
    moved = move(source, expected, memory_limit_bytes=0 if move is reshard else None)
    assert_equal(moved, state())
    assert moved["name"] == "model"
    for leaf, target in zip(
        jax.tree.leaves(moved), jax.tree.leaves(expected), strict=False
    ):
        if isinstance(leaf, jax.Array):
            assert leaf.sharding == target


def test_a_prefix_of_shardings_spreads_over_arrays_below():
    source = put(
        {"p": {"w": host((8, 4)), "v": host((8,))}, "q": host((8, 8))},
        sharding((8,), "a"),
    )
    order = (7, 6, 1, 0)
    target = sharding((4,), "a", order=order)
    other = sharding((2,), "a")
    leaves = jax.tree.leaves(reshard(source, target))
    shardings = {x.sharding for x in leaves}
    assert shardings == {target}
    moved = reshard(source, {"p": target, "q": other})
    leaves = jax.tree.leaves(moved["p"])
    shardings = {x.sharding for x in leaves}
    assert shardings == {target}
    assert moved["q"].sharding == other
    half = reshard(source, {"p": None, "q": other})
    assert half["p"]["w"] is source["p"]["w"]
    assert half["q"].sharding == other


def test_rows_of_a_replicated_array_share_its_memory():
    values = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
    target_sharding = NamedSharding(mesh((8,)), P())
    x = jax.device_put(
        values,
        target_sharding,
    )
    first = np.asarray(x).__array_interface__["data"][0]
    target_sharding = NamedSharding(mesh((8,)), P("a"))
    moved = reshard(x, target_sharding)
    where = [
        shard.data.unsafe_buffer_pointer() - first for shard in moved.addressable_shards
    ]
    assert where == [number * 8 * 64 * 4 for number in range(8)]
    jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    values = np.arange(64 * 64).reshape(64, 64)
    np.testing.assert_array_equal(moved, values)


def count_compilations(fn):
    events = []

    def listen(event, duration_secs, **kwargs):
        events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        fn()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return events.count("/jax/core/compile/backend_compile_duration")


def rows(tree, expected):
    """Leaves and where they shall lie, as a job has them."""
    leaves = jax.tree.leaves(tree)
    shardings = jax.tree.leaves(expected)
    return list(zip(range(len(leaves)), leaves, shardings, strict=True))


def test_a_thousand_leaves_take_one_program_a_move():
    shapes = [(8 * (i + 1), 16) for i in range(10)]
    source = [
        jax.device_put(host(shapes[i % 10]), sharding((8,), "a")) for i in range(1000)
    ]
    shardings = [
        sharding((2, 4), *[("b", "a"), (None, "b")][i // 10 % 2]) for i in range(1000)
    ]
    moves = {(x.shape, target) for x, target in zip(source, shardings, strict=True)}
    assert len(moves) == 20
    job = job_of(rows(source, shardings), str, copies=False)
    assert sum(map(len, job.moves.values())) == 1000
    assert len(job.moves) == 20
    jax.block_until_ready(through_programs(source[:200], shardings[:200]))
    moved = []
    # Whatever the 20 moves compiled, the other 800 leaves compile nothing.
    compilations = count_compilations(
        lambda: moved.extend(through_programs(source[200:], shardings[200:]))
    )
    assert compilations == 0
    expected = [np.asarray(x) for x in source[200:]]
    assert_equal(moved, expected)


def moves_of_all_kinds():
    """A tree that takes every way, and where it goes to."""
    keys = jax.device_put(
        jax.random.split(jax.random.key(0, impl="rbg"), 8), sharding((8,), "a")
    )
    placed = jax.device_put(host((96, 64)), sharding((8,), "a"))
    tree = {
        "steps": placed,
        "smaller": jax.device_put(host((96, 64)), sharding((8,), "a")),
        "bits": jax.device_put(
            host((24, 16)).astype(jnp.bfloat16), sharding((8,), "a")
        ),
        "empty": jax.device_put(host((0, 8)), sharding((8,), None, "a")),
        "scalar": jax.device_put(host(()), sharding((8,))),
        "kind": jax.device_put(host((24, 16)), sharding((8,), "a")),
        "numpy": host((8,)),
        "keys": keys,
    }
    target_sharding = sharding((2,), order=(5, 1))
    expected = dict.fromkeys(tree, target_sharding)
    expected |= {
        "steps": sharding((2, 4), "b", "a"),
        "kind": sharding((4,), "a", kind="unpinned_host"),
    }
    order = (5, 1, 3, 0, 7, 2)
    target_sharding = sharding((2, 3), "b", "a", order=order)
    expected |= dict.fromkeys(("smaller", "bits"), target_sharding)
    return tree, expected


def surroundings():
    return jax.transfer_guard("disallow"), jax.transfer_guard("log"), jax.disable_jit()


@both_ways
@pytest.mark.parametrize(
    "around, limit_bytes", [(0, None), (1, 13000), (2, None), (2, 13000)]
)
def test_a_move_is_what_was_asked_for(move, around, limit_bytes, capfd):
    tree, target = moves_of_all_kinds()
    numbers = lambda tree: tree | {"keys": jax.random.key_data(tree["keys"])}
    expected = jax.tree.map(np.asarray, numbers(tree))
    with surroundings()[around]:
        moved = move(tree, target, memory_limit_bytes=limit_bytes)
    assert "transfer" not in capfd.readouterr().err
    for name, leaf in moved.items():
        assert leaf.sharding.is_equivalent_to(target[name], leaf.ndim)
        assert leaf.dtype == tree[name].dtype
    assert_equal(numbers(moved), expected)


@pytest.mark.parametrize("guard", ["disallow_explicit", "log_explicit"])
def test_transfer_guards_stop_transfers_to_devices(guard, capfd):
    x = jax.device_put(host((8,)), sharding((8,)))
    targets = [
        sharding((4,), "a"),
        sharding((8,), "a"),
        jax.sharding.SingleDeviceSharding(jax.devices()[5]),
    ]
    with jax.transfer_guard(
        guard
    ):  # shards of the CPU's devices are copied where they lie
        moved = reshard([x] * 3, targets)
    assert_equal(moved, [host((8,))] * 3)
    assert "transfer" not in capfd.readouterr().err
    if guard == "disallow_explicit":
        with (
            jax.transfer_guard(guard),
            pytest.raises(MoveError, match="Disallowed host-to-device transfer"),
        ):
            reshard(host((8,)), sharding((4,), "a"))


def spread_out():
    """Leaves on four replicas, each to a device of its own, and some with a choice of
    two of the four.
    """
    replicas = sharding((4,))
    pairs = sharding((2, 2), "a")
    source = {f"r{i}": jax.device_put(host((8, 8), i), replicas) for i in range(4)}
    source |= {f"p{i}": jax.device_put(host((8, 8), i), pairs) for i in range(4)}
    alone = [NamedSharding(mesh((1,), order=(4 + i,)), P()) for i in range(4)]
    return source, {name: alone[int(name[1])] for name in source}


def test_senders_are_balanced_over_the_whole_tree():
    source, expected = spread_out()
    reshard_plan = plan_reshard(source, expected)
    sent = Counter()
    for (sender, _), size in reshard_plan.links.items():
        sent[sender] += size
    assert sent == dict.fromkeys(range(4), 2 * 256)
    job = job_of(rows(source, expected), str, copies=False)
    links = Counter()
    for move, places in job.moves.items():
        assert move.assembly is not None
        assert move.assembly.method == "programs"
        for (sender, receiver), size in move.assembly.parts.links.items():
            pair = tuple(
                move.assembly.devices[place].id for place in (sender, receiver)
            )
            links[pair] += size * len(places)
    assert links == reshard_plan.links
    moves = job_of(
        rows([source, source], [expected, expected]), str, copies=False
    ).moves
    count = len(moves)
    assert count == len(job.moves) == 8
    for limit in (None, 2000):
        tree = through_programs(source, expected, memory_limit_bytes=limit)
        assert_equal(
            tree,
            {k: host((8, 8), int(k[1])) for k in source},
        )
    assert count_compilations(lambda: through_programs(source, expected)) == 0


@pytest.mark.parametrize(
    "make",
    [lambda: jnp.ones((8,)), lambda: jnp.asarray(2.0), lambda: jax.random.key(0)],
)
def test_an_array_is_committed_to_where_it_was_sent(make):
    x = make()
    assert not x.committed
    for dst in (
        x.sharding,
        *(NamedSharding(mesh((1,), order=(device,)), P()) for device in (0, 3)),
    ):
        moved = reshard([x], dst)[0]
        assert moved.committed
        assert moved.sharding == dst
        assert moved.dtype == x.dtype
        assert getattr(moved, "weak_type", None) == getattr(x, "weak_type", None)
        assert bool((moved == x).all())


def test_a_custom_layout_becomes_the_default_one():
    turned = Format(Layout((1, 0)), sharding((8,), "a"))
    x = jax.device_put(host((16, 8)), turned)
    moved, put_there = (
        move(x, sharding((8,), None, "a")) for move in (reshard, jax.device_put)
    )
    assert x.format.layout.major_to_minor == (1, 0)
    assert moved.format == put_there.format  # pyright: ignore[reportAttributeAccessIssue]
    for form, match in (
        (turned, "`dst` is a Format, .* which is no sharding; use"),
        ({"a": turned}, "Format at `a`"),
    ):
        with pytest.raises(LeafTypeError, match=match):
            reshard(x if form is turned else {"a": x}, form)
