"""What there is to do for a tree whose arrays are live: leaves that change their shardings, or another tree of them."""

import contextlib
import dataclasses
import functools as ft
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import NamedSharding, Sharding

from .._convert import TreeMap
from .._ground.boxes import Box, volume
from .._ground.errors import LeafTypeError, MapError, MeshError, SpecError
from .._ground.tree import flatten
from .._plan import Target, target_of
from .destinations import has_devices, is_array, leaf_name, require_movable, require_reduced
from .flight import Job
from .move import Move, balanced, move_of
from .pieces.work import MovedLeaf, Work, works_of


_WAIT_SECONDS = 60
_ROOT = "shardfx.maps"


def job_of(
    rows: Sequence[tuple[int, Any, Sharding | None]],
    path_of: Callable[[int], str],
    lost: tuple[Any, ...] = (),
    copies: bool = True,
) -> Job:
    """Finds the move of every leaf, before any is made; what is wrong with one raises with its path.

    **Arguments:**

    - `rows`: the number of each leaf, the leaf, and where it shall lie: `None` where it is to be left alone.
    - `path_of`: the path of a leaf.
    - `lost`, `copies`: as of `move_of`.
    """
    known: dict[object, Move] = {}
    job = Job(path_of, {}, [], [], {}, set(), copies)
    for at, leaf, target in rows:
        if target is None or not is_array(leaf):
            job.kept.add(id(leaf))
            continue
        with naming(lambda at=at: path_of(at)):
            if not isinstance(leaf, jax.Array):
                _require_devices(target)
                require_movable(leaf.shape, leaf.dtype, target)
                require_reduced(target)
                job.placements.append((at, leaf, target))
                continue
            key = (leaf.sharding, target, leaf.shape, leaf.dtype)
            move = known.get(key)
            if move is None:
                move = known[key] = _move(leaf, target, lost, copies)
        if move.how == "in place" and leaf.committed:
            job.kept.add(id(leaf))
        else:
            job.moves.setdefault(move, []).append((at, leaf))
    chosen = balanced({move: len(places) for move, places in job.moves.items()})
    return dataclasses.replace(job, moves={chosen[move]: places for move, places in job.moves.items()})


def _move(leaf: jax.Array, target: Sharding, lost: tuple[object, ...], copies: bool) -> Move:
    _require_devices(target)
    move = move_of(leaf.shape, leaf.dtype, leaf.sharding, target, lost, copies)
    if move.work is not None and move.work.cuts.missing:
        raise MeshError(f"{_lost_text(move, move.work.cuts.missing)}; load it from a checkpoint.")
    return move


def _require_devices(target: Sharding) -> None:
    if isinstance(target, NamedSharding) and not has_devices(target):
        raise MeshError(
            f"the target {target.spec} lies on the mesh {dict(target.mesh.shape)} without devices; "
            "use `plan.on(plan.mesh.build(jax.devices()))`, or a NamedSharding on a `jax.sharding.Mesh`."
        )


def _lost_text(move: Move, missing: Sequence[Box]) -> str:
    """Which elements no device holds that is left."""
    first = ", ".join(f"{start}:{stop}" for start, stop in missing[0])
    count = sum(map(volume, missing))
    return f"{count} of {math.prod(move.shape)} elements are on lost devices only, the first of them [{first}]"


@contextlib.contextmanager
def naming(path: Callable[[], str]) -> Iterator[None]:
    """Puts the leaf's path before what is wrong with it."""
    try:
        yield
    except (SpecError, MeshError, LeafTypeError) as error:
        raise type(error)(f"{leaf_name(path())}: {error}") from error


@dataclasses.dataclass(frozen=True)
class Journey:
    """A tree on its way into another.

    **Arguments:**

    - `arrays`: the source's arrays by path.
    - `target`: the tree that is made.
    - `works`: what there is to do for it.
    """

    arrays: Mapping[str, Any]
    target: Target
    works: tuple[Work, ...]


