"""Twelve training steps of different kinds, with AdamW's moments and few layers; their
arguments are structs.
"""

import functools as ft
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ._llama import Model, llama, normed, trained
from ._zoo_sizes import SIZES, SMALL_SIZES


_LAYERS = 2


def models(dtype: Any) -> dict[str, Callable[[], Model]]:
    """What makes each model, by name."""
    return _models_of(SIZES, dtype)


def small_models() -> dict[str, Callable[[], Model]]:
    """The same models at sizes that two cores run in seconds."""
    return _models_of(SMALL_SIZES, jnp.float32)


def _models_of(
    sizes_by_name: Mapping[str, Mapping[str, int]], dtype: Any
) -> dict[str, Callable[[], Model]]:
    struct = ft.partial(jax.ShapeDtypeStruct, dtype=dtype)
    dense = ft.partial(llama, _LAYERS, dtype=dtype)
    others = {
        "experts": _experts,
        "T5": _t5,
        "ViT": _vit,
        "convolutions": _convolutions,
        "MLP-mixer": _mixer,
        "DiT": _dit,
        "U-Net": _unet,
    }
    models: dict[str, Callable[[], Model]] = {}
    for name, sizes in sizes_by_name.items():
        if name in others:
            models[name] = ft.partial(others[name], struct, **sizes)
        else:
            models[name] = ft.partial(dense, **sizes)
    return models


def _attended(x: Any, y: Any, p: Any, heads: int, head: int) -> Any:
    b, s, _ = x.shape
    t = y.shape[1]
    query_input = x @ p["q"]
    query = query_input.reshape(b, s, heads, head)
    key, value = ((y @ p[name]).reshape(b, t, heads, head) for name in "kv")
    products = jnp.einsum("bshd,bthd->bhst", query, key)
    scores = products / math.sqrt(head)
    weights = jax.nn.softmax(scores, axis=-1)
    mixed = jnp.einsum("bhst,bthd->bshd", weights, value)
    flat = mixed.reshape(b, s, heads * head)
    return flat @ p["o"]


def _block(x: Any, p: Any, heads: int, head: int) -> Any:
    y = normed(x)
    x = x + _attended(
        y,
        y=y,
        p=p["attention"],
        heads=heads,
        head=head,
    )
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
    loss_logits = logits.astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(loss_logits, tokens)
    return losses.mean()


