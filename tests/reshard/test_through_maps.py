"""`reshard` with a map: bitwise what NumPy makes of whole arrays, over one device set,
others, and in programs.
"""

import collections
import gc
import itertools as it
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding
from mapped_trees import MESHES, equal, mesh, placed
from maps import maps, same, written
from moves import both_ways, through_programs

import shardfx
from shardfx import From, MeshSpec, PathRules, TreeMap, plan_reshard, reshard
from shardfx._reshard.pieces.exchange import program
from shardfx.errors import LeafTypeError, MapError, MeshError, MoveError


def drawn(draw, shape, where):
    used = set()
    entries = []
    for _ in shape:
        entry = draw(st.sampled_from([None, "a", "b", ("b", "a")]))
        names = {*((entry,) if isinstance(entry, str) else entry or ())}
        entries.append(None if names & used else entry)
        used |= names
    decision = shardfx.correct(P(*entries), shape, MeshSpec.of(where))
    spec = decision.spec
    return NamedSharding(where, spec)


def target_of(draw, whole, where):
    return {
        path: jax.ShapeDtypeStruct(
            array.shape, array.dtype, sharding=drawn(draw, array.shape, where)
        )
        for path, array in whole.items()
    }


@pytest.mark.parametrize(
    "source,there",
    [("all", "all"), ("first", "last"), ("six", "last"), ("first", "six")],
)
@settings(max_examples=40, deadline=None)
@given(case=maps(), data=st.data())
def test_moves_make_what_numpy_makes(source, there, case, data):
    tree_map, arrays = written(case)
    whole = tree_map.apply(arrays)
    tree = {
        path: placed(leaf, drawn(data.draw, leaf.shape, mesh(*MESHES[source])))
        for path, leaf in arrays.items()
    }
    target = target_of(data.draw, whole, mesh(*MESHES[there]))
    equal(reshard(tree, target, map=tree_map), whole, target)
    # Programs take seconds to compile.
    if source != "six" and data.draw(st.integers(0, 9)) == 0:
        equal(through_programs(tree, target, map=tree_map), whole, target)
    for path, array in arrays.items():
        same(tree[path], array)


