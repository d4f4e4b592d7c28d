"""The rounding of a reference's results in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from shardfx.testing._rounding import NARROW, WIDE, Noise, lowest_bits, moved, rounded


NARROW_DTYPES = ["bfloat16", "float16", "float32"]
DTYPES = ["float8_e4m3fn", *NARROW_DTYPES, "float64"]
# The golden ratio as a fraction of 2 ** 64: seeds are odd multiples of it.
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def noise_of_seed(kind=NARROW, seed=1, units=1.0):
    odd = np.uint64(2 * seed + 1)
    with np.errstate(over="ignore"):
        odd_seed = odd * GOLDEN
    return Noise(kind=kind, odd_seed=odd_seed, units=units)


def in_float64(numbers, dtype, kind: Any = NARROW, seed=1, units=1.0):
    """The numbers with rounding to `dtype`."""
    with jax.enable_x64(True):
        result = rounded(
            jnp.asarray(numbers),
            jnp.dtype(dtype),
            noise_of_seed(kind, seed, units),
        )
        return np.asarray(result)


def random_numbers():
    generator = np.random.default_rng(0)
    return generator.standard_normal(20_000)


def relative_distances(result, numbers):
    distances = np.abs(result - numbers)
    return distances / np.abs(numbers)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_as_many_numbers_go_up_as_down(dtype, seed):
    numbers = random_numbers()
    result = in_float64(numbers, dtype, seed=seed)
    share_up = np.mean(result > numbers)
    share_down = np.mean(result < numbers)
    assert 0.47 < share_up < 0.53
    assert 0.47 < share_down < 0.53


@pytest.mark.parametrize("dtype", NARROW_DTYPES)
def test_numbers_of_a_narrower_dtype_do_not_change(dtype):
    narrow = jnp.dtype(dtype)
    with np.errstate(over="ignore"):
        representable = random_numbers().astype(narrow)
    largest = float(jnp.finfo(dtype).max)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, largest]
    numbers = np.concatenate([representable.astype(np.float64), special])
    result = in_float64(numbers, dtype)
    assert_array_equal(result, numbers)


@pytest.mark.parametrize("dtype", NARROW_DTYPES)
def test_others_become_a_number_of_it_beside_them(dtype):
    numbers = random_numbers()
    result = in_float64(numbers, dtype)
    narrow = result.astype(jnp.dtype(dtype))
    assert_array_equal(result, narrow)
    # The numbers of a dtype are less than its epsilon, relatively, from each other.
    distances = relative_distances(result, numbers)
    assert distances.max() < float(jnp.finfo(dtype).eps)


def test_a_number_of_float64_becomes_one_beside_it():
    numbers = random_numbers()
    result = in_float64(numbers, "float64")
    above = np.nextafter(numbers, np.inf)
    is_up = result > numbers
    assert_array_equal(result[is_up], above[is_up])
    distances = relative_distances(result, numbers)
    assert distances.max() <= np.finfo(np.float64).eps


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_rounding_makes_no_infinity_and_no_nan(seed):
    largest = np.finfo(np.float64).max
    unchanged = np.array([np.inf, -np.inf, 0.0, -0.0, 5e-324])
    numbers = np.concatenate([[largest, -largest], unchanged])
    result = in_float64(numbers, "float64", seed=seed)
    assert not np.isnan(result).any()
    assert_array_equal(np.isinf(result), np.isinf(numbers))
    assert_array_equal(np.signbit(result), np.signbit(numbers))
    assert_array_equal(result[2:], unchanged)


def test_the_wide_kind_rounds_to_float64():
    numbers = random_numbers()
    expected = in_float64(numbers, "float64")
    result = in_float64(numbers, "bfloat16", WIDE)
    assert_array_equal(result, expected)


@pytest.mark.parametrize("kind", [NARROW, WIDE])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_traced_kind_rounds_as_a_constant_one(dtype, kind):
    numbers = random_numbers()
    expected = in_float64(numbers, dtype, kind)
    traced_kind = np.array(kind)
    result = in_float64(numbers, dtype, traced_kind)
    assert_array_equal(result, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_units_are_no_rounding(dtype):
    numbers = random_numbers()
    for kind in (NARROW, WIDE):
        result = in_float64(numbers, dtype, kind, units=0.0)
        assert_array_equal(result, numbers)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_coarse_numbers_are_as_many_units_further(dtype):
    generator = np.random.default_rng(0)
    numbers = 1 + generator.random(1000) / 2
    result = in_float64(numbers, dtype, units=8.0)
    distances = np.abs(result - numbers)
    units = distances / float(jnp.finfo(dtype).eps)
    assert units.min() >= 7
    assert units.max() <= 8


def test_a_short_number_of_float64_is_exact():
    short_numbers = np.array([0.25, 3.0, -1e6, 2.0**52])
    result = in_float64(short_numbers, "float64")
    assert_array_equal(result, short_numbers)
    long_numbers = np.array([0.1, 1 / 3])
    result = in_float64(long_numbers, "float64")
    assert (result != long_numbers).all()


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_a_complex_number_is_rounded_by_its_absolute_value(dtype):
    generator = np.random.default_rng(0)
    real_parts = generator.standard_normal(1000)
    imaginary_parts = 1e-9 * generator.standard_normal(1000)
    numbers = real_parts + 1j * imaginary_parts
    result = in_float64(numbers, dtype)
    errors = np.abs(np.imag(result) - numbers.imag)
    distances = errors / np.abs(numbers)
    eps = float(jnp.finfo(dtype).eps)
    assert distances.max() <= eps
    assert distances.min() > eps / 4
    whole = np.array([3.0 + 4.0j, 0.0, -0.5j])
    assert_array_equal(in_float64(whole, dtype), whole)


def test_numbers_are_moved_up_as_often_as_down():
    numbers = np.repeat([0.0, 1.0], 1000)
    generator = np.random.default_rng(0)
    distances = generator.random(2000)
    with jax.enable_x64(True):
        array = jnp.asarray(numbers)
        result = np.asarray(moved(array, distances, noise_of_seed()))
    actual = np.abs(result - numbers)
    np.testing.assert_allclose(actual, distances, rtol=1e-12)
    is_up = result > numbers
    shares_up = is_up.reshape(2, 1000).mean(axis=1)
    assert (shares_up > 0.4).all()
    assert (shares_up < 0.6).all()


def test_a_number_is_a_multiple_of_its_lowest_bit():
    numbers = np.array([1.0, -5.5, 96.0, 0.1, 0.0, np.inf, np.nan])
    with jax.enable_x64(True):
        array = jnp.asarray(numbers)
        lowest = np.asarray(lowest_bits(array))
    assert_array_equal(lowest[:3], [1.0, 0.5, 32.0])
    assert lowest[3] == 2.0**-55
    assert_array_equal(lowest[4:], [np.inf, 0.0, 0.0])
