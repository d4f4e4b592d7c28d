"""The scripts of docs/launch.md, started as each launcher starts them: with its
environment variables, on this machine.
"""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from _processes import free_port


pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[2]
SCRIPTS = dict(
    re.findall(
        r'^```py title="([\w.]+)"\n(.*?)^```$',
        (ROOT / "docs" / "launch.md").read_text(),
        re.DOTALL | re.MULTILINE,
    )
)
# The coordinator of a test listens on this machine alone.
RUNNER = """
import functools, os, runpy, sys
import jax
bind = os.environ["BIND"]
start = functools.partial(jax.distributed.initialize, coordinator_bind_address=bind)
jax.distributed.initialize = start
if "TPU_WORKER_ID" in os.environ:
    from jax._src.clusters import cloud_tpu_cluster
    cloud_tpu_cluster.running_in_cloud_tpu_vm = True
if sys.argv[1:]:
    runpy.run_path(sys.argv[1], run_name="__main__")
"""
# What `ray_job.py` uses of Ray, with a process for each actor.
RAY = """
import subprocess, sys, types
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
        code = f"import runner, ray_job; ray_job.Process.kind().run(*{args!r})"
        child = subprocess.Popen([sys.executable, "-c", code])
        def wait():
            assert child.wait(100) == 0
        return wait

class Actor:
    address, run = Method("address"), Method("run")

def remote(**_):
    return lambda kind: types.SimpleNamespace(kind=kind, remote=Actor)
"""


def slurm(index: int, count: int, port: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_NODELIST": "127.0.0.1,127.0.0.1",
        "SLURM_NTASKS": str(count),
        "SLURM_PROCID": str(index),
        "SLURM_LOCALID": str(index % 2),
        "JAX_COORDINATOR_PORT": str(port),
    }


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


@pytest.mark.parametrize(
    ("variables", "started", "count"),
    [(slurm, 4, 4), (indexed_job, 2, 2), (tpu_vm, 2, 2), (ray_job, 1, 2)],
)
def test_a_script_of_the_page_starts_and_trains(variables, started, count, tmp_path):
    for name, text in SCRIPTS.items():
        (tmp_path / name).write_text(text)
    port = free_port()
    if variables is ray_job:
        (tmp_path / "ray.py").write_text(textwrap.dedent(RAY))
        (tmp_path / "ray_job.py").write_text(
            SCRIPTS["ray_job.py"].replace(":1234", f":{port}")
        )
    (tmp_path / "runner.py").write_text(RUNNER)
    others = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "TPU_", "MEGASCALE_", "KUBERNETES_", "XLA_"))
    }
    script = tmp_path / f"{variables.__name__}.py"
    children = [
        subprocess.Popen(
            [sys.executable, "runner.py", script.name],
            cwd=tmp_path,
            env={
                **others,
                "JAX_PLATFORMS": "cpu",
                "JAX_NUM_CPU_DEVICES": "2",
                "BIND": f"127.0.0.1:{port}",
                "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)]),
                **variables(index, count, port),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(started)
    ]
    try:
        texts = [child.communicate(timeout=110)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0] * started, "\n".join(texts)
    # Rows hold the number of their process, and each is summed over 64 ones.
    mean = 64 * sum(range(count)) / count
    printed = "".join(texts)
    assert printed.count(f"processes {count} devices {2 * count}\n") == 1
    assert f"mean {mean}\n" in printed


def test_the_page_has_a_script_for_each_launcher():
    launchers = {"slurm.py", "indexed_job.py", "tpu_vm.py", "ray_job.py"}
    assert SCRIPTS.keys() == {"train.py", *launchers}
    # "The script of ten lines for each", beside train.py.
    for name in launchers - {"ray_job.py"}:
        code = [line for line in SCRIPTS[name].splitlines() if line.strip()]
        assert len([line for line in code if not line.startswith("#")]) <= 10
