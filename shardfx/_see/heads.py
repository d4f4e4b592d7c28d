"""Checks of attention layers: finds dimensions that are sharded within an attention
head.

A `Group` is arrays that are planned alike and whose paths differ only in numbers.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from .._ground.spec import entries_at, entries_of, shard_counts, trimmed
from .._plan import FUSED, ROLES, Group, fused_dimension, head_dimension
from .._rules import atomic
from .finding import Finding, Severity
from .subject import Subject


_NORM = re.compile(r"(q|k|query|key)_(norm|layernorm)")
# Most large models have heads of this width. No width is assumed for models that are
# narrower than `_LEAST_WIDE`.
_USUAL_WIDTH = 128
_LEAST_WIDE = 1024


class _Width(NamedTuple):
    """The number `unit` of elements of an attention head, the severity of findings that
    rely on this number, and a phrase `why` that says where it comes from. `noun` is the
    word for several units.
    """

    unit: int
    severity: Severity
    why: str
    noun: str = "heads"


def cut_heads(subject: Subject, head_dim: int | None) -> Iterator[Finding]:
    """Findings for dimensions that are sharded within an attention head.

    The width of a head is `head_dim`. If it is `None`, it is the number of elements
    that a rule keeps together in an array of the same layer, else the size of a norm of
    the queries or keys. If none is known, the usual width 128 is assumed for wide
    queries with narrower keys. The findings are then of severity "info".

    An array that holds several projections in one, such as `qkv`, is judged likewise. If
    nothing tells the width of its heads, a finding of severity "info" says so.
    """
    projections = _projections(subject)
    for fused in projections.fused:
        norm = projections.norms.get(fused.layer)
        yield from _cut_fused(subject, fused, norm, head_dim)
    for layer, arrays_by_suffix in projections.layers.items():
        norm = projections.norms.get(layer)
        biases = [group for _, group in arrays_by_suffix.get("bias", ())]
        for suffix, arrays in arrays_by_suffix.items():
            yield from _cut_layer(
                subject=subject,
                suffix=suffix,
                arrays=arrays,
                biases=biases,
                norm=norm,
                head_dim=head_dim,
            )


# Arrays, each with its role in the layer: "q", "k", "v" or "o".
_Roles: TypeAlias = list[tuple[str, Group]]


class _Fused(NamedTuple):
    """Arrays that hold several projections of one layer in one, such as `qkv`.

    - `layer`: the path before the projection.
    - `part`: the segment of the path that names the projection.
    - `suffix`: the path after it.
    """

    layer: tuple[str, ...]
    part: str
    suffix: str
    group: Group


class _Projections(NamedTuple):
    """The arrays of attention layers. A layer is the path before the projections,
    without its numbers.

    - `layers`: for each layer, its projections by the path after them, such as "bias".
    - `norms`: for each layer, a norm of its queries or keys.
    - `fused`: arrays that hold several projections in one.
    """

    layers: dict[tuple[str, ...], dict[str, _Roles]]
    norms: dict[tuple[str, ...], Group]
    fused: list[_Fused]


def _projections(subject: Subject) -> _Projections:
    """The attention layers of a plan, found by the names in its paths: for
    `layers/0/attn/q_proj/weight`, the layer is `layers/attn`, the role "q", and the
    suffix "weight".
    """
    projections = _Projections(
        layers={},
        norms={},
        fused=[],
    )
    for group in subject.content.groups:
        segments = re.split("[/.]", group.paths[0])
        parts = tuple(_without_number(segment) for segment in segments)
        # The last segment that names a projection.
        role_position = None
        for position, part in enumerate(parts):
            layer = parts[:position]
            suffix = "/".join(parts[position + 1 :])
            if _NORM.fullmatch(part):
                projections.norms.setdefault(layer, group)
            if part in FUSED:
                projections.fused.append(
                    _Fused(layer=layer, part=part, suffix=suffix, group=group)
                )
            if part in ROLES:
                role_position = position
        if role_position is not None:
            layer = parts[:role_position]
            suffix = "/".join(parts[role_position + 1 :])
            arrays = projections.layers.setdefault(layer, {}).setdefault(suffix, [])
            arrays.append((ROLES[parts[role_position]], group))
    return projections


def _without_number(segment: str) -> str:
    """A segment of a path, which is "0" for each number."""
    if segment.isdigit():
        return "0"
    return segment


def _cut_layer(
    subject: Subject,
    suffix: str,
    arrays: _Roles,
    biases: list[Group],
    norm: Group | None,
    head_dim: int | None,
) -> Iterator[Finding]:
    """Findings for the projections of one layer that are sharded within a head.

    `arrays` are the projections, each with its role ("q", "k", "v" or "o"), and
    `suffix` is the path after them, such as "weight". The rules of `arrays` and
    `biases` may say how wide a head is, and so may the `norm` of the layer.
    """
    # Of several arrays of one role, the first one counts.
    shapes = {role: group.row.shape for role, group in reversed(arrays)}
    query = shapes.get("q", ())
    output = shapes.get("o", ())
    if len(query) == len(output) >= 3 and query[-2:] == output[-3:-1]:
        # The heads and the elements of a head are separate dimensions: the last two of
        # the queries, and the two before the last of the output.
        yield from _cut_elements(subject, arrays)
        return

    shapes_of_qkv = [shapes[role] for role in "qkv" if role in shapes]
    # The dimension that holds the heads, each with all of its elements.
    dim = head_dimension(suffix, shapes_of_qkv)
    if dim is None:
        return
    groups = [group for _, group in arrays] + biases
    width = _width(groups, [shape[dim] for shape in shapes_of_qkv], norm, head_dim)
    if width is None:
        return

    for role, group in arrays:
        if role != "o":
            yield from _cut(subject, group, dim, width)
        elif len(query) == len(output) >= 2:
            # The last two dimensions are numbers rank - 2 and rank - 1. The weights of
            # the output have them in the opposite order.
            output_dim = 2 * len(query) - 3 - dim
            if output[output_dim] == query[dim]:
                yield from _cut(subject, group, output_dim, width)


def _cut_fused(
    subject: Subject,
    fused: _Fused,
    norm: Group | None,
    head_dim: int | None,
) -> Iterator[Finding]:
    """A finding for arrays that hold several projections in one, such as `qkv`, and are
    sharded within a head. If the width of a head is not known, the finding says that it
    was not judged.
    """
    group = fused.group
    shape = group.row.shape
    # Three projections in `qkv`, two in `kv`.
    projection_count = FUSED[fused.part]
    # The dimension that holds the heads of all projections.
    dim = fused_dimension(fused.part, fused.suffix, shape)
    if dim is None:
        return
    if fused.part.startswith("in_proj") and len(shape) > 1:
        # The other one of the last two dimensions is that of the inputs.
        input_size = shape[2 * len(shape) - 3 - dim]
        if shape[dim] != projection_count * input_size:
            return

    width = _width([group], [shape[dim]], norm, head_dim)
    projection_size = shape[dim] // projection_count
    if width is None and shape[dim] % projection_count == 0:
        if projection_size >= _LEAST_WIDE and projection_size % _USUAL_WIDTH == 0:
            why = "as most models have them; pass `head_dim=` if these are narrower"
            width = _Width(
                unit=_USUAL_WIDTH,
                severity="info",
                why=why,
            )
        else:
            why = "nothing says how wide a head is; pass `head_dim=`"
            width = _Width(
                unit=projection_size,
                severity="info",
                why=why,
                noun="projections",
            )
    if width is not None:
        yield from _cut(subject, group, dim, width)


def _cut_elements(subject: Subject, arrays: _Roles) -> Iterator[Finding]:
    """A finding for each array in which the elements of a head are sharded, although
    the dimension of the heads could be sharded instead.

    `arrays` are those of one layer, each with its role ("q", "k", "v" or "o"). In these
    arrays the heads and the elements of a head are separate dimensions.
    """
    element_dims: list[tuple[Group, int]] = []
    element_names = set()
    for role, group in arrays:
        dim_from_end = -2 if role == "o" else -1
        names = group.row.names
        element_dims.append((group, len(group.row.shape) + dim_from_end))
        # `None` for arrays without names.
        element_names.add(names and names[dim_from_end])
    if len(element_names) > 1:
        return  # names in the wrong order, which another check reports

    for group, dim in element_dims:
        row = group.row
        rank = len(row.shape)
        counts = shard_counts(row.spec, rank, subject.content.mesh.shape)
        heads = row.shape[dim - 1]
        if counts[dim] > 1 and counts[dim - 1] == 1 and heads % counts[dim] == 0:
            message = (
                f"dim {dim} of size {row.shape[dim]} is the elements of one head, and"
                f" is cut into {counts[dim]} pieces; dim {dim - 1} of {heads} heads is"
                " whole, and could be cut so"
            )
            entries = [*entries_at(row.spec, rank)]
            entries[dim - 1] = entries[dim]
            entries[dim] = None
            names = _without(row.names or (None,) * rank, dim)
            fix = subject.fix(group, names, trimmed(entries))
            yield Finding(
                code="cut-head",
                severity="warning",
                where=group.where,
                bytes=0,
                message=message,
                fix=fix,
            )


def _width(
    groups: Sequence[Group],
    sizes: Sequence[int],
    norm: Group | None,
    head_dim: int | None,
) -> _Width | None:
    """The width of a head in arrays whose dimension of heads has these `sizes`, from
    `head_dim`, else the rules of `groups`, else the size of `norm`, else the width of
    most models.
    """
    if head_dim is not None:
        return _Width(
            unit=head_dim,
            severity="warning",
            why="`head_dim` says so",
        )
    for group in groups:
        unit = max(group.row.units or (1,))
        if unit > 1:
            why = f"the rules of `{group.where}` keep so many together"
            return _Width(
                unit=unit,
                severity="warning",
                why=why,
            )
    if norm is not None and len(norm.row.shape) == 1 and norm.row.shape[0] < max(sizes):
        return _Width(
            unit=norm.row.shape[0],
            severity="warning",
            why=f"as `{norm.where}` has",
        )
    if (
        min(sizes) < max(sizes)
        and max(sizes) >= _LEAST_WIDE
        and all(size % _USUAL_WIDTH == 0 for size in sizes)
    ):
        why = "as most models have them; pass `head_dim=` if these are narrower"
        return _Width(
            unit=_USUAL_WIDTH,
            severity="info",
            why=why,
        )
    return None


def _cut(subject: Subject, group: Group, dim: int, width: _Width) -> Iterator[Finding]:
    """A finding if the arrays of `group` are sharded within a head along `dim`, in
    which the elements of a head are `width.unit` elements in a row.
    """
    row = group.row
    unit = width.unit
    size = row.shape[dim]
    rank = len(row.shape)
    count = shard_counts(row.spec, rank, subject.content.mesh.shape)[dim]
    if size % unit or count == 1 or (size // unit) % count == 0:
        return
    message = (
        f"dim {dim} of size {size} is cut into {count} pieces of {size // count}"
        f" elements, inside {width.noun} of {unit} ({width.why})"
    )

    units = [1] * rank
    units[dim] = unit
    spec = trimmed(entries_of(row.requested)[:rank])
    names = _without(row.names or (), dim)
    fix = subject.fix(group, names, atomic(spec, tuple(units)))
    name = None
    if row.names is not None and subject.is_named(group):
        name = row.names[dim]
    if (
        isinstance(name, str)
        and width.noun == "heads"
        and subject.axes is not None
        and name not in dict(subject.axes.units)
    ):
        fix = f"axes = axes.merge(AxisRules(units={{{name!r}: {unit}}}))"
    yield Finding(
        code="cut-head",
        severity=width.severity,
        where=group.where,
        bytes=0,
        message=message,
        fix=fix,
    )


def _without(names: tuple[object, ...], dim: int) -> tuple[Any, ...]:
    """The logical names of an array without that of one dimension."""
    shortened = list(names)
    if names:
        shortened[dim] = None
    return tuple(shortened)
