"""`reshard` with a map that casts, scales and adds: bitwise what NumPy makes of whole
arrays.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from mapped_trees import MESHES, equal, mesh, placed
from moves import both_ways

import shardfx
from shardfx import From, PathRules, TreeMap, reshard


@both_ways
@pytest.mark.parametrize("there", ["all", "last"])
def test_casts_constants_and_blocks_of_scales(move, there):
    numbers = np.random.default_rng(0)
    arrays = {
        "w": numbers.normal(size=(16, 24)).astype(jnp.float8_e4m3fn),
        "s": numbers.uniform(size=(2, 3)).astype(np.float32),
        "x": numbers.normal(size=(8, 8)).astype(np.float32),
    }
    scaled = From("w").scale("s", block=(8, 8))
    narrow = From("x").cast("bfloat16")
    shifted = narrow.times(0.3).plus(1.1)
    rules = {
        "w": scaled.cast("bfloat16").T,
        "wide": scaled,
        "x": narrow.pad_to(16, dim=1, value=0.3),
        "both": narrow.cast("float32").T,
        "counted": shifted.T.cast("float32").times(3),
        "again": scaled.times(2).cast("bfloat16"),
        "c": From.constant(7, (8,), "int32"),
    }
    tree_map = TreeMap(rules)
    source_name = "all" if there == "all" else "first"
    source_mesh = mesh(*MESHES[source_name])
    path_rules = PathRules([("s", ()), (".*", P("a", "b"))])
    source_plan = shardfx.plan(arrays, source_mesh, paths=path_rules)
    tree = shardfx.shard(arrays, source_plan)
    whole = tree_map.apply(arrays)
    sharding = NamedSharding(mesh(*MESHES[there]), P("b"))
    target = {}
    for path, array in whole.items():
        target[path] = struct_of(array, sharding)
    moved = move(tree, target, map=tree_map)
    equal(moved, whole, target)


def struct_of(array, sharding):
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def first_and(there):
    """A sharding on the first devices, and one that cuts columns there."""
    source = NamedSharding(mesh(*MESHES["first"]), P("a"))
    target = NamedSharding(mesh(*MESHES[there]), P(None, "a"))
    return source, target


@both_ways
@pytest.mark.parametrize("there", ["first", "last"])
def test_one_array_scaled_in_blocks_of_two_sizes(move, there):
    arrays = {
        "w": np.ones((4, 4), np.float32),
        "s": np.arange(4, dtype=np.float32).reshape(2, 2),
    }
    # Both sizes of blocks need 2 by 2 scales.
    in_twos = From("w").scale("s", block=(2, 2))
    in_threes = From("w").scale("s", block=(3, 3))
    tree_map = TreeMap({"w": From.concat([in_twos, in_threes])})
    source, target = first_and(there)
    whole = tree_map.apply(arrays)
    structs = {"w": struct_of(whole["w"], target)}
    everywhere = NamedSharding(source.mesh, P())
    tree = {
        "w": placed(arrays["w"], source),
        "s": placed(arrays["s"], everywhere),
    }
    moved = move(tree, structs, map=tree_map)
    equal(moved, whole, structs)


@both_ways
@pytest.mark.parametrize("on_host", [("s",), ("w",), ("w", "s")], ids="".join)
def test_scales_and_scaled_arrays_of_numpy(move, on_host):
    arrays = {
        "w": np.ones((4, 4), np.float32),
        "s": np.arange(4, dtype=np.float32).reshape(2, 2),
    }
    tree_map = TreeMap({"w": From("w").scale("s", block=(2, 2))})
    source, target = first_and("first")
    whole = tree_map.apply(arrays)
    structs = {"w": struct_of(whole["w"], target)}
    everywhere = NamedSharding(source.mesh, P())
    tree = {}
    for path, array in arrays.items():
        tree[path] = array
        if path not in on_host:
            tree[path] = placed(array, everywhere)
    moved = move(tree, structs, map=tree_map)
    equal(moved, whole, structs)


def test_arithmetic_with_zeros_of_both_signs():
    # Not by programs: XLA replaces `x + 0.0` by `x`, which is -0.0 here.
    zeros = np.full((4, 4), -0.0, np.float32)
    rules = {
        "v": From("v").plus(-0.0),
        "w": From("w").plus(0.0),
    }
    tree_map = TreeMap(rules)
    source, target = first_and("last")
    whole = tree_map.apply({"v": zeros, "w": zeros})
    struct = struct_of(zeros, target)
    structs = {"v": struct, "w": struct}
    tree = {
        "v": placed(zeros, source),
        "w": placed(zeros, source),
    }
    moved = reshard(tree, structs, map=tree_map)
    equal(moved, whole, structs)


@both_ways
def test_maps_with_zeros_of_both_signs(move):
    source, target = first_and("last")
    arrays = {"v": np.ones((4, 4), np.float32)}
    tree = {"v": placed(arrays["v"], source)}
    for zero in (0.0, -0.0):
        tree_map = TreeMap({"v": From("v").pad_to(8, value=zero)})
        whole = tree_map.apply(arrays)
        structs = {"v": struct_of(whole["v"], target)}
        equal(move(tree, structs, map=tree_map), whole, structs)
