"""The check of optimizer states: finds leaves that are sharded less than their
parameters, or otherwise. A `Group` is arrays that are planned alike and whose paths
differ only in numbers.
"""

import itertools
import re
from collections.abc import Iterator
from typing import NamedTuple

from jax.sharding import PartitionSpec

from .._ground.reason import Code
from .._ground.spec import (
    entries_at,
    entries_of,
    entry_axes,
    shards_over,
    trimmed,
)
from .._ground.text import bytes_text, together
from .._plan import Group, Request, Row, correspondences, shard_over
from .._rules import axes_of_target, fsdp
from .finding import Finding
from .subject import Subject, has_code


class _State(NamedTuple):
    """Equal leaves of an optimizer's state, and the parameter to which they belong.

    - `root`, `group`: the first segment of the leaves' paths, such as `opt`, and the
      leaves.
    - `param`: the plan of the parameter.
    - `follows`: the spec that the leaves would have if they were sharded like the
      parameter.
    - `is_whole`: whether the leaves have all dimensions of the parameter, as moments
      do. ZeRO-1 can shard such leaves.
    """

    root: str
    group: Group
    param: Row
    follows: PartitionSpec
    is_whole: bool


def optimizer_states(subject: Subject, limit: int) -> Iterator[Finding]:
    """Findings for leaves of an optimizer's state that could be sharded further.

    A leaf is found in three cases:

    - It has fewer shards than its parameter, or a mesh axis shards a dimension of the
      parameter and not of the leaf.
    - A mesh axis shards other leaves of the state in addition to their parameters'
      axes, and could shard this leaf.
    - A mesh axis shards no leaf of the state and no parameter, and ZeRO-1 could shard
      the leaf over it. This case is reported only if it costs each device at least
      `limit` bytes.
    """
    # Each has leaves of the state, and the plan of their parameter in `param`.
    states = _states(subject)
    yield from _unlike_parameters(subject, states)
    # Statistics of rows and columns are small: they only follow their parameter.
    states = [state for state in states if state.is_whole]
    for axis, size in subject.content.mesh.shape.items():
        unsharded_states = [
            state for state in states if axis not in _axes_of(state.group.row)
        ]
        is_of_parameters = any(axis in _axes_of(state.param) for state in states)
        if any(_is_added(axis, state) for state in states):
            # A leaf with reasons could not be sharded as it was requested.
            unsharded_states = [
                state for state in unsharded_states if not state.group.row.reasons
            ]
            message = f"other states are sharded over `{axis}`, these are not"
            least_bytes = 0
        elif size == 1 or len(unsharded_states) < len(states) or is_of_parameters:
            continue
        else:
            message = (
                f"every device along `{axis}` holds the same states: nothing is sharded"
                " over it, as ZeRO-1 would"
            )
            least_bytes = limit

        specs = list(_shardable_over(subject, unsharded_states, axis))
        if specs:
            where = unsharded_states[0].root
            if len(specs) == 1:
                group, _ = specs[0]
                where = group.where
            finding = _of_states(subject, where, message, specs)
            if finding.bytes >= least_bytes:
                yield finding


def _axes_of(row: Row) -> tuple[str, ...]:
    """The mesh axes that shard an array."""
    return axes_of_target(row.spec)


def _is_added(axis: str, state: _State) -> bool:
    """Whether a mesh axis shards the leaves of a state, and not their parameter."""
    return axis in _axes_of(state.group.row) and axis not in _axes_of(state.param)


def _unlike_parameters(subject: Subject, states: list[_State]) -> Iterator[Finding]:
    """Findings for leaves that are sharded otherwise than their parameters."""
    sizes = subject.content.mesh.shape
    for state in states:
        spec = state.group.row.spec
        # The spec that the leaf gets from its parameter's.
        follows = state.follows
        shard_count = shards_over(axes_of_target(spec), sizes)
        followed_count = shards_over(axes_of_target(follows), sizes)
        if shard_count < followed_count:
            message = (
                f"it is sharded over {_axes_text(spec)}, its parameter over"
                f" {_axes_text(follows)}"
            )
            if not state.is_whole:
                message += " in the dimensions that it has of it"
        elif state.is_whole and not _covers(spec, follows):
            message = (
                f"it lies as {_code(spec)}, its parameter as {_code(follows)}: each"
                " step moves one to the other. Was it planned from another model's"
                " plan?"
            )
        else:
            continue
        specs = [(state.group, follows)]
        yield _of_states(subject, state.group.where, message, specs)


_LETTERS_OF_MOMENTS = {"m", "v"}

# The names by which libraries call optimizer states and copies of parameters.
_STATE_NAME = re.compile(
    r"(opt|ema|mom|adam|exp_avg|accum|slots?$|trace$|veloc|param_states$|mu$|nu$|m$|v$)"
)


