"""Makes the rules of a map from one layout to another by comparing the names of their
axes.

The rule for an array of the target is an expression (`From`) of those arrays of the
source that hold the same kind of weight, such as "query".
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..._convert import From
from ..._ground.errors import MapError
from ..._ground.text import together
from ..._rules import near
from ._conversion import converted, sliced
from ._entries import Entry, Fused, Range, Scaled, Weight, weights_of
from ._reading import Sizes


# The kind of the source from which a kind is made that the source lacks: with tied
# weights, the output weights are the embedding.
_KIND_IF_ABSENT = {"head": "embedding"}


def between(
    source_weights: Sequence[Weight],
    target: Sequence[tuple[str, Entry]],
    sizes: Sizes,
    drop: Sequence[str],
) -> dict[str, From]:
    """Returns the rules of a map, by the paths of the target.

    `source_weights` are the arrays of the source, and `target` has the paths and
    entries of the target. `sizes` has the sizes of the axes of both layouts. `drop` has
    the kinds of weights that only the source has. Raises `MapError` if any other kind
    is in one of the layouts only.
    """
    # The kind of a weight is its use, such as "query".
    weights_by_kind = together(source_weights, lambda weight: weight.kind)
    target_weights_by_path = {path: weights_of(path, entry) for path, entry in target}
    target_kinds: list[str] = []
    for weights in target_weights_by_path.values():
        target_kinds += [weight.kind for weight in weights]
    _check_kinds(weights_by_kind, target_kinds, drop)
    rules = {}
    for path, entry in target:
        parts = []
        for weight in target_weights_by_path[path]:
            _check_splits(weight, sizes)
            sources = weights_by_kind.get(weight.kind)
            if not sources:
                sources = weights_by_kind[_KIND_IF_ABSENT[weight.kind]]
            parts.append(_expression(sources, weight, sizes))
        if isinstance(entry, Scaled):
            raise MapError(
                f"`{path}` is stored in blocks with scales, which a map cannot find;"
                f" write it as {entry.dtype}: with `{{**config, 'quantization_config':"
                " None}`, or `entry.part` in the place of a `Scaled` of your own."
            )
        rules[path] = parts[0]
        if isinstance(entry, Fused):
            rules[path] = From.concat(parts, dim=entry.dim, shards=entry.shards)
    return rules


def _check_kinds(
    weights_by_kind: Mapping[str, list[Weight]],
    target_kinds: Sequence[str],
    drop: Sequence[str],
) -> None:
    """Raises `MapError` with all kinds of weights that only one layout has, except
    those in `drop`, which only the source may have. `weights_by_kind` has the source's
    arrays of each kind.
    """
    lines = []
    for kind in dict.fromkeys(target_kinds):
        if (
            kind not in weights_by_kind
            and _KIND_IF_ABSENT.get(kind) not in weights_by_kind
        ):
            lines.append(
                f"the source has no `{kind}`{near(kind, list(weights_by_kind))}"
            )
    for kind, weights in weights_by_kind.items():
        if kind not in target_kinds and kind not in drop:
            hint = f"{near(kind, target_kinds)}; without it: `drop=[{kind!r}]`"
            lines.append(f"the target has no `{kind}` ({weights[0].path}){hint}")
    for kind in drop:
        if kind not in weights_by_kind:
            hint = near(kind, list(weights_by_kind))
            lines.append(f"`drop` has `{kind}`, which the source has not{hint}")
    if lines:
        raise MapError(
            "the layouts have different kinds of weights:\n  " + "\n  ".join(lines)
        )


def _check_splits(want: Weight, sizes: Sizes) -> None:
    """Raises `MapError` if the layouts split one width into axes in two ways, such as 4
    heads of 8 and 2 heads of 16: heads would be cut off, and the others padded.
    """
    source_sizes: list[int] = []
    target_sizes: list[int] = []
    source_texts = []
    target_texts = []
    for axis in want.axes:
        source = sizes.source.get(axis)
        target = sizes.target.get(axis)
        if source is None or target is None or source == target:
            continue
        source_sizes.append(source)
        target_sizes.append(target)
        source_texts.append(f"{axis}={source}")
        target_texts.append(f"{axis}={target}")
    if source_sizes and math.prod(source_sizes) == math.prod(target_sizes):
        source_text = ", ".join(source_texts)
        target_text = ", ".join(target_texts)
        raise MapError(
            f"`{want.path}`: the layouts split one width in two ways, {source_text} and"
            f" {target_text}; make both layouts from one configuration."
        )


def _expression(sources: Sequence[Weight], want: Weight, sizes: Sizes) -> From:
    """Returns the expression for the array `want` of the target. `sources` are the
    source's arrays that hold the same kind of weight. An array may hold only a `range`
    of the entries of an axis, such as `layers[:3]`.
    """
    if len(sources) == 1 and sources[0].range is None:
        return converted(sources[0], want, sizes)
    for source in sources:
        if source.range is not None and source.range == want.range:
            return converted(
                source._replace(range=None), want._replace(range=None), sizes
            )
    return _joined_ranges(sources, want, sizes)


def _joined_ranges(sources: Sequence[Weight], want: Weight, sizes: Sizes) -> From:
    """Returns the expression for the array `want` from arrays that each have a range of
    one axis: they are joined to the whole axis, of which `want` may be a range again.
    """
    axis = _range_axis(sources, want)
    # An array as `want`, but with the whole axis as a dimension of its own.
    whole = want._replace(range=None)
    has_axis_in_path = axis in want.in_path
    if has_axis_in_path:
        in_path = tuple(name for name in want.in_path if name != axis)
        whole = whole._replace(dims=((axis,), *want.dims), in_path=in_path)
    wanted = want.range
    # Whether `want` has only one entry of the axis, such as `layers[3]`.
    is_entry = wanted is not None and wanted.axis == axis and not wanted.step
    if is_entry:
        whole = whole._replace(dims=((axis,), *want.dims))
    if (axis,) not in whole.dims:
        raise MapError(
            f"`{want.path}`: `{axis}` comes in parts, and must be a dimension of its"
            " own, or in the path."
        )

    dim = whole.dims.index((axis,))
    parts = []
    for source in sources:
        span = source.range
        if span is None:
            continue
        # An array of one entry (step 0) has no dimension for the axis.
        dims = tuple(group for group in whole.dims if span.step or group != (axis,))
        expression = converted(
            source._replace(range=None), whole._replace(dims=dims), sizes
        )
        parts.append(_RangePart(span, expression))
    joined = _concatenated(parts, dim, want)
    if has_axis_in_path:
        joined = joined.at(axis)
    if wanted is None:
        return joined
    if not is_entry:
        dim = want.dims.index((wanted.axis,))
    return sliced(joined, wanted, dim)


def _range_axis(sources: Sequence[Weight], want: Weight) -> str:
    """Returns the one axis of which each of `sources` has a range. Raises `MapError` if
    there is no such axis.
    """
    axes: dict[str | None, None] = {}
    for source in sources:
        axis_of_source = None if source.range is None else source.range.axis
        axes[axis_of_source] = None
    axis, *others = axes
    if axis is None or others:
        paths = ", ".join(source.path for source in sources)
        raise MapError(
            f"`{want.path}`: the source has `{want.kind}` in {paths}; give each a range"
            " of the same axis."
        )
    return axis


class _RangePart(NamedTuple):
    """A range of an axis, and the expression of the array that has it."""

    span: Range
    expression: From


class _Interleaved(NamedTuple):
    """What ranges to be interleaved have in common: the entry at which the first one
    starts, the stop, and the step. A range that is not interleaved has its own.
    """

    first: int
    stop: int | None
    step: int


def _interleaved(span: Range) -> _Interleaved:
    """The group of a range. Ranges to be interleaved have consecutive starts, and the
    same stop and step.
    """
    if span.step > 1:
        first = span.start - span.start % span.step
        return _Interleaved(
            first=first,
            stop=span.stop,
            step=span.step,
        )
    return _Interleaved(
        first=span.start,
        stop=None,
        step=span.step,
    )


def _check_coverage(spans: Sequence[Range], want: Weight) -> None:
    """Raises `MapError` unless each of `spans`, the ranges of one axis in ascending
    order of their starts, begins at the entry at which the one before it ends, and the
    first one at 0. Interleaved ranges count as one.
    """
    next_start: int | None = 0
    for group in together(spans, _interleaved).values():
        first = group[0]
        start = _interleaved(first).first
        if start != next_start:
            texts = ", ".join(f"`{span}`" for span in spans)
            raise MapError(
                f"`{want.path}`: the source has `{want.kind}` in the ranges {texts};"
                f" the ranges of `{first.axis}` begin at 0, and each one where the one"
                " before it ends. Correct the ranges in the source's layout."
            )
        next_start = first.stop


def _concatenated(parts: Sequence[_RangePart], dim: int, want: Weight) -> From:
    """Returns the expression that joins arrays along dimension `dim`, each of which has
    a range of one axis. The ranges `[:3]` and `[3:]` are concatenated; `[0::2]` and
    `[1::2]` are interleaved. Raises `MapError`, which names the array `want` of the
    target, if a range is missing, or if two ranges have one entry.
    """
    in_order = sorted(parts, key=lambda part: part.span.start)
    groups = together(in_order, lambda part: _interleaved(part.span))
    _check_coverage([part.span for part in in_order], want)
    pieces = []
    for (first, _, step), members in groups.items():
        expressions = [part.expression for part in members]
        if step > 1:
            starts = [part.span.start for part in members]
            if starts != list(range(first, first + step)):
                raise MapError(
                    f"`{want.path}`: of every {step} `{want.kind}` the source has those"
                    f" from {', '.join(map(str, starts))}, not all."
                )
            pieces.append(From.stacked(expressions, dim=dim + 1).merge(dim))
        elif step == 1:
            pieces.append(expressions[0])
        else:
            # Single entries, `[0]` and `[1]`, are stacked.
            pieces.append(From.stacked(expressions, dim=dim))
    if len(pieces) == 1:
        return pieces[0]
    return From.concat(pieces, dim=dim)
