"""A model, its rules and a step of training: what the examples of the command line name."""

import jax
import jax.numpy as jnp
import optax

from shardfx import AxisRules, From, PathRules, TreeMap, plan


RULES = PathRules([("up", ("embed", "mlp")), ("down", ("mlp", "embed"))])
AXES = AxisRules([("batch", ("data", "fsdp")), ("mlp", "tensor"), ("embed", "fsdp")], axes=("data", "fsdp", "tensor"))
BOTH = (RULES, AXES)
STACKED = TreeMap({f"layers/{name}": From(f"layer_{{i}}.{name}").T.stack("i") for name in ("up", "down")})
BY_HAND = AxisRules([("batch", "rows"), ("mlp", "columns")])
OPTIMIZER = optax.adamw(1e-3)


def make(key, width=256, layers=2):
    shapes = {"up": (width, 4 * width), "down": (4 * width, width)}
    return {
        f"layer_{i}": {name: jax.random.normal(key, shape) for name, shape in shapes.items()} for i in range(layers)
    }


def loss(params, x):
    y = x
    for layer in params.values():
        y = y + jax.nn.relu(y @ layer["up"]) @ layer["down"]
    return jnp.mean((y - x) ** 2)


def train_step(mesh, width=256):
    """The step, and how its arguments are sharded on the mesh."""
    params = plan(jax.eval_shape(lambda: make(jax.random.key(0), width)), mesh, paths=RULES, axes=AXES)
    batch = plan(jax.ShapeDtypeStruct((1024, width), jnp.float32), mesh, names=("batch", None), axes=AXES)

    return step, (params.structs, batch.structs)


def plain_step(width=2048, rows=65536):
    """The step for a search: its arguments are not sharded yet."""
    params = jax.eval_shape(lambda: make(jax.random.key(0), width))
    return step, (params, jax.ShapeDtypeStruct((rows, width), jnp.float32))


def step(params, x):
    value, gradients = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda weight, gradient: weight - 1e-3 * gradient, params, gradients), value
