"""Selects by masks that are known, and sums of parts with zeros elsewhere: how the
partitioner puts a value together of pieces.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from ..hlo_text import Instruction
from .cuts import HOLE
from .held import Axis, Context, Held, view_of
from .joining import beside, constant_number, is_empty, is_zero, with_axis


def selected(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
    shape: tuple[int, ...],
) -> Held | None:
    """The result of a `select` by a known mask, as the partitioner masks padding."""
    if instruction.opcode != "select":
        return None
    mask, one, other = operands
    if mask.known is None or mask.terms is not None:
        return None
    chosen = mask.known != 0
    if chosen.all():
        return one
    if not chosen.any():
        return other
    if is_zero(one) and is_zero(other):
        return other
    varying = [at for at in range(len(shape)) if chosen.shape[1 + at] > 1]
    if len(varying) > 1:
        return _selected_in_box(context, chosen, varying, one, other)
    rows = chosen.reshape(len(chosen), -1)
    if not varying:
        return _selected_on_devices(context, rows[:, 0], one, other, shape)
    return _merged(context, varying[0], rows, one, other)


def _selected_in_box(
    context: Context,
    chosen: np.ndarray,
    varying: Sequence[int],
    one: Held,
    other: Held,
) -> Held | None:
    """The elements of `one` in some rows and columns, and a constant elsewhere."""
    box = np.ones_like(chosen)
    held: Held | None = one
    for place in varying:
        others = tuple(at for at in range(1, chosen.ndim) if at != 1 + place)
        row = chosen.any(axis=others, keepdims=True)
        box = box & row
        if held is not None:
            rows = row.reshape(len(chosen), -1)
            held = _merged(context, place, rows, held, other)
    is_constant = constant_number(other) is not None
    return held if is_constant and (box == chosen).all() else None


def _selected_on_devices(
    context: Context,
    chosen: np.ndarray,
    one: Held,
    other: Held,
    shape: tuple[int, ...],
) -> Held | None:
    if not one.is_finished or not other.is_finished:
        return None
    if one.root == other.root and one.root >= 0 and view_of(one) == view_of(other):
        pairs = list(zip(one.axes, other.axes, strict=True))
        if all(first is None or second is not None for first, second in pairs):
            places = [
                at
                for at, (first, second) in enumerate(pairs)
                if first is not None
                and second is not None
                and first.cut is not second.cut
            ]
            held = one
            for at in places:
                rows = np.repeat(chosen[:, None], shape[at], axis=1)
                merged = _merged(context, at, rows, held, other, is_device_mask=True)
                if merged is None:
                    return None
                held = merged
            return held
    for part, rest, is_part in ((one, other, chosen), (other, one, ~chosen)):
        if is_zero(rest) and part.root >= 0:
            mask = sum(1 << at for at in np.flatnonzero(is_part).tolist())
            return dataclasses.replace(part, terms=(mask,), known=None)
    return None


def _merged(
    context: Context,
    place: int,
    chosen: np.ndarray,
    one: Held,
    other: Held,
    is_device_mask: bool = False,
) -> Held | None:
    """The elements of `one` where a mask along dimension `place` is true, and those of
    `other` elsewhere.
    """
    if not one.is_finished or not other.is_finished:
        return None
    cuts = context.cuts
    for first, second, mask in ((one, other, chosen), (other, one, ~chosen)):
        axis = first.axes[place]
        if axis is None:
            continue
        number = constant_number(second)
        if number is not None:
            before = cuts.indices(axis.cut)
            indices = np.where(mask, before, HOLE)
            held = with_axis(first, place, Axis(axis.dim, cuts.from_indices(indices)))
            # Holes that the mask leaves keep what they had.
            has_others = any(
                other is not None and other.cut.has_holes
                for at, other in enumerate(first.axes)
                if at != place
            )
            is_left = bool(((before == HOLE) & mask).any())
            is_same = first.fill == number or not (has_others or is_left)
            return dataclasses.replace(
                held, fill=number if is_same else None, known=None
            )
    axis, other_axis = one.axes[place], other.axes[place]
    if one.root != other.root or axis is None or other_axis is None:
        return None
    if axis.dim != other_axis.dim or one.rest != other.rest:
        return None
    used = (chosen.any(axis=1), (~chosen).any(axis=1))
    held = one
    if not is_device_mask:
        empty = [is_empty(held, context.devices) for held in (one, other)]
        used = (used[0] & ~empty[0], used[1] & ~empty[1])
        for at in range(len(one.axes)):
            if at != place:
                held = with_axis(held, at, beside(context, (one, other), at, used))
    indices = np.where(chosen, cuts.indices(axis.cut), cuts.indices(other_axis.cut))
    held = with_axis(held, place, Axis(axis.dim, cuts.from_indices(indices)))
    fill = one.fill if one.fill == other.fill else None
    return dataclasses.replace(held, fill=fill, known=None)


def union_of(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
    shape: tuple[int, ...],
) -> Held | None:
    """The sum of two parts of one value, where each has zeros in the place of the
    other's elements.
    """
    if instruction.opcode not in ("add", "or") or len(operands) != 2:
        return None
    one, other = operands
    if one.root != other.root or one.fill != 0 or other.fill != 0:
        return None
    if not (one.is_finished and other.is_finished) or one.rest or other.rest:
        return None
    places = [
        at
        for at, (first, second) in enumerate(zip(one.axes, other.axes, strict=True))
        if first != second
    ]
    if len(places) != 1:
        return None
    axis, beside = one.axes[places[0]], other.axes[places[0]]
    if axis is None or beside is None or axis.dim != beside.dim:
        return None
    first, second = context.cuts.indices(axis.cut), context.cuts.indices(beside.cut)
    if ((first != HOLE) & (second != HOLE)).any():
        return None
    both = np.where(first == HOLE, second, first)
    cut = context.cuts.from_indices(both)
    del shape
    return with_axis(one, places[0], Axis(axis.dim, cut))
