"""One kind of move, shared by all leaves of a shape, dtype and placement: how it is done, what it costs, doing it."""

import dataclasses
import functools as ft
import itertools as it
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, Sharding

from .._errors import LeafTypeError, MeshError, SpecError, check_type
from .._spec import array_bytes, bits, entries_of, shard_counts
from .steps.live import move_group
from .steps.redistribute import Redistribution, layout, redistribute
from .tiles.transfer import (
    IN_FLIGHT_BYTES,
    Transfer,
    carry_out,
    copies_bytes,
    in_device_memory,
    led,
    lost_text,
    sharers,
    spread,
    transfer_of,
)
from .within_limit import Slices, sliced, slices_of


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
    def held_bytes(self) -> int:
        """The most that is held of an array while it moves, its source and target included, in one memory."""
        source = self.source_bytes * sharers(self.src.device_set)
        return source + self.target_bytes * sharers(self.dst.device_set) + self.extra_bytes

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

    `SpecError` if `dst` does not divide the shape, or either end has unreduced axes; `LeafTypeError` for dtypes that
    JAX moves wrongly; `MeshError` if no way leads there, or lost devices alone hold some elements.
    """
    require_movable(shape, dtype, dst)
    if lost or src != dst:
        require_reduced(src, dst)
    if isinstance(dst, NamedSharding) and isinstance(dst.mesh, AbstractMesh):
        raise MeshError(
            f"the target {dst.spec} lies on the mesh {dict(dst.mesh.shape)} without devices; "
            "use `plan.on(plan.mesh.build(jax.devices()))`, or a NamedSharding on a `jax.sharding.Mesh`."
        )
    move = decided(*data_of(shape, dtype), src, dst, lost, host)
    if move.transfer is not None and move.transfer.tiles.missing:
        raise MeshError(f"{lost_text(move.transfer)}; load it from a checkpoint.")
    return move


def lost_devices(lost: Iterable[Any]) -> tuple[Any, ...]:
    """The argument `lost` of a move, for which ids, or one device alone, would name no device; as a tuple."""
    fix = "give an iterable of jax devices, such as `lost=[jax.devices()[3]]`."
    check_type("lost", lost, Iterable, LeafTypeError, fix.removesuffix("."))
    found = tuple(lost)
    for device in found:
        if not isinstance(device, jax.Device):
            raise LeafTypeError(f"`lost` holds {device!r:.80}, of type {type(device).__name__}, not a device; {fix}")
    return found


def leaf_name(path: str) -> str:
    """A leaf in a message; a tree that is one array has no path."""
    return f"leaf `{path}`" if path else "the array"


def data_of(shape: tuple[int, ...], dtype: Any) -> tuple[tuple[int, ...], Any]:
    """The shape and dtype of the arrays that are moved in the place of typed PRNG keys, and of others."""
    if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return shape, np.dtype(dtype)
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
    return data.shape, np.dtype(data.dtype)


@ft.lru_cache(maxsize=4096)
def decided(
    shape: tuple[int, ...], dtype: Any, src: Sharding, dst: Sharding, lost: tuple[Any, ...] = (), host: bool = True
) -> Move:
    """As `move_of`, but where elements are on lost devices alone the Move leaves them out."""
    make = ft.partial(Move, shape=shape, dtype=dtype, src=src, dst=dst, lost=lost)
    there = dst if src.memory_kind is None else dst.with_memory_kind(src.memory_kind)
    if not lost and src.is_equivalent_to(there, len(shape)):
        if src.memory_kind != dst.memory_kind:
            return make("memory kind")
        return make("in place" if src == dst else "relabel")
    if not lost and src.device_set == dst.device_set and not (host and _share_memory(src)):
        steps = _planned(shape, dtype, src, dst)
        if steps is not None:
            return make("steps", plan=steps, extra_bytes=_extra_bytes(steps, src, dst, shape, dtype))
    made = transfer_of(shape, dtype, src, dst, lost)
    if made.way == "host" and not host:
        made = transfer_of(shape, dtype, src, dst, lost, "rounds")
    return make(made.way, transfer=made, extra_bytes=made.extra_bytes)


def balanced(moves: Mapping[Move, int]) -> dict[Move, Move]:
    """The same moves with senders that are balanced over all of them.

    **Arguments:**

    - `moves`: in order, each with the number of arrays that it moves. A move is planned once for all of them, so that
        they share a program; where replicas give a choice it falls on those that send least for the moves before.

    **Returns:**

    Per move the one to make in its place.
    """
    sent: dict[Any, int] = {}
    chosen = {}
    for move, count in moves.items():
        chosen[move] = move
        if move.transfer is None:
            continue
        made = spread(move.transfer, sent)
        if made is not move.transfer:
            chosen[move] = _through(move, made)
        for place, size in made.tiles.sent_bytes.items():
            sent[made.devices[place]] = sent.get(made.devices[place], 0) + count * size
    return chosen


@ft.lru_cache(maxsize=1024)
def _through(move: Move, made: Transfer) -> Move:
    return dataclasses.replace(move, transfer=made, extra_bytes=made.extra_bytes)


def apply(move: Move, x: jax.Array, *, donate: bool = False, limit_bytes: int | None = None) -> jax.Array:
    """Moves one live array; work that the devices still have to do is not waited for.

    **Arguments:**

    - `move`: how.
    - `x`: an array of its shape, dtype and source.
    - `donate`: gives up its buffers.
    - `limit_bytes`: beside the shards of source and target, `least_limit_bytes` or more; an array that would need
        more goes in slices.

    **Returns:**

    The moved array.
    """
    if x.dtype != move.dtype:  # typed PRNG keys: their data move
        data = apply(move, jax.random.key_data(x), donate=donate, limit_bytes=limit_bytes)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if move.how == "in place":
        return x
    if move.how in ("relabel", "memory kind") and not move.dst.addressable_devices:
        # JAX's own device_put asserts that it has something to put.
        return jax.make_array_from_single_device_arrays(x.shape, move.dst, [], dtype=x.dtype)
    if move.how == "relabel":
        return jax.device_put(x, move.dst, donate=donate)
    if move.how == "memory kind":
        result = jax.device_put(x, move.dst)
        if donate:  # JAX itself cannot donate across memory kinds; the copy keeps what it reads until it is done
            x.delete()
        return result
    how = None if limit_bytes is None else _slices_within(move, limit_bytes)
    if how is not None:
        part = _part(move, how)
        return sliced(x, _named(move.dst), how, ft.partial(apply, part, donate=True), donate=donate)
    if move.transfer is None:
        return move_group([x], _named(move.dst), src=_named(move.src), donate=donate)[0]
    return carry_out(move.transfer, x, donate, IN_FLIGHT_BYTES if limit_bytes is None else limit_bytes)


def least_limit_bytes(move: Move) -> int:
    """The least memory limit under which an array can move: whole, or in the finest slices."""
    finest = _finest(move)
    return move.extra_bytes if finest is None else min(move.extra_bytes, _part(move, finest).held_bytes)


def why_least(move: Move) -> str:
    """Why an array cannot move under a smaller limit."""
    finest = _finest(move)
    if finest is not None and _part(move, finest).held_bytes < move.extra_bytes:
        return f"even in {finest.parts} slices of shape {finest.shape}, the finest"
    for end in (move.src, move.dst):
        if not isinstance(end, NamedSharding):
            return f"it moves whole, as a {type(end).__name__} does not say how to slice it"
        if in_device_memory(end) is not end:
            return f"it moves whole, as programs cannot cut slices in {end.memory_kind} memory"
    return "it moves whole, as its dimensions cannot be cut further"


@ft.lru_cache(maxsize=1024)
def _slices_within(move: Move, limit_bytes: int) -> Slices | None:
    """The slices in which an array moves within a limit that is large enough; `None` where it may move whole."""
    if move.extra_bytes <= limit_bytes:
        return None
    enough = _slices(move, -(-move.held_bytes // max(1, limit_bytes)))
    fits = enough is not None and _part(move, enough).held_bytes <= limit_bytes
    return enough if fits else _finest(move)


@ft.lru_cache(maxsize=1024)
def _finest(move: Move) -> Slices | None:
    return _slices(move, max(move.shape, default=1))


def _slices(move: Move, count: int) -> Slices | None:
    ends = (move.src, move.dst)
    if any(not isinstance(end, NamedSharding) or in_device_memory(end) is not end for end in ends):
        return None
    return slices_of(move.shape, _named(move.src), _named(move.dst), count)


def _part(move: Move, how: Slices) -> Move:
    """The move of one slice."""
    part = move_of(how.shape, move.dtype, move.src, move.dst, move.lost, move.how == "host")
    if move.transfer is None or part.transfer is None or not move.transfer.ahead:
        return part
    return _through(part, led(part.transfer, move.transfer.ahead))


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


def require_reduced(*ends: Sharding) -> None:
    """Raises where devices hold, or should hold, summands in the place of elements."""
    for end in ends:
        if isinstance(end, NamedSharding) and end.spec.unreduced:
            raise SpecError(
                f"{end.spec} has the unreduced axes {sorted(end.spec.unreduced)}, and a move neither adds up nor takes "
                "apart what they hold; add it up first with `jax.sharding.reshard(x, NamedSharding(mesh, P(...)))`."
            )


def _planned(shape: tuple[int, ...], dtype: Any, src: Sharding, dst: Sharding) -> Redistribution | None:
    """The steps between two placements that name mesh axes; others have none."""
    if not isinstance(src, NamedSharding) or not isinstance(dst, NamedSharding):
        return None
    ends = [layout(end.mesh, end.spec, len(shape)) for end in (src, dst)]
    return redistribute(shape, bits(dtype), *ends)


def _extra_bytes(plan: Redistribution, src: Sharding, dst: Sharding, shape: tuple[int, ...], dtype: Any) -> int:
    """The most that the program of the steps, or XLA's own in their place, allocates beside source and target."""
    layouts = [step.source for step in plan.steps] + [step.target for step in plan.steps[-1:]]
    pieces = [array_bytes(end.piece_shape(shape), dtype) for end in layouts]
    # XLA's own program is taken up to this much.
    most = 2 * max(array_bytes(end.shard_shape(shape), dtype) for end in (src, dst))
    last = len(pieces) - 2
    for number, (before, after) in enumerate(it.pairwise(pieces)):
        # A step holds a copy of what it sends and of what it receives, laid out for the exchange, beside its ends.
        ends = before * (number > 0) + after * (number < last)
        most = max(most, ends + before + after)
    return most * sharers(dst.device_set) + copies_bytes(shape, dtype, src, dst)


def _named(sharding: Sharding) -> NamedSharding:
    assert isinstance(sharding, NamedSharding)
    return sharding


def _share_memory(sharding: Sharding) -> bool:
    return all(device.platform == "cpu" for device in sharding.device_set) and sharding.is_fully_addressable
