"""The suite `load`: a checkpoint from a file onto devices, by time, memory and bytes
read.
"""

import argparse
import atexit
import functools as ft
import itertools
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

from shardfx import MeshSpec, PathRules, ShardPlan, checkpoint, plan

from . import _load_stores, _many_arrays
from ._case import Case, Entry, Finding, Limit, Race, Rival, Value, memcpy
from ._load_files import (
    COUNT,
    CUTS,
    checkpoint_folder,
    file_bytes,
    plan_of_cut,
    read_through,
)
from ._load_processes import cold_loads, first_loads, memory_of_loads
from ._load_rivals import (
    TORCH,
    flax_file,
    load_by_file,
    load_by_flax,
    load_by_memory_map,
    load_by_safe_open,
    load_by_slices,
)
from ._runner import Options


SUMMARY = (
    "A checkpoint of 2 GiB (64 MiB under --quick) from its file onto the devices; the"
    " page cache is warm."
)
SAFETENSORS = ("safetensors",)


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
        for cut, rival in itertools.product(cuts, TORCH)
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
            ft.partial(first_loads, size, options),
            () if options.quick else first,
        ),
        Finding(
            f"{name}, memory",
            ft.partial(memory_of_loads, size, options),
            () if options.quick else lean,
        ),
        Finding(f"{name}, one of four processes", ft.partial(_quarters, size), quarter),
        Finding(f"{name}, cold page cache", ft.partial(cold_loads, size, options)),
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
        *_many_arrays.findings(options),
    ]


def _rivals_of_files(file: Path, sharding_plan: ShardPlan) -> tuple[Rival, ...]:
    """Those that read files of many small tensors, too."""
    shardings = sharding_plan.shardings
    shardfx_rival = _rival(
        "shardfx",
        lambda path, _: checkpoint.load(path, sharding_plan),
        file,
        shardings,
    )
    by_file = _rival(
        name="load_file, device_put",
        load=load_by_file,
        file=file,
        shardings=shardings,
        needs=SAFETENSORS,
    )
    by_safe_open = _rival(
        name="safe_open, device_put",
        load=load_by_safe_open,
        file=file,
        shardings=shardings,
        needs=SAFETENSORS,
    )
    in_torch = [
        _rival(name=name, load=load, file=file, shardings=shardings, needs=needs)
        for name, (load, needs) in TORCH.items()
    ]
    return (shardfx_rival, by_file, by_safe_open, *in_torch)


def _rival(
    name: str,
    load: Callable[[Path, Any], Any],
    file: Path,
    shardings: Any,
    needs: tuple[str, ...] = (),
) -> Rival:
    def make() -> Callable[[Any], Any]:
        read_through(file)
        return lambda _: load(file, shardings)

    return Rival(name, make=make, check=_same_as(shardings), needs=needs)


def _flax_loader(file: Path, shardings: Any) -> Callable[[Any], Any]:
    packed = flax_file(file)
    read_through(packed)
    return lambda _: load_by_flax(packed, shardings)


