"""A tile map as copies between single devices: the way between platforms, which no one program spans."""

import collections
import functools as ft
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..small_floats import moved
from .tile_map import Tile, TileMap


def put_together(
    wanted: jax.ShapeDtypeStruct,
    tile_map: TileMap,
    devices: Sequence[Any],
    shards: Mapping[int, jax.Array],
    *,
    in_flight_bytes: int,
    free: Callable[[int], None] | None = None,
) -> jax.Array:
    """Cuts each piece on its sender, copies it to its receiver, and writes it into the shard there.

    **Arguments:**

    - `wanted`: the array's shape, dtype and sharding.
    - `tile_map`: whose device numbers are places in `devices`.
    - `shards`: the source's shards as single-device arrays, by device number.
    - `in_flight_bytes`: how many bytes of pieces may exist at a time, where the largest is no larger.
    - `free`: called with each device number when its shard is not read any more.

    **Returns:**

    The array.
    """
    by_receiver: dict[int, list[Tile]] = {}
    for tile in tile_map.tiles:
        by_receiver.setdefault(tile.receiver, []).append(tile)
    left = collections.Counter(tile.sender for tile in tile_map.tiles)
    for sender in shards:
        if free is not None and sender not in left:
            free(sender)
    place = {device: index for index, device in enumerate(devices)}
    shape, sharding = wanted.shape, wanted.sharding
    shard_shape = sharding.shard_shape(shape)
    built, in_flight = [], 0
    for device in sharding.addressable_devices_indices_map(shape):
        target = jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
        tiles = by_receiver.get(place[device], [])
        out = None if len(tiles) == 1 else jnp.zeros(shard_shape, wanted.dtype, device=target)
        for tile in tiles:
            # A piece is cut on its sender and copied to its receiver, and the two may be one memory.
            if in_flight and 2 * (in_flight + tile.bytes) > in_flight_bytes:
                jax.block_until_ready([*built, out])
                in_flight = 0
            piece = jax.device_put(_cut(shards[tile.sender], tile), target)
            out = piece if out is None else _write(out, piece, tuple(start for start, _ in tile.target))
            in_flight += tile.bytes
            left[tile.sender] -= 1
            done = not left[tile.sender]
            if free is not None and done:
                jax.block_until_ready([*built, out])
                in_flight = 0
                free(tile.sender)
        built.append(out)
    return jax.make_array_from_single_device_arrays(shape, sharding, built, dtype=wanted.dtype)


def _cut(shard: jax.Array, tile: Tile) -> jax.Array:
    sizes = tuple(stop - start for start, stop in tile.source)
    if sizes == shard.shape and tile.sender != tile.receiver:
        return shard
    # On its own device even a whole shard is copied: old and new array must not share a buffer.
    return _slice(shard, tuple(start for start, _ in tile.source), sizes)


@ft.partial(jax.jit, static_argnums=2)
def _slice(shard: jax.Array, starts: tuple[Any, ...], sizes: tuple[int, ...]) -> jax.Array:
    return moved(lambda shard: jax.lax.dynamic_slice(shard, starts, sizes), shard)


@ft.partial(jax.jit, donate_argnums=0)
def _write(out: jax.Array, piece: jax.Array, starts: tuple[Any, ...]) -> jax.Array:
    return moved(lambda out, piece: jax.lax.dynamic_update_slice(out, piece, starts), out, piece)
