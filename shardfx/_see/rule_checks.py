"""Checks of rules: compares rules with each other, with the axes of a mesh, and with
the sizes of the dimensions that they name. A `Group` is arrays that are planned alike
and whose paths differ only in numbers.
"""

import collections
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from .._ground.spec import entry_axes
from .._ground.text import between_numbers, entry_text, together
from .._plan import Group, axes_used, misspelled_axes
from .._rules import AxisRules, alias_chain
from .finding import Finding, Severity
from .subject import Subject


def dead_rules(subject: Subject) -> Iterator[Finding]:
    """Findings for axis rules that can never apply.

    A rule is blocked if another dimension of the array uses one of its mesh axes. It is
    tried only if all earlier rules of its logical name were blocked. A rule that has
    all mesh axes of an earlier rule of its name can therefore never apply: after
    `("mlp", "tensor")`, the rule `("mlp", ("data", "tensor"))` is always blocked. A
    rule without axes is never blocked, so no later rule of its name can apply.
    """
    if subject.axes is None:
        return
    for mode, rules in ((None, subject.axes.rules), *subject.axes.modes):
        earlier: dict[str, list[tuple[int, frozenset[str]]]] = {}
        for number, (name, target) in enumerate(rules):
            axes = frozenset(entry_axes(target))
            before = next(
                (at for at, needs in earlier.get(name, []) if needs <= axes), None
            )
            if before is None:
                earlier.setdefault(name, []).append((number, axes))
                continue
            told = (
                f"axes.rules[{number}]"
                if mode is None
                else f"axes.modes[{mode!r}][{number}]"
            )
            where = f"{told} {name!r} -> {entry_text(target)}"
            other = entry_text(rules[before][1])
            why = (
                "which is never blocked"
                if not entry_axes(rules[before][1])
                else "which applies wherever it could"
            )
            message = (
                f"the rule stands after rule {before} of the same name, {name!r} ->"
                f" {other}, {why}"
            )
            fix = (
                "axes ="
                f" axes.drop({number}{'' if mode is None else f', mode={mode!r}'})"
            )
            yield Finding("dead-rule", "warning", where, 0, message, fix)


def unused_axes(subject: Subject, misspelled: Severity) -> Iterator[Finding]:
    """Findings for mesh axes of more than one device that no rule uses.

    If the rules use a similar name that the mesh lacks, the axis is probably
    misspelled. The finding then has the severity `misspelled`.
    """
    path_rules = () if subject.paths is None else subject.paths.rules
    sizes = subject.content.mesh.shape
    declared = [
        axis
        for rules in (subject.paths, subject.axes)
        if rules is not None
        for axis in rules.mesh_axes
    ]
    used = axes_used(subject.content.rows, path_rules, subject.axes)
    meant = misspelled_axes(subject.content.mesh, declared, used)
    # Axis rules are for activations too; path rules alone do not say which axis shards
    # the batch.
    what, severity = ("paths", "info") if subject.axes is None else ("axes", "warning")
    share = subject.content.total_bytes[1]
    for axis, size in (
        sizes.items() if subject.axes is not None or subject.paths is not None else ()
    ):
        if size > 1 and axis not in {*declared, *used}:
            fix = f"{what} = {what}.extend(mesh_axes=({axis!r},))"
            told = f"If it is for the batch alone, declare it: `{fix}`"
            if axis in meant:
                renamed = {
                    meant.get(name, name): count for name, count in sizes.items()
                }
                fix = f"mesh = MeshSpec({renamed!r})"
                told = (
                    f"The rules use {meant[axis]!r}, which the mesh lacks: if that is"
                    f" meant, `{fix}`"
                )
            message = (
                f"no rule uses the mesh axis {axis!r} of size {size}: devices along it"
                f" hold the same. {told}"
            )
            found = misspelled if axis in meant else severity
            yield Finding(
                "unused-axis",
                found,
                f"mesh axis {axis!r}",
                share - share // size,
                message,
                fix,
            )


# The logical names of the dimensions of an array.
Names = tuple[Any, ...]
# For each logical name, the sizes of its dimensions, each with the number of arrays
# that have it.
Counts = dict[str, collections.Counter[int]]


