"""Updates: pieces written into an array at indices."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from ..hlo_text import Instruction
from .cuts import HOLE
from .held import Axis, Context, Held, require_finished
from .joining import constant_number, form_in, joined_cut
from .matching import expressed, matched_operands, placed
from .pieces import is_global
from .verdict import Unjudged


def dynamic_update_slice(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
) -> Held:
    operand, update, *places = operands
    shape = operand.shape
    starts: list[np.ndarray] = []
    is_known = True
    for place, index in enumerate(places):
        if shape[place] == update.shape[place]:
            starts.append(np.zeros(context.devices, np.int64))
        elif index.known_numbers is None:
            is_known = False
        else:
            room = shape[place] - update.shape[place]
            index_numbers = index.known_numbers.reshape(-1).astype(np.int64)
            starts.append(np.clip(index_numbers, 0, room))
    if is_global(operands):
        held = _updated_globally(context, instruction, operands)
        if held is not None:
            return held
    if not is_known:
        raise Unjudged(
            "an update, at an index that is computed, of a dimension that is cut"
        )
    return _updated(context, instruction, operand, update, starts)


def _updated_globally(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
) -> Held | None:
    """The result of an update that computes a value of the whole program, or `None`."""
    operand, update, *indices = operands
    for index in indices:
        require_finished(index, "an index")
    shape = operand.shape
    for number, expressed_operands in matched_operands(context, instruction, operands):
        operand, update = expressed_operands[:2]
        form = form_in(context, instruction, expressed_operands, shape)
        node = context.values.nodes[number]
        global_shape, global_update_shape = (
            node.operands[0].shape,
            node.operands[1].shape,
        )
        cuts = []
        for dim in range(len(shape)):
            axes = [operand.axes[dim], update.axes[dim]]
            if (
                global_shape[dim] == global_update_shape[dim]
                and shape[dim] == update.shape[dim]
            ):
                cut = joined_cut(context, "dynamic-update-slice", dim, axes)
                cuts.append(cut)
                continue
            sizes = (global_shape[dim], global_update_shape[dim])
            is_whole = all(
                axis is None or context.cuts.is_whole(axis.cut, size)
                for axis, size in zip(axes, sizes, strict=True)
            )
            if not is_whole or (shape[dim], update.shape[dim]) != sizes:
                break
            cuts.append(context.cuts.whole(shape[dim]))
        else:
            return _update_sums(
                placed(context, form, instruction, shape, cuts, number),
                operand,
                update,
            )
    return None


def _update_sums(held: Held, operand: Held, update: Held) -> Held:
    is_zero = operand.known_numbers is not None and not operand.known_numbers.any()
    if not is_zero and (operand.terms, operand.scale) != (update.terms, update.scale):
        require_finished(operand, "dynamic-update-slice")
        require_finished(update, "dynamic-update-slice")
    return dataclasses.replace(
        held,
        terms=update.terms,
        reducer=update.reducer,
        scale=update.scale,
    )


def _updated(
    context: Context,
    instruction: Instruction,
    operand: Held,
    update: Held,
    starts: Sequence[np.ndarray],
) -> Held:
    """A piece written at each device's own place into zeros, or into other pieces of
    the same value.
    """
    if not operand.is_finished or not update.is_finished:
        raise Unjudged("an update of an unfinished sum")
    number = constant_number(operand)
    if number is None and operand.root != update.root:
        operand, update = _same_array(context, instruction, operand, update)
    changed = [
        dim
        for dim in range(len(operand.shape))
        if operand.shape[dim] != update.shape[dim]
    ]
    if number is None and len(changed) > 1:
        raise Unjudged("an update of several cut dimensions")
    axes: list[Axis | None] = list(update.axes)
    for dim in range(len(axes)):
        axis, before = update.axes[dim], operand.axes[dim]
        if dim not in changed:
            if number is None and axis != before:
                raise Unjudged("an update by a piece that lies differently")
            continue
        if axis is None:
            raise Unjudged("an update by a broadcast")
        if number is None and (before is None or before.dim != axis.dim):
            raise Unjudged("an update by a piece that lies differently")
        rows = np.full((context.devices, operand.shape[dim]), HOLE)
        if number is None and before is not None:
            rows = context.cuts.indices(before.cut).copy()
        columns = starts[dim][:, None] + np.arange(update.shape[dim])
        np.put_along_axis(rows, columns, context.cuts.indices(axis.cut), axis=1)
        axes[dim] = Axis(axis.dim, context.cuts.from_indices(rows))
    fill = number if number is not None else operand.fill_number
    if update.has_holes and update.fill != fill:
        fill = None
    return dataclasses.replace(
        update,
        shape=operand.shape,
        axes=tuple(axes),
        fill=fill,
        known_numbers=None,
    )


def _same_array(
    context: Context,
    instruction: Instruction,
    operand: Held,
    update: Held,
) -> tuple[Held, Held]:
    """Pieces of two arrays as pieces of a concatenation of the whole program."""
    for opcode in ("concatenate", "pad"):
        for number in context.values.with_name(opcode, instruction.op_name):
            array = context.values.nodes[number].result
            assert array is not None
            first = expressed(context, operand, array)
            other = expressed(context, update, array)
            if first is not None and other is not None:
                return first, other
    raise Unjudged("an update by a piece of another array")