def _states(subject: Subject) -> list[_State]:
    """The leaves of the optimizer's state, each with its parameter.

    A branch of the tree is all arrays whose paths have the same first segment. The
    branch with the parameters is the one whose paths occur most often at the end of
    paths in other branches.
    """
    branches = together(
        subject.content.groups, lambda group: group.paths[0].partition("/")[0]
    )
    if len(branches) == 1:
        return []
    # A single letter, such as `v`, may be a module as well as a moment (values next to
    # queries, for example). Moments always occur together.
    state_branches = dict(branches)
    if not _LETTERS_OF_MOMENTS <= branches.keys():
        for letter in _LETTERS_OF_MOMENTS:
            state_branches.pop(letter, None)
    # In a tree without branches, each array is one: most hold no state.
    possible_states: dict[str, list[Group]] = {}
    for root, groups in state_branches.items():
        named = [group for group in groups if _is_named_as_state(group)]
        if named:
            possible_states[root] = named
    best_states: list[_State] = []
    for root, params in branches.items():
        param_rows: dict[str, Row] = {}
        for group in params:
            for path in group.paths:
                param_rows[path.removeprefix(f"{root}/")] = group.row
        states = []
        for other_root, groups in possible_states.items():
            if other_root != root:
                states += [_state(other_root, group, param_rows) for group in groups]
        best_states = max(
            best_states, [state for state in states if state is not None], key=len
        )
    return best_states


def _is_named_as_state(group: Group) -> bool:
    """Whether a branch with the leaves of `group` has a name of an optimizer's state."""
    names = group.paths[0].split("/")[:-1]
    return any(map(_STATE_NAME.match, names))


def _state(root: str, group: Group, row_by_path: dict[str, Row]) -> _State | None:
    """The leaves in `group` with their parameter; `None` if they are not in an
    optimizer's state.

    `root` is the first segment of the leaves' paths. `row_by_path` has the plans of
    the parameters. A parameter is found by the end of the leaves' paths: `opt/mu/w` and
    `opt/w/v_row` belong to the parameter `w`.
    """
    parts = group.paths[0].split("/")
    shape = group.row.shape
    if not shape:
        return None
    for start in range(1, len(parts)):
        if not any(map(_STATE_NAME.match, parts[:start])):
            continue
        for path in ("/".join(parts[start:]), "/".join(parts[start:-1])):
            param = row_by_path.get(path)
            if param is None:
                continue
            entries = entries_at(param.spec, len(param.shape))
            specs = set()
            # All ways in which the leaf's dimensions can be those of the parameter:
            # `dims` has for each of them a dimension of the parameter, or `None`.
            for dims in correspondences(param.shape, shape):
                entries_of_dims = []
                for dim in dims:
                    entry = None if dim is None else entries[dim]
                    entries_of_dims.append(entry)
                specs.add(trimmed(entries_of_dims))
            # Dimensions of equal sizes may be sharded differently: then nothing says
            # what the state follows.
            if len(specs) == 1:
                return _State(
                    root=root,
                    group=group,
                    param=param,
                    follows=specs.pop(),
                    is_whole=len(shape) >= len(param.shape),
                )
    return None


def _axes_text(spec: PartitionSpec) -> str:
    """The mesh axes of a spec as text; "nothing" for none."""
    return " and ".join(f"`{axis}`" for axis in axes_of_target(spec)) or "nothing"


def _code(spec: PartitionSpec) -> str:
    """A spec as code."""
    return f"P({', '.join(map(repr, entries_of(spec)))})"


def _covers(spec: PartitionSpec, base: PartitionSpec) -> bool:
    """Whether each dimension is sharded under `spec` over all the mesh axes that shard
    it under `base`.
    """
    pairs = itertools.zip_longest(entries_of(spec), entries_of(base))
    for ours, theirs in pairs:
        if not set(entry_axes(theirs)) <= set(entry_axes(ours)):
            return False
    return True


def _shardable_over(
    subject: Subject,
    states: list[_State],
    axis: str,
) -> Iterator[tuple[Group, PartitionSpec]]:
    """Yields the leaves in `states` that can also be sharded over the mesh axis `axis`,
    each with its new spec.
    """
    mesh = subject.content.mesh
    for state in states:
        row = state.group.row
        request = Request(spec=row.spec, units=row.units)
        spec = shard_over(
            request=request,
            shape=row.shape,
            dtype=row.dtype,
            mesh=mesh,
            over=fsdp(axis),
        ).spec
        if spec != row.spec and not has_code(row.reasons, Code.small):
            yield state.group, spec


def _of_states(
    subject: Subject,
    where: str,
    message: str,
    specs: list[tuple[Group, PartitionSpec]],
) -> Finding:
    """One finding for leaves of an optimizer's state. `specs` has these leaves, each
    with the spec it should get.

    `where` and `message` become fields of the Finding.
    """
    content = subject.content
    saved_bytes = 0
    for group, spec in specs:
        _, shard_bytes = content.byte_counts[group.number]
        _, new_bytes = group.row._replace(spec=spec).byte_counts(content.mesh.shape)
        saved_bytes += (shard_bytes - new_bytes) * len(group.paths)
    if saved_bytes > 0:
        message += f"; it costs each device {bytes_text(saved_bytes)}"
    fix = "\n".join(subject.rule_fix(group.paths, spec) for group, spec in specs)
    return Finding(
        code="optimizer-state",
        severity="warning",
        where=where,
        bytes=max(saved_bytes, 0),
        message=message,
        fix=fix,
    )
