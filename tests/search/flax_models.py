"""Models of `models.py` that are written in flax."""

from typing import Any

import flax.linen as nn
import jax
import optax
from models import Struct, f32, sgd, trained


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        normed = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(normed)
        normed = nn.LayerNorm()(x)
        # Flax numbers layers in the order in which they are made.
        last_layer = nn.Dense(64)
        hidden = nn.Dense(256)(normed)
        return x + last_layer(nn.gelu(hidden))


class _Net(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(1000, 64)(tokens)
        positions = self.param("pos", nn.initializers.zeros, (16, 64))
        x = x + positions
        for _ in range(2):
            x = Block()(x)
        return nn.Dense(1000)(x)


def transformer() -> tuple[Any, ...]:
    net: Any = _Net()
    tokens = Struct((8, 16), "int32")
    optimizer = optax.adamw(1e-3)
    variables = jax.eval_shape(net.init, jax.random.key(0), tokens)
    state = jax.eval_shape(optimizer.init, variables)

    def loss(variables, tokens):
        logits = net.apply(variables, tokens)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
        return losses.mean()

    step = trained(loss, optimizer)
    return step, variables, state, tokens


class _Convolutions(nn.Module):
    @nn.compact
    def __call__(self, x):
        convolved = nn.Conv(32, (3, 3))(x)
        x = nn.avg_pool(nn.relu(convolved), (2, 2), (2, 2))
        x = nn.Conv(32, (3, 3), feature_group_count=32)(x)
        convolved = nn.Conv(64, (3, 3))(x)
        x = nn.max_pool(nn.relu(convolved), (2, 2), (2, 2))
        flat = x.reshape(x.shape[0], -1)
        last_layer = nn.Dense(10)
        hidden = nn.Dense(128)(flat)
        return last_layer(nn.relu(hidden))


def convolutions() -> tuple[Any, ...]:
    net: Any = _Convolutions()
    images = f32(8, 16, 16, 3)
    variables = jax.eval_shape(net.init, jax.random.key(0), images)

    def loss(variables, images, labels):
        logits = net.apply(variables, images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean()

    labels = Struct((8,), "int32")
    return sgd(loss), variables, images, labels
