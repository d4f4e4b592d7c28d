"""Concatenations: of the whole program, or of pieces of one value, as in `pieces.py`."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..hlo_text import Instruction, arrays_in
from .cuts import HOLE
from .elements import expressed
from .forms import numbers
from .held import (
    MOST_KNOWN,
    NOWHERE,
    Axis,
    Context,
    Fills,
    Held,
    Number,
    require_finished,
    with_all_axes,
)
from .joining import (
    common_axis,
    constant_number,
    emptied_on,
    form_in,
    is_empty,
    joined_cut,
    with_axis,
)
from .matching import candidates, held_result
from .values import Global
from .verdict import Unjudged


def concatenate(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
) -> Held:
    """The result of a concatenation: of the whole program's, of numbers of one device's
    program, or of pieces of one value.
    """
    shape = arrays_in(instruction.result)[0].shape
    (along,) = numbers(instruction, "dimensions")
    tables = [
        operand.known_numbers
        for operand in operands
        if operand.known_numbers is not None
    ]
    if any(operand.root == NOWHERE for operand in operands):
        return _known_concatenation(operands, tables, shape, along)
    matched = _concatenated_globally(
        context=context,
        instruction=instruction,
        operands=operands,
        shape=shape,
        along=along,
    )
    if matched is not None:
        return matched
    pieces = [with_all_axes(context, operand) for operand in operands]
    held = _joined_pieces(context, pieces, shape, along)
    if held is not None:
        return held
    concatenations: list[Held] = []
    for value_number in context.values.with_name("concatenate", instruction.op_name):
        node = context.values.nodes[value_number]
        assert node.result is not None
        pieces_of_result = [
            _as_piece_of(context, piece, node.result) for piece in pieces
        ]
        present_pieces = [piece for piece in pieces_of_result if piece is not None]
        if len(present_pieces) == len(pieces):
            held = _joined_pieces(context, present_pieces, shape, along)
            if held is not None:
                concatenations.append(held)
    if not concatenations:
        raise Unjudged("a concatenation of pieces of different arrays")
    # Several concatenations of the whole program may have this name, and these pieces.
    return min(concatenations, key=_count_of_segments)


def _count_of_segments(held: Held) -> int:
    """How many segments the dimensions of an array have."""
    return sum(len(axis.cut.lengths) for axis in held.axes if axis is not None)


def _as_piece_of(context: Context, piece: Held, array: Global) -> Held | None:
    """A piece as elements of `array`; constants stay as they are. `None` if it has no
    elements of it.
    """
    number = constant_number(piece)
    return piece if number is not None else expressed(context, piece, array)


def _known_concatenation(
    operands: Sequence[Held],
    tables: Sequence[np.ndarray],
    shape: tuple[int, ...],
    along: int,
) -> Held:
    """The concatenation along dimension `along` of numbers of one device's program.
    `tables` are the known numbers of the operands, arrays of shape (devices, 1 or size,
    ...).
    """
    devices = len(tables[0]) if tables else 0
    if len(tables) != len(operands) or devices * np.prod(shape) > MOST_KNOWN:
        raise Unjudged("a concatenation of numbers of one device's program")
    full_tables = [
        np.broadcast_to(table, (devices, *operand.shape))
        for table, operand in zip(tables, operands, strict=True)
    ]
    joined = np.concatenate(full_tables, axis=1 + along)
    return Held(
        root=NOWHERE, shape=shape, axes=(None,) * len(shape), known_numbers=joined
    )


def _concatenated_globally(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
    shape: tuple[int, ...],
    along: int,
) -> Held | None:
    """The result of a concatenation of the whole program along a dimension that is not
    cut; `None` if the whole program has no such concatenation.
    """
    form = form_in(context, instruction, operands, shape)
    for value_number in candidates(context, form, instruction):
        node = context.values.nodes[value_number]
        is_whole = all(
            operand.shape[along] == array.shape[along]
            and (
                (axis := operand.axes[along]) is None
                or context.cuts.is_whole(axis.cut, array.shape[along])
            )
            for operand, array in zip(operands, node.operands, strict=True)
        )
        if not is_whole:
            continue
        cuts = []
        for place in range(len(shape)):
            if place == along:
                cuts.append(context.cuts.whole(shape[along]))
                continue
            axes = [operand.axes[place] for operand in operands]
            cut = joined_cut(context, "concatenate", place, axes)
            if cut is None and shape[place] == node.shape[place]:
                cut = context.cuts.whole(shape[place])
            if cut is None and shape[place] != 1:
                raise Unjudged("a concatenation of broadcasts")
            cuts.append(cut)
        sum_states = {
            (operand.terms, operand.reducer, operand.scale) for operand in operands
        }
        if len(sum_states) > 1:
            for operand in operands:
                require_finished(operand, "concatenate")
        terms, reducer, scale = sum_states.pop()
        held = held_result(
            context, instruction, operands, cuts, value_number=value_number
        )
        return dataclasses.replace(held, terms=terms, reducer=reducer, scale=scale)
    return None


def _joined_pieces(
    context: Context,
    pieces: Sequence[Held],
    shape: tuple[int, ...],
    along: int,
) -> Held | None:
    """The pieces of one value, side by side along dimension `along`; `None` if they are
    of several. Constants are holes with a fill. The result has the shape `shape`.
    """
    # Without the constants.
    value_pieces = [piece for piece in pieces if constant_number(piece) is None]
    if not value_pieces or len({piece.root for piece in value_pieces}) > 1:
        return None
    first_axis = value_pieces[0].axes[along]
    if first_axis is None or any(not piece.is_finished for piece in pieces):
        return None
    dims = {
        axis.dim for piece in value_pieces if (axis := piece.axes[along]) is not None
    }
    if len(dims) > 1:
        return None
    # Which devices have elements of each piece, and of any.
    used = [~is_empty(piece, context.devices) for piece in value_pieces]
    has_elements = np.any(used, axis=0)
    cuts = []
    for piece in pieces:
        axis = piece.axes[along]
        constant = constant_number(piece)
        if constant is not None:
            cuts.append(context.cuts.holes(piece.shape[along]))
        elif axis is None:
            return None
        else:
            # A piece that is padding beside another one holds none of its elements.
            is_padding = is_empty(piece, context.devices) & has_elements
            cuts.append(emptied_on(context, axis.cut, is_padding))
    held = value_pieces[0]
    for place in range(len(shape)):
        if place != along:
            held = with_axis(
                held, place, common_axis(context, value_pieces, place, used)
            )
    held = with_axis(held, along, Axis(first_axis.dim, context.cuts.concatenated(cuts)))
    fill = _fill_of_pieces(context, pieces, first_axis.dim)
    return dataclasses.replace(held, shape=shape, fill=fill, known_numbers=None)


def _fill_of_pieces(
    context: Context,
    pieces: Sequence[Held],
    along: int,
) -> Number | Fills | None:
    """What the holes are filled with after pieces are joined along dimension `along` of
    their value: one number, if it is the same in all holes; else one in those along
    that dimension and one in the others. `None` if it is not known.
    """
    numbers_along: set[Number | None] = set()
    numbers_beside: set[Number | None] = set()
    for piece in pieces:
        fills = _fills_of_piece(context, piece, along)
        numbers_along |= fills.along
        numbers_beside |= fills.beside

    number = next(iter(numbers_along)) if len(numbers_along) == 1 else None
    if not numbers_beside:
        return number
    if len(numbers_beside) > 1:
        return None
    (other,) = numbers_beside
    if other is None or numbers_along <= {other}:
        return other
    return Fills(dims=frozenset([along]), number=number, other=other)


class _FillsOfPiece(NamedTuple):
    """The numbers in a piece's holes: in those along the dimension in which it is
    joined with others, and in those along another dimension. `None` is a number that is
    not known.
    """

    along: set[Number | None]
    beside: set[Number | None]


def _fills_of_piece(context: Context, piece: Held, along: int) -> _FillsOfPiece:
    """The numbers in the holes of a piece that is joined along dimension `along` of its
    value. A constant has holes along it, as has a piece on a device that has none of
    its elements.
    """
    constant = constant_number(piece)
    if constant is not None:
        return _FillsOfPiece(along={constant}, beside=set())
    fills = _FillsOfPiece(along=set(), beside=set())
    has_nothing = is_empty(piece, context.devices)
    if has_nothing.any():
        fill = piece.fill
        fills.along.add(fill.number if isinstance(fill, Fills) else fill)
    hole_dims = {
        axis.dim
        for axis in piece.axes
        if axis is not None and (axis.cut.starts[~has_nothing] == HOLE).any()
    }
    for dim in hole_dims:
        numbers = _numbers_in_holes(piece.fill, dim, hole_dims)
        if dim == along:
            fills.along.update(numbers)
        else:
            fills.beside.update(numbers)
    return fills


def _numbers_in_holes(
    fill: Number | Fills | None,
    dim: int,
    hole_dims: set[int],
) -> set[Number | None]:
    """The numbers in the holes along dimension `dim` of the value, where an array with
    this fill has holes along the dimensions `hole_dims`.
    """
    if not isinstance(fill, Fills):
        return {fill}
    numbers: set[Number | None] = set()
    if dim not in fill.dims:
        numbers.add(fill.other)
    # A hole along several dimensions has this number.
    if hole_dims & fill.dims:
        numbers.add(fill.number)
    return numbers
