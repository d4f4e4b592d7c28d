"""Cuts between sides that do not have the same devices: pieces travel end to end, in memory of their own size.

One program over all devices would take a block of each side's shape on every device, as its arguments have one shape.
So there are three: the source's devices cut the pieces, all devices exchange them, the target's devices put them in.
"""

import functools as ft
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..steps.program import is_small_float
from .cuts import first_casts
from .exchange import AXIS, Block, Form, Round, cut_out, joined, put_in, sent_dtype, sharding_of


# Of each round: how many elements a device sends, and who sends to whom.
Parcel = tuple[int, tuple[tuple[int, int], ...]]


def elements_of(form: Form) -> int:
    """How many elements of a piece are sent: of what repeats, one."""
    return math.prod(count for _, own in form.source for count, _ in own)


def parcels(rounds: Sequence[Round]) -> tuple[Parcel, ...]:
    """What the devices exchange, round by round."""
    return tuple((elements_of(step.form), step.pairs) for step in rounds)


def carried(dtype: Any, devices: Sequence[Any]) -> Any:
    """The dtype in which numbers travel and lie in new shards: small floats are bits on a CPU, as in `on_bits`."""
    if devices[0].platform != "cpu" or not is_small_float(dtype):
        return dtype
    return jnp.dtype(f"uint{jnp.finfo(dtype).bits}")


def parcel_block(rounds: Sequence[Round], dtype: object, devices: Sequence[object]) -> Block:
    """Shape and dtype of what one device sends, of an array of a dtype."""
    return (sum(size for size, _ in parcels(rounds)),), carried(sent_dtype(rounds[0].form, dtype), devices)


def _as(x: jax.Array, dtype: Any) -> jax.Array:
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)


def anywhere(rounds: Sequence[Round]) -> tuple[Round, ...]:
    """Rounds without who sends to whom: those of other parts of an array are often the same."""
    return tuple(step._replace(pairs=()) for step in rounds)


@ft.lru_cache(maxsize=256)
def cutting(devices: tuple[object, ...], rounds: tuple[Round, ...], sources: tuple[Block, ...]) -> Any:
    """The jitted step in which the devices of some arrays of one dtype cut their pieces, and lay them end to end."""
    dtype = sources[0][1]
    (count,), to = parcel_block(rounds, dtype, devices)
    # What is cast before it is sent is cast as what it is.
    own = carried(dtype, devices) if sent_dtype(rounds[0].form, dtype) == dtype else dtype

    def run(places: jax.Array, *given: jax.Array) -> jax.Array:
        shards = [_as(one.reshape(shape), own) for one, (shape, _) in zip(given, sources, strict=True)]
        sent, start = jnp.zeros(count, to), 0
        for at, step in enumerate(rounds):
            # Without the barrier all pieces could be cut, and kept, before the first is laid down.
            shards, sent = jax.lax.optimization_barrier((shards, sent))
            piece = _as(cut_out(step.form, shards[step.number], places[0, at]).reshape(-1), to)
            sent, start = jax.lax.dynamic_update_slice(sent, piece, (start,)), start + piece.size
        return sent

    return _mapped(devices, run, 1 + len(sources))


@ft.lru_cache(maxsize=256)
def sending(devices: tuple[object, ...], found: tuple[Parcel, ...]) -> Any:
    """The jitted step in which all devices exchange parcels; it takes the memory of what is sent for what comes."""

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
    """The jitted step in which the devices of the target put what they received into its shards.

    **Arguments:**

    - `begins`: whether it makes the shards; else it takes them as its last argument and gives them back.
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
    """The jitted step in which bits become the numbers that they are, in their own memory."""
    return _mapped(devices, lambda x: _as(x, dtype), 1, 0)


@ft.lru_cache(maxsize=256)
def zeros(devices: tuple[object, ...], block: Block) -> Any:
    """The jitted step in which devices make a block of zeros each."""
    return jax.jit(lambda: jnp.zeros((len(devices) * block[0][0],), block[1]), out_shardings=sharding_of(devices))


def _mapped(devices: tuple[object, ...], body: Any, count: int, *donated: int) -> Any:
    mesh, spec = sharding_of(devices).mesh, PartitionSpec(AXIS)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(spec,) * count, out_specs=spec, check_vma=False)
    return jax.jit(mapped, donate_argnums=donated)
