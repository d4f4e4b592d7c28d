"""Functions of whole matrices under plans that cut them: values, traffic, owners, and
what cannot be mapped.
"""

import math
import random
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P
from optax.contrib import _muon

import shardfx as sfx
from benchmarks._matrices import orthogonal
from shardfx import (
    AxisRules,
    From,
    MeshSpec,
    PathRules,
    TreeMap,
    fsdp,
    map_matrices,
    plan,
)
from shardfx.errors import (
    LeafTypeError,
    MoveError,
    PlanMismatchError,
    RuleError,
    SpecError,
)


FSDP = PathRules([(".*", fsdp("fsdp"))])
# Whole matrices alone give these: of a part the norm is another.
unit = lambda item: item / jnp.linalg.norm(item)


def matrices(count, shape=(16, 32), dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), count)
    return {
        f"w{number}": jax.random.normal(key, shape).astype(dtype)
        for number, key in enumerate(keys)
    }


def built(sizes, **options):
    spec = MeshSpec(sizes, **options)
    return spec.build(jax.devices()[: spec.size])


def check(fn, tree, mesh, *, rules: Any = FSDP, axes=None, names=None, **options):
    """What is mapped under a plan, beside what the function makes of each matrix on one
    device.
    """
    sharding_plan = plan(
        tree,
        mesh,
        paths=rules,
        axes=axes,
        names=names,
        unused="allow",
    )
    mapped = map_matrices(fn, sharding_plan, **options)
    lowered = jax.jit(mapped, out_shardings=sharding_plan.shardings).lower(
        sharding_plan.structs
    )
    compiled = lowered.compile()
    result = compiled(sfx.shard(tree, sharding_plan))
    leaves = jax.tree.leaves(sfx.shardings_of(result))
    specs = [leaf.spec for leaf in leaves]
    leaves = jax.tree.leaves(sharding_plan.shardings)
    expected = [leaf.spec for leaf in leaves]
    assert specs == expected
    return result, mapped, sfx.cost.traffic(compiled)


def same(tree, expected, tolerance=1e-5):
    for leaf, other in zip(
        jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True
    ):
        leaf, other = (np.asarray(x, np.float64) for x in (leaf, other))
        largest = np.abs(leaf - other).max()
        assert largest <= tolerance * np.abs(other).max()


@pytest.mark.parametrize("count", [1, 3, 8, 11, 24])
@pytest.mark.parametrize(
    "sizes", [{"fsdp": 8}, {"data": 2, "fsdp": 4}, {"fsdp": 2, "tensor": 3}]
)
def test_each_matrix_is_whole(count, sizes):
    rules_by_path = [("w", P("fsdp", "tensor")), (".*", sfx.replicate)]
    rules = PathRules(
        rules_by_path,
        mesh_axes=("fsdp", "tensor"),
    )
    tree = matrices(count, (16, 36)) | {
        "b": jnp.ones(8),
        "scale": jnp.ones((), jnp.bfloat16),
    }
    if count == 3:
        tree |= {"half": tree["w0"].astype(jnp.bfloat16)}
    else:
        tree |= {}
    result, _, _ = check(unit, tree, built(sizes), rules=rules)
    dtypes_by_name = {name: array.dtype for name, array in result.items()}
    expected = {name: array.dtype for name, array in tree.items()}
    assert dtypes_by_name == expected
    tolerance = 0.02 if "half" in tree else 1e-5
    same(
        result,
        {
            name: unit(array) if array.ndim == 2 else array
            for name, array in tree.items()
        },
        tolerance,
    )


