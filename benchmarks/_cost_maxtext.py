"""The step that MaxText compiles for one configuration, as a plain function: what the
fit boundary is told of.

Its facts are those of `configs/tpu/v4/52b.sh` and of the defaults of `configs/base.yml`
in June 2026: parameters and moments in float32 and activations in bfloat16, a Llama
layer with three matrices in its feed-forward block, layers stacked on the second
dimension of each parameter and scanned, each computed again in the backward pass, flash
attention, logits in float32 with a loss whose residuals are kept, gradients clipped by
their norm.
"""

import functools as ft
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from shardfx import MeshSpec, PathRules, ShardPlan, constrain, follow, plan

from ._steps import normed


# `normalization_layer_epsilon` of `configs/base.yml`.
_EPSILON = 1e-5
# The layers lie on the second dimension of each parameter, as `param_scan_axis=1` says.
_RULES = PathRules(
    [
        ("layers/(query|key|value|gate|up)", P("fsdp")),
        ("layers/out", P(None, None, None, "fsdp")),
        ("layers/down", P(None, None, "fsdp")),
        ("^embedding", P(None, "fsdp")),
        ("norm", P()),
        ("unembedding", P("fsdp")),
    ]
)


def planned(
    config: Mapping[str, Any], *, tiled: bool
) -> tuple[dict[str, ShardPlan], Callable[..., Any]]:
    """The plans and the step.

    **Arguments:**

    - `config`: the sizes, by name.
    - `tiled`: whether the logits are computed in tiles, as `num_vocab_tiling=8` asks
      for.
    """
    axes = {"data": config["slices"], "fsdp": config["fsdp"]}
    mesh = MeshSpec(
        axes,
        dcn={"data": config["slices"]},
    )
    params = plan(_structs(config), mesh, paths=_RULES)
    count = config["sequences"] * config["fsdp"] * config["slices"]
    tokens = jax.ShapeDtypeStruct((count, config["length"]), jnp.int32)
    names = ("inputs", "positions", "segments", "targets", "targets_segments")
    rules = PathRules([(".*", P(("data", "fsdp")))])
    batch = plan(
        dict.fromkeys(names, tokens),
        mesh,
        paths=rules,
    )
    plans = {"params": params, "state": follow(_moments, params), "batch": batch}
    return plans, _step(config, params, tiled=tiled)


def _structs(config: Mapping[str, Any]) -> dict[str, Any]:
    layers = config["layers"]
    width = config["width"]
    hidden = config["hidden"]
    heads = (width, layers, config["heads"], config["head_dim"])
    shapes = {
        "embedding": (config["vocab"], width),
        "layers": {
            "attention_norm": (width, layers),
            **dict.fromkeys(("query", "key", "value"), heads),
            "out": (config["heads"], layers, config["head_dim"], width),
            "mlp_norm": (width, layers),
            "gate": (width, layers, hidden),
            "up": (width, layers, hidden),
            "down": (hidden, layers, width),
        },
        "norm": (width,),
        "unembedding": (width, config["vocab"]),
    }
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        shapes,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def _moments(params: Any) -> dict[str, Any]:
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params)
    return {"mean": zeros, "square": zeros, "count": jnp.zeros((), jnp.int32)}


