"""Makes global arrays from the rows that each process loaded."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from .._ground.boxes import boxes_here
from .._ground.errors import PlanMismatchError
from .._ground.misuse import called
from .._ground.spec import entries_at
from .._ground.tree import flatten
from .._plan import LeafPlan, ShardPlan, canonical_dtype, check_plan, require_range
from ._outcome import SharedOutcome


@called("global_batch(local, plan)")
def global_batch(
    local: PyTree,
    plan: ShardPlan,
    *,
    pad: int | float | None = None,
    wait_seconds: float | None = None,
) -> PyTree:
    """The global arrays of a batch, from the part that each process loaded.

    Every process calls `global_batch` with its rows, which
    [`shardfx.hosts.data_layout`][] or [`shardfx.hosts.local_chunk`][] computes. If an
    array has all elements of a dimension, `global_batch` takes this process's part of
    them. No rows are sent over the network.

    By default the processes do not talk. A process with too few rows then raises alone,
    and the others wait for it in their next step. With `wait_seconds` all processes
    raise.

    **Arguments:**

    - `local`: a tree of NumPy arrays: the part of the batch for this process's devices.
      On CPUs the result may share memory with these arrays, as with `jax.device_put`:
      pass copies if you fill the same arrays again.
    - `plan`: the plan of the global batch, on a mesh of devices.
    - `pad`: the value for missing rows (dimension 0). Without `pad`, a batch with too
      few rows is an error.
    - `wait_seconds`: the seconds that a process waits for the others to say whether
      their rows fit; by default it does not ask. Give it on all processes. At each call
      they exchange a short text through JAX's coordination service. Calls with one plan
      come one after the other, not from several threads.

    **Returns:**

    The tree of global arrays, sharded as planned. With `pad`, a pair of the tree and a
    mask over the rows of the global batch, which is `True` for loaded rows and is
    sharded like the rows.

    **Raises:**

    `PlanMismatchError` that names the leaf, if its shape or dtype is not as planned for
    this process, or if the dtype cannot represent `pad` or an
    integer of 64 bits. With `wait_seconds` also if
    another process fails or does not call `global_batch` in time; the error names it.

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
    check_plan("plan", plan, "global_batch(local, plan)")
    if plan.jax_mesh is None:
        raise PlanMismatchError(
            "the plan has no devices to put a batch on; use"
            " `plan.on(plan.mesh.build(jax.devices()))`."
        )
    process = jax.process_index()
    if all(device.process_index != process for device in plan.jax_mesh.devices.flat):
        raise PlanMismatchError(
            f"process {process} owns no device of the plan's mesh; call `global_batch` on"
            " the processes that do, or plan the batch on a mesh of all devices."
        )
    if wait_seconds is None:
        outcome = contextlib.nullcontext()
    else:
        outcome = SharedOutcome(plan, wait_seconds)
    with outcome:
        return _global_batch(local, plan, pad)


def _global_batch(local: PyTree, plan: ShardPlan, pad: int | float | None) -> PyTree:
    """What `global_batch` returns, from this process's rows alone."""
    assert plan.jax_mesh is not None
    flat = flatten(local)
    shardings, treedef = jax.tree.flatten(
        plan.shardings, is_leaf=lambda leaf: leaf is None
    )
    if flat.treedef != treedef or None in shardings:
        raise PlanMismatchError(
            f"the batch has the leaves {list(flat.paths)}, the plan"
            f" {[leaf.path for leaf in plan.leaves]}, all arrays; plan a tree of the"
            " batch's structure."
        )
    leaves = [plan[path] for path in flat.paths]
    # The shape of this process's part of each array.
    part_shapes = [
        _local_shape(leaf.shape, sharding)
        for leaf, sharding in zip(leaves, shardings, strict=True)
    ]
    arrays = []
    for leaf, array, part_shape in zip(leaves, flat.leaves, part_shapes, strict=True):
        arrays.append(_checked(leaf, np.asarray(array), part_shape, pad))
    shapes = [leaf.shape for leaf in leaves]
    # Without `pad` no rows are missing.
    if pad is None:
        return treedef.unflatten(
            map(jax.make_array_from_process_local_data, shardings, arrays, shapes)
        )
    _require_same_rows(leaves, arrays)
    padded = []
    for array, part_shape in zip(arrays, part_shapes, strict=True):
        padded.append(_padded(array, part_shape, pad))
    batch = treedef.unflatten(
        map(jax.make_array_from_process_local_data, shardings, padded, shapes)
    )
    first_entry = entries_at(leaves[0].spec, 1)
    rows = NamedSharding(plan.jax_mesh, PartitionSpec(*first_entry))
    is_loaded = np.ones(len(arrays[0]), bool)
    mask = _padded(is_loaded, part_shapes[0], False)
    return batch, jax.make_array_from_process_local_data(rows, mask, shapes[0][:1])


