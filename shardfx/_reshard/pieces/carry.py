"""The assembly of the target's arrays from live arrays, one array after the other.

If the two sides have different devices, pieces are sent in one concatenated block of their own size. One program over
all devices would need a block of each side's shape on every device, since its arguments have one shape. So there are
three programs: the source's devices cut out the pieces, all devices exchange them, the target's devices write them into
shards.
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

from ..._convert import Piece, Scale, fill
from ..._ground.boxes import Box
from ..steps.program import is_small_float
from .cuts import first_casts
from .exchange import (
    AXIS,
    Block,
    Exchange,
    PieceForm,
    Round,
    blocks,
    cut_out,
    joined,
    program,
    put_in,
    sent_dtype,
    sharding_of,
)
from .host import LocalShards, coming
from .work import ScaledArray, Work


# For each round: how many elements a device sends, and the pairs of sender and receiver.
Parcel = tuple[int, tuple[tuple[int, int], ...]]


def elements_of(form: PieceForm) -> int:
    """The number of elements of a piece that are sent. Repeated elements are sent once."""
    return math.prod(count for _, own in form.source for count, _ in own)


def parcels(rounds: Sequence[Round]) -> tuple[Parcel, ...]:
    """The parcel that devices exchange in each round."""
    return tuple((elements_of(step.form), step.pairs) for step in rounds)


def carried(dtype: Any, devices: Sequence[Any]) -> Any:
    """The dtype in which numbers are sent and stored in new shards. On CPUs small floats are integers, as
    in `on_bits`.
    """
    if devices[0].platform != "cpu" or not is_small_float(dtype):
        return dtype
    return jnp.dtype(f"uint{jnp.finfo(dtype).bits}")


def parcel_block(rounds: Sequence[Round], dtype: object, devices: Sequence[object]) -> Block:
    """The shape and dtype of the block that one device sends."""
    return (sum(size for size, _ in parcels(rounds)),), carried(sent_dtype(rounds[0].form, dtype), devices)


def _as(x: jax.Array, dtype: Any) -> jax.Array:
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)


def anywhere(rounds: Sequence[Round]) -> tuple[Round, ...]:
    """The rounds without their senders and receivers, so that programs of different parts of an array compare equal."""
    return tuple(step._replace(pairs=()) for step in rounds)


@ft.lru_cache(maxsize=256)
def cutting(devices: tuple[object, ...], rounds: tuple[Round, ...], sources: tuple[Block, ...]) -> Any:
    """The jitted function in which the source's devices cut out their pieces and concatenate them."""
    dtype = sources[0][1]
    (count,), to = parcel_block(rounds, dtype, devices)
    # Casts before sending act on values, not on their bits.
    own = carried(dtype, devices) if sent_dtype(rounds[0].form, dtype) == dtype else dtype

    def run(places: jax.Array, *given: jax.Array) -> jax.Array:
        shards = [_as(one.reshape(shape), own) for one, (shape, _) in zip(given, sources, strict=True)]
        sent, start = jnp.zeros(count, to), 0
        for at, step in enumerate(rounds):
            # Without the barrier XLA could cut out and keep all pieces before it writes the first.
            shards, sent = jax.lax.optimization_barrier((shards, sent))
            piece = _as(cut_out(step.form, shards[step.number], places[0, at]).reshape(-1), to)
            sent, start = jax.lax.dynamic_update_slice(sent, piece, (start,)), start + piece.size
        return sent

    return _mapped(devices, run, 1 + len(sources))


@ft.lru_cache(maxsize=256)
def sending(devices: tuple[object, ...], found: tuple[Parcel, ...]) -> Any:
    """The jitted function in which all devices exchange parcels. It reuses the memory of its argument."""

    def run(sent: jax.Array) -> jax.Array:
        start = 0
        for size, pairs in found:
            if pairs:
                piece = jax.lax.ppermute(jax.lax.slice(sent, (start,), (start + size,)), AXIS, pairs)
                sent = jax.lax.optimization_barrier(jax.lax.dynamic_update_slice(sent, piece, (start,)))
            start += size
        return sent

    return _mapped(devices, run, 1, 0)


