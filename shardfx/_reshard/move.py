"""The move of arrays of one shape, dtype and sharding to another sharding: the decision
how they move.

Two arguments recur. `lost` are devices whose shards are not to be read. `copies` says
whether shards on CPU devices may be copied in host memory, which these devices share.
"A memory" is that of a device, or host memory.
"""

import dataclasses
import functools as ft
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
from jax.sharding import NamedSharding, Sharding

from .._ground.boxes import Box, shard_boxes
from .._ground.keys import data_of
from .._ground.spec import DType, array_bytes, bits
from ..topology import MeshSpec
from .movable import require_movable, require_reduced
from .pieces.assembly import Assembly
from .pieces.planning import assembly_between
from .shardings import (
    device_copy_bytes,
    has_devices,
    in_host_memory,
    layout,
    named,
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
    - `lost`: devices whose shards are not to be read.
    - `copies`: whether shards on CPU devices may be copied in host memory, which these
      devices share.
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
    def staging_bytes(self) -> int:
        """The bytes of device memory that programs use for copies of old and new shards
        that are in host memory. 0 if no program runs: if the host copies, or if nothing
        moves.
        """
        is_assembled = self.assembly is not None and self.assembly.method == "programs"
        if self.plan is None and not is_assembled:
            return 0
        return device_copy_bytes(self.shape, self.dtype, self.src, self.dst)

    @ft.cached_property
    def extra_bytes(self) -> int:
        """The most bytes that one memory needs besides the shards of source and target.
        Between TPU slices, an array is assembled first, and then spread inside the
        slices by a second move; the one that needs more counts.
        """
        if self.plan is not None:
            device_bytes = _program_bytes(self.plan, self.shape, self.dtype)
            # `sharers` is the largest number of devices that share one memory.
            return device_bytes * sharers(self.dst.device_set) + self.staging_bytes
        if self.assembly is None:
            return 0
        exchange_bytes = self.assembly.extra_bytes(self.assembly.exchanges())
        spread = spread_of(self.assembly)
        if spread is not None:
            spread_bytes = spread.source_bytes_in_memory + spread.extra_bytes
            exchange_bytes = max(exchange_bytes, spread_bytes)
        return exchange_bytes + self.staging_bytes

    @property
    def total_bytes(self) -> int:
        """The most bytes of this array that one memory holds during the move, shards of
        source and target included.
        """
        target_bytes = self.target_bytes * sharers(self.dst.device_set)
        return self.source_bytes_in_memory + target_bytes + self.extra_bytes

    @property
    def source_bytes_in_memory(self) -> int:
        """The most bytes of the source's shards in one memory. Devices can share it."""
        return self.source_bytes * sharers(self.src.device_set)

    @property
    def crosses_cpu(self) -> bool:
        """Whether CPU devices of several processes take part in the move."""
        if self.dst.is_fully_addressable:
            return False
        platforms = {device.platform for device in self.dst.device_set}
        return "cpu" in platforms

    def chunks_of(self, count: int) -> Chunks | None:
        """The division of shards into `count` chunks or more, or as many as there can
        be. `None` if the move has no steps or the shards cannot be divided.
        """
        if self.plan is None:
            return None
        shard_shape = self.src.shard_shape(self.shape)
        return split_into(count, shard_shape, self.plan.steps)

    def chunks_within(self, limit_bytes: int | None) -> Chunks | None:
        """Chunks of shards that need at most `limit_bytes` in one memory besides source
        and target. `None` if whole shards need no more, if `limit_bytes` is `None` (no
        limit), or if the shards cannot be divided. The finest chunks may need more than
        a limit that is less than `least_bytes`.
        """
        if limit_bytes is None or self.extra_bytes <= limit_bytes:
            return None
        # As many chunks as the limit asks for; if these need more, as many as there
        # are.
        chunk_bytes = max(1, limit_bytes - self.staging_bytes)
        chunks = self.chunks_of(-(-self.total_bytes // chunk_bytes))
        if chunks is None or self.bytes_in(chunks) <= limit_bytes:
            return chunks
        return self.chunks_of(max(self.shape))

    def bytes_in(self, chunks: Chunks) -> int:
        """The bytes that one memory needs besides the shards of source and target if
        shards move in `chunks`. They include one chunk's part of the shards, before and
        after its move.
        """
        divided_bytes = self.total_bytes - self.staging_bytes
        # Of the `block` elements of a block along the divided dimension, `chunk` are in
        # one chunk.
        chunk_bytes = -(-divided_bytes * chunks.chunk // chunks.block)
        return chunk_bytes + self.staging_bytes

    @property
    def least_bytes(self) -> int:
        """The least `limit_bytes`, besides the shards of source and target, under which
        the array can move.
        """
        if self.assembly is not None:
            exchange_bytes = least_bytes_of(self.assembly)
            return min(self.extra_bytes, exchange_bytes + self.staging_bytes)
        finest = self.chunks_of(max(self.shape, default=1))
        if finest is None:
            return self.extra_bytes
        return min(self.extra_bytes, self.bytes_in(finest))


def spread_of(assembly: Assembly) -> Move | None:
    """Returns the move inside TPU slices (or nodes) that follows an assembly in which
    each element enters a slice once. `None` if the assembly makes the target's shards
    themselves.
    """
    if assembly.relay is not None:
        return Move(
            how="tiles",
            shape=assembly.shape,
            dtype=assembly.dtype,
            src=assembly.target,
            dst=assembly.target,
            copies=False,
            assembly=assembly.relay,
        )
    if assembly.sharding == assembly.target:
        return None
    return move_of(
        assembly.shape,
        assembly.dtype,
        src=assembly.sharding,
        dst=assembly.target,
        copies=False,
    )


def least_bytes_of(assembly: Assembly) -> int:
    """Returns the least `limit_bytes`, besides the shards of source and target, under
    which an array can be assembled and its shards gathered inside slices.
    """
    spread = spread_of(assembly)
    if spread is None:
        return assembly.least_bytes
    return max(assembly.least_bytes, spread.source_bytes_in_memory + spread.least_bytes)


@ft.lru_cache(maxsize=4096)
def program_of(
    move: Move,
    donate: bool,
    chunks: Chunks | None,
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

    `lost` are devices whose shards are not to be read. `assembly.parts.missing` of the
    result lists the elements that only they hold. `copies` says whether shards on CPU
    devices may be copied in host memory, which these devices share. A move between
    meshes without devices can be planned, but not carried out; `meshes` then says how
    the meshes of source and target span TPU slices.

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
    # What all kinds of moves have in common.
    make = ft.partial(
        Move,
        shape=shape,
        dtype=dtype,
        src=src,
        dst=dst,
        lost=lost,
        copies=copies,
    )
    if stays:
        return make("in place")
    if not lost and _same_devices(src, dst):
        # Devices that share a memory do not need steps, so none are searched.
        steps = None
        if not (copies and _is_local_cpu(src)):
            steps = _steps(shape=shape, dtype=dtype, src=src, dst=dst, meshes=meshes)
        if steps is None:
            keeps_shards = _same_shards(shape, src, dst)
        else:
            keeps_shards = not steps.steps
        # Each device already holds its shard.
        if keeps_shards:
            is_in_host_memory = in_host_memory(src) or in_host_memory(dst)
            if src.memory_kind != dst.memory_kind and is_in_host_memory:
                return make("memory kind")
            return make("relabel")
        # An array without elements has nothing to send.
        if steps is not None and 0 not in shape:
            return make("steps", plan=steps)
    assembly = assembly_between(
        shape=shape, dtype=dtype, src=src, dst=dst, lost=lost, may_copy_on_host=copies
    )
    return make("tiles", assembly=assembly)


def _steps(
    shape: tuple[int, ...],
    dtype: object,
    src: Sharding,
    dst: Sharding,
    meshes: tuple[MeshSpec | None, MeshSpec | None],
) -> Redistribution | None:
    """The collectives from `src` to `dst`, on the same devices; `None` if one of the
    two is no NamedSharding. `meshes` are those of the plans without devices.
    """
    if not isinstance(src, NamedSharding) or not isinstance(dst, NamedSharding):
        return None
    src_mesh, dst_mesh = meshes
    src_layout = layout(src_mesh or src.mesh, src.spec, len(shape))
    dst_layout = layout(dst_mesh or dst.mesh, dst.spec, len(shape))
    return redistribute(shape, bits(dtype), src_layout, dst_layout)


def balanced(moves: Mapping[Move, int]) -> dict[Move, Move]:
    """Chooses which replicas send, so that over all moves between different devices
    they send equally many bytes. `moves` has the number of arrays of each move.

    Of several replicas of a shard, the one that has sent the fewest bytes in earlier
    moves is taken. Returns for each move the move with the chosen senders. All its
    arrays have the same senders, so that they share a program.
    """
    sent_by_device: dict[object, int] = {}
    chosen: dict[Move, Move] = {}
    for move, count in moves.items():
        chosen[move] = move
        if move.assembly is None:
            continue
        sent_by_position: dict[int, int] = {}
        for position, device in enumerate(move.assembly.devices):
            sent_by_position[position] = sent_by_device.get(device, 0)
        sent_before = move.assembly.parts.sent_before(sent_by_position)
        if sent_before:
            chosen[move] = _with_senders(move, sent_before)
        assembly = chosen[move].assembly
        assert assembly is not None
        for position, nbytes in assembly.parts.sent_bytes.items():
            device = assembly.devices[position]
            sent_so_far = sent_by_device.get(device, 0)
            sent_by_device[device] = sent_so_far + count * nbytes
    return chosen


@ft.lru_cache(maxsize=1024)
def _with_senders(move: Move, sent_before: tuple[tuple[int, int], ...]) -> Move:
    """Returns the same move with senders chosen anew. `sent_before` has pairs: the
    position of a device in `assembly.devices`, and how many more bytes it has sent in
    earlier moves than the device with the same shard that has sent the fewest.
    """
    assembly = assembly_between(
        move.shape,
        move.dtype,
        src=move.src,
        dst=move.dst,
        lost=move.lost,
        may_copy_on_host=move.copies,
        sent_before=sent_before,
    )
    return dataclasses.replace(move, assembly=assembly)


def shares_memory(move: Move) -> bool:
    """Whether all devices of a move are CPU devices of this process. Shards can then be
    copied in host memory.
    """
    return _is_local_cpu(move.src) and _is_local_cpu(move.dst)


def _is_local_cpu(sharding: Sharding) -> bool:
    """Whether all devices of a sharding are CPU devices of this process."""
    if not has_devices(sharding) or not sharding.is_fully_addressable:
        return False
    platforms = {device.platform for device in sharding.device_set}
    return platforms == {"cpu"}


def _same_devices(src: Sharding, dst: Sharding) -> bool:
    """Whether both shardings have the same devices. Positions in a mesh without devices
    count as device ids.
    """
    if has_devices(src) and has_devices(dst):
        return src.device_set == dst.device_set
    return _device_numbers(src) == _device_numbers(dst)


def _device_numbers(sharding: Sharding) -> set[int]:
    """The numbers of a sharding's devices; positions in a mesh without devices."""
    if has_devices(sharding):
        return {device.id for device in sharding.device_set}
    return set(range(named(sharding).mesh.size))


def _same_shards(shape: tuple[int, ...], src: Sharding, dst: Sharding) -> bool:
    """Whether each device holds the same shard under both shardings."""
    old_boxes = shard_boxes(src, shape)
    new_boxes = shard_boxes(dst, shape)
    if has_devices(src) and has_devices(dst):
        return old_boxes == new_boxes
    return _by_number(old_boxes) == _by_number(new_boxes)


def _by_number(boxes: Mapping[Any, Box]) -> dict[int, Box]:
    """The boxes of devices by their ids; positions in a mesh without devices stay."""
    return {getattr(device, "id", device): box for device, box in boxes.items()}


def _program_bytes(plan: Redistribution, shape: tuple[int, ...], dtype: object) -> int:
    """The most bytes that the program of the steps allocates on a device besides the
    shards of source and target.
    """
    last = len(plan.steps) - 1
    most_bytes = 0
    for number, step in enumerate(plan.steps):
        old_bytes = array_bytes(step.source.shard_shape(shape), dtype)
        new_bytes = array_bytes(step.target.shard_shape(shape), dtype)
        # A step holds a copy of the bytes that it sends and a copy of the bytes that it
        # receives, and its old and its new shard. The first step's old shard is the
        # source, and the last step's new shard is the target.
        step_bytes = old_bytes + new_bytes
        if number > 0:
            step_bytes += old_bytes
        if number < last:
            step_bytes += new_bytes
        most_bytes = max(most_bytes, step_bytes)
    return most_bytes
