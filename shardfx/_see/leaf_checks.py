"""Checks of planned arrays: finds arrays that are replicated, or sharded less than
their rules request, or not like similar arrays. A `Group` is arrays that are planned
alike and whose paths differ only in numbers.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from .._ground.reason import Code, Reason
from .._ground.spec import canonical_entry, entries_at, entries_of, entry_axes
from .._ground.text import between_numbers, bytes_text, plural, spec_text, together
from .._plan import Group, Row
from .._rules import axes_of_target
from .finding import Finding, Severity
from .subject import Subject, code_of, has_code, name_at, rule_of


def replicated(subject: Subject, limit: int) -> Iterator[Finding]:
    """A finding for each array of at least `limit` bytes that every device holds whole."""
    content = subject.content
    shards_some = any(
        entries_of(row.requested) or row.strategies for row in content.rows
    )
    # Rules that shard nothing at all are those of data parallelism.
    if content.mesh.size == 1 or not shards_some:
        return
    for group in content.groups:
        row = group.row
        whole_bytes, shard_bytes = content.byte_counts[group.number]
        is_whole = whole_bytes == shard_bytes
        if whole_bytes < limit or not is_whole or row.rule is None:
            continue
        # If the array could not be sharded as requested, `corrected` reports it, with
        # the reason.
        if any(reason.code.is_cut for reason in row.reasons):
            continue
        cause = _rule_asks(group)
        if has_code(row.reasons, Code.skipped):
            cause = f"{rule_of(group)} may cut no dimension of it"
        message = f"every device holds all {bytes_text(whole_bytes)} of it, as {cause}"
        fix = _sharding_fix(subject, group) or f"replicated_bytes = {whole_bytes + 1}"
        lost_bytes = subject.bytes_lost_if_replicated(row.shape, row.dtype)
        yield Finding(
            code="replicated",
            severity="warning",
            where=group.where,
            bytes=lost_bytes * len(group.paths),
            message=message,
            fix=fix,
        )


def _rule_asks(group: Group) -> str:
    """The words "its names ask" or "paths[0] asks", by what shards these arrays."""
    verb = "ask" if group.row.rule == "names" else "asks"
    return f"{rule_of(group)} {verb}"


def _sharding_fix(subject: Subject, group: Group) -> str | None:
    """Code that shards the arrays of `group` over a mesh axis; `None` if no mesh axis
    divides a dimension, or if the arrays are replicated because they are small.
    """
    row = group.row
    # Pairs of a dimension and a mesh axis that divides it.
    divisible_dims = subject.divisible(row.shape, row.units)
    if not divisible_dims or has_code(row.reasons, Code.small):
        return None
    if not subject.is_named(group):
        return subject.rule_fix(group.paths, subject.target_for(row.shape, row.units))
    for dim, axis in divisible_dims:
        name = name_at(row, dim)
        if isinstance(name, str):
            # The array is replicated, so no dimension of it uses the axis already.
            rules = f"[({name!r}, {axis!r})]"
            if subject.mode is not None:
                rules = f"modes={{{subject.mode!r}: {rules}}}"
            return f"axes = axes.prepend({rules})"
    return None


def corrected(subject: Subject) -> Iterator[Finding]:
    """Findings for arrays that are sharded less than their rule requests.

    An array is found if a requested mesh axis does not divide a dimension, would split
    a unit, or already shards another dimension. With `lint(strict=True)`, an array is
    found if the plan has any reason for it. Scalars are never found. Three or more
    arrays that one mesh axis does not divide are one finding.
    """
    content = subject.content
    if not any(row.reasons for row in content.rows):
        return
    rows = content.rows
    if subject.refine:
        # `index` has the number of the row of each leaf, in both plans.
        refined_numbers = dict(zip(content.index, subject.refined.index, strict=True))
        rows = [
            subject.refined.rows[refined_numbers[number]] for number in range(len(rows))
        ]
    # The arrays that are sharded less for one cause.
    causes: dict[object, list[_Undersharded]] = {}
    for group in content.groups:
        reasons = _shortfall(subject, rows[group.number])
        if not reasons:
            continue
        severity: Severity = "warning"
        if subject.strict:
            severity = "error"
        elif all(reason.code is Code.unit for reason in reasons):
            # Units may be declared for meshes that have more devices along an axis than
            # there are units.
            severity = "info"
        axes = set()
        for reason in reasons:
            axes.update(reason.axes)
        # Arrays of one cause may become one finding; any other array is its own cause.
        cause: object = group
        if len(axes) == 1 and all(reason.code.is_about_size for reason in reasons):
            cause = (severity, *axes)
        undersharded_group = _Undersharded(
            group=group,
            reasons=reasons,
            severity=severity,
        )
        causes.setdefault(cause, []).append(undersharded_group)

    for undersharded in causes.values():
        if len(undersharded) >= _LEAST_TOGETHER:
            yield _finding_of_axis(subject, undersharded)
            continue
        for short in undersharded:
            reasons_text = "; ".join(map(str, short.reasons))
            message = f"cut less than {_rule_asks(short.group)} for: {reasons_text}"
            yield _finding(subject, short.group.where, message, [short])


# If at least this many arrays, or groups of similar arrays, are sharded less over one
# mesh axis, they are one finding.
_LEAST_TOGETHER = 3
_SHOWN = 3


class _Undersharded(NamedTuple):
    """Arrays that are sharded less than their rule requests, the reasons, and the
    severity of a finding about them.
    """

    group: Group
    reasons: tuple[Reason, ...]
    severity: Severity


def _finding_of_axis(subject: Subject, shorts: list[_Undersharded]) -> Finding:
    """One finding for arrays that one mesh axis does not divide. `shorts` has groups of
    these arrays, each with the reasons, which are all about this axis.
    """
    axis = shorts[0].reasons[0].axes[0]
    size = subject.content.mesh.shape.get(axis, 1)
    axis_text = f"`{axis}` ({size})"
    arrays = plural(sum(len(short.group.paths) for short in shorts), "array")
    cause = f"{arrays} are not divisible by {axis_text} as asked"
    codes = set()
    for short in shorts:
        codes.update(reason.code for reason in short.reasons)
    if codes == {Code.unit}:
        cause = f"{axis_text} would cut inside units of {arrays}"

    shown = []
    for short in shorts[:_SHOWN]:
        shown.append(f"`{short.group.where}` {short.group.row.shape}")
    if len(shorts) > _SHOWN:
        shown.append(f"{len(shorts) - _SHOWN} more")
    message = f"{cause}: {', '.join(shown)}"
    return _finding(subject, f"mesh axis {axis!r}", message, shorts)


def _shortfall(subject: Subject, row: Row) -> tuple[Reason, ...]:
    """The reasons of `row`, the plan of an array, for which the array is sharded less
    than its rule requests.
    """
    if subject.strict:
        return tuple(reason for reason in row.reasons if not reason.code.is_expected)
    entries = entries_at(row.spec, len(row.shape))
    cuts = []
    for reason in row.reasons:
        # With `refine` the mesh has been split so that a dimension is sharded over all
        # axes that divide it: no more is possible.
        is_sharded = reason.dim is not None and bool(entry_axes(entries[reason.dim]))
        is_as_far_as_possible = subject.refine and is_sharded
        if reason.code.is_cut and not is_as_far_as_possible:
            cuts.append(reason)
    return tuple(cuts)


def _finding(
    subject: Subject,
    where: str,
    message: str,
    shorts: list[_Undersharded],
) -> Finding:
    """The finding about the arrays in `shorts`, which are sharded less than requested.
    Its bytes are those that the requested sharding would save on each device. `where`
    and `message` become its fields.
    """
    content = subject.content
    avoidable_bytes = 0
    for short in shorts:
        row = short.group.row
        axes: dict[str, None] = {}
        for target in (row.requested, *row.strategies):
            axes |= dict.fromkeys(axes_of_target(target))
        shards = math.prod(content.mesh.shape.get(axis, 1) for axis in axes)
        whole_bytes, shard_bytes = content.byte_counts[short.group.number]
        requested_bytes = -(-whole_bytes // shards)
        surplus = max(0, shard_bytes - requested_bytes)
        avoidable_bytes += surplus * len(short.group.paths)
    fix = _fix_for_present_spec(subject, shorts)
    return Finding(
        code="corrected",
        severity=shorts[0].severity,
        where=where,
        bytes=avoidable_bytes,
        message=message,
        fix=fix,
    )


def _fix_for_present_spec(subject: Subject, shorts: list[_Undersharded]) -> str:
    """Code that resolves the finding about the arrays in `shorts`: `refine = True` if
    splitting mesh axes shards the arrays further, else rules that request the present
    sharding.
    """
    # Lines of code about names, and for each target of a path rule its arrays.
    lines = dict[str, None]()
    targets = dict[Any, list[str]]()
    for short in shorts:
        group = short.group
        row = group.row
        if _is_better_refined(subject, group):
            return "refine = True"
        if not subject.is_named(group):
            target: Any = row.spec
            if not entries_of(row.spec) and not has_code(short.reasons, Code.small):
                target = subject.target_for(row.shape, row.units)
            targets.setdefault(target, []).extend(group.paths)
        elif subject.strict and not all(why.code.is_cut for why in short.reasons):
            lines["strict = False"] = None
        else:
            lines |= dict.fromkeys(_names_for_present_spec(subject, short))
    rules = [subject.rule_fix(paths, target) for target, paths in targets.items()]
    return "\n".join([*lines, *rules])


def _is_better_refined(subject: Subject, group: Group) -> bool:
    """Whether splitting mesh axes, which the subject does not do, shards the arrays of
    `group` further.
    """
    if subject.strict or subject.refine or subject.is_plan:
        return False
    content = subject.content
    # Both plans have the same leaves, and different rows.
    first_leaf = content.index.index(group.number)
    refined_number = subject.refined.index[first_leaf]
    _, refined_bytes = subject.refined.byte_counts[refined_number]
    _, shard_bytes = content.byte_counts[group.number]
    return refined_bytes < shard_bytes


def _names_for_present_spec(subject: Subject, short: _Undersharded) -> Iterator[str]:
    """Yields lines of code that give the arrays of `short` logical names, and those
    names rules, for their present sharding.
    """
    row = short.group.row
    names = [*(row.names or ())]
    entries = entries_at(row.spec, len(row.shape))
    for dim in dict.fromkeys(reason.dim for reason in short.reasons):
        if dim is None:
            continue
        entry = canonical_entry(entry_axes(entries[dim]))
        if not entry:
            names[dim] = None
            continue
        # A dimension that is sharded over some of its axes gets a name of its own, with
        # these axes. One dimension may have several logical names.
        old_name = names[dim]
        if not isinstance(old_name, str):
            old_name = "_".join(old_name)
        name = f"{old_name}_{row.shape[dim]}"
        names[dim] = name
        if subject.axes is not None and name not in subject.axes.names:
            yield f"axes = axes.extend([({name!r}, {code_of(entry)})])"
    yield subject.names_fix(short.group.paths, tuple(names))


def uneven_layers(subject: Subject) -> Iterator[Finding]:
    """Findings for arrays that are sharded differently from the same array of most
    other layers.

    The arrays of repeated layers are compared if they have one shape and dtype, and
    paths that differ only in numbers.
    """
    # The bytes of a whole array and of its shard, by the number of its row.
    byte_counts = subject.content.byte_counts
    for groups in together(subject.content.groups, _layer_key).values():
        groups_by_spec = together(groups, lambda group: group.row.spec)
        if len(groups_by_spec) == 1:
            continue
        # The spec of most layers is taken as intended; of equally many, the one with
        # fewer bytes per device.
        usual_groups = max(
            groups_by_spec.values(),
            key=lambda groups_of_spec: (
                _count(groups_of_spec),
                -byte_counts[groups_of_spec[0].number][1],
            ),
        )
        usual_group = usual_groups[0]
        _, usual_bytes = byte_counts[usual_group.number]
        other_specs = [
            groups_of_spec
            for groups_of_spec in groups_by_spec.values()
            if groups_of_spec is not usual_groups
        ]
        for group in itertools.chain.from_iterable(other_specs):
            _, shard_bytes = byte_counts[group.number]
            surplus = max(0, shard_bytes - usual_bytes) * len(group.paths)
            message = (
                f"sharded as {spec_text(entries_of(group.row.spec))} by"
                f" {rule_of(group)}, while {_count(usual_groups)} of the same stack"
                f" (`{usual_group.where}`) are sharded as"
                f" {spec_text(entries_of(usual_group.row.spec))} by"
                f" {rule_of(usual_group)}"
            )
            fix = subject.fix(group, usual_group.row.names, usual_group.row.spec)
            yield Finding(
                code="uneven-layers",
                severity="warning",
                where=group.where,
                bytes=surplus,
                message=message,
                fix=fix,
            )


def _layer_key(group: Group) -> object:
    """A key that is equal for the arrays of one kind in repeated layers."""
    # A number at the end of a path is no layer: the rows and columns of a square matrix
    # are `w/0` and `w/1`.
    path = group.paths[0]
    last = path.rpartition("/")[2]
    last_number = last if last.isdigit() else ""
    return between_numbers(path), last_number, group.row.shape, group.row.dtype


def _count(groups: list[Group]) -> int:
    """The number of arrays in some groups."""
    return sum(len(group.paths) for group in groups)
