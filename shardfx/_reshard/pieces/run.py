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
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..._convert import Piece, constant, target_view
from .assembly import Assembly, ScaledArray
from .exchange import (
    Exchange,
    Round,
    block_shape,
    blocks,
    program,
    program_dtype,
    sent_dtype,
    sharding_of,
)
from .host import LocalShards, start_on_host
from .programs import (
    Sending,
    scaling_program,
    send_program,
    sent_shape,
    slice_program,
    write_program,
    zeros_program,
)
from .shard_part import Block


class BlockKey(NamedTuple):
    """What an array that `Context.block` returns depends on: the paths of the source
    and of its scales, the blocks and the dtype of the product as text, and the devices.
    """

    paths: tuple[str, ...]
    product: str
    devices: tuple[Any, ...]


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
      limit and source and target are on different devices.
    - `pool`: the threads that copy, if any.
    - `shards`: this process's shards of the arrays.
    - `blocks`: a cache of the arrays that `block` returns, by the paths of the source
      and of its scales, and the devices.
    - `in_flight`, `in_flight_bytes`: arrays that programs may still be computing, if
      source and target are on different devices, and the bytes that these programs use.
    """

    arrays: Mapping[str, Any]
    move: Callable[[jax.Array, Any], jax.Array] | None
    limit_bytes: int | None
    most_bytes: int
    pool: ThreadPoolExecutor | None
    shards: LocalShards
    blocks: dict[BlockKey, jax.Array] = dataclasses.field(default_factory=dict)
    in_flight: list[jax.Array] = dataclasses.field(default_factory=list)
    in_flight_bytes: int = 0

    def wait_for(self, nbytes: int, sharers: int) -> None:
        """Adds `nbytes`, the bytes that new programs will use in one memory, to
        `in_flight_bytes`. If the sum would exceed the memory limit, it first waits for
        all programs that may still run. If `limit_bytes` is `None`, the limit is
        `most_bytes` for each of the `sharers` devices that share one memory.
        """
        most_bytes = self.limit_bytes
        if most_bytes is None:
            most_bytes = self.most_bytes * sharers
        if self.in_flight_bytes + nbytes > most_bytes:
            # An array that was donated to a later program is deleted.
            live = [array for array in self.in_flight if not array.is_deleted()]
            jax.block_until_ready(live)
            self.in_flight.clear()
            self.in_flight_bytes = 0
        self.in_flight_bytes += nbytes

    def forget(self, path: str) -> None:
        """Drops all references to the array at a path, so that its memory can be freed."""
        self.shards.forget(path)
        for key in [key for key in self.blocks if path in key.paths]:
            del self.blocks[key]

    def block(
        self,
        plan: Assembly,
        names: Sequence[str],
        devices: tuple[Any, ...],
        key: str,
    ) -> jax.Array:
        """One array that concatenates the shards of one source of `plan`, as an
        argument of a program on `devices`. `names` are the paths of the sources, and
        `key` is the number of the source as text, or a name in `plan.scaled`. The array
        is cached, since many leaves can be slices of one stacked array.
        """
        product = plan.scaled.get(key)
        if product is None:
            path = names[int(key)]
            block_key = BlockKey(paths=(path,), product="", devices=devices)
        else:
            path = names[int(product.source)]
            scale_path = names[int(product.scale.path)]
            block_key = BlockKey(
                paths=(path, scale_path),
                product=f"{product.scale.block} {product.dtype}",
                devices=devices,
            )
        if block_key not in self.blocks:
            arrays = [self.shards.leaf(path) for path in block_key.paths]
            array = arrays[0] if product is None else self._scaled(product, *arrays)
            shape, dtype = plan.source_shapes[key]
            with _on(devices):
                shards: dict[Any, jax.Array] = {}
                for device, shard in _shards(array).items():
                    shards[device] = _in_memory(shard, device.default_memory().kind)
                self.blocks[block_key] = blocks(devices, shape, dtype, shards)
        return self.blocks[block_key]

    def _scaled(
        self,
        product: ScaledArray,
        x: jax.Array,
        scales: jax.Array,
    ) -> jax.Array:
        """The array `x` multiplied by `scales` and cast as `product` says, with the
        sharding of `x`.
        """
        assert self.move is not None
        sharding = x.sharding
        scales_sharding = sharding
        if isinstance(sharding, NamedSharding):
            scales_sharding = NamedSharding(sharding.mesh, PartitionSpec())
        scales = self.move(scales, scales_sharding)
        return scaling_program(product.scale, product.dtype, sharding)(x, scales)


def start_assembly(
    plan: Assembly,
    names: Sequence[str],
    context: Context,
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
            targets=plan.targets,
            copies=plan.host_copies,
            joint=plan.joint_copies,
            names=names,
            shards=context.shards,
            pool=context.pool,
        )
    run_step = _run_on_same_devices
    if plan.changes_devices:
        run_step = _run_between_devices
    shards_so_far = _constants(plan)
    # Each step is a program, with the positions of the parts that it sends and writes.
    for step, places in _programs(plan, context.limit_bytes, context.most_bytes):
        shards_so_far = run_step(
            plan=plan,
            names=names,
            context=context,
            step=step,
            places=places,
            shards_so_far=shards_so_far,
        )

    shard_of = {} if shards_so_far is None else _shards(shards_so_far)
    shards = []
    for device in plan.sharding.addressable_devices_indices_map(plan.shape):
        shard = shard_of[device].reshape(plan.shard_shape)
        # Programs compute in device memory. Arrays in host memory move there after.
        shards.append(_in_memory(shard, plan.sharding.memory_kind))
    array = jax.make_array_from_single_device_arrays(
        plan.shape, plan.sharding, shards, dtype=plan.dtype
    )
    return lambda: array


def _run_on_same_devices(
    plan: Assembly,
    names: Sequence[str],
    context: Context,
    step: Exchange,
    places: Any,
    shards_so_far: jax.Array | None,
) -> jax.Array | None:
    """Runs the program `step` of an assembly whose source and target are on the same
    devices. `names` are the paths of the sources. `places` has one array:
    `step.places`, the positions of the parts, on the devices. `shards_so_far` are those
    that earlier programs made, if any. Returns the updated shards.
    """
    devices = plan.devices
    arguments = [context.block(plan, names, devices, key) for key in step.keys]
    if shards_so_far is not None:
        arguments.append(shards_so_far)
    with _on(devices):
        run = program(
            devices,
            step.rounds,
            sources=tuple([plan.source_shapes[key] for key in step.keys]),
            target=Block(plan.shard_shape, plan.dtype),
            makes_shards=shards_so_far is None,
        )
        shards_so_far = run(places[0], *arguments)
    if context.limit_bytes is not None or _spans_cpu_processes(devices):
        # Programs that talk to other processes block threads of the CPU's runtime;
        # several at once can block them all.
        jax.block_until_ready(shards_so_far)
    return shards_so_far


def _run_between_devices(
    plan: Assembly,
    names: Sequence[str],
    context: Context,
    step: Exchange,
    places: Any,
    shards_so_far: jax.Array | None,
) -> jax.Array | None:
    """Runs the three programs (slice, send, write) for `step`, if source and target are
    on different devices. `names` are the paths of the sources. `places` has
    `step.places`, the positions of the parts, as two arrays: on the source's and on the
    target's devices. `shards_so_far` are those that earlier programs made, if any.
    Returns the updated shards; `None` if this process has none of the array's devices.
    """
    # Without senders and receivers, the programs of different parts of an array are
    # equal.
    rounds: list[Round] = []
    sendings: list[Sending] = []
    for one_round in step.rounds:
        elements = math.prod(sent_shape(one_round.form))
        rounds.append(one_round._replace(senders=(), receivers=()))
        sendings.append(Sending(size=elements, pairs=tuple(one_round.pairs)))
    source_dtype = plan.source_shapes[step.keys[0]].dtype
    senders = plan.source_devices[step.keys[0]]
    message_size = sum(sending.size for sending in sendings)
    message = Block(
        shape=(message_size,),
        dtype=program_dtype(sent_dtype(rounds[0].form, source_dtype), senders),
    )
    context.wait_for(plan.extra_bytes([step]), plan.sharers)
    messages = _messages(
        plan,
        names,
        context,
        keys=step.keys,
        rounds=tuple(rounds),
        message=message,
        places=places[0],
    )
    with _on(plan.devices):
        send = send_program(plan.devices, tuple(sendings))
        sent = blocks(plan.devices, message.shape, message.dtype, messages)
        received = _shards(send(sent))
    # Backends without donation would keep the messages.
    del sent
    messages.clear()

    receivers = plan.target_devices
    if any(map(_is_mine, receivers)):
        with _on(receivers):
            write = write_program(
                receivers,
                tuple(rounds),
                source_dtype=source_dtype,
                target=Block(plan.shard_shape, plan.dtype),
                makes_shards=shards_so_far is None,
            )
            arguments = [blocks(receivers, message.shape, message.dtype, received)]
            if shards_so_far is not None:
                arguments.append(shards_so_far)
            shards_so_far = write(places[1], *arguments)
    result = shards_so_far
    if result is None:
        result = next(iter(received.values()))
    # `wait_for` waits for it; a process without target devices has what it exchanged.
    context.in_flight.append(result)
    if _spans_cpu_processes(plan.devices):
        jax.block_until_ready(result)
    return shards_so_far


def _messages(
    plan: Assembly,
    names: Sequence[str],
    context: Context,
    keys: Sequence[str],
    rounds: tuple[Round, ...],
    message: Block,
    places: Any,
) -> dict[Any, jax.Array]:
    """The message of each of this process's devices, of the shape and dtype `message`.
    It is zeros on devices that send nothing. `names` are the paths of the sources, and
    `keys` the numbers of those that are read.
    """
    senders = plan.source_devices[keys[0]]
    messages: dict[Any, jax.Array] = {}
    if any(map(_is_mine, senders)):
        arrays = [context.block(plan, names, senders, key) for key in keys]
        sources = tuple([plan.source_shapes[key] for key in keys])
        with _on(senders):
            slice_parts = slice_program(senders, rounds, sources, message)
            messages = _shards(slice_parts(places, *arrays))
    others: list[Any] = []
    for device in plan.devices:
        if _is_mine(device) and device not in messages:
            others.append(device)
    if others:
        idle_devices = tuple(others)
        with _on(idle_devices):
            messages |= _shards(zeros_program(idle_devices, message)())
    return messages


def _is_mine(device: Any) -> bool:
    """Whether a device is one of this process."""
    return device.process_index == jax.process_index()


def _shards(array: jax.Array) -> dict[Any, jax.Array]:
    """This process's shards of an array, by device."""
    return {shard.device: shard.data for shard in array.addressable_shards}


