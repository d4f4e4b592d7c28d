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
unit = lambda one: one / jnp.linalg.norm(one)


def matrices(count, shape=(16, 32), dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), count)
    return {
        f"w{at}": jax.random.normal(key, shape).astype(dtype)
        for at, key in enumerate(keys)
    }


def built(sizes, **options):
    spec = MeshSpec(sizes, **options)
    return spec.build(jax.devices()[: spec.size])


def check(fn, tree, mesh, *, rules: Any = FSDP, axes=None, names=None, **options):
    """What is mapped under a plan, beside what the function makes of each matrix on one
    device.
    """
    made = plan(tree, mesh, paths=rules, axes=axes, names=names, unused="allow")
    mapped = map_matrices(fn, made, **options)
    compiled = (
        jax.jit(mapped, out_shardings=made.shardings).lower(made.structs).compile()
    )
    result = compiled(sfx.shard(tree, made))
    assert [one.spec for one in jax.tree.leaves(sfx.shardings_of(result))] == [
        one.spec for one in jax.tree.leaves(made.shardings)
    ]
    return result, mapped, sfx.cost.traffic(compiled)


def same(found, wanted, tolerance=1e-5):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        one, other = (np.asarray(x, np.float64) for x in (one, other))
        assert np.abs(one - other).max() <= tolerance * np.abs(other).max()


@pytest.mark.parametrize("count", [1, 3, 8, 11, 24])
@pytest.mark.parametrize(
    "sizes", [{"fsdp": 8}, {"data": 2, "fsdp": 4}, {"fsdp": 2, "tensor": 3}]
)
def test_each_matrix_is_whole(count, sizes):
    rules = PathRules(
        [("w", P("fsdp", "tensor")), (".*", sfx.replicate)],
        mesh_axes=("fsdp", "tensor"),
    )
    tree = matrices(count, (16, 36)) | {
        "b": jnp.ones(8),
        "scale": jnp.ones((), jnp.bfloat16),
    }
    tree |= {"half": tree["w0"].astype(jnp.bfloat16)} if count == 3 else {}
    result, _, _ = check(unit, tree, built(sizes), rules=rules)
    assert {name: one.dtype for name, one in result.items()} == {
        name: one.dtype for name, one in tree.items()
    }
    tolerance = 0.02 if "half" in tree else 1e-5
    same(
        result,
        {name: unit(one) if one.ndim == 2 else one for name, one in tree.items()},
        tolerance,
    )


def test_muon_sends_two_all_to_alls_and_no_more():
    tree = matrices(16, (64, 64)) | {
        f"u{at}": one for at, one in enumerate(matrices(8, (64, 256)).values())
    }
    result, mapped, traffic = check(orthogonal, tree, built({"fsdp": 8}))
    theirs = _muon.orthogonalize_via_newton_schulz
    with jax.numpy_dtype_promotion("standard"):
        wanted = {
            name: theirs(one, jnp.array([3.4445, -4.775, 2.0315]))
            for name, one in tree.items()
        }
    same(result, wanted)
    whole = sum(one.nbytes for one in tree.values())
    assert {row.kind for row in traffic.rows} == {"all-to-all"}
    assert traffic.wire_bytes <= 0.22 * whole
    assert [one.starts(0).shape[1] for one in mapped.exchanges] == [1, 2]


def test_what_is_left_over_goes_to_those_that_have_done_least():
    made = plan(matrices(3) | {f"u{at}": one for at, one in enumerate(matrices(5, (16, 16)).values())},
                built({"fsdp": 8}), paths=FSDP)  # fmt: skip
    mapped = map_matrices(unit, made)
    (exchange,) = mapped.exchanges
    assert [len(own) for own in exchange.owned] == [1] * 8
    made = plan(matrices(3, (64, 64)), MeshSpec({"fsdp": 64}), paths=FSDP)
    assert (
        sorted(map(len, map_matrices(orthogonal, made).exchanges[0].owned))
        == [0] * 61 + [1] * 3
    )
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
        f"{at}/{name}": jax.ShapeDtypeStruct(shape, "float32")
        for at in range(32)
        for name, shape in shapes.items()
    }
    made = plan(
        tree,
        MeshSpec({"fsdp": 8, "tensor": 8}),
        paths=PathRules([(".*", P("fsdp", "tensor"))]),
    )
    mapped = map_matrices(orthogonal, made)
    sent = sum(one.width * math.prod(one.unit) * 64 for one in mapped.exchanges)
    assert sent * 4 * 64 <= 1.15 * sum(leaf.bytes for leaf in made.leaves)


