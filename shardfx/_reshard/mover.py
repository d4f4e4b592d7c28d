"""Moving a tree of arrays: which leaves go together, in which order, and how much is under way at a time."""

import collections
import contextlib
import dataclasses
import functools as ft
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, SupportsIndex, TypeVar, overload

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, Sharding

from .._convert import TreeMap
from .._ground.errors import LeafTypeError, MeshError, MoveError, SpecError
from .._ground.tree import tree_paths
from .carry_out import carry_out, least_limit_bytes, why_least
from .destinations import is_array, leaf_name, lost_devices, targets
from .move import Move, balanced, has_devices, move_of, require_movable, require_reduced
from .through_map import through_map
from .tiles.transfer import IN_FLIGHT_BYTES, lost_text
from .traced import traced


T = TypeVar("T")

# Each program that is under way holds threads of the CPU's runtime, which gives up when too many wait for each other;
# those that wait for other processes can block all of them.
_IN_FLIGHT_COUNT = 32


@overload
def reshard(
    tree: Any,
    dst: Any,
    *,
    src: Any = None,
    map: TreeMap,
    memory_limit_bytes: SupportsIndex | None = None,
    donate: bool = False,
    lost: Iterable[Any] = (),
) -> Any: ...


@overload
def reshard(
    tree: np.ndarray,
    dst: Any,
    *,
    src: Any = None,
    map: None = None,
    memory_limit_bytes: SupportsIndex | None = None,
    donate: bool = False,
    lost: Iterable[Any] = (),
) -> jax.Array: ...


@overload
def reshard(
    tree: T,
    dst: Any,
    *,
    src: Any = None,
    map: None = None,
    memory_limit_bytes: SupportsIndex | None = None,
    donate: bool = False,
    lost: Iterable[Any] = (),
) -> T: ...


def reshard(
    tree: Any,
    dst: Any,
    *,
    src: Any = None,
    map: TreeMap | None = None,
    memory_limit_bytes: SupportsIndex | None = None,
    donate: bool = False,
    lost: Iterable[Any] = (),
) -> Any:
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
        devices share one memory). One group moves at a time, and an array that needs more moves in slices; where
        even those need more, that is an error with the least limit that works. Inside `jit` it has no effect: there
        XLA decides over the memory.
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
    is less than some array needs in the finest of slices. In the middle: `MoveError`, which says and holds what was
    moved.

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
    tree: Any,
    dst: Any,
    *,
    src: Any = None,
    map: TreeMap | None = None,
    memory_limit_bytes: SupportsIndex | None = None,
    donate: bool = False,
    lost: Iterable[Any] = (),
    copies: bool = True,
) -> Any:
    """As `reshard`; without `copies`, devices of the CPU run the programs of devices with memories of their own."""
    lost, limit_bytes = lost_devices(lost), _whole_bytes(memory_limit_bytes)
    if map is not None:
        if lost or src is not None:
            raise LeafTypeError("`reshard` with a map takes neither `src` nor `lost`; move the tree as it is first.")
        with _asked_for():
            how = {"limit_bytes": limit_bytes, "donate": donate, "copies": copies}
            return through_map(tree, dst, map, ft.partial(_as_it_is, copies), **how)
    leaves, treedef = jax.tree.flatten(tree)
    wanted = targets(dst, tree, leaves, treedef, "dst")
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        sources = [None] * len(leaves) if src is None else targets(src, tree, leaves, treedef, "src")
        return jax.tree.unflatten(treedef, _traced(leaves, sources, wanted, treedef))
    job = job_of(leaves, wanted, treedef, lost, copies)
    if limit_bytes is not None:
        _require_room(job, limit_bytes)
    with _asked_for():
        return jax.tree.unflatten(treedef, _done(job, leaves, limit_bytes, donate))


def _as_it_is(copies: bool, tree: Any, dst: Any, limit_bytes: int | None, donate: bool) -> Any:
    return resharded(tree, dst, memory_limit_bytes=limit_bytes, donate=donate, copies=copies)


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


