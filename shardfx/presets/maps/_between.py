"""Makes the rules of a map from one layout to another by comparing the names of their
axes.

The rule for an array of the target is an expression (`From`) of those arrays of the
source that hold the same kind of weight, such as "query".
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

from ..._convert import From, sum_of
from ..._ground.errors import MapError
from ..._ground.text import together
from ..._rules import near
from ._entries import Counted, Entry, Fused, Range, Scaled, Weight, weights_of


# Named axes, such as `("heads", "dim")`.
Axes = tuple[str, ...]
# Where the source lacks the kind: with tied weights, the output weights are the
# embedding.
_ALSO = {"head": "embedding"}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of axes in the source and target layouts, by axis.

    `apart` has the parts of each axis that one of the layouts splits, such as
    `{"dim": ("two", "half")}`.
    """

    source: Mapping[str, int]
    target: Mapping[str, int]
    apart: Mapping[str, Axes]

    def of(self, axis: str, why: str) -> int:
        """Returns the size of an axis in the target, or in the source if the target's
        is unknown.

        Raises `MapError` if both are unknown. The error's text begins with `why`.
        """
        found = self.target.get(axis, self.source.get(axis))
        if found is None:
            raise MapError(
                f"{why} needs the size of the axis `{axis}`; say it:"
                f" `layout.with_sizes({axis}=...)`."
            )
        return found

    def before(self, axis: str, why: str) -> int:
        """Returns the size of an axis in the source, or in the target if the source's
        is unknown.

        Raises `MapError` if both are unknown. The error's text begins with `why`.
        """
        return self.source[axis] if axis in self.source else self.of(axis, why)

    def resized(self, axis: str) -> int | None:
        """Returns an axis's size in the target if the source has another size; `None`
        if not, or if one is unknown.
        """
        one, two = self.source.get(axis), self.target.get(axis)
        return two if one is not None and two is not None and one != two else None


def between(
    places: Sequence[Weight],
    target: Sequence[tuple[str, Entry]],
    sizes: Sizes,
    drop: Sequence[str],
) -> dict[str, From]:
    """Returns the rules of a map, by the paths of the target.

    `places` are the arrays of the source, and `target` has the paths and entries of the
    target. `drop` has the kinds of weights that only the source has. Raises `MapError`
    if any other kind is in one of the layouts only.
    """
    kinds = together(places, lambda place: place.kind)
    rows = {path: weights_of(path, entry) for path, entry in target}
    _check_kinds(kinds, [place.kind for row in rows.values() for place in row], drop)
    rules = {}
    for path, entry in target:
        parts = [
            _made(kinds.get(place.kind) or kinds[_ALSO[place.kind]], place, sizes)
            for place in rows[path]
        ]
        if isinstance(entry, Scaled):
            raise MapError(
                f"`{path}` is stored in blocks with scales, which a map cannot find;"
                f" write it as {entry.dtype}: with `{{**config, 'quantization_config':"
                " None}`, or `entry.part` in the place of a `Scaled` of your own."
            )
        rules[path] = (
            From.concat(parts, dim=entry.dim, shards=entry.shards)
            if isinstance(entry, Fused)
            else parts[0]
        )
    return rules


def _check_kinds(
    kinds: Mapping[str, list[Weight]], wanted: Sequence[str], drop: Sequence[str]
) -> None:
    lines = []
    for kind in dict.fromkeys(wanted):
        if kind not in kinds and _ALSO.get(kind) not in kinds:
            lines.append(f"the source has no `{kind}`{near(kind, list(kinds))}")
    for kind, places in kinds.items():
        if kind not in wanted and kind not in drop:
            hint = f"{near(kind, wanted)}; without it: `drop=[{kind!r}]`"
            lines.append(f"the target has no `{kind}` ({places[0].path}){hint}")
    for kind in drop:
        if kind not in kinds:
            lines.append(
                f"`drop` has `{kind}`, which the source has"
                f" not{near(kind, list(kinds))}"
            )
    if lines:
        raise MapError(
            "the layouts have different kinds of weights:\n  " + "\n  ".join(lines)
        )


