"""Shardings in the text of programs: `{devices=[2,1,4]<=[8] last_tile_dim_replicate}`."""

import math
import re
from collections.abc import Sequence

import numpy as np

from ..hlo_text import parts_of
from ..mesh_text import (
    axis_sizes,
    device_ids,
    numbers_in,
    sub_axes_in,
    transposed_iota,
)
from .cuts import HOLE, MOST_WRITTEN, Cut, Cuts
from .verdict import Unjudged


# In the text of JAX 0.12: `mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)), [{'x'}, {}]`.
_NAMED = re.compile(
    r"mesh\[(?P<axes>[^\]]*)\](?:,? ?device_ids=\((?P<ids>[^()]*(?:\([^()]*\))?)\))?"
    r",? \[(?P<dimensions>.*?)\](?P<rest>.*)"
)
_COMMENT = re.compile(r"/\*.*?\*/")
_REPLICATED = ("replicated", "maximal", "mesh[], replicated")
_START = ", sharding={"
_TILED = re.compile(
    r"devices=\[(?P<tiles>[\d,]+)\]"
    r"(?:<=\[(?P<grid>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?|(?P<devices>[\d,]+))"
)
# The kinds of the dimensions of the tiles that are no dimensions of the array.
_SUBGROUPS = re.compile(r"last_tile_dims=\{([^{}]*)\}")
_REPEATED = "last_tile_dim_replicate"
# The same in the text of JAX 0.12: the axes of the mesh that are no longer whole.
_MANUAL_AXES = re.compile(r", manual=\{([^{}]*)\}")


class WrongShard(Unjudged):
    """The reason that the shape of an array of one device is not that of a shard of its
    sharding.
    """


def shardings_in(attributes: str) -> list[str]:
    """The shardings in the attributes of an instruction, one for each array."""
    start = attributes.find(_START)
    if start < 0:
        return []
    start += len(_START) - 1
    open_braces = 0
    stop = start
    while open_braces or stop == start:
        open_braces += (attributes[stop] == "{") - (attributes[stop] == "}")
        stop += 1
    text = attributes[start + 1 : stop - 1]
    if not text.startswith("{"):
        return [text]
    # XLA writes `/*index=5*/` before some elements.
    text = _COMMENT.sub("", text)
    return [part[1:-1] for part in parts_of(f"({text})")]


def cuts_of(
    cuts: Cuts,
    sharding_text: str,
    shape: Sequence[int],
    shard_shape: Sequence[int],
) -> list[Cut]:
    """The cut of each dimension of an array of `shape` with this sharding, whose shards
    have the shape `shard_shape`. Shards of a dimension that the devices do not divide
    have holes at its end.
    """
    if not shape:
        return []
    key = (sharding_text, tuple(shape), tuple(shard_shape))
    dim_cuts = cuts.by_sharding.get(key)
    if dim_cuts is None:
        dim_cuts = _cuts_of(cuts, sharding_text, shape, shard_shape)
        cuts.by_sharding[key] = dim_cuts
    return dim_cuts


def _cuts_of(
    cuts: Cuts,
    sharding_text: str,
    shape: Sequence[int],
    shard_shape: Sequence[int],
) -> list[Cut]:
    """As `cuts_of`, asked once."""
    if not sharding_text or sharding_text.startswith(_REPLICATED):
        if tuple(shape) != tuple(shard_shape):
            raise Unjudged("an array whose sharding the program does not say")
        return [cuts.whole(size) for size in shape]
    named = _NAMED.match(sharding_text)
    if named and "manual" not in named["rest"]:
        dimensions = re.findall(r"\{([^{}]*)\}", named["dimensions"])
        places, tiles = _named_places(named, dimensions, cuts.devices)
        return _tiled(
            cuts=cuts, places=places, tiles=tiles, shape=shape, shard_shape=shard_shape
        )
    match = _TILED.search(sharding_text)
    if match is None or "manual" in sharding_text or "last_tile_dims" in sharding_text:
        raise Unjudged(f"the sharding {sharding_text}")
    places = _places(match, cuts.devices)
    return _tiled(
        cuts=cuts,
        places=places,
        tiles=numbers_in(match["tiles"]),
        shape=shape,
        shard_shape=shard_shape,
    )


