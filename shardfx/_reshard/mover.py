"""`reshard`: the move of a tree of arrays, from its arguments to a job that the
execution runs.

Three arguments recur. `lost` are devices whose shards are not to be read. `copies` says
whether shards on CPU devices may be copied in host memory, which these devices share.
`path_of` returns the path of the leaf with a given number.
"""

import contextlib
import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, SupportsIndex, TypedDict, TypeVar, Unpack, overload

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Sharding
from jaxtyping import PyTree

from .._convert import TreeMap, check_map, number_copies
from .._ground.boxes import volume
from .._ground.errors import (
    LeafTypeError,
    MeshError,
    MoveError,
    PlanMismatchError,
    check_type,
)
from .._ground.misuse import called
from .._ground.tree import Flat, flatten, is_number
from .._plan import ShardPlan, Target, shardings_of_leaves, target_of
from .flight import Job, NumberedAssembly, require_memory, run_job
from .movable import LEAF_ERRORS, naming, require_movable, require_reduced, with_path
from .move import Move, balanced, move_of
from .pieces.assembly import MovedLeaf
from .pieces.planning import TargetArray, target_arrays
from .same_map import processes_of, require_same_map
from .shardings import has_devices, is_array, named
from .traced import move_traced_leaves


T = TypeVar("T")


class MoveOptions(TypedDict, total=False):
    """The keyword arguments of `reshard`. `src` has the shardings of traced arrays.
    `memory_limit_bytes` bounds the bytes besides the shards of source and target. With
    `donate`, the source's arrays are deleted once they are read.
    """

    src: Any
    memory_limit_bytes: SupportsIndex | None
    donate: bool
    lost: Iterable[Any]


@overload
def reshard(
    tree: Any,
    dst: Any,
    *,
    map: TreeMap,
    **options: Unpack[MoveOptions],
) -> Any: ...


@overload
def reshard(
    tree: np.ndarray,
    dst: Any,
    *,
    map: None = None,
    **options: Unpack[MoveOptions],
) -> jax.Array: ...


@overload
def reshard(
    tree: T,
    dst: Any,
    *,
    map: None = None,
    **options: Unpack[MoveOptions],
) -> T: ...


