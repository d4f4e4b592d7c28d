"""The rounding of sums, whose summands devices add up in another order.

The error of a sum is a multiple of the sum of its summands' absolute values, not of its
result: a sum that cancels to 0 in one order is a tiny number in another.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from .._ground.spec import DType
from ._rounding import COARSE_UNITS, Noise, epsilon, lowest_bits, moved


# The operands whose numbers an equation adds up, by the name of its primitive.
_ADDED = {
    "reduce_sum": (0,),
    "cumsum": (0,),
    "reduce_window_sum": (0,),
    "scatter-add": (0, 2),
    "scatter-sub": (0, 2),
    "select_and_scatter_add": (0,),
}
# The operands of which an equation adds up products.
_MULTIPLIED = {
    "dot_general": (0, 1),
    "ragged_dot_general": (0, 1),
    "conv_general_dilated": (0, 1),
}


def reordered(
    equation: jex.JaxprEqn,
    operands: Sequence[Any],
    result: Any,
    evaluate: Callable[[Sequence[Any]], Any],
    noise: Noise,
    may_be_exact: bool,
) -> Any:
    """The result of an equation in float64 or complex128. If the equation adds up
    numbers, each sum is moved as far as another order of its summands may move it.

    `evaluate` returns the result of the equation for other operands. A sum without an
    error in any order, such as a sum of a few integers, is not moved; `may_be_exact`
    says whether there may be one.
    """
    result_type: Any = equation.outvars[0].aval
    dtype = result_type.dtype
    if not jnp.issubdtype(dtype, np.inexact):
        return result
    name = equation.primitive.name
    if name == "fft":
        # Each number of the result is a sum over all numbers of the operand.
        dims = tuple(range(-len(equation.params["fft_lengths"]), 0))
        largest = jnp.max(jnp.abs(result), dims, keepdims=True, initial=0.0)
        magnitudes = jnp.broadcast_to(largest, result.shape)
        distances = _epsilon(dtype, noise) * noise.units * magnitudes
        return moved(result, distances, noise)
    positions = {**_ADDED, **_MULTIPLIED}.get(name)
    if positions is None:
        return result

    absolute_operands = list(operands)
    for position in positions:
        operand = operands[position]
        absolute_operands[position] = jnp.abs(operand).astype(operand.dtype)
    if name == "scatter-sub":
        absolute_operands[2] = -absolute_operands[2]
    magnitudes = jnp.real(evaluate(absolute_operands))

    rounding = _epsilon(dtype, noise)
    # If one summand is added after the other, each sum up to there is rounded.
    worst_units = max(_summands(equation, operands, result) / 2, COARSE_UNITS)
    units = jnp.where(noise.units > 1, worst_units, noise.units)
    distances = (rounding * units) * magnitudes
    if may_be_exact:
        # A power of two: all summands are multiples of it, and so are all their sums.
        lowest_bit = np.inf
        if name in _MULTIPLIED:
            lowest_bit = _lowest_bit(operands[0]) * _lowest_bit(operands[1])
        else:
            for position in positions:
                lowest_bit = jnp.minimum(lowest_bit, _lowest_bit(operands[position]))
        is_exact = magnitudes <= lowest_bit / rounding
        distances = jnp.where(is_exact, 0.0, distances)
    return moved(result, distances, noise)


def _summands(equation: jex.JaxprEqn, operands: Sequence[Any], result: Any) -> float:
    """About how many summands a number of the result has at most."""
    name = equation.primitive.name
    params = equation.params
    sizes = [operand.size for operand in operands]
    if name in _MULTIPLIED:
        # As many as the contracted dimensions have elements.
        return math.sqrt(sizes[0] * sizes[1] / max(1, result.size))
    if name == "reduce_sum":
        return sizes[0] / max(1, result.size)
    if name == "cumsum":
        return operands[0].shape[params["axis"]]
    if name == "reduce_window_sum":
        return math.prod(params["window_dimensions"])
    if name == "select_and_scatter_add":
        return sizes[0]
    updates = operands[2]
    window_dims = params["dimension_numbers"].update_window_dims
    return updates.size / max(1, math.prod(updates.shape[dim] for dim in window_dims))


def _epsilon(dtype: DType, noise: Noise) -> Any:
    """The distance from 1.0 to the next number of the dtype in which numbers of `dtype`
    are added up. Narrow floats are added up in float32.
    """
    if jnp.finfo(dtype).bits < 32:
        dtype = np.float32
    return epsilon(dtype, noise)


def _lowest_bit(array: Any) -> Any:
    """The largest power of two of which all numbers of an array are multiples."""
    if jnp.issubdtype(array.dtype, np.complexfloating):
        return jnp.minimum(_lowest_bit(array.real), _lowest_bit(array.imag))
    lowest = lowest_bits(array.astype(np.float64))
    return jnp.min(lowest, initial=np.inf)
