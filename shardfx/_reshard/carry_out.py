"""Making a move: one function that does with a live array what its Move says, in slices where memory is limited."""

import functools as ft
from concurrent.futures import ThreadPoolExecutor

import jax
from jax.sharding import Sharding

from .ends import in_device_memory, named
from .move import Move, move_of
from .pieces.carry import Means, begun
from .pieces.host import Shards, copied, put_together
from .steps.ends import labelled
from .within_limit import Slices, sliced, slices_of


def carry_out(
    move: Move,
    x: jax.Array,
    *,
    donate: bool = False,
    limit_bytes: int | None = None,
    pool: ThreadPoolExecutor | None = None,
) -> jax.Array:
    """Moves one live array; work that the devices still have to do is not waited for.

    **Arguments:**

    - `move`: how.
    - `x`: an array of its shape, dtype and source.
    - `donate`: gives up its buffers, unless the result has them.
    - `limit_bytes`: beside the shards of source and target, `least_limit_bytes` or more; an array that would need
        more goes in slices.
    - `pool`: threads to copy with.

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
    elif move.work is None:
        moved = move.programs[donate](x)
    else:
        moved = _in_pieces(move, x, donate, limit_bytes, pool)
    return labelled(moved, move.dst)


def _in_pieces(
    move: Move, x: jax.Array, donate: bool, limit_bytes: int | None, pool: ThreadPoolExecutor | None
) -> jax.Array:
    work, ends = move.work, (move.src, move.dst)
    assert work is not None
    if x.weak_type and not move.lost and all(end.is_fully_addressable for end in ends):  # which pieces would lose
        return jax.device_put(x, move.dst, donate=donate)
    shards = Shards({"": x}, one_by_one=work.way == "host" and (donate or bool(move.lost)))
    if work.way == "host" and not work.is_elsewhere:
        make = put_together if donate else copied
        return make(work.struct, work.targets, work.fillings, shards, pool)
    if work.way == "programs" and limit_bytes is not None:
        limit_bytes -= move.aside_bytes
    made = begun(work, Means({"": x}, None, limit_bytes, work.most_bytes, pool, shards))()
    if donate:
        jax.block_until_ready(made)
        x.delete()
    return made


def _in_other_memory(x: jax.Array, dst: Sharding, donate: bool) -> jax.Array:
    if not dst.addressable_devices:  # JAX's own device_put asserts that it has something to put
        return labelled(x, dst)
    result = jax.device_put(x, dst)
    if donate:  # JAX itself cannot donate across memory kinds; the copy keeps what it reads until it is done
        x.delete()
    return result


def least_limit_bytes(move: Move) -> int:
    """The least memory limit under which an array can move: whole, or in the finest slices or pieces."""
    if move.work is not None:
        return min(move.extra_bytes, move.work.least_bytes + move.aside_bytes)
    finest = _finest(move)
    return move.extra_bytes if finest is None else min(move.extra_bytes, _part(move, finest).held_bytes)


def why_least(move: Move) -> str:
    """Why an array cannot move under a smaller limit."""
    if move.work is not None:
        return "even in the finest of pieces"
    finest = _finest(move)
    if finest is not None and _part(move, finest).held_bytes < move.extra_bytes:
        return f"even in {finest.parts} slices of shape {finest.shape}, the finest"
    for end in (move.src, move.dst):
        if in_device_memory(end) is not end:
            return f"it moves whole, as programs cannot cut slices in {end.memory_kind} memory"
    return "it moves whole, as its dimensions cannot be cut further"


@ft.lru_cache(maxsize=1024)
def slices_within(move: Move, limit_bytes: int) -> Slices | None:
    """The slices in which an array moves within a limit that is large enough; `None` where it may move whole."""
    if move.work is not None or move.extra_bytes <= limit_bytes:
        return None
    enough = _slices(move, -(-move.held_bytes // max(1, limit_bytes)))
    fits = enough is not None and _part(move, enough).held_bytes <= limit_bytes
    return enough if fits else _finest(move)


@ft.lru_cache(maxsize=1024)
def _finest(move: Move) -> Slices | None:
    return _slices(move, max(move.shape, default=1))


def _slices(move: Move, count: int) -> Slices | None:
    if move.plan is None or any(in_device_memory(end) is not end for end in (move.src, move.dst)):
        return None
    return slices_of(move.shape, named(move.src), named(move.dst), count)


def _part(move: Move, cut: Slices) -> Move:
    """The move of one slice."""
    return move_of(cut.shape, move.dtype, move.src, move.dst, move.lost, move.copies)
