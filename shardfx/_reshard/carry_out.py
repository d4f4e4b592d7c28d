"""Making a move: one function that does with a live array what its Move says, in slices where memory is limited."""

import functools as ft

import jax
from jax.sharding import NamedSharding, Sharding

from .move import Move, move_of, named, through
from .steps.ends import labelled
from .tiles.transfer import IN_FLIGHT_BYTES, in_device_memory, transferred
from .within_limit import Slices, sliced, slices_of


def carry_out(move: Move, x: jax.Array, *, donate: bool = False, limit_bytes: int | None = None) -> jax.Array:
    """Moves one live array; work that the devices still have to do is not waited for.

    **Arguments:**

    - `move`: how.
    - `x`: an array of its shape, dtype and source.
    - `donate`: gives up its buffers, unless the result has them.
    - `limit_bytes`: beside the shards of source and target, `least_limit_bytes` or more; an array that would need
        more goes in slices.

    **Returns:**

    The moved array, committed to exactly the sharding `move.dst`.
    """
    if x.dtype != move.dtype:  # typed PRNG keys: their data move
        data = carry_out(move, jax.random.key_data(x), donate=donate, limit_bytes=limit_bytes)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if move.idle:
        return labelled(x, move.dst)
    if move.how == "memory kind":
        return _in_other_memory(x, move.dst, donate)
    cut = None if limit_bytes is None else slices_within(move, limit_bytes)
    if cut is not None:
        part = _part(move, cut)
        ends = named(move.src), named(move.dst)
        moved = sliced(x, *ends, cut, ft.partial(carry_out, part, donate=True), donate=donate)
    elif move.transfer is None:
        moved = move.programs[donate](x)
    else:
        moved = transferred(move.transfer, x, donate, IN_FLIGHT_BYTES if limit_bytes is None else limit_bytes)
    return labelled(moved, move.dst)


def _in_other_memory(x: jax.Array, dst: Sharding, donate: bool) -> jax.Array:
    if not dst.addressable_devices:  # JAX's own device_put asserts that it has something to put
        return labelled(x, dst)
    result = jax.device_put(x, dst)
    if donate:  # JAX itself cannot donate across memory kinds; the copy keeps what it reads until it is done
        x.delete()
    return result


def least_limit_bytes(move: Move) -> int:
    """The least memory limit under which an array can move: whole, or in the finest slices."""
    finest = _finest(move)
    return move.extra_bytes if finest is None else min(move.extra_bytes, _part(move, finest).held_bytes)


def why_least(move: Move) -> str:
    """Why an array cannot move under a smaller limit."""
    finest = _finest(move)
    if finest is not None and _part(move, finest).held_bytes < move.extra_bytes:
        return f"even in {finest.parts} slices of shape {finest.shape}, the finest"
    for end in (move.src, move.dst):
        if not isinstance(end, NamedSharding):
            return f"it moves whole, as a {type(end).__name__} does not say how to slice it"
        if in_device_memory(end) is not end:
            return f"it moves whole, as programs cannot cut slices in {end.memory_kind} memory"
    return "it moves whole, as its dimensions cannot be cut further"


@ft.lru_cache(maxsize=1024)
def slices_within(move: Move, limit_bytes: int) -> Slices | None:
    """The slices in which an array moves within a limit that is large enough; `None` where it may move whole."""
    if move.extra_bytes <= limit_bytes:
        return None
    enough = _slices(move, -(-move.held_bytes // max(1, limit_bytes)))
    fits = enough is not None and _part(move, enough).held_bytes <= limit_bytes
    return enough if fits else _finest(move)


@ft.lru_cache(maxsize=1024)
def _finest(move: Move) -> Slices | None:
    return _slices(move, max(move.shape, default=1))


def _slices(move: Move, count: int) -> Slices | None:
    ends = (move.src, move.dst)
    if any(not isinstance(end, NamedSharding) or in_device_memory(end) is not end for end in ends):
        return None
    return slices_of(move.shape, named(move.src), named(move.dst), count)


def _part(move: Move, cut: Slices) -> Move:
    """The move of one slice."""
    part = move_of(cut.shape, move.dtype, move.src, move.dst, move.lost, move.copies)
    if move.transfer is None or part.transfer is None or not move.transfer.sent_before:
        return part
    return through(part, move.transfer.sent_before)
