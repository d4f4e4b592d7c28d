"""The programs that assemble arrays between devices: one slices the parts of a message
out of old shards, one sends the messages, and one writes them into new shards.
"""

import functools as ft
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..._convert import Scale
from .exchange import (
    AXIS,
    MOST_IN_FLIGHT,
    Round,
    StridedCopy,
    bitcast,
    block_shape,
    first_shard,
    per_device,
    program_dtype,
    sent_dtype,
    sharding_of,
    slice_part,
    write_part,
)
from .shard_part import Block, sender_cast_count


class Sending(NamedTuple):
    """One round: the number of elements that a device sends, and the pairs of sender
    and receiver.
    """

    size: int
    pairs: tuple[tuple[int, int], ...]


def sent_shape(form: StridedCopy) -> list[int]:
    """The shape in which a part of a shard is sent. An element that is written several
    times is sent once.
    """
    shape: list[int] = []
    # For each dimension of the box that is read, the loops that reach its elements.
    for _, loops in form.source:
        for count, _ in loops:
            shape.append(count)
    return shape


@ft.lru_cache(maxsize=256)
def slice_program(
    devices: tuple[Any, ...],
    rounds: tuple[Round, ...],
    sources: tuple[Block, ...],
    message_block: Block,
) -> Any:
    """A jitted function on the source's devices: each device slices the parts that it
    sends, one for each round, out of its shards, and concatenates them to its message.
    `sources` have the shape and dtype of a shard of each array that is read, and
    `message_block` has those of the message.
    """
    source_dtype = sources[0].dtype
    dtype = source_dtype
    # The sender casts values, not their bits.
    if sent_dtype(rounds[0].form, source_dtype) == source_dtype:
        dtype = program_dtype(source_dtype, devices)

    def run(places: jax.Array, *arrays: jax.Array) -> jax.Array:
        """The message of a device that has these shards of the sources."""
        shards: list[jax.Array] = []
        for source, array in zip(sources, arrays, strict=True):
            shards.append(bitcast(array.reshape(source.shape), dtype))
        message = jnp.zeros(message_block.shape, message_block.dtype)
        start = 0
        for number, step in enumerate(rounds):
            # Without the barrier XLA could slice and keep all parts before it writes
            # the first.
            shards, message = jax.lax.optimization_barrier((shards, message))
            shard = shards[step.source_number]
            part = slice_part(step.form, shard, places[0, number])
            part = bitcast(part.reshape(-1), message_block.dtype)
            message = jax.lax.dynamic_update_slice(message, part, (start,))
            start += part.size
        return message

    return per_device(devices, run, 1 + len(sources))


@ft.lru_cache(maxsize=256)
def send_program(devices: tuple[object, ...], rounds: tuple[Sending, ...]) -> Any:
    """A jitted function in which devices exchange their messages, by one collective
    permute for each round of `rounds`. Each part that a device receives takes the place
    of the one that it sent in this round.
    """

    def run(message: jax.Array) -> jax.Array:
        """What a device has of the message of each device that sends to it."""
        # Without pairs of sender and receiver, devices copy their own elements.
        start = 0
        for number, (size, pairs) in enumerate(rounds):
            if pairs:
                part = jax.lax.slice(message, (start,), (start + size,))
                part = jax.lax.ppermute(part, AXIS, pairs)
                message = jax.lax.dynamic_update_slice(message, part, (start,))
                if (number + 1) % MOST_IN_FLIGHT == 0:
                    message = jax.lax.optimization_barrier(message)
            start += size
        return message

    return per_device(devices, run, 1, donated=(0,))


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
    dtype = program_dtype(target.dtype, devices)
    wire_dtype = sent_dtype(rounds[0].form, source_dtype)
    casts = rounds[0].form.casts
    is_cast_by_sender = sender_cast_count(casts, source_dtype) == len(casts)

    def run(places: jax.Array, message: jax.Array, *arrays: jax.Array) -> jax.Array:
        """A device's shard with the parts of the message written into it."""
        earlier = None if makes_shards else arrays[0]
        shard = first_shard(target.shape, dtype, earlier)
        start = 0
        for number, step in enumerate(rounds):
            message, shard = jax.lax.optimization_barrier((message, shard))
            shape = sent_shape(step.form)
            stop = start + math.prod(shape)
            part = jax.lax.slice(message, (start,), (stop,)).reshape(shape)
            # The receiver casts values, not the bits that the message has.
            if not is_cast_by_sender:
                part = bitcast(part, wire_dtype)
            start = stop
            shard = write_part(
                step=step,
                target_shard=shard,
                part=part,
                source_dtype=source_dtype,
                place=places[0, number],
            )
        return bitcast(shard.reshape(block_shape(target.shape)), target.dtype)

    if makes_shards:
        return per_device(devices, run, 2)
    return per_device(devices, run, 3, donated=(2,))


@ft.lru_cache(maxsize=256)
def zeros_program(devices: tuple[object, ...], message: Block) -> Any:
    """A jitted function in which each device makes a message of zeros, of the shape and
    dtype in `message`.
    """
    shape = (len(devices) * message.shape[0],)
    return jax.jit(
        lambda: jnp.zeros(shape, message.dtype), out_shardings=sharding_of(devices)
    )


@ft.lru_cache(maxsize=64)
def scaling_program(scale: Scale, dtype: Any, sharding: object) -> Any:
    """A jitted function of an array and its scales: their product in float32, cast to
    `dtype`, in `sharding`. Blocks at the array's end may be smaller than `scale.block`.
    """

    def run(x: jax.Array, scales: jax.Array) -> jax.Array:
        """`x` multiplied by `scales`, of which each is repeated over its block."""
        scales = scales.astype(jnp.float32)
        for dim, size in enumerate(scale.block):
            scales = jnp.repeat(scales, size, axis=dim)
        scales = scales[tuple(map(slice, x.shape))]
        return (x.astype(jnp.float32) * scales).astype(dtype)

    return jax.jit(run, out_shardings=sharding)
