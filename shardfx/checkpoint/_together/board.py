"""Where the processes of one job leave each other short notes: the key-value store of JAX's coordination service.

It needs no devices and runs no program, so that nothing waits for ever where one process does something else.
"""

import dataclasses
import math
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
        try:
            self.client.key_value_set(_ROOT + name, text, True)
        except jax.errors.JaxRuntimeError as error:
            raise _gone(error) from error

    def get(self, name: str, seconds: float) -> str | None:
        """The note, waited for so long."""
        try:
            return self.client.blocking_key_value_get(_ROOT + name, max(1, math.ceil(seconds * 1000)))
        except jax.errors.JaxRuntimeError as error:
            # The service tells by words alone why it has no answer.
            if str(error).startswith("DEADLINE_EXCEEDED"):
                return None
            raise _gone(error) from error

    def find(self, name: str) -> str | None:
        """The note, if it is there now."""
        try:
            return self.client.key_value_try_get(_ROOT + name)
        except jax.errors.JaxRuntimeError as error:
            if str(error).startswith("NOT_FOUND"):
                return None
            raise _gone(error) from error

    def look(self, folder: str) -> dict[str, str]:
        """All notes of a folder that are there now."""
        try:
            found = self.client.key_value_dir_get(_ROOT + folder)
        except jax.errors.JaxRuntimeError as error:
            raise _gone(error) from error
        return {name.rpartition("/")[2]: text for name, text in found}

    def remove(self, name: str) -> None:
        """Takes away a note, or all that lie in the folder of that name."""
        try:
            self.client.key_value_delete(_ROOT + name)
        except jax.errors.JaxRuntimeError as error:
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
