"""The check that all processes which move a tree together move it by the same map."""

import functools as ft
from collections.abc import Iterable

import jax

from .._convert import TreeMap
from .._ground.errors import MapError
from .._ground.processes import coordination, exchanged
from .pieces.assembly import MovedLeaf


_WAIT_SECONDS = 60


def processes_of(leaves: Iterable[MovedLeaf]) -> tuple[int, ...]:
    """The processes whose devices hold some of the arrays."""
    shardings = {leaf.sharding for leaf in leaves}
    processes: set[int] = set()
    for sharding in shardings:
        if sharding is not None:
            processes |= {device.process_index for device in sharding.device_set}
    return tuple(sorted(processes))


@ft.lru_cache(maxsize=64)
def require_same_map(map: TreeMap, processes: tuple[int, ...]) -> None:
    """Raises `MapError` unless all of `processes`, which move a tree together, have the
    same map. They compare it through JAX's coordination service, if there is one. A
    process that waits too long for the others raises it too.
    """
    client = coordination()
    me = jax.process_index()
    if client is None or me not in processes:
        return
    name = f"shardfx.maps/{'-'.join(str(process) for process in processes)}"
    # The digest of each process's map, and the late processes: "processes 1, 3" or "".
    digests, late = exchanged(
        client=client,
        name=name,
        text=map.digest,
        seconds=_WAIT_SECONDS,
        me=me,
        processes=processes,
    )
    if late:
        raise MapError(
            f"the processes {list(processes)} compare a map before they first move by"
            f" it, and {late} did not come within {_WAIT_SECONDS} s; call `reshard`"
            " with this map on all of them. Nothing was moved."
        )
    for process, digest in digests.items():
        if digest == map.digest:
            continue
        raise MapError(
            f"process {me} and process {process} move by different maps; make the map"
            " from the same numbers on every process: `hosts.assert_same_plan(map)`"
            " says where they differ. Nothing was moved."
        )
