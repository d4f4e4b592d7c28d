"""Checks of each planned array: replicated, sharded less than its rule asks for, or sharded within an
attention head.
"""

import functools as ft
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from .._ground.reason import Code, Reason
from .._ground.spec import canonical_entry, entries_at, entries_of, entry_axes, pinned, shard_counts, trimmed
from .._ground.text import bytes_text, plural
from .._plan import Group, Row, axes_of, row_on
from .._rules import AxisRules, atomic, attempts
from ..topology import MeshSpec
from .finding import Finding, Severity
from .mistakes import axes_to_cut, cutting
from .subject import Subject, asked_by, code_of


def replicated(subject: Subject, limit: int) -> Iterator[Finding]:
    """A finding for each array of at least `limit` bytes that every device holds whole."""
    if not any(entries_of(row.requested) or row.strategies for row in subject.content.rows):
        return  # rules that shard nothing at all are those of data parallelism
    whole = [
        number
        for number, (size, share) in enumerate(subject.content.byte_counts)
        if size >= limit and size == share and subject.mesh.size > 1 and subject.content.rows[number].rule is not None
    ]
    for group in subject.groups_of(whole):
        size = subject.content.byte_counts[group.number][0]
        if not _is_cut_short(group.row):  # `corrected` says that, with the reason
            message = f"every device holds all {bytes_text(size)} of it, as {_asks(group)}"
            fix = _sharded(subject, group) or f"replicated_bytes = {size + 1}"
            yield Finding("replicated", "warning", group.where, subject.excess(group), message, fix)


def _asks(group: Group) -> str:
    return f"{asked_by(group)} {'ask' if group.row.rule == 'names' else 'asks'}"


def _is_cut_short(row: Row) -> bool:
    return any(why.code in _CUT for why in row.reasons)


def _sharded(subject: Subject, group: Group) -> str | None:
    """Code that shards these arrays over a mesh axis; `None` if no axis divides them."""
    row = group.row
    if any(why.code is Code.small for why in row.reasons):
        return None
    if not subject.is_named(group.paths[0]):
        over = cutting(subject, row.shape, row.units)
        return None if over is None else subject.ruled(group.paths, over)
    for dim, over in axes_to_cut(subject, row.shape, row.units):
        if row.names is not None and isinstance(name := row.names[dim], str):
            rule = f"[({name!r}, {over.axes[0]!r})]"  # checked first: the array has no axis that could block it
            return f"axes = axes.prepend({rule if subject.mode is None else f'modes={{{subject.mode!r}: {rule}}}'})"
    return None


# The reasons why a leaf is sharded less than its rule asks, except for those that somebody has accepted.
_CUT = (Code.indivisible, Code.unit, Code.duplicate)


def corrected(subject: Subject) -> Iterator[Finding]:
    """Findings for arrays that are sharded less than their rule asks for; under `strict` for all arrays
    with a reason.
    """
    rows = {n: why for n, row in enumerate(subject.content.rows) if row.reasons and (why := _shortfall(subject, row))}
    sizes = ft.lru_cache(maxsize=64)(ft.partial(_other_sizes, subject))
    causes: dict[Any, list[tuple[Group, Finding]]] = {}
    for group in subject.groups_of([*rows]):
        found, axes = _corrected(subject, group, rows[group.number], sizes), _axes(rows[group.number])
        is_size = all(why.code in (Code.indivisible, Code.unit) for why in rows[group.number])
        causes.setdefault((found.severity, axes) if is_size and len(axes) == 1 else group, []).append((group, found))
    for cause, shorts in causes.items():
        if isinstance(cause, Group) or len(shorts) < _TOGETHER:
            yield from (found for _, found in shorts)
        else:
            yield _together(subject, cause[1][0], shorts, sizes)


# If at least this many arrays, or groups of similar arrays, are sharded less over one mesh axis, they are one finding.
_TOGETHER = 3
_SHOWN = 3
_Sizes: TypeAlias = Callable[[str], tuple[int, ...]]


