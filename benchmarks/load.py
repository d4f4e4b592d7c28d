"""The suite `load`: a checkpoint from a file onto devices, by time, memory and bytes
read.
"""

import argparse
import atexit
import functools as ft
import gc
import importlib.util
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from shardfx import MeshSpec, PathRules, ShardPlan, checkpoint, plan

from . import _load_stores
from ._case import Case, Entry, Finding, Limit, Race, Rival, Value, memcpy
from ._machine import fresh_process, peak_resident_bytes, reset_peak, resident_bytes
from ._runner import Options


SUMMARY = (
    "A checkpoint of 2 GiB (64 MiB under --quick) from its file onto the devices; the"
    " page cache is warm."
)
COUNT = 128
CUTS = {"rows": P("x"), "columns": P(None, "x"), "replicated": P()}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mebibytes", type=int, default=None, help="size of the checkpoint"
    )
    parser.add_argument(
        "--store", choices=["s3"], default=None, help="read from a server instead"
    )


def cases(options: Options) -> list[Entry]:
    if options.flags.store is not None:
        return _load_stores.cases(options)
    size = options.flags.mebibytes or (64 if options.quick else 2048)
    name = f"{size} MiB safetensors"
    cuts = ("rows", "columns")
    first = tuple(
        Limit(f"faster_than.{cut}.load_file, device_put", at_least=4.0) for cut in cuts
    )
    first += tuple(
        Limit(f"faster_than.{cut}.{rival}", at_least=1.0)
        for cut in cuts
        for rival in TORCH
    )
    count = 2000 if options.quick else 20_000
    lean = (
        Limit("resident_over_tensors.shardfx", at_most=1.05),
        Limit("peak_over_tensors.shardfx", at_most=1.05),
    )
    quarter = tuple(
        Limit(f"read_over_quarter.{cut}", at_most=1.001) for cut in ("rows", "columns")
    )
    # Every replica is a copy for the rivals: eight times 2 GiB would not fit
    # everywhere.
    again = [
        Case(
            f"{count} MiB safetensors, {cut}, again in one process",
            ft.partial(_safetensors, count, cut, options),
        )
        for cut, count in (
            ("rows", size),
            ("columns", size),
            ("replicated", min(size, 512)),
        )
    ]
    small = (Limit("speedup.safe_open, device_put", at_least=1.0),)
    # Limits are for the full size; at 64 MiB starting up weighs more than reading.
    return [
        Finding(
            f"{name}, first load of a process",
            ft.partial(_first, size, options),
            () if options.quick else first,
        ),
        Finding(
            f"{name}, memory",
            ft.partial(_memory, size, options),
            () if options.quick else lean,
        ),
        Finding(f"{name}, one of four processes", ft.partial(_quarters, size), quarter),
        Finding(f"{name}, cold page cache", ft.partial(_cold, size, options)),
        *again,
        Case(
            f"{name}, float32 to bfloat16 on the way", ft.partial(_cast, size, options)
        ),
        Case(f"{size} MiB, Orbax's own format", ft.partial(_orbax, size, options)),
        Case(
            f"{count:,} small tensors, replicated",
            ft.partial(_small, count, options),
            () if options.quick else small,
        ),
    ]


