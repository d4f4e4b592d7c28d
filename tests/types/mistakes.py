"""Uses that type checkers must refuse: each line that says so, and no other."""

import equinox as eqx
import jax

import shardfx as sfx


class Dense(eqx.Module):
    weight: jax.Array = sfx.field(names=("mlp", "embed"))
    scale: float


@sfx.filter_jit
def step(x: jax.Array, rate: float) -> jax.Array:
    return x * rate


def mistakes(array: jax.Array) -> None:
    Dense()  # refused
    Dense(array)  # refused
    Dense(array, "1.0")  # refused
    step(array)  # refused
    step(array, "0.1")  # refused
    step(array, rte=0.1)  # refused
    step(array, 0.1)
    Dense(array, 1.0)
