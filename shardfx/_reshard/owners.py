"""How matrices lie on the wire between the devices that hold their pieces and their owners: arrays of one device.

Each device sends one row of `Exchange.width` units to each owner: its pieces of the owner's matrices, one behind the
other. So an owner receives a row from each device, and the columns of a matrix in these rows are all its pieces.
All functions are for the body of a `shard_map`.
"""

import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .stacks import Exchange, Stack


def packed(exchange: Exchange, arrays: Sequence[jax.Array]) -> jax.Array:
    """One row for each owner, of a device's pieces of all arrays."""
    column, unit = iter(arrays), exchange.unit
    pieces = [
        jnp.concatenate([next(column).reshape(-1, *stack.piece) for _ in stack.parts]) for stack in exchange.stacks
    ]
    made, order = [], []
    for owners, held in _alike(exchange):
        blocks = [_taken(pieces[at], own.ravel()).reshape(len(owners), -1, *unit) for at, own in held]
        left = exchange.width - sum(block.shape[1] for block in blocks)
        blocks.append(jnp.zeros((len(owners), left, *unit), pieces[0].dtype))
        made.append(jnp.concatenate(blocks, axis=1))
        order += [*owners]
    return _taken(jnp.concatenate(made), np.argsort(order))


def unpacked(exchange: Exchange, rows: jax.Array) -> list[jax.Array]:
    """The reverse of `packed`."""
    pieces: list[list[jax.Array]] = [[] for _ in exchange.stacks]
    order: list[list[int]] = [[] for _ in exchange.stacks]
    for owners, held in _alike(exchange):
        ends = np.cumsum([own.shape[1] * exchange.stacks[at].width for at, own in held])
        blocks = jnp.split(_taken(rows, owners), ends.tolist(), axis=1)
        for (at, own), block in zip(held, blocks, strict=False):  # the last one is padding
            pieces[at].append(block.reshape(own.size, *exchange.stacks[at].piece))
            order[at] += own.ravel().tolist()
    made = []
    for stack, own, numbers in zip(exchange.stacks, pieces, order, strict=True):
        shapes = [(part.many[0] // exchange.size(part.cut), *part.many[1:]) for part in stack.parts]
        ends = np.cumsum([*map(math.prod, shapes)])[:-1].tolist()
        parts = jnp.split(_taken(jnp.concatenate(own), np.argsort(numbers)), ends)
        made += [one.reshape(*shape, *stack.piece) for one, shape in zip(parts, shapes, strict=True)]
    return made


def _alike(exchange: Exchange) -> Iterator[tuple[np.ndarray, list[tuple[int, np.ndarray]]]]:
    """Owners that own as many of each stack: who they are, and for each stack their matrices, by owner."""
    found: dict[tuple[int, ...], list[int]] = {}
    for owner, own in enumerate(exchange.holds):
        found.setdefault(tuple(stack for stack, _ in own), []).append(owner)
    for stacks, owners in found.items():
        held = np.array([exchange.holds[owner] for owner in owners], int).reshape(len(owners), -1, 2)
        yield np.array(owners), [(stack, held[:, held[0, :, 0] == stack, 1]) for stack in dict.fromkeys(stacks)]


def _taken(rows: jax.Array, numbers: np.ndarray) -> jax.Array:
    """Some of the rows; those that stand beside each other are a slice."""
    first, count = int(numbers[0]), len(numbers)
    if not np.array_equal(numbers, np.arange(first, first + count)):
        return rows[numbers]
    return rows if count == len(rows) else rows[first : first + count]


def sent(exchange: Exchange, rows: jax.Array) -> jax.Array:
    """Each row at its owner; or back, which is the same all-to-all."""
    return jax.lax.all_to_all(rows, exchange.axes, 0, 0, tiled=True) if len(exchange.holds) > 1 else rows


def row_of_owner(exchange: Exchange, table: np.ndarray) -> jax.Array:
    """This owner's row of a table."""
    is_same = (table == table[0]).all()
    return jnp.asarray(table[0]) if is_same else jnp.asarray(table)[jax.lax.axis_index(exchange.axes)]


def joined(exchange: Exchange, stack: Stack, pieces: jax.Array) -> jax.Array:
    """A matrix from its pieces."""
    grid, order = _grid(exchange, stack), _order(exchange, stack)
    pieces = pieces.reshape(*[exchange.sizes[axis] for axis in exchange.axes], *stack.piece)
    # Of the devices that hold the same piece, the first one's is taken.
    return pieces[tuple(slice(size) for size in grid)].transpose(order).reshape(stack.parts[0].matrix)


def apart(exchange: Exchange, stack: Stack, matrix: jax.Array) -> jax.Array:
    """The pieces of a matrix, for each device its own."""
    grid, order = _grid(exchange, stack), _order(exchange, stack)
    pieces = matrix.reshape([(*grid, *stack.piece)[at] for at in order]).transpose(np.argsort(order))
    pieces = jnp.broadcast_to(pieces, (*[exchange.sizes[axis] for axis in exchange.axes], *stack.piece))
    return pieces.reshape(len(exchange.holds), -1, *exchange.unit)


def _grid(exchange: Exchange, stack: Stack) -> list[int]:
    """Along each of the owners' axes, into how many parts it cuts a matrix."""
    cuts = {axis for own in stack.parts[0].laid for axis in own}
    return [exchange.sizes[axis] if axis in cuts else 1 for axis in exchange.axes]


def _order(exchange: Exchange, stack: Stack) -> list[int]:
    """The dimensions of a matrix's pieces, first the owners' axes, in the order in which they are a matrix."""
    axes, laid = exchange.axes, stack.parts[0].laid
    order = [at for dim, own in enumerate(laid) for at in (*map(axes.index, own), len(axes) + dim)]
    return [at for at in range(len(axes)) if at not in order] + order
