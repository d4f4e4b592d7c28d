"""Models of `models.py` that are written in flax."""

from typing import Any

import flax.linen as nn
import jax
import optax
from models import Struct, f32, sgd, trained


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x))
        normed = nn.LayerNorm()(x)
        return x + nn.Dense(64)(nn.gelu(nn.Dense(256)(normed)))


class _Net(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(1000, 64)(tokens)
        x = x + self.param("pos", nn.initializers.zeros, (16, 64))
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
        return optax.softmax_cross_entropy_with_integer_labels(
            net.apply(variables, tokens), tokens
        ).mean()

    return trained(loss, optimizer), variables, state, tokens


class _Convolutions(nn.Module):
    @nn.compact
    def __call__(self, x):
        convolved = nn.relu(nn.Conv(32, (3, 3))(x))
        x = nn.avg_pool(convolved, (2, 2), (2, 2))
        x = nn.Conv(32, (3, 3), feature_group_count=32)(x)
        convolved = nn.relu(nn.Conv(64, (3, 3))(x))
        x = nn.max_pool(convolved, (2, 2), (2, 2))
        flat = x.reshape(x.shape[0], -1)
        return nn.Dense(10)(nn.relu(nn.Dense(128)(flat)))


def convolutions() -> tuple[Any, ...]:
    net: Any = _Convolutions()
    images = f32(8, 16, 16, 3)
    variables = jax.eval_shape(net.init, jax.random.key(0), images)

    def loss(variables, images, labels):
        return optax.softmax_cross_entropy_with_integer_labels(
            net.apply(variables, images), labels
        ).mean()

    return sgd(loss), variables, images, Struct((8,), "int32")
