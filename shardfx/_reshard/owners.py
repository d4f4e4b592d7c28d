"""How matrices lie on the wire between the devices that hold their pieces and their owners: arrays of one device.

Each device sends one row of `Exchange.width` units to each owner: its pieces of the owner's matrices, one behind the
other. So an owner receives a row from each device, and the columns of a matrix in these rows are all its pieces.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .stacks import Exchange, Matrices, Stack


def lead_of(part: Matrices) -> list[tuple[str, ...] | None]:
    """The axes that cut each dimension that counts matrices: the first, or none."""
    return [part.cut or None, *[None] * (len(part.many) - 1)]


class Layout:
    """Moves the pieces of an exchange's matrices; all methods are for the body of a `shard_map`."""

    def __init__(self, exchange: Exchange, sizes: dict[str, int]):
        self.exchange, self.sizes = exchange, sizes

    def size(self, axes: Iterable[str]) -> int:
        return math.prod(self.sizes[axis] for axis in axes)

    def axes(self, stack: Stack) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """The axes that cut a matrix among its owners' axes, those that do not, and those that cut it beside them."""
        cut = [axis for axes in stack.parts[0].entries for axis in axes]
        own = self.exchange.axes
        within, beside = (tuple(axis for axis in cut if (axis in own) is inside) for inside in (True, False))
        return within, tuple(axis for axis in own if axis not in cut), beside

    def rows(self, stack: Stack, arrays: Sequence[Any]) -> Any:
        """What a device sends of each matrix, one row each."""
        (_, missing, beside), unit = self.axes(stack), self.exchange.unit
        local = self.local(stack)
        whole = jnp.concatenate([jnp.reshape(one, (-1, *local)) for one in arrays])
        if beside:
            whole = jax.lax.all_gather(whole, beside, axis=1)
        whole = whole.reshape(len(whole), -1, *unit)
        if missing:
            # All of these devices have it: each sends a part.
            parts = self.size(missing)
            whole = _padded(whole, parts * stack.width).reshape(len(whole), parts, stack.width)
            whole = jax.lax.dynamic_index_in_dim(whole, jax.lax.axis_index(missing), axis=1, keepdims=False)
        return whole

    def arrays(self, stack: Stack, rows: Any) -> Iterator[Any]:
        """The reverse of `rows`."""
        _, missing, beside = self.axes(stack)
        local = self.local(stack)
        if missing:
            rows = jax.lax.all_gather(rows, missing, axis=1).reshape(len(rows), -1)[:, : self.elements(stack)]
        rows = rows.reshape(len(rows), -1, *local)
        if beside:
            rows = jax.lax.dynamic_slice_in_dim(rows, jax.lax.axis_index(beside), 1, axis=1)
        counts = [part.number // self.size(part.cut) for part in stack.parts]
        for part, own in zip(stack.parts, jnp.split(rows, np.cumsum(counts)[:-1].tolist()), strict=True):
            yield own.reshape(part.many[0] // self.size(part.cut), *part.many[1:], *local)

    def local(self, stack: Stack) -> tuple[int, ...]:
        """The shape of a device's piece of a matrix."""
        first = stack.parts[0]
        return tuple(size // self.size(axes) for size, axes in zip(first.rest, first.entries, strict=True))

    def elements(self, stack: Stack) -> int:
        """How many elements of a matrix the devices along `missing` have."""
        return math.prod(self.local(stack)) * self.size(self.axes(stack)[2])

    def alike(self) -> Iterator[tuple[list[int], list[tuple[int, int]], np.ndarray]]:
        """Owners that own as many of each stack: who they are, stacks with their counts, and matrices by owner."""
        found: dict[tuple[int, ...], list[int]] = {}
        for owner, own in enumerate(self.exchange.holds):
            found.setdefault(tuple(stack for stack, _ in own), []).append(owner)
        for stacks, owners in found.items():
            runs = [(stack, len([*run])) for stack, run in itertools.groupby(stacks)]
            matrices = [[matrix for _, matrix in self.exchange.holds[owner]] for owner in owners]
            yield owners, runs, np.array(matrices, int).reshape(len(owners), len(stacks))

    def packed(self, rows: Sequence[Any]) -> Any:
        """One row for each owner, of the rows of all stacks."""
        made, order = [], []
        for owners, runs, matrices in self.alike():
            blocks, at = [], 0
            for stack, count in runs:
                own = _taken(rows[stack], matrices[:, at : at + count].ravel())
                blocks.append(own.reshape(len(owners), -1, *self.exchange.unit))
                at += count
            empty = jnp.zeros((len(owners), 0, *self.exchange.unit), rows[0].dtype)
            made.append(_padded(jnp.concatenate(blocks or [empty], axis=1), self.exchange.width))
            order += owners
        return _taken(jnp.concatenate(made), np.argsort(order))

    def unpacked(self, whole: Any) -> list[Any]:
        """The reverse of `packed`."""
        rows: list[list[Any]] = [[] for _ in self.exchange.stacks]
        order: list[list[int]] = [[] for _ in self.exchange.stacks]
        for owners, runs, matrices in self.alike():
            own, at, start = _taken(whole, np.array(owners)), 0, 0
            for stack, count in runs:
                end = start + count * self.exchange.stacks[stack].width
                rows[stack].append(own[:, start:end].reshape(len(owners) * count, -1, *self.exchange.unit))
                order[stack] += matrices[:, at : at + count].ravel().tolist()
                at, start = at + count, end
        return [_taken(jnp.concatenate(own), np.argsort(at)) for own, at in zip(rows, order, strict=True)]

    def sent(self, rows: Any) -> Any:
        """Each row to its owner; or back, which is the same exchange."""
        axes = self.exchange.axes
        return jax.lax.all_to_all(rows, axes, 0, 0, tiled=True) if self.size(axes) > 1 else rows

    def mine(self, table: np.ndarray) -> Any:
        """This owner's row of a table."""
        return jnp.asarray(table[0] if (table == table[0]).all() else jnp.asarray(table)[jax.lax.axis_index(self.exchange.axes)])

    def whole(self, stack: Stack, pieces: Any) -> Any:
        """A matrix of its pieces."""
        first, (within, missing, beside) = stack.parts[0], self.axes(stack)
        own, inner = self.exchange.axes, pieces.shape[1:]
        pieces = pieces.reshape(*self.grid(own), *inner)
        pieces = pieces.transpose(*[own.index(axis) for axis in (*within, *missing)], *range(len(own), pieces.ndim))
        if missing:
            pieces = pieces.reshape(self.size(within), -1)[:, : self.elements(stack)]
        pieces = pieces.reshape(*self.grid(within, beside), *self.local(stack))
        return pieces.transpose(self.places(stack)).reshape(first.matrix)

    def pieces(self, stack: Stack, matrix: Any) -> Any:
        """The reverse of `whole`."""
        first, (within, missing, _) = stack.parts[0], self.axes(stack)
        pairs = zip(first.entries, self.local(stack), strict=True)
        pieces = matrix.reshape([size for axes, left in pairs for size in (*self.grid(axes), left)])
        pieces = pieces.transpose(np.argsort(self.places(stack)))
        if missing:
            pieces = _padded(pieces.reshape(self.size(within), -1), self.size(missing) * stack.width)
        inner = stack.width, *self.exchange.unit
        pieces = pieces.reshape(*self.grid(within, missing), *inner)
        order = [(*within, *missing).index(axis) for axis in self.exchange.axes]
        return pieces.transpose(*order, *range(len(order), pieces.ndim)).reshape(-1, *inner)

    def grid(self, *groups: Iterable[str]) -> list[int]:
        return [self.sizes[axis] for axes in groups for axis in axes]

    def places(self, stack: Stack) -> list[int]:
        """Where each cut and each dimension of a matrix is in its pieces, which have all cuts first."""
        within, _, beside = self.axes(stack)
        axes = (*within, *beside)
        entries = stack.parts[0].entries
        return [at for dim, own in enumerate(entries) for at in (*map(axes.index, own), len(axes) + dim)]


def _padded(rows: Any, width: int) -> Any:
    more = [(0, width - size if dim == 1 else 0) for dim, size in enumerate(rows.shape)]
    return rows if rows.shape[1] == width else jnp.pad(rows, more)


def _taken(rows: Any, numbers: np.ndarray) -> Any:
    """Some of the rows; those that stand beside each other are a slice."""
    first, count = int(numbers[0]), len(numbers)
    if not np.array_equal(numbers, np.arange(first, first + count)):
        return rows[numbers]
    return rows if count == len(rows) else rows[first : first + count]
