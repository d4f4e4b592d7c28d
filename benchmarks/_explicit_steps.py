"""Twelve steps, each in JAX's style for Explicit axes and in a plain form.

The typed form says every sharding that JAX asks for, by `reshard` and `out_sharding=`
over the axes `data` and `tensor`, as in JAX's training cookbook. The plain form is the
same code without them.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P


AXES = ("data", "tensor")
Struct = jax.ShapeDtypeStruct


class Step(NamedTuple):
    """A step, and its arguments as structs."""

    step: Callable[..., Any]
    args: tuple[Any, ...]


class Form(NamedTuple):
    """What says the shardings in a step; nothing if the form is plain."""

    is_typed: bool

    def out(self, *spec: Any) -> P | None:
        """The value of an `out_sharding=`."""
        return P(*spec) if self.is_typed else None

    def put(self, x: jax.Array, *spec: Any) -> jax.Array:
        return jax.sharding.reshard(x, P(*spec)) if self.is_typed else x


def f32(*shape: int) -> Struct:
    return Struct(shape, jnp.float32)


def i32(*shape: int) -> Struct:
    return Struct(shape, jnp.int32)


def trained(loss: Callable[..., Any], params: Any, *data: Any) -> Step:
    """A step of gradient descent."""

    def step(params, *data):
        value, grads = jax.value_and_grad(loss)(params, *data)
        updated = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return updated, value

    return Step(step, (params, *data))


def norm(x: jax.Array) -> jax.Array:
    mean_square = jnp.mean(x**2, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean_square + 1e-6)


def feed_forward(form: Form, weights: Any, x: jax.Array) -> jax.Array:
    """Two products with the hidden dimension cut over `tensor`."""
    up = form.put(weights["up"], None, "tensor")
    down = form.put(weights["down"], "tensor")
    hidden = jax.nn.relu(x @ up)
    return jnp.matmul(hidden, down, out_sharding=form.out("data"))


def perceptron(form: Form) -> Step:
    params = {"up": f32(256, 1024), "down": f32(1024, 256)}

    def loss(params, x: jax.Array) -> jax.Array:
        out = feed_forward(form, params, x)
        return jnp.mean((x + out) ** 2)

    return trained(loss, params, f32(512, 256))


def adamw(form: Form) -> Step:
    """Scanned layers with AdamW."""
    params = {"up": f32(4, 256, 1024), "down": f32(4, 1024, 256)}
    optimizer = optax.adamw(1e-3)

    def loss(params, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w):
            return x + feed_forward(form, w, norm(x)), None

        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

    def step(params, state, x: jax.Array):
        value, grads = jax.value_and_grad(loss)(params, x)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state = jax.eval_shape(optimizer.init, params)
    return Step(step, (params, state, f32(512, 256)))


class Cookbook(NamedTuple):
    """The specs of the cookbook's decoder: of its weights as they are used, and of its
    activations.
    """

    heads: Any
    mlp: Any
    batch: Any


def cookbook(form: Form, specs: Cookbook, *, embed: int = 128) -> Step:
    """A decoder as JAX's training cookbook writes it: a lookup with an `out_sharding`,
    einsums with one each, and layers in a scan.
    """
    layers, vocab, heads, head, mlp, length = 2, 512, 4, 32, 256, 64
    params = {
        "embed": f32(vocab, embed),
        "positions": f32(length, embed),
        "layers": {
            "qkv": f32(layers, 3, embed, heads, head),
            "out": f32(layers, heads, head, embed),
            "up": f32(layers, embed, mlp),
            "down": f32(layers, mlp, embed),
        },
    }
    batch = specs.batch
    act = form.out(batch)

    def forward(params, tokens: jax.Array) -> jax.Array:
        table = form.put(params["embed"])
        x = table.at[tokens].get(out_sharding=act) if act else table[tokens]
        x = x + form.put(params["positions"])
        is_before = jnp.ones((tokens.shape[1], tokens.shape[1]), bool)
        mask = jnp.tril(is_before)

        def layer(x: jax.Array, w):
            qkv = form.put(w["qkv"], None, None, specs.heads)
            by_heads = form.out(None, batch, None, specs.heads)
            q, k, v = jnp.einsum(
                "bse,gehd->gbshd",
                norm(x),
                qkv,
                out_sharding=by_heads,
            )
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / head**0.5
            weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
            mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
            out = form.put(w["out"], specs.heads)
            x = x + jnp.einsum("bqhd,hde->bqe", mixed, out, out_sharding=act)
            up = form.put(w["up"], None, specs.mlp)
            by_hidden = form.out(batch, None, specs.mlp)
            hidden = jnp.einsum(
                "bse,ef->bsf",
                norm(x),
                up,
                out_sharding=by_hidden,
            )
            down = form.put(w["down"], specs.mlp)
            activated = jax.nn.gelu(hidden)
            x = x + jnp.einsum("bsf,fe->bse", activated, down, out_sharding=act)
            return x, None

        x, _ = jax.lax.scan(layer, x, params["layers"])
        return jnp.einsum("bse,ve->bsv", norm(x), table, out_sharding=act)

    def loss(params, tokens: jax.Array) -> jax.Array:
        logits = jax.nn.log_softmax(forward(params, tokens))
        chosen = jax.nn.one_hot(tokens, vocab) * logits
        return -jnp.mean(jnp.sum(chosen, axis=-1))

    return trained(loss, params, i32(32, length))


DATA_PARALLEL = Cookbook(heads=None, mlp=None, batch=("data", "tensor"))
TENSOR_PARALLEL = Cookbook(heads="tensor", mlp="tensor", batch="data")
FULLY_SHARDED = Cookbook(heads=None, mlp=None, batch="data")


def remat(form: Form) -> Step:
    params = {"up": f32(4, 256, 1024), "down": f32(4, 1024, 256)}

    def loss(params, x: jax.Array) -> jax.Array:
        @jax.checkpoint
        def layer(x: jax.Array, w) -> jax.Array:
            up = form.put(w["up"], None, "tensor")
            hidden = jax.nn.gelu(jnp.matmul(x, up))
            down = form.put(w["down"], "tensor")
            return x + jnp.matmul(hidden, down, out_sharding=form.out("data"))

        start = form.put(x, "data")
        x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), start, params)
        return jnp.mean(x**2)

    return trained(loss, params, f32(512, 256))


def experts(form: Form) -> Step:
    params = {
        "router": f32(256, 8),
        "up": f32(8, 256, 512),
        "down": f32(8, 512, 256),
    }

    def loss(params, x: jax.Array) -> jax.Array:
        shares = jax.nn.softmax(x @ form.put(params["router"]))
        up = form.put(params["up"], "tensor")
        down = form.put(params["down"], "tensor")
        hidden = jax.nn.relu(jnp.einsum("ne,xef->xnf", x, up))
        out = jnp.einsum("xnf,xfe->xne", hidden, down)
        placed_shares = form.put(shares, "data", "tensor")
        mixed = jnp.einsum(
            "xne,nx->ne",
            out,
            placed_shares,
            out_sharding=form.out("data"),
        )
        return jnp.mean((x + mixed) ** 2)

    return trained(loss, params, f32(512, 256))


def recurrent(form: Form) -> Step:
    params = {"inner": f32(256, 256), "outer": f32(128, 256)}

    def loss(params, x: jax.Array) -> jax.Array:
        inner = form.put(params["inner"])
        outer = form.put(params["outer"])

        def cell(state: jax.Array, x: jax.Array):
            state = jnp.tanh(state @ inner + x @ outer)
            return state, state

        zeros = jnp.zeros((x.shape[1], 256))
        start = form.put(zeros, "data")
        _, states = jax.lax.scan(cell, start, x)
        return jnp.mean(states**2)

    def over_time(params, x: jax.Array) -> jax.Array:
        return loss(params, form.put(x, None, "data"))

    return trained(over_time, params, f32(16, 128, 128))


def own_derivative(form: Form) -> Step:
    """A function with a derivative of its own, as a fused kernel has."""
    params = {"up": f32(256, 1024), "down": f32(1024, 256)}

    @jax.custom_vjp
    def squared(x: jax.Array) -> jax.Array:
        return jnp.maximum(x, 0) ** 2

    def forward(x: jax.Array):
        return squared(x), x

    def backward(x: jax.Array, cotangent: jax.Array):
        return (2 * jnp.maximum(x, 0) * cotangent,)

    squared.defvjp(forward, backward)

    def loss(params, x: jax.Array) -> jax.Array:
        hidden = squared(x @ form.put(params["up"], None, "tensor"))
        down = form.put(params["down"], "tensor")
        out = jnp.matmul(hidden, down, out_sharding=form.out("data"))
        return jnp.mean(out**2)

    return trained(loss, params, f32(512, 256))


def towers(form: Form) -> Step:
    """A contrastive loss of two towers."""
    params = {"left": f32(256, 128), "right": f32(192, 128)}

    def loss(params, x: jax.Array, y: jax.Array) -> jax.Array:
        left = norm(x @ form.put(params["left"]))
        right = norm(y @ form.put(params["right"]))
        logits = jnp.matmul(left, right.T, out_sharding=form.out("data"))
        eye = jnp.eye(x.shape[0])
        log_probabilities = jax.nn.log_softmax(logits)
        return -jnp.mean(jnp.sum(log_probabilities * eye, axis=-1))

    return trained(loss, params, f32(128, 256), f32(128, 192))


def branches(form: Form) -> Step:
    params = {"wide": f32(256, 256), "shift": f32(256)}

    def loss(params, x: jax.Array, scale: jax.Array) -> jax.Array:
        wide = form.put(params["wide"])
        shift = form.put(params["shift"])
        y = jax.lax.cond(
            scale > 0, lambda x: jnp.tanh(x @ wide), lambda x: x + shift, x
        )
        return jnp.mean(y**2)

    return trained(loss, params, f32(512, 256), f32())


def accumulated(form: Form) -> Step:
    """Gradients summed over microbatches in a scan."""
    params = {"up": f32(128, 512), "down": f32(512, 128)}

    def loss(params, x: jax.Array) -> jax.Array:
        out = feed_forward(form, params, x)
        return jnp.mean((x - out) ** 2)

    def step(params, micros: jax.Array):
        micros = form.put(micros, None, "data")

        def add(total, micro: jax.Array):
            grads = jax.grad(loss)(params, micro)
            return jax.tree.map(jnp.add, total, grads), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        total, _ = jax.lax.scan(add, zeros, micros)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, total)

    return Step(step, (params, f32(4, 128, 128)))


STEPS: Mapping[str, Callable[[Form], Step]] = {
    "perceptron": perceptron,
    "adamw, scanned": adamw,
    "cookbook, data parallel": lambda form: cookbook(form, DATA_PARALLEL),
    "cookbook, fully sharded": lambda form: cookbook(form, FULLY_SHARDED),
    "cookbook, tensor parallel": lambda form: cookbook(form, TENSOR_PARALLEL),
    "remat": remat,
    "experts": experts,
    "recurrent": recurrent,
    "own derivative": own_derivative,
    "towers": towers,
    "branches": branches,
    "accumulated": accumulated,
}
