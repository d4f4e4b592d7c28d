"""The rule of each operation, by its opcode."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from ..._ground.opcodes import CONSTANTS, ELEMENTWISE
from ..collectives import KINDS
from ..hlo_text import Instruction, arrays_in, parts_of
from . import (
    choices,
    concatenations,
    convolutions,
    exchanges,
    gathers,
    lookups,
    pieces,
    pools,
    positions,
    products,
    scatters,
    sources,
    updates,
    views,
    whole_operations,
)
from .held import Context, Held, Result
from .joining import operation_of
from .local_reshapes import Overflowing
from .manual_calls import own_collective
from .pointwise import elementwise
from .verdict import Unjudged


_Rule: TypeAlias = Callable[[Context, Instruction, Sequence[Held]], Held]
_Unary: TypeAlias = Callable[[Context, Instruction, Held], Held]
# Operations that only change where the elements of a value lie.
_LOCAL = frozenset(
    "broadcast transpose slice collective-permute all-gather all-reduce reduce-scatter"
    " all-to-all".split()
)


# What may come between a reshape that splits padding and one that merges it.
_BETWEEN_RESHAPES = ("reshape", "transpose", "copy", "all-to-all")


def applied(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
) -> Result:
    """The result of an operation by the rule of its opcode. Operands with an unfinished
    idiom, and operands in the body of a `shard_map` that is manual in some axes only,
    have rules of their own.
    """
    opcode = instruction.opcode
    if any(operand.idiom is not None for operand in operands):
        result = _idiom_step(context, instruction, operands)
        if result is not None:
            return result
    # Each device computes a part of the value, in a `shard_map`.
    is_of_part = any(
        operand.root in context.values.parts_by_value for operand in operands
    )
    if is_of_part and opcode in KINDS:
        held = own_collective(context, instruction, operands)
        if held is not None:
            return held
    if opcode == "bitcast-convert":
        shape = arrays_in(instruction.result)[0].shape
        if len(operands[0].shape) != len(shape):
            return whole_operations.of_other_width(context, instruction, operands)
    if opcode in ELEMENTWISE:
        return elementwise(context, instruction, operands)
    rule = _RULES.get(opcode)
    if rule is not None:
        return rule(context, instruction, operands)
    unary = _UNARY.get(opcode)
    if unary is not None and len(operands) == 1:
        if opcode in _LOCAL and operands[0].idiom is None:
            return _remembered(context, instruction, operands[0], unary)
        return unary(context, instruction, operands[0])
    if opcode == "reduce" and len(operands) == 2:
        return products.reduce(context, instruction, operands)
    if opcode == "reduce":
        return choices.reduce_several(context, instruction, operands)
    if opcode in ("all-reduce", "all-gather") and len(operands) > 1:
        return _tuple_collective(context, instruction, operands)
    if opcode in CONSTANTS:
        return sources.source(context, instruction)
    return whole_operations.whole_operation(context, instruction, operands)


def applied_bitcast(
    context: Context,
    instruction: Instruction,
    operand: Held,
    source: Instruction,
) -> Result:
    """The result of a bitcast; `source` is the instruction of its operand. A step of a
    lookup may be reshaped alone.
    """
    if operand.idiom is None:
        return views.bitcast(context, instruction, operand, source)
    return applied(context, views.reshape_of_bitcast(instruction, source), [operand])


def _idiom_step(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
) -> "Result | None":
    """The result of an operation that continues an unfinished idiom of an operand;
    `None` if the usual rule of the operation does so. Raises `Unjudged` if the idiom
    does not go on like this.
    """
    opcode = instruction.opcode
    idioms = [operand.idiom for operand in operands if operand.idiom is not None]
    if any(isinstance(idiom, Overflowing) for idiom in idioms):
        if opcode not in _BETWEEN_RESHAPES:
            raise Unjudged(f"{opcode} of an array in parts, with padding")
        return None
    if opcode not in lookups.IDIOMS:
        raise Unjudged("a lookup that is not finished")
    if opcode == "dynamic-update-slice":
        return positions.update_row(context, instruction, operands)
    if opcode != "select" and any(
        isinstance(idiom, positions.Updated) for idiom in idioms
    ):
        raise Unjudged("an update that is not finished")
    if any(isinstance(idiom, choices.Choices) for idiom in idioms):
        if opcode != "reduce":
            raise Unjudged("choices that are not chosen from")
        return choices.reduce_several(context, instruction, operands)
    if opcode == "reduce":
        return lookups.any_of_columns(context, instruction, operands)
    if opcode in ("broadcast", "reshape", "transpose"):
        result = _UNARY[opcode](context, instruction, operands[0])
        return lookups.viewed(instruction, operands[0], result)
    return None


def _remembered(
    context: Context,
    instruction: Instruction,
    operand: Held,
    rule: _Unary,
) -> Held:
    """The result of a rule that changes where the elements of a value lie, whatever the
    value is. The rule is asked once for equal operations on operands that lie alike.
    """
    operation = operation_of(context, instruction)
    is_value = operand.root >= 0
    key = (*operation, is_value, operand.layout)
    held = context.memory.result(key)
    if held is None:
        held = rule(context, instruction, operand)
        if held.root == operand.root and held.idiom is None:
            context.memory.add(key, [operand], held)
        return held
    return held.of_value(operand.root)


def _tuple_collective(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
) -> Result:
    """The results of a collective of several arrays, one for each operand."""
    result_texts = parts_of(instruction.result)
    rule = _UNARY[instruction.opcode]
    return tuple(
        rule(context, instruction._replace(result=result_text), operand)
        for result_text, operand in zip(result_texts, operands, strict=True)
    )


_RULES: Mapping[str, _Rule] = {
    "dot": products.dot,
    "convolution": convolutions.convolution,
    "reduce-window": pools.reduce_window,
    "select-and-scatter": pools.select_and_scatter,
    "concatenate": concatenations.concatenate,
    "dynamic-slice": pieces.dynamic_slice,
    "dynamic-update-slice": updates.dynamic_update_slice,
    "pad": pieces.pad,
    "gather": gathers.gather,
    "scatter": scatters.scatter,
}
_UNARY: Mapping[str, _Unary] = {
    "broadcast": views.broadcast,
    "reshape": views.reshape,
    "transpose": lambda context, instruction, operand: views.transpose(
        instruction, operand
    ),
    "copy": lambda context, instruction, operand: operand,
    "slice": pieces.slice_,
    "reverse": pieces.reverse,
    "collective-permute": exchanges.permute,
    "all-gather": exchanges.all_gather,
    "all-reduce": exchanges.all_reduce,
    "reduce-scatter": exchanges.reduce_scatter,
    "all-to-all": exchanges.all_to_all,
}
