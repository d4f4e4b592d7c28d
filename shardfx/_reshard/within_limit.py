"""Moving an array in slices, where moving it whole would need more memory than is allowed.

A slice takes a part of every piece into which either placement cuts a dimension, so that cutting it out and writing
it back never leave a device.
"""

import functools as ft
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from .._ground.spec import shard_counts
from .small_floats import moved
from .steps.ends import NO_MESH, untyped


class Slices(NamedTuple):
    """How an array is sliced.

    **Arguments:**

    - `dim`: the dimension that is cut.
    - `blocks`: into how many blocks the two placements together cut it.
    - `parts`: how many slices; each takes one part of every block.
    - `shape`: of one slice.
    """

    dim: int
    blocks: int
    parts: int
    shape: tuple[int, ...]


def slices_of(shape: tuple[int, ...], src: NamedSharding, dst: NamedSharding, count: int) -> Slices | None:
    """At least `count` slices, or as many as there can be; `None` where the array cannot be sliced.

    **Arguments:**

    - `shape`: of the whole array.
    - `src`, `dst`: its placements, that divide it.
    - `count`: how many slices are wanted.

    **Returns:**

    The first dimension's slices that are enough, or else the most that any dimension allows.
    """
    best = None
    pairs = zip(*[shard_counts(end.spec, len(shape), end.mesh.shape) for end in (src, dst)], strict=True)
    for dim, (ours, theirs) in enumerate(pairs):
        blocks = math.lcm(ours, theirs)
        room = shape[dim] // blocks
        if room < 2:
            continue
        most = next((k for k in range(min(count, room), room + 1) if room % k == 0), room)
        found = Slices(dim, blocks, most, (*shape[:dim], shape[dim] // most, *shape[dim + 1 :]))
        if most >= count:
            return found
        if best is None or most > best.parts:
            best = found
    return best


def sliced(
    x: jax.Array,
    src: NamedSharding,
    dst: NamedSharding,
    cuts: Slices,
    move: Callable[[jax.Array], jax.Array],
    *,
    donate: bool,
) -> jax.Array:
    """Moves `x` slice by slice with `move`, waiting for each before the next is cut.

    **Arguments:**

    - `x`: a live array.
    - `src`, `dst`: where it lies, and where it shall lie.
    - `cuts`: the slices.
    - `move`: moves one slice, which may be donated.
    - `donate`: gives `x` up in the end.

    **Returns:**

    The array in `dst`, on Auto axes.
    """
    # Of a mesh of mixed axis types JAX would let a result lie along its Explicit axes alone.
    src, dst = untyped(src), untyped(dst)
    cut, write = _programs(x.shape, src, dst, cuts)
    with jax.sharding.use_abstract_mesh(NO_MESH):
        out = jnp.zeros(x.shape, x.dtype, device=dst)
        for index in range(cuts.parts):
            out = jax.block_until_ready(write(out, move(cut(x, index)), index))
    if donate:
        x.delete()
    return out


@ft.lru_cache(maxsize=256)
def _programs(shape: tuple[int, ...], src: NamedSharding, dst: NamedSharding, cuts: Slices) -> tuple[Any, Any]:
    def by_block(piece: jax.Array, parts: int, pieces: int) -> jax.Array:
        """The cut dimension of a device's piece as its blocks, their parts, and the rest."""
        own = cuts.blocks // pieces
        size = piece.shape[cuts.dim]
        return piece.reshape(*piece.shape[: cuts.dim], own, parts, size // (own * parts), *piece.shape[cuts.dim + 1 :])

    def take(piece: jax.Array, index: jax.Array) -> jax.Array:
        blocks = by_block(piece, cuts.parts, _pieces(src, shape, cuts.dim))
        part = jax.lax.dynamic_index_in_dim(blocks, index, cuts.dim + 1, keepdims=False)
        return part.reshape(*piece.shape[: cuts.dim], -1, *piece.shape[cuts.dim + 1 :])

    def put(piece: jax.Array, part: jax.Array, index: jax.Array) -> jax.Array:
        count = _pieces(dst, shape, cuts.dim)
        blocks, part = by_block(piece, cuts.parts, count), by_block(part, 1, count)
        return jax.lax.dynamic_update_slice_in_dim(blocks, part, index, cuts.dim + 1).reshape(piece.shape)

    none = jax.sharding.PartitionSpec()
    cut = jax.shard_map(
        ft.partial(moved, take), mesh=src.mesh, in_specs=(src.spec, none), out_specs=src.spec, check_vma=False
    )
    ends = {"in_specs": (dst.spec, dst.spec, none), "out_specs": dst.spec}
    write = jax.shard_map(ft.partial(moved, put), mesh=dst.mesh, check_vma=False, **ends)
    return (
        jax.jit(cut, in_shardings=(src, None), out_shardings=src),
        jax.jit(write, in_shardings=(dst, dst, None), out_shardings=dst, donate_argnums=0),
    )


def _pieces(end: NamedSharding, shape: tuple[int, ...], dim: int) -> int:
    return shard_counts(end.spec, len(shape), end.mesh.shape)[dim]
