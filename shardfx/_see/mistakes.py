"""Findings for every mistake that `plan` raises for, from the same lists."""

from collections.abc import Iterator, Sequence

from .._ground.text import between_numbers, joined, together
from .._plan import (
    NAMES,
    Draft,
    Unused,
    absent_axes,
    uncovered,
    unknown_of_rows,
    unknown_units,
    unused_rules,
)
from .._rules import Optional, members_of, near, nearest
from .finding import Finding, Severity
from .subject import Subject, code_of


# The number of leaves without a rule for which the nearest rule is searched, the largest first: the search takes longer
# than planning.
_HINTED = 40


def unplannable(subject: Subject, draft: Draft) -> Iterator[Finding]:
    """Findings for leaves that cannot be planned, one for equal leaves of repeated layers."""
    flat, groups = subject.flat, dict[object, list[int]]()
    for at, number in enumerate(draft.numbers):
        if number <= -2:
            text = str(draft.errors[-2 - number][1])
            groups.setdefault((between_numbers(flat.paths[at]), text), []).append(at)
    for places in groups.values():
        leaf, paths = flat.leaves[places[0]], [flat.paths[at] for at in places]
        size = sum(subject.lost(tuple(flat.leaves[at].shape), flat.leaves[at].dtype) for at in places)
        text = str(draft.errors[-2 - draft.numbers[places[0]]][1])
        if subject.given[places[0]] is None:
            fix = subject.ruled(paths, subject.cut(tuple(leaf.shape)))
        elif subject.axes is None:
            wanted = dict.fromkeys(name for given in subject.given for name in members_of(given))
            fix = f"axes = AxisRules([{', '.join(f'({name!r}, None)' for name in wanted)}])"
        else:
            fix = subject.renamed(paths, _fitting(tuple(subject.given[places[0]]), len(leaf.shape)))
        yield Finding("unplannable", "error", joined(paths), size, text, fix)


def _fitting(names: tuple[object, ...], rank: int) -> tuple[object, ...]:
    """`names` shortened or extended to `rank` entries, each name once; none at all where some entry is no plain
    name.
    """
    if not all(name is None or name is ... or isinstance(name, str) for name in names):
        return ()
    once = [None if name in names[:at] else name for at, name in enumerate(names) if name is not ...][:rank]
    return (..., *once) if len(once) < rank else tuple(once)


def uncovered_leaves(subject: Subject, draft: Draft, severity: Severity) -> Iterator[Finding]:
    """Findings for leaves that no rule covers."""
    groups = together(uncovered(draft), lambda leaf: (between_numbers(leaf[0]), leaf[1]))
    patterns = () if subject.paths is None else tuple(regex for regex, _ in subject.paths.rules)
    for number, leaves in enumerate(groups.values()):
        paths, row = [path for path, _ in leaves], leaves[0][1]
        like = near(paths[0], patterns) if number < _HINTED else ""
        told = "an array" if len(paths) == 1 else f"{len(paths)} arrays"
        message = f"no rule covers {told} of shape {row.shape}{like}, so every device holds all of it"
        size = subject.lost(row.shape, row.dtype) * len(paths)
        fix = subject.ruled(paths, subject.cut(row.shape), last=True)
        yield Finding("unmatched", severity, joined(paths), size, message, fix)


def unknown_names(subject: Subject, draft: Draft, severity: Severity) -> Iterator[Finding]:
    """Findings for logical names, and for names with a unit, that have no rule."""
    axes = subject.axes
    if axes is None:
        return
    for name in unknown_units(axes):
        message = f"`units` has {name!r}{near(name, axes.names)}, and no rule of `axes` is about that name"
        yield Finding("unknown-name", severity, f"units {name!r}", 0, message, f"axes = axes.without({name!r})")
    unknown = unknown_of_rows(draft.rows, axes)
    leaves = [(name, path, row) for path, number, row in draft.arrays(unknown) for name in unknown[number]]
    for name, own in together(leaves, lambda leaf: leaf[0]).items():
        size = sum(subject.lost(row.shape, row.dtype) for _, _, row in own)
        meant = nearest(name, axes.names)
        fix = (
            f"axes = axes.with_alias({name!r}, of={meant[0]!r})" if meant else f"axes = axes.extend([({name!r}, None)])"
        )
        message = f"no rule of `axes` is about the logical name {name!r}{near(name, axes.names)} of `{own[0][1]}`"
        message += f" and {len(own) - 1} more" if len(own) > 1 else ""
        yield Finding("unknown-name", severity, f"name {name!r}", size, message, fix)


