"""Random operations that sum, reduce, scan or loop: products, convolutions, windows."""

import random

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._data import Operand
from ._operations import (
    ALL,
    FLOATS,
    Drawn,
    Shape,
    count,
    dimension,
    operation,
    size,
)
from .bank_sequence import affine_scan


@operation((2, 4), ALL, weight=2)
class Dot:
    @staticmethod
    def draw(draws: random.Random, shape: Shape) -> Drawn:
        kinds = [draws.choice("bckk") for _ in shape]
        if "c" not in kinds:
            kinds[draws.randrange(len(kinds))] = "c"
        batch = [dim for dim, kind in enumerate(kinds) if kind == "b"]
        contracted = [dim for dim, kind in enumerate(kinds) if kind == "c"]
        free_count = min(draws.choice((0, 1, 1, 2)), 4 - len(batch) - len(contracted))
        labels: list[tuple[str, int]] = [("batch", n) for n in range(len(batch))]
        labels += [("contracted", n) for n in range(len(contracted))]
        labels += [("free", n) for n in range(max(0, free_count))]
        draws.shuffle(labels)
        sizes = []
        for kind, number in labels:
            dims = {"batch": batch, "contracted": contracted}.get(kind)
            sizes.append(size(draws) if dims is None else shape[dims[number]])
        other_contracted = [
            labels.index(("contracted", n)) for n in range(len(contracted))
        ]
        other_batch = [labels.index(("batch", n)) for n in range(len(batch))]
        numbers = [[contracted, other_contracted], [batch, other_batch]]
        return {"numbers": numbers}, [Operand(tuple(sizes))]

    @staticmethod
    def apply(x, other, numbers):
        (left, right), (left_batch, right_batch) = numbers
        dims = (tuple(left), tuple(right)), (tuple(left_batch), tuple(right_batch))
        return lax.dot_general(x, other, dims)


