"""`constrain`: sets the sharding of an intermediate array, by logical names or by a
spec, inside `jit` and outside.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, overload

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .._ground.errors import LeafTypeError, PlanMismatchError, SpecError
from .._ground.keys import as_keys, is_key, raw
from .._ground.misuse import called
from .._ground.purity import is_tracing
from .._ground.reason import Code, Decision, reason_for
from .._ground.spec import UNCONSTRAINED, entries_of, entry_axes, trimmed
from .._ground.text import plural
from .._plan import Policy, ShardPlan, check_plan, decision_for
from ..topology import MeshSpec
from .given import sharding_of


def placed(leaves: list[Any], shardings: list[Any]) -> list[Any]:
    """Puts arrays on the devices of their `shardings`, on one process or many."""
    if all(sharding.is_fully_addressable for sharding in shardings):
        return jax.device_put(leaves, shardings)
    return [
        _placed_across(leaf, sharding)
        for leaf, sharding in zip(leaves, shardings, strict=True)
    ]


def _placed_across(leaf: Any, sharding: NamedSharding) -> Any:
    """Places the array `leaf` on a mesh whose devices belong to several processes.
    Either `leaf` is a global array, or every process passes the same whole array.
    """
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    if is_key(leaf.dtype):
        return as_keys(_placed_across(raw(leaf), sharding), leaf)
    whole = np.asarray(leaf)
    # Without a dtype, a process that owns no device of the sharding could not know it.
    return jax.make_array_from_callback(
        whole.shape, sharding, lambda index: whole[index], dtype=whole.dtype
    )


@overload
def constrain(
    x: jax.Array | np.ndarray,
    names_or_spec: Any,
    plan: ShardPlan,
    *,
    strict: bool | None = None,
    unmatched: Policy = "raise",
    explain: Literal[False] = False,
) -> jax.Array: ...


@overload
def constrain(
    x: jax.Array | np.ndarray,
    names_or_spec: Any,
    plan: ShardPlan,
    *,
    strict: bool | None = None,
    unmatched: Policy = "raise",
    explain: Literal[True],
) -> tuple[jax.Array, Decision]: ...


@called("constrain(x, names_or_spec, plan)")
def constrain(
    x: Any,
    names_or_spec: Any,
    plan: ShardPlan,
    *,
    strict: bool | None = None,
    unmatched: Policy = "raise",
    explain: bool = False,
) -> Any:
    """Sets the sharding of an intermediate array, by logical names or by a spec,
    corrected to the array's shape.

    The same call works outside and inside `jax.jit`, for Auto, Explicit and mixed axis
    types, with and without `jax.set_mesh`. Inside `jax.shard_map`, Manual axes are left
    out of the spec.

    **Arguments:**

    - `x`: an array.
    - `names_or_spec`: a tuple with a logical name for each dimension, for which the
      rules in the plan's `axes` give mesh axes. An `...` in the tuple stands for all
      dimensions that are not sharded. Or a PartitionSpec, whose missing last entries
      count as `None`. `None` in place of both leaves `x` as it is.
    - `plan`: a plan with the mesh, the rules from names to mesh axes (`axes`), and the
      `mode` of the rules, such as "decode", in which names are resolved. The array need
      not be one of its leaves.
    - `strict`: whether to raise if two names have one mesh axis, or the size of a
      dimension is not divisible. If not, such axes are dropped. By default the plan's
      own `strict` holds.
    - `unmatched`: "raise": an error for a name without a rule in the plan, and for a
      mesh axis in a spec that neither the mesh nor `AxisRules(..., mesh_axes=...)`
      knows. "replicate": such names and axes are left out.
    - `explain`: whether to return the [`shardfx.Decision`][] too.

    **Returns:**

    `x` with this sharding. `PartitionSpec()` replicates `x`. For an UNCONSTRAINED
    dimension, the compiler chooses. Inside `jit`, Explicit axes shard a dimension
    before Auto axes. With `explain=True`, a pair of the array and the Decision.

    **Raises:**

    - `RuleError` for names if the plan has no `axes`.
    - `UnmatchedError` for a name without a rule.
    - `SpecError` if there are more or fewer names than dimensions, for an unknown mesh
      axis, and under `strict` if an axis would be dropped.
    - `PlanMismatchError` if `x` is on another mesh. For a plan without devices, also if
      the constraint would have no effect: outside `jit`, and if no argument of the
      compiled function is on the mesh.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        from jax.sharding import PartitionSpec as P
        from shardfx import AxisRules, MeshSpec, constrain, plan

        mesh = MeshSpec({"data": 2, "tensor": 4}).build(jax.devices())
        axes = AxisRules([("batch", "data"), ("mlp", "tensor"), ("embed", None)])
        made = plan({"w": jnp.ones((16, 32))}, mesh, names={"w": ("embed", "mlp")}, axes=axes)

        @jax.jit
        def layer(x):
            return constrain(jnp.tanh(x), ("batch", "mlp"), made)

        assert layer(jnp.ones((8, 32))).sharding.spec == P("data", "tensor")
        _, decision = constrain(jnp.ones((8, 30)), ("batch", "mlp"), made, explain=True)
        print(decision.reasons[0])  # dim 1: size 30 is not divisible by `tensor` (4); ...
        ```
    """
    _require_array(x)
    check_plan("plan", plan, "constrain(x, names, plan)")
    if names_or_spec is None:
        if explain:
            return (x, Decision(PartitionSpec()))
        return x
    if not isinstance(x, Tracer) and is_tracing():
        # A constant of the traced function, which becomes a traced value.
        x = jax.device_put(x)
    mesh = _mesh_of(x, plan)
    # Manual axes are those of a `shard_map` around this call.
    free_axis_types = {
        name: axis_type
        for name, axis_type in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if axis_type != AxisType.Manual
    }
    free_mesh = MeshSpec(
        [(name, mesh.shape[name]) for name in free_axis_types],
        axis_types=free_axis_types,
    )
    if strict is None:
        strict = plan.strict
    decision = decision_for(
        names_or_spec=names_or_spec,
        shape=x.shape,
        plan=plan.content,
        mesh=free_mesh,
        strict=strict,
        unmatched=unmatched,
    )
    if isinstance(x, Tracer):
        decision = _explicit_axes_first(decision, free_axis_types, strict)
        x = _constrained_in_jit(x, decision.spec, mesh, free_axis_types)
    else:
        x = _constrained_outside_jit(x, decision.spec, mesh)
    if explain:
        return (x, decision)
    return x


def _require_array(x: object) -> None:
    """Raises `LeafTypeError` if the first argument of `constrain` is no array."""
    if isinstance(x, jax.Array | np.ndarray):
        return
    if isinstance(x, PartitionSpec | str):
        raise LeafTypeError(
            f"`constrain` takes the array first, and this is {x!r}; write"
            " `constrain(x, names, plan)`."
        )
    if isinstance(x, int | float):
        raise LeafTypeError(
            f"`constrain` takes one array, not {x!r}; a number has nothing to"
            " shard: leave it out, or make it one by `jnp.asarray(...)`."
        )
    raise LeafTypeError(
        f"`constrain` takes one array, not {type(x).__name__}; map it over a tree"
        " with `jax.tree.map`."
    )


def _explicit_axes_first(
    decision: Decision,
    axis_types: dict[str, AxisType],
    strict: bool,
) -> Decision:
    """The decision `decision`, with the mesh axes of each dimension in JAX's order
    inside `jit`: Explicit axes before Auto axes.

    `axis_types` has the type of each mesh axis. Raises `SpecError` under `strict` if
    the order changes.
    """
    entries = []
    reasons = [*decision.reasons]
    for dim, entry in enumerate(entries_of(decision.spec)):
        axes = () if entry is UNCONSTRAINED else entry_axes(entry)
        explicit_first = sorted(
            axes, key=lambda axis: axis_types[axis] != AxisType.Explicit
        )
        if strict and explicit_first != [*axes]:
            raise SpecError(
                f"dim {dim} is to be cut by {axes}, of which JAX puts Explicit axes"
                f" first inside `jit`; write {tuple(explicit_first)}, or give all axes"
                " of the mesh one type."
            )
        if explicit_first != [*axes]:
            what = f"mesh axes {', '.join(f'`{axis}`' for axis in axes)}"
            order = repr(tuple(explicit_first))
            why = reason_for(Code.reordered, dim, axes, what=what, order=order)
            reasons.append(why)
        entries.append(tuple(explicit_first) if axes else entry)
    return Decision(trimmed(entries, decision.spec), tuple(reasons))


def _mesh_of(x: object, plan: ShardPlan) -> Mesh | AbstractMesh:
    """The mesh on which `x` is constrained: its own, or the plan's mesh if `x` has
    none.

    Outside `jit`, a plan's mesh with devices has priority over the mesh of `x`. Inside
    `jit`, a mesh of one device with the plan's axes has priority over both. Raises
    `PlanMismatchError` if the names or sizes of the axes of the two meshes differ.
    """
    plan_mesh = plan.content.any_mesh
    context_mesh = jax.sharding.get_abstract_mesh()
    if context_mesh.size == 1 and context_mesh.axis_names == plan_mesh.axis_names:
        # The step is traced for one device, as `unsharded` traces it.
        return context_mesh
    sharding = sharding_of(x)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        return plan_mesh
    if not isinstance(x, Tracer):
        if plan.jax_mesh is not None:
            return plan_mesh
        return sharding.mesh
    if [*sharding.mesh.shape.items()] != [*plan_mesh.shape.items()]:
        raise PlanMismatchError(
            f"the array lies on a mesh {MeshSpec.of(sharding.mesh)}, but the plan is"
            f" for {plan.mesh}; use the plan that its step was compiled with, or"
            " `reshard` it first."
        )
    # Types within `jit` have no devices. With the plan's own mesh, JAX compares its
    # devices with the program's.
    is_on_plan_mesh = (
        plan.jax_mesh is not None and sharding.mesh == plan.jax_mesh.abstract_mesh
    )
    if is_on_plan_mesh:
        return plan_mesh
    return sharding.mesh


def _spec_over(
    spec: PartitionSpec,
    axes: Sequence[str],
    axis_type: AxisType,
) -> PartitionSpec:
    """The spec without the mesh axes that are not in `axes`. All `axes` have the type
    `axis_type`. Unless it is Auto, UNCONSTRAINED entries become `None`.
    """
    entries: list[Any] = []
    for entry in entries_of(spec):
        if entry is UNCONSTRAINED:
            is_auto = axis_type == AxisType.Auto
            entries.append(entry if is_auto else None)
        else:
            entries.append(tuple(axis for axis in entry_axes(entry) if axis in axes))
    return trimmed(entries)


def _constrained_in_jit(
    x: Any,
    spec: PartitionSpec,
    mesh: Mesh | AbstractMesh,
    axis_types: dict[str, AxisType],
) -> Any:
    """The traced array `x` with the sharding `spec` over `mesh`. `axis_types` has the
    type of each mesh axis that is not Manual.
    """
    # The type of a value may have a mesh because the function closes over an array on
    # it. The program may still run on one device.
    if (
        isinstance(mesh, AbstractMesh)
        and not mesh.manual_axes
        and jax.sharding.get_abstract_mesh().empty
    ):
        # Its lowering raises if the program is for another number of devices.
        x = _meant_for.bind(x, sizes=tuple(mesh.shape.items()))
    # JAX refuses Auto axes in a `reshard`, and Explicit axes in a constraint.
    for axis_type, constraint in (
        (AxisType.Explicit, jax.sharding.reshard),
        (AxisType.Auto, jax.lax.with_sharding_constraint),
    ):
        axes = [name for name in axis_types if axis_types[name] == axis_type]
        if axes:
            spec_over_axes = _spec_over(spec, axes, axis_type)
            x = constraint(x, NamedSharding(mesh, spec_over_axes))
    return x


def _constrained_outside_jit(
    x: Any,
    spec: PartitionSpec,
    mesh: Mesh | AbstractMesh,
) -> Any:
    """An array with the sharding `spec` over `mesh`, outside of `jit`. Raises
    `PlanMismatchError` for a mesh without devices.
    """
    if not isinstance(mesh, Mesh):
        raise PlanMismatchError(
            "outside `jit`, an array can only be constrained on devices. This one, of"
            f" type {type(x).__name__} and shape {x.shape}, lies on no mesh of them,"
            " and the plan has none; use `plan.on(plan.mesh.build(jax.devices()))`."
        )
    memory_kind = None
    if isinstance(x, jax.Array):
        memory_kind = x.sharding.memory_kind
    sharding = NamedSharding(mesh, spec, memory_kind=memory_kind)
    if any(entry is UNCONSTRAINED for entry in entries_of(spec)):
        return jax.lax.with_sharding_constraint(x, sharding)
    return placed([x], [sharding])[0]


# The identity, with the names and sizes of the mesh axes as a parameter.
_meant_for = Primitive("meant_for")


def _lowered_meant_for(
    ctx: Any,
    x: object,
    *,
    sizes: tuple[tuple[str, int], ...],
) -> list[Any]:
    """Lowers the primitive `_meant_for`, whose result is its operand `x`.

    `ctx` is JAX's context of the lowering. `sizes` has the name and size of each axis
    of the mesh on which `x` is constrained. Raises `PlanMismatchError` if the program
    is for another number of devices than this mesh has.
    """
    match ctx.module_context.axis_context:
        # Without devices, as in an export, and inside `shard_map`, there is nothing to
        # compare.
        case object(num_devices=int(count)) if count != math.prod(
            size for _, size in sizes
        ):
            mesh = ",".join(f"{name}={size}" for name, size in sizes)
            raise PlanMismatchError(
                f"an array of shape {ctx.avals_in[0].shape} is constrained on a mesh"
                f" {mesh} without devices, in a program for {plural(count, 'device')},"
                " where that does nothing: no argument lies on the mesh. Use"
                " `plan.on(plan.mesh.build(jax.devices()))`, and place the arguments"
                " first; pass arrays that the function closes over as arguments."
            )
    return [x]


_meant_for.def_impl(lambda x, *, sizes: x)
_meant_for.def_abstract_eval(lambda x, *, sizes: x)
mlir.register_lowering(_meant_for, _lowered_meant_for)
ad.deflinear2(
    _meant_for, lambda cotangent, x, *, sizes: [_meant_for.bind(cotangent, sizes=sizes)]
)
batching.defvectorized(_meant_for)
