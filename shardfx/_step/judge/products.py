"""Products, reductions and windows: operations that sum over dimensions.

A sum over a dimension that is cut is not finished: each device has the term of its own
part. `Cuts.terms` says which devices have which term.
"""

import dataclasses
import functools as ft
import re
from collections.abc import Sequence
from fractions import Fraction

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
    permuted,
    product_of_terms,
    require_finished,
)
from .joining import (
    constant_number,
    disagreement,
    form_in,
    is_identity,
    joined_cut,
    remembered,
)
from .matching import are_same, held_result, matched_operands
from .values import Node
from .verdict import Unjudged, Wrong


_SIDES = re.compile(r"\b(?:lhs_|rhs_)")


def dot(context: Context, instruction: Instruction, operands: Sequence[Held]) -> Held:
    """The result of a product."""
    for operand in operands:
        if operand.terms is not None and operand.reducer != "add":
            require_finished(operand, "dot")
    matched = matched_operands(context, instruction, operands)
    fault: Wrong | None = None
    for number, expressed_operands in matched:
        try:
            rule = ft.partial(_dot, context, instruction, expressed_operands, number)
            return remembered(context, instruction, expressed_operands, number, rule)
        except Wrong as error:
            fault = error if are_same(expressed_operands, operands) else fault
    if fault is not None:
        raise fault
    if not matched:
        swapped = _swapped(context, instruction, operands)
        if swapped is not None:
            return swapped
    try:
        return _dot(context, instruction, operands, None)
    except Wrong as error:
        raise Unjudged(f"unlike any operation of the whole program: {error}") from error


def _swapped(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
) -> Held | None:
    """The result where the whole program transposes the product of the operands in the
    other order; `None` if it has no such product.
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
    for number, expressed_operands in matched_operands(
        context, exchanged, [other, first]
    ):
        try:
            held = _dot(context, exchanged, expressed_operands, number)
        except (Wrong, Unjudged):
            continue
        return permuted(held, [order.index(dim) for dim in range(len(order))])
    return None


def _dot(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
    number: int | None,
) -> Held:
    """The result of a product as the value `number` of the whole program, or as a new
    one if it is `None`. The sum over a dimension that is cut is unfinished.
    """
    shape = arrays_in(instruction.result)[0].shape
    first, other = operands
    dims = dot_dims(instruction, (len(first.shape), len(other.shape)))
    node = None if number is None else context.values.nodes[number]
    terms = None
    scale = Fraction(1)
    for first_dim, other_dim in dims.contracted:
        axes = [first.axes[first_dim], other.axes[other_dim]]
        if axes == [None, None]:
            if node is None:
                raise Unjudged("a product of broadcasts")
            # Of equal elements, each device sums its share.
            size = node.operands[0].shape[first_dim]
            scale *= Fraction(first.shape[first_dim], size)
            continue
        cut = contracted_cut(context, operands, axes, first_dim)
        size = _contracted_size(context, node, first, other, first_dim, other_dim)
        part = context.cuts.terms(cut, size)
        terms = product_of_terms(context.everywhere, terms, part)
    cuts: list[Cut | None] = []
    for place, (first_dim, other_dim) in enumerate(dims.batch):
        axes = [first.axes[first_dim], other.axes[other_dim]]
        cuts.append(joined_cut(context, "dot", place, axes))
    for operand, free in zip(operands, dims.free, strict=True):
        cuts += [cut_of(operand.axes[dim]) for dim in free]
    form = form_in(context, instruction, operands, shape)
    held = held_result(context, form, instruction, shape, cuts, number)
    fill = 0 if _fills_are(operands, 0) else None
    return with_sums(context, held, operands, terms, scale, fill)


def contracted_cut(
    context: Context,
    operands: Sequence[Held],
    axes: Sequence[Axis | None],
    place: int,
) -> Cut:
    """The cut of a contracted dimension. Where one operand has zeros in holes, the other
    may have anything finite.
    """
    real = [axis.cut for axis in axes if axis is not None]
    if len(real) == 2 and any(cut.has_holes for cut in real):
        if not _fills_are(operands, 0):
            raise Unjudged("a product over padding")
        both = context.cuts.joined(*real)
        if both is None:
            raise disagreement("dot", place, *real)
        return both
    if any(cut.has_holes for cut in real) and not _fills_are(operands, 0):
        raise Unjudged("a product over padding")
    cut = joined_cut(context, "dot, over a contracted dimension,", place, axes)
    assert cut is not None
    return cut


def _fills_are(operands: Sequence[Held], number: Number) -> bool:
    """Whether all holes of operands have this number."""
    return all(operand.fill == number for operand in operands if operand.has_holes)


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


def cut_of(axis: Axis | None) -> Cut | None:
    """The cut of an axis; `None` if there is none."""
    return None if axis is None else axis.cut


def with_sums(
    context: Context,
    held: Held,
    operands: Sequence[Held],
    terms: tuple[int, ...] | None,
    scale: Fraction,
    fill: Number | None,
) -> Held:
    """The result of an operation that is linear in each operand, with the sums that its
    operands leave unfinished.
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
    operand, start = operands
    reducer = reducer_of(context.module, instruction)
    if operand.terms is not None and operand.reducer != reducer:
        require_finished(operand, "reduce")
    if operand.scale != 1 and reducer != "add":
        require_finished(operand, "reduce")
    require_finished(start, "reduce")
    fault: Wrong | None = None
    for number, expressed_operands in matched_operands(context, instruction, operands):
        try:
            rule = ft.partial(
                _reduced, context, instruction, expressed_operands, reducer, number
            )
            return remembered(context, instruction, expressed_operands, number, rule)
        except Wrong as error:
            fault = error if are_same(expressed_operands, operands) else fault
    if fault is not None:
        raise fault
    try:
        return _reduced(context, instruction, operands, reducer, None)
    except Wrong as error:
        raise Unjudged(f"unlike any operation of the whole program: {error}") from error