def _made(sources: Sequence[Weight], want: Weight, sizes: Sizes) -> From:
    """Returns the expression for the array `want` of the target. `sources` are the
    source's arrays that hold the same kind of weight.
    """
    if len(sources) == 1 and sources[0].range is None:
        return _converted(sources[0], want, sizes)
    exact = [
        one for one in sources if one.range is not None and one.range == want.range
    ]
    if exact:
        return _converted(
            exact[0]._replace(range=None), want._replace(range=None), sizes
        )
    axes = {one.range.axis if one.range is not None else None for one in sources}
    if len(axes) != 1 or None in axes:
        paths = ", ".join(one.path for one in sources)
        raise MapError(
            f"`{want.path}`: the source has `{want.kind}` in {paths}; give each a range"
            " of the same axis."
        )
    (axis,) = axes
    assert axis is not None
    whole = want._replace(range=None)
    if axis in want.in_path:
        whole = whole._replace(
            dims=((axis,), *want.dims),
            in_path=tuple(n for n in want.in_path if n != axis),
        )
    is_entry = (
        want.range is not None and want.range.axis == axis and not want.range.step
    )
    if is_entry:
        whole = whole._replace(dims=((axis,), *want.dims))
    if (axis,) not in whole.dims:
        raise MapError(
            f"`{want.path}`: `{axis}` comes in parts, and must be a dimension of its"
            " own, or in the path."
        )
    dim = whole.dims.index((axis,))
    parts = []
    for one, span in ((one, one.range) for one in sources if one.range is not None):
        dims = tuple(group for group in whole.dims if span.step or group != (axis,))
        parts.append(
            (
                span,
                _converted(one._replace(range=None), whole._replace(dims=dims), sizes),
            )
        )
    made = _concatenated(parts, dim, want)
    if axis in want.in_path:
        made = made.at(axis)
    if want.range is None:
        return made
    return _sliced(
        made, want.range, dim if is_entry else want.dims.index((want.range.axis,))
    )


def _concatenated(parts: Sequence[tuple[Range, From]], dim: int, want: Weight) -> From:
    """Returns the expression that joins arrays along dimension `dim`, each of which has
    a range of one axis. The ranges `[:3]` and `[3:]` are concatenated; `[0::2]` and
    `[1::2]` are interleaved.

    `parts` has the range and the expression of each array. Raises `MapError`, which
    names the array `want` of the target, if a range is missing between interleaved
    ones.
    """
    groups: dict[tuple[int, int | None, int], list[tuple[int, From]]] = {}
    for span, made in sorted(parts, key=lambda part: part[0].start):
        # Arrays to be interleaved have consecutive starts, and the same stop and step.
        first = span.start - span.start % span.step if span.step > 1 else span.start
        groups.setdefault(
            (first, span.stop if span.step > 1 else None, span.step), []
        ).append((span.start, made))
    rows = []
    for (first, _, step), own in groups.items():
        if step > 1 and [start for start, _ in own] != list(range(first, first + step)):
            starts = ", ".join(str(start) for start, _ in own)
            raise MapError(
                f"`{want.path}`: of every {step} `{want.kind}` the source has those"
                f" from {starts}, not all."
            )
        turns = [made for _, made in own]
        if step > 1:
            rows.append(From.stacked(turns, dim=dim + 1).merge(dim))
        else:
            rows.append(turns[0] if step else From.stacked(turns, dim=dim))
    return rows[0] if len(rows) == 1 else From.concat(rows, dim=dim)


def _sliced(made: From, span: Range, dim: int) -> From:
    """Returns the expression for the entries `span` of dimension `dim`, from the
    expression `made` for the whole array.
    """
    if not span.step:
        return made.at(span.start, dim=dim)
    if span.step == 1:
        return made.slice(span.start, span.stop, dim=dim)
    first = span.start - span.start % span.step
    whole = (
        made
        if span.stop is None and not first
        else made.slice(first, span.stop, dim=dim)
    )
    return whole.split(dim, -1, span.step).at(span.start - first, dim=dim + 1)


def _split_axes(place: Weight, other: Weight, apart: Mapping[str, Axes]) -> Weight:
    """Returns the array `place` with its axes split as in `apart`, such as "dim" into
    "two" and "half".

    An axis is split only if the array `other` has all its parts.
    """
    split = {
        axis: parts for axis, parts in apart.items() if set(parts) <= {*other.axes}
    }
    dims = [
        tuple(one for axis in group for one in split.get(axis, (axis,)))
        for group in place.dims
    ]
    return place._replace(dims=tuple(dims))