def _same_as(shardings: Any) -> Callable[[Any, Any], None]:
    def check(file, result) -> None:
        from safetensors import safe_open

        with safe_open(file, "numpy") as opened:
            for name in list(shardings)[:: max(1, len(shardings) // 16)]:
                expected = opened.get_tensor(name)
                assert result[name].sharding.is_equivalent_to(shardings[name], 2), name
                actual = np.asarray(result[name]).tobytes()
                assert actual == expected.tobytes(), name

    return check


def _safetensors(mebibytes: int, cut: str, options: Options) -> Race:
    file = checkpoint_folder(mebibytes) / "model.safetensors"
    sharding_plan = plan_of_cut(mebibytes, cut, options.devices)
    shardings = sharding_plan.shardings

    by_slices = _rival(
        name="safetensors slices",
        load=load_by_slices,
        file=file,
        shardings=shardings,
        needs=SAFETENSORS,
    )
    by_memory_map = _rival("memory map", load_by_memory_map, file, shardings)
    by_flax = Rival(
        "flax msgpack",
        make=ft.partial(_flax_loader, file, shardings),
        check=_same_as(shardings),
        needs=("flax", "msgpack"),
    )
    rivals = (
        *_rivals_of_files(file, sharding_plan),
        by_slices,
        by_memory_map,
        by_flax,
    )
    facts = {"tensors": COUNT, "devices": len(options.devices)}
    return Race(
        rivals=rivals,
        fresh=lambda: file,
        byte_count=sharding_plan.bytes_total,
        floor=memcpy(sharding_plan.bytes_total),
        facts=facts,
        clear_caches=False,
    )


def _small(count: int, options: Options) -> Race:
    """Many tensors of 64 bytes: what counts is what each costs, not its bytes."""
    from safetensors.numpy import save_file

    folder = Path(tempfile.mkdtemp(prefix="shardfx-load-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    file = folder / "small.safetensors"
    arrays = {f"layers.{i}.scale": np.full(16, i, np.float32) for i in range(count)}
    save_file(arrays, file)
    structs = checkpoint.structs(checkpoint.read_index(file))
    mesh = Mesh(np.array(options.devices), ("x",))
    rules = PathRules([(".*", P())])
    sharding_plan = plan(structs, mesh, paths=rules)
    facts = {"tensors": count, "devices": len(options.devices)}
    return Race(
        rivals=_rivals_of_files(file, sharding_plan),
        fresh=lambda: file,
        facts=facts,
        clear_caches=False,
    )


def _cast(mebibytes: int, options: Options) -> Race:
    file = checkpoint_folder(mebibytes) / "model.safetensors"
    sharding_plan = plan_of_cut(mebibytes, "rows", options.devices, jnp.bfloat16)

    def rival(_):
        from safetensors.numpy import load_file

        arrays = {
            name: array.astype(jnp.bfloat16) for name, array in load_file(file).items()
        }
        return jax.device_put(arrays, sharding_plan.shardings)

    def check(_, result) -> None:
        expected = rival(None)
        for name in list(expected)[::16]:
            expected_array = np.asarray(expected[name])
            assert np.array_equal(np.asarray(result[name]), expected_array)

    read_through(file)
    shardfx_rival = Rival(
        "shardfx",
        make=lambda: lambda _: checkpoint.load(file, sharding_plan, dtype="plan"),
        check=check,
    )
    rivals = (
        shardfx_rival,
        Rival(
            "load_file, astype, device_put",
            make=lambda: rival,
            needs=("safetensors",),
        ),
    )
    return Race(
        rivals=rivals,
        fresh=lambda: None,
        byte_count=file_bytes(mebibytes),
        clear_caches=False,
    )


def _orbax(mebibytes: int, options: Options) -> Race:
    import orbax.checkpoint as ocp

    folder = checkpoint_folder(mebibytes)
    sharding_plan = plan_of_cut(mebibytes, "rows", options.devices)
    path = folder / "orbax"
    if not path.exists():
        with ocp.StandardCheckpointer() as writer:
            writer.save(path, checkpoint.load(folder, sharding_plan))
    read_through(path)

    def restore() -> Callable[[Any], Any]:
        reader = ocp.StandardCheckpointer()
        return lambda _: reader.restore(path, sharding_plan.structs)

    check = _same_as(sharding_plan.shardings)
    rivals = (
        Rival(
            "shardfx",
            make=lambda: lambda _: checkpoint.load(path, sharding_plan),
            check=check,
        ),
        Rival("Orbax", make=restore, check=check, needs=("orbax",)),
    )
    return Race(
        rivals=rivals,
        fresh=lambda: folder / "model.safetensors",
        byte_count=sharding_plan.bytes_total,
        clear_caches=False,
    )


def _quarters(mebibytes: int) -> Mapping[str, Value]:
    index = checkpoint.read_index(checkpoint_folder(mebibytes))
    values: dict[str, Value] = {}
    for cut in ("rows", "columns"):
        structs = checkpoint.structs(index)
        rules = PathRules([(".*", CUTS[cut])])
        sharding_plan = plan(
            structs,
            MeshSpec({"x": 8}),
            paths=rules,
        )
        reads = checkpoint.plan_reads(index, sharding_plan, processes=4)
        most = max(reads.processes, key=lambda process: process.read_bytes)
        values[f"read_over_quarter.{cut}"] = most.read_bytes / (index.bytes_total / 4)
        values[f"excess_bytes.{cut}"] = most.excess_bytes
        values[f"reads.{cut}"] = most.reads
    return values
