"""Shardings in the text of programs: `{devices=[2,1,4]<=[8] last_tile_dim_replicate}`."""

import math
import re
from collections.abc import Sequence

import numpy as np

from .cuts import HOLE, Cut, Cuts
from .verdict import Unjudged


_START = ", sharding={"
_TILED = re.compile(
    r"devices=\[([\d,]+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))(.*)"
)


def shardings_in(attributes: str) -> list[str]:
    """The shardings in the attributes of an instruction, one for each array."""
    start = attributes.find(_START)
    if start < 0:
        return []
    start += len(_START) - 1
    depth = 0
    stop = start
    while depth or stop == start:
        depth += (attributes[stop] == "{") - (attributes[stop] == "}")
        stop += 1
    text = attributes[start + 1 : stop - 1]
    if not text.startswith("{"):
        return [text]
    return re.findall(r"\{([^{}]*)\}", text)


def axes_of(
    cuts: Cuts, sharding: str, shape: Sequence[int], local: Sequence[int]
) -> list[Cut]:
    """The cuts that a sharding makes of an array of `shape`, whose shards have the shape
    `local`. Shards of a dimension that the devices do not divide have holes at its end.
    """
    if not shape:
        return []
    if not sharding or sharding.startswith(("replicated", "maximal")):
        if tuple(shape) != tuple(local):
            raise Unjudged("an array whose sharding the program does not say")
        return [cuts.whole(size) for size in shape]
    found = _TILED.search(sharding)
    if found is None or "manual" in sharding or "last_tile_dims" in sharding:
        raise Unjudged(f"the sharding {sharding}")
    tiles = _numbers(found[1])
    if found[2]:
        grid = np.arange(math.prod(tiles)).reshape(_numbers(found[2]))
        if found[3]:
            grid = grid.transpose(_numbers(found[3]))
        grid = grid.reshape(tiles)
    else:
        grid = np.array(_numbers(found[4])).reshape(tiles)
    if grid.size != cuts.devices:
        raise Unjudged("a sharding over other devices")
    places = np.zeros((len(shape), cuts.devices), np.int64)
    for at in range(len(shape)):
        index = np.arange(tiles[at]).reshape(
            [-1 if axis == at else 1 for axis in range(grid.ndim)]
        )
        places[at, grid.ravel()] = np.broadcast_to(index, grid.shape).ravel()
    made = []
    for at, size in enumerate(shape):
        if local[at] != -(-size // tiles[at]):
            raise Unjudged("a shard of another size than its sharding says")
        starts = places[at] * local[at]
        if local[at] * tiles[at] == size:
            made.append(cuts.from_starts(starts, local[at]))
            continue
        indices = starts[:, None] + np.arange(local[at])
        made.append(cuts.from_indices(np.where(indices < size, indices, HOLE)))
    return made


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))
