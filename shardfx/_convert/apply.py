"""Maps applied to whole arrays in memory, and strided copies between arrays in JAX.

A map has one or more steps, each with its rules. A `Made` is a leaf that a map makes:
its shape, its dtype, and the pieces (strided copies) that fill it. A factor is one loop
of a strided copy: the number of iterations, and the step of one in elements.
"""

import functools as ft
import itertools as it
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .._ground.spec import DType
from .._ground.tree import flatten, is_number
from .binding import bound_steps, places, structs_of, tree_structs
from .casts import cast_array
from .evaluate import ON_SHAPES, evaluated, leaf_made
from .expression import Rules
from .pieces import (
    NOWHERE,
    Arithmetic,
    Factor,
    Made,
    Piece,
    along,
    changed,
    extended,
    hull,
    swapped,
)
from .routes import bound_with, number_copies, number_paths
from .values import constant, fill


def on_arrays(xp: Any, op: str, parts: Sequence[Any], *args: Any) -> Any:
    """Applies the operation `op` of an expression, such as `"transpose"`, to its
    operands `parts`.

    `xp` is `numpy` or `jax.numpy`, the library of the operands. Their shapes must have
    been checked. `args` are the operation's other arguments.
    """
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
            pieces = zip(
                *[xp.split(part, shards, axis=dim) for part in parts], strict=True
            )
            return xp.concatenate([*it.chain.from_iterable(pieces)], axis=dim)
        case "at", index, dim:
            return x[(slice(None),) * (dim % x.ndim) + (index,)]
        case "slice", start, stop, dim:
            return x[(slice(None),) * (dim % x.ndim) + (slice(start, stop),)]
        case "repeat", count, dim, unit:
            dim %= x.ndim
            units = x.reshape(
                *x.shape[:dim], x.shape[dim] // unit, unit, *x.shape[dim + 1 :]
            )
            return xp.repeat(units, count, axis=dim).reshape(
                *x.shape[:dim], x.shape[dim] * count, *x.shape[dim + 1 :]
            )
        case "pad_to", size, dim, value:
            dim %= x.ndim
            padding = xp.full(
                (*x.shape[:dim], size - x.shape[dim], *x.shape[dim + 1 :]),
                value,
                x.dtype,
            )
            return xp.concatenate([x, padding], axis=dim)
        case "cast", dtype:
            return cast_array(x, jnp.dtype(dtype))
        case "scale", *block:
            x, by = (part.astype(jnp.float32) for part in parts)
            for dim, size in enumerate(block):
                by = xp.repeat(by, size, axis=dim)
            return x * by[tuple(slice(size) for size in x.shape)]
    # The others are `times` and `plus`.
    return changed(x, Arithmetic("*" if op == "times" else "+", *args))


def apply_steps(steps: Sequence[Rules], tree: object, like: object) -> PyTree:
    """Makes the target of a map from the arrays of `tree`, for `TreeMap.apply`.

    `like` is a tree with the structure, shapes and dtypes of the target. If it is
    `None`, the result is a dict by path.
    """
    flat = flatten(tree)
    rows = list(zip(flat.paths, flat.leaves, flat.is_array, strict=True))
    arrays = {path: leaf for path, leaf, is_array in rows if is_array}
    own_numbers = {path: leaf for path, leaf, _ in rows if is_number(leaf)}
    target = None
    targets = None
    if like is not None:
        target = tree_structs(like)
        targets = number_paths(like)
    numbers = number_copies(steps, own_numbers, targets)
    structs = structs_of(arrays, arrays.values())
    made = bound_with(numbers, steps, structs, target)
    # The rules find a number as an array of rank 0, whatever its value.
    arrays |= {path: np.zeros((), kind) for path, kind in numbers.kinds}
    if any(step.inverted for step in steps):
        assemble = _assembled_in_jax if _is_in_jax(arrays) else _assembled
        arrays_by_path = {path: assemble(one, arrays) for path, one in made.items()}
    else:
        arrays_by_path = _by_rules(steps, arrays, made, own_numbers)
    arrays_by_path |= {path: own_numbers[route] for path, route in numbers.routes}
    if like is None:
        return arrays_by_path
    there = flatten(like)
    leaves = [
        arrays_by_path[path] if path in arrays_by_path else leaf
        for path, leaf in zip(there.paths, there.leaves, strict=True)
    ]
    return jax.tree.unflatten(there.treedef, leaves)


def _is_in_jax(arrays: Mapping[str, object]) -> bool:
    return any(isinstance(array, jax.Array) for array in arrays.values())


