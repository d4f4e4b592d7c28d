"""Each process's part of arrays, batches and meshes, compared with the list of devices;
and every message.
"""

import dataclasses
import math

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _devices import chips, objects
from hypothesis import given, settings
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from shardfx import MeshSpec, PathRules, gather, hosts, plan, specs_of, topology
from shardfx.errors import MeshError, PlanMismatchError, SpecError


mesh_of_grid = MeshSpec({"replica": 2, "data": 4, "model": 2})
GRID = hosts.regular_grid(mesh_of_grid, {"replica": 2, "data": 2})


def regular_mesh(sizes, chunks):
    """A mesh of descriptions, whose processes are numbered along it."""
    device_count = math.prod(sizes.values())
    bounds = (device_count, 1, 1, 1)
    devices = chips(bounds)
    shape = tuple(sizes.values())
    array = objects(devices).reshape(shape)
    counts = []
    for name in sizes:
        counts.append(chunks.get(name, 1))
    for place, device in np.ndenumerate(array):
        cell = []
        for coordinate, count, size in zip(place, counts, sizes.values(), strict=True):
            cell.append(coordinate * count // size)
        number = np.ravel_multi_index(cell, counts)
        device.process_index = int(number)
    return Mesh(array, tuple(sizes))


def test_a_grid_is_a_value():
    axis_sizes = {"data": 4, "model": 2}
    chunk_ids = [(0, 0), (1, 0)]
    grid = hosts.HostGrid(
        axis_sizes=axis_sizes, num_chunks={"data": 2}, chunk_ids=chunk_ids
    )
    axis_sizes = {"data": 4, "model": 2}
    num_chunks = {"model": 1, "data": 2}
    chunk_ids = ((0, 0), (1, 0))
    same = hosts.HostGrid(
        axis_sizes=axis_sizes, num_chunks=num_chunks, chunk_ids=chunk_ids
    )
    assert grid == same
    assert hash(grid) == hash(same)
    leaves = jax.tree.leaves(grid)
    assert not leaves
    axis_sizes_of_grid = dict(grid.axis_sizes)
    assert axis_sizes_of_grid == {"data": 4, "model": 2}
    num_chunks_of_grid = dict(grid.num_chunks)
    assert num_chunks_of_grid == {"data": 2, "model": 1}
    assert grid.chunk_ids == ((0, 0), (1, 0))
    assert grid.process_count == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ({"a": 4}, {"b": 2}, [(0,)]),
            r"`num_chunks` names `b`, but the mesh has \('a',\)",
        ),
        (
            ({"a": 4}, {"a": 3}, [(0,)]),
            "3 processes cannot share the 4 devices of mesh axis `a` evenly",
        ),
        (
            ({"a": 4}, {"a": 2}, [(0, 0), (1, 0)]),
            r"chunk \(0, 0\); it needs one index for each axis of \('a',\)",
        ),
        (
            ({"a": 4}, {"a": 2}, [(0,), (2,)]),
            r"process 1 has chunk \(2,\); it needs .*, below \(2,\)",
        ),
        (
            ({"a": 4}, {"a": 2}, [(0,), (0,)]),
            "2 processes have 1 different chunks, but {'a': 2} makes 2",
        ),
        (({"a": 4}, {"a": 2}, [(0,)]), "1 processes have 1 different chunks"),
    ],
)
def test_a_grid_refuses(arguments, message):
    axis_sizes, num_chunks, chunk_ids = arguments
    with pytest.raises(MeshError, match=message):
        hosts.HostGrid(
            axis_sizes=axis_sizes, num_chunks=num_chunks, chunk_ids=chunk_ids
        )


AXES = {"a": (1, 2, 4), "b": (1, 2, 6), "c": (1, 3)}
strategies = {}
for name, n in AXES.items():
    strategies[name] = st.sampled_from(n)
sizes = st.fixed_dictionaries(strategies)
entries = st.sampled_from(
    [(), ("a",), ("b",), ("a", "b"), ("b", "a"), ("c",), ("c", "a")]
)


