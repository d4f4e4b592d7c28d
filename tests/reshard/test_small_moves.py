"""Many small arrays of one kind, which are copied by what was computed once."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from moves import move_of

from shardfx import clear_caches, reshard
from shardfx._reshard.pieces.small_moves import small_mover
from shardfx.errors import MoveError


SHAPE = (16, 24)
MOVES = [
    (((8,), P("a")), ((8,), P(None, "a"))),
    (((2, 4), P("a", "b")), ((2, 4), P("b", "a"))),
    (((8,), P(None, "a")), ((2, 4), P("a"))),
    (((8,), P()), ((2, 4), P("b", "a"))),
    (((4,), P("a")), ((8,), P(None, "a"))),
    (((8,), P("a")), ((4,), P("a"))),
]
# One function, so that a program is compiled once for all arrays of one kind.
identity = jax.jit(lambda x: x)
DTYPES = ["float32", "bfloat16", "int8", "bool", "complex64", "int4", "float8_e4m3fn"]


def sharding(mesh_shape, spec):
    count = math.prod(mesh_shape)
    devices = np.array(jax.devices()[:count])
    names = ("a", "b")[: len(mesh_shape)]
    mesh = Mesh(devices.reshape(mesh_shape), names)
    return NamedSharding(mesh, spec)


def arrays(source, dtype, count=3):
    numbers = np.arange(math.prod(SHAPE)).reshape(SHAPE)
    placed = []
    for offset in range(count):
        values = (numbers + offset) % 7
        array = values.astype(jnp.dtype(dtype))
        placed.append(jax.device_put(array, source))
    return placed


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("source", "target"), MOVES)
def test_each_array_is_what_device_put_makes(source, target, dtype):
    src = sharding(*source)
    dst = sharding(*target)
    tree = arrays(src, dtype)
    expected = jax.device_put(tree, dst)
    moved = reshard(tree, dst)
    for array, moved_array, placed in zip(tree, moved, expected, strict=True):
        assert moved_array.sharding == dst
        assert moved_array.aval == placed.aval
        assert moved_array.committed
        np.testing.assert_array_equal(moved_array, placed)
        np.testing.assert_array_equal(moved_array, array)
        # A jitted function takes it as it is.
        same = identity(moved_array)
        np.testing.assert_array_equal(same, placed)


def test_donated_arrays_are_gone():
    rows = sharding((8,), P("a"))
    columns = sharding((8,), P(None, "a"))
    tree = arrays(rows, "float32")
    expected = [np.array(array) for array in tree]
    moved = reshard(tree, columns, donate=True)
    assert all(array.is_deleted() for array in tree)
    for array, values in zip(moved, expected, strict=True):
        np.testing.assert_array_equal(array, values)


def test_what_a_kind_has_in_common_is_computed_once(monkeypatch):
    clear_caches()
    calls = []
    make = jax.make_array_from_callback

    def counted(*args, **options):
        calls.append(args)
        return make(*args, **options)

    monkeypatch.setattr(jax, "make_array_from_callback", counted)
    rows = sharding((8,), P("a"))
    columns = sharding((8,), P(None, "a"))
    tree = arrays(rows, "float32", count=20)
    reshard(tree, columns)
    assert len(calls) == 1


def mover_of(shape, source, target):
    move = move_of(shape, np.dtype("float32"), source, target)
    assert move.assembly is not None
    return small_mover(move.assembly)


def test_large_arrays_and_views_move_otherwise():
    rows = sharding((8,), P("a"))
    columns = sharding((8,), P(None, "a"))
    halves = sharding((2,), P("a"))
    assert mover_of(SHAPE, rows, columns) is not None
    assert mover_of((1024, 1024), rows, columns) is None
    assert mover_of(SHAPE, halves, rows) is None
    with jax.transfer_guard_host_to_device("disallow_explicit"):
        assert mover_of(SHAPE, rows, columns) is None


def test_arrays_that_cannot_move_together_move_alone():
    rows = sharding((8,), P("a"))
    columns = sharding((8,), P(None, "a"))
    plain = arrays(rows, "float32", count=5)
    weak = jax.device_put(jnp.broadcast_to(jnp.asarray(2.0), SHAPE), rows)
    assert weak.weak_type
    tree = [plain[0], plain[1], plain[0], weak, *plain[2:]]
    moved = reshard(tree, columns)
    for array, moved_array in zip(tree, moved, strict=True):
        assert moved_array.sharding == columns
        assert moved_array.weak_type == array.weak_type
        np.testing.assert_array_equal(moved_array, array)
    assert moved[0] is moved[2]


def test_more_arrays_than_move_together_all_move():
    rows = sharding((8,), P("a"))
    columns = sharding((8,), P(None, "a"))
    mover = mover_of(SHAPE, rows, columns)
    assert mover is not None
    count = 2 * mover.most_together + 1
    tree = arrays(rows, "float32", count)
    for array, moved in zip(tree, reshard(tree, columns), strict=True):
        np.testing.assert_array_equal(moved, array)


def test_the_first_deleted_array_is_named():
    rows = sharding((8,), P("a"))
    columns = sharding((8,), P(None, "a"))
    tree = arrays(rows, "float32", count=4)
    tree[2].delete()
    with pytest.raises(
        MoveError, match=r"stopped at leaf `2` .* after 2 of 4"
    ) as caught:
        reshard(tree, columns)
    assert sorted(caught.value.moved) == ["0", "1"]
