"""Moving one array between any two device sets: the tile map, and which of three ways carries it out."""

import collections
import contextlib
import dataclasses
import functools as ft
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Sharding

from ..._ground.boxes import boxes, boxes_here, volume
from ..._ground.errors import MeshError
from ..._ground.spec import array_bytes, bits
from . import device_copies, host_copies, rounds
from .tile_map import TileMap, tile_map


Way = Literal["host", "rounds", "pieces"]

IN_FLIGHT_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True, eq=False)
class Transfer:
    """How arrays of one shape, dtype and placement get to other devices.

    **Arguments:**

    - `way`: "host" (NumPy copies between host buffers), "rounds" (one program over all devices of both sides) or
        "pieces" (copies between single devices).
    - `tiles`: which device takes what from which; numbers are places in `devices`.
    - `devices`: the devices of both sides, those of the source first. Where an end has no devices all are integers:
        a device's id, or its place in a mesh that has none.
    - `shape`, `dtype`: of the array.
    - `source`, `sharding`: before and afterwards.
    - `lost`: devices whose shards are not to be read.
    - `sent_before`: senders, and the bytes that they have sent more than other replicas of their shards, of other
        arrays.
    """

    way: Way
    tiles: TileMap
    devices: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: Any
    source: Sharding
    sharding: Sharding
    lost: tuple[Any, ...] = ()
    sent_before: tuple[tuple[int, int], ...] = ()

    @ft.cached_property
    def everything_is_here(self) -> bool:
        """Whether JAX itself could do it: no shard is lost, or on another process."""
        return not self.lost and self.source.is_fully_addressable and self.sharding.is_fully_addressable

    @property
    def source_shape(self) -> tuple[int, ...]:
        """The shape of one shard before."""
        return self.source.shard_shape(self.shape)

    @ft.cached_property
    def extra_bytes(self) -> int:
        """The most bytes in one memory (a device's, or a process's where the CPU plays the devices) beside the shards
        of source and target."""
        if self.way == "host" or not self.tiles.tiles:
            return 0
        ends = copies_bytes(self.shape, self.dtype, self.source, self.sharding)
        # A piece is cut, and received.
        pieces = 2 * max(tile.bytes for tile in self.tiles.tiles)
        if self.way == "pieces":
            return pieces + ends
        if any(device.platform == "cpu" for device in self.devices):
            # The CPU's compiler drops the barriers between rounds, and may cut all pieces before it sends the first.
            pieces += sum(step.tiles[0].bytes for step in rounds.rounds(self.tiles))
        # A device of one side only holds a block of the other side's shape too.
        blocks = (self.source_shape, self.sharding.shard_shape(self.shape))
        return (pieces + max(array_bytes(block, self.dtype) for block in blocks)) * sharers(self.devices) + ends

    @ft.cached_property
    def within(self) -> "Transfer":
        """The same between the memories that programs compute in; the Transfer itself if its ends lie there."""
        source, target = in_device_memory(self.source), in_device_memory(self.sharding)
        if source is self.source and target is self.sharding:
            return self
        return dataclasses.replace(self, source=source, sharding=target)

    @ft.cached_property
    def place(self) -> dict[Any, int]:
        """The number of each device."""
        return {device: index for index, device in enumerate(self.devices)}

    @ft.cached_property
    def assembly(self) -> host_copies.Assembly:
        """The copies that this process makes on the way "host"."""
        mine = [(self.place[device], box) for device, box in boxes_here(self.sharding, self.shape).items()]
        return host_copies.assembly(self.tiles, mine)

    @ft.cached_property
    def positions(self) -> dict[int, int]:
        """For each sender of the way "host", which of the source's addressable shards it holds."""
        order = {device: index for index, device in enumerate(self.source.addressable_devices_indices_map(self.shape))}
        return {sender: order[self.devices[sender]] for sender in self.assembly.readers}

    @ft.cached_property
    def program(self) -> rounds.Program:
        """The compiled exchange of the way "rounds"."""
        return rounds.program(self.tiles, self.devices, self.source_shape, self.sharding.shard_shape(self.shape))