def _step(
    config: Mapping[str, Any], plan: ShardPlan, *, tiled: bool
) -> Callable[..., Any]:
    laid = ft.partial(constrain, names_or_spec=P(("data", "fsdp")), plan=plan)

    def layer(x: jax.Array, w) -> tuple[jax.Array, None]:
        w = jax.tree.map(lambda leaf: leaf.astype(x.dtype), w)
        attention_input = laid(normed(x, w["attention_norm"], _EPSILON))
        query = jnp.einsum("bsd,dhk->bshk", attention_input, w["query"])
        key = jnp.einsum("bsd,dhk->bshk", attention_input, w["key"])
        value = jnp.einsum("bsd,dhk->bshk", attention_input, w["value"])
        scaled_query = _rotated(query) / math.sqrt(config["head_dim"])
        mixed = _flash(scaled_query, _rotated(key), value, config["blocks"])
        x = x + laid(jnp.einsum("bshk,hkd->bsd", mixed, w["out"]))
        mlp_input = laid(normed(x, w["mlp_norm"], _EPSILON))
        gate = jax.nn.silu(mlp_input @ w["gate"])
        up = mlp_input @ w["up"]
        down = laid((gate * up) @ w["down"])
        return laid(x + down), None

    def loss(params, batch) -> jax.Array:
        embedding = params["embedding"].astype(jnp.bfloat16)[batch["inputs"]]
        x = laid(embedding)
        stacked = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 1, 0), params["layers"])
        x, _ = jax.lax.scan(jax.checkpoint(layer), x, stacked)
        norm = params["norm"].astype(x.dtype)
        x = laid(normed(x, norm, _EPSILON))
        head = params["unembedding"].astype(x.dtype)
        mask = (batch["targets_segments"] != 0).astype(jnp.float32)
        if not tiled:
            return _cross_entropy(x, head, batch["targets"], mask)
        rows = math.prod(batch["targets"].shape) // config["vocab_tiles"]

        def tiles_of(array: jax.Array) -> jax.Array:
            tiles = array.reshape(config["vocab_tiles"], rows, *array.shape[2:])
            return constrain(tiles, P(None, ("data", "fsdp")), plan)

        tile_loss = jax.checkpoint(ft.partial(_cross_entropy, head=head))

        def add(total: jax.Array, tile) -> tuple[jax.Array, None]:
            x, targets, mask = tile
            return total + tile_loss(x, targets=targets, mask=mask), None

        tiles = (tiles_of(x), tiles_of(batch["targets"]), tiles_of(mask))
        total, _ = jax.lax.scan(add, jnp.float32(0), tiles)
        return total

    def step(params, state, batch) -> tuple[Any, Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, batch)
        squares = [jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(grads)]
        norm = jnp.sqrt(sum(squares))
        grads = jax.tree.map(lambda g: jnp.where(norm < 1, g, g / norm), grads)
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mean"], grads)
        square = jax.tree.map(
            lambda v, g: 0.95 * v + 0.05 * g * g, state["square"], grads
        )
        count = state["count"] + 1
        first = 1 - 0.9 ** count.astype(jnp.float32)
        second = 1 - 0.95 ** count.astype(jnp.float32)

        def moved(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            root = jnp.sqrt(v / second) + 1e-8
            return p - 1e-8 * (m / first / root + 0.1 * p)

        new = jax.tree.map(moved, params, mean, square)
        return new, {"mean": mean, "square": square, "count": count}, value

    return step


def _rotated(x: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    positions = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None]
    planes = jnp.arange(half) / half
    angles = positions / 10_000**planes
    sin = jnp.sin(angles)[None, :, None]
    cos = jnp.cos(angles)[None, :, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned_first = first * cos - second * sin
    turned_second = second * cos + first * sin
    return jnp.concatenate([turned_first, turned_second], axis=-1).astype(x.dtype)


def _flash(q: jax.Array, k: jax.Array, v: jax.Array, blocks: int) -> jax.Array:
    """Attention as a flash kernel does it: never more than one block of queries against
    the keys.
    """

    def block(q: jax.Array) -> jax.Array:
        scores = jnp.einsum("bqhd,bthd->bhqt", q, k).astype(jnp.float32)
        return jnp.einsum(
            "bhqt,bthd->bqhd", jax.nn.softmax(scores, axis=-1).astype(q.dtype), v
        )

    parts = q.reshape(q.shape[0], blocks, -1, *q.shape[2:]).swapaxes(0, 1)
    _, mixed = jax.lax.scan(
        lambda carry, chunk: (carry, jax.checkpoint(block)(chunk)), None, parts
    )
    return mixed.swapaxes(0, 1).reshape(q.shape)


def _cross_entropy(
    x: jax.Array, head: jax.Array, targets: jax.Array, mask: jax.Array
) -> jax.Array:
    logits = (x @ head).astype(jnp.float32)
    targets_one_hot = jax.nn.one_hot(targets, logits.shape[-1])
    return jnp.sum(_stable(logits, targets_one_hot) * mask)


@jax.custom_vjp
def _stable(logits: jax.Array, targets: jax.Array) -> jax.Array:
    elements = targets * jax.nn.log_softmax(logits)
    return -jnp.sum(elements, axis=-1)


def _stable_forward(
    logits: jax.Array, targets: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    powers = jnp.exp(shifted)
    total = jnp.sum(powers, axis=-1, keepdims=True)
    elements = targets * (shifted - jnp.log(total))
    return -jnp.sum(elements, axis=-1), (
        targets,
        powers,
        total,
    )


def _stable_backward(
    residuals: tuple[jax.Array, ...], grad: jax.Array
) -> tuple[jax.Array, None]:
    targets, powers, total = residuals
    return grad[..., None] * (powers / total - targets), None


_stable.defvjp(_stable_forward, _stable_backward)
