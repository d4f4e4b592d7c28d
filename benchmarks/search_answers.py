"""Published answers to which mesh is best: whether a search gives them, with the
numbers that decide.
"""

import functools as ft
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

import shardfx as sfx

from ._case import Value
from ._llama import llama


# Of Llama-3 70B: layers, width, hidden, key heads, queries of each, size of a head,
# tokens.
_70B = (80, 8192, 28672, 8, 8, 128, 128256)
# The step keeps the scores of attention, which the recipes' kernels do not: as many
# tokens, in shorter sequences.
_LENGTH = 1024


def answers() -> dict[str, Value]:
    """Each is 1 where the search agrees with what was published."""
    answer_by_name = {**_book(), **_recipe(), **_crossover()}
    right = [
        value for name, value in answer_by_name.items() if name.startswith("right:")
    ]
    total = sum(map(float, right))
    return {"right": float(total), **answer_by_name}


def _book() -> Mapping[str, Value]:
    """The scaling book, applied-training.md: 4M tokens on 8,960 v5p want about 2,048 x
    4, as fsdp alone waits.

    8,192 of the chips, since powers of two are what the model's sizes divide by.
    """
    tokens = 4 * 2**20
    candidates = sfx.auto.search(
        *llama(*_70B, tokens // _LENGTH, _LENGTH), devices=8192, chip="v5p"
    )
    best = candidates[0]
    tensor = math.prod(
        best.mesh.shape[axis]
        for axis, names in best.assignments
        if names[0] in ("mlp", "kv_heads")
    )
    return {
        "right: 70B on a v5p pod cuts tensors, a little": int(2 <= tensor <= 8),
        "70B on a v5p pod": best.title,
        "70B on a v5p pod, tensor": tensor,
    }


def _recipe() -> Mapping[str, Value]:
    """tpu-recipes, ironwood: Llama-3.1-70B, 2M tokens on 64 chips of two devices, by
    fsdp alone.
    """
    search_result = sfx.auto.search(
        *llama(*_70B, 256 * 8192 // _LENGTH, _LENGTH), devices=128, chip="v7x"
    )
    best = search_result[0]
    return {
        "right: 70B on 64 Ironwood chips cuts the batch alone": int(
            all(names[0] == "batch" for _, names in best.assignments)
        ),
        "70B on 64 Ironwood chips": best.title,
        "70B on 64 Ironwood chips, ms": best.seconds * 1e3,
        "70B on 64 Ironwood chips, GiB": best.memory_bytes / 2**30,
    }


def _crossover() -> Mapping[str, Value]:
    """AutoParallel, adaptive_sharding.md: data and tensor parallelism cost the same
    with as many tokens as features.

    Layers in the middle of a model: the bytes of the first and last are counted off, by
    the difference of two depths.
    """
    features = 4096
    ratios = {}
    for tokens in (features // 2, features, 2 * features):
        cases = (("batch",), ("mlp",))
        sent = [_between(tokens, features, axes) for axes in cases]
        ratios[tokens] = sent[0] / sent[1]
    few, even, many = ratios.values()
    return {
        "right: data and tensor parallelism cross at as many tokens as features": int(
            few > 1 > many
        ),
        "data over tensor parallelism, half as many tokens as features": few,
        "as many": even,
        "twice as many": many,
    }


def _between(tokens: int, features: int, axes: tuple[str, ...]) -> float:
    """What two layers more of a model send under one way, on 8 devices."""
    rules = sfx.AxisRules([(name, "a") for name in axes])
    limits = sfx.auto.Limits(rules=rules)
    few, deep = (
        sfx.auto.search(
            *_layers(depth, features, tokens), devices=8, chip="v5p", limits=limits
        )[0]
        for depth in (2, 4)
    )
    return deep.wire_bytes - few.wire_bytes


def _layers(depth: int, features: int, tokens: int) -> tuple[Any, ...]:
    def loss(p, x):
        for layer in p:
            x = x + jax.nn.relu(x @ layer["up"]) @ layer["down"]
        return jnp.mean(x**2)

    def step(p, x):
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, jax.grad(loss)(p, x))

    struct = ft.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    layer = {
        "up": struct((features // 4, features)),
        "down": struct((features, features // 4)),
    }
    return step, [layer] * depth, struct((tokens, features // 4))
