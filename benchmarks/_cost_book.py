"""The worked answers of the scaling book, each worked out again by shardfx.

The book's answers and where they stand are in `cost_oracles.json`. Nothing is compiled
here.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from shardfx import MeshSpec, PathRules, ShardPlan, chips, plan
from shardfx.cost import Traffic, TrafficRow, fit, seconds

from ._case import Value


# The book counts 16 GB for a chip of v5e and 96 GB for one of v5p, whatever a program
# may fill.
_BOOKS = {"v5e": 16e9, "v5p": 96e9}


def row(kind: str, wire_bytes: int, group: int, axes: tuple[str, ...]) -> TrafficRow:
    """A collective that nobody compiled."""
    return TrafficRow(
        kind=kind,
        wire_bytes=wire_bytes,
        dcn_bytes=0,
        calls=1,
        dtype="bf16",
        group_size=group,
        axes=axes,
        source=None,
        stack=(),
        leaf=None,
    )


def crossovers(data: Mapping[str, Any]) -> Mapping[str, Value]:
    """From how many tokens on a product is bound by arithmetic and not by memory."""
    values: dict[str, Value] = {}
    for name, tokens in data["crossover"]["tokens"].items():
        chip = chips.find(name)
        ours = chip.flops("bfloat16") / chip.hbm_bytes_per_second
        values |= {f"{name}.book_tokens": tokens, f"{name}.tokens": round(ours, 1)}
        values["error_percent"] = round(abs(100 * (ours / tokens - 1)), 2)
    return values


def collectives(data: Mapping[str, Any]) -> Mapping[str, Value]:
    """Gathers on slices with and without rings.

    Some of the book's answers count the device's own shard as if it were sent too; it
    says so in its summary, and the error is against the answer without it.
    """
    values: dict[str, Value] = {}
    worst = 0.0
    for example in data["collectives"]:
        size = math.prod(example["mesh"][axis] for axis in example["axes"])
        sent = example["bytes"] * (size - 1) // size
        rows = (row(example["kind"], sent, size, tuple(example["axes"])),)
        devices = math.prod(example["mesh"].values())
        traffic = Traffic(
            rows,
            devices,
        )
        estimate = seconds(
            traffic, example["chip"], MeshSpec(example["mesh"]), slice=example["slice"]
        )
        # The book's answers are bytes over bandwidth.
        (priced,) = estimate.rows
        ours = 1e6 * (priced.seconds - priced.latency_seconds)
        book = (
            example["microseconds"]
            if "measured_microseconds" in example
            else example["microseconds"] * (size - 1) / size
        )
        worst = max(worst, abs(100 * (ours / book - 1)))
        values |= {
            f"{example['name']}, book": example["microseconds"],
            f"{example['name']}, us": round(ours, 1),
        }
        if "measured_microseconds" in example:
            values[f"{example['name']}, measured"] = example["measured_microseconds"]
    return {**values, "error_percent": round(worst, 2)}


def training(data: Mapping[str, Any], model: Mapping[str, int]) -> Mapping[str, Value]:
    """70B in batches of 4M tokens on v5p: how many chips at least, how much on each of
    a pod, how many tokens.
    """
    mine = data["training"]
    mesh = MeshSpec({"fsdp": mine["chips"]})
    whole = PathRules([(".*", P())])
    params = plan(_parameters(model, jnp.bfloat16), mesh, paths=whole)
    moments = plan(_parameters(model, jnp.float32), mesh, paths=whole)
    activations = jax.ShapeDtypeStruct(
        (3 * mine["layers"], mine["tokens_for_memory"], mine["width"]), jnp.bfloat16
    )
    bytes_total = plan({"kept": activations}, mesh, paths=whole).bytes_total
    total = params.bytes_total + 2 * moments.bytes_total + bytes_total
    least = math.ceil(total / _BOOKS[mine["chip"]])
    chip = chips.find(mine["chip"])
    # With two links on each of three dimensions, gathers of 2 bytes hide behind 2
    # operations for each token.
    tokens = chip.flops("bfloat16") / (chip.links * chip.link_bytes_per_second)
    return {
        "book_least_chips": mine["least_chips"],
        "least_chips": least,
        "book_gigabytes_a_chip": mine["gigabytes_a_chip"],
        "gigabytes_a_chip": round(total / mine["chips"] / 1e9, 2),
        "book_tokens_for_fsdp": mine["tokens_for_fsdp"],
        "tokens_for_fsdp": round(tokens),
        "error_percent": round(
            100 * max(abs(least / mine["least_chips"] - 1), abs(tokens / 850 - 1)), 2
        ),
    }


def serving(data: Mapping[str, Any], model: Mapping[str, int]) -> Mapping[str, Value]:
    """How many caches of 8k tokens fit beside 70B, on the least slices of v5e."""
    mine = data["serving"]
    values: dict[str, Value] = {}
    for name, extents in mine["slices"].items():
        dtype = jnp.dtype(name)
        axes = {"x": extents[0], "y": extents[1]}
        mesh = MeshSpec(axes)
        rules = PathRules([(".*", P(None, "x", "y"))])
        weights = plan(
            _parameters(model, dtype),
            mesh,
            paths=rules,
        )
        sharding_plan = plan(_cache(model, mine, 1, dtype), mesh, paths=_CACHED)
        plans = {
            "params": weights,
            "cache": sharding_plan,
        }
        a_token = plans["cache"].bytes_total / mine["context"]
        assert abs(a_token / mine["cache_bytes_a_token"][name] - 1) < 0.01
        values |= {f"{name}.book_caches": mine["caches"][name]}
        for which, usable in (
            ("as the book counts", _BOOKS["v5e"]),
            ("that a program may fill", None),
        ):
            chip = chips.find("v5e")
            if usable is not None:
                chip = dataclasses.replace(chip, usable_hbm_bytes=int(usable))
            values[f"{name}.caches in memory {which}"] = _most_caches(
                model,
                mine=mine,
                dtype=dtype,
                weights=weights,
                chip=chip,
            )
        values[f"{name}.least_chips"] = round(weights.bytes_total / _BOOKS["v5e"], 2)
        values[f"{name}.book_least_chips"] = mine["least_chips"][name]
    return values


_CACHED = PathRules([(".*", P(None, None, "x", "y"))])


def _most_caches(
    model: Mapping[str, int],
    mine: Mapping[str, Any],
    dtype: Any,
    weights: Any,
    chip: Any,
) -> int:
    low = 0
    high = 1024
    while high - low > 1:
        middle = (low + high) // 2
        cache = plan(_cache(model, mine, middle, dtype), weights.mesh, paths=_CACHED)
        joined = ShardPlan.join(params=weights, cache=cache)
        fitted = fit(joined, chip=chip)
        fits = fitted.fits
        if fits:
            low = middle
        else:
            high = middle
    return low


def _cache(
    model: Mapping[str, int], mine: Mapping[str, Any], count: int, dtype: Any
) -> dict[str, Any]:
    shape = (
        model["layers"],
        count,
        mine["context"],
        model["kv_heads"],
        model["head_dim"],
    )
    return dict.fromkeys(("keys", "values"), jax.ShapeDtypeStruct(shape, dtype))


def _parameters(model: Mapping[str, int], dtype: Any) -> dict[str, Any]:
    layers = model["layers"]
    width = model["width"]
    hidden = model["hidden"]
    heads = model["heads"] * model["head_dim"]
    keys = model["kv_heads"] * model["head_dim"]
    shapes = {
        "query": (layers, width, heads),
        "key": (layers, width, keys),
        "value": (layers, width, keys),
        "out": (layers, heads, width),
        "gate": (layers, width, hidden),
        "up": (layers, width, hidden),
        "down": (layers, hidden, width),
        "embedding": (1, model["vocab"], width),
        "unembedding": (1, width, model["vocab"]),
    }
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
