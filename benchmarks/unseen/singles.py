"""A hundred single operations, forward or gradient, each under layouts drawn by chance
from its name.
"""

import functools
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._case import AnyMesh, Case, Made, on


CPU = {"a": 4, "b": 2}
V5E = {"a": 4, "b": 4}
# What every drawn cut divides on both meshes.
CUTS = {"a": 4, "b": 4}


def drawn(chance: random.Random, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """A spec: each axis in one of the dimensions that it divides, or in none, in either
    order.
    """
    spec: list[tuple[str, ...]] = [() for _ in shape]
    sizes = list(shape)
    for axis in chance.sample(sorted(CUTS), len(CUTS)):
        fitting = [dim for dim, size in enumerate(sizes) if size % CUTS[axis] == 0]
        if fitting and chance.random() < 0.8:
            dim = chance.choice(fitting)
            spec[dim] += (axis,)
            sizes[dim] //= CUTS[axis]
    return tuple(_entry(names) for names in spec)


def _entry(names: tuple[str, ...]) -> str | tuple[str, ...] | None:
    """The mesh axes of a dimension as an entry of a `PartitionSpec`."""
    if len(names) == 1:
        return names[0]
    return names or None


def single(
    name: str, function: Callable[..., Any], *operands: Any, out: bool = True
) -> Case:
    """The case of one operation: an operand is a shape, for floats, or a pair of a
    shape and a dtype.

    Floats are bfloat16 in two of five cases; two of five results of one array have a
    drawn layout, too.
    """
    chance = random.Random(name)
    dtype = jnp.bfloat16 if chance.random() < 0.4 else jnp.float32
    pairs = []
    for operand in operands:
        has_dtype = operand and isinstance(operand[0], tuple)
        pairs.append(operand if has_dtype else (operand, dtype))
    specs = [drawn(chance, shape) for shape, _ in pairs]
    while not any(any(spec) for spec in specs):
        specs = [drawn(chance, shape) for shape, _ in pairs]

    def make(mesh: AnyMesh) -> Made:
        struct = on(mesh)
        structs = tuple(
            struct(shape, *spec, dtype=kind)
            for (shape, kind), spec in zip(pairs, specs, strict=True)
        )
        result = jax.eval_shape(function, *structs)
        generator = random.Random(name + " out")
        placed = None
        if (
            out
            and isinstance(result, jax.ShapeDtypeStruct)
            and generator.random() < 0.4
        ):
            placed = struct(result.shape, *drawn(generator, result.shape)).sharding
        return jax.jit(function, out_shardings=placed), structs

    return Case(name, make, CPU, V5E)


def grad(function: Callable[..., Any], *argnums: int) -> Callable[..., Any]:
    """The gradient of a sum of sines of the result."""

    def loss(*operands):
        return jnp.sum(jnp.sin(function(*operands).astype(jnp.float32)))

    return jax.grad(loss, argnums=argnums[0] if len(argnums) == 1 else argnums or 0)


def conv(x: Any, w: Any, numbers: str = "NHWC", **options: Any) -> Any:
    """A convolution, whose kernel's dimensions are ordered as its images' are."""
    order = {
        "NHWC": "HWIO",
        "NCHW": "OIHW",
        "NWC": "WIO",
        "NDHWC": "DHWIO",
    }[numbers]
    options = {"window_strides": (1,) * (x.ndim - 2), "padding": "SAME", **options}
    return lax.conv_general_dilated(
        x, w, dimension_numbers=(numbers, order, numbers), **options
    )


def pool(x: Any, start: float, operation: Any, size: int, stride: int) -> Any:
    """Windows over the two middle dimensions."""
    window = (1, size, size, 1)
    strides = (1, stride, stride, 1)
    return lax.reduce_window(
        x, np.array(start, x.dtype), operation, window, strides, "SAME"
    )


def ints(*shape: int) -> tuple[tuple[int, ...], Any]:
    return shape, jnp.int32


def floats(*shape: int) -> tuple[tuple[int, ...], Any]:
    return shape, jnp.float32


def bools(*shape: int) -> tuple[tuple[int, ...], Any]:
    return shape, jnp.bool_


def space_to_depth(x: Any) -> Any:
    n, h, w, c = x.shape
    return (
        x.reshape(n, h // 2, 2, w // 2, 2, c)
        .transpose(0, 1, 3, 2, 4, 5)
        .reshape(n, h // 2, w // 2, 4 * c)
    )


def power(x: Any, v: Any) -> Any:
    return lax.while_loop(
        lambda c: c[0] < 6, lambda c: (c[0] + 1, jnp.tanh(x @ c[1])), (0, v)
    )[1]


def sliding(x: Any) -> Any:
    step = lambda i, total: total + lax.dynamic_slice_in_dim(x, 4 * i, 16, 0)
    return lax.fori_loop(0, 8, step, jnp.zeros((16, x.shape[1]), x.dtype))


def shifted_mean(x: Any) -> Any:
    return lax.scan(
        lambda carry, row: (0.9 * carry + row, carry - row), jnp.zeros_like(x[0]), x
    )[1]


def affine(first: Any, second: Any) -> Any:
    return first[0] * second[0], first[1] * second[0] + second[1]


def recurrence(x: Any, y: Any) -> Any:
    return lax.associative_scan(affine, (x, y), axis=1)[1]


def grouped(x: Any, w: Any) -> Any:
    return conv(x, w, feature_group_count=4)


def attend(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.softmax(q @ k.mT, -1) @ v


def layer_norm(x: Any, scale: Any) -> Any:
    return jax.nn.standardize(x) * scale


def put(x: Any, start: Any, value: Any) -> Any:
    return lax.dynamic_update_slice(x, value, (start, start))


def windows(x: Any, start: Any) -> Any:
    return jax.vmap(lambda row, start: lax.dynamic_slice_in_dim(row, start, 8))(
        x, start
    )


reshapes = (
    single("reshape-merge-leading", lambda x: x.reshape(-1, 64) * 2, (16, 32, 64)),
    single("reshape-merge-trailing", lambda x: x.reshape(32, -1) + 1, (32, 16, 32)),
    single("reshape-split", lambda x: jnp.sin(x.reshape(16, 16, 64)), (256, 64)),
    single("reshape-flatten", lambda x: x.ravel() * 3, (32, 64)),
    single("reshape-regroup", lambda x: x.reshape(32, 48).T, (48, 32)),
    single(
        "reshape-fused-heads",
        lambda x: jnp.moveaxis(x.reshape(16, 32, 3, 4, 16), 2, 0),
        (16, 32, 192),
    ),
    single(
        "reshape-merge-gradient",
        grad(lambda x, w: x.reshape(-1, 64) @ w, 0, 1),
        (16, 16, 64),
        (64, 32),
    ),
    single("space-to-depth", space_to_depth, (8, 16, 16, 32)),
    single("transpose-three", lambda x: x.transpose(2, 0, 1), (16, 32, 64)),
    single(
        "swap-and-merge",
        lambda x: x.swapaxes(1, 2).reshape(16, 32, -1),
        (16, 8, 32, 16),
    ),
    single(
        "broadcast-outer-sum", lambda x, y: x[:, None] + y[None], (64, 32), (16, 32)
    ),
    single("tile", lambda x: jnp.tile(x, (2, 3)), (32, 48)),
    single("repeat", lambda x: jnp.repeat(x, 4, axis=1), (32, 16, 8)),
    single(
        "bitcast-to-bytes",
        lambda x: lax.bitcast_convert_type(x, jnp.uint8),
        floats(64, 32),
    ),
)
waves = (
    single("fft-last", lambda x: jnp.abs(jnp.fft.fft(x)), floats(32, 64)),
    single(
        "fft-first-of-complex",
        lambda x: jnp.fft.fft(x, axis=0),
        ((64, 32), jnp.complex64),
    ),
    single(
        "rfft-two-dimensions",
        lambda x: jnp.fft.rfft2(x, axes=(1, 2)),
        floats(16, 32, 32),
    ),
    single("irfft", lambda x: jnp.fft.irfft(x[:, :33]), ((32, 64), jnp.complex64)),
    single("rfft-gradient", grad(lambda x: jnp.abs(jnp.fft.rfft(x))), floats(32, 128)),
    single(
        "complex-product",
        lambda x, y: jnp.einsum("ij,jk->ik", x, jnp.conj(y)),
        *[((64, 64), jnp.complex64)] * 2,
    ),
)
orders = (
    single("roll-one", lambda x: jnp.roll(x, 5, 1), (32, 64)),
    single("roll-two", lambda x: jnp.roll(x, (3, -1), (0, 1)), (64, 64)),
    single("roll-by-argument", lambda x, n: jnp.roll(x, n, 0), (64, 32), ints()),
    single("flip", lambda x: jnp.flip(x, 0), (64, 32)),
    single(
        "reverse-gradient",
        grad(lambda x, y: lax.rev(x, (0, 1)) * y, 0),
        (32, 64),
        (32, 64),
    ),
    single("sort-last", jnp.sort, (32, 128)),
    single(
        "sort-pairs-first",
        lambda x, y: lax.sort((x, y), dimension=0, num_keys=1),
        (128, 16),
        (128, 16),
    ),
    single("sort-gradient", grad(lambda x: jnp.sort(x, axis=0)), (64, 32)),
    single("top-k", lambda x: lax.top_k(x, 8), (32, 256)),
    single("top-k-gradient", grad(lambda x: lax.top_k(x, 8)[0]), (32, 256)),
    single("argmax", lambda x: jnp.argmax(x, 1), (64, 128)),
    single("median", lambda x: jnp.median(x, axis=0), floats(64, 32)),
    single("searchsorted", jnp.searchsorted, floats(256), floats(64, 16)),
)
sums = (
    single("cumsum", lambda x: jnp.cumsum(x, 0), (64, 128)),
    single(
        "cumsum-gradient",
        grad(lambda x, y: jnp.cumsum(x, 1) * y, 0, 1),
        (32, 64),
        (32, 64),
    ),
    single("cummax-reverse", lambda x: lax.cummax(x, 0, reverse=True), (64, 64)),
    single("cumlogsumexp", lambda x: lax.cumlogsumexp(x, 1), floats(64, 64)),
    single(
        "associative-scan",
        lambda x, y: lax.associative_scan(affine, (x, y), axis=1)[1],
        (16, 64, 32),
        (16, 64, 32),
    ),
    single("logsumexp-gradient", grad(lambda x: jax.nn.logsumexp(x, -1)), (64, 128)),
    single("layer-norm-gradient", grad(layer_norm, 0, 1), (64, 128), (128,)),
    single("variance-of-two", lambda x: jnp.var(x, (0, 2)), (32, 16, 64)),
    single("scan-over-rows", shifted_mean, (64, 32)),
    single("scan-gradient", grad(shifted_mean), (32, 16, 32)),
)
gathers = (
    single("take-rows", lambda x, i: x[i], (512, 64), ints(128)),
    single("take-rows-gradient", grad(lambda x, i: x[i]), (512, 64), ints(16, 16)),
    single("take-columns", lambda x, i: jnp.take(x, i, axis=1), (64, 256), ints(32)),
    single(
        "take-along", lambda x, i: jnp.take_along_axis(x, i, 1), (64, 128), ints(64, 16)
    ),
    single(
        "take-along-gradient",
        grad(lambda x, i: jnp.take_along_axis(x, i, 0)),
        (128, 32),
        ints(16, 32),
    ),
    single("gather-pairs", lambda x, i, j: x[i, j], (64, 128, 16), ints(64), ints(64)),
    single(
        "gather-batched",
        lambda x, i: jax.vmap(lambda row, position: row[position])(x, i),
        (32, 64, 16),
        ints(32, 8),
    ),
    single(
        "gather-outer", lambda x, i, j: x[i[:, None], j], (64, 128), ints(16), ints(32)
    ),
    single(
        "dynamic-slice",
        lambda x, i: lax.dynamic_slice(x, (i, i), (16, 32)),
        (64, 128),
        ints(),
    ),
    single(
        "dynamic-slice-gradient",
        grad(lambda x, i: lax.dynamic_slice(x, (0, i), (64, 32))),
        (64, 128),
        ints(),
    ),
    single("dynamic-slice-batched", windows, (64, 64, 4), ints(64)),
    single("slice-uneven", lambda x: x[3:50, 1:], (64, 64)),
    single("slice-strided", lambda x: x[::2, ::3], (64, 96)),
    single("slice-strided-gradient", grad(lambda x: x[1::2]), (64, 32)),
    single("split-in-three", lambda x: jnp.split(x, 3, axis=1), (32, 192)),
)
scatters = (
    single("dynamic-update-slice", put, (128, 64), ints(), (16, 16)),
    single(
        "dynamic-update-slice-gradient", grad(put, 0, 2), (64, 64), ints(), (32, 16)
    ),
    single("set-rows", lambda x, i, v: x.at[i].set(v), (256, 64), ints(32), (32, 64)),
    single(
        "set-one-for-each",
        lambda x, i, v: x.at[jnp.arange(32), i].set(v),
        (32, 64, 16),
        ints(32),
        (32, 16),
    ),
    single(
        "add-pairs",
        lambda x, i, j, v: x.at[i, j].add(v),
        (64, 64),
        ints(256),
        ints(256),
        (256,),
    ),
    single(
        "maximum-at", lambda x, i, v: x.at[:, i].max(v), (64, 128), ints(16), (64, 16)
    ),
    single(
        "segment-sum",
        lambda x, i: jax.ops.segment_sum(x, i, 64),
        (1024, 32),
        ints(1024),
    ),
    single(
        "segment-max-gradient",
        grad(lambda x, i: jax.ops.segment_max(x, i, 64)),
        (512, 16),
        ints(512),
    ),
    single("bincount", lambda i: jnp.bincount(i, length=128), ints(4096)),
    single(
        "nonzero-of-a-size",
        lambda m, x: x[jnp.nonzero(m, size=64)[0]],
        bools(256),
        (256, 32),
    ),
)
convolutions = (
    single(
        "conv-nchw",
        functools.partial(conv, numbers="NCHW"),
        (8, 16, 32, 32),
        (32, 16, 3, 3),
    ),
    single(
        "conv-strided",
        functools.partial(conv, window_strides=(2, 2)),
        (8, 32, 32, 16),
        (5, 5, 16, 16),
    ),
    single("conv-gradient", grad(conv, 0, 1), (8, 16, 16, 16), (3, 3, 16, 16)),
    single(
        "conv-valid-dilated",
        functools.partial(conv, padding="VALID", rhs_dilation=(2, 2)),
        (8, 32, 32, 8),
        (3, 3, 8, 16),
    ),
    single(
        "conv1d-causal",
        functools.partial(conv, numbers="NWC", padding=[(3, 0)]),
        (16, 128, 32),
        (4, 32, 32),
    ),
    single(
        "conv-depthwise",
        functools.partial(conv, feature_group_count=32),
        (8, 16, 16, 32),
        (3, 3, 1, 32),
    ),
    single(
        "conv-grouped-gradient",
        grad(functools.partial(conv, feature_group_count=4), 1),
        (8, 16, 16, 32),
        (3, 3, 8, 32),
    ),
    single(
        "conv-transposed",
        lambda x, w: lax.conv_transpose(x, w, (2, 2), "SAME"),
        (8, 16, 16, 16),
        (4, 4, 16, 8),
    ),
    single(
        "conv3d",
        functools.partial(conv, numbers="NDHWC"),
        (4, 8, 16, 16, 8),
        (3, 3, 3, 8, 16),
    ),
    single(
        "convolve-signals",
        lambda x, w: jnp.convolve(x, w, mode="same"),
        floats(1024),
        floats(16),
    ),
    single(
        "pool-max-gradient",
        grad(lambda x: pool(x=x, start=-np.inf, operation=lax.max, size=3, stride=2)),
        (8, 32, 32, 16),
    ),
    single(
        "pool-mean-gradient",
        grad(lambda x: pool(x=x, start=0, operation=lax.add, size=3, stride=1)),
        (8, 16, 16, 16),
    ),
    single(
        "resize-linear",
        lambda x: jax.image.resize(x, (8, 32, 48, 16), "linear"),
        (8, 16, 16, 16),
    ),
    single(
        "resize-nearest-gradient",
        grad(lambda x: jax.image.resize(x, (4, 32, 32, 16), "nearest")),
        (4, 16, 16, 16),
    ),
)
products = (
    single("matmul", jnp.matmul, (64, 128), (128, 256)),
    single("matmul-gradient", grad(jnp.matmul, 0, 1), (128, 64), (64, 128)),
    single(
        "batched-matmul",
        lambda x, y: jnp.einsum("bij,bjk->bki", x, y),
        (16, 32, 64),
        (16, 64, 32),
    ),
    single("attention", attend, (8, 4, 32, 16), (8, 4, 32, 16), (8, 4, 32, 16)),
    single(
        "attention-gradient",
        grad(attend, 0, 1, 2),
        (8, 4, 32, 16),
        (8, 4, 32, 16),
        (8, 4, 32, 16),
    ),
    single(
        "contract-two",
        lambda x, y: jnp.einsum("abij,ijc->cab", x, y),
        (16, 8, 16, 16),
        (16, 16, 64),
    ),
    single("trace-and-diagonal", lambda x: jnp.trace(x) + jnp.diagonal(x, 1), (64, 64)),
    single("power-by-while", power, (64, 64), (64, 16)),
    single(
        "map-over-rows",
        lambda x, w: lax.map(lambda row: jnp.tanh(row @ w), x),
        (16, 32, 64),
        (64, 64),
    ),
)
rests = (
    single("concatenate", lambda x, y: jnp.concatenate([x, y]), (64, 32), (32, 32)),
    single(
        "concatenate-gradient",
        grad(lambda x, y: jnp.concatenate([x, y], 1), 0, 1),
        (32, 64),
        (32, 32),
    ),
    single("pad", lambda x: jnp.pad(x, ((1, 0), (2, 3))), (64, 32)),
    single(
        "pad-inside",
        lambda x: lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 1), (-2, 2, 0))),
        (32, 64),
    ),
    single(
        "pad-reflect-gradient",
        grad(lambda x: jnp.pad(x, ((2, 2), (0, 0)), "reflect")),
        (32, 32),
    ),
    single("sliding-sum", sliding, (64, 32)),
    single(
        "random-normal",
        lambda key, x: x + jax.random.normal(key, x.shape, x.dtype),
        ((2,), jnp.uint32),
        (64, 64),
    ),
    single(
        "cholesky",
        lambda x: jnp.linalg.cholesky(x + 64 * jnp.eye(16)),
        floats(32, 16, 16),
    ),
    single(
        "cond-of-layouts",
        lambda c, x, y: lax.cond(c, jnp.matmul, jnp.add, x, y),
        bools(),
        (64, 64),
        (64, 64),
    ),
)
CASES = (
    *reshapes,
    *waves,
    *orders,
    *sums,
    *gathers,
    *scatters,
    *convolutions,
    *products,
    *rests,
)