def _by_rules(
    steps: Sequence[Rules],
    arrays: Mapping[str, object],
    made: Mapping[str, Made],
    spare: Collection[str],
) -> dict[str, Any]:
    """Makes the leaves of the target from whole arrays, one step of the map after the
    other.

    `arrays` are the leaves of the source by path. `made` has the shape and dtype of
    each leaf of the target. The leaves `spare` of the source need not be used.
    """
    xp = jnp if _is_in_jax(arrays) else np
    leaves = dict(arrays)
    structs = structs_of(arrays, arrays.values())
    for number, step in enumerate(steps):
        last = number == len(steps) - 1
        target = made if last else bound_steps([step], structs, spare=spare)
        arrays_by_path = {}
        run = ft.partial(on_arrays, xp)
        for path, rule, binding in places(step, structs, target, []):
            value = evaluated(rule, binding, leaves, leaves.__getitem__, run)
            arrays_by_path[path] = (
                cast_array(value, target[path].dtype)
                if value.dtype != target[path].dtype
                else value
            )
        leaves = {path: arrays_by_path[path] for path in target}
        structs = structs_of(target, target.values())
    return leaves


def _assembled(made: Made, arrays: Mapping[str, object]) -> Any:
    """A leaf of the target, copied with NumPy piece by piece. `arrays` are the leaves
    of the source by path.
    """
    out = np.zeros(made.shape, made.dtype)
    whole = tuple((0, size) for size in made.shape)
    for piece in made.pieces:
        fill(
            out,
            whole,
            piece,
            lambda path, box: np.asarray(arrays[path])[
                (..., *[slice(*span) for span in box])
            ],
        )
    return out


def _assembled_in_jax(made: Made, arrays: Mapping[str, Any]) -> jax.Array:
    """A leaf of the target, copied with JAX piece by piece, also in a traced function.

    `arrays` are the leaves of the source by path. PRNG keys are copied as key data.
    """
    if not jnp.issubdtype(made.dtype, jax.dtypes.extended):
        return _filled(made.pieces, made.shape, made.dtype, arrays)
    names = [piece.value.path for piece in made.pieces if piece.value.path is not None]
    bits = {name: jax.random.key_data(arrays[name]) for name in names}
    key_data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), made.dtype))
    data = _filled(
        [extended(other, key_data.shape) for other in made.pieces],
        (*made.shape, *key_data.shape),
        key_data.dtype,
        bits,
    )
    return jax.random.wrap_key_data(
        data, impl=jax.random.key_impl(arrays[names[0]]) if names else None
    )


def _filled(
    pieces: Sequence[Piece],
    shape: tuple[int, ...],
    dtype: DType,
    arrays: Mapping[str, object],
) -> jax.Array:
    out = jnp.zeros(shape, dtype)
    for piece in pieces:
        copy = strided_copy(piece)
        source_slices, target_slices = (
            tuple(slice(*span) for span in hull(box_of))
            for box_of in (swapped(piece), piece)
        )
        path = piece.value.path
        scale = piece.value.scale
        values = constant(piece) if path is None else arrays[path]
        if scale is not None:
            values = on_arrays(jnp, "scale", [values, arrays[scale.path]], *scale.block)
        values = gathered(jnp.asarray(values)[source_slices], copy.source)
        for to in () if path is None else piece.value.casts:
            values = changed(values, to)
        filled = scattered(
            out[target_slices], copy.target, transposed(values, copy).astype(dtype), 0
        )
        out = (
            filled
            if len(pieces) == 1 and filled.shape == shape
            else out.at[target_slices].set(filled)
        )
    return out


# A factor (one loop of a strided copy) along a dimension: its number of iterations, and
# the elements that one moves by.
BoxFactor = tuple[int, int]
# For each dimension of a box its size, and the factors along it, the longest step
# first.
BoxFactors = tuple[tuple[int, tuple[BoxFactor, ...]], ...]


class StridedCopy(NamedTuple):
    """A strided copy from one box to another: a piece without the names of its arrays
    and its positions in them.

    Pieces with equal strided copies run the same compiled program.

    **Arguments:**

    - `source`, `target`: the factors of either box.
    - `order`: for each factor of the target, the index of the same factor of the
      source, or `NOWHERE` for a factor that
        repeats the source.
    - `casts`: the operations on the elements, in order.
    """

    source: BoxFactors
    target: BoxFactors
    order: tuple[int, ...]
    casts: tuple[Any, ...]


def strided_copy(piece: Piece) -> StridedCopy:
    """The strided copy that a piece makes."""
    sources = _box_factors(swapped(piece))
    targets = _box_factors(piece)
    source = [f for dim_factors in sources for f in dim_factors]
    # A factor is the same loop on both sides, with source and target exchanged.
    numbers = {(f.target_dim, f.target_step): number for number, f in enumerate(source)}
    order = tuple(
        NOWHERE if f.source_dim == NOWHERE else numbers[f.source_dim, f.source_step]
        for dim_factors in targets
        for f in dim_factors
    )
    return StridedCopy(
        _plain(hull(swapped(piece)), sources),
        _plain(hull(piece), targets),
        order,
        tuple(piece.value.casts),
    )


