"""The bounds of integers of the whole program, such as the index of an update or the
start of a slice.
"""

import operator
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ..hlo_text import arrays_in
from .forms import attribute, numbers
from .held import Context, Held
from .values import Node, Values, scalar_constant
from .verdict import Unjudged


class Bounds(NamedTuple):
    """The least and the greatest number that each element of a value may have. A
    predicate has 0 and 1.
    """

    low: int
    high: int


# Operations behind an index that are looked at.
_MOST_OPERATIONS = 64
_NEVER = Bounds(0, 0)
_ALWAYS = Bounds(1, 1)
_EITHER = Bounds(0, 1)


def bounds_of(values: Values, number: int) -> Bounds | None:
    """The bounds of a value of integers; `None` for other dtypes."""
    return _Reader(values).bounds(number)


def _bounds_of_dtype(node: Node) -> Bounds | None:
    """The bounds that the dtype of a value sets; `None` if it is no integer or
    predicate.
    """
    if node.instruction is None:
        return None
    arrays = arrays_in(node.instruction.result)
    dtype = arrays[0].dtype if len(arrays) == 1 else ""
    if dtype == "pred":
        return _EITHER
    if dtype[:1] not in ("s", "u") or not dtype[1:].isdigit():
        return None
    bit_count = int(dtype[1:])
    if dtype.startswith("u"):
        return Bounds(0, 2**bit_count - 1)
    return Bounds(-(2 ** (bit_count - 1)), 2 ** (bit_count - 1) - 1)


class _Reader:
    """Bounds of values, each asked once."""

    def __init__(self, values: Values):
        self.values = values
        self.known_bounds: dict[int, Bounds | None] = {}

    def bounds(self, number: int) -> Bounds | None:
        """The bounds of the value `number`: those that follow from its operands if they
        are within those of its dtype, and else these.
        """
        if number in self.known_bounds:
            return self.known_bounds[number]
        node = self.values.nodes[number]
        of_dtype = _bounds_of_dtype(node)
        # What is asked again meanwhile, or is too far behind, has those of its dtype.
        self.known_bounds[number] = of_dtype
        if of_dtype is None or len(self.known_bounds) > _MOST_OPERATIONS:
            return of_dtype
        computed = self._computed(node)
        if computed is None or computed.low < of_dtype.low:
            return of_dtype
        if computed.high > of_dtype.high:
            return of_dtype
        self.known_bounds[number] = computed
        return computed

    def _computed(self, node: Node) -> Bounds | None:
        """The bounds of a value from those of its operands; `None` if no rule says
        them, or if an operand has none.
        """
        if node.opcode == "constant":
            constant = scalar_constant(node)
            if constant is None or constant != int(constant):
                return None
            return Bounds(int(constant), int(constant))
        rule = _RULES.get(node.opcode)
        operands: list[Bounds] = []
        for operand in node.operands:
            bounds = self.bounds(operand.view.root)
            if bounds is None:
                return None
            operands.append(bounds)
        if node.opcode == "compare":
            assert node.instruction is not None
            direction = attribute(node.instruction, "direction")
            return _compared(direction, operands[0], operands[1])
        compute = _MONOTONE.get(node.opcode)
        if compute is not None:
            lows = [bounds.low for bounds in operands]
            highs = [bounds.high for bounds in operands]
            return Bounds(compute(*lows), compute(*highs))
        return None if rule is None else rule(*operands)


def _compared(direction: str, first: Bounds, other: Bounds) -> Bounds:
    """The bounds of a comparison of two numbers: 1 if it always holds, 0 if it never
    holds, else both.
    """
    if direction in ("GT", "GE"):
        swapped = "LT" if direction == "GT" else "LE"
        return _compared(swapped, other, first)
    if direction == "LT":
        is_always = first.high < other.low
        is_never = first.low >= other.high
    elif direction == "LE":
        is_always = first.high <= other.low
        is_never = first.low > other.high
    else:
        is_apart = first.high < other.low or other.high < first.low
        is_equal = first == other and first.low == first.high
        is_always = is_equal if direction == "EQ" else is_apart
        is_never = is_apart if direction == "EQ" else is_equal
    if is_always:
        return _ALWAYS
    return _NEVER if is_never else _EITHER


