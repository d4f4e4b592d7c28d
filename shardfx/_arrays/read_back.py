"""How the arrays of a tree are sharded now, as specs and as shardings."""

from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from .._ground.errors import LeafTypeError, PlanMismatchError
from .._ground.spec import canonical


def specs_of(tree: object) -> Any:
    """The PartitionSpec of every array of a tree, in canonical form.

    **Arguments:**

    - `tree`: any tree of arrays or ShapeDtypeStructs; inside `jax.jit`, of traced ones on Explicit axes.

    **Returns:**

    The tree with a PartitionSpec at each array, `PartitionSpec()` for NumPy arrays, structs without a sharding and
    arrays of rank 0, and `None` at leaves that are no arrays.

    **Raises:**

    `LeafTypeError` for a JAX array that lies on one device, or is sharded without a mesh: it has no PartitionSpec.
    For a traced array on Auto axes, too: how they cut it is for the compiler to choose.
    """

    def spec(path: object, leaf: object) -> PartitionSpec | None:
        sharding = known_sharding(path, leaf)
        if isinstance(sharding, NamedSharding):
            return canonical(sharding.spec)
        if isinstance(leaf, jax.Array) and leaf.ndim:
            raise LeafTypeError(
                f"{_name(path)}, shape {leaf.shape}, lies on "
                f"{sharding}, which has no PartitionSpec; place it with `shard(tree, plan)`, or use `shardings_of`."
            )
        return PartitionSpec() if isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct) else None

    return jax.tree_util.tree_map_with_path(spec, tree)


def shardings_of(tree: object, mesh: Mesh | None = None) -> Any:
    """The Sharding of every leaf of a tree that has one.

    **Arguments:**

    - `tree`: any tree; its leaves may be arrays, ShapeDtypeStructs, Shardings or PartitionSpecs.
    - `mesh`: the mesh for bare PartitionSpecs; needed only if there are any.

    **Returns:**

    The tree with a Sharding at each such leaf, and `None` at all others.

    **Raises:**

    `PlanMismatchError` for a bare PartitionSpec without `mesh`. `LeafTypeError` for a traced array on Auto axes.
    """

    def sharding(path: object, leaf: object) -> Sharding | None:
        if not isinstance(leaf, PartitionSpec):
            return leaf if isinstance(leaf, Sharding) else known_sharding(path, leaf)
        if mesh is None:
            raise PlanMismatchError(f"the tree holds the bare spec {leaf}; pass the mesh that it is for: `mesh=`.")
        return NamedSharding(mesh, leaf)

    return jax.tree_util.tree_map_with_path(sharding, tree)


def known_sharding(path: object, leaf: object) -> Sharding | None:
    """The sharding of an array or struct; raises where the type of a traced one does not say it."""
    sharding = sharding_of(leaf)
    if isinstance(leaf, Tracer) and leaf.ndim and isinstance(sharding, NamedSharding):
        mesh = sharding.mesh
        autos = [name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Auto]
        if any(mesh.shape[name] > 1 for name in autos):
            raise LeafTypeError(
                f"{_name(path)}, shape {leaf.shape}, is traced on a "
                f"mesh with the Auto axes {tuple(autos)}: the compiler chooses how they cut it, and has not yet. Look "
                "at what the compiled function returns; or use Explicit axes, which are in the type."
            )
    return sharding


def _name(path: Any) -> str:
    where = jax.tree_util.keystr(path, simple=True, separator="/")
    return f"array `{where}`" if where else "the array"


def sharding_of(leaf: object) -> Sharding | None:
    """The sharding of an array or struct; of a traced array the one in its type."""
    if isinstance(leaf, Tracer):
        return jax.typeof(leaf).sharding
    return leaf.sharding if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) else None
