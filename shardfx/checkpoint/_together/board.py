"""Where the processes of one job leave each other short notes: the key-value store of JAX's coordination service.

It needs no devices and runs no program, so that nothing waits for ever where one process does something else.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax

from ..._ground.errors import CheckpointError


_ROOT = "shardfx.save/"


@dataclasses.dataclass(frozen=True)
class Board:
    """Notes under names like paths; every call returns within a bounded time.

    **Arguments:**

    - `client`: JAX's client of the service.
    """

    client: Any

    def put(self, name: str, text: str) -> None:
        """Leaves a note, in the place of an older one."""
        self._asked(self.client.key_value_set, name, text, True)

    def get(self, name: str, seconds: float) -> str | None:
        """The note, waited for so long."""
        milliseconds = max(1, math.ceil(seconds * 1000))
        return self._asked(self.client.blocking_key_value_get, name, milliseconds, absent="DEADLINE_EXCEEDED")

    def find(self, name: str) -> str | None:
        """The note, if it is there now."""
        return self._asked(self.client.key_value_try_get, name, absent="NOT_FOUND")

    def look(self, folder: str) -> dict[str, str]:
        """All notes of a folder that are there now."""
        found = self._asked(self.client.key_value_dir_get, folder)
        return {name.rpartition("/")[2]: text for name, text in found}

    def remove(self, name: str) -> None:
        """Takes away a note, or all that lie in the folder of that name."""
        self._asked(self.client.key_value_delete, name)

    def _asked(self, call: Callable[..., Any], name: str, *args: Any, absent: str | None = None) -> Any:
        """What the service answers; `None` where its error begins with `absent`: it tells by words alone why."""
        try:
            return call(_ROOT + name, *args)
        except jax.errors.JaxRuntimeError as error:
            if absent is not None and str(error).startswith(absent):
                return None
            raise _gone(error) from error


def board_of_this_job() -> Board:
    """The board of this job.

    **Raises:**

    `CheckpointError` if the job has no coordination service.
    """
    # JAX has no public way to its service; Orbax and others take this one, which is the same in JAX 0.9 to 0.10.
    from jax._src import distributed

    client = distributed.global_state.client
    if client is None:
        raise CheckpointError(
            f"the arrays lie on several of {jax.process_count()} processes, which agree on a save through JAX's "
            "coordination service, and it does not run; call `jax.distributed.initialize()` when the program starts."
        )
    return Board(client)


def _gone(error: Exception) -> CheckpointError:
    first = str(error).partition("\n")[0]
    return CheckpointError(
        f"JAX's coordination service does not answer ({first:.200}): its process, the one with number 0, has ended, or "
        "the network fails; start the job again."
    )
