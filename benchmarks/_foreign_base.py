"""What a model of another library is for the benchmark, and the data that it learns
from.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


BATCH = 8
KEY = 7


class Model(NamedTuple):
    """A model, what it learns from, and its loss: `loss(model, *batch)`."""

    model: Any
    loss: Callable[..., jax.Array]
    batch: tuple[Any, ...]


def random_normal(*shape: int, seed: int = 1) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def random_tokens(*shape: int, most: int = 64) -> jax.Array:
    return jax.random.randint(jax.random.key(2), shape, 0, most)


def labels_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.mean(losses)