def journey_of(tree: object, dst: object, map: TreeMap, copies: bool) -> Journey:
    """Finds what there is to do, and raises where a map does not fit, before anything is moved."""
    flat = flatten(tree)
    if any(isinstance(leaf, Tracer) for leaf in flat.leaves):
        raise LeafTypeError(
            "`reshard(..., map=...)` moves live arrays, and this tree is traced; inside `jit` use "
            "`map.apply(tree, like)`, and constrain the result."
        )
    rows = zip(flat.paths, flat.leaves, flat.is_array, strict=True)
    arrays = {path: leaf for path, leaf, is_one in rows if is_one}
    for path, leaf in arrays.items():
        if not is_array(leaf):
            raise LeafTypeError(f"leaf `{path}` is a {type(leaf).__name__}, which holds no values to move.")
    target = target_of(dst, "reshard")
    sources = tuple(MovedLeaf(path, tuple(leaf.shape), leaf.dtype, _sharding(leaf)) for path, leaf in arrays.items())
    for path, leaf in target.arrays:
        if not has_devices(leaf.sharding):
            raise MeshError(
                f"leaf `{path}`: the target's mesh has no devices; use `plan.on(plan.mesh.build(jax.devices()))`."
            )
    targets = tuple(MovedLeaf(path, tuple(leaf.shape), leaf.dtype, leaf.sharding) for path, leaf in target.arrays)
    if jax.process_count() > 1:
        ends = dict.fromkeys(leaf.sharding for leaf in (*sources, *targets) if leaf.sharding is not None)
        require_same_map(map, tuple(sorted({device.process_index for end in ends for device in end.device_set})))
    return Journey(arrays, target, works_of(map, sources, targets, copies))


def _sharding(leaf: object) -> Any:
    return leaf.sharding if isinstance(leaf, jax.Array) else None


def job_through(journey: Journey, copies: bool) -> Job:
    """What there is to do: arrays that move as they are, and those that are put together from parts of others."""
    works = list(enumerate(journey.works))
    plain = [(at, journey.arrays[work.sources[0]], work.leaf.sharding) for at, work in works if work.way == "plain"]
    path_of = lambda at: journey.works[at].leaf.path
    job = job_of(plain, path_of, copies=copies)
    return dataclasses.replace(job, arrays=journey.arrays, works=[one for one in works if one[1].way != "plain"])


@ft.lru_cache(maxsize=64)
def require_same_map(map: TreeMap, processes: tuple[int, ...]) -> None:
    """Raises on each of `processes`, which move a tree together, unless all of them have this map.

    It goes by JAX's coordination service, so that nothing waits for ever where one process does something else. A job
    without this service has brought its processes together by itself, and compares nothing.
    """
    # JAX has no public way to its service; Orbax and others take this one, which is the same in JAX 0.9 to 0.12.
    from jax._src import distributed

    client, me = distributed.global_state.client, jax.process_index()
    if client is None or len(processes) == 1 or me not in processes:
        return
    folder = f"{_ROOT}/{'-'.join(str(process) for process in processes)}"
    try:
        client.key_value_set(f"{folder}/{me}", map.digest, True)
        client.wait_at_barrier(f"{folder}/set", 1000 * _WAIT_SECONDS, list(processes))
        found = {int(name.rpartition("/")[2]): digest for name, digest in client.key_value_dir_get(folder)}
        client.wait_at_barrier(f"{folder}/read", 1000 * _WAIT_SECONDS, list(processes))
    except jax.errors.JaxRuntimeError as error:
        raise MapError(
            f"the processes {list(processes)} compare a map before they first move by it, and one of them did not come "
            f"within {_WAIT_SECONDS} s ({str(error).splitlines()[0][:200]}); call `reshard` with this map on all of "
            "them. Nothing was moved."
        ) from error
    other = next((process for process in processes if found.get(process) != map.digest), None)
    if other is not None:
        raise MapError(
            f"process {me} and process {other} move by different maps; make the map from the same numbers on every "
            "process: `hosts.assert_same_plan(map)` says where they differ. Nothing was moved."
        )
