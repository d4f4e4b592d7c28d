"""Puts arrays on the devices of a plan, gathers arrays to the host, reads their
shardings, and clears the caches of the package.
"""

import functools as ft
import sys
from typing import Any, TypeVar, overload

import jax
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
)
from jaxtyping import PyTree

from .._ground.errors import LeafTypeError, PlanMismatchError
from .._ground.keys import as_keys, is_key, raw
from .._ground.misuse import called
from .._ground.purity import is_tracing
from .._ground.spec import canonical
from .._ground.tree import Flat, flatten
from .._plan import ShardPlan, check_plan, named_sharding, rows_of, shardings_of_leaves
from .._rules import axes_of_target
from .constraint import constrain, placed
from .given import sharding_of


T = TypeVar("T")


@overload
def shard(tree: np.ndarray, plan: ShardPlan) -> jax.Array: ...


@overload
def shard(tree: T, plan: ShardPlan) -> T: ...


@called("shard(tree, plan)")
def shard(tree: object, plan: ShardPlan) -> PyTree:
    """Puts every array of a tree on the devices of the plan, sharded as planned, on one
    process or many.

    Inside `jax.jit`, where arrays cannot be moved, `shard` constrains every array, as
    [`shardfx.constrain`][] does.

    **Arguments:**

    - `tree`: the planned tree, of JAX or NumPy arrays. Leaves that are no arrays may be
      missing in it. On many processes, a NumPy array and an array of one process must
      be the whole array, equal on all processes; each process copies its shards from
      it. On CPUs the result may share memory with a NumPy array, as with
      `jax.device_put`: pass `array.copy()` if you fill the array again.
    - `plan`: the plan of the tree, on a mesh of devices. Inside `jax.jit` the plan may
      have no devices if an argument of the compiled function is on its mesh.

    **Returns:**

    The tree with sharded arrays. Leaves that are no arrays are returned unchanged.

    **Raises:**

    `PlanMismatchError` if the tree is not the planned one or the plan has no devices.
    No array has been moved then.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        from shardfx import MeshSpec, PathRules, plan, shard

        tree = {"w": jnp.arange(64.0).reshape(8, 8)}
        mesh = MeshSpec({"data": 8}).build(jax.devices())
        made = plan(tree, mesh, paths=PathRules.parse("w->data"))
        assert shard(tree, made)["w"].addressable_shards[0].data.shape == (1, 8)
        ```
    """
    check_plan("plan", plan, "shard(tree, plan)")
    flat = flatten(tree)
    if is_tracing() or any(isinstance(leaf, Tracer) for leaf in flat.leaves):
        return jax.tree.unflatten(flat.treedef, _constrained(flat, plan))
    shardings = shardings_of_leaves(plan, flat)
    leaves = list(flat.leaves)
    for path, leaf in zip(flat.paths, leaves, strict=True):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise LeafTypeError(
                f"leaf `{path}` is a ShapeDtypeStruct, which has no values to put on"
                " devices; make the arrays there, `filter_jit(make,"
                " out_shardings=plan)(key)`, or load them, `checkpoint.load(path, plan)`."
            )
    array_positions = [
        position
        for position, is_array in enumerate(flat.is_array)
        if is_array and shardings[position] is not None
    ]
    for position, array in zip(
        array_positions,
        placed(
            [leaves[position] for position in array_positions],
            [shardings[position] for position in array_positions],
        ),
        strict=True,
    ):
        leaves[position] = array
    return jax.tree.unflatten(flat.treedef, leaves)


@overload
def gather(tree: jax.Array) -> np.ndarray: ...


@overload
def gather(tree: T) -> T: ...


