"""The assembly of the target's arrays from live arrays, one array after the other.

If both sides have the same devices, one program cuts out the pieces, exchanges them and writes them into shards. It
takes a block of each side's shape on every device, since an argument has one shape. If the sides have different
devices, three programs avoid these blocks: the source's devices concatenate their pieces, all devices exchange these
parcels, and the target's devices write the pieces into shards.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..._convert import Piece, Scale, constant, target_view
from .cuts import first_casts
from .exchange import (
    AXIS,
    Block,
    Exchange,
    PieceForm,
    Round,
    bitcast,
    blocks,
    carried,
    cut_out,
    joined,
    mapped,
    program,
    put_in,
    sent_dtype,
    sharding_of,
)
from .host import LocalShards, coming
from .work import Assembly, ScaledArray


# For each round: how many elements a device sends, and the pairs of sender and receiver.
Parcel = tuple[int, tuple[tuple[int, int], ...]]


def _sent_shape(form: PieceForm) -> list[int]:
    """The shape of a piece on the wire, where repeated elements occur once."""
    return [count for _, own in form.source for count, _ in own]


@ft.lru_cache(maxsize=256)
def cutting(devices: tuple[Any, ...], rounds: tuple[Round, ...], sources: tuple[Block, ...], block: Block) -> Any:
    """A jitted function on the source's devices: each slices its pieces out of its shards and concatenates them to one
    block.
    """
    dtype, (shape, to) = sources[0][1], block
    # Casts before sending act on values, not on their bits.
    own = carried(dtype, devices) if sent_dtype(rounds[0].form, dtype) == dtype else dtype

    def run(places: jax.Array, *given: jax.Array) -> jax.Array:
        shards = [bitcast(one.reshape(shape), own) for one, (shape, _) in zip(given, sources, strict=True)]
        sent, start = jnp.zeros(shape, to), 0
        for at, step in enumerate(rounds):
            # Without the barrier XLA could cut out and keep all pieces before it writes the first.
            shards, sent = jax.lax.optimization_barrier((shards, sent))
            piece = bitcast(cut_out(step.form, shards[step.number], places[0, at]).reshape(-1), to)
            sent, start = jax.lax.dynamic_update_slice(sent, piece, (start,)), start + piece.size
        return sent

    return mapped(devices, run, 1 + len(sources))


@ft.lru_cache(maxsize=256)
def sending(devices: tuple[object, ...], found: tuple[Parcel, ...]) -> Any:
    """A jitted function in which devices send blocks to each other by permutes. It donates its argument."""

    def run(sent: jax.Array) -> jax.Array:
        start = 0
        for size, pairs in found:
            if pairs:
                piece = jax.lax.ppermute(jax.lax.slice(sent, (start,), (start + size,)), AXIS, pairs)
                sent = jax.lax.optimization_barrier(jax.lax.dynamic_update_slice(sent, piece, (start,)))
            start += size
        return sent

    return mapped(devices, run, 1, 0)


@ft.lru_cache(maxsize=256)
def putting(
    devices: tuple[object, ...], rounds: tuple[Round, ...], source_dtype: object, target: Block, begins: bool
) -> Any:
    """A jitted function on the target's devices: each writes the received pieces into its shard.

    **Arguments:**

    - `begins`: whether it makes the shards. If not, it takes them as its last argument and returns them.
    """
    own, wire = carried(target[1], devices), sent_dtype(rounds[0].form, source_dtype)
    casts = rounds[0].form.casts
    is_ready = first_casts(casts, source_dtype) == len(casts)

    def run(places: jax.Array, sent: jax.Array, *given: jax.Array) -> jax.Array:
        out = jnp.zeros(target[0], own) if begins else bitcast(given[0].reshape(target[0]), own)
        start = 0
        for at, step in enumerate(rounds):
            sent, out = jax.lax.optimization_barrier((sent, out))
            shape = _sent_shape(step.form)
            piece = jax.lax.slice(sent, (start,), (start + math.prod(shape),)).reshape(shape)
            piece, start = piece if is_ready else bitcast(piece, wire), start + piece.size
            out = put_in(step, out, piece, source_dtype, places[0, at])
        return bitcast(out.reshape(joined(target[0])), target[1])

    return mapped(devices, run, 2) if begins else mapped(devices, run, 3, 2)


@ft.lru_cache(maxsize=256)
def zeros(devices: tuple[object, ...], block: Block) -> Any:
    """A jitted function in which each device makes a block of zeros."""
    return jax.jit(lambda: jnp.zeros((len(devices) * block[0][0],), block[1]), out_shardings=sharding_of(devices))


@dataclasses.dataclass
class Means:
    """The arrays, memory limits and caches that the assembly of every array of one tree uses.

    **Arguments:**

    - `arrays`: the source's arrays by path.
    - `move`: moves an array to a sharding; needed for scales alone.
    - `limit_bytes`: bytes that may be used beside source and target.
    - `most_bytes`: bytes that programs may take of a device without a limit, if the two sides have different devices.
    - `pool`: threads to copy with, if any.
    - `shards`: the arrays' shards of this process.
    - `joined_up`: the blocks that programs take of the arrays, by the paths of an array and of its scales, and devices;
        a cache.
    - `begun`, `begun_bytes`: the arrays in flight that programs make on other devices than the source's, and the bytes
        that these programs take.
    """

    arrays: Mapping[str, Any]
    move: Callable[[jax.Array, Any], jax.Array] | None
    limit_bytes: int | None
    most_bytes: int
    pool: ThreadPoolExecutor | None
    shards: LocalShards
    joined_up: dict[tuple[tuple[str, ...], object], jax.Array] = dataclasses.field(default_factory=dict)
    begun: list[jax.Array] = dataclasses.field(default_factory=list)
    begun_bytes: int = 0

    def wait_for(self, count: int, sharers: int) -> None:
        """Waits for programs in flight if `count` more bytes would exceed the limit."""
        most = self.most_bytes * sharers if self.limit_bytes is None else self.limit_bytes
        if self.begun_bytes + count > most:
            # Arrays that a later program reused are deleted.
            jax.block_until_ready([one for one in self.begun if not one.is_deleted()])
            self.begun.clear()
            self.begun_bytes = 0
        self.begun_bytes += count

    def forget(self, path: str) -> None:
        """Drops the references to an array that no later assembly reads."""
        self.shards.forget(path)
        for key in [key for key in self.joined_up if path in key[0]]:
            del self.joined_up[key]

    def block(self, work: Assembly, names: Sequence[str], devices: tuple[Any, ...], key: str) -> jax.Array:
        """One source's shards as an array on the program's devices. It is cached, since many leaves can be slices of
        one stacked array.
        """
        scaled, kind = work.scaled.get(key), ""
        paths = [names[int(key if scaled is None else scaled.source)]]
        if scaled is not None:
            paths, kind = [*paths, names[int(scaled.scale.path)]], f"{scaled.scale.block} {scaled.dtype}"
        known = (*paths, kind), devices
        if known not in self.joined_up:
            array, *by = map(self.shards.leaf, paths)
            array = array if scaled is None else self._scaled(scaled, array, *by)
            with _on(devices):
                here = _shards(array).items()
                shards = {device: _in_memory(one, device.default_memory().kind) for device, one in here}
                self.joined_up[known] = blocks(devices, *work.source_shapes[key], shards)
        return self.joined_up[known]

    def _scaled(self, one: ScaledArray, x: jax.Array, by: jax.Array) -> jax.Array:
        """An array multiplied by its scales, with the array's own sharding."""
        assert self.move is not None
        end = x.sharding
        by = self.move(by, NamedSharding(end.mesh, PartitionSpec()) if isinstance(end, NamedSharding) else end)
        return _times(one.scale, one.dtype, end)(x, by)


