"""The operations of expressions on target arrays that are known by shape.

A target array is a `Made`: its shape, its dtype, and the pieces (strided copies) that
fill it. An operation changes the pieces, and copies no element.
"""

import functools as ft
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from .._ground.errors import MapError
from .._ground.spec import DType
from .arguments import check_number
from .dimensions import merged, renumbered, split
from .pieces import (
    NOWHERE,
    Arithmetic,
    Factor,
    Made,
    Operation,
    Piece,
    Scale,
    Struct,
    Value,
    cut,
    nonempty_piece,
    shifted,
    whole,
)


def dim_of(dim: int, rank: int, op: str) -> int:
    """Dimension `dim` of an array of rank `rank` as a non-negative number, for the
    operation `op`.

    Raises `MapError` if the array lacks it.
    """
    if not isinstance(dim, int) or not -rank <= dim < rank:
        raise MapError(f"`{op}` takes dim {dim}, and the array has {rank} dimensions.")
    return dim % rank


def sizes_of(sizes: Sequence[int], count: int, what: str) -> tuple[int, ...]:
    """The sizes, with -1 replaced so that their product is `count`.

    Raises `MapError`, with a text that begins with `what`, if no size does that.
    """
    filled = list(sizes)
    free_dims = [dim for dim, size in enumerate(sizes) if size == -1]
    fixed = math.prod(size for size in sizes if size != -1)
    if len(free_dims) == 1 and fixed and count % fixed == 0:
        filled[free_dims[0]] = count // fixed
    if any(size < 0 for size in filled) or math.prod(filled) != count:
        why = "whose product is another number"
        if free_dims:
            why = "which no value of -1 fits"
        raise MapError(f"{what} of {count} elements into sizes {tuple(sizes)}, {why}.")
    return tuple(filled)


def _shape_after(shape: tuple[int, ...], dim: int, *sizes: int) -> tuple[int, ...]:
    """A shape with other sizes, or none, in the place of dimension `dim`."""
    return (*shape[:dim], *sizes, *shape[dim + 1 :])


def leaf_made(path: str, struct: Struct | Made) -> Made:
    """A target array that is a copy of the leaf `path` of the source. `struct` has the
    leaf's shape and dtype.
    """
    shape = tuple(struct.shape)
    value = Value(path)
    return Made(shape=shape, dtype=struct.dtype, pieces=whole(value, shape))


def filled_with(number: Any, shape: tuple[int, ...], dtype: DType) -> Made:
    """A target array of which each element is `number`."""
    check_number(number, dtype, f"an array of shape {shape}")
    pieces = nonempty_piece(
        value=Value(path=None, number=number, casts=(dtype,)),
        source=(),
        target=(0,) * len(shape),
        factors=[_repetition(size, dim) for dim, size in enumerate(shape)],
    )
    return Made(shape=shape, dtype=dtype, pieces=pieces)


def _repetition(size: int, dim: int) -> Factor:
    """The loop that writes one element `size` times along dimension `dim` of the
    target.
    """
    return Factor(
        size=size,
        source_dim=NOWHERE,
        source_step=0,
        target_dim=dim,
        target_step=1,
    )


def _constant(
    operands: Sequence[Made],
    number: Any,
    shape: Sequence[int],
    dtype: str,
) -> Made:
    """An array filled with one number; it has no operand."""
    assert not operands
    return filled_with(number, tuple(shape), jnp.dtype(dtype))


def _transpose(operands: Sequence[Made], *order: int) -> Made:
    """The operand with its dimensions in the order `order`, or reversed if none is
    given.
    """
    (array,) = operands
    rank = len(array.shape)
    if order:
        order = tuple(dim_of(dim, rank, "transpose") for dim in order)
    else:
        order = tuple(reversed(range(rank)))
    if sorted(order) != list(range(rank)):
        raise MapError(
            f"`transpose{order}` is no order of the {rank} dimensions of shape"
            f" {array.shape}."
        )
    return _reordered(array, order, tuple(array.shape[dim] for dim in order))


def _split(operands: Sequence[Made], dim: int, *sizes: int) -> Made:
    """The operand with dimension `dim` split into several of these sizes, of which one
    may be -1.
    """
    (array,) = operands
    dim = dim_of(dim, len(array.shape), "split")
    sizes = sizes_of(sizes, array.shape[dim], f"`split` of dim {dim}")
    if not sizes:
        raise MapError(f"`split` of dim {dim} of shape {array.shape} needs sizes.")
    pieces = list(array.pieces)
    for number in range(1, len(sizes)):
        # The last dimension so far is split into one of its size and the rest.
        last_dim = dim + number - 1
        rest_size = math.prod(sizes[number:])
        divided: list[Piece] = []
        for piece in pieces:
            divided += split(piece, last_dim, rest_size)
        pieces = divided
    return Made(
        shape=_shape_after(array.shape, dim, *sizes),
        dtype=array.dtype,
        pieces=tuple(pieces),
    )