@called("gather(tree)")
def gather(tree: object) -> PyTree:
    """The tree with every array as a whole array on the host, on one process or many.

    **Arguments:**

    - `tree`: any tree. On many processes, all processes must call `gather`.

    **Returns:**

    The tree with NumPy arrays in the place of JAX arrays. PRNG keys, which NumPy cannot
    hold, are JAX arrays on one device. Leaves that are no arrays are returned
    unchanged.

    **Raises:**

    `LeafTypeError` inside `jax.jit`, where arrays have no values yet, and for an array
    that was deleted.

    !!! Example

        ```python
        import jax.numpy as jnp
        from shardfx import gather

        assert gather({"w": jnp.ones(3)})["w"].tolist() == [1.0, 1.0, 1.0]
        ```
    """
    if isinstance(tree, ShardPlan):
        raise LeafTypeError(
            "`gather` takes arrays, and a plan has none; write `gather(tree)`."
        )
    return jax.tree_util.tree_map_with_path(_gathered_leaf, tree)


def _constrained(flat: Flat, plan: ShardPlan) -> list[Any]:
    """The leaves of a traced tree. Each array is constrained to its sharding in the
    plan.
    """
    leaves = list(flat.leaves)
    for position, row_number in enumerate(rows_of(plan.content, flat)):
        # Leaves that are no arrays have the number -1.
        if row_number >= 0:
            row = plan.content.rows[row_number]
            leaves[position] = constrain(leaves[position], row.spec, plan, strict=True)
            if row.memory_kind is not None:
                sharding = named_sharding(
                    plan.content.any_mesh, row.spec, row.memory_kind
                )
                leaves[position] = jax.device_put(leaves[position], sharding)
    return leaves


