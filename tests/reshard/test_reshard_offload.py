import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from moves import both_ways, carry_out, move_of

from shardfx import PathRules, plan, reshard
from shardfx._reshard.flight import Window
from tests.reshard.layouts import assert_equal, host, mesh, put, sharding, state


# Memory kinds


def test_offloading_by_regex_and_back():
    source = put(state(), sharding((8,), "a"))
    rules = PathRules([("w|b", P("a")), ("step", P())])
    sharding_plan = plan(
        source,
        mesh((8,)),
        paths=rules,
        memory_kinds=[("w$", "pinned_host")],
    )
    offloaded = reshard(source, sharding_plan)
    offloaded_layers = offloaded["layers"]
    memory_kinds = [layer["w"].sharding.memory_kind for layer in offloaded_layers]
    assert memory_kinds == ["pinned_host"] * 3
    first_layer = offloaded_layers[0]
    assert first_layer["b"] is source["layers"][0]["b"]
    assert_equal(offloaded, state())
    source_plan = plan(source, mesh((8,)), paths=rules)
    back = reshard(offloaded, source_plan, donate=True)
    first_layer_back = back["layers"][0]
    assert first_layer_back["w"].sharding.memory_kind != "pinned_host"
    assert first_layer["w"].is_deleted()
    assert_equal(back, state())


def test_offloads_are_bounded_in_flight():
    on_devices = sharding((8,), "a")
    in_host_memory = sharding((8,), "a", kind="pinned_host")
    values = [host((64,), number) for number in range(40)]
    source = jax.device_put(values, on_devices)
    move = move_of((64,), np.dtype("float32"), on_devices, in_host_memory)
    window = Window(100)
    bytes_in_flight = []
    moves_in_flight = []
    for array in source:
        window.make_room(move.extra_bytes)
        window.add(carry_out(move, array), move.target_bytes)
        bytes_in_flight.append(window.bytes)
        moves_in_flight.append(len(window.pending))
    assert max(bytes_in_flight) <= 100 + 32
    assert max(moves_in_flight) > 1
    tree = reshard(source, in_host_memory, memory_limit_bytes=100)
    assert_equal(tree, values)


@pytest.mark.parametrize("donate", [False, True])
@both_ways
def test_offloading_to_another_order_of_the_devices(move, donate):
    order = [2, 0, 3, 1]
    values = {"rows": host((8, 4)), "whole": host((8, 4), 1)}
    on_devices = {"rows": sharding((4,), "a"), "whole": sharding((4,))}
    in_host_memory = {
        "rows": sharding((4,), "a", order=order, kind="pinned_host"),
        "whole": sharding((4,), order=order, kind="pinned_host"),
    }
    source = jax.device_put(values, on_devices)
    offloaded = move(source, in_host_memory, donate=donate)
    assert offloaded["whole"].sharding == in_host_memory["whole"]
    assert_equal(offloaded, values)
    back = move(offloaded, on_devices, donate=donate)
    assert_equal(back, values)


@pytest.mark.skipif(
    jax.__version_info__ < (0, 10),
    reason="JAX 0.9 cannot end a jitted CPU program in host memory",
)
def test_offloading_inside_jit():
    src = sharding((2, 4), "a")
    dst = sharding((2, 4), "b", kind="pinned_host")
    x = jax.device_put(host((8, 8)), src)
    jitted = jax.jit(lambda x: reshard(x, dst, src=src))
    moved = jitted(x)
    assert moved.sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(moved, host((8, 8)))
