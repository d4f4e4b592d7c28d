import gc

import equinox as eqx
import jax
import pytest


# One process with eight emulated devices; tests that need more processes or devices start their own.
jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture
def getkey():
    return eqx.internal.GetKey()


@pytest.fixture(autouse=True, scope="module")
def _drop_compiled_programs():
    yield
    jax.clear_caches()
    gc.collect()
