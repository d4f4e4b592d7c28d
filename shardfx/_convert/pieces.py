"""Pieces: strided copies between two arrays. Every change of layout is a list of
pieces.

A piece copies elements in nested loops. Each loop is a factor: it moves the position in
the target by its step along one dimension of the target, and the position in the source
by its step along one dimension of the source. Source and target are symmetric, so code
for one side also serves the other: `swapped` exchanges them. All numbers are integers.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from .._ground.boxes import Box
from .._ground.errors import MapError
from .._ground.spec import DType
from .casts import cast_array


NOWHERE = -1
# NumPy counts the bytes of an array in 64 bits, and wraps around beyond. An element
# takes at most 16 bytes.
_MOST_ELEMENTS = 2**59


class Struct(NamedTuple):
    """The shape and dtype of a leaf."""

    shape: tuple[int, ...]
    dtype: DType


class Scale(NamedTuple):
    """The scales of a quantised array: another array with one scale for each block of
    elements.

    **Arguments:**

    - `path`: the path of the array of scales.
    - `block`: the size of a block along each dimension.
    """

    path: str
    block: tuple[int, ...]


class Arithmetic(NamedTuple):
    """An arithmetic operation with the second operand `number`, computed in float32 and
    rounded to the array's dtype.

    For float64 it is computed in float64.
    """

    sign: Literal["*", "/", "+", "-"]
    number: float

    @property
    def back(self) -> "Arithmetic":
        """The inverse operation, which restores the array up to rounding."""
        signs: dict[str, Literal["*", "/", "+", "-"]] = {
            "*": "/",
            "/": "*",
            "+": "-",
            "-": "+",
        }
        return Arithmetic(signs[self.sign], self.number)


# An operation on the elements of an array: an `Arithmetic`, or a dtype, which stands
# for a cast.
Operation: TypeAlias = Any


def changed(x: Any, operation: Operation) -> Any:
    """The NumPy or JAX array `x` after an operation: an `Arithmetic`, which computes in
    float32 (float64 for float64) and keeps the dtype, or the dtype of a cast.
    """
    if not isinstance(operation, Arithmetic):
        return cast_array(x, operation)
    wide = np.dtype("float64") if x.dtype == np.float64 else np.dtype("float32")
    number = wide.type(operation.number)
    values = x.astype(wide)
    match operation.sign:
        case "*":
            values = values * number
        case "/":
            values = values / number
        case "+":
            values = values + number
        case "-":
            values = values - number
    return values.astype(x.dtype)


def is_only(casts: Iterable[Operation], dtype: object) -> bool:
    """Whether all operations in `casts` are casts to `dtype`."""
    for operation in casts:
        if isinstance(operation, Arithmetic) or operation != dtype:
            return False
    return True


def dtypes_of(casts: Iterable[Operation]) -> list[Any]:
    """The dtypes of the casts among the operations."""
    return [dtype for dtype in casts if not isinstance(dtype, Arithmetic)]


class Value(NamedTuple):
    """The source of a piece, an array or a constant, and the operations on its
    elements.

    **Arguments:**

    - `path`: the path of the source array; `None` for a constant.
    - `number`: the constant.
    - `scale`: the scales that multiply the elements in float32.
    - `casts`: the operations, in order.
    """

    path: str | None
    number: int | float | bool | None = None
    scale: Scale | None = None
    casts: tuple[Operation, ...] = ()


class Factor(NamedTuple):
    """One loop of a piece.

    - `size`: the number of iterations.
    - `source_dim`, `source_step`: the dimension of the source along which an iteration
      moves, and the elements that it moves by. If the dimension is `NOWHERE`, the loop
      repeats one element of the source.
    - `target_dim`, `target_step`: the same for the target.
    """

    size: int
    source_dim: int
    source_step: int
    target_dim: int
    target_step: int


class Piece(NamedTuple):
    """A strided copy in nested loops, the factors, from one array, the source, to
    another one, the target.

    The transpose of an array of shape (2, 3) has the factors `Factor(2, 0, 1, 1, 1)`
    and `Factor(3, 1, 1, 0, 1)`.

    **Arguments:**

    - `value`: the source, and the operations on its elements.
    - `source`, `target`: the position of the first element in either array.
    - `factors`: the nested loops. Along one dimension, the step of a loop is at least
      the number of elements that the loops with shorter steps span.
    """

    value: Value
    source: tuple[int, ...]
    target: tuple[int, ...]
    factors: tuple[Factor, ...]

    @property
    def elements(self) -> int:
        """The number of elements that the piece writes."""
        return math.prod(factor.size for factor in self.factors)


@dataclasses.dataclass(frozen=True)
class Made:
    """A target array: its shape, its dtype, and the pieces (strided copies) that fill
    it. No two pieces overlap.
    """

    shape: tuple[int, ...]
    dtype: DType
    pieces: Sequence[Piece]

    def __post_init__(self) -> None:
        if math.prod(size or 1 for size in self.shape) > _MOST_ELEMENTS:
            raise MapError(
                f"an array of shape {str(self.shape):.200} has more elements than any"
                " memory holds."
            )


def whole(value: Value, shape: tuple[int, ...]) -> tuple[Piece, ...]:
    """The piece that copies a whole array of shape `shape`, in a tuple; no piece for an
    array without elements. `value` has the path of the array.
    """
    start = (0,) * len(shape)
    factors = [
        Factor(
            size=size,
            source_dim=dim,
            source_step=1,
            target_dim=dim,
            target_step=1,
        )
        for dim, size in enumerate(shape)
    ]
    return nonempty_piece(value=value, source=start, target=start, factors=factors)


def nonempty_piece(
    value: Value,
    source: tuple[int, ...],
    target: tuple[int, ...],
    factors: Iterable[Factor],
) -> tuple[Piece, ...]:
    """The piece with these fields, in a tuple; no piece if a factor has size 0. Factors
    of size 1 are left out. `value` has the source array or a constant, `source` and
    `target` the position of the first element in either array, and `factors` the loops.
    """
    loops = tuple(factor for factor in factors if factor.size != 1)
    if any(factor.size == 0 for factor in loops):
        return ()
    return (Piece(value=value, source=source, target=target, factors=loops),)


def names_of(piece: Piece) -> tuple[str, ...]:
    """The paths of the arrays that a piece reads: its source, and the scales that
    multiply it.
    """
    names = []
    if piece.value.path is not None:
        names.append(piece.value.path)
    if piece.value.scale is not None:
        names.append(piece.value.scale.path)
    return tuple(names)


def extended(piece: Piece, sizes: tuple[int, ...]) -> Piece:
    """The piece for a source and a target with further last dimensions of sizes
    `sizes`, which are copied whole.
    """
    start = (0,) * len(sizes)
    new_factors = []
    for number, size in enumerate(sizes):
        factor = Factor(
            size=size,
            source_dim=len(piece.source) + number,
            source_step=1,
            target_dim=len(piece.target) + number,
            target_step=1,
        )
        if size != 1:
            new_factors.append(factor)
    return Piece(
        value=piece.value,
        source=(*piece.source, *start),
        target=(*piece.target, *start),
        factors=(*piece.factors, *new_factors),
    )


def swapped(piece: Piece) -> Piece:
    """The piece with source and target exchanged."""
    return Piece(
        value=piece.value,
        source=piece.target,
        target=piece.source,
        factors=_swapped(piece.factors),
    )


# Thousands of pieces have the same few factors.
@ft.lru_cache(maxsize=4096)
def _swapped(factors: tuple[Factor, ...]) -> tuple[Factor, ...]:
    """The factors with source and target exchanged."""
    return tuple(
        Factor(
            size=factor.size,
            source_dim=factor.target_dim,
            source_step=factor.target_step,
            target_dim=factor.source_dim,
            target_step=factor.source_step,
        )
        for factor in factors
    )


def moved(position: tuple[int, ...], dim: int, distance: int) -> tuple[int, ...]:
    """A position moved by `distance` elements along dimension `dim`. It stays the same
    if `dim` is `NOWHERE`.
    """
    if dim == NOWHERE or not distance:
        return position
    coordinate = position[dim] + distance
    return (*position[:dim], coordinate, *position[dim + 1 :])


def iterations(piece: Piece, factor: Factor, start: int, stop: int) -> Piece:
    """The part of a piece with only the iterations `start` to `stop` of `factor`."""
    if start == 0 and stop == factor.size:
        return piece
    count = stop - start
    factors = []
    for other in piece.factors:
        if other is factor:
            other = other._replace(size=count)
        if other.size != 1:
            factors.append(other)
    return Piece(
        value=piece.value,
        source=moved(piece.source, factor.source_dim, start * factor.source_step),
        target=moved(piece.target, factor.target_dim, start * factor.target_step),
        factors=tuple(factors),
    )


def along(piece: Piece, dim: int) -> list[Factor]:
    """The factors of a piece that move along dimension `dim` of the target, the longest
    step first.
    """
    factors = [factor for factor in piece.factors if factor.target_dim == dim]
    return sorted(factors, key=lambda factor: -factor.target_step)


def span(factors: Sequence[Factor]) -> int:
    """The number of elements from the first to the last that factors along one
    dimension of the target reach.

    For sizes 2 and 3 with steps 6 and 2, they reach 0, 2, 4, 6, 8 and 10, so the result
    is 11.
    """
    return 1 + sum((factor.size - 1) * factor.target_step for factor in factors)


def cut(piece: Piece, dim: int, start: int, stop: int) -> Iterator[Piece]:
    """Yields a few pieces that together copy the elements `start` to `stop` along
    dimension `dim` of the target.
    """
    factors = along(piece, dim)
    low = piece.target[dim]
    high = low + span(factors)
    if start <= low and high <= stop:
        yield piece
        return
    if high <= start or stop <= low or start >= stop:
        return

    outer = factors[0]
    step = outer.target_step
    # The elements that one iteration of the outer loop reaches are a row.
    row_length = span(factors[1:])
    # The first row that begins at `start` or later, and the first that ends behind
    # `stop`. The rows between them are whole inside.
    row_from_start = -(-(start - low) // step)
    first_row = min(max(0, row_from_start), outer.size)
    row_behind_stop = (stop - row_length - low) // step + 1
    end_row = max(first_row, min(outer.size, row_behind_stop))
    # At both ends only a part of a row is inside; a row of one element is inside or
    # not.
    if first_row > 0 and row_length > 1:
        before = iterations(piece, outer, first_row - 1, first_row)
        yield from cut(before, dim, start, stop)
    if end_row > first_row:
        yield iterations(piece, outer, first_row, end_row)
    if end_row < outer.size and row_length > 1:
        after = iterations(piece, outer, end_row, end_row + 1)
        yield from cut(after, dim, start, stop)


def within(piece: Piece, box: Box) -> list[Piece]:
    """The part of a piece inside a box of the target, as several pieces."""
    is_inside = True
    for (low, high), (start, stop) in zip(hull(piece), box, strict=True):
        if high <= start or stop <= low:
            return []
        is_inside = is_inside and start <= low and high <= stop
    if is_inside:
        return [piece]
    parts = [piece]
    for dim, (start, stop) in enumerate(box):
        inside: list[Piece] = []
        for part in parts:
            inside += cut(part, dim, start, stop)
        parts = inside
    return parts


def shifted(piece: Piece, offset: Sequence[int]) -> Piece:
    """The piece with its position in the target moved by a number of elements for each
    dimension.
    """
    pairs = zip(piece.target, offset, strict=True)
    target = tuple([position + distance for position, distance in pairs])
    return Piece(
        value=piece.value,
        source=piece.source,
        target=target,
        factors=piece.factors,
    )


def simplified(piece: Piece) -> Piece:
    """The same piece with fewer factors. Two nested loops become one that copies the
    same elements in the same order.

    Sizes 2 and 3 with steps 3 and 1 in source and target become size 6 with step 1.
    """
    return Piece(
        value=piece.value,
        source=piece.source,
        target=piece.target,
        factors=_simplified(piece.factors),
    )


@ft.lru_cache(maxsize=4096)
def _simplified(factors: tuple[Factor, ...]) -> tuple[Factor, ...]:
    """The same loops as fewer ones, in the order of the target's dimensions, the
    longest step first.
    """
    ordered = sorted(
        factors, key=lambda factor: (factor.target_dim, -factor.target_step)
    )
    fewer: list[Factor] = []
    for factor in ordered:
        if fewer and _goes_on(fewer[-1], factor):
            outer = fewer.pop()
            factor = factor._replace(size=outer.size * factor.size)
        fewer.append(factor)
    return tuple(fewer)


def _goes_on(outer: Factor, inner: Factor) -> bool:
    """Whether two nested loops along one dimension of the source and of the target move
    as one: a step of the outer one is all iterations of the inner one, on both sides.
    """
    if outer.target_dim != inner.target_dim or outer.source_dim != inner.source_dim:
        return False
    is_even = outer.target_step == inner.size * inner.target_step
    return is_even and outer.source_step == inner.size * inner.source_step


def hull(piece: Piece) -> Box:
    """The smallest box of the target that contains all elements of a piece."""
    reaches = _reaches(piece.factors, len(piece.target))
    pairs = zip(piece.target, reaches, strict=True)
    return tuple([(low, low + reach) for low, reach in pairs])


def from_start(piece: Piece, box: Box) -> list[int]:
    """For each dimension of the target, the number of elements from the start of `box`
    to the start of the piece.

    It is 0 along dimensions in which the piece begins before the box or ends after it.
    """
    distances = []
    for (low, high), (start, stop) in zip(hull(piece), box, strict=True):
        is_inside = start <= low and high <= stop
        distances.append(low - start if is_inside else 0)
    return distances


@ft.lru_cache(maxsize=4096)
def _reaches(factors: tuple[Factor, ...], rank: int) -> tuple[int, ...]:
    """The number of elements from the first to the last that the factors reach, along
    each of `rank` dimensions.
    """
    reaches = []
    for dim in range(rank):
        factors_of_dim = [factor for factor in factors if factor.target_dim == dim]
        reaches.append(span(factors_of_dim))
    return tuple(reaches)


def dense(piece: Piece) -> Iterator[Piece]:
    """Yields pieces with the elements of a piece, each of which fills a box of the
    target without gaps.

    A piece that writes every second one of 6 elements becomes three pieces of one
    element.
    """
    for dim in range(len(piece.target)):
        length = 1
        for factor in reversed(along(piece, dim)):
            if factor.target_step != length:
                for number in range(factor.size):
                    yield from dense(iterations(piece, factor, number, number + 1))
                return
            length *= factor.size
    yield piece


def once(piece: Piece) -> Piece:
    """The piece without repetitions: it copies each source element only to the first of
    its target positions.
    """
    factors = tuple([f for f in piece.factors if f.source_dim != NOWHERE])
    return Piece(
        value=piece.value,
        source=piece.source,
        target=piece.target,
        factors=factors,
    )
