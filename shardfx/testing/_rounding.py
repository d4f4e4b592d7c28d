"""The dtypes in which the equations of a step are evaluated, and the rounding of their
results.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._ground.spec import DType


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
    pairs = zip(arrays, others, strict=True)
    return [array.astype(other.dtype) for array, other in pairs]


def rounded(array: Any, dtype: DType, kind: Any, odd_seed: Any) -> Any:
    """A float64 `array` rounded to the numbers of a narrower dtype. Numbers of that
    dtype do not change.

    With `kind` 0 nothing is rounded, with 1 the numbers are rounded to `dtype`, and
    with 2 to the wider of `dtype` and float32. The bits of a number times the odd
    number `odd_seed` decide whether it is rounded up or down.
    """
    if not jnp.issubdtype(dtype, np.floating):
        return array
    info = jnp.finfo(dtype)
    if info.bits < 16:
        # The smallest floats are rounded as bfloat16.
        info = jnp.finfo(jnp.bfloat16)
    bits = jax.lax.bitcast_convert_type(array, np.uint64)
    top_bit = bits * odd_seed >> np.uint64(63)
    direction = top_bit.astype(np.float64) - 0.5
    if info.bits >= 32:
        # Both kinds are rounded to this dtype.
        return _rounded_to(info, array, direction, kind > 0)
    array = _rounded_to(info, array, direction, kind == 1)
    return _rounded_to(jnp.finfo(np.float32), array, direction, kind == 2)


def _rounded_to(info: Any, array: Any, direction: Any, is_on: Any) -> Any:
    """A float64 `array` rounded to a float dtype, if `is_on`. `info` is the `jnp.finfo`
    of this dtype. `direction` is negative where a number is rounded down.
    """
    nudged = array * (1.0 + direction * float(info.eps))
    nearest = jax.lax.reduce_precision(array, info.nexp, info.nmant)
    up_or_down = jax.lax.reduce_precision(nudged, info.nexp, info.nmant)
    is_changed = (nearest != array) | (info.bits == 64)
    return jnp.where(is_on & is_changed, up_or_down, array)
