"""Checks of arrays that are sharded differently from similar ones: optimizer states, and layers of one stack."""

import itertools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from jax.sharding import PartitionSpec

from .._ground.reason import Code
from .._ground.spec import entries_at, entries_of, entry_axes, trimmed
from .._ground.text import between_numbers, bytes_text, spec_text, together
from .._plan import Group, Request, Row, corresponding, further
from .._rules import axes_of_target, fsdp
from .finding import Finding
from .subject import Subject, asked_by


class _State(NamedTuple):
    """Leaves of an optimizer's state, the row of their parameter, and the spec that follows the parameter's.

    `is_whole` means that they have all of its dimensions, so they could be sharded further, as moments are.
    """

    root: str
    group: Group
    param: Row
    follows: PartitionSpec
    is_whole: bool


def optimizer_states(subject: Subject, limit: int) -> Iterator[Finding]:
    """Findings for states that are sharded less than their parameter or than other states, or that ZeRO-1
    would shard.
    """
    sizes, states = subject.content.mesh.shape, _states(subject)
    for state in states:
        spec, follows = state.group.row.spec, state.follows
        shards, asked = (math.prod(sizes[axis] for axis in axes_of_target(one)) for one in (spec, follows))
        if shards < asked:
            message = f"it is sharded over {_told(spec)}, its parameter over {_told(follows)}"
            message += "" if state.is_whole else " in the dimensions that it has of it"
        elif state.is_whole and not _keeps(spec, follows):
            shown = [f"P({', '.join(map(repr, entries_of(one)))})" for one in (spec, follows)]
            message = f"it lies as {shown[0]}, its parameter as {shown[1]}: each step moves one to the other. "
            message += "Was it planned from another model's plan?"
        else:
            continue
        yield _finding(subject, state.group.where, message, [(state.group, follows)])
    # Statistics of rows and columns are small: they only follow their parameter.
    states = [state for state in states if state.is_whole]
    for axis, size in sizes.items():
        left = [state for state in states if axis not in axes_of_target(state.group.row.spec)]
        message = f"every device along `{axis}` holds the same states: nothing is sharded over it, as ZeRO-1 would"
        least = limit
        if any(
            axis in axes_of_target(state.group.row.spec) and axis not in axes_of_target(state.param.spec)
            for state in states
        ):
            left = [state for state in left if not state.group.row.reasons]
            message, least = f"other states are sharded over `{axis}`, these are not", 0
        elif size == 1 or len(left) < len(states) or any(axis in axes_of_target(state.param.spec) for state in states):
            continue
        found = list(_over(subject, left, axis))
        if found:
            finding = _finding(subject, found[0][0].where if len(found) == 1 else left[0].root, message, found)
            yield from [finding] if finding.bytes >= least else []


_MOMENTS = {"m", "v"}
# The names by which libraries call optimizer states and copies of parameters.
_CALLED = re.compile(r"(opt|ema|mom|adam|exp_avg|accum|slots?$|trace$|veloc|param_states$|mu$|nu$|m$|v$)")


def _states(subject: Subject) -> list[_State]:
    """The optimizer's states. The branch of the tree that explains most of them is taken for the parameters."""
    branches = together(subject.content.groups, lambda group: group.paths[0].partition("/")[0])
    # A single letter may be a module as well as a moment (values next to queries, for example); a moment never comes
    # alone.
    likely = {root: own for root, own in branches.items() if root not in _MOMENTS or _MOMENTS <= branches.keys()}
    best: list[_State] = []
    for root, params in branches.items() if len(branches) > 1 else ():
        known = {path.removeprefix(f"{root}/"): group.row for group in params for path in group.paths}
        found = [_state(other, group, known) for other in likely if other != root for group in likely[other]]
        best = max(best, [state for state in found if state is not None], key=len)
    return best


