"""Checks of planned arrays: finds arrays that are replicated, or sharded less than
their rules request, or not like similar arrays. A `Group` is arrays that are planned
alike and whose paths differ only in numbers.
"""

import itertools
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from .._ground.reason import Code, Reason
from .._ground.spec import canonical_entry, entries_at, entries_of, entry_axes, trimmed
from .._ground.text import between_numbers, bytes_text, plural, spec_text, together
from .._plan import Group, Request, Row, correspondences, shard_over
from .._rules import axes_of_target, fsdp
from .finding import Finding, Severity
from .subject import Subject, code_of, rule_of


def replicated(subject: Subject, limit: int) -> Iterator[Finding]:
    """A finding for each array of at least `limit` bytes that every device holds whole."""
    content = subject.content
    if content.mesh.size == 1 or not any(
        entries_of(row.requested) or row.strategies for row in content.rows
    ):
        return  # rules that shard nothing at all are those of data parallelism
    for group in content.groups:
        row = group.row
        size, shard = content.byte_counts[group.number]
        # If the array could not be sharded as requested, `corrected` reports it, with
        # the reason.
        if (
            size < limit
            or size != shard
            or row.rule is None
            or any(why.code.is_cut for why in row.reasons)
        ):
            continue
        cause = _asks(group)
        if any(why.code is Code.skipped for why in row.reasons):
            cause = f"{rule_of(group)} may cut no dimension of it"
        message = f"every device holds all {bytes_text(size)} of it, as {cause}"
        fix = _sharded(subject, group) or f"replicated_bytes = {size + 1}"
        lost = subject.lost(row.shape, row.dtype) * len(group.paths)
        yield Finding("replicated", "warning", group.where, lost, message, fix)


def _asks(group: Group) -> str:
    return f"{rule_of(group)} {'ask' if group.row.rule == 'names' else 'asks'}"


def _sharded(subject: Subject, group: Group) -> str | None:
    """Code that shards the arrays of `group` over a mesh axis; `None` if no mesh axis
    divides a dimension, or if the arrays are replicated because they are small.
    """
    row = group.row
    mode = subject.mode
    places = subject.divisible(row.shape, row.units)
    if not places or any(why.code is Code.small for why in row.reasons):
        return None
    if not subject.is_named(group):
        return subject.rule_fix(group.paths, subject.target_for(row.shape, row.units))
    for dim, axis in places:
        if row.names and isinstance(name := row.names[dim], str):
            rule = (  # no axis is in use in this array, so the rule is not blocked
                f"[({name!r}, {axis!r})]"
            )
            return (
                "axes ="
                f" axes.prepend({rule if mode is None else f'modes={{{mode!r}: {rule}}}'})"
            )
    return None


def corrected(subject: Subject) -> Iterator[Finding]:
    """Findings for arrays that are sharded less than their rule requests.

    An array is found if a requested mesh axis does not divide a dimension, would split
    a unit, or already shards another dimension. With `lint(strict=True)`, an array is
    found if the plan has any reason for it. Scalars are never found. Three or more
    arrays that one mesh axis does not divide are one finding.
    """
    content = subject.content
    if not any(row.reasons for row in content.rows):
        return
    rows = content.rows
    if subject.refine:
        twins = dict(zip(content.index, subject.refined.index, strict=True))
        rows = [subject.refined.rows[twins[number]] for number in range(len(rows))]
    causes: dict[object, list[_Short]] = {}
    for group in content.groups:
        reasons = _shortfall(subject, rows[group.number])
        if reasons:
            axes = {axis for why in reasons for axis in why.axes}
            is_size = len(axes) == 1 and all(why.code.is_about_size for why in reasons)
            # Units may be declared for meshes that have more devices along an axis than
            # there are units.
            foreseen = all(why.code is Code.unit for why in reasons)
            severity = "error" if subject.strict else "info" if foreseen else "warning"
            causes.setdefault((severity, *axes) if is_size else group, []).append(
                _Short(group, reasons, severity)
            )
    for shorts in causes.values():
        if len(shorts) < _TOGETHER:
            for one in shorts:
                message = (
                    f"cut less than {_asks(one.group)} for:"
                    f" {'; '.join(map(str, one.reasons))}"
                )
                yield _finding(subject, one.group.where, message, [one])
        else:
            axis = shorts[0].reasons[0].axes[0]
            arrays = plural(sum(len(one.group.paths) for one in shorts), "array")
            axis_text = f"`{axis}` ({subject.content.mesh.shape.get(axis, 1)})"
            what = f"{arrays} are not divisible by {axis_text} as asked"
            if all(why.code is Code.unit for one in shorts for why in one.reasons):
                what = f"{axis_text} would cut inside units of {arrays}"
            shown = [
                f"`{one.group.where}` {one.group.row.shape}" for one in shorts[:_SHOWN]
            ]
            shown += [f"{len(shorts) - _SHOWN} more"] if len(shorts) > _SHOWN else []
            yield _finding(
                subject, f"mesh axis {axis!r}", f"{what}: {', '.join(shown)}", shorts
            )


