import functools as ft
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from benchmarks._programs import lowered, steps_program
from shardfx._ground.errors import (
    LeafTypeError,
    MeshError,
    MoveError,
    PlanMismatchError,
    SpecError,
)
from shardfx._plan.planner import plan
from shardfx._reshard.flight import Window, carry_out
from shardfx._reshard.move import move_of
from shardfx._reshard.mover import job_of, reshard, resharded
from shardfx._reshard.reshard_planning import plan_reshard
from shardfx._rules.path_rules import PathRules
from shardfx.topology._mesh import MeshSpec


# Live arrays take the programs that accelerators take, where the CPU would copy in its
# memory.
through_programs = ft.partial(resharded, copies=False)
both_ways = pytest.mark.parametrize(
    "move", [reshard, through_programs], ids=["copies", "programs"]
)


def mesh(sizes, names="ab", order=None, **types):
    devices = np.asarray(jax.devices())[
        np.arange(np.prod(sizes)) if order is None else list(order)
    ]
    return Mesh(devices.reshape(sizes), tuple(names[: len(sizes)]), **types)


def sharding(sizes, *entries, order=None, kind=None):
    return NamedSharding(mesh(sizes, order=order), P(*entries), memory_kind=kind)


def host(shape, start=0, dtype=np.float32):
    return (start + np.arange(np.prod(shape))).reshape(shape).astype(dtype)


def state(layers=3):
    return {
        "layers": [
            {"w": host((24, 16), i), "b": host((24,), i)} for i in range(layers)
        ],
        "step": host(()),
        "name": "model",
    }


def put(tree, target):
    return jax.tree.map(
        lambda x: (
            jax.device_put(x, target) if isinstance(x, np.ndarray) and x.ndim else x
        ),
        tree,
    )


def assert_equal(tree, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a), b), tree, expected
    )


def targets(tree, matrix, vector):
    def target(x):
        return (
            None
            if isinstance(x, str) or not x.ndim
            else matrix
            if x.ndim == 2
            else vector
        )

    return jax.tree.map(target, tree)


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
    target = sharding((4,), "a", order=(7, 6, 1, 0))
    other = sharding((2,), "a")
    assert {x.sharding for x in jax.tree.leaves(reshard(source, target))} == {target}
    moved = reshard(source, {"p": target, "q": other})
    assert {x.sharding for x in jax.tree.leaves(moved["p"])} == {target}
    assert moved["q"].sharding == other
    half = reshard(source, {"p": None, "q": other})
    assert half["p"]["w"] is source["p"]["w"]
    assert half["q"].sharding == other


def test_rows_of_a_replicated_array_share_its_memory():
    x = jax.device_put(
        np.arange(64 * 64, dtype=np.float32).reshape(64, 64),
        NamedSharding(mesh((8,)), P()),
    )
    first = np.asarray(x).__array_interface__["data"][0]
    moved = reshard(x, NamedSharding(mesh((8,)), P("a")))
    where = [
        shard.data.unsafe_buffer_pointer() - first for shard in moved.addressable_shards
    ]
    assert where == [number * 8 * 64 * 4 for number in range(8)]
    jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    np.testing.assert_array_equal(moved, np.arange(64 * 64).reshape(64, 64))


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
    assert (
        count_compilations(
            lambda: moved.extend(through_programs(source[200:], shardings[200:]))
        )
        == 0
    )
    assert_equal(moved, [np.asarray(x) for x in source[200:]])


