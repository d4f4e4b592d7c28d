"""The rule that operands which an operation joins lie alike."""

import dataclasses
import math
import re
from collections.abc import Sequence

import numpy as np

from ..hlo_text import Instruction
from .cuts import HOLE, Cut
from .forms import Form, form_of, nameless_text, reducer_of
from .held import Axis, Context, Held, Number, dim_of, view_of
from .values import Global
from .verdict import Unjudged, Wrong


def form_in(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
    shape: tuple[int, ...],
) -> Form:
    """The form of an operation of the program of one device, whose result has the shape
    `shape` there.
    """
    views = [view_of(operand) for operand in operands]
    form = form_of(instruction, views, shape, context.module)
    assert isinstance(form, Form)
    return form


def operation_of(context: Context, instruction: Instruction) -> tuple[str, ...]:
    """What an instruction does, without the names in its text."""
    reducer = ""
    if "to_apply=" in instruction.attributes:
        reducer = reducer_of(context.module, instruction) or instruction.attributes
    return instruction.opcode, instruction.result, nameless_text(instruction), reducer


def fitted(context: Context, held: Held, array: Global) -> Held | None:
    """What devices hold of `array`, which has elements of the same value as `held`;
    `None` unless its dimensions are those of `held`. A row whose dimension `held`
    dropped gets an axis along it.
    """
    if len(held.axes) != len(array.shape):
        return None
    if view_of(held).dims == array.view.dims:
        return held
    sizes = context.values.nodes[held.root].shape
    axes = list(held.axes)
    dropped_cuts = {axis.dim: axis.cut for axis in held.dropped_axes}
    for place, dim in enumerate(array.view.dims):
        axis = axes[place]
        if axis is None:
            # Nothing changes along it, so any part of it fits. But a row may be
            # repeated, of a value that has others.
            if dim not in dropped_cuts:
                continue
            if held.shape[place] == 1:
                axes[place] = Axis(dim, dropped_cuts.pop(dim))
            elif dim < len(sizes) and sizes[dim] != 1:
                return None
            continue
        if axis.dim == dim:
            continue
        # The array's view leaves out dimensions of size 1.
        is_single = axis.dim < len(sizes) and sizes[axis.dim] == 1
        if dim is not None or not is_single:
            return None
    if len(dropped_cuts) == len(held.dropped_axes):
        return held
    dropped_axes = tuple(Axis(dim, cut) for dim, cut in dropped_cuts.items())
    return dataclasses.replace(held, axes=tuple(axes), dropped_axes=dropped_axes)


def joined_cut(
    context: Context,
    what: str,
    place: int,
    axes: Sequence[Axis | None],
) -> Cut | None:
    """The cut of a dimension in which the operation `what` joins its operands, whose
    axes there are `axes`; `None` if nothing changes along any of them. `place` is the
    dimension in the text of a fault.

    Raises `Wrong` if a device holds different elements of two operands, and `Unjudged`
    if these are in pieces.
    """
    joined: Cut | None = None
    for axis in axes:
        if axis is None:
            continue
        if joined is None:
            joined = axis.cut
            continue
        next_cut = context.cuts.joined(joined, axis.cut)
        if next_cut is None:
            if max(len(joined.lengths), len(axis.cut.lengths)) > 1:
                # A shard that is put together of pieces may be read in two ways.
                raise Unjudged(f"{what} of pieces that lie differently")
            raise disagreement(what, place, joined, axis.cut)
        joined = next_cut
    return joined


def disagreement(what: str, place: int, first: Cut, other: Cut) -> Wrong:
    """The fault of two operands that lie differently along dimension `place`."""
    wrong_devices = [
        device
        for device in range(len(first.starts))
        if first.text_on(device) != other.text_on(device)
    ]
    device = wrong_devices[0]
    return Wrong(
        fault=f"{what} joins operands that lie differently: along dimension {place},"
        f" device {device} holds {first.text_on(device)} of one operand and"
        f" {other.text_on(device)} of another, and {len(wrong_devices)} of"
        f" {len(first.starts)} devices disagree",
        right=f"both operands at {first.text_on(device)} on device {device}",
        mend="constrain the sharding of this line's result, and of the arrays that it"
        " reads, with `jax.lax.with_sharding_constraint`",
    )


