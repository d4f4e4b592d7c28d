import gc
import itertools as it
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from moves import carry_out, move_of

from shardfx._reshard.move import Move
from shardfx._reshard.pieces.planning import assembly_between


WAYS = ("host", "programs")
MESHES = [
    ((0, 1, 2, 3, 4, 5, 6, 7), (8,)),
    ((7, 6, 5, 4, 3, 2, 1, 0), (8,)),
    ((0, 1, 2, 3, 4, 5, 6, 7), (2, 4)),
    ((3, 1, 7, 5), (2, 2)),
    ((6, 2, 4, 0, 5, 1), (2, 3)),
    ((2, 6, 1), (3,)),
    ((5,), (1,)),
]


def transfer(x, dst, *, lost=(), donate=False, method="host", pool=None):
    """One array by one way, also where steps would lead there."""
    data = x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, x)
    shape = data.shape
    dtype = data.dtype
    copies = method == "host"
    work = assembly_between(
        shape=shape,
        dtype=dtype,
        src=x.sharding,
        dst=dst,
        lost=lost,
        may_copy_on_host=copies,
    )
    assert work.method == method or 0 in x.shape
    move = Move(
        how="tiles",
        shape=shape,
        dtype=dtype,
        src=x.sharding,
        dst=dst,
        lost=lost,
        copies=copies,
        assembly=work,
    )
    return carry_out(move, x, donate=donate, pool=pool)


def mesh(order, sizes):
    devices = np.asarray(jax.devices())[list(order)].reshape(sizes)
    return Mesh(devices, ("a", "b")[: len(sizes)])


def shardings(rank):
    """Every way to put the axes of every mesh on `rank` dimensions."""
    for order, sizes in MESHES:
        device_mesh = mesh(order, sizes)
        axes = device_mesh.axis_names
        for dims in it.product(range(-1, rank), repeat=len(axes)):
            entries = [()] * rank
            for axis, dim in zip(axes, dims, strict=True):
                if dim >= 0:
                    entries[dim] += (axis,)
            yield NamedSharding(device_mesh, P(*entries))
            if len(axes) == 2 and dims[0] == dims[1] >= 0:
                spec = P(*[entry[::-1] for entry in entries])
                yield NamedSharding(device_mesh, spec)


def values(shape, dtype=jnp.float32):
    count = int(np.prod(shape))
    numbers = np.arange(count).reshape(shape) % 100
    return numbers.astype(jnp.dtype(dtype))


def assert_is(array, expected, sharding):
    assert array.sharding == sharding
    assert array.shape == expected.shape
    assert array.dtype == expected.dtype
    for shard in array.addressable_shards:
        assert shard.device in sharding.device_set
        actual = np.asarray(shard.data).tobytes()
        assert actual == np.ascontiguousarray(expected[shard.index]).tobytes()


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_any_layout_to_any_other_on_any_devices(data):
    all_shardings = st.sampled_from(list(shardings(2)))
    src = data.draw(all_shardings)
    dst = data.draw(all_shardings)
    # Programs take seconds to compile.
    method = data.draw(st.sampled_from(15 * ["host"] + ["programs"]))
    expected = values((24, 24))
    array = transfer(jax.device_put(expected, src), dst, method=method)
    assert_is(array, expected, dst)


@pytest.mark.parametrize("method", WAYS)
@pytest.mark.parametrize("shape", [(), (12,), (12, 0), (12, 5, 6)])
def test_every_rank_and_empty_dimensions(shape, method):
    spec = P()
    if shape:
        spec = P("a")
    src = NamedSharding(mesh((0, 1, 2, 3), (2, 2)), spec)
    dst = NamedSharding(mesh((7, 3, 5), (3,)), spec)
    expected = values(shape)
    array = transfer(jax.device_put(expected, src), dst, method=method)
    assert_is(array, expected, dst)


# NaNs that arithmetic would replace by others.
ODD_NANS = {
    "bfloat16": np.array(0x7F81, "uint16"),
    "float8_e5m2": np.array(0x7D, "uint8"),
}


@pytest.mark.parametrize("method", WAYS)
@pytest.mark.parametrize(
    "dtype", ["bool", "int4", "int8", "uint16", "float8_e5m2", "bfloat16", "complex64"]
)
def test_every_dtype(dtype, method):
    device_mesh = mesh((0, 1, 2, 3), (4,))
    src = NamedSharding(device_mesh, P("a"))
    dst = NamedSharding(mesh((4, 2), (2,)), P(None, "a"))
    expected = values((8, 6), dtype).copy()
    if dtype in ODD_NANS:
        expected[:, 1] = ODD_NANS[dtype].view(expected.dtype)
    array = transfer(jax.device_put(expected, src), dst, method=method)
    assert_is(array, expected, dst)


@pytest.mark.parametrize("method", WAYS)
@pytest.mark.parametrize(
    "layouts",
    [
        ("device", "pinned_host"),
        ("pinned_host", "device"),
        ("pinned_host", "pinned_host"),
    ],
)
def test_memory_kinds_at_either_end(layouts, method):
    source_kind, target_kind = layouts
    source_mesh = mesh((0, 1, 2, 3), (4,))
    target_mesh = mesh((4, 2), (2,))
    src = NamedSharding(source_mesh, P("a"), memory_kind=source_kind)
    dst = NamedSharding(target_mesh, P(None, "a"), memory_kind=target_kind)
    expected = values((8, 6))
    x = jax.device_put(expected, src)
    moved = transfer(x, dst, method=method)
    assert_is(moved, expected, dst)
    memory_kinds = {
        shard.data.sharding.memory_kind for shard in moved.addressable_shards
    }
    assert memory_kinds == {target_kind}
    assert not x.is_deleted()


