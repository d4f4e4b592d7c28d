"""A dimension in which heads lie side by side is only cut between heads, and as far as heads allow."""

import itertools
import math

import catalogue
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import NamedSharding, PartitionSpec as P

from shardfx import AxisRules, MeshSpec, PathRules, atomic, fsdp, plan
from shardfx._ground.spec import entries_of, entry_axes
from shardfx.presets import hf


MODELS = {name: model for name, model in catalogue.MODELS.items() if model.fused}
# Every size to 64; 3, 6 and 12 share no power of two with most head counts, 7 divides 28 heads.
SIZES = [(size,) for size in range(1, 65)]
SEVERAL = [(2, 3), (3, 2), (4, 6), (2, 2, 2), (7, 4), (5, 8), (16, 2, 3), (1, 8), (8, 8)]


def most_pieces(count: int, sizes: tuple[int, ...]) -> int:
    """By trying all: into how many pieces a subset of axes of these sizes can cut `count` heads."""
    subsets = itertools.product([False, True], repeat=len(sizes))
    products = [math.prod(itertools.compress(sizes, chosen)) for chosen in subsets]
    return max(product for product in products if count % product == 0)


def cuts(spec: P, shape: tuple[int, ...], mesh: MeshSpec, dim: int) -> list[int]:
    """Where JAX cuts a dimension."""
    piece = NamedSharding(mesh.abstract(), spec).shard_shape(shape)[dim]
    return list(range(piece, shape[dim], piece))


def preset(model: catalogue.Model, tensor: str | tuple[str, ...] = "tensor") -> PathRules:
    assert model.preset is not None
    return getattr(hf, model.preset)(**dict(model.arguments), tensor=tensor)


def fused_tree(model: catalogue.Model) -> dict[str, jax.ShapeDtypeStruct]:
    return {path: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for path, shape, _, _ in catalogue.fused_of(model)}


@pytest.mark.parametrize("name", MODELS)
def test_no_mesh_cuts_a_head_of_a_real_model_and_none_is_left_whole_for_nothing(name):
    model = MODELS[name]
    tree, fused = fused_tree(model), catalogue.fused_of(model)
    # Every pattern of the catalogue finds leaves.
    assert len({(dim, unit) for _, _, dim, unit in fused}) == len({heads[1:] for heads in model.fused})
    for sizes in [*SIZES, *SEVERAL]:
        tensor = tuple(f"t{i}" for i in range(len(sizes)))
        mesh = MeshSpec({"fsdp": 4, **dict(zip(tensor, sizes, strict=True))})
        made = plan(tree, mesh, paths=preset(model, tensor), unmatched="replicate")
        for path, shape, dim, unit in fused:
            leaf = made[path]
            found = cuts(leaf.spec, shape, mesh, dim)
            assert all(cut % unit == 0 for cut in found), (path, sizes)
            assert len(found) + 1 == most_pieces(shape[dim] // unit, sizes), (path, sizes)
            whole = not [why for why in leaf.reasons if set(tensor) & set(why.axes)]
            assert (len(found) + 1 == math.prod(sizes)) == whole
            # The other dimension is sharded whatever becomes of the heads.
            assert len(shape) == 1 or [*entries_of(leaf.spec), None, None][1 - dim] == "fsdp"


@given(st.integers(1, 24), st.integers(1, 32), st.integers(1, 64), st.lists(st.integers(1, 12), min_size=1, max_size=3))
@settings(max_examples=300)
def test_strategies_keep_heads_whole_too(heads, unit, other, sizes):
    axes = tuple(f"a{i}" for i in range(len(sizes)))
    mesh = MeshSpec(zip(axes, sizes, strict=True))
    shape = (heads * unit, other)
    rules = PathRules([("w", atomic(P(), (unit, 1)) | fsdp(axes))])
    leaf = plan({"w": jax.ShapeDtypeStruct(shape, jnp.float32)}, mesh, paths=rules)["w"]
    assert all(cut % unit == 0 for cut in cuts(leaf.spec, shape, mesh, 0))
    pieces = math.prod(mesh.axis_size(entry_axes(entry)) for entry in entries_of(leaf.spec))
    assert pieces == max(most_pieces(heads, tuple(sizes)), most_pieces(other, tuple(sizes)))


def test_an_array_that_counts_units_has_none_whatever_was_planned_before_it():
    axes = AxisRules([("heads", None)], units={"heads": 16})
    tree = [jax.ShapeDtypeStruct((size,), jnp.float32) for size in (32, 8)]
    assert [leaf.units for leaf in plan(tree, MeshSpec({"x": 2}), names=("heads",), axes=axes).leaves] == [(16,), (1,)]