@operation((3, 4), FLOATS, weight=5)
class Convolution:
    @staticmethod
    def draw(draws: random.Random, shape: Shape) -> Drawn:
        spatial = "HW"[: len(shape) - 2]
        letters = draws.choice((f"NC{spatial}", f"N{spatial}C"))
        extents = dict(zip(letters, shape, strict=True))
        groups, batch_groups = _groups(draws, extents["C"], extents["N"])
        outputs = draws.choice((2, 4, 8, 8, 16, 3, 6))
        if outputs % (groups * batch_groups):
            outputs = groups * batch_groups * draws.choice((1, 2))
        kernel = {"O": outputs, "I": extents["C"] // groups}
        dilation = [draws.choice((1, 1, 1, 1, 1, 2)) for _ in spatial]
        kernel_dilation = [draws.choice((1, 1, 1, 2)) for _ in spatial]
        padding = []
        for place, letter in enumerate(spatial):
            low = draws.choice((0, 1, 1, 2, 0, 1, 1, 2, 0, 1, 1, -1))
            padding.append([low, draws.choice((0, 1, 1, 2))])
            width = draws.choice((1, 2, 3, 3, 4))
            padded = (extents[letter] - 1) * dilation[place] + 1 + sum(padding[-1])
            kernel[letter] = width
            if padded < (width - 1) * kernel_dilation[place] + 1:
                kernel[letter] = 1
        kernel_letters = draws.choice((f"OI{spatial}", f"{spatial}IO"))
        parameters = {
            "letters": [letters, kernel_letters, letters],
            "groups": groups,
            "batch_groups": batch_groups,
            "strides": [draws.choice((1, 1, 2, 3)) for _ in spatial],
            "dilation": dilation,
            "kernel_dilation": kernel_dilation,
            "padding": padding,
        }
        kernel_shape = tuple(kernel[letter] for letter in kernel_letters)
        return parameters, [Operand(kernel_shape)]

    @staticmethod
    def apply(
        x,
        kernel,
        letters,
        groups,
        batch_groups,
        strides,
        dilation,
        kernel_dilation,
        padding,
    ):
        return lax.conv_general_dilated(
            x,
            kernel,
            strides,
            [tuple(pair) for pair in padding],
            lhs_dilation=dilation,
            rhs_dilation=kernel_dilation,
            dimension_numbers=tuple(letters),
            feature_group_count=groups,
            batch_group_count=batch_groups,
        )


def _groups(draws: random.Random, channels: int, batch: int) -> tuple[int, int]:
    """Groups of features and of the batch; at most one of them is not 1."""
    choice = draws.random()
    if choice < 0.15:
        return channels, 1
    if choice < 0.27 and channels % 2 == 0:
        return 2, 1
    if choice < 0.35 and batch % 2 == 0:
        return 1, 2
    return 1, 1


@operation(weight=3)
class Window:
    @staticmethod
    def draw(draws: random.Random, shape: Shape) -> Drawn:
        sizes = [min(extent, draws.choice((1, 1, 2, 3))) for extent in shape]
        strides = []
        padding = []
        for width in sizes:
            is_wide = width > 1
            strides.append(draws.choice((1, 1, 2, 2, 3)) if is_wide else 1)
            pair = [draws.choice((0, 0, 1)), draws.choice((0, 0, 1))]
            padding.append(pair if is_wide else [0, 0])
        dilation = [1] * len(shape)
        if draws.random() < 0.25:
            dilation = [draws.choice((1, 1, 1, 2)) for _ in shape]
        parameters = {
            "sizes": sizes,
            "strides": strides,
            "padding": padding,
            "dilation": dilation,
            "kind": draws.choice(("max", "add", "min")),
        }
        return parameters, []

    @staticmethod
    def apply(x, sizes, strides, padding, dilation, kind):
        start = 0
        if kind != "add":
            is_float = jnp.issubdtype(x.dtype, jnp.floating)
            limits = jnp.finfo(x.dtype) if is_float else jnp.iinfo(x.dtype)
            start = limits.min if kind == "max" else limits.max
            # JAX knows a window's gradient by the value that it starts from.
            if is_float:
                start = -np.inf if kind == "max" else np.inf
        result = lax.reduce_window(
            x,
            np.array(start, x.dtype)[()],
            getattr(lax, kind),
            sizes,
            strides,
            [tuple(pair) for pair in padding],
            dilation,
        )
        # A window in the padding alone holds the start.
        return result if kind == "add" else jnp.clip(result, -1000, 1000)


@operation(weight=1.5)
class Cumulative:
    @staticmethod
    def draw(draws: random.Random, shape: Shape) -> Drawn:
        kinds = ("cumsum", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
        parameters = {
            "dim": dimension(draws, shape),
            "kind": draws.choice(kinds),
            "reverse": draws.random() < 0.4,
        }
        return parameters, []

    @staticmethod
    def apply(x, dim, kind, reverse):
        is_integer = x.dtype == jnp.int32
        if kind == "cumlogsumexp" and is_integer:
            kind = "cummax"
        if kind == "cumprod":
            x = 1 + x // 10 if is_integer else 1 + x / 8
        return getattr(lax, kind)(x, axis=dim, reverse=reverse)


@operation((2, 3), ("float32",), weight=1.2)
class AffineScan:
    @staticmethod
    def draw(draws: random.Random, shape: Shape) -> Drawn:
        return {}, [Operand(shape)]

    @staticmethod
    def apply(x, other):
        return affine_scan(jnp.tanh(x), other)


@operation(weight=1.5)
class Reduce:
    @staticmethod
    def draw(draws: random.Random, shape: Shape) -> Drawn:
        dims = sorted(draws.sample(range(len(shape)), draws.randint(1, len(shape))))
        kinds = ("sum", "max", "prod", "any", "var", "mean", "softmax", "logsumexp")
        parameters = {
            "dims": dims,
            "kind": draws.choice(kinds),
            "keeps": draws.random() < 0.5,
        }
        return parameters, []

    @staticmethod
    def apply(x, dims, kind, keeps):
        dims = tuple(dims)
        is_integer = x.dtype == jnp.int32
        if is_integer and kind in ("var", "mean", "softmax", "logsumexp"):
            kind = "sum"
        if kind == "softmax":
            return jax.nn.softmax(x, axis=dims)
        if kind == "logsumexp":
            return jax.nn.logsumexp(x, axis=dims, keepdims=keeps)
        if kind == "any":
            x = x > 1
        if kind == "prod":
            x = 1 + x // 10 if is_integer else 1 + x / 8
        return getattr(jnp, kind)(x, axis=dims, keepdims=keeps)


@operation((2, 3), ("float32",), weight=1.5)
class Scan:
    @staticmethod
    def draw(draws: random.Random, shape: Shape) -> Drawn:
        reverse = draws.random() < 0.3
        weight = Operand((shape[-1], shape[-1]))
        return {"reverse": reverse}, [Operand(shape[1:]), weight]

    @staticmethod
    def apply(x, state, weight, reverse):
        def step(state, x):
            state = jnp.tanh(state @ weight * 0.5 + x)
            return state, state * 2

        last, states = lax.scan(step, state, x, reverse=reverse)
        return states + last


@operation((2, 3), ("float32", "int32"), gradient=False)
class While:
    @staticmethod
    def draw(draws: random.Random, shape: Shape) -> Drawn:
        turns = draws.randint(1, 4)
        return {"turns": turns}, [Operand((1,), "below:4"), Operand((shape[-1],))]

    @staticmethod
    def apply(x, extra, bias, turns):
        def body(carry):
            turn, x = carry
            row = lax.dynamic_index_in_dim(x, turn, 0, keepdims=True)
            return turn + 1, jnp.roll(x, 1, 0) + bias.astype(x.dtype) + row

        limit = turns + extra[0]
        return lax.while_loop(lambda c: c[0] < limit, body, (jnp.int32(0), x))[1]


@operation((2, 3), ("float32",), weight=0.7)
class Switch:
    @staticmethod
    def draw(draws: random.Random, shape: Shape) -> Drawn:
        weight = Operand((shape[-1], shape[-1]))
        return {}, [Operand((1,), "below:3"), weight]

    @staticmethod
    def apply(x, branch, weight):
        branches = [
            lambda x: x @ weight,
            lambda x: jnp.flip(x, 0) * 2,
            lambda x: jnp.cumsum(x, -1),
        ]
        return lax.switch(branch[0], branches, x)


@operation((2, 3), ("float32",), weight=0.8)
class Map:
    @staticmethod
    def draw(draws: random.Random, shape: Shape) -> Drawn:
        weight = Operand((shape[-1], size(draws)))
        return {"batch_size": draws.choice((None, 2))}, [weight]

    @staticmethod
    def apply(x, weight, batch_size):
        return lax.map(lambda row: jnp.sin(row @ weight), x, batch_size=batch_size)


@operation((1, 3), ("float32", "complex64"), weight=1.2)
class Fft:
    @staticmethod
    def draw(draws: random.Random, shape: Shape) -> Drawn:
        kind = draws.choice(("fft", "ifft", "rfft"))
        return {"kind": kind, "dim": dimension(draws, shape)}, []

    @staticmethod
    def apply(x, kind, dim):
        real = x.real if kind == "rfft" else x
        return getattr(jnp.fft, kind)(real, axis=dim)


@operation((2, 3), ("float32",), weight=1.2)
class Linalg:
    @staticmethod
    def draw(draws: random.Random, shape: Shape) -> Drawn:
        kind = draws.choice(("cholesky", "triangular", "qr", "solve", "eigenvalues"))
        return {"kind": kind}, [Operand((*shape[:-1], 3))]

    @staticmethod
    def apply(x, other, kind):
        extent = x.shape[-2]
        spread = jnp.arange(1, extent + 1, dtype=x.dtype) * (3 + extent)
        square = jnp.einsum("...ij,...kj->...ik", x, x)
        square = square + jnp.eye(extent, dtype=x.dtype) * spread
        if kind == "cholesky":
            return jnp.linalg.cholesky(square)
        if kind == "triangular":
            return lax.linalg.triangular_solve(
                square, other, left_side=True, lower=True
            )
        if kind == "qr":
            return jnp.abs(jnp.linalg.qr(square)[1])
        if kind == "solve":
            return jnp.linalg.solve(square, other)
        return jnp.linalg.eigvalsh(square)


@operation((2, 2), ("float32",), weight=0.8)
class Ragged:
    @staticmethod
    def draw(draws: random.Random, shape: Shape) -> Drawn:
        groups = draws.choice((2, 4, 8, 3))
        limit = max(1, shape[0] // groups)
        weight = Operand((groups, shape[1], size(draws)))
        return {}, [weight, Operand((groups,), f"below:{limit}")]

    @staticmethod
    def apply(x, weight, sizes):
        result = lax.ragged_dot(x, weight, sizes)
        # What lies in no group is not specified.
        rows = jnp.arange(x.shape[0]) < jnp.sum(sizes)
        return jnp.where(rows[:, None], result, 0)


@operation((1, 3), ("float32",), gradient=False, weight=1.2)
class Random:
    @staticmethod
    def draw(draws: random.Random, shape: Shape) -> Drawn:
        kind = draws.choice(("uniform", "normal", "permutation", "split"))
        parameters = {"kind": kind, "dim": dimension(draws, shape)}
        return parameters, [Operand((1,), "below:9")]

    @staticmethod
    def apply(x, key, kind, dim):
        key = jax.random.fold_in(jax.random.key(3), key[0])
        if kind == "permutation":
            return jax.random.permutation(key, x, axis=dim)
        if kind == "split":
            keys = jax.random.split(key, x.shape[0])
            draw = lambda key: jax.random.uniform(key, x.shape[1:], jnp.float32)
            return jax.vmap(draw)(keys) + x
        # The same bits where 64 bits are the default.
        return getattr(jax.random, kind)(key, x.shape, jnp.float32) + x


MOST_ELEMENTS = 6000


def fits(shape: Shape) -> bool:
    """Whether an array is small enough for thousands of cases."""
    return 0 < count(shape) <= MOST_ELEMENTS
