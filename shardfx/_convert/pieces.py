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


def changed(x: Any, to: Operation) -> Any:
    """The NumPy or JAX array `x` after the operation `to`."""
    if not isinstance(to, Arithmetic):
        return cast_array(x, to)
    wide = np.dtype("float64") if x.dtype == np.float64 else np.dtype("float32")
    number, values = wide.type(to.number), x.astype(wide)
    match to.sign:
        case "*":
            made = values * number
        case "/":
            made = values / number
        case "+":
            made = values + number
        case "-":
            made = values - number
    return made.astype(x.dtype)


def is_only(casts: Iterable[Operation], dtype: object) -> bool:
    """Whether all operations in `casts` are casts to `dtype`."""
    return all(not isinstance(to, Arithmetic) and to == dtype for to in casts)


def dtypes_of(casts: Iterable[Operation]) -> list[Any]:
    """The dtypes of the casts among the operations."""
    return [to for to in casts if not isinstance(to, Arithmetic)]


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
      moves, and the elements that it
        moves by. If the dimension is `NOWHERE`, the loop repeats one element of the
        source.
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
      the number of elements that the
        loops with shorter steps span.
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
    pieces: tuple[Piece, ...]

    def __post_init__(self) -> None:
        if math.prod(size or 1 for size in self.shape) > _MOST_ELEMENTS:
            raise MapError(
                f"an array of shape {str(self.shape):.200} has more elements than any"
                " memory holds."
            )


def whole(value: Value, shape: tuple[int, ...]) -> tuple[Piece, ...]:
    """The piece that copies a whole array of shape `shape`, in a tuple; no piece for an
    array without elements.
    """
    zero = (0,) * len(shape)
    return made_of(
        value,
        zero,
        zero,
        [Factor(size, dim, 1, dim, 1) for dim, size in enumerate(shape)],
    )


def made_of(
    value: Value,
    source: tuple[int, ...],
    target: tuple[int, ...],
    factors: Iterable[Factor],
) -> tuple[Piece, ...]:
    """The piece with these fields, in a tuple; no piece if a factor has size 0. Factors
    of size 1 are left out.
    """
    kept = tuple(factor for factor in factors if factor.size != 1)
    return (
        ()
        if any(factor.size == 0 for factor in kept)
        else (Piece(value, source, target, kept),)
    )


def names_of(piece: Piece) -> tuple[str, ...]:
    """The paths of the arrays that a piece reads: its source, and the scales that
    multiply it.
    """
    value = piece.value
    return tuple(
        name
        for name in (value.path, value.scale and value.scale.path)
        if name is not None
    )


def extended(piece: Piece, sizes: tuple[int, ...]) -> Piece:
    """The piece for a source and a target with further last dimensions of sizes
    `sizes`, which are copied whole.
    """
    here, there, zero = len(piece.source), len(piece.target), (0,) * len(sizes)
    more = [
        Factor(size, here + at, 1, there + at, 1)
        for at, size in enumerate(sizes)
        if size != 1
    ]
    return Piece(
        piece.value,
        (*piece.source, *zero),
        (*piece.target, *zero),
        (*piece.factors, *more),
    )


def swapped(piece: Piece) -> Piece:
    """The piece with source and target exchanged."""
    return Piece(piece.value, piece.target, piece.source, _swapped(piece.factors))


# Thousands of pieces have the same few factors.
@ft.lru_cache(maxsize=4096)
def _swapped(factors: tuple[Factor, ...]) -> tuple[Factor, ...]:
    return tuple(
        Factor(f.size, f.target_dim, f.target_step, f.source_dim, f.source_step)
        for f in factors
    )


def moved(place: tuple[int, ...], dim: int, by: int) -> tuple[int, ...]:
    """The position `place`, moved by `by` elements along dimension `dim`. It stays the
    same if `dim` is `NOWHERE`.
    """
    return (
        place
        if dim == NOWHERE or not by
        else (*place[:dim], place[dim] + by, *place[dim + 1 :])
    )


def rows(piece: Piece, factor: Factor, start: int, stop: int) -> Piece:
    """The part of a piece with only the iterations `start` to `stop` of `factor`."""
    source = moved(piece.source, factor.source_dim, start * factor.source_step)
    target = moved(piece.target, factor.target_dim, start * factor.target_step)
    if start == 0 and stop == factor.size:
        return piece
    kept = [
        f if f is not factor else Factor(stop - start, *f[1:]) for f in piece.factors
    ]
    return Piece(piece.value, source, target, tuple([f for f in kept if f.size != 1]))