def _places(tiled: re.Match[str], devices: int) -> np.ndarray:
    """The tile of each device in each dimension of a sharding in tiles, an array of
    shape (dimensions, devices). The dimensions of tiles that are no dimensions of the
    array come last. `tiled` is a match of `_TILED`.
    """
    tiles = numbers_in(tiled["tiles"])
    if tiled["grid"]:
        grid = transposed_iota(tiled["grid"], tiled["order"]).reshape(tiles)
    else:
        grid = np.array(numbers_in(tiled["devices"])).reshape(tiles)
    if grid.size != devices:
        raise Unjudged("a sharding over other devices")
    places = np.zeros((len(tiles), devices), np.int64)
    places[:, grid.ravel()] = np.indices(tiles).reshape(len(tiles), -1)
    return places


def cuts_of_part(
    cuts: Cuts,
    sharding_text: str,
    shape: Sequence[int],
    shard_shape: Sequence[int],
) -> list[Cut]:
    """As `cuts_of`, for an array within the body of a `shard_map` that is manual in
    some axes only. Its shape is that of one of the parts over these axes.
    """
    sharding_text = _SUBGROUPS.sub(_REPEATED, sharding_text)
    sharding_text = _MANUAL_AXES.sub("", sharding_text)
    return cuts_of(cuts, sharding_text, shape, shard_shape)


def parts_of_devices(sharding: str, devices: int) -> np.ndarray:
    """The number of the part over the manual axes that each device has."""
    named = _NAMED.match(sharding)
    axes = _MANUAL_AXES.search(sharding)
    if named and axes:
        places, _ = _named_places(named, [axes[1]], devices)
        return places[0]
    tiled = _TILED.search(sharding)
    subgroups = _SUBGROUPS.search(sharding)
    if tiled is None or subgroups is None:
        raise Unjudged(f"the sharding {sharding}")
    subgroup_kinds = [kind.strip() for kind in subgroups[1].split(",")]
    if subgroup_kinds.count("manual") != 1:
        raise Unjudged(f"the sharding {sharding}")
    return _places(tiled, devices)[subgroup_kinds.index("manual") - len(subgroup_kinds)]


def _tiled(
    cuts: Cuts,
    places: np.ndarray,
    tiles: Sequence[int],
    shape: Sequence[int],
    shard_shape: Sequence[int],
) -> list[Cut]:
    """The cut of each dimension of an array in tiles. `places` has the tile of each
    device in each dimension, an array of shape (dimensions, devices), and `tiles` the
    number of tiles.
    """
    cuts_of_dims = []
    for dim, size in enumerate(shape):
        if shard_shape[dim] != -(-size // tiles[dim]):
            raise WrongShard("a shard of another size than its sharding says")
        starts = places[dim] * shard_shape[dim]
        if shard_shape[dim] * tiles[dim] == size:
            cuts_of_dims.append(cuts.from_starts(starts, shard_shape[dim]))
            continue
        if shard_shape[dim] * len(starts) > MOST_WRITTEN:
            raise Unjudged("an uneven sharding that is too long to be written out")
        indices = starts[:, None] + np.arange(shard_shape[dim])
        cuts_of_dims.append(cuts.from_indices(np.where(indices < size, indices, HOLE)))
    return cuts_of_dims


def _named_places(
    named: re.Match[str],
    dimensions: Sequence[str],
    devices: int,
) -> tuple[np.ndarray, list[int]]:
    """The tile of each device in each dimension, and the number of tiles, of a sharding
    over the axes of a mesh: a match of `_NAMED`. `dimensions` has the text of the axes
    of each: "'x','y':(2)4".
    """
    sizes = axis_sizes(named["axes"])
    if math.prod(sizes.values()) != devices or "unreduced" in named["rest"]:
        raise Unjudged("a sharding over other devices, or of an unfinished sum")
    ids = device_ids(named["ids"]) if named["ids"] else np.arange(devices)
    coordinates = dict(
        zip(sizes, np.unravel_index(np.arange(devices), [*sizes.values()]), strict=True)
    )
    places = []
    tiles = []
    for dimension in dimensions:
        tile = np.zeros(devices, np.int64)
        tile_count = 1
        for sub_axis in sub_axes_in(dimension):
            axis_size = sizes[sub_axis.axis]
            size = sub_axis.size or axis_size
            stride = axis_size // (sub_axis.outer_size * size)
            tile = tile * size + coordinates[sub_axis.axis] // stride % size
            tile_count *= size
        tile_by_device = np.zeros(devices, np.int64)
        tile_by_device[ids] = tile
        places.append(tile_by_device)
        tiles.append(tile_count)
    return np.array(places), tiles