def _state(root: str, group: Group, known: dict[str, Row]) -> _State | None:
    """The state of a parameter, found by the end of its path, or by that without the last name as in `w/v_row`; `None`
    for other leaves.
    """
    parts, shape = group.paths[0].split("/"), group.row.shape
    for at in range(1, len(parts)):
        if not any(map(_CALLED.match, parts[:at])):
            continue
        for param in (known.get("/".join(parts[at:])), known.get("/".join(parts[at:-1]))):
            dims = None if param is None or not shape else corresponding(param.shape, shape)
            if param is not None and dims is not None:
                entries = entries_at(param.spec, len(param.shape))
                spec = trimmed([None if dim is None else entries[dim] for dim in dims])
                return _State(root, group, param, spec, len(shape) >= len(param.shape))
    return None


def _keeps(spec: PartitionSpec, follows: PartitionSpec) -> bool:
    """Whether `spec` shards each dimension over at least the axes that `follows` shards it over."""
    pairs = itertools.zip_longest(entries_of(spec), entries_of(follows))
    return all(set(entry_axes(theirs)) <= set(entry_axes(ours)) for ours, theirs in pairs)


def _told(spec: PartitionSpec) -> str:
    return " and ".join(f"`{axis}`" for axis in axes_of_target(spec)) or "nothing"


def _over(subject: Subject, states: list[_State], axis: str) -> Iterator[tuple[Group, PartitionSpec]]:
    """The states that could be sharded over a mesh axis too, each with its spec then."""
    for group in [state.group for state in states]:
        row = group.row
        request = Request(None, row.spec, None, row.units, (), ())
        spec = further(request, row.shape, row.dtype, subject.content.mesh, fsdp(axis)).spec
        if spec != row.spec and not any(why.code is Code.small for why in row.reasons):
            yield group, spec


def _finding(subject: Subject, where: str, message: str, specs: list[tuple[Group, PartitionSpec]]) -> Finding:
    """One finding for all states that another spec would shard further."""
    content, saved = subject.content, 0
    for group, spec in specs:
        shard = group.row._replace(spec=spec).byte_counts(content.mesh.shape)[1]
        saved += (content.byte_counts[group.number][1] - shard) * len(group.paths)
    message += f"; it costs each device {bytes_text(saved)}" if saved > 0 else ""
    fix = "\n".join(subject.ruled(group.paths, spec) for group, spec in specs)
    return Finding("optimizer-state", "warning", where, max(saved, 0), message, fix)


def uneven_layers(subject: Subject) -> Iterator[Finding]:
    """Findings for arrays of repeated layers with one shape and dtype, if a few of them are sharded differently."""
    sizes = subject.content.byte_counts
    stacks = together(subject.content.groups, _stack)
    for groups in stacks.values():
        by_spec = together(groups, lambda group: group.row.spec)
        if len(by_spec) == 1:
            continue
        # The spec of most layers is taken as intended; of equally many, the one with fewer bytes per device.
        most = max(by_spec.values(), key=lambda same: (_count(same), -sizes[same[0].number][1]))
        like = most[0]
        for group in (group for same in by_spec.values() if same is not most for group in same):
            more = max(0, sizes[group.number][1] - sizes[like.number][1]) * len(group.paths)
            message = (
                f"sharded as {spec_text(entries_of(group.row.spec))} by {asked_by(group)}, while {_count(most)} of the "
                f"same stack (`{like.where}`) are sharded as {spec_text(entries_of(like.row.spec))} by {asked_by(like)}"
            )
            fix = subject.mended(group, like.row.names, like.row.spec)
            yield Finding("uneven-layers", "warning", group.where, more, message, fix)


def _stack(group: Group) -> object:
    # A number at the end of a path is no layer: the rows and columns of a square matrix are `w/0` and `w/1`.
    last = group.paths[0].rpartition("/")[2]
    return between_numbers(group.paths[0]), last if last.isdigit() else "", group.row.shape, group.row.dtype


def _count(groups: list[Group]) -> int:
    return sum(len(group.paths) for group in groups)
