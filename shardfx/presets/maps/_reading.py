"""The expressions that read arrays of the source, and the sizes of axes in both
layouts.
"""

import dataclasses
import math
import re
from collections.abc import Mapping

from ..._convert import From, sum_of
from ..._ground.errors import MapError
from ._entries import Counted, Fused, Range, Scaled, Weight, weights_of


# Named axes, such as `("heads", "dim")`.
Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of axes in the source and target layouts, by axis.

    `apart` has the parts of each axis that one of the layouts splits, such as
    `{"dim": ("two", "half")}`.
    """

    source: Mapping[str, int]
    target: Mapping[str, int]
    apart: Mapping[str, Axes]

    def in_target(self, axis: str, why: str) -> int:
        """Returns the size of an axis in the target, or in the source if the target's
        is unknown.

        Raises `MapError` if both are unknown. The error's text begins with `why`.
        """
        size = self.target.get(axis, self.source.get(axis))
        if size is None:
            raise MapError(
                f"{why} needs the size of the axis `{axis}`; say it:"
                f" `layout.with_sizes({axis}=...)`."
            )
        return size

    def in_source(self, axis: str, why: str) -> int:
        """Returns the size of an axis in the source, or in the target if the source's
        is unknown.

        Raises `MapError` if both are unknown. The error's text begins with `why`.
        """
        if axis in self.source:
            return self.source[axis]
        return self.in_target(axis, why)

    def resized(self, axis: str) -> int | None:
        """Returns an axis's size in the target if the source has another size; `None`
        if not, or if one is unknown.
        """
        source_size = self.source.get(axis)
        target_size = self.target.get(axis)
        if source_size is None or source_size == target_size:
            return None
        return target_size


def array_counts(source: Weight, want: Weight, sizes: Sizes) -> dict[str, int | None]:
    """Returns for each axis in the source's path, such as `layers` in
    `layers.{layers}.weight`, the number of arrays along it that are read; `None` if it
    is not known.
    """
    counts = {axis: sizes.source.get(axis) for axis in source.in_path}
    span = want.range
    if span is not None and span.axis in source.in_path:
        counts[span.axis] = span.entries(counts[span.axis])
    return counts


def read(source: Weight, want: Weight, sizes: Sizes) -> From:
    """Returns the expression that reads the array `source`.

    If the array `want` of the target has a range of an axis in the source's path, only
    the arrays of that range are read.
    """
    entry = source.entry
    span = want.range
    if span is not None and span.axis not in source.in_path:
        span = None
    path = source.path if span is None else _path_of(source.path, span)
    expression = From(path)
    if isinstance(entry, Scaled):
        scales = entry.by if span is None else _path_of(entry.by, span)
        return expression.scale(scales, block=entry.block).cast(entry.dtype)
    if isinstance(entry, Counted):
        if entry.plus:
            expression = expression.plus(-entry.plus)
        if entry.times != 1:
            expression = expression.times(1 / entry.times)
    if isinstance(entry, Fused):
        return _part_of_fused(expression, source, entry, sizes)
    return expression


def _path_of(path: str, span: Range) -> str:
    """Returns the path of the arrays that a range of an axis selects. The axis is in
    braces in `path`.

    For `layers.{layers}.w` and `[3:]`: `layers.{layers+3}.w`. For the range of the one
    entry 3: `layers.3.w`.
    """

    def shifted(braces: re.Match[str]) -> str:
        """The braces with `start + step * axis` in the place of the axis."""
        # A constant, and pairs of a factor and the name of an axis.
        number = sum_of(braces[1])
        factor = sum(count for count, name in number.terms if name == span.axis)
        if not factor or (span.start, span.step) == (0, 1):
            return braces[0]
        terms = []
        for count, name in number.terms:
            # For one entry the step is 0: the axis is no longer in the path.
            if name == span.axis:
                count *= span.step
            if count == 1:
                terms.append(name)
            elif count:
                terms.append(f"{count}*{name}")
        constant = number.constant + factor * span.start
        if not terms:
            return str(constant)
        if constant:
            terms.append(str(constant))
        return "{" + "+".join(terms) + "}"

    return re.sub(r"\{([^{}]*)\}", shifted, path)


def _part_of_fused(whole: From, source: Weight, entry: Fused, sizes: Sizes) -> From:
    """Returns the expression that extracts one kind of weight from an array of several,
    such as "key" from query, key and value in one.

    `whole` is the expression for the whole array. `source` is the kind to extract, and
    `source.number` its place among the kinds. Along `entry.dim` the array has a part of
    each kind, and this `entry.shards` times.
    """
    dim = entry.dim
    shards = entry.shards
    parts = weights_of(source.path, entry)
    if len({part.dims[dim] for part in parts}) == 1:
        # All parts have one size, so the array need not know it.
        if shards == 1:
            return whole.split(dim, len(parts), -1).at(source.number, dim=dim)
        by_part = whole.split(dim, shards, len(parts), -1)
        return by_part.at(source.number, dim=dim + 1).merge(dim)

    why = f"a part of `{source.path}`"
    lengths = []
    for part in parts:
        axis_sizes = [sizes.in_source(axis, why) for axis in part.dims[dim]]
        lengths.append(math.prod(axis_sizes) // shards)
    start = sum(lengths[: source.number])
    stop = start + lengths[source.number]
    if shards == 1:
        return whole.slice(start, stop, dim=dim)
    by_shard = whole.split(dim, shards, -1)
    return by_shard.slice(start, stop, dim=dim + 1).merge(dim)
