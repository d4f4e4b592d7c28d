"""A `shard_map` on one device: each shard is a row of a mapped dimension, and `vmap`
has the collectives.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ._case import AnyMesh


def shard_map_on_one_device(
    body: Callable[..., Any],
    *,
    mesh: AnyMesh,
    in_specs: Any,
    out_specs: Any,
    check_vma: bool = True,
) -> Callable[..., Any]:
    """A function with the results of `jax.shard_map(body, ...)` that needs no mesh.

    `check_vma` is ignored. `jax.vmap` differentiates a collective within the body as
    `jax.shard_map` does without that check.
    """
    sizes = dict(mesh.shape)

    def mapped(*args: Any) -> Any:
        split = lambda spec, tree: jax.tree.map(lambda x: _split(x, spec, sizes), tree)
        shards = jax.tree.map(split, in_specs, args, is_leaf=_is_spec)
        run = body
        for axis in reversed(sizes):
            run = jax.vmap(run, axis_name=axis)
        results = run(*shards)
        join = lambda spec, tree: jax.tree.map(lambda x: _joined(x, spec, sizes), tree)
        return jax.tree.map(join, out_specs, results, is_leaf=_is_spec)

    return mapped


def _is_spec(value: object) -> bool:
    return isinstance(value, PartitionSpec)


def _axes_of_dims(spec: PartitionSpec, rank: int) -> Sequence[tuple[str, ...]]:
    """The mesh axes that shard each dimension of an array."""
    axes_of_dims = []
    for dim in range(rank):
        entry = spec[dim] if dim < len(spec) else None
        if entry is None:
            entry = ()
        axes_of_dims.append((entry,) if isinstance(entry, str) else tuple(entry))
    return axes_of_dims


def _split(x: jax.Array, spec: PartitionSpec, sizes: Mapping[str, int]) -> jax.Array:
    """The shard of each device, in an array whose first dimensions are the mesh axes.

    `_split(arange(4), P("x"), {"x": 2, "y": 3})` has the shape (2, 3, 2).
    """
    axes_of_dims = _axes_of_dims(spec, x.ndim)
    shape: list[int] = []
    position_of_axis: dict[str, int] = {}
    inner_positions = []
    for length, axes in zip(x.shape, axes_of_dims, strict=True):
        for axis in axes:
            position_of_axis[axis] = len(shape)
            shape.append(sizes[axis])
        inner_positions.append(len(shape))
        shape.append(length // math.prod(sizes[axis] for axis in axes))
    x = x.reshape(shape)
    outer_positions = [
        position_of_axis[axis] for axis in sizes if axis in position_of_axis
    ]
    x = x.transpose(*outer_positions, *inner_positions)
    unused_positions = [
        position for position, axis in enumerate(sizes) if axis not in position_of_axis
    ]
    x = jnp.expand_dims(x, unused_positions)
    shard_shape = x.shape[len(sizes) :]
    return jnp.broadcast_to(x, (*sizes.values(), *shard_shape))


def _joined(x: jax.Array, spec: PartitionSpec, sizes: Mapping[str, int]) -> jax.Array:
    """The array whose shards `x` has, as `_split` returns them. Of equal shards, the
    first counts.
    """
    axes_of_dims = _axes_of_dims(spec, x.ndim - len(sizes))
    used_axes = list(itertools.chain.from_iterable(axes_of_dims))
    shard_shape = x.shape[len(sizes) :]
    first_or_all: list[int | slice] = []
    position_of_axis = {}
    for axis in sizes:
        if axis in used_axes:
            first_or_all.append(slice(None))
            position_of_axis[axis] = len(position_of_axis)
        else:
            first_or_all.append(0)
    x = x[tuple(first_or_all)]
    order: list[int] = []
    shape = []
    for dim, axes in enumerate(axes_of_dims):
        order += [position_of_axis[axis] for axis in axes]
        order.append(len(position_of_axis) + dim)
        shape.append(shard_shape[dim] * math.prod(sizes[axis] for axis in axes))
    return x.transpose(order).reshape(shape)
