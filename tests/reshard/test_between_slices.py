"""Moves to other devices, of which some are in another TPU slice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from moves import move_of, through_programs

from shardfx import From, TreeMap, clear_caches, plan_reshard, topology
from shardfx._reshard.pieces import relay


SHAPE = (24, 16)


def slice_of(device):
    """The number of a device's slice."""
    return device.id // 4


@pytest.fixture
def two_slices(monkeypatch):
    """Devices 0 to 3 are in one slice, and devices 4 to 7 in another."""

    def slices(devices):
        positions_by_slice = {}
        for position, device in enumerate(np.ravel(devices)):
            positions = positions_by_slice.setdefault(slice_of(device), [])
            positions.append(position)
        numbers = sorted(positions_by_slice)
        return tuple(tuple(positions_by_slice[number]) for number in numbers)

    clear_caches()
    monkeypatch.setattr(topology, "slices", slices)
    yield
    clear_caches()


def sharding(numbers, sizes, spec):
    devices = np.array(jax.devices())[list(numbers)].reshape(sizes)
    return NamedSharding(Mesh(devices, ("a", "b", "c")[: len(sizes)]), spec)


def on_first_slice(spec):
    """A sharding over the four devices of the first slice, as one axis."""
    return sharding(numbers=range(4), sizes=(4,), spec=spec)


def on_second_slice(spec):
    """A sharding over the four devices of the second slice, as one axis."""
    return sharding(numbers=range(4, 8), sizes=(4,), spec=spec)


def on_square_of_second_slice(spec):
    """A sharding over the four devices of the second slice, as two axes."""
    return sharding(numbers=range(4, 8), sizes=(2, 2), spec=spec)


def move_by_programs(x, target):
    """The planned move of an array whose pieces programs send."""
    return move_of(
        shape=x.shape,
        dtype=x.dtype,
        src=x.sharding,
        dst=target,
        lost=(),
        copies=False,
    )


def array(source, shape=SHAPE, dtype=jnp.float32):
    values = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    return jax.device_put(values, source)


def leaf_of(x, target):
    [leaf] = plan_reshard(x, target).leaves
    return leaf


def test_an_element_enters_a_slice_once(two_slices):
    x = array(on_first_slice(P("a")))
    target = on_square_of_second_slice(P("a"))
    leaf = leaf_of(x, target)
    # Each of four devices needs half of the array. A quarter comes from the other
    # slice, and a quarter from the device that holds the same half.
    assert leaf.dcn_bytes == x.nbytes // 4
    assert leaf.wire_bytes == x.nbytes // 2
    assert [step.kind for step in leaf.steps] == ["all_gather"]
    assert "tiles > all_gather" in str(plan_reshard(x, target))
    moved = through_programs(x, target)
    assert moved.sharding == target
    np.testing.assert_array_equal(moved, x)


# The numbers of the devices, the sizes of the mesh, and the spec.
TARGETS = [
    (range(4, 8), (2, 2), P()),
    (range(4, 8), (4,), P()),
    ((7, 5, 6, 4), (2, 2), P(None, "b")),
    (range(2, 8), (3, 2), P("a")),
    (range(2, 8), (2, 3), P("b")),
    (range(1, 8), (7,), P()),
    ((4, 5, 6), (3,), P()),
]


DTYPES = [jnp.float32, jnp.bfloat16, jnp.int8]


@pytest.mark.parametrize("number", range(len(TARGETS)))
def test_values_arrive_and_no_more_bytes_cross(two_slices, number):
    target = sharding(*TARGETS[number])
    sources = (
        on_first_slice(P("a")),
        sharding(range(4), (2, 2), P(None, "b")),
        sharding((0, 1, 4), (3,), P("a")),
    )
    for source_number, source in enumerate(sources):
        # Each target and each source meets each dtype.
        dtype_that_moves = DTYPES[(number + source_number) % len(DTYPES)]
        for dtype in DTYPES:
            x = array(source, dtype=dtype)
            if dtype == dtype_that_moves:
                moved = through_programs(x, target)
                assert moved.sharding == target
                np.testing.assert_array_equal(moved, x)
            leaf = leaf_of(x, target)
            assert leaf.dcn_bytes <= leaf.wire_bytes
            assembly = move_by_programs(x, target).assembly
            assert assembly is not None
            most_bytes = crossing(source, target) * x.nbytes
            if leaf.steps:
                assert assembly.dcn_bytes < most_bytes
            else:
                assert assembly.dcn_bytes == most_bytes


