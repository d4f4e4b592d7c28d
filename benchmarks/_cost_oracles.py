"""Public numbers that the costs are held against: what fits, the worked answers of a book, step times of recipes.

The numbers and where they are from are in `cost_oracles.json`. Nothing is compiled here.
"""

import functools as ft
import json
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from shardfx import MeshSpec, PathRules, Traffic, TrafficRow, chips, constrain, fit, follow, plan, seconds

from ._case import Finding, Limit, Value


DATA: dict[str, Any] = json.loads((Path(__file__).parent / "cost_oracles.json").read_text())


def cases() -> list[Finding]:
    """The oracles, in the runner's form."""
    return [
        Finding("oracle: fit boundary of maxtext#4117", boundary),
        Finding("oracle: a gather of the scaling book", gather, (Limit("error_percent", at_most=1),)),
        Finding("oracle: 70B on a v5p pod, scaling book", pod),
        Finding("oracle: step times of the TPU recipes", recipes),
    ]


def boundary() -> Mapping[str, Value]:
    """What a 52B step needs that does not fit v4, and what it needs as it was mended."""
    told = DATA["boundary"]
    found = {}
    for name, mended in (("before", False), ("after", True)):
        plans, step = _dense(told, mended=mended)
        made = fit(plans, step=step, chip=told["chip"], donate=("params", "state"))
        found[name] = made.peak_bytes / 2**30
        assert made.fits or not mended, f"the mended step fits, and is estimated at {found[name]:.2f} GiB"
    assert found["before"] > found["after"]
    error = 100 * (found["before"] / told["needs_gib"] - 1)
    return {
        "reported_gib": told["needs_gib"],
        "estimated_gib": round(found["before"], 2),
        "error_percent": round(error, 1),
        "said_not_to_fit": int(found["before"] * 2**30 > chips.find(told["chip"]).usable_hbm_bytes),
        "mended_gib": round(found["after"], 2),
        "usable_gib": round(chips.find(told["chip"]).usable_hbm_bytes / 2**30, 2),
    }


