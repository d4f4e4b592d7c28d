"""Makes the rules of a map from one layout to another, by comparing the names of their axes."""

import dataclasses
import difflib
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..._convert import From, sum_of
from ..._ground.errors import MapError
from ..._ground.text import together
from ._places import Counted, Entry, Fused, Place, Range, Scaled, places_of


Paths = tuple[str, ...]
# A kind that replaces one that the source lacks: with tied weights, the output weights are the embedding.
_ALSO = {"head": "embedding"}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of axes in the source and target layouts, and the axes that one of the layouts splits into several."""

    source: Mapping[str, int]
    target: Mapping[str, int]
    apart: Mapping[str, Paths]

    def of(self, axis: str, why: str) -> int:
        """Returns the size of an axis: the target's if known, else the source's; raises if neither is known."""
        found = self.target.get(axis, self.source.get(axis))
        if found is None:
            raise MapError(f"{why} needs the size of the axis `{axis}`; say it: `layout.with_sizes({axis}=...)`.")
        return found

    def before(self, axis: str, why: str) -> int:
        """Returns the size of an axis in the source; the target's if the source's is unknown."""
        return self.source[axis] if axis in self.source else self.of(axis, why)

    def resized(self, axis: str) -> int | None:
        """Returns the target's size of an axis if both sizes are known and differ, else `None`."""
        one, two = self.source.get(axis), self.target.get(axis)
        return two if one is not None and two is not None and one != two else None


def between(
    places: Sequence[Place], target: Sequence[tuple[str, Entry]], sizes: Sizes, drop: Sequence[str]
) -> dict[str, From]:
    """Returns a rule for each array of the target: an expression over the arrays of the source."""
    kinds = together(places, lambda place: place.kind)
    rows = {path: places_of(path, entry) for path, entry in target}
    _check_kinds(kinds, [place.kind for row in rows.values() for place in row], drop)
    rules = {}
    for path, entry in target:
        parts = [_made(kinds.get(place.kind) or kinds[_ALSO[place.kind]], place, sizes) for place in rows[path]]
        if isinstance(entry, Scaled):
            raise MapError(
                f"`{path}` is stored in blocks with scales, which a map cannot find; write it as {entry.dtype}: with "
                "`{**config, 'quantization_config': None}`, or `entry.part` in the place of a `Scaled` of your own."
            )
        rules[path] = From.concat(parts, dim=entry.dim, shards=entry.shards) if isinstance(entry, Fused) else parts[0]
    return rules


def _check_kinds(kinds: Mapping[str, list[Place]], wanted: Sequence[str], drop: Sequence[str]) -> None:
    lines = []
    for kind in dict.fromkeys(wanted):
        if kind not in kinds and _ALSO.get(kind) not in kinds:
            lines.append(f"the source has no `{kind}`{_near(kind, kinds)}")
    for kind, places in kinds.items():
        if kind not in wanted and kind not in drop:
            near = _near(kind, wanted)
            lines.append(f"the target has no `{kind}` ({places[0].path}){near}; without it: `drop=[{kind!r}]`")
    for kind in drop:
        if kind not in kinds:
            lines.append(f"`drop` has `{kind}`, which the source has not{_near(kind, kinds)}")
    if lines:
        raise MapError("the layouts have different kinds of weights:\n  " + "\n  ".join(lines))


def _near(kind: str, kinds: Mapping[str, list[Place]] | Sequence[str]) -> str:
    near = difflib.get_close_matches(kind, kinds, n=2)
    return f"; near {' or '.join(f'`{one}`' for one in near)}" if near else ""


def _made(sources: Sequence[Place], want: Place, sizes: Sizes) -> From:
    """Returns the expression that computes one kind of weight in the target from its arrays in the source."""
    if len(sources) == 1 and sources[0].range is None:
        return _taken(sources[0], want, sizes)
    exact = [one for one in sources if one.range is not None and one.range == want.range]
    if exact:
        return _taken(exact[0]._replace(range=None), want._replace(range=None), sizes)
    axes = {one.range.axis if one.range is not None else None for one in sources}
    if len(axes) != 1 or None in axes:
        paths = ", ".join(one.path for one in sources)
        raise MapError(f"`{want.path}`: the source has `{want.kind}` in {paths}; give each a range of the same axis.")
    (axis,) = axes
    assert axis is not None
    whole = want._replace(range=None)
    if axis in want.in_path:
        whole = whole._replace(dims=((axis,), *want.dims), in_path=tuple(n for n in want.in_path if n != axis))
    is_entry = want.range is not None and want.range.axis == axis and not want.range.step
    if is_entry:
        whole = whole._replace(dims=((axis,), *want.dims))
    if (axis,) not in whole.dims:
        raise MapError(f"`{want.path}`: `{axis}` comes in parts, and must be a dimension of its own, or in the path.")
    dim = whole.dims.index((axis,))
    made = _joined([(one.range, _part_of(one, whole, sizes)) for one in sources if one.range is not None], dim, want)
    if axis in want.in_path:
        made = made.at(axis)
    if want.range is None:
        return made
    return _cut(made, want.range, dim if is_entry else want.dims.index((want.range.axis,)))


