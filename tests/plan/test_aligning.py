"""`follow` aligns the dimensions of adapters, scales and states by position. Brute force
over all coinciding sizes up to rank 4.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P
from optax._src.factorized import _factored_dims

from shardfx import Code, LeafPlan, MeshSpec, PathRules, ShardPlan, follow, plan
from shardfx._plan import aligning
from shardfx.errors import SpecError
from tests.specs import entries_at
from tests.structs import struct


Shape = tuple[int, ...]
# For each dimension, the corresponding one of the base.
Dims = tuple[int | None, ...]
SIZES = (2, 3, 4)
AXES = ("a", "b", "c", "d")


def shapes(*ranks: int, sizes: Iterable[int] = SIZES) -> Iterator[Shape]:
    for rank in ranks:
        yield from itertools.product(sizes, repeat=rank)


# --- adapters


def pairs_of(base: Shape, rank: int) -> Iterator[tuple[Shape, Dims, Shape, Dims]]:
    """The shapes and dimensions of both adapters of a base, for each division of its
    dimensions into those of a stack, those of one side and those of the other.
    """
    count = len(base)
    for stack, middle in itertools.combinations(range(count), 2):
        first = (*base[:middle], rank)
        second = (*base[:stack], rank, *base[middle:])
        first_dims = (*range(middle), None)
        second_dims = (*range(stack), None, *range(middle, count))
        yield first, first_dims, second, second_dims


def test_each_pair_of_adapters_is_read_as_it_was_made():
    alone = 0
    for base in shapes(2, 3, 4):
        # What two shapes may mean: one pair may be made in several ways.
        meanings: dict[tuple[Shape, Shape], set[Dims]] = {}
        for rank in SIZES:
            for first, first_dims, second, second_dims in pairs_of(base, rank):
                meanings.setdefault((first, second), set()).add(first_dims)
                meanings.setdefault((second, first), set()).add(second_dims)
        for (shape, partner), meaning in meanings.items():
            readings = aligning.adapter_readings(base, shape, (partner,))
            dims_of_readings = set()
            for reading in readings:
                dims_of_readings.add(reading.dims)
            assert dims_of_readings == meaning, (base, shape)
            is_alone = len(meaning) == 1
            alone += is_alone
    assert alone > 2000


def test_an_adapter_without_its_partner_is_read_as_it_may_be():
    for base in shapes(2, 3, 4):
        for rank in SIZES:
            for first, first_dims, second, second_dims in pairs_of(base, rank):
                for shape, dims in ((first, first_dims), (second, second_dims)):
                    result = []
                    for adapter_reading in aligning.adapter_readings(base, shape, ()):
                        result.append(adapter_reading.dims)
                    # A rank above that of the product is no adapter's.
                    assert dims in result or rank > min(base), (base, shape)


# --- scales


def exact(base: Shape, shape: Shape, fronts: Iterable[int]) -> set[Dims]:
    """The first and last dimensions of the base that have the sizes of `shape`, with
    one of `fronts` as the number of first ones.
    """
    names = set()
    for front in fronts:
        back = len(shape) - front
        last = range(len(base) - back, len(base))
        dims = (*range(front), *last)
        sizes = []
        for dim in dims:
            sizes.append(base[dim])
        if tuple(sizes) == shape:
            names.add(dims)
    return names


def test_scales_with_the_first_or_last_dimensions_have_those():
    for base in shapes(2, 3, 4):
        for shape in shapes(*range(1, len(base))):
            fronts = range(len(shape) + 1)
            exact_dims = exact(base, shape, fronts)
            result = set()
            for reading in aligning.scale_readings(base, shape):
                result.add(reading.dims)
            if exact_dims:
                assert result == exact_dims, (base, shape)
            for dims in result:
                bases = []
                for dim in dims:
                    if dim is not None:
                        bases.append(base[dim])
                sizes = zip(shape, bases, strict=True)
                for size, whole in sizes:
                    remainder = whole % size
                    assert remainder == 0, (base, shape)


def test_a_scale_with_all_dimensions_is_read_by_place():
    for base in shapes(1, 2, 3):
        sizes = (1, 2, 3, 4)
        for shape in shapes(len(base), sizes=sizes):
            (reading,) = aligning.scale_readings(base, shape)
            expected = tuple(range(len(base)))
            assert reading.dims == expected


MESH = MeshSpec({"fsdp": 4, "tensor": 2})
FT = P("fsdp", "tensor")
NFT = P(None, "fsdp", "tensor")
LORA_A = "lora_a"
LORA_B = "lora_b"
MAGNITUDE = "magnitude"
SCALE = "scale"


@pytest.mark.parametrize(
    "base, spec, arrays, specs",
    [
        # Llama 3 8B: 8 heads of keys, adapters of rank 8.
        (
            (4096, 8, 128),
            FT,
            {LORA_A: (4096, 8), LORA_B: (8, 8, 128), MAGNITUDE: (8, 128)},
            [P("fsdp"), P(None, "tensor"), P("tensor")],
        ),
        (
            (64, 128),
            FT,
            {LORA_A: (64, 64), LORA_B: (64, 128)},
            [P("fsdp"), P(None, "tensor")],
        ),
        (
            (8, 64, 128),
            NFT,
            {LORA_A: (8, 64, 64), LORA_B: (8, 64, 128)},
            [P(None, "fsdp"), P(None, None, "tensor")],
        ),
        # Layers of torch: the rows of a base are those of `lora_b`.
        (
            (64, 64),
            FT,
            {LORA_A: (8, 64), LORA_B: (64, 8)},
            [P(None, "tensor"), P("fsdp")],
        ),
        # Many adapters in one array, experts that share one, a convolution.
        (
            (64, 128),
            FT,
            {LORA_A: (5, 64, 8), LORA_B: (5, 8, 128)},
            [P(None, "fsdp"), P(None, None, "tensor")],
        ),
        ((6, 64, 128), NFT, {LORA_A: (64, 8)}, [P("fsdp")]),
        (
            (3, 64, 128),
            NFT,
            {LORA_A: (3, 64, 8), LORA_B: (1, 8, 128)},
            [P(None, "fsdp"), P(None, None, "tensor")],
        ),
        ((512, 16, 128), FT, {SCALE: (16, 128)}, [P("tensor")]),
        ((512, 16, 128), FT, {SCALE: (16,)}, [P("tensor")]),
        ((512, 16, 128), FT, {SCALE: (1, 16, 128)}, [P(None, "tensor")]),
        ((512, 16, 128), FT, {SCALE: (4, 16, 128)}, [P("fsdp", "tensor")]),
        ((512, 128), FT, {SCALE: (16, 128)}, [P("fsdp", "tensor")]),
        ((512, 128), FT, {SCALE: (8, 512, 128)}, [NFT]),
        ((512, 128), FT, {SCALE: (1, 128)}, [P(None, "tensor")]),
        ((512, 128), FT, {SCALE: (1,)}, [P()]),
        ((512, 128), FT, {SCALE: ()}, [P()]),
    ],
)
def test_adapters_and_scales_go_with_their_base(base, spec, arrays, specs):
    tree = {"k": {"w": struct(*base)}}
    rules = PathRules([("w$", spec)])
    base_plan = plan(tree, MESH, paths=rules, strict=True)

    def adapters(_):
        return {"k": {name: struct(*shape) for name, shape in arrays.items()}}

    state_plan = follow(
        adapters,
        base_plan,
        unused="allow",
        adapters=[("lora_[ab]$|magnitude", "w")],
        scales=[("scale$", "w")],
    )
    actual = []
    for name in arrays:
        actual.append(state_plan[f"k/{name}"].spec)
    assert actual == specs


@pytest.mark.parametrize(
    "base, kind, shape, spec, says",
    [
        ((64, 128), LORA_B, (64, 128), P(None, "tensor"), "numbered (-, 1) or (0, 1)"),
        (
            (64, 128),
            LORA_B,
            (3, 5),
            P(),
            "no dimension of shape (3, 5) is one of `k/w`",
        ),
        ((64, 64), SCALE, (64,), P(), "may be those numbered (0) or (1) of `k/w`"),
        ((64, 64), SCALE, (8,), P(), "may be those numbered (0) or (1) of `k/w`"),
        ((100, 128), SCALE, (6, 128), P(None, "tensor"), "dim 0: 6 elements are not"),
    ],
)
def test_dimensions_that_nothing_tells_have_a_reason(base, kind, shape, spec, says):
    tree = {"k": {"w": struct(*base)}}
    rules = PathRules([("w$", FT)])
    followed = lambda strict: follow(
        lambda _: {"k": {kind: struct(*shape)}},
        plan(tree, MESH, paths=rules, strict=strict),
        unused="allow",
        adapters=[("lora_b$", "w")],
        scales=[("scale$", "w")],
    )[f"k/{kind}"]
    leaf = followed(strict=False)
    (why,) = leaf.reasons
    assert leaf.spec == spec
    assert why.code is Code.unaligned
    message = str(why)
    assert says in message
    with pytest.raises(SpecError, match="not sharded as asked"):
        followed(strict=True)


def test_a_rule_for_scalars_alone_is_in_use():
    tree = {"w": struct(8, 4)}
    rules = PathRules([("w$", FT)])
    base_plan = plan(tree, MESH, paths=rules)

    def init(tree):
        return {**tree, "scale": struct(), "step": struct()}

    paths = PathRules([("step", P())])
    state_plan = follow(init, base_plan, scales=[("scale$", "w")], paths=paths)
    specs = []
    for leaf in state_plan.leaves:
        specs.append(leaf.spec)
    assert specs == [P(), P(), FT]


# --- states of optimizers


def planned(bases: Iterable[Shape]) -> ShardPlan:
    """A plan that shards each dimension of an array over a mesh axis of its own, of
    size 1, so that only the alignment decides.
    """
    tree = {}
    for shape in bases:
        tree[str(shape)] = struct(*shape)
    sizes: dict[str, int] = dict.fromkeys(AXES, 1)
    mesh = MeshSpec(sizes)

    def rule(path, leaf):
        return P(*AXES[: len(leaf.shape)])

    rules = PathRules([("", rule)])
    return plan(tree, mesh, paths=rules)


def without(values: tuple[Any, ...], dim: int) -> tuple[Any, ...]:
    return (*values[:dim], *values[dim + 1 :])


def test_statistics_of_adafactor_have_the_dimensions_of_optax():
    bases = [*shapes(2, 3), *shapes(4, sizes=(2, 3))]
    base_plan = planned(bases)
    optimizer = optax.scale_by_factored_rms(min_dim_size_to_factor=2)
    init = optimizer.init
    by_jax = follow(init, base_plan)
    dims = {}
    for shape in bases:
        dims[shape] = _factored_dims(shape, True, 2) or (0, 1)

    def without_jax(_):
        """The same shapes, of which nothing says where they come from."""
        return {
            str(shape): {
                "row": struct(*without(shape, last)),
                "col": struct(*without(shape, first)),
            }
            for shape, (first, last) in dims.items()
        }

    by_shape = follow(without_jax, base_plan)
    for shape, (first, last) in dims.items():
        for name, dim in (("row", last), ("col", first)):
            names = AXES[: len(shape)]
            expected = without(names, dim)
            exact_leaf = by_jax[f"v_{name}/{shape}"]
            if not exact_leaf.reasons:
                assert entries(exact_leaf) == expected
            else:
                # JAX 0.9 does not say which dimension of a square is left out.
                assert jax.__version_info__ < (0, 10)
                assert exact_leaf.reasons[0].code == Code.unaligned
            leaf = by_shape[f"{shape}/{name}"]
            if leaf.reasons:
                codes = []
                for why in leaf.reasons:
                    codes.append(why.code)
                assert codes == [Code.unaligned]
                actual = entries(leaf)
                pairs = zip(actual, expected, strict=True)
                for entry, axis in pairs:
                    assert entry in (None, axis)
            else:
                assert entries(leaf) == expected


def entries(leaf: LeafPlan) -> tuple[Any, ...]:
    return tuple(entries_at(leaf.spec, len(leaf.shape)))


def test_placeholders_and_constants_have_nothing_to_shard():
    params = {"w": struct(256, 512), "b": struct(16)}
    rules = PathRules([("w$", FT), ("b", P("fsdp"))])
    base_plan = plan(params, MESH, paths=rules)
    for optimizer in (optax.adafactor(1e-3), optax.contrib.muon(1e-3)):
        followed = follow(optimizer.init, base_plan)
        for leaf in followed.leaves:
            is_whole = leaf.spec == P()
            has_reason = any(why.code is Code.scalar for why in leaf.reasons)
            assert is_whole == has_reason

    def large(tree):
        return {**tree, "table": jnp.ones(1000)}

    followed_large = follow(large, base_plan)
    (why,) = followed_large["table"].reasons
    assert why.code is Code.unmatched
