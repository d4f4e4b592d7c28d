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
    there = reshard(source, sharding_plan)
    memory_kinds = [layer["w"].sharding.memory_kind for layer in there["layers"]]
    assert memory_kinds == ["pinned_host"] * 3
    layers = there["layers"][0]["b"]
    assert layers is source["layers"][0]["b"]
    assert_equal(there, state())
    rules = PathRules([("w|b", P("a")), ("step", P())])
    source_plan = plan(source, mesh((8,)), paths=rules)
    back = reshard(
        there,
        source_plan,
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
    tree = reshard(source, away, memory_limit_bytes=100)
    expected = [host((64,), i) for i in range(40)]
    assert_equal(
        tree,
        expected,
    )


@pytest.mark.parametrize("donate", [False, True])
@both_ways
def test_offloading_to_another_order_of_the_devices(move, donate):
    order = [2, 0, 3, 1]
    source = {
        "rows": jax.device_put(host((8, 4)), sharding((4,), "a")),
        "whole": jax.device_put(host((8, 4), 1), sharding((4,))),
    }
    away = sharding((4,), "a", order=order, kind="pinned_host")
    whole = sharding((4,), order=order, kind="pinned_host")
    expected = {"rows": host((8, 4)), "whole": host((8, 4), 1)}
    there = move(source, {"rows": away, "whole": whole}, donate=donate)
    assert there["whole"].sharding == whole
    assert_equal(there, expected)
    shardings = {"rows": sharding((4,), "a"), "whole": sharding((4,))}
    assert_equal(move(there, shardings, donate=donate), expected)


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
