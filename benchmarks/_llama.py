"""A Llama's training step at any size."""

import functools as ft
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


Model = tuple[Any, ...]


def trained(loss: Callable[..., Any], params: Any, *data: Any) -> Model:
    """The step of a loss, and its arguments: parameters, two moments, data."""

    def step(p: Any, mu: Any, nu: Any, *data: Any) -> tuple[Any, Any, Any]:
        grads = jax.grad(loss)(p, *data)
        mu = jax.tree.map(lambda m, g: m * 0.9 + g * 0.1, mu, grads)
        nu = jax.tree.map(lambda n, g: n * 0.99 + g * g * 0.01, nu, grads)
        return (
            jax.tree.map(
                lambda w, m, n: w - 0.001 * m * jax.lax.rsqrt(n + 1e-6), p, mu, nu
            ),
            mu,
            nu,
        )

    return step, params, params, params, *data


def llama(
    layers: int,
    width: int,
    hidden: int,
    kv: int,
    group: int,
    head: int,
    vocab: int,
    batch: int,
    length: int,
    dtype: Any = jnp.bfloat16,
) -> Model:
    """A training step of a Llama under scan and remat, with AdamW's moments; its
    arguments are structs.
    """
    struct = ft.partial(jax.ShapeDtypeStruct, dtype=dtype)

    def layer(x: Any, p: Any) -> tuple[Any, None]:
        b, s, _ = x.shape
        y = normed(x)
        query = (y @ p["q"]).reshape(b, s, kv, group, head)
        key, value = ((y @ p[name]).reshape(b, s, kv, head) for name in "kv")
        scores = jnp.einsum("bskgd,btkd->bkgst", query, key) / math.sqrt(head)
        weights = jax.nn.softmax(scores, axis=-1)
        mixed = jnp.einsum("bkgst,btkd->bskgd", weights, value)
        x = x + mixed.reshape(b, s, kv * group * head) @ p["o"]
        y = normed(x)
        return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"], None

    def loss(p: Any, tokens: Any) -> Any:
        rematerialized = jax.checkpoint(layer)
        x, _ = jax.lax.scan(rematerialized, p["embedding"][tokens], p["layers"])
        logits = (normed(x) @ p["unembedding"]).astype(jnp.float32)
        picked = jnp.take_along_axis(logits, tokens[..., None], axis=-1)
        right = picked[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - right)

    shapes = {
        "q": (width, kv * group * head),
        "k": (width, kv * head),
        "v": (width, kv * head),
        "o": (kv * group * head, width),
        "gate": (width, hidden),
        "up": (width, hidden),
        "down": (hidden, width),
    }
    structs_by_name = {name: struct((layers, *shape)) for name, shape in shapes.items()}
    params = {
        "embedding": struct((vocab, width)),
        "layers": structs_by_name,
        "unembedding": struct((width, vocab)),
    }
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    return trained(loss, params, tokens)


def normed(x: Any) -> Any:
    mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean_square + 1e-6)
