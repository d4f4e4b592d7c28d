"""The dtypes in which the equations of a step are evaluated, and the rounding of their
results.
"""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._ground.spec import DType


# Kinds of rounding: to the dtypes of the step, and to float64.
NARROW = 1
WIDE = 2
# The units in the last place by which coarse rounding moves a number.
COARSE_UNITS = 8
# The primitives whose equations do not round.
EXACT = frozenset(
    """
    abs and argmax argmin broadcast_in_dim ceil clamp complex concatenate conj copy
    copy_p cummax cummin dynamic_slice dynamic_update_slice eq floor gather ge gt imag
    iota is_finite le lt max min ne neg not or pad all_gather all_to_all ppermute pvary
    pcast real reduce_and reduce_max reduce_min reduce_or reduce_precision reshape rev
    round select_n sign slice sort split squeeze stop_gradient top_k transpose pmax pmin
    pgather reduce_window_max
    """.split()
)
# The primitives whose equations operate on the bits of their dtype.
OF_BITS = frozenset(
    """
    bitcast_convert_type random_bits rng_bit_generator random_gamma pallas_call ffi_call
    pure_callback
    """.split()
)
# The bits of a float64 that have its exponent, and those that have its fraction.
_EXPONENT_BITS = np.uint64(0x7FF0_0000_0000_0000)
_FRACTION_BITS = np.uint64(0x000F_FFFF_FFFF_FFFF)
# The fraction of the golden ratio, by which seeds are multiplied so that all their bits
# change.
_GOLDEN = np.uint64(0x9E37_79B9_7F4A_7C15)


class Noise(NamedTuple):
    """The rounding of the results of equations.

    - `kind`: `NARROW` for rounding to the dtype of a result in the step, and `WIDE` for
      rounding to float64. It may be traced.
    - `odd_seed`: an odd integer of 64 bits, which decides which numbers are rounded up.
      It is traced.
    - `units`: by how many units in the last place a number is moved: 0.0 for no
      rounding, 1.0, or `COARSE_UNITS`. With the last, sums are moved by as much as in
      the worst program, which adds up one summand after the other. It is traced.
    """

    kind: Any
    odd_seed: Any
    units: Any

    def of_equation(self, key: int) -> "Noise":
        """The rounding of the results of one equation. Those of another `key` are
        rounded independently.
        """
        odd_key = np.uint64((2 * key + 1) * int(_GOLDEN) % 2**64)
        return self._replace(odd_seed=self.odd_seed * odd_key)


def noise_of(kind: Any, odd: Any, units: Any) -> Noise:
    """The rounding of this kind and of these units, from a small odd number."""
    return Noise(
        kind=kind,
        odd_seed=odd.astype(np.uint64) * _GOLDEN,
        units=units.astype(np.float64),
    )


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


def last_place_dtype(dtype: DType, evaluated_dtype: DType) -> DType:
    """The dtype whose last places may differ in a result of `dtype`, which may be
    evaluated in a wider dtype: not beyond those of float32.
    """
    if jnp.issubdtype(dtype, np.inexact) and dtype != evaluated_dtype:
        return wider(dtype, np.float32)
    return evaluated_dtype


def with_dtypes_of(arrays: Sequence[Any], others: Sequence[Any]) -> Sequence[Any]:
    """The arrays, cast to the dtypes of `others`."""
    cast_arrays = []
    for array, other in zip(arrays, others, strict=True):
        cast_arrays.append(array.astype(other.dtype))
    return cast_arrays


def rounded(array: Any, dtype: DType, noise: Noise) -> Any:
    """A float64 `array`, the result of an equation, with rounding: each number becomes
    one of the two beside it in the dtype to which it is rounded. Numbers of that dtype
    do not change, and for float64, numbers of float32 do not: they are exact.

    Complex numbers are rounded as far as a real number of their absolute value: a
    product of two rounds so.

    **Arguments:**

    - `dtype`: the dtype of the result in the step. An array of integers is returned
      unchanged.
    """
    if jnp.issubdtype(dtype, np.complexfloating):
        return _rounded_complex(array, dtype, noise)
    if not jnp.issubdtype(dtype, np.floating):
        return array
    if jnp.finfo(dtype).bits < 16:
        # The smallest floats are rounded as bfloat16.
        dtype = jnp.bfloat16

    def result_of(kind: int) -> Any:
        rounded_dtype = np.float64 if kind == WIDE else dtype
        return _rounded_to(rounded_dtype, array, noise.odd_seed, noise.units)

    return _of_kind(noise, result_of)


