"""The difference between two plans: the arrays that differ, the mesh axes that shard
another dimension, and the cost of moving the arrays from one plan to the other.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax

from .._ground.errors import LeafTypeError, MeshError, SpecError
from .._ground.misuse import called
from .._ground.spec import entries_of, entry_axes
from .._ground.text import (
    array_text,
    between_numbers,
    bytes_text,
    first_lines,
    html_table,
    joined,
    plural,
    printable,
    spec_text,
)
from .._plan import (
    OTHER_TREES,
    LeafPlan,
    Pair,
    PathTree,
    ShardPlan,
    check_plan,
    pairs,
    plan_lines,
)
from .._reshard import LeafMove, plan_reshard


@dataclasses.dataclass(frozen=True)
class AxisMove:
    """A mesh axis that shards different dimensions of an array in two plans.

    **Arguments:**

    - `axis`: the mesh axis.
    - `src`, `dst`: the dimension that the axis shards in the first plan and in the
      second; `None` if it shards no dimension.
    """

    __module__ = "shardfx.results"

    axis: str
    src: int | None
    dst: int | None

    def __str__(self) -> str:
        if self.src is None:
            return f"{self.axis} cuts dim {self.dst}"
        if self.dst is None:
            return f"{self.axis} no longer cuts dim {self.src}"
        return f"{self.axis} dim {self.src} -> {self.dst}"


@dataclasses.dataclass(frozen=True)
class LeafDiff:
    """Arrays that differ in the same way between two plans. Equal arrays of repeated
    layers are one `LeafDiff`.

    **Arguments:**

    - `path`: the array's path, or one text with number ranges for the paths of all
      arrays: `layers/{0..31}/attn/q_proj/weight`.
    - `paths`: the path of each array.
    - `before`, `after`: the LeafPlan of the first array in the first plan and in the
      second; `None` if the plan lacks the array.
    - `fields`: the names of the fields of [`shardfx.LeafPlan`][] that differ.
    - `axes`: the mesh axes that shard another dimension, one `AxisMove` each.
    - `move`: the move of the first array from one plan to the other, as in
      [`shardfx.plan_reshard`][]. `None` if nothing can be moved: the array is in one
      plan only, has another shape or dtype, or has unreduced axes.
    - `wire_bytes`: the bytes that enter a device to move all these arrays, as the mean
      over devices.
    """

    __module__ = "shardfx.results"

    path: str
    paths: tuple[str, ...]
    before: LeafPlan | None
    after: LeafPlan | None
    fields: tuple[str, ...]
    axes: tuple[AxisMove, ...]
    move: LeafMove | None
    wire_bytes: int

    @property
    def count(self) -> int:
        """The number of arrays."""
        return len(self.paths)

    @property
    def steps(self) -> tuple[str, ...]:
        """The names of the collectives that move an array of this group from the first
        plan's sharding to the second's, such as "all-gather".

        If no collectives move it, the only item says how it moves, such as "relabel"
        (see [`shardfx.plan_reshard`][]).
        """
        if self.move is None:
            return ()
        return tuple(step.kind for step in self.move.steps) or (self.move.how,)


@dataclasses.dataclass(frozen=True)
class Diff:
    """The difference between two plans; made by [`shardfx.diff`][]. `print` and a
    notebook show it. A Diff is true if the plans differ.

    **Arguments:**

    - `plans`: texts, one for each of the arguments `mesh`, `mode`, `axes` and `strict`
      of [`shardfx.plan`][] that had different values for the two plans.
    - `leaves`: the differences between arrays. Arrays that differ in the same way are
      one `LeafDiff`.
    - `bytes_per_device`: bytes per device of all arrays, in the first plan and in the
      second.
    """

    __module__ = "shardfx.results"

    plans: tuple[str, ...]
    leaves: tuple[LeafDiff, ...]
    bytes_per_device: tuple[int, int]

    @property
    def wire_bytes(self) -> int:
        """The bytes that enter a device to move all arrays from the first plan to the
        second, the mean over devices.
        """
        return sum(leaf.wire_bytes for leaf in self.leaves)

    def __bool__(self) -> bool:
        return bool(self.plans or self.leaves)

    def __str__(self) -> str:
        parts = [
            "\n".join(map(printable, self.plans)),
            *map(_paragraph, self.leaves),
            _totals(self),
        ]
        return "\n\n".join(part for part in parts if part)

    __repr__ = first_lines

    def _repr_html_(self) -> str:
        rows = [_HEADER, *map(_cells, self.leaves)]
        return html_table(rows, right=_NUMBERS, below=[*self.plans, _totals(self)])


@called("diff(a, b)")
def diff(a: ShardPlan, b: ShardPlan) -> Diff:
    """The difference between two plans, array by array, and the cost of moving a state
    from one to the other.

    **Arguments:**

    - `a`, `b`: the plans. Their trees may differ, and so may their meshes.

    **Returns:**

    A `Diff`, false exactly if both plans have the same `digest`. If the meshes differ,
    it also has the arrays that must move although their LeafPlans are equal.

    !!! Example

        ```python
        import jax
        from shardfx import MeshSpec, PathRules, diff, plan

        tree = {"layers": [{"w": jax.ShapeDtypeStruct((4096, 4096), "bfloat16")}] * 32}
        mesh = MeshSpec({"fsdp": 4, "tensor": 2})
        before = plan(tree, mesh, paths=PathRules.parse("w->fsdp.tensor"))
        after = plan(tree, mesh, paths=PathRules.parse("w->tensor.fsdp"))
        found = diff(before, after)
        assert str(found.leaves[0].axes[0]) == "fsdp dim 0 -> 1"
        print(found)
        ```
    """
    check_plan("a", a)
    check_plan("b", b)
    totals = (a.bytes_per_device, b.bytes_per_device)
    if a.digest == b.digest:
        return Diff(plans=(), leaves=(), bytes_per_device=totals)

    plans = plan_lines(a, b)
    moves = _moves_by_path(a, b)
    # Arrays with one row number in a plan are planned alike there.
    row_numbers_of_a = dict(a.content.paths_and_rows)
    row_numbers_of_b = dict(b.content.paths_and_rows)
    # Arrays that are planned alike in both plans, and whose paths differ in numbers.
    groups: dict[object, list[Pair]] = {}
    # A pair has the LeafPlans of an array in both plans, and the fields that differ.
    for pair in pairs(a, b):
        path = pair.path
        is_in_both = pair.before is not None and pair.after is not None
        is_moved = path in moves and not moves[path].idle
        if pair.fields or is_moved or not is_in_both:
            key = (
                between_numbers(path),
                row_numbers_of_a.get(path),
                row_numbers_of_b.get(path),
            )
            groups.setdefault(key, []).append(pair)

    leaves = tuple(_leaf_diff(alike, moves) for alike in groups.values())
    if not plans and not leaves:
        plans = (OTHER_TREES,)
    return Diff(plans=plans, leaves=leaves, bytes_per_device=totals)


def _leaf_diff(alike: Sequence[Pair], moves: dict[str, LeafMove]) -> LeafDiff:
    """The difference of arrays that differ in the same way. `alike` has the plans of
    each array in both plans, and `moves` the move of each array by its path.
    """
    first = alike[0]
    paths = tuple(pair.path for pair in alike)
    axes: tuple[AxisMove, ...] = ()
    if first.before is not None and first.after is not None:
        axes = _axis_moves(first.before, first.after)
    return LeafDiff(
        path=joined(paths),
        paths=paths,
        before=first.before,
        after=first.after,
        fields=first.fields,
        axes=axes,
        move=moves.get(first.path),
        wire_bytes=sum(moves[path].wire_bytes for path in paths if path in moves),
    )


def _axis_moves(before: LeafPlan, after: LeafPlan) -> tuple[AxisMove, ...]:
    """The mesh axes that shard different dimensions of an array in two plans."""
    dims_before = _dims_by_axis(before)
    dims_after = _dims_by_axis(after)
    moves = []
    for axis in dict.fromkeys([*dims_before, *dims_after]):
        move = AxisMove(
            axis=axis,
            src=dims_before.get(axis),
            dst=dims_after.get(axis),
        )
        if move.src != move.dst:
            moves.append(move)
    return tuple(moves)


def _dims_by_axis(leaf: LeafPlan) -> dict[str, int]:
    """For each mesh axis that shards an array, the dimension that it shards."""
    dims: dict[str, int] = {}
    for dim, entry in enumerate(entries_of(leaf.spec)):
        dims |= dict.fromkeys(entry_axes(entry), dim)
    return dims


def _moves_by_path(a: ShardPlan, b: ShardPlan) -> dict[str, LeafMove]:
    """The moves of arrays from plan `a` to plan `b`, by path, as `plan_reshard` finds
    them.

    An array is included if both plans have it with one shape and dtype, and its spec,
    its memory kind or the mesh differs. Arrays that JAX cannot move are left out.
    """
    paths = []
    for leaf in a.leaves:
        other = b.content.by_path.get(leaf.path)
        if other is None or (leaf.shape, leaf.dtype) != (other.shape, other.dtype):
            continue
        has_same_spec = leaf.spec == other.spec
        has_same_memory = leaf.memory_kind == other.memory_kind
        if a.mesh != b.mesh or not has_same_spec or not has_same_memory:
            paths.append(leaf.path)
    return _planned_moves(a, b, paths)


def _planned_moves(
    a: ShardPlan,
    b: ShardPlan,
    paths: Sequence[str],
) -> dict[str, LeafMove]:
    """The moves of the arrays at these paths, by path, without those that JAX cannot
    move.
    """
    try:
        plan = plan_reshard(_of_paths(a, paths), _of_paths(b, paths))
    except (SpecError, MeshError, LeafTypeError):
        # An array that JAX cannot move does not stop the others.
        moves: dict[str, LeafMove] = {}
        if len(paths) > 1:
            for path in paths:
                moves |= _planned_moves(a, b, [path])
        return moves
    return {move.path: move for move in plan.leaves}


def _of_paths(plan: ShardPlan, paths: Sequence[str]) -> ShardPlan:
    """A plan of only the arrays at `paths`, as a flat tree in this order."""
    numbers = dict(plan.content.paths_and_rows)
    index = [numbers[path] for path in paths]
    path_tree = PathTree(tuple(paths), jax.tree.structure([*paths]))
    return ShardPlan(plan.content.replaced(index=index, path_tree=path_tree))


_HEADER = (
    "path",
    "arrays",
    "shape",
    "before",
    "after",
    "bytes/device",
    "what",
    "wire/device",
    "how",
)
_NUMBERS = {"arrays", "bytes/device", "wire/device"}


class _Cells(NamedTuple):
    """The cells of one row of the table, in the order of `_HEADER`."""

    path: str
    array_count: str
    shape: str
    spec_before: str
    spec_after: str
    bytes_per_device: str
    what: str
    wire_bytes: str
    how: str


def _cells(row: LeafDiff) -> _Cells:
    """The cells of arrays' row in the table. Equal texts of both plans stand once, but
    for the two specs.
    """
    shapes = []
    specs = []
    sizes = []
    for leaf in (row.before, row.after):
        if leaf is None:
            specs.append("(none)")
            sizes.append("-")
            continue
        shapes.append(array_text(leaf.dtype, leaf.shape))
        specs.append(spec_text(entries_of(leaf.spec)))
        sizes.append(bytes_text(leaf.bytes_per_device * row.count))
    sent = bytes_text(row.wire_bytes) if row.wire_bytes else "-"
    spec_before, spec_after = specs
    return _Cells(
        path=row.path,
        array_count=str(row.count),
        shape=" -> ".join(dict.fromkeys(shapes)),
        spec_before=spec_before,
        spec_after=spec_after,
        bytes_per_device=" -> ".join(dict.fromkeys(sizes)),
        what=_what(row),
        wire_bytes=sent,
        how=" > ".join(row.steps) or "-",
    )


def _change(before: str, after: str) -> str:
    """Two texts with an arrow between; one of them if they are equal."""
    if before == after:
        return before
    return f"{before} -> {after}"


def _paragraph(row: LeafDiff) -> str:
    """The cells of a row as three lines: the arrays, their specs, and the cost."""
    cells = _Cells(*map(printable, _cells(row)))
    arrays = cells.shape
    if row.count > 1:
        arrays = f"{cells.array_count} x {cells.shape}"
    specs = _change(cells.spec_before, cells.spec_after)
    if cells.what != "-":
        specs += f": {cells.what}"
    cost = f"{cells.bytes_per_device} per device"
    if row.wire_bytes:
        cost += f"; {cells.wire_bytes} enter each device: {cells.how}"
    elif row.move:
        cost += f"; {cells.how}"
    return "\n    ".join([f"{cells.path}: {arrays}", specs, cost])


# Fields of a LeafPlan that other columns of the table show, or that follow from such
# fields.
_SHOWN = {
    "path",
    "shape",
    "dtype",
    "spec",
    "bytes",
    "bytes_per_device",
    "requested",
    "reasons",
}


def _what(row: LeafDiff) -> str:
    """The differences that no other column shows. That a request or reasons differ is
    told only if nothing else does.
    """
    if row.after is None:
        return "only in the first"
    if row.before is None:
        return "only in the second"
    changes = [*map(str, row.axes)]
    # Fields whose values are too long for the cell.
    only_differ = []
    for name in row.fields:
        if name not in _SHOWN:
            before = _field_text(getattr(row.before, name))
            after = _field_text(getattr(row.after, name))
            changes.append(f"{name}: {before} -> {after}")
        elif name in ("requested", "reasons"):
            only_differ.append(f"{name} differs")
    return ", ".join(changes or only_differ) or "-"


def _field_text(value: object) -> str:
    if isinstance(value, tuple):
        return spec_text(value)
    return str(value)


def _totals(difference: Diff) -> str:
    """A sentence about all arrays that differ."""
    before, after = map(bytes_text, difference.bytes_per_device)
    if not difference:
        return f"the plans are equal: {before} per device"
    count = sum(leaf.count for leaf in difference.leaves)
    sizes = _change(before, after)
    return (
        f"{plural(count, 'array differs or moves', 'arrays differ or move')}, {sizes}"
        " per device.\nTo get from one plan to the other"
        f" {bytes_text(difference.wire_bytes)} enter each device."
    )
