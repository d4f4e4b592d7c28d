"""Runs the steps of a `Redistribution` on traced or live arrays, as one `shard_map`
over the source's mesh.

Collectives name the devices of their replica groups by their positions in the mesh of
`like`, the source's layout. With `chunks`, shards move chunk by chunk to limit memory;
with `None`, whole shards move.
"""

import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped

from ..._ground.spec import bits
from ..shardings import NO_MESH, flat, labelled, layouts, placed, same_order, untyped
from .chunks import Chunks, chunks_on_tpus, in_chunks
from .groups import all_gather, all_to_all, join, kept_parts, split
from .layout import StepLayout
from .paths import permutation
from .redistribution import MoveStep, Redistribution


# A gather along two dimensions of a v5p, by one concatenation and by writes: 1.75 and 1.0
# shards for 4 x 4 shards, 0.69 and 1.0 for 4 x 16.
_CONCATENATED = 8


def program(
    x: Shaped[Array, "..."],
    src: NamedSharding,
    dst: NamedSharding,
    steps: tuple[MoveStep, ...],
    like: StepLayout,
    chunks: Chunks | None = None,
) -> Shaped[Array, "..."]:
    """Moves a traced array by `steps` from `src` to `dst`. Both meshes must list their
    devices in the same order. `like` is the layout before the move, in whose mesh order
    devices are numbered. With `chunks`, shards move in these chunks, to limit memory.
    """
    if not steps:
        return placed(x, dst)
    move = ft.partial(_run_on_mesh, src=src, steps=steps, like=like, chunks=chunks)
    x = placed(x, src)
    if src.mesh.abstract_mesh == dst.mesh.abstract_mesh:
        return move(x, spec=dst.spec)
    # The new shards are those of `dst`, whose spec may have no form on the mesh of
    # `src`. Concatenated along dimension 0 in device order, they are one array that
    # `flat` shards on either mesh, so nothing moves here.
    x = placed(move(x, spec=flat(src.mesh)), NamedSharding(dst.mesh, flat(dst.mesh)))
    return _shard_mapped(lambda shard: shard, dst.mesh, flat(dst.mesh), dst.spec)(x)


def _run_on_mesh(
    x: Shaped[Array, "..."],
    src: NamedSharding,
    steps: tuple[MoveStep, ...],
    like: StepLayout,
    chunks: Chunks | None,
    spec: PartitionSpec,
) -> Shaped[Array, "..."]:
    """Moves a traced array by `steps`, in a `shard_map` over the mesh of its sharding
    `src`. The new shards form the result as `spec` says. `like` and `chunks` are those
    of `program`.
    """
    body = ft.partial(
        run_steps,
        steps=steps,
        like=like,
        axes=tuple(src.mesh.axis_names),
        chunks=chunks,
    )
    return _shard_mapped(body, src.mesh, src.spec, spec)(x)


def live_program(
    shape: tuple[int, ...],
    plan: Redistribution,
    src: NamedSharding,
    dst: NamedSharding,
    *,
    donate: bool,
    chunks: Chunks | None = None,
) -> Callable[[jax.Array], jax.Array]:
    """Returns a function that moves live arrays of one shape from `src` to `dst` by the
    steps of `plan`. Both meshes have the same devices, in any order. With `donate`, the
    function deletes its argument.
    """
    # The same shardings with mesh axes of type Auto, in the default memory.
    source = untyped(src)
    target = untyped(dst)
    # Devices are numbered in the mesh order of this layout, the one before the move.
    like, _ = layouts(len(shape), source, target)
    options = {"src": source, "steps": plan.steps, "like": like, "chunks": chunks}
    if same_order(source, target):
        # XLA reuses a buffer only for a result of the same size.
        is_reused = donate and source.shard_shape(shape) == target.shard_shape(shape)
        step = jax.jit(
            ft.partial(program, dst=target, **options),
            in_shardings=source,
            out_shardings=target,
            donate_argnums=(0,) if is_reused else (),
        )
    else:
        # One program cannot have two orders of devices. So it returns the new shards
        # concatenated along dimension 0, and `labelled` makes an array of them.
        step = jax.jit(
            ft.partial(_run_on_mesh, spec=flat(source.mesh), **options),
            in_shardings=source,
        )

    def move_array(array: jax.Array) -> jax.Array:
        x = array
        if x.sharding.memory_kind != source.memory_kind:
            x = jax.device_put(x, NamedSharding(src.mesh, src.spec))
        # The caller may have set another mesh or `disable_jit`.
        with jax.sharding.use_abstract_mesh(NO_MESH), jax.disable_jit(False):
            y = step(x)
        y = labelled(y, NamedSharding(dst.mesh, dst.spec), shape)
        if dst.memory_kind != y.sharding.memory_kind:
            y = jax.device_put(y, dst)
        if donate and not array.is_deleted():
            array.delete()
        return y

    return move_array


