"""A map applied to whole arrays in memory, by its operations or, for an inverted map, by pieces."""

import functools as ft
import itertools as it
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .._ground.spec import DType
from .._ground.tree import flatten
from .binding import bound_steps, places, structs_of, tree_structs
from .casts import cast_array
from .evaluate import ON_SHAPES, evaluated, leaf_made
from .expression import Rules
from .pieces import NOWHERE, Arithmetic, Factor, Made, Piece, along, changed, extended, hull, swapped
from .values import constant, fill


def on_arrays(xp: Any, op: str, parts: Sequence[Any], *args: Any) -> Any:
    """Applies an operation to arrays of `xp`, which is `numpy` or `jax.numpy`. The shapes must have been checked."""
    x: Any = parts[0] if parts else None
    match op, *args:
        case "constant", value, shape, dtype:
            return xp.full(shape, value, jnp.dtype(dtype))
        case "transpose", *order:
            return xp.transpose(x, order or None)
        case "reshape" | "split" | "merge", *_:
            return x.reshape(ON_SHAPES[op]([leaf_made("", x)], *args).shape)
        case "stacked", dim:
            return xp.stack(parts, axis=dim)
        case "concat", dim, shards:
            pieces = zip(*[xp.split(part, shards, axis=dim) for part in parts], strict=True)
            return xp.concatenate([*it.chain.from_iterable(pieces)], axis=dim)
        case "at", index, dim:
            return x[(slice(None),) * (dim % x.ndim) + (index,)]
        case "slice", start, stop, dim:
            return x[(slice(None),) * (dim % x.ndim) + (slice(start, stop),)]
        case "repeat", count, dim, unit:
            dim %= x.ndim
            units = x.reshape(*x.shape[:dim], x.shape[dim] // unit, unit, *x.shape[dim + 1 :])
            return xp.repeat(units, count, axis=dim).reshape(*x.shape[:dim], x.shape[dim] * count, *x.shape[dim + 1 :])
        case "pad_to", size, dim, value:
            dim %= x.ndim
            more = xp.full((*x.shape[:dim], size - x.shape[dim], *x.shape[dim + 1 :]), value, x.dtype)
            return xp.concatenate([x, more], axis=dim)
        case "cast", dtype:
            return cast_array(x, jnp.dtype(dtype))
        case "scale", *block:
            x, by = (part.astype(jnp.float32) for part in parts)
            for dim, size in enumerate(block):
                by = xp.repeat(by, size, axis=dim)
            return x * by[tuple(slice(size) for size in x.shape)]
    # The others are `times` and `plus`.
    return changed(x, Arithmetic("*" if op == "times" else "+", *args))


def applied(steps: Sequence[Rules], tree: object, like: object) -> PyTree:
    """The implementation of `TreeMap.apply`."""
    flat = flatten(tree)
    arrays = {
        path: leaf for path, leaf, is_array in zip(flat.paths, flat.leaves, flat.is_array, strict=True) if is_array
    }
    target = None if like is None else tree_structs(like)
    made = bound_steps(steps, structs_of(arrays, arrays.values()), target)
    if any(step.inverted for step in steps):
        put = _assembled_in_jax if _is_in_jax(arrays) else _assembled
        found = {path: put(one, arrays) for path, one in made.items()}
    else:
        found = _by_rules(steps, arrays, made)
    if like is None:
        return found
    there = flatten(like)
    leaves = [found[path] if path in found else leaf for path, leaf in zip(there.paths, there.leaves, strict=True)]
    return jax.tree.unflatten(there.treedef, leaves)


def _is_in_jax(arrays: Mapping[str, object]) -> bool:
    return any(isinstance(one, jax.Array) for one in arrays.values())


def _by_rules(steps: Sequence[Rules], arrays: Mapping[str, object], made: Mapping[str, Made]) -> dict[str, Any]:
    """Makes the target's leaves by running the operations of each rule. It does not use pieces, and so serves to check
    them.
    """
    xp = jnp if _is_in_jax(arrays) else np
    leaves, structs = dict(arrays), structs_of(arrays, arrays.values())
    for number, step in enumerate(steps):
        last = number == len(steps) - 1
        target = made if last else bound_steps([step], structs)
        found, run = {}, ft.partial(on_arrays, xp)
        for path, rule, binding in places(step, structs, target, []):
            value = evaluated(rule, binding, leaves, leaves.__getitem__, run)
            found[path] = cast_array(value, target[path].dtype) if value.dtype != target[path].dtype else value
        leaves, structs = {path: found[path] for path in target}, structs_of(target, target.values())
    return leaves


def _assembled(made: Made, arrays: Mapping[str, object]) -> Any:
    """A leaf assembled from pieces with NumPy."""
    out = np.zeros(made.shape, made.dtype)
    whole = tuple((0, size) for size in made.shape)
    for piece in made.pieces:
        fill(out, whole, piece, lambda path, box: np.asarray(arrays[path])[(..., *[slice(*ends) for ends in box])])
    return out


def _assembled_in_jax(made: Made, arrays: Mapping[str, Any]) -> jax.Array:
    """A leaf assembled from pieces with JAX, traced or not. PRNG keys are moved as key data."""
    if not jnp.issubdtype(made.dtype, jax.dtypes.extended):
        return _filled(made.pieces, made.shape, made.dtype, arrays)
    names = [piece.value.path for piece in made.pieces if piece.value.path is not None]
    bits = {name: jax.random.key_data(arrays[name]) for name in names}
    more = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), made.dtype))
    data = _filled([extended(one, more.shape) for one in made.pieces], (*made.shape, *more.shape), more.dtype, bits)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(arrays[names[0]]) if names else None)