def contradicted_names(subject: Subject) -> Iterator[Finding]:
    """Findings for logical names that arrays use for dimensions of contradictory sizes.

    The sizes of two dimensions with one name contradict each other if neither divides
    the other, such as 512 and 768. One of the dimensions then probably has a wrong
    name, or the names of an array are in a wrong order.

    A name may stand for two axes on purpose, such as the inner widths of dense layers
    and of experts. Therefore a size is not reported if two arrays of one module have a
    dimension of this name and size, and no dimension with another name has this size. A
    size is not reported either if no rule maps the name to a mesh axis.
    """
    groups = [group for group in subject.content.groups if group.row.names is not None]
    names = [group.row.names or () for group in groups]
    usual = _usual(_counts(groups, names))
    swapped = {
        at: other
        for at, group in enumerate(groups)
        if (other := _swapped(names[at], group.row.shape, usual))
    }
    # Arrays whose names are in the wrong order are counted in the right order.
    counts = _counts(groups, [swapped.get(at, own) for at, own in enumerate(names)])
    usual = _usual(counts)
    odd = list[tuple[tuple[str, int], Group]]()
    for at, group in enumerate(groups):
        if at in swapped:
            message = (
                f"the names {names[at]} stand on shape {group.row.shape}; elsewhere"
                " these names have the sizes that they would have here in the order"
                f" {swapped[at]}"
            )
            fix = subject.fix(group, swapped[at], swapped[at])
            yield Finding("contradicted-name", "warning", group.where, 0, message, fix)
            continue
        for name, size in _pairs(names[at], group.row.shape):
            if (
                size % usual[name]
                and usual[name] % size
                and _is_sharded(name, subject.axes)
            ):
                odd.append(((name, size), group))
    for (name, size), found in together(odd, lambda one: one[0]).items():
        is_of_another = any(
            size in sizes for other, sizes in counts.items() if other != name
        )
        if not is_of_another and _in_one_module([group for _, group in found]):
            continue
        message = (
            f"{name!r} is {size} here, and {usual[name]} elsewhere; neither divides the"
            " other, so one name stands for two axes; give one of them a name of"
            " its own"
        )
        for _, group in found:
            where = f"{group.where}, name {name!r}"
            yield Finding(
                "contradicted-name",
                "warning",
                where,
                0,
                message,
                _own_name(subject, group, name, size),
            )


def _pairs(names: Names, shape: tuple[int, ...]) -> list[tuple[str, int]]:
    """The logical names of an array that are strings, each with the size of its
    dimension.
    """
    return [
        (name, size)
        for name, size in zip(names, shape, strict=False)
        if isinstance(name, str) and size
    ]


def _counts(groups: list[Group], names: list[Names]) -> Counts:
    counts: Counts = {}
    for group, own in zip(groups, names, strict=True):
        for name, size in _pairs(own, group.row.shape):
            counts.setdefault(name, collections.Counter())[size] += len(group.paths)
    return counts


def _usual(counts: Counts) -> dict[str, int]:
    return {name: sizes.most_common(1)[0][0] for name, sizes in counts.items()}


def _swapped(
    names: Names, shape: tuple[int, ...], usual: Mapping[str, int]
) -> Names | None:
    """The names of an array in another order, in which each name stands at a dimension
    of its `usual` size.

    It is `None` if there is no such order, or if the present order is one. It is also
    `None` if the only name stands at a multiple of its usual size: such an array holds
    several projections in one, as queries, keys and values.
    """
    named = _pairs(names, shape)
    if len(named) == 1 and named[0][1] % usual[named[0][0]] == 0:
        return None
    orders = itertools.permutations(names) if len(names) <= 4 else [names]
    fitting = [
        other
        for other in orders
        if all(usual[name] == size for name, size in _pairs(other, shape))
    ]
    return fitting[0] if fitting and names not in fitting else None


def _is_sharded(name: str, axes: AxisRules | None) -> bool:
    """Whether a rule in `axes` maps the logical name to a mesh axis, in any mode
    ("decode"). `axes` may be `None`.
    """
    if axes is None:
        return False
    of = alias_chain(name, axes)[-1]
    return any(
        entry_axes(target)
        for _, rules in ((None, axes.rules), *axes.modes)
        for to, target in rules
        if to == of
    )


# The end of a projection's path: the leaf of a module with one matrix.
_LAST = re.compile(r"[/.](kernel|weight|scale|bias|embedding|value)$")


def _in_one_module(groups: list[Group]) -> bool:
    """Whether one module holds two or more different arrays of `groups`, as a layer
    holds its projections.
    """
    ends = {_LAST.sub("", group.paths[0]).rpartition("/")[::2] for group in groups}
    inner = {
        (between_numbers(module), between_numbers(end))
        for module, end in ends
        if module
    }
    return len(inner) > len({module for module, _ in inner})


def _own_name(subject: Subject, group: Group, name: str, size: int) -> str:
    """Code that renames the logical name `name` of dimensions of this size in the
    arrays of `group`, such as `mlp` to `mlp_768`. The new name has the same rules.

    A finished plan has no names, so the code sets the spec of the arrays instead.
    """
    if subject.is_plan:
        return subject.rule_fix(group.paths, group.row.spec)
    other = f"{name}_{size}"
    names = tuple(other if one == name else one for one in group.row.names or ())
    known = subject.axes is not None and other in subject.axes.names
    alias = [] if known else [f"axes = axes.with_alias({other!r}, of={name!r})"]
    return "\n".join([subject.fix(group, names, names), *alias])
