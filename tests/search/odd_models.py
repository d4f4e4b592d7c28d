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
    mean = x.mean(-1, keepdims=True)
    centred = x - mean
    scale = jax.lax.rsqrt(variance + 1e-6)
    return centred * scale


def token_loss(logits, labels):
    log_probabilities = jax.nn.log_softmax(logits)
    columns = labels[..., None]
    picked = jnp.take_along_axis(log_probabilities, columns, -1)
    return -jnp.mean(picked)


def dit() -> tuple[Any, ...]:
    """A diffusion transformer: its width is 96, that of its conditioning 32; labels are
    looked up, tokens are not.
    """

    def block(x, c, p):
        b, t, d = x.shape
        projected = jax.nn.silu(c) @ p["ada"]
        modulation = projected[:, None]
        shift, scale, gate, shift_2, scale_2, gate_2 = jnp.split(modulation, 6, -1)
        scaled = norm(x) * (1 + scale)
        h = scaled + shift
        fused = h @ p["qkv"]
        qkv = fused.reshape(b, t, 3, 6, 16)
        q, k, v = jnp.moveaxis(qkv, 2, 0)
        products = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        weights = jax.nn.softmax(products)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        flat = mixed.reshape(b, t, d)
        attended = flat @ p["proj"]
        x = x + gate * attended
        scaled_again = norm(x) * (1 + scale_2)
        h = scaled_again + shift_2
        hidden = jax.nn.gelu(h @ p["mlp_in"])
        fed = hidden @ p["mlp_out"]
        return x + gate_2 * fed

    def loss(p, rows, time, label, noise):
        x = rows @ p["patch"]
        frequencies = jnp.arange(24.0)
        waves = jnp.cos(time[:, None] * frequencies)
        time_hidden = jax.nn.silu(waves @ p["time_1"])
        time_embedding = time_hidden @ p["time_2"]
        label_embedding = p["label"][label]
        c = time_embedding + label_embedding
        for layer in p["blocks"]:
            x = block(x, c, layer)
        predicted = norm(x) @ p["final"]
        squares = (predicted - noise) ** 2
        return jnp.mean(squares)

    shapes = {
        "ada": (32, 576),
        "qkv": (96, 288),
        "proj": (96, 96),
        "mlp_in": (96, 384),
        "mlp_out": (384, 96),
    }
    block_structs = {}
    for name, shape in shapes.items():
        block_structs[name] = f32(*shape)
    blocks = [block_structs for _ in range(2)]
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
        query = x @ p["q"]
        q = query.reshape(b, 2, 4, 16)
        key = x @ p["k"]
        new_k = key.reshape(b, 1, 2, 16)
        value = x @ p["v"]
        new_v = value.reshape(b, 1, 2, 16)
        corner = (0, index, 0, 0)
        k = jax.lax.dynamic_update_slice(k, new_k, corner)
        v = jax.lax.dynamic_update_slice(v, new_v, (0, index, 0, 0))
        products = jnp.einsum("bkgd,bskd->bkgs", q, k)
        weights = jax.nn.softmax(products)
        mixed = jnp.einsum("bkgs,bskd->bkgd", weights, v)
        flat = mixed.reshape(b, 128)
        x = x + flat @ p["o"]
        raised = norm(x) @ p["up"]
        hidden = jax.nn.silu(raised)
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
        embedded = p["embed"][token]
        x, (k, v) = jax.lax.scan(body, embedded, rows)
        logits = norm(x) @ p["embed"].T
        chosen = jnp.argmax(logits, -1)
        return chosen, {"k": k, "v": v}

    shapes = {
        "q": (64, 128),
        "k": (64, 32),
        "v": (64, 32),
        "o": (128, 64),
        "up": (64, 256),
        "down": (256, 64),
    }
    layers = {}
    for name, shape in shapes.items():
        layers[name] = f32(4, *shape)
    cache = {}
    for name in "kv":
        cache[name] = f32(4, 16, 128, 2, 16)
    params = {"embed": f32(2048, 64), "layers": layers}
    token = i32(16)
    index = i32()
    return step, params, cache, token, index


def channels_first() -> tuple[Any, ...]:
    def convolve(x, kernel, stride=1):
        return jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME")

    def loss(p, x, labels):
        stem = convolve(x, p["stem"], 2)
        x = jax.nn.relu(stem)
        first = convolve(x, p["a"])
        hidden = jax.nn.relu(first)
        residual = convolve(hidden, p["b"])
        x = x + residual
        convolved = convolve(x, p["down"], 2)
        pooled = convolved.mean((2, 3))
        logits = pooled @ p["head"]
        return token_loss(logits, labels)

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
            raised = norm(x) @ layer["fc"]
            hidden = jax.nn.gelu(raised)
            x = x + hidden @ layer["out"]
        return x

    def loss(p, image, text):
        image_rows = image @ p["image"]["patch"]
        patches = tower(image_rows, p["image"]["layers"])
        image_means = patches.mean(1)
        images = image_means @ p["image"]["head"]
        text_rows = p["text"]["tokens"][text]
        tokens = tower(text_rows, p["text"]["layers"])
        last_tokens = tokens[:, -1]
        texts = last_tokens @ p["text"]["head"]
        products = images @ texts.T
        log_probabilities = jax.nn.log_softmax(products)
        right = jnp.diag(log_probabilities)
        return -jnp.mean(right)

    def layers(width):
        layer = {"fc": f32(width, 4 * width), "out": f32(4 * width, width)}
        return [layer] * 2

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
            adapter_update = x @ a["down"] @ a["up"]
            adapted = x @ w["up"] + adapter_update
            hidden = jax.nn.relu(adapted)
            x = x + hidden @ w["back"]
        logits = x @ base["wte"].T
        return token_loss(logits, tokens)

    layer = {"up": f32(64, 256), "back": f32(256, 64)}
    base = {"wte": f32(1000, 64), "h": [layer, layer]}
    adapter = {"down": f32(64, 8), "up": f32(8, 256)}
    tokens = i32(16, 32)
    return sgd(loss), [adapter, adapter], base, tokens


def positions() -> tuple[Any, ...]:
    def loss(p, tokens):
        wpe = p["wpe"][: tokens.shape[1]]
        embedded = p["wte"][tokens]
        x = embedded + wpe
        first = jnp.zeros((tokens.shape[0], 1, 64))
        tokens_and_first = jnp.concatenate([first, x], 1)
        x = tokens_and_first + p["pos_embed"]
        hidden = jax.nn.relu(x @ p["up"])
        x = x + hidden @ p["down"]
        logits = x @ p["wte"].T
        normalizers = jax.nn.logsumexp(logits, -1)
        return jnp.mean(normalizers)

    shapes = {
        "wte": (5000, 64),
        "wpe": (1024, 64),
        "pos_embed": (1, 129, 64),
        "up": (64, 256),
        "down": (256, 64),
    }
    params = {}
    for name, shape in shapes.items():
        params[name] = f32(*shape)
    tokens = i32(8, 128)
    return jax.grad(loss), params, tokens


def rows_of_a_table() -> tuple[Any, ...]:
    """As Equinox's embedding does it: a slice of one row, which `jax.vmap` makes a
    lookup that keeps a one.
    """

    def loss(params, tokens):
        def row_of(token):
            return params["table"][token]

        look_up = jax.vmap(row_of)
        rows = jax.vmap(look_up)(tokens)
        products = rows @ params["out"]
        return jnp.mean(products**2)

    params = {"table": f32(5000, 64), "out": f32(64, 96)}
    tokens = i32(16, 8)
    return jax.grad(loss), params, tokens
