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
from tests.reshard.mapped_matrices import (
    FSDP,
    built,
    check,
    expected_unit,
    expected_units,
    matrices,
    normal,
    same,
    unit,
)


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
        "b": np.ones(8, np.float32),
        "scale": np.ones((), jnp.bfloat16),
    }
    if count == 3:
        tree |= {"half": tree["w0"].astype(jnp.bfloat16)}
    else:
        tree |= {}
    mesh = built(sizes)
    result, _, _ = check(unit, tree, mesh, rules=rules)
    dtypes_by_name = {}
    for name, array in result.items():
        dtypes_by_name[name] = array.dtype
    expected = {}
    for name, array in tree.items():
        expected[name] = array.dtype
    assert dtypes_by_name == expected
    tolerance = 0.02 if "half" in tree else 1e-5
    units = {}
    for name, array in tree.items():
        units[name] = expected_unit(array) if array.ndim == 2 else array
    same(
        result,
        units,
        tolerance,
    )


def test_muon_sends_two_all_to_alls_and_no_more():
    wide = matrices(8, (64, 256))
    wide_by_name = {}
    for position, matrix in enumerate(wide.values()):
        wide_by_name[f"u{position}"] = matrix
    tree = matrices(16, (64, 64)) | wide_by_name
    mesh = built({"fsdp": 8})
    result, mapped, traffic = check(orthogonal, tree, mesh)
    theirs = jax.jit(_muon.orthogonalize_via_newton_schulz)
    with jax.numpy_dtype_promotion("standard"):
        coefficients = jnp.array([3.4445, -4.775, 2.0315])
        theirs_by_name = {}
        for name, matrix in tree.items():
            theirs_by_name[name] = theirs(matrix, coefficients)
    same(result, theirs_by_name)
    byte_counts = []
    for matrix in tree.values():
        byte_counts.append(matrix.nbytes)
    whole = sum(byte_counts)
    kinds = set()
    for row in traffic.rows:
        kinds.add(row.kind)
    assert kinds == {"all-to-all"}
    limit = 0.22 * whole
    assert traffic.wire_bytes <= limit
    shapes = []
    for matrix in mapped.exchanges:
        shapes.append(matrix.starts(0).shape[1])
    assert shapes == [1, 2]


def test_what_is_left_over_goes_to_those_that_have_done_least():
    small_matrices = matrices(5, (16, 16))
    small = {}
    for position, matrix in enumerate(small_matrices.values()):
        small[f"u{position}"] = matrix
    mesh = built({"fsdp": 8})
    all_matrices = matrices(3) | small
    sharding_plan = plan(all_matrices, mesh, paths=FSDP)
    mapped = map_matrices(unit, sharding_plan)
    (exchange,) = mapped.exchanges
    owned_counts = []
    for matrices_owned in exchange.owned:
        owned_counts.append(len(matrices_owned))
    assert owned_counts == [1] * 8
    large_mesh = MeshSpec({"fsdp": 64})
    sharding_plan = plan(matrices(3, (64, 64)), large_mesh, paths=FSDP)
    large = map_matrices(orthogonal, sharding_plan)
    owned = large.exchanges[0].owned
    counts = map(len, owned)
    actual = sorted(counts)
    expected = [0] * 61 + [1] * 3
    assert actual == expected
    exchanged = exchange.units_per_owner * exchange.unit[0]
    assert exchanged == 16 * 32 // 8


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
    tree = {}
    for position in range(32):
        for name, shape in shapes.items():
            tree[f"{position}/{name}"] = jax.ShapeDtypeStruct(shape, "float32")
    mesh = MeshSpec({"fsdp": 8, "tensor": 8})
    rules = PathRules([(".*", P("fsdp", "tensor"))])
    sharding_plan = plan(
        tree,
        mesh,
        paths=rules,
    )
    mapped = map_matrices(orthogonal, sharding_plan)
    sent_by_exchange = []
    for exchange in mapped.exchanges:
        sent_by_exchange.append(
            exchange.units_per_owner * math.prod(exchange.unit) * 64
        )
    sent = sum(sent_by_exchange)
    leaf_bytes = []
    for leaf in sharding_plan.leaves:
        leaf_bytes.append(leaf.bytes)
    limit = 1.15 * sum(leaf_bytes)
    sent_bytes = sent * 4 * 64
    assert sent_bytes <= limit