def transfer_of(
    shape: tuple[int, ...],
    dtype: Any,
    src: Sharding,
    dst: Sharding,
    lost: tuple[Any, ...] = (),
    way: Way | None = None,
) -> Transfer:
    """Plans the move of arrays of one kind.

    **Arguments:**

    - `shape`, `dtype`: of the whole array; for typed PRNG keys those of their `key_data`.
    - `src`, `dst`: any shardings.
    - `lost`: devices whose shards are not to be read.
    - `way`: chosen by what the devices can do if not given; to be given where an end has no devices.

    **Returns:**

    The Transfer.

    **Raises:**

    `MeshError` if no way leads there.
    """
    tiles, devices = _tiles(shape, dtype, src, dst, lost)
    return Transfer(way or _way(tiles, devices), tiles, devices, shape, dtype, src, dst, lost)


def after(made: Transfer, sent_before: tuple[tuple[int, int], ...]) -> Transfer:
    """The same move after some senders have sent more than other replicas of their shards: those send instead."""
    tiles, _ = _tiles(made.shape, made.dtype, made.source, made.sharding, made.lost, sent_before)
    return dataclasses.replace(made, tiles=tiles, sent_before=sent_before)


def _tiles(
    shape: tuple[int, ...],
    dtype: Any,
    src: Sharding,
    dst: Sharding,
    lost: tuple[Any, ...],
    sent_before: tuple[tuple[int, int], ...] = (),
) -> tuple[TileMap, tuple[Any, ...]]:
    """The tile map, and the devices that its numbers stand for."""
    (sources, targets), gone = named_boxes(shape, src, dst), {device for one in lost for device in (one, one.id)}
    sources = {device: box for device, box in sources.items() if device not in gone}
    devices = tuple(dict.fromkeys([*sources, *targets]))
    place = {device: index for index, device in enumerate(devices)}
    tiles = tile_map(
        bits(dtype),
        [(place[device], box) for device, box in sources.items()],
        [(place[device], box) for device, box in targets.items()],
        {place[device]: device.process_index for device in devices if isinstance(device, jax.Device)},
        sent_before,
    )
    return tiles, devices


def named_boxes(shape: tuple[int, ...], *ends: Sharding) -> list[dict[Any, Any]]:
    """The boxes of each end by device, or by the ids of devices where an end has none but places in a mesh."""
    found = [boxes(end, shape) for end in ends]
    if all(isinstance(device, jax.Device) for held in found for device in held):
        return found
    return [{getattr(device, "id", device): box for device, box in held.items()} for held in found]


def transferred(
    made: Transfer, x: jax.Array, donate: bool = False, in_flight_bytes: int = IN_FLIGHT_BYTES
) -> jax.Array:
    """Moves one array of the kind that a Transfer was planned for, with so many bytes of pieces at a time."""
    if x.weak_type and made.everything_is_here:
        return jax.device_put(x, made.sharding, donate=donate)
    if not made.tiles.tiles:
        return _empty(x, made, donate)
    if made.way == "host":
        return _by_host(x, made, donate)
    run = _by_rounds if made.way == "rounds" else ft.partial(_by_pieces, in_flight_bytes=in_flight_bytes)
    within = made.within
    # These two compute on devices, so that host memory at either end is left and entered in the same layout.
    given, x = x, x if within.source is made.source else jax.device_put(x, within.source)
    result = run(x, within, donate or x is not given)
    if donate and x is not given:
        given.delete()
    return result if within.sharding is made.sharding else jax.device_put(result, made.sharding)


def copies_bytes(shape: tuple[int, ...], dtype: Any, *ends: Sharding) -> int:
    """What programs need where an end lies in other memory than they compute in: a copy of its shards in theirs."""
    away = [end for end in ends if in_device_memory(end) is not end]
    return sum(array_bytes(end.shard_shape(shape), dtype) * sharers(end.device_set) for end in away)


