"""Checks of each planned array: replicated, or sharded less than its rule asks for."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from .._ground.reason import Code, Reason
from .._ground.spec import canonical_entry, entries_at, entries_of, entry_axes
from .._ground.text import bytes_text, plural
from .._plan import Group, Row
from .._rules import axes_of_target
from .finding import Finding, Severity
from .subject import Subject, asked_by, code_of


def replicated(subject: Subject, limit: int) -> Iterator[Finding]:
    """A finding for each array of at least `limit` bytes that every device holds whole."""
    content = subject.content
    if content.mesh.size == 1 or not any(entries_of(row.requested) or row.strategies for row in content.rows):
        return  # rules that shard nothing at all are those of data parallelism
    for group in content.groups:
        row, (size, shard) = group.row, content.byte_counts[group.number]
        # If the array could not be sharded as asked, `corrected` says that, with the reason.
        if size < limit or size != shard or row.rule is None or any(why.code in _CUT for why in row.reasons):
            continue
        message = f"every device holds all {bytes_text(size)} of it, as {_asks(group)}"
        fix = _sharded(subject, group) or f"replicated_bytes = {size + 1}"
        lost = subject.lost(row.shape, row.dtype) * len(group.paths)
        yield Finding("replicated", "warning", group.where, lost, message, fix)


def _asks(group: Group) -> str:
    return f"{asked_by(group)} {'ask' if group.row.rule == 'names' else 'asks'}"


def _sharded(subject: Subject, group: Group) -> str | None:
    """Code that shards these arrays over a mesh axis; `None` if no axis divides them."""
    row, mode = group.row, subject.mode
    places = subject.divisible(row.shape, row.units)
    if not places or any(why.code is Code.small for why in row.reasons):
        return None
    if not subject.is_named(group):
        return subject.ruled(group.paths, subject.cut(row.shape, row.units))
    for dim, axis in places:
        if row.names is not None and isinstance(name := row.names[dim], str):
            rule = f"[({name!r}, {axis!r})]"  # the array has no axis that could block it
            return f"axes = axes.prepend({rule if mode is None else f'modes={{{mode!r}: {rule}}}'})"
    return None


# The reasons why a leaf is sharded less than its rule asks, except for those that somebody has accepted.
_CUT = (Code.indivisible, Code.unit, Code.duplicate)
_OF_SIZE = (Code.indivisible, Code.unit)


def corrected(subject: Subject) -> Iterator[Finding]:
    """Findings for arrays that are sharded less than their rule asks for; under `strict` for all arrays
    with a reason. Arrays that one mesh axis does not divide are one finding.
    """
    content = subject.content
    if not any(row.reasons for row in content.rows):
        return
    rows = content.rows
    if subject.refine:
        twins = dict(zip(content.index, subject.refined.index, strict=True))
        rows = [subject.refined.rows[twins[number]] for number in range(len(rows))]
    causes: dict[object, list[_Short]] = {}
    for group in content.groups:
        reasons = _shortfall(subject, rows[group.number])
        if reasons:
            axes = {axis for why in reasons for axis in why.axes}
            is_size = len(axes) == 1 and all(why.code in _OF_SIZE for why in reasons)
            # Units may be declared for meshes that have more devices along an axis than there are units.
            foreseen = all(why.code is Code.unit for why in reasons)
            severity = "error" if subject.strict else "info" if foreseen else "warning"
            causes.setdefault((severity, *axes) if is_size else group, []).append(_Short(group, reasons, severity))
    for shorts in causes.values():
        if len(shorts) < _TOGETHER:
            for one in shorts:
                message = f"cut less than {_asks(one.group)} for: {'; '.join(map(str, one.reasons))}"
                yield _finding(subject, one.group.where, message, [one])
        else:
            axis = shorts[0].reasons[0].axes[0]
            arrays = plural(sum(len(one.group.paths) for one in shorts), "array")
            axis_text = f"`{axis}` ({subject.content.mesh.shape.get(axis, 1)})"
            what = f"{arrays} are not divisible by {axis_text} as asked"
            if all(why.code is Code.unit for one in shorts for why in one.reasons):
                what = f"{axis_text} would cut inside units of {arrays}"
            shown = [f"`{one.group.where}` {one.group.row.shape}" for one in shorts[:_SHOWN]]
            shown += [f"{len(shorts) - _SHOWN} more"] if len(shorts) > _SHOWN else []
            yield _finding(subject, f"mesh axis {axis!r}", f"{what}: {', '.join(shown)}", shorts)


# If at least this many arrays, or groups of similar arrays, are sharded less over one mesh axis, they are one finding.
_TOGETHER = 3
_SHOWN = 3


class _Short(NamedTuple):
    """Arrays that are sharded less than their rule asks for, with the reasons and the severity of the finding."""

    group: Group
    reasons: tuple[Reason, ...]
    severity: Severity


def _shortfall(subject: Subject, row: Row) -> tuple[Reason, ...]:
    if subject.strict:
        return tuple(why for why in row.reasons if why.code is not Code.scalar)
    found = [why for why in row.reasons if why.code in _CUT]
    if subject.refine:
        # The mesh has been split so that the dimension takes all axes that divide it: no more is possible.
        whole = [dim for dim, entry in enumerate(entries_at(row.spec, len(row.shape))) if not entry_axes(entry)]
        found = [why for why in found if why.dim is None or why.dim in whole]
    return tuple(found)


def _finding(subject: Subject, where: str, message: str, shorts: list[_Short]) -> Finding:
    """The finding about some arrays, with the bytes that each device holds beyond those that their rules ask for."""
    content, sizes, lost = subject.content, subject.content.mesh.shape, 0
    for row, group in ((one.group.row, one.group) for one in shorts):
        axes = [axis for target in (row.requested, *row.strategies) for axis in axes_of_target(target)]
        asked = math.prod(sizes.get(axis, 1) for axis in dict.fromkeys(axes))
        whole, shard = content.byte_counts[group.number]
        lost += max(0, shard - -(-whole // asked)) * len(group.paths)
    return Finding("corrected", shorts[0].severity, where, lost, message, _as_it_is(subject, shorts))


def _as_it_is(subject: Subject, shorts: list[_Short]) -> str:
    """Code that asks for no more than the arrays can have, or that splits a mesh axis for them."""
    content, lines, targets = subject.content, dict[str, None](), dict[Any, list[str]]()
    for group, reasons, _ in shorts:
        row = group.row
        if not (subject.strict or subject.refine or subject.is_plan):
            better = subject.refined.index[content.index.index(group.number)]
            if subject.refined.byte_counts[better][1] < content.byte_counts[group.number][1]:
                return "refine = True"
        if not subject.is_named(group):
            is_whole = not entries_of(row.spec) and not any(why.code is Code.small for why in reasons)
            target = subject.cut(row.shape, row.units) if is_whole else row.spec
            targets.setdefault(target, []).extend(group.paths)
        elif subject.strict and not all(why.code in _CUT for why in reasons):
            lines["strict = False"] = None
        else:
            # A dimension that is sharded over some of its axes gets a name of its own, with these axes.
            names, entries = [*(row.names or ())], entries_at(row.spec, len(row.shape))
            for dim in dict.fromkeys(why.dim for why in reasons if why.dim is not None):
                kept = canonical_entry(entry_axes(entries[dim]))
                names[dim] = f"{names[dim]}_{row.shape[dim]}" if kept else None
                if kept and subject.axes is not None and names[dim] not in subject.axes.names:
                    lines[f"axes = axes.extend([({names[dim]!r}, {code_of(kept)})])"] = None
            lines[subject.renamed(group.paths, tuple(names))] = None
    return "\n".join([*lines, *[subject.ruled(paths, target) for target, paths in targets.items()]])