def crossing(source, target):
    """How many times the array crosses if each device receives what it lacks from the
    other slice by itself.
    """
    source_shards = source.addressable_devices_indices_map(SHAPE)
    target_shards = target.addressable_devices_indices_map(SHAPE)
    elements = 0
    for receiver, target_index in target_shards.items():
        is_lacking = np.zeros(SHAPE, bool)
        is_lacking[target_index] = True
        for holder, source_index in source_shards.items():
            if slice_of(holder) == slice_of(receiver):
                is_lacking[source_index] = False
        elements += is_lacking.sum()
    return elements / np.prod(SHAPE)


def test_a_replica_in_the_same_slice_sends(two_slices):
    x = array(sharding((0, 4), (2,), P()))
    leaf = leaf_of(x, sharding((5, 6, 7), (3,), P()))
    assert leaf.dcn_bytes == 0
    assert {sender for sender, _ in leaf.links} == {4}


def test_shards_that_nothing_divides_move_at_once(two_slices):
    x = array(on_first_slice(P()), shape=(3, 5))
    target = on_second_slice(P())
    leaf = leaf_of(x, target)
    assert leaf.steps == ()
    assert leaf.dcn_bytes == x.nbytes
    np.testing.assert_array_equal(through_programs(x, target), x)


def test_a_limit_and_donation_hold(two_slices):
    x = array(on_first_slice(P("a")), shape=(64, 64))
    expected = np.asarray(x)
    target = on_square_of_second_slice(P())
    assert leaf_of(x, target).steps
    move = move_by_programs(x, target)
    assert move.least_bytes < move.extra_bytes
    moved = through_programs(
        x, target, donate=True, memory_limit_bytes=move.least_bytes
    )
    assert x.is_deleted()
    np.testing.assert_array_equal(moved, expected)


def test_keys_enter_once(two_slices):
    keys = jax.random.split(jax.random.key(0), 8)
    x = jax.device_put(keys, on_first_slice(P("a")))
    target = on_second_slice(P())
    moved = through_programs(x, target)
    assert moved.sharding.is_equivalent_to(target, 1)
    np.testing.assert_array_equal(jax.random.key_data(moved), jax.random.key_data(x))


def test_through_a_map_an_element_enters_once(two_slices):
    x = array(on_first_slice(P("a")))
    target = on_second_slice(P())
    structs = {"t": jax.ShapeDtypeStruct(SHAPE[::-1], x.dtype, sharding=target)}
    turn = TreeMap({"t": From("w").T})
    [leaf] = plan_reshard({"w": x}, structs, map=turn).leaves
    assert leaf.dcn_bytes == x.nbytes // 4
    assert leaf.wire_bytes == leaf.lower_bound_bytes == x.nbytes
    assert [step.kind for step in leaf.steps] == ["all_gather"]
    assert leaf.peak_bytes >= leaf.source_bytes + leaf.target_bytes
    for limit_bytes in (None, 100_000):
        moved = through_programs(
            {"w": x},
            structs,
            map=turn,
            memory_limit_bytes=limit_bytes,
        )
        assert moved["t"].sharding == target
        np.testing.assert_array_equal(moved["t"], x.T)


@pytest.fixture
def relays_of_any_size(two_slices, monkeypatch):
    """Relays also for parts that are smaller than it is worth."""
    monkeypatch.setattr(relay, "LEAST_SAVED_BYTES", 1)


