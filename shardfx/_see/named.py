"""Logical names that contradict the shapes of the arrays that have them."""

import collections
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from .._ground.spec import entry_axes
from .._ground.text import between_numbers
from .._rules.axis_rules import AxisRules, alias_chain
from .finding import Finding
from .subject import Group, Subject


def contradicted_names(subject: Subject) -> Iterator[Finding]:
    """Names that stand on sizes that cannot be one axis: neither divides the other.

    A name may stand for axes that are alike, as the inner widths of dense layers and of experts are. So it is none of
    these: a size on which leaves of one module agree, and a name that no mesh axis cuts.
    """
    counts: dict[str, collections.Counter[int]] = {}
    for number, row in enumerate(subject.rows):
        if row.names is not None:
            for name, size in zip(row.names, row.shape, strict=False):
                if isinstance(name, str) and size:
                    counts.setdefault(name, collections.Counter())[size] += subject.uses[number]
    usual = {name: sizes.most_common(1)[0][0] for name, sizes in counts.items()}
    odd = {
        name: [size for size in sizes if not _one_axis(size, usual[name])]
        for name, sizes in counts.items()
        if len(sizes) > 1 and _is_cut(name, subject.axes)
    }
    agreed = _agreed(subject, odd)
    odd = {name: [size for size in sizes if (name, size) not in agreed] for name, sizes in odd.items()}
    for number, row in enumerate(subject.rows):
        swapped = _swapped(row.names or (), row.shape, usual)
        if swapped is not None:
            for group in subject.groups_of([number]):
                message = (
                    f"the names {row.names} stand on shape {row.shape}; elsewhere these names have the sizes that they "
                    f"would have here in the order {swapped}"
                )
                fix = _swap(subject, group, swapped)
                yield Finding("contradicted-name", "warning", group.where, subject.excess(group), message, fix)
            continue
        for name, size in _contradictions(row.names, row.shape, odd):
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


# What ends the path of a projection: the leaf of a module that is one matrix.
_LAST = re.compile(r"[/.](kernel|weight|scale|bias|embedding|value)$")


def _agreed(subject: Subject, odd: Mapping[str, list[int]]) -> set[tuple[str, int]]:
    """The names and sizes on which several projections of one module agree."""
    found: dict[tuple[str, str, int], tuple[str, ...]] = {}
    agreed: set[tuple[str, int]] = set()
    for number, row in enumerate(subject.rows):
        for name, size in _contradictions(row.names, row.shape, odd):
            for group in subject.groups_of([number]):
                module, _, projection = _LAST.sub("", group.paths[0]).rpartition("/")
                parts = between_numbers(projection)
                if module and found.setdefault((module, name, size), parts) != parts:
                    agreed.add((name, size))
    return agreed


def _contradictions(
    names: tuple[Any, ...] | None, shape: tuple[int, ...], odd: Mapping[str, list[int]]
) -> list[tuple[str, int]]:
    pairs = zip(names or (), shape, strict=False)
    return [(name, size) for name, size in pairs if isinstance(name, str) and size in odd.get(name, ())]


def _swapped(names: tuple[Any, ...], shape: tuple[int, ...], usual: Mapping[str, int]) -> tuple[Any, ...] | None:
    """The names in another order, in which each stands on its usual size; `None` if they do, or there is none."""
    pairs = zip(names, shape, strict=False)
    if len(names) > 4 or all(usual.get(name, size) == size for name, size in pairs if isinstance(name, str)):
        return None
    for other in itertools.permutations(names):
        pairs = [(name, size) for name, size in zip(other, shape, strict=True) if isinstance(name, str)]
        if all(usual.get(name) == size for name, size in pairs):
            return other
    return None


def _swap(subject: Subject, group: Group, names: tuple[Any, ...]) -> str:
    if subject.flat is not None and subject.is_named(group.paths[0]):
        return subject.renamed(group.paths, names)
    return subject.ruled(group.paths, names)


def _own_name(subject: Subject, group: Group, name: str, size: int) -> str:
    """Code that gives the leaves another name with the same rules; in a plan, which keeps its rules, their spec."""
    if subject.flat is None:
        return subject.ruled(group.paths, group.row.spec)
    other = f"{name}_{size}"
    names = tuple(other if one == name else one for one in group.row.names or ())
    known = subject.axes is not None and other in subject.axes.names
    alias = [] if known else [f"axes = axes.with_alias({other!r}, of={name!r})"]
    return "\n".join([_swap(subject, group, names), *alias])
