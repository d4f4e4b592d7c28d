"""A Llama's training step at any size."""

import functools as ft
import math
from typing import Any

import jax
import jax.numpy as jnp


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
) -> tuple[Any, ...]:
    """A training step of a Llama under scan and remat, with AdamW's moments; its
    arguments are structs.
    """
    struct = ft.partial(jax.ShapeDtypeStruct, dtype=dtype)

    def layer(x: Any, p: Any) -> tuple[Any, None]:
        b, s, _ = x.shape
        y = _normed(x)
        query = (y @ p["q"]).reshape(b, s, kv, group, head)
        key, value = ((y @ p[name]).reshape(b, s, kv, head) for name in "kv")
        scores = jnp.einsum("bskgd,btkd->bkgst", query, key) / math.sqrt(head)
        mixed = jnp.einsum("bkgst,btkd->bskgd", jax.nn.softmax(scores, axis=-1), value)
        x = x + mixed.reshape(b, s, kv * group * head) @ p["o"]
        y = _normed(x)
        return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"], None

    def loss(p: Any, tokens: Any) -> Any:
        x, _ = jax.lax.scan(jax.checkpoint(layer), p["embedding"][tokens], p["layers"])
        logits = (_normed(x) @ p["unembedding"]).astype(jnp.float32)
        right = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - right)

    def step(p: Any, mu: Any, nu: Any, tokens: Any) -> tuple[Any, Any, Any]:
        grads = jax.grad(loss)(p, tokens)
        mu = jax.tree.map(lambda m, g: m * 0.9 + g * 0.1, mu, grads)
        nu = jax.tree.map(lambda n, g: n * 0.99 + g * g * 0.01, nu, grads)
        return (
            jax.tree.map(
                lambda w, m, n: w - 0.001 * m * jax.lax.rsqrt(n + 1e-6), p, mu, nu
            ),
            mu,
            nu,
        )

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
    return (
        step,
        params,
        params,
        params,
        jax.ShapeDtypeStruct((batch, length), jnp.int32),
    )


def _normed(x: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
