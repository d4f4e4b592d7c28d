"""Small models in several styles, without a name on any of them, each with a whole
training step.
"""

import functools as ft
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from parts_of_search import Space, named_classes, search_options, trace

from shardfx.auto import Candidate, Limits, name_axes


Struct = jax.ShapeDtypeStruct


def f32(*shape: int) -> Struct:
    return Struct(shape, "float32")


def space_of(
    model: Any,
    devices: Any,
    chip: str | None = None,
    limits: Limits | None = None,
    slices: int = 1,
) -> Space:
    """The space of a model: what the core can choose from, before anything is
    partitioned.
    """
    step, *args = model
    classes = named_classes(trace(step, *args))
    return Space(
        classes=classes,
        hardware=search_options(devices, chip, slices),
        limits=limits or Limits(),
    )


@ft.cache
def naming_of(make: Any) -> Any:
    """The names of the dimensions of what `make` returns: to trace a step takes long."""
    return name_axes(*make())


def run_code(candidate: Candidate) -> dict[str, Any]:
    namespace: dict[str, Any] = {}
    exec(candidate.code(), namespace)
    return namespace


def compiled(candidate: Candidate, step: Any, args: Any) -> Any:
    """The program of the code as it is pasted, on the devices that are here."""
    namespace = run_code(candidate)
    plans = namespace["plans_of"](step, *args)
    assert plans == candidate.plans
    lowered = namespace["jitted"](
        step, [each.on(candidate.mesh.build(jax.devices())) for each in plans]
    ).lower(*args)
    return lowered.compile()


def sgd(loss: Any) -> Any:
    """A step of plain gradient descent."""

    def step(model, *data):
        gradients = eqx.filter_grad(loss)(model, *data)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, gradients))

    return step


def trained(loss: Any, optimizer: Any) -> Any:
    """A step of an optimizer of optax."""

    def step(params, state, *data):
        updates, state = optimizer.update(jax.grad(loss)(params, *data), state, params)
        return optax.apply_updates(params, updates), state

    return step


def mlp_step(
    width: int, hidden: int, rows: int, dtype: Any = "bfloat16"
) -> tuple[Any, ...]:
    """A residual layer of two matrices."""

    def loss(p, x):
        hidden = jax.nn.relu(x @ p["up"])
        return jnp.mean((x + hidden @ p["down"]) ** 2)

    params = {
        "up": Struct((width, hidden), dtype),
        "down": Struct((hidden, width), dtype),
    }
    return sgd(loss), params, Struct((rows, width), dtype)


def mlp() -> tuple[Any, ...]:
    def loss(p, x, y):
        hidden = jax.nn.relu(x @ p["w1"] + p["b1"])
        hidden = jax.nn.relu(hidden @ p["w2"] + p["b2"])
        return jnp.mean((hidden @ p["w3"] - y) ** 2)

    p = {
        "w1": f32(48, 96),
        "b1": f32(96),
        "w2": f32(96, 96),
        "b2": f32(96),
        "w3": f32(96, 10),
    }
    return sgd(loss), p, f32(16, 48), f32(16, 10)


def equinox_attention() -> tuple[Any, ...]:
    model = eqx.filter_eval_shape(
        eqx.nn.MultiheadAttention, 8, 64, key=jax.random.key(0)
    )
    optimizer = sgd(lambda m, x: jnp.mean((x + jax.vmap(lambda q: m(q, q, q))(x)) ** 2))
    return (
        optimizer,
        model,
        f32(8, 32, 64),
    )


def flax_transformer() -> tuple[Any, ...]:
    return _of_flax().transformer()


def convolutions() -> tuple[Any, ...]:
    return _of_flax().convolutions()


def _of_flax() -> Any:
    """The module with models of flax, which need not be installed."""
    return pytest.importorskip("flax_models", reason="flax is not installed")


def experts() -> tuple[Any, ...]:
    def loss(p, x):
        gates = jax.nn.softmax(x @ p["router"])
        _, chosen = jax.lax.top_k(gates, 2)
        total = jax.nn.one_hot(chosen, 8).sum(-2)
        shares = total * gates
        rows = jnp.einsum("bse,bsx->xbse", x, shares)
        hidden = jax.nn.silu(jnp.einsum("xbse,xem->xbsm", rows, p["wi"]))
        return jnp.mean((x + jnp.einsum("xbsm,xme->bse", hidden, p["wo"])) ** 2)

    params = {"router": f32(64, 8), "wi": f32(8, 64, 256), "wo": f32(8, 256, 64)}
    return (
        sgd(loss),
        params,
        f32(4, 32, 64),
    )


def ragged_experts() -> tuple[Any, ...]:
    def loss(p, x):
        rows = x.reshape(-1, x.shape[-1])
        chosen = jnp.argmax(rows @ p["router"], -1)
        order = jnp.argsort(chosen)
        counts = jnp.bincount(chosen, length=8)
        hidden = jax.nn.silu(jax.lax.ragged_dot(rows[order], p["wi"], counts))
        mixed = jax.lax.ragged_dot(hidden, p["wo"], counts)
        back = mixed[jnp.argsort(order)].reshape(x.shape)
        return jnp.mean((x + back) ** 2)

    params = {"router": f32(64, 8), "wi": f32(8, 64, 256), "wo": f32(8, 256, 64)}
    return (
        sgd(loss),
        params,
        f32(4, 32, 64),
    )


def scanned() -> tuple[Any, ...]:
    """Residual layers under remat and scan, with grouped heads."""

    def layer(x, p):
        batch, length, _ = x.shape
        query = (x @ p["q"]).reshape(batch, length, 2, 4, 16)
        key = (x @ p["k"]).reshape(batch, length, 2, 16)
        value = (x @ p["v"]).reshape(batch, length, 2, 16)
        weights = jax.nn.softmax(jnp.einsum("bskgd,btkd->bkgst", query, key))
        mixed = jnp.einsum("bkgst,btkd->bskgd", weights, value).reshape(
            batch, length, 128
        )
        x = x + mixed @ p["o"]
        return x + jax.nn.gelu(x @ p["wi"]) @ p["wo"], None

    def loss(p, tokens):
        x = p["embedding"][tokens]
        x, _ = jax.lax.scan(jax.checkpoint(layer), x, p["layers"])
        logits = x @ p["embedding"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

    shapes = {
        "q": (64, 128),
        "k": (64, 32),
        "v": (64, 32),
        "o": (128, 64),
        "wi": (64, 256),
        "wo": (256, 64),
    }
    layers = {name: f32(4, *shape) for name, shape in shapes.items()}
    params = {"embedding": f32(512, 64), "layers": layers}
    tokens = Struct((16, 32), "int32")
    return (
        sgd(loss),
        params,
        tokens,
    )


MODELS = {
    make.__name__: make
    for make in (
        mlp,
        equinox_attention,
        flax_transformer,
        convolutions,
        experts,
        ragged_experts,
        scanned,
    )
}
