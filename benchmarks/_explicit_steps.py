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

        def descended(p, g):
            return p - 0.1 * g

        updated = jax.tree.map(descended, params, grads)
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
    placed = form.out("data")
    return jnp.matmul(hidden, down, out_sharding=placed)


def perceptron(form: Form) -> Step:
    params = {"up": f32(256, 1024), "down": f32(1024, 256)}

    def loss(params, x: jax.Array) -> jax.Array:
        out = feed_forward(form, params, x)
        squares = (x + out) ** 2
        return jnp.mean(squares)

    return trained(loss, params, f32(512, 256))


def adamw(form: Form) -> Step:
    """Scanned layers with AdamW."""
    params = {"up": f32(4, 256, 1024), "down": f32(4, 1024, 256)}
    optimizer = optax.adamw(1e-3)

    def loss(params, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w):
            normed = norm(x)
            return x + feed_forward(form, w, normed), None

        outputs = jax.lax.scan(layer, x, params)
        return jnp.mean(outputs[0] ** 2)

    def step(params, state, x: jax.Array):
        value, grads = jax.value_and_grad(loss)(params, x)
        updates, state = optimizer.update(grads, state, params)
        updated = optax.apply_updates(params, updates)
        return updated, state, value

    state = jax.eval_shape(optimizer.init, params)
    batch = f32(512, 256)
    return Step(step, (params, state, batch))


class Cookbook(NamedTuple):
    """The specs of the cookbook's decoder: of its weights as they are used, and of its
    activations.
    """

    heads: Any
    mlp: Any
    batch: Any


def _cookbook_params(vocab, embed, length, layers, heads, head, mlp):
    return {
        "embed": f32(vocab, embed),
        "positions": f32(length, embed),
        "layers": {
            "qkv": f32(layers, 3, embed, heads, head),
            "out": f32(layers, heads, head, embed),
            "up": f32(layers, embed, mlp),
            "down": f32(layers, mlp, embed),
        },
    }


def cookbook(form: Form, specs: Cookbook, *, embed: int = 128) -> Step:
    """A decoder as JAX's training cookbook writes it: a lookup with an `out_sharding`,
    einsums with one each, and layers in a scan.
    """
    vocab = 512
    head = 32
    length = 64
    params = _cookbook_params(
        vocab=vocab,
        embed=embed,
        length=length,
        layers=2,
        heads=4,
        head=head,
        mlp=256,
    )
    batch = specs.batch
    act = form.out(batch)

    def forward(params, tokens: jax.Array) -> jax.Array:
        table = form.put(params["embed"])
        x = table.at[tokens].get(out_sharding=act) if act else table[tokens]
        x = x + form.put(params["positions"])
        square = (tokens.shape[1], tokens.shape[1])
        is_before = jnp.ones(square, bool)
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
            products = jnp.einsum("bqhd,bkhd->bhqk", q, k)
            scores = products / head**0.5
            masked = jnp.where(mask, scores, -1e9)
            weights = jax.nn.softmax(masked)
            mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
            out = form.put(w["out"], specs.heads)
            mixed_out = jnp.einsum("bqhd,hde->bqe", mixed, out, out_sharding=act)
            x = x + mixed_out
            up = form.put(w["up"], None, specs.mlp)
            by_hidden = form.out(batch, None, specs.mlp)
            hidden = jnp.einsum("bse,ef->bsf", norm(x), up, out_sharding=by_hidden)
            down = form.put(w["down"], specs.mlp)
            activated = jax.nn.gelu(hidden)
            lowered = jnp.einsum("bsf,fe->bse", activated, down, out_sharding=act)
            x = x + lowered
            return x, None

        x, _ = jax.lax.scan(layer, x, params["layers"])
        return jnp.einsum("bse,ve->bsv", norm(x), table, out_sharding=act)

    def loss(params, tokens: jax.Array) -> jax.Array:
        answers = forward(params, tokens)
        logits = jax.nn.log_softmax(answers)
        hot = jax.nn.one_hot(tokens, vocab)
        chosen = hot * logits
        picked = jnp.sum(chosen, axis=-1)
        return -jnp.mean(picked)

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
            raised = jnp.matmul(x, up)
            hidden = jax.nn.gelu(raised)
            down = form.put(w["down"], "tensor")
            placed = form.out("data")
            lowered = jnp.matmul(hidden, down, out_sharding=placed)
            return x + lowered

        start = form.put(x, "data")

        def step(x, w):
            return layer(x, w), None

        x, _ = jax.lax.scan(step, start, params)
        return jnp.mean(x**2)

    return trained(loss, params, f32(512, 256))


