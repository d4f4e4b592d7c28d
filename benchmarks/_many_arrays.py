"""Thousands of small arrays beside the same work by hand, in turn in one process: the
experts of a checkpoint into stacks and back, and a tree of small arrays into a file.
"""

import atexit
import functools as ft
import gc
import importlib.util
import itertools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

from shardfx import From, PathRules, ShardPlan, TreeMap, checkpoint, plan

from ._case import Entry, Finding, Limit, Skip, Value
from ._runner import Options


NAMES = ("gate_proj", "up_proj", "down_proj")
LAYERS = 24
SHAPE = (16, 32)
_ROUNDS = 5
# Processor time over that of the same by hand.
_LIMITS = (Limit("processor_over_by_hand", at_most=1.3),)


class _Experts(NamedTuple):
    """A checkpoint of experts, the map to three stacks, and the plan of these."""

    file: Path
    paths: Mapping[str, list[list[str]]]
    map: TreeMap
    plan: ShardPlan


def findings(options: Options) -> list[Entry]:
    experts = 25 if options.quick else 250
    count = 3 * LAYERS * experts
    names = (
        f"{count:,} experts into three stacks",
        f"{count:,} experts out of three stacks",
        f"{count:,} small NumPy arrays saved",
    )
    if importlib.util.find_spec("safetensors") is None:
        return [Skip(name, "safetensors is not installed") for name in names]
    limits = () if options.quick else _LIMITS
    measures = (_load, _save_back, _save)
    return [
        Finding(name, ft.partial(measure, experts, options), limits)
        for name, measure in zip(names, measures, strict=True)
    ]


@ft.lru_cache(maxsize=1)
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="shardfx-many-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _experts(experts: int, options: Options) -> _Experts:
    from safetensors.numpy import save_file

    paths = {}
    rules = {}
    structs = {}
    for name in NAMES:
        template = f"model.layers.{{i}}.mlp.experts.{{j}}.{name}.weight"
        rules[name] = From(template).stack("j").stack("i")
        shape = (LAYERS, experts, *SHAPE)
        structs[name] = jax.ShapeDtypeStruct(shape, np.float32)
        paths[name] = [
            [template.format(i=i, j=j) for j in range(experts)] for i in range(LAYERS)
        ]
    file = _folder() / f"{experts}.safetensors"
    if not file.exists():
        random = np.random.default_rng(0)
        arrays = {}
        for rows in paths.values():
            for path in itertools.chain.from_iterable(rows):
                arrays[path] = random.standard_normal(SHAPE).astype(np.float32)
        save_file(arrays, file)
    mesh = Mesh(np.array(options.devices), ("x",))
    sharding_plan = plan(structs, mesh, paths=PathRules([(".*", P())]))
    return _Experts(file=file, paths=paths, map=TreeMap(rules), plan=sharding_plan)


def _load(experts: int, options: Options) -> Mapping[str, Value]:
    from safetensors.numpy import load_file

    source = _experts(experts, options)
    shardings = source.plan.shardings

    def by_hand() -> dict[str, jax.Array]:
        arrays = load_file(source.file)
        stacks = {}
        for name, rows in source.paths.items():
            layers = [np.stack([arrays[path] for path in row]) for row in rows]
            stacks[name] = jax.device_put(np.stack(layers), shardings[name])
        return jax.block_until_ready(stacks)

    def ours() -> dict[str, jax.Array]:
        loaded = checkpoint.load(source.file, source.plan, source.map)
        return jax.block_until_ready(loaded)

    expected = by_hand()
    for name, array in ours().items():
        assert (np.asarray(array) == np.asarray(expected[name])).all(), name
    return _compared(by_hand, ours)


def _save_back(experts: int, options: Options) -> Mapping[str, Value]:
    from safetensors.numpy import load_file, save_file

    source = _experts(experts, options)
    tree = checkpoint.load(source.file, source.plan, source.map)
    like = checkpoint.structs(source.file)
    inverse = source.map.inverse()

    def by_hand(file: Path) -> None:
        arrays = {}
        for name, rows in source.paths.items():
            stack = np.asarray(tree[name])
            for i, row in enumerate(rows):
                for j, path in enumerate(row):
                    arrays[path] = stack[i, j]
        save_file(arrays, file)
        _flush(file)

    def ours(file: Path) -> None:
        checkpoint.save(file, tree, source.plan, map=inverse, like=like)

    expected = load_file(source.file)
    ours(_fresh())
    saved = load_file(_file())
    assert saved.keys() == expected.keys()
    assert all((saved[path] == array).all() for path, array in expected.items())
    return _compared(lambda: by_hand(_fresh()), lambda: ours(_fresh()))


def _save(experts: int, options: Options) -> Mapping[str, Value]:
    from safetensors.numpy import load_file, save_file

    arrays = {}
    for number in range(3 * LAYERS * experts):
        arrays[f"blocks/{number // 10}/w{number % 10}"] = np.full(
            128, number, "float32"
        )
    mesh = Mesh(np.array(options.devices), ("x",))
    sharding_plan = plan(arrays, mesh, paths=PathRules([(".*", P())]))

    def by_hand() -> None:
        file = _fresh()
        save_file(arrays, file)
        _flush(file)

    def ours() -> None:
        checkpoint.save(_fresh(), arrays, sharding_plan)

    ours()
    saved = load_file(_file())
    assert all((saved[path] == array).all() for path, array in arrays.items())
    return _compared(by_hand, ours)


def _file() -> Path:
    return _folder() / "out.safetensors"


def _fresh() -> Path:
    _file().unlink(missing_ok=True)
    return _file()


def _flush(file: Path) -> None:
    # `save` flushes its files too.
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _compared(
    by_hand: Callable[[], Any], ours: Callable[[], Any]
) -> Mapping[str, Value]:
    """The times of both in turn, and their ratio."""
    by_hand()
    ours()
    seconds: dict[str, list[float]] = {"by_hand": [], "shardfx": []}
    for _ in range(_ROUNDS):
        for name, run in (("by_hand", by_hand), ("shardfx", ours)):
            gc.collect()
            start = time.process_time()
            run()
            seconds[name].append(time.process_time() - start)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    ratio = medians["shardfx"] / medians["by_hand"]
    return {
        "processor_over_by_hand": ratio,
        **{f"processor_seconds.{name}": value for name, value in medians.items()},
    }
