import gc

import equinox as eqx
import jax
import pytest


# One process with eight emulated devices; tests that need more processes or devices start their own.
jax.config.update("jax_num_cpu_devices", 8)
# A sum of two dtypes is an error, so that nothing here relies on promotion that a user may have switched off.
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture
def getkey():
    return eqx.internal.GetKey()


@pytest.fixture
def standard_promotion():
    """For tests that run the code of optax and others, which adds numbers of two dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(autouse=True, scope="module")
def _drop_compiled_programs():
    yield
    jax.clear_caches()
    gc.collect()
