"""One kind of move, shared by all leaves of a shape, dtype and placement: how it is done, what it costs, doing it."""

import collections
import dataclasses
import functools as ft
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, Sharding

from ._collective import move_group
from ._errors import LeafTypeError, MeshError, SpecError
from ._redistribute import Redistribution, layout, redistribute
from ._sliced import Slices, sliced, slices_of
from ._spec import array_bytes, bits, entries_of, shard_counts
from ._transfer import Transfer, carry_out, lost_text, transfer_of


How = Literal["in place", "relabel", "memory kind", "steps", "host", "rounds", "pieces"]


@dataclasses.dataclass(frozen=True, eq=False)
class Move:
    """How arrays of one shape, dtype and placement get to another placement.

    **Arguments:**

    - `how`: "in place" (nothing to do), "relabel" (the same shards under another mesh's names), "memory kind" (the
        same shards in other memory), "steps" (collectives over one device set), or a way of `Transfer.way`.
    - `shape`, `dtype`: of the whole array; for typed PRNG keys those of their `key_data`.
    - `src`, `dst`: the shardings.
    - `lost`: devices whose shards are not to be read.
    - `plan`: the steps, for "steps".
    - `transfer`: the tile map, for the ways between device sets.
    - `extra_bytes`: the most that is needed beside the shards of source and target, in one memory: a device's, or
        the host's where the CPU plays the devices.
    """

    how: How
    shape: tuple[int, ...]
    dtype: Any
    src: Sharding
    dst: Sharding
    lost: tuple[Any, ...] = ()
    plan: Redistribution | None = None
    transfer: Transfer | None = None
    extra_bytes: int = 0

    @property
    def source_bytes(self) -> int:
        """Bytes of one shard before."""
        return array_bytes(self.src.shard_shape(self.shape), self.dtype)

    @property
    def crosses_cpu(self) -> bool:
        """Whether CPU devices of several processes take part."""
        devices = self.dst.device_set
        return not self.dst.is_fully_addressable and any(device.platform == "cpu" for device in devices)

    @property
    def target_bytes(self) -> int:
        """Bytes of one shard afterwards."""
        return array_bytes(self.dst.shard_shape(self.shape), self.dtype)


@ft.lru_cache(maxsize=4096)
def move_of(
    shape: tuple[int, ...], dtype: Any, src: Sharding, dst: Sharding, lost: tuple[Any, ...] = (), host: bool = True
) -> Move:
    """Decides how arrays of one kind are moved.

    **Arguments:**

    - `shape`, `dtype`: of the array.
    - `src`, `dst`: shardings on devices.
    - `lost`: devices whose shards are not to be read.
    - `host`: whether devices of the CPU may move their shards by copies in the memory that they share.

    **Returns:**

    The Move, from a bounded cache where the same was asked before.

    **Raises:**

    `SpecError` if `dst` does not divide the shape; `LeafTypeError` for dtypes that JAX moves wrongly; `MeshError` if
    no way leads there, or lost devices alone hold some elements.
    """
    require_movable(shape, dtype, dst)
    if isinstance(dst, NamedSharding) and isinstance(dst.mesh, AbstractMesh):
        raise MeshError(
            f"the target {dst.spec} lies on the mesh {dict(dst.mesh.shape)} without devices; "
            "use `plan.on(plan.mesh.build(jax.devices()))`, or a NamedSharding on a `jax.sharding.Mesh`."
        )
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
        shape, dtype = data.shape, data.dtype
    make = ft.partial(Move, shape=shape, dtype=np.dtype(dtype), src=src, dst=dst, lost=lost)
    there = dst if src.memory_kind is None else dst.with_memory_kind(src.memory_kind)
    if not lost and src.is_equivalent_to(there, len(shape)):
        if src.memory_kind != dst.memory_kind:
            return make("memory kind")
        return make("in place" if src == dst else "relabel")
    if not lost and src.device_set == dst.device_set and not (host and _share_memory(src)):
        steps = _planned(shape, dtype, src, dst)
        if steps is not None:
            return make("steps", plan=steps, extra_bytes=_extra_bytes(steps, src, dst, shape, dtype))
    made = transfer_of(shape, np.dtype(dtype), src, dst, lost)
    if made.way == "host" and not host:
        made = transfer_of(shape, np.dtype(dtype), src, dst, lost, "rounds")
    if made.tiles.missing:
        raise MeshError(f"{lost_text(made)}; load it from a checkpoint.")
    return make(made.way, transfer=made, extra_bytes=made.extra_bytes * _sharers(dst))


