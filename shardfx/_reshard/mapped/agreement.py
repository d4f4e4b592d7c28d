"""Whether the processes that move a tree have the same map; each map is compared once."""

import functools as ft

import jax

from ..._convert import TreeMap
from ..._ground.errors import MapError


_WAIT_SECONDS = 60
_ROOT = "shardfx.maps"


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
