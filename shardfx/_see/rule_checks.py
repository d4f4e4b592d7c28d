"""What can be said of rules by themselves, and against the axes of a mesh."""

from collections.abc import Iterator

from .._ground.spec import entry_axes
from .._ground.text import entry_text
from .._plan.complaints import axes_used, misspelled_axes
from .finding import Finding, Severity
from .subject import Subject


def dead_rules(subject: Subject) -> Iterator[Finding]:
    """Axis rules that can never apply.

    A rule is read only where all earlier ones of its name were blocked, and axes that are taken stay taken. So it can
    never apply exactly if all the axes of one of these are among its own: what blocks the earlier one blocks it too.
    One that asks for no axis is never blocked.
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
    """Mesh axes of more than one device that no rule uses; `misspelled` is for those that are like one of a rule."""
    if subject.axes is None and subject.paths is None:
        return
    declared, used = _declared(subject), _used(subject)
    meant = misspelled_axes(subject.mesh, declared, used)
    # Axis rules are for activations too; path rules alone do not say what cuts the batch.
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


def _declared(subject: Subject) -> tuple[str, ...]:
    return tuple(axis for rules in (subject.paths, subject.axes) if rules is not None for axis in rules.axes)


def _used(subject: Subject) -> dict[str, None]:
    return axes_used(subject.rows, () if subject.paths is None else subject.paths.rules, subject.axes)
