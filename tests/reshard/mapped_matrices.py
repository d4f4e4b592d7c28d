"""Matrices that are mapped under a plan, beside what one device makes of each."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import shardfx as sfx
from shardfx import (
    MeshSpec,
    PathRules,
    fsdp,
    map_matrices,
    plan,
)


FSDP = PathRules([(".*", fsdp("fsdp"))])


# Whole matrices alone give these: of a part the norm is another.
def unit(item):
    return item / jnp.linalg.norm(item)


def expected_unit(matrix):
    """What `unit` returns, computed by NumPy."""
    values = np.asarray(matrix, np.float64)
    return values / np.linalg.norm(values)


def expected_units(matrices):
    """`expected_unit` of each matrix in the last two dimensions."""
    rows = matrices.reshape(-1, *matrices.shape[-2:])
    units = np.stack([expected_unit(matrix) for matrix in rows])
    return units.reshape(matrices.shape)


def normal(seed, shape):
    """Normally distributed float32 numbers of NumPy: JAX would compile for each shape."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def matrices(count, shape=(16, 32), dtype=jnp.float32):
    arrays = {}
    for number in range(count):
        arrays[f"w{number}"] = normal(number, shape).astype(dtype)
    return arrays


def built(sizes, **options):
    spec = MeshSpec(sizes, **options)
    devices = jax.devices()[: spec.size]
    return spec.build(devices)


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
    jitted = jax.jit(mapped, out_shardings=sharding_plan.shardings)
    lowered = jitted.lower(sharding_plan.structs)
    compiled = lowered.compile()
    placed = sfx.shard(tree, sharding_plan)
    result = compiled(placed)
    shardings = sfx.shardings_of(result)
    leaves = jax.tree.leaves(shardings)
    specs = []
    for leaf in leaves:
        specs.append(leaf.spec)
    leaves = jax.tree.leaves(sharding_plan.shardings)
    expected = []
    for leaf in leaves:
        expected.append(leaf.spec)
    assert specs == expected
    return result, mapped, sfx.cost.traffic(compiled)


def same(tree, expected, tolerance=1e-5):
    leaves = jax.tree.leaves(tree)
    others = jax.tree.leaves(expected)
    for leaf, other in zip(leaves, others, strict=True):
        leaf, other = (np.asarray(x, np.float64) for x in (leaf, other))
        differences = np.abs(leaf - other)
        largest = differences.max()
        limit = tolerance * np.abs(other).max()
        assert largest <= limit
