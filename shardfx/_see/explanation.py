"""Explains the sharding of one array of a plan, dimension by dimension, and lists
changes that would remove the reasons for it.
"""

import dataclasses
import math
import re
import textwrap
from collections.abc import Callable
from typing import Any, overload

from .._ground.errors import UnknownPathError
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
from ..cost import StepShardings
from ..cost._shardings import explained
from ..topology import MeshSpec


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
    """

    __module__ = "shardfx.results"

    leaf: LeafPlan
    mesh: MeshSpec
    dims: tuple[DimExplanation, ...]
    reasons: tuple[Reason, ...]
    changes: tuple[str, ...]

    def __str__(self) -> str:
        lines = [*_head(self), *([""] if self.dims else [])]
        lines += (
            table([_HEADER, *map(_cells, self.dims)], right=_NUMBERS)
            if self.dims
            else []
        )
        for title, notes in _notes(self):
            lines += [
                "",
                printable(title),
                *[line for note in notes for line in _wrapped(printable(note))],
            ]
        return "\n".join(lines)

    __repr__ = first_lines

    def _repr_html_(self) -> str:
        notes = [f"{title}: {note}" for title, lines in _notes(self) for note in lines]
        rows = [_HEADER, *map(_cells, self.dims)] if self.dims else []
        return (
            html_table([], below=_head(self))
            + "\n"
            + html_table(rows, right=_NUMBERS, below=notes)
        )


@overload
def explain(plan: ShardPlan, path: str) -> Explanation: ...


@overload
def explain(plan: Callable[..., Any], path: str, *args: Any) -> StepShardings: ...


def explain(plan: Any, path: str, *args: object) -> Explanation | StepShardings:
    """Explains why one array of a plan is sharded as it is, and which changes would
    alter its sharding. For a step, explains the arrays that one source line makes.

    Nothing is planned again: the plan contains its rules, requests and reasons. Only
    the axis rules are tried again on the array's names, to list the outcome of each
    rule.

    **Arguments:**

    - `plan`: the plan; or a step, jitted or not.
    - `path`: the path of the array, as in the plan's report; or a regex, such as
      `k_proj`, that matches the path of one
        array. If it matches equal arrays of repeated layers, the first is explained.
        For a step, a file and a line, "train.py:41".
    - `args`: only for a step: its arguments, arrays or ShapeDtypeStructs with
      shardings.

    **Returns:**

    An `Explanation`; for a step a [`shardfx.cost.StepShardings`][], whose notes name
    the traffic of the line and its cause.

    **Raises:**

    `UnknownPathError`, with the nearest paths, if the plan has no such array or the
    step no such line, or if a regex matches arrays whose paths differ in more than
    numbers.

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
    if args:
        return explained(plan, path, args)
    check_plan("plan", plan)
    leaf = _found(plan, path)
    entries, asked = (
        entries_at(spec, len(leaf.shape)) for spec in (leaf.spec, leaf.requested)
    )
    names = leaf.names or (None,) * len(leaf.shape)
    units = leaf.units or (1,) * len(leaf.shape)
    tried = (
        ()
        if leaf.names is None or plan.axes is None
        else attempts(leaf.names, plan.axes, plan.mode)
    )
    used = axes_of_target(leaf.spec)
    unused = {
        axis: size
        for axis, size in plan.mesh.shape.items()
        if size > 1 and axis not in used
    }
    dims = []
    for dim, size in enumerate(leaf.shape):
        own = tuple(one for one in tried if one.dim == dim)
        reasons = tuple(why for why in leaf.reasons if why.dim == dim)
        blocked = [
            axis for why in reasons if why.code is Code.blocked for axis in why.axes
        ]
        wanted = tuple(dict.fromkeys([*entry_axes(asked[dim]), *blocked]))
        has = entry_axes(entries[dim])
        kept, dropped = (
            tuple(axis for axis in wanted if (axis in has) is held)
            for held in (True, False)
        )
        added = tuple(axis for axis in has if axis not in wanted)
        count = size // units[dim] if size % units[dim] == 0 else 1
        left = count // plan.mesh.axis_size(has) if has else count
        free = tuple(axis for axis, ways in unused.items() if size and left % ways == 0)
        sizes: tuple[int, ...] = ()
        if any(why.code.is_about_size for why in reasons):
            product = (
                math.prod(plan.mesh.shape.get(axis, 1) for axis in wanted) * units[dim]
            )
            below = size // product * product
            sizes = (below, below + product) if below else (product,)
        changes = [
            text for why in reasons for text in _changes(why, plan, tried, left, sizes)
        ]
        if free and dropped:
            told = ", ".join(f"`{axis}` ({plan.mesh.shape[axis]})" for axis in free)
            changes.append(f"free mesh axes that cut it evenly: {told}")
        columns = (
            own,
            wanted,
            kept,
            dropped,
            added,
            reasons,
            sizes,
            free,
            tuple(changes),
        )
        dims.append(DimExplanation(dim, size, units[dim], names[dim], *columns))
    whole = tuple(why for why in leaf.reasons if why.dim is None)
    texts = tuple(text for why in whole for text in _changes(why, plan, tried, 1, ()))
    return Explanation(leaf, plan.mesh, tuple(dims), whole, texts)


