"""Operations of which each device computes the whole, along the dimensions that they
do not treat element by element: sorts, searches for an extremum, and all that have no
rule of their own.
"""

from collections.abc import Sequence

from ..hlo_text import Instruction, arrays_in
from .cuts import Cut
from .forms import Form, numbers
from .held import Axis, Context, Held, require_finished
from .joining import form_in, joined_cut
from .matching import candidates, matched_operands, placed
from .values import Node
from .verdict import Unjudged
from .windows import window_of


def whole_operation(
    context: Context, instruction: Instruction, operands: Sequence[Held]
) -> Held | tuple[Held, ...]:
    """Any other operation is right where each device computes the whole of it; a sort,
    also where its other dimensions are cut.
    """
    results = arrays_in(instruction.result)
    for operand in operands:
        require_finished(operand, instruction.opcode)
    matched = matched_operands(context, instruction, operands)
    for number, seen in matched:
        node = context.values.nodes[number]
        if node.instruction is None:
            continue
        axes = _whole_axes(context, instruction, seen, node)
        if axes is None:
            continue
        shape = results[0].shape
        found = form_in(context, instruction, seen, shape)
        if not instruction.result.startswith("("):
            return placed(context, found, instruction, shape, axes, number)
        parts = []
        for place, array in enumerate(results):
            cuts: list[Cut | None] = axes
            if len(axes) != len(array.shape):
                cuts = [context.cuts.whole(size) for size in array.shape]
            parts.append(
                _part_of(context, instruction, found, place, cuts, array.shape)
            )
        return tuple(parts)
    raise Unjudged(f"no rule for this {instruction.opcode}")


def reduce_several(
    context: Context, instruction: Instruction, operands: Sequence[Held]
) -> tuple[Held, ...]:
    """The reduction of several arrays together, as for an argmax, over dimensions that
    are not cut.
    """
    arrays = operands[: len(operands) // 2]
    over = numbers(instruction, "dimensions")
    results = arrays_in(instruction.result)
    for operand in operands:
        require_finished(operand, "reduce")
    for number, seen in matched_operands(context, instruction, operands):
        node = context.values.nodes[number]
        own = seen[: len(arrays)]
        if any(
            operand.shape[at] != array.shape[at]
            or not _is_whole(context, operand.axes[at], array.shape[at])
            for operand, array in zip(own, node.operands, strict=False)
            for at in over
        ):
            continue
        cuts = []
        for at in range(len(own[0].shape)):
            if at in over:
                continue
            axes = [operand.axes[at] for operand in own]
            cuts.append(joined_cut(context, "reduce", at, axes))
        found = form_in(context, instruction, seen, results[0].shape)
        return tuple(
            _part_of(context, instruction, found, place, cuts, results[place].shape)
            for place in range(len(results))
        )
    raise Unjudged("a reduction of several arrays over a dimension that is cut")


def _is_whole(context: Context, axis: Axis | None, size: int) -> bool:
    return axis is None or context.cuts.is_whole(axis.cut, size)


def _part_of(
    context: Context,
    instruction: Instruction,
    found: Form,
    place: int,
    cuts: Sequence[Cut | None],
    shape: tuple[int, ...],
) -> Held:
    """One of the results of an operation with several."""
    dims = tuple(range(len(shape)))
    keyed = Form((*found.key, place), dims, dims)
    parts = candidates(context, keyed, instruction)
    if not parts:
        raise Unjudged(f"{instruction.opcode} that the whole program has not")
    return placed(context, keyed, instruction, shape, cuts, parts[0])


def _whole_axes(
    context: Context, instruction: Instruction, operands: Sequence[Held], node: Node
) -> list[Cut | None] | None:
    """The cuts of the results, if each device computes the whole along each dimension
    that the operation does not treat element by element.
    """
    shape = arrays_in(instruction.result)[0].shape
    free: set[int] = set()
    if instruction.opcode == "sort":
        free = set(range(len(shape))) - set(numbers(instruction, "dimensions"))
    if instruction.opcode == "custom-call" and "TopK" in instruction.attributes:
        free = set(range(len(shape) - 1))
    if instruction.opcode == "select-and-scatter":
        assert node.instruction is not None
        windows = window_of(instruction, len(shape))
        if windows != window_of(node.instruction, len(shape)):
            return None
        # A dimension along which windows have one element is treated by element.
        free = {at for at, window in enumerate(windows) if window.is_trivial}
    for operand, array in zip(operands, node.operands, strict=True):
        for at, (axis, size) in enumerate(zip(operand.axes, array.shape, strict=True)):
            if at in free:
                continue
            if operand.shape[at] != size:
                return None
            if axis is not None and not context.cuts.is_whole(axis.cut, size):
                return None
    cuts: list[Cut | None] = []
    for at, size in enumerate(shape):
        if at not in free:
            cuts.append(context.cuts.whole(size))
            continue
        axes = [operand.axes[at] for operand in operands if operand.shape]
        cuts.append(joined_cut(context, instruction.opcode, at, axes))
        if cuts[-1] is None:
            cuts[-1] = context.cuts.whole(size) if size == node.shape[at] else None
    if not free and shape != node.shape:
        return None
    return cuts
