"""`python -m benchmarks.gpu OUT.json`: what one accelerator shows: offload, loading, moves between platforms, jit.

Each result is checked, timed in turn with its rival and with a plain copy of the same bytes in the same run.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from shardfx import PathRules, checkpoint, filter_jit, plan
from shardfx._reshard import reshard

from . import _machine


REPEATS = 9
LEAVES, LEAF_BYTES, WIDTH = 32, 128 << 20, 8192


def main(path: str) -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    devices = jax.devices()
    results: dict[str, Any] = {}
    for name, measure in MEASURES.items():
        begin = time.perf_counter()
        try:
            results[name] = measure(devices[0])
        except (RuntimeError, ValueError, TypeError, AssertionError, OSError) as error:
            results[name] = {"failed": f"{type(error).__name__}: {error}"[:2000]}
        print(f"{name} ({time.perf_counter() - begin:.0f} s): {json.dumps(results[name], indent=1)}", flush=True)
    document = {"machine": _machine.machine(devices), "versions": _machine.versions(), "results": results}
    Path(path).write_text(json.dumps(document, indent=1) + "\n")


def _on(device: Any, kind: str | None = None) -> NamedSharding:
    return NamedSharding(Mesh(np.array([device]), ("x",)), P("x"), memory_kind=kind)


def _race(runs: Mapping[str, Callable[[], Any]], byte_count: int) -> dict[str, float]:
    """Median GB/s of each, taken in turn, after one untimed round."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(REPEATS + 1):
        for name, run in list(runs.items())[:: 1 if repeat % 2 else -1]:
            begin = time.perf_counter()
            result = jax.block_until_ready(run())
            if repeat:
                taken[name].append(time.perf_counter() - begin)
            del result
    return {name: byte_count / statistics.median(times) / 1e9 for name, times in taken.items()}


def offload(device: Any) -> dict[str, Any]:
    """An optimizer's state to pinned host memory and back, against one copy of one array of as many bytes."""
    here, there = _on(device), _on(device, "pinned_host")
    count = LEAF_BYTES // 4
    make = jax.jit(lambda seed: jnp.arange(count, dtype=jnp.float32) + seed, out_shardings=here)
    tree = [jax.block_until_ready(make(i)) for i in range(LEAVES)]
    whole = jax.jit(lambda: jnp.ones((LEAVES * count,), jnp.float32), out_shardings=here)()
    hosted, whole_hosted = jax.block_until_ready((reshard(tree, there), jax.device_put(whole, there)))
    for i, leaf in enumerate(hosted):
        assert leaf.sharding == there, leaf.sharding
        np.testing.assert_array_equal(np.asarray(leaf)[::4097], np.arange(count, dtype=np.float32)[::4097] + i)
    back = reshard(hosted, here)
    assert all(bool((a == b).all()) for a, b in zip(tree, back, strict=True))
    del back
    total = LEAVES * LEAF_BYTES
    out = _race(
        {
            "shardfx": lambda: reshard(tree, there),
            "jax.device_put of the tree": lambda: jax.device_put(tree, [there] * LEAVES),
            "one copy": lambda: jax.device_put(whole, there),
        },
        total,
    )
    into = _race(
        {
            "shardfx": lambda: reshard(hosted, here),
            "jax.device_put of the tree": lambda: jax.device_put(hosted, [here] * LEAVES),
            "one copy": lambda: jax.device_put(whole_hosted, here),
        },
        total,
    )
    return {
        "bytes": total,
        "device to pinned_host, GB/s": out,
        "pinned_host to device, GB/s": into,
        "device to pinned_host, share of one copy": out["shardfx"] / out["one copy"],
        "pinned_host to device, share of one copy": into["shardfx"] / into["one copy"],
    }


def limited(device: Any) -> dict[str, Any]:
    """Peak bytes on the device when a state four times the limit moves out and back, and when it is donated."""
    if device.memory_stats() is None:
        return {"skipped": "this device counts no memory"}
    here, there, limit = _on(device), _on(device, "pinned_host"), LEAVES * LEAF_BYTES // 4
    count = LEAF_BYTES // 4
    tree = jax.jit(lambda: [jnp.full((count,), i, jnp.float32) for i in range(LEAVES)], out_shardings=here)()
    hosted = jax.block_until_ready(reshard(tree, there, memory_limit_bytes=limit, donate=True))
    assert all(leaf.is_deleted() for leaf in tree)
    left = device.memory_stats()["bytes_in_use"]
    back = jax.block_until_ready(reshard(hosted, here, memory_limit_bytes=limit))
    assert all(float(leaf[-1]) == i for i, leaf in enumerate(back))
    held = device.memory_stats()["bytes_in_use"]
    return {"limit": limit, "left after a donated move": left, "held after it came back": held, "tree": 4 * limit}


