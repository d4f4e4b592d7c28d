"""Putting shards together in host memory: the copies of a tile map as NumPy assignments, in an order that frees early.

On the CPU backend NumPy can look at a shard, which is host memory, and JAX at an aligned NumPy buffer. So each byte is
copied once, from the old shard to the new one.
"""

import collections
import dataclasses
import functools as ft
import itertools as it
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jax
import numpy as np

from ..._ground.boxes import Box, as_box, volume
from ..._ground.buffers import buffers
from .tile_map import Tile, TileMap


Order = Literal["target", "source", "staged"]

_PARALLEL_BYTES = 8 << 20
_BLOCK_BYTES = 1 << 20
# The kernel backs large buffers with huge pages, so a smaller piece touches a whole one.
_PAGE_BYTES = 2 << 20


@dataclasses.dataclass(frozen=True)
class Assembly:
    """A tile map, replicas taken out: they share one buffer, as JAX itself does for replicated host arrays.

    **Arguments:**

    - `targets`: the box of every different shard to make.
    - `tiles`: per target the tiles it is made of.
    - `readers`: per sender, how many tiles are read from it.
    """

    targets: tuple[Box, ...]
    tiles: tuple[tuple[Tile, ...], ...]
    readers: dict[int, int]

    @ft.cached_property
    def order(self) -> Order:
        """The order of copies that keeps the least memory where the source is freed on the way."""
        if all(_run_bytes(tile, box) >= _PAGE_BYTES for box, tiles in self.pairs for tile in tiles):
            return "source"
        by_target, staged = self.peak_bytes("target"), self.peak_bytes("staged")
        return "target" if by_target <= 1.25 * staged else "staged"

    @ft.cached_property
    def copies(self) -> tuple[tuple[tuple[int, Any, Any], ...], ...]:
        """Per target and tile the sender, and what NumPy indexes the target and the sender's shard with."""
        return tuple(
            tuple((tile.sender, slices(tile.target), slices(tile.source)) for tile in tiles) for tiles in self.tiles
        )

    @ft.cached_property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each target."""
        return tuple(_sizes(box) for box in self.targets)

    @property
    def pairs(self) -> Iterable[tuple[Box, tuple[Tile, ...]]]:
        return zip(self.targets, self.tiles, strict=True)

    def peak_bytes(self, order: Order) -> int:
        """The most bytes beside the source's own, when each of its shards is freed after its last use."""
        shards: dict[int, int] = collections.Counter()
        for tile in it.chain.from_iterable(self.tiles):
            shards[tile.sender] += tile.bytes
        held, peak = 0, 0 if order == "target" else max(shards.values(), default=0)
        if order == "source":
            return peak
        left = dict(self.readers)
        for tiles in self.tiles:
            held += sum(tile.bytes for tile in tiles)
            peak = max(peak, held)
            for tile in tiles:
                left[tile.sender] -= 1
                if order == "staged":
                    held -= tile.bytes
                elif not left[tile.sender]:
                    held -= shards[tile.sender]
        return peak


def assembly(tile_map: TileMap, targets: Sequence[tuple[int, Box]]) -> Assembly:
    """The copies for `targets`, pairs of device and box; replicas of a box are made once."""
    first = {box: device for device, box in reversed(targets)}
    wanted = {device: [] for device in first.values()}
    for tile in tile_map.tiles:
        if tile.receiver in wanted:
            wanted[tile.receiver].append(tile)
    boxes = tuple(dict.fromkeys(box for _, box in targets))
    tiles = tuple(tuple(wanted[first[box]]) for box in boxes)
    return Assembly(boxes, tiles, collections.Counter(tile.sender for each in tiles for tile in each))