def _dense(told: Mapping[str, Any], *, mended: bool) -> tuple[dict[str, Any], Any]:
    """MaxText's default decoder with two matrices in each feed-forward block, and its step under fsdp."""
    layers, width, hidden = told["layers"], told["width"], told["hidden"]
    heads, head_dim, vocab, length = told["heads"], told["head_dim"], told["vocab"], told["length"]
    mesh = MeshSpec({"data": told["slices"], "fsdp": told["fsdp"]}, dcn={"data": told["slices"]})
    shapes = {
        "embedding": (vocab, width),
        "layers": {
            "qkv": (layers, width, 3, heads, head_dim),
            "out": (layers, heads, head_dim, width),
            "up": (layers, width, hidden),
            "down": (layers, hidden, width),
        },
        "unembedding": (width, vocab),
    }
    structs = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), shapes, is_leaf=lambda node: isinstance(node, tuple)
    )
    rules = PathRules(
        [
            ("layers/(qkv|up)", P(None, "fsdp")),
            ("layers/out", P(None, None, None, "fsdp")),
            ("layers/down", P(None, None, "fsdp")),
            ("unembedding", P("fsdp")),
            ("embedding", P(None, "fsdp")),
        ]
    )
    ours = plan(structs, mesh, paths=rules)
    state = follow(_adam, ours)
    count = told["sequences"] * told["fsdp"] * told["slices"]
    tokens = jax.ShapeDtypeStruct((count, length), jnp.int32)
    rows = P(("data", "fsdp"))
    batch = plan(tokens, mesh, paths=PathRules([(".*", rows)]))
    laid = ft.partial(constrain, names_or_spec=rows, plan=ours)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = jnp.einsum("bqhd,bthd->bhqt", q, k).astype(jnp.float32)
        return jnp.einsum("bhqt,bthd->bqhd", jax.nn.softmax(scores, axis=-1).astype(q.dtype), v)

    def in_blocks(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """As a flash kernel: never more than a block of scores."""
        blocks = q.reshape(q.shape[0], 8, length // 8, heads, head_dim).swapaxes(0, 1)
        _, mixed = jax.lax.scan(lambda c, block: (c, jax.checkpoint(attend)(block, k, v)), None, blocks)
        return mixed.swapaxes(0, 1).reshape(q.shape)

    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        w = jax.tree.map(lambda leaf: leaf.astype(x.dtype), w)
        q, k, v = (jnp.einsum("bsd,dhk->bshk", x, w["qkv"][:, at]) for at in range(3))
        x = x + jnp.einsum("bshk,hkd->bsd", (in_blocks if mended else attend)(q, k, v), w["out"])
        return laid(x + jax.nn.relu(x @ w["up"]) @ w["down"]), None

    def tile(x: jax.Array, targets: jax.Array, weight: jax.Array) -> jax.Array:
        logits = (x @ weight).astype(jnp.float32)
        return jnp.sum(jax.nn.logsumexp(logits, axis=-1)) + jnp.sum(logits * jax.nn.one_hot(targets, vocab))

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        x = laid(params["embedding"].astype(jnp.bfloat16)[tokens])
        x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
        weight = params["unembedding"].astype(jnp.bfloat16)
        if not mended:
            return tile(x, tokens, weight)
        tiles = told["vocab_tiles"]
        xs = x.reshape(count, tiles, length // tiles, width).swapaxes(0, 1)
        ts = tokens.reshape(count, tiles, length // tiles).swapaxes(0, 1)
        total, _ = jax.lax.scan(
            lambda sum_, one: (sum_ + jax.checkpoint(tile)(*one, weight), None), jnp.float32(0), (xs, ts)
        )
        return total

    def step(params: Any, state: Any, batch: jax.Array) -> tuple[Any, Any]:
        grads = jax.grad(loss)(params, batch)
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mean"], grads)
        square = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, state["square"], grads)
        new = jax.tree.map(lambda p, m, v: p - 1e-3 * m / (jnp.sqrt(v) + 1e-8), params, mean, square)
        return new, {"mean": mean, "square": square}

    return {"params": ours, "state": state, "batch": batch}, step


def _adam(params: Any) -> Any:
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params)
    return {"mean": zeros, "square": zeros}


def gather() -> Mapping[str, Value]:
    """The book's gather on a slice that closes no ring, which it also measured."""
    told = DATA["book"]["gather"]
    total = 2 * math.prod(told["shape"])
    size = told["mesh"][told["axis"]]
    row = _row("all-gather", total * (size - 1) // size, size, (told["axis"],))
    found = seconds(Traffic((row,), 32), told["chip"], MeshSpec(told["mesh"]), slice=told["slice"])
    micro = 1e6 * found.seconds
    return {
        "book_us": told["microseconds"],
        "estimated_us": round(micro, 1),
        "error_percent": round(abs(100 * (micro / told["microseconds"] - 1)), 2),
        "measured_us": told["measured_microseconds"],
    }


def pod() -> Mapping[str, Value]:
    """70B on 8,960 chips: pure fsdp waits for its wires; about 2,048 x 4 does not."""
    told = DATA["book"]["training"]
    chip = chips.find(told["chip"])
    compute = 6 * told["parameters"] * told["tokens"] / told["chips"] / chip.flops("bfloat16")
    found: dict[str, float] = {}
    for tensor in (1, 2, 4, 5, 7, 10, 16, 20):
        shards = told["chips"] // tensor
        mesh = MeshSpec({"fsdp": shards, "tensor": tensor})
        # Gathered in the forward pass, and again in the backward pass, and the gradients scattered: 2 bytes each.
        weights = 3 * 2 * told["parameters"] / tensor * (shards - 1) / shards
        # Four gathers and four scatters of the activations in each layer, forward and backward.
        acts = 8 * told["layers"] * 2 * told["tokens"] / shards * told["width"] * (tensor - 1) / tensor
        rows = (
            _row("all-gather", int(weights), shards, ("fsdp",)),
            _row("all-gather", int(acts), tensor, ("tensor",)),
        )
        times = seconds(Traffic(rows, told["chips"]), chip, mesh, slice=told["slice"])
        found[f"{shards} x {tensor}"] = times.seconds / compute
    best = min(found, key=lambda name: found[name])
    assert found[f"{told['chips']} x 1"] > 1, "the book: pure fsdp is bound by communication"
    return {
        "pure_fsdp_wire_over_compute": round(found[f"{told['chips']} x 1"], 2),
        "best": best,
        "best_wire_over_compute": round(found[best], 2),
        "book_best": "about 2048 x 4",
    }


def _row(kind: str, wire_bytes: int, group: int, axes: tuple[str, ...]) -> TrafficRow:
    return TrafficRow(kind, wire_bytes, 0, 1, "bf16", group, axes, None, (), None)


def recipes() -> Mapping[str, Value]:
    """Step times from arithmetic and one efficiency per generation; each generation held out in turn."""
    rows = DATA["recipes"]["rows"]
    ideal = [_ideal_seconds(row) for row in rows]
    efficiency = {
        name: statistics.median(
            least / row["seconds"] for least, row in zip(ideal, rows, strict=True) if _generation(row) == name
        )
        for name in sorted({_generation(row) for row in rows})
    }
    own = [_error(least / efficiency[_generation(row)], row) for least, row in zip(ideal, rows, strict=True)]
    held: dict[str, list[float]] = {}
    for least, row in zip(ideal, rows, strict=True):
        others = statistics.mean(value for name, value in efficiency.items() if name != _generation(row))
        held.setdefault(_generation(row), []).append(_error(least / others, row))
    values: dict[str, Value] = {
        "rows": len(rows),
        **{f"efficiency.{name}": round(value, 3) for name, value in efficiency.items()},
        "median_error_percent": round(statistics.median(map(abs, own)), 1),
        "largest_error_percent": round(max(map(abs, own)), 1),
    }
    for name, errors in held.items():
        values[f"held_out.{name}.median_error_percent"] = round(statistics.median(map(abs, errors)), 1)
        values[f"held_out.{name}.largest_error_percent"] = round(max(map(abs, errors)), 1)
    return values


def _generation(row: Mapping[str, Any]) -> str:
    return f"{row['chip']} {row['dtype']}"


def _error(predicted: float, row: Mapping[str, Any]) -> float:
    return 100 * (predicted / row["seconds"] - 1)


def _ideal_seconds(row: Mapping[str, Any]) -> float:
    """Products of parameters and of causal attention at the chip's peak; remat is not counted, as in MFU."""
    model = DATA["models"][row["model"]]
    heads = model["width"] * model["head_dim"] * 2 * (model["heads"] + model["kv_heads"])
    layer = heads + 3 * model["width"] * model["hidden"]
    parameters = model["layers"] * layer + model["width"] * model["vocab"]
    attention = 6 * model["layers"] * row["length"] * model["heads"] * model["head_dim"]
    flops = (6 * parameters + attention) * row["batch"] * row["length"] / row["chips"]
    return flops / chips.find(row["chip"]).flops(row["dtype"])
