"""The suite `load`: first loads, memory and cold files, each in a process of its own."""

import functools as ft
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from shardfx import PathRules, ShardPlan, plan

from ._case import Value
from ._load_files import CUTS, checkpoint_folder, file_bytes, plan_of_cut, read_through
from ._load_rivals import ABSENT, LOADERS, flax_file
from ._machine import figures_of_loader, fresh_process, memory_over
from ._runner import Options


def first_loads(mebibytes: int, options: Options) -> Mapping[str, Value]:
    """Later loads find memory that earlier ones have touched, which is most of the
    cost; a real load is the first.
    """
    file = checkpoint_folder(mebibytes) / "model.safetensors"
    values = dict(ABSENT)
    for cut in ("rows", "columns"):
        seconds: dict[str, list[float]] = {name: [] for name in LOADERS}
        for _ in range(1 if options.quick else min(5, options.repeats)):
            for name, taken in seconds.items():
                arguments = {
                    "file": str(file),
                    "mebibytes": mebibytes,
                    "name": name,
                    "cut": cut,
                }
                read_through(_read_by(name, file))
                taken.append(
                    fresh_process(
                        "benchmarks._load_processes:first_load_of",
                        arguments | {"devices": len(options.devices)},
                    )
                )
        medians = {name: statistics.median(taken) for name, taken in seconds.items()}
        for name, median in medians.items():
            values[f"first_gigabytes_per_second.{cut}.{name}"] = (
                file_bytes(mebibytes) / median / 1e9
            )
            if name != "shardfx":
                values[f"faster_than.{cut}.{name}"] = median / medians["shardfx"]
    return values


def _read_by(name: str, file: Path) -> Path:
    """The file that a loader reads; made if it is not there."""
    return flax_file(file) if name == "flax msgpack" else file


def first_load_of(
    file: str, mebibytes: int, name: str, cut: str, devices: int
) -> float:
    """In a process of its own: the seconds of its first load, after one of a small
    file.
    """
    sharding_plan = _ready(mebibytes, name, cut, devices)
    begin = time.perf_counter()
    jax.block_until_ready(LOADERS[name](Path(file), sharding_plan))
    return time.perf_counter() - begin


def _ready(mebibytes: int, name: str, cut: str, devices: int) -> ShardPlan:
    """Loads a small file, so that the libraries are there, and their memory with them;
    the plan of the large one.
    """
    from safetensors.numpy import save_file

    jax.config.update("jax_num_cpu_devices", devices)
    with tempfile.TemporaryDirectory() as folder:
        array = np.ones((8, 8), np.float32)
        small = {"w": array}
        save_file(small, Path(folder, "small.safetensors"))
        mesh = Mesh(np.array(jax.devices()), ("x",))
        rules = PathRules([(".*", CUTS[cut])])
        few = plan(
            small,
            mesh,
            paths=rules,
        )
        jax.block_until_ready(LOADERS[name](Path(folder, "small.safetensors"), few))
    gc.collect()
    return plan_of_cut(mebibytes, cut, jax.devices())


def memory_of_loads(mebibytes: int, options: Options) -> Mapping[str, Value]:
    file = checkpoint_folder(mebibytes) / "model.safetensors"
    values = dict(ABSENT)
    for name in LOADERS:
        read_through(_read_by(name, file))
        arguments = {
            "file": str(file),
            "mebibytes": mebibytes,
            "name": name,
            "devices": len(options.devices),
        }
        values |= figures_of_loader("benchmarks._load_processes:memory_of", arguments)
    return values


def memory_of(file: str, mebibytes: int, name: str, devices: int) -> dict[str, float]:
    """In a process of its own: the most memory that a load takes, and what stays, over
    the bytes of the tensors.
    """
    sharding_plan = _ready(mebibytes, name, "columns", devices)
    load = ft.partial(LOADERS[name], Path(file), sharding_plan)
    return memory_over(load, sharding_plan.bytes_total)


def cold_loads(mebibytes: int, options: Options) -> Mapping[str, Value]:
    file = checkpoint_folder(mebibytes) / "model.safetensors"
    sharding_plan = plan_of_cut(mebibytes, "rows", options.devices)
    values = dict(ABSENT)
    for name, load in LOADERS.items():
        _forget(_read_by(name, file))
        begin = time.perf_counter()
        jax.block_until_ready(load(file, sharding_plan))
        values[f"from_disk_gigabytes_per_second.{name}"] = (
            sharding_plan.bytes_total / (time.perf_counter() - begin) / 1e9
        )
        gc.collect()
    return values


def _forget(file: Path) -> None:
    """Drops a file's pages from the page cache."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
