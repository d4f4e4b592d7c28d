"""Arrays under a plan: placing them, constraining them, and reading back how they are placed."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .._errors import LeafTypeError, PlanMismatchError, RuleError, SpecError
from .._mesh import MeshSpec
from .._plan.correct import correct
from .._plan.shard_plan import ShardPlan, check_plan
from .._rules.resolve import check_rank, resolve, units_of
from .._spec import UNCONSTRAINED, entries_of, entry_axes, trimmed
from .place import placed
from .read_back import sharding_of


def constrain(x: Any, names_or_spec: Any, plan: ShardPlan, *, strict: bool = False) -> Any:
    """Says how an intermediate array is sharded: by logical names or by a spec, corrected to its shape.

    The same call works outside and inside `jax.jit`, for Auto, Explicit and mixed axis types, under `jax.set_mesh`
    and without it, and inside `jax.shard_map`, where the Manual axes are left out of the spec.

    **Arguments:**

    - `x`: an array.
    - `names_or_spec`: a PartitionSpec, or a tuple of logical names that the plan's `axes` resolve. Dimensions beyond
        its end are replicated. `None` leaves the array as it is.
    - `plan`: whose mesh, `axes` and `mode` count; the array need not be one of its leaves.
    - `strict`: raise where the rules, the shape or the mesh do not allow what is asked: a name without a rule, a mesh
        axis that another name has, a size that does not divide.

    **Returns:**

    `x`, sharded so. `PartitionSpec()` replicates it; a dimension that is UNCONSTRAINED is left to the compiler.

    **Raises:**

    `RuleError` for names if the plan has no `axes`, `SpecError` for more entries than dimensions, and under `strict`
    if anything would be dropped, `PlanMismatchError` if `x` lies on another mesh.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        from shardfx import AxisRules, MeshSpec, constrain, plan

        mesh = MeshSpec({"data": 2, "tensor": 4}).build(jax.devices())
        axes = AxisRules([("batch", "data"), ("mlp", "tensor"), ("embed", None)])
        made = plan({"w": jnp.ones((16, 32))}, mesh, names={"w": ("embed", "mlp")}, axes=axes)

        @jax.jit
        def layer(x):
            return constrain(jnp.tanh(x), ("batch", "mlp"), made)

        assert layer(jnp.ones((8, 32))).sharding.spec == jax.P("data", "tensor")
        ```
    """
    if not isinstance(x, jax.Array | np.ndarray):
        raise LeafTypeError(
            f"`constrain` takes one array, not {type(x).__name__}; map it over a tree with `jax.tree.map`."
        )
    check_plan("plan", plan)
    if names_or_spec is None:
        return x
    spec, units = _requested(names_or_spec, plan, x.ndim, strict)
    mesh = _mesh_of(x, plan)
    free = {name: kind for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind != AxisType.Manual}
    if not free:
        return x
    spec = trimmed([_without(entry, mesh, free) for entry in entries_of(spec)], spec)
    sizes = MeshSpec([(name, mesh.shape[name]) for name in free], axis_types=free)
    spec = correct(spec, x.shape, sizes, units=units, strict=strict).spec
    if not isinstance(x, Tracer):
        return _constrained_outside(x, spec, mesh)
    for kind, constraint in (
        (AxisType.Explicit, jax.sharding.reshard),
        (AxisType.Auto, jax.lax.with_sharding_constraint),
    ):
        axes = [name for name in free if free[name] == kind]
        if axes:
            x = constraint(x, NamedSharding(mesh, _only(spec, axes, kind)))
    return x


def _requested(
    names_or_spec: Any, plan: ShardPlan, rank: int, strict: bool
) -> tuple[PartitionSpec, tuple[int, ...] | None]:
    if isinstance(names_or_spec, PartitionSpec):
        return names_or_spec, None
    if plan.axes is None:
        raise RuleError(
            f"the plan has no `axes` to resolve the names {names_or_spec} with; plan with `axes=AxisRules([...])`, or "
            "pass a PartitionSpec."
        )
    units = units_of(names_or_spec, plan.axes)
    check_rank(names_or_spec, rank)
    padded = None if units is None else (*units[:rank], *[1] * (rank - len(units)))
    found = resolve(names_or_spec, plan.axes, mode=plan.mode)
    if strict and found.reasons:
        raise SpecError(
            f"`strict=True`, and {names_or_spec} would not shard as asked: {'; '.join(map(str, found.reasons))}"
        )
    return found.spec, padded


def _mesh_of(x: Any, plan: ShardPlan) -> Mesh | AbstractMesh:
    """The mesh on which `x` is typed, or else the plan's."""
    planned = plan.mesh.abstract() if plan.jax_mesh is None else plan.jax_mesh
    sharding = sharding_of(x)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        return planned
    if not isinstance(x, Tracer):
        return planned if plan.jax_mesh is not None else sharding.mesh
    if dict(sharding.mesh.shape) != dict(planned.shape):
        raise PlanMismatchError(
            f"the array lies on a mesh {MeshSpec.of(sharding.mesh)}, but the plan is for {plan.mesh}; use the plan "
            "that its step was compiled with, or `reshard` it first."
        )
    return sharding.mesh


def _without(entry: Any, mesh: Mesh | AbstractMesh, free: dict[str, AxisType]) -> Any:
    """An entry without the Manual axes of the mesh; axes that the mesh lacks stay, for `correct` to report."""
    if entry is UNCONSTRAINED:
        return entry
    return tuple(axis for axis in entry_axes(entry) if axis in free or axis not in mesh.axis_names)


def _only(spec: PartitionSpec, axes: Sequence[str], kind: AxisType) -> PartitionSpec:
    """The part of a spec that concerns `axes`, which are of one kind."""
    parts = []
    for entry in entries_of(spec):
        if entry is UNCONSTRAINED:
            parts.append(entry if kind == AxisType.Auto else None)
        else:
            parts.append(tuple(axis for axis in entry_axes(entry) if axis in axes))
    return trimmed(parts)


def _constrained_outside(x: Any, spec: PartitionSpec, mesh: Mesh | AbstractMesh) -> Any:
    if not isinstance(mesh, Mesh):
        raise PlanMismatchError(
            "outside `jit`, an array can only be constrained on devices, and the plan has none; use "
            "`plan.on(plan.mesh.build(jax.devices()))`."
        )
    memory_kind = x.sharding.memory_kind if isinstance(x, jax.Array) else None
    sharding = NamedSharding(mesh, spec, memory_kind=memory_kind)
    if any(entry is UNCONSTRAINED for entry in entries_of(spec)):
        return jax.lax.with_sharding_constraint(x, sharding)
    return placed([x], [sharding])[0]
