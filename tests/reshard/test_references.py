"""What a move leaves behind: no reference to an array, without a garbage collector."""

import gc
import weakref

import jax
import numpy as np
import pytest

from shardfx import From, TreeMap, checkpoint, reshard
from tests.reshard.layouts import host, sharding


@pytest.fixture
def no_collector():
    """Without the garbage collector, which would hide a cycle of references."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _rows():
    return jax.device_put(host((16, 16)), sharding((8,), "a"))


def _columns(count=8):
    return sharding((count,), None, "a")


def _to_same_devices():
    source = _rows()
    return source, reshard(source, _columns())


def _to_other_devices():
    source = _rows()
    return source, reshard(source, _columns(4))


def _within_a_limit():
    source = _rows()
    return source, reshard(source, _columns(4), memory_limit_bytes=1 << 20)


def _donated():
    source = _rows()
    return source, reshard(source, _columns(4), donate=True)


def _by_a_map():
    source = _rows()
    wanted = jax.ShapeDtypeStruct((16, 16), source.dtype, sharding=_columns(4))
    moved = reshard(
        {"rows": source}, {"columns": wanted}, map=TreeMap({"columns": From("rows")})
    )
    return source, moved["columns"]


def _of_many_small_arrays():
    sources = [_rows() for _ in range(20)]
    moved = reshard(sources, _columns(4))
    return sources[0], moved[0]


MOVES = [
    _to_same_devices,
    _to_other_devices,
    _within_a_limit,
    _donated,
    _by_a_map,
    _of_many_small_arrays,
]


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__.strip("_"))
def test_a_move_keeps_neither_source_nor_result(move, no_collector):
    # The first move fills the caches of plans and programs.
    move()
    source, result = move()
    alive = [weakref.ref(source), weakref.ref(result)]
    del source, result
    assert [reference() for reference in alive] == [None, None]


def test_save_and_load_keep_no_array(tmp_path, no_collector):
    struct = jax.ShapeDtypeStruct((16, 16), np.float32, sharding=_columns(4))
    for name in ("first", "second"):
        source = _rows()
        checkpoint.save(tmp_path / name, {"rows": source})
        (loaded,) = checkpoint.load(tmp_path / name, {"rows": struct}).values()
        alive = [weakref.ref(source), weakref.ref(loaded)]
        del source, loaded
    assert [reference() for reference in alive] == [None, None]
