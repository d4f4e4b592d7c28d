"""Assembles the target's arrays from live arrays, one array after another.

If source and target are on the same devices, one program slices parts out of the old
shards, sends them and writes them into the new shards. In one program every argument
takes memory on every device. If source and target are on different devices, three
programs run instead: the source's devices concatenate the parts that they send to one
vector, the *message*; all devices exchange these messages; and the target's devices
write the received parts into shards.
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
from .assembly import Assembly, ScaledArray
from .exchange import (
    AXIS,
    Block,
    Exchange,
    Round,
    StridedCopy,
    bitcast,
    block_shape,
    blocks,
    per_device,
    program,
    program_dtype,
    sent_dtype,
    sharding_of,
    slice_part,
    write_part,
)
from .host import LocalShards, start_on_host
from .parts import first_casts


# One round: the number of elements that a device sends, and the pairs of sender and
# receiver.
Sending = tuple[int, tuple[tuple[int, int], ...]]


def _sent_shape(form: StridedCopy) -> list[int]:
    """The shape in which a part of a shard is sent. An element that is written several
    times is sent once.
    """
    return [count for _, own in form.source for count, _ in own]


@ft.lru_cache(maxsize=256)
def slice_program(
    devices: tuple[Any, ...],
    rounds: tuple[Round, ...],
    sources: tuple[Block, ...],
    block: Block,
) -> Any:
    """A jitted function on the source's devices: each device slices the parts that it
    sends, one for each round, out of its shards, and concatenates them to its message.
    `sources` have the shape and dtype of a shard of each array that is read, and
    `block` has those of the message.
    """
    dtype, (shape, to) = sources[0][1], block
    # The sender casts values, not their bits.
    own = (
        program_dtype(dtype, devices)
        if sent_dtype(rounds[0].form, dtype) == dtype
        else dtype
    )

    def run(places: jax.Array, *given: jax.Array) -> jax.Array:
        shards = [
            bitcast(one.reshape(shape), own)
            for one, (shape, _) in zip(given, sources, strict=True)
        ]
        sent, start = jnp.zeros(shape, to), 0
        for at, step in enumerate(rounds):
            # Without the barrier XLA could slice and keep all parts before it writes
            # the first.
            shards, sent = jax.lax.optimization_barrier((shards, sent))
            piece = bitcast(
                slice_part(step.form, shards[step.number], places[0, at]).reshape(-1),
                to,
            )
            sent, start = (
                jax.lax.dynamic_update_slice(sent, piece, (start,)),
                start + piece.size,
            )
        return sent

    return per_device(devices, run, 1 + len(sources))


@ft.lru_cache(maxsize=256)
def send_program(devices: tuple[object, ...], rounds: tuple[Sending, ...]) -> Any:
    """A jitted function in which devices exchange their messages, by one collective
    permute for each round.
    """

    def run(sent: jax.Array) -> jax.Array:
        start = 0
        for size, pairs in rounds:
            if pairs:
                piece = jax.lax.ppermute(
                    jax.lax.slice(sent, (start,), (start + size,)), AXIS, pairs
                )
                sent = jax.lax.optimization_barrier(
                    jax.lax.dynamic_update_slice(sent, piece, (start,))
                )
            start += size
        return sent

    return per_device(devices, run, 1, 0)


@ft.lru_cache(maxsize=256)
def write_program(
    devices: tuple[object, ...],
    rounds: tuple[Round, ...],
    source_dtype: object,
    target: Block,
    makes_shards: bool,
) -> Any:
    """A jitted function on the target's devices: each device writes the parts that it
    received, one for each round, into its shard. `target` has the shape and dtype of
    this shard, and `source_dtype` is the dtype of the sources. If `makes_shards` is
    true, the function makes the shards. Otherwise they are its last argument, which it
    writes into and returns.
    """
    own, wire = (
        program_dtype(target[1], devices),
        sent_dtype(rounds[0].form, source_dtype),
    )
    casts = rounds[0].form.casts
    is_ready = first_casts(casts, source_dtype) == len(casts)

    def run(places: jax.Array, sent: jax.Array, *given: jax.Array) -> jax.Array:
        out = (
            jnp.zeros(target[0], own)
            if makes_shards
            else bitcast(given[0].reshape(target[0]), own)
        )
        start = 0
        for at, step in enumerate(rounds):
            sent, out = jax.lax.optimization_barrier((sent, out))
            shape = _sent_shape(step.form)
            piece = jax.lax.slice(sent, (start,), (start + math.prod(shape),)).reshape(
                shape
            )
            piece, start = (
                piece if is_ready else bitcast(piece, wire),
                start + piece.size,
            )
            out = write_part(step, out, piece, source_dtype, places[0, at])
        return bitcast(out.reshape(block_shape(target[0])), target[1])

    return (
        per_device(devices, run, 2) if makes_shards else per_device(devices, run, 3, 2)
    )


@ft.lru_cache(maxsize=256)
def zeros(devices: tuple[object, ...], block: Block) -> Any:
    """A jitted function in which each device makes a message of zeros, of the shape and
    dtype in `block`.
    """
    return jax.jit(
        lambda: jnp.zeros((len(devices) * block[0][0],), block[1]),
        out_shardings=sharding_of(devices),
    )


@dataclasses.dataclass
class Context:
    """The arrays, memory limits and caches that the assemblies of all arrays of one
    tree share.

    **Arguments:**

    - `arrays`: the source's arrays by path.
    - `move`: a function that moves the scales of a quantised array to a sharding;
      `None` if there are no scales.
    - `limit_bytes`: the most bytes that may be used besides source and target; `None`
      for no limit.
    - `most_bytes`: the most bytes that programs may use on a device if there is no
      limit and source and target are on
        different devices.
    - `pool`: the threads that copy, if any.
    - `shards`: this process's shards of the arrays.
    - `blocks`: a cache of the arrays that `block` returns, by the paths of the source
      and of its scales, and the
        devices.
    - `in_flight`, `in_flight_bytes`: arrays that programs may still be computing, if
      source and target are on different
        devices, and the bytes that these programs use.
    """

    arrays: Mapping[str, Any]
    move: Callable[[jax.Array, Any], jax.Array] | None
    limit_bytes: int | None
    most_bytes: int
    pool: ThreadPoolExecutor | None
    shards: LocalShards
    blocks: dict[tuple[tuple[str, ...], object], jax.Array] = dataclasses.field(
        default_factory=dict
    )
    in_flight: list[jax.Array] = dataclasses.field(default_factory=list)
    in_flight_bytes: int = 0

    def wait_for(self, nbytes: int, sharers: int) -> None:
        """Adds `nbytes`, the bytes that new programs will use in one memory, to
        `in_flight_bytes`. If the sum would exceed the memory limit, it first waits for
        all programs that may still run. If `limit_bytes` is `None`, the limit is
        `most_bytes` for each of the `sharers` devices that share one memory.
        """
        most = (
            self.most_bytes * sharers if self.limit_bytes is None else self.limit_bytes
        )
        if self.in_flight_bytes + nbytes > most:
            # An array that was donated to a later program is deleted.
            jax.block_until_ready(
                [one for one in self.in_flight if not one.is_deleted()]
            )
            self.in_flight.clear()
            self.in_flight_bytes = 0
        self.in_flight_bytes += nbytes

    def forget(self, path: str) -> None:
        """Drops all references to the array at a path, so that its memory can be freed."""
        self.shards.forget(path)
        for key in [key for key in self.blocks if path in key[0]]:
            del self.blocks[key]

    def block(
        self, plan: Assembly, names: Sequence[str], devices: tuple[Any, ...], key: str
    ) -> jax.Array:
        """One array that concatenates the shards of one source of `plan`, as an
        argument of a program on `devices`. `names` are the paths of the sources, and
        `key` is the number of the source as text, or a name in `plan.scaled`. The array
        is cached, since many leaves can be slices of one stacked array.
        """
        scaled, kind = plan.scaled.get(key), ""
        paths = [names[int(key if scaled is None else scaled.source)]]
        if scaled is not None:
            paths, kind = (
                [*paths, names[int(scaled.scale.path)]],
                f"{scaled.scale.block} {scaled.dtype}",
            )
        known = (*paths, kind), devices
        if known not in self.blocks:
            array, *by = map(self.shards.leaf, paths)
            array = array if scaled is None else self._scaled(scaled, array, *by)
            with _on(devices):
                here = _shards(array).items()
                shards = {
                    device: _in_memory(one, device.default_memory().kind)
                    for device, one in here
                }
                self.blocks[known] = blocks(devices, *plan.source_shapes[key], shards)
        return self.blocks[known]

    def _scaled(self, one: ScaledArray, x: jax.Array, scales: jax.Array) -> jax.Array:
        """The array `x` multiplied by `scales` and cast as `one` says, with the
        sharding of `x`.
        """
        assert self.move is not None
        end = x.sharding
        scales = self.move(
            scales,
            (
                NamedSharding(end.mesh, PartitionSpec())
                if isinstance(end, NamedSharding)
                else end
            ),
        )
        return _times(one.scale, one.dtype, end)(x, scales)


@ft.lru_cache(maxsize=64)
def _times(scale: Scale, dtype: Any, sharding: object) -> Any:
    def run(x: jax.Array, by: jax.Array) -> jax.Array:
        by = by.astype(jnp.float32)
        for dim, size in enumerate(scale.block):
            by = jnp.repeat(by, size, axis=dim)
        by = by[tuple(slice(size) for size in x.shape)]
        return (x.astype(jnp.float32) * by).astype(dtype)

    return jax.jit(run, out_shardings=sharding)


def start_assembly(
    plan: Assembly, names: Sequence[str], context: Context
) -> Callable[[], jax.Array]:
    """Starts to assemble one array from shards of its sources, whose paths are `names`.
    Returns a function that waits for copies in other threads and returns the array, or
    the key data of PRNG keys. Devices may still be computing it.
    """
    if plan.is_remote:
        return lambda: jax.make_array_from_single_device_arrays(
            plan.shape, plan.sharding, [], dtype=plan.dtype
        )
    if plan.method == "host":
        return start_on_host(
            plan.struct,
            plan.targets,
            plan.host_copies,
            names,
            context.shards,
            context.pool,
        )
    out = _constants(plan)
    for step, places in _programs(plan, context.limit_bytes, context.most_bytes):
        out = (_run_three if plan.changes_devices else _run_one)(
            plan, names, context, step, places, out
        )
    parts = {} if out is None else _shards(out)
    mine = [
        parts[device]
        for device in plan.sharding.addressable_devices_indices_map(plan.shape)
    ]
    # Programs compute in device memory; an array in host memory is moved there
    # afterwards.
    mine = [
        _in_memory(part.reshape(plan.shard_shape), plan.sharding.memory_kind)
        for part in mine
    ]
    made = jax.make_array_from_single_device_arrays(
        plan.shape, plan.sharding, mine, dtype=plan.dtype
    )
    return lambda: made


def _run_one(
    plan: Assembly,
    names: Sequence[str],
    context: Context,
    step: Exchange,
    places: Any,
    out: jax.Array | None,
) -> jax.Array | None:
    """Runs the program `step` of an assembly whose source and target are on the same
    devices. `names` are the paths of the sources. `places` has one array:
    `step.places`, the positions of the parts, on the devices. `out` has the shards that
    earlier programs made, if any. Returns the updated shards.
    """
    devices = plan.devices
    given = [context.block(plan, names, devices, key) for key in step.keys]
    sources = tuple(plan.source_shapes[key] for key in step.keys)
    with _on(devices):
        run = program(
            devices, step.rounds, sources, (plan.shard_shape, plan.dtype), out is None
        )
        out = run(places[0], *given, *(() if out is None else (out,)))
    if context.limit_bytes is not None or _crosses(devices):
        # Programs that talk to other processes block threads of the CPU's runtime;
        # several at once can block them all.
        jax.block_until_ready(out)
    return out


def _run_three(
    plan: Assembly,
    names: Sequence[str],
    context: Context,
    step: Exchange,
    places: Any,
    out: jax.Array | None,
) -> jax.Array | None:
    """Runs the three programs (slice, send, write) for `step`, if source and target are
    on different devices. `names` are the paths of the sources. `places` has
    `step.places`, the positions of the parts, as two arrays: on the source's and on the
    target's devices. `out` has the shards that earlier programs made, if any. Returns
    the updated shards; `None` if this process has none of the array's devices.
    """
    here, there = plan.source_devices[step.keys[0]], plan.target_devices
    # Without senders and receivers, the programs of different parts of an array are
    # equal.
    rounds = tuple(one._replace(pairs=()) for one in step.rounds)
    sources = tuple(plan.source_shapes[key] for key in step.keys)
    sizes = [math.prod(_sent_shape(one.form)) for one in rounds]
    block = (
        (sum(sizes),),
        program_dtype(sent_dtype(rounds[0].form, sources[0][1]), here),
    )
    context.wait_for(plan.extra_bytes([step]), plan.sharers)
    sent: dict[object, jax.Array] = {}
    if any(map(_is_mine, here)):
        given = [context.block(plan, names, here, key) for key in step.keys]
        with _on(here):
            sent = _shards(
                slice_program(here, rounds, sources, block)(places[0], *given)
            )
    others = tuple(
        device for device in plan.devices if _is_mine(device) and device not in sent
    )
    if others:  # devices that send nothing
        with _on(others):
            sent |= _shards(zeros(others, block)())
    with _on(plan.devices):
        sends = tuple(zip(sizes, [one.pairs for one in step.rounds], strict=True))
        received = _shards(
            send_program(plan.devices, sends)(blocks(plan.devices, *block, sent))
        )
    sent.clear()
    if any(map(_is_mine, there)):
        with _on(there):
            put = write_program(
                there,
                rounds,
                sources[0][1],
                (plan.shard_shape, plan.dtype),
                out is None,
            )
            out = put(
                places[1],
                blocks(there, *block, received),
                *(() if out is None else (out,)),
            )
    context.in_flight.append(next(iter(received.values())) if out is None else out)
    if _crosses(plan.devices):
        jax.block_until_ready(context.in_flight[-1])
    return out


def _is_mine(device: Any) -> bool:
    return device.process_index == jax.process_index()


def _shards(array: jax.Array) -> dict[Any, jax.Array]:
    return {shard.device: shard.data for shard in array.addressable_shards}


def _on(devices: tuple[object, ...]) -> Any:
    """A context manager that sets the abstract mesh of these devices, since the caller
    may have set another mesh.
    """
    return jax.sharding.use_abstract_mesh(sharding_of(devices).mesh.abstract_mesh)


def _in_memory(shard: jax.Array, kind: str | None) -> jax.Array:
    if kind is None or shard.sharding.memory_kind == kind:
        return shard
    return jax.device_put(shard, shard.sharding.with_memory_kind(kind))


def _crosses(devices: Sequence[Any]) -> bool:
    return (
        devices[0].platform == "cpu"
        and len({device.process_index for device in devices}) > 1
    )


@ft.lru_cache(maxsize=4096)
def _programs(
    plan: Assembly, limit_bytes: int | None, most_bytes: int
) -> tuple[tuple[Exchange, tuple[jax.Array | None, ...]], ...]:
    """The programs of an assembly, each with the positions of its parts
    (`Exchange.places`) as an array on all devices. If source and target are on
    different devices, there are two such arrays: one on the source's devices and one on
    the target's. `limit_bytes` is the most bytes of a program in one memory besides
    source and target. If it is `None` and source and target are on different devices,
    programs use at most `most_bytes` on a device.
    """
    number, found = {device: at for at, device in enumerate(plan.devices)}, []
    for step in plan.exchanges(limit_bytes, most_bytes):
        sides = (
            (plan.source_devices[step.keys[0]], plan.target_devices)
            if plan.changes_devices
            else (plan.devices,)
        )
        found.append(
            (
                step,
                tuple(
                    _placed(step.places[[number[one] for one in side]], side)
                    for side in sides
                ),
            )
        )
    return tuple(found)


def _placed(rows: np.ndarray, devices: tuple[object, ...]) -> jax.Array | None:
    """An array with one row of `rows` on each device; `None` if this process has none
    of the devices.
    """
    if not any(map(_is_mine, devices)):
        return None
    return jax.make_array_from_callback(
        rows.shape, sharding_of(devices), lambda index: rows[index]
    )


def _constants(plan: Assembly) -> jax.Array | None:
    """New shards with the array's constants, which no source gives, and zeros
    elsewhere; `None` without constants.
    """
    constants: dict[int, list[Piece]] = {}
    for part in plan.parts.all:
        if part.piece.value.path is None:
            constants.setdefault(part.receiver, []).append(part.piece)
    # A single program is over all devices, so all of them then hold a shard of the
    # target.
    devices, target = (
        plan.target_devices if plan.changes_devices else plan.devices,
        plan.shard_shape,
    )
    if not constants or not any(map(_is_mine, devices)):
        return None
    numbers = [plan.devices.index(device) for device in devices]
    first = block_shape(target)[0]

    def shard(index: Any) -> np.ndarray:
        out = np.zeros(target, plan.dtype)
        for piece in constants.get(numbers[(index[0].start or 0) // first], ()):
            with np.errstate(over="ignore", invalid="ignore"):
                target_view(out, piece)[...] = constant(piece)
        return out.reshape(block_shape(target))

    whole = (len(devices) * first, *block_shape(target)[1:])
    return jax.make_array_from_callback(
        whole, sharding_of(devices), shard, dtype=plan.dtype
    )
