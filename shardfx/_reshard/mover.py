"""Moving a tree of arrays: which leaves go together, in which order, and how much is under way at a time."""

import contextlib
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, SupportsIndex, TypedDict, TypeVar, Unpack, overload

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from .._convert import TreeMap
from .._ground.errors import LeafTypeError, MoveError, SpecError
from .._ground.tree import tree_paths
from .destinations import is_array, leaf_name, lost_devices, targets
from .flight import Job, carried_out, require_room
from .job import job_of, job_through, journey_of, naming
from .traced import traced


T = TypeVar("T")


class MoveOptions(TypedDict, total=False):
    """The options of `reshard`."""

    src: Any
    memory_limit_bytes: SupportsIndex | None
    donate: bool
    lost: Iterable[Any]


@overload
def reshard(tree: Any, dst: Any, *, map: TreeMap, **options: Unpack[MoveOptions]) -> Any: ...


@overload
def reshard(tree: np.ndarray, dst: Any, *, map: None = None, **options: Unpack[MoveOptions]) -> jax.Array: ...


@overload
def reshard(tree: T, dst: Any, *, map: None = None, **options: Unpack[MoveOptions]) -> T: ...


def reshard(
    tree: object,
    dst: object,
    *,
    src: object = None,
    map: TreeMap | None = None,
    memory_limit_bytes: SupportsIndex | None = None,
    donate: bool = False,
    lost: Iterable[object] = (),
) -> PyTree:
    """Moves the arrays of a tree to other shardings: other specs, meshes, devices, processes or memory.

    Live arrays go in groups: all leaves of one shape, dtype and pair of shardings share a program. Leaves that are
    where they should be are not touched. Only so much is under way at a time. Over the same devices an array takes
    the steps of [`shardfx.plan_reshard`][]. To other devices, and between devices that this process's CPU plays, each
    shard is put together from the shards that overlap it. No device ever holds a whole array that it was not asked to
    hold.

    Inside `jax.jit` (and `grad`, `checkpoint`, `scan`) traced arrays are moved over the devices of the program. What
    such a function returns lies as its `out_shardings` say; without them XLA may gather it.

    On many processes all those that own devices of either side have to call this, with trees of one structure; arrays
    on other processes' devices have no addressable shards here, before or afterwards.

    **Arguments:**

    - `tree`: any tree. Leaves that are no arrays come back as they are; NumPy arrays are put on the devices. On CPUs
        the result may share memory with a NumPy array, as with `jax.device_put`: pass `array.copy()` if you fill it
        again.
    - `dst`: a plan on a jax Mesh, a sharding for all arrays, or a tree (or prefix) of shardings; `None` leaves what is
        below it alone.
    - `map`: how the arrays of another tree are made of these, where `dst` is not a plan of this tree: a
        [`shardfx.TreeMap`][]. Then `dst` is a plan, or a tree of structs with shardings. What is put together is cut on
        the devices that have it, so that each element enters a device that needs it once, and nothing else does.
    - `src`: where traced arrays lie, in the forms of `dst`; needed inside `jit` under Auto axes alone.
    - `memory_limit_bytes`: how much may be used beside the source's and the target's shards, per device (the CPU's
        devices share one memory). One group moves at a time, and an array that needs more moves in
        smaller parts; where even those need more, that is an error with the least limit that works. Inside `jit` it
        has no effect: there XLA decides over the memory.
    - `donate`: gives up the arrays of `tree`, each as soon as it was read. An array of which every device keeps its
        shard is not deleted: the result shares its buffers, under another mesh's names too.
    - `lost`: jax devices whose shards are not to be read; replicas elsewhere take their place.

    **Returns:**

    The tree in the shardings of `dst`, committed to exactly those. An array's layout in memory is JAX's default one
    afterwards, as after `jax.device_put` to a sharding: a custom layout (`jax.experimental.layout.Format`) is lost.

    **Raises:**

    Before anything is moved: `MapError` that lists all of a map that does not fit; `PlanMismatchError` if `dst` is for
    another tree or has no devices; `SpecError` if a sharding does not divide its array, or has unreduced axes and is
    not where the array lies; `LeafTypeError` for dtypes that JAX moves wrongly, and for a `lost` or a limit of another
    type; `MeshError` if there is no way, or elements are on `lost` devices alone; `MoveError` if `memory_limit_bytes`
    is less than some array needs in the finest of parts. In the middle: `MoveError`, which says and holds
    what was moved.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        from shardfx import reshard

        trainers, servers = (
            Mesh(jax.devices()[:6], ("fsdp",)),
            Mesh(jax.devices()[6:], ("tensor",)),
        )
        tree = {"w": jax.device_put(jnp.ones((24, 8)), NamedSharding(trainers, P("fsdp")))}
        moved = reshard(tree, NamedSharding(servers, P(None, "tensor")))
        assert moved["w"].addressable_shards[0].data.shape == (24, 4)
        ```
    """
    return resharded(tree, dst, src=src, map=map, memory_limit_bytes=memory_limit_bytes, donate=donate, lost=lost)


