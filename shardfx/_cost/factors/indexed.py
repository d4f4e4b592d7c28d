"""Rows that are looked up by number, and values that are put or added where numbers say."""

from collections.abc import Mapping, Sequence
from typing import Any

from .rule import Dim, Kind, Loops, Rule, Shape


# What becomes of values that are put in one place.
_SCATTERS: Mapping[str, Kind] = {"scatter-add": "sum", "scatter_add": "sum", "scatter": "whole"}


def gather(params: Mapping[str, Any], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    loops, (table, places) = Loops(), given[:2]
    indices = [*loops.dims(places[:-1]), loops.new(places[-1], "whole")]
    paired = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    operand: list[Dim] = []
    for at, (size, part) in enumerate(zip(table, sizes, strict=True)):
        if at in paired:
            operand.append(indices[paired[at]])
        elif at in numbers.collapsed_slice_dims:
            operand.append(loops.new(size, "sum"))  # who does not hold a row adds zero
        else:
            operand.append(loops.new(size, "pass" if size == part else "whole"))
    window = [at for at in range(len(table)) if at not in numbers.collapsed_slice_dims and at not in paired]
    inner = iter([operand[at] if table[at] == sizes[at] else loops.new(sizes[at], "whole") for at in window])
    outer = iter(indices[:-1])
    result = [next(inner) if at in numbers.offset_dims else next(outer) for at in range(len(made[0]))]
    return loops.rule([operand, indices], [result])


def scatter(name: str, params: Mapping[str, Any], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    numbers = params["dimension_numbers"]
    kind = _SCATTERS.get(name, "join")
    loops, (whole, places, updates) = Loops(), given[:3]
    paired = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
    indices = [loops.new(size, "pass" if at in paired.values() else kind) for at, size in enumerate(places[:-1])]
    window = iter(numbers.update_window_dims)
    operand: list[Dim] = []
    windows: dict[int, Dim] = {}
    for at, size in enumerate(whole):
        if at in paired:
            operand.append(indices[paired[at]])
        elif at in numbers.inserted_window_dims:
            operand.append(loops.new(size))  # each device keeps the rows that are its own
        else:
            place = next(window)
            fits = updates[place] == size
            operand.append(loops.new(size, "pass" if fits else "whole"))
            windows[place] = operand[-1] if fits else loops.new(updates[place], "whole")
    outer = iter(indices)
    update = [windows[at] if at in windows else next(outer) for at in range(len(updates))]
    return loops.rule([operand, [*indices, loops.new(places[-1], "whole")], update], [operand])
