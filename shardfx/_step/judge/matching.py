"""The match of an operation of the partitioned program with one of the whole program."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..hlo_text import Instruction, arrays_in
from .cuts import HOLE, Cut
from .forms import Form, View
from .held import Axis, Context, Held
from .joining import fitted, form_in
from .moves import MOVES_BY_OPCODE, continued, pad_move
from .values import MOVES, Global, Node
from .verdict import Unjudged, Wrong


def node_for(context: Context, form: Form, instruction: Instruction) -> int | None:
    """The number of the whole program's value with this form; `None` if there is none.
    Of several, which differ in sizes alone, it is the one that has the instruction's
    name; `None` if that is not exactly one.
    """
    values = context.values
    value_numbers = [
        value_number
        for value_number in values.with_key(form.key)
        if values.nodes[value_number].instruction is not None
    ]
    if len(value_numbers) == 1:
        return value_numbers[0]
    named = [
        candidate
        for candidate in value_numbers
        if values.is_named(candidate, instruction.op_name)
    ]
    return named[0] if len(named) == 1 else None


def candidates(context: Context, form: Form, instruction: Instruction) -> list[int]:
    """The numbers of the whole program's values with this form, those with the
    instruction's name first. They differ in sizes alone.
    """
    values = context.values
    value_numbers = [
        value_number
        for value_number in values.with_key(form.key)
        if values.nodes[value_number].instruction is not None
    ]
    if len(value_numbers) < 2:
        return value_numbers
    return sorted(
        value_numbers,
        key=lambda candidate: not values.is_named(candidate, instruction.op_name),
    )


def held_result(
    context: Context,
    form: Form,
    instruction: Instruction,
    shape: tuple[int, ...],
    cuts: Sequence[Cut | None],
    value_number: int | None = None,
) -> Held:
    """What devices hold of the result of an operation, from its form, its shape on one
    device, and the cut of each dimension: `None` for one along which nothing changes.
    `value_number` is that of its value; if it is `None`, it is looked up by the form.
    If the whole program has no such operation, the value is a new one, which is no
    result of the whole program.
    """
    if value_number is None:
        value_number = node_for(context, form, instruction)
    if value_number is None:
        kept_sizes = tuple(_size(context, form, place) for place in form.kept)
        node = Node(
            opcode=instruction.opcode,
            key=form.key,
            shape=kept_sizes,
            # No value of the whole program has this mark, so none is equal.
            unkeyed_sizes=("derived",),
        )
        value_number = context.values.number_of(node)
    value_shape = context.values.nodes[value_number].shape
    axes: list[Axis | None] = []
    for dim, cut, size in zip(form.dims, cuts, shape, strict=True):
        if dim is not None and cut is None and value_shape[dim] == size and size != 1:
            # Nothing changes along it, so its devices hold all of it.
            cut = context.cuts.whole(size)
        axes.append(None if dim is None or cut is None else Axis(dim, cut))
    return Held(root=value_number, shape=shape, axes=tuple(axes))


def _size(context: Context, form: Form, place: int) -> int | None:
    """The size in its value of dimension `place` of an elementwise result, from the
    operands, whose views are in the form's key. `None` if no operand changes along it.
    """
    value_dim = form.dims[place]
    for view in form.key:
        if (
            isinstance(view, View)
            and value_dim is not None
            and value_dim < len(view.dims)
        ):
            operand_dim = view.dims[value_dim]
            shape = context.values.nodes[view.root].shape
            if operand_dim is not None and operand_dim < len(shape):
                return shape[operand_dim]
    return None


def is_matched(context: Context, held: Held) -> bool:
    """Whether the whole program computes this value. Numbers of one device's program
    count as such.
    """
    if held.root < 0:
        return True
    return context.values.nodes[held.root].instruction is not None


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


class Match(NamedTuple):
    """A value of the whole program that an operation may compute: its number, and the
    operation's operands, seen as the operands of the value.
    """

    value_number: int
    operands: list[Held]


def matches_by_name(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
) -> list[Match]:
    """The values that operations of an instruction's opcode and name make in the whole
    program, each with the operands seen as operands of that operation. Matches come
    first whose operands still have all elements that the devices hold.
    """
    matches: list[Match] = []
    partial_matches: list[Match] = []
    for number in context.values.with_name_of(
        instruction.opcode, instruction.op_name, operands[0].root
    ):
        arrays = context.values.nodes[number].operands
        if len(arrays) != len(operands):
            continue
        expressed_operands: list[Held] = []
        for operand, array in zip(operands, arrays, strict=True):
            expressed_operand = expressed(context, operand, array)
            if expressed_operand is not None:
                expressed_operands.append(expressed_operand)
        if len(expressed_operands) != len(operands):
            continue
        if any(
            new.has_holes and not old.has_holes
            for new, old in zip(expressed_operands, operands, strict=True)
        ):
            partial_matches.append(Match(number, expressed_operands))
        else:
            matches.append(Match(number, expressed_operands))
    return matches + partial_matches


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


def matched_operands(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
) -> list[Match]:
    """The values of the whole program that an operation may compute, with its operands
    seen as the operands of each: those with the form of the operation, and if there are
    none, those with its name.
    """
    shape = operands[0].shape
    result_arrays = arrays_in(instruction.result)
    if result_arrays:
        shape = result_arrays[0].shape
    form = form_in(context, instruction, operands, shape)
    if instruction.result.startswith("("):
        # The values of several results have their numbers in their keys.
        form = form._replace(key=(*form.key, 0))
    matches = [
        Match(value_number, list(operands))
        for value_number in candidates(context, form, instruction)
    ]
    if matches:
        return matches
    key_without_views = _without_views(form.key)
    return [
        match
        for match in matches_by_name(context, instruction, operands)
        if _without_views(context.values.nodes[match.value_number].key)
        == key_without_views
    ]


def _without_views(key: tuple[object, ...]) -> list[object]:
    """The operation of a key, without its operands: names alone prove nothing."""
    return [part for part in key if not isinstance(part, View)]


def are_same(expressed_operands: Sequence[Held], operands: Sequence[Held]) -> bool:
    """Whether operands are seen as elements of the values that they have themselves.
    Only then is a mismatch a fault: an operation of the same name may take other pieces
    of the same arrays.
    """
    return all(
        first.root == other.root
        for first, other in zip(expressed_operands, operands, strict=True)
    )


def judged_match(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
    of_match: Callable[[Sequence[Held], int], Held],
) -> Held:
    """The result of an operation as the first value of the whole program with which
    `of_match` judges it: `of_match` takes the operands, seen as those of the value, and
    the value's number. Raises `Unjudged` if one is not judged or there is none, and
    else `Wrong` if one is refuted whose operands are these themselves.
    """
    reason: Unjudged | None = None
    fault: Wrong | None = None
    for value_number, expressed_operands in matched_operands(
        context, instruction, operands
    ):
        try:
            return of_match(expressed_operands, value_number)
        except Unjudged as error:
            reason = error
        except Wrong as error:
            if are_same(expressed_operands, operands):
                fault = error
    no_match = f"no {instruction.opcode} of the whole program has these operands"
    raise reason or fault or Unjudged(no_match)


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
