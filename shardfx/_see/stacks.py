"""Layers of one stack that are sharded differently."""

from collections.abc import Iterator
from typing import Any

from .._ground.spec import entries_of
from .._ground.text import between_numbers, spec_text
from .._plan.content import Group
from .finding import Finding
from .subject import Subject, asked_by


def uneven_layers(subject: Subject) -> Iterator[Finding]:
    """Leaves whose paths differ in numbers only, with one shape and dtype, of which a few are sharded differently."""
    stacks: dict[Any, list[Group]] = {}
    for group in subject.groups:
        # A number at the end of a path is no layer's: rows and columns of a square matrix are `w/0` and `w/1`.
        last = group.paths[0].rpartition("/")[2]
        key = (between_numbers(group.paths[0]), last if last.isdigit() else "", group.row.shape, group.row.dtype)
        stacks.setdefault(key, []).append(group)
    for groups in stacks.values():
        by_spec: dict[Any, list[Group]] = {}
        for group in groups:
            by_spec.setdefault(group.row.spec, []).append(group)
        if len(by_spec) > 1:
            # Most layers, or else those of which a device holds less, are taken to be what was meant.
            most = max(by_spec.values(), key=lambda same: (_count(same), -_share(subject, same[0])))
            for group in (group for same in by_spec.values() if same is not most for group in same):
                yield _finding(subject, group, most)


def _count(groups: list[Group]) -> int:
    return sum(len(group.paths) for group in groups)


def _share(subject: Subject, group: Group) -> int:
    return subject.content.byte_counts[group.number][1]


def _finding(subject: Subject, group: Group, most: list[Group]) -> Finding:
    like = most[0]
    more = max(0, _share(subject, group) - _share(subject, like)) * len(group.paths)
    message = (
        f"sharded as {spec_text(entries_of(group.row.spec))} by {asked_by(group)}, while {_count(most)} of the same "
        f"stack (`{like.where}`) are sharded as {spec_text(entries_of(like.row.spec))} by {asked_by(like)}"
    )
    if subject.flat is not None and subject.is_named(group.paths[0]):
        fix = subject.renamed(group.paths, like.row.names)
    else:
        fix = subject.ruled(group.paths, subject.plain_row(like).spec)
    return Finding("uneven-layers", "warning", group.where, more, message, fix)