@called("reshard(tree, dst)")
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
    """Moves the arrays of a tree to other shardings: other specs, meshes, devices,
    processes or memory.

    Live arrays move in groups: all leaves of one shape, dtype and pair of shardings
    (before and after) share a program. Leaves that already have their sharding are not
    touched. The bytes of arrays that devices have yet to compute are bounded. If the
    devices stay the same, an array moves by the collectives that
    [`shardfx.plan_reshard`][] shows. To other devices, and between CPU devices of this
    process, each shard is assembled from the shards that overlap it. No device ever
    holds a whole array unless its sharding asks for it.

    Inside `jax.jit` (and `grad`, `checkpoint`, `scan`) traced arrays are moved over the
    devices of the program. The result of such a function has the sharding of
    `out_shardings`; without them XLA may gather it.

    With several processes, each process that owns a device of the source or the target
    must call this, with trees of one structure. An array on other processes' devices
    has no addressable shards here, before or after the move.

    **Arguments:**

    - `tree`: any tree. Leaves that are no arrays come back as they are; NumPy arrays
      are put on the devices. On CPUs the result may share memory with a NumPy array, as
      with `jax.device_put`: pass `array.copy()` if you fill it again.
    - `dst`: a plan on a jax Mesh, a sharding for all arrays, or a tree (or prefix) of
      shardings. Arrays below a `None` do not move.
    - `map`: a [`shardfx.TreeMap`][] that makes the arrays of `dst` from the arrays of
      `tree`, if the two trees differ. Then `dst` is a plan, or a tree of structs with
      shardings. A device receives each element that it needs once.
    - `src`: the shardings of traced arrays, in the forms of `dst`. It is needed only
      inside `jit` under Auto axes.
    - `memory_limit_bytes`: bytes that may be used beside the source's and the target's
      shards, per device (CPU devices share one memory). One group moves at a time, and
      an array that needs more moves in chunks of its shards. If the smallest chunks
      need more, the error states the least limit that works. Inside `jit` the limit has
      no effect.
    - `donate`: gives up the arrays of `tree`, each as soon as it was read. If every
      device keeps its shard of an array, the result shares the array's buffers and the
      array is not deleted.
    - `lost`: jax devices whose shards are not to be read; replicas elsewhere take their
      place. Not inside `jit`.

    **Returns:**

    The tree, with each array committed to its sharding in `dst`. The array has JAX's
    default layout in memory: a custom layout (`jax.experimental.layout.Format`) is
    lost.

    **Raises:**

    Before anything is moved: `MapError` with all problems of a map that does not fit;
    `PlanMismatchError` if `dst` is for another tree or has no devices; `SpecError` if a
    sharding does not divide its array, or if one with unreduced axes is not the array's
    own; `LeafTypeError` for dtypes that JAX moves wrongly, for a `lost` or a limit of
    another type, and for `lost` inside `jit`; `MeshError` if the move is impossible, or
    if elements are only on `lost` devices; `MoveError` if `memory_limit_bytes` is less
    than some array needs in the smallest chunks. During the move: `MoveError`, which
    names and holds the arrays that have moved.

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
    return resharded(
        tree,
        dst,
        src=src,
        map=map,
        memory_limit_bytes=memory_limit_bytes,
        donate=donate,
        lost=lost,
    )


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
    """Does what `reshard` does. With `copies=False`, for tests, CPU devices count as
    having separate memories.
    """
    if isinstance(tree, ShardPlan):
        raise LeafTypeError(
            "`reshard` takes the tree first, and this is a plan; write `reshard(tree,"
            " plan)`."
        )
    check_map(map)
    lost = lost_devices(lost)
    limit_bytes = _whole_bytes(memory_limit_bytes)
    flat = flatten(tree, allow_specs=True)
    if map is not None:
        if lost or src is not None:
            raise LeafTypeError(
                "`reshard` with a map takes neither `src` nor `lost`; move the tree as"
                " it is first."
            )
        move = map_move(flat, dst, map, copies)
        return _moved_by_map(move, limit_bytes, donate, copies)
    new_shardings = targets(dst, flat, "dst")
    path_of = flat.paths.__getitem__
    if _has_tracer(flat.leaves):
        if lost:
            raise LeafTypeError(
                "`reshard` inside `jit` takes no `lost`: a program runs on all devices of"
                " its mesh. Move the arrays before, outside of the function."
            )
        old_shardings: list[Sharding | None] = [None] * len(new_shardings)
        if src is not None:
            old_shardings = targets(src, flat, "src")
        moved = move_traced_leaves(flat.leaves, old_shardings, new_shardings, path_of)
    else:
        numbers = range(len(new_shardings))
        rows = zip(numbers, flat.leaves, new_shardings, strict=True)
        job = job_of(list(rows), path_of, lost, copies)
        moved = _moved(job, flat.leaves, limit_bytes, donate)
    return jax.tree.unflatten(flat.treedef, moved)


def _has_tracer(leaves: Iterable[object]) -> bool:
    """Whether some leaf is traced, as inside `jit`."""
    return any(isinstance(leaf, Tracer) for leaf in leaves)


def _moved_by_map(
    move: "MapMove",
    limit_bytes: int | None,
    donate: bool,
    copies: bool,
) -> PyTree:
    """Carries a move by a `TreeMap` out, and returns the tree that it makes. An array
    without an assembly is a source array that only changes its sharding.
    """
    leaves: list[Any] = []
    unassembled: list[tuple[int, Any, Sharding | None]] = []
    assemblies: list[NumberedAssembly] = []
    for number, array in enumerate(move.plans):
        leaf = move.arrays[array.sources[0]] if array.sources else None
        leaves.append(leaf)
        if array.assembly is None:
            unassembled.append((number, leaf, array.leaf.sharding))
        else:
            assemblies.append(
                NumberedAssembly(
                    number=number, source_paths=array.sources, assembly=array.assembly
                )
            )

    # A number is an array's position in `move.plans`.
    job = job_of(
        unassembled, lambda number: move.plans[number].leaf.path, copies=copies
    )
    job = dataclasses.replace(job, arrays=move.arrays, assemblies=assemblies)
    arrays = _moved(job, leaves, limit_bytes, donate)
    return move.target.filled(arrays, move.numbers)


def targets(form: PyTree, flat: Flat, argument_name: str) -> list[Sharding | None]:
    """Returns the sharding that each leaf of the tree `flat` gets; `None` for a leaf
    that does not move. A single sharding is also that of leaves that are no arrays.

    `form` is a plan with devices, a sharding, or a tree (or prefix) whose leaves are
    shardings, arrays or ShapeDtypeStructs with shardings, or `None`. `argument_name` is
    the name of this argument, for messages. Raises `PlanMismatchError` if the form is for
    another tree, and `LeafTypeError` if it holds anything else.
    """
    if isinstance(form, ShardPlan):
        return shardings_of_leaves(form, flat)
    if isinstance(form, Sharding):
        return [form] * len(flat.leaves)
    try:
        entries = flat.treedef.flatten_up_to(form)
    except ValueError:
        entries = _broadcast_prefix(
            form, jax.tree.unflatten(flat.treedef, flat.leaves), argument_name
        )
    shardings = []
    for entry in entries:
        if isinstance(entry, jax.ShapeDtypeStruct | jax.Array):
            entry = entry.sharding
        shardings.append(entry)
    for number, sharding in enumerate(shardings):
        if sharding is not None and not isinstance(sharding, Sharding):
            path = flat.paths[number]
            kind = type(sharding).__name__
            where = f"`{argument_name}` is a {kind}"
            if path:
                where = f"`{argument_name}` holds a {kind} at `{path}`"
            raise LeafTypeError(
                f"{where}, {sharding!r:.80}, which is no sharding; use `NamedSharding(mesh,"
                " spec)`, the `.sharding` of a `Format`, or a plan: `plan(tree, mesh,"
                " ...)`."
            )
    return shardings


def _broadcast_prefix(prefix: object, tree: object, argument_name: str) -> list[Any]:
    """The entry of `prefix` for each leaf of `tree`, in order. An entry for a node, or
    `None`, is that of all leaves below it. Raises `PlanMismatchError` if the two trees
    do not fit.
    """
    try:
        full = jax.tree.broadcast(prefix, tree, is_leaf=lambda node: node is None)
    except ValueError as error:
        raise PlanMismatchError(
            f"`{argument_name}` is no prefix of the tree: {str(error).splitlines()[0]};"
            " give a plan of this tree, one sharding, or a tree of shardings of its"
            " structure."
        ) from error
    return jax.tree.leaves(full, is_leaf=lambda node: node is None)


def lost_devices(lost: Iterable[object]) -> tuple[Any, ...]:
    """Returns the argument `lost` of `reshard` as a tuple. Raises `LeafTypeError` if it
    is no iterable of devices.
    """
    fix = "give an iterable of jax devices, such as `lost=[jax.devices()[3]]`."
    check_type(
        what="lost",
        value=lost,
        expected=Iterable,
        error=LeafTypeError,
        fix=fix.removesuffix("."),
    )
    devices = tuple(lost)
    for device in devices:
        if not isinstance(device, jax.Device):
            raise LeafTypeError(
                f"`lost` holds {device!r:.80}, of type {type(device).__name__}, not a"
                f" device; {fix}"
            )
    return devices


def _moved(
    job: Job,
    leaves: Sequence[object],
    limit_bytes: int | None,
    donate: bool,
) -> list[Any]:
    """Runs the moves of a job, and returns the leaves with the moved arrays in place of
    the old ones. Its transfers are explicit, like those of `jax.device_put`, so
    `jax.transfer_guard("disallow")` lets them pass. It overrides `jax.disable_jit`,
    since operations that run one at a time would not move arrays.
    """
    if not (job.moves or job.placements or job.assemblies or job.arrays):
        return list(leaves)
    if limit_bytes is not None:
        require_memory(job, limit_bytes)
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.disable_jit(False))
        for direction in ("host_to_device", "device_to_device", "device_to_host"):
            level = getattr(jax.config, f"jax_transfer_guard_{direction}")
            if level in ("disallow", "log"):
                guard = getattr(jax, f"transfer_guard_{direction}")
                stack.enter_context(guard("allow"))
        moved = run_job(job, limit_bytes, donate)
    return [moved.get(number, leaf) for number, leaf in enumerate(leaves)]


def _whole_bytes(memory_limit_bytes: SupportsIndex | None) -> int | None:
    """The argument `memory_limit_bytes` of `reshard` as an int; `None` for no limit.
    Raises `LeafTypeError` for anything but whole numbers, and `MoveError` for negative
    ones.
    """
    fix = (
        "give a number of bytes, such as `memory_limit_bytes=1 << 30`, or `None` for no"
        " limit"
    )
    if memory_limit_bytes is None:
        return None
    try:
        limit_bytes = operator.index(memory_limit_bytes)
    except TypeError as error:
        kind = type(memory_limit_bytes).__name__
        value = f"{memory_limit_bytes!r:.80} of type {kind}"
        raise LeafTypeError(
            f"`memory_limit_bytes` must be a whole number, not {value}; {fix}."
        ) from error
    if limit_bytes < 0:
        raise MoveError(
            f"`memory_limit_bytes={limit_bytes}` is negative. Nothing was moved; {fix}."
        )
    return limit_bytes


def job_of(
    rows: Sequence[tuple[int, Any, Sharding | None]],
    path_of: Callable[[int], str],
    lost: tuple[Any, ...] = (),
    copies: bool = True,
) -> Job:
    """Decides the move of every leaf before any leaf moves. `rows` has three values for
    each leaf: its number, the leaf, and its target sharding, which is `None` for a leaf
    that does not move.

    `lost` are devices whose shards are not to be read. `copies` says whether shards on
    CPU devices may be copied in host memory, which these devices share.
    """
    moves: dict[object, Move] = {}
    job = Job(
        path_of=path_of,
        moves={},
        placements=[],
        assemblies=[],
        arrays={},
        kept=set(),
        copies=copies,
    )
    for number, leaf, target in rows:
        if target is None or not is_array(leaf):
            job.kept.add(id(leaf))
            continue
        # A `with naming(...)` for each leaf would take as long as all the rest.
        try:
            _require_devices(target)
            if not isinstance(leaf, jax.Array):
                require_movable(leaf.shape, leaf.dtype, target)
                require_reduced(target)
                job.placements.append((number, leaf, target))
                continue
            key = (leaf.sharding, target, leaf.shape, leaf.dtype)
            if key not in moves:
                moves[key] = _move(leaf, target, lost, copies)
        except LEAF_ERRORS as error:
            raise with_path(error, path_of(number)) from error
        # An uncommitted array that stays becomes a committed one, so it counts as
        # moved.
        if moves[key].how == "in place" and leaf.committed:
            job.kept.add(id(leaf))
        else:
            job.moves.setdefault(moves[key], []).append((number, leaf))
    counts = {move: len(numbered_arrays) for move, numbered_arrays in job.moves.items()}
    chosen = balanced(counts)
    balanced_moves = {
        chosen[move]: numbered_arrays for move, numbered_arrays in job.moves.items()
    }
    return dataclasses.replace(job, moves=balanced_moves)


def _move(
    leaf: jax.Array,
    target: Sharding,
    lost: tuple[object, ...],
    copies: bool,
) -> Move:
    """Decides the move of one array. `lost` are devices whose shards are not to be
    read, and `copies` says whether shards on CPU devices may be copied in host memory.
    Raises `MeshError` if some elements are on lost devices only.
    """
    move = move_of(
        shape=leaf.shape,
        dtype=leaf.dtype,
        src=leaf.sharding,
        dst=target,
        lost=lost,
        copies=copies,
    )
    if move.assembly is not None and move.assembly.parts.missing:
        missing = move.assembly.parts.missing
        first = ", ".join(f"{start}:{stop}" for start, stop in missing[0])
        raise MeshError(
            f"{sum(map(volume, missing))} of {math.prod(move.shape)} elements are on"
            f" lost devices only, the first of them [{first}]; load it from a"
            " checkpoint."
        )
    return move


def _require_devices(target: Sharding) -> None:
    """Raises `MeshError` if a target sharding is on a mesh without devices."""
    if not has_devices(target):
        raise MeshError(
            f"the target {named(target).spec} lies on the mesh"
            f" {dict(named(target).mesh.shape)} without devices; use"
            " `plan.on(plan.mesh.build(jax.devices()))`, or a NamedSharding on a"
            " `jax.sharding.Mesh`."
        )


class MapMove(NamedTuple):
    """The move of a tree into another tree: the source's arrays by path, the tree that
    is made, for each of its arrays the plan for assembling it, and its Python numbers
    by their positions among its leaves.
    """

    arrays: Mapping[str, Any]
    target: Target
    plans: tuple[TargetArray, ...]
    numbers: Mapping[int, Any]


def map_move(flat: Flat, dst: object, map: TreeMap, copies: bool) -> MapMove:
    """Decides how a `TreeMap` makes every array of `dst`, a plan or a tree of structs
    with shardings, from the tree `flat`. No array has moved when it returns. `copies`
    says whether shards on CPU devices may be copied in host memory. Raises `MapError`
    if the map does not fit the two trees.
    """
    if _has_tracer(flat.leaves):
        raise LeafTypeError(
            "`reshard(..., map=...)` moves live arrays, and this tree is traced; inside"
            " `jit` use `map.apply(tree, like)`, and constrain the result."
        )
    rows = zip(flat.paths, flat.leaves, flat.is_array, strict=True)
    arrays = {path: leaf for path, leaf, is_array_leaf in rows if is_array_leaf}
    for path, leaf in arrays.items():
        if not is_array(leaf):
            raise LeafTypeError(
                f"leaf `{path}` is a {type(leaf).__name__}, which holds no values to"
                " move."
            )
    target = target_of(dst, "reshard")
    sources = [_moved_leaf(path, leaf) for path, leaf in arrays.items()]
    targets = [_moved_leaf(path, leaf) for path, leaf in target.arrays]
    for leaf in targets:
        assert leaf.sharding is not None
        with naming(str, leaf.path):
            _require_devices(leaf.sharding)
    if jax.process_count() > 1:
        require_same_map(map, processes_of([*sources, *targets]))
    # Python numbers among the leaves, by path. They have no shards: the map only says
    # which of them go where.
    pairs = zip(flat.paths, flat.leaves, strict=True)
    python_numbers = {path: leaf for path, leaf in pairs if is_number(leaf)}
    # The positions of the target's Python numbers among its leaves, by path.
    target_positions = {
        leaf.path: leaf.position for leaf in target.others if leaf.is_number
    }
    copied_numbers = number_copies(map.steps, python_numbers, target_positions)
    plans = target_arrays(
        tree_map=map,
        sources=tuple(sources),
        targets=tuple(targets),
        may_copy_on_host=copies,
        numbers=copied_numbers,
    )
    numbers_by_position = {
        target_positions[target_path]: python_numbers[source_path]
        for target_path, source_path in copied_numbers.routes
    }
    return MapMove(
        arrays=arrays, target=target, plans=plans, numbers=numbers_by_position
    )


def _moved_leaf(path: str, leaf: Any) -> MovedLeaf:
    """An array or a struct as a `MovedLeaf`; NumPy arrays have no sharding."""
    sharding = None
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        sharding = leaf.sharding
    return MovedLeaf(
        path=path, shape=tuple(leaf.shape), dtype=leaf.dtype, sharding=sharding
    )
