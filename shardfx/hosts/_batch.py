"""Global arrays made of the rows that each process loaded."""

from typing import overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, PyTree

from .._ground.errors import PlanMismatchError
from .._ground.spec import entries_of
from .._ground.tree import flatten
from .._plan import LeafPlan, ShardPlan, canonical_dtype


@overload
def global_batch(local: PyTree, plan: ShardPlan, *, pad: None = None) -> PyTree: ...


@overload
def global_batch(local: PyTree, plan: ShardPlan, *, pad: int | float) -> tuple[PyTree, Bool[Array, " rows"]]: ...


def global_batch(local: PyTree, plan: ShardPlan, *, pad: int | float | None = None) -> PyTree:
    """The global arrays of a batch, from the part that each process loaded.

    Every process calls it, with its rows by [`shardfx.hosts.data_layout`][] or [`shardfx.hosts.local_chunk`][], or with
    a whole dimension, of which its part is then taken. No data goes over the network.

    **Arguments:**

    - `local`: a tree of NumPy arrays: what this process's devices will hold between them. On CPUs the result may share
        their memory, as with `jax.device_put`: pass copies if you fill the same buffers again.
    - `plan`: the plan of the global batch, on a mesh of devices.
    - `pad`: the value to fill missing rows (dimension 0) with. Without it, a batch that is too short is an
        error.

    **Returns:**

    The tree of global arrays, sharded as planned; with `pad`, also a mask over the rows of the global batch that is
    `True` for loaded rows. The mask is sharded like the rows.

    **Raises:**

    `PlanMismatchError`, with the leaf, if its shape or dtype is not this process's part of the plan, or if its dtype
    cannot hold `pad`.

    !!! Example

        ```python
        import jax
        import numpy as np
        from jax.sharding import PartitionSpec as P
        from shardfx import hosts, MeshSpec, PathRules, plan

        mesh = MeshSpec({"data": 4, "tensor": 2}).build(jax.devices())
        batch_plan = plan(
            {"x": np.zeros((8, 3), np.float32)}, mesh, paths=PathRules([("x", P("data"))])
        )
        batch, mask = hosts.global_batch({"x": np.ones((7, 3), np.float32)}, batch_plan, pad=0)
        assert batch["x"].shape == (8, 3) and int(mask.sum()) == 7
        ```
    """
    if plan.jax_mesh is None:
        raise PlanMismatchError(
            "the plan has no devices to put a batch on; use `plan.on(plan.mesh.build(jax.devices()))`."
        )
    flat = flatten(local)
    shardings, treedef = jax.tree.flatten(plan.shardings, is_leaf=lambda leaf: leaf is None)
    if flat.treedef != treedef or None in shardings:
        raise PlanMismatchError(
            f"the batch has the leaves {list(flat.paths)}, the plan {[leaf.path for leaf in plan.leaves]}, all "
            "arrays; plan a tree of the batch's structure."
        )
    leaves = [plan[path] for path in flat.paths]
    parts = [_part(leaf.shape, sharding) for leaf, sharding in zip(leaves, shardings, strict=True)]
    arrays, loaded = [], []
    for leaf, array, part in zip(leaves, flat.leaves, parts, strict=True):
        checked = _checked(leaf.path, np.asarray(array), leaf.shape, leaf.dtype, part, pad is not None)
        loaded.append(len(checked) if checked.ndim else 0)
        arrays.append(checked)
    if pad is None:
        return treedef.unflatten(map(_global, arrays, shardings, [leaf.shape for leaf in leaves]))
    rows = _same_rows(leaves, loaded)
    for leaf, array in zip(leaves, arrays, strict=True):
        _check_pad(leaf.path, pad, array.dtype)
    padded = [_padded(array, part, pad) for array, part in zip(arrays, parts, strict=True)]
    batch = treedef.unflatten(map(_global, padded, shardings, [leaf.shape for leaf in leaves]))
    size, entry = leaves[0].shape[0], (*entries_of(leaves[0].spec), None)[0]
    mask = _padded(np.ones(rows, bool), parts[0][:1], False)
    return batch, _global(mask, NamedSharding(plan.jax_mesh, PartitionSpec(entry)), (size,))


def _part(shape: tuple[int, ...], sharding: NamedSharding) -> tuple[int, ...]:
    """The number of elements along each dimension that this process's devices hold."""
    indices = sharding.addressable_devices_indices_map(shape).values()
    out = []
    for dim, size in enumerate(shape):
        ranges = {index[dim].indices(size)[:2] for index in indices if index is not None}
        out.append(sum(stop - start for start, stop in sorted(ranges)))
    return tuple(out)


def _checked(
    path: str, array: np.ndarray, shape: tuple[int, ...], dtype: np.dtype, part: tuple[int, ...], short: bool
) -> np.ndarray:
    if array.dtype != dtype and canonical_dtype(array.dtype) != dtype:
        raise PlanMismatchError(
            f"leaf `{path}` is {array.dtype}, but the plan is for {dtype}; load it as that, or plan the other."
        )
    fits = array.ndim == len(shape) and all(
        size in (mine, whole) for size, mine, whole in zip(array.shape, part, shape, strict=True)
    )
    missing = array.ndim == len(shape) > 0 and array.shape[1:] == part[1:] and len(array) < part[0]
    if not fits and not (missing and short):
        hint = "; pass `pad=0` to fill the missing rows and get a mask" if missing else ""
        raise PlanMismatchError(
            f"leaf `{path}` has shape {array.shape} here, but process {jax.process_index()} owns {part} of "
            f"{shape}; load the part that `hosts.local_chunk` names{hint}."
        )
    return array.astype(dtype, copy=False)


def _same_rows(leaves: list[LeafPlan], loaded: list[int]) -> int:
    first = leaves[0]
    for leaf, rows in zip(leaves, loaded, strict=True):
        entries = [(*entries_of(one.spec), None)[0] for one in (leaf, first)]
        if not leaf.shape or leaf.shape[0] != first.shape[0] or rows != loaded[0] or entries[0] != entries[1]:
            raise PlanMismatchError(
                f"leaf `{leaf.path}` has {rows} rows here of shape {leaf.shape} sharded as {leaf.spec}, but "
                f"leaf `{first.path}` has {loaded[0]} of {first.shape} as {first.spec}; one mask needs the "
                "same rows in all."
            )
    return loaded[0]


def _check_pad(path: str, pad: int | float, dtype: np.dtype) -> None:
    """Raises for a padding value that an integer dtype cannot hold. Floats may round it."""
    is_bool = jnp.issubdtype(dtype, jnp.bool_)
    if not (is_bool or jnp.issubdtype(dtype, jnp.integer)):
        return
    low, high = (0, 1) if is_bool else (int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max))
    if not low <= pad <= high or pad != int(pad):
        raise PlanMismatchError(
            f"leaf `{path}` is {dtype}, which cannot hold `pad={pad}`; pad with an integer from {low} to {high}, or "
            "plan the leaf as floats."
        )


def _padded(array: np.ndarray, part: tuple[int, ...], value: int | float) -> np.ndarray:
    missing = max(part[0] - len(array), 0)
    return np.concatenate([array, np.full((missing, *array.shape[1:]), value, array.dtype)])


def _global(array: np.ndarray, sharding: NamedSharding, shape: tuple[int, ...]) -> jax.Array:
    return jax.make_array_from_process_local_data(sharding, array, shape)
