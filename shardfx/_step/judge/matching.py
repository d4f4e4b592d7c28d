"""The match of an operation of the partitioned program with one of the whole program."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from ..hlo_text import Instruction, arrays_in
from .cuts import HOLE, Cut
from .forms import Form, View, attribute, numbers
from .held import Axis, Context, Held, Number, view_of
from .joining import form_in
from .values import MOVES, Global, Node, scalar_constant


def node_for(context: Context, form: Form, instruction: Instruction) -> int | None:
    """The number of the whole program's value with this form. Of several, which differ
    in sizes alone, it is the one that has the instruction's name.
    """
    values = context.values
    matches = [
        number
        for number in values.with_key(form.key)
        if values.nodes[number].instruction is not None
    ]
    if len(matches) == 1:
        return matches[0]
    named = [
        candidate
        for candidate in matches
        if values.is_named(candidate, instruction.op_name)
    ]
    if len(named) == 1 or (named and len(matches) == len(named)):
        return named[0] if len(named) == 1 else None
    return None


def candidates(context: Context, form: Form, instruction: Instruction) -> list[int]:
    """The numbers of the values with this form, those with the instruction's name
    first.
    """
    values = context.values
    matches = [
        number
        for number in values.with_key(form.key)
        if values.nodes[number].instruction is not None
    ]
    if len(matches) < 2:
        return matches
    return sorted(
        matches,
        key=lambda candidate: not values.is_named(candidate, instruction.op_name),
    )


def placed(
    context: Context,
    form: Form,
    instruction: Instruction,
    shape: tuple[int, ...],
    cuts: Sequence[Cut | None],
    number: int | None = None,
) -> Held:
    """What devices hold of the result of an operation, whose dimensions have these
    cuts. If the whole program has no such operation, its value is a new one, which is
    no result of the whole program.
    """
    if number is None:
        number = node_for(context, form, instruction)
    if number is None:
        sizes = tuple(_size(context, form, place) for place in form.kept)
        node = Node(instruction.opcode, form.key, sizes, ("derived",))
        number = context.values.number_of(node)
    sizes_of_value = context.values.nodes[number].shape
    axes: list[Axis | None] = []
    for dim, cut, size in zip(form.dims, cuts, shape, strict=True):
        if (
            dim is not None
            and cut is None
            and sizes_of_value[dim] == size
            and size != 1
        ):
            # Nothing changes along it, so its devices hold all of it.
            cut = context.cuts.whole(size)
        axes.append(None if dim is None or cut is None else Axis(dim, cut))
    return Held(number, shape, tuple(axes))


def _size(context: Context, form: Form, place: int) -> int | None:
    """The size of a dimension of an elementwise result, from its operands."""
    dim = form.dims[place]
    for part in form.key:
        if isinstance(part, View) and dim is not None and dim < len(part.dims):
            source = part.dims[dim]
            shape = context.values.nodes[part.root].shape
            if source is not None and source < len(shape):
                return shape[source]
    return None


def is_matched(context: Context, held: Held) -> bool:
    """Whether the whole program computes this value."""
    if held.root < 0:
        return True
    return context.values.nodes[held.root].instruction is not None


def expressed(context: Context, held: Held, array: Global) -> Held | None:
    """What devices hold of `array`, from what they hold of the values that it consists
    of: a slice, a padded array, a concatenation or a reversed array has elements of
    others. `None` if they hold none.
    """
    if held.root == array.view.root:
        return held if _fits(context, held, array) else None
    if held.idiom is not None or held.root < 0 or array.view.root < 0:
        return None
    seen = _elements(context, held, array)
    # An array has all dimensions of its value that are longer than 1. In the others its
    # elements have the index 0.
    if seen is None or any(axis.cut.starts.any() for axis in seen.rest):
        return None
    return dataclasses.replace(seen, rest=())


def _elements(context: Context, held: Held, array: Global) -> Held | None:
    """As `expressed`, where `array` may lack dimensions of its value: `rest` has them."""
    if held.root == array.view.root:
        return held if _fits(context, held, array) else None
    node = context.values.nodes[array.view.root]
    if node.opcode not in MOVES:
        return _elements_of_twin(context, held, array)
    if node.result is None or len(array.shape) != len(held.axes):
        return None
    value: Held | None = None
    for number, operand in enumerate(node.operands):
        if len(operand.shape) != len(node.shape):
            continue
        below = _elements(context, held, _beneath(context, array, operand))
        if below is None:
            continue
        moved = _remembered_move(context, below, array, node, number)
        if moved is None:
            continue
        if not moved.has_holes:
            return moved
        # The operands of a concatenation may be pieces of one value.
        if value is None:
            value = moved
        elif value.rest == moved.rest:
            value = _both(context, value, moved)
    return None if value is None else _filled(context, held, value)


def _elements_of_twin(context: Context, held: Held, array: Global) -> Held | None:
    """As `_elements`, where devices hold elements of a twin of the array's value."""
    source = context.values.twins_of(array.view.root).get(held.root)
    if source is None:
        return None
    node = context.values.nodes[array.view.root]
    (root,) = [
        part.root
        for part in node.key
        if isinstance(part, View) and any(dim is not None for dim in part.dims)
    ]
    # The twin has an element where its operand has one.
    operand = dataclasses.replace(held.of(source), fill=None, known=None)
    below = _elements(
        context, operand, Global(View(root, array.view.dims), array.shape)
    )
    if below is None:
        return None
    seen = dataclasses.replace(below, root=array.view.root, fill=held.fill_number)
    return _filled(context, held, seen)


