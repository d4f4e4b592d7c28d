"""Arrays that are cut less than asked for one cause, a mesh axis whose size does not divide them, as one finding."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from .._ground.reason import Code, Reason
from .._ground.text import plural
from .._plan.content import Group
from .._plan.leaf import Row
from ..topology._mesh import MeshSpec
from .finding import Finding
from .subject import Subject


# So many arrays, or groups of alike ones, are told as one finding.
_TOGETHER = 3
_SHOWN = 3


@dataclasses.dataclass(frozen=True)
class Short:
    """Arrays that are cut less than asked, the reasons, and the finding about them alone."""

    group: Group
    reasons: tuple[Reason, ...]
    finding: Finding


def by_cause(subject: Subject, found: Iterable[Short], falls_short: Callable[[Subject, Row], object]) -> list[Finding]:
    """The findings, those of one cause together. `falls_short` says whether a row is cut less than asked."""
    causes: dict[tuple[str, tuple[str, ...]], list[Short]] = {}
    alone = []
    for one in found:
        axes = {axis for why in one.reasons for axis in why.axes}
        if len(axes) == 1 and all(why.code in (Code.indivisible, Code.unit) for why in one.reasons):
            causes.setdefault((one.finding.severity, tuple(axes)), []).append(one)
        else:
            alone.append(one.finding)
    for (_, (axis,)), shorts in causes.items():
        if len(shorts) < _TOGETHER:
            alone += [one.finding for one in shorts]
        else:
            alone.append(_together(subject, axis, shorts, falls_short))
    return alone


def other_sizes(
    subject: Subject, axis: str, groups: Sequence[Group], falls_short: Callable[[Subject, Row], object]
) -> tuple[int, ...]:
    """Sizes of a mesh axis, from half to twice its own, under which none of these arrays is cut less than asked.

    The largest below its own comes first, then the smallest above.
    """
    mesh, size = subject.mesh, subject.mesh.shape.get(axis, 1)
    if subject.flat is None or subject.refine or any(count > 1 for count in mesh.dcn_sizes):
        return ()
    paths = {group.number: group.paths[0] for group in groups}
    found = []
    for tried in (
        range(size - 1, max(1, -(-size // 2) - 1), -1),
        range(size + 1, min(2 * size, size + _MOST_TRIED) + 1),
    ):
        for other in tried[:_MOST_TRIED]:
            changed = dataclasses.replace(subject, mesh=_resized(subject, axis, other))
            rows = (changed.row_with(path) for path in paths.values())
            if all(row is not None and not falls_short(changed, row) for row in rows):
                found.append(other)
                break
    return tuple(found)


_MOST_TRIED = 16


def mesh_code(subject: Subject, axis: str, size: int) -> str:
    """Code for the mesh with another size of one axis."""
    return f"mesh = {_resized(subject, axis, size)!r}"


def _resized(subject: Subject, axis: str, size: int) -> MeshSpec:
    mesh = subject.mesh
    sizes = {name: size if name == axis else was for name, was in mesh.shape.items()}
    return MeshSpec(sizes, axis_types=dict(zip(mesh.axis_names, mesh.axis_types, strict=True)))


def _together(
    subject: Subject, axis: str, shorts: Sequence[Short], falls_short: Callable[[Subject, Row], object]
) -> Finding:
    groups = [one.group for one in shorts]
    count = sum(len(group.paths) for group in groups)
    shown = [f"`{group.where}` {group.row.shape}" for group in groups[:_SHOWN]]
    more = [f"{len(groups) - len(shown)} more"] if len(groups) > len(shown) else []
    size = subject.content.mesh.shape.get(axis, 1)
    in_units = all(why.code is Code.unit for one in shorts for why in one.reasons)
    what = f"{plural(count, 'array')} are not divisible by `{axis}` ({size}) as asked"
    if in_units:
        what = f"`{axis}` ({size}) would cut inside units of {plural(count, 'array')}"
    message = f"{what}: {', '.join([*shown, *more])}"
    sizes = other_sizes(subject, axis, groups, falls_short)
    fixes = list(dict.fromkeys(one.finding.fix for one in shorts))
    if sizes:
        message += f"; `{axis}` of {' or '.join(map(str, sizes))} would divide all of them"
    fix = mesh_code(subject, axis, sizes[0]) if sizes and fixes != ["refine = True"] else "\n".join(fixes)
    lost = sum(one.finding.bytes for one in shorts)
    return Finding("corrected", shorts[0].finding.severity, f"mesh axis {axis!r}", lost, message, fix)