def _shard_mapped(
    body,
    mesh: Mesh | AbstractMesh,
    source: PartitionSpec,
    target: PartitionSpec,
):
    """Returns a function that applies `body` to each device's shard of an array.
    `source` and `target` are the specs of its argument and its result on `mesh`.
    """

    def mapped_body(x):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            # JAX cannot infer the replication that the steps establish.
            return jax.shard_map(
                body,
                mesh=mesh,
                in_specs=source,
                out_specs=target,
                check_vma=False,
            )(x)

    return mapped_body


def run_steps(
    shard: Shaped[Array, "..."],
    *,
    steps: tuple[MoveStep, ...],
    like: StepLayout,
    axes: tuple[str, ...],
    chunks: Chunks | None = None,
) -> Shaped[Array, "..."]:
    """Applies all steps of a move to one device's shard, inside a `shard_map` over a
    mesh with the axes `axes`. Devices are numbered in the mesh order of `like`.

    With `chunks`, the shard moves in these chunks, to limit memory. On TPUs it moves in
    the chunks of `chunks_on_tpus` if these are finer, and also without `chunks`.
    """

    def at_once(shard: Array) -> Array:
        """Moves a shard, or a chunk of one, by all steps."""
        for step in steps:
            shard = _FUNCTIONS[step.kind](shard, step, like, axes)
        return shard

    tpu_chunks = None
    # How many bits a typed key takes is JAX's own matter.
    if not jnp.issubdtype(shard.dtype, jax.dtypes.extended):
        tpu_chunks = chunks_on_tpus(shard.shape, bits(shard.dtype), steps)
    if tpu_chunks is None:
        tpu_chunks = chunks
    elif chunks is not None and chunks.per_block >= tpu_chunks.per_block:
        tpu_chunks = chunks
    if tpu_chunks is None:
        return at_once(shard)
    on_tpu = ft.partial(in_chunks, move=at_once, chunks=tpu_chunks)
    if chunks is None:
        return lax.platform_dependent(shard, tpu=on_tpu, cpu=at_once, default=at_once)
    elsewhere = ft.partial(in_chunks, move=at_once, chunks=chunks, as_on_tpus=False)
    return lax.platform_dependent(
        shard,
        tpu=on_tpu,
        cpu=on_bits(elsewhere),
        default=elsewhere,
    )


def _slice(
    shard: Array,
    step: MoveStep,
    like: StepLayout,
    axes: tuple[str, ...],
) -> Array:
    """Keeps one part of a device's shard. Sends nothing. `step` has the layouts before
    and after. Devices are numbered in the mesh order of `like`, and the mesh has the
    axes `axes`.
    """
    # For each device, the index of the part that it keeps along each dimension.
    part_of_device = jnp.asarray(kept_parts(step.source, step.target, like), jnp.int32)
    part_indices = part_of_device[lax.axis_index(axes)]
    counts = zip(step.source.counts, step.target.counts, strict=True)
    sizes = [
        size * old_count // count
        for size, (old_count, count) in zip(shard.shape, counts, strict=True)
    ]
    start = [part_indices[dim] * size for dim, size in enumerate(sizes)]
    return moved(
        ft.partial(lax.dynamic_slice, start_indices=start, slice_sizes=sizes), shard
    )


def _permute(
    shard: Array,
    step: MoveStep,
    like: StepLayout,
    axes: tuple[str, ...],
) -> Array:
    """Replaces a device's shard by that of its sender. `step` has the layouts before
    and after. Devices are numbered in the mesh order of `like`, and the mesh has the
    axes `axes`.
    """
    senders = permutation(step.source, step.target, like).tolist()
    pairs = [(sender, device) for device, sender in enumerate(senders)]
    return moved(ft.partial(lax.ppermute, axis_name=axes, perm=pairs), shard)


def _all_gather(
    shard: Array,
    step: MoveStep,
    like: StepLayout,
    axes: tuple[str, ...],
) -> Array:
    """Concatenates the shards of a replica group on each of its devices. `step` has the
    layouts before and after. Devices are numbered in the mesh order of `like`, and the
    mesh has the axes `axes`.
    """
    # The replica groups, and how many of a group's shards lie along each dimension of
    # the result.
    exchange = all_gather(step.source, step.target, like)
    gather = ft.partial(
        lax.all_gather,
        axis_name=axes,
        axis_index_groups=exchange.groups.tolist(),
    )
    gathered_dims = [dim for dim, count in enumerate(exchange.counts) if count > 1]

    def at_once(shard: Array) -> Array:
        """Gathers without `join`, which would copy the result once more."""
        if len(gathered_dims) == 1:
            return gather(shard, axis=gathered_dims[0], tiled=True)
        return concatenated(gather(shard), exchange.counts)

    def stacked(shard: Array) -> Array:
        """Gathers along a new dimension, which `join` then removes."""
        return join(gather(shard), exchange)

    return _either(shard, at_once, stacked)


