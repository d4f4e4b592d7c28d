"""Loading under a plan reads the right bytes, no others, each once, into memory that
JAX keeps.
"""

import os
import threading
import time

import equinox as eqx
import hypothesis as hyp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding
from safetensors.numpy import save_file

import shardfx
from shardfx import From, MeshSpec, PathRules, TreeMap, checkpoint
from shardfx.checkpoint import _flight as flights
from shardfx.checkpoint._entry import may_change
from shardfx.errors import CheckpointError, LeafTypeError, PlanMismatchError


MESH = MeshSpec({"a": 2, "b": 2, "c": 2})


def random(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8)
    if np.dtype(dtype) == bool:
        raw %= 2
    return raw.reshape(-1).view(dtype).reshape(shape)


def struct(array, spec, mesh=None, dtype=None):
    sharding = NamedSharding(mesh or MESH.build(jax.devices()), spec)
    return jax.ShapeDtypeStruct(array.shape, dtype or array.dtype, sharding=sharding)


def same_bytes(a, b):
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    actual = np.asarray(a).tobytes()
    return actual == np.asarray(b).tobytes()


@pytest.fixture
def reads(monkeypatch):
    """Every byte count that the loader reads, and from which thread."""
    seen = []
    preadv = os.preadv

    def counted(descriptor, into, offset):
        done = preadv(descriptor, into, offset)
        seen.append(done)
        return done

    monkeypatch.setattr(os, "preadv", counted)
    return seen


DTYPES = [
    *(
        "bool",
        "int8",
        "uint8",
        "int16",
        "uint16",
        "int32",
        "uint32",
        "float16",
        "bfloat16",
        "float32",
        "complex64",
    ),
    *("float8_e4m3fn", "float8_e5m2"),
]


@hyp.settings(max_examples=100, deadline=None)
@hyp.given(st.data())
def test_any_shape_any_spec_any_transpose_and_any_dtype(tmp_path_factory, data):
    rank = data.draw(st.integers(0, 4))
    shape = tuple(data.draw(st.sampled_from([0, 1, 2, 4, 8, 24])) for _ in range(rank))
    dtype = jnp.dtype(data.draw(st.sampled_from(DTYPES)))
    array = random(shape, dtype)
    order = tuple(data.draw(st.permutations(range(rank))))
    path = tmp_path_factory.mktemp("t")
    save_file({"x": array}, path / "x.safetensors")
    free = ["a", "b", "c"]
    entries = []
    transposed = array.transpose(order)
    for size in transposed.shape:
        if free:
            axes = tuple(data.draw(st.lists(st.sampled_from(free), unique=True)))
        else:
            axes = ()
        if size % 2 ** len(axes) != 0:
            axes = ()
        free = [axis for axis in free if axis not in axes]
        entries.append(axes)
    structs = {"y": struct(transposed, P(*entries))}
    tree_map = TreeMap({"y": From("x").transpose(*order)})
    loaded = checkpoint.load(path, structs, tree_map)["y"]
    assert loaded.sharding == structs["y"].sharding
    assert same_bytes(loaded, transposed)
    for shard in loaded.addressable_shards:
        assert same_bytes(shard.data, transposed[shard.index])


def test_a_live_model_comes_back_with_its_static_leaves(tmp_path):
    model = eqx.nn.MLP(8, 8, 8, 1, key=jax.random.key(0))
    plan = shardfx.plan(
        model, MESH.build(jax.devices()), paths=PathRules.parse("weight->a.b, bias->c")
    )
    checkpoint.save(tmp_path / "step", shardfx.shard(model, plan), plan)
    other = shardfx.shard(eqx.nn.MLP(8, 8, 8, 1, key=jax.random.key(1)), plan)
    for target in (other, eqx.combine(plan.structs, model)):
        loaded = checkpoint.load(tmp_path / "step", target)
        assert np.allclose(loaded(jnp.ones(8)), model(jnp.ones(8)), rtol=1e-5)
        assert loaded.layers[0].weight.sharding.spec == P("a", "b")  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(PlanMismatchError, match="leaf `act` .* has none. Make a plan"):
        checkpoint.load(tmp_path / "step", {"act": "relu"})


