"""Products, reductions and windows: operations that sum over dimensions.

A sum over a dimension that is cut is not finished: each device has the term of its own
part. `Cuts.terms` says which devices have which term.
"""

import dataclasses
import functools as ft
import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from ..._ground.opcodes import IDEMPOTENT
from ..hlo_text import Instruction, arrays_in
from .cuts import Cut
from .forms import (
    dot_dims,
    numbers,
    reducer_of,
    text_of,
)
from .held import (
    Axis,
    Context,
    Held,
    Number,
    cut_of,
    permuted,
    product_of_terms,
    require_finished,
)
from .joining import (
    constant_number,
    disagreement,
    is_identity,
    joined_cut,
)
from .matching import Match, are_same, held_result, matched_operands, remembered
from .values import Node
from .verdict import Unjudged, Wrong


_SIDES = re.compile(r"\b(?:lhs_|rhs_)")


def dot(context: Context, instruction: Instruction, operands: Sequence[Held]) -> Held:
    """The result of a product."""
    for operand in operands:
        if operand.terms is not None and operand.reducer != "add":
            require_finished(operand, "dot")
    rule = ft.partial(_dot, context, instruction)
    matches = matched_operands(context, instruction, operands)
    held = _unrefuted(
        matches, operands, ft.partial(remembered, context, instruction, rule)
    )
    if held is None and not matches:
        held = _swapped(context, instruction, operands)
    return _as_new_value(operands, rule) if held is None else held


def _unrefuted(
    matches: Sequence[Match],
    operands: Sequence[Held],
    rule: Callable[[Match], Held],
) -> Held | None:
    """The result of an operation as the value of the first match that `rule` does not
    refute; `None` if there is none. Raises `Wrong` if it refutes one whose operands are
    `operands`, those of the operation, themselves.
    """
    fault: Wrong | None = None
    for match in matches:
        try:
            return rule(match)
        except Wrong as error:
            if are_same(match.operands, operands):
                fault = error
    if fault is not None:
        raise fault
    return None


def _as_new_value(
    operands: Sequence[Held],
    rule: Callable[[Sequence[Held], None], Held],
) -> Held:
    """The result of an operation, by its rule, as a value that the program of one
    device alone computes.
    """
    try:
        return rule(operands, None)
    except Wrong as error:
        raise Unjudged(f"unlike any operation of the whole program: {error}") from error


def _swapped(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
) -> Held | None:
    """The result, where the whole program computes `other @ first` and transposes it;
    `None` if it has no such product.
    """
    first, other = operands
    dims = dot_dims(instruction, (len(first.shape), len(other.shape)))
    # The result has the batch dimensions, those of the first operand, and the other's.
    batch_count = len(dims.batch)
    other_start = batch_count + len(dims.free[0])
    stop = other_start + len(dims.free[1])
    order = [
        *range(batch_count),
        *range(other_start, stop),
        *range(batch_count, other_start),
    ]
    array = arrays_in(instruction.result)[0]
    sizes = ",".join(str(array.shape[dim]) for dim in order)
    exchanged = instruction._replace(
        result=f"{array.dtype}[{sizes}]",
        attributes=_SIDES.sub(
            lambda side: "rhs_" if side[0] == "lhs_" else "lhs_", text_of(instruction)
        ),
    )
    for value_number, expressed_operands in matched_operands(
        context, exchanged, [other, first]
    ):
        try:
            held = _dot(context, exchanged, expressed_operands, value_number)
        except (Wrong, Unjudged):
            continue
        return permuted(held, [order.index(dim) for dim in range(len(order))])
    return None


def _dot(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
    value_number: int | None,
) -> Held:
    """The result of a product as the value `value_number` of the whole program, or as a
    new one if it is `None`. The sum over a dimension that is cut is unfinished.
    """
    first, second = operands
    dims = dot_dims(instruction, (len(first.shape), len(second.shape)))
    node = None if value_number is None else context.values.nodes[value_number]
    terms = None
    scale = Fraction(1)
    for first_dim, second_dim in dims.contracted:
        axes = [first.axes[first_dim], second.axes[second_dim]]
        if axes == [None, None]:
            if node is None:
                raise Unjudged("a product of broadcasts")
            # Of equal elements, each device sums its share.
            size = node.operands[0].shape[first_dim]
            scale *= Fraction(first.shape[first_dim], size)
            continue
        cut = contracted_cut(context, operands, axes, first_dim)
        size = _contracted_size(
            context=context,
            node=node,
            first=first,
            other=second,
            first_dim=first_dim,
            other_dim=second_dim,
        )
        terms_of_dim = context.cuts.terms(cut, size)
        terms = product_of_terms(context.everywhere, terms, terms_of_dim)
    cuts: list[Cut | None] = []
    for place, (first_dim, second_dim) in enumerate(dims.batch):
        axes = [first.axes[first_dim], second.axes[second_dim]]
        cuts.append(joined_cut(context, "dot", place, axes))
    for operand, free_dims in zip(operands, dims.free, strict=True):
        cuts += [cut_of(operand.axes[dim]) for dim in free_dims]
    held = held_result(context, instruction, operands, cuts, value_number=value_number)
    fill = 0 if _have_zeros_in_holes(operands) else None
    return with_sums(
        context=context,
        held=held,
        operands=operands,
        terms=terms,
        scale=scale,
        fill=fill,
    )