def platforms(device: Any) -> dict[str, Any]:
    """From eight CPU devices to the accelerator and back, each shard from those that overlap it."""
    cpus = np.array(jax.devices("cpu"))
    values = np.arange(1 << 24, dtype=np.float32).reshape(4096, 4096)
    spread = NamedSharding(Mesh(cpus, ("x",)), P(None, "x"))
    rows = NamedSharding(Mesh(cpus[[6, 1, 3, 0]], ("x",)), P("x"))
    alone = _on(device)
    x = jax.device_put(values, spread)
    there = reshard(x, alone)
    assert there.sharding == alone
    np.testing.assert_array_equal(np.asarray(there), values)
    back = reshard(there, rows)
    assert back.sharding == rows
    for shard in back.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), values[shard.index])
    on_device = jax.device_put(values, alone)
    into = {"shardfx": lambda: reshard(x, alone), "jax.device_put": lambda: jax.device_put(x, alone)}
    out = {"shardfx": lambda: reshard(on_device, rows), "jax.device_put": lambda: jax.device_put(on_device, rows)}
    return {
        "bytes": values.nbytes,
        "8 CPU devices to the accelerator, GB/s": _race(into, values.nbytes),
        "the accelerator to 4 CPU devices, GB/s": _race(out, values.nbytes),
    }


def load(device: Any) -> dict[str, Any]:
    """A safetensors file of 2 GiB onto the device; the page cache is warm."""
    rng = np.random.default_rng(0)
    tree = {f"layer{i}": rng.random((WIDTH // 2, WIDTH // 2), np.float32) for i in range(LEAVES)}
    made = plan(tree, Mesh(np.array([device]), ("x",)), paths=PathRules([(".*", P("x"))]))
    total = sum(x.nbytes for x in tree.values())
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "model.safetensors")
        checkpoint.save(file, tree, made, progress=False)
        loaded = checkpoint.load(file, made, progress=False)
        for name, x in tree.items():
            np.testing.assert_array_equal(np.asarray(loaded[name])[::513], x[::513])
        del loaded

        def by_library() -> Any:
            from safetensors.numpy import load_file

            return jax.device_put(load_file(file), made.shardings)

        one = np.ones(total // 4, np.float32)
        runs = {
            "shardfx": lambda: checkpoint.load(file, made, progress=False),
            "load_file, device_put": by_library,
            "one copy from NumPy memory": lambda: jax.device_put(one, _on(device)),
            "reading the file": lambda: np.fromfile(file, np.uint8),
        }
        return {"bytes": total, "GB/s": _race(runs, total)}


def jit(device: Any) -> dict[str, Any]:
    """A step of a wide network: `filter_jit` with a plan against plain `jax.jit`."""
    width, depth = WIDTH, 4
    params = {f"w{i}": np.full((width, width), 1 / width, np.float32) for i in range(depth)}
    mesh, rules = Mesh(np.array([device]), ("x",)), PathRules([(".*", P("x"))])
    made = plan(params, mesh, paths=rules)
    batch_plan = plan({"x": np.ones((64, width), np.float32)}, mesh, paths=rules)

    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            x = batch["x"]
            for i in range(depth):
                x = jnp.tanh(x @ params[f"w{i}"])
            return jnp.mean(x**2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    placed = jax.device_put(params, made.shardings)
    batch = jax.device_put({"x": np.ones((64, width), np.float32)}, batch_plan.shardings)
    planned, plain = filter_jit(step, in_shardings=(made, batch_plan)), jax.jit(step)
    ours, theirs = planned(placed, batch), plain(placed, batch)
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-6)
    seconds = _race({"planned": lambda: planned(placed, batch), "plain": lambda: plain(placed, batch)}, 10**9)
    return {"steps per second": seconds, "planned over plain": seconds["plain"] / seconds["planned"]}


MEASURES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "offload": offload,
    "limited": limited,
    "platforms": platforms,
    "load": load,
    "jit": jit,
}

if __name__ == "__main__":
    main(sys.argv[1])