def _merge(operands: Sequence[Made], dim: int, count: int) -> Made:
    """The operand with `count` dimensions, from `dim` on, merged into one."""
    (array,) = operands
    rank = len(array.shape)
    dim = dim_of(dim, rank, "merge")
    if not 1 <= count <= rank - dim:
        raise MapError(
            f"`merge` of {count} dimensions from dim {dim} on, and shape {array.shape}"
            f" has {rank}."
        )
    sizes = array.shape[dim : dim + count]
    pieces = array.pieces
    for size in sizes[1:]:
        pieces = tuple(merged(piece, dim, size) for piece in pieces)
    merged_size = math.prod(sizes)
    return Made(
        shape=(*array.shape[:dim], merged_size, *array.shape[dim + count :]),
        dtype=array.dtype,
        pieces=pieces,
    )


def _reshape(operands: Sequence[Made], *sizes: int) -> Made:
    """The operand with another shape: all its dimensions are merged, and the result is
    split.
    """
    (array,) = operands
    what = f"`reshape` of shape {array.shape}"
    sizes = sizes_of(sizes, math.prod(array.shape), what)
    if 0 in sizes:
        return Made(shape=sizes, dtype=array.dtype, pieces=())
    if array.shape:
        vector = _merge(operands, 0, len(array.shape))
    else:
        # An array of rank 0 gets a dimension of size 1, and loses one below.
        vector = _reordered(array, [None], (1,))
    if not sizes:
        return _reordered(vector, [], ())
    return _split([vector], 0, *sizes)


def _reordered(
    array: Made,
    order: Sequence[int | None],
    shape: tuple[int, ...],
) -> Made:
    """A target array with its dimensions reordered to the shape `shape`.

    `order` has an old dimension for each new one, or `None` for an inserted dimension
    of size 1.
    """
    pieces = tuple(renumbered(piece, order) for piece in array.pieces)
    return Made(shape=shape, dtype=array.dtype, pieces=pieces)


def _stacked(operands: Sequence[Made], dim: int) -> Made:
    """The operands, of one shape, along a new dimension `dim`."""
    first = _first_of_alike(operands, "stack", None)
    rank = len(first.shape) + 1
    dim = dim_of(dim, rank, "stack")
    order = (*range(dim), None, *range(dim, rank - 1))
    pieces: list[Piece] = []
    for number, operand in enumerate(operands):
        offset = _offset_along(dim, number, rank)
        pieces += [
            shifted(renumbered(piece, order), offset) for piece in operand.pieces
        ]
    return Made(
        shape=(*first.shape[:dim], len(operands), *first.shape[dim:]),
        dtype=first.dtype,
        pieces=tuple(pieces),
    )


def _offset_along(dim: int, distance: int, rank: int) -> tuple[int, ...]:
    """An offset of `distance` elements along dimension `dim` of `rank` dimensions."""
    return (0,) * dim + (distance,) + (0,) * (rank - dim - 1)


def _concat(operands: Sequence[Made], dim: int, shards: int) -> Made:
    """The operands one after the other along dimension `dim`; with `shards` other than
    1, their chunks are interleaved.
    """
    if shards != 1:
        return _interleaved(operands, dim, shards)
    first = _first_of_alike(operands, "concat", dim)
    rank = len(first.shape)
    dim = dim_of(dim, rank, "concat")
    size = 0
    pieces: list[Piece] = []
    for operand in operands:
        offset = _offset_along(dim, size, rank)
        pieces += [shifted(piece, offset) for piece in operand.pieces]
        size += operand.shape[dim]
    return Made(
        shape=_shape_after(first.shape, dim, size),
        dtype=first.dtype,
        pieces=tuple(pieces),
    )


def _interleaved(operands: Sequence[Made], dim: int, shards: int) -> Made:
    """The concatenation of the first of `shards` chunks of each operand, then of the
    second of each, and so on.
    """
    rank = len(operands[0].shape) if operands else 0
    dim = dim_of(dim, rank, "concat")
    by_chunk = []
    for operand in operands:
        chunk_size = _chunk_size(operand.shape, dim, shards)
        by_chunk.append(_split([operand], dim, shards, chunk_size))
    chunks = _concat(by_chunk, dim + 1, 1)
    return _merge([chunks], dim, 2)


