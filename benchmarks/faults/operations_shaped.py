"""Random operations that move elements: reshapes, slices, pads, concatenations."""

import random

import jax
import jax.numpy as jnp
from jax import lax

from ._data import Operand
from ._operations import (
    ALL,
    NUMBERS,
    Drawn,
    Shape,
    count,
    dimension,
    operation,
    size,
    with_size,
)


@operation((1, 4), ALL, weight=3)
class Reshape:
    @staticmethod
    def draw(draws: random.Random, shape: Shape) -> Drawn:
        choice = draws.random()
        if choice < 0.45 and len(shape) > 1:
            dim = draws.randrange(len(shape) - 1)
            merged = shape[dim] * shape[dim + 1]
            return {"to": [*shape[:dim], merged, *shape[dim + 2 :]]}, []
        if choice < 0.8:
            dim = dimension(draws, shape)
            divisors = [n for n in range(1, shape[dim] + 1) if shape[dim] % n == 0]
            major = draws.choice(divisors)
            split = (major, shape[dim] // major)
            return {"to": [*shape[:dim], *split, *shape[dim + 1 :]]}, []
        rest = count(shape)
        sizes = []
        for _ in range(draws.randint(0, 2)):
            divisors = [n for n in (1, 2, 3, 4, 6, 8) if rest % n == 0]
            sizes.append(draws.choice(divisors))
            rest //= sizes[-1]
        sizes.append(rest)
        draws.shuffle(sizes)
        return {"to": sizes}, []

    @staticmethod
    def apply(x, to):
        return x.reshape(to)


@operation((1, 4), ALL, weight=2)
class Slice:
    @staticmethod
    def draw(draws: random.Random, shape: Shape) -> Drawn:
        low = []
        for extent in shape:
            starts_at_zero = draws.random() >= 0.5
            low.append(0 if starts_at_zero else draws.randrange(extent))
        high = []
        for start, extent in zip(low, shape, strict=True):
            high.append(draws.randint(start + 1, extent))
            if draws.random() < 0.5:
                high[-1] = extent
        strides = [draws.choice((1, 1, 1, 2, 3)) for _ in shape]
        return {"low": low, "high": high, "strides": strides}, []

    @staticmethod
    def apply(x, low, high, strides):
        return lax.slice(x, low, high, strides)


@operation(weight=2)
class Concatenate:
    @staticmethod
    def draw(draws: random.Random, shape: Shape) -> Drawn:
        dim = dimension(draws, shape)
        others = [
            Operand(with_size(shape, dim, size(draws)))
            for _ in range(draws.choice((1, 1, 2)))
        ]
        parameters = {
            "dim": dim,
            "with_itself": draws.random() < 0.4,
            "low": draws.randint(0, shape[dim] - 1),
        }
        return parameters, others

    @staticmethod
    def apply(x, *others, dim, with_itself, low):
        parts = [x, *(other.astype(x.dtype) for other in others)]
        if with_itself:
            parts = [lax.slice_in_dim(x, low, x.shape[dim], axis=dim), *parts]
        return lax.concatenate(parts, dim)


@operation(weight=2)
class Pad:
    @staticmethod
    def draw(draws: random.Random, shape: Shape) -> Drawn:
        padding = []
        for extent in shape:
            amounts = [0, 0, 0]
            if draws.random() < 0.6:
                edges = (-2, -1, 0, 1, 2, 3)
                amounts = [draws.choice(edges), draws.choice(edges)]
                amounts.append(draws.choice((0, 0, 0, 1, 2)))
            if extent + (extent - 1) * amounts[2] + amounts[0] + amounts[1] < 1:
                amounts = [0, 0, 0]
            padding.append(amounts)
        return {"padding": padding, "value": draws.choice((0, 1))}, []

    @staticmethod
    def apply(x, padding, value):
        amounts = [tuple(amount) for amount in padding]
        return lax.pad(x, jnp.array(value, x.dtype), amounts)


@operation((1, 4), ALL, weight=1.5)
class Move:
    @staticmethod
    def draw(draws: random.Random, shape: Shape) -> Drawn:
        order = list(range(len(shape)))
        draws.shuffle(order)
        kinds = ("transpose", "flip", "roll", "roll", "tile", "repeat")
        parameters = {
            "kind": draws.choice(kinds),
            "order": order,
            "dim": dimension(draws, shape),
            "amount": draws.choice((-3, -1, 1, 2, 5)),
        }
        return parameters, []

    @staticmethod
    def apply(x, kind, order, dim, amount):
        if kind == "transpose":
            return jnp.transpose(x, order)
        if kind == "flip":
            return jnp.flip(x, dim)
        if kind == "roll":
            return jnp.roll(x, amount, dim)
        if kind == "tile":
            repeats = [1] * x.ndim
            repeats[dim] = 2
            return jnp.tile(x, repeats)
        return jnp.repeat(x, abs(amount), axis=dim)


@operation((1, 3))
class Stack:
    @staticmethod
    def draw(draws: random.Random, shape: Shape) -> Drawn:
        parameters = {
            "kind": draws.choice(("stack", "halves", "interleave")),
            "place": draws.randint(0, len(shape)),
            "dim": dimension(draws, shape),
        }
        return parameters, [Operand(shape)]

    @staticmethod
    def apply(x, other, kind, place, dim):
        other = other.astype(x.dtype)
        if kind == "stack":
            return jnp.stack([x, other], place)
        if kind == "interleave":
            return jnp.stack([x, other], x.ndim).reshape(*x.shape[:-1], -1)
        if x.shape[dim] % 2:
            return x + other
        left, right = jnp.split(x, 2, dim)
        return jnp.concatenate([-right, left], dim) * other


@operation((2, 3), ("float32", "int32"))
class Diagonal:
    @staticmethod
    def draw(draws: random.Random, shape: Shape) -> Drawn:
        kind = draws.choice(("diagonal", "trace", "tril", "triu"))
        return {"kind": kind, "offset": draws.choice((-1, 0, 1))}, []

    @staticmethod
    def apply(x, kind, offset):
        if kind in ("tril", "triu"):
            return getattr(jnp, kind)(x, offset)
        return getattr(jnp, kind)(x, axis1=-2, axis2=-1)


@operation((2, 3), ("float32",), weight=0.7)
class Resize:
    @staticmethod
    def draw(draws: random.Random, shape: Shape) -> Drawn:
        to = []
        for extent in shape:
            is_kept = draws.random() < 0.5
            to.append(extent if is_kept else size(draws))
        return {"to": to, "method": draws.choice(("nearest", "linear", "cubic"))}, []

    @staticmethod
    def apply(x, to, method):
        return jax.image.resize(x, to, method)


@operation((1, 4), NUMBERS)
class Elementwise:
    @staticmethod
    def draw(draws: random.Random, shape: Shape) -> Drawn:
        rank = draws.randint(1, len(shape))
        return {}, [Operand(shape[-rank:])]

    @staticmethod
    def apply(x, other):
        other = other.astype(x.dtype)
        return jnp.maximum(x * 2 + other, jnp.minimum(x, other) - 1)
