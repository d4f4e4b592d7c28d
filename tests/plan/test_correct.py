"""The axes that `correct` keeps and drops, with reasons; dimensions of heads are
sharded only between heads.
"""

import itertools
import math
import re
from typing import Any

import catalogue
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import shardfx as sfx
from shardfx import Code, MeshSpec, correct, fsdp
from shardfx._ground.spec import entries_of, entry_axes
from shardfx.errors import SpecError
from shardfx.presets import hf


U = P.UNCONSTRAINED
MESH = MeshSpec({"data": 2, "tensor": 4, "one": 1})
BOTH = ("data", "tensor")


def added(spec, shape, axes, units=None, mesh=MESH):
    """The plan of an array under `fsdp` after a spec."""
    target = (spec if units is None else sfx.atomic(spec, units)) | fsdp(axes)
    tree = {"w": jax.ShapeDtypeStruct(shape, jnp.float32)}
    rules = sfx.PathRules([("w", target)], mesh_axes=("gone",))
    sharding_plan = sfx.plan(tree, mesh, paths=rules)
    return sharding_plan["w"]


def codes(decision):
    return [why.code for why in decision.reasons]


UNREDUCED = P("tensor", unreduced=frozenset({"data"}))


@pytest.mark.parametrize(
    "spec, shape, keywords, expected, why",
    [
        (P(("data", "gone")), (4,), {}, P("data"), [Code.absent]),
        (P("data", "data"), (4, 4), {}, P("data"), [Code.duplicate]),
        (UNREDUCED, (8,), {}, UNREDUCED, []),
        (
            P("tensor", unreduced=frozenset({"gone"})),
            (8,),
            {},
            P("tensor"),
            [Code.absent],
        ),
        (P(BOTH), (2 * 128,), {"units": (128,)}, P("data"), [Code.unit]),
        (P("data"), (8,), {"min_bytes": 33, "dtype": jnp.float32}, P(), [Code.small]),
    ],
)
def test_correct(spec, shape, keywords, expected, why):
    decision = correct(spec, shape, MESH.abstract(), **keywords)
    assert decision.spec == expected
    assert codes(decision) == why


@pytest.mark.skipif(
    "unreduced_kind" not in dir(P), reason="JAX 0.11 and later can leave out a maximum"
)
def test_an_unreduced_maximum_stays_a_maximum():
    sharding: Any = jax.sharding
    kinds: Any = {
        "unreduced": frozenset({"data"}),
        "unreduced_kind": sharding.UnreducedKind.max,
    }
    spec = P("tensor", None, **kinds)
    assert (
        sfx._ground.spec.canonical(spec)
        == P("tensor", **kinds)
        == correct(spec, (8, 8), MESH).spec
    )
    decision = correct(
        P(**{**kinds, "unreduced": frozenset({"data", "gone"})}), (8,), MESH
    )
    actual = decision.spec
    assert actual == P(**kinds)
    struct = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    rules = sfx.PathRules([("w", spec)])
    plan = sfx.plan(
        {"w": struct},
        MESH,
        paths=rules,
    )
    again = sfx.ShardPlan.from_json(plan.to_json())
    assert again == plan
    assert again["w"].spec == P("tensor", **kinds)
    assert again["w"].requested == spec
    summed = plan.replace("w", P("tensor", unreduced=frozenset({"data"})))
    assert summed.digest != plan.digest
    assert "unreduced max data" in sfx.testing.plan_text(plan)
    assert "unreduced data" in sfx.testing.plan_text(summed)
    # Sums are as they were.
    assert '"kind"' not in summed.to_json()


@pytest.mark.parametrize(
    "size, unit, axis",
    [(16, 8, 3), (16, 8, 4), (16, 8, 16), (24, 4, 12), (7, 1, 2), (12, 4, 9)],
)
def test_the_advice_never_cuts_inside_a_unit(size, unit, axis):
    mesh = MeshSpec({"x": axis})
    for decision in (
        correct(P("x"), (size,), mesh, units=(unit,)),
        added(P(), (size,), "x", (unit,), mesh=mesh),
    ):
        (why,) = decision.reasons
        advised = re.search(r"axes whose product divides (\d+)", why.message)
        assert advised is not None
        assert int(advised[1]) == size // unit
        padded = re.search(r"pad it to (\d+)", why.message)
        assert padded is None or correct(
            P("x"), (int(padded[1]),), mesh, units=(unit,)
        ).spec == P("x")


