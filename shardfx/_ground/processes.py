"""Barriers and messages between the processes of a job, made with JAX's coordination service, without devices."""

import math
import re
import time
from collections.abc import Sequence
from typing import Any

import jax


def coordination() -> Any:
    """JAX's client of the coordination service; `None` if the service does not run."""
    # JAX has no public way to its service; Orbax and others take this one, which is the same in JAX 0.9 to 0.12.
    from jax._src import distributed

    return distributed.global_state.client


def absent(client: Any, name: str, seconds: float, me: int, processes: Sequence[int] | None = None) -> str:
    """Waits at a barrier until all processes arrive or the time is over, and returns the processes that did not arrive.

    **Arguments:**

    - `client`: the client that `coordination` returns.
    - `name`: the name of the barrier; a name may be used several times.
    - `seconds`: how long the first process to arrive waits for the others.
    - `me`: the number of this process.
    - `processes`: the numbers of the processes to wait for; by default all processes of the job.

    **Returns:**

    Text with the processes that did not arrive, "process 3" or "processes 1, 3"; an empty string if all arrived.

    **Raises:**

    `JaxRuntimeError` if the coordination service fails.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            client.wait_at_barrier(name, max(1, math.ceil(1000 * seconds)), processes)
            return ""
        except jax.errors.JaxRuntimeError as error:
            text = str(error)
            late = re.findall(r"^(?:\S*task[:/])?(\d+)$", text.partition("timed out task names:")[2], re.MULTILINE)
            # After a missed barrier, the late process and those waiting at the next one get this error.
            if time.monotonic() < until and (str(me) in late or text.startswith("INTERNAL: Barrier")):
                continue
            if not text.startswith("DEADLINE_EXCEEDED"):
                raise
            return named(sorted(map(int, late))) if late else "processes unknown"


def exchanged(
    client: Any, name: str, text: str, seconds: float, me: int, processes: Sequence[int]
) -> tuple[dict[int, str], str]:
    """Sends the text of this process to other processes, and returns the texts of all of them.

    **Arguments:**

    - `client`, `seconds`, `me`, `processes`: as in `absent`.
    - `name`: a name for the exchange; a name may be used several times.
    - `text`: the text of this process.

    **Returns:**

    The texts by process, in the order of the processes' numbers; and the processes that did not arrive in time, as text
    like that of `absent`. The texts of these processes may be missing.

    **Raises:**

    `JaxRuntimeError` if the coordination service fails.
    """
    if len(processes) == 1:
        return {me: text}, ""
    client.key_value_set(f"{name}/{me}", text, True)
    late = absent(client, f"{name}/sent", seconds, me, processes)
    found = sorted((int(key.rpartition("/")[2]), one) for key, one in client.key_value_dir_get(name))
    # No process deletes its text, or sends the next one, before all have read it.
    late = late or absent(client, f"{name}/read", seconds, me, processes)
    if not late:
        client.key_value_delete(f"{name}/{me}")
    return dict(found), late


def named(processes: Sequence[int]) -> str:
    """The text that names processes by their numbers: "process 3" or "processes 1, 3"."""
    listed = ", ".join(map(str, processes[:16])) + (", ..." if len(processes) > 16 else "")
    return f"process {listed}" if len(processes) == 1 else f"processes {listed}"