def _on(devices: tuple[object, ...]) -> Any:
    """A context manager that sets the abstract mesh of these devices, since the caller
    may have set another mesh.
    """
    return jax.sharding.use_abstract_mesh(sharding_of(devices).mesh.abstract_mesh)


def _in_memory(shard: jax.Array, kind: str | None) -> jax.Array:
    """A shard in memory of this kind on its device; `None` is any kind."""
    if kind is None or shard.sharding.memory_kind == kind:
        return shard
    return jax.device_put(shard, shard.sharding.with_memory_kind(kind))


def _spans_cpu_processes(devices: Sequence[Any]) -> bool:
    """Whether the devices are CPU devices of several processes."""
    if devices[0].platform != "cpu":
        return False
    processes = {device.process_index for device in devices}
    return len(processes) > 1


@ft.lru_cache(maxsize=4096)
def _programs(
    plan: Assembly,
    limit_bytes: int | None,
    most_bytes: int,
) -> tuple[tuple[Exchange, tuple[jax.Array | None, ...]], ...]:
    """The programs of an assembly, each with the positions of its parts
    (`Exchange.places`) as an array on all devices. If source and target are on
    different devices, there are two such arrays: one on the source's devices and one on
    the target's. `limit_bytes` is the most bytes of a program in one memory besides
    source and target. If it is `None` and source and target are on different devices,
    programs use at most `most_bytes` on a device.
    """
    numbers = {device: number for number, device in enumerate(plan.devices)}
    programs = []
    for step in plan.exchanges(limit_bytes, most_bytes):
        sides: list[tuple[Any, ...]] = [plan.devices]
        if plan.changes_devices:
            sides = [plan.source_devices[step.keys[0]], plan.target_devices]
        places: list[jax.Array | None] = []
        for side in sides:
            rows = [numbers[device] for device in side]
            places.append(_placed(step.places[rows], side))
        programs.append((step, tuple(places)))
    return tuple(programs)


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
    elsewhere, as one array on the devices of the program that writes into them; `None`
    without constants, or if this process has none of the devices.
    """
    if all(piece.value.path is not None for piece in plan.pieces):
        return None
    constants: dict[int, list[Piece]] = {}
    for part in plan.parts.all:
        if part.piece.value.path is None:
            constants.setdefault(part.receiver, []).append(part.piece)
    # A single program is over all devices, so all of them hold a shard of the target.
    devices = plan.target_devices if plan.changes_devices else plan.devices
    if not constants or not any(map(_is_mine, devices)):
        return None

    block = block_shape(plan.shard_shape)
    numbers = [plan.devices.index(device) for device in devices]

    def shard(index: Any) -> np.ndarray:
        """A device's shard of the array of all shards. The first slice in `index`
        starts at this shard.
        """
        new_shard = np.zeros(plan.shard_shape, plan.dtype)
        number = numbers[(index[0].start or 0) // block[0]]
        for piece in constants.get(number, ()):
            with np.errstate(over="ignore", invalid="ignore"):
                target_view(new_shard, piece)[...] = constant(piece)
        return new_shard.reshape(block)

    whole = (len(devices) * block[0], *block[1:])
    return jax.make_array_from_callback(
        whole, sharding_of(devices), shard, dtype=plan.dtype
    )
