"""What the processes of one save must agree on: a name, and at each step that all of them have come through it."""

import contextlib
import dataclasses
import os
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from .._errors import CheckpointError


@dataclasses.dataclass(frozen=True)
class Group:
    """The processes that save together; with one of them, nothing is exchanged."""

    count: int
    is_first: bool

    def token(self) -> str:
        """A random name, the same on every process."""
        drawn = np.frombuffer(os.urandom(8), np.uint32)
        if self.count > 1:
            from jax.experimental import multihost_utils

            drawn = np.asarray(multihost_utils.broadcast_one_to_all(drawn))
        return drawn.tobytes().hex()

    @contextlib.contextmanager
    def together(self, path: str) -> Iterator[None]:
        """Waits at the end until every process is there; raises on all of them if it raised on one."""
        failed: Exception | None = None
        try:
            yield
        except (ValueError, OSError, RuntimeError, MemoryError) as error:
            # Raised below: the other processes must first hear of it, or they would wait for this one.
            failed = error
        if self.count > 1:
            failures = _gathered(failed is not None, path)
            if failed is None and failures:
                raise CheckpointError(
                    f"saving to {path!r} failed on process {', '.join(map(str, failures))}, whose error says why; "
                    "nothing was changed there."
                )
        if failed is not None:
            raise failed


def _gathered(failed: bool, path: str) -> list[int]:
    from jax.experimental import multihost_utils

    mine = np.array([failed, zlib.crc32(path.encode())], np.uint32)
    table = np.asarray(multihost_utils.process_allgather(mine)).reshape(-1, 2)
    if len(set(table[:, 1].tolist())) > 1:
        raise CheckpointError(
            f"the processes save to different paths, this one to {path!r}; give all of them the same."
        )
    return np.flatnonzero(table[:, 0]).tolist()


def processes_of(values: Sequence[Any]) -> Group:
    """The processes whose devices hold the arrays."""
    holders = {
        device.process_index for value in values if isinstance(value, jax.Array) for device in value.sharding.device_set
    }
    # The collectives that they agree through run over all processes, so all of them must take part.
    count = jax.process_count() if len(holders) > 1 else 1
    return Group(count, count == 1 or jax.process_index() == 0)