def _filled(pieces: Sequence[Piece], shape: tuple[int, ...], dtype: DType, arrays: Mapping[str, object]) -> jax.Array:
    out = jnp.zeros(shape, dtype)
    for piece in pieces:
        form = form_of(piece)
        here, there = (tuple(slice(*ends) for ends in hull(one)) for one in (swapped(piece), piece))
        path, scale = piece.value.path, piece.value.scale
        values = constant(piece) if path is None else arrays[path]
        if scale is not None:
            values = on_arrays(jnp, "scale", [values, arrays[scale.path]], *scale.block)
        values = taken(jnp.asarray(values)[here], form.source)
        for to in () if path is None else piece.value.casts:
            values = changed(values, to)
        made = put(out[there], form.target, ordered(values, form).astype(dtype), 0)
        out = made if len(pieces) == 1 and made.shape == shape else out.at[there].set(made)
    return out


# For each dimension the extent of a box, and its digits: the size and the stride of each.
Digits = tuple[tuple[int, tuple[tuple[int, int], ...]], ...]


class PieceForm(NamedTuple):
    """A piece without its position. Pieces of one form run the same compiled program.

    **Arguments:**

    - `source`, `target`: the digits of each dimension, on either side.
    - `order`: for each digit of the target, the number of the source's digit that it is, or `NOWHERE` for a repetition.
    - `casts`: the dtypes that the numbers are cast to.
    """

    source: Digits
    target: Digits
    order: tuple[int, ...]
    casts: tuple[Any, ...]


def form_of(piece: Piece) -> PieceForm:
    """The form of a piece: its digits, their order and its casts, without its position."""
    sources, targets = _digits(swapped(piece)), _digits(piece)
    source = [f for own in sources for f in own]
    # Both sides give the same digit the same four numbers.
    numbers = {(f.target_dim, f.target_step): number for number, f in enumerate(source)}
    order = tuple(
        NOWHERE if f.source_dim == NOWHERE else numbers[f.source_dim, f.source_step] for own in targets for f in own
    )
    return PieceForm(
        _plain(hull(swapped(piece)), sources), _plain(hull(piece), targets), order, tuple(piece.value.casts)
    )


def _digits(piece: Piece) -> list[list[Factor]]:
    return [along(piece, dim) for dim in range(len(piece.target))]


def _plain(box: Sequence[tuple[int, int]], digits: Sequence[Sequence[Factor]]) -> Digits:
    sizes = [stop - start for start, stop in box]
    return tuple((size, tuple((f.size, f.target_step) for f in own)) for size, own in zip(sizes, digits, strict=True))


def is_dense(size: int, digits: Sequence[tuple[int, int]]) -> bool:
    """Whether the digits cover a dimension of this size completely, one element after the other."""
    step = 1
    for count, own in reversed(digits):
        if own != step:
            return False
        step *= count
    return step == size


def taken(x: jax.Array, digits: Digits) -> jax.Array:
    """The elements of a box at the positions that the digits (factors of a mixed-radix index) enumerate, as an array
    with one dimension for each digit.
    """
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
    """The number of elements that the digits with a step below `step` span, from the first to the last."""
    return 1 + sum((count - 1) * each for count, each in own if each < step)


def _rows(x: jax.Array, axis: int, count: int, step: int) -> jax.Array:
    """`x` with dimension `axis` reshaped to `count` rows of `step` elements. Zeros fill the last row."""
    missing = count * step - x.shape[axis]
    padded = jnp.pad(x, [(0, missing if at == axis else 0) for at in range(x.ndim)])
    return padded.reshape(*x.shape[:axis], count, step, *x.shape[axis + 1 :])


def ordered(piece: jax.Array, form: PieceForm) -> jax.Array:
    """A piece with its dimensions, one for each digit, in the order of the target. Repeated digits are broadcast."""
    piece = piece.transpose([number for number in form.order if number != NOWHERE])
    counts = [count for _, own in form.target for count, _ in own]
    shape = [1 if number == NOWHERE else count for number, count in zip(form.order, counts, strict=True)]
    return jnp.broadcast_to(piece.reshape(shape), counts)


def put(box: jax.Array, digits: Digits, piece: jax.Array, axis: int) -> jax.Array:
    """A copy of `box` in which `piece` replaces the elements at the positions that the digits enumerate."""
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