@ft.lru_cache(maxsize=64)
def _times(scale: Scale, dtype: Any, sharding: object) -> Any:
    def run(x: jax.Array, by: jax.Array) -> jax.Array:
        by = by.astype(jnp.float32)
        for dim, size in enumerate(scale.block):
            by = jnp.repeat(by, size, axis=dim)
        by = by[tuple(slice(size) for size in x.shape)]
        return (x.astype(jnp.float32) * by).astype(dtype)

    return jax.jit(run, out_shardings=sharding)


def begun(work: Assembly, names: Sequence[str], means: Means) -> Callable[[], jax.Array]:
    """Starts to assemble one array from shards of its sources.

    **Arguments:**

    - `work`: the plan of the array.
    - `names`: the paths of its sources.
    - `means`: the arrays, limits and caches of the tree.

    **Returns:**

    A function that waits for copies in other threads and returns the array; of PRNG keys their key data. Devices may
    still have to compute it.
    """
    if work.is_elsewhere:
        return lambda: jax.make_array_from_single_device_arrays(work.shape, work.sharding, [], dtype=work.dtype)
    if work.way == "host":
        return coming(work.struct, work.targets, work.fillings, names, means.shards, means.pool)
    out = _constants(work)
    for step, places in _steps(work, means.limit_bytes, means.most_bytes):
        out = (_apart if work.is_apart else _together)(work, names, means, step, places, out)
    parts = {} if out is None else _shards(out)
    mine = [parts[device] for device in work.sharding.addressable_devices_indices_map(work.shape)]
    # Programs compute in device memory; an array in host memory is moved there afterwards.
    mine = [_in_memory(part.reshape(work.shard_shape), work.sharding.memory_kind) for part in mine]
    made = jax.make_array_from_single_device_arrays(work.shape, work.sharding, mine, dtype=work.dtype)
    return lambda: made


def _together(
    work: Assembly, names: Sequence[str], means: Means, step: Exchange, places: Any, out: jax.Array | None
) -> jax.Array | None:
    """Runs one program of an assembly whose source and target are on the same devices, and returns the updated
    shards.
    """
    devices = work.devices
    given = [means.block(work, names, devices, key) for key in step.keys]
    sources = tuple(work.source_shapes[key] for key in step.keys)
    with _on(devices):
        run = program(devices, step.rounds, sources, (work.shard_shape, work.dtype), out is None)
        out = run(places[0], *given, *(() if out is None else (out,)))
    if means.limit_bytes is not None or _crosses(devices):
        # Programs that talk to other processes block threads of the CPU's runtime; several at once can block them all.
        jax.block_until_ready(out)
    return out