def _part_of(one: Place, whole: Place, sizes: Sizes) -> From:
    """Returns the expression for the entries of an axis that one source array holds, shaped like the whole weight in
    the target.
    """
    assert one.range is not None
    if not one.range.step:
        whole = whole._replace(dims=tuple(group for group in whole.dims if group != (one.range.axis,)))
    return _taken(one._replace(range=None), whole, sizes)


def _joined(parts: Sequence[tuple[Range, From]], dim: int, want: Place) -> From:
    """Returns the expression that joins source arrays along an axis: concatenated, or interleaved if they have
    a step.
    """
    groups: dict[tuple[int, int | None, int], list[tuple[int, From]]] = {}
    for span, made in sorted(parts, key=lambda part: part[0].start):
        # Arrays to be interleaved have consecutive starts, and the same stop and step.
        first = span.start - span.start % span.step if span.step > 1 else span.start
        groups.setdefault((first, span.stop if span.step > 1 else None, span.step), []).append((span.start, made))
    rows = []
    for (first, _, step), own in groups.items():
        if step > 1 and [start for start, _ in own] != list(range(first, first + step)):
            starts = ", ".join(str(start) for start, _ in own)
            raise MapError(f"`{want.path}`: of every {step} `{want.kind}` the source has those from {starts}, not all.")
        turns = [made for _, made in own]
        if step > 1:
            rows.append(From.stacked(turns, dim=dim + 1).merge(dim))
        else:
            rows.append(turns[0] if step else From.stacked(turns, dim=dim))
    return rows[0] if len(rows) == 1 else From.concat(rows, dim=dim)


def _cut(made: From, span: Range, dim: int) -> From:
    """Returns an expression for the entries in a range of a dimension."""
    if not span.step:
        return made.at(span.start, dim=dim)
    if span.step == 1:
        return made.slice(span.start, span.stop, dim=dim)
    first = span.start - span.start % span.step
    whole = made if span.stop is None and not first else made.slice(first, span.stop, dim=dim)
    return whole.split(dim, -1, span.step).at(span.start - first, dim=dim + 1)


def _apart(place: Place, other: Place, apart: Mapping[str, Paths]) -> Place:
    """Returns `place` with those of its axes split that the layout of the `other` place splits (`apart` maps an axis to
    its sub-axes).
    """

    def parts(axis: str) -> Paths:
        found = apart.get(axis, (axis,))
        return found if set(found) <= {*other.axes} else (axis,)

    return place._replace(dims=tuple(tuple(one for axis in group for one in parts(axis)) for group in place.dims))


class _Change(NamedTuple):
    """The steps that turn the axes of a source array into the axes of a target array.

    **Arguments:**

    - `more`: the axes that only the target has: its entries are repeated along them.
    - `taken`: the axes that are removed by indexing, in this order, each with its index: a number, or the axis's own
        name if the target has an array for each entry.
    - `stacked`: the axes in the source's path that become dimensions.
    - `groups`: the axes of each dimension of the target, without `more`.
    - `kept`: the groups that are one dimension in both arrays and are not split.
    """

    more: list[str]
    taken: dict[str, int | str]
    stacked: list[str]
    groups: list[Paths]
    kept: list[Paths]

    @property
    def order(self) -> list[Paths]:
        """The dimensions in the target's order, before the axes of a group are merged into one dimension."""
        return [one for group in self.groups for one in ([group] if group in self.kept else [(n,) for n in group])]


