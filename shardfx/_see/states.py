"""Checks of arrays that are sharded differently from similar ones: optimizer states, and layers of one stack."""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jax.sharding import PartitionSpec

from .._ground.reason import Code
from .._ground.spec import entries_at, entries_of, entry_axes, trimmed
from .._ground.text import between_numbers, bytes_text, spec_text, together
from .._plan import Group, Request, Row, further
from .._rules import fsdp
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
    sizes = subject.content.mesh.shape
    states = _states(subject, sizes)
    if not states:
        return
    for state in states:
        row = state.group.row
        if _pieces(row.spec, sizes) < _pieces(state.follows, sizes):
            message = f"it is sharded over {_told(row.spec)}, its parameter over {_told(state.follows)}"
            message += "" if state.is_whole else " in the dimensions that it has of it"
            yield _finding(subject, [state], message, {state.group.number: state.follows})
        elif state.is_whole and not _keeps(row.spec, state.follows):
            message = f"it lies as {_shown(row.spec)}, its parameter as {_shown(state.follows)}"
            message += ": each step moves one to the other. Was it planned from another model's plan?"
            yield _finding(subject, [state], message, {state.group.number: state.follows})
    # Statistics of rows and columns are small: they only follow their parameter.
    states = [state for state in states if state.is_whole]
    beside = {
        axis: None for state in states for axis in _axes(state.group.row.spec) if axis not in _axes(state.param.spec)
    }
    for axis in beside:
        left = [state for state in states if axis not in _axes(state.group.row.spec) and not state.group.row.reasons]
        yield from _over(subject, left, axis, f"other states are sharded over `{axis}`, these are not")
    for axis, size in sizes.items():
        if size > 1 and not any(axis in _axes(row.spec) for state in states for row in (state.group.row, state.param)):
            message = f"every device along `{axis}` holds the same states: nothing is sharded over it, as ZeRO-1 would"
            yield from (one for one in _over(subject, states, axis, message) if one.bytes >= limit)


def _states(subject: Subject, sizes: Mapping[str, int]) -> list[_State]:
    """The optimizer's states. The branch of the tree that explains most of them is taken for the parameters."""
    branches = together(subject.content.groups, lambda group: group.paths[0].partition("/")[0])
    # A single letter may be a module as well as a moment (values next to queries, for example); a moment never comes
    # alone.
    likely = {root: groups for root, groups in branches.items() if root not in _MOMENTS or _MOMENTS <= {*branches}}
    first = [group.paths[0].split("/") for groups in likely.values() for group in groups]
    if len(branches) < 2 or not any(map(_names_a_state, first)):
        return []
    best: list[_State] = []
    for root, params in branches.items():
        known = {path.removeprefix(f"{root}/"): group.row for group in params for path in group.paths}
        found = [
            state for other, groups in likely.items() if other != root for state in _of(other, groups, known, sizes)
        ]
        best = max(best, found, key=len)
    return best


_MOMENTS = {"m", "v"}
# The names by which libraries call optimizer states and copies of parameters.
_CALLED = re.compile(r"(opt|ema|mom|adam|exp_avg|accum|slots?$|trace$|veloc|param_states$|mu$|nu$|m$|v$)")


def _names_a_state(parts: Sequence[str]) -> bool:
    return any(map(_CALLED.match, parts))


def _of(root: str, groups: list[Group], known: dict[str, Row], sizes: Mapping[str, int]) -> list[_State]:
    """The states in one branch of the tree, if they correspond to at least half of the parameters."""
    by_owner: dict[tuple[str, ...], list[_State]] = {}
    for group in groups:
        parts = group.paths[0].split("/")
        for at in range(1, len(parts)):
            state = _state(root, group, parts[at:], known, sizes) if _names_a_state(parts[:at]) else None
            if state is not None:
                # A factored optimizer has matrices in one tree and vectors in another with the same paths.
                by_owner.setdefault(tuple(parts[: max(at - 1, 1)]), []).append(state)
                break
    rows = len(set(known.values()))
    return [state for states in by_owner.values() if 2 * len({one.param for one in states}) >= rows for state in states]


