"""States of an optimizer that are sharded less than their parameters, or than each other."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
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
    """The states, by the branch of the tree that holds the parameters of most of them."""
    branches: dict[str, list[Group]] = {}
    for group in subject.groups:
        branches.setdefault(group.paths[0].partition("/")[0], []).append(group)
    if len(branches) < 2 or not any(map(_is_of_an_optimizer, branches.values())):
        return []
    best: list[_State] = []
    for root, params in branches.items():
        known = {path.removeprefix(f"{root}/"): group.row for group in params for path in group.paths}
        found = [state for other, groups in branches.items() if other != root for state in _of(other, groups, known)]
        best = max(best, found, key=len)
    return best


def _is_of_an_optimizer(groups: list[Group]) -> bool:
    return any(_names_a_state(group.paths[0].split("/")) for group in groups)


# What libraries call the states of an optimizer, and copies of parameters.
_CALLED = re.compile(r"(opt|ema|mom|adam|exp_avg|accum|slots?$|trace$|veloc|param_states$|mu$|nu$|m$|v$)")


def _names_a_state(parts: Sequence[str]) -> bool:
    return any(map(_CALLED.match, parts))


def _of(root: str, groups: list[Group], known: dict[str, Row]) -> list[_State]:
    """The states in one branch: of a moment, or a copy, that holds at least half of the parameters."""
    by_owner: dict[tuple[str, ...], list[_State]] = {}
    for group in groups:
        parts = group.paths[0].split("/")
        for at in range(1, len(parts)):
            param = known.get("/".join(parts[at:]))
            if param is not None and param.shape == group.row.shape and param.shape and _names_a_state(parts[:at]):
                by_owner.setdefault(tuple(parts[:at]), []).append(_State(root, group, param))
                break
    rows = len(set(known.values()))
    return [state for states in by_owner.values() if 2 * len({one.param for one in states}) >= rows for state in states]


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
