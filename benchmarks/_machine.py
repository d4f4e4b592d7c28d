"""The machine and the versions behind a result, and memory as the operating system
counts it.
"""

import importlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


LIBRARIES = (
    "shardfx",
    "jax",
    "jaxlib",
    "equinox",
    "numpy",
    "optax",
    "flax",
    "eformer",
    "scalax",
    "safetensors",
    "tensorstore",
    "orbax-checkpoint",
    "libtpu",
)


def versions() -> dict[str, str]:
    """Installed versions of everything that takes part."""
    version_by_name = {
        d.metadata["Name"].lower(): d.version
        for d in importlib.metadata.distributions()
    }
    return {
        name: version_by_name[name] for name in LIBRARIES if name in version_by_name
    }


def machine(devices: list[Any]) -> dict[str, str | int]:
    """Processor, cores, memory, devices."""
    cpu = [
        line.split(":", 1)[1].strip()
        for line in _lines("/proc/cpuinfo")
        if line.startswith("model name")
    ]
    total = [
        int(line.split()[1])
        for line in _lines("/proc/meminfo")
        if line.startswith("MemTotal")
    ]
    return {
        "processor": cpu[0] if cpu else platform.processor() or platform.machine(),
        "cores": os.cpu_count() or 1,
        "memory_gib": round(total[0] / 2**20) if total else 0,
        "system": platform.system(),
        "python": platform.python_version(),
        "platform": devices[0].platform,
        "device_kind": devices[0].device_kind,
        "device_count": len(devices),
    }


def fresh_process(
    target: str,
    arguments: Mapping[str, Any] | None = None,
    *,
    timeout_seconds: float = 600,
) -> Any:
    """Calls `target` ("benchmarks.load:peak") with keyword `arguments` in a new Python
    process.

    Arguments and result travel as JSON. Peak memory can only be told apart per process,
    so every measurement of it runs through here.
    """
    code = (
        "import importlib, json, sys; module, name = sys.argv[1].split(':'); result ="
        " getattr(importlib.import_module(module), name)(**json.loads(sys.argv[2]));"
        " print('\\n' + json.dumps(result))"
    )
    encoded = json.dumps(dict(arguments or {}))
    command = [sys.executable, "-c", code, target, encoded]
    root = Path(__file__).parent.parent
    done = subprocess.run(
        command,
        cwd=root,
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
    )
    if done.returncode != 0:
        raise RuntimeError(f"`{target}` failed in its process:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def figures_of_loader(target: str, arguments: Mapping[str, Any]) -> dict[str, float]:
    """What `target` measures in a new process, each figure under the loader's name."""
    figures = fresh_process(target, arguments)
    name = arguments["name"]
    return {f"{figure}.{name}": value for figure, value in figures.items()}


def memory_over(load: Callable[[], Any], held_bytes: int) -> dict[str, float]:
    """The most memory that a load takes in this process, and what stays, over the bytes
    of its tensors.
    """
    import jax

    reset_peak()
    before = resident_bytes()
    result = jax.block_until_ready(load())
    peak = peak_resident_bytes() - before
    resident = resident_bytes() - before
    del result
    return {
        "peak_over_tensors": peak / held_bytes,
        "resident_over_tensors": resident / held_bytes,
    }


def resident_bytes() -> int:
    """What this process holds in memory now."""
    return _status("VmRSS")


def peak_resident_bytes() -> int:
    """The most that this process has held since it started, or since `reset_peak`."""
    return _status("VmHWM")


def reset_peak() -> None:
    """Makes `peak_resident_bytes` count from now."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(key: str) -> int:
    [value] = [
        line.split()[1]
        for line in _lines("/proc/self/status")
        if line.startswith(key + ":")
    ]
    return int(value) * 1024


def _lines(path: str) -> list[str]:
    file = Path(path)
    if file.exists():
        return file.read_text().splitlines()
    return []