def _found(plan: ShardPlan, where: str) -> LeafPlan:
    """The LeafPlan at the path `where`, or the first one whose path the regex `where`
    matches.

    Raises `UnknownPathError` if nothing matches, or if the regex matches paths that
    differ in more than numbers.
    """
    try:
        groups = (
            {}
            if where in plan
            else together(filter(re.compile(where).search, plan), between_numbers)
        )
    except re.error:
        groups = {}
    if not groups:
        return plan[where]
    if len(groups) > 1:
        shown = [f"`{joined(paths)}`" for paths in list(groups.values())[:_MOST_GROUPS]]
        more = [f"{len(groups) - len(shown)} more"] if len(groups) > len(shown) else []
        raise UnknownPathError(
            f"{where!r} finds {' and '.join(shown + more)}; write more of the path of"
            " one."
        )
    ((first, *_),) = groups.values()
    return plan[first]


_MOST_GROUPS = 4


def _changes(
    why: Reason,
    plan: ShardPlan,
    tried: tuple[Attempt, ...],
    left: int,
    sizes: tuple[int, ...],
) -> list[str]:
    """Changes that would remove the reason `why` of an array of `plan`, a sentence
    each.

    `tried` has the outcomes of the axis rules for the array's names. `left` is the
    number of units of the reason's dimension in one device's shard; a unit is one
    element, or several that no shard may split. `sizes` are the nearest sizes of this
    dimension that all requested mesh axes divide.
    """
    mesh = plan.mesh
    if why.code.is_about_size and why.dim is not None:
        shares = [
            (axis, math.gcd(left, mesh.shape[axis]))
            for axis in why.axes
            if axis in mesh.shape
        ]
        parts = [
            f"`{axis}` of size {share} would"
            for axis, share in shares
            if 1 < share < mesh.shape[axis]
        ]
        near_sizes = f"the nearest sizes that divide: {' and '.join(map(str, sizes))}"
        return [
            near_sizes,
            *(
                [f"{' or '.join(parts)} cut it (`refine=True` splits the axis)"]
                if parts
                else []
            ),
        ]
    if why.code is Code.blocked:
        winners = {
            axis: one
            for one in tried
            if one.outcome == "applied"
            for axis in entry_axes(one.rule[1])
        }
        return [
            f"`{axis}` went to dim {winners[axis].dim} (`{winners[axis].name}`) by"
            f" {_place(winners[axis])}; the rule that stands first wins"
            for axis in why.axes
            if axis in winners
        ]
    if why.code is Code.unmatched and why.dim is not None and plan.axes is not None:
        return [
            f"the rules have {plan.axes.names}{near(axis, plan.axes.names)}"
            for axis in why.axes
        ]
    if why.code is Code.absent:
        return [
            f"the mesh has {mesh.axis_names}{near(axis, mesh.axis_names)}, no `{axis}`"
            for axis in why.axes
        ]
    return []


