"""Checks of rules: against each other, against the axes of a mesh, and against the sizes of the dimensions that they
name.
"""

import collections
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from .._ground.spec import entry_axes
from .._ground.text import between_numbers, entry_text
from .._plan import Group, Row, axes_used, misspelled_axes
from .._rules import AxisRules, alias_chain
from .finding import Finding, Severity
from .subject import Subject


def dead_rules(subject: Subject) -> Iterator[Finding]:
    """Findings for axis rules that can never apply.

    A rule is read only where all earlier rules of its name were blocked, and used axes stay used. So it can never apply
    if and only if all axes of one earlier rule are among its own: what blocks that rule blocks this one too. A rule
    without axes is never blocked.
    """
    if subject.axes is None:
        return
    for mode, rules in ((None, subject.axes.rules), *subject.axes.modes):
        earlier: dict[str, list[tuple[int, frozenset[str]]]] = {}
        for number, (name, target) in enumerate(rules):
            axes = frozenset(entry_axes(target))
            before = next((at for at, needs in earlier.get(name, []) if needs <= axes), None)
            if before is None:
                earlier.setdefault(name, []).append((number, axes))
                continue
            told = f"axes.rules[{number}]" if mode is None else f"axes.modes[{mode!r}][{number}]"
            where = f"{told} {name!r} -> {entry_text(target)}"
            other = entry_text(rules[before][1])
            why = "which is never blocked" if not entry_axes(rules[before][1]) else "which applies wherever it could"
            message = f"the rule stands after rule {before} of the same name, {name!r} -> {other}, {why}"
            fix = f"axes = axes.drop({number}{'' if mode is None else f', mode={mode!r}'})"
            yield Finding("dead-rule", "warning", where, 0, message, fix)


