"""Arrays onto the devices of a plan, and back as whole arrays: `shard` and `gather`."""

from typing import Any, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils

from .._ground.errors import LeafTypeError
from .._ground.tree import Flat, flatten
from .._plan import Row, ShardPlan, check_plan, named_sharding, rows_of, shardings_of_leaves
from .constraint import constrain, is_tracing, placed


T = TypeVar("T")


@overload
def shard(tree: np.ndarray, plan: ShardPlan) -> jax.Array: ...


@overload
def shard(tree: T, plan: ShardPlan) -> T: ...


def shard(tree: object, plan: ShardPlan) -> Any:
    """Puts every array of a tree where the plan says: the same on one process and on many.

    Inside `jax.jit`, where nothing can be put anywhere, it constrains every array, as [`shardfx.constrain`][] does.

    **Arguments:**

    - `tree`: the planned tree, of JAX or NumPy arrays; leaves that are no arrays may be missing in it. On many
        processes, NumPy arrays and arrays that one process holds must be the whole array, equal on all; each process
        copies its shards out of it. On CPUs the result may share memory with a NumPy array, as with `jax.device_put`:
        pass `array.copy()` if you fill the array again.
    - `plan`: its plan, on a jax Mesh; inside `jax.jit` any, if an argument lies on its mesh.

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
        made = plan(
            tree, MeshSpec({"data": 8}).build(jax.devices()), paths=PathRules.parse("w->data")
        )
        assert shard(tree, made)["w"].addressable_shards[0].data.shape == (1, 8)
        ```
    """
    check_plan("plan", plan)
    flat = flatten(tree)
    if is_tracing() or any(isinstance(leaf, Tracer) for leaf in flat.leaves):
        return jax.tree.unflatten(flat.treedef, _constrained(flat, plan))
    shardings = shardings_of_leaves(plan, flat)
    leaves = list(flat.leaves)
    moved = [
        at
        for at, (sharding, shaped) in enumerate(zip(shardings, flat.is_array, strict=True))
        if shaped and sharding is not None
    ]
    for at, array in zip(moved, placed([leaves[at] for at in moved], [shardings[at] for at in moved]), strict=True):
        leaves[at] = array
    return jax.tree.unflatten(flat.treedef, leaves)


@overload
def gather(tree: jax.Array) -> np.ndarray: ...


@overload
def gather(tree: T) -> T: ...


def gather(tree: object) -> Any:
    """Brings every array of a tree whole to the host: the same on one process and on many.

    **Arguments:**

    - `tree`: any tree. On many processes, all must call this.

    **Returns:**

    The tree with NumPy arrays in the place of JAX arrays; PRNG keys, which NumPy cannot hold, as JAX arrays on one
    device. Leaves that are no arrays come back as they are.

    **Raises:**

    `LeafTypeError` inside `jax.jit`, where no array has values yet.

    !!! Example

        ```python
        import jax.numpy as jnp
        from shardfx import gather

        assert gather({"w": jnp.ones(3)})["w"].tolist() == [1.0, 1.0, 1.0]
        ```
    """
    return jax.tree_util.tree_map_with_path(_gathered_leaf, tree)


def _constrained(flat: Flat, plan: ShardPlan) -> list[Any]:
    """The leaves of a tree that is traced; the index of rows is -1 at leaves that are no arrays."""
    rows = plan.content.rows
    pairs = zip(flat.leaves, rows_of(plan.content, flat), strict=True)
    return [leaf if i < 0 else _constrained_leaf(leaf, rows[i], plan) for leaf, i in pairs]


def _constrained_leaf(leaf: object, row: Row, plan: ShardPlan) -> Any:
    x = constrain(leaf, row.spec, plan, strict=True)
    if row.memory_kind is None:
        return x
    return jax.device_put(x, named_sharding(plan.content.any_mesh, row.spec, row.memory_kind))


def _gathered_leaf(path: Any, leaf: object) -> Any:
    if isinstance(leaf, Tracer):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        raise LeafTypeError(
            f"{f'leaf `{name}`' if name else 'the array'}, {leaf.dtype}{list(leaf.shape)}, is traced: inside `jax.jit` "
            "it has no values that could be brought to the host. Gather what the function returns; to have an array "
            "whole on every device inside, use `constrain(x, PartitionSpec(), plan)`."
        )
    return _gathered(leaf) if isinstance(leaf, jax.Array) else leaf


def _gathered(leaf: jax.Array) -> Any:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(_gathered(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
    if leaf.is_fully_addressable or leaf.is_fully_replicated:
        return np.asarray(leaf)
    return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
