"""Makes one array of the target from one array of the source: `converted` splits,
orders, resizes, joins and repeats dimensions by the names of their axes.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from ..._convert import From
from ..._ground.errors import MapError
from ._entries import Counted, Range, Weight
from ._reading import Axes, Sizes, array_counts, read


def sliced(whole: From, span: Range, dim: int) -> From:
    """Returns the expression for the entries `span` of dimension `dim`, from the
    expression for the `whole` array. A range of one entry (step 0) removes the
    dimension.
    """
    if not span.step:
        return whole.at(span.start, dim=dim)
    if span.step == 1:
        return whole.slice(span.start, span.stop, dim=dim)
    # Every `step` entries form a group, of which one entry is taken.
    offset = span.start % span.step
    first = span.start - offset
    if span.stop is not None or first:
        whole = whole.slice(first, span.stop, dim=dim)
    return whole.split(dim, -1, span.step).at(offset, dim=dim + 1)


def _split_axes(
    weight: Weight,
    other: Weight,
    parts_by_axis: Mapping[str, Axes],
) -> Weight:
    """Returns the array `weight` with its axes split as in `parts_by_axis`, such as
    "dim" into "two" and "half".

    An axis is split only if the array `other` has all its parts.
    """
    axes_of_other = set(other.axes)
    dims: list[Axes] = []
    for group in weight.dims:
        axes: list[str] = []
        for axis in group:
            parts = parts_by_axis.get(axis)
            if parts is not None and axes_of_other >= set(parts):
                axes += parts
            else:
                axes.append(axis)
        dims.append(tuple(axes))
    return weight._replace(dims=tuple(dims))


def converted(source: Weight, want: Weight, sizes: Sizes) -> From:
    """Returns the expression that makes the array `want` of the target from the one
    array `source`.

    It splits each dimension of `source` into its axes, such as `(heads dim)` into
    `heads` and `dim`, unless the same axes form one dimension of `want` too. Then it
    puts the axes into the order of `want` and joins them.
    """
    split_source = _split_axes(source, want, sizes.apart)
    want = _split_axes(want, source, sizes.apart)
    conversion = _matched_axes(split_source, want, sizes)
    draft = _Draft(
        expression=read(split_source, want, sizes),
        dims=[],
        sizes=sizes,
    )
    _split_dims(draft, conversion)
    _take_entries(draft, conversion)
    _order_dims(draft, conversion)
    _resize_and_slice(draft, conversion)
    _join_dims(draft, conversion)
    expression = _repeated(draft.expression, want, conversion.repeated, sizes)
    if isinstance(want.entry, Counted):
        if want.entry.times != 1:
            expression = expression.times(want.entry.times)
        if want.entry.plus:
            expression = expression.plus(want.entry.plus)
    return expression


@dataclasses.dataclass(frozen=True)
class _Conversion:
    """How the axes of one array correspond to those of another one.

    **Arguments:**

    - `source`, `want`: the array of the source, and the array of the target.
    - `entry`: the range of `want` if `want` has only one entry of an axis, such as
      `layers[3]`.
    - `repeated`: the axes that only `want` has, along which entries are repeated.
    - `dropped`: the axes that only `source` has; their first entry is read.
    - `groups`: the axes of each dimension of `want`, without `repeated`.
    - `whole`: those of `groups` that are a dimension of `source` too, and keep their
      sizes. They are not split.
    """

    source: Weight
    want: Weight
    entry: Range | None
    repeated: Sequence[str]
    dropped: Sequence[str]
    groups: Sequence[Axes]
    whole: Sequence[Axes]

    @property
    def order(self) -> list[Axes]:
        """The dimensions of `want` before axes are joined."""
        dims: list[Axes] = []
        for group in self.groups:
            dims += self.parts_of(group)
        return dims

    def parts_of(self, group: Axes) -> list[Axes]:
        """The dimensions for a `group` of axes: one for the whole group if it is in
        `whole`, else one per axis.
        """
        if group in self.whole:
            return [group]
        return [(axis,) for axis in group]


def _matched_axes(source: Weight, want: Weight, sizes: Sizes) -> _Conversion:
    """Returns how the axes of the array `source` correspond to those of the array
    `want` of the target. Raises `MapError` if they do not.
    """
    # The range of `want` if it has one entry of an axis, such as `layers[3]` (step 0).
    entry = None
    if want.range is not None and not want.range.step:
        entry = want.range
    in_path = [axis for axis in source.in_path if entry is None or axis != entry.axis]
    repeated, dropped = _unshared_axes(source, want, (*source.axes, *in_path), entry)
    groups: list[Axes] = []
    whole: list[Axes] = []
    for dim in want.dims:
        group = tuple(axis for axis in dim if axis not in repeated)
        groups.append(group)
        # A dimension that both arrays have, with equal sizes, need not be split.
        if group in source.dims and not any(map(sizes.resized, group)):
            whole.append(group)
    return _Conversion(
        source=source,
        want=want,
        entry=entry,
        repeated=repeated,
        dropped=dropped,
        groups=groups,
        whole=whole,
    )


@dataclasses.dataclass
class _Draft:
    """An expression in the making, and the axes of each of its dimensions."""

    expression: From
    dims: list[Axes]
    sizes: Sizes

    def resize(self, axis: str, dim: int) -> None:
        """Truncates dimension `dim`, or pads it with zeros at its end, to the target's
        size of `axis`.
        """
        size = self.sizes.resized(axis)
        if size is None:
            return
        if size > self.sizes.source[axis]:
            self.expression = self.expression.pad_to(size, dim=dim)
        else:
            self.expression = self.expression.slice(0, size, dim=dim)


def _split_dims(draft: _Draft, conversion: _Conversion) -> None:
    """Splits each dimension of the source into its axes, except whole groups. `draft`
    has the expression so far, and the axes of each of its dimensions.
    """
    for group in conversion.source.dims:
        if len(group) > 1 and group not in conversion.whole:
            why = f"`{draft.expression}`"
            inner_sizes = [draft.sizes.in_source(axis, why) for axis in group[1:]]
            dim = len(draft.dims)
            draft.expression = draft.expression.split(dim, -1, *inner_sizes)
        draft.dims += conversion.parts_of(group)


def _take_entries(draft: _Draft, conversion: _Conversion) -> None:
    """Takes one entry of each axis that is no dimension of the target."""
    source_axes = conversion.source.axes
    # The index to take along each axis: a number, or the name of a number in the
    # target's path.
    indices: dict[str, int | str] = {}
    for axis in source_axes:
        if axis in conversion.want.in_path:
            # The target has an array for each entry, so the index is the axis's name.
            indices[axis] = axis
    entry = conversion.entry
    if entry is not None and entry.axis in source_axes:
        indices[entry.axis] = entry.start
    indices |= dict.fromkeys(conversion.dropped, 0)
    for axis, index in indices.items():
        dim = draft.dims.index((axis,))
        # The arrays of all entries must have the target's number of entries.
        if index == axis:
            draft.resize(axis, dim)
        draft.expression = draft.expression.at(index, dim=dim)
        draft.dims.remove((axis,))


def _order_dims(draft: _Draft, conversion: _Conversion) -> None:
    """Puts the dimensions into the order of the target. The arrays of all numbers of an
    axis in the source's path become one array, with the axis as a dimension.
    """
    # `order` has the dimensions of the target before axes are joined.
    present = [group for group in conversion.order if group in draft.dims]
    source_dims = [draft.dims.index(group) for group in present]
    if source_dims != sorted(source_dims):
        if source_dims == sorted(source_dims, reverse=True):
            draft.expression = draft.expression.T
        else:
            draft.expression = draft.expression.transpose(*source_dims)
    counts = array_counts(conversion.source, conversion.want, draft.sizes)
    for dim, group in enumerate(conversion.order):
        # The axis is in the source's path, so that it is no dimension yet.
        if group not in draft.dims:
            draft.dims.append(group)
            (axis,) = group
            count = counts.get(axis)
            draft.expression = draft.expression.stack(axis, dim=dim, count=count)


def _resize_and_slice(draft: _Draft, conversion: _Conversion) -> None:
    """Gives each dimension the target's size, and keeps the target's range of an
    axis.
    """
    for dim, group in enumerate(conversion.order):
        if group not in conversion.whole:
            draft.resize(group[0], dim)
    span = conversion.want.range
    if span is None or not span.step or span.axis in conversion.source.in_path:
        return
    dim = conversion.order.index((span.axis,))
    draft.expression = sliced(draft.expression, span, dim)


def _join_dims(draft: _Draft, conversion: _Conversion) -> None:
    """Joins the axes that form one dimension of the target."""
    groups = [group for group in conversion.groups if group]
    for dim, group in enumerate(groups):
        if len(group) > 1 and group not in conversion.whole:
            draft.expression = draft.expression.merge(dim, len(group))


def _unshared_axes(
    source: Weight,
    want: Weight,
    source_axes: Axes,
    entry: Range | None,
) -> tuple[list[str], list[str]]:
    """Returns two lists: the axes that only the array `want` has, along which entries
    are repeated; and the axes that only the array `source` has.

    `source_axes` are the axes of `source`, also those in its path. `entry` is the range
    of `want` if `want` has only one entry of an axis, such as `layers[3]`; this axis is
    in neither list. Raises `MapError` if both lists would have axes, or if one array's
    path has an axis that the other array lacks.
    """
    target_axes = (*want.axes, *want.in_path)
    repeated = [axis for axis in want.axes if axis not in source_axes]
    dropped = [axis for axis in source_axes if axis not in target_axes]
    if entry is not None:
        dropped = [axis for axis in dropped if axis != entry.axis]
    lacks_path_axis = any(axis not in source_axes for axis in want.in_path)
    if dropped and repeated or lacks_path_axis:
        raise MapError(
            f"`{want.kind}` has other axes in both layouts: {' '.join(source_axes)} in"
            f" `{source.path}`, {' '.join(target_axes)} in `{want.path}`. Only one of"
            " them may have more, which are repetitions."
        )
    for axis in dropped:
        if axis in source.in_path:
            raise MapError(
                f"`{source.path}` has `{{{axis}}}`, an axis that the target does not"
                " have."
            )
    return repeated, dropped


def _repeated(
    expression: From,
    want: Weight,
    repeated: Sequence[str],
    sizes: Sizes,
) -> From:
    """Returns the expression with entries repeated along the axes `repeated`, which
    only the array `want` has.
    """
    rank = len(want.dims)
    # Whether the source has one number, of which all entries are copies.
    is_number = all(axis in repeated for axis in want.axes)
    if is_number and want.dims:
        expression = expression.reshape(*[1] * rank)
    why = f"`{want.path}`"
    for dim, group in enumerate(want.dims):
        # A dimension that the source lacks altogether begins with size 1.
        is_new = not is_number and all(axis in repeated for axis in group)
        if is_new and dim < rank - 1:
            expression = expression.split(dim, 1, -1)
        elif is_new:
            expression = expression.split(dim - 1, -1, 1)
        for position in reversed(range(len(group))):
            if group[position] in repeated:
                inner = [sizes.in_target(axis, why) for axis in group[position + 1 :]]
                count = sizes.in_target(group[position], why)
                expression = expression.repeat(count, dim=dim, unit=math.prod(inner))
    return expression