@pytest.mark.parametrize("method", WAYS)
@pytest.mark.parametrize(
    "specs", [(P("a"), P("a")), (P("a"), P(None, "a")), (P(), P("a")), (P("a"), P())]
)
def test_donation_deletes_the_source_and_nothing_else(specs, method):
    device_mesh = mesh((0, 1, 2, 3), (4,))
    src = NamedSharding(device_mesh, specs[0])
    dst = NamedSharding(mesh((3, 1), (2,)), specs[1])
    expected = values((8, 8))
    x = jax.device_put(expected, src)
    shards = [shard.data for shard in x.addressable_shards]
    moved = transfer(x, dst, donate=True, method=method)
    assert x.is_deleted()
    for shard in shards:
        assert shard.is_deleted()
    gc.collect()
    assert_is(moved, expected, dst)


def test_large_shards_are_given_up_one_by_one():
    cases = [
        (P("a"), P("a")),
        (P("a"), P(None, "a")),
        (P(None, "a"), P("a")),
        (P(None, "a"), P(None, "a")),
    ]
    expected = np.arange(4 * 1024 * 1024, dtype=np.float32).reshape(2048, 2048)
    for specs in cases:
        device_mesh = mesh((0, 1, 2, 3), (4,))
        src = NamedSharding(device_mesh, specs[0])
        dst = NamedSharding(mesh((5, 1), (2,)), specs[1])
        x = jax.device_put(expected, src)
        assert_is(transfer(x, dst), expected, dst)
        assert_is(transfer(x, dst, donate=True), expected, dst)


@pytest.mark.parametrize("method", WAYS)
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("spec", [P(), P("a")])
def test_replicas_on_lost_devices_are_not_read(spec, donate, method):
    devices = jax.devices()
    expected = values((8,))
    source = NamedSharding(mesh(range(8), (2, 4)), spec)
    boxes = source.devices_indices_map((8,)).items()
    placed = []
    for device, box in boxes:
        shard = expected[box]
        if device not in devices[3:]:
            shard = np.full_like(shard, -7)
        placed.append(jax.device_put(shard, device))
    x = jax.make_array_from_single_device_arrays((8,), source, placed)
    target = NamedSharding(mesh(range(8), (8,)), P("a"))
    array = transfer(x, target, lost=tuple(devices[:3]), donate=donate, method=method)
    assert_is(array, expected, target)


def pointers_of(array):
    pointers = [
        shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards
    ]
    return sorted(pointers)


@pytest.mark.parametrize("given_up", ["source", "result", "source deleted"])
def test_whole_shards_share_memory_that_nobody_writes_to(given_up):
    src = NamedSharding(mesh((0, 1, 2, 3), (4,)), P("a"))
    dst = NamedSharding(mesh((6, 3, 0, 5), (4,)), P("a"))
    expected = values((4096, 16))
    source = jax.jit(lambda x: x + 0, out_shardings=src)(expected)
    result = transfer(source, dst)
    assert_is(result, expected, dst)
    assert pointers_of(result) == pointers_of(source)
    if given_up.startswith("source"):
        array = result
        lost = source
    else:
        array = source
        lost = result
    if given_up.endswith("deleted"):
        lost.delete()
    else:
        overwrite = jax.jit(
            lambda x: x * 0 - 1,
            donate_argnums=0,
            out_shardings=lost.sharding,
        )
        jax.block_until_ready(overwrite(lost))
    del lost, source, result
    gc.collect()
    fill = np.full((1024, 16), -1.0, np.float32)
    others = [jax.device_put(fill, device) for device in jax.devices()]
    assert_is(array, expected, array.sharding)
    del others


def test_evenly_spaced_parts_of_a_shard_are_copied_at_once():
    """A small array of 8 shards would need 64 copies from rows to columns."""
    devices = np.asarray(jax.devices()).reshape(2, 4)
    mesh = Mesh(devices, ("a", "b"))
    rows = NamedSharding(mesh, P(("a", "b")))
    for columns in (P(None, ("a", "b")), P(None, ("b", "a"))):
        target = NamedSharding(mesh, columns)
        move = move_of((64, 64), np.dtype("float32"), rows, target)
        assert move.assembly is not None
        assert len(move.assembly.joint_copies) == 8
        large = move_of((1024, 1024), np.dtype("float32"), rows, target).assembly
        assert large is not None
        assert large.joint_copies == ()


def test_threads_also_copy_the_data_of_typed_keys(monkeypatch):
    keys = jax.random.wrap_key_data(jnp.zeros((1 << 19, 2), jnp.uint32))
    source = NamedSharding(mesh(range(4), (4,)), P("a"))
    target = NamedSharding(mesh(range(4, 8), (2, 2)), P("b"))
    tasks = []
    with ThreadPoolExecutor(1) as pool:
        submit = pool.submit

        def counted(*task):
            tasks.append(task)
            return submit(*task)

        monkeypatch.setattr(pool, "submit", counted)
        moved = transfer(jax.device_put(keys, source), target, pool=pool)
    assert moved.sharding == target
    assert tasks