@pytest.mark.parametrize("seed", range(6))
def test_any_layout_and_any_owners(seed):
    rng = random.Random(seed)
    sizes = rng.choice(
        [{"a": 8}, {"a": 2, "b": 4}, {"a": 2, "b": 2, "c": 2}, {"a": 2, "b": 3}]
    )
    tree, rules, where, wanted = {}, [], {}, {}
    for at in range(4):
        many, rest = (
            rng.choice([(), (6,), (12, 2)]),
            rng.choice([(6, 12), (24, 24), (5, 7), (2, 3, 24)]),
        )
        axes = rng.sample([*sizes], len(sizes))
        entries = [
            (
                axes.pop()
                if axes and size % sizes[axes[-1]] == 0 and rng.random() < 0.7
                else None
            )
            for size in rest
        ]
        tree[f"w{at}"] = x = jax.random.normal(jax.random.key(at), (*many, *rest))
        rules.append((f"^w{at}$", P(*[None] * len(many), *entries)))
        where[f"^w{at}$"] = len(many), len(rest) - 1
        wanted[f"w{at}"] = jax.vmap(unit)(
            x.reshape(-1, math.prod(rest[:-1]), rest[-1])
        ).reshape(x.shape)
    over = rng.choice([None, rng.sample([*sizes], 1)])
    result, _, _ = check(
        unit,
        tree,
        built(sizes),
        rules=PathRules(rules, mesh_axes=(*sizes,)),
        where=where,
        over=over,
    )
    same(result, wanted)


