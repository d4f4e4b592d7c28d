"""Selects by masks that are known, and sums of parts with zeros elsewhere: how the
partitioner puts a value together of pieces.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from ..hlo_text import Instruction
from .cuts import HOLE
from .held import Axis, Context, Fills, Held, Number, view_of
from .joining import common_axis, constant_number, is_empty, is_zero, with_axis, without
from .matching import seen_as_padded


def selected_by_mask(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
    shape: tuple[int, ...],
) -> Held | None:
    """The result of a `select` by a known mask, as the partitioner masks padding;
    `None` for other operations and masks.
    """
    if instruction.opcode != "select":
        return None
    mask, chosen_value, other = operands
    if mask.known_numbers is None or mask.terms is not None:
        return None
    chosen = mask.known_numbers != 0
    if chosen.all():
        return chosen_value
    if not chosen.any():
        return other
    if is_zero(chosen_value) and is_zero(other):
        return other
    varying = [dim for dim in range(len(shape)) if chosen.shape[1 + dim] > 1]
    if len(varying) > 1:
        return None
    rows = chosen.reshape(len(chosen), -1)
    if not varying:
        return _selected_on_devices(context, rows[:, 0], chosen_value, other, shape)
    held = _merged(context, varying[0], rows, chosen_value, other)
    return None if held is None else seen_as_padded(context, instruction, held)


def _selected_on_devices(
    context: Context,
    chosen: np.ndarray,
    on_part: Held,
    other: Held,
    shape: tuple[int, ...],
) -> Held | None:
    """The result of a `select` whose mask is one predicate for each device, `chosen`:
    pieces of one value, or a value on some devices and zeros on the others. `None` if
    it is neither. `on_part` is what devices take where it is true.
    """
    if not on_part.is_finished or not other.is_finished:
        return None
    if (
        on_part.root == other.root
        and on_part.root >= 0
        and on_part.dropped_axes == other.dropped_axes
        and view_of(on_part) == view_of(other)
    ):
        pairs = list(zip(on_part.axes, other.axes, strict=True))
        if all(first is None or second is not None for first, second in pairs):
            differing_dims = [
                dim
                for dim, (first, second) in enumerate(pairs)
                if first is not None
                and second is not None
                and first.cut is not second.cut
            ]
            held = on_part
            for dim in differing_dims:
                rows = np.repeat(chosen[:, None], shape[dim], axis=1)
                merged = _merged(context, dim, rows, held, other, is_device_mask=True)
                if merged is None:
                    return None
                held = merged
            return held
    for part, zeros, takes_part in (
        (on_part, other, chosen),
        (other, on_part, ~chosen),
    ):
        if is_zero(zeros) and part.root >= 0:
            is_zero_already = is_empty(part, context.devices) & (part.fill == 0)
            if is_zero_already[~takes_part].all():
                # The other devices hold zeros already.
                return part
            mask = sum(1 << device for device in np.flatnonzero(takes_part).tolist())
            return dataclasses.replace(part, terms=(mask,), known_numbers=None)
    return None


def _merged(
    context: Context,
    place: int,
    chosen: np.ndarray,
    chosen_value: Held,
    other: Held,
    is_device_mask: bool = False,
) -> Held | None:
    """The elements of `chosen_value` where the mask `chosen` along dimension `place` is
    true, and those of `other` elsewhere. A constant in the place of one leaves holes.
    `None` if they are no pieces of one value. With `is_device_mask`, a device takes all
    of one of them, so the other dimensions may differ.
    """
    if not chosen_value.is_finished or not other.is_finished:
        return None
    cuts = context.cuts
    # An array beside a constant.
    for first, second, mask in (
        (chosen_value, other, chosen),
        (other, chosen_value, ~chosen),
    ):
        axis = first.axes[place]
        if axis is None:
            continue
        number = constant_number(second)
        if number is not None:
            before = cuts.indices(axis.cut)
            indices = np.where(mask, before, HOLE)
            held = with_axis(first, place, Axis(axis.dim, cuts.from_indices(indices)))
            is_left = bool(((before == HOLE) & mask).any())
            fill = _masked_fill(first, axis.dim, number, is_left=is_left)
            return dataclasses.replace(held, fill=fill, known_numbers=None)
    # Two pieces of one value.
    axis, other_axis = chosen_value.axes[place], other.axes[place]
    if chosen_value.root != other.root or axis is None or other_axis is None:
        return None
    if axis.dim != other_axis.dim or chosen_value.dropped_axes != other.dropped_axes:
        return None
    # Which devices use an element of each.
    used = (chosen.any(axis=1), (~chosen).any(axis=1))
    chosen_cut = axis.cut
    other_cut = other_axis.cut
    held = chosen_value
    if not is_device_mask:
        empty = [is_empty(held, context.devices) for held in (chosen_value, other)]
        used = (used[0] & ~empty[0], used[1] & ~empty[1])
        # Padding of one beside elements of the other holds none of these.
        chosen_cut = without(context, chosen_cut, empty[0] & used[1])
        other_cut = without(context, other_cut, empty[1] & used[0])
        for dim in range(len(chosen_value.axes)):
            if dim != place:
                held = with_axis(
                    held, dim, common_axis(context, (chosen_value, other), dim, used)
                )
    indices = np.where(chosen, cuts.indices(chosen_cut), cuts.indices(other_cut))
    held = with_axis(held, place, Axis(axis.dim, cuts.from_indices(indices)))
    fill = chosen_value.fill_number
    if fill != other.fill:
        fill = None
    return dataclasses.replace(held, fill=fill, known_numbers=None)


def _masked_fill(
    held: Held,
    dim: int,
    number: Number,
    *,
    is_left: bool,
) -> Number | Fills | None:
    """The numbers in holes after a mask along a dimension of the value, with `number`
    where it is false. `is_left` says whether it leaves holes along this dimension,
    which keep what they had, as do those along others.
    """
    others = held.hole_dims - {dim}
    if held.fill == number or not (others or is_left):
        return number
    other = held.fill
    if isinstance(other, Fills):
        other = None if others & other.dims else other.other
    if is_left or other is None:
        return None
    if other == number:
        return number
    return Fills(dims=frozenset([dim]), number=number, other=other)


def union_of(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
) -> Held | None:
    """The sum of two parts of one value, where each has zeros in the place of the
    other's elements; `None` for other operations and operands.
    """
    if instruction.opcode not in ("add", "or") or len(operands) != 2:
        return None
    first_operand, other = operands
    if first_operand.root != other.root or first_operand.fill != 0 or other.fill != 0:
        return None
    if (
        not (first_operand.is_finished and other.is_finished)
        or first_operand.dropped_axes
        or other.dropped_axes
    ):
        return None
    differing_dims = [
        dim
        for dim, (first, second) in enumerate(
            zip(first_operand.axes, other.axes, strict=True)
        )
        if first != second
    ]
    if len(differing_dims) != 1:
        return None
    (dim,) = differing_dims
    axis, other_axis = first_operand.axes[dim], other.axes[dim]
    if axis is None or other_axis is None or axis.dim != other_axis.dim:
        return None
    first, second = context.cuts.indices(axis.cut), context.cuts.indices(other_axis.cut)
    if ((first != HOLE) & (second != HOLE)).any():
        return None
    both = np.where(first == HOLE, second, first)
    cut = context.cuts.from_indices(both)
    return with_axis(first_operand, dim, Axis(axis.dim, cut))
