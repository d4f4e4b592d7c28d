"""Products: of matrices, of groups of rows, and convolutions."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .rule import Dim, Loops, Rule, Shape


def dot_general(params: Mapping[str, Any], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    (left_sum, right_sum), (left_batch, right_batch) = params["dimension_numbers"]
    loops, (left, right) = Loops(), given[:2]
    lefts: dict[int, Dim] = {at: loops.new(left[at]) for at in left_batch}
    rights = dict(zip(right_batch, lefts.values(), strict=True))
    batch = [*lefts.values()]
    for at, other in zip(left_sum, right_sum, strict=True):
        lefts[at] = rights[other] = loops.new(left[at], "sum")
    free = [[at for at in range(len(shape)) if at not in own] for shape, own in ((left, lefts), (right, rights))]
    for shape, own, rest in ((left, lefts, free[0]), (right, rights, free[1])):
        own.update({at: loops.new(shape[at]) for at in rest})
    result = [*batch, *[lefts[at] for at in free[0]], *[rights[at] for at in free[1]]]
    flops = 2.0 * math.prod(loops.sizes)
    more = [loops.dims(shape) for shape in given[2:]]
    operands = [[own[at] for at in range(len(shape))] for shape, own in ((left, lefts), (right, rights))]
    return loops.rule([*operands, *more], [result], is_product=True, flops=flops)


def ragged_dot(params: Mapping[str, Any], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    numbers = params.get("ragged_dot_dimension_numbers")
    if numbers is None:  # (m, k) x (g, k, n), groups of rows
        ragged, groups, dots = [0], [0], (([1], [1]), ([], []))
    else:
        ragged, groups = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
        dots = numbers.dot_dimension_numbers
    (left_sum, right_sum), (left_batch, right_batch) = dots
    loops, (left, right, sizes) = Loops(), given[:3]
    lefts: dict[int, Dim] = {at: loops.new(left[at]) for at in left_batch}
    rights = dict(zip(right_batch, lefts.values(), strict=True))
    batch = [*lefts.values()]
    for at, other in zip(left_sum, right_sum, strict=True):
        lefts[at] = rights[other] = loops.new(left[at], "whole" if at in ragged else "sum")
    # Each device would have to know which rows of others belong to its groups.
    group = [loops.new(right[at], "whole") for at in groups]
    rights.update(dict(zip(groups, group, strict=True)))
    for shape, own in ((left, lefts), (right, rights)):
        own.update({at: loops.new(shape[at]) for at in range(len(shape)) if at not in own})
    rows = [lefts[at] for at in range(len(left)) if at not in left_batch and at not in left_sum]
    columns = [
        rights[at] for at in range(len(right)) if at not in right_batch and at not in right_sum and at not in groups
    ]
    # Each row meets one group.
    flops = 2.0 * math.prod(loops.sizes) / math.prod(right[at] for at in groups)
    result = [*batch, *rows, *columns]
    if len(result) < len(made[0]):  # groups in the contraction: one product for each
        result = [*loops.dims(made[0][: len(made[0]) - len(result)], "whole"), *result]
    operands = [[own[at] for at in range(len(shape))] for shape, own in ((left, lefts), (right, rights))]
    return loops.rule(
        [*operands, loops.dims(sizes, "whole"), *[loops.dims(s) for s in given[3:]]],
        [result],
        is_product=True,
        flops=flops,
    )


def conv(params: Mapping[str, Any], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    numbers, groups = params["dimension_numbers"], params["feature_group_count"]
    batches = params["batch_group_count"]
    (batch, feature, *space), (out, inner, *window) = numbers.lhs_spec, numbers.rhs_spec
    loops, (image, kernel), result = Loops(), given[:2], made[0]
    lefts, rights, outs = ({} for _ in range(3))
    group = loops.new(max(groups, batches)) if max(groups, batches) > 1 else ()
    rows, channels = loops.new(result[numbers.out_spec[0]]), loops.new(kernel[inner], "sum")
    columns = loops.new(kernel[out] // max(groups, batches))
    lefts[batch] = group + rows if batches > 1 else rows
    lefts[feature] = group + channels if groups > 1 else channels
    rights[out], rights[inner] = group + columns, channels
    outs[numbers.out_spec[0]], outs[numbers.out_spec[1]] = rows, group + columns
    margins = []
    for number, (at, own, to) in enumerate(zip(space, window, numbers.out_spec[2:], strict=True)):
        if kernel[own] == image[at] > result[to] and params["lhs_dilation"][number] == 1:
            # The gradient of a kernel: both are cut along the image, and what neighbours have is looked at, too.
            lefts[at] = rights[own] = loops.new(image[at], "sum")
            outs[to] = loops.new(result[to], "whole")
            margins.append((lefts[at][0], result[to] - 1))
            continue
        rights[own] = loops.new(kernel[own], "whole")
        stride = image[at] // result[to] if result[to] and not image[at] % result[to] else 0
        if stride == params["window_strides"][number] and params["lhs_dilation"][number] == 1:
            place = loops.new(result[to], "window")
            margins.append((place[0], max(0, (kernel[own] - 1) * params["rhs_dilation"][number] + 1 - stride)))
            lefts[at], outs[to] = (place + loops.new(stride, "whole") if stride > 1 else place), place
        else:
            lefts[at], outs[to] = loops.new(image[at], "whole"), loops.new(result[to], "whole")
    operands = [[own[at] for at in range(len(own))] for own in (lefts, rights)]
    flops = 2.0 * math.prod(result) * math.prod(kernel) / (kernel[out] or 1)
    results = [[outs[at] for at in range(len(outs))]]
    return loops.rule(operands, results, margins=tuple(margins), is_product=True, flops=flops)