def _gathered_leaf(path: Any, leaf: object) -> Any:
    """A leaf of the tree that `gather` returns. Raises `LeafTypeError` for a leaf
    without values.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise LeafTypeError(
            f"{_array_text(path)} is a ShapeDtypeStruct, which has no values to gather;"
            " make the arrays first."
        )
    if isinstance(leaf, Tracer):
        raise LeafTypeError(
            f"{_array_text(path)}, {leaf.dtype}{list(leaf.shape)}, is traced: inside"
            " `jax.jit` it has no values that could be brought to the host. Gather"
            " what the function returns; to have an array whole on every device"
            " inside, use `constrain(x, PartitionSpec(), plan)`."
        )
    if isinstance(leaf, jax.Array):
        if leaf.is_deleted():
            raise LeafTypeError(
                f"{_array_text(path)}, {leaf.dtype}{list(leaf.shape)}, was deleted, or"
                " donated to a call, and has no values to gather; gather what that call"
                " returned."
            )
        return _gathered(leaf)
    return leaf


def _gathered(leaf: jax.Array) -> Any:
    """A whole array on the host. PRNG keys stay a JAX array."""
    if is_key(leaf.dtype):
        return as_keys(_gathered(raw(leaf)), leaf)
    if leaf.is_fully_addressable or leaf.is_fully_replicated:
        return np.asarray(leaf)
    return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))


_CACHED = type(ft.lru_cache(len))
_JITTED = type(jax.jit(len))


def clear_caches() -> None:
    """Clears all caches of the package, and with them the references to devices, meshes
    and programs.

    Call `clear_caches` after devices were lost, or between tests: the package then
    keeps no device alive. JAX has caches of its own, which `jax.clear_caches()` clears;
    they hold the programs of [`shardfx.filter_jit`][]. Results do not change, since
    plans and programs are made again if they are needed.

    !!! Example

        ```py
        import jax
        import shardfx

        shardfx.clear_caches()
        jax.clear_caches()
        ```
    """
    package = __name__.partition(".")[0]
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == package
    ]
    values: list[object] = []
    for module in modules:
        values += vars(module).values()
    for value in values:
        if isinstance(value, _CACHED):
            value.cache_clear()
        elif isinstance(value, _JITTED):
            value.clear_cache()  # pyright: ignore[reportAttributeAccessIssue]


@called("specs_of(tree)")
def specs_of(tree: object) -> Any:
    """The PartitionSpec of every array of a tree, in canonical form (without trailing
    `None`s and one-element tuples).

    **Arguments:**

    - `tree`: any tree of arrays or ShapeDtypeStructs. Inside `jax.jit`, traced arrays
      must be on Explicit axes.

    **Returns:**

    The tree with a PartitionSpec for each array, and `None` for leaves that are no
    arrays. NumPy arrays, structs without a sharding and arrays of rank 0 have
    `PartitionSpec()`.

    **Raises:**

    `LeafTypeError` for a JAX array on one device, or one that is sharded without a
    mesh, since it has no PartitionSpec; for a traced array on Auto axes, whose sharding
    the compiler chooses; and for a plan.
    """

    if isinstance(tree, ShardPlan):
        raise LeafTypeError(
            "`specs_of` takes arrays, and a plan has none; write `plan.specs`."
        )

    def spec(path: object, leaf: object) -> PartitionSpec | None:
        """The PartitionSpec of a leaf; `None` for what is no array."""
        sharding = known_sharding(path, leaf)
        if isinstance(sharding, NamedSharding):
            return canonical(sharding.spec)
        if isinstance(leaf, jax.Array) and leaf.ndim:
            raise LeafTypeError(
                f"{_array_text(path)}, shape {leaf.shape}, lies on {sharding}, which"
                " has no PartitionSpec; place it with `shard(tree, plan)`, or use"
                " `shardings_of`."
            )
        if isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
            return PartitionSpec()
        return None

    return jax.tree_util.tree_map_with_path(spec, tree)


@called("shardings_of(tree)")
def shardings_of(tree: object, mesh: Mesh | None = None) -> Any:
    """The Sharding of every leaf of a tree.

    **Arguments:**

    - `tree`: any tree; its leaves may be arrays, ShapeDtypeStructs, Shardings or
      PartitionSpecs.
    - `mesh`: the mesh of the PartitionSpecs in the tree; needed only if there are any.

    **Returns:**

    The tree with a Sharding for each leaf that has one, and `None` for the others.

    **Raises:**

    `PlanMismatchError` for a PartitionSpec without `mesh` or with a mesh axis that the
    mesh lacks, or with a `mesh` of another type. `LeafTypeError` for a traced
    array on Auto axes.
    """

    def sharding(path: object, leaf: object) -> Sharding | None:
        """The Sharding of a leaf; `None` if it has none."""
        if not isinstance(leaf, PartitionSpec):
            if isinstance(leaf, Sharding):
                return leaf
            return known_sharding(path, leaf)
        if mesh is None:
            raise PlanMismatchError(
                f"the tree holds the bare spec {leaf}; pass the mesh that it is for:"
                " `mesh=`."
            )
        if not isinstance(mesh, Mesh | AbstractMesh):
            raise PlanMismatchError(
                f"`mesh` is a JAX mesh, not {type(mesh).__name__}; write"
                " `shardings_of(tree, mesh=spec.build(jax.devices()))` for a MeshSpec"
                " `spec`."
            )
        missing_axes = [
            axis for axis in axes_of_target(leaf) if axis not in mesh.axis_names
        ]
        if missing_axes:
            raise PlanMismatchError(
                f"the tree holds the spec {leaf}, and the mesh has no axis"
                f" {missing_axes[0]!r}; it has {mesh.axis_names}."
            )
        return NamedSharding(mesh, leaf)

    return jax.tree_util.tree_map_with_path(sharding, tree)


def known_sharding(path: object, leaf: object) -> Sharding | None:
    """The sharding of an array or ShapeDtypeStruct; `None` if it has none.

    Raises `LeafTypeError`, which names the leaf's `path`, for a traced array on Auto
    axes: the compiler chooses its sharding.
    """
    sharding = sharding_of(leaf)
    if isinstance(leaf, Tracer) and leaf.ndim and isinstance(sharding, NamedSharding):
        mesh = sharding.mesh
        auto_axes = [
            name
            for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
            if kind == AxisType.Auto and mesh.shape[name] > 1
        ]
        if auto_axes:
            raise LeafTypeError(
                f"{_array_text(path)}, shape {leaf.shape}, is traced on a mesh with the"
                f" Auto axes {tuple(auto_axes)}: the compiler chooses how they cut it,"
                " and has not yet. Look at what the compiled function returns; or use Explicit"
                " axes, which are in the type."
            )
    return sharding


def _array_text(path: Any) -> str:
    """The name of an array in messages, from its path in JAX's form."""
    where = jax.tree_util.keystr(path, simple=True, separator="/")
    if where:
        return f"array `{where}`"
    return "the array"
