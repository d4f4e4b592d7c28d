import os
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from moves import both_ways, move_of

from shardfx import TreeMap, plan_reshard, reshard
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
    for layer in source["layers"]:
        assert layer["w"].is_deleted()
        assert not layer["b"].is_deleted()
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
    expected = dict.fromkeys("abc", host((8, 8)))
    assert_equal(moved, expected)


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
    cases = (P("c", "d"), P("d"), P())
    yield from (NamedSharding(mesh((2, 4), "cd"), spec) for spec in cases)
    order = range(7, -1, -1)
    yield NamedSharding(mesh((8,), "z", order=order), P())
    order = (4, 5, 6, 7, 0, 1, 2, 3)
    yield NamedSharding(mesh((2, 4), order=order), P("a"))


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
        actual = x.sharding.devices_indices_map((8, 8))
        same = actual == dst.devices_indices_map((8, 8))
        assert same == idle == leaf.idle, (layouts[ours], dst)
        moved = move(x, dst, donate=True)
        assert moved.sharding == dst, theirs
        assert moved.sharding.mesh == dst.mesh, theirs
        assert moved.committed, theirs
        assert x.is_deleted() != idle
        assert not idle or pointers(moved) == before
        np.testing.assert_array_equal(moved, host((8, 8)))


# Prints the most memory that a donated array of 64 MiB takes beside itself, over its
# bytes, and whether its values are right.
DONATED_COLUMNS = """
    import gc
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from shardfx import reshard

    def status(field):
        with open("/proc/self/status") as lines:
            return next(1024 * int(line.split()[1]) for line in lines if field in line)

    jax.config.update("jax_num_cpu_devices", 8)
    devices = np.array(jax.devices())
    columns = NamedSharding(Mesh(devices, ("x",)), P(None, "x"))
    rows = NamedSharding(Mesh(devices[:4], ("x",)), P("x"))
    def make(size):
        numbers = np.arange(size * size, dtype=np.int32).reshape(size, size)
        return jax.device_put(numbers, columns)
    jax.block_until_ready(reshard(make(1024), rows, donate=True))
    array = jax.block_until_ready(make(4096))
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = status("VmRSS")
    moved = jax.block_until_ready(reshard(array, rows, donate=True))
    print((status("VmHWM") - before) / moved.nbytes, array.is_deleted())
    numbers = np.arange(moved.size, dtype=np.int32).reshape(moved.shape)
    print(np.array_equal(moved, numbers))
"""


@pytest.mark.skipif(
    not os.path.exists("/proc/self/clear_refs"),
    reason="only Linux says the peak memory of a process",
)
def test_donated_columns_become_rows_in_a_third_of_their_bytes():
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(DONATED_COLUMNS)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    peak, is_deleted, is_equal = result.stdout.split()
    assert float(peak) < 0.33
    assert (is_deleted, is_equal) == ("True", "True")


def test_a_donated_tree_of_which_nothing_is_made_is_freed():
    dropped = jax.device_put(host((8, 8)), sharding((8,), "a"))
    nothing = TreeMap({}, drop=["dropped"])
    assert reshard({"dropped": dropped}, {}, map=nothing, donate=True) == {}
    assert dropped.is_deleted()
