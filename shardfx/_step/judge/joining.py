"""The rule that operands which an operation joins lie alike."""

import dataclasses
from collections.abc import Sequence

from ..hlo_text import Instruction
from .cuts import Cut
from .forms import Form, form_of
from .held import Axis, Context, Held, view_of
from .verdict import Wrong


def form_in(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
    shape: tuple[int, ...],
) -> Form:
    """The form of an operation of the program of one device."""
    views = [view_of(operand) for operand in operands]
    found = form_of(instruction, views, shape, context.module)
    assert isinstance(found, Form)
    return found


def joined_cut(
    context: Context, what: str, place: int, axes: Sequence[Axis | None]
) -> Cut | None:
    """The cut of a dimension in which an operation joins its operands."""
    joined: Cut | None = None
    for axis in axes:
        if axis is None:
            continue
        if joined is None:
            joined = axis.cut
            continue
        both = context.cuts.joined(joined, axis.cut)
        if both is None:
            raise different(what, place, joined, axis.cut)
        joined = both
    return joined


def different(what: str, place: int, one: Cut, other: Cut) -> Wrong:
    device = next(
        device
        for device in range(len(one.starts))
        if one.on(device) != other.on(device)
    )
    wrong = [at for at in range(len(one.starts)) if one.on(at) != other.on(at)]
    return Wrong(
        f"{what} joins operands that lie differently: along dimension {place}, device"
        f" {device} holds {one.on(device)} of one operand and {other.on(device)} of"
        f" another, and {len(wrong)} of {len(one.starts)} devices disagree",
        f"both operands at {one.on(device)} on device {device}",
        "constrain the sharding of this line's result, and of the arrays that it reads,"
        " with `jax.lax.with_sharding_constraint`",
    )


def with_axis(held: Held, place: int, axis: Axis | None) -> Held:
    axes = (*held.axes[:place], axis, *held.axes[place + 1 :])
    return dataclasses.replace(held, axes=axes)


def constant_number(held: Held) -> float | None:
    """The number of an array that has one number at all positions of all devices."""
    known = held.known
    if known is None or known.size != known.shape[0] or not held.is_uniform:
        return None
    return known.flat[0].item()