@settings(deadline=None, max_examples=150)
@given(sizes, st.data())
def test_local_chunks_are_what_the_devices_hold(axis_sizes, data):
    chunks = {
        name: data.draw(
            st.sampled_from([n for n in range(1, size + 1) if size % n == 0])
        )
        for name, size in axis_sizes.items()
    }
    mesh = regular_mesh(axis_sizes, chunks)
    grid = hosts.grid_of(mesh)
    expected = hosts.regular_grid(MeshSpec(axis_sizes), chunks)
    assert grid == expected
    first = data.draw(entries)
    second = data.draw(entries)
    rest = tuple(axis for axis in second if axis not in first)
    spec = P(first or None, rest or None)
    shape = (24, 72, 5)
    sharding = NamedSharding(mesh, spec)
    counts = np.zeros(shape, int)
    for process in range(grid.process_count):
        owned = hosts.owned(shape, sharding, process)
        held = np.zeros(shape, bool)
        for chunk in owned:
            held[chunk.slices] = True
            if chunk.replica_id == 0:
                counts[chunk.slices] += 1
        try:
            chunk = hosts.local_chunk(shape, spec, grid, process)
        except MeshError as error:
            # Several ranges of rows are no chunk.
            message = str(error)
            assert "several ranges of rows" in message
            continue
        box = np.zeros(shape, bool)
        box[chunk.slices] = True
        np.testing.assert_array_equal(box, held)
        assert {chunk.replica_id for chunk in owned} == {chunk.replica_id}
    # Whoever owns a part first owns it alone: every element once.
    is_owned_once = counts == 1
    assert is_owned_once.all()


@given(st.permutations(["replica", "data", "model"]), st.integers(0, 3))
def test_shard_and_replica_ids_number_the_processes(order, count):
    axes = tuple(order[:count])
    chunk_counts = []
    for axis in axes:
        chunk_counts.append(GRID.num_chunks[axis])
    shards = math.prod(chunk_counts)
    pairs = set()
    for p in range(GRID.process_count):
        pairs.add((hosts.shard_id(axes, GRID, p), hosts.replica_id(axes, GRID, p)))
    replicas = GRID.process_count // shards
    expected = set()
    for s in range(shards):
        for r in range(replicas):
            expected.add((s, r))
    assert pairs == expected


def test_answers_are_plain_python_values():
    for asked, layout in (
        (
            (8, None, GRID, 0),
            hosts.DataLayout(
                batch_size=8,
                shard_id=0,
                num_shards=1,
                is_first_host_in_replica_set=True,
            ),
        ),
        (
            (8, (), GRID, 3),
            hosts.DataLayout(
                batch_size=8,
                shard_id=0,
                num_shards=1,
                is_first_host_in_replica_set=False,
            ),
        ),
        (
            (None, ("replica", "data"), GRID, 3),
            hosts.DataLayout(
                batch_size=8,
                shard_id=3,
                num_shards=4,
                is_first_host_in_replica_set=True,
            ),
        ),
    ):
        answer = hosts.data_layout(*asked)
        assert answer == layout
        arrays = dataclasses.asdict(hosts.data_layout(*asked))
        actual = set()
        for value in arrays.values():
            actual.add(type(value))
        assert actual == {int, bool}
    # A spec may end in None beyond the rank.
    chunk = hosts.local_chunk((8,), P("data", None), GRID, 1)
    assert chunk.slices == (slice(4, 8),)
    start = chunk.slices[0].start
    assert type(start) is type(chunk.replica_id) is int
    actual = hosts.local_chunk((), P(), GRID, 3)
    expected = hosts.LocalChunk((), 3)
    assert actual == expected


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (
            lambda: hosts.shard_id({"data"}, GRID, 0),
            r"\['data'\] came in a set, which has no order; pass a tuple",
        ),
        (
            lambda: hosts.shard_id({"data", 3}, GRID, 0),  # pyright: ignore
            r"\[3, 'data'\] came in a set",
        ),
        (
            lambda: hosts.shard_id("zz", GRID, 0),
            r"no axis 'zz', but \('replica', 'data', 'model'\); use one of those",
        ),
        (lambda: hosts.shard_id(("data", "data"), GRID, 0), "occurs twice"),
        (
            lambda: hosts.replica_id("data", GRID, 4),
            "there is no process 4; use one of 0 to 3",
        ),
        (
            lambda: hosts.data_layout(6, "data", GRID, 0),
            r"6 rows cannot be sharded over the 4 .* along \('data',\)",
        ),
        (
            lambda: hosts.data_layout(0, "data", GRID, 0),
            "use a positive multiple of 4, or `None` for 4",
        ),
        (
            lambda: hosts.local_chunk((6,), P("data"), GRID, 0),
            "size 6 is not divisible by the 4 .*pad it to 8",
        ),
        (
            lambda: hosts.local_chunk((8,), P("data", "model"), GRID, 0),
            r"has 2 entries, but .* shape \(8,\)",
        ),
        (
            lambda: hosts.local_chunk((8,), P(P.UNCONSTRAINED), GRID, 0),
            "nobody knows who owns it; name its axes",
        ),
        (
            lambda: hosts.local_chunk((8,), P(("data", "replica")), GRID, 0),
            "several devices along `data`.*hosts.owned",
        ),
        (lambda: hosts.local_chunk((8, 8), P("data", "data"), GRID, 0), "occurs twice"),
    ],
)
def test_questions_that_are_refused(ask, message):
    with pytest.raises((MeshError, SpecError), match=message):
        ask()