def _tokens(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _experts(
    struct: Any, width: int, hidden: int, experts: int, batch: int, length: int
) -> Model:
    heads = 16
    head = width // 16
    vocab = 32000

    def layer(x, p):
        y = normed(x)
        attended = _attended(
            y,
            y=y,
            p=p["attention"],
            heads=heads,
            head=head,
        )
        x = x + attended
        y = normed(x)
        router_logits = y @ p["router"]
        gates = jax.nn.softmax(router_logits)
        _, chosen = jax.lax.top_k(gates, 2)
        choices = jax.nn.one_hot(chosen, experts, dtype=y.dtype)
        total = choices.sum(-2)
        shares = total * gates
        rows = jnp.einsum("bse,bsx->xbse", y, shares)
        raised = jnp.einsum("xbse,xem->xbsm", rows, p["wi"])
        mixed = jax.nn.silu(raised)
        out = jnp.einsum("xbsm,xme->bse", mixed, p["wo"])
        return x + out, None

    def loss(p, tokens):
        rematerialized = jax.checkpoint(layer)
        embedded = p["embedding"][tokens]
        x, _ = jax.lax.scan(rematerialized, embedded, p["layers"])
        logits = x @ p["unembedding"]
        return _token_loss(logits, tokens)

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
    def decoder(memory, x, p):
        y = normed(x)
        attended = _attended(
            y,
            y=y,
            p=p["attention"],
            heads=heads,
            head=head,
        )
        x = x + attended
        cross_input = normed(x)
        crossed = _attended(
            cross_input,
            y=memory,
            p=p["cross"],
            heads=heads,
            head=head,
        )
        x = x + crossed
        mlp_input = normed(x) @ p["mlp"]["up"]
        hidden = jax.nn.relu(mlp_input)
        return x + hidden @ p["mlp"]["down"]

    def loss(p, inputs, targets):
        def encode_layer(x, layer):
            return _block(x, layer, heads, head), None

        encode = jax.checkpoint(encode_layer)
        source = p["embedding"][inputs]
        memory, _ = jax.lax.scan(encode, source, p["encoder"])

        def decode_layer(x, layer):
            return decoder(memory, x, layer), None

        decode = jax.checkpoint(decode_layer)
        embedded = p["embedding"][targets]
        x, _ = jax.lax.scan(decode, embedded, p["decoder"])
        logits = normed(x) @ p["embedding"].T
        return _token_loss(logits, targets)

    inner = heads * head
    encoder = {
        "attention": _attention(struct, width, inner),
        "mlp": _mlp(struct, width, hidden),
    }
    crossed = _attention(struct, width, inner)
    params = {
        "embedding": struct((vocab, width)),
        "encoder": encoder,
        "decoder": {**encoder, "cross": crossed},
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
    def loss(p, images, labels):
        embedded = images @ p["patch_embed"]
        x = embedded + p["pos_embed"]
        block = jax.checkpoint(lambda x, layer: (_block(x, layer, heads, head), None))
        x, _ = jax.lax.scan(
            block,
            x,
            p["layers"],
        )
        means = normed(x).mean(1)
        logits = means @ p["head"]
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

    def loss(p, images, labels):
        x = images
        for stage in p["stages"]:
            convolved = _convolved(x, stage["first"], 2)
            x = jax.nn.relu(convolved)
            activated = jax.nn.relu(x)
            residual = _convolved(activated, stage["second"])
            x = x + residual
        means = x.mean((1, 2))
        logits = means @ p["head"]
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
    def layer(x, p):
        transposed_input = normed(x)
        y = jnp.swapaxes(transposed_input, 1, 2)
        token_weights = p["tokens"]
        raised = jax.nn.gelu(y @ token_weights["up"])
        mixed = raised @ token_weights["down"]
        x = x + jnp.swapaxes(mixed, 1, 2)
        mlp_input = normed(x) @ p["mlp"]["up"]
        hidden = jax.nn.gelu(mlp_input)
        return x + hidden @ p["mlp"]["down"], None

    def loss(p, images, labels):
        patch_embeddings = images @ p["patch_embed"]
        rematerialized = jax.checkpoint(layer)
        x, _ = jax.lax.scan(rematerialized, patch_embeddings, p["layers"])
        means = normed(x).mean(1)
        logits = means @ p["head"]
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
    def layer(condition, x, p):
        modulation = condition @ p["modulation"]
        scale, shift = jnp.split(modulation, 2, axis=-1)
        scaled = normed(x) * (1 + scale[:, None])
        y = scaled + shift[:, None]
        attended = _attended(
            y,
            y=y,
            p=p["attention"],
            heads=heads,
            head=head,
        )
        x = x + attended
        mlp_input = normed(x) @ p["mlp"]["up"]
        hidden = jax.nn.gelu(mlp_input)
        return x + hidden @ p["mlp"]["down"], None

    def loss(p, latents, times, noise):
        embedded = times @ p["time_embed"]
        condition = jax.nn.silu(embedded)
        conditioned = jax.checkpoint(ft.partial(layer, condition))
        patch_embeddings = latents @ p["patch_embed"]
        x, _ = jax.lax.scan(
            conditioned,
            patch_embeddings,
            p["layers"],
        )
        predicted = normed(x) @ p["head"]
        squares = (predicted - noise) ** 2
        return jnp.mean(squares)

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

    def loss(p, images, noise):
        x = _convolved(images, p["first"])
        skips = []
        for stage in p["down"]:
            skips.append(x)
            convolved = _convolved(x, stage, 2)
            x = jax.nn.silu(convolved)
        activated = jax.nn.silu(x)
        x = x + _convolved(activated, p["middle"])
        for stage, other in zip(p["up"], reversed(skips), strict=True):
            count = jnp.repeat(x, 2, 1)
            x = jnp.repeat(count, 2, 2)
            upsampled = _convolved(x, stage)
            x = jax.nn.silu(upsampled) + other
        predicted = _convolved(x, p["last"])
        squares = (predicted - noise) ** 2
        return jnp.mean(squares)

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
