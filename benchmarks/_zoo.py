"""Twelve training steps of different kinds, with AdamW's moments and few layers; their
arguments are structs.
"""

import functools as ft
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ._llama import llama


Model = tuple[Any, ...]
_LAYERS = 2


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


def models(dtype: Any) -> dict[str, Callable[[], Model]]:
    """What makes each model, by name."""
    struct = ft.partial(jax.ShapeDtypeStruct, dtype=dtype)
    dense = ft.partial(llama, _LAYERS, dtype=dtype)
    return {
        "dense 0.1B": ft.partial(dense, 768, 2048, 12, 1, 64, 32000, 64, 512),
        "dense 1B": ft.partial(dense, 2048, 5632, 16, 1, 128, 32000, 32, 1024),
        "dense 8B, 8 of 32 heads for keys": ft.partial(
            dense, 4096, 14336, 8, 4, 128, 128256, 16, 2048
        ),
        "dense 70B, 8 of 64 heads for keys": ft.partial(
            dense, 8192, 28672, 8, 8, 128, 128256, 16, 2048
        ),
        "dense, 4 long sequences": ft.partial(
            dense, 1024, 4096, 2, 8, 64, 50304, 4, 8192
        ),
        "experts": ft.partial(_experts, struct, 1024, 4096, 8, 16, 512),
        "T5": ft.partial(_t5, struct, 768, 2048, 12, 64, 32128, 64, 512, 128),
        "ViT": ft.partial(_vit, struct, 768, 3072, 12, 64, 128, 196, 1000),
        "convolutions": ft.partial(_convolutions, struct, 64),
        "MLP-mixer": ft.partial(_mixer, struct, 768, 3072, 384, 196, 64),
        "DiT": ft.partial(_dit, struct, 1152, 4608, 16, 72, 64, 256),
        "U-Net": ft.partial(_unet, struct, 64),
    }


def small_models() -> dict[str, Callable[[], Model]]:
    """The same models at sizes that two cores run in seconds."""
    struct = ft.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    dense = ft.partial(llama, _LAYERS, dtype=jnp.float32)
    return {
        "dense 0.1B": ft.partial(dense, 192, 512, 4, 1, 48, 4096, 16, 128),
        "dense 1B": ft.partial(dense, 256, 704, 8, 1, 32, 4096, 16, 128),
        "dense 8B, 8 of 32 heads for keys": ft.partial(
            dense, 256, 896, 8, 4, 8, 8192, 16, 64
        ),
        "dense 70B, 8 of 64 heads for keys": ft.partial(
            dense, 512, 1792, 8, 8, 8, 8192, 16, 32
        ),
        "dense, 4 long sequences": ft.partial(dense, 128, 512, 2, 4, 16, 2048, 4, 512),
        "experts": ft.partial(_experts, struct, 128, 256, 8, 16, 64),
        "T5": ft.partial(_t5, struct, 192, 512, 4, 48, 4096, 16, 64, 32),
        "ViT": ft.partial(_vit, struct, 192, 768, 4, 48, 16, 64, 1000),
        "convolutions": ft.partial(_convolutions, struct, 8),
        "MLP-mixer": ft.partial(_mixer, struct, 192, 768, 96, 64, 16),
        "DiT": ft.partial(_dit, struct, 256, 1024, 8, 32, 16, 64),
        "U-Net": ft.partial(_unet, struct, 8),
    }


def _attended(x: Any, y: Any, p: Any, heads: int, head: int) -> Any:
    (b, s, _), t = x.shape, y.shape[1]
    query = (x @ p["q"]).reshape(b, s, heads, head)
    key, value = ((y @ p[name]).reshape(b, t, heads, head) for name in "kv")
    weights = jax.nn.softmax(
        jnp.einsum("bshd,bthd->bhst", query, key) / math.sqrt(head), axis=-1
    )
    return (
        jnp.einsum("bhst,bthd->bshd", weights, value).reshape(b, s, heads * head)
        @ p["o"]
    )


def _normed(x: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def _block(x: Any, p: Any, heads: int, head: int) -> Any:
    y = _normed(x)
    x = x + _attended(y, y=y, p=p["attention"], heads=heads, head=head)
    return x + jax.nn.gelu(_normed(x) @ p["mlp"]["up"]) @ p["mlp"]["down"]


def _attention(
    struct: Any, width: int, inner: int, layers: int = _LAYERS
) -> dict[str, Any]:
    shapes = {name: (width, inner) for name in "qkv"} | {"o": (inner, width)}
    return {name: struct((layers, *shape)) for name, shape in shapes.items()}


def _mlp(struct: Any, width: int, hidden: int, layers: int = _LAYERS) -> dict[str, Any]:
    return {
        "up": struct((layers, width, hidden)),
        "down": struct((layers, hidden, width)),
    }


def _token_loss(logits: Any, tokens: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), tokens
    ).mean()


