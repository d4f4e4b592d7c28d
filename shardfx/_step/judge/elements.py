"""What the devices hold of an array of the whole program, from what they hold of the
values of which it has elements: those of a slice, a padded array, a concatenation or a
reversed array.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from ..hlo_text import Instruction
from .cuts import HOLE
from .forms import View
from .held import Axis, Context, Held
from .joining import fitted
from .moves import MOVES_BY_OPCODE, continued, pad_move
from .values import MOVES, Global, Node


def expressed(context: Context, held: Held, array: Global) -> Held | None:
    """What devices hold of `array`, from what they hold of the values that it consists
    of: a slice, a padded array, a concatenation or a reversed array has elements of
    others. `None` if they hold none.
    """
    if held.root == array.view.root:
        return fitted(context, held, array)
    if held.idiom is not None or held.root < 0 or array.view.root < 0:
        return None
    held_array = _elements(context, held, array)
    # An array has all dimensions of its value that are longer than 1. In the others its
    # elements have the index 0.
    if held_array is None or any(
        axis.cut.starts.any() for axis in held_array.dropped_axes
    ):
        return None
    return dataclasses.replace(held_array, dropped_axes=())


def _elements(context: Context, held: Held, array: Global) -> Held | None:
    """As `expressed`, where `array` may lack dimensions of its value: the indices in
    these are in `dropped_axes` of what is returned.
    """
    if held.root == array.view.root:
        return fitted(context, held, array)
    node = context.values.nodes[array.view.root]
    if node.opcode not in MOVES:
        return _elements_of_twin(context, held, array)
    if node.result is None or len(array.shape) != len(held.axes):
        return None
    joined: Held | None = None
    for operand_number, operand in enumerate(node.operands):
        if len(operand.shape) != len(node.shape):
            continue
        held_operand = _elements(context, held, _beneath(context, array, operand))
        if held_operand is None:
            continue
        moved = _remembered_move(
            context=context,
            held_operand=held_operand,
            array=array,
            node=node,
            operand_number=operand_number,
        )
        if moved is None:
            continue
        if not moved.has_holes:
            return moved
        # The operands of a concatenation may be pieces of one value.
        if joined is None:
            joined = moved
        elif joined.dropped_axes == moved.dropped_axes:
            joined = _elements_of_either(context, joined, moved)
    return None if joined is None else _filled(context, held, joined)


def _elements_of_twin(context: Context, held: Held, array: Global) -> Held | None:
    """As `_elements`, where devices hold elements of a twin of the array's value: of
    `-x`, where the array is `-x[1:]`. Asks which of the elements of `x` are in `x[1:]`.
    """
    twin_operand = context.values.twins_of(array.view.root).get(held.root)
    if twin_operand is None:
        return None
    node = context.values.nodes[array.view.root]
    (operand_number,) = [
        part.root
        for part in node.key
        if isinstance(part, View) and any(dim is not None for dim in part.dims)
    ]
    # The twin has an element where its operand has one.
    held_source = dataclasses.replace(
        held.of_value(twin_operand), fill=None, known_numbers=None
    )
    held_operand = _elements(
        context, held_source, Global(View(operand_number, array.view.dims), array.shape)
    )
    if held_operand is None:
        return None
    held_array = dataclasses.replace(
        held_operand, root=array.view.root, fill=held.fill_number
    )
    return _filled(context, held, held_array)


def _filled(context: Context, held: Held, held_array: Held) -> Held:
    """`held_array`, which is `held` seen as another array, with a fill that is certain:
    it is `None` if a hole of `held_array` is where `held` has an element, which is then
    no element of that array.
    """
    if held_array.fill is None:
        return held_array
    for axis_before, axis_after in zip(held.axes, held_array.axes, strict=True):
        if axis_after is None or not axis_after.cut.has_holes:
            continue
        are_new_holes = context.cuts.indices(axis_after.cut) == HOLE
        if axis_before is not None:
            are_new_holes &= context.cuts.indices(axis_before.cut) != HOLE
        if are_new_holes.any():
            return dataclasses.replace(held_array, fill=None)
    return held_array


def _beneath(context: Context, array: Global, operand: Global) -> Global:
    """The operand of the operation that makes the value of `array`, viewed with its
    dimensions in the order of `array`.
    """
    operand_dims = _dims_with_ones(context, operand)
    dims: list[int | None] = []
    shape: list[int] = []
    for place, dim in enumerate(_dims_with_ones(context, array)):
        if dim is None:
            dims.append(None)
            shape.append(array.shape[place])
        else:
            dims.append(operand_dims[dim])
            shape.append(operand.shape[dim])
    return Global(View(operand.view.root, tuple(dims)), tuple(shape))


def _dims_with_ones(context: Context, array: Global) -> list[int | None]:
    """For each dimension of an array, the dimension of its value, those of size 1
    included. The array's view has `None` for these. They are in the order of the
    value's dimensions.
    """
    dims = list(array.view.dims)
    shape = context.values.nodes[array.view.root].shape
    missing_ones = [
        dim for dim, size in enumerate(shape) if size == 1 and dim not in dims
    ]
    for place, dim in enumerate(dims):
        if dim is None and array.shape[place] == 1 and missing_ones:
            dims[place] = missing_ones.pop(0)
    return dims


def _elements_of_either(
    context: Context,
    first_value: Held,
    second_value: Held,
) -> Held:
    """The elements that either of two views of the same array has. If they differ in
    several dimensions, those of the first: the elements of both are no box then.
    """
    axes: list[Axis | None] = []
    differing_dims = 0
    for first, second in zip(first_value.axes, second_value.axes, strict=True):
        if first == second or first is None or second is None:
            axes.append(first)
            differing_dims += first != second
            continue
        differing_dims += 1
        first_indices = context.cuts.indices(first.cut)
        second_indices = context.cuts.indices(second.cut)
        cut = context.cuts.from_indices(
            np.where(first_indices == HOLE, second_indices, first_indices)
        )
        axes.append(Axis(first.dim, cut))
    if differing_dims > 1:
        return first_value
    return dataclasses.replace(first_value, axes=tuple(axes))


def _remembered_move(
    context: Context,
    held_operand: Held,
    array: Global,
    node: Node,
    operand_number: int,
) -> Held | None:
    """As `_moved`, asked once for nodes of equal operations and sizes whose operands
    lie alike.
    """
    operand_shape = context.values.nodes[node.operands[operand_number].view.root].shape
    padding = node.operands[1].view.root if node.opcode == "pad" else None
    key = (
        node.likeness,
        operand_number,
        operand_shape,
        padding,
        array.view.dims,
        array.shape,
        held_operand.layout,
    )
    held = context.memory.result(key)
    if held is not None:
        return held.of_value(array.view.root)
    held = _moved(
        context=context,
        held_operand=held_operand,
        array=array,
        node=node,
        operand_number=operand_number,
    )
    if held is not None:
        context.memory.add(key, [held_operand], held)
    return held


def _moved(
    context: Context,
    held_operand: Held,
    array: Global,
    node: Node,
    operand_number: int,
) -> Held | None:
    """The elements of operand `operand_number` of a node that moves elements, as
    elements of its result; `None` if they cannot be followed. `held_operand` is what
    devices hold of the operand, with its dimensions in the order of `array`, a view of
    the result. A node of these opcodes moves elements along its dimensions: slice, pad,
    concatenate, reverse.
    """
    operand = node.operands[operand_number]
    operand_dims = _dims_with_ones(context, operand)
    dropped_cuts = {axis.dim: axis.cut for axis in held_operand.dropped_axes}
    array_dims = _dims_with_ones(context, array)
    axes: list[Axis | None] = []
    for place, (dim, axis) in enumerate(
        zip(array_dims, held_operand.axes, strict=True)
    ):
        if dim is None:
            if (
                axis is not None
                and array.shape[place] == 1
                and not axis.cut.is_first_element
            ):
                return None
            axes.append(None if array.shape[place] == 1 else axis)
            continue
        move = MOVES_BY_OPCODE[node.opcode](context, node, operand_number, dim)
        if move is None:
            return None
        operand_dim = operand_dims[dim]
        if axis is None and operand_dim in dropped_cuts:
            if held_operand.shape[place] != 1:
                return None
            axis = Axis(operand_dim, dropped_cuts[operand_dim])
        if axis is None:
            is_repeated = operand_dim is None and node.opcode == "slice"
            is_all = move.is_same and operand.shape[dim] == array.shape[place]
            if is_repeated or is_all:
                axes.append(None)
                continue
            # Dimensions of size 1 hold the first element.
            if held_operand.shape[place] != 1:
                return None
            axis = Axis(0, context.cuts.whole(1))
        cut = move.applied(
            context, axis.cut, array.shape[place], held_operand.fill_number
        )
        axes.append(Axis(dim, cut))
    moved_dropped_axes = _moved_dropped_axes(
        context=context,
        held_operand=held_operand,
        array_dims=array_dims,
        node=node,
        operand_number=operand_number,
    )
    if moved_dropped_axes is None:
        return None
    return dataclasses.replace(
        held_operand,
        root=array.view.root,
        axes=tuple(axes),
        dropped_axes=moved_dropped_axes,
        fill=held_operand.fill_number,
        known_numbers=None,
    )


def _moved_dropped_axes(
    context: Context,
    held_operand: Held,
    array_dims: Sequence[int | None],
    node: Node,
    operand_number: int,
) -> tuple[Axis, ...] | None:
    """The axes of the dimensions that the result of a node has and `array_dims` lacks,
    for the elements of operand `operand_number`; `None` if the operand has no element
    there. `held_operand` is what devices hold of the operand.
    """
    operand_dims = _dims_with_ones(context, node.operands[operand_number])
    dropped_cuts = {axis.dim: axis.cut for axis in held_operand.dropped_axes}
    moved_axes: list[Axis] = []
    for dim, size in enumerate(node.shape):
        if dim in array_dims:
            continue
        move = MOVES_BY_OPCODE[node.opcode](context, node, operand_number, dim)
        if move is None or size is None:
            return None
        operand_dim = operand_dims[dim]
        cut = context.cuts.whole(1)
        if operand_dim in dropped_cuts:
            cut = dropped_cuts[operand_dim]
        cut = move.applied(context, cut, size, None)
        if cut.has_holes:
            return None
        moved_axes.append(Axis(dim, cut))
    return tuple(moved_axes)


def seen_as_padded(context: Context, instruction: Instruction, held: Held) -> Held:
    """The same elements as pieces of a padded array of the whole program, if there is
    one: holes that are its padding are elements then.
    """
    if held.fill is None:
        return held
    for value_number in context.values.with_name_of(
        "pad", instruction.op_name, held.root
    ):
        array = context.values.nodes[value_number].result
        held_array = None if array is None else expressed(context, held, array)
        if held_array is not None and held_array.fill == held.fill:
            return held_array
    return _with_own_padding(context, held)


def _with_own_padding(context: Context, held: Held) -> Held:
    """The same, where holes beside elements of a padded array are elements: its
    padding, which has the number that the holes have.
    """
    node = context.values.nodes[held.root]
    if held.root < 0 or node.opcode != "pad" or not node.operands:
        return held
    axes = list(held.axes)
    for place, axis in enumerate(axes):
        if axis is None or not axis.cut.has_holes:
            continue
        move = pad_move(context, node, 0, axis.dim)
        size = node.shape[axis.dim]
        if move is None or size is None or move.padding != held.fill:
            continue
        indices = context.cuts.indices(axis.cut)
        filled = continued(indices, indices == HOLE, size, move)
        axes[place] = Axis(axis.dim, context.cuts.from_indices(filled))
    return dataclasses.replace(held, axes=tuple(axes))
