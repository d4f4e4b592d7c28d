"""Pieces in JAX: the elements that they take from an array, and the box of another that they are put into."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .pieces import NOWHERE, Factor, Piece, along, hull, swapped


# Per dimension the extent of a box, and the digits that count through it: how many, and how far apart.
Digits = tuple[tuple[int, tuple[tuple[int, int], ...]], ...]


class Form(NamedTuple):
    """What pieces have in common that begin at different places.

    **Arguments:**

    - `source`, `target`: the digits of each dimension, on either side.
    - `order`: per digit of the target the number of the source's digit that it is, or `NOWHERE` where it repeats.
    - `casts`: the dtypes that the numbers are cast to.
    """

    source: Digits
    target: Digits
    order: tuple[int, ...]
    casts: tuple[Any, ...]


def form_of(piece: Piece) -> Form:
    """What a piece has in common with others that begin elsewhere."""
    sources, targets = _digits(swapped(piece)), _digits(piece)
    source = [f for own in sources for f in own]
    # Seen from either side the same digit has the same four numbers.
    numbers = {(f.target_dim, f.target_step): number for number, f in enumerate(source)}
    order = tuple(
        NOWHERE if f.source_dim == NOWHERE else numbers[f.source_dim, f.source_step] for own in targets for f in own
    )
    return Form(_plain(hull(swapped(piece)), sources), _plain(hull(piece), targets), order, tuple(piece.value.casts))


def _digits(piece: Piece) -> list[list[Factor]]:
    return [along(piece, dim) for dim in range(len(piece.target))]


def _plain(box: Sequence[tuple[int, int]], digits: Sequence[Sequence[Factor]]) -> Digits:
    sizes = [stop - start for start, stop in box]
    return tuple((size, tuple((f.size, f.target_step) for f in own)) for size, own in zip(sizes, digits, strict=True))


def is_dense(size: int, digits: Sequence[tuple[int, int]]) -> bool:
    """Whether digits count through all of a box's dimension, one element after the other."""
    step = 1
    for count, own in reversed(digits):
        if own != step:
            return False
        step *= count
    return step == size


def taken(x: jax.Array, digits: Digits) -> jax.Array:
    """The elements of a box that digits count through: one dimension each."""
    axis = 0
    for size, own in digits:
        if is_dense(size, own):
            x = x.reshape(*x.shape[:axis], *[count for count, _ in own], *x.shape[axis + 1 :])
            axis += len(own)
            continue
        for count, step in own:
            x = _rows(x, axis, count, step)
            axis += 1
            inner = _below(own, step)
            x = jax.lax.slice_in_dim(x, 0, inner, axis=axis)
        x = x.reshape(*x.shape[:axis], *x.shape[axis + 1 :])
    return x


def _below(own: Sequence[tuple[int, int]], step: int) -> int:
    """From the first to the last element that the digits below one of this step reach."""
    return 1 + sum((count - 1) * each for count, each in own if each < step)


def _rows(x: jax.Array, axis: int, count: int, step: int) -> jax.Array:
    """A dimension as so many rows of `step` elements; behind the last there may be too few."""
    missing = count * step - x.shape[axis]
    padded = jnp.pad(x, [(0, missing if at == axis else 0) for at in range(x.ndim)])
    return padded.reshape(*x.shape[:axis], count, step, *x.shape[axis + 1 :])


def ordered(piece: jax.Array, form: Form) -> jax.Array:
    """The digits in the order of the target, those that repeat among them."""
    piece = piece.transpose([number for number in form.order if number != NOWHERE])
    counts = [count for _, own in form.target for count, _ in own]
    shape = [1 if number == NOWHERE else count for number, count in zip(form.order, counts, strict=True)]
    return jnp.broadcast_to(piece.reshape(shape), counts)


def put(box: jax.Array, digits: Digits, piece: jax.Array, axis: int) -> jax.Array:
    """A box whose elements that digits count through are those of `piece`."""
    if axis == box.ndim:
        return piece.reshape(box.shape)
    if all(is_dense(size, own) for size, own in digits):
        return piece.reshape(box.shape)
    (size, own), rest = digits[0], digits[1:]
    if is_dense(size, own):
        merged = piece.reshape(*piece.shape[:axis], size, *piece.shape[axis + len(own) :])
        return put(box, rest, merged, axis + 1)
    (count, step), below = own[0], own[1:]
    rows = _rows(box, axis, count, step)
    inner = 1 + sum((each - 1) * length for each, length in below)
    part = jax.lax.slice_in_dim(rows, 0, inner, axis=axis + 1)
    new = put(part, ((inner, below), *rest), piece, axis + 1)
    rows = jax.lax.dynamic_update_slice_in_dim(rows, new, 0, axis + 1)
    flat = rows.reshape(*box.shape[:axis], count * step, *box.shape[axis + 1 :])
    return jax.lax.slice_in_dim(flat, 0, size, axis=axis)