def _place(attempt: Attempt) -> str:
    rules = "axes.rules" if attempt.mode is None else f"axes.modes[{attempt.mode!r}]"
    return f"{rules}[{attempt.number}]"


_HEADER = ("dim", "size", "name", "wanted", "kept", "dropped", "added", "free")
_NUMBERS = {"dim"}
_WIDTH = 84
_PATH_RULE = re.compile(r"paths\[(\d+)\]")


def _head(found: Explanation) -> list[str]:
    leaf = found.leaf
    mesh = found.mesh
    array = array_text(leaf.dtype, leaf.shape)
    first = (
        f"{leaf.path}: {array}, {bytes_text(leaf.bytes)}, on mesh {mesh} ({mesh.size:,}"
        " devices)"
    )
    asked = (
        f"asked for: {spec_text(entries_of(leaf.requested))} by"
        f" {leaf.rule or 'no rule'}"
    )
    number = _PATH_RULE.match(leaf.rule or "")
    if number and int(number[1]):
        before = int(number[1]) - 1
        asked += (
            " (the first that matches:"
            f" {'rule 0 does' if not before else f'rules 0 to {before} do'} not)"
        )
    steps = [step.text for step in leaf.strategies]
    asked += f", then {', then '.join(steps)}" if steps else ""
    gets = (
        f"gets: {spec_text(entries_of(leaf.spec))}, {bytes_text(leaf.bytes_per_device)}"
        " on each device"
    )
    gets += f", in {leaf.memory_kind}" if leaf.memory_kind else ""
    even = array_bytes(leaf.shape, leaf.dtype) / mesh.size
    gets += f", {leaf.bytes_per_device / even:.4g} x an even split" if even >= 1 else ""
    return [printable(line) for line in (first, asked, gets)]


def _cells(dim: DimExplanation) -> tuple[str, ...]:
    size = str(dim.size) if dim.unit == 1 else f"{dim.size} in units of {dim.unit}"
    axes = (dim.wanted, dim.kept, dim.dropped, dim.added, dim.free)
    return (
        str(dim.dim),
        size,
        entry_text(dim.name),
        *["+".join(names) or "-" for names in axes],
    )


def _notes(found: Explanation) -> list[tuple[str, list[str]]]:
    """The notes on each dimension and then on the whole array, each with a title: the
    outcomes of rules, the reasons, and the changes that would remove them. Dimensions
    without notes are left out.
    """
    parts = []
    for title, one in [
        *((f"dim {dim.dim}", dim) for dim in found.dims),
        ("the array", found),
    ]:
        tried = one.tried if isinstance(one, DimExplanation) else ()
        notes = [
            f"{_place(own)}: {own.rule[0]} -> {entry_text(own.rule[1])}:"
            f" {_outcome(own, one)}"
            for own in tried
        ]
        notes += [f"why: {why.message}" for why in one.reasons] + [
            f"change: {text}" for text in one.changes
        ]
        parts += [(title, notes)] if notes else []
    return parts


def _wrapped(note: str) -> list[str]:
    first, *rest = textwrap.wrap(
        note, _WIDTH, break_on_hyphens=False, break_long_words=False
    ) or [""]
    return [f"  {first}", *[f"      {line}" for line in rest]]


def _outcome(attempt: Attempt, dim: DimExplanation) -> str:
    if attempt.outcome == "blocked":
        users = ", ".join(
            f"`{axis}` is on dim {dim} (`{name}`)" for axis, name, dim in attempt.taken
        )
        return f"blocked, {users}"
    if attempt.outcome == "settled":
        return "not needed, an earlier rule applies"
    if dropped := [
        f"`{axis}`" for axis in entry_axes(attempt.rule[1]) if axis in dim.dropped
    ]:
        return (
            f"matches, and {' and '.join(dropped)}"
            f" {'is' if len(dropped) == 1 else 'are'} dropped"
        )
    return (
        "applies"
        if attempt.rule[1] is not None
        else "applies: whole, and no rule after it is asked"
    )