@dataclasses.dataclass(frozen=True)
class Job:
    """What there is to do: the leaves of each move, by number, and NumPy leaves that have yet to be placed."""

    moves: dict[Move, list[int]]
    placements: list[tuple[int, Sharding]]
    treedef: Any


def job_of(
    leaves: Sequence[Any],
    wanted: Sequence[Sharding | None],
    treedef: Any,
    lost: tuple[Any, ...] = (),
    copies: bool = True,
) -> Job:
    """Finds the move of every leaf, before any is made; what is wrong with one raises with its path."""
    known: dict[Any, Move] = {}
    job = Job({}, [], treedef)
    for at, (leaf, target) in enumerate(zip(leaves, wanted, strict=True)):
        if target is None or (not isinstance(leaf, jax.Array) and not is_array(leaf)):
            continue
        if not isinstance(leaf, jax.Array):
            with _naming(treedef, at):
                _require_devices(target)
                require_movable(leaf.shape, leaf.dtype, target)
                require_reduced(target)
            job.placements.append((at, target))
            continue
        key = (leaf.sharding, target, leaf.shape, leaf.dtype)
        move = known.get(key)
        if move is None:
            move = known[key] = _move(job, at, leaf, target, lost, copies)
        if move.how != "in place" or not leaf.committed:
            job.moves.setdefault(move, []).append(at)
    chosen = balanced({move: len(places) for move, places in job.moves.items()})
    return dataclasses.replace(job, moves={chosen[move]: places for move, places in job.moves.items()})


def _move(job: Job, at: int, leaf: jax.Array, target: Sharding, lost: tuple[Any, ...], copies: bool) -> Move:
    with _naming(job.treedef, at):
        _require_devices(target)
        move = move_of(leaf.shape, leaf.dtype, leaf.sharding, target, lost, copies)
        if move.transfer is not None and move.transfer.tiles.missing:
            raise MeshError(f"{lost_text(move.transfer)}; load it from a checkpoint.")
    return move


def _require_devices(target: Sharding) -> None:
    if isinstance(target, NamedSharding) and not has_devices(target):
        raise MeshError(
            f"the target {target.spec} lies on the mesh {dict(target.mesh.shape)} without devices; "
            "use `plan.on(plan.mesh.build(jax.devices()))`, or a NamedSharding on a `jax.sharding.Mesh`."
        )


def _require_room(job: Job, limit_bytes: int) -> None:
    """Raises where some leaf cannot move within the limit, before any has moved."""
    short = {move: least_limit_bytes(move) for move in job.moves if move.extra_bytes > limit_bytes}
    short = {move: least for move, least in short.items() if least > limit_bytes}
    if not short:
        return
    worst = max(short, key=lambda move: short[move])
    others = sum(len(job.moves[move]) for move in short) - 1
    raise MoveError(
        f"{leaf_name(tree_paths(job.treedef)[job.moves[worst][0]])}, {worst.dtype}{list(worst.shape)}, needs "
        f"{short[worst]} bytes beside its source and target: {why_least(worst)}; `memory_limit_bytes={limit_bytes}` "
        f"is too little for it{f' and {others} more' if others else ''}. Nothing was moved; "
        f"pass `memory_limit_bytes={short[worst]}` or more."
    )


@contextlib.contextmanager
def _naming(treedef: Any, at: int) -> Iterator[None]:
    """Puts the leaf's path before what is wrong with it."""
    try:
        yield
    except (SpecError, MeshError, LeafTypeError) as error:
        raise type(error)(f"{leaf_name(tree_paths(treedef)[at])}: {error}") from error


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


