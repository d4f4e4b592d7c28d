"""Steps whose numbers only round under a plan, and the same steps with a mistake."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

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
    return {
        "deviation": x.std(),
        "variance": jnp.var(x, axis=0),
        "centred": x - x.mean(),
        "sums": rows.sum() - columns.sum(),
        "running": jnp.cumsum(x, axis=0)[-1] - rows,
        "product": x @ y.T - (y @ x.T).T,
    }


@pytest.mark.parametrize("is_wide", [False, True], ids=["float32", "float64"])
def test_sums_that_cancel_are_not_accused(is_wide, mesh):
    with jax.enable_x64(is_wide):
        dtype = jnp.float64 if is_wide else jnp.float32
        x = cut(jnp.full((64, 96), 0.1, dtype), "d", "t", mesh=mesh)
        y = cut(jnp.full((64, 96), 0.3, dtype), "t", mesh=mesh)
        check = check_step(statistics, x, y)
        assert check, str(check)
        for output in check.outputs:
            assert output.allowed < 1e5 * float(jnp.finfo(dtype).eps)


def divergence(policy, reference, x):
    """What a policy's distance from its reference is, which it equals at the start."""
    log_policy = jax.nn.log_softmax(jnp.tanh(x @ policy) @ policy.T)
    log_reference = jax.nn.log_softmax(jnp.tanh(x @ reference) @ reference.T)
    ratios = jnp.exp(log_policy) * (log_policy - log_reference)
    return jnp.mean(ratios.sum(-1)), log_policy.mean() - log_reference.mean()


def test_equal_weights_that_lie_otherwise_are_not_accused(mesh):
    weights = some(16, 32)
    policy = cut(weights, None, "t", mesh=mesh)
    reference = cut(weights, "d", mesh=mesh)
    x = cut(some(8, 16), "d", mesh=mesh)
    check = check_step(divergence, policy, reference, x)
    assert check, str(check)
    assert all(output.allowed < 1e-3 for output in check.outputs)


def transforms(x):
    spectrum = jnp.fft.fft(x, axis=-1)
    mixed = jnp.fft.ifft(jnp.fft.fft(spectrum, axis=0) * (1 + 2j), axis=0)
    product = spectrum @ x.T.astype(spectrum.dtype)
    return spectrum, jnp.abs(mixed), mixed.imag - 2 * mixed.real, product


def test_complex_numbers_round(mesh):
    for array in (jnp.full((8, 12), 0.1), some(8, 12)):
        check = check_step(transforms, cut(array, "d", "t", mesh=mesh))
        assert check, str(check)
        assert all(output.allowed < 0.1 for output in check.outputs)


def standardized(x, w):
    return jax.nn.standardize(x, axis=-1) @ w


@pytest.mark.parametrize("seed", range(4))
def test_a_variance_that_bfloat16_hardly_has_is_not_accused(seed, mesh):
    numbers = 8 + jax.random.normal(jax.random.key(seed), (16, 32))
    x = cut(numbers.astype(jnp.bfloat16), "d", "t", mesh=mesh)
    w = cut(some(32, 8).astype(jnp.bfloat16), "t", mesh=mesh)
    check = check_step(standardized, x, w)
    assert check, str(check)


def with_mistake(mesh, name):
    """A function that makes a mistake on one of two devices along "d"."""

    def body(x):
        is_second = lax.axis_index("d") == 1
        if name == "swapped":
            return lax.ppermute(x, "d", [(0, 1), (1, 0)])
        factor = {"doubled": 2.0, "left out": 0.0, "a hundredth": 1.01}[name]
        return jnp.where(is_second, x * jnp.asarray(factor, x.dtype), x)

    return jax.shard_map(
        body, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False
    )


@pytest.mark.parametrize("name", ["swapped", "doubled", "left out", "a hundredth"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_mistake_beside_sums_that_cancel_is_found(name, dtype, mesh):
    mistake = with_mistake(mesh, name)
    numbers = 8 + some(16, 32)
    x = cut(numbers.astype(dtype), "d", "t", mesh=mesh)
    w = cut(some(32, 8).astype(dtype), "t", mesh=mesh)
    step = lambda x, w: standardized(x, w) - standardized(x, w).mean(0)
    wrong = lambda x, w: step(mistake(x) if name == "swapped" else x, w) + 0 * x[:, :8]
    if name != "swapped":
        wrong = lambda x, w: mistake(standardized(x, w)) - standardized(x, w).mean(0)
    check = check_step(wrong, x, w, reference=step)
    assert not check, str(check)


def test_a_mistake_that_float32_hides_is_found_in_float64(mesh):
    """The mean is so large that float32 leaves little of the variance."""
    x = cut(300 + some(16, 32), "d", "t", mesh=mesh)
    w = cut(some(32, 8), "t", mesh=mesh)
    assert check_step(standardized, x, w)
    mistake = with_mistake(mesh, "a hundredth")
    wrong = lambda x, w: mistake(standardized(x, w))
    assert not check_step(wrong, x, w, reference=standardized)


def test_a_sum_of_whole_numbers_has_no_error(mesh):
    ones = np.arange(64 * 96).reshape(64, 96) % 3 == 0
    sharding = NamedSharding(mesh, P("d", "t"))
    x = jax.device_put(jnp.asarray(ones, jnp.float32), sharding)
    step = lambda x: (jnp.floor(x.sum()), jnp.cumsum(x, 0), x @ x.T)
    check = check_step(step, x)
    assert check, str(check)
    for output in check.outputs:
        assert output.allowed < 0.01
    # A row that counts twice.
    twice = lambda x: jnp.floor(x.sum() + x[0].sum())
    assert not check_step(twice, x, reference=lambda x: jnp.floor(x.sum()))
