"""Barriers between the processes of a job by JAX's coordination service, which need no devices."""

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
    """The processes that did not reach a barrier in time.

    **Arguments:**

    - `client`: the client that `coordination` returned.
    - `name`: the name of the barrier. It may be used again.
    - `seconds`: how long the first process waits for the others.
    - `me`: the number of this process.
    - `processes`: all whom it waits for; by default those of the job.

    **Returns:**

    The processes that did not come, "process 3" or "processes 1, 3"; empty text if all came.

    **Raises:**

    `JaxRuntimeError` where the service fails.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            client.wait_at_barrier(name, max(1, math.ceil(1000 * seconds)), processes)
            return ""
        except jax.errors.JaxRuntimeError as error:
            text = str(error)
            late = re.findall(r"^(?:\S*task[:/])?(\d+)$", text.partition("timed out task names:")[2], re.MULTILINE)
            # A process that once did not come is told so when it comes the next time, and so is who waits there then.
            if time.monotonic() < until and (str(me) in late or text.startswith("INTERNAL: Barrier")):
                continue
            if not text.startswith("DEADLINE_EXCEEDED"):
                raise
            return named(sorted(map(int, late))) if late else "processes unknown"


def named(processes: Sequence[int]) -> str:
    """The processes by their numbers, as text: "process 3", "processes 1, 3"."""
    listed = ", ".join(map(str, processes[:16])) + (", ..." if len(processes) > 16 else "")
    return f"process {listed}" if len(processes) == 1 else f"processes {listed}"
