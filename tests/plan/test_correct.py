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
from shardfx.errors import SpecError
from shardfx.presets import hf
from tests.specs import entries_of, entry_axes


U = P.UNCONSTRAINED
MESH = MeshSpec({"data": 2, "tensor": 4, "one": 1})
BOTH = ("data", "tensor")


def added(spec, shape, axes, units=None, mesh=MESH):
    """The plan of an array under `fsdp` after a spec."""
    placed = spec if units is None else sfx.atomic(spec, units)
    target = placed | fsdp(axes)
    struct = jax.ShapeDtypeStruct(shape, jnp.float32)
    tree = {"w": struct}
    rules = sfx.PathRules([("w", target)], mesh_axes=("gone",))
    sharding_plan = sfx.plan(tree, mesh, paths=rules)
    return sharding_plan["w"]


def codes(decision):
    reason_codes = []
    for why in decision.reasons:
        reason_codes.append(why.code)
    return reason_codes


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
    abstract = MESH.abstract()
    decision = correct(spec, shape, abstract, **keywords)
    assert decision.spec == expected
    actual = codes(decision)
    assert actual == why


@pytest.mark.skipif(
    "unreduced_kind" not in dir(P),
    reason="before JAX 0.11 a spec cannot leave a maximum unreduced",
)
def test_an_unreduced_maximum_stays_a_maximum():
    sharding: Any = jax.sharding
    summed_axes = frozenset({"data"})
    kinds: Any = {
        "unreduced": summed_axes,
        "unreduced_kind": sharding.UnreducedKind.max,
    }
    spec = P("tensor", None, **kinds)
    canonical = sfx._ground.spec.canonical(spec)
    corrected = correct(spec, (8, 8), MESH)
    assert canonical == P("tensor", **kinds) == corrected.spec
    with_gone = {**kinds, "unreduced": frozenset({"data", "gone"})}
    decision = correct(P(**with_gone), (8,), MESH)
    actual = decision.spec
    assert actual == P(**kinds)
    struct = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    rules = sfx.PathRules([("w", spec)])
    plan = sfx.plan(
        {"w": struct},
        MESH,
        paths=rules,
    )
    text = plan.to_json()
    again = sfx.ShardPlan.from_json(text)
    assert again == plan
    expected = P("tensor", **kinds)
    assert again["w"].spec == expected
    assert again["w"].requested == spec
    summed_spec = P("tensor", unreduced=frozenset({"data"}))
    summed = plan.replace("w", summed_spec)
    assert summed.digest != plan.digest
    text_of_plan = sfx.testing.plan_text(plan)
    assert "unreduced max data" in text_of_plan
    text_of_sum = sfx.testing.plan_text(summed)
    assert "unreduced data" in text_of_sum
    # Sums are as they were.
    json_of_sum = summed.to_json()
    assert '"kind"' not in json_of_sum


@pytest.mark.parametrize(
    "size, unit, axis",
    [(16, 8, 3), (16, 8, 4), (16, 8, 16), (24, 4, 12), (7, 1, 2), (12, 4, 9)],
)
def test_the_advice_never_cuts_inside_a_unit(size, unit, axis):
    mesh = MeshSpec({"x": axis})
    by_spec = correct(P("x"), (size,), mesh, units=(unit,))
    by_strategy = added(P(), (size,), "x", (unit,), mesh=mesh)
    for decision in (
        by_spec,
        by_strategy,
    ):
        (why,) = decision.reasons
        advised = re.search(r"axes whose product divides (\d+)", why.message)
        assert advised is not None
        unit_count = size // unit
        product = int(advised[1])
        assert product == unit_count
        padded = re.search(r"pad it to (\d+)", why.message)
        assert padded is None or correct(
            P("x"), (int(padded[1]),), mesh, units=(unit,)
        ).spec == P("x")


@pytest.mark.parametrize(
    "size, padded", [(50257, 50260), (1003, 1004), (64, None), (3, None), (192, None)]
)
def test_padding_is_advised_where_it_adds_little(size, padded):
    axis_size = 4 if size % 4 else 7
    mesh = MeshSpec({"x": axis_size})
    decision = correct(P("x"), (size,), mesh)
    (why,) = decision.reasons
    is_advised = "pad it to" in str(why)
    assert is_advised == (padded is not None)
    expected = str(padded or "")
    assert expected in str(why)


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
    spec = P(axes)
    decision = correct(spec, (size,), mesh, units=(unit,))
    (why,) = decision.reasons
    message_of_reason = str(why)
    assert message_of_reason.startswith(f"dim 0: {message}")


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
    actual = codes(leaf)
    assert actual == why


# --- attention heads


MODELS = {}
for name, model in catalogue.MODELS.items():
    if model.fused:
        MODELS[name] = model
