"""What the suite `reshard` measures with: pairs, rows of the census, states, and the peers' functions."""

import argparse
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from benchmarks import _census, _pairs, _peers, _states, reshard as suite
from benchmarks._case import Case
from benchmarks._machine import fresh_process
from benchmarks._runner import Options


def ends(devices):
    mesh = Mesh(np.array(devices).reshape(2, 4), ("x", "y"))
    return NamedSharding(mesh, P("x")), NamedSharding(mesh, P(None, "y"))


def test_every_pair_is_in_one_group_and_a_group_is_of_one_placement():
    layouts = _pairs.every_layout(16)
    groups = _pairs._by_placement(layouts)
    assert len(layouts) == 183 and len(groups) == 117**2
    assert len({pair for group in groups for pair in group}) == sum(map(len, groups)) == 183**2
    largest = max(groups, key=len)
    assert len(_pairs._by_steps(largest)) == 1


def test_a_chunk_runs_its_pairs():
    found = fresh_process("benchmarks._pairs:run_chunk", {"chunk": 7, "chunks": 4000})
    assert found["wrong"] == [] and found["pairs"] >= found["distinct"] == 4
    assert found["programs of steps compiled"] == 4


def test_wrong_values_and_wrong_shardings_are_found():
    src, dst = ends(jax.devices()[:8])
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    assert _pairs._is_right(values, _pairs.placed(values, dst), dst)
    assert not _pairs._is_right(values, _pairs.placed(values, src), dst)
    assert not _pairs._is_right(values, _pairs.placed(np.where(values == 63, -0.0, values), dst), dst)
    [text] = _pairs._wrong_ways(values, (src, dst), (src, dst), {"steps": lambda x: x + 1})
    assert text.endswith("by steps")


@pytest.mark.parametrize("text", ["0/3", "4/3", "3"])
def test_a_part_that_is_none_is_refused(text):
    with pytest.raises((argparse.ArgumentTypeError, ValueError)):
        suite._part(text)


def row(temp, speedup, wire=8.0):
    two = {"xla": temp, "ours": 1 << 20}
    wires, seconds = {"xla": 9.0, "ours": wire}, {"xla": 0.1, "ours": 0.1}
    return _census.Row("(a, -) on 4 to (-, a) on 4", "all_to_all", 1 << 20, 0, 4, two, wires, seconds, speedup)


def test_the_census_counts_single_moves_that_are_slower():
    values = _census._summary([row(1 << 24, 6.0), row(1 << 20, 0.5), row(1 << 20, 2.0), row(1 << 20, 0.95, wire=11.0)])
    assert values["pairs where XLA rematerializes"] == 1
    assert values["pairs elsewhere"] == 3
    assert values["pairs elsewhere more than 1.1x slower than XLA"] == 1
    assert str(values["slowest elsewhere, 1"]).startswith("0.50, (a, -) on 4 to (-, a) on 4: all_to_all")
    assert "slowest elsewhere, 2" not in values
    assert values["pairs with more wire bytes than XLA"] == 1


def test_pairs_that_were_only_compiled_have_no_speed():
    assert not [key for key in _census._summary([row(1 << 20, None)]) if "speedup" in key or "slower" in key]


def test_the_state_has_llamas_leaves():
    shapes = _states._shapes(32, moments=True)
    assert [len(jax.tree.leaves(part)) for part in (shapes["params"], shapes["adam"]["mu"])] == [291, 291]
    assert shapes["params"]["model"]["layers"]["31"]["mlp"]["up_proj"]["weight"].shape == (448, 128)
    values = jax.tree.leaves(_states._values(shapes["params"]))
    assert all(np.isfinite(x.astype(np.float32)).all() for x in values)
    assert values[0].dtype == jnp.bfloat16


def test_a_wrong_leaf_of_a_tree_is_found():
    _, dst = ends(jax.devices()[:8])
    values = {"a": np.arange(64.0).reshape(8, 8), "b": np.ones((4, 4))}
    targets = {"a": dst, "b": dst}
    check = _states.equals(values, targets)
    right = jax.tree.map(_pairs.placed, values, targets)
    check(None, right)
    for wrong in ({**right, "b": right["b"] * 2}, {**right, "b": jax.device_put(right["b"], jax.devices()[0])}):
        with pytest.raises(AssertionError):
            check(None, wrong)


def require(peer):
    if peer in ("eformer", "scalax"):
        pytest.importorskip(peer, reason=f"{peer} is a rival of the benchmarks; the extra `bench` installs it")


@pytest.mark.filterwarnings("ignore:.with mesh:DeprecationWarning")  # eformer
@pytest.mark.parametrize("name", ["whole_jit", "jit_per_leaf", "device_put", "eformer", "scalax"])
def test_peers_move_every_leaf(name):
    require(name)
    here, there = ends(jax.devices()[:8])
    values = {"w": np.arange(64.0).reshape(8, 8).astype(np.float32), "norm": np.arange(8.0, dtype=np.float32)}
    src = {"w": here, "norm": NamedSharding(here.mesh, P("x"))}
    dst = {"w": there, "norm": NamedSharding(here.mesh, P())}
    way = _peers.whole_jit(src, dst) if name == "whole_jit" else getattr(_peers, name)(dst)
    tree = jax.tree.map(_pairs.placed, values, src)
    _states.equals(values, dst)(tree, way(tree))


def test_scalax_says_that_it_takes_no_other_devices():
    require("scalax")
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    with pytest.raises(ValueError, match="over all"):
        _peers.scalax({"w": NamedSharding(mesh, P("x"))})


def test_alpas_cases_between_meshes_share_no_device():
    devices = list(range(20))
    made = suite.between_meshes(Options(True, 1, devices, SimpleNamespace()))  # pyright: ignore[reportArgumentType]
    assert [entry.name.partition(",")[0] for entry in made if isinstance(entry, Case)] == [
        "Alpa's case 6",
        "Alpa's cases 7 and 8",
    ]
