"""Checks of a draft, which is a plan with its errors: finds leaves that cannot be
planned or that no rule covers, unknown names, absent mesh axes, and unused path rules.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from .._ground.spec import entries_of, entry_axes
from .._ground.text import between_numbers, joined
from .._plan import (
    NAMES,
    Draft,
    Row,
    Unused,
    absent_axes,
    uncovered,
    unknown_of_rows,
    unknown_units,
    unused_rules,
)
from .._rules import Optional, members_of, near, nearest
from .finding import Finding, Severity
from .subject import Subject, code_of, mode_argument


# The number of groups without a rule for which the nearest rule is searched: the search
# takes longer than planning.
_HINTED = 40


def _error_of_leaf(draft: Draft, row_index: int) -> str | None:
    """The text of the error for which a leaf cannot be planned; `None` if it can.

    `row_index` is the leaf's entry of `draft.row_indices`: -2 stands for the first
    error of the draft, -3 for the second; other numbers are no errors.
    """
    if row_index > -2:
        return None
    _, error = draft.errors[-2 - row_index]
    return str(error)


def unplannable(subject: Subject, draft: Draft) -> Iterator[Finding]:
    """Findings for leaves that cannot be planned. Equal leaves of repeated layers are
    one finding.
    """
    flat = subject.flat
    # The positions of leaves that have one error, and whose paths differ in numbers.
    groups: dict[tuple[object, str], list[int]] = {}
    for position, row_index in enumerate(draft.row_indices):
        error = _error_of_leaf(draft, row_index)
        if error is not None:
            key = (between_numbers(flat.paths[position]), error)
            groups.setdefault(key, []).append(position)

    for (_, error), positions in groups.items():
        first = positions[0]
        paths = [flat.paths[position] for position in positions]
        lost_bytes = 0
        for position in positions:
            leaf = flat.leaves[position]
            shape = tuple(leaf.shape)
            lost_bytes += subject.bytes_lost_if_replicated(shape, leaf.dtype)
        first_shape = tuple(flat.leaves[first].shape)
        leaf_names = subject.leaf_names[first]
        if leaf_names is None:
            fix = subject.rule_fix(paths, subject.target_for(first_shape))
        elif subject.axes is None:
            # Without axis rules, every name of the tree needs one.
            names: dict[str, None] = {}
            for names_of_leaf in subject.leaf_names:
                names |= dict.fromkeys(members_of(names_of_leaf))
            rules = ", ".join(f"({name!r}, None)" for name in names)
            fix = f"axes = AxisRules([{rules}])"
        else:
            names_that_fit = _fitting(tuple(leaf_names), len(first_shape))
            fix = subject.names_fix(paths, names_that_fit)
        yield Finding(
            code="unplannable",
            severity="error",
            where=joined(paths),
            bytes=lost_bytes,
            message=error,
            fix=fix,
        )


def _fitting(names: tuple[object, ...], rank: int) -> tuple[object, ...]:
    """Valid logical names for an array of rank `rank`, made from names of another
    length or with a name twice.

    Duplicates become `None`, names beyond the rank are left out, and missing names
    become `...` in front: for rank 3, `("a", "a")` becomes `(..., "a", None)`. The
    result is `()` if an entry is neither a name, `None` nor `...`.
    """
    if not all(name is None or name is ... or isinstance(name, str) for name in names):
        return ()
    fitting_names: list[object] = []
    for number, name in enumerate(names):
        if name is ...:
            continue
        if name in names[:number]:
            name = None
        fitting_names.append(name)
    if len(fitting_names) < rank:
        return (..., *fitting_names)
    return tuple(fitting_names[:rank])


def uncovered_leaves(
    subject: Subject,
    draft: Draft,
    severity: Severity,
) -> Iterator[Finding]:
    """Findings, of this severity, for leaves that no path rule covers. Leaves that are
    alike are one finding.
    """
    # The path and the plan of each leaf of a group.
    groups: dict[object, list[tuple[str, Row]]] = {}
    for path, row in uncovered(draft):
        groups.setdefault((between_numbers(path), row), []).append((path, row))
    patterns: tuple[str, ...] = ()
    if subject.paths is not None:
        patterns = tuple(regex for regex, _ in subject.paths.rules)
    for number, leaves in enumerate(groups.values()):
        paths = [path for path, _ in leaves]
        _, row = leaves[0]
        hint = near(paths[0], patterns) if number < _HINTED else ""
        arrays = "an array" if len(paths) == 1 else f"{len(paths)} arrays"
        message = (
            f"no rule covers {arrays} of shape {row.shape}{hint}, so every device holds"
            " all of it"
        )
        lost_bytes = subject.bytes_lost_if_replicated(row.shape, row.dtype)
        fix = subject.rule_fix(paths, subject.target_for(row.shape), last=True)
        yield Finding(
            code="unmatched",
            severity=severity,
            where=joined(paths),
            bytes=lost_bytes * len(paths),
            message=message,
            fix=fix,
        )


def unknown_names(
    subject: Subject,
    draft: Draft,
    severity: Severity,
) -> Iterator[Finding]:
    """Findings, of this severity, for logical names that have no rule. The names are
    those of arrays, and those in `AxisRules(units=...)`.
    """
    axes = subject.axes
    if axes is None:
        return
    for name in unknown_units(axes):
        message = (
            f"`units` has {name!r}{near(name, axes.names)}, and no rule of `axes` is"
            " about that name"
        )
        fix = f"axes = axes.without({name!r})"
        yield Finding(
            code="unknown-name",
            severity=severity,
            where=f"units {name!r}",
            bytes=0,
            message=message,
            fix=fix,
        )

    # By the number of a row, the names of its arrays that have no rule.
    unknown_by_row = unknown_of_rows(draft.rows, axes)
    # Pairs of the path and the plan of each array with the name.
    arrays_of_name: dict[str, list[tuple[str, Row]]] = {}
    for path, row_number, row in draft.arrays(unknown_by_row):
        for name in unknown_by_row[row_number]:
            arrays_of_name.setdefault(name, []).append((path, row))
    for name, arrays in arrays_of_name.items():
        lost_bytes = 0
        for _, row in arrays:
            lost_bytes += subject.bytes_lost_if_replicated(row.shape, row.dtype)
        similar = nearest(name, axes.names)
        fix = f"axes = axes.extend([({name!r}, None)])"
        if similar:
            fix = f"axes = axes.with_alias({name!r}, of={similar[0]!r})"
        first_path, _ = arrays[0]
        message = (
            "no rule of `axes` is about the logical name"
            f" {name!r}{near(name, axes.names)} of `{first_path}`"
        )
        if len(arrays) > 1:
            message += f" and {len(arrays) - 1} more"
        yield Finding(
            code="unknown-name",
            severity=severity,
            where=f"name {name!r}",
            bytes=lost_bytes,
            message=message,
            fix=fix,
        )


def absent(subject: Subject, draft: Draft, severity: Severity) -> Iterator[Finding]:
    """Findings, of this severity, for mesh axes that rules of `draft` use and its mesh
    lacks. Axes that the rules declare, as in `PathRules(..., mesh_axes=["x"])`, are not
    found.
    """
    mesh_axes = draft.mesh.axis_names
    rules = "axes" if subject.axes is not None else "paths"
    # The text names the first rule or leaf that uses the axis.
    for axis, user_text in absent_axes(draft).items():
        message = (
            f"{user_text} uses the mesh axis {axis!r}{near(axis, mesh_axes)}; the mesh has"
            f" {mesh_axes}"
        )
        similar = nearest(axis, mesh_axes)
        lines = []
        if similar:
            lines = [*_corrected_axis(subject, axis, similar[0])]
        if not lines:
            lines = [f"{rules} = {rules}.extend(mesh_axes=({axis!r},))"]
        fix = "\n".join(lines)
        yield Finding(
            code="absent-axis",
            severity=severity,
            where=f"mesh axis {axis!r}",
            bytes=0,
            message=message,
            fix=fix,
        )


def _corrected_axis(subject: Subject, axis: str, similar: str) -> Iterator[str]:
    """Yields lines of code that replace the mesh axis `axis` by the axis `similar` in
    all rules. Rules whose target is a callable do not change.
    """
    axes = subject.axes
    paths = subject.paths
    # The variable that has the rules, their mode, and pairs of a name or regex and a
    # target.
    tables: list[tuple[str, str | None, Sequence[tuple[str, Any]]]] = []
    if axes is not None:
        tables.append(("axes", None, axes.rules))
        tables += [("axes", mode, rules) for mode, rules in axes.modes]
    if paths is not None:
        tables.append(("paths", None, paths.rules))
    for variable, mode, rules in tables:
        of_mode = mode_argument(mode)
        for number, (_, target) in enumerate(rules):
            code = code_of(target)
            if repr(axis) not in code:
                continue
            new_code = code.replace(repr(axis), repr(similar))
            if repr(similar) in code:
                # No array is sharded over one axis twice.
                new_code = code_of(_without(target, axis))
            if new_code != code:
                yield f"{variable} = {variable}.replace({number}, {new_code}{of_mode})"


def _without(target: object, axis: str) -> object:
    """The target of a rule without the mesh axis `axis`.

    A target that contains other targets, such as `P("data") | fsdp("tensor")`, does not
    change.
    """
    if isinstance(target, PartitionSpec):
        entries: list[Any] = []
        for entry in entries_of(target):
            axes = entry_axes(entry)
            if axis in axes:
                entries.append(tuple(other for other in axes if other != axis) or None)
            else:
                entries.append(entry)
        return PartitionSpec(*entries)
    if isinstance(target, tuple):
        return tuple(entry for entry in target if entry != axis)
    return target


def unused_findings(
    subject: Subject,
    draft: Draft,
    kinds: Sequence[tuple[str, str]],
    severity: Severity,
) -> Iterator[Finding]:
    """Findings for path rules that shard no leaf, and for entries of `kinds` that apply
    to no leaf.

    `kinds` has pairs of a regex and a memory kind. A rule with `optional(...)` is
    found, with severity "info", only if it matches leaves that earlier rules shard.
    """
    flat = subject.flat
    rules = draft.paths.rules
    used = draft.paths.used
    for unused in unused_rules(
        rules=rules, used=used, flat=flat, decided=subject.leaf_names, by=NAMES
    ):
        regex, _ = rules[unused.number]
        yield _unused_rule(subject, unused, regex, severity)
    yield from _unused_optional_rules(subject, draft)

    for unused in unused_rules(draft.kinds.rules, draft.kinds.used, flat):
        where = f"memory_kinds[{unused.number}] {kinds[unused.number][0]!r}"
        other_kinds = (*kinds[: unused.number], *kinds[unused.number + 1 :])
        fix = f"memory_kinds = {other_kinds!r}"
        yield _unused(
            where=where, what="entry", severity=severity, unused=unused, fix=fix
        )


def _unused_optional_rules(subject: Subject, draft: Draft) -> Iterator[Finding]:
    """Findings of severity "info" for path rules with `optional(...)` that match leaves,
    all of which earlier rules shard.
    """
    rules = draft.paths.rules
    # The keys are the numbers of the rules that shard leaves.
    used = draft.paths.used
    # One path of each group shows which optional rules match at all; many rules of a
    # preset do not.
    first_paths = [group.paths[0] for group in subject.content.groups]
    unused_optional_targets: dict[int, object] = {}
    for number, (_, target) in enumerate(rules):
        if number in used or not isinstance(target, Optional):
            continue
        if any(map(subject.patterns[number].search, first_paths)):
            unused_optional_targets[number] = target.target
    if not unused_optional_targets:
        return
    # `unused_rules` leaves out optional rules. Here they are rules without `optional`,
    # and all other rules count as used.
    rules_to_check = []
    for number, (regex, _) in enumerate(rules):
        rules_to_check.append((regex, unused_optional_targets.get(number)))
    assumed_used = {
        number: None
        for number in range(len(rules))
        if number not in unused_optional_targets
    }
    for unused in unused_rules(
        rules=rules_to_check,
        used=assumed_used,
        flat=subject.flat,
        decided=subject.leaf_names,
        by=NAMES,
    ):
        # A rule that shards these arrays and no others was put before the rules of a
        # preset on purpose.
        if any(_deciders(subject, unused).values()):
            regex, _ = rules[unused.number]
            yield _unused_rule(subject, unused, regex, "info")


def _unused_rule(
    subject: Subject,
    unused: Unused,
    regex: str,
    severity: Severity,
) -> Finding:
    """The finding about a path rule that shards no leaf, whose regex is `regex`."""
    where = f"paths[{unused.number}] {regex!r}"
    return _unused(
        where=where,
        what="rule",
        severity=severity,
        unused=unused,
        fix=_fix(subject, unused),
    )


def _unused(
    where: str,
    what: str,
    severity: Severity,
    unused: Unused,
    fix: str,
) -> Finding:
    """A finding about a rule or an entry (`what`) that applies to no leaf."""
    # `unused` has the path nearest to a regex that matches none. A regex that matches
    # paths is shadowed by other rules.
    code = "unused-rule" if unused.nearest is not None else "shadowed-rule"
    return Finding(
        code=code,
        severity=severity,
        where=where,
        bytes=0,
        message=f"the {what} {unused.text}",
        fix=fix,
    )


def _fix(subject: Subject, unused: Unused) -> str:
    """Code that puts the unused rule before all other rules, so that it shards the
    arrays that it matches.

    If no path matches it, or if another rule would then be unused, the code removes the
    unused rule instead.
    """
    number = unused.number
    deciders = _deciders(subject, unused)
    if deciders and all(deciders.values()):
        return f"paths = paths.prepend([paths.rules[{number}]]).drop({number + 1})"
    return f"paths = paths.drop({number})"


def _deciders(subject: Subject, unused: Unused) -> dict[int, bool]:
    """The path rules that shard the arrays which an unused rule matches, each with
    whether it shards other arrays too.
    """
    deciders: dict[int, bool] = {}
    for number, shards_others in subject.rules_for(unused.arrays).items():
        if number is not None:
            deciders[number] = shards_others
    return deciders
