"""Making a move: one function that does with a live array what its Move says, in parts where memory is limited."""

from concurrent.futures import ThreadPoolExecutor

import jax
from jax.sharding import Sharding

from .move import Move, program_of
from .pieces.carry import Means, begun
from .pieces.host import Shards, put_together
from .steps.ends import labelled


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
    - `limit_bytes`: beside the shards of source and target, `move.least_bytes` or more; an array that would need
        more goes in parts.
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
    if move.work is not None:
        return labelled(_in_pieces(move, x, donate, limit_bytes, pool), move.dst)
    return labelled(program_of(move, donate, move.cut_within(limit_bytes))(x), move.dst)


def _in_pieces(
    move: Move, x: jax.Array, donate: bool, limit_bytes: int | None, pool: ThreadPoolExecutor | None
) -> jax.Array:
    work, ends = move.work, (move.src, move.dst)
    assert work is not None
    if x.weak_type and not move.lost and all(end.is_fully_addressable for end in ends):  # which pieces would lose
        return jax.device_put(x, move.dst, donate=donate)
    shards = Shards({"": x}, one_by_one=work.way == "host" and (donate or bool(move.lost)))
    if donate and work.way == "host" and not work.is_elsewhere:
        return put_together(work.struct, work.targets, work.fillings, shards, pool)
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
