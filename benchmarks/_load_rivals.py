"""The suite `load`: how others read the file."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from shardfx import ShardPlan, checkpoint

from ._case import Value


def load_by_file(file: Path, shardings: Any) -> Any:
    from safetensors.numpy import load_file

    return jax.device_put(load_file(file), shardings)


def load_by_slices(file: Path, shardings: Any) -> Any:
    from safetensors import safe_open

    with safe_open(file, "numpy") as opened:
        return {
            name: _from_callback(
                opened.get_slice(name), sharding, _shape_of(opened, name)
            )
            for name, sharding in shardings.items()
        }


def _shape_of(opened: Any, name: str) -> tuple[int, ...]:
    return tuple(opened.get_slice(name).get_shape())


def _from_callback(
    source: Any, sharding: NamedSharding, shape: tuple[int, ...]
) -> jax.Array:
    return jax.make_array_from_callback(
        shape, sharding, lambda index: np.array(source[index])
    )


def load_by_memory_map(file: Path, shardings: Any) -> Any:
    entries = checkpoint.read_index(file).by_path
    return {
        name: _mapped(entries[name], sharding) for name, sharding in shardings.items()
    }


def _mapped(entry: checkpoint.ArrayEntry, sharding: NamedSharding) -> jax.Array:
    assert isinstance(entry, checkpoint.FileArray)
    mapped = np.memmap(entry.file, entry.dtype, "r", entry.offset, entry.shape)
    return _from_callback(mapped, sharding, entry.shape)


def load_by_safe_open(file: Path, shardings: Any) -> Any:
    from safetensors import safe_open

    with safe_open(file, "numpy") as opened:
        tensors_by_name = {name: opened.get_tensor(name) for name in opened.keys()}
        return jax.device_put(tensors_by_name, shardings)


def load_by_fastsafetensors(file: Path, shardings: Any) -> Any:
    from fastsafetensors import fastsafe_open  # pyright: ignore[reportMissingImports]

    with fastsafe_open(str(file), device="cpu", nogds=True) as opened:
        return jax.device_put(
            {name: _as_numpy(opened.get_tensor(name)) for name in opened.keys()},
            shardings,
        )


def load_by_streamer(file: Path, shardings: Any) -> Any:
    from runai_model_streamer import SafetensorsStreamer  # pyright: ignore

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(str(file))
        return jax.device_put(
            {name: _as_numpy(tensor) for name, tensor in streamer.get_tensors()},
            shardings,
        )


def _as_numpy(tensor: Any) -> np.ndarray:
    """A tensor of PyTorch, in its own memory; NumPy has no bfloat16 that PyTorch knows."""
    import torch  # pyright: ignore[reportMissingImports]

    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(jnp.bfloat16)
    return tensor.numpy()


def load_by_flax(file: Path, shardings: Any) -> Any:
    from flax.serialization import msgpack_restore

    return jax.device_put(msgpack_restore(file.read_bytes()), shardings)


def flax_file(file: Path) -> Path:
    from flax.serialization import msgpack_serialize
    from safetensors.numpy import load_file

    packed = file.with_suffix(".msgpack")
    if not packed.exists():
        packed.write_bytes(msgpack_serialize(load_file(file)))
    return packed


# Libraries of 2026 that read safetensors into PyTorch's tensors: how each is used, and
# what it needs.
TORCH: dict[str, tuple[Callable[[Path, Any], Any], tuple[str, ...]]] = {
    "fastsafetensors": (load_by_fastsafetensors, ("fastsafetensors", "torch")),
    "Run:ai Model Streamer": (load_by_streamer, ("runai_model_streamer", "torch")),
}


def _is_installed(names: tuple[str, ...]) -> bool:
    return all(importlib.util.find_spec(name) is not None for name in names)


LOADERS: dict[str, Callable[[Path, ShardPlan], Any]] = {
    "shardfx": checkpoint.load,
    "load_file, device_put": lambda file, sharding_plan: load_by_file(
        file, sharding_plan.shardings
    ),
    "safetensors slices": lambda file, sharding_plan: load_by_slices(
        file, sharding_plan.shardings
    ),
    "memory map": lambda file, sharding_plan: load_by_memory_map(
        file, sharding_plan.shardings
    ),
    "flax msgpack": lambda file, sharding_plan: load_by_flax(
        flax_file(file), sharding_plan.shardings
    ),
    "safe_open, device_put": lambda file, sharding_plan: load_by_safe_open(
        file, sharding_plan.shardings
    ),
    **{
        name: lambda file, sharding_plan, load=load: load(file, sharding_plan.shardings)
        for name, (load, needs) in TORCH.items()
        if _is_installed(needs)
    },
}
# A line in the place of the numbers of those that are not there.
ABSENT: dict[str, Value] = {
    f"skipped.{name}": f"{', '.join(needs)} not installed"
    for name, (_, needs) in TORCH.items()
    if not _is_installed(needs)
}