def assemble(
    shape: tuple[int, ...],
    dtype: Any,
    sharding: jax.sharding.Sharding,
    plan: Assembly,
    shards: Mapping[int, Any],
    free: Callable[[int], None] | None = None,
) -> jax.Array:
    """Makes an array on the CPU backend from the shards of another.

    **Arguments:**

    - `shape`, `dtype`, `sharding`: of the array.
    - `plan`: the copies.
    - `shards`: the source's shards as single-device arrays, by device number.
    - `free`: called with each device number when its shard is not read any more; keeps the source if not given.

    **Returns:**

    The array, whose shards are buffers that were filled once; where each is a shard of the source, or rows of one that
    is replicated, they share the source's memory. JAX knows that it is shared and will not write to it if one of the
    two is donated. On a process that owns none of its devices, one without addressable shards.
    """
    if all(
        len(tiles) == 1 and shards[tiles[0].sender].shape == size
        for tiles, size in zip(plan.tiles, plan.sizes, strict=True)
    ):
        built = [np.asarray(shards[tile.sender]) for (tile,) in plan.tiles]
        if free is not None:
            for sender in shards:
                free(sender)
    elif free is None:
        built = _in_one_go(plan, np.dtype(dtype), shards)
    else:
        built = _freeing(plan, np.dtype(dtype), shards, free)
    if not built:  # no device of the target is this process's, and of a replicated array JAX would ask for a shard
        return jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=dtype)
    if len(built) == 1:
        return jax.make_array_from_callback(shape, sharding, lambda _: built[0], dtype=dtype)
    buffers = dict(zip(plan.targets, built, strict=True))  # JAX asks once per device, by index
    return jax.make_array_from_callback(shape, sharding, lambda index: buffers[as_box(index or (), shape)], dtype=dtype)


def slices(box: Box) -> tuple[Any, ...]:
    """A box as what NumPy indexes with; the ellipsis makes it a view at rank 0 too."""
    return (*[slice(start, stop) for start, stop in box], ...)


def _in_one_go(plan: Assembly, dtype: np.dtype, shards: Mapping[int, Any]) -> list[np.ndarray]:
    views = {sender: np.asarray(shards[sender]) for sender in plan.readers}
    shared = _shared(plan, views)
    if shared is not None:
        return shared
    built = memory_of(plan.sizes, dtype)
    if sum(buffer.nbytes for buffer in built) < _PARALLEL_BYTES:
        for buffer, copies in zip(built, plan.copies, strict=True):
            for sender, target, source in copies:
                buffer[target] = views[sender][source]
        return built
    tasks = [
        [(buffer[target], views[sender][source]) for sender, target, source in copies]
        for buffer, copies in zip(built, plan.copies, strict=True)
    ]
    _run(shared_out(tasks, os.cpu_count() or 1))
    return built


def _shared(plan: Assembly, views: Mapping[int, np.ndarray]) -> list[np.ndarray] | None:
    """The new shards as parts of old ones, where that keeps no more memory than copies take."""
    if any(len(copies) != 1 for copies in plan.copies):
        return None
    parts = [views[sender][source] for ((sender, _, source),) in plan.copies]
    # Replicas in one memory are kept once.
    kept = {view.__array_interface__["data"][0]: view.nbytes for view in views.values()}
    is_less = sum(kept.values()) <= sum(part.nbytes for part in parts)
    return parts if is_less and all(part.flags.c_contiguous for part in parts) else None


def shared_out(tasks: list[Any], threads: int) -> list[Any]:
    """The copies for threads to take in turn, from lists of those for each new shard."""
    # Two threads that fill one new shard often touch the same large page first, and the kernel clears it for both. But
    # where the shards do not come out even, the last ones would leave threads without work.
    even = len(tasks) % threads == 0 or len(tasks) >= 4 * threads
    return tasks if even else [[pair] for task in tasks for pair in task]


def _freeing(
    plan: Assembly, dtype: np.dtype, shards: Mapping[int, Any], free: Callable[[int], None]
) -> list[np.ndarray]:
    for sender in shards:
        if sender not in plan.readers:
            free(sender)
    if plan.order == "target":
        return _target_by_target(plan, shards, dtype, free)
    # The kernel gives memory page by page, when it is first written: what is not yet filled takes none.
    built = [aligned(_sizes(box), dtype) for box in plan.targets]
    if plan.order == "source":
        _source_by_source(_by_sender(plan, map(_parts, built, plan.tiles)), shards, free)
        return built
    _source_by_source(_by_sender(plan, map(_split, built, plan.tiles)), shards, free)
    for place, (box, tiles) in enumerate(plan.pairs):
        buffer = aligned(_sizes(box), dtype)
        _copy_all(list(zip(_parts(buffer, tiles), _split(built[place], tiles), strict=True)))
        built[place] = buffer
    return built