def _change(source: Place, want: Place, sizes: Sizes) -> _Change:
    here, there = (*source.axes, *source.in_path), (*want.axes, *want.in_path)
    entry = want.range if want.range is not None and not want.range.step else None
    chosen = {entry.axis: entry.start} if entry is not None and entry.axis in here else {}
    more = [axis for axis in want.axes if axis not in here]
    less = [axis for axis in here if axis not in there and axis not in chosen]
    if less and more or any(axis in want.in_path for axis in there if axis not in here):
        raise MapError(
            f"`{want.kind}` has other axes in both layouts: {' '.join(here)} in `{source.path}`, {' '.join(there)} in "
            f"`{want.path}`. Only one of them may have more, which are repetitions."
        )
    absent = next((axis for axis in less if axis in source.in_path), None)
    if absent is not None:
        raise MapError(f"`{source.path}` has `{{{absent}}}`, an axis that the target does not have.")
    groups = [tuple(axis for axis in group if axis not in more) for group in want.dims]
    # A group that is one dimension in both arrays is not split, unless an axis in it changes its size.
    joined = [group for group in groups if len(group) > 1 and group in source.dims]
    into_path = {axis: axis for axis in source.axes if axis in want.in_path}
    return _Change(
        more=more,
        taken={**into_path, **chosen, **dict.fromkeys(less, 0)},
        stacked=[axis for axis in source.in_path if axis in want.axes],
        groups=groups,
        kept=[group for group in joined if all(sizes.resized(axis) is None for axis in group)],
    )


class _Route:
    """An expression under construction, and the axes of each of its dimensions."""

    def __init__(self, made: From, dims: Sequence[Paths], sizes: Sizes):
        self.made, self.dims, self.sizes = made, list(dims), sizes

    def split(self, kept: Sequence[Paths]) -> None:
        """Splits each dimension of several axes into one dimension per axis, except the groups in `kept`."""
        for group in [group for group in self.dims if len(group) > 1 and group not in kept]:
            dim = self.dims.index(group)
            rest = [self.sizes.before(axis, f"`{self.made}`") for axis in group[1:]]
            self.made = self.made.split(dim, -1, *rest)
            self.dims[dim : dim + 1] = [(axis,) for axis in group]

    def at(self, axis: str, index: int | str) -> None:
        """Takes one entry along an axis. If `index` is the axis's own name, the target has an array for each entry."""
        if index == axis:
            self.resize(axis)
        self.made = self.made.at(index, dim=self.dims.index((axis,)))
        self.dims.remove((axis,))

    def sort(self, order: Sequence[Paths]) -> None:
        """Transposes the dimensions into this order, which may name further dimensions."""
        self.dims, before = [group for group in order if group in self.dims], self.dims
        places = [before.index(group) for group in self.dims]
        if places != sorted(places):
            turned = len(places) > 1 and places == sorted(places, reverse=True)
            self.made = self.made.T if turned else self.made.transpose(*places)

    def stack(self, axis: str, order: Sequence[Paths], count: int | None) -> None:
        """Stacks the arrays for all numbers of an axis in the path into one array, with the axis at its position in
        `order`.
        """
        dim = sum(group in self.dims for group in order[: order.index((axis,))])
        self.made = self.made.stack(axis, dim=dim, count=count)
        self.dims.insert(dim, (axis,))

    def resize(self, axis: str) -> None:
        """Pads an axis with zeros at its end, or truncates it, if the target has another size."""
        before, size, dim = self.sizes.source.get(axis, 0), self.sizes.resized(axis), self.dims.index((axis,))
        if size is not None:
            self.made = self.made.pad_to(size, dim=dim) if size > before else self.made.slice(0, size, dim=dim)

    def merge(self, groups: Sequence[Paths], kept: Sequence[Paths]) -> None:
        """Merges the axes of each group into one dimension, except the groups in `kept`."""
        dim = 0
        for group in groups:
            if len(group) > 1 and group not in kept:
                self.made = self.made.merge(dim, len(group))
            dim += bool(group)


def _taken(source: Place, want: Place, sizes: Sizes) -> From:
    """Returns the expression that turns the weight in one source array into the weight of a target array."""
    source, want = _apart(source, want, sizes.apart), _apart(want, source, sizes.apart)
    made, counts = _opened(source, want, sizes)
    if want.range is not None and not want.range.step:
        source = source._replace(in_path=tuple(axis for axis in source.in_path if axis != want.range.axis))
    change = _change(source, want, sizes)
    way, order = _Route(made, source.dims, sizes), change.order
    way.split(change.kept)
    for axis, index in change.taken.items():
        way.at(axis, index)
    way.sort(order)
    for axis in reversed(change.stacked):
        way.stack(axis, order, counts.get(axis))
    for (axis,) in [group for group in order if len(group) == 1]:
        way.resize(axis)
    if want.range is not None and want.range.step and want.range.axis not in source.in_path:
        way.made = _cut(way.made, want.range, way.dims.index((want.range.axis,)))
    way.merge(change.groups, change.kept)
    return _counted(_repeated(way.made, want, change.more, sizes), want.entry)


