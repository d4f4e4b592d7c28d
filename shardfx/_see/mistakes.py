"""Findings for every mistake that `plan` raises for, from the same lists."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from .._ground.errors import RuleError, SpecError
from .._ground.spec import canonical_entry, entries_of, entry_axes, trimmed
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
    unused_text,
)
from .._rules import Atomic, Optional, PathRules, Pipeline, Strategy, bare, fsdp, members_of, near, nearest, replicate
from .finding import Finding, Severity
from .subject import Subject, code_of


# The number of leaves without a rule for which the nearest rule is searched, the largest first: the search takes longer
# than planning.
_HINTED = 40


def unplannable(subject: Subject, draft: Draft) -> Iterator[Finding]:
    """Findings for leaves that cannot be planned, one for equal leaves of repeated layers."""
    if not draft.errors:
        return
    flat, groups = subject.flat, {}
    for at, number in enumerate(draft.numbers):
        if number <= -2:
            text = str(draft.errors[-2 - number][1])
            groups.setdefault((between_numbers(flat.paths[at]), text), []).append(at)
    for (_, text), places in groups.items():
        paths = [flat.paths[at] for at in places]
        size = sum(subject.lost(tuple(flat.leaves[at].shape), flat.leaves[at].dtype) for at in places)
        yield Finding("unplannable", "error", joined(paths), size, text, _plannable(subject, places, paths))


def _plannable(subject: Subject, places: Sequence[int], paths: Sequence[str]) -> str:
    """Code under which these leaves can be planned, as close as possible to what was asked for."""
    leaf, names = subject.flat.leaves[places[0]], subject.given[places[0]]
    if names is not None:
        if subject.axes is None:
            wanted = dict.fromkeys(name for given in subject.given for name in members_of(given))
            return f"axes = AxisRules([{', '.join(f'({name!r}, None)' for name in wanted)}])"
        other = _other_names(tuple(names), len(leaf.shape))
        return subject.renamed(paths, () if subject.row_with(paths[0], names=other) is None else other)
    number = next((n for n, pattern in enumerate(subject.patterns) if pattern.search(paths[0])), None)
    target = None if number is None or subject.paths is None else bare(subject.paths.rules[number][1])
    other = _other_target(target, len(leaf.shape))
    if other is not None and code_of(other) is not None and _is_planned(subject, paths[0], other):
        return subject.ruled(paths, other)
    return subject.ruled(paths, cutting(subject, tuple(leaf.shape)) or replicate)


def _is_planned(subject: Subject, path: str, target: object) -> bool:
    try:
        rules = PathRules([(subject.regex([path]), target)])
    except (RuleError, SpecError):
        return False
    return subject.row_with(path, paths=rules) is not None


# The first dimension of this many arrays may be that of stacked layers, declared or not.
_STACKED_RANK = 3


def axes_to_cut(
    subject: Subject, shape: tuple[int, ...], units: tuple[int, ...] | None
) -> Iterator[tuple[int, Strategy]]:
    """Pairs of a dimension and a strategy over one mesh axis that shards it, the largest axis first."""
    sizes = subject.mesh.shape
    for axis in sorted(sizes, key=lambda axis: -sizes[axis]):
        over = fsdp(axis, skip=0) if len(shape) >= _STACKED_RANK else fsdp(axis)
        for dim, (size, unit) in enumerate(zip(shape, units or (1,) * len(shape), strict=True)):
            if sizes[axis] > 1 and size > 0 and dim not in over.skip and size % (unit * sizes[axis]) == 0:
                yield dim, over


def cutting(subject: Subject, shape: tuple[int, ...], units: tuple[int, ...] | None = None) -> Strategy | None:
    """A strategy over one mesh axis that shards an array of this shape; `None` if no axis divides it."""
    return next((over for _, over in axes_to_cut(subject, shape, units)), None)


def _other_names(names: tuple[object, ...], rank: int) -> tuple[Any, ...]:
    """`names` shortened or extended to `rank` entries, each name once."""
    if len(names) > rank:
        names = tuple(name for name in names if name is not ...)[:rank]
    once = [None if name in names[:at] else name for at, name in enumerate(names)]
    return (..., *once) if len(names) < rank and ... not in names else tuple(once)


def _other_target(target: object, rank: int) -> Any:
    """A target that fits an array of this rank and keeps as much of `target` as possible; `None` if it
    keeps nothing.
    """
    first, rest = (target.steps[0], target.steps[1:]) if isinstance(target, Pipeline) else (target, ())
    inner = first.target if isinstance(first, Atomic) else first
    if not isinstance(inner, PartitionSpec | tuple):
        return None
    other = trimmed(entries_of(inner)[:rank]) if isinstance(inner, PartitionSpec) else _other_names(inner, rank)
    return Pipeline((other, *rest)) if rest else other


def uncovered_leaves(subject: Subject, draft: Draft, severity: Severity) -> Iterator[Finding]:
    """Findings for leaves that no rule covers."""
    groups = together(uncovered(draft), lambda leaf: (between_numbers(leaf.path), leaf.row))
    patterns = () if subject.paths is None else tuple(regex for regex, _ in subject.paths.rules)
    for number, leaves in enumerate(groups.values()):
        paths, row = [leaf.path for leaf in leaves], leaves[0].row
        like = near(paths[0], patterns) if number < _HINTED else ""
        told = "an array" if len(paths) == 1 else f"{len(paths)} arrays"
        message = f"no rule covers {told} of shape {row.shape}{like}, so every device holds all of it"
        size = subject.lost(row.shape, row.dtype) * len(paths)
        target = cutting(subject, row.shape) or replicate
        yield Finding("unmatched", severity, joined(paths), size, message, subject.ruled(paths, target, last=True))


def unknown_names(subject: Subject, draft: Draft, severity: Severity) -> Iterator[Finding]:
    """Findings for logical names, and for names with a unit, that have no rule."""
    axes = subject.axes
    if axes is None:
        return
    for name in unknown_units(axes):
        message = f"`units` has {name!r}{near(name, axes.names)}, and no rule of `axes` is about that name"
        yield Finding("unknown-name", severity, f"units {name!r}", 0, message, f"axes = axes.without({name!r})")
    numbers: dict[str, list[int]] = {}
    for number, names in unknown_of_rows(draft.rows, axes).items():
        for name in names:
            numbers.setdefault(name, []).append(number)
    for name, rows in numbers.items():
        leaves = [at for at, number in enumerate(draft.numbers) if number in rows]
        size = sum(subject.lost(row.shape, row.dtype) for row in (draft.rows[draft.numbers[at]] for at in leaves))
        path = subject.content.skeleton.paths[leaves[0]]
        meant = next(iter(nearest(name, axes.names)), None)
        fix = f"axes = axes.extend([({name!r}, None)])"
        if meant is not None:
            fix = f"axes = axes.with_alias({name!r}, of={meant!r})"
        message = f"no rule of `axes` is about the logical name {name!r}{near(name, axes.names)} of `{path}`"
        message += f" and {len(leaves) - 1} more" if len(leaves) > 1 else ""
        yield Finding("unknown-name", severity, f"name {name!r}", size, message, fix)


def absent(subject: Subject, draft: Draft, severity: Severity) -> Iterator[Finding]:
    """Findings for mesh axes of rules that the mesh lacks and that the rules do not declare."""
    known = subject.mesh.axis_names
    for axis, who in absent_axes(draft, subject.axes).items():
        message = f"{who} uses the mesh axis {axis!r}{near(axis, known)}; the mesh has {known}"
        meant = next(iter(nearest(axis, known)), None)
        fix = "" if meant is None else "\n".join(_corrected_axis(subject, axis, meant))
        yield Finding("absent-axis", severity, f"mesh axis {axis!r}", 0, message, fix or _declared(subject, axis))


def _declared(subject: Subject, axis: str) -> str:
    what = "axes" if subject.axes is not None else "paths"
    return f"{what} = {what}.extend(axes=({axis!r},))"


def _corrected_axis(subject: Subject, axis: str, meant: str) -> Iterator[str]:
    """Lines of code that replace a mesh axis in every rule; none for rules that have no code, such as callables."""
    if subject.axes is not None:
        for mode, rules in ((None, subject.axes.rules), *subject.axes.modes):
            of_mode = "" if mode is None else f", mode={mode!r}"
            for number, (_, target) in enumerate(rules):
                if axis in entry_axes(target):
                    other = tuple(dict.fromkeys(meant if one == axis else one for one in entry_axes(target)))
                    yield f"axes = axes.replace({number}, {code_of(canonical_entry(other))}{of_mode})"
    for number, (_, target) in enumerate(() if subject.paths is None else subject.paths.rules):
        other = _target_with(target, axis, meant)
        if other != target:
            yield f"paths = paths.replace({number}, {code_of(other)})"


def _target_with(target: object, axis: str, meant: str) -> Any:
    """The target of a path rule with `meant` in the place of the mesh axis `axis`. An axis that occurs twice then is
    kept once.
    """
    if isinstance(target, Optional):
        return Optional(_target_with(target.target, axis, meant))
    if isinstance(target, Atomic):
        is_spec = isinstance(target.target, PartitionSpec)
        return Atomic(_target_with(target.target, axis, meant), target.unit) if is_spec else target
    if isinstance(target, Pipeline):
        return Pipeline(tuple(_target_with(step, axis, meant) for step in target.steps))
    if isinstance(target, Strategy):
        axes = dict.fromkeys(meant if one == axis else one for one in target.axes)
        return dataclasses.replace(target, axes=tuple(axes))
    if not isinstance(target, PartitionSpec) or axis not in [one for e in entries_of(target) for one in entry_axes(e)]:
        return target
    taken = {one for entry in entries_of(target) for one in entry_axes(entry)}
    swap = {axis: () if meant in taken else (meant,)}
    entries = [
        tuple(new for one in entry_axes(entry) for new in swap.get(one, (one,))) if entry_axes(entry) else entry
        for entry in entries_of(target)
    ]
    return trimmed(entries, target)


def unused_findings(
    subject: Subject, draft: Draft, kinds: Sequence[tuple[str, str]], severity: Severity
) -> Iterator[Finding]:
    """Findings for path rules and memory kinds that decide about no leaf."""
    rules = draft.paths.rules
    for why in unused_rules(rules, draft.paths.used, subject.flat, subject.given, NAMES):
        where = f"paths[{why.number}] {rules[why.number][0]!r}"
        code = "unused-rule" if why.nearest is not None else "shadowed-rule"
        yield Finding(code, severity, where, 0, f"the rule {unused_text(why)}", _used(subject, why))
    yield from _shadowed_optionals(subject, draft)
    for why in unused_rules(draft.kinds.rules, draft.kinds.used, subject.flat):
        rest = tuple(pair for at, pair in enumerate(kinds) if at != why.number)
        where = f"memory_kinds[{why.number}] {kinds[why.number][0]!r}"
        code = "unused-rule" if why.nearest is not None else "shadowed-rule"
        yield Finding(code, severity, where, 0, f"the entry {unused_text(why)}", f"memory_kinds = {rest!r}")


def _shadowed_optionals(subject: Subject, draft: Draft) -> Iterator[Finding]:
    """Findings for optional rules whose leaves all match earlier rules."""
    rules, used = draft.paths.rules, draft.paths.used
    spare = [n for n, (_, target) in enumerate(rules) if isinstance(target, Optional) and n not in used]
    # One path of each group shows which rules match at all; many rules of a preset do not.
    patterns = subject.patterns
    matching = [n for n in spare if any(patterns[n].search(group.paths[0]) for group in subject.content.groups)]
    if not matching:
        return
    others = dict.fromkeys(n for n in range(len(rules)) if n not in matching)
    plain = [(regex, target.target if isinstance(target, Optional) else target) for regex, target in rules]
    for why in unused_rules(plain, others, subject.flat, subject.given, NAMES):
        where = f"paths[{why.number}] {rules[why.number][0]!r}"
        if not any(wide for number, wide in subject.rules_for(why.arrays).items() if number is not None):
            continue  # a rule that takes only these arrays is the user's own, before those of a preset
        yield Finding("shadowed-rule", "info", where, 0, f"the rule {unused_text(why)}", _used(subject, why))


def _used(subject: Subject, why: Unused) -> str:
    """Code that moves a shadowed rule in front of the others, or that removes it if the earlier rules would lose all
    their leaves.
    """
    takers = {number: wide for number, wide in subject.rules_for(why.arrays).items() if number is not None}
    if takers and all(takers.values()):
        return f"paths = paths.prepend([paths.rules[{why.number}]]).drop({why.number + 1})"
    return f"paths = paths.drop({why.number})"