def _chunk_size(shape: tuple[int, ...], dim: int, shards: int) -> int:
    """The size of one of `shards` equal chunks along dimension `dim`. Raises `MapError`
    if there are no such chunks.
    """
    if dim >= len(shape) or shards < 1 or shape[dim] % shards:
        raise MapError(
            f"`concat` in {shards} shards along dim {dim}, which does not divide shape"
            f" {shape}."
        )
    return shape[dim] // shards


def _first_of_alike(operands: Sequence[Made], op: str, dim: int | None) -> Made:
    """The first of several arrays. Raises `MapError` if they differ in dtype, or in
    shape along other dimensions than `dim`.
    """
    if not operands:
        raise MapError(f"`{op}` takes at least one array.")
    shapes = {operand.shape for operand in operands}
    if dim is None:
        is_same_shape = len(shapes) == 1
    else:
        rank = len(operands[0].shape)
        dim = dim_of(dim, rank, op)
        other_sizes = {(len(shape), *_shape_after(shape, dim)) for shape in shapes}
        is_same_shape = len(other_sizes) == 1
    if not is_same_shape:
        raise MapError(f"`{op}` of different shapes, {sorted(shapes)}.")

    dtypes = list(dict.fromkeys(str(operand.dtype) for operand in operands))
    if len(dtypes) > 1:
        raise MapError(
            f"`{op}` of different dtypes, {' and '.join(dtypes)}; cast them first."
        )
    return operands[0]


def _at(operands: Sequence[Made], index: int, dim: int) -> Made:
    """The entry at one index of dimension `dim`, without this dimension. A negative
    index counts from the end.
    """
    (array,) = operands
    rank = len(array.shape)
    dim = dim_of(dim, rank, "at")
    size = array.shape[dim]
    if not -size <= index < size:
        raise MapError(
            f"`at({index})` is out of range along dim {dim} of shape {array.shape}."
        )
    start = index % size
    entry = _slice(operands, start, start + 1, dim)
    other_dims = [other for other in range(rank) if other != dim]
    return _reordered(entry, other_dims, _shape_after(array.shape, dim))


def _slice(operands: Sequence[Made], start: int, stop: int | None, dim: int) -> Made:
    """The entries from `start` to `stop` along dimension `dim`, as in Python, but for a
    `stop` beyond the end, which is an error.
    """
    (array,) = operands
    rank = len(array.shape)
    dim = dim_of(dim, rank, "slice")
    low, high, _ = slice(start, stop).indices(array.shape[dim])
    if low > high or (stop is not None and stop > array.shape[dim]):
        raise MapError(
            f"`slice({start}, {stop})` is out of range along dim {dim} of shape"
            f" {array.shape}."
        )
    offset = _offset_along(dim, -low, rank)
    pieces: list[Piece] = []
    for piece in array.pieces:
        pieces += [shifted(part, offset) for part in cut(piece, dim, low, high)]
    return Made(
        shape=_shape_after(array.shape, dim, high - low),
        dtype=array.dtype,
        pieces=tuple(pieces),
    )


def _repeat(operands: Sequence[Made], count: int, dim: int, unit: int) -> Made:
    """The operand with each block of `unit` entries along dimension `dim` repeated
    `count` times, one repetition after the other.
    """
    (array,) = operands
    dim = dim_of(dim, len(array.shape), "repeat")
    if unit < 1 or count < 0 or array.shape[dim] % unit:
        raise MapError(
            f"`repeat` of units of {unit} along dim {dim}, which do not divide shape"
            f" {array.shape}."
        )
    if unit != 1:
        units = _split(operands, dim, -1, unit)
        repeated = _repeat([units], count, dim, 1)
        return _merge([repeated], dim, 2)
    repetition = _repetition(count, dim)
    pieces: list[Piece] = []
    for piece in array.pieces:
        # Each element of the dimension takes the place of `count`.
        with_new_dim = _with_new_dim(piece, dim + 1)
        spread = merged(with_new_dim, dim, count)
        pieces += nonempty_piece(
            value=piece.value,
            source=piece.source,
            target=spread.target,
            factors=[*spread.factors, repetition],
        )
    return Made(
        shape=_shape_after(array.shape, dim, array.shape[dim] * count),
        dtype=array.dtype,
        pieces=tuple(pieces),
    )


def _with_new_dim(piece: Piece, dim: int) -> Piece:
    """The piece for a target with a further dimension `dim` of size 1."""
    rank = len(piece.target)
    return renumbered(piece, (*range(dim), None, *range(dim, rank)))