HEADS = 8
KEYS = 2
SIZE = 4
WIDTH = 16
LAYERS = 3
SHARDS = 4
ENGINE = TreeMap(
    {
        "model.layers.{i}.qkv": From.concat(
            [
                From("layers/q").at("i").T,
                From("layers/k").at("i").T.repeat(SHARDS // KEYS, unit=SIZE),
                From("layers/v").at("i").T.repeat(SHARDS // KEYS, unit=SIZE),
            ],
            shards=SHARDS,
        ),
        "model.layers.{i}.gate_up": From.concat(
            [From("layers/gate").at("i").T, From("layers/up").at("i").T], shards=4
        ),
        "model.layers.{i}.norm": From("layers/norm").at("i"),
        "model.embed": "embed",
    }
)


def trainer(layers=LAYERS, dtype=np.float32):
    shapes = {
        "embed": (32, WIDTH),
        "layers/q": (layers, WIDTH, HEADS * SIZE),
        "layers/k": (layers, WIDTH, KEYS * SIZE),
        "layers/v": (layers, WIDTH, KEYS * SIZE),
        "layers/gate": (layers, WIDTH, 24),
        "layers/up": (layers, WIDTH, 24),
        "layers/norm": (layers, WIDTH),
    }
    numbers = np.random.default_rng(0)
    return {
        path: numbers.normal(size=shape).astype(dtype) for path, shape in shapes.items()
    }


RULES = PathRules([("embed", P("a")), ("norm", P()), ("layers", P(None, "a", "b"))])


def trained(where, arrays) -> Any:
    sharding_plan = shardfx.plan(arrays, where, paths=RULES)
    return shardfx.shard(arrays, sharding_plan)


def engine(where, arrays):
    applied = ENGINE.apply(arrays).items()
    structs = {
        path: jax.ShapeDtypeStruct(array.shape, array.dtype) for path, array in applied
    }
    rules = PathRules([("(qkv|gate_up)", P("b")), ("embed", P(None, "b")), (".*", ())])
    return shardfx.plan(structs, where, paths=rules)


@both_ways
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("there", ["all", "last"])
def test_a_trainers_tree_becomes_an_engines(move, there, dtype):
    arrays = trainer(dtype=dtype)
    # A number that is none keeps its bits.
    arrays["layers/q"].view(np.uint32 if dtype == np.float32 else np.uint16)[
        0, 0, :4
    ] |= 0x7FC1
    source = "all" if there == "all" else "first"
    tree = trained(mesh(*MESHES[source]), arrays)
    plan = engine(mesh(*MESHES[there]), arrays)
    moved = move(tree, plan, map=ENGINE, donate=dtype == np.float32)
    for path, array in ENGINE.apply(arrays).items():
        same(moved[path], array)
        assert moved[path].sharding == plan.shardings[path]
    actual = {leaf.is_deleted() for leaf in tree.values()}
    assert actual == {dtype == np.float32}


def test_no_byte_enters_a_device_that_has_it_or_does_not_need_it():
    arrays = trainer()
    where = mesh(0, 8, 2, 4)
    # Both trees are cut alike along heads, so that each device has what it needs of its
    # half of the width.
    tree = trained(where, arrays)
    plan = engine(where, arrays)
    leaves = plan_reshard(tree, plan, map=ENGINE).leaves
    assembled = [leaf for leaf in leaves if leaf.how == "pieces"]
    assert assembled
    for leaf in assembled:
        sent_bytes = sum(leaf.links.values())
        assert sent_bytes == lower_bound(leaf, arrays, tree)


def lower_bound(leaf, arrays, tree):
    """By brute force: every element of the source gets a number, and each device counts
    those that it lacks.
    """
    numbered = {}
    held = {}
    start = 1
    for path, array in arrays.items():
        values = np.arange(start, start + array.size, dtype=np.int64)
        numbered[path] = values.reshape(array.shape)
        start += array.size
        for shard in tree[path].addressable_shards:
            held.setdefault(shard.device, set()).update(
                numbered[path][shard.index].ravel().tolist()
            )
    whole = ENGINE.apply(numbered)[leaf.path]
    count = 0
    for device, index in leaf.dst.devices_indices_map(whole.shape).items():
        count += len(set(whole[index].ravel().tolist()) - held[device])
    return count * leaf.dtype.itemsize


def test_a_plan_through_a_map_says_what_will_move():
    arrays = trainer()
    where = mesh(0, 8, 2, 4)
    tree = trained(where, arrays)
    plan = engine(where, arrays)
    move = plan_reshard(tree, plan, map=ENGINE)
    assert [leaf.path for leaf in move.leaves] == [leaf.path for leaf in plan.leaves]
    for leaf in move.leaves:
        if leaf.how == "pieces":
            bound = lower_bound(leaf, arrays, tree)
            assert leaf.wire_bytes == leaf.lower_bound_bytes == -(-bound // 8)
            assert leaf.copied
            assert leaf.rounds > 0
    by_path = {leaf.path: leaf for leaf in move.leaves}
    assert by_path["model.embed"].how == "steps"
    assert by_path["model.embed"].made_of == ("embed",)
    assert by_path["model.layers.1.qkv"].made_of == ("layers/q", "layers/k", "layers/v")
    # Stacks count once, for the last of their layers.
    held = [
        sum(shard.data.nbytes for shard in leaf.addressable_shards) // 8
        for leaf in tree.values()
    ]
    assert sum(leaf.source_bytes for leaf in move.leaves) == sum(held)
    actual = [by_path[f"model.layers.{i}.norm"].source_bytes > 0 for i in range(3)]
    assert actual == [
        False,
        False,
        True,
    ]
    assert "rounds of pieces" in str(move)
    assert "model.layers.{0..2}.qkv" in str(move)
    # Plans alone are enough, of meshes without devices too.
    ours = shardfx.plan(arrays, where, paths=RULES)
    reshard_plan = plan_reshard(ours, plan, map=ENGINE)
    for abstract in (
        reshard_plan,
        plan_reshard(ours.off(), plan.off(), map=ENGINE),
    ):
        assert abstract.wire_bytes == move.wire_bytes
        assert abstract.links == move.links
    with pytest.raises(MapError, match="no rule makes it"):
        plan_reshard(ours, ours, map=ENGINE)
    with pytest.raises(LeafTypeError, match="with a map takes no `lost`"):
        plan_reshard(ours, plan, map=ENGINE, lost=jax.devices()[:1])


def test_the_bound_counts_an_element_needed_twice_once():
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    arrays = {"w": values}
    first = mesh(0, 4, 2, 2)
    last = mesh(4, 8, 2, 2)
    parts = [From("w"), From("w").slice(0, 4)]
    rules = {"w": From.concat(parts)}
    twice = TreeMap(rules)
    rules = PathRules([(".*", P("a"))])
    src = shardfx.plan(arrays, first, paths=rules)
    array = np.zeros((12, 8), np.float32)
    rules = PathRules([(".*", P())])
    dst = shardfx.plan({"w": array}, last, paths=rules)
    move = plan_reshard(src, dst, map=twice)
    assert move.wire_bytes == 12 * 8 * 4
    assert move.lower_bound_bytes <= 8 * 8 * 4


def test_layers_and_leaves_of_one_kind_share_a_program():
    arrays = trainer(layers=40)
    tree = trained(mesh(0, 8, 2, 4), arrays)
    plan = engine(mesh(0, 8, 2, 4), arrays)
    program.cache_clear()
    moved = through_programs(tree, plan, map=ENGINE)
    assert len(moved) == 121
    assert program.cache_info().currsize == 3  # qkv; gate and up; norm


@both_ways
def test_the_second_time_nothing_is_planned(move):
    from shardfx._reshard.pieces.planning import target_arrays

    arrays = trainer()
    tree = trained(mesh(0, 8, 2, 4), arrays)
    plan = engine(mesh(0, 8, 2, 4), arrays)
    target_arrays.cache_clear()
    for time in range(3):
        arrays_by_path = {path: array + 0 for path, array in tree.items()}
        move(arrays_by_path, plan, map=ENGINE)
        assert target_arrays.cache_info()[:2] == (time, 1)


@both_ways
@pytest.mark.parametrize(
    "layouts, limit", [(("all", "all"), 20_000), (("first", "last"), 100_000)]
)
def test_a_limit_on_memory_is_kept(move, layouts, limit):
    arrays = trainer()
    tree = trained(mesh(*MESHES[layouts[0]]), arrays)
    plan = engine(mesh(*MESHES[layouts[1]]), arrays)
    moved = move(tree, plan, map=ENGINE, memory_limit_bytes=limit)
    for path, array in ENGINE.apply(arrays).items():
        same(moved[path], array)
    if move is through_programs:
        with pytest.raises(
            MoveError, match="is too little for it and . more. Nothing was moved; pass"
        ):
            move(tree, plan, map=ENGINE, memory_limit_bytes=10)
        # Arrays that move as they are are asked before any moves, too.
        as_they_are = TreeMap({path: path for path in arrays})
        turned = shardfx.plan(arrays, mesh(0, 8, 4, 2), paths=RULES)
        with pytest.raises(
            MoveError, match="is too little for it and . more. Nothing was moved; pass"
        ):
            move(tree, turned, map=as_they_are, memory_limit_bytes=10, donate=True)
        for leaf in tree.values():
            assert not leaf.is_deleted()


def live_bytes():
    """Per device the bytes of all buffers that are alive."""
    # What a test looks at stays in cycles on JAX 0.9.
    if jax.__version_info__ < (0, 10):
        gc.collect()
    counts = collections.Counter()
    # A buffer of several arrays counts once.
    piece_of_buffer = {}
    for x in jax.live_arrays():
        for piece in pieces_of(x):
            buffer = (piece.device, piece.data.unsafe_buffer_pointer())
            piece_of_buffer[buffer] = piece
    for (device, _), piece in piece_of_buffer.items():
        counts[device] += piece.data.nbytes
    return counts


def pieces_of(array):
    if array.is_deleted():
        return []
    return array.addressable_shards


def test_moves_to_other_devices_keep_each_side_apart(monkeypatch):
    from shardfx._reshard.pieces import run

    arrays = {
        "w": np.random.default_rng(0).normal(size=(6, 1024, 1024)).astype(np.float32)
    }
    rules = {"w.{i}": From("w").at("i").T}
    layers = TreeMap(rules)
    source = mesh(0, 4, 2, 2)
    target = mesh(4, 8, 2, 2)
    rules = PathRules([("w", P(None, "a", "b"))])
    sharding_plan = shardfx.plan(arrays, source, paths=rules)
    tree = shardfx.shard(
        arrays,
        sharding_plan,
    )
    whole = layers.apply(arrays)
    expected = {
        path: jax.ShapeDtypeStruct(
            array.shape, array.dtype, sharding=NamedSharding(target, P("a"))
        )
        for path, array in whole.items()
    }
    before = live_bytes()
    most = collections.Counter()
    bytes_by_program = {}

    def temporaries(run, *arguments):
        """Each program is compiled once for its bytes, however often it runs."""
        types = tuple(jax.typeof(leaf) for leaf in jax.tree.leaves(arguments))
        if (run, types) not in bytes_by_program:
            memory = run.lower(*arguments).compile().memory_analysis()
            bytes_by_program[run, types] = memory.temp_size_in_bytes
        return bytes_by_program[run, types]

    def watched(make):
        def made(devices, *args, **options):
            run = make(devices, *args, **options)

            def inner(*arguments):
                temp_size_in_bytes = temporaries(run, *arguments)
                result = run(*arguments)
                for device, count in live_bytes().items():
                    held = count - before[device]
                    if device in devices:
                        held += temp_size_in_bytes
                    most[device] = max(most[device], held)
                return result

            return inner

        return made

    for name in ("slice_program", "send_program", "write_program"):
        monkeypatch.setattr(run, name, watched(getattr(run, name)))
    moved = through_programs(tree, expected, map=layers)
    equal(moved, whole, expected)
    move = plan_reshard(tree, expected, map=layers)
    shard = 512 * 1024 * 4
    # On eight devices that share one memory.
    largest = max(
        leaf.peak_bytes - leaf.source_bytes - leaf.target_bytes for leaf in move.leaves
    )
    extra = largest // 8
    assert extra <= shard
    assert max(most[device] for device in source.devices.flat) <= extra
    # The targets stay.
    largest = max(most[device] for device in target.devices.flat)
    assert largest - 6 * shard <= extra


@both_ways
def test_host_memory_at_either_end(move):
    where = mesh(0, 8, 2, 4)
    turned = TreeMap({"w": From("w").T})
    values = np.arange(16 * 8, dtype=np.float32)
    w = values.reshape(16, 8)
    for ours, theirs in (("device", "pinned_host"), ("pinned_host", "device")):
        tree = {"w": placed(w, NamedSharding(where, P("a"), memory_kind=ours))}
        struct = jax.ShapeDtypeStruct(
            (8, 16),
            w.dtype,
            sharding=NamedSharding(where, P("b"), memory_kind=theirs),
        )
        target = {"w": struct}
        equal(move(tree, target, map=turned), {"w": w.T}, target)


@both_ways
def test_keys_stay_keys(move):
    where = mesh(0, 8, 2, 4)
    keys = jax.random.split(jax.random.key(3), 8)
    tree = {
        "k.0": jax.device_put(keys, NamedSharding(where, P("b"))),
        "k.1": jax.device_put(
            jax.random.split(jax.random.key(4), 8), NamedSharding(where, P())
        ),
    }
    rules = {"k": From("k.{i}").stack("i").T}
    tree_map = TreeMap(rules)
    struct = jax.ShapeDtypeStruct(
        (8, 2), keys.dtype, sharding=NamedSharding(where, P("a"))
    )
    target = {"k": struct}
    moved = move(tree, target, map=tree_map)
    key_data = jax.random.key_data(tree["k.0"])
    expected = jnp.stack([key_data, jax.random.key_data(tree["k.1"])]).transpose(
        1, 0, 2
    )
    same(jax.random.key_data(moved["k"]), expected)
    assert moved["k"].sharding.is_equivalent_to(target["k"].sharding, 2)


@both_ways
def test_odd_leaves(move):
    where = mesh(0, 8, 2, 4)
    tree = {
        "n": np.float32(3) * np.ones((), np.float32),
        "e": jnp.zeros((0, 4)),
        "v": np.arange(8.0, dtype=np.float32),
    }
    rule = From("v").reshape(2, 4)
    rules = {
        "n": From("n").reshape(1),
        "m": "n",
        "e": From("e").T,
        "v": rule,
    }
    tree_map = TreeMap(rules)
    sharding = SingleDeviceSharding(jax.devices()[3])
    struct = jax.ShapeDtypeStruct(
        (2, 4), np.float32, sharding=NamedSharding(where, P("a", "b"))
    )
    target = {
        "n": jax.ShapeDtypeStruct((1,), np.float32, sharding=NamedSharding(where, P())),
        "m": jax.ShapeDtypeStruct((), np.float32, sharding=sharding),
        "e": jax.ShapeDtypeStruct(
            (4, 0), np.float32, sharding=NamedSharding(where, P("b"))
        ),
        "v": struct,
    }
    array = np.zeros((0, 4), np.float32)
    equal(
        move(tree, target, map=tree_map),
        tree_map.apply({**tree, "e": array}),
        target,
    )


def test_what_is_wrong_is_said_before_anything_moves():
    arrays = trainer()
    where = mesh(0, 8, 2, 4)
    tree = trained(where, arrays)
    plan = engine(where, arrays)
    with pytest.raises(MapError, match="source `layers/k2`: nothing is made of it"):
        reshard({**tree, "layers/k2": tree["layers/k"]}, plan, map=ENGINE, donate=True)
    for leaf in tree.values():
        assert not leaf.is_deleted()
    with pytest.raises(LeafTypeError, match="takes neither `src` nor `lost`"):
        reshard(tree, plan, map=ENGINE, lost=jax.devices()[:1])
    with pytest.raises(
        MeshError, match="leaf `model.embed`: the target .* without devices"
    ):
        reshard(tree, plan.off(), map=ENGINE)
    with pytest.raises(LeafTypeError, match="use `map.apply\\(tree, like\\)`"):
        jax.jit(lambda tree: reshard(tree, plan, map=ENGINE))(tree)
    with pytest.raises(LeafTypeError, match="holds no values to move"):
        reshard(plan.structs, plan, map=ENGINE)


@both_ways
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_a_failure_midway_says_what_was_moved(move, donate, late, monkeypatch):
    from shardfx._reshard import flight

    arrays = trainer()
    where = mesh(0, 8, 2, 4)
    tree = trained(where, arrays)
    plan = engine(where, arrays)
    start = flight.start_assembly
    count = it.count()

    def fail():
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    def fails(work, names, means):
        if names != ("layers/gate", "layers/up") or next(count) != 1:
            return start(work, names, means)
        # A late failure comes while the next array is started.
        return fail if late else fail()

    monkeypatch.setattr(flight, "start_assembly", fails)
    with pytest.raises(
        MoveError,
        match="stopped at leaf `model.layers.1.gate_up`.*after 4 of 10 leaves",
    ) as caught:
        move(tree, plan, map=ENGINE, donate=donate)
    whole = ENGINE.apply(arrays)
    assert len(caught.value.moved) == 4
    for path, array in caught.value.moved.items():
        same(array, whole[path])
    # Of stacked arrays all layers are read before they are given up.
    for path, leaf in tree.items():
        if not donate or path != "embed":
            same(leaf, arrays[path])
