"""Pieces for targets whose dimensions are in another order, or are split or merged."""

import functools as ft
from collections.abc import Iterator, Sequence

from .pieces import NOWHERE, Factor, Piece, along, cut, iterations, span


def renumbered(piece: Piece, order: Sequence[int | None]) -> Piece:
    """The piece for a target with reordered dimensions.

    `order` has an old dimension for each new one, or `None` for an inserted dimension
    of size 1.
    """
    target: list[int] = []
    for dim in order:
        target.append(0 if dim is None else piece.target[dim])
    factors = _renumbered(piece.factors, tuple(order))
    return Piece(
        value=piece.value,
        source=piece.source,
        target=tuple(target),
        factors=factors,
    )


@ft.lru_cache(maxsize=4096)
def _renumbered(
    factors: tuple[Factor, ...],
    old_dims: tuple[int | None, ...],
) -> tuple[Factor, ...]:
    """The factors for a target with reordered dimensions. `old_dims` has for each new
    dimension the old one; `None` for an inserted dimension.
    """
    new_dims = {dim: number for number, dim in enumerate(old_dims) if dim is not None}
    new_dims[NOWHERE] = NOWHERE
    return tuple(
        factor._replace(target_dim=new_dims[factor.target_dim]) for factor in factors
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
    return Piece(
        value=piece.value,
        source=piece.source,
        target=target,
        factors=tuple(factors),
    )


def split(piece: Piece, dim: int, inner: int) -> Iterator[Piece]:
    """Yields the pieces for a target with dimension `dim` split into two, the second of
    size `inner`.
    """
    rank = len(piece.target)
    order = (*range(dim + 1), None, *range(dim + 1, rank))
    yield from _split(renumbered(piece, order), dim, inner)


def _split(piece: Piece, dim: int, inner: int) -> Iterator[Piece]:
    """Yields the pieces of `split`. Dimension `dim + 1` of the target is there, and all
    elements are still along dimension `dim`: element n belongs in row `n // inner` and
    column `n % inner`.
    """
    # The loops along the dimension, the longest step first, and the interval from the
    # first element that they reach to behind the last.
    factors = along(piece, dim)
    low = piece.target[dim]
    high = low + span(factors)
    row, column = divmod(low, inner)
    if high <= (row + 1) * inner:
        yield _in_row(piece, dim, row, column)
        return

    outer = factors[0]
    step = outer.target_step
    # The elements from the first to the last of one iteration of the outer loop.
    reach = span(factors[1:])
    # The number of iterations in a row, if each row has the same number; else 0.
    per_row = inner // step if inner % step == 0 else 0
    if step % inner == 0:
        # Each iteration moves by whole rows, so all iterations are split like the
        # first.
        by_rows = outer._replace(target_step=step // inner)
        for part in _split(_without(piece, outer), dim, inner):
            yield part._replace(factors=(by_rows, *part.factors))
    elif per_row and _fills_rows(outer, per_row, column, reach):
        over_rows = outer._replace(
            size=outer.size // per_row,
            source_step=outer.source_step * per_row,
            target_step=inner,
        )
        in_row = outer._replace(size=per_row)
        others = _without(piece, outer).factors
        in_two = piece._replace(factors=(over_rows, in_row, *others))
        yield from _split(in_two, dim, inner)
    elif per_row and column % step + reach <= step:
        # No iteration crosses the end of a row. The piece is cut at the end of its
        # first row, or before the last row that is not full, so that the rest is even.
        end = (row + 1) * inner if column >= step else high // inner * inner
        parts = (*cut(piece, dim, low, end), *cut(piece, dim, end, high))
        for part in parts:
            yield from _split(part, dim, inner)
    elif per_row:
        # An iteration crosses the end of a row: the piece is cut row by row.
        for start in range(row * inner, high, inner):
            for part in cut(piece, dim, start, start + inner):
                yield from _split(part, dim, inner)
    else:
        # Rows have different numbers of iterations: each iteration is split by itself.
        for number in range(outer.size):
            iteration = iterations(piece, outer, number, number + 1)
            yield from _split(iteration, dim, inner)


def _fills_rows(outer: Factor, per_row: int, column: int, reach: int) -> bool:
    """Whether the iterations of a loop are whole rows of `per_row` iterations, if the
    first begins at `column` of its row, and each reaches `reach` elements.
    """
    step = outer.target_step
    row_length = per_row * step
    last = column + (per_row - 1) * step
    return last + reach <= row_length and outer.size % per_row == 0


def _in_row(piece: Piece, dim: int, row: int, column: int) -> Piece:
    """The piece whose elements all lie in one row of a target with dimension `dim`
    split: in row `row` from column `column` on. Its loops along `dim` become loops
    along `dim + 1`.
    """
    target = (*piece.target[:dim], row, column, *piece.target[dim + 2 :])
    factors = []
    for factor in piece.factors:
        if factor.target_dim == dim:
            factor = factor._replace(target_dim=dim + 1)
        factors.append(factor)
    return Piece(
        value=piece.value,
        source=piece.source,
        target=target,
        factors=tuple(factors),
    )


def _without(piece: Piece, factor: Factor) -> Piece:
    """The piece without one of its factors: the first iteration of that loop."""
    others = [other for other in piece.factors if other is not factor]
    return piece._replace(factors=tuple(others))