def _pad_to(operands: Sequence[Made], size: int, dim: int, value: object) -> Made:
    """The operand with dimension `dim` padded at its end to size `size`, with `value`."""
    (array,) = operands
    dim = dim_of(dim, len(array.shape), "pad_to")
    missing = size - array.shape[dim]
    if missing < 0:
        raise MapError(
            f"`pad_to({size})` along dim {dim} of shape {array.shape}, which is more;"
            " `slice` makes it less."
        )
    if missing == 0:
        return array
    padding_shape = _shape_after(array.shape, dim, missing)
    padding = filled_with(value, padding_shape, array.dtype)
    return _concat([array, padding], dim, 1)


def cast(array: Made, dtype: Any) -> Made:
    """A target array cast to `dtype`."""
    if array.dtype == dtype:
        return array
    keys = jax.dtypes.extended
    if jnp.issubdtype(array.dtype, keys) or jnp.issubdtype(dtype, keys):
        raise MapError(
            f"{array.dtype} cannot be cast to {dtype}: a PRNG key means something only"
            " to its own implementation."
        )
    is_complex = jnp.issubdtype(array.dtype, jnp.complexfloating)
    if is_complex and not jnp.issubdtype(dtype, jnp.complexfloating):
        raise MapError(
            f"{array.dtype} cannot be cast to {dtype}, which has no imaginary part."
        )
    return _after_operation(array, dtype, dtype)


def _cast(operands: Sequence[Made], dtype: str) -> Made:
    (array,) = operands
    return cast(array, jnp.dtype(dtype))


def _after_operation(array: Made, operation: Operation, dtype: DType) -> Made:
    """The target array after one more operation on its elements, which results in
    `dtype`. The operation is appended to the casts of each piece.
    """
    pieces = []
    for piece in array.pieces:
        casts = (*piece.value.casts, operation)
        pieces.append(piece._replace(value=piece.value._replace(casts=casts)))
    return Made(shape=array.shape, dtype=dtype, pieces=tuple(pieces))


def _arithmetic(
    sign: Literal["*", "+"],
    operands: Sequence[Made],
    number: float,
) -> Made:
    """The operand after the operation `sign` with `number`. Raises `MapError` unless it
    is floating-point.
    """
    (array,) = operands
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise MapError(
            f"{array.dtype} takes no arithmetic with {number!r}: cast it to a"
            " floating-point dtype first."
        )
    return _after_operation(array, Arithmetic(sign, number), array.dtype)


def _scale(operands: Sequence[Made], *block: int) -> Made:
    """The first operand, a leaf, multiplied by the second, which has one scale for each
    block of sizes `block`. The result is float32.
    """
    for operand in operands:
        is_float = jnp.issubdtype(operand.dtype, jnp.floating)
        if not is_float and not jnp.issubdtype(operand.dtype, jnp.integer):
            raise MapError(
                f"{operand.dtype} is not multiplied in float32; scale integers and"
                " floating-point numbers."
            )
    weights, scales = operands
    scales_shape = tuple(
        -(-size // block_size)
        for size, block_size in zip(weights.shape, block, strict=False)
        if block_size > 0
    )
    if len(block) != len(weights.shape) or scales.shape != scales_shape:
        raise MapError(
            f"blocks of {block} of shape {weights.shape} take scales of shape"
            f" {scales_shape}, and these have {scales.shape}."
        )

    pieces: list[Piece] = []
    if scales.pieces:
        scale = Scale(path=str(scales.pieces[0].value.path), block=block)
        for piece in weights.pieces:
            pieces.append(piece._replace(value=piece.value._replace(scale=scale)))
    return Made(shape=weights.shape, dtype=jnp.dtype("float32"), pieces=tuple(pieces))


def on_shapes(op: str, operands: Sequence[Made], *args: Any) -> Made:
    """Applies the operation `op` of an expression, such as `"transpose"`, to the target
    arrays `operands`.

    `args` are the operation's other arguments.
    """
    return ON_SHAPES[op](operands, *args)


ON_SHAPES: Mapping[str, Callable[..., Made]] = {
    "constant": _constant,
    "transpose": _transpose,
    "split": _split,
    "merge": _merge,
    "reshape": _reshape,
    "stacked": _stacked,
    "concat": _concat,
    "at": _at,
    "slice": _slice,
    "repeat": _repeat,
    "pad_to": _pad_to,
    "cast": _cast,
    "scale": _scale,
    "times": ft.partial(_arithmetic, "*"),
    "plus": ft.partial(_arithmetic, "+"),
}