def along(piece: Piece, dim: int) -> list[Factor]:
    """The factors of a piece that move along dimension `dim` of the target, the longest
    step first.
    """
    return sorted(
        [f for f in piece.factors if f.target_dim == dim],
        key=lambda factor: -factor.target_step,
    )


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
    own = along(piece, dim)
    low, length = piece.target[dim], span(own)
    if start <= low and low + length <= stop:
        yield piece
        return
    if low + length <= start or stop <= low or start >= stop:
        return
    outer, inner = own[0], span(own[1:])
    step = outer.target_step
    first = min(max(0, -(-(start - low) // step)), outer.size)
    last = max(first, min(outer.size, (stop - inner - low) // step + 1))
    # At both ends only a part of the row is inside; a row of one element is inside or
    # not.
    if first > 0 and inner > 1:
        yield from cut(rows(piece, outer, first - 1, first), dim, start, stop)
    if last > first:
        yield rows(piece, outer, first, last)
    if last < outer.size and inner > 1:
        yield from cut(rows(piece, outer, last, last + 1), dim, start, stop)


def within(piece: Piece, box: Box) -> list[Piece]:
    """The part of a piece inside a box of the target, as several pieces."""
    ends = hull(piece)
    if all(
        start <= low and high <= stop
        for (low, high), (start, stop) in zip(ends, box, strict=True)
    ):
        return [piece]
    if any(
        high <= start or stop <= low
        for (low, high), (start, stop) in zip(ends, box, strict=True)
    ):
        return []
    found = [piece]
    for dim, (start, stop) in enumerate(box):
        found = [part for one in found for part in cut(one, dim, start, stop)]
    return found


def shifted(piece: Piece, by: Sequence[int]) -> Piece:
    """The piece with its position in the target moved by a number of elements for each
    dimension.
    """
    target = tuple([place + more for place, more in zip(piece.target, by, strict=True)])
    return Piece(piece.value, piece.source, target, piece.factors)


def renumbered(piece: Piece, order: Sequence[int | None]) -> Piece:
    """The piece for a target with reordered dimensions.

    `order` has an old dimension for each new one, or `None` for an inserted dimension
    of size 1.
    """
    target = tuple([0 if dim is None else piece.target[dim] for dim in order])
    return Piece(
        piece.value, piece.source, target, _renumbered(piece.factors, tuple(order))
    )


@ft.lru_cache(maxsize=4096)
def _renumbered(
    factors: tuple[Factor, ...], order: tuple[int | None, ...]
) -> tuple[Factor, ...]:
    new = {dim: number for number, dim in enumerate(order) if dim is not None}
    return tuple(
        f if f.target_dim == NOWHERE else f._replace(target_dim=new[f.target_dim])
        for f in factors
    )


def merged(piece: Piece, dim: int, inner: int) -> Piece:
    """The piece for a target whose dimensions `dim` and `dim + 1` become one; the
    latter has size `inner`.
    """
    target = (
        *piece.target[:dim],
        piece.target[dim] * inner + piece.target[dim + 1],
        *piece.target[dim + 2 :],
    )
    factors = []
    for factor in piece.factors:
        if factor.target_dim == dim:
            factor = factor._replace(target_step=factor.target_step * inner)
        elif factor.target_dim > dim:
            factor = factor._replace(target_dim=factor.target_dim - 1)
        factors.append(factor)
    return Piece(piece.value, piece.source, target, tuple(factors))


def split(piece: Piece, dim: int, inner: int) -> Iterator[Piece]:
    """Yields the pieces for a target with dimension `dim` split into two, the second of
    size `inner`.
    """
    order: list[int | None] = list(range(dim + 1))
    opened = renumbered(piece, [*order, None, *range(dim + 1, len(piece.target))])
    yield from _split(opened, dim, inner)


def _split(piece: Piece, dim: int, inner: int) -> Iterator[Piece]:
    own = along(piece, dim)
    low, length = piece.target[dim], span(own)
    row, column = divmod(low, inner)
    if column + length <= inner:
        yield _in_row(piece, dim, row, column)
        return
    outer, below = own[0], span(own[1:])
    step = outer.target_step
    per = inner // step if inner % step == 0 else 0
    if step % inner == 0:
        # Each iteration moves by whole rows, so all iterations are split like the
        # first.
        for part in _split(_without(piece, outer), dim, inner):
            further = outer._replace(target_step=step // inner)
            yield part._replace(factors=(further, *part.factors))
    elif per and column + (per - 1) * step + below <= inner and outer.size % per == 0:
        longer = outer._replace(
            size=outer.size // per,
            source_step=outer.source_step * per,
            target_step=inner,
        )
        two = (longer, outer._replace(size=per))
        rest = _without(piece, outer)
        yield from _split(rest._replace(factors=(*two, *rest.factors)), dim, inner)
    elif per and column % step + below <= step:
        # Split at the end of the row, or before the last row that is not full, so that
        # the rest is even.
        end = (row + 1) * inner if column >= step else (low + length) // inner * inner
        for part in (*cut(piece, dim, low, end), *cut(piece, dim, end, low + length)):
            yield from _split(part, dim, inner)
    elif per:
        for start in range(row * inner, low + length, inner):
            for part in cut(piece, dim, start, start + inner):
                yield from _split(part, dim, inner)
    else:
        for number in range(outer.size):
            yield from _split(rows(piece, outer, number, number + 1), dim, inner)


def _in_row(piece: Piece, dim: int, row: int, column: int) -> Piece:
    target = (*piece.target[:dim], row, column, *piece.target[dim + 2 :])
    factors = tuple(
        f._replace(target_dim=dim + 1) if f.target_dim == dim else f
        for f in piece.factors
    )
    return Piece(piece.value, piece.source, target, factors)


def _without(piece: Piece, factor: Factor) -> Piece:
    return piece._replace(factors=tuple(f for f in piece.factors if f is not factor))


def simplified(piece: Piece) -> Piece:
    """The same piece with fewer factors. Two nested loops become one that copies the
    same elements in the same order.

    Sizes 2 and 3 with steps 3 and 1 in source and target become size 6 with step 1.
    """
    return Piece(piece.value, piece.source, piece.target, _simplified(piece.factors))


def all_simplified(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yields `simplified` of each piece. Pieces that follow each other often have the
    same factors.
    """
    last: tuple[Factor, ...] | None = None
    factors: tuple[Factor, ...] = ()
    for piece in pieces:
        if piece.factors is not last:
            last = piece.factors
            factors = _simplified(last)
        yield Piece(piece.value, piece.source, piece.target, factors)


@ft.lru_cache(maxsize=4096)
def _simplified(given: tuple[Factor, ...]) -> tuple[Factor, ...]:
    factors: list[Factor] = []
    for factor in sorted(given, key=lambda f: (f.target_dim, -f.target_step)):
        last = factors[-1] if factors else None
        if last is not None and _goes_on(last, factor):
            factors[-1] = factor._replace(size=last.size * factor.size)
        else:
            factors.append(factor)
    return tuple(factors)


def _goes_on(outer: Factor, inner: Factor) -> bool:
    if outer.target_dim != inner.target_dim or outer.source_dim != inner.source_dim:
        return False
    is_even = outer.target_step == inner.size * inner.target_step
    return is_even and outer.source_step == inner.size * inner.source_step


def hull(piece: Piece) -> Box:
    """The smallest box of the target that contains all elements of a piece."""
    return tuple(
        [
            (low, low + reach)
            for low, reach in zip(
                piece.target, _reaches(piece.factors, len(piece.target)), strict=True
            )
        ]
    )


def from_start(piece: Piece, box: Box) -> list[int]:
    """For each dimension of the target, the number of elements from the start of `box`
    to the start of the piece.

    It is 0 along dimensions in which the piece begins before the box or ends after it.
    """
    pairs = zip(hull(piece), box, strict=True)
    return [
        low - start if start <= low and high <= stop else 0
        for (low, high), (start, stop) in pairs
    ]


@ft.lru_cache(maxsize=4096)
def _reaches(factors: tuple[Factor, ...], rank: int) -> tuple[int, ...]:
    """The number of elements from the first to the last that the factors reach, along
    each of `rank` dimensions.
    """
    return tuple(
        span([one for one in factors if one.target_dim == dim]) for dim in range(rank)
    )


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
                    yield from dense(rows(piece, factor, number, number + 1))
                return
            length *= factor.size
    yield piece


def once(piece: Piece) -> Piece:
    """The piece without repetitions: it copies each source element only to the first of
    its target positions.
    """
    kept = tuple([f for f in piece.factors if f.source_dim != NOWHERE])
    return Piece(piece.value, piece.source, piece.target, kept)


def composed(outer: Piece, inner: Piece) -> Iterator[Piece]:
    """Yields pieces that make the copies of `inner` and then `outer` in one step.

    `inner` writes an intermediate array, and `outer` reads it. The result does not need
    this array.
    """
    for box in dense(inner):
        # For each dimension of the intermediate array, the factors in `box`, the
        # largest step first.
        factors = [along(box, dim) for dim in range(len(box.target))]
        parts = [
            shifted(part, [-place for place in box.target])
            for part in within(swapped(outer), hull(box))
        ]
        numbers: list[Factor | None] = []
        for own in factors:
            at = len(numbers)
            for factor in own[:-1]:
                parts = [
                    new for part in parts for new in split(part, at, factor.target_step)
                ]
                at += 1
            numbers += own or [None]
        for part in parts:
            yield _through(part, numbers, box)


def _through(part: Piece, loops: Sequence[Factor | None], box: Piece) -> Piece:
    """The piece that `composed` makes of a part of its outer piece and a part of its
    inner piece.

    **Arguments:**

    - `part`: a part of the outer piece with source and target exchanged. Its target is
      the part of the intermediate
        array that `box` fills, with each dimension split into one dimension per factor
        of `box`.
    - `loops`: for each dimension of this target, the factor of `box`; `None` for one of
      size 1 without a factor.
    - `box`: a part of the inner piece that fills a box of the intermediate array.
    """
    source = box.source
    for place, loop in zip(part.target, loops, strict=True):
        if loop is not None:
            source = moved(source, loop.source_dim, place * loop.source_step)
    factors = []
    for f in part.factors:
        loop = loops[f.target_dim] if f.target_dim != NOWHERE else None
        dim, step = (
            (NOWHERE, 0)
            if loop is None
            else (loop.source_dim, f.target_step * loop.source_step)
        )
        factors.append(Factor(f.size, dim, step, f.source_dim, f.source_step))
    value = box.value._replace(casts=(*box.value.casts, *part.value.casts))
    return Piece(value, source, part.source, tuple(factors))
