"""Steps whose numbers only round under a plan, and the same steps with a mistake."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from shardfx.testing import check_step
from tests.testing.placed import cut, some
from tests.testing.planted import mesh_of


@pytest.fixture(scope="module")
def mesh():
    return mesh_of(jax.devices())


def statistics(x, y):
    """Differences that are 0 in one order of summation, and tiny in others."""
    rows = x.sum(0)
    columns = x.sum(1)
    running_sums = jnp.cumsum(x, axis=0)
    product = x @ y.T
    turned_product = y @ x.T
    return {
        "deviation": x.std(),
        "variance": jnp.var(x, axis=0),
        "centred": x - x.mean(),
        "sums": rows.sum() - columns.sum(),
        "running": running_sums[-1] - rows,
        "product": product - turned_product.T,
    }


@pytest.mark.parametrize("is_wide", [False, True], ids=["float32", "float64"])
def test_sums_that_cancel_are_not_accused(is_wide, mesh):
    dtype = jnp.float32
    if is_wide:
        dtype = jnp.float64
    # On JAX 0.9 ten times as much is allowed for the sums of 64 bits.
    most_roundings = 1e5
    if jax.__version_info__ < (0, 10):
        most_roundings = 1e6
    most_allowed = most_roundings * float(jnp.finfo(dtype).eps)
    with jax.enable_x64(is_wide):
        tenths = jnp.full((64, 96), 0.1, dtype)
        x = cut(tenths, "d", "t", mesh=mesh)
        other_tenths = jnp.full((64, 96), 0.3, dtype)
        y = cut(other_tenths, "t", mesh=mesh)
        check = check_step(statistics, x, y)
        assert check, str(check)
        for output in check.outputs:
            assert output.allowed < most_allowed


def log_probabilities(x, weights):
    hidden = jnp.tanh(x @ weights)
    return jax.nn.log_softmax(hidden @ weights.T)


def divergence(policy, reference, x):
    """What a policy's distance from its reference is, which it equals at the start."""
    log_policy = log_probabilities(x, policy)
    log_reference = log_probabilities(x, reference)
    ratios = jnp.exp(log_policy) * (log_policy - log_reference)
    kl_divergence = jnp.mean(ratios.sum(-1))
    difference_of_means = log_policy.mean() - log_reference.mean()
    return kl_divergence, difference_of_means


def test_equal_weights_that_lie_otherwise_are_not_accused(mesh):
    weights = some(16, 32)
    policy = cut(weights, None, "t", mesh=mesh)
    reference = cut(weights, "d", mesh=mesh)
    x = cut(some(8, 16), "d", mesh=mesh)
    check = check_step(divergence, policy, reference, x)
    assert check, str(check)
    for output in check.outputs:
        assert output.allowed < 1e-3


def transforms(x):
    spectrum = jnp.fft.fft(x, axis=-1)
    both_spectra = jnp.fft.fft(spectrum, axis=0)
    mixed = jnp.fft.ifft(both_spectra * (1 + 2j), axis=0)
    difference = mixed.imag - 2 * mixed.real
    columns = x.T.astype(spectrum.dtype)
    product = spectrum @ columns
    return spectrum, jnp.abs(mixed), difference, product


def test_complex_numbers_round(mesh):
    constant = jnp.full((8, 12), 0.1)
    for array in (constant, some(8, 12)):
        x = cut(array, "d", "t", mesh=mesh)
        check = check_step(transforms, x)
        assert check, str(check)
        for output in check.outputs:
            assert output.allowed < 0.1


def standardized(x, w):
    return jax.nn.standardize(x, axis=-1) @ w


@pytest.mark.parametrize("seed", range(4))
def test_a_variance_that_bfloat16_hardly_has_is_not_accused(seed, mesh):
    key = jax.random.key(seed)
    numbers = 8 + jax.random.normal(key, (16, 32))
    x = cut(numbers.astype(jnp.bfloat16), "d", "t", mesh=mesh)
    weights = some(32, 8, dtype=jnp.bfloat16)
    w = cut(weights, "t", mesh=mesh)
    check = check_step(standardized, x, w)
    assert check, str(check)


# The factor by which a mistake multiplies the numbers of one device.
FACTORS = {
    "doubled": 2.0,
    "left out": 0.0,
    "a hundredth": 1.01,
}


def with_mistake(mesh, name):
    """A function that makes a mistake on one of two devices along "d"."""

    def body(x):
        if name == "swapped":
            return lax.ppermute(x, "d", [(0, 1), (1, 0)])
        factor = jnp.asarray(FACTORS[name], x.dtype)
        is_second = lax.axis_index("d") == 1
        return jnp.where(is_second, x * factor, x)

    return jax.shard_map(
        body,
        mesh=mesh,
        in_specs=P("d"),
        out_specs=P("d"),
        check_vma=False,
    )


@pytest.mark.parametrize("name", ["swapped", "doubled", "left out", "a hundredth"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_mistake_beside_sums_that_cancel_is_found(name, dtype, mesh):
    mistake = with_mistake(mesh, name)
    numbers = 8 + some(16, 32)
    x = cut(numbers.astype(dtype), "d", "t", mesh=mesh)
    weights = some(32, 8, dtype=dtype)
    w = cut(weights, "t", mesh=mesh)

    def step(x, w):
        rows = standardized(x, w)
        return rows - rows.mean(0)

    def wrong(x, w):
        if name == "swapped":
            return step(mistake(x), w) + 0 * x[:, :8]
        rows = standardized(x, w)
        return mistake(rows) - rows.mean(0)

    check = check_step(wrong, x, w, reference=step)
    assert not check, str(check)


def test_a_mistake_that_float32_hides_is_found_in_float64(mesh):
    """The mean is so large that float32 leaves little of the variance."""
    numbers = 300 + some(16, 32)
    x = cut(numbers, "d", "t", mesh=mesh)
    w = cut(some(32, 8), "t", mesh=mesh)
    assert check_step(standardized, x, w)
    mistake = with_mistake(mesh, "a hundredth")

    def wrong(x, w):
        return mistake(standardized(x, w))

    assert not check_step(wrong, x, w, reference=standardized)


def test_a_sum_of_whole_numbers_has_no_error(mesh):
    numbers = np.arange(64 * 96).reshape(64, 96)
    is_counted = numbers % 3 == 0
    ones = jnp.asarray(is_counted, jnp.float32)
    x = cut(ones, "d", "t", mesh=mesh)

    def step(x):
        count = jnp.floor(x.sum())
        running_counts = jnp.cumsum(x, 0)
        return count, running_counts, x @ x.T

    check = check_step(step, x)
    assert check, str(check)
    for output in check.outputs:
        assert output.allowed < 0.01

    def count_of(x):
        return jnp.floor(x.sum())

    def with_a_row_twice(x):
        first_row = x[0]
        return jnp.floor(x.sum() + first_row.sum())

    assert not check_step(with_a_row_twice, x, reference=count_of)
