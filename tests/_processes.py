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
from typing import Any


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
    search = os.pathsep.join(
        [str(WORKER.parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONHASHSEED": "random",
        "PYTHONPATH": search,
    }
    started = time.monotonic()
    children = []
    logs = []
    ended: dict[int, float] = {}
    try:
        for index in range(count):
            name = (tasks_for or {}).get(index, task)
            logs.append((folder / f"{index}.log").open("w+"))
            command = [
                sys.executable,
                str(worker),
                name,
                str(index),
                str(count),
                str(devices),
                str(port),
                str(folder),
            ]
            children.append(
                subprocess.Popen(
                    command,
                    stdout=logs[-1],
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
            )
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
        log.seek(0)
        stored = folder / f"{index}.pickle"
        if stored.exists():
            result = pickle.loads(stored.read_bytes())
        else:
            result = None
        killed = index not in ended
        outcomes.append(
            Outcome(
                returncode=None if killed else child.returncode,
                seconds=ended.get(index, deadline_seconds),
                log=log.read(),
                result=result,
            )
        )
        log.close()
    return outcomes
