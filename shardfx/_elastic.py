import dataclasses

from jax.sharding import AbstractMesh, Mesh

from ._content import LeafPlan
from ._mesh import MeshSpec
from ._plan import ShardPlan
from ._planner import replanned


@dataclasses.dataclass(frozen=True)
class Replan:
    """The plan of the same rules on another mesh, and what that changed; made by [`shardfx.replan`][].

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

    A [`shardfx.Replan`][]; `reshard(state, replan(...).plan)` moves the arrays.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        from shardfx import MeshSpec, PathRules, plan, replan

        tree = {"w": jax.ShapeDtypeStruct((24, 8), jnp.float32), "b": jax.ShapeDtypeStruct((8,), jnp.float32)}
        before = plan(tree, MeshSpec({"data": 8}), paths=PathRules.parse(".*->data"))
        after = replan(before, MeshSpec({"data": 6}))
        assert after.plan["w"].spec == jax.P("data") and after.plan["b"].spec == jax.P()
        print(after)  # leaf `b`: P('data',) -> P(), 4 -> 32 bytes per device: dim 0: size 8 is not divisible by ...
        ```
    """
    made = replanned(plan, mesh)
    lines = [] if plan.mesh == made.mesh else [f"mesh: {plan.mesh} -> {made.mesh}"]
    texts: dict[tuple[int, int], str] = {}
    for path, before, after in zip(plan.content.paths, plan.content.index, made.content.index, strict=True):
        if before >= 0:
            if (before, after) not in texts:
                texts[before, after] = _change(plan.content.rows[before], made.content.rows[after])
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