def _state(
    root: str, group: Group, parts: Sequence[str], known: Mapping[str, Row], sizes: Mapping[str, int]
) -> _State | None:
    """The state of a parameter, found by the end of its path, or by that without the last name as in `w/v_row`; `None`
    for other leaves.
    """
    for path in ("/".join(parts), "/".join(parts[:-1])):
        param = known.get(path)
        if param is not None and param.shape:
            spec = _following(group.row.shape, param, sizes)
            if spec is not None:
                return _State(root, group, param, spec, len(group.row.shape) >= len(param.shape))
    return None


def _following(shape: tuple[int, ...], param: Row, sizes: Mapping[str, int]) -> PartitionSpec | None:
    """The parameter's spec for a state with some of its dimensions, or with one more in front; `None` if shapes do not
    match.
    """
    rank = len(param.shape)
    entries = entries_at(param.spec, rank)
    if shape[-rank:] == param.shape and len(shape) <= rank + 1:
        return trimmed((None,) * (len(shape) - rank) + entries)
    if not shape or len(shape) >= rank or shape == (1,) or rank > _MOST_DIMENSIONS:
        return None
    chosen = itertools.combinations(range(rank), len(shape))
    fitting = [dims for dims in chosen if tuple(param.shape[dim] for dim in dims) == shape]
    # The rows and columns of a square matrix look alike, so less is required of them then.
    specs = [trimmed([entries[dim] for dim in dims]) for dims in fitting]
    return min(specs, key=lambda spec: _pieces(spec, sizes), default=None)


# Above this number of dimensions, there are too many ways to leave some out.
_MOST_DIMENSIONS = 8


def _axes(spec: PartitionSpec) -> tuple[str, ...]:
    return tuple(axis for entry in entries_of(spec) for axis in entry_axes(entry))


def _pieces(spec: PartitionSpec, sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[axis] for axis in _axes(spec))


def _keeps(spec: PartitionSpec, follows: PartitionSpec) -> bool:
    """Whether `spec` shards each dimension over at least the axes that `follows` shards it over."""
    pairs = itertools.zip_longest(entries_of(spec), entries_of(follows))
    return all(set(entry_axes(theirs)) <= set(entry_axes(ours)) for ours, theirs in pairs)


def _shown(spec: PartitionSpec) -> str:
    return f"P({', '.join(map(repr, entries_of(spec)))})"


def _told(spec: PartitionSpec) -> str:
    return " and ".join(f"`{axis}`" for axis in _axes(spec)) or "nothing"


def _over(subject: Subject, states: list[_State], axis: str, message: str) -> Iterator[Finding]:
    """One finding for all states that could be sharded over a mesh axis too."""
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
    text = f"{message}; it costs each device {bytes_text(saved)}" if saved > 0 else message
    return Finding("optimizer-state", "warning", where, max(saved, 0), text, "\n".join(lines))


def uneven_layers(subject: Subject) -> Iterator[Finding]:
    """Findings for arrays of repeated layers with one shape and dtype, if a few of them are sharded differently."""
    stacks: dict[object, list[Group]] = {}
    for group in subject.content.groups:
        # A number at the end of a path is no layer: the rows and columns of a square matrix are `w/0` and `w/1`.
        last = group.paths[0].rpartition("/")[2]
        key = (between_numbers(group.paths[0]), last if last.isdigit() else "", group.row.shape, group.row.dtype)
        stacks.setdefault(key, []).append(group)
    for groups in stacks.values():
        by_spec = together(groups, lambda group: group.row.spec)
        if len(by_spec) > 1:
            # The spec of most layers is taken as intended; of equally many, the one with fewer bytes per device.
            most = max(by_spec.values(), key=lambda same: (_count(same), -_share(subject, same[0])))
            for group in (group for same in by_spec.values() if same is not most for group in same):
                yield _uneven(subject, group, most)


def _count(groups: list[Group]) -> int:
    return sum(len(group.paths) for group in groups)


def _share(subject: Subject, group: Group) -> int:
    return subject.content.byte_counts[group.number][1]


def _uneven(subject: Subject, group: Group, most: list[Group]) -> Finding:
    like = most[0]
    more = max(0, _share(subject, group) - _share(subject, like)) * len(group.paths)
    message = (
        f"sharded as {spec_text(entries_of(group.row.spec))} by {asked_by(group)}, while {_count(most)} of the same "
        f"stack (`{like.where}`) are sharded as {spec_text(entries_of(like.row.spec))} by {asked_by(like)}"
    )
    fix = subject.mended(group.paths, like.row.names, subject.plain_row(like).spec)
    return Finding("uneven-layers", "warning", group.where, more, message, fix)
