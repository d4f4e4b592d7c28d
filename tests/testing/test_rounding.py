"""The rounding of a reference's results in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from shardfx.testing._rounding import NARROW, WIDE, rounded


NARROW_DTYPES = ["bfloat16", "float16", "float32"]
DTYPES = ["float8_e4m3fn", *NARROW_DTYPES, "float64"]
# The golden ratio as a fraction of 2 ** 64: seeds are odd multiples of it.
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def in_float64(numbers, dtype, kind=NARROW, seed=1):
    """The numbers with rounding to `dtype`."""
    odd = np.uint64(2 * seed + 1)
    with jax.enable_x64(True), np.errstate(over="ignore"):
        array = jnp.asarray(numbers)
        result = rounded(array, jnp.dtype(dtype), kind, odd * GOLDEN)
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


@pytest.mark.parametrize(
    "kind, dtype",
    [(0, "float64"), (NARROW, "bfloat16"), (WIDE, "float32")],
)
def test_the_wider_kind_rounds_to_float32(kind, dtype):
    numbers = random_numbers()
    expected = numbers
    if kind != 0:
        expected = in_float64(numbers, dtype)
    result = in_float64(numbers, "bfloat16", kind)
    assert_array_equal(result, expected)