def absent(subject: Subject, draft: Draft, severity: Severity) -> Iterator[Finding]:
    """Findings for mesh axes of rules that the mesh lacks and that the rules do not declare."""
    known = draft.mesh.axis_names
    for axis, who in absent_axes(draft).items():
        message = f"{who} uses the mesh axis {axis!r}{near(axis, known)}; the mesh has {known}"
        what = "axes" if subject.axes is not None else "paths"
        meant = nearest(axis, known)
        fix = "\n".join(_corrected_axis(subject, axis, meant[0])) if meant else ""
        fix = fix or f"{what} = {what}.extend(axes=({axis!r},))"
        yield Finding("absent-axis", severity, f"mesh axis {axis!r}", 0, message, fix)


def _corrected_axis(subject: Subject, axis: str, meant: str) -> Iterator[str]:
    """Lines of code that replace a mesh axis in every rule; none for rules that have no code, such as callables."""
    axes, paths = subject.axes, subject.paths
    places = [] if axes is None else [("axes", mode, rules) for mode, rules in ((None, axes.rules), *axes.modes)]
    places += [] if paths is None else [("paths", None, paths.rules)]
    for what, mode, rules in places:
        for number, (_, target) in enumerate(rules):
            code = code_of(target)
            if repr(axis) in code and repr(meant) not in code:  # no array is sharded over one axis twice
                of_mode = "" if mode is None else f", mode={mode!r}"
                yield f"{what} = {what}.replace({number}, {code.replace(repr(axis), repr(meant))}{of_mode})"


def unused_findings(
    subject: Subject, draft: Draft, kinds: Sequence[tuple[str, str]], severity: Severity
) -> Iterator[Finding]:
    """Findings for path rules and memory kinds that decide about no leaf."""
    rules, used = draft.paths.rules, draft.paths.used
    for why in unused_rules(rules, used, subject.flat, subject.given, NAMES):
        yield _unused(f"paths[{why.number}] {rules[why.number][0]!r}", "rule", severity, why, _used(subject, why))
    # One path of each group shows which optional rules match at all; many rules of a preset do not.
    first, spare = [group.paths[0] for group in subject.content.groups], {}
    for number, (_, target) in enumerate(rules):
        if number not in used and isinstance(target, Optional) and any(map(subject.patterns[number].search, first)):
            spare[number] = target.target
    others = dict.fromkeys(number for number in range(len(rules)) if number not in spare)
    plain = [(regex, spare.get(number)) for number, (regex, _) in enumerate(rules)]
    for why in unused_rules(plain, others, subject.flat, subject.given, NAMES) if spare else ():
        # A rule that takes only these arrays is the user's own, before those of a preset.
        if any(wide for number, wide in subject.rules_for(why.arrays).items() if number is not None):
            yield _unused(f"paths[{why.number}] {rules[why.number][0]!r}", "rule", "info", why, _used(subject, why))
    for why in unused_rules(draft.kinds.rules, draft.kinds.used, subject.flat):
        fix = f"memory_kinds = {(*kinds[: why.number], *kinds[why.number + 1 :])!r}"
        yield _unused(f"memory_kinds[{why.number}] {kinds[why.number][0]!r}", "entry", severity, why, fix)


def _unused(where: str, what: str, severity: Severity, why: Unused, fix: str) -> Finding:
    code = "unused-rule" if why.nearest is not None else "shadowed-rule"
    return Finding(code, severity, where, 0, f"the {what} {why.text}", fix)


def _used(subject: Subject, why: Unused) -> str:
    """Code that moves a shadowed rule in front of the others, or that removes it if the earlier rules would lose all
    their leaves.
    """
    takers = {number: wide for number, wide in subject.rules_for(why.arrays).items() if number is not None}
    if takers and all(takers.values()):
        return f"paths = paths.prepend([paths.rules[{why.number}]]).drop({why.number + 1})"
    return f"paths = paths.drop({why.number})"
