"""Layers of the bank: residual stacks, feed-forward blocks, adapters, norms and steps
of optimizers.
"""

import jax
import jax.numpy as jnp
from jax import lax

from ._layers import layer


def normed(x):
    """A norm without a scale over the last dimension."""
    mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
    scale = lax.rsqrt(mean_square + 1e-2)
    return x * scale


@layer("residual", x="2*b d", w0="d d", w1="d d")
def residual_pair(x, w0, w1):
    for weight in (w0, w1):
        x = x + jnp.tanh(x @ weight)
    return x


@layer(
    "residual",
    x="2*b d",
    w0="d d",
    w1="d d",
    w2="d d",
)
def residual_three(x, w0, w1, w2):
    for weight in (w0, w1, w2):
        x = x + jnp.sin(x @ weight)
    return x


@layer("residual", x="b t d", w0="d d", w1="d d")
def residual_normed(x, w0, w1):
    for weight in (w0, w1):
        x = x + jax.nn.gelu(normed(x) @ weight)
    return x


@layer("residual", x="2*b d", w="4 d d")
def residual_scan(x, w):
    def add_product(x, weight):
        return x + jnp.tanh(x @ weight), None

    return lax.scan(add_product, x, w)[0]


@layer("residual", x="2*b d", w="4 d d")
def residual_scan_checkpoint(x, w):
    def add_product(x, weight):
        return x + jnp.tanh(x @ weight), None

    step = jax.checkpoint(add_product)
    return lax.scan(step, x, w)[0]


@layer("residual", x="e b d", w="e d d", v="e d d")
def residual_mapped(x, w, v):
    def one(x, w, v):
        first = jnp.tanh(x @ w)
        x = x + first
        second = jnp.tanh(x @ v)
        return x + second

    return jax.vmap(one)(x, w, v)


@layer(
    "residual",
    x="2*b d",
    up0="d f",
    down0="f d",
    up1="d f",
    down1="f d",
)
def residual_mlp(x, up0, down0, up1, down1):
    first_hidden = jax.nn.gelu(x @ up0)
    x = x + first_hidden @ down0
    second_hidden = jax.nn.gelu(x @ up1)
    return x + second_hidden @ down1


@layer("residual", x="b t d", up="4 d f", down="4 f d")
def residual_mlp_scan(x, up, down):
    def step(x, weights):
        up = weights[0]
        hidden = jax.nn.gelu(normed(x) @ up)
        down = weights[1]
        return x + hidden @ down, None

    return lax.scan(step, x, (up, down))[0]


@layer("residual", x="2*b d", w0="d d", w1="d d")
def dense_concat(x, w0, w1):
    hidden = jnp.tanh(x @ w0)
    both = jnp.concatenate([x, hidden], axis=-1)
    width = x.shape[1]
    product = both[:, :width] * both[:, width:]
    return product + hidden @ w1


@layer("residual", x="2*b d", w="d 2*d", v="d d")
def highway(x, w, v):
    gate, value = jnp.split(x @ w, 2, axis=-1)
    gate = jax.nn.sigmoid(gate)
    new_part = gate * jnp.tanh(value)
    kept_part = (1 - gate) * x
    x = new_part + kept_part
    return x + jnp.tanh(x @ v)


@layer(
    "feed-forward",
    x="b t d",
    gate="d f",
    up="d f",
    down="f d",
)
def gated(x, gate, up, down):
    gate_input = normed(x) @ gate
    activated = jax.nn.silu(gate_input)
    raised = normed(x) @ up
    gated = activated * raised
    return x + gated @ down


@layer("feed-forward", x="b t d", w="d 2*f", down="f d")
def gated_fused(x, w, down):
    gate, up = jnp.split(x @ w, 2, axis=-1)
    activated = jax.nn.silu(gate)
    return (activated * up) @ down


@layer("feed-forward", x="b t d", tokens="t t", channels="d d")
def mixer(x, tokens, channels):
    mixed = jnp.einsum("btd,ts->bsd", jnp.tanh(x), tokens)
    x = x + mixed
    channel_input = jnp.tanh(x)
    return x + channel_input @ channels


@layer(
    "lora",
    x="b t d",
    w="d f",
    a="d r",
    b="r f",
)
def lora(x, w, a, b):
    adapted = (x @ a) @ b
    return x @ w + adapted * 2


@layer(
    "lora",
    x="b t d",
    w="d d",
    a="e d r",
    b="e r d",
    choice="b : below e",
)
def lora_many(x, w, a, b, choice):
    first_factor = a[choice]
    small = jnp.einsum("btd,bdr->btr", x, first_factor)
    second_factor = b[choice]
    adapted = jnp.einsum("btr,brd->btd", small, second_factor)
    return x + x @ w + adapted


@layer(
    "dit",
    x="b t d",
    condition="b c",
    modulate="c 6*d",
    w="d d",
    up="d f",
    down="f d",
)
def dit_block(x, condition, modulate, w, up, down):
    modulation = jax.nn.silu(condition) @ modulate
    expanded = modulation[:, None]
    parts = jnp.split(expanded, 6, axis=-1)
    scaled_input = normed(x) * (1 + parts[1])
    scaled = scaled_input + parts[0]
    x = x + parts[2] * (scaled @ w)
    scaled_hidden = normed(x) * (1 + parts[4])
    hidden = scaled_hidden + parts[3]
    activated = jax.nn.gelu(hidden @ up)
    return x + parts[5] * (activated @ down)


