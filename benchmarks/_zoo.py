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

from ._llama import Model, llama, normed, trained


_LAYERS = 2


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
    scores = jnp.einsum("bshd,bthd->bhst", query, key) / math.sqrt(head)
    weights = jax.nn.softmax(scores, axis=-1)
    mixed = jnp.einsum("bhst,bthd->bshd", weights, value)
    return mixed.reshape(b, s, heads * head) @ p["o"]


def _block(x: Any, p: Any, heads: int, head: int) -> Any:
    y = normed(x)
    x = x + _attended(y, y=y, p=p["attention"], heads=heads, head=head)
    hidden = jax.nn.gelu(normed(x) @ p["mlp"]["up"])
    return x + hidden @ p["mlp"]["down"]


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
        y = normed(x)
        x = x + _attended(y, y=y, p=p["attention"], heads=heads, head=head)
        y = normed(x)
        gates = jax.nn.softmax(y @ p["router"])
        _, chosen = jax.lax.top_k(gates, 2)
        total = jax.nn.one_hot(chosen, experts, dtype=y.dtype).sum(-2)
        shares = total * gates
        rows = jnp.einsum("bse,bsx->xbse", y, shares)
        mixed = jax.nn.silu(jnp.einsum("xbse,xem->xbsm", rows, p["wi"]))
        return x + jnp.einsum("xbsm,xme->bse", mixed, p["wo"]), None

    def loss(p: Any, tokens: Any) -> Any:
        rematerialized = jax.checkpoint(layer)
        x, _ = jax.lax.scan(rematerialized, p["embedding"][tokens], p["layers"])
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
        y = normed(x)
        x = x + _attended(y, y=y, p=p["attention"], heads=heads, head=head)
        cross_input = normed(x)
        x = x + _attended(cross_input, y=memory, p=p["cross"], heads=heads, head=head)
        hidden = jax.nn.relu(normed(x) @ p["mlp"]["up"])
        return x + hidden @ p["mlp"]["down"]

    def loss(p: Any, inputs: Any, targets: Any) -> Any:
        encode = jax.checkpoint(lambda x, layer: (_block(x, layer, heads, head), None))
        memory, _ = jax.lax.scan(encode, p["embedding"][inputs], p["encoder"])
        decode = jax.checkpoint(lambda x, layer: (decoder(memory, x, layer), None))
        x, _ = jax.lax.scan(decode, p["embedding"][targets], p["decoder"])
        return _token_loss(normed(x) @ p["embedding"].T, targets)

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
        block = jax.checkpoint(lambda x, layer: (_block(x, layer, heads, head), None))
        x, _ = jax.lax.scan(
            block,
            x,
            p["layers"],
        )
        logits = normed(x).mean(1) @ p["head"]
        return _token_loss(logits, labels)

    layers = {
        "attention": _attention(struct, width, heads * head),
        "mlp": _mlp(struct, width, hidden),
    }
    params = {
        "patch_embed": struct((768, width)),
        "pos_embed": struct((patches, width)),
        "layers": layers,
        "head": struct((width, classes)),
    }
    return trained(loss, params, struct((batch, patches, 768)), _tokens(batch))


def _convolved(x: Any, kernel: Any, stride: int = 1) -> Any:
    dimensions = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=dimensions
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
    params = {"stages": stages, "head": struct((256, 1000))}
    images = struct((batch, 64, 64, 3))
    return trained(
        loss,
        params,
        images,
        _tokens(batch),
    )


def _mixer(
    struct: Any, width: int, hidden: int, mixed: int, patches: int, batch: int
) -> Model:
    def layer(x: Any, p: Any) -> tuple[Any, None]:
        y = jnp.swapaxes(normed(x), 1, 2)
        mixed = jax.nn.gelu(y @ p["tokens"]["up"]) @ p["tokens"]["down"]
        x = x + jnp.swapaxes(mixed, 1, 2)
        hidden = jax.nn.gelu(normed(x) @ p["mlp"]["up"])
        return x + hidden @ p["mlp"]["down"], None

    def loss(p: Any, images: Any, labels: Any) -> Any:
        patch_embeddings = images @ p["patch_embed"]
        x, _ = jax.lax.scan(jax.checkpoint(layer), patch_embeddings, p["layers"])
        logits = normed(x).mean(1) @ p["head"]
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
        scaled = normed(x) * (1 + scale[:, None])
        y = scaled + shift[:, None]
        x = x + _attended(y, y=y, p=p["attention"], heads=heads, head=head)
        hidden = jax.nn.gelu(normed(x) @ p["mlp"]["up"])
        return x + hidden @ p["mlp"]["down"], None

    def loss(p: Any, latents: Any, times: Any, noise: Any) -> Any:
        condition = jax.nn.silu(times @ p["time_embed"])
        conditioned = jax.checkpoint(ft.partial(layer, condition))
        patch_embeddings = latents @ p["patch_embed"]
        x, _ = jax.lax.scan(
            conditioned,
            patch_embeddings,
            p["layers"],
        )
        return jnp.mean((normed(x) @ p["head"] - noise) ** 2)

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
    latents = struct((batch, patches, 16))
    times = struct((batch, 256))
    return trained(
        loss,
        params,
        latents,
        times,
        latents,
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
    up = [struct((3, 3, b, a)) for a, b in reversed(pairs)]
    params = {
        "first": struct((3, 3, 4, widths[0])),
        "down": [struct((3, 3, a, b)) for a, b in pairs],
        "middle": struct((3, 3, widths[-1], widths[-1])),
        "up": up,
        "last": struct((3, 3, widths[0], 4)),
    }
    images = struct((batch, 32, 32, 4))
    return trained(loss, params, images, images)