def test_muon_sends_two_all_to_alls_and_no_more():
    tree = matrices(16, (64, 64)) | {
        f"u{position}": matrix
        for position, matrix in enumerate(matrices(8, (64, 256)).values())
    }
    result, mapped, traffic = check(orthogonal, tree, built({"fsdp": 8}))
    theirs = _muon.orthogonalize_via_newton_schulz
    with jax.numpy_dtype_promotion("standard"):
        theirs_by_name = {
            name: theirs(matrix, jnp.array([3.4445, -4.775, 2.0315]))
            for name, matrix in tree.items()
        }
    same(result, theirs_by_name)
    whole = sum(matrix.nbytes for matrix in tree.values())
    assert {row.kind for row in traffic.rows} == {"all-to-all"}
    assert traffic.wire_bytes <= 0.22 * whole
    shapes = [matrix.starts(0).shape[1] for matrix in mapped.exchanges]
    assert shapes == [1, 2]


def test_what_is_left_over_goes_to_those_that_have_done_least():
    small = {
        f"u{position}": matrix
        for position, matrix in enumerate(matrices(5, (16, 16)).values())
    }
    sharding_plan = plan(matrices(3) | small, built({"fsdp": 8}), paths=FSDP)
    mapped = map_matrices(unit, sharding_plan)
    (exchange,) = mapped.exchanges
    assert [len(matrices_owned) for matrices_owned in exchange.owned] == [1] * 8
    sharding_plan = plan(matrices(3, (64, 64)), MeshSpec({"fsdp": 64}), paths=FSDP)
    owned = map_matrices(orthogonal, sharding_plan).exchanges[0].owned
    actual = sorted(map(len, owned))
    assert actual == [0] * 61 + [1] * 3
    assert exchange.width * exchange.unit[0] == 16 * 32 // 8


def test_small_matrices_fill_what_large_ones_leave():
    """Four shapes of a decoder of 32 layers on 64 owners: no device receives much more
    than its share.
    """
    shapes = {
        "gate": (1024, 256),
        "up": (1024, 256),
        "down": (256, 1024),
        "q": (256, 256),
        "o": (256, 256),
    }
    tree = {
        f"{position}/{name}": jax.ShapeDtypeStruct(shape, "float32")
        for position in range(32)
        for name, shape in shapes.items()
    }
    mesh = MeshSpec({"fsdp": 8, "tensor": 8})
    rules = PathRules([(".*", P("fsdp", "tensor"))])
    sharding_plan = plan(
        tree,
        mesh,
        paths=rules,
    )
    mapped = map_matrices(orthogonal, sharding_plan)
    sent = sum(
        exchange.width * math.prod(exchange.unit) * 64 for exchange in mapped.exchanges
    )
    limit = 1.15 * sum(leaf.bytes for leaf in sharding_plan.leaves)
    assert sent * 4 * 64 <= limit


@pytest.mark.parametrize("seed", range(6))
def test_any_layout_and_any_owners(seed):
    rng = random.Random(seed)
    sizes = rng.choice(
        [{"a": 8}, {"a": 2, "b": 4}, {"a": 2, "b": 2, "c": 2}, {"a": 2, "b": 3}]
    )
    tree = {}
    rules = []
    where = {}
    expected = {}
    for position in range(4):
        many = rng.choice([(), (6,), (12, 2)])
        rest = rng.choice([(6, 12), (24, 24), (5, 7), (2, 3, 24)])
        axes = rng.sample([*sizes], len(sizes))
        entries = [
            (
                axes.pop()
                if axes and size % sizes[axes[-1]] == 0 and rng.random() < 0.7
                else None
            )
            for size in rest
        ]
        tree[f"w{position}"] = x = jax.random.normal(
            jax.random.key(position), (*many, *rest)
        )
        spec = P(*[None] * len(many), *entries)
        rules.append((f"^w{position}$", spec))
        where[f"^w{position}$"] = len(many), len(rest) - 1
        stacked = x.reshape(-1, math.prod(rest[:-1]), rest[-1])
        expected[f"w{position}"] = jax.vmap(unit)(stacked).reshape(x.shape)
    over = rng.choice([None, rng.sample([*sizes], 1)])
    path_rules = PathRules(rules, mesh_axes=(*sizes,))
    result, _, _ = check(
        unit,
        tree,
        built(sizes),
        rules=path_rules,
        where=where,
        over=over,
    )
    same(result, expected)


