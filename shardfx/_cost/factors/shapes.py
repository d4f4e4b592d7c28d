"""Operations that change what an array looks like, and little else."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .rule import Dim, Loops, Rule, Shape, opaque, shifted


def broadcast(params: Mapping[str, Any], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    loops, where = Loops(), params["broadcast_dimensions"]
    dims = loops.dims(made[0])
    shape = given[0] if given else ()
    operand = [dims[to] if made[0][to] == size else loops.new(size) for to, size in zip(where, shape, strict=True)]
    more = [loops.dims(one) for one in given[1:]]
    is_simple = len(shape) == len(made[0])
    return loops.rule([operand, *more][: len(given)], [dims], moves=True, is_linear=True, is_simple=is_simple)


def transpose(params: Mapping[str, Any], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    loops = Loops()
    dims = loops.dims(given[0])
    result = [dims[at] for at in params["permutation"]]
    return loops.rule([dims], [result], moves=True, is_linear=True, is_simple=True)


def squeeze(params: Mapping[str, Any], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    loops, rank = Loops(), len(given[0])
    dims = loops.dims(given[0])
    gone = [at % rank for at in params["dimensions"]]
    kept = [dim for at, dim in enumerate(dims) if at not in gone]
    return loops.rule([dims], [kept], moves=True, is_linear=True, is_simple=True)


def expand_dims(params: Mapping[str, Any], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    loops, rank = Loops(), len(made[0])
    dims = loops.dims(made[0])
    new = [at % rank for at in params["dimensions"]]
    kept = [dim for at, dim in enumerate(dims) if at not in new]
    return loops.rule([kept], [dims], moves=True, is_linear=True, is_simple=True)


def reshaped(source: Shape, target: Shape) -> tuple[list[int], list[Dim], list[Dim]]:
    """The common factors of two shapes of one size: their sizes, and those of each dimension on both sides."""
    sizes: list[int] = []
    sides: tuple[list[Dim], list[Dim]] = ([() for _ in source], [() for _ in target])
    shapes = (list(source), list(target))
    at, left = [0, 0], [1, 1]  # the dimension of each side, and what of it has no factor yet

    def step(side: int) -> bool:
        while left[side] == 1 and at[side] < len(shapes[side]):
            left[side] = shapes[side][at[side]]
            at[side] += 1
        return left[side] > 1

    while step(0) and step(1):
        size = min(left)
        if max(left) % size:  # 6 and 4: from here on no factor is common
            break
        sizes.append(size)
        for side in (0, 1):
            sides[side][at[side] - 1] += (len(sizes) - 1,)
            left[side] //= size
    return sizes, *sides


def reshape(params: Mapping[str, Any], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    if params.get("dimensions") is not None:
        return opaque(given, made, "a reshape in another order of dimensions counts as if all of it were needed.")
    loops = Loops()
    sizes, source, target = reshaped(given[0], made[0])
    loops.dims(sizes)
    operands = [_filled(loops, shape, dims) for shape, dims in ((given[0], source), (made[0], target))]
    more = [loops.dims(shape) for shape in given[1:]]
    return loops.rule([operands[0], *more], [operands[1]], moves=True, is_linear=True, is_simple=True)


def _filled(loops: Loops, shape: Shape, dims: Sequence[Dim]) -> list[Dim]:
    """The factors of each dimension, with one more where those found do not make up its size."""
    found = []
    for size, dim in zip(shape, dims, strict=True):
        rest = size // math.prod(loops.sizes[at] for at in dim) if size else 1
        found.append((*dim, *loops.new(rest, "whole")) if rest > 1 else dim)
    return found


def concatenate(params: Mapping[str, Any], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    return shifted(params["dimension"], given, made)


def split(params: Mapping[str, Any], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    return shifted(params["axis"], given, made, is_linear=True)


def piece(params: Mapping[str, Any], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    """A part of an array, in a place that is known before it runs."""
    loops = Loops()
    dims = [
        loops.new(size) if size == part else loops.new(math.gcd(size, part), "shift")
        for size, part in zip(given[0], made[0], strict=True)
    ]
    return loops.rule([dims], [dims], moves=True, is_linear=True)


def cut(params: Mapping[str, Any], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    """A part of the first operand; more operands say where."""
    loops = Loops()
    pairs = list(zip(given[0], made[0], strict=True))
    dims = [loops.new(size, "pass" if size == part else "whole") for size, part in pairs]
    result = [dim if size == part else loops.new(part, "whole") for dim, (size, part) in zip(dims, pairs, strict=True)]
    return loops.rule([dims, *[loops.dims(s) for s in given[1:]]], [result], moves=True, is_linear=True)


def put(params: Mapping[str, Any], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    """The second operand in the place of a part of the first."""
    loops, (whole, part) = Loops(), given[:2]
    dims = [loops.new(size, "pass" if size == own else "whole") for size, own in zip(whole, part, strict=True)]
    update = [dim if size == own else loops.new(own, "whole") for dim, size, own in zip(dims, whole, part, strict=True)]
    return loops.rule([dims, update, *[loops.dims(s) for s in given[2:]]], [dims])


def pad(params: Mapping[str, Any], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    loops = Loops()
    dims = [
        loops.new(math.gcd(size, full), "shift" if low or high or inside else "pass")
        for size, (low, high, inside), full in zip(given[0], params["padding_config"], made[0], strict=True)
    ]
    return loops.rule([dims, *[loops.dims(s) for s in given[1:]]], [dims], is_linear=True)


def bitcast(params: Mapping[str, Any], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    loops, shared = Loops(), min(len(given[0]), len(made[0]))
    dims = loops.dims(given[0][:shared])
    more = [[*dims, *loops.dims(shape[shared:], "whole")] for shape in (given[0], made[0])]
    return loops.rule(more[:1], more[1:], is_simple=True)
