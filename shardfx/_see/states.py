"""States of an optimizer that are sharded less than their parameters, or than each other."""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from jax.sharding import PartitionSpec

from .._ground.reason import Code
from .._ground.spec import entries_of, entry_axes
from .._ground.text import bytes_text
from .._plan.decide import Request
from .._plan.further import further
from .._plan.leaf import Row
from .._rules.strategies import fsdp
from .finding import Finding
from .subject import Group, Subject


class _State(NamedTuple):
    """Leaves that have the shape and the name of a parameter elsewhere in the tree, and that parameter's row."""

    root: str
    group: Group
    param: Row


def optimizer_states(subject: Subject, limit: int) -> Iterator[Finding]:
    """States that are less sharded than their parameters, or than other states, or as if there were no ZeRO."""
    states = _states(subject)
    if not states:
        return
    sizes = subject.content.mesh.shape
    beside = {axis: None for state in states for axis in _axes(state.group.row) if axis not in _axes(state.param)}
    for state in states:
        row, param = state.group.row, state.param
        if _pieces(row, sizes) < _pieces(param, sizes):
            message = f"it is sharded over {_told(row)}, its parameter over {_told(param)}"
            yield _finding(subject, [state], message, {state.group.number: param.spec})
    for axis in beside:
        left = [state for state in states if axis not in _axes(state.group.row) and not state.group.row.reasons]
        yield from _over(subject, left, axis, f"other states are sharded over `{axis}`, these are not")
    for axis, size in sizes.items():
        if size > 1 and not any(axis in _axes(row) for state in states for row in (state.group.row, state.param)):
            message = f"every device along `{axis}` holds the same states: nothing is sharded over it, as ZeRO-1 would"
            yield from (one for one in _over(subject, states, axis, message) if one.bytes >= limit)


def _states(subject: Subject) -> list[_State]:
    """The states, by the one of the tree's branches that holds the parameters of most others."""
    branches: dict[str, list[Group]] = {}
    for group in subject.groups:
        branches.setdefault(group.paths[0].partition("/")[0], []).append(group)
    if len(branches) < 2:
        return []
    best: list[_State] = []
    for root, params in branches.items():
        known = {path.removeprefix(f"{root}/"): group.row for group in params for path in group.paths}
        found = [state for other, groups in branches.items() if other != root for state in _of(other, groups, known)]
        # What looks like a state has a namesake; only of an optimizer do most parameters have states.
        covered = {state.param for state in found}
        if 2 * len(covered) >= len({group.row for group in params}) and len(found) > len(best):
            best = found
    return best


def _of(branch: str, groups: list[Group], known: dict[str, Row]) -> list[_State]:
    """The states in a branch. Of an optimizer most arrays are; an embedding of the output's shape is none."""
    found = [_State(branch, group, param) for group in groups if (param := _param(group, branch, known)) is not None]
    return found if 2 * len(found) >= sum(bool(group.row.shape) for group in groups) else []


# Of copies that have no names of their own between the branch and the parameter's path.
_COPIES = ("opt", "ema", "momentum", "velocity", "mu", "nu", "m", "v")


def _param(group: Group, root: str, known: dict[str, Row]) -> Row | None:
    """The row of the parameter whose path is the end of these leaves' path."""
    parts = group.paths[0].split("/")[1:]
    for at in range(0 if root.startswith(_COPIES) else 1, len(parts)):
        row = known.get("/".join(parts[at:]))
        if row is not None and row.shape == group.row.shape and row.shape:
            return row
    return None


def _axes(row: Row) -> tuple[str, ...]:
    return tuple(axis for entry in entries_of(row.spec) for axis in entry_axes(entry))


def _pieces(row: Row, sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[axis] for axis in _axes(row))


def _told(row: Row) -> str:
    return " and ".join(f"`{axis}`" for axis in _axes(row)) or "nothing"


def _over(subject: Subject, states: list[_State], axis: str, message: str) -> Iterator[Finding]:
    """One finding for all states that could be sharded over an axis too."""
    specs: dict[int, PartitionSpec] = {}
    for state in states:
        row = state.group.row
        request = Request(None, row.spec, None, row.units, (), ())
        spec = further(request, row.shape, row.dtype, subject.content.mesh, fsdp(axis)).spec
        if spec != row.spec and not any(why.code is Code.small for why in row.reasons):
            specs[state.group.number] = spec
    chosen = [state for state in states if state.group.number in specs]
    if chosen:
        yield _finding(subject, chosen, message, specs)


def _finding(subject: Subject, states: list[_State], message: str, specs: dict[int, PartitionSpec]) -> Finding:
    sizes, lines, saved = subject.content.mesh.shape, [], 0
    for state in states:
        group = state.group
        row = group.row._replace(spec=specs[group.number])
        saved += (subject.content.byte_counts[group.number][1] - row.byte_counts(sizes)[1]) * len(group.paths)
        lines.append(subject.ruled(group.paths, row.spec))
    where = states[0].group.where if len(states) == 1 else states[0].root
    text = f"{message}; it costs each device {bytes_text(max(saved, 0))}"
    return Finding("optimizer-state", "warning", where, max(saved, 0), text, "\n".join(lines))