def test_nothing_is_cast_that_was_not_asked_for(tmp_path):
    arrays = {"w": random((8, 8), np.float32), "n": np.arange(8, dtype=np.int32)}
    save_file(arrays, tmp_path / "x.safetensors")
    plan = {
        "w": struct(arrays["w"], P("a"), dtype=jnp.bfloat16),
        "n": struct(arrays["n"], P("b")),
    }
    with pytest.raises(
        CheckpointError,
        match=(
            "leaf `w`: 'w' is float32, but the plan has bfloat16; pass `dtype=\"plan\"`"
        ),
    ):
        checkpoint.load(tmp_path, plan)
    expected = jnp.asarray(arrays["w"]).astype(jnp.bfloat16)
    for dtype in ("plan", jnp.bfloat16, "bfloat16"):
        loaded = checkpoint.load(tmp_path, plan, dtype=dtype)
        assert same_bytes(loaded["w"], expected)
        assert same_bytes(loaded["n"], arrays["n"])
    actual = checkpoint.load(tmp_path, plan, dtype=jnp.float16)["w"].dtype
    assert actual == jnp.float16
    with pytest.raises(LeafTypeError, match="`dtype=3` is no dtype of JAX; write"):
        checkpoint.load(tmp_path, plan, dtype=3)


CASES = {
    "x64": ("n", {}, "would be int64, which JAX holds only under .*jax_enable_x64"),
    "complex": ("c", {"dtype": np.float32}, "is complex and would be cast to float32"),
    "no devices": (
        "n",
        {"mesh": MESH.abstract()},
        "no devices, so there is nowhere to load to; .*plan.mesh.build",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_has_no_place_is_refused(tmp_path, case):
    arrays = {"n": np.arange(3), "c": np.ones(2, np.complex64)}
    save_file(arrays, tmp_path / "x.safetensors")
    name, options, text = CASES[case]
    dtype = None if case == "x64" else "plan"
    targets = {
        name: struct(
            arrays[name],
            P(),
            **({"dtype": np.int32} if "mesh" in options else {}),
            **options,
        )
    }
    with pytest.raises((CheckpointError, PlanMismatchError), match=text):
        checkpoint.load(tmp_path, targets, dtype=dtype, unread="allow")
    with pytest.raises(PlanMismatchError, match=r"leaf `n` \(ndarray\) has none"):
        checkpoint.load(tmp_path, {"n": arrays["n"]})


def test_unreadable_leaves_are_named_before_reading(tmp_path, reads):
    array = np.ones((8, 4), np.float32)
    arrays = {"a": array, "b": np.ones(8, np.float32)}
    save_file(arrays, tmp_path / "x.safetensors")
    array = np.ones((4, 8), np.float32)
    plan = {
        "a": struct(array, P()),
        "b": struct(arrays["b"], P()),
        "c": struct(arrays["b"], P()),
    }
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(tmp_path, plan)
    text = str(caught.value)
    assert text.startswith("2 of 3 leaves cannot be read from")
    assert (
        "leaf `a`: 'a' gives shape (8, 4), but the plan has (4, 8); torch keeps weights"
        " as [out, in]: `map=TreeMap({'a': From('a').T})`." in text
    )
    assert "leaf `c`: checkpoint" in text
    assert "has no array 'c'" in text
    assert reads == []


def test_replicas_are_read_once_and_share_their_memory(tmp_path, reads):
    array = random((256, 256), np.float32)
    save_file({"w": array}, tmp_path / "x.safetensors")
    for spec, copies in ((P(), 8), (P("a"), 4), (P(None, "b"), 4)):
        reads.clear()
        loaded = checkpoint.load(tmp_path, {"w": struct(array, spec)})["w"]
        assert sum(reads) == array.nbytes
        pointers = [
            shard.data.unsafe_buffer_pointer() for shard in loaded.addressable_shards
        ]
        assert len(set(pointers)) == 8 // copies
        for pointer in pointers:
            assert pointer % 64 == 0


def test_donating_one_replica_leaves_the_others(tmp_path):
    array = random((64,), np.int32)
    save_file({"w": array}, tmp_path / "x.safetensors")
    plan = {"w": struct(array, P())}
    loaded = checkpoint.load(tmp_path, plan)["w"]
    copies = [jnp.array(shard.data, copy=False) for shard in loaded.addressable_shards]
    jax.block_until_ready(jax.jit(lambda x: x * 0, donate_argnums=0)(loaded))
    for copy in copies:
        if not copy.is_deleted():
            assert np.array_equal(copy, array)


def test_a_quarter_of_the_devices_reads_a_quarter(tmp_path, reads):
    arrays = {
        "rows": random((64, 64), np.float32),
        "columns": random((64, 128), np.uint8),
    }
    save_file(arrays, tmp_path / "x.safetensors")
    mesh = Mesh(np.array(jax.devices()), ("x",))
    plan = {
        "rows": struct(arrays["rows"], P("x"), mesh),
        "columns": struct(arrays["columns"], P(None, "x"), mesh),
    }
    index = checkpoint.read_index(tmp_path)
    total = sum(array.nbytes for array in arrays.values())
    mesh_spec = MeshSpec({"x": 8})
    abstract = shardfx.plan(
        arrays, mesh_spec, paths=PathRules.parse("rows->x, columns->None.x")
    )
    with pytest.raises(
        PlanMismatchError, match="3 processes cannot each have as many of the 8 devices"
    ):
        checkpoint.plan_reads(index, abstract, processes=3)
    for count in (0, -4):
        message = f"`processes={count}` is no number of processes; give 1 or more"
        with pytest.raises(PlanMismatchError, match=message):
            checkpoint.plan_reads(index, abstract, processes=count)
    of_numpy = checkpoint.plan_reads(index, abstract, processes=np.int64(2)).processes
    assert [type(process.process_index) for process in of_numpy] == [int, int]
    for process in checkpoint.plan_reads(index, abstract, processes=4).processes:
        assert process.needed_bytes == total // 4
        assert process.excess_bytes == 0
    checkpoint.load(index, plan)
    planned = checkpoint.plan_reads(index, plan)
    assert sum(reads) == planned.read_bytes == total
    expected = sum(process.reads for process in planned.processes)
    assert len(reads) == expected == 2


@pytest.mark.parametrize("gap_bytes", [1, 10**9])
def test_gaps_are_read_along_or_skipped_as_asked(tmp_path, reads, gap_bytes):
    array = random((64, 512), np.float32)
    save_file({"w": array}, tmp_path / "x.safetensors")
    gathered = np.concatenate([array[:, 64:128], array[:, 384:448]], 1)
    parts = [From("w").slice(64, 128, dim=1), From("w").slice(384, 448, dim=1)]
    columns = From.concat(parts, dim=1)
    tree_map = TreeMap({"y": columns})
    loaded = checkpoint.load(
        tmp_path,
        {"y": struct(gathered, P())},
        tree_map,
        gap_bytes=gap_bytes,
    )
    assert same_bytes(loaded["y"], gathered)
    if gap_bytes == 1:
        expected = gathered.nbytes
    else:
        expected = array.nbytes - 2 * 64 * 4
    assert sum(reads) == expected
    # One device of eight needs its columns, and where gaps are read along all of the
    # rows between.
    mesh = Mesh(np.array(jax.devices()), ("x",))
    abstract = {"w": struct(array, P(None, "x"), MeshSpec.of(mesh).abstract())}
    reads_of_process = checkpoint.plan_reads(
        checkpoint.read_index(tmp_path), abstract, processes=8, gap_bytes=gap_bytes
    )
    assert reads_of_process.processes[3].needed_bytes == array.nbytes // 8
    if gap_bytes == 1:
        expected = 0
    else:
        expected = 63 * 512 * 4 * 7 // 8
    assert reads_of_process.processes[3].excess_bytes == expected
    assert "in excess" in str(reads_of_process)


def after(happens, call):
    """`call`, but for what `happens` ahead of the first one."""
    actions = [happens]

    def called(*arguments):
        while actions:
            actions.pop()()
        return call(*arguments)

    return called


def written_again(path):
    # The clock of a file system may tick every few milliseconds.
    time.sleep(0.02)
    path.write_bytes(path.read_bytes())


CHANGES = {
    "cut off": (
        lambda path: os.truncate(path, 500_000),
        "ends at byte 500000, within array 'w1'",
    ),
    "written to": (
        written_again,
        "was replaced or written to since its header was read",
    ),
    "removed": (os.unlink, "is missing|was replaced"),
}


@pytest.mark.parametrize("change, message", CHANGES.values(), ids=CHANGES)
def test_a_file_that_changes_after_its_header_was_read(tmp_path, change, message):
    arrays = {f"w{i}": random((1024, 64), np.float32, i) for i in range(4)}
    path = tmp_path / "x.safetensors"
    threads = threading.active_count()
    for spec in (P("a"), P(None, "a")):
        save_file(arrays, path)
        index = checkpoint.read_index(tmp_path)
        plan = {name: struct(array, spec) for name, array in arrays.items()}
        # Between the moment at which the file is looked at, and the first read.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "preadv", after(lambda: change(path), os.preadv))
            with pytest.raises(CheckpointError, match=message):
                checkpoint.load(index, plan)
        with pytest.raises(
            CheckpointError,
            match="was replaced or written to since its header was read|is missing",
        ):
            checkpoint.load(index, plan)
    assert threading.active_count() == threads


def test_reads_that_return_less_are_continued(tmp_path, monkeypatch):
    preadv = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda fd, into, offset: preadv(fd, [into[0][:100]], offset)
    )
    arrays = {f"w{i}": random((64, 64), np.float32, i) for i in range(3)}
    save_file(arrays, tmp_path / "x.safetensors")
    for spec in (P("a"), P(None, "a")):
        structs_by_name = {name: struct(array, spec) for name, array in arrays.items()}
        loaded = checkpoint.load(tmp_path, structs_by_name)
        for name, array in arrays.items():
            assert same_bytes(loaded[name], array)


def test_a_boolean_that_is_neither(tmp_path):
    values = np.array([0, 1, 2, 1], np.uint8)
    save_file({"w": values}, tmp_path / "x.safetensors")
    replaced = (tmp_path / "x.safetensors").read_bytes().replace(b'"U8"', b'"BOOL"')
    data = replaced.replace(b"}}  ", b"}}")
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(
        CheckpointError,
        match="leaf `w`: a boolean in the checkpoint is neither 0 nor 1",
    ):
        checkpoint.load(tmp_path, {"w": struct(np.ones(4, bool), P())})


@pytest.mark.parametrize("limit", [32 * 1024, 40_000, 10**9])
def test_no_more_than_the_limit_is_on_its_way(tmp_path, monkeypatch, reads, limit):
    """Where the host's memory is only a stop: what the kernel has read that is not yet
    on a device.
    """
    arrays = {f"w{i}": random((64, 64), np.float32, i) for i in range(12)} | {
        "big": random((8, 8192), np.float32)
    }
    save_file(arrays, tmp_path / "x.safetensors")
    plan = {name: struct(array, P(("a", "b", "c"))) for name, array in arrays.items()}
    moved = flights.copies_on_devices
    gone = []
    on_way = []

    def move(filled, devices, sharding):
        on_way.append(sum(reads) - sum(gone))
        gone.append(filled.nbytes)
        return moved(filled, devices, sharding)

    monkeypatch.setattr(flights, "is_on_cpu", lambda sharding: False)
    monkeypatch.setattr(flights, "copies_on_devices", move)
    loaded = checkpoint.load(tmp_path, plan, memory_limit_bytes=limit)
    for name in arrays:
        assert same_bytes(loaded[name], arrays[name])
    for name, array in loaded.items():
        assert array.sharding == plan[name].sharding
    assert sum(reads) == sum(gone)
    assert 0 < max(on_way) <= limit
    # The limit is what holds it down.
    assert max(on_way) < sum(gone) or limit == 10**9


def test_a_limit_below_one_shard(tmp_path, monkeypatch):
    array = random((64, 64), np.float32)
    save_file({"w": array}, tmp_path / "x.safetensors")
    plan = {"w": struct(array, P(("a", "b", "c")))}
    monkeypatch.setattr(flights, "is_on_cpu", lambda sharding: False)
    with pytest.raises(
        CheckpointError,
        match="`memory_limit_bytes=100` is less than one shard of leaf `w`, 2048",
    ):
        checkpoint.load(tmp_path, plan, memory_limit_bytes=100)


def test_small_tensors_are_read_together(tmp_path, reads):
    """As many as the kernel takes at once, whatever their shapes, shardings and dtypes;
    and what is cut is in place.
    """
    shapes = [(16,), (3, 5), (), (0, 4), (8, 2), (24,)]
    arrays = {
        f"w{i:04}": random(
            shapes[i % 6], (np.float32, jnp.bfloat16, np.int8, bool)[i % 4], i
        )
        for i in range(600)
    }
    save_file(arrays, tmp_path / "x.safetensors")
    # (8, 2) in columns is cut out of what is read; the others, of up to eight pieces
    # each, go straight into place.
    for spec, most in ((P("c"), 10), (P("c", "b"), 360)):
        specs = {(16,): P("a"), (8, 2): spec, (24,): P(("a", "b", "c"))}
        plan = {
            name: struct(array, specs.get(array.shape, P()))
            for name, array in arrays.items()
        }
        reads.clear()
        loaded = checkpoint.load(tmp_path, plan)
        for name, array in arrays.items():
            assert same_bytes(loaded[name], array)
        for name, target in plan.items():
            assert loaded[name].sharding == target.sharding
        expected = sum(array.nbytes for array in arrays.values())
        assert sum(reads) == expected
        assert len(reads) <= most


def test_memory_kinds_other_shardings_and_progress(tmp_path, capsys):
    array = random((8, 8), np.float32)
    save_file({"a": array, "b": array}, tmp_path / "x.safetensors")
    pinned = NamedSharding(MESH.build(jax.devices()), P("a"), memory_kind="pinned_host")
    shardings = {"a": pinned, "b": SingleDeviceSharding(jax.devices()[5])}
    structs = {
        name: jax.ShapeDtypeStruct((8, 8), np.float32, sharding=sharding)
        for name, sharding in shardings.items()
    }
    for progress, line in (
        (None, ""),
        (True, "loading [########################] 0.00 of 0.00 GB"),
    ):
        for name, loaded in checkpoint.load(
            tmp_path, structs, progress=progress
        ).items():
            assert loaded.sharding == shardings[name]
            assert same_bytes(loaded, array)
        assert line in (printed := capsys.readouterr().err)
        assert bool(printed) == bool(line)


def test_a_checkpoint_loads_without_a_stderr(tmp_path, monkeypatch):
    array = np.ones((8, 4), np.float32)
    save_file({"a": array}, tmp_path / "x.safetensors")
    sharding = SingleDeviceSharding(jax.devices()[0])
    struct = jax.ShapeDtypeStruct((8, 4), np.float32, sharding=sharding)
    monkeypatch.setattr("sys.stderr", None)
    loaded = checkpoint.load(tmp_path, {"a": struct})
    assert same_bytes(loaded["a"], array)


def test_arrays_that_no_leaf_is_made_of_are_an_error(tmp_path, reads):
    """A checkpoint of four layers in a model of one."""
    array = np.ones((8, 4), np.float32)
    arrays = {
        "head": array,
        **{f"layers/{i}/w": np.ones(8, np.float32) for i in range(4)},
    }
    save_file(arrays, tmp_path / "x.safetensors")
    tree = {
        "layers": [{"w": arrays["layers/0/w"]} for _ in range(4)],
        "head": arrays["head"],
    }
    trees = (tree, tree | {"layers": tree["layers"][:1]})
    plan_of_all, shallow = (
        shardfx.plan(tree, MESH.build(jax.devices()), paths=PathRules.parse(".*->a"))
        for tree in trees
    )
    message = (
        "has 3 of its 5 arrays in no leaf of the plan: 'layers/1/w', 'layers/2/w',"
        " 'layers/3/w'; nothing was read.*`plan.select.*or pass `unread=\"allow\"`"
    )
    for call in (
        checkpoint.load,
        lambda *args: checkpoint.plan_reads(checkpoint.read_index(args[0]), args[1]),
    ):
        with pytest.raises(CheckpointError, match=message):
            call(tmp_path, shallow)
    assert not reads
    layers = checkpoint.load(tmp_path, shallow, unread="allow")["layers"][0]["w"]
    shape = layers.shape
    assert shape == (8,)
    # A part of a plan says by itself that the others are left.
    loaded = checkpoint.load(tmp_path, plan_of_all.select("layers/1"))
    assert loaded["head"] is None
    assert loaded["layers"][1]["w"].shape == (8,)


@pytest.mark.parametrize("to", ["float32", "bfloat16", "int8", "bool"])
def test_a_cast_may_drop_an_imaginary_part(to):
    assert may_change(jnp.dtype("complex64"), jnp.dtype(to))
    assert not may_change(jnp.dtype(to), jnp.dtype("complex64"))
    assert not may_change(jnp.dtype("complex128"), jnp.dtype("complex64"))


def test_a_complex_number_may_round_an_integer():
    for stored, is_changed in (("int64", True), ("int32", True), ("int16", False)):
        assert may_change(jnp.dtype(stored), jnp.dtype("complex64")) is is_changed
