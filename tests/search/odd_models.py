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
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(
        jnp.var(x, -1, keepdims=True) + 1e-6
    )


def token_loss(logits, labels):
    return -jnp.mean(
        jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)
    )


def dit() -> tuple[Any, ...]:
    """A diffusion transformer: its width is 96, that of its conditioning 32; labels are
    looked up, tokens are not.
    """

    def block(x, c, p):
        b, t, d = x.shape
        shift, scale, gate, shift_2, scale_2, gate_2 = jnp.split(
            (jax.nn.silu(c) @ p["ada"])[:, None], 6, -1
        )
        h = norm(x) * (1 + scale) + shift
        q, k, v = jnp.moveaxis((h @ p["qkv"]).reshape(b, t, 3, 6, 16), 2, 0)
        a = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        x = x + gate * (
            jnp.einsum("bhqk,bkhd->bqhd", a, v).reshape(b, t, d) @ p["proj"]
        )
        h = norm(x) * (1 + scale_2) + shift_2
        return x + gate_2 * (jax.nn.gelu(h @ p["mlp_in"]) @ p["mlp_out"])

    def loss(p, rows, time, label, noise):
        x = rows @ p["patch"]
        c = (
            jax.nn.silu(jnp.cos(time[:, None] * jnp.arange(24.0)) @ p["time_1"])
            @ p["time_2"]
            + p["label"][label]
        )
        for layer in p["blocks"]:
            x = block(x, c, layer)
        return jnp.mean((norm(x) @ p["final"] - noise) ** 2)

    shapes = {
        "ada": (32, 576),
        "qkv": (96, 288),
        "proj": (96, 96),
        "mlp_in": (96, 384),
        "mlp_out": (384, 96),
    }
    blocks = [{name: f32(*shape) for name, shape in shapes.items()} for _ in range(2)]
    p = {
        "patch": f32(12, 96),
        "time_1": f32(24, 32),
        "time_2": f32(32, 32),
        "label": f32(1000, 32),
    }
    return (
        sgd(loss),
        {**p, "blocks": blocks, "final": f32(96, 12)},
        f32(16, 64, 12),
        f32(16),
        i32(16),
        f32(16, 64, 12),
    )


def decode() -> tuple[Any, ...]:
    """One token for each sequence, with keys and values of those before; layers are
    stacked.
    """

    def layer(x, p, k, v, index):
        b = x.shape[0]
        q = (x @ p["q"]).reshape(b, 2, 4, 16)
        new = [(x @ p[name]).reshape(b, 1, 2, 16) for name in "kv"]
        k, v = (
            jax.lax.dynamic_update_slice(old, update, (0, index, 0, 0))
            for old, update in zip((k, v), new, strict=True)
        )
        weights = jax.nn.softmax(jnp.einsum("bkgd,bskd->bkgs", q, k))
        x = x + jnp.einsum("bkgs,bskd->bkgd", weights, v).reshape(b, 128) @ p["o"]
        return x + jax.nn.silu(norm(x) @ p["up"]) @ p["down"], k, v

    def step(p, cache, token, index):
        def body(x, row):
            p, k, v = row
            x, k, v = layer(x, p=p, k=k, v=v, index=index)
            return x, (k, v)

        x, (k, v) = jax.lax.scan(
            body, p["embed"][token], (p["layers"], cache["k"], cache["v"])
        )
        return jnp.argmax(norm(x) @ p["embed"].T, -1), {"k": k, "v": v}

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
    return step, {"embed": f32(2048, 64), "layers": layers}, cache, i32(16), i32()


def channels_first() -> tuple[Any, ...]:
    def convolve(x, kernel, stride=1):
        return jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME")

    def loss(p, x, labels):
        x = jax.nn.relu(convolve(x, p["stem"], 2))
        x = x + convolve(jax.nn.relu(convolve(x, p["a"])), p["b"])
        logits = convolve(x, p["down"], 2).mean((2, 3)) @ p["head"]
        return token_loss(logits, labels)

    p = {
        "stem": f32(32, 4, 7, 7),
        "a": f32(48, 32, 3, 3),
        "b": f32(32, 48, 3, 3),
        "down": f32(64, 32, 3, 3),
    }
    return sgd(loss), {**p, "head": f32(64, 10)}, f32(16, 4, 32, 24), i32(16)


def two_towers() -> tuple[Any, ...]:
    def tower(x, layers):
        for layer in layers:
            x = x + jax.nn.gelu(norm(x) @ layer["fc"]) @ layer["out"]
        return x

    def loss(p, image, text):
        images = (
            tower(image @ p["image"]["patch"], p["image"]["layers"]).mean(1)
            @ p["image"]["head"]
        )
        tokens = p["text"]["tokens"][text]
        right = tower(tokens, p["text"]["layers"])[:, -1] @ p["text"]["head"]
        return -jnp.mean(jnp.diag(jax.nn.log_softmax(images @ right.T)))

    def layers(width):
        return [{"fc": f32(width, 4 * width), "out": f32(4 * width, width)}] * 2

    image = {"patch": f32(48, 96), "layers": layers(96), "head": f32(96, 32)}
    text = {"tokens": f32(4096, 64), "layers": layers(64), "head": f32(64, 32)}
    return sgd(loss), {"image": image, "text": text}, f32(16, 24, 48), i32(16, 20)


def adapters() -> tuple[Any, ...]:
    """The adapters are what is trained; the base is no data, though it has a dimension
    that they lack.
    """

    def loss(adapters, base, tokens):
        x = base["wte"][tokens]
        for a, w in zip(adapters, base["h"], strict=True):
            x = x + jax.nn.relu(x @ w["up"] + x @ a["down"] @ a["up"]) @ w["back"]
        return token_loss(x @ base["wte"].T, tokens)

    base = {"wte": f32(1000, 64), "h": [{"up": f32(64, 256), "back": f32(256, 64)}] * 2}
    return sgd(loss), [{"down": f32(64, 8), "up": f32(8, 256)}] * 2, base, i32(16, 32)


def positions() -> tuple[Any, ...]:
    def loss(p, tokens):
        wpe = p["wpe"][: tokens.shape[1]]
        x = p["wte"][tokens] + wpe
        array = jnp.zeros((tokens.shape[0], 1, 64))
        x = jnp.concatenate([array, x], 1) + p["pos_embed"]
        return jnp.mean(
            jax.nn.logsumexp(
                (x + jax.nn.relu(x @ p["up"]) @ p["down"]) @ p["wte"].T, -1
            )
        )

    shapes = {
        "wte": (5000, 64),
        "wpe": (1024, 64),
        "pos_embed": (1, 129, 64),
        "up": (64, 256),
        "down": (256, 64),
    }
    return (
        jax.grad(loss),
        {name: f32(*shape) for name, shape in shapes.items()},
        i32(8, 128),
    )


def rows_of_a_table() -> tuple[Any, ...]:
    """As Equinox's embedding does it: a slice of one row, which `jax.vmap` makes a
    lookup that keeps a one.
    """

    def loss(params, tokens):
        look_up = jax.vmap(lambda token: params["table"][token])
        rows = jax.vmap(look_up)(tokens)
        return jnp.mean((rows @ params["out"]) ** 2)

    return jax.grad(loss), {"table": f32(5000, 64), "out": f32(64, 96)}, i32(16, 8)
