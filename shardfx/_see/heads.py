"""Checks of attention layers: finds dimensions that are sharded within an attention
head.

A `Group` is arrays that are planned alike and whose paths differ only in numbers.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from .._ground.spec import entries_at, entries_of, shard_counts, trimmed
from .._plan import FUSED, ROLES, Group, fused_dimension, head_dimension
from .._rules import atomic
from .finding import Finding, Severity
from .subject import Subject


_NORM = re.compile(r"(q|k|query|key)_(norm|layernorm)")
# Most large models have heads of this width. No width is assumed for models that are
# narrower than `_NARROW`.
_USUAL = 128
_NARROW = 1024


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
    layers: dict[tuple[str, ...], dict[str, list[tuple[str, Group]]]] = {}
    norms: dict[tuple[str, ...], Group] = {}
    fused: list[tuple[tuple[str, ...], str, str, Group]] = []
    for group in subject.content.groups:
        parts = tuple(
            "0" if part.isdigit() else part for part in re.split("[/.]", group.paths[0])
        )
        for at, part in enumerate(parts):
            if _NORM.fullmatch(part):
                norms.setdefault(parts[:at], group)
        for at, part in enumerate(parts):
            if part in FUSED:
                suffix = "/".join(parts[at + 1 :])
                fused.append((parts[:at], part, suffix, group))
        at = max((at for at, part in enumerate(parts) if part in ROLES), default=None)
        if at is not None:
            own = layers.setdefault(parts[:at], {}).setdefault(
                "/".join(parts[at + 1 :]), []
            )
            own.append((ROLES[parts[at]], group))
    for layer, part, suffix, group in fused:
        yield from _cut_fused(subject, part, suffix, group, norms.get(layer), head_dim)
    for layer, suffixes in layers.items():
        for suffix, found in suffixes.items():
            first = dict(reversed(found))
            shapes = {role: group.row.shape for role, group in first.items()}
            query = shapes.get("q", ())
            output = shapes.get("o", ())
            if len(query) == len(output) >= 3 and query[-2:] == output[-3:-1]:
                # The heads and the elements of a head are separate dimensions.
                yield from _cut_elements(subject, found)
                continue
            dim = head_dimension(
                suffix, [shapes[role] for role in "qkv" if role in shapes]
            )
            if dim is None:
                continue
            known = [group for _, group in (*found, *suffixes.get("bias", ()))]
            sizes = [shapes[role][dim] for role in "qkv" if role in shapes]
            width = _width(known, sizes, norms.get(layer), head_dim)
            if width is None:
                continue
            for role, group in found:
                at = dim
                if role == "o":
                    # The weights of the output have the opposite order.
                    at = 2 * len(query) - 3 - dim
                    if (
                        len(query) != len(output)
                        or len(query) < 2
                        or output[at] != query[dim]
                    ):
                        continue
                yield from _cut(subject, group, at, width)


def _cut_fused(
    subject: Subject,
    part: str,
    suffix: str,
    group: Group,
    norm: Group | None,
    head_dim: int | None,
) -> Iterator[Finding]:
    """A finding for arrays that hold several projections in one, such as `qkv`, and are
    sharded within a head.

    `part` is the name of the module that says so, `suffix` the path after it. If the
    width of a head is not known, the finding says that it was not judged.
    """
    shape = group.row.shape
    count = FUSED[part]
    dim = fused_dimension(part, suffix, shape)
    if dim is None:
        return
    if part.startswith("in_proj") and len(shape) > 1:
        # The other one of the last two dimensions is that of the inputs.
        inputs = shape[2 * len(shape) - 3 - dim]
        if shape[dim] != count * inputs:
            return
    width = _width([group], [shape[dim]], norm, head_dim)
    one_projection = shape[dim] // count
    if width is None and shape[dim] % count == 0:
        if one_projection >= _NARROW and one_projection % _USUAL == 0:
            why = "as most models have them; pass `head_dim=` if these are narrower"
            width = _Width(_USUAL, "info", why)
        else:
            why = "nothing says how wide a head is; pass `head_dim=`"
            width = _Width(one_projection, "info", why, "projections")
    if width is not None:
        yield from _cut(subject, group, dim, width)


def _cut_elements(
    subject: Subject, found: Sequence[tuple[str, Group]]
) -> Iterator[Finding]:
    """A finding for each array in which the elements of a head are sharded, although
    the dimension of the heads could be sharded instead.

    `found` has the arrays of one layer, each with its role ("q", "k", "v" or "o"). In
    these arrays the heads and the elements of a head are separate dimensions.
    """
    dims = [len(group.row.shape) - (2 if role == "o" else 1) for role, group in found]
    pairs = [(group, dim) for (_, group), dim in zip(found, dims, strict=True)]
    if (
        len(
            {
                group.row.names and group.row.names[dim - len(group.row.shape)]
                for group, dim in pairs
            }
        )
        > 1
    ):
        return  # names in the wrong order, which another check reports
    for group, dim in pairs:
        row = group.row
        rank = len(group.row.shape)
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
            fix = subject.fix(
                group, _without(row.names or (None,) * rank, dim), trimmed(entries)
            )
            yield Finding("cut-head", "warning", group.where, 0, message, fix)


def _width(
    known: Sequence[Group],
    sizes: Sequence[int],
    norm: Group | None,
    head_dim: int | None,
) -> _Width | None:
    if head_dim is not None:
        return _Width(head_dim, "warning", "`head_dim` says so")
    for group in known:
        unit = max(group.row.units or (1,))
        if unit > 1:
            return _Width(
                unit, "warning", f"the rules of `{group.where}` keep so many together"
            )
    if norm is not None and len(norm.row.shape) == 1 and norm.row.shape[0] < max(sizes):
        return _Width(norm.row.shape[0], "warning", f"as `{norm.where}` has")
    if (
        min(sizes) < max(sizes)
        and max(sizes) >= _NARROW
        and not any(size % _USUAL for size in sizes)
    ):
        return _Width(
            _USUAL,
            "info",
            "as most models have them; pass `head_dim=` if these are narrower",
        )
    return None


def _cut(subject: Subject, group: Group, dim: int, width: _Width) -> Iterator[Finding]:
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
    units = tuple(unit if at == dim else 1 for at in range(rank))
    fix = subject.fix(
        group,
        _without(row.names or (), dim),
        atomic(trimmed(entries_of(row.requested)[:rank]), units),
    )
    name = None if row.names is None or not subject.is_named(group) else row.names[dim]
    if (
        isinstance(name, str)
        and width.noun == "heads"
        and subject.axes is not None
        and name not in dict(subject.axes.units)
    ):
        fix = f"axes = axes.merge(AxisRules(units={{{name!r}: {unit}}}))"
    yield Finding("cut-head", width.severity, group.where, 0, message, fix)


def _without(names: tuple[object, ...], dim: int) -> tuple[Any, ...]:
    return tuple(None if at == dim else name for at, name in enumerate(names))
