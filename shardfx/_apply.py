"""Arrays under a plan: placing them, constraining them, and reading back how they are placed."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from ._content import check_columns, named_sharding
from ._correct import correct
from ._errors import LeafTypeError, PlanMismatchError, RuleError, SpecError
from ._mesh import MeshSpec
from ._plan import ShardPlan, check_plan
from ._rules import check_rank, resolve, units_of
from ._spec import UNCONSTRAINED, canonical, entries_of, entry_axes, trimmed
from ._tree import flatten


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


def shard(tree: Any, plan: ShardPlan) -> Any:
    """Puts every array of a tree where the plan says: the same on one process and on many.

    **Arguments:**

    - `tree`: the planned tree, of JAX or NumPy arrays. On many processes, NumPy arrays and arrays that one process
        holds must be the whole array, equal on all; each process copies its shards out of it.
    - `plan`: its plan, on a jax Mesh.

    **Returns:**

    The tree with sharded arrays. Leaves that are no arrays come back as they are.

    **Raises:**

    `PlanMismatchError` before anything is moved, if the tree is not the planned one or the plan has no devices.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        from shardfx import MeshSpec, PathRules, plan, shard

        tree = {"w": jnp.arange(64.0).reshape(8, 8)}
        made = plan(tree, MeshSpec({"data": 8}).build(jax.devices()), paths=PathRules.parse("w->data"))
        assert shard(tree, made)["w"].addressable_shards[0].data.shape == (1, 8)
        ```
    """
    check_plan("plan", plan)
    flat = flatten(tree)
    check_columns(plan.content, flat.paths, flat.leaves, flat.is_array)
    shardings = devices_shardings(plan)
    placed = list(flat.leaves)
    moved = [
        at
        for at, (sharding, shaped) in enumerate(zip(shardings, flat.is_array, strict=True))
        if shaped and sharding is not None
    ]
    for at, array in zip(moved, _placed([placed[at] for at in moved], [shardings[at] for at in moved]), strict=True):
        placed[at] = array
    return jax.tree.unflatten(flat.treedef, placed)


def gather(tree: Any) -> Any:
    """Brings every array of a tree whole to the host: the same on one process and on many.

    **Arguments:**

    - `tree`: any tree. On many processes, all must call this.

    **Returns:**

    The tree with NumPy arrays in the place of JAX arrays; PRNG keys, which NumPy cannot hold, as JAX arrays on one
    device. Leaves that are no arrays come back as they are.

    !!! Example

        ```python
        import jax.numpy as jnp
        from shardfx import gather

        assert gather({"w": jnp.ones(3)})["w"].tolist() == [1.0, 1.0, 1.0]
        ```
    """
    return jax.tree.map(lambda leaf: _gathered(leaf) if isinstance(leaf, jax.Array) else leaf, tree)


def specs_of(tree: Any) -> Any:
    """The PartitionSpec of every array of a tree, in canonical form.

    **Arguments:**

    - `tree`: any tree of arrays or ShapeDtypeStructs; inside `jax.jit`, of traced ones.

    **Returns:**

    The tree with a PartitionSpec at each array, `PartitionSpec()` for NumPy arrays, structs without a sharding and
    arrays of rank 0, and `None` at leaves that are no arrays.

    **Raises:**

    `LeafTypeError` for a JAX array that lies on one device, or is sharded without a mesh: it has no PartitionSpec.
    """

    def spec(path: Any, leaf: Any) -> PartitionSpec | None:
        sharding = sharding_of(leaf)
        if isinstance(sharding, NamedSharding):
            return canonical(sharding.spec)
        if isinstance(leaf, jax.Array) and leaf.ndim:
            raise LeafTypeError(
                f"array `{jax.tree_util.keystr(path, simple=True, separator='/')}`, shape {leaf.shape}, lies on "
                f"{sharding}, which has no PartitionSpec; place it with `shard(tree, plan)`, or use `shardings_of`."
            )
        return PartitionSpec() if isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct) else None

    return jax.tree_util.tree_map_with_path(spec, tree)


def shardings_of(tree: Any, mesh: Mesh | None = None) -> Any:
    """The Sharding of every leaf of a tree that has one.

    **Arguments:**

    - `tree`: any tree; its leaves may be arrays, ShapeDtypeStructs, Shardings or PartitionSpecs.
    - `mesh`: the mesh for bare PartitionSpecs; needed only if there are any.

    **Returns:**

    The tree with a Sharding at each such leaf, and `None` at all others.

    **Raises:**

    `PlanMismatchError` for a bare PartitionSpec without `mesh`.
    """

    def sharding(leaf: Any) -> Sharding | None:
        if not isinstance(leaf, PartitionSpec):
            return leaf if isinstance(leaf, Sharding) else sharding_of(leaf)
        if mesh is None:
            raise PlanMismatchError(f"the tree holds the bare spec {leaf}; pass the mesh that it is for: `mesh=`.")
        return NamedSharding(mesh, leaf)

    return jax.tree.map(sharding, tree)


def sharding_of(leaf: Any) -> Sharding | None:
    """The sharding of an array or struct; of a traced array the one in its type."""
    if isinstance(leaf, Tracer):
        return jax.typeof(leaf).sharding
    return leaf.sharding if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) else None


def devices_shardings(plan: ShardPlan) -> list[Any]:
    """The sharding of each leaf of the planned tree on the plan's devices, `None` at leaves that are no arrays."""
    if plan.jax_mesh is None:
        raise PlanMismatchError(
            f"the plan is for the mesh {plan.mesh} and has no devices; use `plan.on(plan.mesh.build(jax.devices()))`."
        )
    rows = [named_sharding(plan.jax_mesh, row.spec, row.memory_kind) for row in plan.content.rows]
    table = [*rows, None]
    return [table[i] for i in plan.content.index]


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
    return _placed([x], [sharding])[0]


def _placed(leaves: list[Any], shardings: list[Any]) -> list[Any]:
    if all(sharding.is_fully_addressable for sharding in shardings):
        return jax.device_put(leaves, shardings)
    return [_placed_across(leaf, sharding) for leaf, sharding in zip(leaves, shardings, strict=True)]


def _placed_across(leaf: Any, sharding: NamedSharding) -> Any:
    """One array on a mesh of several processes, from one that is global already or whole on each process."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = _placed_across(jax.random.key_data(leaf), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    whole = np.asarray(leaf)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def _gathered(leaf: jax.Array) -> Any:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(_gathered(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
    if leaf.is_fully_addressable or leaf.is_fully_replicated:
        return np.asarray(leaf)
    return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
