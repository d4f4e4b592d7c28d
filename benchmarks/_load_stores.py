"""The cases of the suite `load` that read from a store: a server on loopback in which
each request takes 20 ms.
"""

import atexit
import contextlib
import functools as ft
import gc
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

from shardfx import PathRules, ShardPlan, checkpoint, plan

from ._case import Entry, Finding, Limit, Value
from ._machine import fresh_process, peak_resident_bytes, reset_peak, resident_bytes
from ._runner import Options


ARRAYS = 1137
SECONDS = 0.02
READ_LIMIT_BYTES = 256 * 2**20
CUTS = {"rows": P("x"), "columns": P(None, "x"), "replicated": P()}


def cases(options: Options) -> list[Entry]:
    size = options.flags.mebibytes or (64 if options.quick else 1024)
    name = f"{size} MiB in {ARRAYS} arrays, {SECONDS * 1000:.0f} ms a request"
    ranges = []
    for cut in CUTS:
        ranges += [
            Limit(f"read_over_needed.{cut}", at_most=1.02),
            Limit(f"requests_over_8_mib_pieces.{cut}", at_most=1.1),
        ]
    fast = (
        Limit("faster_than.Orbax's arrays", at_least=2.0),
        Limit("faster_than.download first", at_least=2.0),
    )
    lean = (Limit("beside_the_state_over_limit", at_most=1.0),)
    return [
        Finding(f"{name}, ranges", ft.partial(_ranges, size, options), tuple(ranges)),
        Finding(f"{name}, time", ft.partial(_times, size, options), fast),
        Finding(f"{name}, memory", ft.partial(_memory, size), lean),
    ]


