"""Making what is planned: one array of the target after the other, from live arrays."""

import dataclasses
import functools as ft
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..._convert.pieces import Piece, Scale, within
from ..._convert.values import fill
from ..._ground.boxes import Box, as_box
from .copies import Coming, Shards, coming, data_of_keys
from .exchange import Block, Exchange, blocks, joined, program, sharding_of
from .work import Scaled, Work


Move = Callable[[jax.Array, Any], jax.Array]
Joined = dict[tuple[str, tuple[Any, ...]], jax.Array]


@dataclasses.dataclass
class Means:
    """What the arrays of one tree are made with.

    **Arguments:**

    - `arrays`: the source's arrays by path.
    - `move`: moves an array to a sharding, for scales.
    - `limit_bytes`: how much may be used beside source and target.
    - `pool`: threads to copy with.
    - `shards`: the arrays' shards of this process.
    - `joined_up`: what programs take of the arrays, by path and devices; filled on the way.
    """

    arrays: Mapping[str, Any]
    move: Move
    limit_bytes: int | None
    pool: ThreadPoolExecutor
    shards: Shards
    joined_up: Joined = dataclasses.field(default_factory=dict)

    def forget(self, path: str) -> None:
        """Lets go of an array of which nothing more is made."""
        self.shards.forget(path)
        for key in [key for key in self.joined_up if key[0] == path]:
            del self.joined_up[key]


def begun(work: Work, means: Means) -> Callable[[], jax.Array]:
    """Begins to make one array.

    **Arguments:**

    - `work`: how; not "plain".
    - `means`: with what.

    **Returns:**

    A function that waits for what other threads copy, and gives the array. Devices may still have to compute it.
    """
    arrays = means.arrays
    data = {name: data_of_keys(arrays[name]) for name in work.sources}
    if work.is_elsewhere:
        there = ft.partial(_itself, _made_of(work, []))
    elif 0 in work.shape or work.way == "host":
        there = ft.partial(_itself, _by_host(work, data))
    elif work.way == "copies":
        there = _by_copies(work, data, means).there
    else:
        there = ft.partial(_itself, _by_programs(work, data, means))
    if jnp.issubdtype(work.leaf.dtype, jax.dtypes.prng_key):
        return ft.partial(_keys, there, arrays[work.sources[0]])
    return there


def _made_of(work: Work, shards: Sequence[jax.Array]) -> jax.Array:
    sharding = work.leaf.sharding
    assert sharding is not None
    return jax.make_array_from_single_device_arrays(work.shape, sharding, shards, dtype=work.dtype)


def _itself(made: jax.Array) -> jax.Array:
    return made


def _keys(there: Callable[[], jax.Array], like: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(there(), impl=jax.random.key_impl(like))


def _reader(data: Mapping[str, Any]) -> Callable[[str, Box], np.ndarray]:
    """Boxes of whole arrays, put together from shards."""

    def read(path: str, box: Box) -> np.ndarray:
        leaf = data[path]
        out = np.empty([stop - start for start, stop in box], leaf.dtype)
        parts: list[tuple[Box, Any]]
        if isinstance(leaf, jax.Array):
            parts = [(as_box(shard.index, leaf.shape), shard.data) for shard in leaf.addressable_shards]
        else:
            parts = [(tuple((0, size) for size in leaf.shape), leaf)]
        for own, value in parts:
            both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(own, box, strict=True)]
            if all(low < high for low, high in both):
                out[_within(both, box)] = np.asarray(value)[_within(both, own)]
        return out

    return read


def _within(part: Sequence[tuple[int, int]], box: Box) -> tuple[slice, ...]:
    return tuple(slice(low - first, high - first) for (low, high), (first, _) in zip(part, box, strict=True))


def _by_copies(work: Work, data: Mapping[str, Any], means: Means) -> Coming:
    assert work.leaf.sharding is not None
    where = (work.leaf.sharding, work.targets, work.fillings, work.sources)
    return coming(work.shape, work.dtype, *where, means.shards, _reader(data), means.pool)


def _by_host(work: Work, data: Mapping[str, Any]) -> jax.Array:
    read, sharding = _reader(data), work.leaf.sharding
    assert sharding is not None
    known: dict[Box, np.ndarray] = {}

    def shard(index: Any) -> np.ndarray:
        box = as_box(index or (), work.shape)
        if box not in known:
            known.clear()
            known[box] = np.zeros([stop - start for start, stop in box], work.dtype)
            for piece in work.made.pieces:
                for part in within(piece, box):
                    fill(known[box], box, part, read)
        return known[box]

    return jax.make_array_from_callback(work.shape, sharding, shard, dtype=work.dtype)


