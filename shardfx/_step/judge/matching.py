"""The match of an operation of the partitioned program with one of the whole program."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from ..hlo_text import Instruction, arrays_in
from .cuts import Cut
from .elements import expressed
from .forms import Form, View
from .held import Axis, Context, Held
from .joining import form_in, operation_of
from .values import Node
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
    instruction: Instruction,
    operands: Sequence[Held],
    cuts: Sequence[Cut | None],
    *,
    value_number: int | None = None,
) -> Held:
    """What devices hold of the result of an operation, from the cut of each dimension:
    `None` for one along which nothing changes. `value_number` is that of its value, and
    `operands` are seen as those of the value. If the number is `None`, it is looked up
    by the operation's form. If the whole program has no such operation, the value is a
    new one, which is no result of the whole program.
    """
    shape = arrays_in(instruction.result)[0].shape
    form = form_in(context, instruction, operands, shape)
    if value_number is None:
        value_number = node_for(context, form, instruction)
    if value_number is None:
        value_number = _new_value(context, instruction, form)
    return held_view(context, View(value_number, form.dims), shape, cuts)


def held_view(
    context: Context,
    view: View,
    shape: tuple[int, ...],
    cuts: Sequence[Cut | None],
) -> Held:
    """What devices hold of a view of a value, whose shape is `shape` on one device and
    whose dimensions have these cuts: `None` for one along which nothing changes.
    """
    value_shape = context.values.nodes[view.root].shape
    axes: list[Axis | None] = []
    for dim, cut, size in zip(view.dims, cuts, shape, strict=True):
        if dim is not None and cut is None and value_shape[dim] == size and size != 1:
            # Nothing changes along it, so its devices hold all of it.
            cut = context.cuts.whole(size)
        axes.append(None if dim is None or cut is None else Axis(dim, cut))
    return Held(root=view.root, shape=shape, axes=tuple(axes))


def held_results(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
    cuts: Sequence[Cut | None],
    *,
    value_number: int,
) -> tuple[Held, ...]:
    """What devices hold of the results of an operation that has several, the first of
    which is the value `value_number`. Results of its shape have these cuts; of the
    others, each device holds all. Raises `Unjudged` if the whole program has no such
    operation.
    """
    arrays = arrays_in(instruction.result)
    form = form_in(context, instruction, operands, arrays[0].shape)
    unkeyed_sizes = context.values.nodes[value_number].unkeyed_sizes
    results: list[Held] = []
    for result_number, array in enumerate(arrays):
        dims = tuple(range(len(array.shape)))
        # The values of several results have their numbers in their keys.
        key = (*form.key, result_number)
        if len(array.shape) > len(form.dims):
            # The whole program has such a result by its shape.
            key = (*key, array.shape)
        value_numbers = [
            number
            for number in candidates(context, Form(key, dims, dims), instruction)
            if context.values.nodes[number].unkeyed_sizes == unkeyed_sizes
        ]
        if not value_numbers:
            raise Unjudged(f"{instruction.opcode} that the whole program has not")
        result_cuts = cuts
        if array.shape != arrays[0].shape:
            result_cuts = [context.cuts.whole(size) for size in array.shape]
        view = View(value_numbers[0], dims)
        results.append(held_view(context, view, array.shape, result_cuts))
    return tuple(results)


def _new_value(context: Context, instruction: Instruction, form: Form) -> int:
    """The number of a value that the program of one device alone makes, by an operation
    with the form `form`.
    """
    kept_sizes = tuple(_size(context, form, place) for place in form.kept)
    node = Node(
        opcode=instruction.opcode,
        key=form.key,
        shape=kept_sizes,
        # No value of the whole program has this mark, so none is equal.
        unkeyed_sizes=("derived",),
    )
    return context.values.number_of(node)


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


class Match(NamedTuple):
    """A value of the whole program that an operation may compute: its number, and the
    operation's operands, seen as the operands of the value.
    """

    value_number: int
    operands: Sequence[Held]


# The result of an operation as a value of the whole program, from its operands, seen as
# those of the value, and the value's number.
Rule: TypeAlias = Callable[[Sequence[Held], int], Held]


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
        Match(value_number, operands)
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
    rule: Rule,
) -> Held:
    """The result of an operation as the first value of the whole program with which
    `rule` judges it. Raises `Unjudged` if one is not judged or there is none, and else
    `Wrong` if one is refuted whose operands are these themselves.
    """
    reason: Unjudged | None = None
    fault: Wrong | None = None
    for match in matched_operands(context, instruction, operands):
        try:
            return rule(match.operands, match.value_number)
        except Unjudged as error:
            reason = error
        except Wrong as error:
            if are_same(match.operands, operands):
                fault = error
    no_match = f"no {instruction.opcode} of the whole program has these operands"
    raise reason or fault or Unjudged(no_match)


def remembered(
    context: Context,
    instruction: Instruction,
    rule: Rule,
    match: Match,
) -> Held:
    """The result of an operation by its rule, as the value of `match`. The rule is
    asked once for equal operations, operands that lie alike, and values of equal
    operations and sizes.
    """
    if any(operand.idiom is not None for operand in match.operands):
        return rule(match.operands, match.value_number)
    key = (
        *operation_of(context, instruction),
        context.values.nodes[match.value_number].likeness,
        *[operand.layout for operand in match.operands],
    )
    held = context.memory.result(key)
    if held is not None:
        return held.of_value(match.value_number)
    held = rule(match.operands, match.value_number)
    if held.root == match.value_number and held.idiom is None:
        context.memory.add(key, match.operands, held)
    return held