def _local_shape(shape: tuple[int, ...], sharding: NamedSharding) -> tuple[int, ...]:
    """The shape of the part of an array of `shape` that this process's devices hold
    under `sharding`. Along each dimension it has the elements of all their shards, which
    need not be adjacent.
    """
    sizes = []
    boxes = boxes_here(sharding, shape)
    for intervals in zip(*boxes.values(), strict=True):
        sizes.append(sum(stop - start for start, stop in set(intervals)))
    return tuple(sizes)


def _checked(
    leaf: LeafPlan,
    array: np.ndarray,
    part_shape: tuple[int, ...],
    pad: int | float | None,
) -> np.ndarray:
    """`array`, which this process loaded, cast to the dtype of its plan `leaf`.

    `part_shape` is the shape of this process's part. Raises `PlanMismatchError` for
    another dtype, for integers and a `pad` that the dtype cannot represent, and for a
    dimension whose size is neither that of the part nor that of the global batch. With
    `pad`, rows may be missing.
    """
    shape = leaf.shape
    dtype = leaf.dtype
    if array.dtype != dtype and canonical_dtype(array.dtype) != dtype:
        raise PlanMismatchError(
            f"leaf `{leaf.path}` is {array.dtype}, but the plan is for {dtype}; load it"
            " as that, or plan the other."
        )
    if array.dtype != dtype:
        require_range(leaf.path, array, dtype)
    lacks_rows = (
        array.ndim == len(shape) > 0
        and array.shape[1:] == part_shape[1:]
        and len(array) < part_shape[0]
    )
    fits = _fits(array.shape, part_shape, shape)
    if not fits and (pad is None or not lacks_rows):
        hint = ""
        if lacks_rows:
            hint = "; pass `pad=0` to fill the missing rows and get a mask"
        raise PlanMismatchError(
            f"leaf `{leaf.path}` has shape {array.shape} here, but process"
            f" {jax.process_index()} owns {part_shape} of {shape}; load the part that"
            f" `hosts.local_chunk` names{hint}."
        )
    is_bool = jnp.issubdtype(dtype, jnp.bool_)
    if pad is not None and (is_bool or jnp.issubdtype(dtype, jnp.integer)):
        low = 0
        high = 1
        if not is_bool:
            low = int(jnp.iinfo(dtype).min)
            high = int(jnp.iinfo(dtype).max)
        if not low <= pad <= high or pad != int(pad):
            raise PlanMismatchError(
                f"leaf `{leaf.path}` is {dtype}, which cannot hold `pad={pad}`; pad"
                f" with an integer from {low} to {high}, or plan the leaf as floats."
            )
    return array.astype(dtype, copy=False)


def _fits(
    loaded_shape: tuple[int, ...],
    part_shape: tuple[int, ...],
    shape: tuple[int, ...],
) -> bool:
    """Whether an array of `loaded_shape` has, along each dimension, as many elements as
    this process's part or as the global array of `shape`.
    """
    if len(loaded_shape) != len(shape):
        return False
    sizes = zip(loaded_shape, part_shape, shape, strict=True)
    for size, part_size, whole_size in sizes:
        if size not in (part_size, whole_size):
            return False
    return True


def _require_same_rows(leaves: list[LeafPlan], arrays: list[np.ndarray]) -> None:
    """Raises `PlanMismatchError` unless all leaves have the same rows on this process,
    so that one mask fits all.

    `arrays` are the arrays that this process loaded, one per leaf.
    """
    # A text for each kind of rows: how many are here, how many the batch has, and over
    # which mesh axes they are sharded.
    texts: dict[object, str] = {}
    for leaf, array in zip(leaves, arrays, strict=True):
        text = (
            f"leaf `{leaf.path}` has shape {array.shape} here, of {leaf.shape} sharded"
            f" as {leaf.spec}"
        )
        rows = (array.shape[:1], leaf.shape[:1], entries_at(leaf.spec, 1))
        texts.setdefault(rows, text)
    if len(texts) > 1 or not leaves[0].shape:
        raise PlanMismatchError(
            "one mask needs the same rows in all leaves, but"
            f" {' and '.join(texts.values())}."
        )


def _padded(array: np.ndarray, part: tuple[int, ...], value: int | float) -> np.ndarray:
    """`array` with rows of `value` behind its own, up to the rows of `part`."""
    missing_rows = max(part[0] - len(array), 0)
    padding_shape = (missing_rows, *array.shape[1:])
    padding = np.full(padding_shape, value, array.dtype)
    return np.concatenate([array, padding])
