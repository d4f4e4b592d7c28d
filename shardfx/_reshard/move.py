"""The move of arrays of one shape, dtype and sharding to another sharding: the decision
how they move.

Two arguments recur. `lost` are devices whose shards are not to be read. `copies` says
whether shards on CPU devices may be copied in host memory, which these devices share.
"A memory" is that of a device, or host memory.
"""

import dataclasses
import functools as ft
import itertools as it
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
from jax.sharding import NamedSharding, Sharding

from .._ground.boxes import shard_boxes
from .._ground.spec import DType, array_bytes, bits
from ..topology import MeshSpec
from .pieces.assembly import Assembly
from .pieces.planning import assembly_between
from .shardings import (
    data_of,
    device_copy_bytes,
    has_devices,
    in_host_memory,
    layout,
    named,
    require_movable,
    require_reduced,
    sharers,
)
from .steps.chunks import Chunks, split_into
from .steps.programs import live_program
from .steps.redistribution import Redistribution, redistribute


How = Literal["in place", "relabel", "memory kind", "steps", "tiles"]


@dataclasses.dataclass(frozen=True, eq=False)
class Move:
    """The decision how arrays of one shape, dtype and sharding move to another
    sharding.

    **Arguments:**

    - `how`: "in place" (nothing to do), "relabel" (every device already holds its
      shard, and only the mesh or the spec changes), "memory kind" (each device copies
      its shard to another of its memories), "steps" (collectives among the same
      devices) or "tiles" (each new shard is assembled from the old shards that overlap
      it).
    - `shape`, `dtype`: those of the whole array; for typed PRNG keys those of their
      `key_data`.
    - `src`, `dst`: the shardings before and after.
    - `plan`: for "steps", the steps.
    - `assembly`: for "tiles", which parts of the old shards each new shard is made of.
    """

    how: How
    shape: tuple[int, ...]
    dtype: DType
    src: Sharding
    dst: Sharding
    lost: tuple[Any, ...] = ()
    copies: bool = True
    plan: Redistribution | None = None
    assembly: Assembly | None = None

    @property
    def idle(self) -> bool:
        """Whether no bytes are copied. The result then shares the buffers of the
        source.
        """
        return self.how in ("in place", "relabel")

    @ft.cached_property
    def source_bytes(self) -> int:
        """The bytes of one shard before the move."""
        return array_bytes(self.src.shard_shape(self.shape), self.dtype)

    @ft.cached_property
    def target_bytes(self) -> int:
        """The bytes of one shard after the move."""
        return array_bytes(self.dst.shard_shape(self.shape), self.dtype)

    @ft.cached_property
    def copy_bytes(self) -> int:
        """The bytes of device memory that programs use for copies of old and new shards
        that are in host memory.
        """
        if self.plan is None and (
            self.assembly is None or self.assembly.method != "programs"
        ):
            return 0
        return device_copy_bytes(self.shape, self.dtype, self.src, self.dst)

    @ft.cached_property
    def extra_bytes(self) -> int:
        """The most bytes that one memory needs besides the shards of source and target."""
        if self.plan is not None:
            return (
                _program_bytes(self.plan, self.shape, self.dtype)
                * sharers(self.dst.device_set)
                + self.copy_bytes
            )
        if self.assembly is None:
            return 0
        return self.assembly.extra_bytes(self.assembly.exchanges()) + self.copy_bytes

    @property
    def held_bytes(self) -> int:
        """The most bytes of this array that one memory holds during the move, shards of
        source and target included.
        """
        source = self.source_bytes * sharers(self.src.device_set)
        return (
            source + self.target_bytes * sharers(self.dst.device_set) + self.extra_bytes
        )

    @property
    def crosses_cpu(self) -> bool:
        """Whether CPU devices of several processes take part in the move."""
        devices = self.dst.device_set
        return not self.dst.is_fully_addressable and any(
            device.platform == "cpu" for device in devices
        )

    def chunks_of(self, count: int) -> Chunks | None:
        """The division of shards into `count` chunks or more, or as many as there can
        be. `None` if the move has no steps or the shards cannot be divided.
        """
        return (
            None
            if self.plan is None
            else split_into(count, self.src.shard_shape(self.shape), self.plan.steps)
        )

    def chunks_within(self, limit_bytes: int | None) -> Chunks | None:
        """Chunks of shards that need at most `limit_bytes` in one memory besides source
        and target. `None` if whole shards need no more, if `limit_bytes` is `None` (no
        limit), or if the shards cannot be divided.
        """
        if limit_bytes is None or self.extra_bytes <= limit_bytes:
            return None
        chunks = self.chunks_of(
            -(-self.held_bytes // max(1, limit_bytes - self.copy_bytes))
        )
        return (
            chunks
            if chunks is None or self.bytes_in(chunks) <= limit_bytes
            else self.chunks_of(max(self.shape))
        )

    def bytes_in(self, chunks: Chunks) -> int:
        """The bytes that one memory needs besides the shards of source and target if
        shards move in `chunks`. They include one chunk's part of the shards, before and
        after its move.
        """
        return (
            -(-(self.held_bytes - self.copy_bytes) * chunks.chunk // chunks.block)
            + self.copy_bytes
        )

    @property
    def least_bytes(self) -> int:
        """The least `limit_bytes`, besides the shards of source and target, under which
        the array can move.
        """
        if self.assembly is not None:
            return min(self.extra_bytes, self.assembly.least_bytes + self.copy_bytes)
        finest = self.chunks_of(max(self.shape, default=1))
        return (
            self.extra_bytes
            if finest is None
            else min(self.extra_bytes, self.bytes_in(finest))
        )


@ft.lru_cache(maxsize=4096)
def program_of(
    move: Move, donate: bool, chunks: Chunks | None
) -> Callable[[jax.Array], jax.Array]:
    """Returns a function that moves a live array by the steps of `move`, compiled on
    its first call. With `donate`, it deletes the array. `chunks` are those in which
    shards move; `None` for whole shards.
    """
    assert move.plan is not None
    return live_program(
        move.shape,
        move.plan,
        named(move.src),
        named(move.dst),
        donate=donate,
        chunks=chunks,
    )


@ft.lru_cache(maxsize=4096)
def move_of(
    shape: tuple[int, ...],
    dtype: object,
    src: Sharding,
    dst: Sharding,
    lost: tuple[object, ...] = (),
    copies: bool = True,
    meshes: tuple[MeshSpec | None, MeshSpec | None] = (None, None),
) -> Move:
    """Decides how arrays of one shape and dtype move from the sharding `src` to `dst`.
    The result is cached.

    `assembly.parts.missing` of the result lists the elements that only `lost` devices
    hold. A move between meshes without devices can be planned, but not carried out;
    `meshes` then says how the meshes of source and target span TPU slices.

    **Raises:**

    `SpecError` if `dst` does not divide the shape, or if `src` or `dst` has unreduced
    axes; `LeafTypeError` for dtypes that JAX moves wrongly; `MeshError` if the move is
    impossible.
    """
    stays = src == dst and not lost
    if not stays:
        require_movable(shape, dtype, src, dst)
        require_reduced(src, dst)
    shape, dtype = data_of(shape, dtype)
    make = ft.partial(
        Move, shape=shape, dtype=dtype, src=src, dst=dst, lost=lost, copies=copies
    )
    if stays:
        return make("in place")
    if not lost and _same_devices(src, dst):
        pairs = [
            (end, mesh)
            for end, mesh in zip((src, dst), meshes, strict=True)
            if isinstance(end, NamedSharding)
        ]
        step_layouts = [
            layout(mesh or end.mesh, end.spec, len(shape)) for end, mesh in pairs
        ]
        # Devices that share a memory do not need steps, so none are searched.
        steps = (
            redistribute(shape, bits(dtype), *step_layouts)
            if len(step_layouts) == 2 and not (copies and _is_local_cpu(src))
            else None
        )
        if _same_shards(shape, src, dst) if steps is None else not steps.steps:
            if src.memory_kind != dst.memory_kind and (
                in_host_memory(src) or in_host_memory(dst)
            ):
                return make("memory kind")
            return make("relabel")
        if steps is not None and 0 not in shape:
            return make("steps", plan=steps)
    return make(
        "tiles", assembly=assembly_between(shape, dtype, src, dst, lost, copies)
    )


def balanced(moves: Mapping[Move, int]) -> dict[Move, Move]:
    """Chooses which replicas send, so that over all moves between different devices
    they send equally many bytes. `moves` has the number of arrays of each move.

    Of several replicas of a shard, the one that has sent the fewest bytes in earlier
    moves is taken. Returns for each move the move with the chosen senders. All its
    arrays have the same senders, so that they share a program.
    """
    sent: dict[object, int] = {}
    chosen = {}
    for move, count in moves.items():
        balanced_move = chosen[move] = move
        if move.assembly is None:
            continue
        places = {
            place: sent.get(device, 0)
            for place, device in enumerate(move.assembly.devices)
        }
        before = move.assembly.parts.sent_before(places)
        if before:
            balanced_move = chosen[move] = _with_senders(move, before)
        assert balanced_move.assembly is not None
        for place, size in balanced_move.assembly.parts.sent_bytes.items():
            device = balanced_move.assembly.devices[place]
            sent[device] = sent.get(device, 0) + count * size
    return chosen


@ft.lru_cache(maxsize=1024)
def _with_senders(move: Move, sent_before: tuple[tuple[int, int], ...]) -> Move:
    """Returns the same move with senders chosen anew. `sent_before` has pairs: the
    position of a device in `assembly.devices`, and how many more bytes it has sent in
    earlier moves than the device with the same shard that has sent the fewest.
    """
    fields = (move.shape, move.dtype, move.src, move.dst, move.lost, move.copies)
    return dataclasses.replace(move, assembly=assembly_between(*fields, sent_before))


def shares_memory(move: Move) -> bool:
    """Whether all devices of a move are CPU devices of this process. Shards can then be
    copied in host memory.
    """
    return _is_local_cpu(move.src) and _is_local_cpu(move.dst)


def _is_local_cpu(sharding: Sharding) -> bool:
    if not has_devices(sharding) or not sharding.is_fully_addressable:
        return False
    return all(device.platform == "cpu" for device in sharding.device_set)


def _same_devices(*shardings: Sharding) -> bool:
    """Whether all shardings have the same devices. Positions in a mesh without devices
    count as device ids.
    """
    if all(map(has_devices, shardings)):
        return shardings[0].device_set == shardings[1].device_set
    first, second = map(_device_numbers, shardings)
    return first == second


def _device_numbers(sharding: Sharding) -> set[int]:
    """The numbers of a sharding's devices; positions in a mesh without devices."""
    if has_devices(sharding):
        return {device.id for device in sharding.device_set}
    return set(range(named(sharding).mesh.size))


def _same_shards(shape: tuple[int, ...], src: Sharding, dst: Sharding) -> bool:
    ours = shard_boxes(src, shape)
    theirs = shard_boxes(dst, shape)
    if not (has_devices(src) and has_devices(dst)):
        ours, theirs = (
            {getattr(device, "id", device): box for device, box in held.items()}
            for held in (ours, theirs)
        )
    return ours == theirs


def _program_bytes(plan: Redistribution, shape: tuple[int, ...], dtype: object) -> int:
    """The most bytes that the program of the steps allocates on a device besides the
    shards of source and target.
    """
    layouts = [step.source for step in plan.steps] + [
        step.target for step in plan.steps[-1:]
    ]
    held = [array_bytes(end.shard_shape(shape), dtype) for end in layouts]
    # Besides its old and its new shard, a step holds a copy of the bytes that it sends
    # and a copy of the bytes that it receives. The first step's old shard is the
    # source, and the last step's new shard is the target.
    inner = [0, *held[1:-1], 0]
    return max(
        sum(pair) + sum(layouts_of_step)
        for pair, layouts_of_step in zip(
            it.pairwise(held), it.pairwise(inner), strict=True
        )
    )