def _selected(chosen: Bounds, first: Bounds, other: Bounds) -> Bounds:
    """The bounds of a `select` by a predicate."""
    if chosen == _ALWAYS:
        return first
    if chosen == _NEVER:
        return other
    return _bounds_of_either(first, other)


def _remainder(number: Bounds, divisor: Bounds) -> Bounds | None:
    """The bounds of a remainder by a positive constant; `None` for other divisors. The
    remainder has the sign of the number that is divided.
    """
    if divisor.low != divisor.high or divisor.low <= 0:
        return None
    last = divisor.low - 1
    low = 0 if number.low >= 0 else -last
    return Bounds(low, last)


def _and(first: Bounds, other: Bounds) -> Bounds | None:
    """The bounds of the `and` of two predicates; `None` for other integers."""
    are_predicates = max(first.high, other.high) <= 1 and min(first.low, other.low) >= 0
    if not are_predicates:
        return None
    return Bounds(min(first.low, other.low), min(first.high, other.high))


def _bounds_of_either(*each: Bounds) -> Bounds:
    """The bounds of a number that is one of several."""
    low = min(bounds.low for bounds in each)
    high = max(bounds.high for bounds in each)
    return Bounds(low, high)


# Functions that grow with each of their operands. A sum that wraps is beyond the bounds
# of the dtype, which are taken then.
_MONOTONE: Mapping[str, Callable[..., int]] = {
    "maximum": max,
    "minimum": min,
    "add": operator.add,
    "clamp": lambda low, number, high: min(max(number, low), high),
}
_RULES: Mapping[str, Callable[..., Bounds | None]] = {
    "select": _selected,
    "remainder": _remainder,
    "and": _and,
    "convert": lambda number: number,
    "slice": lambda numbers: numbers,
    "dynamic-slice": lambda numbers, *indices: numbers,
    "concatenate": _bounds_of_either,
    "subtract": lambda first, other: Bounds(
        first.low - other.high, first.high - other.low
    ),
}


class _Start(NamedTuple):
    """Where slices of a dimension start: the number of the value that has the indices,
    and the last start at which a slice is within the dimension.
    """

    indices: int
    last: int


def require_start_in_bounds(
    context: Context,
    operand: Held,
    shape: tuple[int, ...],
) -> None:
    """Raises `Unjudged` if the operand is a slice of the whole program that may start
    beyond its bounds, and devices take a part of it, of the shape `shape`. XLA's
    simplifier makes one slice of the two, which starts at the sum of their starts; it
    clamps the first to the size of the part.
    """
    start_by_dim = _starts_of(context.values.nodes[operand.root])
    for place, axis in enumerate(operand.axes):
        if axis is None or shape[place] == operand.shape[place]:
            continue
        start = start_by_dim.get(axis.dim)
        if start is None or start.last == 0:
            continue
        bounds = bounds_of(context.values, start.indices)
        if bounds is None or bounds.low < 0 or bounds.high > start.last:
            raise Unjudged(
                "a part of a slice at an index that may be out of bounds: XLA would take"
                " other elements, so clip it before,"
                f" `jnp.clip(index, 0, {start.last})`"
            )


def _starts_of(node: Node) -> dict[int, _Start]:
    """Where the slices start that a `dynamic-slice` or a `gather` makes, by the
    dimension of its result. Empty for other values.
    """
    if node.instruction is None or node.opcode not in ("dynamic-slice", "gather"):
        return {}
    array, *indices = node.operands
    result_shape = arrays_in(node.instruction.result)[0].shape
    if node.opcode == "dynamic-slice":
        return {
            dim: _Start(index.view.root, array.shape[dim] - result_shape[dim])
            for dim, index in enumerate(indices)
        }
    dropped_dims = {
        *numbers(node.instruction, "collapsed_slice_dims"),
        *numbers(node.instruction, "operand_batching_dims"),
    }
    sliced_dims = [dim for dim in range(len(array.shape)) if dim not in dropped_dims]
    starts = {}
    offset_dims = numbers(node.instruction, "offset_dims")
    for place, dim in zip(offset_dims, sliced_dims, strict=True):
        last_start = array.shape[dim] - result_shape[place]
        starts[place] = _Start(indices[0].view.root, last_start)
    return starts
