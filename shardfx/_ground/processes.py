"""Barriers and messages between the processes of a job, made with JAX's coordination
service, without devices.
"""

import math
import re
import time
from collections.abc import Sequence
from typing import Any

import jax


def coordination() -> Any:
    """JAX's client of the coordination service; `None` if the service does not run."""
    # JAX has no public way to its service; Orbax and others take this one, which is the
    # same in JAX 0.9 to 0.12.
    from jax._src import distributed

    return distributed.global_state.client


def absent(
    client: Any,
    name: str,
    seconds: float,
    me: int,
    processes: Sequence[int] | None = None,
) -> str:
    """Waits at a barrier, and returns the processes that do not arrive in time as text
    like "processes 1, 3", or "".

    **Arguments:**

    - `client`: the client that `coordination` returns.
    - `name`: the name of the barrier. Later barriers may have the same name.
    - `seconds`: the longest time that a process waits for the others.
    - `me`: the number of this process.
    - `processes`: the numbers of the processes to wait for; by default all processes of
      the job.

    **Raises:**

    `JaxRuntimeError` if the coordination service fails.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            milliseconds = max(1, math.ceil(1000 * seconds))
            client.wait_at_barrier(name, milliseconds, processes)
            return ""
        except jax.errors.JaxRuntimeError as error:
            text = str(error)
            late = re.findall(
                r"^(?:\S*task[:/])?(\d+)$",
                text.partition("timed out task names:")[2],
                re.MULTILINE,
            )
            # After a missed barrier, the late process and those waiting at the next one
            # get this error.
            if time.monotonic() < deadline and (
                str(me) in late or text.startswith("INTERNAL: Barrier")
            ):
                continue
            if not text.startswith("DEADLINE_EXCEEDED"):
                raise
            if late:
                return named(sorted(map(int, late)))
            return "processes unknown"


def exchanged(
    client: Any,
    name: str,
    text: str,
    seconds: float,
    me: int,
    processes: Sequence[int],
) -> tuple[dict[int, str], str]:
    """Sends `text` to the other processes. Returns the texts of all processes by their
    numbers, and the late processes.

    The late processes are text like "processes 1, 3", or "" if all arrive in time.
    Their texts may be missing. `client` is the result of `coordination`, and `name` the
    name of the exchange. `me` is the number of this process, and `processes` has the
    numbers of all processes that take part. They wait for each other at two barriers,
    at most `seconds` at each. Raises `JaxRuntimeError` if the coordination service
    fails.
    """
    if len(processes) == 1:
        return {me: text}, ""
    client.key_value_set(f"{name}/{me}", text, True)
    late = absent(
        client=client,
        name=f"{name}/sent",
        seconds=seconds,
        me=me,
        processes=processes,
    )
    texts = {}
    for key, sent in client.key_value_dir_get(name):
        _, _, process = key.rpartition("/")
        texts[int(process)] = sent
    # No process deletes its text, or sends the next one, before all have read it.
    late = late or absent(
        client=client,
        name=f"{name}/read",
        seconds=seconds,
        me=me,
        processes=processes,
    )
    if not late:
        client.key_value_delete(f"{name}/{me}")
    return dict(sorted(texts.items())), late


def exchanged_at_call(
    client: Any,
    name: str,
    text: str,
    seconds: float,
    me: int,
    processes: Sequence[int],
) -> tuple[dict[int, str], str]:
    """Like `exchanged`, for exchanges that go on after one that a process missed.

    Each process counts its own calls, so a process that is late at one call is with the
    others again at the next. Its late call ends as theirs did: it returns its own
    number among the late processes.
    """
    if len(processes) == 1:
        return {me: text}, ""
    call = client.key_value_increment(f"{name}/calls/{me}", 1)
    client.key_value_set(f"{name}/{call}/{me}", text)
    deadline = time.monotonic() + seconds
    texts: dict[int, str] = {}
    missing = []
    for process in processes:
        wait_seconds = deadline - time.monotonic()
        try:
            texts[process] = client.blocking_key_value_get(
                f"{name}/{call}/{process}", max(1, math.ceil(1000 * wait_seconds))
            )
        except jax.errors.JaxRuntimeError as error:
            if not str(error).startswith("DEADLINE_EXCEEDED"):
                raise
            missing.append(process)

    # The key under which a process that missed others tells it to those that it missed.
    late_key = f"{name}/{call}/late"
    if missing:
        # Several processes may set it.
        client.key_value_set(late_key, named(missing), True)
        return texts, named(missing)
    try:
        # Another process gave up, and says on whom.
        return texts, client.key_value_try_get(late_key)
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith("NOT_FOUND"):
            raise
    # All have sent this text, so all have read the one before it.
    client.key_value_delete(f"{name}/{call - 1}/{me}")
    return texts, ""


def named(processes: Sequence[int]) -> str:
    """The text that names processes by their numbers: "process 3" or "processes 1, 3"."""
    listed = ", ".join(map(str, processes[:16]))
    if len(processes) > 16:
        listed += ", ..."
    if len(processes) == 1:
        return f"process {listed}"
    return f"processes {listed}"