@pytest.mark.parametrize("seed", range(6))
def test_any_layout_and_any_owners(seed):
    rng = random.Random(seed)
    choices = [{"a": 8}, {"a": 2, "b": 4}, {"a": 2, "b": 2, "c": 2}, {"a": 2, "b": 3}]
    sizes = rng.choice(choices)
    tree = {}
    rules = []
    where = {}
    expected = {}
    for position in range(4):
        counts = [(), (6,), (12, 2)]
        many = rng.choice(counts)
        shapes = [(6, 12), (24, 24), (5, 7), (2, 3, 24)]
        rest = rng.choice(shapes)
        axes = rng.sample([*sizes], len(sizes))
        entries = []
        for size in rest:
            divides = bool(axes) and size % sizes[axes[-1]] == 0
            is_sharded = divides and rng.random() < 0.7
            entries.append(axes.pop() if is_sharded else None)
        tree[f"w{position}"] = x = normal(position, (*many, *rest))
        leading = [None] * len(many)
        spec = P(*leading, *entries)
        rules.append((f"^w{position}$", spec))
        where[f"^w{position}$"] = len(many), len(rest) - 1
        rows = math.prod(rest[:-1])
        stacked = x.reshape(-1, rows, rest[-1])
        expected[f"w{position}"] = expected_units(stacked).reshape(x.shape)
    some = rng.sample([*sizes], 1)
    over = rng.choice([None, some])
    path_rules = PathRules(rules, mesh_axes=(*sizes,))
    mesh = built(sizes)
    result, _, _ = check(
        unit,
        tree,
        mesh,
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
    tree = {
        "up": normal(0, (8, 16, 32)),
        "down": normal(1, (8, 11, 32, 16)),
    }
    mesh = built({"ep": 2, "fsdp": 4})
    result, mapped, traffic = check(
        unit, tree, mesh, rules=None, names=names, axes=axes
    )
    expected_by_name = {}
    for name, array in tree.items():
        expected_by_name[name] = expected_units(array)
    same(result, expected_by_name)
    actual = set()
    for exchange in mapped.exchanges:
        actual.add((exchange.lead_axes, exchange.axes))
    expected = {(("ep",), ("fsdp",))}
    assert actual == expected
    others = set()
    for row in traffic.rows:
        for axis in row.axes or ():
            others.add(axis)
    assert "ep" not in others


def test_convolutions_and_vectors_by_where():
    tree = {
        "conv": normal(0, (3, 3, 8, 16)),
        "b": np.ones(8, np.float32),
        "step": np.zeros((), np.int32),
    }

    def doubled(item):
        return 2 * item

    where = {"conv": (0, 3), "^b$": doubled}
    mesh = built({"fsdp": 8})
    result, _, _ = check(unit, tree, mesh, where=where)
    conv = tree["conv"].reshape(72, 16)
    expected = expected_unit(conv).reshape(tree["conv"].shape)
    doubled_vector = 2 * tree["b"]
    same(result, {"conv": expected, "b": doubled_vector, "step": tree["step"]})


def test_states_stay_with_the_owners():
    """Shampoo's factors: their sums over steps are of whole matrices, and lie with
    these.
    """

    def preconditioned(matrix, factors):
        row_products = matrix @ matrix.T
        left_factor = factors["left"] + row_products
        column_products = matrix.T @ matrix
        right = factors["right"] + column_products
        row_trace = jnp.trace(left_factor)
        scaled = matrix / (1 + row_trace)
        return scaled + jnp.trace(right), {
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
    specs = set()
    for leaf in mapped.states.leaves:
        specs.add(leaf.spec)
    assert specs == {P("fsdp")}
    in_shardings = (sharding_plan, mapped.states)
    out_shardings = (sharding_plan, mapped.states)
    step = sfx.filter_jit(
        mapped,
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        donate="all",
    )
    jitted_init = jax.jit(mapped.init, out_shardings=mapped.states.shardings)
    states = jitted_init()
    sharded = sfx.shard(tree, sharding_plan)
    arrays = tree
    on_one_device = jax.jit(preconditioned)
    first_factors = init(tree["w0"])
    factors = dict.fromkeys(tree, first_factors)
    for _ in range(3):
        sharded, states = step(sharded, states)
        both = {}
        for name, matrix in arrays.items():
            both[name] = on_one_device(matrix, factors[name])
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
    up = np.ones((16, 32), np.float32)
    down = np.ones((32, 16), np.float32)
    layer = {"up": up, "down": down, "norm": np.ones(16, np.float32)}
    stacked = {}
    for seed, (name, array) in enumerate(layer.items()):
        stacked[name] = normal(seed, (11, *array.shape))
    rules = PathRules([("norm", P()), (".*", P(*axes))])
    matrix = plan(layer, mesh, paths=rules)
    rules = PathRules([("norm", P()), (".*", P(None, *axes))])
    every = plan(stacked, mesh, paths=rules)
    mapped_matrices = map_matrices(unit, matrix, over=tuple(sizes))
    mapped = jax.checkpoint(mapped_matrices)
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
    mapped_items = {}
    for name, item in stacked.items():
        mapped_items[name] = item if name == "norm" else expected_units(item)
    same(
        result,
        mapped_items,
    )


@pytest.mark.parametrize("spec", [P("fsdp"), P(None, "fsdp")])
def test_a_tree_map_splits_fused_arrays(spec):
    """q, k and v in one: each is a matrix of its own, and no device receives all of the
    array.
    """
    arrays = {"q": (0, 32), "k": (32, 48), "v": (48, None)}
    split = {}
    for name, owned in arrays.items():
        split[name] = From("qkv").slice(*owned, dim=1)
    map = TreeMap(split)
    mesh = built({"fsdp": 8})
    fused = {"qkv": normal(0, (64, 64))}
    rules = PathRules([("qkv", spec)])
    sharding_plan = plan(fused, mesh, paths=rules)
    apply = map.apply
    structs = jax.eval_shape(apply, fused)
    rules = PathRules([(".*", P("fsdp"))])
    mapped_plan = plan(structs, mesh, paths=rules)
    mapped = map_matrices(
        unit,
        mapped_plan,
    )

    def updated(tree):
        return map.inverse().apply(mapped(map.apply(tree)), like=tree)

    update = jax.jit(
        updated,
        out_shardings=sharding_plan.shardings,
    )
    lowered = update.lower(sharding_plan.structs)
    compiled = lowered.compile()
    fused_values = np.asarray(fused["qkv"])
    parts = []
    for owned in arrays.values():
        parts.append(fused_values[:, slice(*owned)])
    normalized = []
    for part in parts:
        normalized.append(part / np.linalg.norm(part))
    joined = np.concatenate(normalized, axis=1)
    placed = sfx.shard(fused, sharding_plan)
    same(compiled(placed), {"qkv": joined})
    rows = sfx.cost.traffic(compiled).rows
    kinds = set()
    for row in rows:
        kinds.add(row.kind)
    assert kinds == {"all-to-all"}


def test_a_plan_without_devices_is_estimated():
    arrays = matrices(32, (64, 64))
    mesh = MeshSpec({"fsdp": 32})
    sharding_plan = plan(arrays, mesh, paths=FSDP)
    mapped = map_matrices(orthogonal, sharding_plan)
    step = sfx.filter_jit(
        mapped,
        in_shardings=(sharding_plan,),
        out_shardings=sharding_plan,
    )
    estimated = sfx.cost.estimate(step, sharding_plan.structs, compiler="cpu")
    kinds = set()
    for row in estimated.rows:
        kinds.add(row.kind)
    assert kinds == {"all-to-all"}
    assert len(estimated.rows) == 2


def test_a_limit_makes_stacks_smaller():
    tree = matrices(32)
    mesh = built({"fsdp": 8})
    sharding_plan = plan(tree, mesh, paths=FSDP)
    matrix_bytes = 16 * 32 * 4
    mapped = map_matrices(unit, sharding_plan)
    assert len(mapped.exchanges) == 1
    limit = 5 * matrix_bytes
    few = map_matrices(unit, sharding_plan, memory_limit_bytes=limit)
    shapes = []
    for exchange in few.exchanges:
        shapes.append(exchange.starts(0).shape[1])
    assert shapes == [2, 2]
    placed = sfx.shard(tree, sharding_plan)
    expected = {}
    for name, item in tree.items():
        expected[name] = expected_unit(item)
    same(
        jax.jit(few)(placed),
        expected,
    )
    with pytest.raises(
        MoveError,
        match=f"1 matrices of 16 x 32 on 8 owners need {3 * matrix_bytes} bytes",
    ):
        map_matrices(unit, sharding_plan, memory_limit_bytes=matrix_bytes)


def test_an_empty_tree_and_other_owners():
    tree = {"b": np.ones(8, np.float32)}
    mesh = built({"data": 2, "fsdp": 4})
    sharding_plan = plan(tree, mesh, paths=FSDP)
    mapped = map_matrices(unit, sharding_plan)
    same(jax.jit(mapped)(tree), tree)
    sharding_plan = plan(matrices(8), mesh, paths=FSDP)
    by_plan = map_matrices(unit, sharding_plan)
    assert by_plan.exchanges[0].axes == ("fsdp",)
    over_both = map_matrices(unit, sharding_plan, over=("data", "fsdp"))
    exchanges = over_both.exchanges[0]
    shape = exchanges.starts(0).shape
    assert shape == (8, 1)
    axes = AxisRules([("batch", ("data", "fsdp"))])
    arrays = matrices(8)
    sharding_plan = plan(arrays, mesh, paths=FSDP, axes=axes)
    by_batch = map_matrices(unit, sharding_plan)
    exchanges = by_batch.exchanges[0]
    actual = exchanges.axes
    assert actual == ("data", "fsdp")


MESH = MeshSpec({"fsdp": 8})


@pytest.mark.parametrize(
    "error, match, leaf, options",
    [
        (
            LeafTypeError,
            r"`w` is of dtype int32, .*: `where=\{'w': None\}`",
            np.zeros((8, 8), np.int32),
            {},
        ),
        (
            LeafTypeError,
            "`w` is of dtype complex64",
            np.zeros((8, 8), np.complex64),
            {},
        ),
        (
            SpecError,
            r"`w` has the shape \(3, 3, 8, 8\), and nothing says .* \(2, 1\)",
            np.zeros((3, 3, 8, 8), np.float32),
            {},
        ),
        (
            SpecError,
            r"which \(0, 2\) does not make matrices of",
            np.zeros((8, 8), np.float32),
            {"where": {"w": (0, 2)}},
        ),
        (
            SpecError,
            "`over` has 'tensor', and the mesh has the axes fsdp",
            np.zeros((8, 8), np.float32),
            {"over": "tensor"},
        ),
        (
            RuleError,
            "'q' decides about no array",
            np.zeros((8, 8), np.float32),
            {"where": {"q": None}},
        ),
    ],
)
def test_what_cannot_be_mapped(error, match, leaf, options):
    with pytest.raises(error, match=match):
        map_matrices(unit, plan({"w": leaf}, MESH, paths=FSDP), **options)


def test_another_tree_and_another_result_are_errors():
    arrays = matrices(2)
    mesh = MESH.build(jax.devices())
    sharding_plan = plan(arrays, mesh, paths=FSDP)
    mapped = map_matrices(unit, sharding_plan)
    other_tree = {"w0": np.ones((16, 32), np.float32)}
    with pytest.raises(PlanMismatchError, match="the tree has no `w1`"):
        mapped(other_tree)
    with pytest.raises(LeafTypeError, match="return the same shapes, dtypes"):
        jax.eval_shape(
            map_matrices(lambda matrix: matrix.T, sharding_plan), sharding_plan.structs
        )
    array = np.zeros((8, 8), np.int32)
    whole = plan({"w": array}, MESH, paths=FSDP)
    by_where = map_matrices(unit, whole, where={"w": None})
    exchanges = by_where.exchanges
    assert exchanges == ()
    without_state = map_matrices(unit, sharding_plan)
    with pytest.raises(LeafTypeError, match="pass `map_matrices"):
        without_state.init()


def test_modules_keep_what_is_no_array():
    key = jax.random.key(0)
    linear = eqx.nn.MLP(8, 8, 16, 2, key=key)
    mesh = MESH.build(jax.devices())
    sharding_plan = plan(linear, mesh, paths=FSDP)
    mapped = map_matrices(unit, sharding_plan)
    placed = sfx.shard(linear, sharding_plan)
    result = sfx.filter_jit(mapped)(placed)
    expected = expected_unit(linear.layers[0].weight)
    same(result.layers[0].weight, expected)
    assert result.activation is linear.activation


def test_arrays_that_select_left_out_stay():
    tree = {
        name: np.full((4, 4), value, np.float32)
        for name, value in (("a", 1.0), ("b", 2.0))
    }
    whole = plan(tree, MESH.build(jax.devices()), paths=FSDP)
    mapped = map_matrices(lambda matrix: -matrix, whole.select("b"))
    result = mapped(sfx.shard(tree, whole))
    same(result["a"], tree["a"])
    same(result["b"], -tree["b"])