def moves_of_all_kinds():
    """A tree that takes every way, and where it goes to."""
    keys = jax.device_put(
        jax.random.split(jax.random.key(0, impl="rbg"), 8), sharding((8,), "a")
    )
    tree = {
        "steps": jax.device_put(host((96, 64)), sharding((8,), "a")),
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
    expected = dict.fromkeys(tree, sharding((2,), order=(5, 1)))
    expected |= {
        "steps": sharding((2, 4), "b", "a"),
        "kind": sharding((4,), "a", kind="unpinned_host"),
    }
    expected |= dict.fromkeys(
        ("smaller", "bits"), sharding((2, 3), "b", "a", order=(5, 1, 3, 0, 7, 2))
    )
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


@both_ways
def test_donation_frees_what_moved_and_only_that(move):
    source = put(state(), sharding((8,), "a"))
    stays = jax.device_put(host((8,)), sharding((8,), "a"))
    moved = move(
        {"s": source, "t": stays},
        {
            "s": targets(source, sharding((2, 4), "b", "a"), None),
            "t": sharding((8,), "a"),
        },
        donate=True,
    )
    assert all(
        layer["w"].is_deleted() and not layer["b"].is_deleted()
        for layer in source["layers"]
    )
    assert moved["t"] is stays
    assert not stays.is_deleted()
    assert_equal(moved["s"], state())


@both_ways
def test_an_array_that_is_in_the_tree_twice_is_donated_once(move):
    shared = jax.device_put(host((8, 8)), sharding((8,), "a"))
    first = sharding((2, 4), "b", "a")
    second = sharding((2, 4), None, "b")
    moved = move(
        {"a": shared, "b": shared, "c": shared},
        {"a": first, "b": second, "c": first},
        donate=True,
    )
    assert moved["a"] is moved["c"]
    assert shared.is_deleted()
    assert_equal(moved, dict.fromkeys("abc", host((8, 8))))


@both_ways
@pytest.mark.parametrize(
    "source, make_sharding",
    [
        (lambda: sharding((8,), "a"), lambda: sharding((8,), "a")),
        (lambda: sharding((8,), "a"), lambda: NamedSharding(mesh((8,), "z"), P("z"))),
        (lambda: sharding((8,)), lambda: sharding((8,), order=range(7, -1, -1))),
    ],
    ids=["in place", "other names", "replicas in another order"],
)
def test_an_array_that_also_stays_is_not_donated(move, source, make_sharding):
    shared = jax.device_put(host((8, 8)), source())
    make_sharding = make_sharding()
    expected = {
        "moves": sharding((2, 4), "b", "a"),
        "held": make_sharding,
        "parked": sharding((8,), "a", kind="pinned_host"),
    }
    moved = move(dict.fromkeys(expected, shared), expected, donate=True)
    assert_equal(moved, dict.fromkeys(expected, host((8, 8))))
    assert moved["held"].sharding == make_sharding


def least_in(error):
    (least,) = re.findall(r"pass `memory_limit_bytes=(\d+)` or more", str(error.value))
    return int(least)


def test_an_unreachable_limit_is_an_error_with_one_that_works():
    source = put(
        state() | {"v": host((16, 8)), "fits": host((8,))}, sharding((8,), "a")
    )
    expected = targets(source, sharding((2, 4), "b", "a"), sharding((2, 4), "b"))
    expected["fits"] = sharding((8,), "a")
    with pytest.raises(
        MoveError,
        match=(
            r"leaf `layers/0/w`, float32\[24, 16\], needs 960 bytes beside its source"
            r" and target, even in the "
            r"smallest parts; `memory_limit_bytes=100` is too little for it and 6 more."
            r" Nothing was moved"
        ),
    ) as error:
        through_programs(source, expected, memory_limit_bytes=100, donate=True)
    assert error.value.moved == {}
    assert not any(
        x.is_deleted() for x in jax.tree.leaves(source) if isinstance(x, jax.Array)
    )
    least = least_in(error)
    with pytest.raises(MoveError, match="is too little for it and 2 more"):
        through_programs(source, expected, memory_limit_bytes=least - 1)
    moved = through_programs(source, expected, memory_limit_bytes=least, donate=True)
    assert_equal(moved["layers"], state()["layers"])
    assert moved["layers"][0]["w"].sharding == expected["layers"][0]["w"]
    assert source["v"].is_deleted()


@pytest.mark.parametrize(
    "shape, source, target",
    [
        (
            (16, 16),
            lambda: sharding((8,), "a"),
            lambda: sharding((2, 4), "b", "a", kind="pinned_host"),
        ),
        ((8,), lambda: sharding((8,), "a"), lambda: sharding((2, 4), "a")),
        (
            (16, 16),
            lambda: sharding((8,), "a", kind="pinned_host"),
            lambda: sharding((4,), "a"),
        ),
        (
            (16, 16),
            lambda: sharding((4,), "a"),
            lambda: jax.sharding.SingleDeviceSharding(jax.devices()[5]),
        ),
    ],
)
@pytest.mark.parametrize("number", [np.array, jnp.int32, int], ids=str)
def test_an_error_says_within_which_limit_an_array_moves(shape, source, target, number):
    x = jax.device_put(host(shape), source())
    with pytest.raises(
        MoveError,
        match=r"^the array, float32.*even in the smallest parts; .*=10` is too",
    ) as error:
        through_programs(x, target(), memory_limit_bytes=number(10))
    with pytest.raises(MoveError, match="Nothing was moved"):
        through_programs(x, target(), memory_limit_bytes=least_in(error) - 1)
    np.testing.assert_array_equal(
        through_programs(x, target(), memory_limit_bytes=number(least_in(error))), x
    )


@pytest.mark.parametrize(
    "source, target",
    [
        (lambda: sharding((8,), "a"), lambda: sharding((2, 4), "b", "a")),
        (lambda: sharding((2, 4), "a", "b"), lambda: sharding((2, 4), "b", "a")),
        (lambda: sharding((2, 4), "b", "a"), lambda: sharding((8,))),
        (lambda: sharding((8,)), lambda: sharding((8,), None, "a")),
    ],
)
@pytest.mark.parametrize("parts", [1, 3, 10])
def test_the_told_peak_covers_what_programs_allocate(source, target, parts):
    shape = (480, 960)
    dtype = np.dtype("float32")
    move = move_of(shape, dtype, source(), target(), copies=False)
    chunks = None if parts == 1 else move.chunks_of(parts)
    steps: Any = steps_program(shape, dtype, source(), target())
    allocated = temp_bytes(
        lowered(ft.partial(steps, chunks=chunks), shape, dtype, source(), target())
    )
    devices = len(move.src.device_set)
    needed = move.extra_bytes if chunks is None else move.bytes_in(chunks)
    # The pointers of a tuple and scalars are allocations, but no copies of the array.
    assert 0 <= allocated <= needed // devices + 4096


def temp_bytes(lowered):
    return lowered.compile().memory_analysis().temp_size_in_bytes


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
    assert (
        len(
            job_of(
                rows([source, source], [expected, expected]), str, copies=False
            ).moves
        )
        == len(job.moves)
        == 8
    )
    for limit in (None, 2000):
        assert_equal(
            through_programs(source, expected, memory_limit_bytes=limit),
            {k: host((8, 8), int(k[1])) for k in source},
        )
    assert count_compilations(lambda: through_programs(source, expected)) == 0


@pytest.mark.parametrize("donate", [False, True])
def test_a_failure_in_the_middle_says_what_moved(donate):
    source = put({name: host((8,)) for name in "abcd"}, sharding((8,), "a"))
    source["c"].delete()
    text = (
        "the sources of these were donated"
        if donate
        else "the tree itself is untouched"
    )
    with pytest.raises(
        MoveError,
        match=(
            r"stopped at leaf `c` \(RuntimeError: Array has been deleted.* after 2 of 4"
            r" leaves: `a`, `b`; "
        )
        + text,
    ) as caught:
        reshard(source, sharding((4,), "a"), donate=donate)
    assert_equal(caught.value.moved, {"a": host((8,)), "b": host((8,))})
    np.testing.assert_array_equal(source["d"], host((8,)))
    assert source["a"].is_deleted() == donate


@pytest.mark.parametrize(
    "make_target, error, message",
    [
        (
            lambda: sharding((3,), "a"),
            SpecError,
            r"`w`: dim 0 of shape \(8,\) does not divide .* pad it to 9",
        ),
        (
            lambda: sharding((4,), None, "a"),
            SpecError,
            "`w`: .* more entries than the shape",
        ),
        (lambda: P("a"), LeafTypeError, "`dst` .* at `w`, .*, which is no sharding"),
        (
            lambda: NamedSharding(MeshSpec({"a": 4}).abstract(), P("a")),
            MeshError,
            "`w`: the target .* without devices; use `plan.on",
        ),
    ],
)
def test_errors_come_before_anything_moves(make_target, error, message):
    source = put({"v": host((8,)), "w": host((8,))}, sharding((8,), "a"))
    with pytest.raises(error, match=message):
        reshard(source, {"v": sharding((4,), "a"), "w": make_target()}, donate=True)
    assert not source["v"].is_deleted()


@pytest.mark.parametrize(
    "limit, error, message",
    [
        (
            "1GB",
            LeafTypeError,
            (
                "must be a whole number, not '1GB' of type str; give a number of bytes,"
                " such as"
            ),
        ),
        (
            -1,
            MoveError,
            (
                "`memory_limit_bytes=-1` is negative. Nothing was moved; give a number"
                " of bytes, such as"
            ),
        ),
    ],
)
def test_a_memory_limit_that_is_none(limit, error, message, as_users_run_it):
    with pytest.raises(error, match=message):
        reshard(
            jax.device_put(host((8,)), sharding((8,), "a")),
            sharding((8,), "a"),
            memory_limit_bytes=limit,
        )


def test_sums_that_are_not_taken_yet_are_an_error():
    """A move of their summands would read one device's for the sum."""
    end = mesh((2, 4), axis_types=(AxisType.Explicit,) * 2)
    remaining, right = (
        jax.device_put(host((8, 8)), NamedSharding(end, spec))
        for spec in (P("a", "b"), P("b"))
    )
    unreduced = NamedSharding(end, P("a", unreduced=frozenset({"b"})))
    reduced = NamedSharding(end, P("a"))
    sums = jax.jit(lambda x, y: jnp.einsum("ij,jk->ik", x, y, out_sharding=unreduced))(
        remaining, right
    )
    plain = jax.device_put(host((8, 8)), reduced)
    message = (
        r"leaf `w`: .* has the unreduced axes \['b'\].*; add the array up first with"
        r" `jax.sharding.reshard\(x, "
    )
    for move in (reshard, plan_reshard):
        for source, target in (
            (sums, reduced),
            (plain, unreduced),
            (sums, sharding((4,), "a")),
        ):
            with pytest.raises(SpecError, match=message):
                move({"w": source}, {"w": target})
        with pytest.raises(SpecError, match=message):
            move({"w": sums}, {"w": sums.sharding}, lost=[gone()])
    with pytest.raises(SpecError, match=message):
        reshard({"w": host((8, 8))}, {"w": unreduced})
    assert reshard(sums, sums.sharding) is sums
    assert plan_reshard(sums, sums.sharding).in_place == ("",)
    assert_equal(
        reshard(jax.sharding.reshard(sums, reduced), sharding((4,), "a")),
        host((8, 8)) @ host((8, 8)),
    )


def test_another_tree_is_an_error():
    source = {"v": jax.device_put(host((8,)), sharding((8,), "a"))}
    with pytest.raises(PlanMismatchError, match="`dst` is no prefix of the tree"):
        reshard(source, {"w": sharding((8,), "a")})
    with pytest.raises(PlanMismatchError, match="the plan has no `v`"):
        reshard(
            source,
            plan({"w": host((8,))}, mesh((8,)), paths=PathRules([("w", P("a"))])),
        )
    with pytest.raises(PlanMismatchError, match="has no devices"):
        reshard(
            source, plan(source, MeshSpec({"a": 8}), paths=PathRules([("v", P("a"))]))
        )


def gone():
    return jax.devices()[0]


@pytest.mark.parametrize(
    "lost, message",
    [
        (
            lambda: [0, 1],
            (
                r"`lost` holds 0, of type int, not a device; give an iterable of jax"
                r" devices, such as `lost="
            ),
        ),
        (
            lambda: gone(),
            (
                "`lost` must be of type Iterable, not .*Device; give an iterable of jax"
                " devices, such as"
            ),
        ),
        (lambda: [gone(), {gone()}], "`lost` holds .*, of type set, not a device"),
    ],
)
def test_lost_must_be_devices(lost, message, as_users_run_it):
    source = jax.device_put(host((8,)), sharding((8,)))
    target = sharding((8,), "a")
    for move in (reshard, plan_reshard):
        with pytest.raises(LeafTypeError, match=message):
            move(source, target, lost=lost())


def test_lost_may_be_any_iterable_of_devices():
    tree = [struct((8,), sharding((8,))), struct((16,), sharding((8,)))]
    for lost in (iter, frozenset, np.array):
        move = plan_reshard(tree, sharding((8,), "a"), lost=lost([gone()]))
        assert 0 not in [sender for sender, _ in move.links]
        assert move.wire_bytes
        arrays = jax.tree.map(lambda x: jax.device_put(host(x.shape), x.sharding), tree)
        assert_equal(
            reshard(arrays, sharding((8,), "a"), lost=lost([gone()])),
            [host((8,)), host((16,))],
        )


# Memory kinds


def test_offloading_by_regex_and_back():
    source = put(state(), sharding((8,), "a"))
    sharding_plan = plan(
        source,
        mesh((8,)),
        paths=PathRules([("w|b", P("a")), ("step", P())]),
        memory_kinds=[("w$", "pinned_host")],
    )
    there = reshard(source, sharding_plan)
    assert [layer["w"].sharding.memory_kind for layer in there["layers"]] == [
        "pinned_host"
    ] * 3
    assert there["layers"][0]["b"] is source["layers"][0]["b"]
    assert_equal(there, state())
    back = reshard(
        there,
        plan(source, mesh((8,)), paths=PathRules([("w|b", P("a")), ("step", P())])),
        donate=True,
    )
    assert back["layers"][0]["w"].sharding.memory_kind != "pinned_host"
    assert there["layers"][0]["w"].is_deleted()
    assert_equal(back, state())


def test_offloads_are_bounded_in_flight():
    away = sharding((8,), "a", kind="pinned_host")
    source = [jax.device_put(host((64,), i), sharding((8,), "a")) for i in range(40)]
    move = move_of((64,), np.dtype("float32"), source[0].sharding, away)
    window = Window(100)
    seen = []
    for x in source:
        window.make_room(move.extra_bytes)
        window.add(carry_out(move, x), move.target_bytes)
        seen.append((window.bytes, len(window.pending)))
    assert max(size for size, _ in seen) <= 100 + 32
    assert max(count for _, count in seen) > 1
    assert_equal(
        reshard(source, away, memory_limit_bytes=100),
        [host((64,), i) for i in range(40)],
    )


# The result is exactly what was asked for


def every_end():
    """The same eight devices under names, axis types and orders that differ, some with
    equal shards.
    """
    auto = AxisType.Auto
    explicit = AxisType.Explicit
    specs = P("a", "b"), P("a"), P(), P("a", None)
    for types, count in (
        ((auto, auto), 4),
        ((explicit, explicit), 2),
        ((auto, explicit), 1),
    ):
        device_mesh = mesh((2, 4), axis_types=types)
        yield from (NamedSharding(device_mesh, spec) for spec in specs[:count])
    yield from (
        NamedSharding(mesh((2, 4), "cd"), spec) for spec in (P("c", "d"), P("d"), P())
    )
    yield NamedSharding(mesh((8,), "z", order=range(7, -1, -1)), P())
    yield NamedSharding(mesh((2, 4), order=(4, 5, 6, 7, 0, 1, 2, 3)), P("a"))


def pointers(array):
    return {
        shard.device: shard.data.unsafe_buffer_pointer()
        for shard in array.addressable_shards
    }


@both_ways
@pytest.mark.parametrize("ours", range(len(list(every_end()))))
def test_a_donated_source_is_gone_unless_it_is_shared(move, ours):
    layouts = list(every_end())
    for theirs, dst in enumerate(layouts):
        x = jax.make_array_from_callback(
            (8, 8), layouts[ours], lambda index: host((8, 8))[index].copy()
        )
        idle = move_of((8, 8), x.dtype, layouts[ours], dst).idle
        before = pointers(x)
        (leaf,) = plan_reshard(x, dst).leaves
        same = x.sharding.devices_indices_map((8, 8)) == dst.devices_indices_map((8, 8))
        assert same == idle == leaf.idle, (layouts[ours], dst)
        moved = move(x, dst, donate=True)
        assert (
            moved.sharding == dst
            and moved.sharding.mesh == dst.mesh
            and moved.committed
        ), theirs
        assert x.is_deleted() != idle
        assert not idle or pointers(moved) == before
        np.testing.assert_array_equal(moved, host((8, 8)))


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
    assert x.format.layout.major_to_minor == (1, 0) and moved.format == put_there.format  # pyright: ignore[reportAttributeAccessIssue]
    for form, match in (
        (turned, "`dst` is a Format, .* which is no sharding; use"),
        ({"a": turned}, "Format at `a`"),
    ):
        with pytest.raises(LeafTypeError, match=match):
            reshard(x if form is turned else {"a": x}, form)


@pytest.mark.skipif(
    jax.__version_info__ < (0, 10),
    reason="JAX 0.9 cannot end a jitted CPU program in host memory",
)
def test_offloading_inside_jit():
    src = sharding((2, 4), "a")
    dst = sharding((2, 4), "b", kind="pinned_host")
    moved = jax.jit(lambda x: reshard(x, dst, src=src))(
        jax.device_put(host((8, 8)), src)
    )
    assert moved.sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(moved, host((8, 8)))


# plan_reshard


def struct(shape, target, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=target)


def test_a_plan_names_what_needs_nothing_and_counts_the_rest():
    src = {
        "w": struct((16, 8), sharding((8,), "a")),
        "b": struct((16,), sharding((8,), "a")),
    }
    dst = {
        "w": struct((16, 8), sharding((8,), None, "a")),
        "b": struct((16,), sharding((8,), "a")),
    }
    move = plan_reshard(src, dst)
    assert move.in_place == ("b",)
    assert move.moves == 1
    (leaf,) = [leaf for leaf in move.leaves if leaf.path == "w"]
    assert [step.kind for step in leaf.steps] == ["all_to_all"]
    assert list(move.steps) == ["w"]
    # Each device has 64 bytes, keeps an eighth and gets the rest.
    assert move.wire_bytes == move.lower_bound_bytes == 56
    assert move.peak_bytes == leaf.peak_bytes + 8 == 136
    text = str(move)
    assert "all_to_all" in text
    assert "nothing to do for 1 array: b" in text
    # These devices are this process's CPU; meshes without devices are taken to be what
    # they will be.
    assert leaf.copied
    assert "1 array takes no steps here, where this CPU plays all devices" in text
    src = MeshSpec({"a": 8}).abstract()
    dst = P(None, "a")
    bare = plan_reshard(
        struct((16, 8), NamedSharding(src, P("a"))),
        struct((16, 8), NamedSharding(src, dst)),
    )
    assert not bare.leaves[0].copied
    assert "take no steps" not in str(bare)
    assert bare.steps.keys() == {""}


def test_rows_of_the_table_tell_layers_of_different_shapes_apart():
    source = sharding((8,), "a")
    target = sharding((2, 4), "b", "a")
    shapes = ((16, 8), (8, 16))
    mlp = {
        "layers": [
            {"w": jax.ShapeDtypeStruct(shape, np.float32, sharding=source)}
            for shape in shapes
        ]
    }
    tree = {"blocks": [mlp] * 3}
    lines = str(plan_reshard(tree, jax.tree.map(lambda _: target, tree))).splitlines()
    assert [line.split("  ")[0] for line in lines[1:3]] == [
        "blocks/{0..2}/layers/0/w",
        "blocks/{0..2}/layers/1/w",
    ]


def test_a_plan_between_device_sets_shows_tiles_and_links():
    src = struct((12, 8), sharding((3,), "a"))
    move = plan_reshard(src, struct((12, 8), sharding((2,), "a", order=(6, 7))))
    (leaf,) = move.leaves
    assert leaf.how == "tiles"
    assert leaf.links == move.links
    assert move.links == {(0, 6): 128, (1, 6): 64, (1, 7): 64, (2, 7): 128}
    assert move.wire_bytes == 192
    assert "0 -> 6: 128 B" in str(move)
    single = jax.sharding.SingleDeviceSharding(jax.devices()[5])
    assert plan_reshard(
        struct((8,), single), struct((8,), sharding((2,), "a"))
    ).links == {(5, 0): 16, (5, 1): 16}


def test_plans_without_devices_agree_with_plans_on_devices():
    tree = {
        "w": jax.ShapeDtypeStruct((24, 16), jnp.float32),
        "b": jax.ShapeDtypeStruct((24,), jnp.bfloat16),
    }
    tree |= {name: jax.ShapeDtypeStruct((8, 8), jnp.float32) for name in "pqrs"}
    # From replicas, whose senders are balanced over the tree.
    rules = PathRules([("w", P("x", "y")), ("b", P("x")), (".*", P())])
    for small in (
        {"x": 2, "y": 4},
        {"x": 3, "y": 2},
        {"x": 6, "y": 1},
        {"x": 4, "y": 2},
    ):
        plans = [
            plan(tree, MeshSpec(axes), paths=rules)
            for axes in ({"x": 2, "y": 2}, small)
        ]
        live = [end.on(end.mesh.build(jax.devices()[: end.mesh.size])) for end in plans]
        bare = plan_reshard(*plans)
        there = plan_reshard(*live)
        for field in (
            "wire_bytes",
            "lower_bound_bytes",
            "links",
            "peak_bytes",
            "in_place",
            "moves",
        ):
            assert getattr(bare, field) == getattr(there, field), field


def test_plans_on_several_slices_say_what_crosses():
    tree = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
    specs = P(("slices", "chips")), P(None, "chips")
    layouts = {}
    for slices in (1, 2):
        target = MeshSpec({"slices": 2, "chips": 4}, dcn={"slices": slices})
        layouts[slices] = [
            plan(tree, target, paths=PathRules([("w", spec)])) for spec in specs
        ]
    apart = plan_reshard(*layouts[2])
    together = plan_reshard(*layouts[1])
    # A slice holds half of the array, each device of it takes in an eighth of the other
    # half: 64 * 64 * 4 / 2 / 4.
    assert apart.leaves[0].dcn_bytes == apart.dcn_bytes == 64 * 64 * 4 // 2 // 4
    assert together.dcn_bytes == 0
    assert together.wire_bytes <= apart.wire_bytes
    assert "at the peak; 2 KiB of what enters come from other slices" in str(apart)
    assert "other slices" not in str(together)
    assert (
        plan_reshard(layouts[2][0], layouts[1][1].structs).dcn_bytes == apart.dcn_bytes
    )


def test_plans_and_trees_can_be_mixed():
    tree = {"w": jax.device_put(host((8, 8)), sharding((8,), "a")), "n": "no array"}
    sharding_plan = plan(tree, mesh((8,)), paths=PathRules([("w", P(None, "a"))]))
    expected = plan_reshard(tree, sharding_plan)
    assert (
        expected.wire_bytes
        == plan_reshard(tree, {"w": sharding_plan.shardings["w"], "n": None}).wire_bytes
        > 0
    )
    assert plan_reshard(sharding_plan, tree).wire_bytes == expected.wire_bytes


ENDS = {
    "rows": lambda: sharding((8,), "a"),
    "columns": lambda: sharding((8,), None, "a"),
    "grid": lambda: sharding((2, 4), "b", "a"),
    "replicas": lambda: sharding((2, 4)),
    "half": lambda: sharding((2, 2), "b", "a"),
    "turned": lambda: sharding((8,), "a", order=(7, 6, 5, 4, 3, 2, 1, 0)),
    "other names": lambda: NamedSharding(mesh((8,), "z"), P("z")),
    "hosted rows": lambda: sharding((8,), "a", kind="pinned_host"),
    "hosted grid": lambda: sharding((2, 4), "b", "a", kind="pinned_host"),
    "hosted half": lambda: sharding((2, 2), "b", "a", kind="pinned_host"),
    "alone": lambda: sharding((1,)),
    "single": lambda: jax.sharding.SingleDeviceSharding(jax.devices()[0]),
}


@pytest.mark.parametrize("ours", list(ENDS))
@pytest.mark.parametrize("theirs", list(ENDS))
def test_a_plan_says_how_a_move_is_made(ours, theirs):
    src = ENDS[ours]()
    dst = ENDS[theirs]()
    shape = (16, 16)
    move = move_of(shape, np.dtype("float32"), src, dst, copies=False)
    (leaf,) = plan_reshard(struct(shape, src), struct(shape, dst)).leaves
    assert leaf.how == move.how
    assert leaf.copied == (move.how == "steps")
    # Without programs of steps the CPU copies, and what need not move does not either.
    copied = move_of(shape, np.dtype("float32"), src, dst)
    assert copied.how == {"steps": "tiles"}.get(move.how, move.how)
    assert leaf.steps == (move.plan.steps if move.plan is not None else ())
    assert leaf.source_bytes == move.source_bytes
    assert leaf.target_bytes == move.target_bytes
    # What is in the devices' memory is counted, and beside it at most what the limit is
    # checked against.
    total = sum(leaf.held_bytes)
    assert total - min(leaf.held_bytes) <= leaf.peak_bytes <= total + move.extra_bytes
    bare = [
        NamedSharding(
            end.mesh.abstract_mesh,
            end.spec,
            memory_kind="pinned_host" if "hosted" in name else None,
        )
        for name, end in ((ours, src), (theirs, dst))
        if isinstance(end, NamedSharding) and name != "turned"
    ]
    if len(bare) == 2 and "other names" not in (ours, theirs):
        (other,) = plan_reshard(struct(shape, bare[0]), struct(shape, bare[1])).leaves
        assert other.how == leaf.how
        assert other.held_bytes == leaf.held_bytes
        assert other.peak_bytes == leaf.peak_bytes


def test_host_memory_is_counted_apart():
    rows = sharding((8,), "a")
    away = sharding((8,), "a", kind="pinned_host")
    out = plan_reshard(
        [struct((64, 8), rows)] * 4,
        [struct((64, 8), away)] * 3 + [struct((64, 8), rows)],
    )
    shard = 256
    assert out.peak_bytes == 4 * shard
    assert out.host_bytes == 3 * shard
    back = plan_reshard([struct((64, 8), away)] * 4, [struct((64, 8), rows)] * 4)
    assert back.peak_bytes == 4 * shard
    assert back.host_bytes == 4 * shard
    # The layout changes on the devices, to which the source is copied: one array's at a
    # time.
    turned = plan_reshard(
        [struct((64, 8), away)] * 4, [struct((64, 8), sharding((8,), None, "a"))] * 4
    )
    assert turned.peak_bytes == 5 * shard
    assert turned.host_bytes == 4 * shard


def test_plans_count_the_data_of_typed_keys():
    keys = jax.device_put(jax.random.split(jax.random.key(0), 16), sharding((8,), "a"))
    (leaf,) = plan_reshard(keys, sharding((4,), "a")).leaves
    assert leaf.how == "tiles"
    assert leaf.target_bytes == 4 * 2 * 4


def test_planned_losses_are_listed():
    move = plan_reshard(
        struct((8,), sharding((8,), "a")),
        struct((8,), sharding((2,), "a")),
        lost=jax.devices()[3:4],
    )
    assert move.missing == {"": (((3, 4),),)}
    assert "lost: `` [3:4]" in str(move)
    source = {"v": jax.device_put(host((8,)), sharding((8,), "a"))}
    message = (
        r"`v`: 1 of 8 elements are on lost devices only, the first of them \[3:4\];"
        r" load it from a checkpoint"
    )
    with pytest.raises(MeshError, match=message):
        reshard(source, sharding((2,), "a"), lost=jax.devices()[3:4], donate=True)
    assert not source["v"].is_deleted()


def test_plans_of_different_trees_are_an_error():
    a = struct((8,), sharding((8,), "a"))
    b = struct((16,), sharding((8,), "a"))
    with pytest.raises(
        PlanMismatchError,
        match=r"leaf `x` is float32\[8\] in `src` and float32\[16\] in `dst`",
    ):
        plan_reshard({"x": a}, {"x": b})
    small = struct((8,), sharding((4,), "a"), jnp.bfloat16)
    message = (
        r"leaf `x` is float32\[8\] in `src` and bfloat16\[8\] in `dst`; a move changes"
        r" neither"
    )
    rules = PathRules([(".*", P("a"))])
    for target in ({"x": small}, plan({"x": small}, mesh((4,)), paths=rules)):
        with pytest.raises(PlanMismatchError, match=message):
            plan_reshard({"x": a}, target)
    with pytest.raises(PlanMismatchError, match="`y` is only in one of them"):
        plan_reshard(
            plan({"x": a, "y": a}, mesh((8,)), paths=rules),
            plan({"x": a}, mesh((8,)), paths=rules),
        )
    # A tree that is one array has no path to name.
    for tree, name in ((lambda x: {"x": x}, "leaf `x`"), (lambda x: x, "the array")):
        with pytest.raises(LeafTypeError, match=f"^{name} of `src` has no sharding"):
            plan_reshard(tree(jax.ShapeDtypeStruct((8,), jnp.float32)), tree(a))
        for move in (reshard, plan_reshard):
            with pytest.raises(SpecError, match=rf"^{name}: dim 0 of shape \(8,\)"):
                move(tree(jax.device_put(host((8,)), a.sharding)), sharding((3,), "a"))
