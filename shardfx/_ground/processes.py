"""Barriers between the processes of a job, made with JAX's coordination service, without devices."""

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


def named(processes: Sequence[int]) -> str:
    """The text that names processes by their numbers: "process 3" or "processes 1, 3"."""
    listed = ", ".join(map(str, processes[:16])) + (", ..." if len(processes) > 16 else "")
    return f"process {listed}" if len(processes) == 1 else f"processes {listed}"