def scattered(sizes, owner):
    bounds = (math.prod(sizes), 1, 1, 1)
    devices = chips(bounds)
    for device, process in zip(devices, owner, strict=True):
        device.process_index = process
    names = []
    for i in range(len(sizes)):
        names.append(f"a{i}")
    names = tuple(names)
    grid = objects(devices).reshape(sizes)
    return Mesh(grid, names)


@pytest.mark.parametrize(
    ("sizes", "owner", "message"),
    [
        (
            (4,),
            [0, 1, 0, 1],
            r"the 2 devices of process 0 lie within \(0,\) to \(2,\); use `hosts.owned",
        ),
        ((4,), [0, 0, 2, 2], "process 1 has no device in it"),
        ((4,), [0, 1, 1, 1], "the 3 devices of process 1 lie within"),
        ((3,), [0, 0, 1], r"the 1 devices of process 1 lie within \(2,\) to \(2,\)"),
        ((4,), [1, 0, 0, 1], "the 2 devices of process 1 lie within"),
        ((2, 2), [0, 1, 1, 0], "lie within"),
    ],
)
def test_processes_without_equal_boxes(sizes, owner, message):
    mesh = scattered(sizes, owner)
    with pytest.raises(MeshError, match=message):
        hosts.grid_of(mesh)
    shape = (12,) * len(sizes)
    counts_shape = (12,) * len(sizes)
    counts = np.zeros(counts_shape, int)
    for process in set(owner):
        spec = P(*mesh.axis_names)
        sharding = NamedSharding(mesh, spec)
        for chunk in hosts.owned(shape, sharding, process):
            is_first = chunk.replica_id == 0
            counts[chunk.slices] += is_first
    is_owned_once = counts == 1
    assert is_owned_once.all()


def test_hosts_of_65536_devices_need_no_device():
    axes = {"replica": 8, "data": 1024, "model": 8}
    mesh = MeshSpec(axes, dcn={"replica": 8})
    grid = hosts.regular_grid(mesh, {"replica": 8, "data": 1024})
    spec = P(("replica", "data"), "model")
    chunk = hosts.local_chunk((65536, 4096), spec, grid, 8191)
    slices = (slice(65528, 65536), slice(0, 4096))
    expected = hosts.LocalChunk(slices, 0)
    assert chunk == expected
    actual = hosts.data_layout(65536, ("replica", "data"), grid, 8191)
    assert actual == hosts.DataLayout(
        batch_size=65536,
        shard_id=8191,
        num_shards=8192,
        is_first_host_in_replica_set=True,
    )
    bounds = (32, 32, 64, 1)
    host_bounds = (2, 2, 2, 1)
    submesh = (2, 2, 2, 1)
    order = topology.submesh_order(bounds, host_bounds, submesh)
    shape = order.shape
    assert shape == (8192, 8, 4)


def batch_plan(mesh=None, rows=8, rules=None):
    struct = jax.ShapeDtypeStruct((rows, 3), jnp.float32)
    labels = jax.ShapeDtypeStruct((rows,), jnp.int32)
    tree = {
        "x": struct,
        "y": labels,
    }
    if mesh is None:
        spec = MeshSpec({"data": 4, "tensor": 2})
        mesh = spec.build(jax.devices())
    return plan(tree, mesh, paths=rules or PathRules([(".*", P("data"))]))


def batch(rows=8):
    elements = np.arange(3.0 * rows, dtype=np.float32)
    values = elements.reshape(rows, 3)
    labels = np.arange(rows, dtype=np.int32)
    return {
        "x": values,
        "y": labels,
    }


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_global_batch_is_placed_as_planned(kind):
    axes = {"data": 4, "tensor": 2}
    spec = MeshSpec(axes, axis_types=kind)
    mesh = spec.build(jax.devices())
    sharding_plan = batch_plan(mesh)
    out = hosts.global_batch(batch(), sharding_plan)
    gathered = gather(out)
    jax.tree.map(np.testing.assert_array_equal, gathered, batch())

    def sharding_of(array):
        return array.sharding

    actual = jax.tree.map(sharding_of, out)
    assert actual == sharding_plan.shardings


@pytest.mark.parametrize("rows", [0, 1, 5, 8])
def test_a_ragged_batch_is_padded_with_a_mask(rows):
    rows_given = batch(rows)
    planned = batch_plan()
    out, mask = hosts.global_batch(rows_given, planned, pad=-1)
    missing = [False] * (8 - rows)
    expected = [True] * rows + missing
    assert mask.tolist() == expected
    assert specs_of(mask) == P("data")
    count = 8 - rows
    padding = [-1] * count
    labels = gather(out)["y"]
    np.testing.assert_array_equal(labels, [*range(rows), *padding])
    gathered = gather(out)["x"][rows:]
    filling = -np.ones((8 - rows, 3))
    np.testing.assert_array_equal(gathered, filling)


