"""Selects by masks that are known, and sums of parts with zeros elsewhere: how the
partitioner puts a value together of pieces.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from ..hlo_text import Instruction
from .cuts import HOLE
from .elements import seen_as_padded
from .held import Axis, Context, Fills, Held, Number, view_of
from .joining import (
    common_axis,
    constant_number,
    emptied_on,
    is_empty,
    is_zero,
    with_axis,
)


def selected_by_mask(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
    shape: tuple[int, ...],
) -> Held | None:
    """The result of a `select` by a mask with known numbers, as the partitioner masks
    padding; `None` for other operations and masks. Its shape is `shape` on one device.
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
        return _selected_on_devices(
            context=context,
            chosen=rows[:, 0],
            on_part=chosen_value,
            other=other,
            shape=shape,
        )
    held = _merged(
        context=context,
        place=varying[0],
        chosen=rows,
        chosen_value=chosen_value,
        other=other,
    )
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
    it is neither. Devices take `on_part` where it is true, and else `other`.
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
            differing_dims = []
            for dim, (first, second) in enumerate(pairs):
                if first is None or second is None:
                    continue
                if first.cut is not second.cut:
                    differing_dims.append(dim)
            held = on_part
            for dim in differing_dims:
                chosen_positions = np.repeat(chosen[:, None], shape[dim], axis=1)
                merged = _merged(
                    context=context,
                    place=dim,
                    chosen=chosen_positions,
                    chosen_value=held,
                    other=other,
                    is_device_mask=True,
                )
                if merged is None:
                    return None
                held = merged
            is_same_fill = on_part.fill == other.fill
            return held if is_same_fill else dataclasses.replace(held, fill=None)
    for value_part, zero_part, takes_part in (
        (on_part, other, chosen),
        (other, on_part, ~chosen),
    ):
        if is_zero(zero_part) and value_part.root >= 0:
            is_zero_already = is_empty(value_part, context.devices) & (
                value_part.fill == 0
            )
            if is_zero_already[~takes_part].all():
                # The other devices hold zeros already.
                return value_part
            mask = sum(1 << device for device in np.flatnonzero(takes_part).tolist())
            return dataclasses.replace(
                value_part, terms=(mask,), reducer="add", known_numbers=None
            )
    return None


def _merged(
    context: Context,
    place: int,
    chosen: np.ndarray,
    chosen_value: Held,
    other: Held,
    is_device_mask: bool = False,
) -> Held | None:
    """The elements of `chosen_value` where the mask `chosen` is true, and those of
    `other` elsewhere. The mask is along dimension `place`, of shape (devices,
    positions). A constant in the place of one leaves holes. `None` if they are no
    pieces of one value. With `is_device_mask`, a device takes all of one of them, so
    the other dimensions may differ.
    """
    if not chosen_value.is_finished or not other.is_finished:
        return None
    cuts = context.cuts
    # An array beside a constant.
    for masked_value, constant_value, mask in (
        (chosen_value, other, chosen),
        (other, chosen_value, ~chosen),
    ):
        axis = masked_value.axes[place]
        if axis is None:
            continue
        number = constant_number(constant_value)
        if number is not None:
            old_indices = cuts.indices(axis.cut)
            indices = np.where(mask, old_indices, HOLE)
            held = with_axis(
                masked_value, place, Axis(axis.dim, cuts.from_indices(indices))
            )
            leaves_holes = bool(((old_indices == HOLE) & mask).any())
            fill = _masked_fill(
                masked_value, axis.dim, number, leaves_holes=leaves_holes
            )
            return dataclasses.replace(held, fill=fill, known_numbers=None)
    # Two pieces of one value.
    axis = chosen_value.axes[place]
    other_axis = other.axes[place]
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
        chosen_cut = emptied_on(context, chosen_cut, empty[0] & used[1])
        other_cut = emptied_on(context, other_cut, empty[1] & used[0])
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
    leaves_holes: bool,
) -> Number | Fills | None:
    """What the holes are filled with after a mask along dimension `dim` of the value,
    with `number` where the mask is false. `leaves_holes` says whether the mask is true
    at holes along this dimension: they keep what they had, as do holes along others.
    """
    other_hole_dims = held.hole_dims - {dim}
    if held.fill == number or not (other_hole_dims or leaves_holes):
        return number
    other_fill = held.fill
    if isinstance(other_fill, Fills):
        other_fill = None if other_hole_dims & other_fill.dims else other_fill.other
    if leaves_holes or other_fill is None:
        return None
    if other_fill == number:
        return number
    return Fills(dims=frozenset([dim]), number=number, other=other_fill)


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
    first_part, second_part = operands
    if (
        first_part.root != second_part.root
        or first_part.fill != 0
        or second_part.fill != 0
    ):
        return None
    if (
        not (first_part.is_finished and second_part.is_finished)
        or first_part.dropped_axes
        or second_part.dropped_axes
    ):
        return None
    differing_dims = [
        dim
        for dim, (first, second) in enumerate(
            zip(first_part.axes, second_part.axes, strict=True)
        )
        if first != second
    ]
    if len(differing_dims) != 1:
        return None
    (dim,) = differing_dims
    axis = first_part.axes[dim]
    other_axis = second_part.axes[dim]
    if axis is None or other_axis is None or axis.dim != other_axis.dim:
        return None
    first = context.cuts.indices(axis.cut)
    second = context.cuts.indices(other_axis.cut)
    if ((first != HOLE) & (second != HOLE)).any():
        return None
    united = np.where(first == HOLE, second, first)
    cut = context.cuts.from_indices(united)
    return with_axis(first_part, dim, Axis(axis.dim, cut))