def resharded(
    tree: object,
    dst: object,
    *,
    src: object = None,
    map: TreeMap | None = None,
    memory_limit_bytes: SupportsIndex | None = None,
    donate: bool = False,
    lost: Iterable[object] = (),
    copies: bool = True,
) -> PyTree:
    """As `reshard`; without `copies`, devices of the CPU run the programs of devices with memories of their own."""
    lost, limit_bytes = lost_devices(lost), _whole_bytes(memory_limit_bytes)
    if map is not None:
        if lost or src is not None:
            raise LeafTypeError("`reshard` with a map takes neither `src` nor `lost`; move the tree as it is first.")
        journey = journey_of(tree, dst, map, copies)
        job = job_through(journey, copies)
        leaves = [journey.arrays.get(work.sources[0]) if work.sources else None for work in journey.works]
        return journey.target.filled(_moved(job, leaves, limit_bytes, donate), {})
    leaves, treedef = jax.tree.flatten(tree)
    wanted = targets(dst, tree, leaves, treedef, "dst")
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        sources = [None] * len(leaves) if src is None else targets(src, tree, leaves, treedef, "src")
        return jax.tree.unflatten(treedef, _traced(leaves, sources, wanted, treedef))
    rows = list(zip(range(len(leaves)), leaves, wanted, strict=True))
    job = job_of(rows, lambda at: tree_paths(treedef)[at], lost, copies)
    return jax.tree.unflatten(treedef, _moved(job, leaves, limit_bytes, donate))


def _moved(job: Job, leaves: Sequence[object], limit_bytes: int | None, donate: bool) -> list[Any]:
    """The leaves with those in the place of others that a job makes."""
    if limit_bytes is not None:
        require_room(job, limit_bytes)
    with _asked_for():
        made = carried_out(job, limit_bytes, donate)
    return [made.get(at, leaf) for at, leaf in enumerate(leaves)]


def _whole_bytes(memory_limit_bytes: SupportsIndex | None) -> int | None:
    if memory_limit_bytes is None:
        return None
    fix = "give a number of bytes, such as `memory_limit_bytes=1 << 30`, or `None` for no limit."
    try:
        limit_bytes = operator.index(memory_limit_bytes)
    except TypeError as error:
        kind = type(memory_limit_bytes).__name__
        raise LeafTypeError(
            f"`memory_limit_bytes` must be a whole number, not {memory_limit_bytes!r:.80} of type {kind}; {fix}"
        ) from error
    if limit_bytes < 0:
        raise MoveError(f"`memory_limit_bytes={limit_bytes}` is negative. Nothing was moved; {fix}")
    return limit_bytes


@contextlib.contextmanager
def _asked_for() -> Iterator[None]:
    """Makes the copies of a move explicit, as those of `jax.device_put` are: guards stop or log implicit ones alone.

    A move's programs are compiled under `jax.disable_jit` too: run one operation at a time they would not move.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.disable_jit(False))
        for direction in ("host_to_device", "device_to_device", "device_to_host"):
            if getattr(jax.config, f"jax_transfer_guard_{direction}") in ("disallow", "log"):
                stack.enter_context(getattr(jax, f"transfer_guard_{direction}")("allow"))
        yield


def _traced(leaves: Sequence[Any], sources: Sequence[Any], wanted: Sequence[Any], treedef: Any) -> list[Any]:
    results = list(leaves)
    for at, (leaf, source, target) in enumerate(zip(leaves, sources, wanted, strict=True)):
        if target is None or not is_array(leaf):
            continue
        if not isinstance(target, NamedSharding):
            raise SpecError(
                f"{leaf_name(tree_paths(treedef)[at])}: inside `jit` an array can only move to a NamedSharding, not to "
                f"{target}; use `NamedSharding(mesh, spec)`."
            )
        with naming(lambda at=at: tree_paths(treedef)[at]):
            results[at] = traced(leaf, target, source)
        if target.memory_kind != NamedSharding(target.mesh, target.spec).memory_kind:
            results[at] = jax.device_put(results[at], target)
    return results