def test_leading_dimensions_count_matrices():
    names = {
        "up": ("experts", "embed", "mlp"),
        "down": ("experts", "layers", "mlp", "embed"),
    }
    rules = [("layers", None), ("experts", "ep"), ("embed", "fsdp"), ("mlp", None)]
    axes = AxisRules(rules)
    key = jax.random.key(1)
    array = jax.random.normal(key, (8, 16, 32))
    tree = {
        "up": array,
        "down": jax.random.normal(key, (8, 11, 32, 16)),
    }
    result, mapped, traffic = check(
        unit, tree, built({"ep": 2, "fsdp": 4}), rules=None, names=names, axes=axes
    )
    same(
        result,
        {
            "up": jax.vmap(unit)(tree["up"]),
            "down": jax.vmap(jax.vmap(unit))(tree["down"]),
        },
    )
    actual = {(exchange.lead_axes, exchange.axes) for exchange in mapped.exchanges}
    assert actual == {(("ep",), ("fsdp",))}
    others = {axis for row in traffic.rows for axis in row.axes or ()}
    assert "ep" not in others


def test_convolutions_and_vectors_by_where():
    array = jax.random.normal(jax.random.key(0), (3, 3, 8, 16))
    tree = {
        "conv": array,
        "b": jnp.ones(8),
        "step": jnp.zeros((), int),
    }
    where = {"conv": (0, 3), "^b$": lambda item: 2 * item}
    result, _, _ = check(unit, tree, built({"fsdp": 8}), where=where)
    conv = tree["conv"].reshape(72, 16)
    expected = unit(conv).reshape(tree["conv"].shape)
    same(result, {"conv": expected, "b": 2 * tree["b"], "step": tree["step"]})


