"""The scripts of docs/launch.md, started as each launcher starts them: with its
environment variables, on this machine.
"""

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
import pytest
from _processes import free_port


pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[2]
# The devices of a job, shared by its processes.
DEVICES = 4
SCRIPTS = dict(
    re.findall(
        r'^```py title="([\w.]+)"\n(.*?)^```$',
        (ROOT / "docs" / "launch.md").read_text(),
        re.DOTALL | re.MULTILINE,
    )
)
# Starts the launchers' processes as forks of one process that has imported JAX, which
# takes longer than the scripts do. No process has devices when it is forked. A fork
# shares what it imports: frozen, no collection of garbage writes to it, which would
# take longer than all else that a fork does. The coordinator of a test listens on this
# machine alone. Each line that it reads has the processes of one job.
RUNNER = """
import functools, gc, json, os, runpy, sys
import jax
from shardfx import checkpoint
from train import sfx

imported = sfx.auto.plan, sfx.filter_jit, sfx.hosts.global_batch, checkpoint.save
gc.collect()
gc.freeze()
start = jax.distributed.initialize

def run(launch):
    os.chdir(launch["folder"])
    log = os.open(launch["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(launch["variables"])
    jax.config.update("jax_num_cpu_devices", launch["devices"])
    sys.argv[1:] = launch["arguments"]
    address = launch["bind"]
    jax.distributed.initialize = functools.partial(
        start, coordinator_bind_address=address
    )
    if "TPU_WORKER_ID" in os.environ:
        from jax._src.clusters import cloud_tpu_cluster
        cloud_tpu_cluster.running_in_cloud_tpu_vm = True
    runpy.run_path(launch["script"], run_name="__main__")
    print("sees GPUs", jax.config._read("jax_cuda_visible_devices"), flush=True)

while line := sys.stdin.readline():
    children = []
    for launch in json.loads(line):
        child = os.fork()
        if not child:
            run(launch)
            sys.exit()
        children.append(child)
    print(json.dumps([os.waitpid(child, 0)[1] for child in children]), flush=True)
"""
# What `ray_job.py` uses of Ray, with a process for each actor.
RAY = """
import os, sys, types
init = lambda: None
util = types.SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
get = lambda values: [get(v) for v in values] if isinstance(values, list) else values()

class Method:
    def __init__(self, name): self.name = name
    def remote(self, *args):
        from __main__ import Process
        if self.name == "address":
            address = Process.kind().address()
            return lambda: address
        child = os.fork()
        if not child:
            Process.kind().run(*args)
            sys.exit()
        def wait():
            assert os.waitpid(child, 0)[1] == 0
        return wait

class Actor:
    address, run = Method("address"), Method("run")

def remote(**_):
    return lambda kind: types.SimpleNamespace(kind=kind, remote=Actor)
"""


def by_hand(_index: int, _count: int, _port: int) -> dict[str, str]:
    return {}


def slurm(index: int, count: int, port: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_NODELIST": "127.0.0.1,127.0.0.1",
        "SLURM_NTASKS": str(count),
        "SLURM_PROCID": str(index),
        "SLURM_LOCALID": "0",
        "JAX_COORDINATOR_PORT": str(port),
    }


def slurm_per_gpu(index: int, count: int, port: int) -> dict[str, str]:
    """One process for each GPU of a node."""
    return {**slurm(index, count, port), "SLURM_LOCALID": str(index)}


def indexed_job(index: int, count: int, port: int) -> dict[str, str]:
    return {
        "COORDINATOR": f"127.0.0.1:{port}",
        "PROCESSES": str(count),
        "JOB_COMPLETION_INDEX": str(index),
    }


def tpu_vm(index: int, count: int, port: int) -> dict[str, str]:
    return {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": ",".join(["127.0.0.1"] * count),
        "TPU_WORKER_ID": str(index),
        "MEGASCALE_COORDINATOR_ADDRESS": "127.0.0.1",
        "MEGASCALE_NUM_SLICES": "1",
        "MEGASCALE_SLICE_ID": "0",
        "JAX_COORDINATOR_PORT": str(port),
    }


def ray_job(_index: int, _count: int, _port: int) -> dict[str, str]:
    return {}


class Start(NamedTuple):
    """A launcher, and the number of processes of its job."""

    launcher: Callable[..., dict[str, str]]
    processes: int


# The page's scripts are for two processes. JAX counts those of SLURM and of TPUs; the
# others are told how many they are, as those by hand that resume are.
STARTS = [
    Start(by_hand, 2),
    Start(slurm, 2),
    Start(slurm, 4),
    Start(slurm_per_gpu, 2),
    Start(slurm_per_gpu, 4),
    Start(indexed_job, 2),
    Start(tpu_vm, 2),
    Start(tpu_vm, 4),
    Start(ray_job, 2),
]
RESUMED = Start(by_hand, 4)


def started_by(start: Start) -> int:
    """The processes that a launcher starts itself. Ray's driver starts the others."""
    if start.launcher is ray_job:
        return 1
    return start.processes


def script_for(launcher: Callable[..., dict[str, str]], port: int) -> str:
    """The script of the page that a launcher starts."""
    name = launcher.__name__
    if launcher is slurm_per_gpu:
        name = "slurm"
    script = SCRIPTS[f"{name}.py"].replace(":1234", f":{port}")
    if launcher is slurm_per_gpu:
        # "With one process per GPU, leave `local_device_ids` out."
        script = script.replace("local_device_ids=range(8)", "")
    return script


class Ended(NamedTuple):
    """The statuses of the processes that a launcher started, and what they printed."""

    statuses: list[int]
    text: str


