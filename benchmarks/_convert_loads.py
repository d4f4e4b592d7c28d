"""The suite `convert`: a checkpoint of another layout is loaded, by time and memory."""

import atexit
import functools as ft
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

from shardfx import From, PathRules, ShardPlan, checkpoint, plan

from ._case import Race, Rival, Value
from ._convert_trees import (
    HUGGING_FACE,
    MOST_SECONDS,
    layer_count,
    trainer_plan,
    trainer_structs,
)
from ._machine import figures_of_loader, memory_over
from ._runner import Options


@ft.lru_cache(maxsize=2)
def checkpoint_folder(mebibytes: int) -> Path:
    """A folder with a checkpoint of Hugging Face's layout."""
    from safetensors.numpy import save_file

    folder = Path(tempfile.mkdtemp(prefix="shardfx-convert-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    structs = trainer_structs(layer_count(mebibytes))
    random = np.random.default_rng(0)
    arrays = {}
    for path, rule in HUGGING_FACE.steps[0].rules:
        leaf, *_ = _leaves(rule)
        shape = structs[path].shape
        if "{i}" not in leaf:
            stored_shape = shape
        else:
            stored_shape = shape[:0:-1]
        for i in range(shape[0] if "{i}" in leaf else 1):
            numbers = random.integers(0, 2**14, stored_shape, np.uint16).view(
                jnp.bfloat16
            )
            arrays[leaf.replace("{i}", str(i))] = numbers
    save_file(arrays, folder / "model.safetensors")
    return folder


def _leaves(rule: From) -> list[str]:
    if rule.op == "leaf":
        return [rule.path]
    paths = []
    for part in rule.of:
        paths += _leaves(part)
    return paths


def _by_hand(file: Path, shardings: Any) -> Any:
    """What people write: whole weights in NumPy, stacked and transposed, then placed."""
    from safetensors.numpy import load_file

    return jax.device_put(HUGGING_FACE.apply(load_file(file)), shardings)


def _as_it_is(file: Path, devices: list[Any]) -> ShardPlan:
    """The same bytes, in the file's own layout, cut as the weights of a model are."""
    structs = checkpoint.structs(checkpoint.read_index(file))
    mesh = Mesh(np.array(devices).reshape(2, -1), ("fsdp", "tensor"))
    rules = PathRules([("norm", P()), (".*", P("tensor", "fsdp"))])
    return plan(structs, mesh, paths=rules)


def load_race(mebibytes: int, options: Options) -> Race:
    file = checkpoint_folder(mebibytes) / "model.safetensors"
    trainer = trainer_plan(layer_count(mebibytes), options.devices)
    plain_plan = _as_it_is(file, options.devices)

    def check(_, result) -> None:
        for path, array in _by_hand(file, trainer.shardings).items():
            assert result[path].sharding == trainer.shardings[path], path
            actual = np.asarray(result[path]).tobytes()
            assert actual == np.asarray(array).tobytes(), path

    rivals = (
        Rival(
            "shardfx",
            make=lambda: lambda _: checkpoint.load(file, trainer, HUGGING_FACE),
            check=check,
        ),
        Rival(
            "load without a map",
            make=lambda: lambda _: checkpoint.load(file, plain_plan),
        ),
        Rival(
            "load_file, numpy, device_put",
            make=lambda: lambda _: _by_hand(file, trainer.shardings),
        ),
    )
    return Race(
        rivals=rivals,
        fresh=lambda: None,
        byte_count=trainer.bytes_total,
        clear_caches=False,
        also=time.process_time,
        most_seconds=MOST_SECONDS,
    )


LOADERS: dict[str, Callable[[Path, ShardPlan], Any]] = {
    "shardfx": lambda file, planned: checkpoint.load(file, planned, HUGGING_FACE),
    "load_file, numpy, device_put": lambda file, planned: _by_hand(
        file, planned.shardings
    ),
}


def memory_of_loads(mebibytes: int, options: Options) -> Mapping[str, Value]:
    file = checkpoint_folder(mebibytes) / "model.safetensors"
    values: dict[str, Value] = {}
    for name in LOADERS:
        arguments = {
            "file": str(file),
            "mebibytes": mebibytes,
            "name": name,
            "devices": len(options.devices),
        }
        values |= figures_of_loader("benchmarks._convert_loads:memory_of", arguments)
    return values


def memory_of(file: str, mebibytes: int, name: str, devices: int) -> dict[str, float]:
    """In a process of its own: the most memory that a load takes, and what stays, over
    the bytes that stay.
    """
    jax.config.update("jax_num_cpu_devices", devices)
    trainer = trainer_plan(layer_count(mebibytes), jax.devices())
    with tempfile.TemporaryDirectory() as folder:
        from safetensors.numpy import save_file

        small = {"w": np.ones((8, 8), np.float32)}
        save_file(small, Path(folder, "small.safetensors"))
        mesh = jax.make_mesh((1,), ("x",))
        checkpoint.load(folder, plan(small, mesh, paths=REPLICATED))
    held = sum(leaf.bytes_per_device for leaf in trainer.leaves) * devices
    load = ft.partial(LOADERS[name], Path(file), trainer)
    return memory_over(load, held)


REPLICATED = PathRules([(".*", P())])