def _source_by_source(
    places: dict[int, list[tuple[Tile, np.ndarray]]], shards: Mapping[int, Any], free: Callable[[int], None]
) -> None:
    for sender, uses in places.items():
        view = np.asarray(shards[sender])
        _copy_all([(place, view[slices(tile.source)]) for tile, place in uses])
        del view
        free(sender)


def _by_sender(plan: Assembly, places: Iterable[Iterable[np.ndarray]]) -> dict[int, list[tuple[Tile, np.ndarray]]]:
    """Per sender its tiles, each with its place; `places` has those of each target's tiles."""
    found: dict[int, list[tuple[Tile, np.ndarray]]] = {sender: [] for sender in plan.readers}
    for tiles, those in zip(plan.tiles, places, strict=True):
        for tile, place in zip(tiles, those, strict=True):
            found[tile.sender].append((tile, place))
    return found


def _parts(buffer: np.ndarray, tiles: Sequence[Tile]) -> list[np.ndarray]:
    """The part of a new shard where each tile belongs."""
    return [buffer[slices(tile.target)] for tile in tiles]


def _split(buffer: np.ndarray, tiles: Sequence[Tile]) -> list[np.ndarray]:
    """As `_parts`, but each tile's bytes lie together: one tile after another in the memory of the new shard."""
    flat, start, pieces = buffer.reshape(-1), 0, []
    for tile in tiles:
        stop = start + volume(tile.box)
        pieces.append(flat[start:stop].reshape(_sizes(tile.box)))
        start = stop
    return pieces


def _target_by_target(
    plan: Assembly, shards: Mapping[int, Any], dtype: np.dtype, free: Callable[[int], None]
) -> list[np.ndarray]:
    built = []
    left = dict(plan.readers)
    for box, tiles in plan.pairs:
        buffer = aligned(_sizes(box), dtype)
        _copy_all([(buffer[slices(t.target)], np.asarray(shards[t.sender])[slices(t.source)]) for t in tiles])
        built.append(buffer)
        for tile in tiles:
            left[tile.sender] -= 1
            if not left[tile.sender]:
                free(tile.sender)
    return built


def _copy_all(copies: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    """Copies each pair's second array into its first, large ones on all cores: NumPy lets other threads run."""
    if len(copies) < 2 or sum(target.nbytes for target, _ in copies) < _PARALLEL_BYTES:
        _copy(copies)
    else:
        _run([[pair] for pair in copies])


def _run(tasks: Sequence[Sequence[tuple[np.ndarray, np.ndarray]]]) -> None:
    with ThreadPoolExecutor(min(len(tasks), os.cpu_count() or 1)) as pool:
        list(pool.map(_copy, tasks))


def _copy(copies: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
    for target, source in copies:
        np.copyto(target, source)


def memory_of(shapes: Sequence[tuple[int, ...]], dtype: np.dtype) -> list[np.ndarray]:
    """Memory for several shards; those of a small array lie in one block."""
    if sum(math.prod(shape) for shape in shapes) * dtype.itemsize > _BLOCK_BYTES:
        return [aligned(shape, dtype) for shape in shapes]
    return buffers([(shape, dtype) for shape in shapes])


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Memory for a shard."""
    return buffers([(shape, dtype)])[0]


def _sizes(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def _run_bytes(tile: Tile, box: Box) -> int:
    """How many bytes of a tile lie together in the shard that it goes to."""
    sizes, whole = _sizes(tile.target), _sizes(box)
    run = 1
    for size, all_of_it in zip(reversed(sizes), reversed(whole), strict=True):
        run *= size
        if size != all_of_it:
            break
    return run * tile.bytes // max(1, math.prod(sizes))
