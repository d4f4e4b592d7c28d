"""What can be said of each leaf as it is planned: held whole, or cut less than asked."""

import functools as ft
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from .._ground.reason import Code, Reason
from .._ground.spec import canonical_entry, entries_at, entries_of, entry_axes, pinned
from .._ground.text import bytes_text, plural
from .._plan import Group, Row, axes_of, row_on
from .._rules import attempts
from ..topology import MeshSpec
from .finding import Finding
from .mistakes import axes_to_cut, cutting
from .subject import Subject, asked_by, code_of


def replicated(subject: Subject, limit: int) -> Iterator[Finding]:
    """Leaves of at least `limit` bytes that every device holds whole."""
    if not any(entries_of(row.requested) or row.strategies for row in subject.rows):
        return  # rules that ask for nothing anywhere are those of data parallelism
    whole = [
        number
        for number, (size, share) in enumerate(subject.content.byte_counts)
        if size >= limit and size == share and subject.mesh.size > 1 and subject.rows[number].rule is not None
    ]
    for group in subject.groups_of(whole):
        size = subject.content.byte_counts[group.number][0]
        if not _is_cut_short(group.row):  # that is said by `corrected`, with the reason
            message = f"every device holds all {bytes_text(size)} of it, as {_asks(group)}"
            fix = _sharded(subject, group) or f"replicated_bytes = {size + 1}"
            yield Finding("replicated", "warning", group.where, subject.excess(group), message, fix)


def _asks(group: Group) -> str:
    return f"{asked_by(group)} {'ask' if group.row.rule == 'names' else 'asks'}"


def _is_cut_short(row: Row) -> bool:
    return any(why.code in _CUT for why in row.reasons)


def _sharded(subject: Subject, group: Group) -> str | None:
    """Code that shards these leaves over an axis; `None` if there is none that can cut them."""
    row = group.row
    if any(why.code is Code.small for why in row.reasons):
        return None
    if not subject.is_named(group.paths[0]):
        over = cutting(subject, row.shape, row.units)
        return None if over is None else subject.ruled(group.paths, over)
    for dim, over in axes_to_cut(subject, row.shape, row.units):
        if row.names is not None and isinstance(name := row.names[dim], str):
            rule = f"[({name!r}, {over.axes[0]!r})]"  # before all others: the array has no axis that could block it
            return f"axes = axes.prepend({rule if subject.mode is None else f'modes={{{subject.mode!r}: {rule}}}'})"
    return None


# Why a leaf is cut less than its rule asks for, other than that somebody has said so.
_CUT = (Code.indivisible, Code.unit, Code.duplicate)


def corrected(subject: Subject) -> Iterator[Finding]:
    """Leaves that are cut less than their rule asks for; under `strict` all that have a reason."""
    rows = {n: why for n, row in enumerate(subject.rows) if row.reasons and (why := _shortfall(subject, row))}
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


# So many arrays, or groups of alike ones, that are cut less than asked for one mesh axis are told as one finding.
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


# From half to twice the size of an axis; so many of either, and of so many rows.
_MOST_TRIED, _MOST_ROWS = 16, 300


def _other_sizes(subject: Subject, axis: str) -> tuple[int, ...]:
    """Sizes of a mesh axis under which no array is cut less than asked but for other axes: one smaller, one larger."""
    mesh, size = subject.mesh, subject.mesh.shape.get(axis, 1)
    rows = [row for row in subject.rows if not {*_axes(_shortfall(subject, row))} - {axis}]
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
    # Units are declared for meshes that have more devices along an axis than there are units.
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
        # The mesh has been split so that the dimension takes as much as divides it: there is no more to have.
        whole = [dim for dim, entry in enumerate(entries_at(row.spec, len(row.shape))) if not entry_axes(entry)]
        found = [why for why in found if why.dim is None or why.dim in whole]
    return tuple(found)


def _cost(subject: Subject, group: Group) -> int:
    """How many bytes more each device holds than if all were cut as asked, an uneven cut rounded up."""
    row, sizes = group.row, subject.content.mesh.shape
    asked, used = 1, set[str]()
    wanted = [*entries_of(pinned(row.requested)), *[step.axes for step in row.strategies]]
    for axis in (axis for entry in wanted for axis in entry_axes(entry)):
        asked *= sizes.get(axis, 1) if axis not in used else 1
        used.add(axis)
    whole, share = subject.content.byte_counts[group.number]
    return max(0, share - -(-whole // asked)) * len(group.paths)


def _as_it_is(subject: Subject, group: Group, reasons: tuple[Reason, ...], sizes: _Sizes) -> str:
    """Code under which the leaf is asked for no more than it can have, or can have more."""
    row, axes = group.row, _axes(reasons)
    if not subject.strict and _more_if_refined(subject, group):
        return "refine = True"
    if subject.is_named(group.paths[0]):
        # Rules that ask for less leave room for others: only a new plan tells whether these fit.
        fits = (code for code, made in _with_less(subject, group) if made is not None and not _shortfall(subject, made))
        return next(fits, "strict = False" if subject.strict else subject.renamed(group.paths, ()))
    is_small = any(why.code is Code.small for why in reasons)
    # A leaf that got nothing may be cut over another axis.
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
    """Code that asks for less for a named leaf, and the row that it then has."""
    path, axes, row = group.paths[0], subject.axes, subject.plain_row(group)
    assert axes is not None
    dims = {why.dim for why in row.reasons if why.dim is not None and why.code is not Code.scalar}
    names = tuple(None if dim in dims else name for dim, name in enumerate(row.names or ()))
    entries = entries_at(row.spec, len(row.shape))
    alone = any(other is not row and _shares(other, row, dims) for other in subject.rows)
    keeps = any(entries[dim] is not None for dim in dims)
    renamed = (subject.renamed(group.paths, names), subject.row_with(path, names=names))
    if alone and not keeps:
        # Others with these names are cut as asked: the rules are right for them.
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
    """Whether another row has one of the names that stand on these dimensions, and is cut as asked."""
    names = {row.names[dim] for dim in dims if row.names is not None}
    return other.names is not None and not names.isdisjoint(other.names) and not _is_cut_short(other)
