"""Operations that take pieces of arrays: slices and pads, and reverses.

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
from .elements import seen_as_padded
from .forms import numbers
from .held import (
    NOWHERE,
    Axis,
    Context,
    Fills,
    Held,
    Number,
    cut_of,
    require_finished,
)
from .joining import constant_number, form_in
from .matching import (
    Match,
    candidates,
    held_result,
    matched_operands,
    matches_by_name,
)
from .moves import Padding, padding_of, slice_bounds
from .values import Node
from .verdict import Unjudged


def slice_(context: Context, instruction: Instruction, operand: Held) -> Held:
    """The result of a slice with the same bounds on each device."""
    bounds = slice_bounds(instruction)
    shape = arrays_in(instruction.result)[0].shape
    starts = [np.full(context.devices, dim_bounds.start) for dim_bounds in bounds]
    strides = [dim_bounds.stride for dim_bounds in bounds]
    return _window(
        context=context, operand=operand, shape=shape, starts=starts, strides=strides
    )


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
        held = _window(
            context=context,
            operand=operand,
            shape=shape,
            starts=starts,
            strides=[1] * len(shape),
        )
        if held.known_numbers is None:
            require_start_in_bounds(context, operand, shape)
            return held
        # A table of the partitioner, read at the device's number.
        return Held(
            root=NOWHERE,
            shape=shape,
            axes=(None,) * len(shape),
            known_numbers=held.known_numbers,
        )
    try:
        return _indexed_slice(context, instruction, operands, shape)
    except Unjudged:
        return _window(
            context=context,
            operand=operand,
            shape=shape,
            starts=starts,
            strides=[1] * len(shape),
        )


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
        cuts = _cuts_of_slice(
            context, operand, context.values.nodes[value_number], shape
        )
        if cuts is None:
            continue
        # Broadcasts stay broadcasts in the whole program's shape.
        held = held_result(
            context, instruction, expressed_operands, cuts, value_number=value_number
        )
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
    padded_dims: list[int] = []
    for place, (axis, (low, high, interior)) in enumerate(
        zip(operand.axes, paddings, strict=True)
    ):
        if not (low or high or interior):
            axes.append(axis)
            continue
        if axis is None:
            axis = _axis_of_single(context, operand, place)
        indices = _padded_row(
            context=context, axis=axis, low=low, high=high, interior=interior
        )
        # A dimension may lose elements on one side and gain padding on the other.
        if max(low, high, interior) > 0:
            padded_dims.append(axis.dim)
        axes.append(Axis(axis.dim, context.cuts.from_indices(indices)))
        assert axes[-1] is not None and axes[-1].cut.size == shape[place]
    fill = operand.fill
    if padded_dims:
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
    """The axis of dimension `place` of an operand, which has size 1 and no axis. The
    operand's dimensions of this kind are those of its value, in their order. Raises
    `Unjudged` if the value has more or less of them: one may be a broadcast.
    """
    if operand.root < 0 or operand.shape[place] != 1:
        raise Unjudged("padding along a dimension where nothing changes")
    places = [
        operand_place
        for operand_place, axis in enumerate(operand.axes)
        if axis is None and operand.shape[operand_place] == 1
    ]
    value_dims = _single_dims_without_axis(context, operand)
    if len(value_dims) != len(places):
        raise Unjudged("padding along a dimension where nothing changes")
    dim_by_place = dict(zip(places, value_dims, strict=True))
    return Axis(dim_by_place[place], context.cuts.whole(1))


def _single_dims_without_axis(context: Context, operand: Held) -> list[int]:
    """The dimensions of size 1 of an operand's value along which it has no axis."""
    axes = [*operand.axes, *operand.dropped_axes]
    dims_with_axis = {axis.dim for axis in axes if axis is not None}
    value_shape = context.values.nodes[operand.root].shape
    return [
        dim
        for dim, size in enumerate(value_shape)
        if size == 1 and dim not in dims_with_axis
    ]


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
        is_apart = not (padded_dims - old_fill.dims) & operand.hole_dims
        is_known = old_fill.number == number and is_apart
        dims = padded_dims | old_fill.dims
        return Fills(
            dims=dims, number=number if is_known else None, other=old_fill.other
        )
    is_apart = not padded_dims & operand.hole_dims
    return Fills(dims=padded_dims, number=number if is_apart else None, other=old_fill)


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
        Match(number, operands) for number in candidates(context, form, instruction)
    ]
    matches += matches_by_name(context, instruction, operands)
    bounds = padding_of(instruction)
    for number, (operand, value) in matches:
        node = context.values.nodes[number]
        assert node.instruction is not None
        if padding_of(node.instruction) != bounds:
            continue
        cuts = _padded_cuts(
            context=context,
            operand=operand,
            sizes=node.operands[0].shape,
            bounds=bounds,
            shape=shape,
        )
        if cuts is None:
            continue
        require_finished(value, "pad")
        held = held_result(
            context, instruction, [operand, value], cuts, value_number=number
        )
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
        held = held_result(
            context, instruction, [operand], result_cuts, value_number=value_number
        )
        held = held.with_sums_of(operand)
        return dataclasses.replace(held, fill=operand.fill_number)
    axes: list[Axis | None] = list(operand.axes)
    for dim in reversed_dims:
        axis = axes[dim]
        if axis is not None:
            indices = context.cuts.indices(axis.cut)[:, ::-1]
            axes[dim] = Axis(axis.dim, context.cuts.from_indices(indices))
    return dataclasses.replace(operand, axes=tuple(axes), known_numbers=None)