def _converted(source: Weight, want: Weight, sizes: Sizes) -> From:
    """Returns the expression that makes the array `want` of the target from the one
    array `source`.

    It splits each dimension of `source` into its axes, such as `(heads dim)` into
    `heads` and `dim`, unless the same axes form one dimension of `want` too. Then it
    puts the axes into the order of `want` and joins them.
    """
    source, want = (
        _split_axes(source, want, sizes.apart),
        _split_axes(want, source, sizes.apart),
    )
    made, counts = _read(source, want, sizes)
    single = want.range if want.range is not None and not want.range.step else None
    in_path = [axis for axis in source.in_path if single is None or axis != single.axis]
    more, less = _unshared_axes(source, want, (*source.axes, *in_path), single)
    groups = [tuple(axis for axis in group if axis not in more) for group in want.dims]
    # A group is split nevertheless if an axis in it changes its size.
    whole = [
        group
        for group in groups
        if group in source.dims and not any(map(sizes.resized, group))
    ]
    order, dims = (
        [one for group in groups for one in _axes_of(group, whole)],
        list[Axes](),
    )
    for group in source.dims:
        if len(group) > 1 and group not in whole:
            rest = [sizes.before(axis, f"`{made}`") for axis in group[1:]]
            made = made.split(len(dims), -1, *rest)
        dims += _axes_of(group, whole)
    # An axis that is in the target's path has an array for each entry, so the index
    # there is its own name.
    taken: dict[str, int | str] = {
        axis: axis for axis in source.axes if axis in want.in_path
    }
    taken |= (
        {single.axis: single.start}
        if single is not None and single.axis in source.axes
        else {}
    )
    for axis, index in (taken | dict.fromkeys(less, 0)).items():
        dim = dims.index((axis,))
        made = (_resized(made, axis, dim, sizes) if index == axis else made).at(
            index, dim=dim
        )
        dims.remove((axis,))
    places = [dims.index(group) for group in order if group in dims]
    if places != sorted(places):
        made = (
            made.T
            if len(places) > 1 and places == sorted(places, reverse=True)
            else made.transpose(*places)
        )
    for dim, group in enumerate(order):
        if (
            group not in dims
        ):  # the arrays of all numbers of an axis in the path become one, with the axis here
            dims.append(group)
            made = made.stack(group[0], dim=dim, count=counts.get(group[0]))
    for dim, group in enumerate(order):
        made = made if group in whole else _resized(made, group[0], dim, sizes)
    if (
        want.range is not None
        and want.range.step
        and want.range.axis not in source.in_path
    ):
        made = _sliced(made, want.range, order.index((want.range.axis,)))
    for dim, group in enumerate([group for group in groups if group]):
        made = (
            made.merge(dim, len(group))
            if len(group) > 1 and group not in whole
            else made
        )
    made, entry = _repeated(made, want, more, sizes), want.entry
    if isinstance(entry, Counted):
        made = made.times(entry.times) if entry.times != 1 else made
        made = made.plus(entry.plus) if entry.plus else made
    return made


def _unshared_axes(
    source: Weight, want: Weight, here: Axes, single: Range | None
) -> tuple[list[str], list[str]]:
    """Returns two lists: the axes that only the array `want` has, along which entries
    are repeated; and the axes that only the array `source` has.

    `here` has the axes of `source`, also those in its path. `single` is the range of
    `want` if `want` has only one entry of an axis, such as `layers[3]`; this axis is in
    neither list. Raises `MapError` if both lists would have axes, or if one array's
    path has an axis that the other array lacks.
    """
    there = (*want.axes, *want.in_path)
    more = [axis for axis in want.axes if axis not in here]
    less = [
        axis
        for axis in here
        if axis not in there and (single is None or axis != single.axis)
    ]
    if less and more or any(axis in want.in_path for axis in there if axis not in here):
        raise MapError(
            f"`{want.kind}` has other axes in both layouts: {' '.join(here)} in"
            f" `{source.path}`, {' '.join(there)} in `{want.path}`. Only one of them"
            " may have more, which are repetitions."
        )
    absent = next((axis for axis in less if axis in source.in_path), None)
    if absent is not None:
        raise MapError(
            f"`{source.path}` has `{{{absent}}}`, an axis that the target does not"
            " have."
        )
    return more, less


def _axes_of(group: Axes, whole: Sequence[Axes]) -> list[Axes]:
    """Returns the dimensions for a `group` of axes: one for the whole group if it is in
    `whole`, else one per axis.
    """
    return [group] if group in whole else [(axis,) for axis in group]


