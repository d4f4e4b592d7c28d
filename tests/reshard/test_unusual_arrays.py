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


def data(array):
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    if is_key:
        whole = jax.random.key_data(array)
    else:
        whole = array
    return [(shard.index, np.asarray(shard.data)) for shard in whole.addressable_shards]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_keys_and_empty_arrays_move_inside_jit(kind):
    pairs = list(itertools.permutations(SPECS, 2))
    layouts = [[NamedSharding(mesh(kind), spec) for spec in pair] for pair in pairs]
    keys = jax.random.split(jax.random.key(0), (8, 4))
    for impl in ("rbg", "threefry2x32"):
        keys = jax.random.split(jax.random.key(0, impl=impl), (8, 4))
        empty = (jnp.zeros((0, 4)), jnp.zeros((8, 0), jnp.int8), keys[:0])
        arrays = [jax.device_put((keys, *empty), src) for src, _ in layouts]

        def moved(arrays):
            return [
                reshard(tree, dst, **({"src": src} if kind == AxisType.Auto else {}))
                for tree, (src, dst) in zip(arrays, layouts, strict=True)
            ]

        out_shardings = [dst for _, dst in layouts]
        results = jax.jit(moved, out_shardings=out_shardings)(arrays)
        for tree, result, (_, dst) in zip(arrays, results, layouts, strict=True):
            for array, other in zip(tree, result, strict=True):
                assert other.dtype == array.dtype
                assert other.shape == array.shape
                assert other.sharding.is_equivalent_to(dst, other.ndim)
                # JAX cannot gather an empty array that is sharded.
                there = data(jax.device_put(array, dst))
                for (where, values), (mesh_kind, mine) in zip(
                    there, data(other), strict=True
                ):
                    assert where == mesh_kind
                    assert (values == mine).all()


def test_a_plan_of_live_devices_is_a_value():
    src = NamedSharding(mesh(), P("a"))
    dst = NamedSharding(mesh(), P(None, "b"))
    single = jax.sharding.SingleDeviceSharding(jax.devices()[2])
    tree = {"w": jnp.zeros((8, 4)), "b": jnp.zeros(4)}
    arrays = jax.device_put(tree, {"w": src, "b": single})
    sharding = NamedSharding(mesh().abstract_mesh, P("a"))
    abstract = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)
    reshard_plan = plan_reshard(arrays, {"w": dst, "b": NamedSharding(mesh(), P())})
    moves = [
        reshard_plan,
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
