"""Operations of which each device computes the whole, along the dimensions that they
do not treat element by element: sorts, searches for an extremum, and all that have no
rule of their own.
"""

from collections.abc import Sequence

from ..hlo_text import Instruction, arrays_in
from .cuts import Cut
from .forms import attribute, numbers
from .held import Context, Held, cut_of, require_finished
from .joining import joined_cut
from .matching import held_result, held_results, judged_match, matched_operands
from .values import Node
from .verdict import Unjudged


def whole_operation(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
) -> Held | tuple[Held, ...]:
    """Any other operation is right where each device computes the whole of it; a sort,
    also where its other dimensions are cut.
    """
    for operand in operands:
        require_finished(operand, instruction.opcode)
    matched = matched_operands(context, instruction, operands)
    for value_number, expressed_operands in matched:
        node = context.values.nodes[value_number]
        if node.instruction is None:
            continue
        cuts = _whole_cuts(context, instruction, expressed_operands, node)
        if cuts is None:
            continue
        if instruction.result.startswith("("):
            return held_results(
                context,
                instruction,
                expressed_operands,
                cuts,
                value_number=value_number,
            )
        return held_result(
            context, instruction, expressed_operands, cuts, value_number=value_number
        )
    raise Unjudged(f"no rule for this {instruction.opcode}")


def _whole_cuts(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
    node: Node,
) -> list[Cut | None] | None:
    """The cuts of the results, if each device computes the whole along each dimension
    that the operation does not treat independently, such as the sorted one; else
    `None`.
    """
    shape = arrays_in(instruction.result)[0].shape
    independent_dims: set[int] = set()
    if instruction.opcode == "sort":
        independent_dims = set(range(len(shape))) - set(
            numbers(instruction, "dimensions")
        )
    if attribute(instruction, "custom_call_target") == '"TopK"':
        independent_dims = set(range(len(shape) - 1))
    cuts: list[Cut | None] = []
    for dim, size in enumerate(shape):
        axes = [operand.axes[dim] for operand in operands if operand.shape]
        if dim in independent_dims:
            cut = joined_cut(context, instruction.opcode, dim, axes)
            if cut is None and size == node.shape[dim]:
                cut = context.cuts.whole(size)
            cuts.append(cut)
        elif _are_whole(context, operands, node, dim):
            cuts.append(context.cuts.whole(size))
        else:
            return None
    if independent_dims:
        return cuts
    assert node.instruction is not None
    if arrays_in(instruction.result) != arrays_in(node.instruction.result):
        return None
    # Dimensions that operands have, and the first result has not.
    rank = max((len(operand.shape) for operand in operands), default=0)
    for dim in range(len(shape), rank):
        if not _are_whole(context, operands, node, dim):
            return None
    return cuts


def _are_whole(
    context: Context,
    operands: Sequence[Held],
    node: Node,
    dim: int,
) -> bool:
    """Whether each device holds all of dimension `dim` of each operand."""
    for operand, array in zip(operands, node.operands, strict=True):
        if dim >= len(array.shape):
            continue
        axis = operand.axes[dim]
        size = array.shape[dim]
        if operand.shape[dim] != size:
            return False
        if axis is not None and not context.cuts.is_whole(axis.cut, size):
            return False
    return True


def of_other_width(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
) -> Held:
    """The result of a `bitcast-convert` that takes the parts of the bits of each number
    for numbers, or the other way round: as of one `f32` and four `u8`. The parts are
    the last dimension, of which each device needs all.
    """
    (operand,) = operands
    require_finished(operand, instruction.opcode)
    shape = arrays_in(instruction.result)[0].shape

    def of_match(expressed_operands: Sequence[Held], value_number: int) -> Held:
        (expressed_operand,) = expressed_operands
        node = context.values.nodes[value_number]
        number_dims = min(len(shape), len(operand.shape))
        if number_dims < len(operand.shape):
            if not _are_whole(context, expressed_operands, node, number_dims):
                raise Unjudged("numbers of which a device has some bits")
        cuts = [cut_of(axis) for axis in expressed_operand.axes[:number_dims]]
        if number_dims < len(shape):
            cuts.append(context.cuts.whole(shape[-1]))
        return held_result(
            context, instruction, expressed_operands, cuts, value_number=value_number
        )

    return judged_match(context, instruction, operands, of_match)
