"""The same rules on another mesh: with fewer devices, or with axes that are split."""

import collections
import dataclasses
from collections.abc import Iterable
from typing import Any

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from .._ground.reason import Code, Reason
from .._rules.axis_rules import AxisRules
from .._rules.resolution import resolve
from ..topology._mesh import MeshSpec
from .correction import axes_of
from .decide import Request, row_of
from .leaf import LeafPlan, Row
from .refine import Wish, refined_mesh, renamed, renamed_axes, renamed_entry, wishes
from .shard_plan import ShardPlan


def replanned(made: ShardPlan, mesh: MeshSpec | Mesh | AbstractMesh) -> ShardPlan:
    """The plan of the same leaves by the same rules on another mesh; see `shardfx.auto.replan`."""
    spec = MeshSpec.of(mesh).filled()
    rows, axes = [], axes_of(spec)
    for row in made.content.rows:
        small = row.requested != row.spec == PartitionSpec() and any(why.code is Code.small for why in row.reasons)
        if small:  # on one mesh, and so on every other
            rows.append(row)
            continue
        first = _first_reasons(row, made)
        request = Request(row.names, row.requested, row.rule, row.units, row.strategies, first)
        rows.append(row_of(request, row.shape, row.dtype, axes, 0, row.memory_kind))
    jax_mesh = mesh if isinstance(mesh, Mesh) else None
    return ShardPlan(made.content.replaced(mesh=spec, jax_mesh=jax_mesh, rows=rows))


def refined(made: ShardPlan, min_bytes: int) -> ShardPlan:
    """The plan on a mesh whose axes are split where arrays could take part of one."""
    counts = collections.Counter(made.content.index)
    asked: dict[Wish, int] = {}
    wishing = []
    for number, row in enumerate(made.content.rows):
        steps = [step.axes for step in row.strategies]
        small = any(why.code is Code.small for why in row.reasons)
        found = () if small else wishes(row.requested, row.spec, row.shape, row.units, steps, made.mesh.shape)
        wishing.append(bool(found))
        for wish in found:
            saved = made.content.byte_counts[number][1] * (wish.part - 1) // wish.part * counts[number]
            asked[wish] = asked.get(wish, 0) + saved
    mesh, parts = refined_mesh(made.mesh, asked)
    if not parts:
        return made
    pairs = zip(made.content.rows, wishing, strict=True)
    rows = [_refined_row(row, made, mesh, parts, min_bytes, wished) for row, wished in pairs]
    jax_mesh = None if made.jax_mesh is None else mesh.build(made.jax_mesh)
    axes = None if made.axes is None else _renamed_rules(made.axes, parts)
    return ShardPlan(made.content.replaced(mesh=mesh, jax_mesh=jax_mesh, axes=axes, rows=rows))


def _refined_row(
    row: Row, made: ShardPlan, mesh: MeshSpec, parts: dict[str, tuple[str, ...]], min_bytes: int, wished: bool
) -> Row:
    steps = tuple(dataclasses.replace(step, axes=renamed_axes(step.axes, parts)) for step in row.strategies)
    requested, first = renamed(row.requested, parts), _first_reasons(row, made)
    request = Request(row.names, requested, row.rule, row.units, steps, first)
    again = row_of(request, row.shape, row.dtype, axes_of(mesh), min_bytes, row.memory_kind)
    same = renamed(row.spec, parts)
    # Only an array that asked for a part of an axis may change its layout.
    if wished or again.spec == same:
        return again
    return row._replace(spec=same, requested=requested, strategies=steps)


def _renamed_rules(axes: AxisRules, parts: dict[str, tuple[str, ...]]) -> AxisRules:
    def by_part(rules: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
        return [(name, renamed_entry(target, parts)) for name, target in rules]

    modes = {mode: by_part(rules) for mode, rules in axes.modes}
    return AxisRules(
        by_part(axes.rules), modes=modes, units=axes.units, aliases=axes.aliases, axes=renamed_axes(axes.axes, parts)
    )


def _first_reasons(row: Row, made: ShardPlan) -> tuple[Reason, ...]:
    """The reasons of a row that came from its rule, not from the mesh it was corrected for."""
    if row.names is not None and made.axes is not None:
        return resolve(row.names, made.axes, mode=made.mode).reasons
    return tuple(why for why in row.reasons if why.code in (Code.scalar, Code.unmatched))


@dataclasses.dataclass(frozen=True)
class Replan:
    """The plan of the same rules on another mesh, and what that changed; made by [`shardfx.auto.replan`][].

    **Arguments:**

    - `plan`: for the new mesh.
    - `changes`: a line for the mesh, and one for each array whose spec or shard size is not what it was.
    """

    plan: ShardPlan
    changes: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.changes) or "nothing changed"


def replan(plan: ShardPlan, mesh: MeshSpec | Mesh | AbstractMesh) -> Replan:
    """Plans the same arrays by the same rules for another mesh: fewer devices after a loss, more after a recovery.

    **Arguments:**

    - `plan`: any plan, one read back from JSON too.
    - `mesh`: the new mesh. Axes that it lacks are dropped from the specs, sizes that no longer divide are corrected,
        and what the old mesh could not give is tried again.

    **Returns:**

    A [`shardfx.auto.Replan`][]; `reshard(state, replan(...).plan)` moves the arrays.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        from shardfx import MeshSpec, PathRules, plan
        from shardfx.auto import replan

        tree = {
            "w": jax.ShapeDtypeStruct((24, 8), jnp.float32),
            "b": jax.ShapeDtypeStruct((8,), jnp.float32),
        }
        before = plan(tree, MeshSpec({"data": 8}), paths=PathRules.parse(".*->data"))
        after = replan(before, MeshSpec({"data": 6}))
        assert after.plan["w"].spec == jax.P("data") and after.plan["b"].spec == jax.P()
        # leaf `b`: P('data',) -> P(), 4 -> 32 bytes per device: dim 0: size 8 is not divisible
        # by ...
        print(after)
        ```
    """
    made = replanned(plan, mesh)
    lines = [] if plan.mesh == made.mesh else [f"mesh: {plan.mesh} -> {made.mesh}"]
    texts: dict[tuple[int, int], str] = {}
    for (path, before), after in zip(plan.content.numbered, made.content.index, strict=True):
        if before >= 0:
            if (before, after) not in texts:
                texts[before, after] = _change(plan.content.leaf(path, before), made.content.leaf(path, after))
            lines += [f"leaf `{path}`: {texts[before, after]}"] if texts[before, after] else []
    old, new = plan.bytes_per_device, made.bytes_per_device
    if old != new:
        lines.append(f"all arrays: {old} -> {new} bytes per device")
    return Replan(made, tuple(lines))


def _change(before: LeafPlan, after: LeafPlan) -> str:
    if before.spec == after.spec and before.bytes_per_device == after.bytes_per_device:
        return ""
    spec = f"{before.spec} -> {after.spec}" if before.spec != after.spec else f"{after.spec} stays"
    why = f": {after.reasons[0]}" if after.reasons and after.reasons != before.reasons else ""
    return f"{spec}, {before.bytes_per_device} -> {after.bytes_per_device} bytes per device{why}"