def moved(array: Any, distances: Any, noise: Noise) -> Any:
    """A float64 or complex128 array, in which each number is moved by a distance, up or
    down. Where the distance is 0 or not finite, the number does not move.
    """
    if jnp.issubdtype(array.dtype, np.complexfloating):
        real = moved(array.real, distances, noise)
        imaginary = moved(array.imag, distances, noise)
        return jax.lax.complex(real, imaginary)
    # Numbers that are 0 go up and down, too.
    is_up = _is_rounded_up(array + distances, noise.odd_seed)
    is_moved = (distances > 0) & (distances < np.inf)
    steps = jnp.where(is_up, distances, -distances)
    return jnp.where(is_moved, array + steps, array)


@jax.jit
def lowest_bits(array: Any) -> Any:
    """For each number of a float64 array the largest power of two of which it is a
    multiple: 0.5 for -5.5. It is infinite for 0.0, and 0.0 for what is not finite.
    """
    bits = jax.lax.bitcast_convert_type(array, np.uint64)
    fraction = (bits & _FRACTION_BITS) | (_FRACTION_BITS + np.uint64(1))
    lowest_bit = fraction & (~fraction + np.uint64(1))
    powers = _power_of_two_below(array) * float(np.finfo(np.float64).eps)
    lowest = powers * lowest_bit.astype(np.float64)
    lowest = jnp.where(jnp.isfinite(array), lowest, 0.0)
    return jnp.where(array == 0, np.inf, lowest)


def _rounded_complex(array: Any, dtype: DType, noise: Noise) -> Any:
    """A complex128 array with rounding to the complex dtype `dtype`."""
    spacing = _power_of_two_below(jnp.abs(array)) * noise.units
    distances = spacing * epsilon(dtype, noise)
    is_exact = _is_of_float32(array.real) & _is_of_float32(array.imag)
    return moved(array, jnp.where(is_exact, 0.0, distances), noise)


def epsilon(dtype: DType, noise: Noise) -> Any:
    """The distance from 1.0 to the next number of the dtype to which numbers are
    rounded, which have `dtype` in the step.
    """

    def distance_of(kind: int) -> float:
        rounded_dtype = np.float64 if kind == WIDE else dtype
        return float(jnp.finfo(rounded_dtype).eps)

    return _of_kind(noise, distance_of)


def _of_kind(noise: Noise, value_of: Callable[[int], Any]) -> Any:
    """What `value_of` returns for the kind of rounding."""
    if isinstance(noise.kind, int):
        return value_of(noise.kind)
    return jnp.where(noise.kind == WIDE, value_of(WIDE), value_of(NARROW))


def _is_of_float32(array: Any) -> Any:
    """Whether each number of a float64 array is a number of float32, too."""
    info = jnp.finfo(np.float32)
    return jax.lax.reduce_precision(array, info.nexp, info.nmant) == array


def _is_rounded_up(array: Any, odd_seed: Any) -> Any:
    """Whether each number of a float64 array is rounded up: a bit that depends on all
    bits of the number and of the seed.
    """
    bits = jax.lax.bitcast_convert_type(array, np.uint64)
    product = bits * odd_seed
    top_bit = product >> np.uint64(63)
    return top_bit == 1


# A program rounds the results of many equations, most of which have few shapes. Jitted,
# this is traced once for each shape.
@ft.partial(jax.jit, static_argnums=0)
def _rounded_to(dtype: DType, array: Any, odd_seed: Any, units: Any) -> Any:
    """A float64 array rounded to numbers of the float dtype `dtype`, up or down. With 0
    `units`, it is not rounded.
    """
    is_up = _is_rounded_up(array, odd_seed)
    info = jnp.finfo(dtype)
    # The distance between two numbers of the dtype that are next to each other.
    spacing = float(info.eps) * _power_of_two_below(array)
    if info.bits == 64:
        distances = spacing * units
        neighbours = jnp.where(is_up, array + distances, array - distances)
        # Zeros keep their sign.
        is_changed = jnp.isfinite(neighbours) & (spacing > 0) & ~_is_of_float32(array)
        return jnp.where(is_changed & (units > 0), neighbours, array)

    # From half a distance further up, the nearest number of the dtype is the one above.
    distances = spacing * (units - 0.5)
    further = jnp.where(is_up, array + distances, array - distances)
    up_or_down = jax.lax.reduce_precision(further, info.nexp, info.nmant)
    nearest = jax.lax.reduce_precision(array, info.nexp, info.nmant)
    is_changed = (nearest != array) & (units > 0)
    return jnp.where(is_changed, up_or_down, array)


def _power_of_two_below(array: Any) -> Any:
    """For each number of a float64 array the largest power of two that is not above its
    absolute value: 4.0 for -5.5. It is 0.0 for 0.0 and for subnormal numbers.
    """
    bits = jax.lax.bitcast_convert_type(array, np.uint64)
    exponent_bits = bits & _EXPONENT_BITS
    return jax.lax.bitcast_convert_type(exponent_bits, np.float64)