def _by_programs(work: Work, data: Mapping[str, Any], means: Means) -> jax.Array:
    sharding, devices = work.leaf.sharding, work.devices
    assert sharding is not None
    every = dict(data)
    for one in work.scaled:
        every[one.name] = _scaled(one, data[one.path], data[one.scale.path], means.move)
    target = (*sharding.shard_shape(work.leaf.shape), *work.shape[len(work.leaf.shape) :])
    with jax.sharding.use_abstract_mesh(sharding_of(devices).mesh.abstract_mesh):
        out = _constants(work, target)
        for step, places in _steps(work, means.limit_bytes):
            sources = tuple(work.source_shapes[path] for path in step.paths)
            run = program(devices, step.rounds, sources, (target, work.dtype), out is None)
            given = [
                _block(devices, path, source, every, means.joined_up)
                for path, source in zip(step.paths, sources, strict=True)
            ]
            out = run(places, *given, *(() if out is None else (out,)))
            if means.limit_bytes is not None or _crosses(devices):
                # Programs that talk to other processes block threads of the CPU's runtime; several at once can block
                # them all.
                jax.block_until_ready(out)
    assert out is not None
    parts = {shard.device: shard.data for shard in out.addressable_shards}
    mine = [parts[device] for device in sharding.addressable_devices_indices_map(work.leaf.shape)]
    mine = [part if part.shape == target else part.reshape(target) for part in mine]
    # Programs compute in device memory; what shall lie in the host's goes there afterwards.
    kind = sharding.memory_kind
    return _made_of(work, [_in_memory(part, kind) for part in mine])


def _in_memory(shard: jax.Array, kind: str | None) -> jax.Array:
    if kind is None or shard.sharding.memory_kind == kind:
        return shard
    return jax.device_put(shard, shard.sharding.with_memory_kind(kind))


def _block(
    devices: tuple[Any, ...], path: str, source: Block, every: Mapping[str, Any], joined_up: Joined
) -> jax.Array:
    """The shards of an array as a program takes them; a stack that many leaves are made of is joined once."""
    if (path, devices) not in joined_up:
        shards = {shard.device: shard.data for shard in every[path].addressable_shards}
        here = {device: _in_memory(shard, device.default_memory().kind) for device, shard in shards.items()}
        joined_up[path, devices] = blocks(devices, *source, here)
    return joined_up[path, devices]


def _crosses(devices: Sequence[Any]) -> bool:
    return devices[0].platform == "cpu" and len({device.process_index for device in devices}) > 1


@ft.lru_cache(maxsize=4096)
def _steps(work: Work, limit_bytes: int | None) -> tuple[tuple[Exchange, jax.Array], ...]:
    """The programs of an array, and the places that they begin at, on the devices."""
    where = sharding_of(work.devices)
    found = []
    for step in work.exchanges(limit_bytes):
        rows = step.places
        placed = jax.make_array_from_callback(rows.shape, where, lambda index, rows=rows: rows[index])
        found.append((step, placed))
    return tuple(found)


def _constants(work: Work, target: tuple[int, ...]) -> jax.Array | None:
    """The shards with the numbers that no array gives; `None` where there are none."""
    constants: dict[int, list[Piece]] = {}
    for cut in work.cuts.made:
        if cut.piece.value.path is None:
            constants.setdefault(cut.receiver, []).append(cut.piece)
    if not constants:
        return None
    first, box = joined(target)[0], tuple((0, size) for size in target)

    def shard(index: Any) -> np.ndarray:
        out = np.zeros(target, work.dtype)
        for piece in constants.get((index[0].start or 0) // first, ()):
            fill(out, box, piece, _nothing)
        return out.reshape(joined(target))

    whole = (len(work.devices) * first, *joined(target)[1:])
    return jax.make_array_from_callback(whole, sharding_of(work.devices), shard, dtype=work.dtype)


def _nothing(path: str, box: Box) -> np.ndarray:
    raise AssertionError(path)


def _scaled(one: Scaled, x: jax.Array, by: jax.Array, move: Move) -> jax.Array:
    """An array times its scales, where it lies."""
    sharding = x.sharding
    if isinstance(sharding, NamedSharding):
        by = move(by, NamedSharding(sharding.mesh, PartitionSpec()))
    else:
        by = move(by, sharding)
    return _times(one.scale, one.dtype, sharding)(x, by)


@ft.lru_cache(maxsize=64)
def _times(scale: Scale, dtype: Any, sharding: Any) -> Any:
    def run(x: jax.Array, by: jax.Array) -> jax.Array:
        by = by.astype(jnp.float32)
        for dim, size in enumerate(scale.block):
            by = jnp.repeat(by, size, axis=dim)
        by = by[tuple(slice(size) for size in x.shape)]
        return (x.astype(jnp.float32) * by).astype(dtype)

    return jax.jit(run, out_shardings=sharding)
