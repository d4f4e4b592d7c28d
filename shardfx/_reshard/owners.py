"""How matrices lie on the wire between the devices that hold their pieces and their owners: arrays of one device.

Each device sends one row of `Exchange.width` units to each owner: its pieces of the owner's matrices, one behind the
other. So an owner receives a row from each device, and the columns of a matrix in these rows are all its pieces.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .stacks import Exchange, Stack


class Layout:
    """Moves the pieces of an exchange's matrices; all methods are for the body of a `shard_map`."""

    def __init__(self, exchange: Exchange, sizes: dict[str, int]):
        self.exchange, self.sizes = exchange, sizes

    def size(self, axes: Iterable[str]) -> int:
        return math.prod(self.sizes[axis] for axis in axes)

    def rows(self, stack: Stack, arrays: Sequence[Any]) -> Any:
        """What a device sends of each matrix, one row each."""
        whole = jnp.concatenate([jnp.reshape(one, (-1, *stack.piece)) for one in arrays])
        return whole.reshape(len(whole), -1, *self.exchange.unit)

    def arrays(self, stack: Stack, rows: Any) -> Iterator[Any]:
        """The reverse of `rows`."""
        counts = [part.number // self.size(part.cut) for part in stack.parts]
        for part, own in zip(stack.parts, jnp.split(rows, np.cumsum(counts)[:-1].tolist()), strict=True):
            yield own.reshape(part.many[0] // self.size(part.cut), *part.many[1:], *stack.piece)

    def alike(self) -> Iterator[tuple[np.ndarray, list[tuple[int, np.ndarray]]]]:
        """Owners that own as many of each stack: who they are, and for each stack their matrices, by owner."""
        found: dict[tuple[int, ...], list[int]] = {}
        for owner, own in enumerate(self.exchange.holds):
            found.setdefault(tuple(stack for stack, _ in own), []).append(owner)
        for stacks, owners in found.items():
            held = np.array([self.exchange.holds[owner] for owner in owners], int).reshape(len(owners), -1, 2)
            yield np.array(owners), [(stack, held[:, held[0, :, 0] == stack, 1]) for stack in dict.fromkeys(stacks)]

    def packed(self, rows: Sequence[Any]) -> Any:
        """One row for each owner, of the rows of all stacks."""
        made, order = [], []
        for owners, held in self.alike():
            blocks = [jnp.zeros((len(owners), 0, *self.exchange.unit), rows[0].dtype)]
            blocks += [_taken(rows[stack], own.ravel()).reshape(len(owners), -1, *self.exchange.unit)
                       for stack, own in held]  # fmt: skip
            made.append(_padded(jnp.concatenate(blocks, axis=1), self.exchange.width))
            order += [*owners]
        return _taken(jnp.concatenate(made), np.argsort(order))

    def unpacked(self, whole: Any) -> list[Any]:
        """The reverse of `packed`."""
        rows: list[list[Any]] = [[] for _ in self.exchange.stacks]
        order: list[list[int]] = [[] for _ in self.exchange.stacks]
        for owners, held in self.alike():
            ends = np.cumsum([own.shape[1] * self.exchange.stacks[stack].width for stack, own in held])
            blocks = jnp.split(_taken(whole, owners), ends.tolist(), axis=1)
            for (stack, own), block in zip(held, blocks, strict=False):  # the last one is padding
                rows[stack].append(block.reshape(own.size, -1, *self.exchange.unit))
                order[stack] += own.ravel().tolist()
        return [_taken(jnp.concatenate(own), np.argsort(at)) for own, at in zip(rows, order, strict=True)]

    def sent(self, rows: Any) -> Any:
        """Each row to its owner; or back, which is the same exchange."""
        axes = self.exchange.axes
        return jax.lax.all_to_all(rows, axes, 0, 0, tiled=True) if self.size(axes) > 1 else rows

    def mine(self, table: np.ndarray) -> Any:
        """This owner's row of a table."""
        is_same = (table == table[0]).all()
        return jnp.asarray(table[0]) if is_same else jnp.asarray(table)[jax.lax.axis_index(self.exchange.axes)]

    def whole(self, stack: Stack, pieces: Any) -> Any:
        """A matrix of its pieces."""
        first, axes = stack.parts[0], self.exchange.axes
        pieces = pieces.reshape(*[self.sizes[axis] for axis in axes], *stack.piece)
        # What several devices have, the first of them sent.
        for at in (at for at, axis in enumerate(axes) if axis not in self.cuts(stack)):
            pieces = jax.lax.slice_in_dim(pieces, 0, 1, axis=at)
        return pieces.transpose(self.places(stack)).reshape(first.matrix)

    def pieces(self, stack: Stack, matrix: Any) -> Any:
        """The reverse of `whole`."""
        axes, cuts = self.exchange.axes, self.cuts(stack)
        grid = [self.sizes[axis] for axis in axes]
        shape = [*[size if axis in cuts else 1 for axis, size in zip(axes, grid, strict=True)], *stack.piece]
        places = self.places(stack)
        pieces = matrix.reshape([shape[at] for at in places]).transpose(np.argsort(places))
        pieces = jnp.broadcast_to(pieces, (*grid, *stack.piece))
        return pieces.reshape(math.prod(grid), -1, *self.exchange.unit)

    def cuts(self, stack: Stack) -> list[str]:
        return [axis for own in stack.parts[0].laid for axis in own]

    def places(self, stack: Stack) -> list[int]:
        """Where the cuts and the dimensions of a matrix are in its pieces, which have the owners' axes first."""
        axes = self.exchange.axes
        places = [at for at, axis in enumerate(axes) if axis not in self.cuts(stack)]
        entries = stack.parts[0].laid
        return places + [at for dim, own in enumerate(entries) for at in (*map(axes.index, own), len(axes) + dim)]


def _padded(rows: Any, width: int) -> Any:
    more = [(0, width - size if dim == 1 else 0) for dim, size in enumerate(rows.shape)]
    return rows if rows.shape[1] == width else jnp.pad(rows, more)


def _taken(rows: Any, numbers: np.ndarray) -> Any:
    """Some of the rows; those that stand beside each other are a slice."""
    first, count = int(numbers[0]), len(numbers)
    if not np.array_equal(numbers, np.arange(first, first + count)):
        return rows[numbers]
    return rows if count == len(rows) else rows[first : first + count]
