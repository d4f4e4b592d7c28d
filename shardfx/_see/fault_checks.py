"""The check for layouts that XLA's partitioner is known to compute wrongly in some
programs, by the records of `_step/faults`. It reads what specs and shapes answer.
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
    """The arrays of the plan that a predicate selects, the most bytes first."""
    selected: list[Group] = []
    stacks: dict[str, list[tuple[Group, ArrayCut]]] = {}
    for group in subject.content.groups:
        cut = _cut(subject, predicate, group)
        if cut is not None:
            stacks.setdefault(_stack(group), []).append((group, cut))
    for stack, members in stacks.items():
        # One product alone, such as a head, has no second that could go wrong.
        blocks = sum(len(group.paths) for group, _ in members)
        is_stacked = any(len(group.row.shape) > 2 for group, _ in members)
        if blocks == 1 and not is_stacked:
            continue
        opposites = _opposites(subject, stack) if predicate.alone else set()
        selected += [group for group, cut in members if cut not in opposites]
    return sorted(selected, key=lambda group: -group.bytes)


def _cut(subject: Subject, predicate: ArrayPredicate, group: Group) -> ArrayCut | None:
    sizes = dict(subject.content.mesh.shape)
    return matches_array(predicate, group.row.shape, _cuts(group), sizes)


def _cuts(group: Group) -> list[tuple[str, ...]]:
    cuts = [tuple(entry_axes(entry)) for entry in entries_of(group.row.spec)]
    whole_dims = len(group.row.shape) - len(cuts)
    return cuts + [()] * whole_dims


def _stack(group: Group) -> str:
    """The path before its first number, or its first name: the stack of layers that
    holds these arrays.
    """
    before = re.split(r"\d", group.paths[0], maxsplit=1)[0]
    if before != group.paths[0]:
        return before
    return before.partition("/")[0]


def _opposites(subject: Subject, stack: str) -> set[ArrayCut]:
    """The last two dimensions of all arrays of a stack, the other way round."""
    opposites: set[ArrayCut] = set()
    for group in subject.content.groups:
        if len(group.row.shape) > 1 and _stack(group) == stack:
            first, second = map(frozenset, _cuts(group)[-2:])
            opposites.add(ArrayCut(second, first))
    return opposites


def _fix(subject: Subject, group: Group) -> str:
    """Code that shards the arrays of a group over the same mesh axes along one of the
    two dimensions.
    """
    cuts = _cuts(group)
    shape = group.row.shape
    cut_dims = [dim for dim, cut in enumerate(cuts) if cut]
    axes: list[str] = []
    for dim in cut_dims:
        axes += cuts[dim]
    shards = shards_over(axes, subject.content.mesh.shape)
    divisible_dims = [dim for dim in cut_dims if shape[dim] % shards == 0]

    entries: list[Any] = [None] * len(shape)
    names: list[Any] = [None] * len(shape)
    if divisible_dims:
        dim = divisible_dims[-1]
        entries[dim] = canonical_entry(tuple(axes))
        names[dim] = tuple(_names(group, cut_dims))
    else:
        # The last dimension alone, since no dimension divides by all.
        dim = cut_dims[-1]
        entries[dim] = canonical_entry(cuts[dim])
        names[dim] = name_at(group.row, dim)
    return subject.fix(group, tuple(names), PartitionSpec(*entries))


def _names(group: Group, dims: Sequence[int]) -> Iterator[str]:
    if not group.row.names:
        return
    for dim in dims:
        yield from members_of((group.row.names[dim],))