def _counted(made: From, entry: Entry) -> From:
    """Returns the expression with the factor and the addend of a `Counted` target applied."""
    if isinstance(entry, Counted):
        made = made.times(entry.times) if entry.times != 1 else made
        made = made.plus(entry.plus) if entry.plus else made
    return made


def _repeated(made: From, want: Place, more: Sequence[str], sizes: Sizes) -> From:
    """Returns the expression with each entry repeated along the axes that only the target has."""
    is_number = all(axis in more for axis in want.axes)
    if is_number and want.dims:
        made = made.reshape(*[1] * len(want.dims))
    for dim, group in enumerate(want.dims):
        if not is_number and all(axis in more for axis in group):
            rank = len(want.dims)
            made = made.split(dim, 1, -1) if dim < rank - 1 else made.split(dim - 1, -1, 1)
        for at in reversed(range(len(group))):
            if group[at] in more:
                unit = math.prod(sizes.of(axis, f"`{want.path}`") for axis in group[at + 1 :])
                made = made.repeat(sizes.of(group[at], f"`{want.path}`"), dim=dim, unit=unit)
    return made


def _opened(source: Place, want: Place, sizes: Sizes) -> tuple[From, dict[str, int | None]]:
    """Returns the expression that reads a weight from its source array, and the number of arrays per axis in
    the path.
    """
    path, counts = source.path, {axis: sizes.source.get(axis) for axis in source.in_path}
    by = source.entry.by if isinstance(source.entry, Scaled) else ""
    if want.range is not None and want.range.axis in source.in_path:
        path, by = _further(path, want.range), _further(by, want.range)
        counts[want.range.axis] = want.range.entries(counts[want.range.axis])
    made = From(path)
    if isinstance(source.entry, Scaled):
        return made.scale(by, block=source.entry.block).cast(source.entry.dtype), counts
    if isinstance(source.entry, Counted):
        made = made.plus(-source.entry.plus) if source.entry.plus else made
        made = made.times(1 / source.entry.times) if source.entry.times != 1 else made
    return (_part(made, source, sizes) if isinstance(source.entry, Fused) else made), counts


def _further(path: str, span: Range) -> str:
    """Returns the path template of the arrays in a range of an axis: the numbers in its braces are scaled and shifted,
    or filled in for a single entry.
    """

    def shifted(braces: re.Match[str]) -> str:
        one = sum_of(braces[1])
        factor = sum(count for count, name in one.terms if name == span.axis)
        if not factor or (span.start, span.step) == (0, 1):
            return braces[0]
        scaled = [(count * span.step if name == span.axis else count, name) for count, name in one.terms]
        terms = [name if count == 1 else f"{count}*{name}" for count, name in scaled if count]
        rest = one.rest + factor * span.start
        return "{" + "+".join([*terms, *([str(rest)] if rest else [])]) + "}" if terms else str(rest)

    return re.sub(r"\{([^{}]*)\}", shifted, path)


def _part(made: From, source: Place, sizes: Sizes) -> From:
    """Returns the expression that extracts one kind of weight from an array of several (`Fused`)."""
    entry = source.entry
    assert isinstance(entry, Fused)
    parts, dim, shards = places_of(source.path, entry), entry.dim, entry.shards
    if len({part.dims[dim] for part in parts}) == 1:
        halves = made.split(dim, *([shards] if shards != 1 else []), len(parts), -1)
        one = halves.at(source.number, dim=dim + (shards != 1))
        return one.merge(dim) if shards != 1 else one
    long = [
        math.prod(sizes.before(axis, f"a part of `{source.path}`") for axis in part.dims[dim]) // shards
        for part in parts
    ]
    start = sum(long[: source.number])
    if shards == 1:
        return made.slice(start, start + long[source.number], dim=dim)
    apart = made.split(dim, shards, -1).slice(start, start + long[source.number], dim=dim + 1)
    return apart.merge(dim)