@ft.lru_cache(maxsize=2)
def folder(mebibytes: int) -> Path:
    """A folder with a safetensors set and the same arrays as Orbax writes them."""
    from safetensors.numpy import save_file

    root = Path(tempfile.mkdtemp(prefix="shardfx-store-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    columns = 1024
    each = mebibytes * 2**20 // ARRAYS // (4 * columns)
    rng = np.random.default_rng(0)
    rows = [max(8, each * (1, 2, 3, 2)[n % 4] // 2 // 8 * 8) for n in range(ARRAYS)]
    tensors = {
        f"layers.{number}.weight": rng.random((count, columns), np.float32)
        for number, count in enumerate(rows)
    }
    names = list(tensors)
    weight_map = {}
    (root / "set").mkdir()
    # The request behind the last tensor weighs in objects below 15 MiB, which is told
    # on the page.
    file_count = min(4, max(1, mebibytes // 32))
    for number in range(file_count):
        part = names[number::file_count]
        file = f"model-{number + 1:05}-of-{file_count:05}.safetensors"
        tensors_by_name = {name: tensors[name] for name in part}
        save_file(tensors_by_name, root / "set" / file)
        weight_map |= dict.fromkeys(part, file)
    index = json.dumps({"weight_map": weight_map})
    (root / "set" / "model.safetensors.index.json").write_text(index)
    return root


@contextlib.contextmanager
def served(root: Path, seconds: float = SECONDS) -> Iterator[str]:
    """A server of the files below `root`, in which each request takes `seconds`."""
    command = [
        sys.executable,
        "-m",
        "benchmarks._store_server",
        str(root),
        str(seconds),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


def place_of(endpoint: str, path: str) -> dict[str, Any]:
    return {
        "driver": "s3",
        "bucket": "bucket",
        "path": path,
        "endpoint": endpoint,
        "aws_region": "us-east-1",
        "aws_credentials": {"type": "anonymous"},
    }


def _plan(index: checkpoint.Index, cut: str) -> ShardPlan:
    mesh = Mesh(np.array(jax.devices()), ("x",))
    structs = checkpoint.structs(index)
    rules = PathRules([(".*", CUTS[cut])])
    return plan(structs, mesh, paths=rules)


def stats(endpoint: str) -> list[tuple[str, int]]:
    with urllib.request.urlopen(f"{endpoint}/stats") as answer:
        return json.loads(answer.read())


def _ranges(mebibytes: int, options: Options) -> Mapping[str, Value]:
    values: dict[str, Value] = {}
    with served(folder(mebibytes)) as endpoint:
        place = place_of(endpoint, "set/")
        index = checkpoint.read_index(place)
        for cut in CUTS:
            plan = _plan(index, cut)
            stats(endpoint)
            result = jax.block_until_ready(checkpoint.load(index, plan))
            read = [nbytes for _, nbytes in stats(endpoint)]
            needed = index.bytes_total
            values[f"read_over_needed.{cut}"] = sum(read) / needed
            values[f"requests.{cut}"] = len(read)
            pieces = needed / 2**23
            values[f"requests_over_8_mib_pieces.{cut}"] = len(read) / pieces
            del result
            gc.collect()
    return values


def _times(mebibytes: int, options: Options) -> Mapping[str, Value]:
    root = folder(mebibytes)
    index = checkpoint.read_index(root / "set")
    plan = _plan(index, "rows")
    _write_orbax(root, plan)
    names = [file.name for file in (root / "set").iterdir()]
    loaders: dict[str, Callable[[str, ShardPlan], Any]] = {
        "shardfx": lambda endpoint, plan: checkpoint.load(
            place_of(endpoint, "set/"), plan
        ),
        "Orbax's arrays": _orbax,
        "download first": ft.partial(_download, names),
    }
    seconds: dict[str, list[float]] = {name: [] for name in loaders}
    processor_seconds: dict[str, list[float]] = {name: [] for name in loaders}
    expected = checkpoint.load(root / "set", plan)
    with served(root) as endpoint:
        for round_number in range(1 if options.quick else 3):
            for name, load in loaders.items():
                begin = time.perf_counter()
                processor_begin = time.process_time()
                result = jax.block_until_ready(load(endpoint, plan))
                seconds[name].append(time.perf_counter() - begin)
                processor_seconds[name].append(time.process_time() - processor_begin)
                if round_number == 0:
                    for path in list(expected)[:: ARRAYS // 16]:
                        same = np.asarray(result[path]) == np.asarray(expected[path])
                        assert same.all(), path
                del result
                gc.collect()
    median = _medians(seconds)
    processor = _medians(processor_seconds)
    values: dict[str, Value] = {}
    for name in loaders:
        values[f"seconds.{name}"] = median[name]
        values[f"processor_seconds.{name}"] = processor[name]
        values[f"gigabytes_per_second.{name}"] = plan.bytes_total / median[name] / 1e9
        if name != "shardfx":
            values[f"faster_than.{name}"] = median[name] / median["shardfx"]
            values[f"processor_faster_than.{name}"] = (
                processor[name] / processor["shardfx"]
            )
    return values


def _medians(taken: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def _write_orbax(root: Path, plan: ShardPlan) -> None:
    import orbax.checkpoint as ocp

    path = root / "orbax"
    if not path.exists():
        with ocp.StandardCheckpointer() as writer:
            writer.save(path, checkpoint.load(root / "set", plan))


def _orbax(endpoint: str, plan: ShardPlan) -> Any:
    """The arrays of Orbax's file, by the deserializer of JAX that Orbax uses. Orbax
    itself reads S3 at Amazon only.
    """
    from jax.experimental.array_serialization import serialization

    base = place_of(endpoint, "orbax/")
    specs = [
        {
            "driver": "zarr",
            "kvstore": {"driver": "ocdbt", "base": base, "path": f"{leaf.path}/"},
        }
        for leaf in plan.leaves
    ]
    shardings = [plan.shardings[leaf.path] for leaf in plan.leaves]
    read = serialization.run_deserialization  # pyright: ignore[reportPrivateImportUsage]
    arrays = read(shardings, specs)
    return {leaf.path: array for leaf, array in zip(plan.leaves, arrays, strict=True)}


def _download(names: Sequence[str], endpoint: str, plan: ShardPlan) -> Any:
    """All files, each by ten threads in parts of 8 MiB, then a load of the copies."""
    import boto3  # pyright: ignore[reportMissingImports]
    import botocore.config  # pyright: ignore[reportMissingImports]

    config = botocore.config.Config(signature_version=botocore.UNSIGNED)
    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        config=config,
    )
    with tempfile.TemporaryDirectory() as copy:
        for name in names:
            client.download_file("bucket", f"set/{name}", f"{copy}/{name}")
        return checkpoint.load(copy, plan)


def _memory(mebibytes: int) -> Mapping[str, Value]:
    with served(folder(mebibytes)) as endpoint:
        values = fresh_process(
            "benchmarks._load_stores:memory_of",
            {"endpoint": endpoint, "read_limit_bytes": READ_LIMIT_BYTES},
        )
    allowed = READ_LIMIT_BYTES + 64 * 2**20
    beside = values["beside_the_state_bytes"]
    return values | {"beside_the_state_over_limit": beside / allowed}


def memory_of(endpoint: str, read_limit_bytes: int) -> dict[str, float]:
    """In a process of its own: the most memory beside the arrays that a load takes."""
    jax.config.update("jax_num_cpu_devices", 8)
    place = place_of(endpoint, "set/")
    index = checkpoint.read_index(place)
    plan = _plan(index, "rows")
    few = plan.select("layers.1.weight")
    jax.block_until_ready(checkpoint.load(index, few, unread="allow"))
    gc.collect()
    reset_peak()
    before = resident_bytes()
    result = jax.block_until_ready(
        checkpoint.load(index, plan, read_limit_bytes=read_limit_bytes)
    )
    peak = peak_resident_bytes() - before
    del result
    return {"beside_the_state_bytes": float(peak - plan.bytes_total)}