def contracted_cut(
    context: Context,
    operands: Sequence[Held],
    axes: Sequence[Axis | None],
    place: int,
) -> Cut:
    """The cut of a contracted dimension, which has these axes in the two operands.
    Where one operand has zeros in holes, the other may have anything finite. `place` is
    the dimension in the text of a fault.
    """
    present_cuts = [axis.cut for axis in axes if axis is not None]
    if len(present_cuts) == 2 and any(cut.has_holes for cut in present_cuts):
        if not _have_zeros_in_holes(operands):
            raise Unjudged("a product over padding")
        common_cut = context.cuts.joined(*present_cuts)
        if common_cut is None:
            raise disagreement("dot", place, *present_cuts)
        return common_cut
    if any(cut.has_holes for cut in present_cuts) and not _have_zeros_in_holes(
        operands
    ):
        raise Unjudged("a product over padding")
    cut = joined_cut(context, "dot, over a contracted dimension,", place, axes)
    assert cut is not None
    return cut


def _have_zeros_in_holes(operands: Sequence[Held]) -> bool:
    """Whether all holes of operands are zeros."""
    return all(operand.fill == 0 for operand in operands if operand.has_holes)


def _contracted_size(
    context: Context,
    node: Node | None,
    first: Held,
    other: Held,
    first_dim: int,
    other_dim: int,
) -> int:
    """The size of a contracted dimension in the whole program: that of the product
    `node`, or of an operand's value if it is `None`.
    """
    if node is not None:
        return node.operands[0].shape[first_dim]
    for held, place in ((first, first_dim), (other, other_dim)):
        axis = held.axes[place]
        if axis is not None:
            shape = context.values.nodes[held.root].shape
            if axis.dim < len(shape) and (size := shape[axis.dim]) is not None:
                return size
    raise Unjudged("a product over a dimension of unknown size")


def with_sums(
    context: Context,
    held: Held,
    operands: Sequence[Held],
    terms: tuple[int, ...] | None,
    scale: Fraction,
    fill: Number | None,
) -> Held:
    """The result of an operation that is linear in each operand, with the sums that its
    operands leave unfinished. `terms` and `scale` are those that the operation adds by
    itself, and `fill` is the number in its holes.
    """
    for operand in operands:
        terms = product_of_terms(context.everywhere, terms, operand.terms)
        scale *= operand.scale
    return dataclasses.replace(
        held,
        terms=terms,
        reducer="add",
        scale=1 if scale == 1 else scale,
        fill=fill if held.has_holes else None,
    )


def reduce(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
) -> Held:
    """The reduction of one array."""
    operand, initial = operands
    reducer = reducer_of(context.module, instruction)
    if operand.terms is not None and operand.reducer != reducer:
        require_finished(operand, "reduce")
    if operand.scale != 1 and reducer != "add":
        require_finished(operand, "reduce")
    require_finished(initial, "reduce")
    rule = ft.partial(_reduced, context, instruction, reducer=reducer)
    held = _unrefuted(
        matched_operands(context, instruction, operands),
        operands,
        ft.partial(remembered, context, instruction, rule),
    )
    return _as_new_value(operands, rule) if held is None else held


def _reduced(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
    value_number: int | None,
    reducer: str,
) -> Held:
    """The result of a reduction as the value `value_number` of the whole program, or as
    a new one if it is `None`. `reducer` is the opcode of its function; "" for another.
    The reduction over a dimension that is cut is unfinished.
    """
    operand, initial = operands
    dtype = arrays_in(instruction.result)[0].dtype
    reduced_dims = numbers(instruction, "dimensions")
    node = None if value_number is None else context.values.nodes[value_number]
    terms = operand.terms
    scale = Fraction(operand.scale)
    for place in reduced_dims:
        axis = operand.axes[place]
        if axis is None:
            scale *= _share_of_sum(operand, place, node, reducer)
            continue
        size = _size(context, operand, place, node)
        if axis.cut.has_holes and not is_identity(operand.fill_number, reducer, dtype):
            raise Unjudged("a reduction over padding")
        terms_of_dim = context.cuts.terms(axis.cut, size)
        if terms_of_dim is not None and not reducer:
            raise Unjudged("a reduction, by another function, over a cut dimension")
        terms = product_of_terms(context.everywhere, terms, terms_of_dim)
    is_in_parts = terms is not None or scale != 1
    if is_in_parts and not is_identity(constant_number(initial), reducer, dtype):
        raise Unjudged("a reduction that starts with a number on each device")
    cuts = [
        cut_of(axis) for dim, axis in enumerate(operand.axes) if dim not in reduced_dims
    ]
    held = held_result(context, instruction, operands, cuts, value_number=value_number)
    fill = None
    if held.has_holes and reducer == "add":
        are_zeros = operand.fill == 0 and constant_number(initial) == 0
        fill = 0 if are_zeros else None
    return dataclasses.replace(
        held,
        terms=terms,
        reducer=reducer,
        scale=1 if scale == 1 else scale,
        fill=fill,
    )


def _size(context: Context, operand: Held, place: int, node: Node | None) -> int:
    """The size of dimension `place` of an operand in the whole program: of the operand
    of `node`, or of its own value if that is `None`.
    """
    if node is not None:
        return node.operands[0].shape[place]
    axis = operand.axes[place]
    assert axis is not None
    shape = context.values.nodes[operand.root].shape
    size = shape[axis.dim] if axis.dim < len(shape) else None
    if size is None:
        raise Unjudged("a reduction over a dimension of unknown size")
    return size


def _share_of_sum(
    operand: Held,
    place: int,
    node: Node | None,
    reducer: str,
) -> Fraction:
    """How large a share of the whole reduction each device has of equal elements along
    dimension `place`: 1/2 for a sum of 4 of 8 elements, and 1 for their maximum.
    """
    if node is None:
        raise Unjudged("a reduction of a broadcast")
    size = node.operands[0].shape[place]
    if operand.shape[place] == size or reducer in IDEMPOTENT:
        return Fraction(1)
    if reducer != "add":
        raise Unjudged("a reduction of a broadcast")
    return Fraction(operand.shape[place], size)
