"""Plans the same arrays by the same rules on another mesh: one with other devices, or with axes split into sub-axes."""

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from .._ground.reason import Code, Reason
from .._ground.spec import canonical_entry, entries_at, entries_of, entry_axes, trimmed, unreduced_kind, with_reductions
from .._rules import AxisRules, resolve
from ..topology import MeshSpec
from .content import Content
from .correction import Axes, axes_of
from .decide import Request, row_of
from .leaf import Row
from .shard_plan import ShardPlan


def replan(plan: ShardPlan, mesh: MeshSpec | Mesh | AbstractMesh) -> ShardPlan:
    """Plans the same arrays by the same rules for another mesh: fewer devices after a loss, more after a recovery.

    **Arguments:**

    - `plan`: any plan, such as one read back from JSON.
    - `mesh`: the new mesh. Specs lose the axes that it lacks and the axes that no longer divide a dimension. Axes that
        did not fit on the old mesh are tried again.

    **Returns:**

    The plan. [`shardfx.diff`][] says what changed; `reshard(state, again)` moves the arrays.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        from shardfx import MeshSpec, PathRules, diff, plan
        from shardfx.auto import replan

        tree = {
            "w": jax.ShapeDtypeStruct((24, 8), jnp.float32),
            "b": jax.ShapeDtypeStruct((8,), jnp.float32),
        }
        before = plan(tree, MeshSpec({"data": 8}), paths=PathRules.parse(".*->data"))
        after = replan(before, MeshSpec({"data": 6}))
        assert after["w"].spec == jax.P("data") and after["b"].spec == jax.P()
        print(diff(before, after))
        ```
    """
    spec = MeshSpec.of(mesh).filled()
    rows, axes = [], axes_of(spec)
    for row in plan.content.rows:
        kept = _is_small(row) and row.requested != row.spec == PartitionSpec()
        rows.append(row if kept else row_on(row, plan.content, axes))
    jax_mesh = mesh if isinstance(mesh, Mesh) else None
    return ShardPlan(plan.content.replaced(mesh=spec, jax_mesh=jax_mesh, rows=rows))


def _is_small(row: Row) -> bool:
    """Whether an array is replicated because it has fewer bytes than `min_bytes`, which holds on every mesh."""
    return any(why.code is Code.small for why in row.reasons)


def row_on(row: Row, content: Content, axes: Axes, **changes: object) -> Row:
    """Returns the row of an array on other mesh axes, from its old request with some fields changed."""
    request = Request(row.names, row.requested, row.rule, row.units, row.strategies, _first_reasons(row, content))
    return row_of(request._replace(**changes), row.shape, row.dtype, axes, row.memory_kind)


def refined(made: ShardPlan, min_bytes: int) -> ShardPlan:
    """Returns the plan on a mesh whose axes are split where an array can use a sub-axis but not the whole axis."""
    counts = collections.Counter(made.content.index)
    asked: dict[Wish, int] = {}
    wishing = []
    for number, row in enumerate(made.content.rows):
        found = () if _is_small(row) else _wishes(row, made.mesh.shape)
        wishing.append(bool(found))
        for wish in found:
            saved = made.content.byte_counts[number][1] * (wish.part - 1) // wish.part * counts[number]
            asked[wish] = asked.get(wish, 0) + saved
    mesh, parts = _refined_mesh(made.mesh, asked)
    if not parts:
        return made
    pairs, sizes = zip(made.content.rows, wishing, strict=True), axes_of(mesh, min_bytes)
    rows = [_refined_row(row, made.content, sizes, parts, wished) for row, wished in pairs]
    jax_mesh = None if made.jax_mesh is None else mesh.build(made.jax_mesh)
    axes = None if made.axes is None else _renamed_rules(made.axes, parts)
    return ShardPlan(made.content.replaced(mesh=mesh, jax_mesh=jax_mesh, axes=axes, rows=rows))


def _refined_row(row: Row, content: Content, axes: Axes, parts: dict[str, tuple[str, ...]], wished: bool) -> Row:
    steps = tuple(dataclasses.replace(step, axes=_renamed_axes(step.axes, parts)) for step in row.strategies)
    requested, same = _renamed(row.requested, parts), _renamed(row.spec, parts)
    again = row_on(row, content, axes, spec=requested, strategies=steps)
    # Only an array that wishes for a sub-axis may change its layout.
    if wished or again.spec == same:
        return again
    return row._replace(spec=same, requested=requested, strategies=steps)


def _renamed_rules(axes: AxisRules, parts: dict[str, tuple[str, ...]]) -> AxisRules:
    def by_part(rules: Iterable[tuple[str, object]]) -> list[tuple[str, Any]]:
        return [(name, _renamed_entry(target, parts)) for name, target in rules]

    modes = {mode: by_part(rules) for mode, rules in axes.modes}
    return AxisRules(
        by_part(axes.rules), modes=modes, units=axes.units, aliases=axes.aliases, axes=_renamed_axes(axes.axes, parts)
    )


