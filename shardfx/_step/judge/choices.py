"""Reductions of several arrays together, such as an argmax.

Over a dimension that is cut, each device chooses from its own part. The choices of a
group are gathered side by side, and chosen from again.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..hlo_text import HloModule, Instruction, root_of
from .forms import computation_text, numbers
from .held import Context, Held, product_of_terms, require_finished, view_of
from .joining import joined_cut
from .matching import held_results, matched_operands
from .values import Node
from .verdict import Unjudged


class Choices(NamedTuple):
    """The choices of all devices of a group, side by side along dimension `along`, made
    by the function `reducer`. `senders` has the devices, in order, whose choices each
    device has.
    """

    along: int
    reducer: str
    senders: tuple[tuple[int, ...], ...]


def reduce_several(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
) -> tuple[Held, ...]:
    """The results of a reduction of several arrays together. The first half of
    `operands` are the arrays, the other half the numbers with which it starts.

    A reduction over a dimension that is cut leaves each device with the choice from its
    own part: the result is unfinished, and its reducer is the text of the function.
    Raises `Unjudged` if the whole program has no such reduction.
    """
    arrays = operands[: len(operands) // 2]
    if any(isinstance(array.idiom, Choices) for array in arrays):
        starts = operands[len(arrays) :]
        return _chosen_again(context, instruction, arrays, starts)
    reduced_dims = numbers(instruction, "dimensions")
    for operand in operands:
        require_finished(operand, "reduce")
    reason = Unjudged("no reduction of the whole program has these operands")
    for value_number, expressed_operands in matched_operands(
        context, instruction, operands
    ):
        node = context.values.nodes[value_number]
        expressed_arrays = expressed_operands[: len(arrays)]
        try:
            terms = _terms_over(
                context=context,
                instruction=instruction,
                operands=expressed_arrays,
                node=node,
                over=reduced_dims,
            )
        except Unjudged as error:
            reason = error
            continue
        cuts = []
        for dim in range(len(expressed_arrays[0].shape)):
            if dim not in reduced_dims:
                axes = [operand.axes[dim] for operand in expressed_arrays]
                cuts.append(joined_cut(context, "reduce", dim, axes))
        results = held_results(
            context, instruction, expressed_operands, cuts, value_number=value_number
        )
        if terms is None:
            return results
        reducer = _reducer_text(context.module, instruction)
        return tuple(
            dataclasses.replace(held, terms=terms, reducer=reducer) for held in results
        )
    raise reason


def _terms_over(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
    node: Node,
    over: Sequence[int],
) -> tuple[int, ...] | None:
    """The terms of a choice over the dimensions `over`, which are reduced: for each
    part of them, the devices that choose from it, as a bit mask. `None` if each device
    chooses from all.
    """
    terms = None
    for dim in over:
        size = node.operands[0].shape[dim]
        axes = [operand.axes[dim] for operand in operands]
        cut = joined_cut(context, "reduce", dim, axes)
        if cut is None:
            if operands[0].shape[dim] != size:
                raise Unjudged("a reduction of a broadcast")
            continue
        if cut.has_holes:
            raise Unjudged("a reduction of several arrays over padding")
        terms_of_dim = context.cuts.terms(cut, size)
        terms = product_of_terms(context.everywhere, terms, terms_of_dim)
    if terms is not None and not _is_choice(context.module, instruction):
        raise Unjudged("a reduction of several arrays over a dimension that is cut")
    return terms


def _reducer_text(module: HloModule, instruction: Instruction) -> str:
    """The text of the function with which an instruction reduces."""
    return computation_text(module, dict(instruction.called)["to_apply"])


def _is_choice(module: HloModule, instruction: Instruction) -> bool:
    """Whether a reduction chooses one of two candidates, so that it does not matter how
    often it sees the one with which it starts. Each of its results is then a `select`
    between that parameter of the first candidate and that of the other.
    """
    computation = module.computations[dict(instruction.called)["to_apply"]]
    root = root_of(computation)
    result_count = len(root.operands)
    if root.opcode != "tuple":
        return False
    for result_number, name in enumerate(root.operands):
        selected = computation[name]
        if selected.opcode != "select":
            return False
        candidates_ = [computation[operand] for operand in selected.operands[1:]]
        parameter_numbers = sorted(
            operation.inside
            for operation in candidates_
            if operation.opcode == "parameter"
        )
        if parameter_numbers != sorted(
            (str(result_number), str(result_number + result_count))
        ):
            return False
    return True


def gathered_choices(
    operand: Held,
    along: int,
    senders: np.ndarray,
    shape: tuple[int, ...],
) -> Held | None:
    """An operand whose terms are choices, after an all-gather puts those of each group
    of devices side by side along dimension `along`; its shape is `shape` then.
    `senders` has the devices of each device's group, an array (devices, members).
    `None` if the dimension has more than one choice on a device, or if a group has a
    choice twice or not at all.
    """
    if operand.shape[along] != 1 or operand.axes[along] is not None:
        return None
    rows = tuple(tuple(row) for row in senders.tolist())
    for row in rows:
        group_mask = sum(1 << device for device in row)
        for term in operand.terms or ():
            if (term & group_mask).bit_count() != 1:
                return None
    idiom = Choices(along=along, reducer=operand.reducer, senders=rows)
    return dataclasses.replace(
        operand,
        shape=shape,
        terms=None,
        reducer="add",
        known_numbers=None,
        idiom=idiom,
    )


def _chosen_again(
    context: Context,
    instruction: Instruction,
    arrays: Sequence[Held],
    starts: Sequence[Held],
) -> tuple[Held, ...]:
    """The choice from the choices of a group, which finishes a reduction of several
    arrays. Raises `Unjudged` if `arrays` are not the gathered results of one reduction,
    by the same function, or if it starts with other numbers, which are `starts`.
    """
    (along,) = numbers(instruction, "dimensions")
    choices = arrays[0].idiom
    if not isinstance(choices, Choices) or choices.along != along:
        raise Unjudged("a choice from choices of another kind")
    if choices.reducer != _reducer_text(context.module, instruction):
        raise Unjudged("a choice from choices of another kind")
    if any(array.idiom != choices for array in arrays):
        raise Unjudged("a choice from choices in different orders")
    first_node = context.values.nodes[arrays[0].root]
    whole_starts = first_node.operands[len(arrays) :]
    if [view_of(start) for start in starts] != [start.view for start in whole_starts]:
        raise Unjudged("a choice that starts with other numbers")
    results = []
    for result_number, array in enumerate(arrays):
        node = context.values.nodes[array.root]
        if (
            node.key != (*first_node.key[:-1], result_number)
            or node.operands != first_node.operands
        ):
            raise Unjudged("a choice from choices of different arrays")
        for other, axis in zip(arrays[0].axes, array.axes, strict=True):
            if other != axis:
                raise Unjudged("a choice from choices that lie differently")
        results.append(
            dataclasses.replace(
                array,
                shape=array.shape[:along] + array.shape[along + 1 :],
                axes=array.axes[:along] + array.axes[along + 1 :],
                idiom=None,
            )
        )
    return tuple(results)
