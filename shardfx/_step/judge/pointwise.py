"""Operations that compute each element from the same element of each operand.

Their operands hold the same elements on each device. That is the rule that a residual
sum of two device orders breaks.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from ..hlo_text import Instruction, arrays_in
from .cuts import Cut
from .forms import attribute
from .held import (
    MOST_KNOWN,
    NOWHERE,
    Axis,
    Context,
    Held,
    Number,
    require_finished,
)
from .joining import (
    constant_number,
    form_in,
    is_zero,
    joined_cut,
    limits_of,
)
from .lookups import lookup_step
from .masks import selected_by_mask, union_of
from .matching import Match, held_result, matches_by_name, node_for, remembered
from .values import FLOAT_TYPES, ROUNDING
from .verdict import Unjudged, Wrong


# Of sums and their parts: `f(a) + f(b) = f(a + b)`.
_LINEAR = frozenset(
    "add subtract negate convert copy real imag reduce-precision".split()
)
_NUMBERS: Mapping[str, Callable[..., Any]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.logical_not,
    "negate": np.negative,
    "abs": np.abs,
    "sign": np.sign,
    "select": np.where,
    "shift-left": np.left_shift,
    "shift-right-logical": np.right_shift,
    "shift-right-arithmetic": np.right_shift,
    "clamp": lambda low, number, high: np.minimum(np.maximum(number, low), high),
}
# The beginnings of the names of types of floating-point and complex numbers.
_FLOATING = ("f", "bf", "c")
_COMPARED = {
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
}


def elementwise(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
) -> Held:
    """The result of an elementwise operation: of one of the whole program, if there is
    one on the same values; else of the partitioner's own idioms, such as masks and
    lookups.
    """
    shape = arrays_in(instruction.result)[0].shape
    operands = [broadcast_scalar(operand, shape) for operand in operands]
    table = _known_result(instruction, operands)
    if any(operand.idiom is not None for operand in operands):
        held = lookup_step(context, instruction, operands)
        if held is None:
            raise Unjudged("a lookup that is not finished")
        return held
    if any(operand.root == NOWHERE for operand in operands):
        return _of_device_numbers(
            context=context,
            instruction=instruction,
            operands=operands,
            shape=shape,
            table=table,
        )
    if instruction.opcode == "convert":
        _require_exact_parts(context, operands[0])
    # An operation of the whole program comes first: it may be a select or a sum, too.
    held = _matched(context, instruction, operands, shape)
    if held is None and instruction.opcode == "multiply":
        held = _scaled(context, instruction, operands)
    if held is None:
        masked = selected_by_mask(context, instruction, operands, shape)
        if masked is not None:
            return masked
        union = union_of(context, instruction, operands)
        if union is not None:
            return union
        if table is None:
            bounded = lookup_step(context, instruction, operands)
            if bounded is not None:
                return bounded
        try:
            held = _joined(context, instruction, operands, None)
        except Wrong as error:
            raise Unjudged(
                f"unlike any operation of the whole program: {error}"
            ) from error
    if table is not None:
        return dataclasses.replace(held, known_numbers=table)
    return held


def _require_exact_parts(context: Context, operand: Held) -> None:
    """Raises `Unjudged` for a conversion of an unfinished sum or product of integers,
    which wraps: the parts of it, as floats, do not.
    """
    if operand.is_finished or operand.reducer in ("maximum", "minimum"):
        return
    maker = context.values.nodes[operand.root].instruction
    if maker is None or not arrays_in(maker.result)[0].dtype.startswith(_FLOATING):
        raise Unjudged("a conversion of an unfinished reduction of integers")


def broadcast_scalar(operand: Held, shape: tuple[int, ...]) -> Held:
    """A scalar operand, such as a predicate, as an array with the same number at each
    position, so nothing changes along its axes. An operand of that shape stays.
    """
    if operand.shape == shape:
        return operand
    if operand.shape:
        raise Unjudged("an elementwise operation of arrays of different shapes")
    table = operand.known_numbers
    if table is not None:
        table = table.reshape(table.shape[:1] + (1,) * len(shape))
    return dataclasses.replace(
        operand,
        shape=shape,
        axes=(None,) * len(shape),
        known_numbers=table,
    )


def _matched(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
    shape: tuple[int, ...],
) -> Held | None:
    """The result if the whole program has this operation on the same values; `None` if
    it has not. Its shape is `shape` on one device.
    """
    form = form_in(context, instruction, operands, shape)
    value_number = node_for(context, form, instruction)
    fault: Wrong | None = None
    if value_number is not None:
        try:
            rule = ft.partial(_joined, context, instruction)
            match = Match(value_number, operands)
            return remembered(context, instruction, rule, match)
        except Wrong as error:
            fault = error
    for other_number, expressed_operands in matches_by_name(
        context, instruction, operands
    ):
        if other_number == value_number:
            continue
        expressed_form = form_in(context, instruction, expressed_operands, shape)
        expressed_number = node_for(context, expressed_form, instruction)
        if expressed_number is None:
            continue
        try:
            return _joined(context, instruction, expressed_operands, expressed_number)
        except Wrong:
            # It may be another operation of the same name.
            continue
    if fault is not None:
        raise fault
    return None


def _scaled(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
) -> Held | None:
    """A product by a constant that the whole program writes as several products and
    quotients by constants, since compilers multiply the constants; `None` if it is
    none.
    """
    relative_error = ROUNDING.get(arrays_in(instruction.result)[0].dtype)
    if relative_error is None:
        return None
    for operand, constant in (operands, operands[::-1]):
        multiplier = constant_number(constant)
        if (
            multiplier is None
            or operand.known_numbers is not None
            or operand.dropped_axes
            # A negative constant makes a minimum of a maximum.
            or (operand.terms is not None and operand.reducer != "add")
        ):
            continue
        for value_number in _scalings(context, instruction):
            whole_factor = context.values.factors_of(value_number).get(operand.root)
            if whole_factor is None:
                continue
            if not math.isclose(whole_factor, multiplier, rel_tol=relative_error):
                continue
            fill = operand.fill if operand.fill == 0 else None
            return dataclasses.replace(operand.of_value(value_number), fill=fill)
    return None


def _scalings(context: Context, instruction: Instruction) -> list[int]:
    """The numbers of the products and quotients of the whole program with an
    instruction's name. One that the compiler made of several has the names of all.
    """
    op_name = instruction.op_name
    scalings: list[int] = []
    for name in dict.fromkeys((op_name, *op_name.split(";"))):
        for opcode in ("multiply", "divide"):
            scalings += context.values.with_name(opcode, name)
    return scalings


def _joined(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
    value_number: int | None,
) -> Held:
    """The result of operands that hold the same elements on each device, as the value
    `value_number` of the whole program; by its form if that is `None`. Raises `Wrong`
    if they hold different ones.
    """
    opcode = instruction.opcode
    result = arrays_in(instruction.result)[0]
    cuts: list[Cut | None] = []
    for place in range(len(result.shape)):
        axes = [operand.axes[place] for operand in operands]
        cuts.append(joined_cut(context, opcode, place, axes))
    sums = _sums(opcode, result.dtype, operands)
    held = held_result(context, instruction, operands, cuts, value_number=value_number)
    fill = None
    if held.has_holes and _have_holes_of(held, operands):
        fill = _fill_of_result(instruction, operands)
    if sums == _Sums() and fill is None:
        return held
    return dataclasses.replace(held, fill=fill, **sums._asdict())


class _Sums(NamedTuple):
    """The unfinished sums of an array, as in `Held`. Those of a finished one by
    default.
    """

    terms: tuple[int, ...] | None = None
    reducer: str = "add"
    scale: Fraction | int = 1


def _sums(opcode: str, dtype: str, operands: Sequence[Held]) -> _Sums:
    """The unfinished sums of the result of an operation with this opcode and result
    type. Raises `Wrong` if it needs the whole of an operand that is unfinished.
    """
    if all(operand.is_finished for operand in operands):
        return _Sums()
    nonzero_operands = [operand for operand in operands if not is_zero(operand)]
    sum_states = {
        (operand.terms, operand.reducer, operand.scale) for operand in nonzero_operands
    }
    unfinished = [operand for operand in nonzero_operands if not operand.is_finished]
    if not unfinished:
        return _Sums()
    first = unfinished[0]
    sums_of_part = _Sums(first.terms, first.reducer, first.scale)
    is_float = dtype.startswith(_FLOATING)
    if opcode == "convert" and not is_float:
        # Parts that are rounded to integers are no parts of a rounded sum.
        raise Unjudged("a conversion of an unfinished reduction to integers")
    if len(sum_states) == 1 and (
        len(operands) == 1
        and opcode in ("convert", "copy")
        or first.reducer == "add"
        and opcode in _LINEAR
        or first.reducer == opcode
    ):
        return sums_of_part
    is_linear = _is_linear_in(opcode, is_float, operands, first)
    if first.reducer == "add" and len(unfinished) == 1 and is_linear:
        return sums_of_part
    for operand in unfinished:
        require_finished(operand, opcode)
    raise AssertionError("an unfinished operand is refused")


def _is_linear_in(
    opcode: str,
    is_float: bool,
    operands: Sequence[Held],
    part: Held,
) -> bool:
    """Whether an operation on `part`, which holds a term of a sum, makes the term of
    its result. The other operands are whole, and `is_float` says whether the result has
    floating-point numbers.
    """
    if opcode == "multiply":
        return True
    if opcode == "divide":
        return is_float and operands[0] is part
    if opcode == "select":
        others = [operand for operand in operands[1:] if operand is not part]
        return operands[0] is not part and all(map(is_zero, others))
    return False


def _have_holes_of(held: Held, operands: Sequence[Held]) -> bool:
    """Whether each operand with holes has the same holes as the result `held`. It has
    not, where another operand has elements in the place of its holes.
    """
    for operand in operands:
        if not operand.has_holes:
            continue
        for axis, joined_axis in zip(operand.axes, held.axes, strict=True):
            if axis is joined_axis:
                continue
            cuts = [part.cut for part in (axis, joined_axis) if part is not None]
            is_equal = len(cuts) == 2 and cuts[0] is cuts[1]
            if not is_equal and any(cut.has_holes for cut in cuts):
                return False
    return True


def _fill_of_result(
    instruction: Instruction,
    operands: Sequence[Held],
) -> Number | None:
    """The number that an operation makes of the numbers in holes; `None` if it is not
    known.
    """
    numbers = []
    for operand in operands:
        if (
            operand.known_numbers is not None
            and operand.known_numbers.size == operand.known_numbers.shape[0]
        ):
            if not operand.is_uniform:
                return None
            numbers.append(operand.known_numbers.flat[0].item())
        elif operand.has_holes and operand.fill_number is not None:
            numbers.append(operand.fill_number)
        else:
            return None
    opcode = instruction.opcode
    dtype = arrays_in(instruction.result)[0].dtype
    if opcode == "copy":
        return numbers[0]
    if opcode == "convert":
        computed = _converted(np.asarray(numbers[0]), dtype)
    else:
        compute = _NUMBERS.get(opcode)
        if compute is None or opcode in ("select", "not", "shift-right-logical"):
            return None
        try:
            computed = np.asarray(compute(*numbers))
        except TypeError:
            return None
    computed = _as_computed(computed, dtype)
    return None if computed is None else computed.item()


def _known_result(
    instruction: Instruction,
    operands: Sequence[Held],
) -> np.ndarray | None:
    """The known numbers of the result, an array of shape (devices, 1 or size, ...);
    `None` if those of an operand are not known, or no rule computes them exactly.
    """
    operand_numbers = [
        operand.known_numbers
        for operand in operands
        if operand.known_numbers is not None
    ]
    if len(operand_numbers) != len(operands):
        return None
    opcode = instruction.opcode
    result_size = np.prod(
        [
            max(sizes)
            for sizes in zip(*[array.shape for array in operand_numbers], strict=True)
        ]
    )
    if result_size > MOST_KNOWN:
        return None
    dtype = arrays_in(instruction.result)[0].dtype
    if opcode == "convert":
        return _as_computed(_converted(operand_numbers[0], dtype), dtype)
    compute = _NUMBERS.get(opcode)
    if opcode == "compare":
        compute = _COMPARED[attribute(instruction, "direction")]
    is_float = any(array.dtype.kind == "f" for array in operand_numbers)
    if opcode in ("divide", "remainder") and not is_float:
        return _as_computed(
            _divided(opcode, operand_numbers[0], operand_numbers[1]), dtype
        )
    if compute is None or (is_float and opcode not in ("select", "compare", "add")):
        return None
    if opcode == "not" and dtype != "pred":
        return None
    if opcode == "shift-right-logical" and (operand_numbers[0] < 0).any():
        return None
    computed = compute(*operand_numbers)
    # A select takes its numbers from its operands.
    return computed if opcode == "select" else _as_computed(computed, dtype)


def _as_computed(computed: np.ndarray | None, dtype: str) -> np.ndarray | None:
    """The computed numbers, as a device has them in the type `dtype`. It rounds floats,
    and wraps integers beyond those of the type, which no rule follows: `None` for them,
    and for integers of more than 32 bits.
    """
    if computed is None or computed.dtype.kind == "b":
        return computed
    if computed.dtype.kind == "f":
        float_type = FLOAT_TYPES.get(dtype)
        return None if float_type is None else _rounded(computed, float_type)
    lowest, highest = limits_of(dtype)
    lowest = max(lowest, 1 - 2**31)
    highest = min(highest, 2**31 - 1)
    is_beyond = (computed < lowest) | (computed > highest)
    return None if is_beyond.any() else computed


def _rounded(computed: np.ndarray, float_type: Any) -> np.ndarray:
    """The numbers, rounded to a floating-point type."""
    with np.errstate(over="ignore"):
        return computed.astype(float_type).astype(np.float64)


def _converted(numbers: np.ndarray, dtype: str) -> np.ndarray | None:
    """Known numbers in another dtype; `None` for floats as integers."""
    if dtype == "pred":
        return numbers != 0
    if numbers.dtype.kind == "f":
        return numbers if dtype.startswith(("f", "bf")) else None
    if dtype.startswith(("s", "u")):
        return numbers.astype(np.int64)
    return numbers.astype(np.float64) if dtype.startswith(("f", "bf")) else None


def _divided(
    opcode: str,
    dividend: np.ndarray,
    divisor: np.ndarray,
) -> np.ndarray | None:
    """A quotient or a remainder of integers, which HLO rounds to zero; `None` for a
    division by zero.
    """
    if (divisor == 0).any():
        return None
    quotient = (
        np.sign(dividend) * np.sign(divisor) * (np.abs(dividend) // np.abs(divisor))
    )
    return quotient if opcode == "divide" else dividend - quotient * divisor


def _of_device_numbers(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
    shape: tuple[int, ...],
    table: np.ndarray | None,
) -> Held:
    """The result of an operation with an operand that only one device's program has.
    `table` has the known numbers of the result; `None` if it has none.
    """
    masked = selected_by_mask(context, instruction, operands, shape)
    if masked is not None:
        return masked
    if table is not None:
        return from_known(context, table, shape, operands)
    held = lookup_step(context, instruction, operands)
    if held is None:
        raise Unjudged("arithmetic with the device's number")
    return held


def from_known(
    context: Context,
    table: np.ndarray,
    shape: tuple[int, ...],
    operands: Sequence[Held] = (),
) -> Held:
    """What devices hold of an array with the known numbers `table`, of the program of
    one device. Those that come from an operand that is an iota are its elements: the
    partitioner writes the iota of a shard as a small one plus an offset.
    """
    varying = [dim for dim in range(len(shape)) if table.shape[1 + dim] > 1]
    for operand in operands:
        node = context.values.nodes[operand.root] if operand.root >= 0 else None
        if node is None or node.key[0] != "iota" or table.dtype.kind != "i":
            continue
        along = next(
            (dim for dim, axis in enumerate(operand.axes) if axis is not None), None
        )
        if along is None or varying not in ([along], []) or (table < 0).any():
            continue
        if table.shape[1 + along] != shape[along]:
            continue
        axes: list[Axis | None] = [None] * len(shape)
        rows = table.reshape(table.shape[0], -1)
        axes[along] = Axis(0, context.cuts.from_indices(rows))
        return Held(
            root=operand.root, shape=shape, axes=tuple(axes), known_numbers=table
        )
    return Held(
        root=NOWHERE, shape=shape, axes=(None,) * len(shape), known_numbers=table
    )