def with_axis(held: Held, place: int, axis: Axis | None) -> Held:
    """The same with another axis of dimension `place`."""
    axes = (*held.axes[:place], axis, *held.axes[place + 1 :])
    return dataclasses.replace(held, axes=axes)


def constant_number(held: Held) -> Number | None:
    """The number of an array that has one known number at all positions of all devices;
    `None` for others.
    """
    table = held.known_numbers
    if table is None or table.size != table.shape[0] or not held.is_uniform:
        return None
    return table.flat[0].item()


def is_zero(held: Held) -> bool:
    """Whether all of its numbers are known to be zeros."""
    return held.known_numbers is not None and not held.known_numbers.any()


def is_identity(number: Number | None, reducer: str, dtype: str) -> bool:
    """Whether a reduction by the opcode `reducer`, of numbers of the type `dtype`
    ("f32"), is the same with and without this number. `None` is a number that is not
    known.
    """
    if number is None:
        return False
    if reducer in ("add", "or", "xor"):
        return number == 0
    if reducer == "multiply":
        return number == 1
    lowest, highest = limits_of(dtype)
    if reducer == "maximum":
        return number == lowest
    if reducer == "minimum":
        return number == highest
    if reducer != "and":
        return False
    if dtype == "pred":
        return number == 1
    # All bits of -1 are ones, as those of the largest number without a sign.
    return number in (-1, 2 ** _bits_of(dtype) - 1)


def limits_of(dtype: str) -> tuple[Number, Number]:
    """The lowest and the highest number of a type: -128 and 127 for "s8"."""
    bit_count = _bits_of(dtype)
    if dtype == "pred":
        return 0, 1
    if dtype.startswith("u"):
        return 0, 2**bit_count - 1
    if dtype.startswith("s"):
        return -(2 ** (bit_count - 1)), 2 ** (bit_count - 1) - 1
    return -math.inf, math.inf


def _bits_of(dtype: str) -> int:
    """The number in the name of a type: 32 for "f32"; 1 if there is none."""
    return int(re.sub(r"\D", "", dtype) or 1)


def is_empty(held: Held, devices: int) -> np.ndarray:
    """Which devices hold no element, as after a permute that sends them nothing."""
    empty = np.zeros(devices, bool)
    for axis in held.axes:
        if axis is not None:
            empty |= (axis.cut.starts == HOLE).all(axis=1)
    return empty


def emptied_on(context: Context, cut: Cut, devices: np.ndarray) -> Cut:
    """The cut with nothing but holes on the devices that the mask `devices` chooses. On
    the others it is as before, with the holes that it had.
    """
    if not devices.any():
        return cut
    starts = np.where(devices[:, None], HOLE, cut.starts)
    return context.cuts.from_segments(cut.lengths, starts, cut.step)


def common_axis(
    context: Context,
    pieces: Sequence[Held],
    place: int,
    used: Sequence[np.ndarray],
) -> Axis | None:
    """The axis that pieces of one value have in common in a dimension `place` beside
    that in which they are joined. `used` has a mask of devices for each piece: those
    that use it. Raises `Unjudged` if a device uses pieces that lie differently.
    """
    axes = [piece.axes[place] for piece in pieces]
    first = axes[0]
    if all(axis == first for axis in axes):
        return first
    dims = {dim_of(axis) for axis in axes}
    if len(dims) > 1 or first is None:
        raise Unjudged("pieces that lie differently")
    indices = np.full((context.devices, pieces[0].shape[place]), HOLE)
    is_device_set = np.zeros(context.devices, bool)
    for axis, uses_piece in zip(axes, used, strict=True):
        assert axis is not None
        held_indices = context.cuts.indices(axis.cut)
        if (held_indices != indices)[uses_piece & is_device_set].any():
            raise Unjudged("pieces that lie differently")
        indices[uses_piece] = held_indices[uses_piece]
        is_device_set |= uses_piece
    return Axis(first.dim, context.cuts.from_indices(indices))