# Every size to 64; 3, 6 and 12 share no power of two with most head counts, 7 divides
# 28 heads.
SIZES = []
for size in range(1, 65):
    SIZES.append((size,))
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
    products = []
    for chosen in subsets:
        products.append(math.prod(itertools.compress(sizes, chosen)))
    dividing = []
    for product in products:
        if count % product == 0:
            dividing.append(product)
    return max(dividing)


def cuts(spec: P, shape: tuple[int, ...], mesh: MeshSpec, dim: int) -> list[int]:
    """The positions at which JAX splits a dimension into shards."""
    sharding = NamedSharding(mesh.abstract(), spec)
    shard_shape = sharding.shard_shape(shape)
    piece = shard_shape[dim]
    size = shape[dim]
    return list(range(piece, size, piece))


@pytest.mark.parametrize("name", MODELS)
def test_no_mesh_cuts_a_head_of_a_real_model(name):
    model = MODELS[name]
    preset_name = str(model.preset)
    preset = getattr(hf, preset_name)
    fused = catalogue.fused_of(model)
    tree = {}
    for path, shape, _, _ in fused:
        tree[path] = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    # Every pattern of the catalogue finds leaves.
    count = len({(dim, unit) for _, _, dim, unit in fused})
    assert count == len({heads[1:] for heads in model.fused})
    for sizes in [*SIZES, *SEVERAL]:
        tensor = []
        for i in range(len(sizes)):
            tensor.append(f"t{i}")
        tensor = tuple(tensor)
        sizes_by_name = dict(zip(tensor, sizes, strict=True))
        axes = {"fsdp": 4, **sizes_by_name}
        mesh = MeshSpec(axes)
        arguments = dict(model.arguments)
        rules = preset(**arguments, tensor=tensor)
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
                remainder = cut % unit
                assert remainder == 0, (path, sizes)
            count_of_heads = shape[dim] // unit
            expected = most_pieces(count_of_heads, sizes)
            assert len(result) + 1 == expected, (
                path,
                sizes,
            )
            reasons_of_heads = []
            for why in leaf.reasons:
                if set(tensor) & set(why.axes):
                    reasons_of_heads.append(why)
            whole = not reasons_of_heads
            pieces = len(result) + 1
            assert (pieces == math.prod(sizes)) == whole
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
    axes = []
    for i in range(len(sizes)):
        axes.append(f"a{i}")
    axes = tuple(axes)
    pairs = zip(axes, sizes, strict=True)
    mesh = MeshSpec(pairs)
    shape = (heads * unit, other)
    heads_whole = sfx.atomic(P(), (unit, 1))
    rules = sfx.PathRules([("w", heads_whole | fsdp(axes))])
    struct = jax.ShapeDtypeStruct(shape, jnp.float32)
    sharding_plan = sfx.plan({"w": struct}, mesh, paths=rules)
    leaf = sharding_plan["w"]
    for cut in cuts(leaf.spec, shape, mesh, 0):
        remainder = cut % unit
        assert remainder == 0
    axis_products = []
    for entry in entries_of(leaf.spec):
        axis_products.append(mesh.axis_size(entry_axes(entry)))
    pieces = math.prod(axis_products)
    most_of_heads = most_pieces(heads, tuple(sizes))
    most_of_others = most_pieces(other, tuple(sizes))
    expected = max(most_of_heads, most_of_others)
    assert pieces == expected


def test_an_array_that_counts_units_has_no_unit():
    axes = sfx.AxisRules([("heads", None)], units={"heads": 16})
    tree = []
    for size in (32, 8):
        tree.append(jax.ShapeDtypeStruct((size,), jnp.float32))
    mesh = MeshSpec({"x": 2})
    plan = sfx.plan(tree, mesh, names=("heads",), axes=axes)
    units = []
    for leaf in plan.leaves:
        units.append(leaf.units)
    assert units == [(16,), (1,)]


@pytest.mark.parametrize("names", [(), (...,), (None, None)])
def test_units_of_a_rule_without_names(names):
    rules = sfx.PathRules([("w", sfx.atomic(names, (2, 1)))])
    axes = sfx.AxisRules([("mlp", "data")])
    mesh = MeshSpec({"data": 2})
    sharding_plan = sfx.plan({"w": jnp.ones((8, 4))}, mesh, paths=rules, axes=axes)
    assert sharding_plan["w"].spec == P()
    assert sharding_plan["w"].units == (2, 1)


def test_a_text_is_no_shape_and_is_not_advised():
    with pytest.raises(SpecError, match="this is '86'; pass `x.shape`"):
        correct(P("data"), "86", MeshSpec({"data": 2}))  # pyright: ignore