def _first_reasons(row: Row, content: Content) -> tuple[Reason, ...]:
    """Returns the reasons of a row that its rule gave, without those from correction to a mesh."""
    if row.names is not None and content.axes is not None:
        return resolve(row.names, content.axes, mode=content.mode).reasons
    return tuple(why for why in row.reasons if why.code in (Code.scalar, Code.unmatched))


class Wish(NamedTuple):
    """A mesh axis that an array requested and does not use, and the size of a sub-axis of it that would divide a
    dimension.
    """

    axis: str
    part: int


def _wishes(row: Row, sizes: Mapping[str, int]) -> tuple[Wish, ...]:
    """Returns the sub-axes that an array could use, of the mesh axes that it requested and did not get.

    There is one wish per mesh axis, for the first dimension that could use a sub-axis. `sizes` are the axis sizes.
    """
    used = {axis for entry in entries_of(row.spec) for axis in entry_axes(entry)}
    kept = entries_at(row.spec, len(row.shape))
    units = row.units or (1,) * len(row.shape)
    counts = [
        (1 if size % unit else size // unit) // math.prod(sizes[axis] for axis in entry_axes(entry))
        for size, unit, entry in zip(row.shape, units, kept, strict=False)
    ]
    found: dict[str, int] = {}
    for count, entry in zip(counts, entries_of(row.requested), strict=False):
        for axis in entry_axes(entry) if isinstance(entry, str | tuple) else ():
            part = math.gcd(count, sizes.get(axis, 1))
            if axis not in used and axis not in found and part > 1:
                found[axis] = part
                count //= part
    free = [count for count, entry in zip(counts, kept, strict=False) if entry is None]
    for step in row.strategies:
        for axis in step.axes:
            part = max((math.gcd(count, sizes.get(axis, 1)) for count in free), default=1)
            if axis not in used and axis not in found and part > 1:
                found[axis] = part
    return tuple(Wish(axis, part) for axis, part in found.items())


def _refined_mesh(mesh: MeshSpec, asked: Mapping[Wish, int]) -> tuple[MeshSpec, dict[str, tuple[str, ...]]]:
    """Returns the mesh with axes split into the wished sub-axes; the wish that saves most bytes per device comes first.

    The second value holds, for each split axis, the names of its sub-axes, major to minor: sub-axis `i` of `tensor` is
    `tensor_i`. The order of the devices does not change.
    """
    parts: dict[str, tuple[str, ...]] = {}
    for axis, size, slices in zip(mesh.axis_names, mesh.axis_sizes, mesh.dcn_sizes, strict=True):
        wanted = {wish.part: saved for wish, saved in asked.items() if wish.axis == axis}
        chain = _chain(size, slices, sorted(wanted, key=lambda part: (-wanted[part], part)))
        if len(chain) < 3:
            continue
        parts[axis] = _names(axis, len(chain) - 1, mesh.axis_names)
        factors = [large // small for small, large in zip(chain, chain[1:], strict=False)]
        mesh = mesh.split(axis, dict(zip(parts[axis], factors, strict=True)))
    return mesh, parts


def _renamed(spec: PartitionSpec, parts: Mapping[str, tuple[str, ...]]) -> PartitionSpec:
    """Returns the spec of the same layout on the refined mesh: each split axis becomes all of its sub-axes, in
    order.
    """
    entries = [_renamed_entry(entry, parts) for entry in entries_of(spec)]
    unreduced, reduced = (_renamed_axes(sorted(axes), parts) for axes in (spec.unreduced, spec.reduced))
    return trimmed(entries, with_reductions((), unreduced, reduced, unreduced_kind(spec)))


def _renamed_entry(entry: object, parts: Mapping[str, tuple[str, ...]]) -> Any:
    """Returns one entry of a spec, or one target of a rule, with split axes replaced by their sub-axes."""
    if not isinstance(entry, str | tuple):
        return entry
    return canonical_entry(_renamed_axes(entry_axes(entry), parts))


def _renamed_axes(axes: Iterable[str], parts: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Returns the mesh axes, each split axis replaced by its sub-axes."""
    return tuple(part for axis in axes for part in parts.get(axis, (axis,)))


def _chain(size: int, slices: int, wanted: Iterable[int]) -> list[int]:
    """Returns divisors of `size` from 1 to `size`, each dividing the next; the ratio of two neighbours is the size of a
    sub-axis.
    """
    chain = [1, size]
    for part in wanted:
        # A wished size that is incompatible with the chain is reduced to its largest divisor that fits. A sub-axis must
        # lie within one slice or consist of whole slices.
        fitting = [n for n in range(1, part + 1) if part % n == 0 and (n % slices == 0 or slices % n == 0)]
        best = max(n for n in fitting if all(n % other == 0 or other % n == 0 for other in chain))
        chain = sorted({*chain, best})
    return chain


def _names(axis: str, count: int, taken: tuple[str, ...]) -> tuple[str, ...]:
    stem = axis
    while any(f"{stem}_{i}" in taken for i in range(count)):
        stem += "_"
    return tuple(f"{stem}_{i}" for i in range(count))