@pytest.mark.parametrize(
    "size, padded", [(50257, 50260), (1003, 1004), (64, None), (3, None), (192, None)]
)
def test_padding_is_advised_where_it_adds_little(size, padded):
    mesh = MeshSpec({"x": 4 if size % 4 else 7})
    decision = correct(P("x"), (size,), mesh)
    (why,) = decision.reasons
    assert ("pad it to" in str(why)) == (padded is not None)
    assert str(padded or "") in str(why)


@pytest.mark.parametrize(
    "axes, size, unit, message",
    [
        (
            "tensor",
            8,
            8,
            (
                "8 elements are 1 unit of 8, and `tensor` (4) would cut inside a unit;"
                " use axes whose "
            ),
        ),
        (
            BOTH,
            256,
            128,
            (
                "256 elements are 2 units of 128, and `data` (2) x `tensor` (4) would"
                " cut inside a unit; use"
            ),
        ),
        (
            "data",
            10,
            4,
            (
                "size 10 is no whole number of units of 4, so nothing may cut it; if it"
                " counts units already"
            ),
        ),
        (
            "three",
            16,
            8,
            (
                "size 16 (2 units of 8) is not divisible by `three` (3); use axes whose"
                " product divides 2"
            ),
        ),
        (
            BOTH,
            4,
            1,
            (
                "size 4 is not divisible by `data` (2) x `tensor` (4); use axes whose"
                " product divides 4"
            ),
        ),
        (
            U,
            2,
            1,
            (
                "the mesh has no Auto axis that the compiler could choose for"
                " UNCONSTRAINED; "
            ),
        ),
    ],
)
def test_messages_of_reasons(axes, size, unit, message):
    mesh = MeshSpec({"data": 2, "tensor": 4, "three": 3}, axis_types=AxisType.Explicit)
    decision = correct(P(axes), (size,), mesh, units=(unit,))
    (why,) = decision.reasons
    assert str(why).startswith(f"dim 0: {message}")


@pytest.mark.parametrize(
    "arguments, keywords, message",
    [
        ((("data",), (8,)), {}, "expected a PartitionSpec"),
        ((P("data"), (8,)), {"min_bytes": 1}, "`min_bytes` needs the array's dtype"),
        ((P("data"), (8,)), {"units": (1, 2)}, "one positive int for each dimension"),
    ],
)
def test_errors(arguments, keywords, message):
    with pytest.raises(SpecError, match=message):
        correct(arguments[0], arguments[1], MESH, **keywords)


@pytest.mark.parametrize(
    "spec, shape, axes, units, expected, why",
    [
        (P(), (6, 8, 4), "data", None, P(None, "data"), []),
        (P(None, "tensor"), (6, 8, 4), "data", None, P("data", "tensor"), []),
        (P(), (3, 5), "data", None, P(), [Code.indivisible]),
        (P(), (4, 6), BOTH, None, P("tensor"), [Code.indivisible]),
        (P(), (6, 4), "tensor", (6, 1), P(None, "tensor"), []),
        (P("data"), (4, 4), "data", None, P("data"), [Code.duplicate]),
        (P(), (4,), "gone", None, P(), [Code.absent]),
    ],
)
def test_fsdp_takes_the_largest_dimension_or_says_why_not(
    spec, shape, axes, units, expected, why
):
    leaf = added(spec, shape, axes, units)
    assert leaf.spec == expected
    assert codes(leaf) == why


# --- attention heads


MODELS = {name: model for name, model in catalogue.MODELS.items() if model.fused}
# Every size to 64; 3, 6 and 12 share no power of two with most head counts, 7 divides
# 28 heads.
SIZES = [(size,) for size in range(1, 65)]
SEVERAL = [
    (2, 3),
    (3, 2),
    (4, 6),
    (2, 2, 2),
    (7, 4),
    (5, 8),
    (16, 2, 3),
    (1, 8),
    (8, 8),
]


