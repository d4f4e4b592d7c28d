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

    def step(p, mu, nu, *data):
        grads = jax.grad(loss)(p, *data)

        def first_moment(m, g):
            return m * 0.9 + g * 0.1

        mu = jax.tree.map(first_moment, mu, grads)

        def second_moment(n, g):
            return n * 0.99 + g * g * 0.01

        nu = jax.tree.map(second_moment, nu, grads)

        def updated(w, m, n):
            return w - 0.001 * m * jax.lax.rsqrt(n + 1e-6)

        params = jax.tree.map(updated, p, mu, nu)
        return (
            params,
            mu,
            nu,
        )

    return step, params, params, params, *data


def _params(kv, group, head, width, hidden, struct, layers, vocab):
    query_width = kv * group * head
    key_width = kv * head
    shapes = {
        "q": (width, query_width),
        "k": (width, key_width),
        "v": (width, key_width),
        "o": (query_width, width),
        "gate": (width, hidden),
        "up": (width, hidden),
        "down": (hidden, width),
    }
    structs_by_name = {}
    for name, shape in shapes.items():
        structs_by_name[name] = struct((layers, *shape))
    params = {
        "embedding": struct((vocab, width)),
        "layers": structs_by_name,
        "unembedding": struct((width, vocab)),
    }
    return params


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

    def layer(x, p):
        b, s, _ = x.shape
        y = normed(x)
        projected = y @ p["q"]
        query = projected.reshape(b, s, kv, group, head)
        key, value = ((y @ p[name]).reshape(b, s, kv, head) for name in "kv")
        products = jnp.einsum("bskgd,btkd->bkgst", query, key)
        scores = products / math.sqrt(head)
        weights = jax.nn.softmax(scores, axis=-1)
        mixed = jnp.einsum("bkgst,btkd->bskgd", weights, value)
        flat = mixed.reshape(b, s, kv * group * head)
        x = x + flat @ p["o"]
        y = normed(x)
        activated = jax.nn.silu(y @ p["gate"])
        raised = y @ p["up"]
        gated = activated * raised
        return x + gated @ p["down"], None

    def loss(p, tokens):
        rematerialized = jax.checkpoint(layer)
        embedded = p["embedding"][tokens]
        x, _ = jax.lax.scan(rematerialized, embedded, p["layers"])
        low_logits = normed(x) @ p["unembedding"]
        logits = low_logits.astype(jnp.float32)
        columns = tokens[..., None]
        picked = jnp.take_along_axis(logits, columns, axis=-1)
        right = picked[..., 0]
        normalizer = jax.nn.logsumexp(logits, axis=-1)
        return jnp.mean(normalizer - right)

    params = _params(
        kv=kv,
        group=group,
        head=head,
        width=width,
        hidden=hidden,
        struct=struct,
        layers=layers,
        vocab=vocab,
    )
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    return trained(loss, params, tokens)


def normed(x: Any) -> Any:
    mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean_square + 1e-6)
