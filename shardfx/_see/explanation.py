"""Explains the sharding of one array of a plan, dimension by dimension, and lists
changes that would remove the reasons for it.
"""

import dataclasses
import math
import re
import textwrap
from typing import Any

from .._ground.errors import LeafTypeError, UnknownPathError, check_type
from .._ground.misuse import called
from .._ground.reason import Code, Reason
from .._ground.spec import array_bytes, entries_at, entries_of, entry_axes
from .._ground.text import (
    array_text,
    between_numbers,
    bytes_text,
    entry_text,
    first_lines,
    html_table,
    joined,
    printable,
    spec_text,
    table,
    together,
)
from .._plan import LeafPlan, ShardPlan, check_plan
from .._rules import Attempt as Attempt, attempts, axes_of_target, near
from ..topology import MeshSpec
from .subject import name_at, rules_text


@dataclasses.dataclass(frozen=True)
class DimExplanation:
    """The reasons for the sharding of one dimension of an array.

    **Arguments:**

    - `dim`, `size`: the index of the dimension and its number of elements.
    - `unit`: the number of elements that form an indivisible unit; 1 for single
      elements.
    - `name`: the logical name or names of the dimension; `None` without a name.
    - `tried`: for each axis rule of these names, in order, whether it was applied, or
      else why not.
    - `wanted`: the mesh axes that the array's rule, or all rules for the names, request
      for the dimension.
    - `kept`: the axes in `wanted` that shard the dimension.
    - `dropped`: the axes in `wanted` that do not shard the dimension.
    - `added`: mesh axes that shard the dimension and are not in `wanted`, such as those
      of an `fsdp(...)` after a rule.
    - `reasons`: the plan's reasons for the dropped axes.
    - `sizes`: if axes are dropped because of the size, the nearest sizes below and
      above that all wanted axes divide.
    - `free`: mesh axes that shard no dimension of the array, and that divide this
      dimension.
    - `changes`: changes that would remove the reasons, a sentence each.
    """

    __module__ = "shardfx.results"

    dim: int
    size: int
    unit: int
    name: Any
    tried: tuple[Attempt, ...]
    wanted: tuple[str, ...]
    kept: tuple[str, ...]
    dropped: tuple[str, ...]
    added: tuple[str, ...]
    reasons: tuple[Reason, ...]
    sizes: tuple[int, ...]
    free: tuple[str, ...]
    changes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The reasons for the sharding of one array of a plan; made by
    [`shardfx.explain`][]. `print` and a notebook show it.

    **Arguments:**

    - `leaf`: the array's LeafPlan.
    - `mesh`: the plan's mesh.
    - `dims`: one `DimExplanation` per dimension.
    - `reasons`: the plan's reasons for the array as a whole.
    - `changes`: changes that would remove these reasons, a sentence each.
    - `others`: the paths of the other arrays that the regex matches.
    - `different`: those of `others` that are not planned as this array is.
    """

    __module__ = "shardfx.results"

    leaf: LeafPlan
    mesh: MeshSpec
    dims: tuple[DimExplanation, ...]
    reasons: tuple[Reason, ...]
    changes: tuple[str, ...]
    others: tuple[str, ...] = ()
    different: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = _head(self)
        if self.dims:
            rows = [_HEADER, *map(_cells, self.dims)]
            lines += ["", *table(rows, right=_RIGHT_ALIGNED)]

        for title, notes in _notes(self):
            lines += ["", printable(title)]
            for note in notes:
                lines += _wrapped(printable(note))
        return "\n".join(lines)

    __repr__ = first_lines

    def _repr_html_(self) -> str:
        notes = []
        for title, lines in _notes(self):
            notes += [f"{title}: {line}" for line in lines]
        rows = [_HEADER, *map(_cells, self.dims)] if self.dims else []

        head = html_table([], below=_head(self))
        dims = html_table(rows, right=_RIGHT_ALIGNED, below=notes)
        return f"{head}\n{dims}"


@called("explain(plan, path)")
def explain(plan: ShardPlan, path: str) -> Explanation:
    """Explains why one array of a plan is sharded as it is, and which changes would
    alter its sharding.

    Nothing is planned again: the plan contains its rules, requests and reasons. Only
    the axis rules are tried again on the array's names, to list the outcome of each
    rule.

    **Arguments:**

    - `plan`: the plan.
    - `path`: the path of the array, as in the plan's report; or a regex, such as
      `k_proj`, that matches the path of one array. If it matches the arrays of
      repeated layers, the first is explained, and the text counts the others and names
      those that are planned in another way.

    **Returns:**

    An `Explanation`.

    **Raises:**

    `UnknownPathError`, with the nearest paths, if the plan has no such array, or if a
    regex matches arrays whose paths differ in more than numbers.

    !!! Example

        ```python
        import jax
        from shardfx import AxisRules, MeshSpec, explain, plan

        tree = {"head": jax.ShapeDtypeStruct((768, 50257), "bfloat16")}
        axes = AxisRules([("vocab", "tensor"), ("embed", "tensor"), ("embed", "fsdp")])
        mesh = MeshSpec({"fsdp": 4, "tensor": 8})
        made = plan(tree, mesh, names={"head": ("embed", "vocab")}, axes=axes)
        why = explain(made, "head")
        assert why.dims[1].sizes == (50256, 50264)
        assert why.dims[0].tried[0].outcome == "blocked"
        print(why)
        ```
    """
    check_plan("plan", plan, "explain(plan, path)")
    if isinstance(path, LeafPlan):
        path = path.path
    check_type(
        what="path",
        value=path,
        expected=str,
        error=LeafTypeError,
        fix="pass a path of `report(plan)`",
    )
    leaf, *others = _leaves_at(plan, path)
    tried: tuple[Attempt, ...] = ()
    if leaf.names is not None and plan.axes is not None:
        tried = attempts(leaf.names, plan.axes, plan.mode)

    dims = [_explained_dim(plan, leaf, dim, tried) for dim in range(len(leaf.shape))]
    whole = tuple(reason for reason in leaf.reasons if reason.dim is None)
    changes: list[str] = []
    for reason in whole:
        changes += _changes_for(reason, plan, tried, units=1, sizes=())
    return Explanation(
        leaf=leaf,
        mesh=plan.mesh,
        dims=tuple(dims),
        reasons=whole,
        changes=tuple(changes),
        others=tuple(other.path for other in others),
        different=tuple(other.path for other in others if not _is_alike(leaf, other)),
    )


def _is_alike(leaf: LeafPlan, other: LeafPlan) -> bool:
    """Whether two arrays differ in their paths alone."""
    return dataclasses.replace(other, path=leaf.path) == leaf


def _explained_dim(
    plan: ShardPlan,
    leaf: LeafPlan,
    dim: int,
    tried: tuple[Attempt, ...],
) -> DimExplanation:
    """The reasons for the sharding of one dimension of an array of `plan`. `tried` has
    the outcomes of the axis rules for the array's names.
    """
    rank = len(leaf.shape)
    size = leaf.shape[dim]
    unit = leaf.units[dim] if leaf.units else 1
    name = name_at(leaf, dim)
    reasons = tuple(reason for reason in leaf.reasons if reason.dim == dim)

    axes = entry_axes(entries_at(leaf.spec, rank)[dim])
    wanted_axes = dict.fromkeys(entry_axes(entries_at(leaf.requested, rank)[dim]))
    for reason in reasons:
        if reason.code is Code.blocked:
            wanted_axes |= dict.fromkeys(reason.axes)
    asked_axes = tuple(wanted_axes)
    dropped = tuple(axis for axis in asked_axes if axis not in axes)

    # The indivisible units of the dimension in one device's shard.
    units = size // unit if size % unit == 0 else 1
    if axes:
        units //= plan.mesh.axis_size(axes)
    free = _free_axes(plan, leaf, units) if size else ()
    sizes: tuple[int, ...] = ()
    if any(reason.code.is_about_size for reason in reasons):
        sizes = _nearest_sizes(plan, size, unit, asked_axes)

    changes: list[str] = []
    for reason in reasons:
        changes += _changes_for(
            reason=reason, plan=plan, tried=tried, units=units, sizes=sizes
        )
    if free and dropped:
        axes_text = ", ".join(f"`{axis}` ({plan.mesh.shape[axis]})" for axis in free)
        changes.append(f"free mesh axes that cut it evenly: {axes_text}")
    return DimExplanation(
        dim=dim,
        size=size,
        unit=unit,
        name=name,
        tried=tuple(attempt for attempt in tried if attempt.dim == dim),
        wanted=asked_axes,
        kept=tuple(axis for axis in asked_axes if axis in axes),
        dropped=dropped,
        added=tuple(axis for axis in axes if axis not in asked_axes),
        reasons=reasons,
        sizes=sizes,
        free=free,
        changes=tuple(changes),
    )


def _free_axes(plan: ShardPlan, leaf: LeafPlan, units: int) -> tuple[str, ...]:
    """The mesh axes that shard no dimension of an array, and that divide a shard of
    `units` indivisible units.
    """
    used = axes_of_target(leaf.spec)
    free = []
    for axis, size in plan.mesh.shape.items():
        if size > 1 and axis not in used and units % size == 0:
            free.append(axis)
    return tuple(free)


def _nearest_sizes(
    plan: ShardPlan,
    size: int,
    unit: int,
    axes: tuple[str, ...],
) -> tuple[int, ...]:
    """The nearest sizes below and above `size` that all mesh axes in `axes` divide,
    without a cut inside `unit` elements.
    """
    step = unit * math.prod(plan.mesh.shape.get(axis, 1) for axis in axes)
    below = size // step * step
    if not below:
        return (step,)
    return (below, below + step)


def _leaves_at(plan: ShardPlan, where: str) -> list[LeafPlan]:
    """The LeafPlan at the path `where`, or those whose paths the regex `where` matches.

    Raises `UnknownPathError` if nothing matches, or if the regex matches paths that
    differ in more than numbers.
    """
    if where in plan:
        return [plan[where]]
    try:
        pattern = re.compile(where)
    except re.error as error:
        if "*" not in where:
            # It raises, with the nearest paths.
            return [plan[where]]
        raise UnknownPathError(
            f"{where!r} is no path of the plan, and no regex: {error}. {_fix_of(where)}"
        ) from error

    groups = list(together(filter(pattern.search, plan), between_numbers).values())
    if not groups:
        if "*" in where:
            raise UnknownPathError(
                f"{where!r} is no path of the plan, and as a regex it matches none."
                f" {_fix_of(where)}"
            )
        return [plan[where]]
    if len(groups) > 1:
        shown = [f"`{joined(paths)}`" for paths in groups[:_MOST_GROUPS]]
        if len(groups) > _MOST_GROUPS:
            shown.append(f"{len(groups) - _MOST_GROUPS} more")
        raise UnknownPathError(
            f"{where!r} finds {' and '.join(shown)}; write more of the path of one."
        )
    return [plan[path] for path in groups[0]]


def _fix_of(glob: str) -> str:
    """A sentence with the regex for a text that may be a glob."""
    regex = re.sub(r"\*+", "[^/]+", glob)
    return f"For any name or number in a path write a regex: {regex!r}."


_MOST_GROUPS = 4


def _changes_for(
    reason: Reason,
    plan: ShardPlan,
    tried: tuple[Attempt, ...],
    units: int,
    sizes: tuple[int, ...],
) -> list[str]:
    """Changes that would remove a reason of an array of `plan`, a sentence each.

    `tried` has the outcomes of the axis rules for the array's names. `units` is the
    number of units of the reason's dimension in one device's shard; a unit is one
    element, or several that no shard may split. `sizes` are the nearest sizes of this
    dimension that all requested mesh axes divide.
    """
    mesh = plan.mesh
    if reason.code.is_about_size and reason.dim is not None:
        return _changes_of_size(reason, mesh, units, sizes)
    if reason.code is Code.blocked:
        return _winning_rules(reason, tried)
    if (
        reason.code is Code.unmatched
        and reason.dim is not None
        and plan.axes is not None
    ):
        names = plan.axes.names
        return [f"the rules have {names}{near(name, names)}" for name in reason.axes]
    if reason.code is Code.absent:
        return [
            f"the mesh has {mesh.axis_names}{near(axis, mesh.axis_names)}, no `{axis}`"
            for axis in reason.axes
        ]
    return []


def _changes_of_size(
    reason: Reason,
    mesh: MeshSpec,
    units: int,
    sizes: tuple[int, ...],
) -> list[str]:
    """The sizes that would divide, and the parts of mesh axes that do.

    `units` is the number of indivisible units of the dimension in one device's shard,
    and `sizes` are the nearest sizes that the requested axes divide.
    """
    changes = [f"the nearest sizes that divide: {' and '.join(map(str, sizes))}"]
    parts = []
    for axis in reason.axes:
        size = mesh.shape.get(axis, 1)
        part_size = math.gcd(units, size)
        if 1 < part_size < size:
            parts.append(f"`{axis}` of size {part_size} would")
    if parts:
        changes.append(f"{' or '.join(parts)} cut it (`refine=True` splits the axis)")
    return changes


def _winning_rules(reason: Reason, tried: tuple[Attempt, ...]) -> list[str]:
    """For each mesh axis of the reason, a text about the rule that uses it for another
    dimension. `tried` has the outcomes of the axis rules for the array's names.
    """
    # By mesh axis, the attempt whose rule uses it.
    winners: dict[str, Attempt] = {}
    for attempt in tried:
        if attempt.outcome == "applied":
            _, target = attempt.rule
            winners |= dict.fromkeys(entry_axes(target), attempt)
    texts = []
    for axis in reason.axes:
        winner = winners.get(axis)
        if winner is not None:
            texts.append(
                f"`{axis}` went to dim {winner.dim} (`{winner.name}`) by"
                f" {_rule_text(winner)}; the rule that stands first wins"
            )
    return texts


def _rule_text(attempt: Attempt) -> str:
    """The code that reads the rule of an attempt, such as "axes.rules[0]"."""
    return f"{rules_text(attempt.mode)}[{attempt.number}]"


_HEADER = ("dim", "size", "name", "wanted", "kept", "dropped", "added", "free")
_RIGHT_ALIGNED = {"dim"}
_WIDTH = 84
# The rule of a leaf, such as `paths[3] w`: its number.
_PATH_RULE = re.compile(r"paths\[(\d+)\]")


def _head(explanation: Explanation) -> list[str]:
    """The first lines: the array, what was asked for, what it gets, and how many other
    arrays the regex of `explain` matches.
    """
    leaf = explanation.leaf
    mesh = explanation.mesh
    array = array_text(leaf.dtype, leaf.shape)
    array_line = (
        f"{leaf.path}: {array}, {bytes_text(leaf.bytes)}, on mesh {mesh} ({mesh.size:,}"
        " devices)"
    )

    request_line = (
        f"asked for: {spec_text(entries_of(leaf.requested))} by"
        f" {leaf.rule or 'no rule'}"
    )
    rule_number = _PATH_RULE.match(leaf.rule or "")
    if rule_number and int(rule_number[1]):
        last_earlier = int(rule_number[1]) - 1
        earlier_rules = (
            f"rules 0 to {last_earlier} do" if last_earlier else "rule 0 does"
        )
        request_line += f" (the first that matches: {earlier_rules} not)"
    for step in leaf.strategies:
        request_line += f", then {step.text}"

    spec = spec_text(entries_of(leaf.spec))
    result_line = f"gets: {spec}, {bytes_text(leaf.bytes_per_device)} on each device"
    if leaf.memory_kind:
        result_line += f", in {leaf.memory_kind}"
    even_bytes = array_bytes(leaf.shape, leaf.dtype) / mesh.size
    if even_bytes >= 1:
        ratio = leaf.bytes_per_device / even_bytes
        result_line += f", {ratio:.4g} x an even split"
    lines = [array_line, request_line, result_line]
    if explanation.others:
        lines.append(_others_line(explanation))
    return [printable(line) for line in lines]


def _others_line(explanation: Explanation) -> str:
    """The number of the other arrays that were asked for, and whether they are alike."""
    different = explanation.different
    count = len(explanation.others)
    if not different:
        return f"the first of {count + 1} arrays that are planned alike"
    shown = ", ".join(different[:_MOST_GROUPS])
    if len(different) > _MOST_GROUPS:
        shown += f" and {len(different) - _MOST_GROUPS} more"
    return (
        f"the first of {count + 1} arrays; planned in another way, explain them by"
        f" their paths: {shown}"
    )


def _cells(dim: DimExplanation) -> tuple[str, ...]:
    size = str(dim.size) if dim.unit == 1 else f"{dim.size} in units of {dim.unit}"
    columns = (dim.wanted, dim.kept, dim.dropped, dim.added, dim.free)
    axes = ["+".join(names) or "-" for names in columns]
    return (str(dim.dim), size, entry_text(dim.name), *axes)


def _notes(explanation: Explanation) -> list[tuple[str, list[str]]]:
    """The notes on each dimension and then on the whole array, each with a title: the
    outcomes of rules, the reasons, and the changes that would remove them. Dimensions
    without notes are left out.
    """
    titled = []
    for dim in explanation.dims:
        notes = []
        for attempt in dim.tried:
            name, target = attempt.rule
            rule = f"{name} -> {entry_text(target)}"
            notes.append(f"{_rule_text(attempt)}: {rule}: {_outcome(attempt, dim)}")
        titled.append((f"dim {dim.dim}", notes + _causes(dim)))
    titled.append(("the array", _causes(explanation)))
    return [(title, notes) for title, notes in titled if notes]


def _causes(explanation: DimExplanation | Explanation) -> list[str]:
    whys = [f"why: {reason.message}" for reason in explanation.reasons]
    changes = [f"change: {change}" for change in explanation.changes]
    return whys + changes


def _wrapped(note: str) -> list[str]:
    """The lines of a note, all but the first further to the right."""
    lines = textwrap.wrap(note, _WIDTH, break_on_hyphens=False, break_long_words=False)
    first = "".join(lines[:1])
    others = [f"      {line}" for line in lines[1:]]
    return [f"  {first}", *others]


def _outcome(attempt: Attempt, dim: DimExplanation) -> str:
    """A phrase about whether the rule of an attempt applied to a dimension, and why
    not.
    """
    _, target = attempt.rule
    if attempt.outcome == "blocked":
        users = ", ".join(
            f"`{axis}` is on dim {other_dim} (`{name}`)"
            for axis, name, other_dim in attempt.taken
        )
        return f"blocked, {users}"
    if attempt.outcome == "settled":
        return "not needed, an earlier rule applies"

    dropped = [f"`{axis}`" for axis in entry_axes(target) if axis in dim.dropped]
    if dropped:
        verb = "is" if len(dropped) == 1 else "are"
        return f"matches, and {' and '.join(dropped)} {verb} dropped"
    if target is None:
        return "applies: whole, and no rule after it is asked"
    return "applies"