def test_states_stay_with_the_owners():
    """Shampoo's factors: their sums over steps are of whole matrices, and lie with
    these.
    """

    def preconditioned(matrix, factors):
        left_factor = factors["left"] + matrix @ matrix.T
        right = factors["right"] + matrix.T @ matrix
        return matrix / (1 + jnp.trace(left_factor)) + jnp.trace(right), {
            "left": left_factor,
            "right": right,
        }

    def init(matrix):
        rows, columns = matrix.shape
        return {"left": jnp.zeros((rows, rows)), "right": jnp.zeros((columns, columns))}

    tree = matrices(11)
    mesh = built({"fsdp": 8})
    sharding_plan = plan(tree, mesh, paths=FSDP)
    mapped = map_matrices(preconditioned, sharding_plan, state=init)
    specs = {leaf.spec for leaf in mapped.states.leaves}
    assert specs == {P("fsdp")}
    in_shardings = (sharding_plan, mapped.states)
    out_shardings = (sharding_plan, mapped.states)
    step = sfx.filter_jit(
        mapped,
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        donate="all",
    )
    states = jax.jit(mapped.init, out_shardings=mapped.states.shardings)()
    sharded = sfx.shard(tree, sharding_plan)
    arrays = tree
    factors = {name: init(matrix) for name, matrix in tree.items()}
    for _ in range(3):
        sharded, states = step(sharded, states)
        both = {
            name: preconditioned(matrix, factors[name])
            for name, matrix in arrays.items()
        }
        arrays, factors = (
            {name: pair[position] for name, pair in both.items()} for position in (0, 1)
        )
    same(sharded, arrays)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("sizes", [{"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_matrices_in_a_scan_under_checkpoint_with_donation(kind, sizes):
    mesh = built(sizes, axis_types=kind)
    if len(sizes) > 1:
        axes = ("fsdp", "tensor")
    else:
        axes = ("fsdp",)
    layer = {"up": jnp.ones((16, 32)), "down": jnp.ones((32, 16)), "norm": jnp.ones(16)}
    keys = jax.random.split(jax.random.key(0), len(layer))
    shapes = {name: (11, *array.shape) for name, array in layer.items()}
    stacked = {
        name: np.array(jax.random.normal(key, shapes[name]))
        for name, key in zip(layer, keys, strict=True)
    }
    rules = PathRules([("norm", P()), (".*", P(*axes))])
    matrix = plan(layer, mesh, paths=rules)
    rules = PathRules([("norm", P()), (".*", P(None, *axes))])
    every = plan(stacked, mesh, paths=rules)
    mapped = jax.checkpoint(map_matrices(unit, matrix, over=tuple(sizes)))
    step = jax.jit(
        lambda tree: jax.lax.scan(lambda _, layer: (None, mapped(layer)), None, tree)[
            1
        ],
        out_shardings=every.shardings,
        donate_argnums=0,
    )
    with jax.set_mesh(mesh):
        sharded: Any = sfx.shard(stacked, every)
        result = step(sharded)
    assert sharded["up"].is_deleted()
    same(
        result,
        {
            name: item if name == "norm" else jax.vmap(unit)(item)
            for name, item in stacked.items()
        },
    )


@pytest.mark.parametrize("spec", [P("fsdp"), P(None, "fsdp")])
def test_a_tree_map_splits_fused_arrays(spec):
    """q, k and v in one: each is a matrix of its own, and no device receives all of the
    array.
    """
    arrays = {"q": (0, 32), "k": (32, 48), "v": (48, None)}
    split = {name: From("qkv").slice(*owned, dim=1) for name, owned in arrays.items()}
    map = TreeMap(split)
    mesh = built({"fsdp": 8})
    array = jax.random.normal(jax.random.key(0), (64, 64))
    fused = {"qkv": array}
    rules = PathRules([("qkv", spec)])
    sharding_plan = plan(fused, mesh, paths=rules)
    structs = jax.eval_shape(map.apply, fused)
    rules = PathRules([(".*", P("fsdp"))])
    mapped = map_matrices(
        unit,
        plan(structs, mesh, paths=rules),
    )
    update = jax.jit(
        lambda tree: map.inverse().apply(mapped(map.apply(tree)), like=tree),
        out_shardings=sharding_plan.shardings,
    )
    compiled = update.lower(sharding_plan.structs).compile()
    parts = [np.asarray(fused["qkv"])[:, slice(*owned)] for owned in arrays.values()]
    joined = np.concatenate([part / np.linalg.norm(part) for part in parts], axis=1)
    same(compiled(sfx.shard(fused, sharding_plan)), {"qkv": joined})
    rows = sfx.cost.traffic(compiled).rows
    kinds = {row.kind for row in rows}
    assert kinds == {"all-to-all"}


def test_a_plan_without_devices_is_estimated():
    sharding_plan = plan(matrices(32, (64, 64)), MeshSpec({"fsdp": 32}), paths=FSDP)
    step = sfx.filter_jit(
        map_matrices(orthogonal, sharding_plan),
        in_shardings=(sharding_plan,),
        out_shardings=sharding_plan,
    )
    estimated = sfx.cost.estimate(step, sharding_plan.structs, compiler="cpu")
    assert {row.kind for row in estimated.rows} == {"all-to-all"}
    assert len(estimated.rows) == 2


def test_a_limit_makes_stacks_smaller():
    tree = matrices(32)
    mesh = built({"fsdp": 8})
    sharding_plan = plan(tree, mesh, paths=FSDP)
    matrix_bytes = 16 * 32 * 4
    assert len(map_matrices(unit, sharding_plan).exchanges) == 1
    few = map_matrices(unit, sharding_plan, memory_limit_bytes=5 * matrix_bytes)
    shapes = [exchange.starts(0).shape[1] for exchange in few.exchanges]
    assert shapes == [2, 2]
    same(
        jax.jit(few)(sfx.shard(tree, sharding_plan)),
        {name: unit(item) for name, item in tree.items()},
    )
    with pytest.raises(
        MoveError,
        match=f"1 matrices of 16 x 32 on 8 owners need {3 * matrix_bytes} bytes",
    ):
        map_matrices(unit, sharding_plan, memory_limit_bytes=matrix_bytes)


def test_an_empty_tree_and_other_owners():
    tree = {"b": jnp.ones(8)}
    mesh = built({"data": 2, "fsdp": 4})
    sharding_plan = plan(tree, mesh, paths=FSDP)
    same(jax.jit(map_matrices(unit, sharding_plan))(tree), tree)
    sharding_plan = plan(matrices(8), mesh, paths=FSDP)
    assert map_matrices(unit, sharding_plan).exchanges[0].axes == ("fsdp",)
    exchanges = map_matrices(unit, sharding_plan, over=("data", "fsdp")).exchanges[0]
    shape = exchanges.starts(0).shape
    assert shape == (8, 1)
    axes = AxisRules([("batch", ("data", "fsdp"))])
    sharding_plan = plan(matrices(8), mesh, paths=FSDP, axes=axes)
    exchanges = map_matrices(unit, sharding_plan).exchanges[0]
    actual = exchanges.axes
    assert actual == ("data", "fsdp")


MESH = MeshSpec({"fsdp": 8})


@pytest.mark.parametrize(
    "error, match, leaf, options",
    [
        (
            LeafTypeError,
            r"`w` is of dtype int32, .*: `where=\{'w': None\}`",
            jnp.zeros((8, 8), jnp.int32),
            {},
        ),
        (
            LeafTypeError,
            "`w` is of dtype complex64",
            jnp.zeros((8, 8), jnp.complex64),
            {},
        ),
        (
            SpecError,
            r"`w` has the shape \(3, 3, 8, 8\), and nothing says .* \(2, 1\)",
            jnp.zeros((3, 3, 8, 8)),
            {},
        ),
        (
            SpecError,
            r"which \(0, 2\) does not make matrices of",
            jnp.zeros((8, 8)),
            {"where": {"w": (0, 2)}},
        ),
        (
            SpecError,
            "`over` has 'tensor', and the mesh has the axes fsdp",
            jnp.zeros((8, 8)),
            {"over": "tensor"},
        ),
        (
            RuleError,
            "'q' decides about no array",
            jnp.zeros((8, 8)),
            {"where": {"q": None}},
        ),
    ],
)
def test_what_cannot_be_mapped(error, match, leaf, options):
    with pytest.raises(error, match=match):
        map_matrices(unit, plan({"w": leaf}, MESH, paths=FSDP), **options)


def test_another_tree_and_another_result_are_errors():
    sharding_plan = plan(matrices(2), MESH.build(jax.devices()), paths=FSDP)
    with pytest.raises(PlanMismatchError, match="the tree has no `w1`"):
        map_matrices(unit, sharding_plan)({"w0": jnp.ones((16, 32))})
    with pytest.raises(LeafTypeError, match="return the same shapes, dtypes"):
        jax.eval_shape(
            map_matrices(lambda matrix: matrix.T, sharding_plan), sharding_plan.structs
        )
    array = jnp.zeros((8, 8), jnp.int32)
    whole = plan({"w": array}, MESH, paths=FSDP)
    exchanges = map_matrices(unit, whole, where={"w": None}).exchanges
    assert exchanges == ()
    with pytest.raises(LeafTypeError, match="pass `map_matrices"):
        map_matrices(unit, sharding_plan).init()


def test_modules_keep_what_is_no_array():
    linear = eqx.nn.MLP(8, 8, 16, 2, key=jax.random.key(0))
    sharding_plan = plan(linear, MESH.build(jax.devices()), paths=FSDP)
    result = sfx.filter_jit(map_matrices(unit, sharding_plan))(
        sfx.shard(linear, sharding_plan)
    )
    same(result.layers[0].weight, unit(linear.layers[0].weight))
    assert result.activation is linear.activation
