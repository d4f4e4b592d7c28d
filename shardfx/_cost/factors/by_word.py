"""What the body of a `shard_map` sends by its own word."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .rule import Kind, Loops, Rule, Sends, Shape, elementwise


def psum(params: Mapping[str, Any], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    return elementwise(given, made, sends=Sends("all-reduce", _named(params["axes"])))


def collective(kind: str, dims: Sequence[str]) -> Callable[..., Rule]:
    def family(params: Mapping[str, Any], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
        loops = Loops()
        share, changed = 1.0, [params[dim] for dim in dims]
        if kind == "collective-permute":
            moving = [pair for pair in params["perm"] if pair[0] != pair[1]]
            share = len(moving)
        if not changed or len(given[0]) != len(made[0]):
            same = given[0] == made[0]
            operand = loops.dims(given[0], "pass" if same else "whole")
            result = operand if same else loops.dims(made[0], "whole")
        else:
            kinds: list[Kind] = ["whole" if at in changed else "pass" for at in range(len(given[0]))]
            operand = [loops.new(size, own) for size, own in zip(given[0], kinds, strict=True)]
            result = [
                dim if own == "pass" else loops.new(size, "whole")
                for dim, own, size in zip(operand, kinds, made[0], strict=True)
            ]
        more = [loops.dims(shape, "whole") for shape in given[1:]]
        return loops.rule(
            [operand, *more][: len(given)],
            [result] * len(made),
            sends=Sends(kind, _named(params["axis_name"]), float(share)),
        )

    return family


def _named(axes: Any) -> tuple[str, ...]:
    return tuple(axis for axis in (axes if isinstance(axes, tuple | list) else (axes,)) if isinstance(axis, str))