def _axes(reasons: tuple[Reason, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(axis for why in reasons for axis in why.axes))


def _together(subject: Subject, axis: str, shorts: Sequence[tuple[Group, Finding]], sizes: _Sizes) -> Finding:
    groups = [group for group, _ in shorts]
    count = sum(len(group.paths) for group in groups)
    shown = [f"`{group.where}` {group.row.shape}" for group in groups[:_SHOWN]]
    more = [f"{len(groups) - len(shown)} more"] if len(groups) > len(shown) else []
    size = subject.content.mesh.shape.get(axis, 1)
    what = f"{plural(count, 'array')} are not divisible by `{axis}` ({size}) as asked"
    if all(why.code is Code.unit for group in groups for why in _shortfall(subject, group.row)):
        what = f"`{axis}` ({size}) would cut inside units of {plural(count, 'array')}"
    message = f"{what}: {', '.join([*shown, *more])}"
    fixes = list(dict.fromkeys(found.fix for _, found in shorts))
    if others := sizes(axis):
        message += f"; `{axis}` of {' or '.join(map(str, others))} would divide all of them"
    fix = _mesh_code(subject, axis, others[0]) if others and fixes != ["refine = True"] else "\n".join(fixes)
    lost, severity = sum(found.bytes for _, found in shorts), shorts[0][1].severity
    return Finding("corrected", severity, f"mesh axis {axis!r}", lost, message, fix)


# The number of other sizes, from half to twice that of the axis, and the number of rows to try them on.
_MOST_TRIED, _MOST_ROWS = 16, 300


def _other_sizes(subject: Subject, axis: str) -> tuple[int, ...]:
    """The next smaller and the next larger size of a mesh axis that shards every array as its rule asks."""
    mesh, size = subject.mesh, subject.mesh.shape.get(axis, 1)
    rows = [row for row in subject.content.rows if not {*_axes(_shortfall(subject, row))} - {axis}]
    if subject.is_plan or subject.refine or any(count > 1 for count in mesh.dcn_sizes) or len(rows) > _MOST_ROWS:
        return ()
    smaller = range(size - 1, max(1, -(-size // 2) - 1), -1)
    found = []
    for tried in (smaller, range(size + 1, 2 * size + 1)):
        for other in tried[:_MOST_TRIED]:
            axes = axes_of(_resized(mesh, axis, other), subject.min_bytes)
            if not any(_shortfall(subject, row_on(row, subject.content, axes)) for row in rows):
                found.append(other)
                break
    return tuple(found)


def _mesh_code(subject: Subject, axis: str, size: int) -> str:
    return f"mesh = {_resized(subject.mesh, axis, size)!r}"


def _resized(mesh: MeshSpec, axis: str, size: int) -> MeshSpec:
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return MeshSpec({**mesh.shape, axis: size}, axis_types=types)


def _corrected(subject: Subject, group: Group, reasons: tuple[Reason, ...], sizes: _Sizes) -> Finding:
    """The finding about one group of arrays."""
    cost = _cost(subject, group)
    # Units may be declared for meshes that have more devices along an axis than there are units.
    foreseen = all(why.code is Code.unit for why in reasons)
    severity = "error" if subject.strict else "info" if foreseen else "warning"
    told = "; ".join(map(str, reasons))
    message = f"cut less than {_asks(group)} for: {told}"
    return Finding("corrected", severity, group.where, cost, message, _as_it_is(subject, group, reasons, sizes))


def _shortfall(subject: Subject, row: Row) -> tuple[Reason, ...]:
    if subject.strict:
        return tuple(why for why in row.reasons if why.code is not Code.scalar)
    found = [why for why in row.reasons if why.code in _CUT]
    if subject.refine:
        # The mesh has been split so that the dimension takes all axes that divide it: no more is possible.
        whole = [dim for dim, entry in enumerate(entries_at(row.spec, len(row.shape))) if not entry_axes(entry)]
        found = [why for why in found if why.dim is None or why.dim in whole]
    return tuple(found)


def _cost(subject: Subject, group: Group) -> int:
    """The bytes that each device holds beyond those of the sharding that the rule asks for."""
    row, sizes = group.row, subject.content.mesh.shape
    asked, used = 1, set[str]()
    wanted = [*entries_of(pinned(row.requested)), *[step.axes for step in row.strategies]]
    for axis in (axis for entry in wanted for axis in entry_axes(entry)):
        asked *= sizes.get(axis, 1) if axis not in used else 1
        used.add(axis)
    whole, share = subject.content.byte_counts[group.number]
    return max(0, share - -(-whole // asked)) * len(group.paths)


def _as_it_is(subject: Subject, group: Group, reasons: tuple[Reason, ...], sizes: _Sizes) -> str:
    """Code that asks for no more than the arrays can have, or that gives them more."""
    row, axes = group.row, _axes(reasons)
    if not subject.strict and _more_if_refined(subject, group):
        return "refine = True"
    if subject.is_named(group.paths[0]):
        # Rules that ask for less leave room for others; only a new plan shows whether these fit.
        fits = (code for code, made in _with_less(subject, group) if made is not None and not _shortfall(subject, made))
        return next(fits, "strict = False" if subject.strict else subject.renamed(group.paths, ()))
    is_small = any(why.code is Code.small for why in reasons)
    # A leaf that got no axis may be sharded over another one.
    if not entries_of(row.spec) and not is_small and (over := cutting(subject, row.shape, row.units)) is not None:
        return subject.ruled(group.paths, over)
    if len(axes) == 1 and (others := sizes(axes[0])):
        return _mesh_code(subject, axes[0], others[0])
    return subject.ruled(group.paths, subject.plain_row(group).spec)


def _more_if_refined(subject: Subject, group: Group) -> bool:
    if subject.refine or subject.is_plan:
        return False
    content = subject.refined
    at = content.skeleton.paths.index(group.paths[0])
    row = content.rows[content.index[at]]
    return row.byte_counts(content.mesh.shape)[1] < subject.content.byte_counts[group.number][1]


def _with_less(subject: Subject, group: Group) -> Iterator[tuple[str, Row | None]]:
    """For arrays with names: code that asks for less, and the row that the first array then has."""
    path, axes, row = group.paths[0], subject.axes, subject.plain_row(group)
    assert axes is not None
    dims = {why.dim for why in row.reasons if why.dim is not None and why.code is not Code.scalar}
    names = tuple(None if dim in dims else name for dim, name in enumerate(row.names or ()))
    entries = entries_at(row.spec, len(row.shape))
    alone = any(other is not row and _shares(other, row, dims) for other in subject.content.rows)
    keeps = any(entries[dim] is not None for dim in dims)
    renamed = (subject.renamed(group.paths, names), subject.row_with(path, names=names))
    if alone and not keeps:
        # Other arrays with these names are sharded as asked: the rules are right for those.
        yield renamed
    changed, code = axes, []
    for one in attempts(row.names or (), axes, subject.mode):
        if one.outcome == "applied" and one.dim in dims:
            wanted = tuple(axis for axis in entry_axes(one.rule[1]) if axis in entry_axes(entries[one.dim]))
            changed = changed.replace(one.number, wanted, mode=one.mode)
            of_mode = "" if one.mode is None else f", mode={one.mode!r}"
            code.append(f"axes = axes.replace({one.number}, {code_of(canonical_entry(wanted))}{of_mode})")
    if code:
        yield "\n".join(code), subject.row_with(path, axes=changed)
    yield renamed


def _shares(other: Row, row: Row, dims: set[int]) -> bool:
    """Whether another row has one of the names of these dimensions and is sharded as its rule asks."""
    names = {row.names[dim] for dim in dims if row.names is not None}
    return other.names is not None and not names.isdisjoint(other.names) and not _is_cut_short(other)


_ROLES = {
    **dict.fromkeys(("q", "q_proj", "query", "wq", "to_q", "q_lin", "query_proj"), "q"),
    **dict.fromkeys(("k", "k_proj", "key", "wk", "to_k", "k_lin", "key_proj"), "k"),
    **dict.fromkeys(("v", "v_proj", "value", "wv", "to_v", "v_lin", "value_proj"), "v"),
    **dict.fromkeys(("o", "o_proj", "out", "wo", "to_out", "out_lin", "out_proj", "output_proj"), "o"),
}
_PARTS = re.compile(r"[/.]")
# Most large models have heads of this width; narrower models tell nothing.
_USUAL, _NARROW = 128, 1024


class _Projection(NamedTuple):
    """An array of an attention layer that projects queries, keys, values or the output."""

    role: str
    group: Group


class _Width(NamedTuple):
    """The number of elements of an attention head, and how it is known."""

    unit: int
    severity: Severity
    why: str


def cut_heads(subject: Subject, head_dim: int | None) -> Iterator[Finding]:
    """Findings for dimensions that are sharded within an attention head.

    The other leaves of a layer show the width of a head: a unit in the rules of one of them, or a norm of the queries.
    Without these, if keys are narrower than queries, heads of the usual width are a hint.
    """
    projections, norms = _attentions(subject.content.groups)
    for (prefix, suffix), found in projections.items():
        first = {role: group for role, group in reversed(found)}
        if _has_inner_dimension(first):
            inner = [(group, -2 if role == "o" else -1) for role, group in found]
            # If names are on this dimension in one leaf only, their order is wrong: another check reports that.
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
    """Whether the heads and the elements of a head are separate dimensions of the projections."""
    if "q" not in roles or "o" not in roles:
        return False
    query, output = roles["q"].row.shape, roles["o"].row.shape
    return len(query) == len(output) >= 3 and query[-2:] == output[-3:-1]


def _cut_within(subject: Subject, group: Group, dim: int) -> Iterator[Finding]:
    """A finding if the dimension of a head's elements is sharded although the dimension of the heads could be."""
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
    """The projections by their layer and the end of their path, and the norms of queries and keys by their layer."""
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
    """The dimension of the projections that holds the heads: the one in which their sizes differ, or the usual one."""
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
    """The dimension of the output's projection that holds the heads; `None` if it cannot be told."""
    query, output = (roles["q"].row.shape if "q" in roles else ()), group.row.shape
    if len(query) != len(output) or len(query) < 2:
        return None
    # The output of a layer has the opposite order: its first dimension is last here.
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
    """Code under which these arrays are sharded between heads only."""
    row, rank = group.row, len(group.row.shape)
    units = tuple(unit if at == dim else 1 for at in range(rank))
    name = None if row.names is None else row.names[dim]
    if subject.is_named(group.paths[0]) and isinstance(name, str) and subject.axes is not None:
        try:
            subject.axes.merge(AxisRules(units={name: unit}))
        except ValueError:  # the name has a unit of another width already
            return subject.renamed(group.paths, _without(row.names or (), dim))
        return f"axes = axes.merge(AxisRules(units={{{name!r}: {unit}}}))"
    spec = trimmed(entries_of(subject.plain_row(group).requested)[:rank])
    return subject.ruled(group.paths, atomic(spec, units))


def _without(names: tuple[object, ...], dim: int) -> tuple[Any, ...]:
    return tuple(None if at == dim else name for at, name in enumerate(names))
