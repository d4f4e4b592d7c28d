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

from .._ground.boxes import Box, box_shape, box_slices, whole_box
from .._ground.keys import as_keys, as_keys_of_dtype, is_key, key_data_struct, raw
from .._ground.spec import DType
from .._ground.tree import flatten, is_number
from .binding import bound_steps, structs_of
from .casts import cast_array
from .columns import read_paths
from .evaluate import evaluated
from .expression import Rules
from .pieces import (
    NOWHERE,
    Arithmetic,
    Factor,
    Made,
    Piece,
    Struct,
    along,
    changed,
    extended,
    hull,
    swapped,
)
from .routes import bound_with, number_copies, target_leaves
from .rule_places import matched_rules
from .shape_operations import leaf_made, on_shapes
from .values import constant, fill


def on_arrays(xp: Any, op: str, operands: Sequence[Any], *args: Any) -> Any:
    """Applies the operation `op` of an expression, such as `"transpose"`, to its
    operands.

    `xp` is `numpy` or `jax.numpy`, the library of the operands. Their shapes must have
    been checked. `args` are the operation's other arguments.
    """
    array: Any = operands[0] if operands else None
    match op, *args:
        case "constant", number, shape, dtype:
            return xp.full(shape, number, jnp.dtype(dtype))
        case "transpose", *order:
            return xp.transpose(array, order or None)
        case "reshape" | "split" | "merge", *_:
            # The operation on shapes alone gives the new shape.
            struct = Struct(shape=tuple(array.shape), dtype=array.dtype)
            reshaped = on_shapes(op, [leaf_made("", struct)], *args)
            return array.reshape(reshaped.shape)
        case "stacked", dim:
            return xp.stack(operands, axis=dim)
        case "concat", dim, shards:
            chunks_of_parts = [
                xp.split(operand, shards, axis=dim) for operand in operands
            ]
            # The first chunk of each part, then the second of each.
            chunks = it.chain.from_iterable(zip(*chunks_of_parts, strict=True))
            return xp.concatenate(list(chunks), axis=dim)
        case "at", index, dim:
            return _indexed(array, dim, index)
        case "slice", start, stop, dim:
            return _indexed(array, dim, slice(start, stop))
        case "repeat", count, dim, unit:
            dim %= array.ndim
            size = array.shape[dim]
            in_units = _resized(array.shape, dim, size // unit, unit)
            units = array.reshape(in_units)
            repeated = xp.repeat(units, count, axis=dim)
            repeated_shape = _resized(array.shape, dim, size * count)
            return repeated.reshape(repeated_shape)
        case "pad_to", size, dim, number:
            dim %= array.ndim
            missing = size - array.shape[dim]
            padding_shape = _resized(array.shape, dim, missing)
            padding = xp.full(padding_shape, number, array.dtype)
            return xp.concatenate([array, padding], axis=dim)
        case "cast", dtype:
            return cast_array(array, jnp.dtype(dtype))
        case "scale", *block:
            weights = array.astype(jnp.float32)
            scales = operands[1].astype(jnp.float32)
            for dim, size in enumerate(block):
                scales = xp.repeat(scales, size, axis=dim)
            # The last blocks may be larger than what is left of the weights.
            inside = tuple(slice(size) for size in weights.shape)
            return weights * scales[inside]
    # The others are `times` and `plus`.
    (number,) = args
    sign = "*" if op == "times" else "+"
    return changed(array, Arithmetic(sign=sign, number=number))


def _indexed(array: Any, dim: int, index: int | slice) -> Any:
    """The array with one index, or some, of a dimension."""
    before = (slice(None),) * (dim % array.ndim)
    return array[(*before, index)]


def _resized(shape: tuple[int, ...], dim: int, *sizes: int) -> tuple[int, ...]:
    """A shape with other sizes in the place of dimension `dim`."""
    return (*shape[:dim], *sizes, *shape[dim + 1 :])


def apply_steps(steps: Sequence[Rules], tree: object, like: object) -> PyTree:
    """Makes the target of a map from the arrays of `tree`, for `TreeMap.apply`.

    `like` is a tree with the structure, shapes and dtypes of the target. If it is
    `None`, the result is a dict by path.
    """
    flat = flatten(tree)
    arrays: dict[str, Any] = {}
    numbers_by_path: dict[str, Any] = {}
    for path, leaf, is_array in zip(
        flat.paths, flat.leaves, flat.is_array, strict=True
    ):
        if is_array:
            arrays[path] = leaf
        if is_number(leaf):
            numbers_by_path[path] = leaf
    target = None
    number_targets = None
    if like is not None:
        target, number_targets = target_leaves(like)
    numbers = number_copies(steps, numbers_by_path, number_targets)
    structs = structs_of(arrays, arrays.values())
    leaves = bound_with(numbers, steps, structs, target)

    # The rules find a number as an array of rank 0, whatever its value. `kinds` has its
    # type by its path.
    arrays |= {path: np.zeros((), kind) for path, kind in numbers.kinds}
    if any(step.inverted for step in steps):
        assemble = _assembled_in_jax if _is_in_jax(arrays) else _assembled
        results = {path: assemble(leaf, arrays) for path, leaf in leaves.items()}
    else:
        results = _by_rules(steps, arrays, leaves, numbers_by_path)
    # The numbers are copied as they are: pairs of a path of the target and the source.
    results |= {path: numbers_by_path[source] for path, source in numbers.routes}
    if like is None:
        return results
    like_flat = flatten(like)
    pairs = zip(like_flat.paths, like_flat.leaves, strict=True)
    new_leaves = [results.get(path, leaf) for path, leaf in pairs]
    return jax.tree.unflatten(like_flat.treedef, new_leaves)


def _is_in_jax(arrays: Mapping[str, object]) -> bool:
    return any(isinstance(array, jax.Array) for array in arrays.values())


def _by_rules(
    steps: Sequence[Rules],
    arrays: Mapping[str, object],
    target_leaves: Mapping[str, Made],
    may_be_unused: Collection[str],
) -> dict[str, Any]:
    """Makes the leaves of the target from whole arrays, one step of the map after the
    other.

    `arrays` are the leaves of the source by path. `target_leaves` has the shape and
    dtype of each leaf of the target. The leaves `may_be_unused` of the source need not
    be used.
    """
    xp = jnp if _is_in_jax(arrays) else np
    apply_operation = ft.partial(on_arrays, xp)
    # The arrays before each step by path, and their shapes and dtypes.
    leaves = dict(arrays)
    structs = structs_of(arrays, arrays.values())
    for number, step in enumerate(steps, 1):
        is_last = number == len(steps)
        target = (
            target_leaves
            if is_last
            else bound_steps([step], structs, may_be_unused=may_be_unused)
        )
        results = {}
        # Problems were raised when the map was bound.
        for path, rule, binding in matched_rules(step, structs, target, problems=[]):
            array = evaluated(
                expression=rule,
                binding=binding,
                leaves=leaves,
                value_of_leaf=leaves.__getitem__,
                apply_operation=apply_operation,
            )
            if array.dtype != target[path].dtype:
                array = cast_array(array, target[path].dtype)
            results[path] = array
        leaves = {path: results[path] for path in target}
        structs = structs_of(target, target.values())
    return leaves


def _assembled(leaf: Made, arrays: Mapping[str, object]) -> Any:
    """A leaf of the target, copied with NumPy piece by piece. `arrays` are the leaves
    of the source by path.
    """

    def read(path: str, box: Box) -> np.ndarray:
        return np.asarray(arrays[path])[(..., *box_slices(box))]

    array = np.zeros(leaf.shape, leaf.dtype)
    whole = whole_box(leaf.shape)
    for piece in leaf.pieces:
        fill(array, whole, piece, read)
    return array


def _assembled_in_jax(leaf: Made, arrays: Mapping[str, Any]) -> jax.Array:
    """A leaf of the target, copied with JAX piece by piece, also in a traced function.

    `arrays` are the leaves of the source by path. PRNG keys are copied as key data.
    """
    if not is_key(leaf.dtype):
        return _filled_array(leaf.pieces, leaf.shape, leaf.dtype, arrays)
    names = read_paths(leaf.pieces)
    raw_arrays = {name: raw(arrays[name]) for name in names}
    # The data of one key has dimensions of its own, which come last.
    key_data = key_data_struct(leaf.dtype)
    data = _filled_array(
        pieces=[extended(piece, key_data.shape) for piece in leaf.pieces],
        shape=(*leaf.shape, *key_data.shape),
        dtype=key_data.dtype,
        arrays=raw_arrays,
    )
    if names:
        return as_keys(data, arrays[names[0]])
    return as_keys_of_dtype(data, leaf.dtype)


def _filled_array(
    pieces: Sequence[Piece],
    shape: tuple[int, ...],
    dtype: DType,
    arrays: Mapping[str, object],
) -> jax.Array:
    """An array that pieces fill, copied with JAX piece by piece. `arrays` are the
    source arrays by path.

    From the smallest box of the source around the elements of a piece, the copy takes
    these elements, with one dimension per loop of the piece; it then writes them into
    the smallest box of the target.
    """
    array = jnp.zeros(shape, dtype)
    for piece in pieces:
        copy = strided_copy(piece)
        source_box = box_slices(hull(swapped(piece)))
        values = _scaled_source(piece, arrays)[source_box]
        values = gathered(values, copy.source)
        if piece.value.path is not None:
            for operation in piece.value.casts:
                values = changed(values, operation)
        new_elements = transposed(values, copy).astype(dtype)

        target_box = box_slices(hull(piece))
        filled = scattered(array[target_box], copy.target, new_elements, 0)
        is_whole = len(pieces) == 1 and filled.shape == shape
        array = filled if is_whole else array.at[target_box].set(filled)
    return array


def _scaled_source(piece: Piece, arrays: Mapping[str, object]) -> jax.Array:
    """The whole source array of a piece, multiplied by its scales; for a piece without
    a source array, its constant. `arrays` has the source arrays by path.
    """
    if piece.value.path is None:
        return jnp.asarray(constant(piece))
    values = arrays[piece.value.path]
    scale = piece.value.scale
    if scale is not None:
        operands = [values, arrays[scale.path]]
        values = on_arrays(jnp, "scale", operands, *scale.block)
    return jnp.asarray(values)


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
      source, or `NOWHERE` for a factor that repeats the source.
    - `casts`: the operations on the elements, in order.
    """

    source: BoxFactors
    target: BoxFactors
    order: tuple[int, ...]
    casts: tuple[Any, ...]


def strided_copy(piece: Piece) -> StridedCopy:
    """The strided copy that a piece makes: the loops along each dimension of its box of
    the source and of the target, and which loop of the source each of the target is.
    """
    turned = swapped(piece)
    # For each dimension of the source and of the target, the loops along it. In a
    # swapped piece, the fields `target_dim` and `target_step` are about the source.
    source_factors = _box_factors(turned)
    target_factors = _box_factors(piece)
    # The number of a loop of the source, by its dimension and step there.
    loop_numbers = {}
    for number, factor in enumerate(it.chain.from_iterable(source_factors)):
        loop_numbers[factor.target_dim, factor.target_step] = number
    order = []
    for factor in it.chain.from_iterable(target_factors):
        if factor.source_dim == NOWHERE:
            order.append(NOWHERE)
        else:
            order.append(loop_numbers[factor.source_dim, factor.source_step])
    return StridedCopy(
        source=_sizes_and_loops(hull(turned), source_factors),
        target=_sizes_and_loops(hull(piece), target_factors),
        order=tuple(order),
        casts=tuple(piece.value.casts),
    )


def _box_factors(piece: Piece) -> list[list[Factor]]:
    return [along(piece, dim) for dim in range(len(piece.target))]


def _sizes_and_loops(
    box: Box,
    factors_by_dim: Sequence[Sequence[Factor]],
) -> BoxFactors:
    """The sizes of a box, each with the loops along its dimension as pairs of a count
    and a step. `factors_by_dim` has the factors of each dimension.
    """
    dims = []
    for size, factors in zip(box_shape(box), factors_by_dim, strict=True):
        loops = tuple((factor.size, factor.target_step) for factor in factors)
        dims.append((size, loops))
    return tuple(dims)


def is_dense(size: int, factors: Sequence[BoxFactor]) -> bool:
    """Whether the factors along a dimension of size `size` reach every element, in
    order. A factor is a loop, as its count of iterations and its step in elements; the
    longest step is first.

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

    `factors` has for each dimension of `x` its size, and its factors as pairs of a
    count and a step, the longest step first. The factor (3, 2) reaches the elements 0,
    2 and 4.
    """
    axis = 0
    for size, factors_of_dim in factors:
        if is_dense(size, factors_of_dim):
            counts = [count for count, _ in factors_of_dim]
            shape_in_factors = _resized(x.shape, axis, *counts)
            x = x.reshape(shape_in_factors)
            axis += len(factors_of_dim)
            continue
        for count, step in factors_of_dim:
            x = _in_rows(x, axis, count, step)
            axis += 1
            # What the inner loops need of each row.
            inner_size = _span_below(factors_of_dim, step)
            x = jax.lax.slice_in_dim(x, 0, inner_size, axis=axis)
        # Without the dimension of size 1 that remains behind the last loop.
        x = x.reshape(_resized(x.shape, axis))
    return x


def _span_below(factors: Sequence[BoxFactor], step: int) -> int:
    """The number of elements from the first to the last that those of `factors` with a
    step below `step` reach.

    For the factors ((2, 6), (3, 2)) and the step 6: the second one reaches 0, 2 and 4,
    so the result is 5.
    """
    shorter_loops = [(count, stride) for count, stride in factors if stride < step]
    return 1 + sum((count - 1) * stride for count, stride in shorter_loops)


def _in_rows(array: jax.Array, dim: int, count: int, step: int) -> jax.Array:
    """The array with dimension `dim` reshaped to `count` rows of `step` elements. Zeros
    fill the last row.

    For [1, 2, 3, 4, 5] with 2 rows of 3: [[1, 2, 3], [4, 5, 0]].
    """
    padding = [(0, 0)] * array.ndim
    padding[dim] = (0, count * step - array.shape[dim])
    padded = jnp.pad(array, padding)
    shape_in_rows = _resized(array.shape, dim, count, step)
    return padded.reshape(shape_in_rows)


def transposed(array: jax.Array, copy: StridedCopy) -> jax.Array:
    """Transposes `array`, which `gathered` returned for `copy.source`, to the order of
    the target's factors.

    It is broadcast along factors that repeat the source.
    """
    counts: list[int] = []
    for _, factors in copy.target:
        counts += [count for count, _ in factors]
    # The dimensions of `array` in the target's order, and its shape with a dimension of
    # size 1 for each factor that repeats the source.
    source_dims = []
    shape = []
    for source_dim, count in zip(copy.order, counts, strict=True):
        if source_dim == NOWHERE:
            shape.append(1)
        else:
            shape.append(count)
            source_dims.append(source_dim)
    in_order = array.transpose(source_dims).reshape(shape)
    return jnp.broadcast_to(in_order, counts)


def scattered(
    array: jax.Array,
    factors: BoxFactors,
    new_elements: jax.Array,
    axis: int,
) -> jax.Array:
    """A strided scatter: a copy of `array` in which the elements of `new_elements`
    replace those that the factors reach.

    The first `axis` dimensions are the same in both arrays. `factors` are those of the
    other dimensions of `array`. For each factor, in this order, `new_elements` has one
    further dimension. For a dimension of size 6 with the factor (3, 2), `new_elements`
    has the new elements 0, 2 and 4.
    """
    if all(is_dense(size, dim_factors) for size, dim_factors in factors):
        return new_elements.reshape(array.shape)
    size, dim_factors = factors[0]
    other_dims = factors[1:]
    if is_dense(size, dim_factors):
        merged = new_elements.reshape(
            *new_elements.shape[:axis],
            size,
            *new_elements.shape[axis + len(dim_factors) :],
        )
        return scattered(array, other_dims, merged, axis + 1)

    # Each iteration of the outermost loop writes into a row of its own: the inner loops
    # replace elements in the part of the row that they reach.
    count, step = dim_factors[0]
    rows = _in_rows(array, axis, count, step)
    inner_size = _span_below(dim_factors, step)
    inner_rows = jax.lax.slice_in_dim(rows, 0, inner_size, axis=axis + 1)
    inner_factors = ((inner_size, dim_factors[1:]), *other_dims)
    new_rows = scattered(inner_rows, inner_factors, new_elements, axis + 1)
    rows = jax.lax.dynamic_update_slice_in_dim(rows, new_rows, 0, axis + 1)
    flat_shape = _resized(array.shape, axis, count * step)
    flat = rows.reshape(flat_shape)
    return jax.lax.slice_in_dim(flat, 0, size, axis=axis)
