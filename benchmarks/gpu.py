"""`python -m benchmarks gpu`: what the accelerators of a machine show: offload, loading,
moves between platforms, jit; and with eight of them, moves between these beside the
times that `cost.seconds` predicts.

It needs no library but JAX and what shardfx itself needs, and writes its results into a
file to send. With `--quick` it is a trial run, on the CPU if there is nothing else.
`python -m benchmarks.gpu FILE` measures one accelerator alone.
"""

import argparse
import atexit
import functools as ft
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from shardfx import PathRules, ShardPlan, checkpoint, filter_jit, plan
from shardfx._reshard.mover import reshard

from . import _machine, _report, reshard as moves, reshard_trees
from ._case import Case, Entry, Finding, Floor, Limit, Race, Rival, Skip, Value
from ._progress import Progress
from ._runner import Options, run_suite


SUMMARY = (
    "One accelerator: offload, a state beyond its memory limit, moves from and to CPU"
    " devices, loading, jit."
)
LEAVES = 32


FILE = Path("shardfx-accelerators.json")


def arguments(parser: argparse.ArgumentParser) -> None:
    moves.chip_argument(parser)
    parser.set_defaults(json=FILE)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=SUMMARY
    )
    parser.add_argument("file", type=Path, help="where the results go, as JSON")
    parser.add_argument(
        "--quick", action="store_true", help="small sizes and few repeats"
    )
    moves.chip_argument(parser)
    flags = parser.parse_args(words)
    jax.config.update("jax_num_cpu_devices", 8)
    devices = jax.devices()[:1]
    text, failed = results(
        Options(
            quick=flags.quick,
            repeats=3 if flags.quick else 9,
            devices=devices,
            flags=flags,
        )
    )
    flags.file.write_text(text)
    return 1 if failed else 0


def results(options: Options) -> tuple[str, bool]:
    """The results as the common runner writes them, and whether a case failed."""
    entries = cases(options)
    records = run_suite(entries, options, Progress("accelerator", len(entries)))
    print(f"\naccelerator: {SUMMARY}\n\n{_report.table(records)}\n", flush=True)
    machine = _machine.machine(options.devices)
    versions = _machine.versions()
    text = _report.to_json({"accelerator": records}, machine, versions, options.quick)
    return text, any(record.failed for record in records)


def cases(options: Options) -> list[Entry]:
    device = options.devices[0]
    quick = options.quick
    limited: Entry = Skip(
        "a tree of four times the memory limit, out and back",
        "this device counts no memory",
    )
    if device.memory_stats() is not None:
        bound = (Limit("beyond_over_limit", at_most=1.1),)
        limited = Finding(
            limited.name, ft.partial(_limited, device, 1 if quick else 128), bound
        )
    file_mebibytes = 16 if quick else 2048
    return [
        limited,  # first, since the device's own count of its peak cannot be set back
        *reshard_trees.offloads(options, 64 if quick else 4096),
        Case(
            "8 CPU devices to the accelerator",
            ft.partial(_into, device, 1024 if quick else 8192),
        ),
        Case(
            "the accelerator to 4 CPU devices",
            ft.partial(_out, device, 1024 if quick else 8192),
        ),
        Case(
            f"{file_mebibytes} MiB from a file",
            ft.partial(_load, device, file_mebibytes),
        ),
        Case(
            "a step of a wide network, planned",
            ft.partial(_step, device, 256 if quick else 8192),
            (Limit("speedup.jax.jit", at_least=0.9),),
        ),
        *moves.single_moves(options),
    ]


def _on(device: Any, kind: str | None = None) -> NamedSharding:
    mesh = Mesh(np.array([device]), ("x",))
    return NamedSharding(mesh, P("x"), memory_kind=kind)


def _limited(device: Any, mebibytes: int) -> Mapping[str, Value]:
    """Peak bytes on the device when a state moves out under a limit, is given up, and
    comes back.
    """
    source = _on(device)
    there = _on(device, "pinned_host")
    count = mebibytes << 18
    before = device.memory_stats()["bytes_in_use"]
    tree = jax.jit(
        lambda: [jnp.full((count,), i, jnp.float32) for i in range(LEAVES)],
        out_shardings=source,
    )()
    tree = jax.block_until_ready(tree)
    size = 4 * count * LEAVES
    limit = size // 4
    moved = reshard(tree, there, memory_limit_bytes=limit, donate=True)
    hosted = jax.block_until_ready(moved)
    for leaf in tree:
        assert leaf.is_deleted()
    added_bytes = device.memory_stats()["bytes_in_use"] - before
    back = jax.block_until_ready(reshard(hosted, source, memory_limit_bytes=limit))
    for i, leaf in enumerate(back):
        assert float(leaf[0]) == float(leaf[-1]) == i
    beyond = device.memory_stats()["peak_bytes_in_use"] - before - size
    return {
        "beyond_over_limit": max(0, beyond) / limit,
        "left_over_tree": added_bytes / size,
        "tree_over_limit": size / limit,
    }


