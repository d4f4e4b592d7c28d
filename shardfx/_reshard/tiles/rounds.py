"""A tile map as one program over all devices of both sides: rounds in which each device sends and receives one piece.

The only way that crosses processes: JAX's own transfers do not, on most backends. And the only one that costs one
program, not one per device and piece.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..small_floats import on_bits
from .tile_map import Tile, TileMap


_AXIS = "device"


class Round(NamedTuple):
    """Pieces of one shape, of which no two have the same sender or the same receiver."""

    shape: tuple[int, ...]
    local: bool
    tiles: tuple[Tile, ...]


def rounds(tile_map: TileMap) -> tuple[Round, ...]:
    """The tiles in as few rounds per shape of piece as the busiest sender or receiver needs."""
    classes: dict[tuple[tuple[int, ...], bool], list[Tile]] = {}
    for tile in tile_map.tiles:
        shape = tuple(stop - start for start, stop in tile.box)
        classes.setdefault((shape, tile.sender == tile.receiver), []).append(tile)
    found = []
    for (shape, local), tiles in classes.items():
        found += [Round(shape, local, matching) for matching in matchings(tiles)]
    return tuple(found)


def matchings(tiles: Sequence[Any]) -> Iterable[tuple[Any, ...]]:
    """Colours the edges of a bipartite graph with as many colours as its largest degree (Konig's theorem)."""
    at_sender: dict[int, dict[int, Any]] = {}
    at_receiver: dict[int, dict[int, Any]] = {}
    for tile in tiles:
        out, into = at_sender.setdefault(tile.sender, {}), at_receiver.setdefault(tile.receiver, {})
        free_out, free_into = _first_free(out), _first_free(into)
        if free_out in into:
            _swap(tile.receiver, free_out, free_into, at_sender, at_receiver)
        out[free_out] = into[free_out] = tile
    colours: dict[int, list[Any]] = {}
    for used in at_sender.values():
        for colour, tile in used.items():
            colours.setdefault(colour, []).append(tile)
    return [tuple(colours[colour]) for colour in sorted(colours)]


def _swap(receiver: int, a: int, b: int, at_sender: dict, at_receiver: dict) -> None:
    """Exchanges the colours on the path of `a` and `b` edges that starts at `receiver`, so that `a` becomes free."""
    path, sides, node, colour = [], (at_receiver, at_sender), receiver, a
    while (tile := sides[len(path) % 2][node].get(colour)) is not None:
        path.append((tile, colour))
        node = tile.sender if len(path) % 2 else tile.receiver
        colour = b if colour == a else a
    for tile, colour in path:
        del at_sender[tile.sender][colour], at_receiver[tile.receiver][colour]
    for tile, colour in path:
        other = b if colour == a else a
        at_sender[tile.sender][other] = at_receiver[tile.receiver][other] = tile


def _first_free(used: Mapping[int, Any]) -> int:
    colour = 0
    while colour in used:
        colour += 1
    return colour


class Program(NamedTuple):
    """A jitted exchange: what goes in and comes out are the devices' shards, joined along the first dimension."""

    jitted: Any
    devices: tuple[Any, ...]
    sharding: NamedSharding
    source_shape: tuple[int, ...]
    target_shape: tuple[int, ...]


def program(
    tile_map: TileMap, devices: Sequence[Any], source_shape: tuple[int, ...], target_shape: tuple[int, ...]
) -> Program:
    """The program that carries out a tile map whose device numbers are places in `devices`."""
    mesh = Mesh(np.asarray(devices), (_AXIS,))
    spec = PartitionSpec(_AXIS)
    steps = rounds(tile_map)
    tables = [_table(step, len(devices)) for step in steps]

    def exchange(block: jax.Array) -> jax.Array:
        block = block.reshape(source_shape)
        out = jnp.zeros(target_shape, block.dtype)
        here = jax.lax.axis_index(_AXIS)
        for step, (source_starts, target_starts, receives) in zip(steps, tables, strict=True):
            # Without the barrier all pieces could be cut, and kept, before the first is sent.
            block, out = jax.lax.optimization_barrier((block, out))
            piece = jax.lax.dynamic_slice(block, _row(source_starts, here), step.shape)
            if not step.local:
                piece = jax.lax.ppermute(piece, _AXIS, [(tile.sender, tile.receiver) for tile in step.tiles])
            starts = _row(target_starts, here)
            before = jax.lax.dynamic_slice(out, starts, step.shape)
            out = jax.lax.dynamic_update_slice(out, jnp.where(jnp.asarray(receives)[here], piece, before), starts)
        return out.reshape(_joined(target_shape))

    body = on_bits(exchange) if devices[0].platform == "cpu" else exchange
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return Program(jax.jit(mapped), tuple(devices), NamedSharding(mesh, spec), source_shape, target_shape)


def exchange(
    made: Program, shape: tuple[int, ...], dtype: Any, sharding: jax.sharding.Sharding, shards: Mapping[Any, Any]
) -> jax.Array:
    """Runs a program on the shards that this process holds; every process of the program's devices has to call it.

    **Arguments:**

    - `made`: the program.
    - `shape`, `dtype`, `sharding`: of the array that is wanted.
    - `shards`: the source's shards as single-device arrays, by device; devices without one send nothing.

    **Returns:**

    The array; on a process that owns none of its devices, one without addressable shards.
    """
    block = _joined(made.source_shape)
    here = [device for device in made.devices if device.process_index == jax.process_index()]
    if not here:
        return jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=dtype)
    blocks = []
    for device in here:
        if device not in shards:
            # The program has one shape for all, so a device that holds nothing of the source puts in zeros.
            blocks.append(jnp.zeros(block, dtype, device=device))
        else:
            blocks.append(shards[device] if made.source_shape else shards[device].reshape(1))
    whole = (len(made.devices) * block[0], *block[1:])
    joined = jax.make_array_from_single_device_arrays(whole, made.sharding, blocks, dtype=dtype)
    # The caller may be under a mesh of other devices.
    with jax.sharding.use_abstract_mesh(made.sharding.mesh.abstract_mesh):
        result = made.jitted(joined)
    if made.devices[0].platform == "cpu":
        # Programs that talk to other processes block threads of the CPU's runtime; several at once can block them all.
        jax.block_until_ready(result)
    parts = {shard.device: shard.data for shard in result.addressable_shards}
    mine = [parts[device] for device in sharding.addressable_devices_indices_map(shape)]
    if not made.target_shape:
        mine = [part.reshape(()) for part in mine]
    return jax.make_array_from_single_device_arrays(shape, sharding, mine, dtype=dtype)


def _joined(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape or (1,)


def _table(step: Round, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rank = len(step.shape)
    source_starts, target_starts = np.zeros((count, rank), np.int32), np.zeros((count, rank), np.int32)
    receives = np.zeros(count, bool)
    for tile in step.tiles:
        source_starts[tile.sender] = [start for start, _ in tile.source]
        target_starts[tile.receiver] = [start for start, _ in tile.target]
        receives[tile.receiver] = True
    return source_starts, target_starts, receives


def _row(table: np.ndarray, here: jax.Array) -> list[jax.Array]:
    row = jnp.asarray(table)[here]
    return [row[dim] for dim in range(table.shape[1])]