def unused_axes(subject: Subject, misspelled: Severity) -> Iterator[Finding]:
    """Findings for mesh axes of more than one device that no rule uses. `misspelled` is the severity for near names."""
    if subject.axes is None and subject.paths is None:
        return
    declared = [axis for rules in (subject.paths, subject.axes) if rules is not None for axis in rules.axes]
    path_rules = () if subject.paths is None else subject.paths.rules
    used = axes_used(subject.content.rows, path_rules, subject.axes)
    meant = misspelled_axes(subject.mesh, declared, used)
    # Axis rules are for activations too; path rules alone do not say which axis shards the batch.
    severity: Severity = "info" if subject.axes is None else "warning"
    share = subject.content.total_bytes[1]
    for axis, size in subject.mesh.shape.items():
        if size > 1 and axis not in {*declared, *used}:
            what = "paths" if subject.axes is None else "axes"
            message = f"no rule uses the mesh axis {axis!r} of size {size}: devices along it hold the same. "
            if axis in meant:
                sizes = {meant[axis] if name == axis else name: size for name, size in subject.mesh.shape.items()}
                fix = f"mesh = MeshSpec({sizes!r})"
                message += f"The rules use {meant[axis]!r}, which the mesh lacks: if that is meant, `{fix}`"
            else:
                fix = f"{what} = {what}.extend(axes=({axis!r},))"
                message += f"If it is for the batch alone, declare it: `{fix}`"
            found = misspelled if axis in meant else severity
            yield Finding("unused-axis", found, f"mesh axis {axis!r}", share - share // size, message, fix)


def contradicted_names(subject: Subject) -> Iterator[Finding]:
    """Findings for names of dimensions whose sizes cannot belong to one logical axis, since neither divides the other.

    A name may stand for similar axes, such as the inner widths of dense layers and of experts. So two cases are not
    reported: a size on which leaves of one module agree and which no other name has; and a name that no mesh axis
    shards.
    """
    counts: _Counts = {}
    rows, uses = subject.content.rows, collections.Counter(subject.content.index)
    for number, row in enumerate(rows):
        for name, size in _pairs(row):
            counts.setdefault(name, collections.Counter())[size] += uses[number]
    swapped = {number: other for number, row in enumerate(rows) if (other := _swapped(row, counts)) is not None}
    for number, other in swapped.items():  # their sizes are no evidence
        _recount(counts, rows[number], other, uses[number])
    usual = {name: _most(sizes) for name, sizes in counts.items()}
    odd = {
        name: [size for size in sizes if sizes[size] and not _one_axis(size, usual[name])]
        for name, sizes in counts.items()
        if len(sizes) > 1 and _is_cut(name, subject.axes)
    }
    agreed = {(name, size) for name, size in _agreed(subject, odd) if not _is_of_another(name, size, counts)}
    odd = {name: [size for size in sizes if (name, size) not in agreed] for name, sizes in odd.items()}
    for number, row in enumerate(rows):
        if number in swapped:
            for group in subject.groups_of([number]):
                message = (
                    f"the names {row.names} stand on shape {row.shape}; elsewhere these names have the sizes that they "
                    f"would have here in the order {swapped[number]}"
                )
                fix = subject.mended(group.paths, swapped[number], swapped[number])
                yield Finding("contradicted-name", "warning", group.where, subject.excess(group), message, fix)
            continue
        for name, size in _contradictions(row, odd):
            told = f"{name!r} is {size} here, and {usual[name]} elsewhere; neither divides the other"
            message = f"{told}, so one name stands for two axes; give one of them a name of its own"
            for group in subject.groups_of([number]):
                where = f"{group.where}, name {name!r}"
                yield Finding("contradicted-name", "warning", where, 0, message, _own_name(subject, group, name, size))


def _one_axis(one: int, other: int) -> bool:
    return one % other == 0 or other % one == 0


def _is_cut(name: str, axes: AxisRules | None) -> bool:
    """Whether a rule of any mode maps the name to a mesh axis."""
    if axes is None:
        return False
    of = alias_chain(name, axes)[-1]
    return any(entry_axes(target) for _, rules in ((None, axes.rules), *axes.modes) for to, target in rules if to == of)


def _is_of_another(name: str, size: int, counts: Mapping[str, Mapping[int, int]]) -> bool:
    """Whether a dimension of this size has another name elsewhere, as when two names are swapped."""
    return any(size in sizes for other, sizes in counts.items() if other != name)


# The end of a projection's path: the leaf of a module with one matrix.
_LAST = re.compile(r"[/.](kernel|weight|scale|bias|embedding|value)$")


def _agreed(subject: Subject, odd: Mapping[str, list[int]]) -> set[tuple[str, int]]:
    """The pairs of a name and a size on which several projections of one module agree."""
    found: dict[tuple[str, str, int], tuple[str, ...]] = {}
    agreed: set[tuple[str, int]] = set()
    for number, row in enumerate(subject.content.rows):
        for name, size in _contradictions(row, odd):
            for group in subject.groups_of([number]):
                module, _, projection = _LAST.sub("", group.paths[0]).rpartition("/")
                parts = between_numbers(projection)
                if module and found.setdefault((module, name, size), parts) != parts:
                    agreed.add((name, size))
    return agreed


def _contradictions(row: Row, odd: Mapping[str, list[int]]) -> list[tuple[str, int]]:
    return [(name, size) for name, size in _pairs(row) if size in odd.get(name, ())]


_Counts: TypeAlias = dict[str, collections.Counter[int]]


def _most(sizes: collections.Counter[int]) -> int:
    """The most frequent size."""
    return sizes.most_common(1)[0][0]


def _recount(counts: _Counts, row: Row, other: tuple[object, ...], uses: int) -> None:
    for name, size in _pairs(row):
        counts[name][size] -= uses
    for name, size in _pairs(row._replace(names=other)):
        counts[name][size] += uses


def _pairs(row: Row) -> list[tuple[str, int]]:
    """The names of an array, each with the size of its dimension."""
    pairs = zip(row.names or (), row.shape, strict=False)
    return [(name, size) for name, size in pairs if isinstance(name, str) and size]


def _swapped(row: Row, counts: _Counts) -> tuple[Any, ...] | None:
    """The row's names in another order that far more of the other arrays agree with; `None` if there is none."""
    names = row.names or ()
    given = _pairs(row)
    if len(names) > 4 or all(_most(counts[name]) == size for name, size in given):
        return None
    orders = itertools.permutations(names)
    best = max(orders, key=lambda other: _support(_pairs(row._replace(names=other)), counts))
    wanted = _pairs(row._replace(names=best))
    if all(_most(counts[name]) == size for name, size in wanted):
        return best
    apart = any(not _one_axis(size, _most(counts[name])) for name, size in given)
    return best if apart and _support(wanted, counts) > _CLEARLY * _support(given, counts) else None


# How much stronger the evidence for another order must be than that for the given one.
_CLEARLY = 1.5


def _support(pairs: list[tuple[str, int]], counts: _Counts) -> int:
    """How often the names have these sizes in the tree; 0 if one of them never does."""
    found = [counts[name][size] for name, size in pairs]
    return sum(found) if all(found) else 0


def _own_name(subject: Subject, group: Group, name: str, size: int) -> str:
    """Code that gives the leaves another name with the same rules. For a ready plan it is code that sets their spec."""
    if subject.is_plan:
        return subject.ruled(group.paths, group.row.spec)
    other = f"{name}_{size}"
    names = tuple(other if one == name else one for one in group.row.names or ())
    known = subject.axes is not None and other in subject.axes.names
    alias = [] if known else [f"axes = axes.with_alias({other!r}, of={name!r})"]
    return "\n".join([subject.mended(group.paths, names, names), *alias])