@layer("dit", x="b y x c", condition="b d", w="d 2*c")
def film(x, condition, w):
    scale, shift = jnp.split(condition @ w, 2, axis=-1)
    scaled = x * (1 + scale[:, None, None])
    return scaled + shift[:, None, None]


@layer("norm", x="b t d", scale="d", shift="d")
def layer_norm(x, scale, shift):
    centred = x - x.mean(-1, keepdims=True)
    variance = x.var(-1, keepdims=True)
    scaled = centred * lax.rsqrt(variance + 1e-3)
    return scaled * scale + shift


@layer("norm", x="b t d", scale="d")
def rms_norm(x, scale):
    return normed(x) * scale


@layer("norm", x="b t h k", scale="k")
def head_norm(x, scale):
    return normed(x) * scale


@layer("norm", x="b y x 4*g", scale="4*g")
def group_norm(x, scale):
    batch, height, width, channels = x.shape
    groups = x.reshape(batch, height, width, 4, channels // 4)
    mean = groups.mean((1, 2, 4), keepdims=True)
    variance = groups.var((1, 2, 4), keepdims=True)
    deviation = lax.rsqrt(variance + 1e-3)
    scaled = (groups - mean) * deviation
    return scaled.reshape(x.shape) * scale


@layer("norm", x="b c y x", scale="c")
def batch_norm(x, scale):
    mean = x.mean((0, 2, 3), keepdims=True)
    variance = x.var((0, 2, 3), keepdims=True)
    deviation = lax.rsqrt(variance + 1e-3)
    scaled = (x - mean) * deviation
    return scaled * scale[:, None, None]


@layer("norm", x="b c y x")
def instance_norm(x):
    mean = x.mean((2, 3), keepdims=True)
    variance = x.var((2, 3), keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-3)


@layer("norm", x="2*b d", w="d f", scale="f")
def weight_norm(x, w, scale):
    column_squares = jnp.sum(w * w, axis=0)
    norms = lax.rsqrt(column_squares + 1e-3)
    return x @ (w * scale * norms)


@layer("optimizer", w="d f")
def muon(w):
    square_sum = jnp.sum(w * w)
    x = w * lax.rsqrt(square_sum + 1e-3)
    for _ in range(2):
        gram = x @ x.T
        cubic = gram @ x
        x = 3 * x - 3 * gram @ x + gram @ cubic
    return x


@layer(
    "optimizer",
    gradient=False,
    w="d d",
    left="d d",
    right="d d",
)
def shampoo_statistics(w, left, right):
    left = 0.9 * left + w @ w.T
    right = 0.9 * right + w.T @ w
    return left @ w @ right / 8


@layer(
    "optimizer",
    gradient=False,
    w="d f",
    gradient_="d f",
    mean="d f",
    square="d f : positive",
)
def adamw(w, gradient_, mean, square):
    mean = 0.9 * mean + 0.1 * gradient_
    square = 0.99 * square + 0.01 * gradient_**2
    square_sum = jnp.sum(gradient_**2)
    clip = jnp.minimum(1.0, lax.rsqrt(square_sum + 1e-3))
    scale = lax.rsqrt(square + 1e-3)
    change = clip * mean * scale
    return w - 0.1 * (change + 0.01 * w)


@layer(
    "optimizer",
    gradient=False,
    w="d f",
    gradient_="d f",
    rows="d : positive",
    columns="f : positive",
)
def adafactor(w, gradient_, rows, columns):
    row_squares = jnp.mean(gradient_**2, axis=1)
    rows = 0.9 * rows + 0.1 * row_squares
    column_squares = jnp.mean(gradient_**2, axis=0)
    columns = 0.9 * columns + 0.1 * column_squares
    products = rows[:, None] * columns[None, :]
    square = products / jnp.mean(rows)
    scale = lax.rsqrt(square + 1e-3)
    return w - 0.1 * gradient_ * scale


@layer(
    "training",
    gradient=False,
    w0="d f",
    w1="f d",
    x="2*b d",
    target="2*b d",
)
def training_step(w0, w1, x, target):
    def loss(w0, w1):
        hidden = jax.nn.gelu(x @ w0)
        residual = x + hidden @ w1 - target
        return jnp.mean(residual**2)

    first, second = jax.grad(loss, (0, 1))(w0, w1)
    new_w0 = w0 - 0.1 * first
    new_w1 = w1 - 0.1 * second
    return new_w0 @ new_w1


@layer(
    "training",
    gradient=False,
    w="d f",
    x="4 b d",
    target="4 b f",
)
def accumulated_gradients(w, x, target):
    def loss(w, x, target):
        out = jnp.tanh(x @ w)
        return jnp.mean((out - target) ** 2)

    def step(total, batch):
        gradient = jax.grad(loss)(w, *batch)
        return total + gradient, None

    zeros = jnp.zeros_like(w)
    return lax.scan(step, zeros, (x, target))[0]
