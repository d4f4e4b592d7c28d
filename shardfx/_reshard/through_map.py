"""A tree made of another one, whose arrays are live: what there is to do for it."""

import dataclasses
import functools as ft
from collections.abc import Mapping
from typing import Any

import jax
from jax.core import Tracer

from .._convert import TreeMap
from .._ground.errors import LeafTypeError, MapError, MeshError
from .._ground.tree import flatten
from .._plan.target import Target, target_of
from .destinations import is_array
from .ends import has_devices
from .flight import Job
from .job import job_of
from .pieces.work import Leaf, Works, works_of


_WAIT_SECONDS = 60
_ROOT = "shardfx.maps"


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
    works: Works


def journey_of(tree: Any, dst: Any, map: TreeMap, copies: bool) -> Journey:
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
    sources = tuple(Leaf(path, tuple(leaf.shape), leaf.dtype, _sharding(leaf)) for path, leaf in arrays.items())
    for path, leaf in target.arrays:
        if not has_devices(leaf.sharding):
            raise MeshError(
                f"leaf `{path}`: the target's mesh has no devices; use `plan.on(plan.mesh.build(jax.devices()))`."
            )
    targets = tuple(Leaf(path, tuple(leaf.shape), leaf.dtype, leaf.sharding) for path, leaf in target.arrays)
    if jax.process_count() > 1:
        ends = dict.fromkeys(leaf.sharding for leaf in (*sources, *targets) if leaf.sharding is not None)
        require_same_map(map, tuple(sorted({device.process_index for end in ends for device in end.device_set})))
    return Journey(arrays, target, works_of(map, sources, targets, copies))


def _sharding(leaf: Any) -> Any:
    return leaf.sharding if isinstance(leaf, jax.Array) else None


def job_through(journey: Journey, copies: bool) -> Job:
    """What there is to do: arrays that move as they are, and those that are put together from parts of others."""
    works = list(enumerate(journey.works.works))
    plain = [(at, journey.arrays[work.sources[0]], work.leaf.sharding) for at, work in works if work.way == "plain"]
    path_of = lambda at: journey.works.works[at].leaf.path
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