def _into(device: Any, width: int) -> Race:
    devices = np.array(jax.devices("cpu")[:8])
    mesh = Mesh(devices, ("x",))
    spread = NamedSharding(mesh, P(None, "x"))
    return _between(_values(width), spread, _on(device), _on(device))


def _out(device: Any, width: int) -> Race:
    devices = np.array(jax.devices("cpu"))[[6, 1, 3, 0]]
    mesh = Mesh(devices, ("x",))
    rows = NamedSharding(mesh, P("x"))
    return _between(_values(width), _on(device), rows, _on(device, "pinned_host"))


def _values(width: int) -> np.ndarray:
    values = np.arange(width * width, dtype=np.float32)
    return values.reshape(width, width)


def _between(
    values: np.ndarray, src: NamedSharding, dst: NamedSharding, whole: NamedSharding
) -> Race:
    """A race of moves; the floor copies as many bytes between the host and the device
    in one piece.
    """
    out = whole.memory_kind == "pinned_host"
    if out:
        source_array = jax.block_until_ready(jax.device_put(values, src))
    else:
        source_array = values
    rivals = (
        Rival("shardfx", lambda: lambda x: reshard(x, dst), _same(values)),
        Rival(
            "jax.device_put",
            lambda: lambda x: jax.device_put(x, dst),
            _same(values),
        ),
    )
    floor = Floor(
        "one copy",
        lambda _: jax.block_until_ready(jax.device_put(source_array, whole)),
    )
    return Race(
        rivals=rivals,
        # A source that device_put has read keeps a copy on the host.
        fresh=lambda: jax.block_until_ready(jax.device_put(values, src)),
        byte_count=values.nbytes,
        floor=floor,
    )


def _same(values: np.ndarray) -> Callable[[Any, Any], None]:
    def check(_: Any, result: jax.Array) -> None:
        for shard in result.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), values[shard.index])

    return check


def _load(device: Any, mebibytes: int) -> Race:
    """A safetensors file onto the device, against one copy of as many bytes from NumPy
    memory.
    """
    random = np.random.default_rng(0)
    rows = (mebibytes << 18) // LEAVES // 1024
    tree = {f"layer{i}": random.random((rows, 1024), np.float32) for i in range(LEAVES)}
    planned = _planned(tree, device)
    folder = Path(tempfile.mkdtemp(prefix="shardfx-gpu-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    file = folder / "model.safetensors"
    checkpoint.save(file, tree, planned, progress=False)
    whole = np.ones((mebibytes << 18) // LEAVES * LEAVES, np.float32)

    def check(_: Any, loaded: Any) -> None:
        for name, x in tree.items():
            np.testing.assert_array_equal(np.asarray(loaded[name]), x)

    def by_library() -> Callable[[Any], Any]:
        from safetensors.numpy import load_file

        return lambda _: jax.device_put(load_file(file), planned.shardings)

    rivals = (
        Rival(
            "shardfx",
            lambda: lambda _: checkpoint.load(file, planned, progress=False),
            check,
        ),
        Rival(
            name="load_file, device_put",
            make=by_library,
            check=check,
            needs=("safetensors",),
        ),
        Rival(
            "the bytes alone, to the host",
            lambda: lambda _: np.fromfile(file, np.uint8),
        ),
    )
    floor = Floor(
        "one copy from the host",
        lambda _: jax.block_until_ready(jax.device_put(whole, _on(device))),
    )
    return Race(
        rivals=rivals,
        fresh=lambda: None,
        byte_count=whole.nbytes,
        floor=floor,
    )


def _planned(tree: Any, device: Any) -> ShardPlan:
    mesh = Mesh(np.array([device]), ("x",))
    rules = PathRules([(".*", P("x"))])
    return plan(tree, mesh, paths=rules)


def _step(device: Any, width: int) -> Race:
    params = {f"w{i}": np.full((width, width), 1 / width, np.float32) for i in range(4)}
    array = np.ones((64, width), np.float32)
    batch = {"x": array}
    plans = (_planned(params, device), _planned(batch, device))
    placed = tuple(
        jax.device_put(*pair)
        for pair in zip((params, batch), (p.shardings for p in plans), strict=True)
    )

    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            x = batch["x"]
            for name in sorted(params):
                x = jnp.tanh(x @ params[name])
            return jnp.mean(x**2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    expected = float(jax.jit(step)(*placed)[1])

    def jitted(make: Callable[[], Any]) -> Callable[[], Callable[[Any], Any]]:
        def made() -> Callable[[Any], Any]:
            run = make()
            return lambda arguments: run(*arguments)

        return made

    def check(_: Any, result: Any) -> None:
        np.testing.assert_allclose(float(result[1]), expected, rtol=1e-5)

    rivals = (
        Rival(
            "shardfx.filter_jit",
            jitted(lambda: filter_jit(step, in_shardings=plans)),
            check,
        ),
        Rival("jax.jit", jitted(lambda: jax.jit(step)), check),
    )
    return Race(
        rivals=rivals,
        fresh=lambda: placed,
        number=5,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