def _filled(context: Context, held: Held, seen: Held) -> Held:
    """What devices hold, seen as another array. The number in the holes is not known
    where an element of `held` is none of that array.
    """
    if seen.fill is None:
        return seen
    for before, after in zip(held.axes, seen.axes, strict=True):
        if after is None or not after.cut.has_holes:
            continue
        are_holes = context.cuts.indices(after.cut) == HOLE
        if before is not None:
            are_holes &= context.cuts.indices(before.cut) != HOLE
        if are_holes.any():
            return dataclasses.replace(seen, fill=None)
    return seen


def _beneath(context: Context, array: Global, operand: Global) -> Global:
    """An operand of the operation that makes `array`, with its dimensions in the order
    of `array`.
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


def seen_as_named(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
) -> list[tuple[int, list[Held]]]:
    """The values that operations of an instruction's kind and name make in the whole
    program, each with the operands seen as its operands. Those come first whose
    operands have all elements that the devices hold.
    """
    matches: list[tuple[int, list[Held]]] = []
    partial: list[tuple[int, list[Held]]] = []
    for number in context.values.with_name_of(
        instruction.opcode, instruction.op_name, operands[0].root
    ):
        arrays = context.values.nodes[number].operands
        if len(arrays) != len(operands):
            continue
        lifted = [
            expressed(context, operand, array)
            for operand, array in zip(operands, arrays, strict=True)
        ]
        seen = [operand for operand in lifted if operand is not None]
        if len(seen) != len(operands):
            continue
        if any(
            new.has_holes and not old.has_holes
            for new, old in zip(seen, operands, strict=True)
        ):
            partial.append((number, seen))
        else:
            matches.append((number, seen))
    return matches + partial


def seen_as_padded(context: Context, instruction: Instruction, held: Held) -> Held:
    """The same as pieces of a padded array of the whole program, if there is one: its
    padding is no hole then.
    """
    if held.fill is None:
        return held
    for number in context.values.with_name_of("pad", instruction.op_name, held.root):
        array = context.values.nodes[number].result
        seen = None if array is None else expressed(context, held, array)
        if seen is not None and seen.fill == held.fill:
            return seen
    return _with_own_padding(context, held)


def _with_own_padding(context: Context, held: Held) -> Held:
    """The same, where holes beside elements of a padded array are its own padding."""
    node = context.values.nodes[held.root]
    if held.root < 0 or node.opcode != "pad" or not node.operands:
        return held
    axes = list(held.axes)
    for place, axis in enumerate(axes):
        if axis is None or not axis.cut.has_holes:
            continue
        move = _pad_move(context, node, 0, axis.dim)
        size = node.shape[axis.dim]
        if move is None or size is None or move.padding != held.fill:
            continue
        indices = context.cuts.indices(axis.cut)
        filled = _continued(indices, indices == HOLE, size, move)
        axes[place] = Axis(axis.dim, context.cuts.from_indices(filled))
    return dataclasses.replace(held, axes=tuple(axes))


def matched_operands(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
) -> list[tuple[int, list[Held]]]:
    """The values of the whole program that an operation may compute, with its operands
    seen as the operands of each.
    """
    shape = operands[0].shape
    results = arrays_in(instruction.result)
    if results:
        shape = results[0].shape
    key = form_in(context, instruction, operands, shape)
    if instruction.result.startswith("("):
        key = key._replace(key=(*key.key, 0))
    matches = [
        (number, list(operands)) for number in candidates(context, key, instruction)
    ]
    if matches:
        return matches
    meaning = _without_views(key.key)
    return [
        (number, seen)
        for number, seen in seen_as_named(context, instruction, operands)
        if _without_views(context.values.nodes[number].key) == meaning
    ]


def _without_views(key: tuple[object, ...]) -> list[object]:
    """The operation of a key, without its operands: names alone prove nothing."""
    return [part for part in key if not isinstance(part, View)]


def are_same(seen: Sequence[Held], operands: Sequence[Held]) -> bool:
    """Whether operands are seen as they are, so that a mismatch is a fault: an
    operation of the same name may take other pieces of the same arrays.
    """
    return all(
        first.root == other.root for first, other in zip(seen, operands, strict=True)
    )


def _dims_with_ones(context: Context, array: Global) -> list[int | None]:
    """The dimensions of an array's value, those of size 1 included: they are in the
    order of the value's in the array, whose view leaves them out.
    """
    dims = list(array.view.dims)
    shape = context.values.nodes[array.view.root].shape
    ones = [dim for dim, size in enumerate(shape) if size == 1 and dim not in dims]
    for place, dim in enumerate(dims):
        if dim is None and array.shape[place] == 1 and ones:
            dims[place] = ones.pop(0)
    return dims


def _both(context: Context, first_value: Held, other: Held) -> Held:
    """The elements that either of two views of the same array has."""
    axes: list[Axis | None] = []
    differing = 0
    for first, second in zip(first_value.axes, other.axes, strict=True):
        if first == second or first is None or second is None:
            axes.append(first)
            differing += first != second
            continue
        differing += 1
        mine, others = context.cuts.indices(first.cut), context.cuts.indices(second.cut)
        cut = context.cuts.from_indices(np.where(mine == HOLE, others, mine))
        axes.append(Axis(first.dim, cut))
    if differing > 1:
        return first_value
    return dataclasses.replace(first_value, axes=tuple(axes))


def _fits(context: Context, held: Held, array: Global) -> bool:
    """Whether the dimensions of what devices hold are those of an array of the same
    value.
    """
    if len(held.axes) != len(array.shape):
        return False
    if view_of(held).dims == array.view.dims:
        return True
    sizes = context.values.nodes[held.root].shape
    for axis, dim in zip(held.axes, array.view.dims, strict=True):
        if axis is None or axis.dim == dim:
            continue
        # The array's view leaves out dimensions of size 1.
        is_single = axis.dim < len(sizes) and sizes[axis.dim] == 1
        if dim is not None or not is_single:
            return False
    return True


def _remembered_move(
    context: Context,
    below: Held,
    array: Global,
    node: Node,
    number: int,
) -> Held | None:
    """As `_moved`, asked once for nodes of equal operations and sizes whose operands lie
    alike.
    """
    operand_shape = context.values.nodes[node.operands[number].view.root].shape
    padding = node.operands[1].view.root if node.opcode == "pad" else None
    key = (
        node.likeness,
        number,
        operand_shape,
        padding,
        array.view.dims,
        array.shape,
        below.layout,
    )
    held = context.memory.result(key)
    if held is not None:
        return held.of(array.view.root)
    held = _moved(context, below, array, node, number)
    if held is not None:
        context.memory.add(key, [below], held)
    return held


def _moved(
    context: Context,
    below: Held,
    array: Global,
    node: Node,
    number: int,
) -> Held | None:
    """The elements of operand `number` of a node that moves elements, as elements of
    its result.
    """
    operand = node.operands[number]
    operand_dims = _dims_with_ones(context, operand)
    rest = {axis.dim: axis.cut for axis in below.rest}
    array_dims = _dims_with_ones(context, array)
    axes: list[Axis | None] = []
    for place, (dim, axis) in enumerate(zip(array_dims, below.axes, strict=True)):
        if dim is None:
            if axis is not None and array.shape[place] == 1 and not axis.cut.is_first:
                return None
            axes.append(None if array.shape[place] == 1 else axis)
            continue
        move = _MOVES[node.opcode](context, node, number, dim)
        if move is None:
            return None
        operand_dim = operand_dims[dim]
        if axis is None and operand_dim in rest:
            if below.shape[place] != 1:
                return None
            axis = Axis(operand_dim, rest[operand_dim])
        if axis is None:
            is_repeated = operand_dim is None and node.opcode == "slice"
            is_all = move.is_same and operand.shape[dim] == array.shape[place]
            if is_repeated or is_all:
                axes.append(None)
                continue
            # Dimensions of size 1 hold the first element.
            if below.shape[place] != 1:
                return None
            axis = Axis(0, context.cuts.whole(1))
        cut = move.applied(context, axis.cut, array.shape[place], below.fill_number)
        axes.append(Axis(dim, cut))
    kept = _moved_rest(context, below, array_dims, node, number)
    if kept is None:
        return None
    return dataclasses.replace(
        below,
        root=array.view.root,
        axes=tuple(axes),
        rest=kept,
        fill=below.fill_number,
        known=None,
    )


def _moved_rest(
    context: Context,
    below: Held,
    array_dims: Sequence[int | None],
    node: Node,
    number: int,
) -> tuple[Axis, ...] | None:
    """The indices in the dimensions of a node's result that an array lacks; `None` if
    they are not of the operand's elements.
    """
    operand_dims = _dims_with_ones(context, node.operands[number])
    rest = {axis.dim: axis.cut for axis in below.rest}
    moved: list[Axis] = []
    for dim, size in enumerate(node.shape):
        if dim in array_dims:
            continue
        move = _MOVES[node.opcode](context, node, number, dim)
        if move is None or size is None:
            return None
        operand_dim = operand_dims[dim]
        cut = context.cuts.whole(1)
        if operand_dim in rest:
            cut = rest[operand_dim]
        cut = move.applied(context, cut, size, None)
        if cut.has_holes:
            return None
        moved.append(Axis(dim, cut))
    return tuple(moved)


@dataclasses.dataclass(frozen=True)
class _Move:
    """Index i of the operand is index `(i - start) / stride * spread + offset` of the
    result. `padding` is the number in the result's other elements, and `operand_size`
    the size of the operand.
    """

    start: int = 0
    stride: int = 1
    spread: int = 1
    offset: int = 0
    padding: Number | None = None
    operand_size: int = 0
    reversed_size: int = 0

    @property
    def is_same(self) -> bool:
        is_moved = self.start or self.offset or self.reversed_size
        return not is_moved and self.stride == 1 and self.spread == 1

    def applied(
        self,
        context: Context,
        cut: Cut,
        size: int,
        fill: Number | None,
    ) -> Cut:
        cuts = context.cuts
        is_continued = self.padding is not None and fill == self.padding
        are_holes_kept = not (is_continued and cut.has_holes)
        if self.is_same and are_holes_kept and _is_within(cut, size):
            return cut
        indices = cuts.indices(cut)
        is_real = indices != HOLE
        if self.reversed_size:
            moved = self.reversed_size - 1 - indices
        else:
            behind = indices - self.start
            is_real &= behind % self.stride == 0
            moved = behind // self.stride * self.spread + self.offset
        is_real &= (moved >= 0) & (moved < size)
        moved = np.where(is_real, moved, HOLE)
        if is_continued:
            moved = _continued(moved, indices == HOLE, size, self)
        return cuts.from_indices(moved)


def _is_within(cut: Cut, size: int) -> bool:
    """Whether all elements of a cut are in a dimension of this size."""
    starts = cut.starts
    spans = (np.array(cut.lengths, np.int64) - 1) * cut.step
    lowest = np.minimum(starts, starts + spans)
    highest = np.maximum(starts, starts + spans)
    return bool(((starts == HOLE) | ((lowest >= 0) & (highest < size))).all())


def _continued(
    moved: np.ndarray,
    are_holes: np.ndarray,
    size: int,
    move: _Move,
) -> np.ndarray:
    """Holes that hold the padding's number, beside elements of the operand, are
    elements of the padded array.
    """
    places = np.arange(moved.shape[1])
    filled = np.full(moved.shape, HOLE)
    for device, row in enumerate(moved):
        shifts = (row - places)[row != HOLE]
        if len(shifts) and (shifts == shifts[0]).all():
            filled[device] = places + shifts[0]
    behind = filled - move.offset
    is_operand = (behind >= 0) & (behind < move.operand_size * move.spread)
    is_operand &= behind % move.spread == 0
    is_padding = are_holes & (filled >= 0) & (filled < size) & ~is_operand
    return np.where(is_padding, filled, moved)


def _slice_move(context: Context, node: Node, number: int, dim: int) -> _Move | None:
    bounds = slice_bounds(_instruction(node))[dim]
    return _Move(start=bounds[0], stride=bounds[2])


def slice_bounds(instruction: Instruction) -> list[tuple[int, int, int]]:
    """The start, limit and stride of each dimension of a slice."""
    text = attribute(instruction, "slice")[1:-1]
    bounds = []
    for part in text.replace("[", "").split("],"):
        parts = [int(number) for number in part.rstrip("]").strip(", ").split(":")]
        stride = parts[2] if len(parts) > 2 else 1
        bounds.append((parts[0], parts[1], stride))
    return bounds


def padding_of(instruction: Instruction) -> list[tuple[int, int, int]]:
    """The low, high and interior padding of each dimension of a pad."""
    bounds = []
    for part in attribute(instruction, "padding").split("x"):
        parts = [int(number) for number in part.split("_")]
        bounds.append((parts[0], parts[1], parts[2] if len(parts) > 2 else 0))
    return bounds


def _pad_move(context: Context, node: Node, number: int, dim: int) -> _Move | None:
    if number != 0:
        return None
    low, high, interior = padding_of(_instruction(node))[dim]
    if not (low or high or interior):
        return _Move()
    filled = context.values.nodes[node.operands[1].view.root]
    return _Move(
        spread=interior + 1,
        offset=low,
        padding=scalar_constant(filled),
        operand_size=node.operands[0].shape[dim],
    )


def _instruction(node: Node) -> Instruction:
    assert node.instruction is not None
    return node.instruction


def _concatenate_move(
    context: Context,
    node: Node,
    number: int,
    dim: int,
) -> _Move | None:
    (along,) = numbers(_instruction(node), "dimensions")
    if dim != along:
        return _Move()
    before = sum(operand.shape[dim] for operand in node.operands[:number])
    return _Move(offset=before)


def _reverse_move(context: Context, node: Node, number: int, dim: int) -> _Move | None:
    if dim not in numbers(_instruction(node), "dimensions"):
        return _Move()
    size = node.shape[dim]
    return None if size is None else _Move(reversed_size=size)


_MOVES = {
    "slice": _slice_move,
    "pad": _pad_move,
    "concatenate": _concatenate_move,
    "reverse": _reverse_move,
}
