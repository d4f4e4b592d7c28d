"""Which dimensions of the operands and results of an operation are one and the same: its factors.

A factor is a dimension that an operation goes through: a product `bsd,dh->bsh` has four, b, s, d and h. Whatever
cuts a factor in one array cuts it in all that have it. The idea is Shardy's.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..by_element import BY_ELEMENT
from .program import Op, Value


# For each array its dimensions' factors; -1 where a dimension is no other's.
Factors = list[tuple[int, ...]]


class Links(NamedTuple):
    """Arrays that share factors: operands and results of an operation.

    **Arguments:**

    - `op`: the operation.
    - `numbers`: of the values.
    - `factors`: one tuple per value.
    """

    op: Op
    numbers: tuple[int, ...]
    factors: tuple[tuple[int, ...], ...]


# These read each element once and write each once, so a fusion swallows them.
ELEMENTWISE = BY_ELEMENT | {"bitcast_convert_type", "random_bits_elementwise", "sharding_constraint"}
# These only say the same elements in another order, or more often, or again.
VIEWS = frozenset(["reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims", "rev", "optimization_barrier"])
# Pieces of an array: what a fusion reads in place.
PIECES = frozenset(["slice", "dynamic_slice", "split"])
REDUCTIONS = frozenset(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin".split()
)


def links_of(op: Op, values: Sequence[Value]) -> Links:
    """The factors of one operation; an operation that is not known has none."""
    ins = [number for number in op.ins if number is not None]
    numbers = (*ins, *op.outs)
    shapes = [values[number].shape for number in numbers]
    rule = _RULES.get(op.name, _alike if op.name in ELEMENTWISE else _none)
    factors = rule(op, shapes[: len(ins)], shapes[len(ins) :]) if len(ins) == len(op.ins) or rule is _alike else None
    if factors is None:
        factors = _same_sizes(op, shapes[: len(ins)], shapes[len(ins) :]) if rule is not _none else _nothing(shapes)
    return Links(op, numbers, tuple(factors))


Shapes = list[tuple[int, ...]]


def _nothing(shapes: Shapes) -> Factors:
    return [(-1,) * len(shape) for shape in shapes]


def _none(op: Op, ins: Shapes, outs: Shapes) -> Factors:
    return _nothing([*ins, *outs])


def _alike(op: Op, ins: Shapes, outs: Shapes) -> Factors:
    rank = len(outs[0])
    return [tuple(range(rank)) if len(shape) == rank else (-1,) * len(shape) for shape in [*ins, *outs]]


def _same_sizes(op: Op, ins: Shapes, outs: Shapes) -> Factors:
    """Arrays of one rank, where a dimension of one size in all is one dimension."""
    rank = len(outs[0])
    sizes = [shape for shape in [*ins, *outs] if len(shape) == rank]
    same = [d if len({shape[d] for shape in sizes}) == 1 else -1 for d in range(rank)]
    return [tuple(same) if len(shape) == rank else (-1,) * len(shape) for shape in [*ins, *outs]]


def _but(axis: Callable[[Op], Sequence[int]]) -> Callable[[Op, Shapes, Shapes], Factors]:
    """Like arrays of one rank, but for some dimensions."""

    def rule(op: Op, ins: Shapes, outs: Shapes) -> Factors:
        rank = len(outs[0])
        left_out = [dim % rank for dim in axis(op)] if rank else []
        same = tuple(-1 if d in left_out else d for d in range(rank))
        return [same if len(shape) == rank else (-1,) * len(shape) for shape in [*ins, *outs]]

    return rule


def _dot(op: Op, ins: Shapes, outs: Shapes) -> Factors:
    (left_sum, right_sum), (left_batch, right_batch) = op.params["dimension_numbers"]
    left, right = [-1] * len(ins[0]), [-1] * len(ins[1])
    fresh = itertools.count()
    for a, b in [*zip(left_batch, right_batch, strict=True), *zip(left_sum, right_sum, strict=True)]:
        left[a] = right[b] = next(fresh)
    out = [left[dim] for dim in left_batch]
    for dims, shape, summed, batch in ((left, ins[0], left_sum, left_batch), (right, ins[1], right_sum, right_batch)):
        for dim in range(len(shape)):
            if dim not in summed and dim not in batch:
                dims[dim] = next(fresh)
                out.append(dims[dim])
    return [tuple(left), tuple(right), tuple(out)]


def _transpose(op: Op, ins: Shapes, outs: Shapes) -> Factors:
    return [tuple(range(len(ins[0]))), tuple(map(int, op.params["permutation"]))]


def _broadcast(op: Op, ins: Shapes, outs: Shapes) -> Factors:
    where = op.params["broadcast_dimensions"]
    out = tuple(range(len(outs[0])))
    own = tuple(int(to) if ins[0][dim] == outs[0][to] else -1 for dim, to in enumerate(where))
    return [own, *[(-1,) * len(shape) for shape in ins[1:]], out]


def _reduce(op: Op, ins: Shapes, outs: Shapes) -> Factors:
    axes = op.params["axes"]
    kept = tuple(dim for dim in range(len(ins[0])) if dim not in axes)
    return [tuple(range(len(ins[0])))] * len(ins) + [kept] * len(outs)


def _squeeze(op: Op, ins: Shapes, outs: Shapes) -> Factors:
    gone = [dim % len(ins[0]) for dim in op.params["dimensions"]]
    return [tuple(range(len(ins[0]))), tuple(dim for dim in range(len(ins[0])) if dim not in gone)]


def _reshape(op: Op, ins: Shapes, outs: Shapes) -> Factors:
    """Dimensions that are split or joined: the leading part of a group is one factor."""
    before, after = ins[0], outs[0]
    own, out = [-1] * len(before), [-1] * len(after)
    a = b = 0
    fresh = itertools.count()
    while a < len(before) and b < len(after):
        first, second = [a], [b]
        left, right = before[a], after[b]
        while left != right:
            if left < right:
                a += 1
                if a == len(before):
                    return _nothing([*ins, *outs])
                first.append(a)
                left *= before[a]
            else:
                b += 1
                if b == len(after):
                    return _nothing([*ins, *outs])
                second.append(b)
                right *= after[b]
        lead = [
            next((dim for dim in dims if shape[dim] > 1), dims[0]) for dims, shape in ((first, before), (second, after))
        ]
        own[lead[0]] = out[lead[1]] = next(fresh)
        a, b = a + 1, b + 1
    return [tuple(own), *[(-1,) * len(shape) for shape in ins[1:]], tuple(out)]


def _gather(op: Op, ins: Shapes, outs: Shapes) -> Factors:
    numbers, sizes = op.params["dimension_numbers"], op.params["slice_sizes"]
    operand, indices, (out,) = [-1] * len(ins[0]), [-1] * len(ins[1]), outs
    result = [-1] * len(out)
    fresh = itertools.count()
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    windows = [dim for dim in range(len(ins[0])) if dim not in gone]
    for dim, to in zip(windows, numbers.offset_dims, strict=True):
        if sizes[dim] == ins[0][dim]:
            operand[dim] = result[to] = next(fresh)
    batch = [dim for dim in range(len(out)) if dim not in numbers.offset_dims]
    for dim, to in zip(range(len(ins[1]) - 1), batch, strict=True):
        indices[dim] = result[to] = next(fresh)
    for dim, index in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        operand[dim] = indices[index]
    return [tuple(operand), tuple(indices), tuple(result)]


def _scatter(op: Op, ins: Shapes, outs: Shapes) -> Factors:
    numbers = op.params["dimension_numbers"]
    operand, indices, updates = [-1] * len(ins[0]), [-1] * len(ins[1]), [-1] * len(ins[2])
    fresh = itertools.count()
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    for dim in range(len(operand)):
        operand[dim] = next(fresh)
    windows = [dim for dim in range(len(ins[0])) if dim not in gone]
    for dim, to in zip(windows, numbers.update_window_dims, strict=True):
        if ins[2][to] == ins[0][dim]:
            updates[to] = operand[dim]
    batch = [dim for dim in range(len(ins[2])) if dim not in numbers.update_window_dims]
    for dim, to in zip(range(len(ins[1]) - 1), batch, strict=True):
        indices[dim] = updates[to] = next(fresh)
    for dim, index in zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True):
        for to, factor in enumerate(updates):
            updates[to] = operand[dim] if factor == indices[index] else factor
        indices[index] = operand[dim]
    return [tuple(operand), tuple(indices), tuple(updates), tuple(operand)]


def _convolution(op: Op, ins: Shapes, outs: Shapes) -> Factors:
    numbers = op.params["dimension_numbers"]
    left, right, out = [-1] * len(ins[0]), [-1] * len(ins[1]), [-1] * len(outs[0])
    left[numbers.lhs_spec[0]] = out[numbers.out_spec[0]] = 0
    right[numbers.rhs_spec[0]] = out[numbers.out_spec[1]] = 1
    if op.params.get("feature_group_count", 1) == 1:
        left[numbers.lhs_spec[1]] = right[numbers.rhs_spec[1]] = 2
    return [tuple(left), tuple(right), tuple(out)]


_RULES: dict[str, Callable[[Op, Shapes, Shapes], Factors]] = {
    "dot_general": _dot,
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "squeeze": _squeeze,
    "reshape": _reshape,
    "gather": _gather,
    "conv_general_dilated": _convolution,
    **dict.fromkeys(("rev", "optimization_barrier"), _alike),
    **dict.fromkeys(REDUCTIONS, _reduce),
    **dict.fromkeys(("scatter", "scatter-add", "scatter_add", "scatter_mul", "scatter_min", "scatter_max"), _scatter),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _but(lambda op: (op.params["axis"],))),
    **dict.fromkeys(("concatenate", "sort"), _but(lambda op: (op.params["dimension"],))),
    "split": _but(lambda op: (op.params["axis"],)),
    "top_k": _but(lambda op: (-1,)),
    **dict.fromkeys(("slice", "dynamic_slice", "dynamic_update_slice", "pad"), _same_sizes),
}