def _apart(
    work: Assembly, names: Sequence[str], means: Means, step: Exchange, places: Any, out: jax.Array | None
) -> jax.Array | None:
    """Runs one step of an assembly whose source and target are on different devices, as three programs (slice, send,
    write), and returns the updated shards.

    `None` if this process has none of the array's devices.
    """
    here, there = work.source_devices[step.keys[0]], work.target_devices
    # Without senders and receivers, the programs of different parts of an array are equal.
    rounds = tuple(one._replace(pairs=()) for one in step.rounds)
    sources = tuple(work.source_shapes[key] for key in step.keys)
    sizes = [math.prod(_sent_shape(one.form)) for one in rounds]
    block = (sum(sizes),), carried(sent_dtype(rounds[0].form, sources[0][1]), here)
    means.wait_for(work.extra_bytes([step]), work.sharers)
    sent: dict[object, jax.Array] = {}
    if any(map(_is_mine, here)):
        given = [means.block(work, names, here, key) for key in step.keys]
        with _on(here):
            sent = _shards(cutting(here, rounds, sources, block)(places[0], *given))
    others = tuple(device for device in work.devices if _is_mine(device) and device not in sent)
    if others:  # devices that send nothing
        with _on(others):
            sent |= _shards(zeros(others, block)())
    with _on(work.devices):
        parcels = tuple(zip(sizes, [one.pairs for one in step.rounds], strict=True))
        came = _shards(sending(work.devices, parcels)(blocks(work.devices, *block, sent)))
    sent.clear()
    if any(map(_is_mine, there)):
        with _on(there):
            put = putting(there, rounds, sources[0][1], (work.shard_shape, work.dtype), out is None)
            out = put(places[1], blocks(there, *block, came), *(() if out is None else (out,)))
    means.begun.append(next(iter(came.values())) if out is None else out)
    if _crosses(work.devices):
        jax.block_until_ready(means.begun[-1])
    return out


def _is_mine(device: Any) -> bool:
    return device.process_index == jax.process_index()


def _shards(array: jax.Array) -> dict[Any, jax.Array]:
    return {shard.device: shard.data for shard in array.addressable_shards}


def _on(devices: tuple[object, ...]) -> Any:
    """A context that sets the abstract mesh of these devices. The caller may have set the mesh of other devices."""
    return jax.sharding.use_abstract_mesh(sharding_of(devices).mesh.abstract_mesh)


def _in_memory(shard: jax.Array, kind: str | None) -> jax.Array:
    if kind is None or shard.sharding.memory_kind == kind:
        return shard
    return jax.device_put(shard, shard.sharding.with_memory_kind(kind))


def _crosses(devices: Sequence[Any]) -> bool:
    return devices[0].platform == "cpu" and len({device.process_index for device in devices}) > 1


@ft.lru_cache(maxsize=4096)
def _steps(
    work: Assembly, limit_bytes: int | None, most_bytes: int
) -> tuple[tuple[Exchange, tuple[jax.Array | None, ...]], ...]:
    """The programs of an assembly, each with its pieces' positions as arrays: one on all devices, or one on the devices
    of each side.
    """
    number, found = {device: at for at, device in enumerate(work.devices)}, []
    for step in work.exchanges(limit_bytes, most_bytes):
        sides = (work.source_devices[step.keys[0]], work.target_devices) if work.is_apart else (work.devices,)
        found.append((step, tuple(_placed(step.places[[number[one] for one in side]], side) for side in sides)))
    return tuple(found)


def _placed(rows: np.ndarray, devices: tuple[object, ...]) -> jax.Array | None:
    """The rows as an array with one row per device; `None` if this process has none of the devices."""
    if not any(map(_is_mine, devices)):
        return None
    return jax.make_array_from_callback(rows.shape, sharding_of(devices), lambda index: rows[index])


def _constants(work: Assembly) -> jax.Array | None:
    """The shards on the target's devices, filled with the constants; `None` if there are no constants."""
    constants: dict[int, list[Piece]] = {}
    for cut in work.cuts.made:
        if cut.piece.value.path is None:
            constants.setdefault(cut.receiver, []).append(cut.piece)
    # One program is over all devices, which then are the target's.
    devices, target = work.target_devices if work.is_apart else work.devices, work.shard_shape
    if not constants or not any(map(_is_mine, devices)):
        return None
    numbers = [work.devices.index(device) for device in devices]
    first = joined(target)[0]

    def shard(index: Any) -> np.ndarray:
        out = np.zeros(target, work.dtype)
        for piece in constants.get(numbers[(index[0].start or 0) // first], ()):
            with np.errstate(over="ignore", invalid="ignore"):
                target_view(out, piece)[...] = constant(piece)
        return out.reshape(joined(target))

    whole = (len(devices) * first, *joined(target)[1:])
    return jax.make_array_from_callback(whole, sharding_of(devices), shard, dtype=work.dtype)