def entering(source, target, shape):
    """How many elements enter slices if each enters a slice once."""
    is_lacking = np.zeros((2, *shape), bool)
    for receiver, index in target.devices_indices_map(shape).items():
        is_lacking[slice_of(receiver)][index] = True
    for holder, index in source.devices_indices_map(shape).items():
        is_lacking[slice_of(holder)][index] = False
    return is_lacking.sum()


# Slices end inside of mesh axes, or the replicas do not divide the shards. Behind the
# fields of a target stands the shape of the array.
UNEVEN = [
    (range(1, 7), (3, 2), P(), SHAPE),
    (range(1, 7), (3, 2), P("b"), SHAPE),
    (range(1, 7), (3, 2), P(None, "a"), (24, 15)),
    (range(2, 8), (2, 3), P(), SHAPE),
    (range(2, 8), (6,), P(), (5, 7)),
    ((0, 4, 1, 5, 2, 6, 3, 7), (8,), P(), SHAPE),
    (range(4, 8), (2, 2), P("b"), (2, 5)),
]


@pytest.mark.parametrize("target", UNEVEN)
def test_relays_let_each_element_enter_a_slice_once(relays_of_any_size, target):
    *where, shape = target
    target = sharding(*where)
    source = on_first_slice(P())
    if shape[0] % 4 == 0:
        source = sharding((3, 1, 0, 7), (4,), P("a"))
    for dtype in (jnp.bfloat16, jnp.int4):
        x = array(source, shape, dtype)
        move = move_by_programs(x, target)
        assert move.assembly is not None
        # Parts of 4-bit elements are whole bytes.
        if dtype == jnp.bfloat16:
            assert move.assembly.dcn_bytes == 2 * entering(source, target, shape)
        moved = through_programs(x, target)
        assert moved.sharding == target
        np.testing.assert_array_equal(moved, x)


def test_relays_keep_limits_and_plans_count_them(relays_of_any_size):
    x = array(on_first_slice(P("a")), (16, 12))
    expected = np.asarray(x)
    target = sharding(range(2, 8), (2, 3), P())
    move = move_by_programs(x, target)
    assert move.assembly is not None
    assert move.assembly.relay is not None
    assert move.least_bytes < move.extra_bytes
    leaf = leaf_of(x, target)
    # Each of six devices gets what it lacks, in whichever way.
    assert leaf.wire_bytes == (2 * 3 + 4 * 4) * x.nbytes // 4 // 6
    assert leaf.peak_bytes >= leaf.source_bytes + 2 * leaf.target_bytes
    moved = through_programs(
        x, target, donate=True, memory_limit_bytes=move.least_bytes
    )
    assert x.is_deleted()
    np.testing.assert_array_equal(moved, expected)


def test_relays_serve_maps_and_keys(relays_of_any_size):
    x = array(on_first_slice(P("a")))
    target = sharding(range(1, 7), (3, 2), P("b"))
    struct = jax.ShapeDtypeStruct((16, 48), jnp.bfloat16, sharding=target)
    repeated = From("w").T.repeat(2, dim=1, unit=3).cast("bfloat16")
    rules = TreeMap({"t": repeated})
    [leaf] = plan_reshard({"w": x}, {"t": struct}, map=rules).leaves
    # Half of the devices are in a slice that has nothing; elements come as bfloat16.
    assert leaf.dcn_bytes == -(-x.size * 2 // 6)
    moved = through_programs({"w": x}, {"t": struct}, map=rules)
    np.testing.assert_array_equal(moved["t"], rules.apply({"w": np.asarray(x)})["t"])

    keys = jax.random.split(jax.random.key(0), 8)
    x = jax.device_put(keys, on_first_slice(P("a")))
    target = sharding(range(1, 7), (3, 2), P())
    moved = through_programs(x, target)
    np.testing.assert_array_equal(jax.random.key_data(moved), jax.random.key_data(x))


def test_few_bytes_are_not_relayed(two_slices):
    x = array(on_first_slice(P()))
    target = sharding(range(1, 7), (3, 2), P())
    move = move_by_programs(x, target)
    assert move.assembly is not None
    assert move.assembly.relay is None
