"""What the suite `reshard` measures with: pairs, rows of the census, states, and the
peers' functions.
"""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from benchmarks import _pairs, _peers, _states
from benchmarks._machine import fresh_process


def ends(devices):
    mesh = Mesh(np.array(devices).reshape(2, 4), ("x", "y"))
    return NamedSharding(mesh, P("x")), NamedSharding(mesh, P(None, "y"))


def test_a_chunk_runs_its_pairs():
    answer = fresh_process("benchmarks._pairs:run_chunk", {"chunk": 7, "chunks": 4000})
    assert answer["wrong"] == []
    assert answer["pairs"] >= answer["distinct"] == 4
    assert answer["programs of steps compiled"] == 4


def test_wrong_values_and_wrong_shardings_are_found():
    src, dst = ends(jax.devices()[:8])
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    assert _pairs._is_right(values, _pairs.placed(values, dst), dst)
    assert not _pairs._is_right(values, _pairs.placed(values, src), dst)
    assert not _pairs._is_right(
        values, _pairs.placed(np.where(values == 63, -0.0, values), dst), dst
    )
    ways = {"steps": lambda x: x + 1}
    [text] = _pairs._wrong_ways(values, (src, dst), (src, dst), ways)
    assert text.endswith("by steps")


def test_a_wrong_leaf_of_a_tree_is_found():
    _, dst = ends(jax.devices()[:8])
    values = {"a": np.arange(64.0).reshape(8, 8), "b": np.ones((4, 4))}
    targets = {"a": dst, "b": dst}
    check = _states.equals(values, targets)
    right = jax.tree.map(_pairs.placed, values, targets)
    check(None, right)
    placed = jax.device_put(right["b"], jax.devices()[0])
    for wrong in (
        {**right, "b": right["b"] * 2},
        {**right, "b": placed},
    ):
        with pytest.raises(AssertionError):
            check(None, wrong)


@pytest.mark.filterwarnings("ignore:.with mesh:DeprecationWarning")  # eformer
@pytest.mark.parametrize(
    "name", ["whole_jit", "jit_per_leaf", "device_put", "eformer", "scalax"]
)
def test_peers_move_every_leaf(name):
    if name in ("eformer", "scalax"):
        pytest.importorskip(
            name,
            reason=(
                f"{name} is a rival of the benchmarks; the extra `bench` installs it"
            ),
        )
    source, there = ends(jax.devices()[:8])
    values = {
        "w": np.arange(64.0).reshape(8, 8).astype(np.float32),
        "norm": np.arange(8.0, dtype=np.float32),
    }
    src = {"w": source, "norm": NamedSharding(source.mesh, P("x"))}
    dst = {"w": there, "norm": NamedSharding(source.mesh, P())}
    if name == "whole_jit":
        peer = _peers.whole_jit(src, dst)
    else:
        peer = getattr(_peers, name)(dst)
    tree = jax.tree.map(_pairs.placed, values, src)
    _states.equals(values, dst)(tree, peer(tree))
