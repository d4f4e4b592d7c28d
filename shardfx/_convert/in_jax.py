"""A leaf put together from pieces in JAX, traced or not: what goes backwards has no operations, but pieces alone."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .pieces import NOWHERE, Factor, Made, Piece, along, changed, extended, swapped
from .values import constant


def assembled(made: Made, arrays: Mapping[str, Any]) -> jax.Array:
    """A leaf of its pieces.

    **Arguments:**

    - `made`: the leaf; scaled pieces are none that a map backwards has.
    - `arrays`: the arrays that it is made of, by path.
    """
    if not jnp.issubdtype(made.dtype, jax.dtypes.extended):
        return _filled(made.pieces, made.shape, made.dtype, arrays)
    # Of PRNG keys the bits are moved.
    names = [piece.value.path for piece in made.pieces if piece.value.path is not None]
    bits = {name: jax.random.key_data(arrays[name]) for name in names}
    more = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), made.dtype))
    data = _filled([extended(one, more.shape) for one in made.pieces], (*made.shape, *more.shape), more.dtype, bits)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(arrays[names[0]]) if names else None)


def _filled(pieces: Sequence[Piece], shape: tuple[int, ...], dtype: Any, arrays: Mapping[str, Any]) -> jax.Array:
    if len(pieces) == 1 and pieces[0].elements == math.prod(shape):
        return _values(pieces[0], arrays, dtype).reshape(shape)
    out = jnp.zeros(shape, dtype)
    for piece in pieces:
        places = [_places(piece, dim) for dim in range(len(shape))]
        values = _values(piece, arrays, dtype)
        if all(isinstance(place, slice) for place in places):
            out = out.at[tuple(places)].set(values)
        else:
            numbers = [np.arange(shape[dim])[place] for dim, place in enumerate(places)]
            out = out.at[np.ix_(*numbers)].set(values)
    return out


def _values(piece: Piece, arrays: Mapping[str, Any], dtype: Any) -> jax.Array:
    """The elements of a piece, in the order of the target's dimensions."""
    order = [factor for dim in range(len(piece.target)) for factor in along(piece, dim)]
    sizes = [math.prod(factor.size for factor in along(piece, dim)) for dim in range(len(piece.target))]
    if piece.value.path is None:
        return jnp.full(sizes, constant(piece), dtype)
    other = swapped(piece)
    found = jnp.asarray(arrays[piece.value.path])
    for dim in range(len(piece.source)):
        found = found[(slice(None),) * dim + (_places(other, dim),)]
    # As many dimensions as digits, then in the target's order, then in its dimensions.
    digits = [factor for dim in range(len(piece.source)) for factor in along(other, dim)]
    found = found.reshape([factor.size for factor in digits])
    repeated = [factor for factor in other.factors if factor.target_dim == NOWHERE]
    found = jnp.broadcast_to(found, [*[factor.size for factor in repeated], *found.shape])
    at = {factor: number for number, factor in enumerate([*repeated, *digits])}
    found = found.transpose([at[one] for one in map(_swapped, order)]).reshape(sizes)
    for to in piece.value.casts:
        found = changed(found, to)
    return found.astype(dtype)


def _swapped(factor: Factor) -> Factor:
    return Factor(factor.size, factor.target_dim, factor.target_step, factor.source_dim, factor.source_step)


def _places(piece: Piece, dim: int) -> slice | np.ndarray:
    """Where the elements of a piece are along a dimension of its target."""
    numbers = np.array([piece.target[dim]])
    for factor in along(piece, dim):
        numbers = (numbers[:, None] + np.arange(factor.size) * factor.target_step).reshape(-1)
    steps = np.diff(numbers)
    if not len(steps) or (steps == steps[0]).all():
        step = int(steps[0]) if len(steps) else 1
        return slice(int(numbers[0]), int(numbers[-1]) + 1, step)
    return numbers
