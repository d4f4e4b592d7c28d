"""Attention heads that a plan cuts, where the rules do not say how wide a head is."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .._ground.spec import entries_at, entries_of, shard_counts, trimmed
from .._plan import Group
from .._rules import AxisRules, atomic
from .finding import Finding, Severity
from .subject import Subject


_ROLES = {
    **dict.fromkeys(("q", "q_proj", "query", "wq", "to_q", "q_lin", "query_proj"), "q"),
    **dict.fromkeys(("k", "k_proj", "key", "wk", "to_k", "k_lin", "key_proj"), "k"),
    **dict.fromkeys(("v", "v_proj", "value", "wv", "to_v", "v_lin", "value_proj"), "v"),
    **dict.fromkeys(("o", "o_proj", "out", "wo", "to_out", "out_lin", "out_proj", "output_proj"), "o"),
}
_PARTS = re.compile(r"[/.]")
# Most large models have heads of this many elements; narrower models tell nothing.
_USUAL, _NARROW = 128, 1024


class _Projection(NamedTuple):
    """A leaf of an attention layer: of the queries, keys, values or the output."""

    role: str
    group: Group


class _Width(NamedTuple):
    """How many elements a head has, and how that is known."""

    unit: int
    severity: Severity
    why: str


def cut_heads(subject: Subject, head_dim: int | None) -> Iterator[Finding]:
    """Dimensions that are cut inside a head.

    The other leaves of a layer tell how wide a head is: a unit in the rules of one of them, or a norm of the queries.
    Where none does, and keys are narrower than queries, heads of the usual width are taken as a hint.
    """
    projections, norms = _attentions(subject.groups)
    for (prefix, suffix), found in projections.items():
        first = {role: group for role, group in reversed(found)}
        if _has_inner_dimension(first):
            inner = [(group, -2 if role == "o" else -1) for role, group in found]
            # Names that stand on it in one leaf only are in the wrong order: that is said elsewhere.
            if len({None if group.row.names is None else group.row.names[dim] for group, dim in inner}) == 1:
                for group, dim in inner:
                    yield from _cut_within(subject, group, dim)
            continue
        dim = _head_dimension(suffix, first)
        if dim is None:
            continue
        width = _width([*found, *projections.get((prefix, "bias"), ())], first, dim, norms.get(prefix), head_dim)
        for role, group in found if width is not None else ():
            at = dim if role != "o" else _output_dimension(first, group, dim)
            if at is not None and width is not None:
                yield from _cut(subject, group, at, width)


def _has_inner_dimension(roles: Mapping[str, Group]) -> bool:
    """Whether heads and their elements are dimensions of their own: the query ends in both, the output begins so."""
    if "q" not in roles or "o" not in roles:
        return False
    query, output = roles["q"].row.shape, roles["o"].row.shape
    return len(query) == len(output) >= 3 and query[-2:] == output[-3:-1]


def _cut_within(subject: Subject, group: Group, dim: int) -> Iterator[Finding]:
    """The dimension of the elements of one head that is cut, while that of the heads could be."""
    row, rank = group.row, len(group.row.shape)
    counts = shard_counts(row.spec, rank, subject.content.mesh.shape)
    heads, count = row.shape[dim - 1], counts[dim]
    if count == 1 or counts[dim - 1] > 1 or heads % count:
        return
    message = (
        f"dim {rank + dim} of size {row.shape[dim]} is the elements of one head, and is cut into {count} pieces; dim "
        f"{rank + dim - 1} of {heads} heads is whole, and could be cut so"
    )
    entries = [*entries_at(row.spec, rank)]
    entries[dim - 1], entries[dim] = entries[dim], None
    names = _without(row.names or (None,) * rank, rank + dim)
    fix = subject.mended(group.paths, names, trimmed(entries))
    yield Finding("cut-head", "warning", group.where, 0, message, fix)


def _attentions(
    groups: Sequence[Group],
) -> tuple[dict[tuple[tuple[str, ...], str], list[_Projection]], dict[tuple[str, ...], Group]]:
    """The projections by their layer and the rest of their path, and the norms of queries and keys by their layer."""
    projections: dict[tuple[tuple[str, ...], str], list[_Projection]] = {}
    norms: dict[tuple[str, ...], Group] = {}
    for group in groups:
        parts = _PARTS.split(group.paths[0])
        at = next((at for at in range(len(parts) - 1, -1, -1) if parts[at] in _ROLES), None)
        if at is not None:
            key = (_layer(parts[:at]), "/".join(parts[at + 1 :]))
            projections.setdefault(key, []).append(_Projection(_ROLES[parts[at]], group))
        for at, part in enumerate(parts[-2:], max(len(parts) - 2, 0)):
            if part in ("q_norm", "k_norm", "query_norm", "key_norm", "q_layernorm", "k_layernorm"):
                norms.setdefault(_layer(parts[:at]), group)
    return projections, norms


def _layer(parts: Sequence[str]) -> tuple[str, ...]:
    return tuple("0" if part.isdigit() else part for part in parts)


def _head_dimension(suffix: str, roles: Mapping[str, Group]) -> int | None:
    """The dimension of the queries, keys and values that holds the heads: in which they differ, or by convention."""
    shapes = [roles[role].row.shape for role in "qkv" if role in roles]
    if len(shapes) < 2 or len({len(shape) for shape in shapes}) != 1 or not shapes[0]:
        return None
    differ = [dim for dim, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1]
    rank = len(shapes[0])
    if len(differ) == 1:
        return differ[0]
    if differ or rank > 3:
        return None
    last = rank == 1 or suffix.endswith(("kernel", "bias"))
    return rank - 1 if last else rank - 2 if suffix.endswith("weight") else None


def _output_dimension(roles: Mapping[str, Group], group: Group, dim: int) -> int | None:
    """The dimension of the output's projection that holds the heads: the one that the queries do not have there."""
    query, output = (roles["q"].row.shape if "q" in roles else ()), group.row.shape
    if len(query) != len(output) or len(query) < 2:
        return None
    # A layer's output goes the other way: what comes first there comes last here.
    other = len(query) - 1 if dim == len(query) - 2 else len(query) - 2
    return other if output[other] == query[dim] else None


