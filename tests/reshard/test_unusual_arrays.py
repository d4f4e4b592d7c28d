"""PRNG keys and empty arrays inside `jit`, and plans of live devices that are pickled."""

import copy
import itertools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from shardfx import plan_reshard, reshard
from shardfx.errors import PlanMismatchError


SPECS = (P(), P("a"), P(None, "b"), P(("b", "a")))


def mesh(kind=AxisType.Auto):
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    return Mesh(devices, ("a", "b"), axis_types=(kind, kind))


def shards_of(array):
    """The index and the raw data of each shard."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    shards = []
    for shard in array.addressable_shards:
        values = np.asarray(shard.data)
        shards.append((shard.index, values))
    return shards


def assert_moved(moved, array, target):
    assert moved.dtype == array.dtype
    assert moved.shape == array.shape
    assert moved.sharding.is_equivalent_to(target, moved.ndim)
    # JAX cannot gather an empty array that is sharded.
    expected = shards_of(jax.device_put(array, target))
    for shard, expected_shard in zip(shards_of(moved), expected, strict=True):
        index, values = shard
        expected_index, expected_values = expected_shard
        assert index == expected_index
        assert (values == expected_values).all()


@pytest.mark.parametrize("impl", ["rbg", "threefry2x32"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_keys_and_empty_arrays_move_inside_jit(kind, impl):
    sources = []
    targets = []
    for source_spec, target_spec in itertools.permutations(SPECS, 2):
        sources.append(NamedSharding(mesh(kind), source_spec))
        targets.append(NamedSharding(mesh(kind), target_spec))
    key = jax.random.key(0, impl=impl)
    keys = jax.random.split(key, (8, 4))
    arrays = (
        keys,
        jnp.zeros((0, 4)),
        jnp.zeros((8, 0), jnp.int8),
        keys[:0],
    )
    trees = [jax.device_put(arrays, source) for source in sources]

    def moved(trees):
        results = []
        for tree, source, target in zip(trees, sources, targets, strict=True):
            # Explicit types say how an array lies.
            src = source if kind == AxisType.Auto else None
            results.append(reshard(tree, target, src=src))
        return results

    results = jax.jit(moved, out_shardings=targets)(trees)
    for tree, result, target in zip(trees, results, targets, strict=True):
        for array, moved_array in zip(tree, result, strict=True):
            assert_moved(moved_array, array, target)


def test_a_plan_of_live_devices_is_a_value():
    tree = {"w": jnp.zeros((8, 4)), "b": jnp.zeros(4)}
    sources = {
        "w": NamedSharding(mesh(), P("a")),
        "b": jax.sharding.SingleDeviceSharding(jax.devices()[2]),
    }
    targets = {
        "w": NamedSharding(mesh(), P(None, "b")),
        "b": NamedSharding(mesh(), P()),
    }
    arrays = jax.device_put(tree, sources)
    sharding = NamedSharding(mesh().abstract_mesh, P("a"))
    abstract = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)
    moves = [
        plan_reshard(arrays, targets),
        plan_reshard({"v": abstract}, {"v": abstract}),
    ]
    for move in moves:
        decoded = pickle.loads(pickle.dumps(move))
        for again in (decoded, copy.deepcopy(move)):
            assert again == move
            assert str(again) == str(move)
            assert again.leaves[0].src == move.leaves[0].src
    text = pickle.dumps(moves[0]).replace(b"cpu", b"tpu")
    with pytest.raises(PlanMismatchError, match=r"src.off\(\), dst.off\(\)\)`\.$"):
        pickle.loads(text)
