"""What can be said of each leaf as it is planned: held whole, or cut less than asked."""

from collections.abc import Iterator, Mapping
from typing import Any

from jax.sharding import PartitionSpec

from .._ground.reason import Code, Reason
from .._ground.spec import canonical_entry, entries_of, entry_axes, pinned
from .._ground.text import bytes_text
from .._plan.content import Group
from .._plan.leaf import Row
from .._rules.axis_rules import AxisRules
from .._rules.resolution import attempts
from .._rules.strategies import Fsdp
from .causes import Short, by_cause, mesh_code, other_sizes
from .code import code_of
from .finding import Finding
from .mistakes import fallbacks
from .subject import Subject, asked_by


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
    path, row = group.paths[0], group.row
    if subject.flat is None or not subject.is_named(path) and row.names is None:
        for over in fallbacks(subject, len(row.shape)):
            if any(_divides(subject, over, dim, size) for dim, size in enumerate(row.shape)):
                return subject.ruled(group.paths, over)
        return None
    for rule in _axis_rules_for(subject, row):
        code, axes = _before_others(subject, rule)
        made = subject.row_with(path, axes=axes)
        if made is not None and entries_of(made.spec):
            return code
    return None


def _axis_rules_for(subject: Subject, row: Row) -> Iterator[tuple[str, str]]:
    """Rules that would shard a dimension of a named array over an axis that divides it, the largest axis first."""
    for over in fallbacks(subject, len(row.shape)):
        for dim, (name, size) in enumerate(zip(row.names or (), row.shape, strict=False)):
            if isinstance(name, str) and _divides(subject, over, dim, size):
                yield name, over.axes[0]


def _divides(subject: Subject, over: Fsdp, dim: int, size: int) -> bool:
    return dim not in over.skip and size > 0 and size % subject.mesh.axis_size(over.axes) == 0


def _before_others(subject: Subject, rule: tuple[str, str]) -> tuple[str, AxisRules]:
    """`rule` before all others: as code, and as rules."""
    assert subject.axes is not None
    name, axis = rule
    if subject.mode is None:
        return f"axes = axes.prepend([({name!r}, {axis!r})])", subject.axes.prepend([rule])
    modes = {subject.mode: [rule]}
    return f"axes = axes.prepend(modes={{{subject.mode!r}: [({name!r}, {axis!r})]}})", subject.axes.prepend(modes=modes)


# Why a leaf is cut less than its rule asks for, other than that somebody has said so.
_CUT = (Code.indivisible, Code.unit, Code.duplicate)


def corrected(subject: Subject) -> Iterator[Finding]:
    """Leaves that are cut less than their rule asks for; under `strict` all that have a reason."""
    rows = {n: why for n, row in enumerate(subject.rows) if row.reasons and (why := _shortfall(subject, row))}
    found = (Short(group, rows[group.number], _corrected(subject, group, rows)) for group in subject.groups_of([*rows]))
    yield from by_cause(subject, found, _shortfall)


def _corrected(subject: Subject, group: Group, rows: Mapping[int, tuple[Reason, ...]]) -> Finding:
    """The finding about one group of arrays."""
    reasons = rows[group.number]
    cost = _cost(subject, group)
    # Units are declared for meshes that have more devices along an axis than there are units.
    foreseen = all(why.code is Code.unit for why in reasons)
    severity = "error" if subject.strict else "info" if foreseen else "warning"
    told = "; ".join(map(str, reasons))
    message = f"cut less than {_asks(group)} for: {told}"
    return Finding("corrected", severity, group.where, cost, message, _as_it_is(subject, group))


def _shortfall(subject: Subject, row: Row) -> tuple[Reason, ...]:
    if subject.strict:
        return tuple(why for why in row.reasons if why.code is not Code.scalar)
    found = [why for why in row.reasons if why.code in _CUT]
    if subject.refine:
        # The mesh has been split so that the dimension takes as much as divides it: there is no more to have.
        found = [why for why in found if why.dim is None or not _has_axes(row.spec, why.dim)]
    return tuple(found)


def _has_axes(spec: PartitionSpec, dim: int) -> bool:
    entries = entries_of(spec)
    return dim < len(entries) and bool(entry_axes(entries[dim]))


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


def _as_it_is(subject: Subject, group: Group) -> str:
    """Code under which the leaf is asked for no more than it can have, or can have more."""
    row, path = group.row, group.paths[0]
    if not subject.strict and _more_if_refined(subject, group):
        return "refine = True"
    if subject.flat is None or not subject.is_named(path):
        # A leaf that got nothing may be cut over another axis.
        others = () if entries_of(row.spec) else fallbacks(subject, len(row.shape))
        given = row if not subject.refine else subject.row_with(path)  # in the words of the mesh before it was refined
        for target in others:
            if _suffices(subject, path, target):
                return subject.ruled(group.paths, target)
        if resized := _resized(subject, group):
            return resized
        if given is not None and _suffices(subject, path, given.spec):
            return subject.ruled(group.paths, given.spec)
        return "strict = False"
    for code, made in _with_less(subject, group):
        if made is not None and not _shortfall(subject, made):
            return code
    return "strict = False" if subject.strict else subject.renamed(group.paths, ())


def _suffices(subject: Subject, path: str, target: Any) -> bool:
    """Whether the array at `path` gets all that this target asks for; taken for granted of a ready plan."""
    if subject.flat is None:
        return True
    made = subject.row_with(path, paths=subject.prepended(path, target))
    return made is not None and not _shortfall(subject, made)


def _resized(subject: Subject, group: Group) -> str | None:
    """Code for a mesh under which these and all other arrays are cut as asked; `None` if there is none near."""
    axes = {axis for why in _shortfall(subject, group.row) for axis in why.axes}
    others = [one for one in subject.groups if one.row.requested != PartitionSpec() or one.row.strategies]
    if len(axes) != 1 or len(others) > _MOST_RESIZED:
        return None
    (axis,) = axes
    sizes = other_sizes(subject, axis, [group, *others], _shortfall)
    return mesh_code(subject, axis, sizes[0]) if sizes else None


# Each of these is planned again, for a few sizes of the axis.
_MOST_RESIZED = 100


def _more_if_refined(subject: Subject, group: Group) -> bool:
    if subject.refine or subject.flat is None:
        return False
    content = subject.refined
    at = content.skeleton.paths.index(group.paths[0])
    row = content.rows[content.index[at]]
    return row.byte_counts(content.mesh.shape)[1] < subject.content.byte_counts[group.number][1]


def _with_less(subject: Subject, group: Group) -> Iterator[tuple[str, Row | None]]:
    """Code that asks for less for a named leaf, and the row that it then has."""
    path, axes = group.paths[0], subject.axes
    row = (subject.row_with(path) if subject.refine else None) or group.row
    assert axes is not None
    dims = {why.dim for why in row.reasons if why.dim is not None and why.code is not Code.scalar}
    names = tuple(None if dim in dims else name for dim, name in enumerate(row.names or ()))
    entries = (*entries_of(row.spec), *[None] * len(row.shape))
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