def _resized(made: From, axis: str, dim: int, sizes: Sizes) -> From:
    """Returns the expression `made` with dimension `dim` truncated, or padded with
    zeros at its end, to the target's size of `axis`.
    """
    size = sizes.resized(axis)
    if size is None:
        return made
    return (
        made.pad_to(size, dim=dim)
        if size > sizes.source[axis]
        else made.slice(0, size, dim=dim)
    )


def _repeated(made: From, want: Weight, more: Sequence[str], sizes: Sizes) -> From:
    """Returns the expression `made` with entries repeated along the axes `more`, which
    only the array `want` has.
    """
    is_number = all(axis in more for axis in want.axes)
    if is_number and want.dims:
        made = made.reshape(*[1] * len(want.dims))
    for dim, group in enumerate(want.dims):
        if not is_number and all(axis in more for axis in group):
            rank = len(want.dims)
            made = (
                made.split(dim, 1, -1) if dim < rank - 1 else made.split(dim - 1, -1, 1)
            )
        for at in reversed(range(len(group))):
            if group[at] in more:
                unit = math.prod(
                    sizes.of(axis, f"`{want.path}`") for axis in group[at + 1 :]
                )
                made = made.repeat(
                    sizes.of(group[at], f"`{want.path}`"), dim=dim, unit=unit
                )
    return made


def _read(
    source: Weight, want: Weight, sizes: Sizes
) -> tuple[From, dict[str, int | None]]:
    """Returns the expression that reads the array `source`, and a dict from each axis
    in its path, such as `layers` in `layers.{layers}.weight`, to the number of arrays
    along it; `None` if it is not known.

    If the array `want` of the target has a range of such an axis, only the arrays of
    that range are read.
    """
    path, counts = (
        source.path,
        {axis: sizes.source.get(axis) for axis in source.in_path},
    )
    by = source.entry.by if isinstance(source.entry, Scaled) else ""
    if want.range is not None and want.range.axis in source.in_path:
        path, by = _path_of(path, want.range), _path_of(by, want.range)
        counts[want.range.axis] = want.range.entries(counts[want.range.axis])
    made = From(path)
    if isinstance(source.entry, Scaled):
        return made.scale(by, block=source.entry.block).cast(source.entry.dtype), counts
    if isinstance(source.entry, Counted):
        made = made.plus(-source.entry.plus) if source.entry.plus else made
        made = made.times(1 / source.entry.times) if source.entry.times != 1 else made
    return (
        _one_of(made, source, sizes) if isinstance(source.entry, Fused) else made
    ), counts


def _path_of(path: str, span: Range) -> str:
    """Returns the path of the arrays that a range of an axis selects. The axis is in
    braces in `path`.

    For `layers.{layers}.w` and `[3:]`: `layers.{layers+3}.w`. For the range of the one
    entry 3: `layers.3.w`.
    """

    def shifted(braces: re.Match[str]) -> str:
        one = sum_of(braces[1])
        factor = sum(count for count, name in one.terms if name == span.axis)
        if not factor or (span.start, span.step) == (0, 1):
            return braces[0]
        scaled = [
            (count * span.step if name == span.axis else count, name)
            for count, name in one.terms
        ]
        terms = [
            name if count == 1 else f"{count}*{name}" for count, name in scaled if count
        ]
        rest = one.rest + factor * span.start
        return (
            "{" + "+".join([*terms, *([str(rest)] if rest else [])]) + "}"
            if terms
            else str(rest)
        )

    return re.sub(r"\{([^{}]*)\}", shifted, path)


def _one_of(made: From, source: Weight, sizes: Sizes) -> From:
    """Returns the expression that extracts one kind of weight from an array of several,
    such as "key" from query, key and value in one.

    `made` is the expression for the whole array. `source` is the kind to extract.
    """
    entry = source.entry
    assert isinstance(entry, Fused)
    parts, dim, shards = weights_of(source.path, entry), entry.dim, entry.shards
    if len({part.dims[dim] for part in parts}) == 1:
        halves = made.split(dim, *([shards] if shards != 1 else []), len(parts), -1)
        one = halves.at(source.number, dim=dim + (shards != 1))
        return one.merge(dim) if shards != 1 else one
    long = [
        math.prod(
            sizes.before(axis, f"a part of `{source.path}`") for axis in part.dims[dim]
        )
        // shards
        for part in parts
    ]
    start = sum(long[: source.number])
    if shards == 1:
        return made.slice(start, start + long[source.number], dim=dim)
    apart = made.split(dim, shards, -1).slice(
        start, start + long[source.number], dim=dim + 1
    )
    return apart.merge(dim)
