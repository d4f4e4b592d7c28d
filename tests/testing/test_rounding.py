"""The rounding of a reference's results in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardfx.testing._rounding import NARROW, WIDE, rounded


DTYPES = ["float8_e4m3fn", "bfloat16", "float16", "float32", "float64"]


def in_float64(numbers, dtype, kind=NARROW, seed=1):
    """The numbers with rounding to `dtype`."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    with jax.enable_x64(True), np.errstate(over="ignore"):
        odd_seed = np.uint64(2 * seed + 1) * golden
        result = rounded(jnp.asarray(numbers), jnp.dtype(dtype), kind, odd_seed)
        return np.asarray(result)


def random_numbers():
    return np.random.default_rng(0).standard_normal(20_000)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_as_many_numbers_go_up_as_down(dtype, seed):
    numbers = random_numbers()
    result = in_float64(numbers, dtype, seed=seed)
    assert 0.47 < np.mean(result > numbers) < 0.53
    assert 0.47 < np.mean(result < numbers) < 0.53


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_numbers_of_a_narrower_dtype_do_not_change(dtype):
    with np.errstate(over="ignore"):
        numbers = random_numbers().astype(jnp.dtype(dtype)).astype(np.float64)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, float(jnp.finfo(dtype).max)]
    numbers = np.concatenate([numbers, special])
    np.testing.assert_array_equal(in_float64(numbers, dtype), numbers)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_others_become_a_number_of_it_beside_them(dtype):
    numbers = random_numbers()
    result = in_float64(numbers, dtype)
    np.testing.assert_array_equal(result, result.astype(jnp.dtype(dtype)))
    # The numbers of a dtype are less than its epsilon, relatively, from each other.
    distances = np.abs(result - numbers) / np.abs(numbers)
    assert distances.max() < float(jnp.finfo(dtype).eps)


def test_a_number_of_float64_becomes_one_beside_it():
    numbers = random_numbers()
    result = in_float64(numbers, "float64")
    above = np.nextafter(numbers, np.inf)
    is_up = result > numbers
    np.testing.assert_array_equal(result[is_up], above[is_up])
    distances = np.abs(result - numbers) / np.abs(numbers)
    assert distances.max() <= np.finfo(np.float64).eps


def test_rounding_makes_no_infinity_and_no_nan():
    largest = np.finfo(np.float64).max
    numbers = np.array([largest, -largest, np.inf, -np.inf, 0.0, -0.0, 5e-324])
    for seed in (1, 2, 3):
        result = in_float64(numbers, "float64", seed=seed)
        np.testing.assert_array_equal(np.isinf(result), np.isinf(numbers))
        assert not np.isnan(result).any()
        np.testing.assert_array_equal(result[2:], numbers[2:])
        np.testing.assert_array_equal(np.signbit(result), np.signbit(numbers))


@pytest.mark.parametrize("kind", [0, NARROW, WIDE])
def test_the_wider_kind_rounds_to_float32(kind):
    numbers = random_numbers()
    dtype = {0: "float64", NARROW: "bfloat16", WIDE: "float32"}[kind]
    expected = numbers if kind == 0 else in_float64(numbers, dtype)
    np.testing.assert_array_equal(in_float64(numbers, "bfloat16", kind), expected)