def sharers(devices: Iterable[Any]) -> int:
    """How many devices allocate from one memory, at most: all of a process where the CPU plays them."""
    # Every process has to count alike, whichever devices are its own: the count decides what programs run.
    counts = collections.Counter(device.process_index for device in devices if device.platform == "cpu")
    return max(counts.values(), default=1)


def lost_text(made: Transfer) -> str:
    """Which elements no device holds that is left."""
    first = ", ".join(f"{start}:{stop}" for start, stop in made.tiles.missing[0])
    count = sum(map(volume, made.tiles.missing))
    return f"{count} of {math.prod(made.shape)} elements are on lost devices only, the first of them [{first}]"


def _empty(x: jax.Array, made: Transfer, donate: bool) -> jax.Array:
    nothing = np.zeros(made.sharding.shard_shape(made.shape), made.dtype)
    result = jax.make_array_from_callback(made.shape, made.sharding, lambda _: nothing, dtype=made.dtype)
    if donate:
        x.delete()
    return result


def _by_host(x: jax.Array, made: Transfer, donate: bool) -> jax.Array:
    with _copies_allowed():
        if not donate and not made.lost:
            # `addressable_shards` makes an object per shard, and a tree of small arrays has many. But of an array that
            # is the same on all devices this reads the first, whichever is asked for.
            shards = {sender: x.addressable_data(index) for sender, index in made.positions.items()}
            return host_copies.assemble(made.shape, made.dtype, made.sharding, made.assembly, shards)
        shards, free = _shards(x, made, donate)
        return host_copies.assemble(made.shape, made.dtype, made.sharding, made.assembly, shards, free)


def _copies_allowed() -> contextlib.AbstractContextManager[Any]:
    """Lets copies within the host's memory through guards against explicit transfers: none leaves that memory."""
    if "explicit" not in (jax.config.jax_transfer_guard_host_to_device or ""):  # pyright: ignore[reportAttributeAccessIssue]
        return contextlib.nullcontext()
    return jax.transfer_guard_host_to_device("allow")


def _by_pieces(x: jax.Array, made: Transfer, donate: bool, *, in_flight_bytes: int) -> jax.Array:
    shards, free = _shards(x, made, donate)
    wanted = jax.ShapeDtypeStruct(made.shape, made.dtype, sharding=made.sharding)
    return device_copies.put_together(
        wanted, made.tiles, made.devices, shards, in_flight_bytes=in_flight_bytes, free=free
    )


def _by_rounds(x: jax.Array, made: Transfer, donate: bool) -> jax.Array:
    shards = {shard.device: shard.data for shard in x.addressable_shards if shard.device in made.place}
    result = rounds.exchange(made.program, made.shape, made.dtype, made.sharding, shards)
    if donate:
        jax.block_until_ready(result)
        x.delete()
    return result


def in_device_memory(sharding: Sharding) -> Sharding:
    """The same placement in the memory that programs compute in; the sharding itself if it is there."""
    platform = min(sharding.device_set, key=lambda device: device.id).platform
    default = jax.local_devices(backend=platform)[0].default_memory().kind
    return sharding if sharding.memory_kind == default else sharding.with_memory_kind(default)


def _shards(x: jax.Array, made: Transfer, donate: bool) -> tuple[dict[int, jax.Array], Callable[[int], None] | None]:
    shards = {made.place[shard.device]: shard.data for shard in x.addressable_shards if shard.device in made.place}
    return shards, (lambda sender: shards[sender].delete()) if donate else None


def _way(tiles: TileMap, devices: Sequence[Any]) -> Way:
    platforms = tuple(dict.fromkeys(device.platform for device in devices))
    crossing = any(devices[tile.sender].process_index != devices[tile.receiver].process_index for tile in tiles.tiles)
    if platforms == ("cpu",) and not crossing:
        return "host"
    if len(platforms) == 1:
        return "rounds"
    if crossing:
        raise MeshError(
            f"no program spans {' and '.join(platforms)} devices of different processes; move to devices of one "
            "platform within each process first."
        )
    return "pieces"