def apply(move: Move, x: jax.Array, *, donate: bool = False, limit_bytes: int | None = None) -> jax.Array:
    """Moves one live array; work that the devices still have to do is not waited for.

    **Arguments:**

    - `move`: how.
    - `x`: an array of its shape, dtype and source.
    - `donate`: gives up its buffers.
    - `limit_bytes`: beside the shards of source and target; an array that needs more goes in slices.

    **Returns:**

    The moved array.
    """
    if x.dtype != move.dtype:  # typed PRNG keys: their data move
        data = apply(move, jax.random.key_data(x), donate=donate, limit_bytes=limit_bytes)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if move.how == "in place":
        return x
    if move.how == "relabel":
        return jax.device_put(x, move.dst, donate=donate)
    if move.how == "memory kind":
        result = jax.device_put(x, move.dst)
        if donate:  # JAX itself cannot donate across memory kinds; the copy keeps what it reads until it is done
            x.delete()
        return result
    how = None if limit_bytes is None or move.extra_bytes <= limit_bytes else _slices(move, limit_bytes)
    if how is not None and isinstance(move.dst, NamedSharding):
        part = move_of(how.shape, move.dtype, move.src, move.dst, move.lost, move.how == "host")
        return sliced(x, move.dst, how, ft.partial(apply, part, donate=True), donate=donate)
    if move.transfer is None:
        return move_group([x], _named(move.dst), src=_named(move.src), donate=donate)[0]
    return carry_out(move.transfer, x, donate)


def require_movable(shape: tuple[int, ...], dtype: Any, dst: Sharding) -> None:
    """Raises for dtypes that JAX moves wrongly, and for shardings that do not divide the shape."""
    if jnp.issubdtype(dtype, jnp.integer) and bits(dtype) < 4:
        raise LeafTypeError(
            f"arrays of dtype {dtype} cannot be moved: JAX's own jitted reshard corrupts memory with it; "
            "move `x.astype(jnp.int4)` and convert it back."
        )
    if not isinstance(dst, NamedSharding):
        return
    if len(entries_of(dst.spec)) > len(shape):
        raise SpecError(f"{dst.spec} has more entries than the shape {shape}; drop those at the end.")
    for dim, (size, count) in enumerate(zip(shape, shard_counts(dst.spec, len(shape), dst.mesh.shape), strict=True)):
        if size % count:
            raise SpecError(
                f"dim {dim} of shape {shape} does not divide into the {count} pieces that {dst.spec} wants on mesh "
                f"{dict(dst.mesh.shape)}; pad it to {-(-size // count) * count}, or take the spec from "
                "`shardfx.correct(spec, shape, mesh)`."
            )


def _planned(shape: tuple[int, ...], dtype: Any, src: Sharding, dst: Sharding) -> Redistribution | None:
    """The steps between two placements that name mesh axes; others have none."""
    if not isinstance(src, NamedSharding) or not isinstance(dst, NamedSharding):
        return None
    ends = [layout(end.mesh, end.spec, len(shape)) for end in (src, dst)]
    return redistribute(shape, bits(dtype), *ends)


def _extra_bytes(plan: Redistribution, src: Sharding, dst: Sharding, shape: tuple[int, ...], dtype: Any) -> int:
    ends = [array_bytes(end.shard_shape(shape), dtype) for end in (src, dst)]
    # A step may hold a copy of what it exchanges, laid out for sending.
    return (max(plan.peak_bytes - sum(ends), 0) + max(ends)) * _sharers(dst)


def _slices(move: Move, limit_bytes: int) -> Slices | None:
    if not isinstance(move.src, NamedSharding) or not isinstance(move.dst, NamedSharding):
        return None
    default = min(move.dst.device_set, key=lambda device: device.id).default_memory().kind
    if {move.src.memory_kind, move.dst.memory_kind} != {default}:
        return None
    # A slice itself is held on both sides while it moves.
    held = move.extra_bytes + (move.source_bytes + move.target_bytes) * _sharers(move.dst)
    return slices_of(move.shape, move.src, move.dst, -(-held // max(1, limit_bytes)))


def _named(sharding: Sharding) -> NamedSharding:
    assert isinstance(sharding, NamedSharding)
    return sharding


def _share_memory(sharding: Sharding) -> bool:
    return all(device.platform == "cpu" for device in sharding.device_set) and sharding.is_fully_addressable


def _sharers(sharding: Sharding) -> int:
    """How many devices allocate from one memory, at most: all of a process where the CPU plays them."""
    # Every process has to count alike, whichever devices are its own: the count decides what programs run.
    counts = collections.Counter(device.process_index for device in sharding.device_set if device.platform == "cpu")
    return max(counts.values(), default=1)