def _done(job: Job, leaves: list[Any], limit_bytes: int | None, donate: bool) -> list[Any]:
    """Carries a job out; the leaves afterwards."""
    results = list(leaves)
    order = list(job.moves.items())
    if donate:  # what shrinks goes first, so that what grows finds the room
        order.sort(key=lambda item: item[0].target_bytes - item[0].source_bytes)
    last_use = {id(leaves[at]): move for move, places in order for at in places}
    moving = {at: move for move, places in order for at in places}
    # Where an array stays, the result shares its buffers: then no other place in the tree may give it up.
    kept = {id(leaf) for at, leaf in enumerate(leaves) if at not in moving or moving[at].idle}
    window = Window(limit_bytes)
    arrived: dict[int, None] = {}
    at = -1
    try:
        for at, target in job.placements:
            results[at] = jax.device_put(leaves[at], target)
            arrived[at] = None
        for move, places in order:
            made: dict[int, jax.Array] = {}
            for at in places:
                leaf = leaves[at]
                if id(leaf) not in made:
                    window.make_room(move.extra_bytes)
                    # An array that is in the tree more than once is given up by the last of its moves.
                    give_up = donate and last_use[id(leaf)] is move and id(leaf) not in kept
                    made[id(leaf)] = carry_out(move, leaf, donate=give_up, limit_bytes=limit_bytes)
                    window.add(made[id(leaf)], move)
                results[at] = made[id(leaf)]
                arrived[at] = None
            if limit_bytes is not None:
                window.drain()
        if donate:
            window.drain()
    except (RuntimeError, ValueError, TypeError, MemoryError) as error:
        raise _stopped(job, at, results, list(arrived), error, donate) from error
    return results


class Window:
    """Waits for the oldest moves when too much is under way."""

    def __init__(self, limit_bytes: int | None):
        self.limit_bytes = IN_FLIGHT_BYTES if limit_bytes is None else limit_bytes
        self.pending: collections.deque[tuple[jax.Array, int]] = collections.deque()
        self.bytes = 0

    def add(self, array: jax.Array, move: Move) -> None:
        if move.idle or (move.transfer is not None and move.transfer.way == "host"):  # finished when it is returned
            return
        # A copy between memories needs nothing on the side, but too many at once would queue without bound.
        count = move.target_bytes if move.how == "memory kind" else move.extra_bytes
        self.pending.append((array, count))
        self.bytes += count
        if move.how == "steps" and move.crosses_cpu:
            self.drain()

    def make_room(self, count: int) -> None:
        while self.pending and (self.bytes + count > self.limit_bytes or len(self.pending) >= _IN_FLIGHT_COUNT):
            self._wait()

    def drain(self) -> None:
        while self.pending:
            self._wait()

    def _wait(self) -> None:
        array, count = self.pending.popleft()
        self.bytes -= count
        jax.block_until_ready(array)


def _stopped(
    job: Job, at: int, results: Sequence[Any], arrived: Sequence[int], error: Exception, donate: bool
) -> MoveError:
    paths = tree_paths(job.treedef)
    moved = {paths[done]: results[done] for done in arrived if _is_there(results[done])}
    total = len(job.placements) + sum(len(places) for places in job.moves.values())
    listed = ", ".join(f"`{path}`" if path else leaf_name(path) for path in list(moved)[:8]) + (
        ", ..." if len(moved) > 8 else ""
    )
    kept = "the sources of these were donated" if donate else "the tree itself is untouched"
    return MoveError(
        f"stopped at {leaf_name(paths[at])} ({type(error).__name__}: {str(error).splitlines()[0][:300]}) after "
        f"{len(moved)} of {total} leaves: {listed or 'none'}; {kept}, and they are in the error's `moved`.",
        moved,
    )


def _is_there(array: jax.Array) -> bool:
    """Whether an array arrived: its computation may have failed after it was handed out."""
    try:
        jax.block_until_ready(array)
    except RuntimeError:
        return False
    return True


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
        with _naming(treedef, at):
            results[at] = traced(leaf, target, source)
        if target.memory_kind != NamedSharding(target.mesh, target.spec).memory_kind:
            results[at] = jax.device_put(results[at], target)
    return results
