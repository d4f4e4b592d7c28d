import functools as ft
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moves import move_of, through_programs

from benchmarks._programs import lowered, steps_program
from shardfx.errors import MoveError
from tests.reshard.layouts import assert_equal, host, put, sharding, state, targets


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
    for x in jax.tree.leaves(source):
        if isinstance(x, jax.Array):
            assert not x.is_deleted()
    least = least_in(error)
    with pytest.raises(MoveError, match="is too little for it and 2 more"):
        through_programs(source, expected, memory_limit_bytes=least - 1)
    moved = through_programs(source, expected, memory_limit_bytes=least, donate=True)
    assert_equal(moved["layers"], state()["layers"])
    actual = moved["layers"][0]["w"].sharding
    assert actual == expected["layers"][0]["w"]
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
    if parts == 1:
        chunks = None
    else:
        chunks = move.chunks_of(parts)
    steps: Any = steps_program(shape, dtype, source(), target())
    allocated = temp_bytes(
        lowered(
            fn=ft.partial(steps, chunks=chunks),
            shape=shape,
            dtype=dtype,
            src=source(),
            dst=target(),
        )
    )
    devices = len(move.src.device_set)
    if chunks is None:
        needed = move.extra_bytes
    else:
        needed = move.bytes_in(chunks)
    # The pointers of a tuple and scalars are allocations, but no copies of the array.
    assert 0 <= allocated <= needed // devices + 4096


def temp_bytes(lowered):
    return lowered.compile().memory_analysis().temp_size_in_bytes
