"""The dtypes in which the equations of a step are evaluated, and the rounding of their
results.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._ground.spec import DType


# Kinds of rounding: to the dtypes of the step, and to the wider of those and float32.
NARROW = 1
WIDE = 2
# The bits of a float64 that have its exponent.
_EXPONENT_BITS = np.uint64(0x7FF0_0000_0000_0000)


def wider(dtype: DType, wide: DType) -> DType:
    """The float dtype `wide` if `dtype` is a narrower float, else `dtype`. With a
    `wide` of 64 bits, complex64 becomes complex128.
    """
    if jnp.issubdtype(dtype, np.complexfloating):
        if np.dtype(wide).itemsize == 8:
            return np.dtype(np.complex128)
        return dtype
    if not jnp.issubdtype(dtype, np.floating):
        return dtype
    if jnp.finfo(dtype).bits < jnp.finfo(wide).bits:
        return np.dtype(wide)
    return dtype


def with_dtypes_of(arrays: Sequence[Any], others: Sequence[Any]) -> Sequence[Any]:
    """The arrays, cast to the dtypes of `others`."""
    cast_arrays = []
    for array, other in zip(arrays, others, strict=True):
        cast_arrays.append(array.astype(other.dtype))
    return cast_arrays


def rounded(array: Any, dtype: DType, kind: Any, odd_seed: Any) -> Any:
    """A float64 `array`, the result of an equation, with rounding: each number becomes
    one of the two beside it in the dtype to which it is rounded. Numbers of that dtype
    do not change, unless it is float64.

    **Arguments:**

    - `dtype`: the dtype of the result in the step. An array of integers or of complex
      numbers is returned unchanged.
    - `kind`: 0 for no rounding, `NARROW` for rounding to `dtype`, and `WIDE` for
      rounding to the wider of `dtype` and float32. It is traced.
    - `odd_seed`: an odd integer of 64 bits, which decides which numbers are rounded up.
    """
    if not jnp.issubdtype(dtype, np.floating):
        return array
    is_up = _is_rounded_up(array, odd_seed)
    if jnp.finfo(dtype).bits >= 32:
        # Both kinds round to this dtype.
        return jnp.where(kind > 0, _rounded_to(dtype, array, is_up), array)

    narrow_dtype = dtype
    if jnp.finfo(dtype).bits < 16:
        # The smallest floats are rounded as bfloat16.
        narrow_dtype = jnp.bfloat16
    narrow = _rounded_to(narrow_dtype, array, is_up)
    wide = _rounded_to(np.float32, array, is_up)
    array = jnp.where(kind == NARROW, narrow, array)
    return jnp.where(kind == WIDE, wide, array)


def _is_rounded_up(array: Any, odd_seed: Any) -> Any:
    """Whether each number of a float64 array is rounded up: a bit that depends on all
    bits of the number and of the seed.
    """
    bits = jax.lax.bitcast_convert_type(array, np.uint64)
    product = bits * odd_seed
    top_bit = product >> np.uint64(63)
    return top_bit == 1


def _rounded_to(dtype: DType, array: Any, is_up: Any) -> Any:
    """A float64 array rounded to numbers of the float dtype `dtype`: up where `is_up`,
    down elsewhere.
    """
    info = jnp.finfo(dtype)
    # The distance between two numbers of the dtype that are next to each other.
    spacing = float(info.eps) * _power_of_two_below(array)
    if info.bits == 64:
        moved = jnp.where(is_up, array + spacing, array - spacing)
        # Zeros keep their sign.
        is_changed = jnp.isfinite(moved) & (spacing > 0)
        return jnp.where(is_changed, moved, array)

    # From half a distance further up, the nearest number of the dtype is the one above.
    half = spacing / 2
    moved = jnp.where(is_up, array + half, array - half)
    up_or_down = jax.lax.reduce_precision(moved, info.nexp, info.nmant)
    nearest = jax.lax.reduce_precision(array, info.nexp, info.nmant)
    is_number_of_dtype = nearest == array
    return jnp.where(is_number_of_dtype, array, up_or_down)


def _power_of_two_below(array: Any) -> Any:
    """For each number of a float64 array the largest power of two that is not above its
    absolute value: 4.0 for -5.5. It is 0.0 for 0.0 and for subnormal numbers.
    """
    bits = jax.lax.bitcast_convert_type(array, np.uint64)
    exponent_bits = bits & _EXPONENT_BITS
    return jax.lax.bitcast_convert_type(exponent_bits, np.float64)
