"""Random programs that a predicate of a fault selects: how many of them are wrong.
`python -m benchmarks.fault_samples COUNT [FAULT ...]` prints a line of JSON for each.
"""

import functools as ft
import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from shardfx._step.faults import Fault, fault_records, matches_array
from shardfx.cost import shardings
from tests.step.repros._run import CLOSE, Case, apart, emulate, normal, placed


_MESH = {"data": 2, "fsdp": 2, "tensor": 2}
_ACTIVATIONS: Mapping[str, Callable[[Any], Any]] = {
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
}


def residual(rng: random.Random) -> Case:
    """Residual blocks of one square matrix each: rows or sequences, with a norm or
    without, scanned or not.
    """
    width = rng.choice([16, 32, 64, 96])
    depth = rng.choice([2, 3, 4])
    rows = rng.choice([8, 16, 32, 64])
    length = rng.choice([0, 0, 4, 8])
    activation = _ACTIVATIONS[rng.choice([*_ACTIVATIONS])]
    is_normed = rng.random() < 0.5
    is_scanned = rng.random() < 0.3

    def block(x, w):
        if is_normed:
            y = x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        else:
            y = x
        return x + activation(y @ w)

    def loss(x, stack):
        if is_scanned:
            x = jax.lax.scan(lambda x, w: (block(x, w), None), x, stack)[0]
        else:
            x = ft.reduce(block, stack, x)
        return jnp.mean(jnp.sin(x)) + jnp.mean(x**2)

    x = normal(0, rows, *([length] if length else []), width)
    stack = normal(1, depth, width, width)
    spec = P(None, *rng.choice([("tensor", "fsdp"), ("fsdp", "tensor")]))
    step = jax.value_and_grad(loss, (0, 1))
    return Case(lambda mesh: step, (x, stack), _MESH, (_rows(rng), spec))


def convolutions(rng: random.Random) -> Case:
    """Two or three convolutions with strides, residual or not."""
    depth = rng.choice([2, 2, 3])
    channels = rng.choice([8, 16, 32])
    strides = [rng.choice([1, 1, 2]) for _ in range(depth)]
    window = rng.choice([3, 3, 5])
    is_residual = rng.random() < 0.5

    def loss(x, kernels):
        for kernel, stride in zip(kernels, strides, strict=True):
            y = jax.lax.conv_general_dilated(
                x,
                kernel,
                (stride, stride),
                "SAME",
                dimension_numbers=("NCHW", "OIHW", "NCHW"),
            )
            if stride == 1 and is_residual:
                x = jnp.sin(y) + x
            else:
                x = jnp.sin(y)
        return jnp.mean(jnp.cos(x))

    x = normal(0, rng.choice([8, 16]), channels, 8, 8)
    kernels = normal(1, depth, channels, channels, window, window)
    spec = P(None, *rng.choice([("tensor", "fsdp"), ("fsdp", "tensor")]))
    step = jax.value_and_grad(loss, (0, 1))
    return Case(lambda mesh: step, (x, kernels), _MESH, (_rows(rng), spec))


def grouped(rng: random.Random) -> Case:
    """A grouped convolution of images, with a stride or without."""
    channels = rng.choice([8, 16, 32])
    groups = rng.choice([2, 4, channels, channels])
    stride = rng.choice([1, 1, 2])
    window = rng.choice([1, 3, 5])

    def loss(x, kernel):
        y = jax.lax.conv_general_dilated(
            x,
            kernel,
            (stride, stride),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )
        return jnp.mean(jnp.cos(y))

    x = normal(0, rng.choice([8, 16]), 8, 8, channels)
    kernel = normal(1, window, window, channels // groups, channels)
    step = jax.value_and_grad(loss, (0, 1))
    return Case(lambda mesh: step, (x, kernel), _MESH, (_rows(rng), P()))


def _rows(rng: random.Random) -> P:
    return rng.choice([P(("data", "fsdp")), P(("data", "fsdp")), P("data"), P("fsdp")])


_PROGRAMS = {
    "conv-channels": convolutions,
    "conv-groups": grouped,
    "residual-order": residual,
}


def main(count: int, names: Sequence[str]) -> None:
    emulate()
    for fault in fault_records():
        if fault.id not in (names or _PROGRAMS):
            continue
        wrong = 0
        for seed in range(count):
            case = _PROGRAMS[fault.id](random.Random(seed))
            assert _is_selected(fault, case)
            wrong += apart(case) > CLOSE
        row = {"fault": fault.id, "flagged": count, "wrong": int(wrong)}
        print(json.dumps(row), flush=True)


def _is_selected(fault: Fault, case: Case) -> bool:
    """Whether a predicate of a fault selects a program."""
    if fault.arrays is None:
        jitted, *structs = placed(case)
        sentences = shardings(jitted, *structs, compiler="cpu").known_faults
        return any(fault.pattern in sentence for sentence in sentences)
    shape = case.args[1].shape[1:]
    spec = case.specs[1][1:]
    cuts = [(axis,) for axis in spec] + [()] * (len(shape) - len(spec))
    return matches_array(fault.arrays, shape, cuts, case.mesh) is not None


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
