"""Evaluates expressions of a map: to pieces, from the shapes of leaves, or to arrays,
from arrays.

A target array is a `Made`: its shape, its dtype, and the pieces (strided copies) that
fill it.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from .._ground.errors import MapError
from .._ground.spec import DType
from .expression import From, check_number, counted_leaf
from .patterns import Binding, near, pattern, sum_of
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
    made_of,
    merged,
    renumbered,
    shifted,
    split,
    whole,
)


def evaluated(
    made: From,
    binding: Binding,
    leaves: Mapping[str, object],
    leaf: Callable[[str], Any],
    run: Callable[..., Any],
) -> Any:
    """Evaluates the expression `made` with the values `binding` of its placeholders.

    `leaves` are the leaves of the source by path, and `leaf` returns the value of a
    leaf, given its path. `run` returns the value of an operation, given its name, the
    values of its operands and its other arguments. If the values are arrays, `run` is
    `on_arrays`; if they are target arrays with pieces, it is `on_shapes`.
    """
    if made.op == "leaf":
        return leaf(resolved(made.args[0], binding, leaves))
    if made.op == "stack":
        over, dim = made.args[:2]
        numbers = count_of(made, binding, leaves)
        if isinstance(leaf, LeavesMade):
            stack = _stack_of_alike(made, binding, numbers, leaf)
            if stack is not None:
                return stack
        bindings = [{**binding, over: number} for number in numbers]
        return run(
            "stacked",
            [evaluated(made.of[0], one, leaves, leaf, run) for one in bindings],
            dim,
        )
    parts = [evaluated(part, binding, leaves, leaf, run) for part in made.of]
    args = (
        (_index(made.args[0], binding), made.args[1]) if made.op == "at" else made.args
    )
    return run(made.op, parts, *args)


@dataclasses.dataclass(frozen=True)
class LeavesMade:
    """The leaves of the source as target arrays, for `evaluated`.

    **Arguments:**

    - `leaves`: the leaves by path, each with its shape and dtype.
    - `used`: the paths of the leaves that were asked for.
    """

    leaves: Mapping[str, Struct | Made]
    used: dict[str, None]

    def __call__(self, path: str) -> Made:
        self.used[path] = None
        return leaf_made(path, self.leaves[path])


def _stack_of_alike(
    stack: From, binding: Binding, numbers: range, leaf: LeavesMade
) -> Made | None:
    """The target array that a `stack` expression makes of parts that differ in nothing
    but the paths of their leaves; `None` if they may differ in more.

    Only the first part is evaluated. The others get its pieces, with their own paths
    and their own positions along the new dimension. A stack may have thousands of
    parts, and an evaluation takes three times as long.
    """
    over, dim = stack.args[:2]
    part = stack.of[0]
    if len(numbers) < 2 or _selects_by(part, over):
        return None

    leaves = leaf.leaves
    paths_by_part = []
    for number in numbers:
        paths = leaf_paths(part, {**binding, over: number}, leaves)
        if paths is None:
            return None
        paths_by_part.append(paths)
    first_paths = paths_by_part[0]
    kinds = [(leaves[path].shape, leaves[path].dtype) for path in first_paths]
    for paths in paths_by_part:
        if len(paths) != len(kinds):
            return None
        for path, (shape, dtype) in zip(paths, kinds, strict=True):
            other = leaves[path]
            if other.shape != shape or other.dtype != dtype:
                return None

    first = evaluated(part, {**binding, over: numbers[0]}, leaves, leaf, on_shapes)
    made = _stacked([first], dim)
    dim = dim_of(dim, len(made.shape), "stack")
    pieces: list[Piece] = []
    for place, paths in enumerate(paths_by_part):
        leaf.used.update(dict.fromkeys(paths))
        paths_of_part = dict(zip(first_paths, paths, strict=True))
        pieces += _like_first(made.pieces, paths_of_part, dim, place)
    shape = (*made.shape[:dim], len(numbers), *made.shape[dim + 1 :])
    return Made(shape, made.dtype, tuple(pieces))


def _selects_by(made: From, name: str) -> bool:
    """Whether an `at` operation of an expression selects by the placeholder `name`."""
    if made.op == "at" and isinstance(made.args[0], str):
        names = [term for _, term in sum_of(made.args[0]).terms]
        if name in names:
            return True
    return any(_selects_by(part, name) for part in made.of)


def leaf_paths(
    made: From, binding: Binding, leaves: Mapping[str, object]
) -> list[str] | None:
    """The paths of the leaves of an expression, in the order in which `evaluated` asks
    for them; `None` if a path has no value or no leaf.
    """
    if made.op == "leaf":
        path = pattern(made.args[0]).filled(binding)
        return None if path is None or path not in leaves else [path]
    bindings = [binding]
    if made.op == "stack":
        over = made.args[0]
        try:
            numbers = count_of(made, binding, leaves)
        except MapError:
            return None
        bindings = [{**binding, over: number} for number in numbers]
    paths: list[str] = []
    for values in bindings:
        for part in made.of:
            paths_of_part = leaf_paths(part, values, leaves)
            if paths_of_part is None:
                return None
            paths += paths_of_part
    return paths


def _like_first(
    pieces: Sequence[Piece], paths: Mapping[str, str], dim: int, place: int
) -> Iterator[Piece]:
    """Yields the pieces of a part of a stack from those of its first part.

    `paths` has the path of each leaf by that of the first part. The part is at `place`
    along dimension `dim`.
    """
    for value, source, target, factors in pieces:
        path, number, scale, casts = value
        if path is not None:
            if scale is not None:
                scale = Scale(paths[scale.path], scale.block)
            value = Value(paths[path], number, scale, casts)
        target = (*target[:dim], place, *target[dim + 1 :])
        yield Piece(value, source, target, factors)


def resolved(text: str, binding: Binding, leaves: Mapping[str, object]) -> str:
    """The path of a leaf, from a path with placeholders: `layers/3/w` for
    `layers/{i}/w` and i = 3.

    Raises `MapError` if the path is not in `leaves`.
    """
    path = pattern(text).filled(binding)
    if path is None:
        missing = [name for name in pattern(text).names if name not in binding]
        hint = (
            f"`{{{missing[0]}}}` has no value"
            if missing
            else "a sum in it has a name that is no number"
        )
        raise MapError(
            f"`{text}` names no leaf: {hint}; write it into the target's path too, or"
            " use `.stack(...)`."
        )
    if path not in leaves:
        raise MapError(f"the source has no `{path}`{near(path, leaves)}")
    return path


def count_of(made: From, binding: Binding, leaves: Mapping[str, object]) -> range:
    """The numbers 0, 1, 2, ... that a `stack` expression iterates over, as many as its
    `count`.

    Without a count, they end before the first number for which the source has no leaf.
    `binding` has the values of the other placeholders, and `leaves` the leaves of the
    source by path.
    """
    over, first = made.args[0], counted_leaf(made)
    if len(made.args) > 2:
        return range(made.args[2])
    if first is None:
        raise MapError(
            f"`.stack({over!r})` iterates over nothing: no path in {made.of[0]} has"
            f" `{{{over}}}`; write it into one, or give a count: `.stack({over!r},"
            " count=...)`."
        )
    number, binding = 0, {**dict.fromkeys(_inner_stacks(made.of[0]), 0), **binding}
    while (
        path := pattern(first).filled({**binding, over: number})
    ) is not None and path in leaves:
        number += 1
    if not number:
        path = pattern(first).filled({**binding, over: 0}) or first
        raise MapError(
            f"`.stack({over!r})` finds nothing: the source has no"
            f" `{path}`{near(path, leaves)}"
        )
    return range(number)


def _inner_stacks(made: From) -> list[str]:
    """The names of the placeholders that `stack` operations inside an expression
    iterate over.
    """
    own = [made.args[0]] if made.op == "stack" else []
    return [*own, *[name for part in made.of for name in _inner_stacks(part)]]


def _index(index: int | str, binding: Binding) -> int:
    found = index if isinstance(index, int) else sum_of(index).value(binding)
    if not isinstance(found, int):
        raise MapError(
            f"`.at({index!r})` needs a number, and the value of `{index}` is {found!r};"
            " number the target's path."
        )
    return found


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
    known = math.prod(size for size in sizes if size != -1)
    free = [at for at, size in enumerate(sizes) if size == -1]
    found = list(sizes)
    if len(free) == 1 and known and count % known == 0:
        found[free[0]] = count // known
    if any(size < 0 for size in found) or math.prod(found) != count:
        raise MapError(
            f"{what} of {count} elements into sizes {tuple(sizes)}, whose product is"
            " another number."
        )
    return tuple(found)


def _shape_after(shape: tuple[int, ...], dim: int, *sizes: int) -> tuple[int, ...]:
    return (*shape[:dim], *sizes, *shape[dim + 1 :])


# The functions below work on `Made`.


def leaf_made(path: str, struct: Struct | Made) -> Made:
    """A target array that is a copy of the leaf `path` of the source. `struct` has the
    leaf's shape and dtype.
    """
    return Made(
        tuple(struct.shape), struct.dtype, whole(Value(path), tuple(struct.shape))
    )


def filled_with(value: Any, shape: tuple[int, ...], dtype: DType) -> Made:
    """A target array of which each element is `value`."""
    check_number(value, dtype, f"an array of shape {shape}")
    factors = [Factor(size, NOWHERE, 0, dim, 1) for dim, size in enumerate(shape)]
    return Made(
        shape,
        dtype,
        made_of(Value(None, value, None, (dtype,)), (), (0,) * len(shape), factors),
    )


def _transpose(parts: Sequence[Made], *order: int) -> Made:
    (made,), rank = parts, len(parts[0].shape)
    order = (
        tuple(dim_of(dim, rank, "transpose") for dim in order)
        if order
        else tuple(reversed(range(rank)))
    )
    if sorted(order) != list(range(rank)):
        raise MapError(
            f"`transpose{order}` is no order of the {rank} dimensions of shape"
            f" {made.shape}."
        )
    return _placed(made, order, tuple(made.shape[dim] for dim in order))


def _split(parts: Sequence[Made], dim: int, *sizes: int) -> Made:
    (made,) = parts
    dim = dim_of(dim, len(made.shape), "split")
    sizes = sizes_of(sizes, made.shape[dim], f"`split` of dim {dim}")
    if not sizes:
        raise MapError(f"`split` of dim {dim} of shape {made.shape} needs sizes.")
    pieces = list(made.pieces)
    for at in range(1, len(sizes)):
        pieces = [
            part
            for piece in pieces
            for part in split(piece, dim + at - 1, math.prod(sizes[at:]))
        ]
    return Made(_shape_after(made.shape, dim, *sizes), made.dtype, tuple(pieces))


def _merge(parts: Sequence[Made], dim: int, count: int) -> Made:
    (made,), rank = parts, len(parts[0].shape)
    dim = dim_of(dim, rank, "merge")
    if not 1 <= count <= rank - dim:
        raise MapError(
            f"`merge` of {count} dimensions from dim {dim} on, and shape {made.shape}"
            f" has {rank}."
        )
    pieces, sizes = made.pieces, made.shape[dim : dim + count]
    for at in range(count - 1):
        pieces = tuple(merged(piece, dim, sizes[at + 1]) for piece in pieces)
    return Made(
        (*made.shape[:dim], math.prod(sizes), *made.shape[dim + count :]),
        made.dtype,
        pieces,
    )


def _reshape(parts: Sequence[Made], *sizes: int) -> Made:
    (made,) = parts
    sizes = sizes_of(sizes, math.prod(made.shape), f"`reshape` of shape {made.shape}")
    if 0 in sizes:
        return Made(sizes, made.dtype, ())
    flat = (
        _merge(parts, 0, len(made.shape)) if made.shape else _placed(made, [None], (1,))
    )
    return _split([flat], 0, *sizes) if sizes else _placed(flat, [], ())


def _placed(made: Made, order: Sequence[int | None], shape: tuple[int, ...]) -> Made:
    """A target array with its dimensions reordered to the shape `shape`.

    `order` has an old dimension for each new one, or `None` for an inserted dimension
    of size 1.
    """
    return Made(
        shape, made.dtype, tuple(renumbered(piece, order) for piece in made.pieces)
    )


def _stacked(parts: Sequence[Made], dim: int) -> Made:
    first = _alike(parts, "stack", None)
    rank = len(first.shape) + 1
    dim = dim_of(dim, rank, "stack")
    order, shape = (
        (*range(dim), None, *range(dim, rank - 1)),
        (*first.shape[:dim], len(parts), *first.shape[dim:]),
    )
    pieces: list[Piece] = []
    for number, part in enumerate(parts):
        by = (0,) * dim + (number,) + (0,) * (rank - dim - 1)
        pieces += [shifted(renumbered(piece, order), by) for piece in part.pieces]
    return Made(shape, first.dtype, tuple(pieces))


def _concat(parts: Sequence[Made], dim: int, shards: int) -> Made:
    if shards != 1:
        rank = len(parts[0].shape) if parts else 0
        at = dim_of(dim, rank, "concat")
        apart = [
            _split([part], at, shards, _share(part.shape, at, shards)) for part in parts
        ]
        return _merge([_concat(apart, at + 1, 1)], at, 2)
    first = _alike(parts, "concat", dim)
    dim, reached, pieces = dim_of(dim, len(first.shape), "concat"), 0, []
    for part in parts:
        place = tuple(reached * (at == dim) for at in range(len(first.shape)))
        pieces += [shifted(piece, place) for piece in part.pieces]
        reached += part.shape[dim]
    return Made(_shape_after(first.shape, dim, reached), first.dtype, tuple(pieces))


def _share(shape: tuple[int, ...], dim: int, shards: int) -> int:
    if dim >= len(shape) or shards < 1 or shape[dim] % shards:
        raise MapError(
            f"`concat` in {shards} shards along dim {dim}, which does not divide shape"
            f" {shape}."
        )
    return shape[dim] // shards


def _alike(parts: Sequence[Made], op: str, dim: int | None) -> Made:
    if not parts:
        raise MapError(f"`{op}` takes at least one array.")
    shapes = {part.shape for part in parts}
    if dim is not None:
        rank = len(parts[0].shape)
        at = dim_of(dim, rank, op)
        shapes = {
            (len(part.shape), *part.shape[:at], *part.shape[at + 1 :]) for part in parts
        }
    dtypes = list(dict.fromkeys(str(part.dtype) for part in parts))
    if len(shapes) > 1:
        raise MapError(
            f"`{op}` of different shapes, {sorted({part.shape for part in parts})}."
        )
    if len(dtypes) > 1:
        raise MapError(
            f"`{op}` of different dtypes, {' and '.join(dtypes)}; cast them first."
        )
    return parts[0]


def _at(parts: Sequence[Made], index: int, dim: int) -> Made:
    (made,), rank = parts, len(parts[0].shape)
    dim = dim_of(dim, rank, "at")
    if not -made.shape[dim] <= index < made.shape[dim]:
        raise MapError(
            f"`at({index})` is out of range along dim {dim} of shape {made.shape}."
        )
    one = _slice(parts, index % made.shape[dim], index % made.shape[dim] + 1, dim)
    return _placed(
        one, [at for at in range(rank) if at != dim], _shape_after(made.shape, dim)
    )


def _slice(parts: Sequence[Made], start: int, stop: int | None, dim: int) -> Made:
    (made,) = parts
    dim = dim_of(dim, len(made.shape), "slice")
    low, high, _ = slice(start, stop).indices(made.shape[dim])
    if low > high or (stop is not None and stop > made.shape[dim]):
        raise MapError(
            f"`slice({start}, {stop})` is out of range along dim {dim} of shape"
            f" {made.shape}."
        )
    back = tuple(-low * (at == dim) for at in range(len(made.shape)))
    pieces = tuple(
        shifted(part, back)
        for piece in made.pieces
        for part in cut(piece, dim, low, high)
    )
    return Made(_shape_after(made.shape, dim, high - low), made.dtype, pieces)


def _repeat(parts: Sequence[Made], count: int, dim: int, unit: int) -> Made:
    (made,) = parts
    dim = dim_of(dim, len(made.shape), "repeat")
    if unit < 1 or count < 0 or made.shape[dim] % unit:
        raise MapError(
            f"`repeat` of units of {unit} along dim {dim}, which do not divide shape"
            f" {made.shape}."
        )
    if unit != 1:
        return _merge([_repeat([_split(parts, dim, -1, unit)], count, dim, 1)], dim, 2)
    pieces = []
    for piece in made.pieces:
        target = (
            *piece.target[:dim],
            piece.target[dim] * count,
            *piece.target[dim + 1 :],
        )
        factors = [
            f._replace(target_step=f.target_step * count) if f.target_dim == dim else f
            for f in piece.factors
        ]
        pieces += made_of(
            piece.value,
            piece.source,
            target,
            [*factors, Factor(count, NOWHERE, 0, dim, 1)],
        )
    return Made(
        _shape_after(made.shape, dim, made.shape[dim] * count),
        made.dtype,
        tuple(pieces),
    )


def _pad_to(parts: Sequence[Made], size: int, dim: int, value: object) -> Made:
    (made,) = parts
    dim = dim_of(dim, len(made.shape), "pad_to")
    if size < made.shape[dim]:
        raise MapError(
            f"`pad_to({size})` along dim {dim} of shape {made.shape}, which is more;"
            " `slice` makes it less."
        )
    more = _shape_after(made.shape, dim, size - made.shape[dim])
    if size == made.shape[dim]:
        return made
    return _concat([made, filled_with(value, more, made.dtype)], dim, 1)


def cast(made: Made, to: Any) -> Made:
    """A target array cast to the dtype `to`."""
    if made.dtype == to:
        return made
    if jnp.issubdtype(made.dtype, jax.dtypes.extended) or jnp.issubdtype(
        to, jax.dtypes.extended
    ):
        raise MapError(
            f"{made.dtype} cannot be cast to {to}: a PRNG key means something only to"
            " its own implementation."
        )
    if jnp.issubdtype(made.dtype, jnp.complexfloating) and not jnp.issubdtype(
        to, jnp.complexfloating
    ):
        raise MapError(
            f"{made.dtype} cannot be cast to {to}, which has no imaginary part."
        )
    return _then(made, to, to)


def _then(made: Made, step: Operation, dtype: DType) -> Made:
    """The target array `made` after one more operation `step` on its elements, which
    results in `dtype`.
    """
    pieces = [
        piece._replace(value=piece.value._replace(casts=(*piece.value.casts, step)))
        for piece in made.pieces
    ]
    return Made(made.shape, dtype, tuple(pieces))


def _counted(sign: Literal["*", "+"], parts: Sequence[Made], number: float) -> Made:
    (made,) = parts
    if not jnp.issubdtype(made.dtype, jnp.floating):
        raise MapError(
            f"{made.dtype} takes no arithmetic with {number!r}: cast it to a"
            " floating-point dtype first."
        )
    return _then(made, Arithmetic(sign, number), made.dtype)


def _scale(parts: Sequence[Made], *block: int) -> Made:
    made, by = parts
    for part in parts:
        if not jnp.issubdtype(part.dtype, jnp.floating) and not jnp.issubdtype(
            part.dtype, jnp.integer
        ):
            raise MapError(
                f"{part.dtype} is not multiplied in float32; scale integers and"
                " floating-point numbers."
            )
    blocks = tuple(
        -(-size // each)
        for size, each in zip(made.shape, block, strict=False)
        if each > 0
    )
    if len(block) != len(made.shape) or by.shape != blocks:
        raise MapError(
            f"blocks of {block} of shape {made.shape} take scales of shape {blocks},"
            f" and these have {by.shape}."
        )
    if not made.pieces or not by.pieces:
        return Made(made.shape, jnp.dtype("float32"), ())
    scale = Scale(str(by.pieces[0].value.path), block)
    pieces: list[Piece] = [
        piece._replace(value=piece.value._replace(scale=scale)) for piece in made.pieces
    ]
    return Made(made.shape, jnp.dtype("float32"), tuple(pieces))


def on_shapes(op: str, parts: Sequence[Made], *args: Any) -> Made:
    """Applies the operation `op` of an expression, such as `"transpose"`, to the target
    arrays `parts`.

    `args` are the operation's other arguments.
    """
    return ON_SHAPES[op](parts, *args)


ON_SHAPES: Mapping[str, Callable[..., Made]] = {
    "constant": lambda _, value, shape, dtype: filled_with(
        value, tuple(shape), jnp.dtype(dtype)
    ),
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
    "cast": lambda parts, dtype: cast(parts[0], jnp.dtype(dtype)),
    "scale": _scale,
    "times": ft.partial(_counted, "*"),
    "plus": ft.partial(_counted, "+"),
}