def concatenated(shards: Array, counts: tuple[int, ...]) -> Array:
    """Does what `join` does with a gathered shard, in one copy of the result less on
    TPUs. `counts` has the number of shards along each dimension of the result.

    A few shards are written into the result one after another, since TPU compilers hold
    all operands of a concatenation besides its result. Many operands they do not hold.
    """
    # First one dimension for each entry of `counts`, then those of a shard.
    parts = shards.reshape((*counts, *shards.shape[1:]))
    for dim in reversed(range(1, len(counts))):
        along_dim = [
            lax.index_in_dim(parts, index, dim, keepdims=False)
            for index in range(counts[dim])
        ]
        # Of the first kind, those before `dim` are still in front, `dim` in number. So
        # dimension `dim` of a shard is the one at `2 * dim`.
        parts = _joined_along(along_dim, 2 * dim)
    # The shards along dimension 0 lie one after another now, so this is no copy.
    return parts.reshape((-1, *parts.shape[2:]))


def _joined_along(shards: list[Array], dim: int) -> Array:
    """Concatenates shards of one shape along the dimension `dim`."""
    if len(shards) >= _CONCATENATED:
        return lax.concatenate(shards, dim)
    shape = list(shards[0].shape)
    shard_size = shape[dim]
    shape[dim] *= len(shards)
    joined = lax.empty(tuple(shape), shards[0].dtype)
    for index, shard in enumerate(shards):
        start = index * shard_size
        joined = lax.dynamic_update_slice_in_dim(joined, shard, start, dim)
    return joined


def _either(
    shard: Array,
    at_once: Callable[[Array], Array],
    stacked: Callable[[Array], Array],
) -> Array:
    """Runs a collective on one device's shard by one of two functions that return the
    same. XLA's CPU compiler would run `at_once` in a transposed buffer, which it copies
    element by element. So on CPUs `stacked` runs, which stacks the received shards and
    joins them.
    """
    return lax.platform_dependent(shard, cpu=on_bits(stacked), default=at_once)


def _all_to_all(
    shard: Array,
    step: MoveStep,
    like: StepLayout,
    axes: tuple[str, ...],
) -> Array:
    """Splits a device's shard along some dimensions, and joins the chunks that it
    receives from its replica group along others. `step` has the layouts before and
    after. Devices are numbered in the mesh order of `like`, and the mesh has the axes
    `axes`.
    """
    # The replica groups, and for each dimension the sub-axes along which chunks are
    # split and joined.
    exchange = all_to_all(step.source, step.target, like)
    swap = ft.partial(
        lax.all_to_all,
        axis_name=axes,
        tiled=True,
        axis_index_groups=exchange.groups.tolist(),
    )

    def stacked(shard: Array) -> Array:
        """Swaps chunks along a new dimension, which `join` then removes."""
        chunks = swap(split(shard, exchange), split_axis=0, concat_axis=0)
        return join(chunks, exchange)

    # One collective of XLA splits one dimension and concatenates along one, in the
    # order of the group's members.
    all_moving = tuple(range(len(exchange.sizes)))
    splits_one_dim = exchange.splits.count(all_moving) == 1
    if splits_one_dim and exchange.joins.count(all_moving) == 1:
        at_once = ft.partial(
            swap,
            split_axis=exchange.splits.index(all_moving),
            concat_axis=exchange.joins.index(all_moving),
        )
        return _either(shard, at_once, stacked)
    return moved(stacked, shard)


_FUNCTIONS = {
    "slice": _slice,
    "permute": _permute,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
}


def on_bits(move: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that does what `move` does, but moves arrays of bfloat16 and
    smaller float dtypes as integers of the same bits. XLA's CPU compiler would move
    them as larger floats: the traffic and the memory double, and a NaN does not keep
    its bits.
    """

    def move_bits(x: Any, *others: Any) -> Any:
        if not is_small_float(x.dtype):
            return move(x, *others)
        integer = jnp.dtype(f"uint{jnp.finfo(x.dtype).bits}")
        as_bits = []
        for array in (x, *others):
            if array.dtype == x.dtype:
                array = lax.bitcast_convert_type(array, integer)
            as_bits.append(array)
        return lax.bitcast_convert_type(move(*as_bits), x.dtype)

    return move_bits


def is_small_float(dtype: Any) -> bool:
    """Whether `dtype` is a float that XLA's CPU compiler moves by converting it to a
    larger float.
    """
    return (
        jnp.issubdtype(dtype, jnp.floating)
        and dtype != jnp.float16
        and jnp.finfo(dtype).bits < 32
    )


def moved(move: Callable[..., object], *arrays: object) -> Any:
    """Applies `move`, which changes no bits, to `arrays`. On CPUs, bfloat16 and smaller
    floats move as integers.
    """
    return lax.platform_dependent(*arrays, cpu=on_bits(move), default=move)