def most_pieces(count: int, sizes: tuple[int, ...]) -> int:
    """The largest number of shards of `count` heads over a subset of axes of these
    sizes, found by trying all.
    """
    subsets = itertools.product([False, True], repeat=len(sizes))
    products = [math.prod(itertools.compress(sizes, chosen)) for chosen in subsets]
    return max(product for product in products if count % product == 0)


def cuts(spec: P, shape: tuple[int, ...], mesh: MeshSpec, dim: int) -> list[int]:
    """The positions at which JAX splits a dimension into shards."""
    piece = NamedSharding(mesh.abstract(), spec).shard_shape(shape)[dim]
    return list(range(piece, shape[dim], piece))


@pytest.mark.parametrize("name", MODELS)
def test_no_mesh_cuts_a_head_of_a_real_model(name):
    model = MODELS[name]
    preset = getattr(hf, str(model.preset))
    fused = catalogue.fused_of(model)
    tree = {
        path: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for path, shape, _, _ in fused
    }
    # Every pattern of the catalogue finds leaves.
    count = len({(dim, unit) for _, _, dim, unit in fused})
    assert count == len({heads[1:] for heads in model.fused})
    for sizes in [*SIZES, *SEVERAL]:
        tensor = tuple(f"t{i}" for i in range(len(sizes)))
        axes = {"fsdp": 4, **dict(zip(tensor, sizes, strict=True))}
        mesh = MeshSpec(axes)
        rules = preset(**dict(model.arguments), tensor=tensor)
        plan = sfx.plan(
            tree,
            mesh,
            paths=rules,
            unmatched="replicate",
        )
        for path, shape, dim, unit in fused:
            leaf = plan[path]
            result = cuts(leaf.spec, shape, mesh, dim)
            for cut in result:
                assert cut % unit == 0, (path, sizes)
            expected = most_pieces(shape[dim] // unit, sizes)
            assert len(result) + 1 == expected, (
                path,
                sizes,
            )
            whole = not [why for why in leaf.reasons if set(tensor) & set(why.axes)]
            assert (len(result) + 1 == math.prod(sizes)) == whole
            # The other dimension is sharded whatever becomes of the heads.
            assert (
                len(shape) == 1
                or [*entries_of(leaf.spec), None, None][1 - dim] == "fsdp"
            )


@given(
    st.integers(1, 24),
    st.integers(1, 32),
    st.integers(1, 64),
    st.lists(st.integers(1, 12), min_size=1, max_size=3),
)
@settings(max_examples=300)
def test_strategies_keep_heads_whole_too(heads, unit, other, sizes):
    axes = tuple(f"a{i}" for i in range(len(sizes)))
    mesh = MeshSpec(zip(axes, sizes, strict=True))
    shape = (heads * unit, other)
    rules = sfx.PathRules([("w", sfx.atomic(P(), (unit, 1)) | fsdp(axes))])
    struct = jax.ShapeDtypeStruct(shape, jnp.float32)
    sharding_plan = sfx.plan({"w": struct}, mesh, paths=rules)
    leaf = sharding_plan["w"]
    for cut in cuts(leaf.spec, shape, mesh, 0):
        assert cut % unit == 0
    pieces = math.prod(
        mesh.axis_size(entry_axes(entry)) for entry in entries_of(leaf.spec)
    )
    expected = max(most_pieces(heads, tuple(sizes)), most_pieces(other, tuple(sizes)))
    assert pieces == expected


def test_an_array_that_counts_units_has_no_unit():
    axes = sfx.AxisRules([("heads", None)], units={"heads": 16})
    tree = [jax.ShapeDtypeStruct((size,), jnp.float32) for size in (32, 8)]
    plan = sfx.plan(tree, MeshSpec({"x": 2}), names=("heads",), axes=axes)
    units = [leaf.units for leaf in plan.leaves]
    assert units == [(16,), (1,)]