def _tokens(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _experts(
    struct: Any, width: int, hidden: int, experts: int, batch: int, length: int
) -> Model:
    heads = 16
    head = width // 16
    vocab = 32000

    def layer(x: Any, p: Any) -> tuple[Any, None]:
        y = _normed(x)
        x = x + _attended(y, y=y, p=p["attention"], heads=heads, head=head)
        y = _normed(x)
        gates = jax.nn.softmax(y @ p["router"])
        _, chosen = jax.lax.top_k(gates, 2)
        total = jax.nn.one_hot(chosen, experts, dtype=y.dtype).sum(-2)
        shares = total * gates
        rows = jnp.einsum("bse,bsx->xbse", y, shares)
        mixed = jax.nn.silu(jnp.einsum("xbse,xem->xbsm", rows, p["wi"]))
        return x + jnp.einsum("xbsm,xme->bse", mixed, p["wo"]), None

    def loss(p: Any, tokens: Any) -> Any:
        x, _ = jax.lax.scan(jax.checkpoint(layer), p["embedding"][tokens], p["layers"])
        return _token_loss(x @ p["unembedding"], tokens)

    layers = {
        "attention": _attention(struct, width, width),
        "router": struct((_LAYERS, width, experts)),
        "wi": struct((_LAYERS, experts, width, hidden)),
        "wo": struct((_LAYERS, experts, hidden, width)),
    }
    params = {
        "embedding": struct((vocab, width)),
        "layers": layers,
        "unembedding": struct((width, vocab)),
    }
    return trained(loss, params, _tokens(batch, length))


def _t5(
    struct: Any,
    width: int,
    hidden: int,
    heads: int,
    head: int,
    vocab: int,
    batch: int,
    source: int,
    target: int,
) -> Model:
    def decoder(memory: Any, x: Any, p: Any) -> Any:
        y = _normed(x)
        x = x + _attended(y, y=y, p=p["attention"], heads=heads, head=head)
        x = x + _attended(_normed(x), y=memory, p=p["cross"], heads=heads, head=head)
        return x + jax.nn.relu(_normed(x) @ p["mlp"]["up"]) @ p["mlp"]["down"]

    def loss(p: Any, inputs: Any, targets: Any) -> Any:
        encode = jax.checkpoint(lambda x, layer: (_block(x, layer, heads, head), None))
        memory, _ = jax.lax.scan(encode, p["embedding"][inputs], p["encoder"])
        decode = jax.checkpoint(lambda x, layer: (decoder(memory, x, layer), None))
        x, _ = jax.lax.scan(decode, p["embedding"][targets], p["decoder"])
        return _token_loss(_normed(x) @ p["embedding"].T, targets)

    inner = heads * head
    encoder = {
        "attention": _attention(struct, width, inner),
        "mlp": _mlp(struct, width, hidden),
    }
    params = {
        "embedding": struct((vocab, width)),
        "encoder": encoder,
        "decoder": {**encoder, "cross": _attention(struct, width, inner)},
    }
    return trained(loss, params, _tokens(batch, source), _tokens(batch, target))


def _vit(
    struct: Any,
    width: int,
    hidden: int,
    heads: int,
    head: int,
    batch: int,
    patches: int,
    classes: int,
) -> Model:
    def loss(p: Any, images: Any, labels: Any) -> Any:
        x = images @ p["patch_embed"] + p["pos_embed"]
        x, _ = jax.lax.scan(
            jax.checkpoint(lambda x, layer: (_block(x, layer, heads, head), None)),
            x,
            p["layers"],
        )
        logits = _normed(x).mean(1) @ p["head"]
        return _token_loss(logits, labels)

    params = {
        "patch_embed": struct((768, width)),
        "pos_embed": struct((patches, width)),
        "layers": {
            "attention": _attention(struct, width, heads * head),
            "mlp": _mlp(struct, width, hidden),
        },
        "head": struct((width, classes)),
    }
    return trained(loss, params, struct((batch, patches, 768)), _tokens(batch))


def _convolved(x: Any, kernel: Any, stride: int = 1) -> Any:
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _convolutions(struct: Any, batch: int) -> Model:
    sizes = ((3, 64), (64, 128), (128, 256))

    def loss(p: Any, images: Any, labels: Any) -> Any:
        x = images
        for stage in p["stages"]:
            x = jax.nn.relu(_convolved(x, stage["first"], 2))
            x = x + _convolved(jax.nn.relu(x), stage["second"])
        logits = x.mean((1, 2)) @ p["head"]
        return _token_loss(logits, labels)

    stages = [
        {"first": struct((3, 3, a, b)), "second": struct((3, 3, b, b))}
        for a, b in sizes
    ]
    return trained(
        loss,
        {"stages": stages, "head": struct((256, 1000))},
        struct((batch, 64, 64, 3)),
        _tokens(batch),
    )


def _mixer(
    struct: Any, width: int, hidden: int, mixed: int, patches: int, batch: int
) -> Model:
    def layer(x: Any, p: Any) -> tuple[Any, None]:
        y = jnp.swapaxes(_normed(x), 1, 2)
        x = x + jnp.swapaxes(
            jax.nn.gelu(y @ p["tokens"]["up"]) @ p["tokens"]["down"], 1, 2
        )
        return x + jax.nn.gelu(_normed(x) @ p["mlp"]["up"]) @ p["mlp"]["down"], None

    def loss(p: Any, images: Any, labels: Any) -> Any:
        x, _ = jax.lax.scan(
            jax.checkpoint(layer), images @ p["patch_embed"], p["layers"]
        )
        logits = _normed(x).mean(1) @ p["head"]
        return _token_loss(logits, labels)

    layers = {
        "tokens": _mlp(struct, patches, mixed),
        "mlp": _mlp(struct, width, hidden),
    }
    params = {
        "patch_embed": struct((768, width)),
        "layers": layers,
        "head": struct((width, 1000)),
    }
    return trained(loss, params, struct((batch, patches, 768)), _tokens(batch))


def _dit(
    struct: Any,
    width: int,
    hidden: int,
    heads: int,
    head: int,
    batch: int,
    patches: int,
) -> Model:
    def layer(condition: Any, x: Any, p: Any) -> tuple[Any, None]:
        scale, shift = jnp.split(condition @ p["modulation"], 2, axis=-1)
        y = _normed(x) * (1 + scale[:, None]) + shift[:, None]
        x = x + _attended(y, y=y, p=p["attention"], heads=heads, head=head)
        return x + jax.nn.gelu(_normed(x) @ p["mlp"]["up"]) @ p["mlp"]["down"], None

    def loss(p: Any, latents: Any, times: Any, noise: Any) -> Any:
        condition = jax.nn.silu(times @ p["time_embed"])
        x, _ = jax.lax.scan(
            jax.checkpoint(ft.partial(layer, condition)),
            latents @ p["patch_embed"],
            p["layers"],
        )
        return jnp.mean((_normed(x) @ p["head"] - noise) ** 2)

    layers = {
        "attention": _attention(struct, width, heads * head),
        "mlp": _mlp(struct, width, hidden),
        "modulation": struct((_LAYERS, width, 2 * width)),
    }
    params = {
        "patch_embed": struct((16, width)),
        "time_embed": struct((256, width)),
        "layers": layers,
        "head": struct((width, 16)),
    }
    return trained(
        loss,
        params,
        struct((batch, patches, 16)),
        struct((batch, 256)),
        struct((batch, patches, 16)),
    )


def _unet(struct: Any, batch: int) -> Model:
    widths = (64, 128, 256)

    def loss(p: Any, images: Any, noise: Any) -> Any:
        x = _convolved(images, p["first"])
        skips = []
        for stage in p["down"]:
            skips.append(x)
            x = jax.nn.silu(_convolved(x, stage, 2))
        x = x + _convolved(jax.nn.silu(x), p["middle"])
        for stage, other in zip(p["up"], reversed(skips), strict=True):
            count = jnp.repeat(x, 2, 1)
            x = jnp.repeat(count, 2, 2)
            x = jax.nn.silu(_convolved(x, stage)) + other
        return jnp.mean((_convolved(x, p["last"]) - noise) ** 2)

    pairs = list(zip(widths, widths[1:], strict=False))
    structs = [struct((3, 3, b, a)) for a, b in reversed(pairs)]
    params = {
        "first": struct((3, 3, 4, widths[0])),
        "down": [struct((3, 3, a, b)) for a, b in pairs],
        "middle": struct((3, 3, widths[-1], widths[-1])),
        "up": structs,
        "last": struct((3, 3, widths[0], 4)),
    }
    images = struct((batch, 32, 32, 4))
    return trained(loss, params, images, images)