def _box_factors(piece: Piece) -> list[list[Factor]]:
    return [along(piece, dim) for dim in range(len(piece.target))]


def _plain(
    box: Sequence[tuple[int, int]], factors: Sequence[Sequence[Factor]]
) -> BoxFactors:
    sizes = [stop - start for start, stop in box]
    return tuple(
        (size, tuple((f.size, f.target_step) for f in dim_factors))
        for size, dim_factors in zip(sizes, factors, strict=True)
    )


def is_dense(size: int, factors: Sequence[BoxFactor]) -> bool:
    """Whether the factors along a dimension of size `size` reach every element, in
    order.

    For size 6, ((2, 3), (3, 1)) do, and ((3, 2),) does not.
    """
    step = 1
    for count, stride in reversed(factors):
        if stride != step:
            return False
        step *= count
    return step == size


def gathered(x: jax.Array, factors: BoxFactors) -> jax.Array:
    """A strided gather: the elements of `x` that the factors reach, as an array with
    one dimension per factor.

    A factor of size 3 with step 2 reaches the elements 0, 2 and 4.
    """
    axis = 0
    for size, factors_of_dim in factors:
        if is_dense(size, factors_of_dim):
            x = x.reshape(
                *x.shape[:axis],
                *[count for count, _ in factors_of_dim],
                *x.shape[axis + 1 :],
            )
            axis += len(factors_of_dim)
            continue
        for count, step in factors_of_dim:
            x = _rows(x, axis, count, step)
            axis += 1
            inner = _below(factors_of_dim, step)
            x = jax.lax.slice_in_dim(x, 0, inner, axis=axis)
        x = x.reshape(*x.shape[:axis], *x.shape[axis + 1 :])
    return x


def _below(factors: Sequence[BoxFactor], step: int) -> int:
    """The number of elements from the first to the last that the factors in `factors` with
    a step below `step` reach.

    For the factors ((2, 6), (3, 2)) and the step 6: the second one reaches 0, 2 and 4,
    so the result is 5.
    """
    return 1 + sum((count - 1) * each for count, each in factors if each < step)


def _rows(x: jax.Array, axis: int, count: int, step: int) -> jax.Array:
    """The array `x` with dimension `axis` reshaped to `count` rows of `step` elements.
    Zeros fill the last row.

    For [1, 2, 3, 4, 5] with 2 rows of 3: [[1, 2, 3], [4, 5, 0]].
    """
    missing = count * step - x.shape[axis]
    padded = jnp.pad(x, [(0, missing if dim == axis else 0) for dim in range(x.ndim)])
    return padded.reshape(*x.shape[:axis], count, step, *x.shape[axis + 1 :])


def transposed(piece: jax.Array, copy: StridedCopy) -> jax.Array:
    """Transposes the array `piece`, which `gathered` returned for `copy.source`, to the
    order of the target's factors.

    It is broadcast along factors that repeat the source.
    """
    piece = piece.transpose([number for number in copy.order if number != NOWHERE])
    counts = [count for _, dim_factors in copy.target for count, _ in dim_factors]
    shape = [
        1 if number == NOWHERE else count
        for number, count in zip(copy.order, counts, strict=True)
    ]
    return jnp.broadcast_to(piece.reshape(shape), counts)


def scattered(
    box: jax.Array, factors: BoxFactors, piece: jax.Array, axis: int
) -> jax.Array:
    """A strided scatter: a copy of `box` in which the elements of `piece` replace those
    that the factors reach.

    The first `axis` dimensions are the same in both arrays. `factors` are those of the
    other dimensions of `box`. For each factor, in this order, `piece` has one further
    dimension. For a dimension of size 6 with the factor (3, 2), `piece` has the new
    elements 0, 2 and 4.
    """
    if all(is_dense(size, dim_factors) for size, dim_factors in factors):
        return piece.reshape(box.shape)
    size, dim_factors = factors[0]
    rest = factors[1:]
    if is_dense(size, dim_factors):
        merged = piece.reshape(
            *piece.shape[:axis], size, *piece.shape[axis + len(dim_factors) :]
        )
        return scattered(box, rest, merged, axis + 1)
    count, step = dim_factors[0]
    below = dim_factors[1:]
    rows = _rows(box, axis, count, step)
    inner = _below(dim_factors, step)
    part = jax.lax.slice_in_dim(rows, 0, inner, axis=axis + 1)
    new = scattered(part, ((inner, below), *rest), piece, axis + 1)
    rows = jax.lax.dynamic_update_slice_in_dim(rows, new, 0, axis + 1)
    flat = rows.reshape(*box.shape[:axis], count * step, *box.shape[axis + 1 :])
    return jax.lax.slice_in_dim(flat, 0, size, axis=axis)
