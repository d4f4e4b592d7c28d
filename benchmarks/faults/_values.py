"""The numbers of a program's arguments."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from ._data import Operand, Program


def dtype_of(operand: Operand, dtype: str) -> Any:
    """The dtype of an operand in a program of this dtype."""
    return jnp.int32 if operand.is_index else jnp.dtype(dtype)


def arguments(program: Program, result_shape: tuple[int, ...]) -> list[np.ndarray]:
    """The arguments of the program, the cotangent last if it is a gradient. Floating
    numbers are those of the program's dtype.
    """
    draws = np.random.default_rng(7)
    arrays = []
    for operand in program.operands:
        values = _drawn(draws, operand, program.dtype)
        arrays.append(values.astype(dtype_of(operand, program.dtype)))
    if program.gradient:
        cotangent = draws.normal(size=result_shape)
        arrays.append(cotangent.astype(jnp.dtype(program.dtype)))
    return arrays


def _drawn(draws: np.random.Generator, operand: Operand, dtype: str) -> np.ndarray:
    shape = operand.shape
    kind, _, limit_text = operand.values.partition(":")
    if operand.is_index:
        return _indices(draws, kind, int(limit_text), shape)
    values = draws.normal(size=shape)
    if kind == "positive":
        return np.abs(values) + 0.1
    if kind == "mask":
        return values > 0
    if dtype == "int32":
        return draws.integers(-20, 20, shape)
    if dtype == "complex64":
        return values + 1j * draws.normal(size=shape)
    return values


def _indices(
    draws: np.random.Generator, kind: str, limit: int, shape: tuple[int, ...]
) -> np.ndarray:
    count = int(np.prod(shape))
    if kind == "below":
        return draws.integers(0, limit, shape)
    if kind == "permuted":
        return draws.permutation(limit)[:count].reshape(shape)
    if kind == "apart":
        return (np.arange(count) * 2 + limit - count).reshape(shape)
    if kind == "loose":
        if draws.random() < 0.6:
            return draws.integers(-limit - 3, 2 * limit + 3, shape)
        return draws.integers(-2, limit + 3, shape)
    assert kind == "index", kind
    return draws.integers(-limit, limit, shape)
