"""Steps that are unlike decoders: two towers, a diffusion transformer, a decoding step,
channels first, adapters.
"""

from typing import Any

import jax
import jax.numpy as jnp
from models import Struct, f32, sgd


def i32(*shape: int) -> Struct:
    return Struct(shape, "int32")


def norm(x):
    variance = jnp.var(x, -1, keepdims=True)
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + 1e-6)


def token_loss(logits, labels):
    log_probabilities = jax.nn.log_softmax(logits)
    picked = jnp.take_along_axis(log_probabilities, labels[..., None], -1)
    return -jnp.mean(picked)


def dit() -> tuple[Any, ...]:
    """A diffusion transformer: its width is 96, that of its conditioning 32; labels are
    looked up, tokens are not.
    """

    def block(x, c, p):
        b, t, d = x.shape
        modulation = (jax.nn.silu(c) @ p["ada"])[:, None]
        shift, scale, gate, shift_2, scale_2, gate_2 = jnp.split(modulation, 6, -1)
        h = norm(x) * (1 + scale) + shift
        qkv = (h @ p["qkv"]).reshape(b, t, 3, 6, 16)
        q, k, v = jnp.moveaxis(qkv, 2, 0)
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        x = x + gate * (mixed.reshape(b, t, d) @ p["proj"])
        h = norm(x) * (1 + scale_2) + shift_2
        hidden = jax.nn.gelu(h @ p["mlp_in"])
        return x + gate_2 * (hidden @ p["mlp_out"])

    def loss(p, rows, time, label, noise):
        x = rows @ p["patch"]
        waves = jnp.cos(time[:, None] * jnp.arange(24.0))
        time_embedding = jax.nn.silu(waves @ p["time_1"]) @ p["time_2"]
        c = time_embedding + p["label"][label]
        for layer in p["blocks"]:
            x = block(x, c, layer)
        predicted = norm(x) @ p["final"]
        return jnp.mean((predicted - noise) ** 2)

    shapes = {
        "ada": (32, 576),
        "qkv": (96, 288),
        "proj": (96, 96),
        "mlp_in": (96, 384),
        "mlp_out": (384, 96),
    }
    blocks = [{name: f32(*shape) for name, shape in shapes.items()} for _ in range(2)]
    params = {
        "patch": f32(12, 96),
        "time_1": f32(24, 32),
        "time_2": f32(32, 32),
        "label": f32(1000, 32),
        "blocks": blocks,
        "final": f32(96, 12),
    }
    rows = f32(16, 64, 12)
    time = f32(16)
    label = i32(16)
    noise = f32(16, 64, 12)
    return sgd(loss), params, rows, time, label, noise


def decode() -> tuple[Any, ...]:
    """One token for each sequence, with keys and values of those before; layers are
    stacked.
    """

    def layer(x, p, k, v, index):
        b = x.shape[0]
        q = (x @ p["q"]).reshape(b, 2, 4, 16)
        new_k = (x @ p["k"]).reshape(b, 1, 2, 16)
        new_v = (x @ p["v"]).reshape(b, 1, 2, 16)
        k = jax.lax.dynamic_update_slice(k, new_k, (0, index, 0, 0))
        v = jax.lax.dynamic_update_slice(v, new_v, (0, index, 0, 0))
        weights = jax.nn.softmax(jnp.einsum("bkgd,bskd->bkgs", q, k))
        mixed = jnp.einsum("bkgs,bskd->bkgd", weights, v)
        x = x + mixed.reshape(b, 128) @ p["o"]
        hidden = jax.nn.silu(norm(x) @ p["up"])
        return x + hidden @ p["down"], k, v

    def step(p, cache, token, index):
        def body(x, row):
            p, k, v = row
            x, k, v = layer(
                x,
                p=p,
                k=k,
                v=v,
                index=index,
            )
            return x, (k, v)

        rows = (p["layers"], cache["k"], cache["v"])
        x, (k, v) = jax.lax.scan(body, p["embed"][token], rows)
        logits = norm(x) @ p["embed"].T
        return jnp.argmax(logits, -1), {"k": k, "v": v}

    shapes = {
        "q": (64, 128),
        "k": (64, 32),
        "v": (64, 32),
        "o": (128, 64),
        "up": (64, 256),
        "down": (256, 64),
    }
    layers = {name: f32(4, *shape) for name, shape in shapes.items()}
    cache = {name: f32(4, 16, 128, 2, 16) for name in "kv"}
    params = {"embed": f32(2048, 64), "layers": layers}
    token = i32(16)
    index = i32()
    return step, params, cache, token, index


