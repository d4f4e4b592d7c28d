"""The check for layouts that XLA's partitioner is known to compute wrongly in some
programs, by the records of `_step/faults`. It reads what specs and shapes answer. A
`Group` is arrays that are planned alike and whose paths differ only in numbers.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from .._ground.spec import (
    canonical_entry,
    entries_of,
    entry_axes,
    shards_over,
)
from .._ground.text import plural, spec_text
from .._plan import Group
from .._rules import members_of
from .._step import ArrayCut, ArrayPredicate, Fault, fault_records, matches_array
from .finding import Finding
from .subject import Subject, name_at


def known_faults(subject: Subject) -> Iterator[Finding]:
    """A finding for each known fault whose predicate selects arrays of the plan.

    A fault whose program is right with the installed JAX is no finding.
    """
    for fault in fault_records():
        if fault.arrays is None or fault.is_right_with(jax.__version__):
            continue
        groups = _selected(subject, fault.arrays)
        if groups:
            yield _finding(subject, fault, groups)


def _finding(subject: Subject, fault: Fault, groups: Sequence[Group]) -> Finding:
    """The finding about a fault that selects the arrays of these groups, the largest
    first. A fault that went wrong in nearly all programs `is_precise`.
    """
    first = groups[0]
    spec = spec_text(entries_of(first.row.spec))
    others = f", and {plural(len(groups) - 1, 'other')}" if groups[1:] else ""
    counts = f"{fault.wrong} of {fault.flagged} programs that were run with such arrays"
    if fault.is_precise:
        advice = "change the layout"
    else:
        advice = "run `shardfx.testing.check_step`"
    message = (
        f"sharded as {spec}{others}. XLA's partitioner computes wrong numbers for"
        f" {fault.pattern} ({fault.versions_text}): {counts} were wrong; {advice}."
        f" It is mended by {fault.mended_by}"
    )
    fix = "\n".join(_fix(subject, group) for group in groups)
    severity = "warning" if fault.is_precise else "info"
    return Finding(
        code="known-fault",
        severity=severity,
        where=first.where,
        bytes=0,
        message=message,
        fix=fix,
    )


def _selected(subject: Subject, predicate: ArrayPredicate) -> list[Group]:
    """The arrays of the plan that a predicate selects, the most bytes first.

    A predicate with `alone` selects no array whose last two dimensions are sharded the
    other way round in another array of its stack.
    """
    selected: list[Group] = []
    # By the path of a stack of layers, its arrays that match, each with the mesh axes
    # of its two main dimensions.
    stacks: dict[str, list[tuple[Group, ArrayCut]]] = {}
    for group in subject.content.groups:
        cut = _matched_cut(subject, predicate, group)
        if cut is not None:
            stacks.setdefault(_stack_path(group), []).append((group, cut))
    for stack, members in stacks.items():
        # One product alone, such as a head, has no second that could go wrong.
        array_count = sum(len(group.paths) for group, _ in members)
        is_stacked = any(len(group.row.shape) > 2 for group, _ in members)
        if array_count == 1 and not is_stacked:
            continue
        opposites = _opposites(subject, stack) if predicate.alone else set()
        selected += [group for group, cut in members if cut not in opposites]
    return sorted(selected, key=lambda group: -group.bytes)


def _matched_cut(
    subject: Subject,
    predicate: ArrayPredicate,
    group: Group,
) -> ArrayCut | None:
    """The mesh axes of the two main dimensions of the arrays in `group`, if the
    predicate selects these arrays; else `None`.
    """
    sizes = dict(subject.content.mesh.shape)
    return matches_array(predicate, group.row.shape, _axes_of_dims(group), sizes)


def _axes_of_dims(group: Group) -> list[tuple[str, ...]]:
    """The mesh axes that shard each dimension of the arrays in `group`."""
    axes_of_dims = [tuple(entry_axes(entry)) for entry in entries_of(group.row.spec)]
    whole_dims = len(group.row.shape) - len(axes_of_dims)
    return axes_of_dims + [()] * whole_dims


def _stack_path(group: Group) -> str:
    """The path before its first number, or its first name: the stack of layers that
    holds these arrays. It is `layers/` for `layers/0/w`, and `head` for `head/w`.
    """
    path = group.paths[0]
    before_number = re.split(r"\d", path, maxsplit=1)[0]
    if before_number != path:
        return before_number
    return path.partition("/")[0]


def _opposites(subject: Subject, stack: str) -> set[ArrayCut]:
    """The mesh axes of the last two dimensions of all arrays of a stack, the other way
    round.
    """
    opposites: set[ArrayCut] = set()
    for group in subject.content.groups:
        if len(group.row.shape) > 1 and _stack_path(group) == stack:
            first, second = map(frozenset, _axes_of_dims(group)[-2:])
            opposites.add(ArrayCut(second, first))
    return opposites


def _fix(subject: Subject, group: Group) -> str:
    """Code that shards the arrays of a group over the same mesh axes along one of the
    two dimensions.
    """
    axes_of_dims = _axes_of_dims(group)
    shape = group.row.shape
    sharded_dims = [dim for dim, axes in enumerate(axes_of_dims) if axes]
    all_axes: list[str] = []
    for dim in sharded_dims:
        all_axes += axes_of_dims[dim]
    shard_count = shards_over(all_axes, subject.content.mesh.shape)
    divisible_dims = [dim for dim in sharded_dims if shape[dim] % shard_count == 0]

    entries: list[Any] = [None] * len(shape)
    names: list[Any] = [None] * len(shape)
    if divisible_dims:
        dim = divisible_dims[-1]
        entries[dim] = canonical_entry(tuple(all_axes))
        names[dim] = tuple(_names(group, sharded_dims))
    else:
        # The last dimension alone, since no dimension divides by all.
        dim = sharded_dims[-1]
        entries[dim] = canonical_entry(axes_of_dims[dim])
        names[dim] = name_at(group.row, dim)
    return subject.fix(group, tuple(names), PartitionSpec(*entries))


def _names(group: Group, dims: Sequence[int]) -> Iterator[str]:
    """Yields the logical names of some dimensions; nothing for arrays without names."""
    if not group.row.names:
        return
    for dim in dims:
        yield from members_of((group.row.names[dim],))