@pytest.mark.parametrize(
    ("local", "keywords", "message"),
    [
        (
            batch(5),
            {},
            (
                r"leaf `x` has shape \(5, 3\) here, but process 0 owns \(8, 3\) of \(8,"
                r" 3\).*pass `pad=0`"
            ),
        ),
        (batch(9), {"pad": 0}, r"leaf `x` has shape \(9, 3\) here"),
        (
            {**batch(), "x": np.ones((8, 4), np.float32)},
            {"pad": 0},
            r"leaf `x` has shape \(8, 4\) here",
        ),
        (
            {**batch(), "y": np.ones(8, np.float32)},
            {},
            "leaf `y` is float32, but the plan is for int32",
        ),
        (
            {"x": batch()["x"]},
            {},
            r"the batch has the leaves \['x'\], the plan \['x', 'y'\]",
        ),
        (
            {"x": batch(5)["x"], "y": batch(4)["y"]},
            {"pad": 0},
            r"one mask needs the same .*`x` has .*`y` has .*\(4,\)",
        ),
        (
            batch(5),
            {"pad": 0.5},
            (
                r"leaf `y` is int32, which cannot hold `pad=0.5`; pad with an integer"
                r" from -2147"
            ),
        ),
        (
            batch(5),
            {"pad": float("nan")},
            "leaf `y` is int32, which cannot hold `pad=nan`",
        ),
        (
            batch(5),
            {"pad": 2**31},
            "leaf `y` is int32, which cannot hold `pad=2147483648`",
        ),
    ],
)
def test_global_batch_refuses(local, keywords, message):
    with pytest.raises(PlanMismatchError, match=message):
        hosts.global_batch(local, batch_plan(), **keywords)
    mesh = MeshSpec({"data": 4, "tensor": 2})
    planned = batch_plan(mesh)
    rows = batch()
    with pytest.raises(
        PlanMismatchError,
        match=r"no devices to put a batch on; use `plan.on\(plan.mesh.build",
    ):
        hosts.global_batch(rows, planned)


def test_a_batch_of_processes_needs_the_service_to_ask_them():
    # This process's runtime has no service.
    mesh = regular_mesh({"data": 4}, {"data": 2})
    rules = PathRules([(".*", P("data"))])
    two_processes = plan(batch(), mesh, paths=rules)
    rows = batch(4)
    with pytest.raises(
        PlanMismatchError,
        match="the batch lies on processes 0, 1, .* it does not run; call"
        r" `jax.distributed.initialize\(\)` when the program starts, or leave out",
    ):
        hosts.global_batch(rows, two_processes, wait_seconds=1)


def test_one_process_has_nobody_to_ask():
    out = hosts.global_batch(batch(), batch_plan(), wait_seconds=1)
    gathered = gather(out)
    jax.tree.map(np.testing.assert_array_equal, gathered, batch())
    planned = batch_plan()
    rows = batch(5)
    with pytest.raises(PlanMismatchError, match="leaf `x` has shape"):
        hosts.global_batch(rows, planned, wait_seconds=1)


def test_the_mask_is_replicated_where_rows_are():
    columns = P(None, "tensor")
    rules = PathRules([("x", columns), ("y", P())])
    rows = batch(7)
    planned = batch_plan(rules=rules)
    _, mask = hosts.global_batch(
        rows,
        planned,
        pad=0,
    )
    assert mask.sharding.is_fully_replicated
    count = mask.sum()
    assert int(count) == 7


def test_a_plan_of_another_version_says_why_it_is_not_read(monkeypatch):
    # Two processes with two versions of the package.
    sharding_plan = plan(
        {"w": jnp.ones(8)}, MeshSpec({"d": 2}), paths=PathRules.parse("w->d")
    )
    version = '"version":1'
    assert version in sharding_plan.to_json()

    def exchange(message: bytes) -> list[bytes]:
        other = message.replace(version.encode(), b'"version":9')
        return [message, b"another digest" if other == message else other]

    monkeypatch.setattr(hosts._same, "_exchange", exchange)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(
        PlanMismatchError, match="cannot be read here .the plan has ver"
    ):
        hosts.assert_same_plan(sharding_plan)


def test_nobody_owns_shards_of_an_abstract_mesh():
    sharding = NamedSharding(MeshSpec({"data": 8}).abstract(), P("data"))
    with pytest.raises(MeshError, match="abstract mesh, whose devices belong to no"):
        hosts.owned((8,), sharding, 0)
