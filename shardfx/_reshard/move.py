"""How arrays of one shape, dtype and placement get to another placement: one value, decided once by one function."""

import dataclasses
import functools as ft
import itertools as it
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, Sharding

from .._ground.errors import LeafTypeError, SpecError
from .._ground.spec import array_bytes, bits, entries_of, shard_counts
from ..topology._mesh import MeshSpec
from .steps.live import live_program
from .steps.redistribute import Redistribution, layout, redistribute
from .tiles.transfer import Transfer, after, copies_bytes, in_device_memory, named_boxes, sharers, transfer_of


How = Literal["in place", "relabel", "memory kind", "steps", "tiles"]


@dataclasses.dataclass(frozen=True, eq=False)
class Move:
    """How arrays of one shape, dtype and placement get to another placement.

    **Arguments:**

    - `how`: "in place" (nothing to do), "relabel" (every device has its shard, under the names of another mesh),
        "memory kind" (the same shards in other memory), "steps" (collectives over one device set) or "tiles" (each
        new shard is put together from the old ones that overlap it).
    - `shape`, `dtype`: of the whole array; for typed PRNG keys those of their `key_data`.
    - `src`, `dst`: the shardings.
    - `lost`: devices whose shards are not to be read.
    - `copies`: whether devices of the CPU may move their shards by copies in the memory that they share.
    - `plan`: the steps, for "steps".
    - `transfer`: the tile map and its way, for "tiles".
    """

    how: How
    shape: tuple[int, ...]
    dtype: Any
    src: Sharding
    dst: Sharding
    lost: tuple[Any, ...] = ()
    copies: bool = True
    plan: Redistribution | None = None
    transfer: Transfer | None = None

    @property
    def idle(self) -> bool:
        """Whether no byte moves: the result shares the buffers of the source."""
        return self.how in ("in place", "relabel")

    @ft.cached_property
    def source_bytes(self) -> int:
        """Bytes of one shard before."""
        return array_bytes(self.src.shard_shape(self.shape), self.dtype)

    @ft.cached_property
    def target_bytes(self) -> int:
        """Bytes of one shard afterwards."""
        return array_bytes(self.dst.shard_shape(self.shape), self.dtype)

    @ft.cached_property
    def extra_bytes(self) -> int:
        """The most that is needed beside the shards of source and target, in one memory: a device's, or the host's
        where the CPU plays the devices."""
        if self.plan is not None:
            copies = copies_bytes(self.shape, self.dtype, self.src, self.dst)
            return _program_bytes(self.plan, self.shape, self.dtype) * sharers(self.dst.device_set) + copies
        return 0 if self.transfer is None else self.transfer.extra_bytes

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

    @ft.cached_property
    def programs(self) -> tuple[Callable[[jax.Array], jax.Array], Callable[[jax.Array], jax.Array]]:
        """The compiled steps that keep their argument, and those that give it up."""
        assert self.plan is not None
        made = ft.partial(live_program, self.shape, self.plan, named(self.src), named(self.dst))
        return made(donate=False), made(donate=True)


@ft.lru_cache(maxsize=4096)
def move_of(
    shape: tuple[int, ...],
    dtype: Any,
    src: Sharding,
    dst: Sharding,
    lost: tuple[Any, ...] = (),
    copies: bool = True,
    meshes: tuple[MeshSpec | None, MeshSpec | None] = (None, None),
) -> Move:
    """Decides how arrays of one kind are moved.

    **Arguments:**

    - `shape`, `dtype`: of the array.
    - `src`, `dst`: shardings; a move between meshes without devices can be looked at, and not be made.
    - `lost`: devices whose shards are not to be read. Elements that they alone hold are `transfer.tiles.missing`.
    - `copies`: whether devices of the CPU may move their shards by copies in the memory that they share.
    - `meshes`: what says how the meshes of the ends span slices, where their devices do not.

    **Returns:**

    The Move, from a bounded cache where the same was asked before. It holds what was compiled for it.

    **Raises:**

    `SpecError` if `dst` does not divide the shape, or either end has unreduced axes; `LeafTypeError` for dtypes that
    JAX moves wrongly; `MeshError` if no way leads there.
    """
    stays = src == dst and not lost
    if not stays:
        require_movable(shape, dtype, dst)
        require_reduced(src, dst)
    shape, dtype = data_of(shape, dtype)
    make = ft.partial(Move, shape=shape, dtype=dtype, src=src, dst=dst, lost=lost, copies=copies)
    if stays:
        return make("in place")
    if not lost and _one_set(src, dst):
        ends = [layout(mesh or end.mesh, end.spec, len(shape)) for end, mesh in _on_axes((src, dst), meshes)]
        # Devices that share a memory take no steps, so that none are looked for.
        steps = redistribute(shape, bits(dtype), *ends) if len(ends) == 2 and not (copies and _share(src)) else None
        if _same_shards(shape, src, dst) if steps is None else not steps.steps:
            if src.memory_kind != dst.memory_kind and (in_host_memory(src) or in_host_memory(dst)):
                return make("memory kind")
            return make("relabel")
        if steps is not None and 0 not in shape:
            return make("steps", plan=steps)
    with_devices = has_devices(src) and has_devices(dst)
    made = transfer_of(shape, dtype, src, dst, lost, None if with_devices else "rounds")
    if made.way == "host" and not copies:
        made = dataclasses.replace(made, way="rounds")
    return make("tiles", transfer=made)


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
        made = chosen[move] = move
        if move.transfer is None:
            continue
        places = {place: sent.get(device, 0) for place, device in enumerate(move.transfer.devices)}
        before = move.transfer.tiles.sent_before(places)
        if before:
            made = chosen[move] = through(move, before)
        assert made.transfer is not None
        for place, size in made.transfer.tiles.sent_bytes.items():
            device = made.transfer.devices[place]
            sent[device] = sent.get(device, 0) + count * size
    return chosen


