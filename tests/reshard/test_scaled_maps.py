"""`reshard` with a map that casts, scales and adds: bitwise what NumPy makes of whole
arrays.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from mapped_trees import MESHES, both_ways, equal, mesh, placed

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
    rules = {
        "w": From("w").scale("s", block=(8, 8)).cast("bfloat16").T,
        "wide": From("w").scale("s", block=(8, 8)),
        "x": From("x").cast("bfloat16").pad_to(16, dim=1, value=0.3),
        "both": From("x").cast("bfloat16").cast("float32").T,
        "counted": (
            From("x").cast("bfloat16").times(0.3).plus(1.1).T.cast("float32").times(3)
        ),
        "again": From("w").scale("s", block=(8, 8)).times(2).cast("bfloat16"),
        "c": From.constant(7, (8,), "int32"),
    }
    tree_map = TreeMap(rules)
    where = mesh(*MESHES["all" if there == "all" else "first"])
    rules = PathRules([("s", ()), (".*", P("a", "b"))])
    sharding_plan = shardfx.plan(arrays, where, paths=rules)
    tree = shardfx.shard(
        arrays,
        sharding_plan,
    )
    whole = tree_map.apply(arrays)
    where = mesh(*MESHES[there])
    target = {
        path: jax.ShapeDtypeStruct(
            array.shape, array.dtype, sharding=NamedSharding(where, P("b"))
        )
        for path, array in whole.items()
    }
    equal(move(tree, target, map=tree_map), whole, target)


@both_ways
@pytest.mark.parametrize("there", ["first", "last"])
def test_one_array_scaled_in_blocks_of_two_sizes(move, there):
    arrays = {
        "w": np.ones((4, 4), np.float32),
        "s": np.arange(4, dtype=np.float32).reshape(2, 2),
    }
    # Both sizes of blocks need 2 by 2 scales.
    parts = [From("w").scale("s", block=block) for block in ((2, 2), (3, 3))]
    tree_map = TreeMap({"w": From.concat(parts)})
    source = NamedSharding(mesh(*MESHES["first"]), P("a"))
    target = NamedSharding(mesh(*MESHES[there]), P(None, "a"))
    whole = tree_map.apply(arrays)
    structs = {"w": jax.ShapeDtypeStruct((8, 4), np.float32, sharding=target)}
    everywhere = NamedSharding(source.mesh, P())
    tree = {
        "w": placed(arrays["w"], source),
        "s": placed(arrays["s"], everywhere),
    }
    equal(move(tree, structs, map=tree_map), whole, structs)


@both_ways
@pytest.mark.parametrize("on_host", [("s",), ("w",), ("w", "s")], ids="".join)
def test_scales_and_scaled_arrays_of_numpy(move, on_host):
    arrays = {
        "w": np.ones((4, 4), np.float32),
        "s": np.arange(4, dtype=np.float32).reshape(2, 2),
    }
    tree_map = TreeMap({"w": From("w").scale("s", block=(2, 2))})
    where = mesh(*MESHES["first"])
    target = NamedSharding(where, P(None, "a"))
    structs = {"w": jax.ShapeDtypeStruct((4, 4), np.float32, sharding=target)}
    tree = {}
    for path, array in arrays.items():
        tree[path] = array
        if path not in on_host:
            tree[path] = placed(array, NamedSharding(where, P()))
    equal(move(tree, structs, map=tree_map), tree_map.apply(arrays), structs)


def test_arithmetic_with_zeros_of_both_signs():
    # Not by programs: XLA replaces `x + 0.0` by `x`, which is -0.0 here.
    arrays = {name: np.full((4, 4), -0.0, np.float32) for name in ("v", "w")}
    tree_map = TreeMap({"v": From("v").plus(-0.0), "w": From("w").plus(0.0)})
    source = NamedSharding(mesh(*MESHES["first"]), P("a"))
    target = NamedSharding(mesh(*MESHES["last"]), P(None, "a"))
    whole = tree_map.apply(arrays)
    struct = jax.ShapeDtypeStruct((4, 4), np.float32, sharding=target)
    structs = {"v": struct, "w": struct}
    tree = {name: placed(array, source) for name, array in arrays.items()}
    equal(reshard(tree, structs, map=tree_map), whole, structs)
