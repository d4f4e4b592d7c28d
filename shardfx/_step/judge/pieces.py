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
    """The part of an array of `shape` at each device's starts."""
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
    """The known numbers of the part of an array of `shape` at each device's starts;
    `None` if its numbers are not known.
    """
    table = operand.known_numbers
    if table is None:
        return None
    for place, size in enumerate(shape):
        if table.shape[1 + place] == 1:
            continue
        steps = np.arange(size) * strides[place]
        columns = starts[place][:, None] + steps
        sizes = [1] * table.ndim
        sizes[0], sizes[1 + place] = columns.shape
        table = np.take_along_axis(table, columns.reshape(sizes), axis=1 + place)
    return table


def dynamic_slice(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
) -> Held:
    """The result of a slice at indices. Known indices, which may differ between
    devices, choose a piece of the same value. Others are the whole program's.
    """
    operand, *places = operands
    shape = arrays_in(instruction.result)[0].shape
    starts: list[np.ndarray] = []
    for place, index in enumerate(places):
        last_start = operand.shape[place] - shape[place]
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
    """A slice at indices of the whole program, along dimensions that are not cut."""
    operand, *places = operands
    for index in places:
        require_finished(index, "an index")
    for number, expressed_operands in matched_operands(context, instruction, operands):
        operand = expressed_operands[0]
        form = form_in(context, instruction, expressed_operands, shape)
        cuts = _cuts_of_slice(context, operand, context.values.nodes[number], shape)
        if cuts is not None:
            # Broadcasts stay broadcasts in the whole program's shape.
            held = held_result(context, form, instruction, shape, cuts, number)
            return held.with_sums_of(operand)
    raise Unjudged("a slice, at an index that is computed, of a dimension that is cut")


def _cuts_of_slice(
    context: Context,
    operand: Held,
    node: Node,
    shape: tuple[int, ...],
) -> list[Cut | None] | None:
    """The cuts of a slice whose shape is `shape` on one device, and which is the value
    `node` of the whole program; `None` if it is along a dimension that is cut.
    """
    cuts: list[Cut | None] = []
    for dim, axis in enumerate(operand.axes):
        size = node.operands[0].shape[dim]
        sliced_size = node.shape[dim]
        if size == sliced_size and operand.shape[dim] == shape[dim]:
            cuts.append(None if axis is None else axis.cut)
            continue
        is_whole = axis is None or context.cuts.is_whole(axis.cut, size)
        if not is_whole or sliced_size != shape[dim] or operand.shape[dim] != size:
            return None
        cuts.append(context.cuts.whole(shape[dim]))
    return cuts