@ft.lru_cache(maxsize=1024)
def through(move: Move, sent_before: tuple[tuple[int, int], ...]) -> Move:
    """A move between device sets after some senders have sent more than other replicas of their shards."""
    assert move.transfer is not None
    return dataclasses.replace(move, transfer=after(move.transfer, sent_before))


def data_of(shape: tuple[int, ...], dtype: Any) -> tuple[tuple[int, ...], Any]:
    """The shape and dtype of the arrays that are moved in the place of typed PRNG keys, and of others."""
    if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return shape, np.dtype(dtype)
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
    return data.shape, np.dtype(data.dtype)


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


def has_devices(sharding: Sharding) -> bool:
    """Whether a sharding says on which devices an array lies."""
    return not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, AbstractMesh)


@ft.lru_cache(maxsize=1024)
def in_host_memory(sharding: Sharding) -> bool:
    """Whether an array lies in the host's memory, not in its devices'."""
    if has_devices(sharding):
        return in_device_memory(sharding) is not sharding
    return sharding.memory_kind not in (None, "device")


def named(sharding: Sharding) -> NamedSharding:
    """A sharding of which it is known that it names mesh axes."""
    assert isinstance(sharding, NamedSharding)
    return sharding


def shares_memory(move: Move) -> bool:
    """Whether all devices of a move's ends are played by this process's CPU, so that shards can be copied between."""
    ends = (move.src, move.dst)
    return all(has_devices(end) for end in ends) and all(_share(end) for end in ends)


def _share(sharding: Sharding) -> bool:
    if not has_devices(sharding) or not sharding.is_fully_addressable:
        return False
    return all(device.platform == "cpu" for device in sharding.device_set)


def _on_axes(ends: tuple[Sharding, Sharding], meshes: tuple[MeshSpec | None, MeshSpec | None]) -> Any:
    return [(end, mesh) for end, mesh in zip(ends, meshes, strict=True) if isinstance(end, NamedSharding)]


def _one_set(*ends: Sharding) -> bool:
    """Whether both ends are on the same devices; a mesh without any has as many as its size, numbered from 0."""
    if all(map(has_devices, ends)):
        return ends[0].device_set == ends[1].device_set
    ids = [{d.id for d in end.device_set} if has_devices(end) else {*range(named(end).mesh.size)} for end in ends]
    return ids[0] == ids[1]


def _same_shards(shape: tuple[int, ...], src: Sharding, dst: Sharding) -> bool:
    ours, theirs = named_boxes(shape, src, dst)
    return ours == theirs


def _program_bytes(plan: Redistribution, shape: tuple[int, ...], dtype: Any) -> int:
    """The most that the program of the steps allocates on a device beside source and target."""
    layouts = [step.source for step in plan.steps] + [step.target for step in plan.steps[-1:]]
    pieces = [array_bytes(end.piece_shape(shape), dtype) for end in layouts]
    most, last = 0, len(pieces) - 2
    for number, (before, following) in enumerate(it.pairwise(pieces)):
        # A step holds a copy of what it sends and of what it receives, laid out for the exchange, beside its ends.
        ends = before * (number > 0) + following * (number < last)
        most = max(most, ends + before + following)
    return most