def test_leading_dimensions_count_matrices():
    names = {
        "up": ("experts", "embed", "mlp"),
        "down": ("experts", "layers", "mlp", "embed"),
    }
    axes = AxisRules(
        [("layers", None), ("experts", "ep"), ("embed", "fsdp"), ("mlp", None)]
    )
    key = jax.random.key(1)
    tree = {
        "up": jax.random.normal(key, (8, 16, 32)),
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
    assert {(one.lead_axes, one.axes) for one in mapped.exchanges} == {
        (("ep",), ("fsdp",))
    }
    assert "ep" not in {axis for row in traffic.rows for axis in row.axes or ()}


def test_convolutions_and_vectors_by_where():
    tree = {
        "conv": jax.random.normal(jax.random.key(0), (3, 3, 8, 16)),
        "b": jnp.ones(8),
        "step": jnp.zeros((), int),
    }
    where = {"conv": (0, 3), "^b$": lambda one: 2 * one}
    result, _, _ = check(unit, tree, built({"fsdp": 8}), where=where)
    wanted = unit(tree["conv"].reshape(72, 16)).reshape(tree["conv"].shape)
    same(result, {"conv": wanted, "b": 2 * tree["b"], "step": tree["step"]})


def test_states_stay_with_the_owners():
    """Shampoo's factors: their sums over steps are of whole matrices, and lie with
    these.
    """

    def preconditioned(matrix, factors):
        left, right = (
            factors["left"] + matrix @ matrix.T,
            factors["right"] + matrix.T @ matrix,
        )
        return matrix / (1 + jnp.trace(left)) + jnp.trace(right), {
            "left": left,
            "right": right,
        }

    def init(matrix):
        rows, columns = matrix.shape
        return {"left": jnp.zeros((rows, rows)), "right": jnp.zeros((columns, columns))}

    tree, mesh = matrices(11), built({"fsdp": 8})
    made = plan(tree, mesh, paths=FSDP)
    mapped = map_matrices(preconditioned, made, state=init)
    assert {leaf.spec for leaf in mapped.states.leaves} == {P("fsdp")}
    step = sfx.filter_jit(
        mapped,
        in_shardings=(made, mapped.states),
        out_shardings=(made, mapped.states),
        donate="all",
    )
    states = jax.jit(mapped.init, out_shardings=mapped.states.shardings)()
    found, wanted = sfx.shard(tree, made), tree
    factors = {name: init(one) for name, one in tree.items()}
    for _ in range(3):
        found, states = step(found, states)
        both = {
            name: preconditioned(one, factors[name]) for name, one in wanted.items()
        }
        wanted, factors = (
            {name: pair[at] for name, pair in both.items()} for at in (0, 1)
        )
    same(found, wanted)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("sizes", [{"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_matrices_in_a_scan_under_checkpoint_with_donation(kind, sizes):
    mesh, axes = (
        built(sizes, axis_types=kind),
        ("fsdp", "tensor") if len(sizes) > 1 else ("fsdp",),
    )
    layer = {"up": jnp.ones((16, 32)), "down": jnp.ones((32, 16)), "norm": jnp.ones(16)}
    keys = jax.random.split(jax.random.key(0), len(layer))
    shapes = {name: (11, *own.shape) for name, own in layer.items()}
    stacked = {
        name: np.array(jax.random.normal(key, shapes[name]))
        for name, key in zip(layer, keys, strict=True)
    }
    one = plan(layer, mesh, paths=PathRules([("norm", P()), (".*", P(*axes))]))
    every = plan(
        stacked, mesh, paths=PathRules([("norm", P()), (".*", P(None, *axes))])
    )
    mapped = jax.checkpoint(map_matrices(unit, one, over=tuple(sizes)))
    step = jax.jit(
        lambda tree: jax.lax.scan(lambda _, layer: (None, mapped(layer)), None, tree)[
            1
        ],
        out_shardings=every.shardings,
        donate_argnums=0,
    )
    with jax.set_mesh(mesh):
        given: Any = sfx.shard(stacked, every)
        found = step(given)
    assert given["up"].is_deleted()
    same(
        found,
        {
            name: one if name == "norm" else jax.vmap(unit)(one)
            for name, one in stacked.items()
        },
    )


@pytest.mark.parametrize("spec", [P("fsdp"), P(None, "fsdp")])
def test_a_tree_map_splits_fused_arrays(spec):
    """q, k and v in one: each is a matrix of its own, and no device receives all of the
    array.
    """
    ends = {"q": (0, 32), "k": (32, 48), "v": (48, None)}
    split = {name: From("qkv").slice(*own, dim=1) for name, own in ends.items()}
    map, mesh = TreeMap(split), built({"fsdp": 8})
    fused = {"qkv": jax.random.normal(jax.random.key(0), (64, 64))}
    made = plan(fused, mesh, paths=PathRules([("qkv", spec)]))
    mapped = map_matrices(
        unit,
        plan(
            jax.eval_shape(map.apply, fused), mesh, paths=PathRules([(".*", P("fsdp"))])
        ),
    )
    update = jax.jit(
        lambda tree: map.inverse().apply(mapped(map.apply(tree)), like=tree),
        out_shardings=made.shardings,
    )
    compiled = update.lower(made.structs).compile()
    parts = [np.asarray(fused["qkv"])[:, slice(*own)] for own in ends.values()]
    wanted = np.concatenate([one / np.linalg.norm(one) for one in parts], axis=1)
    same(compiled(sfx.shard(fused, made)), {"qkv": wanted})
    assert {row.kind for row in sfx.cost.traffic(compiled).rows} == {"all-to-all"}


def test_a_plan_without_devices_is_estimated():
    made = plan(matrices(32, (64, 64)), MeshSpec({"fsdp": 32}), paths=FSDP)
    step = sfx.filter_jit(
        map_matrices(orthogonal, made), in_shardings=(made,), out_shardings=made
    )
    told = sfx.cost.estimate(step, made.structs, compiler="cpu")
    assert {row.kind for row in told.rows} == {"all-to-all"} and len(told.rows) == 2


def test_a_limit_makes_stacks_smaller():
    tree, mesh = matrices(32), built({"fsdp": 8})
    made = plan(tree, mesh, paths=FSDP)
    one = 16 * 32 * 4
    assert len(map_matrices(unit, made).exchanges) == 1
    few = map_matrices(unit, made, memory_limit_bytes=5 * one)
    assert [one.starts(0).shape[1] for one in few.exchanges] == [2, 2]
    same(
        jax.jit(few)(sfx.shard(tree, made)),
        {name: unit(one) for name, one in tree.items()},
    )
    with pytest.raises(
        MoveError, match=f"1 matrices of 16 x 32 on 8 owners need {3 * one} bytes"
    ):
        map_matrices(unit, made, memory_limit_bytes=one)


def test_an_empty_tree_and_other_owners():
    tree, mesh = {"b": jnp.ones(8)}, built({"data": 2, "fsdp": 4})
    made = plan(tree, mesh, paths=FSDP)
    same(jax.jit(map_matrices(unit, made))(tree), tree)
    made = plan(matrices(8), mesh, paths=FSDP)
    assert map_matrices(unit, made).exchanges[0].axes == ("fsdp",)
    assert map_matrices(unit, made, over=("data", "fsdp")).exchanges[0].starts(
        0
    ).shape == (8, 1)
    axes = AxisRules([("batch", ("data", "fsdp"))])
    assert map_matrices(unit, plan(matrices(8), mesh, paths=FSDP, axes=axes)).exchanges[
        0
    ].axes == ("data", "fsdp")


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
    made = plan(matrices(2), MESH.build(jax.devices()), paths=FSDP)
    with pytest.raises(PlanMismatchError, match="the tree has no `w1`"):
        map_matrices(unit, made)({"w0": jnp.ones((16, 32))})
    with pytest.raises(LeafTypeError, match="return the same shapes, dtypes"):
        jax.eval_shape(map_matrices(lambda one: one.T, made), made.structs)
    whole = plan({"w": jnp.zeros((8, 8), jnp.int32)}, MESH, paths=FSDP)
    assert map_matrices(unit, whole, where={"w": None}).exchanges == ()
    with pytest.raises(LeafTypeError, match="pass `map_matrices"):
        map_matrices(unit, made).init()


def test_modules_keep_what_is_no_array():
    linear = eqx.nn.MLP(8, 8, 16, 2, key=jax.random.key(0))
    made = plan(linear, MESH.build(jax.devices()), paths=FSDP)
    found = sfx.filter_jit(map_matrices(unit, made))(sfx.shard(linear, made))
    same(found.layers[0].weight, unit(linear.layers[0].weight))
    assert found.activation is linear.activation
