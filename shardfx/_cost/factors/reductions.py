"""Operations along some dimensions: reductions, sums so far, sorts, windows, and matrices as a whole."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .rule import Dim, Kind, Loops, Rule, Shape, along


def reduced(kind: Kind, axes: Sequence[int], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    loops, shape = Loops(), given[0]
    dims = [loops.new(size, kind if at in axes else "pass") for at, size in enumerate(shape)]
    kept = [dim for at, dim in enumerate(dims) if at not in axes]
    return loops.rule([dims] * len(given), [kept] * len(made), is_linear=kind == "sum")


def sort(params: Mapping[str, Any], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    return along([params["dimension"]], given, made)


def top_k(params: Mapping[str, Any], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    return along([params.get("axis", params.get("reduction_dimension", -1))], given, made)


def rev(params: Mapping[str, Any], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    return along(params["dimensions"], given, made)


def fft(params: Mapping[str, Any], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    return along([-1 - at for at in range(len(params["fft_lengths"]))], given, made)


def matrices(given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    loops = Loops()
    batch = loops.dims(max(given, key=len)[:-2])

    def of(shape: Shape) -> list[Dim]:
        kept = min(len(batch), len(shape))
        return [*batch[:kept], *loops.dims(shape[kept:], "whole")]

    return loops.rule([of(shape) for shape in given], [of(shape) for shape in made])


def windows(params: Mapping[str, Any], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    """Along dimensions with windows each device works alone but for margins, where steps divide the array."""
    loops, steps = Loops(), params["window_strides"]
    wide = max(given, key=math.prod)
    narrow = min((shape for shape in (*given, *made) if len(shape) == len(wide)), key=math.prod)
    lefts: list[Dim] = []
    rights: list[Dim] = []
    margins = []
    plain = (1,) * len(wide)
    dilated = [params.get("base_dilation", plain), params.get("window_dilation", plain)]
    for size, few, window, step, *dilations in zip(
        wide, narrow, params["window_dimensions"], steps, *dilated, strict=True
    ):
        if size == few * step and dilations == [1, 1]:
            place = loops.new(few, "window" if window > 1 else "pass")
            lefts.append(place + loops.new(step, "whole") if step > 1 else place)
            rights.append(place)
            if window > step:
                margins.append((place[0], window - step))
        else:
            lefts.append(loops.new(size, "whole"))
            rights.append(lefts[-1] if size == few else loops.new(few, "whole"))

    def of(shape: Shape) -> list[Dim]:
        if len(shape) != len(wide):
            return loops.dims(shape, "whole")
        return lefts if shape == wide else rights

    return loops.rule(list(map(of, given)), list(map(of, made)), margins=tuple(margins))