# If at least this many arrays, or groups of similar arrays, are sharded less over one
# mesh axis, they are one finding.
_TOGETHER = 3
_SHOWN = 3


class _Short(NamedTuple):
    """Arrays that are sharded less than their rule requests, the reasons, and the
    severity of a finding about them.
    """

    group: Group
    reasons: tuple[Reason, ...]
    severity: Severity


def _shortfall(subject: Subject, row: Row) -> tuple[Reason, ...]:
    if subject.strict:
        return tuple(why for why in row.reasons if not why.code.is_expected)
    found = [why for why in row.reasons if why.code.is_cut]
    if subject.refine:
        # The mesh has been split so that the dimension is sharded over all axes that
        # divide it: no more is possible.
        whole = [
            dim
            for dim, entry in enumerate(entries_at(row.spec, len(row.shape)))
            if not entry_axes(entry)
        ]
        found = [why for why in found if why.dim is None or why.dim in whole]
    return tuple(found)


def _finding(
    subject: Subject, where: str, message: str, shorts: list[_Short]
) -> Finding:
    """The finding about the arrays in `shorts`. Its bytes are those that the requested
    sharding would save on each device. `where` and `message` become its fields.
    """
    content = subject.content
    sizes = subject.content.mesh.shape
    lost = 0
    for row, group in ((one.group.row, one.group) for one in shorts):
        axes = [
            axis
            for target in (row.requested, *row.strategies)
            for axis in axes_of_target(target)
        ]
        asked = math.prod(sizes.get(axis, 1) for axis in dict.fromkeys(axes))
        whole, shard = content.byte_counts[group.number]
        lost += max(0, shard - -(-whole // asked)) * len(group.paths)
    return Finding(
        "corrected",
        shorts[0].severity,
        where,
        lost,
        message,
        _as_it_is(subject, shorts),
    )


def _as_it_is(subject: Subject, shorts: list[_Short]) -> str:
    """Code that resolves the finding about the arrays in `shorts`: `refine = True` if
    splitting mesh axes shards the arrays further, else rules that request the present
    sharding.
    """
    content = subject.content
    lines = dict[str, None]()
    targets = dict[Any, list[str]]()
    for group, reasons, _ in shorts:
        row = group.row
        if not (subject.strict or subject.refine or subject.is_plan):
            better = subject.refined.index[content.index.index(group.number)]
            if (
                subject.refined.byte_counts[better][1]
                < content.byte_counts[group.number][1]
            ):
                return "refine = True"
        if not subject.is_named(group):
            is_whole = not entries_of(row.spec) and not any(
                why.code is Code.small for why in reasons
            )
            target = subject.target_for(row.shape, row.units) if is_whole else row.spec
            targets.setdefault(target, []).extend(group.paths)
        elif subject.strict and not all(why.code.is_cut for why in reasons):
            lines["strict = False"] = None
        else:
            # A dimension that is sharded over some of its axes gets a name of its own,
            # with these axes.
            names = [*(row.names or ())]
            entries = entries_at(row.spec, len(row.shape))
            for dim in dict.fromkeys(why.dim for why in reasons if why.dim is not None):
                kept = canonical_entry(entry_axes(entries[dim]))
                names[dim] = f"{names[dim]}_{row.shape[dim]}" if kept else None
                if (
                    kept
                    and subject.axes is not None
                    and names[dim] not in subject.axes.names
                ):
                    lines[
                        f"axes = axes.extend([({names[dim]!r}, {code_of(kept)})])"
                    ] = None
            lines[subject.names_fix(group.paths, tuple(names))] = None
    return "\n".join(
        [
            *lines,
            *[subject.rule_fix(paths, target) for target, paths in targets.items()],
        ]
    )


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
    sizes = subject.content.mesh.shape
    states = _states(subject)
    for state in states:
        spec = state.group.row.spec
        follows = state.follows
        shards, asked = (
            math.prod(sizes[axis] for axis in axes_of_target(one))
            for one in (spec, follows)
        )
        if shards < asked:
            message = (
                f"it is sharded over {_told(spec)}, its parameter over {_told(follows)}"
            )
            message += "" if state.is_whole else " in the dimensions that it has of it"
        elif state.is_whole and not _covers(spec, follows):
            shown = [
                f"P({', '.join(map(repr, entries_of(one)))})" for one in (spec, follows)
            ]
            message = (
                f"it lies as {shown[0]}, its parameter as {shown[1]}: each step moves"
                " one to the other. "
            )
            message += "Was it planned from another model's plan?"
        else:
            continue
        yield _of_states(subject, state.group.where, message, [(state.group, follows)])
    # Statistics of rows and columns are small: they only follow their parameter.
    states = [state for state in states if state.is_whole]
    for axis, size in sizes.items():
        left = [
            state
            for state in states
            if axis not in axes_of_target(state.group.row.spec)
        ]
        message = (
            f"every device along `{axis}` holds the same states: nothing is sharded"
            " over it, as ZeRO-1 would"
        )
        least = limit
        if any(
            axis in axes_of_target(state.group.row.spec)
            and axis not in axes_of_target(state.param.spec)
            for state in states
        ):
            left = [state for state in left if not state.group.row.reasons]
            message = f"other states are sharded over `{axis}`, these are not"
            least = 0
        elif (
            size == 1
            or len(left) < len(states)
            or any(axis in axes_of_target(state.param.spec) for state in states)
        ):
            continue
        found = list(_shardable_over(subject, left, axis))
        if found:
            finding = _of_states(
                subject,
                found[0][0].where if len(found) == 1 else left[0].root,
                message,
                found,
            )
            yield from [finding] if finding.bytes >= least else []


_MOMENTS = {"m", "v"}
# The names by which libraries call optimizer states and copies of parameters.
_CALLED = re.compile(
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
    # A single letter may be a module as well as a moment (values next to queries, for
    # example). Moments always occur together.
    likely = {
        root: own
        for root, own in branches.items()
        if root not in _MOMENTS or _MOMENTS <= branches.keys()
    }
    best: list[_State] = []
    for root, params in branches.items() if len(branches) > 1 else ():
        known = {
            path.removeprefix(f"{root}/"): group.row
            for group in params
            for path in group.paths
        }
        found = [
            _state(other, group, known)
            for other in likely
            if other != root
            for group in likely[other]
        ]
        best = max(best, [state for state in found if state is not None], key=len)
    return best


def _state(root: str, group: Group, known: dict[str, Row]) -> _State | None:
    """The leaves in `group` with their parameter; `None` if they are not in an
    optimizer's state.

    `root` is the first segment of the leaves' paths. `known` has the plans of the
    parameters by path. A parameter is found by the end of the leaves' paths: `opt/mu/w`
    and `opt/w/v_row` belong to the parameter `w`.
    """
    parts = group.paths[0].split("/")
    shape = group.row.shape
    for at in range(1, len(parts)):
        if not any(map(_CALLED.match, parts[:at])):
            continue
        for param in (
            known.get("/".join(parts[at:])),
            known.get("/".join(parts[at:-1])),
        ):
            if param is None or not shape:
                continue
            entries = entries_at(param.spec, len(param.shape))
            specs = {
                trimmed([None if dim is None else entries[dim] for dim in dims])
                for dims in correspondences(param.shape, shape)
            }
            # Dimensions of equal sizes may be sharded differently: then nothing says
            # what the state follows.
            if len(specs) == 1:
                is_whole = len(shape) >= len(param.shape)
                return _State(root, group, param, specs.pop(), is_whole)
    return None


def _covers(spec: PartitionSpec, base: PartitionSpec) -> bool:
    """Whether each dimension is sharded under `spec` over all the mesh axes that shard
    it under `base`.
    """
    pairs = itertools.zip_longest(entries_of(spec), entries_of(base))
    return all(
        set(entry_axes(theirs)) <= set(entry_axes(ours)) for ours, theirs in pairs
    )


def _told(spec: PartitionSpec) -> str:
    return " and ".join(f"`{axis}`" for axis in axes_of_target(spec)) or "nothing"


def _shardable_over(
    subject: Subject, states: list[_State], axis: str
) -> Iterator[tuple[Group, PartitionSpec]]:
    """Yields the leaves in `states` that can also be sharded over the mesh axis `axis`,
    each with its new spec.
    """
    for group in [state.group for state in states]:
        row = group.row
        request = Request(None, row.spec, None, row.units, (), ())
        spec = shard_over(
            request, row.shape, row.dtype, subject.content.mesh, fsdp(axis)
        ).spec
        if spec != row.spec and not any(why.code is Code.small for why in row.reasons):
            yield group, spec


def _of_states(
    subject: Subject, where: str, message: str, specs: list[tuple[Group, PartitionSpec]]
) -> Finding:
    """One finding for leaves of an optimizer's state. `specs` has these leaves, each
    with the spec it should get.

    `where` and `message` become fields of the Finding.
    """
    content = subject.content
    saved = 0
    for group, spec in specs:
        shard = group.row._replace(spec=spec).byte_counts(content.mesh.shape)[1]
        saved += (content.byte_counts[group.number][1] - shard) * len(group.paths)
    message += f"; it costs each device {bytes_text(saved)}" if saved > 0 else ""
    fix = "\n".join(subject.rule_fix(group.paths, spec) for group, spec in specs)
    return Finding("optimizer-state", "warning", where, max(saved, 0), message, fix)


def uneven_layers(subject: Subject) -> Iterator[Finding]:
    """Findings for arrays that are sharded differently from the same array of most
    other layers.

    The arrays of repeated layers are compared if they have one shape and dtype, and
    paths that differ only in numbers.
    """
    sizes = subject.content.byte_counts
    stacks = together(subject.content.groups, _stack)
    for groups in stacks.values():
        by_spec = together(groups, lambda group: group.row.spec)
        if len(by_spec) == 1:
            continue
        # The spec of most layers is taken as intended; of equally many, the one with
        # fewer bytes per device.
        most = max(
            by_spec.values(), key=lambda same: (_count(same), -sizes[same[0].number][1])
        )
        like = most[0]
        for group in (
            group for same in by_spec.values() if same is not most for group in same
        ):
            more = max(0, sizes[group.number][1] - sizes[like.number][1]) * len(
                group.paths
            )
            message = (
                f"sharded as {spec_text(entries_of(group.row.spec))} by"
                f" {rule_of(group)}, while {_count(most)} of the same stack"
                f" (`{like.where}`) are sharded as"
                f" {spec_text(entries_of(like.row.spec))} by {rule_of(like)}"
            )
            fix = subject.fix(group, like.row.names, like.row.spec)
            yield Finding("uneven-layers", "warning", group.where, more, message, fix)


def _stack(group: Group) -> object:
    # A number at the end of a path is no layer: the rows and columns of a square matrix
    # are `w/0` and `w/1`.
    last = group.paths[0].rpartition("/")[2]
    return (
        between_numbers(group.paths[0]),
        last if last.isdigit() else "",
        group.row.shape,
        group.row.dtype,
    )


def _count(groups: list[Group]) -> int:
    return sum(len(group.paths) for group in groups)
