"""Steps that are unlike decoders: two towers, a diffusion transformer, a decoding step, channels first, a router."""

from typing import Any

import jax
import jax.numpy as jnp
from models import Struct, f32, sgd


def i32(*shape: int) -> Struct:
    return Struct(shape, "int32")


def norm(x):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-6)


def token_loss(logits, labels):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1))


def dit() -> tuple[Any, ...]:
    """A diffusion transformer: its width is 96, that of its conditioning 32; labels are looked up, tokens are not."""

    def block(x, c, p):
        b, t, d = x.shape
        shift, scale, gate, shift_2, scale_2, gate_2 = jnp.split((jax.nn.silu(c) @ p["ada"])[:, None], 6, -1)
        h = norm(x) * (1 + scale) + shift
        q, k, v = jnp.moveaxis((h @ p["qkv"]).reshape(b, t, 3, 6, 16), 2, 0)
        a = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        x = x + gate * (jnp.einsum("bhqk,bkhd->bqhd", a, v).reshape(b, t, d) @ p["proj"])
        h = norm(x) * (1 + scale_2) + shift_2
        return x + gate_2 * (jax.nn.gelu(h @ p["mlp_in"]) @ p["mlp_out"])

    def loss(p, rows, time, label, noise):
        x = rows @ p["patch"]
        c = jax.nn.silu(jnp.cos(time[:, None] * jnp.arange(24.0)) @ p["time_1"]) @ p["time_2"] + p["label"][label]
        for one in p["blocks"]:
            x = block(x, c, one)
        return jnp.mean((norm(x) @ p["final"] - noise) ** 2)

    shapes = {"ada": (32, 576), "qkv": (96, 288), "proj": (96, 96), "mlp_in": (96, 384), "mlp_out": (384, 96)}
    blocks = [{name: f32(*shape) for name, shape in shapes.items()} for _ in range(2)]
    p = {"patch": f32(12, 96), "time_1": f32(24, 32), "time_2": f32(32, 32), "label": f32(1000, 32)}
    return sgd(loss), {**p, "blocks": blocks, "final": f32(96, 12)}, f32(16, 64, 12), f32(16), i32(16), f32(16, 64, 12)


def decode() -> tuple[Any, ...]:
    """One token for each sequence, with keys and values of those before; layers are stacked."""

    def layer(x, p, k, v, at):
        b = x.shape[0]
        q = (x @ p["q"]).reshape(b, 2, 4, 16)
        new = [(x @ p[name]).reshape(b, 1, 2, 16) for name in "kv"]
        k, v = (jax.lax.dynamic_update_slice(old, one, (0, at, 0, 0)) for old, one in zip((k, v), new, strict=True))
        weights = jax.nn.softmax(jnp.einsum("bkgd,bskd->bkgs", q, k))
        x = x + jnp.einsum("bkgs,bskd->bkgd", weights, v).reshape(b, 128) @ p["o"]
        return x + jax.nn.silu(norm(x) @ p["up"]) @ p["down"], k, v

    def step(p, cache, token, at):
        def body(x, row):
            p, k, v = row
            x, k, v = layer(x, p, k, v, at)
            return x, (k, v)

        x, (k, v) = jax.lax.scan(body, p["embed"][token], (p["layers"], cache["k"], cache["v"]))
        return jnp.argmax(norm(x) @ p["embed"].T, -1), {"k": k, "v": v}

    shapes = {"q": (64, 128), "k": (64, 32), "v": (64, 32), "o": (128, 64), "up": (64, 256), "down": (256, 64)}
    layers = {name: f32(4, *shape) for name, shape in shapes.items()}
    cache = {name: f32(4, 16, 128, 2, 16) for name in "kv"}
    return step, {"embed": f32(2048, 64), "layers": layers}, cache, i32(16), i32()


def channels_first() -> tuple[Any, ...]:
    def convolve(x, kernel, stride=1):
        return jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME")

    def loss(p, x, labels):
        x = jax.nn.relu(convolve(x, p["stem"], 2))
        x = x + convolve(jax.nn.relu(convolve(x, p["a"])), p["b"])
        return token_loss(convolve(x, p["down"], 2).mean((2, 3)) @ p["head"], labels)

    p = {"stem": f32(32, 4, 7, 7), "a": f32(48, 32, 3, 3), "b": f32(32, 48, 3, 3), "down": f32(64, 32, 3, 3)}
    return sgd(loss), {**p, "head": f32(64, 10)}, f32(16, 4, 32, 24), i32(16)


def routed() -> tuple[Any, ...]:
    """Experts by the best two of a softmax, at places in each expert's rows."""

    def loss(p, x):
        rows = x.reshape(-1, 64)
        best, chosen = jax.lax.top_k(jax.nn.softmax(rows @ p["choose"]), 2)
        hot = jax.nn.one_hot(chosen, 8)
        at = jnp.cumsum(hot.reshape(-1, 8), 0).reshape(hot.shape).astype(int) - 1
        at = jax.nn.one_hot(at, 16)
        taken = jnp.einsum("nd,nke,nkec->ecd", rows, hot, at)
        made = jnp.einsum("ecf,efd->ecd", jax.nn.silu(jnp.einsum("ecd,edf->ecf", taken, p["w1"])), p["w2"])
        return jnp.mean((rows + jnp.einsum("nk,nke,nkec,ecd->nd", best, hot, at, made)) ** 2)

    return sgd(loss), {"choose": f32(64, 8), "w1": f32(8, 64, 128), "w2": f32(8, 128, 64)}, f32(8, 32, 64)


def two_towers() -> tuple[Any, ...]:
    def tower(x, layers):
        for one in layers:
            x = x + jax.nn.gelu(norm(x) @ one["fc"]) @ one["out"]
        return x

    def loss(p, image, text):
        left = tower(image @ p["image"]["patch"], p["image"]["layers"]).mean(1) @ p["image"]["head"]
        right = tower(p["text"]["tokens"][text], p["text"]["layers"])[:, -1] @ p["text"]["head"]
        return -jnp.mean(jnp.diag(jax.nn.log_softmax(left @ right.T)))

    def layers(width):
        return [{"fc": f32(width, 4 * width), "out": f32(4 * width, width)}] * 2

    image = {"patch": f32(48, 96), "layers": layers(96), "head": f32(96, 32)}
    text = {"tokens": f32(4096, 64), "layers": layers(64), "head": f32(64, 32)}
    return sgd(loss), {"image": image, "text": text}, f32(16, 24, 48), i32(16, 20)


def fused() -> tuple[Any, ...]:
    """Queries, keys and values by one product, as nanoGPT and ViT have them."""

    def step(p, x):
        b, t, d = x.shape
        made = (x @ p["w"]).reshape(b, t, 3, 6, 16)
        a = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", made[:, :, 0], made[:, :, 1]))
        return x + jnp.einsum("bhqk,bkhd->bqhd", a, made[:, :, 2]).reshape(b, t, d) @ p["o"]

    return step, {"w": f32(96, 288), "o": f32(96, 96)}, f32(16, 64, 96)