def experts(form: Form) -> Step:
    params = {
        "router": f32(256, 8),
        "up": f32(8, 256, 512),
        "down": f32(8, 512, 256),
    }

    def loss(params, x: jax.Array) -> jax.Array:
        router = form.put(params["router"])
        shares = jax.nn.softmax(x @ router)
        up = form.put(params["up"], "tensor")
        down = form.put(params["down"], "tensor")
        raised = jnp.einsum("ne,xef->xnf", x, up)
        hidden = jax.nn.relu(raised)
        out = jnp.einsum("xnf,xfe->xne", hidden, down)
        placed_shares = form.put(shares, "data", "tensor")
        mixed = jnp.einsum(
            "xne,nx->ne",
            out,
            placed_shares,
            out_sharding=form.out("data"),
        )
        squares = (x + mixed) ** 2
        return jnp.mean(squares)

    return trained(loss, params, f32(512, 256))


def recurrent(form: Form) -> Step:
    params = {"inner": f32(256, 256), "outer": f32(128, 256)}

    def loss(params, x: jax.Array) -> jax.Array:
        inner = form.put(params["inner"])
        outer = form.put(params["outer"])

        def cell(state: jax.Array, x: jax.Array):
            carried = state @ inner
            mixed = carried + x @ outer
            state = jnp.tanh(mixed)
            return state, state

        zeros = jnp.zeros((x.shape[1], 256))
        start = form.put(zeros, "data")
        _, states = jax.lax.scan(cell, start, x)
        return jnp.mean(states**2)

    def over_time(params, x: jax.Array) -> jax.Array:
        placed = form.put(x, None, "data")
        return loss(params, placed)

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
        slope = 2 * jnp.maximum(x, 0)
        return (slope * cotangent,)

    squared.defvjp(forward, backward)

    def loss(params, x: jax.Array) -> jax.Array:
        up = form.put(params["up"], None, "tensor")
        hidden = squared(x @ up)
        down = form.put(params["down"], "tensor")
        placed = form.out("data")
        out = jnp.matmul(hidden, down, out_sharding=placed)
        return jnp.mean(out**2)

    return trained(loss, params, f32(512, 256))


def towers(form: Form) -> Step:
    """A contrastive loss of two towers."""
    params = {"left": f32(256, 128), "right": f32(192, 128)}

    def loss(params, x: jax.Array, y: jax.Array) -> jax.Array:
        left_weights = form.put(params["left"])
        left_rows = x @ left_weights
        left = norm(left_rows)
        right_weights = form.put(params["right"])
        right = norm(y @ right_weights)
        placed = form.out("data")
        logits = jnp.matmul(left, right.T, out_sharding=placed)
        eye = jnp.eye(x.shape[0])
        log_probabilities = jax.nn.log_softmax(logits)
        picked = jnp.sum(log_probabilities * eye, axis=-1)
        return -jnp.mean(picked)

    return trained(loss, params, f32(128, 256), f32(128, 192))


def branches(form: Form) -> Step:
    params = {"wide": f32(256, 256), "shift": f32(256)}

    def loss(params, x: jax.Array, scale: jax.Array) -> jax.Array:
        wide = form.put(params["wide"])
        shift = form.put(params["shift"])

        def of_positive(x):
            return jnp.tanh(x @ wide)

        def of_others(x):
            return x + shift

        y = jax.lax.cond(scale > 0, of_positive, of_others, x)
        return jnp.mean(y**2)

    return trained(loss, params, f32(512, 256), f32())


def accumulated(form: Form) -> Step:
    """Gradients summed over microbatches in a scan."""
    params = {"up": f32(128, 512), "down": f32(512, 128)}

    def loss(params, x: jax.Array) -> jax.Array:
        out = feed_forward(form, params, x)
        squares = (x - out) ** 2
        return jnp.mean(squares)

    def step(params, micros: jax.Array):
        micros = form.put(micros, None, "data")

        def add(total, micro: jax.Array):
            grads = jax.grad(loss)(params, micro)
            new_total = jax.tree.map(jnp.add, total, grads)
            return new_total, None

        zeros = jax.tree.map(jnp.zeros_like, params)
        total, _ = jax.lax.scan(add, zeros, micros)

        def descended(p, g):
            return p - 0.1 * g

        return jax.tree.map(descended, params, total)

    batches = f32(4, 128, 128)
    return Step(step, (params, batches))


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
