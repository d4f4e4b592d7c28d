"""Jobs of several JAX processes on this machine: started, timed, and gone when the test
is.
"""

import dataclasses
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, TextIO


WORKER = Path(__file__).with_name("multiprocess_worker.py")


@dataclasses.dataclass
class Outcome:
    """How one process ended."""

    returncode: int | None
    seconds: float
    log: str
    result: Any


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(
    task,
    count,
    devices,
    folder,
    *,
    worker=WORKER,
    deadline_seconds=120.0,
    tasks_for=None,
):
    """Runs `task` of the program `worker` in `count` processes of `devices` emulated
    devices each.

    `tasks_for` gives single processes another task. No process outlives the call,
    whatever happens.
    """
    port = free_port()
    folder = Path(folder)
    environment = _environment()
    started = time.monotonic()
    children = []
    logs = []
    ended: dict[int, float] = {}
    try:
        for index in range(count):
            name = (tasks_for or {}).get(index, task)
            log = (folder / f"{index}.log").open("w+")
            logs.append(log)
            facts = (name, index, count, devices, port, folder)
            command = [sys.executable, str(worker), *map(str, facts)]
            child = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
            children.append(child)
        while len(ended) < count and time.monotonic() - started < deadline_seconds:
            for index, child in enumerate(children):
                if index not in ended and child.poll() is not None:
                    ended[index] = time.monotonic() - started
            time.sleep(0.05)
    finally:
        for child in children:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    outcomes = []
    for index, (child, log) in enumerate(zip(children, logs, strict=True)):
        was_killed = index not in ended
        outcome = Outcome(
            returncode=None if was_killed else child.returncode,
            seconds=ended.get(index, deadline_seconds),
            log=_read_and_close(log),
            result=_result_of(folder / f"{index}.pickle"),
        )
        outcomes.append(outcome)
    return outcomes


def _environment() -> dict[str, str]:
    folders = [str(WORKER.parent.parent)]
    if os.environ.get("PYTHONPATH"):
        folders.append(os.environ["PYTHONPATH"])
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONHASHSEED": "random",
        "PYTHONPATH": os.pathsep.join(folders),
    }


def _read_and_close(log: TextIO) -> str:
    log.seek(0)
    with log:
        return log.read()


def _result_of(stored: Path) -> Any:
    """What a process wrote, or nothing."""
    if not stored.exists():
        return None
    return pickle.loads(stored.read_bytes())