def channels_first() -> tuple[Any, ...]:
    def convolve(x, kernel, stride=1):
        return jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME")

    def loss(p, x, labels):
        x = jax.nn.relu(convolve(x, p["stem"], 2))
        hidden = jax.nn.relu(convolve(x, p["a"]))
        x = x + convolve(hidden, p["b"])
        pooled = convolve(x, p["down"], 2).mean((2, 3))
        return token_loss(pooled @ p["head"], labels)

    params = {
        "stem": f32(32, 4, 7, 7),
        "a": f32(48, 32, 3, 3),
        "b": f32(32, 48, 3, 3),
        "down": f32(64, 32, 3, 3),
        "head": f32(64, 10),
    }
    images = f32(16, 4, 32, 24)
    labels = i32(16)
    return sgd(loss), params, images, labels


def two_towers() -> tuple[Any, ...]:
    def tower(x, layers):
        for layer in layers:
            hidden = jax.nn.gelu(norm(x) @ layer["fc"])
            x = x + hidden @ layer["out"]
        return x

    def loss(p, image, text):
        patches = tower(image @ p["image"]["patch"], p["image"]["layers"])
        images = patches.mean(1) @ p["image"]["head"]
        tokens = tower(p["text"]["tokens"][text], p["text"]["layers"])
        texts = tokens[:, -1] @ p["text"]["head"]
        log_probabilities = jax.nn.log_softmax(images @ texts.T)
        return -jnp.mean(jnp.diag(log_probabilities))

    def layers(width):
        return [{"fc": f32(width, 4 * width), "out": f32(4 * width, width)}] * 2

    image = {"patch": f32(48, 96), "layers": layers(96), "head": f32(96, 32)}
    text = {"tokens": f32(4096, 64), "layers": layers(64), "head": f32(64, 32)}
    params = {"image": image, "text": text}
    images = f32(16, 24, 48)
    texts = i32(16, 20)
    return sgd(loss), params, images, texts


def adapters() -> tuple[Any, ...]:
    """The adapters are what is trained; the base is no data, though it has a dimension
    that they lack.
    """

    def loss(adapters, base, tokens):
        x = base["wte"][tokens]
        for a, w in zip(adapters, base["h"], strict=True):
            adapted = x @ w["up"] + x @ a["down"] @ a["up"]
            x = x + jax.nn.relu(adapted) @ w["back"]
        return token_loss(x @ base["wte"].T, tokens)

    layer = {"up": f32(64, 256), "back": f32(256, 64)}
    base = {"wte": f32(1000, 64), "h": [layer, layer]}
    adapter = {"down": f32(64, 8), "up": f32(8, 256)}
    tokens = i32(16, 32)
    return sgd(loss), [adapter, adapter], base, tokens


def positions() -> tuple[Any, ...]:
    def loss(p, tokens):
        wpe = p["wpe"][: tokens.shape[1]]
        x = p["wte"][tokens] + wpe
        first = jnp.zeros((tokens.shape[0], 1, 64))
        x = jnp.concatenate([first, x], 1) + p["pos_embed"]
        x = x + jax.nn.relu(x @ p["up"]) @ p["down"]
        logits = x @ p["wte"].T
        return jnp.mean(jax.nn.logsumexp(logits, -1))

    shapes = {
        "wte": (5000, 64),
        "wpe": (1024, 64),
        "pos_embed": (1, 129, 64),
        "up": (64, 256),
        "down": (256, 64),
    }
    params = {name: f32(*shape) for name, shape in shapes.items()}
    tokens = i32(8, 128)
    return jax.grad(loss), params, tokens


def rows_of_a_table() -> tuple[Any, ...]:
    """As Equinox's embedding does it: a slice of one row, which `jax.vmap` makes a
    lookup that keeps a one.
    """

    def loss(params, tokens):
        look_up = jax.vmap(lambda token: params["table"][token])
        rows = jax.vmap(look_up)(tokens)
        return jnp.mean((rows @ params["out"]) ** 2)

    params = {"table": f32(5000, 64), "out": f32(64, 96)}
    tokens = i32(16, 8)
    return jax.grad(loss), params, tokens
