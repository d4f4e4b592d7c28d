"""Operations that take pieces of arrays or join them: slices, pads, concatenations.

The partitioner cuts, exchanges and joins pieces where the whole program shifts, pads or
slices a dimension that is cut. None of these changes an element, so the devices hold
pieces of the same value; the operation that reads them next says which array of the
whole program they have to be.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from ..hlo_text import Instruction, arrays_in
from .bounds import require_start_in_bounds
from .cuts import HOLE, Cut
from .forms import numbers
from .held import (
    MOST_KNOWN,
    NOWHERE,
    Axis,
    Context,
    Fills,
    Held,
    Number,
    cut_of,
    require_finished,
    with_all_axes,
)
from .joining import (
    common_axis,
    constant_number,
    form_in,
    is_empty,
    joined_cut,
    with_axis,
    without,
)
from .matching import (
    Match,
    candidates,
    expressed,
    held_result,
    matched_operands,
    matches_by_name,
    seen_as_padded,
)
from .moves import Padding, padding_of, slice_bounds
from .values import Global, Node
from .verdict import Unjudged


def slice_(context: Context, instruction: Instruction, operand: Held) -> Held:
    """The result of a slice with the same bounds on each device."""
    bounds = slice_bounds(instruction)
    shape = arrays_in(instruction.result)[0].shape
    starts = [np.full(context.devices, dim_bounds.start) for dim_bounds in bounds]
    strides = [dim_bounds.stride for dim_bounds in bounds]
    return _window(context, operand, shape, starts, strides)


def _window(
    context: Context,
    operand: Held,
    shape: tuple[int, ...],
    starts: Sequence[np.ndarray],
    strides: Sequence[int],
) -> Held:
    """What devices hold of a slice of an operand that has the shape `shape`. `starts`
    has an array of positions for each dimension, one for each device, and `strides` a
    number for each dimension.
    """
    axes: list[Axis | None] = []
    for place, axis in enumerate(operand.axes):
        is_all = shape[place] == operand.shape[place]
        if axis is None or is_all:
            axes.append(axis)
            continue
        cut = context.cuts.window(axis.cut, starts[place], shape[place], strides[place])
        axes.append(Axis(axis.dim, cut))
    table = _known_window(operand, shape, starts, strides)
    if operand.root == NOWHERE and table is None:
        raise Unjudged("a slice of numbers of one device's program")
    held = dataclasses.replace(
        operand, shape=shape, axes=tuple(axes), known_numbers=table
    )
    return held if held.has_holes else dataclasses.replace(held, fill=None)


def _known_window(
    operand: Held,
    shape: tuple[int, ...],
    starts: Sequence[np.ndarray],
    strides: Sequence[int],
) -> np.ndarray | None:
    """The known numbers of the slice that `_window` takes; `None` for others."""
    table = operand.known_numbers
    if table is None:
        return None
    for place, size in enumerate(shape):
        if table.shape[1 + place] == 1:
            continue
        distances = np.arange(size) * strides[place]
        positions = starts[place][:, None] + distances
        sizes = [1] * table.ndim
        sizes[0], sizes[1 + place] = positions.shape
        table = np.take_along_axis(table, positions.reshape(sizes), axis=1 + place)
    return table


def dynamic_slice(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
) -> Held:
    """The result of a slice at indices. Known indices, which may differ between
    devices, choose a piece of the same value. Others are the whole program's.
    """
    operand, *index_operands = operands
    shape = arrays_in(instruction.result)[0].shape
    starts: list[np.ndarray] = []
    for dim, index in enumerate(index_operands):
        last_start = operand.shape[dim] - shape[dim]
        if last_start == 0:
            starts.append(np.zeros(context.devices, np.int64))
        elif index.known_numbers is None:
            return _indexed_slice(context, instruction, operands, shape)
        else:
            index_numbers = index.known_numbers.reshape(-1).astype(np.int64)
            starts.append(np.clip(index_numbers, 0, last_start))
    if not are_of_whole_program(operands):
        held = _window(context, operand, shape, starts, [1] * len(shape))
        if held.known_numbers is None:
            require_start_in_bounds(context, operand, shape)
            return held
        # A table of the partitioner, read at the device's number.
        return Held(
            NOWHERE, shape, (None,) * len(shape), known_numbers=held.known_numbers
        )
    try:
        return _indexed_slice(context, instruction, operands, shape)
    except Unjudged:
        return _window(context, operand, shape, starts, [1] * len(shape))


def are_of_whole_program(operands: Sequence[Held]) -> bool:
    """Whether no operand has numbers that only the program of one device has."""
    return all(operand.root != NOWHERE for operand in operands)


def _indexed_slice(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
    shape: tuple[int, ...],
) -> Held:
    """A slice at indices of the whole program, along dimensions that are not cut. Its
    shape is `shape` on one device.
    """
    operand, *index_operands = operands
    for index in index_operands:
        require_finished(index, "an index")
    for value_number, expressed_operands in matched_operands(
        context, instruction, operands
    ):
        operand = expressed_operands[0]
        form = form_in(context, instruction, expressed_operands, shape)
        cuts = _cuts_of_slice(
            context, operand, context.values.nodes[value_number], shape
        )
        if cuts is not None:
            # Broadcasts stay broadcasts in the whole program's shape.
            held = held_result(context, form, instruction, shape, cuts, value_number)
            return held.with_sums_of(operand)
    raise Unjudged("a slice, at an index that is computed, of a dimension that is cut")


def _cuts_of_slice(
    context: Context,
    operand: Held,
    node: Node,
    shape: tuple[int, ...],
) -> list[Cut | None] | None:
    """The cuts of a slice of `operand` that has the shape `shape` on one device and is
    the value `node`; `None` if it is along a dimension that is cut.
    """
    cuts: list[Cut | None] = []
    for dim, axis in enumerate(operand.axes):
        size = node.operands[0].shape[dim]
        sliced_size = node.shape[dim]
        if size == sliced_size and operand.shape[dim] == shape[dim]:
            cuts.append(cut_of(axis))
            continue
        is_whole = axis is None or context.cuts.is_whole(axis.cut, size)
        if not is_whole or sliced_size != shape[dim] or operand.shape[dim] != size:
            return None
        cuts.append(context.cuts.whole(shape[dim]))
    return cuts


def pad(context: Context, instruction: Instruction, operands: Sequence[Held]) -> Held:
    """The result of a pad: of the whole program's, or the operand with holes in the
    place of padding. The holes are filled with the number of the padding.
    """
    operand, padding = operands
    shape = arrays_in(instruction.result)[0].shape
    paddings = padding_of(instruction)
    padding_number = constant_number(padding)
    if padding_number != 0:
        require_finished(operand, "pad")
    matched = _padded_globally(context, instruction, operands, shape)
    if matched is not None:
        return matched
    axes: list[Axis | None] = []
    is_padded = False
    padded_dims: list[int] = []
    for place, (axis, (low, high, interior)) in enumerate(
        zip(operand.axes, paddings, strict=True)
    ):
        if not (low or high or interior):
            axes.append(axis)
            continue
        if axis is None:
            axis = _axis_of_single(context, operand, place)
        indices = _padded_row(context, axis, low, high, interior)
        is_padded |= bool(indices.shape[1] > axis.cut.size)
        padded_dims.append(axis.dim)
        axes.append(Axis(axis.dim, context.cuts.from_indices(indices)))
        assert axes[-1] is not None and axes[-1].cut.size == shape[place]
    fill = operand.fill
    if is_padded:
        fill = _fill_of_padded(operand, frozenset(padded_dims), padding_number)
    if operand.root == NOWHERE:
        raise Unjudged("padding of numbers of one device's program")
    padded = dataclasses.replace(
        operand,
        shape=shape,
        axes=tuple(axes),
        fill=fill,
        known_numbers=None,
    )
    return seen_as_padded(context, instruction, padded)


def _axis_of_single(context: Context, operand: Held, place: int) -> Axis:
    """The axis of dimension `place` of an operand, which has size 1 and no axis:
    nothing changes along it. It is that of a dimension of size 1 of the value, if these
    are as many as such dimensions of the operand. Raises `Unjudged` otherwise: the
    dimension may be a broadcast.
    """
    if operand.root < 0 or operand.shape[place] != 1:
        raise Unjudged("padding along a dimension where nothing changes")
    axes = [*operand.axes, *operand.dropped_axes]
    used_dims = {axis.dim for axis in axes if axis is not None}
    single_dims = []
    for dim, size in enumerate(context.values.nodes[operand.root].shape):
        if size == 1 and dim not in used_dims:
            single_dims.append(dim)
    single_places = []
    for other_place, axis in enumerate(operand.axes):
        if axis is None and operand.shape[other_place] == 1:
            single_places.append(other_place)
    if len(single_dims) != len(single_places):
        raise Unjudged("padding along a dimension where nothing changes")
    dim = single_dims[single_places.index(place)]
    return Axis(dim, context.cuts.whole(1))


def _fill_of_padded(
    operand: Held,
    padded_dims: frozenset[int],
    number: Number | None,
) -> Number | Fills | None:
    """What the holes are filled with after an operand is padded by `number` along the
    dimensions `padded_dims` of its value. Holes that it had along others keep their
    number.
    """
    if not operand.has_holes or operand.fill == number:
        return number
    old_fill = operand.fill
    if old_fill is None:
        return None
    if isinstance(old_fill, Fills):
        is_same_number = old_fill.number == number
        dims = padded_dims | old_fill.dims
        return Fills(dims, number if is_same_number else None, old_fill.other)
    is_apart = not padded_dims & operand.hole_dims
    return Fills(padded_dims, number if is_apart else None, old_fill)


def _padded_row(
    context: Context,
    axis: Axis,
    low: int,
    high: int,
    interior: int,
) -> np.ndarray:
    """The indices that the positions of a dimension hold after it is padded: an array
    of shape (devices, positions), with `HOLE` for padding. There are `low` positions
    before the elements of `axis`, `interior` between two, and `high` after them.
    """
    indices = context.cuts.indices(axis.cut)
    count = indices.shape[1]
    step = interior + 1
    size = low + count + max(count - 1, 0) * interior + high
    distances = np.arange(size) - low
    is_element = (distances >= 0) & (distances < count * step) & (distances % step == 0)
    indices_and_hole = np.pad(indices, ((0, 0), (0, 1)), constant_values=HOLE)
    return indices_and_hole[:, np.where(is_element, distances // step, count)]


def _padded_globally(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
    shape: tuple[int, ...],
) -> Held | None:
    """The result of a pad of the whole program along dimensions that are not cut;
    `None` if the whole program has no such pad. Its shape is `shape` on one device.
    """
    form = form_in(context, instruction, operands, shape)
    matches = [
        Match(number, list(operands))
        for number in candidates(context, form, instruction)
    ]
    matches += matches_by_name(context, instruction, operands)
    bounds = padding_of(instruction)
    for number, (operand, value) in matches:
        node = context.values.nodes[number]
        assert node.instruction is not None
        if padding_of(node.instruction) != bounds:
            continue
        cuts = _padded_cuts(context, operand, node.operands[0].shape, bounds, shape)
        if cuts is None:
            continue
        require_finished(value, "pad")
        form = form_in(context, instruction, (operand, value), shape)
        held = held_result(context, form, instruction, shape, cuts, number)
        return held.with_sums_of(operand)
    return None


def _padded_cuts(
    context: Context,
    operand: Held,
    sizes: Sequence[int],
    bounds: Sequence[Padding],
    shape: tuple[int, ...],
) -> list[Cut | None] | None:
    """The cuts of a padded array of the shape `shape` on one device, whose operand has
    the shape `sizes` in the whole program; `None` if a dimension is cut that is padded.
    """
    cuts: list[Cut | None] = []
    for dim, axis in enumerate(operand.axes):
        if bounds[dim] == (0, 0, 0):
            cuts.append(cut_of(axis))
            continue
        if operand.shape[dim] != sizes[dim]:
            return None
        if axis is not None and not context.cuts.is_whole(axis.cut, sizes[dim]):
            return None
        cuts.append(context.cuts.whole(shape[dim]))
    return cuts


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
    matched = _concatenated_globally(context, instruction, operands, shape, along)
    if matched is not None:
        return matched
    pieces = [with_all_axes(operand) for operand in operands]
    held = _joined_pieces(context, pieces, shape, along)
    if held is not None:
        return held
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
                return held
    raise Unjudged("a concatenation of pieces of different arrays")


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
    return Held(NOWHERE, shape, (None,) * len(shape), known_numbers=joined)


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
        held = held_result(context, form, instruction, shape, cuts, value_number)
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
            cuts.append(without(context, axis.cut, is_padding))
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
    their value. Constants are holes along it, as is each piece on a device that has
    none of its elements.
    """
    numbers_along: set[Number | None] = set()
    numbers_beside: set[Number | None] = set()
    for piece in pieces:
        constant = constant_number(piece)
        if constant is not None:
            numbers_along.add(constant)
            continue
        empty = is_empty(piece, context.devices)
        fill = piece.fill
        if empty.any():
            numbers_along.add(fill.number if isinstance(fill, Fills) else fill)
        dims: set[int] = set()
        for axis in piece.axes:
            if axis is not None and (axis.cut.starts[~empty] == HOLE).any():
                dims.add(axis.dim)
        for dim in dims:
            numbers_of_dim = numbers_along if dim == along else numbers_beside
            if not isinstance(fill, Fills):
                numbers_of_dim.add(fill)
                continue
            if dim not in fill.dims:
                numbers_of_dim.add(fill.other)
            # A hole along several dimensions has this number.
            if dims & fill.dims:
                numbers_of_dim.add(fill.number)
    number = next(iter(numbers_along)) if len(numbers_along) == 1 else None
    if not numbers_beside:
        return number
    if len(numbers_beside) > 1:
        return None
    (other,) = numbers_beside
    if other is None or numbers_along <= {other}:
        return other
    return Fills(dims=frozenset([along]), number=number, other=other)