def pad(context: Context, instruction: Instruction, operands: Sequence[Held]) -> Held:
    """The result of a pad: of the whole program's, or holes with a fill beside pieces
    of the same value.
    """
    operand, value = operands
    shape = arrays_in(instruction.result)[0].shape
    bounds = padding_of(instruction)
    number = constant_number(value)
    if number != 0:
        require_finished(operand, "pad")
    matched = _padded_globally(context, instruction, operands, shape)
    if matched is not None:
        return matched
    axes: list[Axis | None] = []
    is_padded = False
    padded_dims: list[int] = []
    for place, (axis, (low, high, interior)) in enumerate(
        zip(operand.axes, bounds, strict=True)
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
        fill = _fill_of_padded(operand, frozenset(padded_dims), number)
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
    """The axis of dimension `place`, of size 1, in which each device holds the first
    element of one of the value, which has size 1 too. Raises `Unjudged` if it may be a
    broadcast.
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
    """The numbers in holes after padding by `number` along some dimensions of a value."""
    if not operand.has_holes or operand.fill == number:
        return number
    before = operand.fill
    if before is None:
        return None
    if isinstance(before, Fills):
        is_same = before.number == number
        dims = padded_dims | before.dims
        return Fills(dims, number if is_same else None, before.other)
    is_apart = not padded_dims & operand.hole_dims
    return Fills(padded_dims, number if is_apart else None, before)


def _padded_row(
    context: Context,
    axis: Axis,
    low: int,
    high: int,
    interior: int,
) -> np.ndarray:
    """The indices that positions of a padded dimension hold, an array (devices,
    positions).
    """
    indices = context.cuts.indices(axis.cut)
    count = indices.shape[1]
    step = interior + 1
    size = low + count + max(count - 1, 0) * interior + high
    places = np.arange(size) - low
    is_element = (places >= 0) & (places < count * step) & (places % step == 0)
    with_hole = np.pad(indices, ((0, 0), (0, 1)), constant_values=HOLE)
    return with_hole[:, np.where(is_element, places // step, count)]


def _padded_globally(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
    shape: tuple[int, ...],
) -> Held | None:
    """The result of a pad of the whole program along dimensions that are not cut;
    `None` if the whole program has no such pad.
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
    """The cuts of the dimensions of a padded array, whose operand has these sizes in
    the whole program; `None` if a dimension that is padded is cut.
    """
    cuts: list[Cut | None] = []
    for dim, axis in enumerate(operand.axes):
        if bounds[dim] == (0, 0, 0):
            cuts.append(None if axis is None else axis.cut)
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
    for number in context.values.with_name("concatenate", instruction.op_name):
        node = context.values.nodes[number]
        assert node.result is not None
        lifted = [_lifted(context, piece, node.result) for piece in pieces]
        present = [piece for piece in lifted if piece is not None]
        if len(present) == len(pieces):
            held = _joined_pieces(context, present, shape, along)
            if held is not None:
                return held
    raise Unjudged("a concatenation of pieces of different arrays")


def _lifted(context: Context, piece: Held, array: Global) -> Held | None:
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
    """The concatenation of numbers of one device's program."""
    devices = len(tables[0]) if tables else 0
    if len(tables) != len(operands) or devices * np.prod(shape) > MOST_KNOWN:
        raise Unjudged("a concatenation of numbers of one device's program")
    full = [
        np.broadcast_to(table, (devices, *operand.shape))
        for table, operand in zip(tables, operands, strict=True)
    ]
    joined = np.concatenate(full, axis=1 + along)
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
    for number in candidates(context, form, instruction):
        node = context.values.nodes[number]
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
        states = {
            (operand.terms, operand.reducer, operand.scale) for operand in operands
        }
        if len(states) > 1:
            for operand in operands:
                require_finished(operand, "concatenate")
        terms, reducer, scale = states.pop()
        held = held_result(context, form, instruction, shape, cuts, number)
        return dataclasses.replace(held, terms=terms, reducer=reducer, scale=scale)
    return None


def _joined_pieces(
    context: Context,
    pieces: Sequence[Held],
    shape: tuple[int, ...],
    along: int,
) -> Held | None:
    """The pieces of one value, side by side; `None` if they are of several. Constants
    are holes with a fill.
    """
    # The pieces that are no constants.
    real = [piece for piece in pieces if constant_number(piece) is None]
    if not real or len({piece.root for piece in real}) > 1:
        return None
    first = real[0].axes[along]
    if first is None or any(not piece.is_finished for piece in pieces):
        return None
    dims = {axis.dim for piece in real if (axis := piece.axes[along]) is not None}
    if len(dims) > 1:
        return None
    # Which devices have elements of each piece, and of any.
    used = [~is_empty(piece, context.devices) for piece in real]
    has_elements = np.any(used, axis=0)
    cuts = []
    for piece in pieces:
        axis = piece.axes[along]
        number = constant_number(piece)
        if number is not None:
            cuts.append(context.cuts.holes(piece.shape[along]))
        elif axis is None:
            return None
        else:
            # A piece that is padding beside another one holds none of its elements.
            is_padding = is_empty(piece, context.devices) & has_elements
            cuts.append(without(context, axis.cut, is_padding))
    held = real[0]
    for place in range(len(shape)):
        if place != along:
            held = with_axis(held, place, common_axis(context, real, place, used))
    held = with_axis(held, along, Axis(first.dim, context.cuts.concatenated(cuts)))
    fill = _fill_of_pieces(context, pieces, first.dim)
    return dataclasses.replace(held, shape=shape, fill=fill, known_numbers=None)


def _fill_of_pieces(
    context: Context,
    pieces: Sequence[Held],
    along: int,
) -> Number | Fills | None:
    """The numbers in the holes of pieces that are joined along a dimension of a value.
    Constants are holes along it, as is each piece on a device that has none of it.
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
            numbers = numbers_along if dim == along else numbers_beside
            if not isinstance(fill, Fills):
                numbers.add(fill)
                continue
            if dim not in fill.dims:
                numbers.add(fill.other)
            # A hole along several dimensions has this number.
            if dims & fill.dims:
                numbers.add(fill.number)
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
    """The result of a reverse: of the whole program's, or the same pieces in reverse
    order.
    """
    shape = operand.shape
    reversed_dims = numbers(instruction, "dimensions")
    form = form_in(context, instruction, [operand], shape)
    for number in candidates(context, form, instruction):
        node = context.values.nodes[number]
        cuts = []
        for dim, axis in enumerate(operand.axes):
            cut = None if axis is None else axis.cut
            size = node.shape[dim]
            if dim in reversed_dims and cut is not None and size is not None:
                indices = context.cuts.indices(cut)[:, ::-1]
                flipped = np.where(indices == HOLE, HOLE, size - 1 - indices)
                cut = context.cuts.from_indices(flipped)
            cuts.append(cut)
        held = held_result(context, form, instruction, shape, cuts, number)
        held = held.with_sums_of(operand)
        return dataclasses.replace(held, fill=operand.fill_number)
    axes: list[Axis | None] = list(operand.axes)
    for dim in reversed_dims:
        axis = axes[dim]
        if axis is not None:
            indices = context.cuts.indices(axis.cut)[:, ::-1]
            axes[dim] = Axis(axis.dim, context.cuts.from_indices(indices))
    return dataclasses.replace(operand, axes=tuple(axes), known_numbers=None)
