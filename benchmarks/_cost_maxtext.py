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
    sequences_per_slice = config["sequences"] * config["fsdp"]
    count = sequences_per_slice * config["slices"]
    tokens_shape = (count, config["length"])
    tokens = jax.ShapeDtypeStruct(tokens_shape, jnp.int32)
    names = ("inputs", "positions", "segments", "targets", "targets_segments")
    rules = PathRules([(".*", P(("data", "fsdp")))])
    batch = plan(
        dict.fromkeys(names, tokens),
        mesh,
        paths=rules,
    )
    state = follow(_moments, params)
    plans = {"params": params, "state": state, "batch": batch}
    return plans, _step(config, params, tiled=tiled)


def _structs(config: Mapping[str, Any]) -> dict[str, Any]:
    layers = config["layers"]
    width = config["width"]
    hidden = config["hidden"]
    heads = (width, layers, config["heads"], config["head_dim"])
    out = (config["heads"], layers, config["head_dim"], width)
    shapes = {
        "embedding": (config["vocab"], width),
        "layers": {
            "attention_norm": (width, layers),
            **dict.fromkeys(("query", "key", "value"), heads),
            "out": out,
            "mlp_norm": (width, layers),
            "gate": (width, layers, hidden),
            "up": (width, layers, hidden),
            "down": (hidden, layers, width),
        },
        "norm": (width,),
        "unembedding": (width, config["vocab"]),
    }

    def struct(shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def is_shape(node):
        return isinstance(node, tuple)

    return jax.tree.map(
        struct,
        shapes,
        is_leaf=is_shape,
    )


def _moments(params: Any) -> dict[str, Any]:
    def zeros_like(leaf):
        return jnp.zeros(leaf.shape, leaf.dtype)

    zeros = jax.tree.map(zeros_like, params)
    count = jnp.zeros((), jnp.int32)
    return {"mean": zeros, "square": zeros, "count": count}


def _optimizer_step(loss):
    def step(params, state, batch) -> tuple[Any, Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, batch)
        squares = []
        for leaf in jax.tree.leaves(grads):
            squares.append(jnp.sum(jnp.square(leaf)))
        norm = jnp.sqrt(sum(squares))

        def clipped(g):
            return jnp.where(norm < 1, g, g / norm)

        grads = jax.tree.map(clipped, grads)

        def next_mean(m, g):
            return 0.9 * m + 0.1 * g

        mean = jax.tree.map(next_mean, state["mean"], grads)

        def next_square(v, g):
            return 0.95 * v + 0.05 * g * g

        square = jax.tree.map(next_square, state["square"], grads)
        count = state["count"] + 1
        steps = count.astype(jnp.float32)
        first = 1 - 0.9**steps
        steps_of_second = count.astype(jnp.float32)
        second = 1 - 0.95**steps_of_second

        def moved(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            unbiased_square = v / second
            root = jnp.sqrt(unbiased_square) + 1e-8
            unbiased_mean = m / first
            change = unbiased_mean / root + 0.1 * p
            return p - 1e-8 * change

        new = jax.tree.map(moved, params, mean, square)
        return new, {"mean": mean, "square": square, "count": count}, value

    return step


def _layer_of(laid, config):
    def layer(x: jax.Array, w) -> tuple[jax.Array, None]:
        def of_type(leaf):
            return leaf.astype(x.dtype)

        w = jax.tree.map(of_type, w)
        attention_norm = normed(x, w["attention_norm"], _EPSILON)
        attention_input = laid(attention_norm)
        query = jnp.einsum("bsd,dhk->bshk", attention_input, w["query"])
        key = jnp.einsum("bsd,dhk->bshk", attention_input, w["key"])
        value = jnp.einsum("bsd,dhk->bshk", attention_input, w["value"])
        turned_query = _rotated(query)
        root = math.sqrt(config["head_dim"])
        scaled_query = turned_query / root
        turned_key = _rotated(key)
        mixed = _flash(scaled_query, turned_key, value, config["blocks"])
        out = jnp.einsum("bshk,hkd->bsd", mixed, w["out"])
        laid_out = laid(out)
        x = x + laid_out
        mlp_norm = normed(x, w["mlp_norm"], _EPSILON)
        mlp_input = laid(mlp_norm)
        gate_product = mlp_input @ w["gate"]
        gate = jax.nn.silu(gate_product)
        up = mlp_input @ w["up"]
        hidden = gate * up
        lowered = hidden @ w["down"]
        down = laid(lowered)
        return laid(x + down), None

    return layer


def _step(
    config: Mapping[str, Any], plan: ShardPlan, *, tiled: bool
) -> Callable[..., Any]:
    laid = ft.partial(constrain, names_or_spec=P(("data", "fsdp")), plan=plan)

    layer = _layer_of(laid, config)

    def loss(params, batch) -> jax.Array:
        table = params["embedding"].astype(jnp.bfloat16)
        embedding = table[batch["inputs"]]
        x = laid(embedding)

        def layers_first(leaf):
            return jnp.moveaxis(leaf, 1, 0)

        stacked = jax.tree.map(layers_first, params["layers"])
        rematerialized = jax.checkpoint(layer)
        x, _ = jax.lax.scan(rematerialized, x, stacked)
        norm = params["norm"].astype(x.dtype)
        normed_x = normed(x, norm, _EPSILON)
        x = laid(normed_x)
        head = params["unembedding"].astype(x.dtype)
        is_real = batch["targets_segments"] != 0
        mask = is_real.astype(jnp.float32)
        if not tiled:
            return _cross_entropy(x, head, batch["targets"], mask)
        token_count = math.prod(batch["targets"].shape)
        rows = token_count // config["vocab_tiles"]

        def tiles_of(array: jax.Array) -> jax.Array:
            tiles = array.reshape(config["vocab_tiles"], rows, *array.shape[2:])
            return constrain(tiles, P(None, ("data", "fsdp")), plan)

        tile_loss = jax.checkpoint(ft.partial(_cross_entropy, head=head))

        def add(total: jax.Array, tile) -> tuple[jax.Array, None]:
            x, targets, mask = tile
            added = tile_loss(x, targets=targets, mask=mask)
            return total + added, None

        tiles_of_x = tiles_of(x)
        tiles_of_targets = tiles_of(batch["targets"])
        tiles_of_mask = tiles_of(mask)
        tiles = (tiles_of_x, tiles_of_targets, tiles_of_mask)
        total, _ = jax.lax.scan(add, jnp.float32(0), tiles)
        return total

    step = _optimizer_step(loss)

    return step


def _rotated(x: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    columns = jnp.arange(x.shape[1], dtype=jnp.float32)
    positions = columns[:, None]
    planes = jnp.arange(half) / half
    angles = positions / 10_000**planes
    sines = jnp.sin(angles)
    sin = sines[None, :, None]
    cosines = jnp.cos(angles)
    cos = cosines[None, :, None]
    wide = x.astype(jnp.float32)
    first, second = jnp.split(wide, 2, axis=-1)
    turned_first = first * cos - second * sin
    turned_second = second * cos + first * sin
    turned = jnp.concatenate([turned_first, turned_second], axis=-1)
    return turned.astype(x.dtype)


def _flash(q: jax.Array, k: jax.Array, v: jax.Array, blocks: int) -> jax.Array:
    """Attention as a flash kernel does it: never more than one block of queries against
    the keys.
    """

    def block(q: jax.Array) -> jax.Array:
        products = jnp.einsum("bqhd,bthd->bhqt", q, k)
        scores = products.astype(jnp.float32)
        shares = jax.nn.softmax(scores, axis=-1)
        low_shares = shares.astype(q.dtype)
        return jnp.einsum("bhqt,bthd->bqhd", low_shares, v)

    by_block = q.reshape(q.shape[0], blocks, -1, *q.shape[2:])
    parts = by_block.swapaxes(0, 1)

    def step(carry, chunk):
        return carry, jax.checkpoint(block)(chunk)

    _, mixed = jax.lax.scan(step, None, parts)
    joined = mixed.swapaxes(0, 1)
    return joined.reshape(q.shape)


def _cross_entropy(
    x: jax.Array, head: jax.Array, targets: jax.Array, mask: jax.Array
) -> jax.Array:
    products = x @ head
    logits = products.astype(jnp.float32)
    targets_one_hot = jax.nn.one_hot(targets, logits.shape[-1])
    losses = _stable(logits, targets_one_hot)
    return jnp.sum(losses * mask)


@jax.custom_vjp
def _stable(logits: jax.Array, targets: jax.Array) -> jax.Array:
    elements = targets * jax.nn.log_softmax(logits)
    return -jnp.sum(elements, axis=-1)


def _stable_forward(
    logits: jax.Array, targets: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    largest = jnp.max(logits, axis=-1, keepdims=True)
    shifted = logits - largest
    powers = jnp.exp(shifted)
    total = jnp.sum(powers, axis=-1, keepdims=True)
    log_probabilities = shifted - jnp.log(total)
    elements = targets * log_probabilities
    losses = -jnp.sum(elements, axis=-1)
    return losses, (
        targets,
        powers,
        total,
    )


def _stable_backward(
    residuals: tuple[jax.Array, ...], grad: jax.Array
) -> tuple[jax.Array, None]:
    targets, powers, total = residuals
    errors = powers / total - targets
    return grad[..., None] * errors, None


_stable.defvjp(_stable_forward, _stable_backward)
