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
    expected = targets(
        source,
        matrix=sharding((2, 4), "b", "a"),
        vector=sharding((2, 4)),
    )
    limit_bytes = None
    if move is reshard:
        # Copies in the host's memory need no room.
        limit_bytes = 0
    moved = move(source, expected, memory_limit_bytes=limit_bytes)
    assert_equal(moved, state())
    assert moved["name"] == "model"
    leaves = jax.tree.leaves(moved)
    for leaf, target in zip(leaves, jax.tree.leaves(expected), strict=False):
        if isinstance(leaf, jax.Array):
            assert leaf.sharding == target


def test_a_prefix_of_shardings_spreads_over_arrays_below():
    tree = {"p": {"w": host((8, 4)), "v": host((8,))}, "q": host((8, 8))}
    source = put(tree, sharding((8,), "a"))
    target = sharding((4,), "a", order=(7, 6, 1, 0))
    other = sharding((2,), "a")
    moved = reshard(source, target)
    shardings = {leaf.sharding for leaf in jax.tree.leaves(moved)}
    assert shardings == {target}
    moved = reshard(source, {"p": target, "q": other})
    shardings = {leaf.sharding for leaf in jax.tree.leaves(moved["p"])}
    assert shardings == {target}
    assert moved["q"].sharding == other
    half = reshard(source, {"p": None, "q": other})
    assert half["p"]["w"] is source["p"]["w"]
    assert half["q"].sharding == other


def test_rows_of_a_replicated_array_share_its_memory():
    values = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
    whole = NamedSharding(mesh((8,)), P())
    x = jax.device_put(values, whole)
    first_pointer, _ = np.asarray(x).__array_interface__["data"]
    rows = NamedSharding(mesh((8,)), P("a"))
    moved = reshard(x, rows)
    offsets = []
    for shard in moved.addressable_shards:
        offsets.append(shard.data.unsafe_buffer_pointer() - first_pointer)
    assert offsets == [number * 8 * 64 * 4 for number in range(8)]
    donating = jax.jit(lambda x: x + 1, donate_argnums=0)
    donating(x)
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
    rows_sharding = sharding((8,), "a")
    first = sharding((2, 4), "b", "a")
    second = sharding((2, 4), None, "b")
    source = []
    shardings = []
    for number in range(250):
        target = first
        if number % 2 == 1:
            target = second
        for rows_of_array in range(8, 40, 8):
            values = host((rows_of_array, 16))
            source.append(jax.device_put(values, rows_sharding))
            shardings.append(target)
    assert len(source) == 1000
    moves = {(x.shape, target) for x, target in zip(source, shardings, strict=True)}
    assert len(moves) == 8
    job = job_of(rows(source, shardings), str, copies=False)
    assert sum(map(len, job.moves.values())) == 1000
    assert len(job.moves) == 8
    jax.block_until_ready(through_programs(source[:200], shardings[:200]))
    moved = []

    def move_others():
        moved.extend(through_programs(source[200:], shardings[200:]))

    # Whatever the 8 moves compiled, the other 800 leaves compile nothing.
    assert count_compilations(move_others) == 0
    expected = [np.asarray(x) for x in source[200:]]
    assert_equal(moved, expected)


def moves_of_all_kinds():
    """A tree that takes every way, and where it goes to."""
    key = jax.random.key(0, impl="rbg")
    rows = sharding((8,), "a")
    columns = sharding((8,), None, "a")
    replicas = sharding((8,))
    tree = {
        "steps": jax.device_put(host((96, 64)), rows),
        "smaller": jax.device_put(host((96, 64)), rows),
        "bits": jax.device_put(host((24, 16)).astype(jnp.bfloat16), rows),
        "empty": jax.device_put(host((0, 8)), columns),
        "scalar": jax.device_put(host(()), replicas),
        "kind": jax.device_put(host((24, 16)), rows),
        "numpy": host((8,)),
        "keys": jax.device_put(jax.random.split(key, 8), rows),
    }
    two_replicas = sharding((2,), order=(5, 1))
    on_six_devices = sharding((2, 3), "b", "a", order=(5, 1, 3, 0, 7, 2))
    expected = dict.fromkeys(tree, two_replicas)
    expected["steps"] = sharding((2, 4), "b", "a")
    expected["kind"] = sharding((4,), "a", kind="unpinned_host")
    expected["smaller"] = on_six_devices
    expected["bits"] = on_six_devices
    return tree, expected


def surroundings():
    return jax.transfer_guard("disallow"), jax.transfer_guard("log"), jax.disable_jit()


@both_ways
@pytest.mark.parametrize(
    "around, limit_bytes", [(0, None), (1, 13000), (2, None), (2, 13000)]
)
def test_a_move_is_what_was_asked_for(move, around, limit_bytes, capfd):
    tree, target = moves_of_all_kinds()

    def numbers(tree):
        return tree | {"keys": jax.random.key_data(tree["keys"])}

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
    # Shards of the CPU's devices are copied where they lie.
    with jax.transfer_guard(guard):
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
    source = {}
    expected = {}
    for number in range(4):
        values = host((8, 8), number)
        source[f"r{number}"] = jax.device_put(values, replicas)
        source[f"p{number}"] = jax.device_put(values, pairs)
        one_device = NamedSharding(mesh((1,), order=(4 + number,)), P())
        expected[f"r{number}"] = one_device
        expected[f"p{number}"] = one_device
    return source, expected


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
        devices = move.assembly.devices
        for (sender, receiver), size in move.assembly.parts.links.items():
            pair = (devices[sender].id, devices[receiver].id)
            links[pair] += size * len(places)
    assert links == reshard_plan.links
    doubled_rows = rows([source, source], [expected, expected])
    doubled_job = job_of(doubled_rows, str, copies=False)
    assert len(doubled_job.moves) == len(job.moves) == 8
    values = {name: host((8, 8), int(name[1])) for name in source}
    for limit in (None, 2000):
        tree = through_programs(source, expected, memory_limit_bytes=limit)
        assert_equal(tree, values)
    assert count_compilations(lambda: through_programs(source, expected)) == 0


@pytest.mark.parametrize(
    "make",
    [lambda: jnp.ones((8,)), lambda: jnp.asarray(2.0), lambda: jax.random.key(0)],
)
def test_an_array_is_committed_to_where_it_was_sent(make):
    x = make()
    assert not x.committed
    on_first_device = NamedSharding(mesh((1,), order=(0,)), P())
    on_fourth_device = NamedSharding(mesh((1,), order=(3,)), P())
    for dst in (x.sharding, on_first_device, on_fourth_device):
        (moved,) = reshard([x], dst)
        assert moved.committed
        assert moved.sharding == dst
        assert moved.dtype == x.dtype
        assert getattr(moved, "weak_type", None) == getattr(x, "weak_type", None)
        assert bool((moved == x).all())


def test_a_custom_layout_becomes_the_default_one():
    turned = Format(Layout((1, 0)), sharding((8,), "a"))
    x = jax.device_put(host((16, 8)), turned)
    columns = sharding((8,), None, "a")
    moved = reshard(x, columns)
    placed = jax.device_put(x, columns)
    assert x.format.layout.major_to_minor == (1, 0)
    assert moved.format == placed.format  # pyright: ignore[reportAttributeAccessIssue]
    for tree, form, match in (
        (x, turned, "`dst` is a Format, .* which is no sharding; use"),
        ({"a": x}, {"a": turned}, "Format at `a`"),
    ):
        with pytest.raises(LeafTypeError, match=match):
            reshard(tree, form)
