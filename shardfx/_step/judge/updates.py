"""Updates: pieces written into an array at indices."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from ..hlo_text import Instruction
from .cuts import HOLE, Cut
from .elements import expressed
from .held import Axis, Context, Held, require_finished
from .joining import constant_number, is_zero, joined_cut
from .matching import held_result, matched_operands
from .pieces import are_of_whole_program
from .values import Node
from .verdict import Unjudged


def dynamic_update_slice(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
) -> Held:
    """The result of an update: of the whole program's, or a piece written at each
    device's own place. Raises `Unjudged` if the place is neither the whole program's
    nor known.
    """
    operand, update, *index_operands = operands
    shape = operand.shape
    starts: list[np.ndarray] = []
    is_known = True
    for dim, index in enumerate(index_operands):
        if shape[dim] == update.shape[dim]:
            starts.append(np.zeros(context.devices, np.int64))
        elif index.known_numbers is None:
            is_known = False
        else:
            last_start = shape[dim] - update.shape[dim]
            index_numbers = index.known_numbers.reshape(-1).astype(np.int64)
            starts.append(np.clip(index_numbers, 0, last_start))
    if are_of_whole_program(operands):
        held = _updated_globally(context, instruction, operands)
        if held is not None:
            return held
    if not is_known:
        raise Unjudged(
            "an update, at an index that is computed, of a dimension that is cut"
        )
    return _updated(
        context=context,
        instruction=instruction,
        operand=operand,
        update=update,
        starts=starts,
    )


def _updated_globally(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
) -> Held | None:
    """The result of an update that computes a value of the whole program; `None` for
    others.
    """
    for index in operands[2:]:
        require_finished(index, "an index")
    for value_number, expressed_operands in matched_operands(
        context, instruction, operands
    ):
        operand, update = expressed_operands[:2]
        cuts = _global_cuts(
            context, operand, update, context.values.nodes[value_number]
        )
        if cuts is None:
            continue
        held = held_result(
            context, instruction, expressed_operands, cuts, value_number=value_number
        )
        return _update_sums(held, operand, update)
    return None


def _global_cuts(
    context: Context,
    operand: Held,
    update: Held,
    node: Node,
) -> list[Cut | None] | None:
    """The cuts of an update's result, if it is the value `node` of the whole program;
    else `None`. A dimension that the update covers is cut as operand and update are.
    Each device holds all of the others.
    """
    operand_shape = node.operands[0].shape
    update_shape = node.operands[1].shape
    cuts: list[Cut | None] = []
    for dim, size in enumerate(operand.shape):
        axes = [operand.axes[dim], update.axes[dim]]
        sizes = (size, update.shape[dim])
        global_sizes = (operand_shape[dim], update_shape[dim])
        if sizes[0] == sizes[1] and global_sizes[0] == global_sizes[1]:
            cuts.append(joined_cut(context, "dynamic-update-slice", dim, axes))
            continue
        are_whole = all(
            axis is None or context.cuts.is_whole(axis.cut, global_size)
            for axis, global_size in zip(axes, global_sizes, strict=True)
        )
        if not are_whole or sizes != global_sizes:
            return None
        cuts.append(context.cuts.whole(size))
    return cuts


def _update_sums(held: Held, operand: Held, update: Held) -> Held:
    """The result with the unfinished sums of its operands. They have to be the same,
    unless the array is zero.
    """
    is_same = (operand.terms, operand.scale) == (update.terms, update.scale)
    if operand.terms is not None and operand.reducer != update.reducer:
        is_same = False
    if not is_zero(operand) and not is_same:
        require_finished(operand, "dynamic-update-slice")
        require_finished(update, "dynamic-update-slice")
    return held.with_sums_of(update)


def _updated(
    context: Context,
    instruction: Instruction,
    operand: Held,
    update: Held,
    starts: Sequence[np.ndarray],
) -> Held:
    """A piece `update`, written at each device's own place into zeros, or into other
    pieces of the same value. `starts` has an array for each dimension: the position on
    each device.
    """
    if not operand.is_finished or not update.is_finished:
        raise Unjudged("an update of an unfinished sum")
    constant = constant_number(operand)
    if constant is None and operand.root != update.root:
        operand, update = _same_array(context, instruction, operand, update)
    if constant is None and operand.dropped_axes != update.dropped_axes:
        raise Unjudged("an update by a piece that lies differently")
    changed_dims = [
        dim
        for dim in range(len(operand.shape))
        if operand.shape[dim] != update.shape[dim]
    ]
    if constant is None and len(changed_dims) > 1:
        raise Unjudged("an update of several cut dimensions")
    axes: list[Axis | None] = list(update.axes)
    for dim in range(len(axes)):
        axis = update.axes[dim]
        old_axis = operand.axes[dim]
        if dim not in changed_dims:
            if constant is None and axis != old_axis:
                raise Unjudged("an update by a piece that lies differently")
            continue
        if axis is None:
            raise Unjudged("an update by a broadcast")
        if constant is None and (old_axis is None or old_axis.dim != axis.dim):
            raise Unjudged("an update by a piece that lies differently")
        new_indices = np.full((context.devices, operand.shape[dim]), HOLE)
        if constant is None and old_axis is not None:
            new_indices = context.cuts.indices(old_axis.cut).copy()
        positions = starts[dim][:, None] + np.arange(update.shape[dim])
        np.put_along_axis(
            new_indices, positions, context.cuts.indices(axis.cut), axis=1
        )
        axes[dim] = Axis(axis.dim, context.cuts.from_indices(new_indices))
    fill = constant if constant is not None else operand.fill_number
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
    """A piece and the update of it, which are of two values, as pieces of one: of a
    concatenation or a padded array of the whole program.
    """
    for opcode in ("concatenate", "pad"):
        for value_number in context.values.with_name(opcode, instruction.op_name):
            array = context.values.nodes[value_number].result
            assert array is not None
            first = expressed(context, operand, array)
            other = expressed(context, update, array)
            if first is not None and other is not None:
                return first, other
    raise Unjudged("an update by a piece of another array")
