"""Operations along some dimensions: reductions, sums so far, sorts, windows, and matrices as a whole."""

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
    """Along dimensions with windows of one element each device works alone; along others all is needed."""
    sizes = params["window_dimensions"]
    return along([at for at, size in enumerate(sizes) if size > 1], given, made)