class Jobs(NamedTuple):
    """What came of the processes of each start. `resumed` are processes started by
    hand, of another number, that load what those before saved. `losses` are those of
    one device: of three steps before the save, and of three after it.
    """

    ended: dict[Start, Ended]
    resumed: Ended
    losses: list[float]


def log_of(start: Start) -> str:
    return f"{start.launcher.__name__}_{start.processes}.txt"


def launches_of(
    folder: Path, start: Start, saved: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    """What `RUNNER` needs to start each of the processes that a launcher starts. Their
    script is written to the `folder`. `saved` names what a job by hand loads.
    """
    launcher, count = start
    port = free_port()
    script = f"{launcher.__name__}_{count}.py"
    (folder / script).write_text(script_for(launcher, port))
    return [
        {
            "folder": str(folder),
            "script": script,
            "log": log_of(start),
            "devices": DEVICES // count,
            "bind": f"127.0.0.1:{port}",
            "variables": launcher(index, count, port),
            "arguments": [str(count), str(index), *saved],
        }
        for index in range(started_by(start))
    ]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """The process of which those of all jobs are forks."""
    folder = tmp_path_factory.mktemp("runner")
    (folder / "train.py").write_text(SCRIPTS["train.py"])
    (folder / "ray.py").write_text(RAY)
    (folder / "runner.py").write_text(RUNNER)
    others = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "TPU_", "MEGASCALE_", "KUBERNETES_"))
    }
    environment = {
        **others,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    process = subprocess.Popen(
        [sys.executable, "runner.py"],
        cwd=folder,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    yield process
    _end(process)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


def _end(runner: subprocess.Popen[str]) -> None:
    """Ends the process and its forks, which are of its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(runner.pid, signal.SIGKILL)


def statuses_of(
    runner: subprocess.Popen[str], launches: list[dict[str, Any]]
) -> list[int]:
    """Starts processes, all at once, and returns their statuses."""
    assert runner.stdin is not None
    assert runner.stdout is not None
    runner.stdin.write(f"{json.dumps(launches)}\n")
    runner.stdin.flush()
    deadline = threading.Timer(300, _end, [runner])
    deadline.start()
    try:
        return json.loads(runner.stdout.readline())
    finally:
        deadline.cancel()


@pytest.fixture(scope="module")
def jobs(
    tmp_path_factory: pytest.TempPathFactory, runner: subprocess.Popen[str]
) -> Jobs:
    """What came of the processes of each start, all of which run at once, and of those
    that resume.
    """
    folder = tmp_path_factory.mktemp("launchers")
    launches = []
    for start in STARTS:
        launches += launches_of(folder, start)
    statuses = iter(statuses_of(runner, launches))
    ended = {}
    for start in STARTS:
        ended[start] = Ended(
            statuses=list(itertools.islice(statuses, started_by(start))),
            text=(folder / log_of(start)).read_text(),
        )
    launches = launches_of(folder, RESUMED, saved=("step_3",))
    resumed = Ended(
        statuses=statuses_of(runner, launches),
        text=(folder / log_of(RESUMED)).read_text(),
    )
    return Jobs(ended=ended, resumed=resumed, losses=losses_on_one_device())


def losses_on_one_device() -> list[float]:
    """The losses of six steps of the page."""
    names: dict[str, Any] = {}
    exec(SCRIPTS["train.py"], names)
    model = names["make"](jax.random.key(0))
    state = names["optimizer"].init(eqx.filter(model, eqx.is_array))
    step = eqx.filter_jit(names["step"])
    rows = np.tile(np.linspace(0, 1, 16, dtype=np.float32)[:, None], 64)
    losses = []
    for _ in range(6):
        model, state, loss = step(model, state, rows)
        losses.append(float(loss))
    return losses


def printed_losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^loss (.+)$", text, re.MULTILINE)]


@pytest.mark.parametrize("start", STARTS, ids=log_of)
def test_a_script_of_the_page_starts_and_trains(start: Start, jobs: Jobs):
    statuses, text = jobs.ended[start]
    assert statuses == [0] * started_by(start), text
    assert text.count(f"processes {start.processes} devices {DEVICES}\n") == 1
    losses = printed_losses(text)
    assert losses == pytest.approx(jobs.losses[:3], rel=1e-5)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("count", [2, 4])
def test_slurm_gives_each_process_its_gpus(count: int, jobs: Jobs):
    _, text = jobs.ended[Start(slurm, count)]
    assert text.count("sees GPUs 0,1,2,3,4,5,6,7\n") == count
    _, text = jobs.ended[Start(slurm_per_gpu, count)]
    for index in range(count):
        assert text.count(f"sees GPUs {index}\n") == 1


def test_other_processes_by_hand_go_on_from_what_was_saved(jobs: Jobs):
    statuses, text = jobs.resumed
    assert statuses == [0] * RESUMED.processes, text
    assert f"processes {RESUMED.processes} devices {DEVICES}\n" in text
    assert printed_losses(text) == pytest.approx(jobs.losses[3:], rel=1e-5)


def test_the_page_has_a_script_for_each_launcher():
    launchers = {"by_hand.py", "slurm.py", "indexed_job.py", "tpu_vm.py", "ray_job.py"}
    assert SCRIPTS.keys() == {"train.py", *launchers}
    # "The script of ten lines for each", beside train.py.
    for name in launchers - {"ray_job.py"}:
        code = [line for line in SCRIPTS[name].splitlines() if line.strip()]
        lines = [line for line in code if not line.startswith("#")]
        count = len(lines)
        assert count <= 10
