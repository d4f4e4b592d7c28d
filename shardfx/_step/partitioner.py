"""XLA's own partitioner: makes the program of one device from a module as JAX lowers
it, without the devices.

The partitioner runs in a second process (`worker.py`), since XLA can abort its process.
The second process also stops XLA after the partitioner: all passes take up to 100 times
as long.
"""

import functools as ft
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .._ground.errors import MeshError, ProgramError
from .lowered import Dims
from .process import Worker


# 16,384 devices take XLA 4 s, and 65,536 minutes. The CPU's compiler, whose program is
# finished, starts threads for each device besides.
MOST_DEVICES = 8192
# The passes of XLA's pipeline after which the text can be requested; after the last, a
# program for CPUs is final.
_WHOLE = "before_spmd-partitioning"
_PARTITIONED = "after_spmd-partitioning"
_UNPROPAGATED = "before_shardy-xla"
_FINISHED = "after_optimizations"
_SECONDS = 600.0
_WORKER = Path(__file__).with_name("worker.py")


def partitioned(
    module: bytes,
    devices: int,
    *,
    finished: bool = False,
) -> str:
    """The HLO text of one device's program, as XLA's SPMD partitioner leaves it.

    **Arguments:**

    - `module`: StableHLO bytecode as JAX lowers it, with `devices` as its
      `mhlo.num_partitions`.
    - `devices`: the number of devices that run the program, at most 8,192.
    - `finished`: whether to return the program after all passes of the CPU's compiler
      instead.

    **Raises:**

    `ProgramError` with XLA's own message if XLA cannot partition the program;
    `MeshError` for more than 8,192 devices.
    """
    dumped = _FINISHED if finished else _PARTITIONED
    request = {
        "devices": devices,
        "seconds": _SECONDS,
        "dumped": [dumped],
        "propagated": None,
    }
    return _asked(module, request)[0].decode()


class Programs(NamedTuple):
    """A program before and after XLA's SPMD partitioner, as HLO texts.

    - `whole`: the program of all devices, with the sharding of each value.
    - `partitioned`: the program of one device.
    """

    whole: str
    partitioned: str


def programs(module: bytes, devices: int) -> Programs:
    """The program of a module before and after XLA's SPMD partitioner, with all numbers
    of its constants. The arguments and errors are those of `partitioned`.
    """
    request = {
        "devices": devices,
        "seconds": _SECONDS,
        "dumped": [_PARTITIONED, _WHOLE],
        "propagated": None,
    }
    after, before = _asked(module, request)
    return Programs(whole=before.decode(), partitioned=after.decode())


def propagated(
    module: bytes,
    mesh: Mapping[str, int],
    arguments: Sequence[Dims | None],
    results: Sequence[Dims | None],
) -> bytes:
    """The StableHLO bytecode of a module, with the sharding that XLA's Shardy pass
    chooses for each array. `mesh` has the sizes of the mesh axes. Shardy may choose the
    shardings of arguments and results that are `None`. Raises `ProgramError` with
    Shardy's own message if Shardy fails.
    """
    asked = {"mesh": dict(mesh), "arguments": arguments, "results": results}
    request = {
        "devices": math.prod(mesh.values()),
        "seconds": _SECONDS,
        "dumped": [_UNPROPAGATED],
        "propagated": asked,
    }
    return _asked(module, request)[0]


def _asked(module: bytes, request: dict[str, Any]) -> list[bytes]:
    """The texts that `worker.py` answers to a request about a module. Raises
    `ProgramError` with the error text of its answer, and `MeshError` for too many
    devices.
    """
    count = request["devices"]
    if count > MOST_DEVICES:
        raise MeshError(
            f"XLA's partitioner takes too long for more than {MOST_DEVICES:,} devices,"
            f" and the mesh has {count:,}; use less."
        )
    worker = _worker(os.getpid())
    if not worker.is_alive:
        worker.end()
        _worker.cache_clear()
        worker = _worker(os.getpid())
    texts, error = worker.ask(module, request)
    if error:
        raise ProgramError(
            f"XLA cannot partition this step for {count} devices: {error:.2000}"
        )
    return texts


@ft.lru_cache(maxsize=1)
def _worker(_process_id: int) -> Worker:
    """The process that partitions modules for the Python process with this id. A forked
    child starts its own.
    """
    return Worker([str(_WORKER)])
