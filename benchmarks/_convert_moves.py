"""The suite `convert`: a trainer's weights move to an engine, by time."""

import functools as ft
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import shardfx
from shardfx import (
    reshard,
)
from shardfx._reshard.mover import resharded

from . import _convert_trees as trees
from ._case import Race, Rival, Value
from ._convert_trees import ENGINE, KEYS, LLAMA, MOST_SECONDS, SHARDS, SIZE, WIDTH
from ._runner import Options


def sync_race(mebibytes: int, options: Options, elsewhere: bool) -> Race:
    layers = trees.layer_count(mebibytes)
    half = len(options.devices) // 2
    if elsewhere:
        source_devices = options.devices[:half]
        there = options.devices[half:]
    else:
        source_devices, there = (options.devices,) * 2
    source = trees.trainer_plan(layers, source_devices)
    target = trees.engine_plan(layers, there)
    shardings = target.shardings

    # All trees hold the same numbers, so that one answer is right for all rivals.
    expected: dict[str, np.ndarray] = {}

    def check(tree, result) -> None:
        if not expected:
            leaves_by_path = {path: np.asarray(leaf) for path, leaf in tree.items()}
            applied = ENGINE.apply(leaves_by_path)
            expected.update(applied)
        for path, array in expected.items():
            assert result[path].sharding == shardings[path], path
            assert np.array_equal(
                np.asarray(result[path]).view(np.uint16), array.view(np.uint16)
            ), path

    def whole() -> Callable[[Any], Any]:
        return jax.jit(
            lambda tree: ENGINE.apply(tree, target.structs),
            out_shardings=shardings,
        )

    rivals = [
        Rival(
            "shardfx",
            make=lambda: lambda tree: reshard(tree, target, map=ENGINE),
            check=check,
        ),
        Rival(
            "shardfx, programs",
            make=lambda: ft.partial(resharded, dst=target, map=ENGINE, copies=False),
            check=check,
        ),
        Rival(
            "jit per leaf, device_put",
            make=lambda: ft.partial(_leaf_by_leaf, layers, shardings),
            check=check,
        ),
    ]
    if not elsewhere:
        rivals.append(Rival("jax.jit, out_shardings", make=whole, check=check))
    facts = {"leaves": len(target.leaves), "devices": len(options.devices)}
    return Race(
        rivals=tuple(rivals),
        # A move measured twice on one source would find copies that JAX keeps on the
        # host.
        fresh=lambda: jax.block_until_ready(trees.filled_tree(source)),
        byte_count=target.bytes_total,
        facts=facts,
        clear_caches=False,
        also=time.process_time,
        most_seconds=MOST_SECONDS,
    )


@jax.jit
def _qkv(q: jax.Array, k: jax.Array, v: jax.Array, i: int) -> jax.Array:
    def key(x: jax.Array) -> jax.Array:
        count = x[i].T.reshape(KEYS, SIZE, WIDTH)
        return jnp.repeat(count, SHARDS // KEYS, 0).reshape(SHARDS, -1, WIDTH)

    return jnp.concatenate(
        [q[i].T.reshape(SHARDS, -1, WIDTH), key(k), key(v)], 1
    ).reshape(-1, WIDTH)


@jax.jit
def _gate_up(gate: jax.Array, up: jax.Array, i: int) -> jax.Array:
    parts = [x[i].T.reshape(SHARDS, -1, WIDTH) for x in (gate, up)]
    return jnp.concatenate(parts, 1).reshape(-1, WIDTH)


@jax.jit
def _turned(x: jax.Array, i: int) -> jax.Array:
    return x[i].T


@jax.jit
def _layer(x: jax.Array, i: int) -> jax.Array:
    return x[i]


def _leaf_by_leaf(layers: int, shardings: Any, tree: Any) -> Any:
    """What people write: a compiled function per kind of weight, and `device_put` of
    what it gives.
    """
    placed = jax.device_put(tree["embed"], shardings["model.embed"])
    arrays_by_path = {"model.embed": placed}
    w = {name.removeprefix("layers/"): leaf for name, leaf in tree.items()}
    for i in range(layers):
        layer = {
            "qkv": _qkv(w["q"], w["k"], w["v"], i),
            "o": _turned(w["o"], i),
            "gate_up": _gate_up(w["gate"], w["up"], i),
            "down": _turned(w["down"], i),
            "norm": _layer(w["norm"], i),
        }
        for name, leaf in layer.items():
            path = f"model.layers.{i}.{name}"
            arrays_by_path[path] = jax.device_put(leaf, shardings[path])
    return arrays_by_path


def second_sync(options: Options) -> Mapping[str, Value]:
    tree, target = trees.small_weights(trees.leaf_count(options), options.devices)
    firsts = []
    seconds = []
    for _ in range(3):
        shardfx.clear_caches()
        jax.clear_caches()
        taken = []
        for _ in range(3):
            begin = time.perf_counter()
            jax.block_until_ready(reshard(tree, target, map=LLAMA))
            taken.append(time.perf_counter() - begin)
        firsts.append(taken[0])
        seconds.append(statistics.median(taken[1:]))
    first = statistics.median(firsts)
    second = statistics.median(seconds)
    return {
        "first_seconds": first,
        "second_seconds": second,
        "first_over_second": first / second,
    }
