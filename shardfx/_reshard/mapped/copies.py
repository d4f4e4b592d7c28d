"""Cuts as NumPy copies in the memory that the devices of this process's CPU share."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from ..._convert.values import chunks, constant, fill, write
from ..._convert.views import source_view, target_view
from ..._ground.boxes import Box, as_box
from ..tiles.host_copies import aligned
from .cuts import Cut


_PARALLEL_BYTES = 8 << 20
_CHUNK_ELEMENTS = 1 << 20
Shards = Mapping[tuple[str, int], np.ndarray]
Read = Callable[[str, Box], np.ndarray]


def assembled(
    shape: tuple[int, ...],
    dtype: Any,
    sharding: jax.sharding.Sharding,
    targets: Sequence[Box],
    cuts: Sequence[Sequence[Cut]],
    shards: Shards,
    read: Read,
    pool: ThreadPoolExecutor,
) -> jax.Array:
    """Makes an array on the CPU from the shards of others.

    **Arguments:**

    - `shape`, `dtype`, `sharding`: of the array.
    - `targets`: its different boxes; replicas share one buffer.
    - `cuts`: what each of them is made of.
    - `shards`: by path and device number.
    - `read`: a box of a whole array, for what takes two.
    - `pool`: threads to copy with: NumPy lets others run meanwhile.

    **Returns:**

    The array, whose shards are buffers that were filled once.
    """
    built = [aligned(tuple(stop - start for start, stop in box), np.dtype(dtype)) for box in targets]
    tasks = [(buffer, cut) for buffer, own in zip(built, cuts, strict=True) for cut in own]
    if sum(buffer.nbytes for buffer in built) < _PARALLEL_BYTES or len(tasks) == 1:
        for buffer, cut in tasks:
            _copy(buffer, cut, shards, read)
    else:
        list(pool.map(lambda task: _copy(task[0], task[1], shards, read), tasks))
    by_box = dict(zip(targets, built, strict=True))
    if len(built) == 1:
        return jax.make_array_from_callback(shape, sharding, lambda _: built[0], dtype=dtype)
    return jax.make_array_from_callback(shape, sharding, lambda index: by_box[as_box(index or (), shape)], dtype=dtype)


def _copy(buffer: np.ndarray, cut: Cut, shards: Shards, read: Read) -> None:
    piece = cut.piece
    if piece.value.path is None:
        with np.errstate(over="ignore", invalid="ignore"):
            target_view(buffer, piece)[...] = constant(piece)
        return
    if piece.value.scale is not None:
        whole = tuple((0, size) for size in buffer.shape)
        for part in chunks(piece, _CHUNK_ELEMENTS):
            fill(buffer, whole, part, read)
        return
    write(target_view(buffer, piece), source_view(shards[piece.value.path, cut.sender], piece), piece)