def _width(
    found: Sequence[_Projection],
    roles: Mapping[str, Group],
    dim: int,
    norm: Group | None,
    head_dim: int | None,
) -> _Width | None:
    sizes = [roles[role].row.shape[dim] for role in "qkv" if role in roles]
    if head_dim is not None:
        return _Width(head_dim, "warning", "`head_dim` says so")
    for _, group in found:
        unit = max(group.row.units or (1,))
        if unit > 1:
            return _Width(unit, "warning", f"the rules of `{group.where}` keep so many together")
    if norm is not None and len(norm.row.shape) == 1 and norm.row.shape[0] < max(sizes):
        return _Width(norm.row.shape[0], "warning", f"as `{norm.where}` has")
    narrower = min(sizes) < max(sizes) and max(sizes) >= _NARROW
    if narrower and all(size % _USUAL == 0 for size in sizes):
        return _Width(_USUAL, "info", "as most models have them; pass `head_dim=` if these are narrower")
    return None


def _cut(subject: Subject, group: Group, dim: int, width: _Width) -> Iterator[Finding]:
    row, unit = group.row, width.unit
    size, rank = row.shape[dim], len(row.shape)
    count = shard_counts(row.spec, rank, subject.content.mesh.shape)[dim]
    if size % unit or count == 1 or (size // unit) % count == 0:
        return
    message = (
        f"dim {dim} of size {size} is cut into {count} pieces of {size // count} elements, inside heads of {unit} "
        f"({width.why})"
    )
    yield Finding("cut-head", width.severity, group.where, 0, message, _whole_heads(subject, group, dim, unit))


def _whole_heads(subject: Subject, group: Group, dim: int, unit: int) -> str:
    """Code under which these leaves are cut between heads only."""
    row, rank = group.row, len(group.row.shape)
    units = tuple(unit if at == dim else 1 for at in range(rank))
    name = None if row.names is None else row.names[dim]
    if subject.is_named(group.paths[0]) and isinstance(name, str) and subject.axes is not None:
        try:
            subject.axes.merge(AxisRules(units={name: unit}))
        except ValueError:  # the name has a unit already, of another width
            return subject.renamed(group.paths, _without(row.names or (), dim))
        return f"axes = axes.merge(AxisRules(units={{{name!r}: {unit}}}))"
    spec = trimmed(entries_of(subject.plain_row(group).requested)[:rank])
    return subject.ruled(group.paths, atomic(spec, units))


def _without(names: tuple[object, ...], dim: int) -> tuple[Any, ...]:
    return tuple(None if at == dim else name for at, name in enumerate(names))