def _reduced(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
    reducer: str,
    number: int | None,
) -> Held:
    """The result of a reduction as the value `number` of the whole program, or as a new
    one if it is `None`. The reduction over a dimension that is cut is unfinished.
    """
    operand, start = operands
    result = arrays_in(instruction.result)[0]
    shape, dtype = result.shape, result.dtype
    over = numbers(instruction, "dimensions")
    node = None if number is None else context.values.nodes[number]
    terms = operand.terms
    scale = Fraction(operand.scale)
    for place in over:
        axis = operand.axes[place]
        if axis is None:
            scale *= _share_of_sum(operand, place, node, reducer)
            continue
        size = _size(context, operand, place, node)
        if axis.cut.has_holes and not is_identity(operand.fill_number, reducer, dtype):
            raise Unjudged("a reduction over padding")
        part = context.cuts.terms(axis.cut, size)
        if part is not None and not reducer:
            raise Unjudged("a reduction, by another function, over a cut dimension")
        terms = product_of_terms(context.everywhere, terms, part)
    is_in_parts = terms is not None or scale != 1
    if is_in_parts and not is_identity(constant_number(start), reducer, dtype):
        raise Unjudged("a reduction that starts with a number on each device")
    rest = [axis for dim, axis in enumerate(operand.axes) if dim not in over]
    form = form_in(context, instruction, operands, shape)
    held = held_result(
        context, form, instruction, shape, [cut_of(axis) for axis in rest], number
    )
    fill = None
    if held.has_holes and reducer == "add":
        are_zeros = operand.fill == 0 and constant_number(start) == 0
        fill = 0 if are_zeros else None
    return dataclasses.replace(
        held,
        terms=terms,
        reducer=reducer,
        scale=1 if scale == 1 else scale,
        fill=fill,
    )


def _size(context: Context, operand: Held, place: int, node: Node | None) -> int:
    """The size of dimension `place` of an operand in the whole program."""
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
    """The share of the whole reduction that each device has, of equal elements along
    dimension `place`: a sum of fewer elements is a share of it.
    """
    if node is None:
        raise Unjudged("a reduction of a broadcast")
    size = node.operands[0].shape[place]
    if operand.shape[place] == size or reducer in ("maximum", "minimum", "and", "or"):
        return Fraction(1)
    if reducer != "add":
        raise Unjudged("a reduction of a broadcast")
    return Fraction(operand.shape[place], size)