@ft.lru_cache(maxsize=256)
def putting(
    devices: tuple[object, ...], rounds: tuple[Round, ...], source_dtype: object, target: Block, begins: bool
) -> Any:
    """The jitted function in which the target's devices write the received pieces into its shards.

    **Arguments:**

    - `begins`: whether it makes the shards. If not, it takes them as its last argument and returns them.
    """
    own, wire = carried(target[1], devices), sent_dtype(rounds[0].form, source_dtype)
    casts = rounds[0].form.casts
    is_ready = first_casts(casts, source_dtype) == len(casts)

    def run(places: jax.Array, sent: jax.Array, *given: jax.Array) -> jax.Array:
        out, start = jnp.zeros(target[0], own) if begins else given[0].reshape(target[0]), 0
        for at, step in enumerate(rounds):
            sent, out = jax.lax.optimization_barrier((sent, out))
            counts = [count for _, own in step.form.source for count, _ in own]
            piece = jax.lax.slice(sent, (start,), (start + math.prod(counts),)).reshape(counts)
            piece, start = piece if is_ready else _as(piece, wire), start + piece.size
            out = put_in(step, out, piece, source_dtype, places[0, at])
        return out.reshape(joined(target[0]))

    return _mapped(devices, run, 2 if begins else 3, *(() if begins else (2,)))


@ft.lru_cache(maxsize=256)
def finishing(devices: tuple[object, ...], dtype: object) -> Any:
    """The jitted function that turns integers back into the small floats whose bits they are, in the same memory."""
    return _mapped(devices, lambda x: _as(x, dtype), 1, 0)


@ft.lru_cache(maxsize=256)
def zeros(devices: tuple[object, ...], block: Block) -> Any:
    """The jitted function in which each device makes a block of zeros."""
    return jax.jit(lambda: jnp.zeros((len(devices) * block[0][0],), block[1]), out_shardings=sharding_of(devices))


def _mapped(devices: tuple[object, ...], body: Any, count: int, *donated: int) -> Any:
    mesh, spec = sharding_of(devices).mesh, PartitionSpec(AXIS)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(spec,) * count, out_specs=spec, check_vma=False)
    return jax.jit(mapped, donate_argnums=donated)


Carry = Callable[[jax.Array, Any], jax.Array]
Joined = dict[tuple[str, tuple[Any, ...]], jax.Array]


@dataclasses.dataclass
class Means:
    """The arrays, limits and caches that all arrays of one tree are assembled with.

    **Arguments:**

    - `arrays`: the source's arrays by path.
    - `move`: moves an array to a sharding; needed for scales alone.
    - `limit_bytes`: bytes that may be used beside source and target.
    - `most_bytes`: bytes that programs may take of a device without a limit, if the two sides have different devices.
    - `pool`: threads to copy with, if any.
    - `shards`: the arrays' shards of this process.
    - `joined_up`: the blocks that programs take of the arrays, by path and devices; a cache.
    - `begun`, `begun_bytes`: the arrays in flight that programs make on other devices than the source's, and the bytes
        that these programs take.
    """

    arrays: Mapping[str, Any]
    move: Carry | None
    limit_bytes: int | None
    most_bytes: int
    pool: ThreadPoolExecutor | None
    shards: LocalShards
    joined_up: Joined = dataclasses.field(default_factory=dict)
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
        """Drops the references to an array that nothing more is made of."""
        self.shards.forget(path)
        for key in [key for key in self.joined_up if key[0] == path]:
            del self.joined_up[key]


def begun(work: Work, means: Means) -> Callable[[], jax.Array]:
    """Starts to assemble one array.

    **Arguments:**

    - `work`: the plan of the array; its way is not "plain".
    - `means`: the arrays, limits and caches of the tree.

    **Returns:**

    A function that waits for copies in other threads and returns the array. Devices may still have to compute it.
    """
    if work.is_elsewhere:
        made = _made_of(work, [])
        there = lambda: made
    elif work.way == "host":
        there = coming(work.struct, work.targets, work.fillings, work.sources, means.shards, means.pool)
    else:
        sent = _by_programs(work, means)
        there = lambda: sent
    if jnp.issubdtype(work.leaf.dtype, jax.dtypes.prng_key):
        return ft.partial(_keys, there, means.arrays[work.sources[0]])
    return there


