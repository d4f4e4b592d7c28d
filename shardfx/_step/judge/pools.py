"""Pools and their gradients: reductions over windows."""

import functools as ft
import math
from collections.abc import Sequence

from ..hlo_text import Instruction, arrays_in, root_of
from .cuts import Cut
from .forms import attribute, reducer_of
from .held import Axis, Context, Held, cut_of, require_finished
from .joining import constant_number, is_identity, joined_cut
from .matching import held_result, judged_match
from .verdict import Unjudged
from .windows import (
    WindowedDim,
    known_size,
    scattered_cut,
    window_of,
    windowed_cut,
)


def reduce_window(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
) -> Held:
    """The result of a reduction over windows, as of a pool."""
    operand, initial = operands
    require_finished(initial, "reduce-window")
    reducer = reducer_of(context.module, instruction)
    if operand.terms is not None and not (reducer == operand.reducer == "add"):
        require_finished(operand, "reduce-window")
    if operand.scale != 1 and reducer != "add":
        raise Unjudged("a reduction, over windows, of shares of a sum")
    if not operand.is_finished and constant_number(initial) != 0:
        raise Unjudged("windows that start with a number on each device")
    rule = ft.partial(_reduced_window, context, instruction, reducer=reducer)
    return judged_match(context, instruction, operands, rule)


def _reduced_window(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
    value_number: int,
    reducer: str,
) -> Held:
    """As `reduce_window`, as the value `value_number` of the whole program. `reducer`
    is the opcode of the reduction. Along a dimension that is cut, a window may read
    holes whose number the reduction leaves as it is.
    """
    operand, initial = operands
    node = context.values.nodes[value_number]
    assert node.instruction is not None
    array = arrays_in(instruction.result)[0]
    local_dims = _windowed_dims(instruction, operand.shape, array.shape)
    whole_dims = _windowed_dims(node.instruction, node.operands[0].shape, node.shape)
    cuts: list[Cut | None] = []
    for axis, local, whole in zip(operand.axes, local_dims, whole_dims, strict=True):
        if local.window.is_trivial and whole.window.is_trivial:
            cuts.append(cut_of(axis))
            continue
        if axis is None or context.cuts.is_whole(axis.cut, whole.image_size):
            if local.image_size != whole.image_size or local.window != whole.window:
                raise Unjudged("a window over a broadcast")
            cuts.append(context.cuts.whole(local.result_size))
            continue
        if axis.cut.has_holes and not is_identity(
            operand.fill_number, reducer, array.dtype
        ):
            raise Unjudged("a window over padding")
        # The window's own padding has this number.
        if not is_identity(constant_number(initial), reducer, array.dtype):
            raise Unjudged("a window that starts with another number")
        windowed = windowed_cut(
            cuts=context.cuts,
            image_cut=axis.cut,
            kernel_cut=context.cuts.whole(whole.kernel_size),
            local=local,
            whole=whole,
        )
        if windowed.terms is not None:
            raise Unjudged("a window over parts")
        cuts.append(windowed.cut)
    held = held_result(context, instruction, operands, cuts, value_number=value_number)
    return held.with_sums_of(operand)


def _windowed_dims(
    instruction: Instruction,
    image_shape: Sequence[int],
    result_shape: Sequence[int | None],
) -> list[WindowedDim]:
    """The dimensions along which an operation has windows, from the shapes of its image
    and of the array with an element for each window: a pool's result, or the source of
    its gradient.
    """
    windows = window_of(instruction, len(image_shape))
    return [
        WindowedDim(
            window=window,
            image_size=image_size,
            kernel_size=window.size,
            result_size=known_size(result_size),
        )
        for window, image_size, result_size in zip(
            windows, image_shape, result_shape, strict=True
        )
    ]


def select_and_scatter(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
) -> Held:
    """The gradient of a pool: each window adds an element to that which it selects."""
    for operand in operands:
        require_finished(operand, "select-and-scatter")
    rule = ft.partial(_scattered, context, instruction)
    return judged_match(context, instruction, operands, rule)


def _scattered(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
    value_number: int,
) -> Held:
    """As `select_and_scatter`, as the value `value_number` of the whole program.
    Operand 0 is the image whose windows select an element, operand 1 has what each
    window adds to it, and operand 2 is the number with which each element starts.
    """
    image, source, _ = operands
    node = context.values.nodes[value_number]
    assert node.instruction is not None
    local_dims = _windowed_dims(instruction, image.shape, source.shape)
    whole_dims = _windowed_dims(
        node.instruction, node.operands[0].shape, node.operands[1].shape
    )
    cuts: list[Cut | None] = []
    for dim, (local, whole) in enumerate(zip(local_dims, whole_dims, strict=True)):
        axes = (image.axes[dim], source.axes[dim])
        if local.window.is_trivial and whole.window.is_trivial:
            cut = joined_cut(context, "select-and-scatter", dim, axes)
            if cut is None and local.image_size == node.shape[dim]:
                cut = context.cuts.whole(local.image_size)
            cuts.append(cut)
            continue
        image_cut = _whole_or_cut(context, axes[0], whole.image_size, local.image_size)
        source_cut = _whole_or_cut(
            context, axes[1], whole.result_size, local.result_size
        )
        is_whole = context.cuts.is_whole(image_cut, whole.image_size)
        is_whole &= context.cuts.is_whole(source_cut, whole.result_size)
        if is_whole and local.window == whole.window:
            cuts.append(context.cuts.whole(whole.image_size))
            continue
        _require_no_effect_of_holes(context, instruction, operands)
        cut = scattered_cut(
            cuts=context.cuts,
            image_cut=image_cut,
            source_cut=source_cut,
            local=local,
            whole=whole,
        )
        cuts.append(cut)
    return held_result(context, instruction, operands, cuts, value_number=value_number)


def _whole_or_cut(
    context: Context,
    axis: Axis | None,
    size: int,
    local_size: int,
) -> Cut:
    """The cut of an axis, or of a dimension along which nothing changes and of which
    each device holds all. Raises `Unjudged` if it holds less.
    """
    if axis is not None:
        return axis.cut
    if size != local_size:
        raise Unjudged("a window over a broadcast")
    return context.cuts.whole(size)


# The number that a window never selects, by the direction of the comparison.
_NEVER_SELECTED = {"GE": -math.inf, "GT": -math.inf, "LE": math.inf, "LT": math.inf}


def _require_no_effect_of_holes(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
) -> None:
    """Raises `Unjudged` if a window may select a hole of the image, or if a hole of the
    source adds something to what its window selects.
    """
    image, source, start = operands
    roots = {
        name: root_of(context.module.computations[_computation_name(instruction, name)])
        for name in ("select", "scatter")
    }
    lowest = _NEVER_SELECTED.get(attribute(roots["select"], "direction"))
    is_compared = roots["select"].opcode == "compare"
    if image.has_holes and not (is_compared and image.fill == lowest):
        raise Unjudged("a window over padding")
    if roots["scatter"].opcode != "add" or constant_number(start) != 0:
        raise Unjudged("windows that do not add what they select")
    if source.has_holes and source.fill != 0:
        raise Unjudged("windows that the whole program has not")


def _computation_name(instruction: Instruction, name: str) -> str:
    """The name of the computation in an attribute, such as `select`."""
    return attribute(instruction, name).lstrip("%")
