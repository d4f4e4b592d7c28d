"""What the devices hold of an array of the whole program, from what they hold of the
values of which it has elements: those of a slice, a padded array, a concatenation or a
reversed array.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..hlo_text import Instruction
from .cuts import HOLE, Cut
from .forms import View
from .held import Axis, Context, Held
from .joining import fitted
from .moves import MOVES_BY_OPCODE, Move, continued, pad_move
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
    array_dims = _dims_with_ones(context, array)
    joined: Held | None = None
    for number, operand in enumerate(node.operands):
        if len(operand.shape) != len(node.shape):
            continue
        operand_dims = _dims_with_ones(context, operand)
        operand_in_order = _in_order(operand, operand_dims, array, array_dims)
        held_operand = _elements(context, held, operand_in_order)
        if held_operand is None:
            continue
        move = _OperandMove(
            node=node,
            number=number,
            operand=operand,
            operand_dims=operand_dims,
            array=array,
            array_dims=array_dims,
        )
        moved = _remembered_move(context, move, held_operand)
        if moved is None:
            continue
        if not moved.has_holes:
            return moved
        # The operands of a concatenation may be pieces of one value.
        if joined is not None:
            moved = _elements_of_either(context, joined, moved)
        joined = moved
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


class _OperandMove(NamedTuple):
    """An operand of an operation that moves elements: a slice, a pad, a concatenation
    or a reverse. The operand has as many dimensions as the operation's value, and its
    elements move along each of them. Some become elements of `array`.

    - `node`: the value that the operation makes.
    - `number`, `operand`: the operand's place among those of the operation, and the
      operand as the operation takes it.
    - `operand_dims`: for each dimension of the operand, that of the operand's own
      value; `None` for one along which nothing changes.
    - `array`: a view of the operation's value. It may have its dimensions in another
      order, and lack some.
    - `array_dims`: for each dimension of `array`, that of the operation's value; `None`
      for one along which nothing changes.
    """

    node: Node
    number: int
    operand: Global
    operand_dims: Sequence[int | None]
    array: Global
    array_dims: Sequence[int | None]

    def along(self, context: Context, dim: int) -> Move | None:
        """How elements move along dimension `dim` of the operation's value; `None` if
        that is not known.
        """
        return MOVES_BY_OPCODE[self.node.opcode](context, self.node, self.number, dim)


def _in_order(
    operand: Global,
    operand_dims: Sequence[int | None],
    array: Global,
    array_dims: Sequence[int | None],
) -> Global:
    """The operand, seen with its dimensions in the order of the array. The arguments
    are as in an `_OperandMove`.
    """
    dims: list[int | None] = []
    shape: list[int] = []
    for dim, size in zip(array_dims, array.shape, strict=True):
        if dim is None:
            dims.append(None)
            shape.append(size)
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
    several dimensions, or in a dropped one, those of the first: the elements of both
    are no box then.
    """
    if first_value.dropped_axes != second_value.dropped_axes:
        return first_value
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
    move: _OperandMove,
    held_operand: Held,
) -> Held | None:
    """As `_moved`, asked once for nodes of equal operations and sizes whose operands
    lie alike.
    """
    node = move.node
    array = move.array
    operand_shape = context.values.nodes[move.operand.view.root].shape
    padding = node.operands[1].view.root if node.opcode == "pad" else None
    key = (
        node.likeness,
        move.number,
        operand_shape,
        padding,
        array.view.dims,
        array.shape,
        held_operand.layout,
    )
    held = context.memory.result(key)
    if held is not None:
        return held.of_value(array.view.root)
    held = _moved(context, move, held_operand)
    if held is not None:
        context.memory.add(key, [held_operand], held)
    return held


def _moved(
    context: Context,
    move: _OperandMove,
    held_operand: Held,
) -> Held | None:
    """What devices hold of the array, from what they hold of the operand, seen with its
    dimensions in the order of the array. `None` if its elements cannot be followed.
    """
    array = move.array
    axes: list[Axis | None] = []
    for place, dim in enumerate(move.array_dims):
        if dim is None:
            axis = held_operand.axes[place]
            is_single = array.shape[place] == 1
            if is_single and axis is not None and not axis.cut.is_first_element:
                return None
            axes.append(None if is_single else axis)
            continue
        move_of_dim = move.along(context, dim)
        if move_of_dim is None:
            return None
        if _is_unchanging(move, move_of_dim, held_operand, place):
            axes.append(None)
            continue
        cut = _cut_of_operand(context, move, held_operand, place)
        if cut is None:
            return None
        size = array.shape[place]
        cut = move_of_dim.applied(context, cut, size, held_operand.fill_number)
        axes.append(Axis(dim, cut))
    dropped_axes = _moved_dropped_axes(context, move, held_operand)
    if dropped_axes is None:
        return None
    return dataclasses.replace(
        held_operand,
        root=array.view.root,
        axes=tuple(axes),
        dropped_axes=dropped_axes,
        fill=held_operand.fill_number,
        known_numbers=None,
    )


def _is_unchanging(
    move: _OperandMove,
    move_of_dim: Move,
    held_operand: Held,
    place: int,
) -> bool:
    """Whether nothing changes along dimension `place` of the array, as along that of
    the operand: the slice of a broadcast, or all that the operand has. `move_of_dim` is
    the move along it.
    """
    dim = move.array_dims[place]
    assert dim is not None
    operand_dim = move.operand_dims[dim]
    if held_operand.axes[place] is not None:
        return False
    if any(axis.dim == operand_dim for axis in held_operand.dropped_axes):
        return False
    is_repeated = operand_dim is None and move.node.opcode == "slice"
    is_all = move_of_dim.is_same and move.operand.shape[dim] == move.array.shape[place]
    return is_repeated or is_all


def _cut_of_operand(
    context: Context,
    move: _OperandMove,
    held_operand: Held,
    place: int,
) -> Cut | None:
    """The cut of the operand along dimension `place` of the array; `None` if it has no
    axis there and a size other than 1.
    """
    axis = held_operand.axes[place]
    if axis is not None:
        return axis.cut
    if held_operand.shape[place] != 1:
        return None
    dim = move.array_dims[place]
    assert dim is not None
    return _cut_of_single(context, held_operand, move.operand_dims[dim])


def _cut_of_single(context: Context, held: Held, value_dim: int | None) -> Cut:
    """The cut of a dimension of size 1 without an axis, which is dimension `value_dim`
    of the value: that of a dropped axis along it, or else the first element.
    """
    dropped_cuts = {axis.dim: axis.cut for axis in held.dropped_axes}
    if value_dim is not None and value_dim in dropped_cuts:
        return dropped_cuts[value_dim]
    return context.cuts.whole(1)


def _moved_dropped_axes(
    context: Context,
    move: _OperandMove,
    held_operand: Held,
) -> tuple[Axis, ...] | None:
    """The axes along the dimensions of the operation's value that the array lacks;
    `None` if a device holds no element there.
    """
    dropped_axes: list[Axis] = []
    for dim, size in enumerate(move.node.shape):
        if dim in move.array_dims:
            continue
        move_of_dim = move.along(context, dim)
        if move_of_dim is None or size is None:
            return None
        cut = _cut_of_single(context, held_operand, move.operand_dims[dim])
        cut = move_of_dim.applied(context, cut, size, None)
        if cut.has_holes:
            return None
        dropped_axes.append(Axis(dim, cut))
    return tuple(dropped_axes)


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