def _made_of(work: Work, shards: Sequence[jax.Array]) -> jax.Array:
    sharding = work.leaf.sharding
    assert sharding is not None
    return jax.make_array_from_single_device_arrays(work.shape, sharding, shards, dtype=work.dtype)


def _keys(there: Callable[[], jax.Array], like: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(there(), impl=jax.random.key_impl(like))


def _by_programs(work: Work, means: Means) -> jax.Array:
    sharding = work.leaf.sharding
    assert sharding is not None
    every = {name: means.shards.leaf(name) for name in work.sources}
    every |= {one.name: _scaled(one, every[one.path], every[one.scale.path], means.move) for one in work.scaled}
    target = (*sharding.shard_shape(work.leaf.shape), *work.shape[len(work.leaf.shape) :])
    out = (_apart if work.is_apart else _together)(work, target, every, means)
    parts = {} if out is None else {shard.device: shard.data for shard in out.addressable_shards}
    mine = [parts[device] for device in sharding.addressable_devices_indices_map(work.leaf.shape)]
    mine = [part if part.shape == target else part.reshape(target) for part in mine]
    # Programs compute in device memory; an array in host memory is moved there afterwards.
    kind = sharding.memory_kind
    return _made_of(work, [_in_memory(part, kind) for part in mine])


def _together(work: Work, target: tuple[int, ...], every: Mapping[str, object], means: Means) -> jax.Array:
    """The shards of an array whose sources are on the same devices."""
    devices = work.devices
    with _on(devices):
        out = _constants(work, target, devices, work.dtype)
        for step, (places,) in _steps(work, means.limit_bytes, means.most_bytes):
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
    return out


def _apart(work: Work, target: tuple[int, ...], every: Mapping[str, object], means: Means) -> jax.Array | None:
    """The shards of an array whose sources are on other devices; `None` if this process has none of the
    array's devices.
    """
    there = work.target_devices
    own, came = carried(work.dtype, there), dict[Any, jax.Array]()
    out = _constants(work, target, there, own)
    for step, places in _steps(work, means.limit_bytes, means.most_bytes):
        here, rounds = work.source_devices[step.paths[0]], anywhere(step.rounds)
        sources = tuple(work.source_shapes[path] for path in step.paths)
        block = parcel_block(rounds, sources[0][1], here)
        means.wait_for(work.extra_bytes([step]), work.sharers)
        sent: dict[object, jax.Array] = {}
        if any(map(_is_mine, here)):
            with _on(here):
                cut = cutting(here, rounds, sources)
                pairs = zip(step.paths, sources, strict=True)
                sent = _by_device(cut(places[0], *[_block(here, *pair, every, means.joined_up) for pair in pairs]))
        came = _by_device(_sent(work.devices, step, block, sent))
        sent.clear()
        if any(map(_is_mine, there)):
            with _on(there):
                put = putting(there, rounds, sources[0][1], (target, work.dtype), out is None)
                out = put(places[1], blocks(there, *block, came), *(() if out is None else (out,)))
        means.begun.append(next(iter(came.values())) if out is None else out)
        if _crosses(work.devices):
            jax.block_until_ready(means.begun[-1])
    if out is None or own == work.dtype:
        return out
    came.clear()
    with _on(there):
        return finishing(there, work.dtype)(out)


def _sent(devices: tuple[object, ...], step: Exchange, block: Block, sent: dict[object, jax.Array]) -> jax.Array:
    """The arrays that each device receives. A device that sends nothing contributes zeros."""
    others = tuple(device for device in devices if _is_mine(device) and device not in sent)
    if others:
        with _on(others):
            sent |= _by_device(zeros(others, block)())
    with _on(devices):
        return sending(devices, parcels(step.rounds))(blocks(devices, *block, sent))


def _is_mine(device: Any) -> bool:
    return device.process_index == jax.process_index()


def _by_device(array: jax.Array) -> dict[Any, jax.Array]:
    return {shard.device: shard.data for shard in array.addressable_shards}


def _on(devices: tuple[object, ...]) -> Any:
    """A context with the abstract mesh of these devices, since the caller may be under the mesh of others."""
    return jax.sharding.use_abstract_mesh(sharding_of(devices).mesh.abstract_mesh)


def _in_memory(shard: jax.Array, kind: str | None) -> jax.Array:
    if kind is None or shard.sharding.memory_kind == kind:
        return shard
    return jax.device_put(shard, shard.sharding.with_memory_kind(kind))


def _block(
    devices: tuple[object, ...], path: str, source: Block, every: Mapping[str, Any], joined_up: Joined
) -> jax.Array:
    """An array's shards as a program's argument, cached, since many leaves can be made of one stack."""
    if (path, devices) not in joined_up:
        shards = {shard.device: shard.data for shard in every[path].addressable_shards}
        here = {device: _in_memory(shard, device.default_memory().kind) for device, shard in shards.items()}
        joined_up[path, devices] = blocks(devices, *source, here)
    return joined_up[path, devices]


def _crosses(devices: Sequence[Any]) -> bool:
    return devices[0].platform == "cpu" and len({device.process_index for device in devices}) > 1


@ft.lru_cache(maxsize=4096)
def _steps(
    work: Work, limit_bytes: int | None, most_bytes: int
) -> tuple[tuple[Exchange, tuple[jax.Array | None, ...]], ...]:
    """The programs of an array, each with the positions of its pieces, on all devices or on those of each side."""
    number, found = {device: at for at, device in enumerate(work.devices)}, []
    for step in work.exchanges(limit_bytes, most_bytes):
        sides = (work.source_devices[step.paths[0]], work.target_devices) if work.is_apart else (work.devices,)
        rows = [step.places[[number[device] for device in side]] for side in sides]
        found.append((step, tuple(_placed(own, side) for own, side in zip(rows, sides, strict=True))))
    return tuple(found)


def _placed(rows: np.ndarray, devices: tuple[object, ...]) -> jax.Array | None:
    """The rows as an array with one row per device; `None` if this process has none of the devices."""
    if not any(map(_is_mine, devices)):
        return None
    return jax.make_array_from_callback(rows.shape, sharding_of(devices), lambda index: rows[index])


def _constants(work: Work, target: tuple[int, ...], devices: tuple[Any, ...], dtype: Any) -> jax.Array | None:
    """The shards on these devices, filled with the target's constants; `None` if it has no constants."""
    constants: dict[int, list[Piece]] = {}
    for cut in work.cuts.made:
        if cut.piece.value.path is None:
            constants.setdefault(cut.receiver, []).append(cut.piece)
    if not constants or not any(map(_is_mine, devices)):
        return None
    numbers = [work.devices.index(device) for device in devices]
    first, box = joined(target)[0], tuple((0, size) for size in target)

    def shard(index: Any) -> np.ndarray:
        out = np.zeros(target, work.dtype)
        for piece in constants.get(numbers[(index[0].start or 0) // first], ()):
            fill(out, box, piece, _nothing)
        return out.reshape(joined(target)).view(dtype)

    whole = (len(devices) * first, *joined(target)[1:])
    return jax.make_array_from_callback(whole, sharding_of(devices), shard, dtype=dtype)


def _nothing(path: str, box: Box) -> np.ndarray:
    raise AssertionError(path)


def _scaled(one: ScaledArray, x: jax.Array, by: jax.Array, move: Carry | None) -> jax.Array:
    """An array multiplied by its scales, with the array's own sharding."""
    assert move is not None
    sharding = x.sharding
    if isinstance(sharding, NamedSharding):
        by = move(by, NamedSharding(sharding.mesh, PartitionSpec()))
    else:
        by = move(by, sharding)
    return _times(one.scale, one.dtype, sharding)(x, by)


@ft.lru_cache(maxsize=64)
def _times(scale: Scale, dtype: Any, sharding: object) -> Any:
    def run(x: jax.Array, by: jax.Array) -> jax.Array:
        by = by.astype(jnp.float32)
        for dim, size in enumerate(scale.block):
            by = jnp.repeat(by, size, axis=dim)
        by = by[tuple(slice(size) for size in x.shape)]
        return (x.astype(jnp.float32) * by).astype(dtype)

    return jax.jit(run, out_shardings=sharding)