def reverse(context: Context, instruction: Instruction, operand: Held) -> Held:
    """The result of a reverse: of the whole program's, or the elements of the operand
    in reverse order.
    """
    shape = operand.shape
    reversed_dims = numbers(instruction, "dimensions")
    form = form_in(context, instruction, [operand], shape)
    for value_number in candidates(context, form, instruction):
        node = context.values.nodes[value_number]
        result_cuts = []
        for dim, axis in enumerate(operand.axes):
            result_cut = cut_of(axis)
            size = node.shape[dim]
            if dim in reversed_dims and result_cut is not None and size is not None:
                indices = context.cuts.indices(result_cut)[:, ::-1]
                flipped = np.where(indices == HOLE, HOLE, size - 1 - indices)
                result_cut = context.cuts.from_indices(flipped)
            result_cuts.append(result_cut)
        held = held_result(context, form, instruction, shape, result_cuts, value_number)
        held = held.with_sums_of(operand)
        return dataclasses.replace(held, fill=operand.fill_number)
    axes: list[Axis | None] = list(operand.axes)
    for dim in reversed_dims:
        axis = axes[dim]
        if axis is not None:
            indices = context.cuts.indices(axis.cut)[:, ::-1]
            axes[dim] = Axis(axis.dim, context.cuts.from_indices(indices))
    return dataclasses.replace(operand, axes=tuple(axes), known_numbers=None)