def _shapes(mebibytes: int) -> dict[str, tuple[tuple[int, int], Any]]:
    """Tensors of three sizes, half of them bfloat16, half float32, that sum up to about
    `mebibytes`.
    """
    shapes, unit = {}, mebibytes * 2**20 // COUNT
    for number in range(COUNT):
        dtype = jnp.bfloat16 if number % 2 else np.float32
        nbytes = unit * (1, 2, 3, 2)[number % 4] // 2
        columns = 4096 if mebibytes >= 1024 else 1024
        rows = max(8, nbytes // (columns * np.dtype(dtype).itemsize) // 8 * 8)
        shapes[f"layers.{number}.weight"] = ((rows, columns), dtype)
    return shapes


@ft.lru_cache(maxsize=4)
def _folder(mebibytes: int) -> Path:
    """A folder with the same arrays as safetensors, and as flax and Orbax write them
    once they are asked for.
    """
    from safetensors.numpy import save_file

    folder = Path(tempfile.mkdtemp(prefix="shardfx-load-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    random = np.random.default_rng(0)
    arrays = {
        name: (
            random.integers(
                0, 2**14, (*shape, np.dtype(dtype).itemsize // 2), np.uint16
            )
            .view(dtype)
            .reshape(shape)
        )
        for name, (shape, dtype) in _shapes(mebibytes).items()
    }
    save_file(arrays, folder / "model.safetensors")
    return folder


def _plan(mebibytes: int, cut: str, devices: list[Any], dtype: Any = None) -> ShardPlan:
    structs = {
        name: jax.ShapeDtypeStruct(shape, dtype or stored_dtype)
        for name, (shape, stored_dtype) in _shapes(mebibytes).items()
    }
    return plan(
        structs, Mesh(np.array(devices), ("x",)), paths=PathRules([(".*", CUTS[cut])])
    )


def _load_file(file: Path, shardings: Any) -> Any:
    from safetensors.numpy import load_file

    return jax.device_put(load_file(file), shardings)


def _slices(file: Path, shardings: Any) -> Any:
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


def _memmap(file: Path, shardings: Any) -> Any:
    entries = checkpoint.read_index(file).by_path
    return {
        name: _mapped(entries[name], sharding) for name, sharding in shardings.items()
    }


def _mapped(entry: checkpoint.ArrayEntry, sharding: NamedSharding) -> jax.Array:
    assert isinstance(entry, checkpoint.FileArray)
    mapped = np.memmap(entry.file, entry.dtype, "r", entry.offset, entry.shape)
    return _from_callback(mapped, sharding, entry.shape)


def _safe_open(file: Path, shardings: Any) -> Any:
    from safetensors import safe_open

    with safe_open(file, "numpy") as opened:
        return jax.device_put(
            {name: opened.get_tensor(name) for name in opened.keys()}, shardings
        )


def _fastsafetensors(file: Path, shardings: Any) -> Any:
    from fastsafetensors import fastsafe_open  # pyright: ignore[reportMissingImports]

    with fastsafe_open(str(file), device="cpu", nogds=True) as opened:
        return jax.device_put(
            {name: _as_numpy(opened.get_tensor(name)) for name in opened.keys()},
            shardings,
        )


def _streamer(file: Path, shardings: Any) -> Any:
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


def _flax(file: Path, shardings: Any) -> Any:
    from flax.serialization import msgpack_restore

    return jax.device_put(msgpack_restore(file.read_bytes()), shardings)


def _flax_file(file: Path) -> Path:
    from flax.serialization import msgpack_serialize
    from safetensors.numpy import load_file

    packed = file.with_suffix(".msgpack")
    if not packed.exists():
        packed.write_bytes(msgpack_serialize(load_file(file)))
    return packed


def _rival(
    name: str,
    load: Callable[[Path, Any], Any],
    file: Callable[[], Path],
    shardings: Any,
    needs: tuple[str, ...],
):
    def make() -> Callable[[Any], Any]:
        path = file()
        _warm(path)
        return lambda _: load(path, shardings)

    return Rival(name, make=make, check=_same_as(shardings), needs=needs)


def _warm(path: Path) -> None:
    """Reads the files through, so that they are in the page cache."""
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        if file.is_file():
            with open(file, "rb") as opened:
                while opened.read(2**24):
                    pass


def _same_as(shardings: Any) -> Callable[[Any, Any], None]:
    def check(file: Any, result: Any) -> None:
        from safetensors import safe_open

        with safe_open(file, "numpy") as opened:
            for name in list(shardings)[:: max(1, len(shardings) // 16)]:
                expected = opened.get_tensor(name)
                assert result[name].sharding.is_equivalent_to(shardings[name], 2), name
                assert np.asarray(result[name]).tobytes() == expected.tobytes(), name

    return check


def _safetensors(mebibytes: int, cut: str, options: Options) -> Race:
    file = _folder(mebibytes) / "model.safetensors"
    sharding_plan = _plan(mebibytes, cut, options.devices)
    shardings = sharding_plan.shardings

    def own() -> Path:
        return file

    return Race(
        rivals=(
            _rival(
                "shardfx",
                lambda path, _: checkpoint.load(path, sharding_plan),
                own,
                shardings,
                (),
            ),
            _rival(
                "load_file, device_put", _load_file, own, shardings, ("safetensors",)
            ),
            _rival("safetensors slices", _slices, own, shardings, ("safetensors",)),
            _rival("memory map", _memmap, own, shardings, ()),
            _rival(
                "flax msgpack",
                _flax,
                lambda: _flax_file(file),
                shardings,
                ("flax", "msgpack"),
            ),
            _rival(
                "safe_open, device_put", _safe_open, own, shardings, ("safetensors",)
            ),
            *[
                _rival(name, load, own, shardings, needs)
                for name, (load, needs) in TORCH.items()
            ],
        ),
        fresh=own,
        byte_count=sharding_plan.bytes_total,
        floor=memcpy(sharding_plan.bytes_total),
        facts={"tensors": COUNT, "devices": len(options.devices)},
        clear_caches=False,
    )


# Libraries of 2026 that read safetensors into PyTorch's tensors: how each is used, and
# what it needs.
TORCH: dict[str, tuple[Callable[[Path, Any], Any], tuple[str, ...]]] = {
    "fastsafetensors": (_fastsafetensors, ("fastsafetensors", "torch")),
    "Run:ai Model Streamer": (_streamer, ("runai_model_streamer", "torch")),
}


def _is_installed(names: tuple[str, ...]) -> bool:
    return all(importlib.util.find_spec(name) is not None for name in names)


def _small(count: int, options: Options) -> Race:
    """Many tensors of 64 bytes: what counts is what each costs, not its bytes."""
    from safetensors.numpy import save_file

    folder = Path(tempfile.mkdtemp(prefix="shardfx-load-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    file = folder / "small.safetensors"
    save_file(
        {f"layers.{i}.scale": np.full(16, i, np.float32) for i in range(count)}, file
    )
    structs = checkpoint.structs(checkpoint.read_index(file))
    sharding_plan = plan(
        structs, Mesh(np.array(options.devices), ("x",)), paths=PathRules([(".*", P())])
    )
    shardings = sharding_plan.shardings

    def own() -> Path:
        return file

    return Race(
        rivals=(
            _rival(
                "shardfx",
                lambda path, _: checkpoint.load(path, sharding_plan),
                own,
                shardings,
                (),
            ),
            _rival(
                "safe_open, device_put", _safe_open, own, shardings, ("safetensors",)
            ),
            _rival(
                "load_file, device_put", _load_file, own, shardings, ("safetensors",)
            ),
            *[
                _rival(name, load, own, shardings, needs)
                for name, (load, needs) in TORCH.items()
            ],
        ),
        fresh=own,
        facts={"tensors": count, "devices": len(options.devices)},
        clear_caches=False,
    )


def _cast(mebibytes: int, options: Options) -> Race:
    file = _folder(mebibytes) / "model.safetensors"
    sharding_plan = _plan(mebibytes, "rows", options.devices, jnp.bfloat16)

    def rival(_: Any) -> Any:
        from safetensors.numpy import load_file

        arrays = {
            name: array.astype(jnp.bfloat16) for name, array in load_file(file).items()
        }
        return jax.device_put(arrays, sharding_plan.shardings)

    def check(_: Any, result: Any) -> None:
        expected = rival(None)
        assert all(
            np.array_equal(np.asarray(result[name]), np.asarray(expected[name]))
            for name in list(expected)[::16]
        )

    _warm(file)
    return Race(
        rivals=(
            Rival(
                "shardfx",
                make=lambda: (
                    lambda _: checkpoint.load(file, sharding_plan, dtype="plan")
                ),
                check=check,
            ),
            Rival(
                "load_file, astype, device_put",
                make=lambda: rival,
                needs=("safetensors",),
            ),
        ),
        fresh=lambda: None,
        byte_count=_file_bytes(mebibytes),
        clear_caches=False,
    )


def _file_bytes(mebibytes: int) -> int:
    return sum(
        int(np.prod(shape)) * np.dtype(dtype).itemsize
        for shape, dtype in _shapes(mebibytes).values()
    )


def _orbax(mebibytes: int, options: Options) -> Race:
    import orbax.checkpoint as ocp

    folder, sharding_plan = (
        _folder(mebibytes),
        _plan(mebibytes, "rows", options.devices),
    )
    path = folder / "orbax"
    if not path.exists():
        with ocp.StandardCheckpointer() as writer:
            writer.save(path, checkpoint.load(folder, sharding_plan))
    _warm(path)

    def restore() -> Callable[[Any], Any]:
        reader = ocp.StandardCheckpointer()
        return lambda _: reader.restore(path, sharding_plan.structs)

    check = _same_as(sharding_plan.shardings)
    return Race(
        rivals=(
            Rival(
                "shardfx",
                make=lambda: lambda _: checkpoint.load(path, sharding_plan),
                check=check,
            ),
            Rival("Orbax", make=restore, check=check, needs=("orbax",)),
        ),
        fresh=lambda: folder / "model.safetensors",
        byte_count=sharding_plan.bytes_total,
        clear_caches=False,
    )


LOADERS: dict[str, Callable[[Path, ShardPlan], Any]] = {
    "shardfx": checkpoint.load,
    "load_file, device_put": lambda file, sharding_plan: _load_file(
        file, sharding_plan.shardings
    ),
    "safetensors slices": lambda file, sharding_plan: _slices(
        file, sharding_plan.shardings
    ),
    "memory map": lambda file, sharding_plan: _memmap(file, sharding_plan.shardings),
    "flax msgpack": lambda file, sharding_plan: _flax(
        _flax_file(file), sharding_plan.shardings
    ),
    "safe_open, device_put": lambda file, sharding_plan: _safe_open(
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


def _first(mebibytes: int, options: Options) -> Mapping[str, Value]:
    """Later loads find memory that earlier ones have touched, which is most of the
    cost; a real load is the first.
    """
    file = _folder(mebibytes) / "model.safetensors"
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
                _warm(_read_by(name, file))
                taken.append(
                    fresh_process(
                        "benchmarks.load:first_load_of",
                        arguments | {"devices": len(options.devices)},
                    )
                )
        medians = {name: statistics.median(taken) for name, taken in seconds.items()}
        for name, median in medians.items():
            values[f"first_gigabytes_per_second.{cut}.{name}"] = (
                _file_bytes(mebibytes) / median / 1e9
            )
            if name != "shardfx":
                values[f"faster_than.{cut}.{name}"] = median / medians["shardfx"]
    return values


def _read_by(name: str, file: Path) -> Path:
    """The file that a loader reads; made if it is not there."""
    return _flax_file(file) if name == "flax msgpack" else file


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
        small = {"w": np.ones((8, 8), np.float32)}
        save_file(small, Path(folder, "small.safetensors"))
        few = plan(
            small,
            Mesh(np.array(jax.devices()), ("x",)),
            paths=PathRules([(".*", CUTS[cut])]),
        )
        jax.block_until_ready(LOADERS[name](Path(folder, "small.safetensors"), few))
    gc.collect()
    return _plan(mebibytes, cut, jax.devices())


def _memory(mebibytes: int, options: Options) -> Mapping[str, Value]:
    file = _folder(mebibytes) / "model.safetensors"
    values = dict(ABSENT)
    for name in LOADERS:
        _warm(_read_by(name, file))
        arguments = {
            "file": str(file),
            "mebibytes": mebibytes,
            "name": name,
            "devices": len(options.devices),
        }
        for key, value in fresh_process("benchmarks.load:memory_of", arguments).items():
            values[f"{key}.{name}"] = value
    return values


def memory_of(file: str, mebibytes: int, name: str, devices: int) -> dict[str, float]:
    """In a process of its own: the most memory that a load takes, and what stays, over
    the bytes of the tensors.
    """
    sharding_plan = _ready(mebibytes, name, "columns", devices)
    reset_peak()
    before = resident_bytes()
    result = jax.block_until_ready(LOADERS[name](Path(file), sharding_plan))
    peak, resident = peak_resident_bytes() - before, resident_bytes() - before
    del result
    return {
        "peak_over_tensors": peak / sharding_plan.bytes_total,
        "resident_over_tensors": resident / sharding_plan.bytes_total,
    }


def _cold(mebibytes: int, options: Options) -> Mapping[str, Value]:
    file, sharding_plan = (
        _folder(mebibytes) / "model.safetensors",
        _plan(mebibytes, "rows", options.devices),
    )
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


def _quarters(mebibytes: int) -> Mapping[str, Value]:
    index = checkpoint.read_index(_folder(mebibytes))
    values: dict[str, Value] = {}
    for cut in ("rows", "columns"):
        sharding_plan = plan(
            checkpoint.structs(index),
            MeshSpec({"x": 8}),
            paths=PathRules([(".*", CUTS[cut])]),
        )
        reads = checkpoint.plan_reads(index, sharding_plan, processes=4)
        most = max(reads.processes, key=lambda process: process.read_bytes)
        values[f"read_over_quarter.{cut}"] = most.read_bytes / (index.bytes_total / 4)
        values[f"excess_bytes.{cut}"] = most.excess_bytes
        values[f"reads.{cut}"] = most.reads
    return values
