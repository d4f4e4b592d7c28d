import gc
import os
import resource
import tempfile

import equinox as eqx
import hypothesis
import jax
import jaxtyping
import pytest


# Modules and tests live as long as the process. To look for garbage among them while
# they are imported and collected takes half of the time of that.
gc.disable()
# The same examples at every run; `--hypothesis-profile=fresh` draws others. How long an
# example takes is the machine's matter: a test that is slow on a busy one has not
# failed.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.register_profile("fresh", deadline=None, print_blob=True)
# Ten times the examples of the laws that ask for this profile, such as that of files.
hypothesis.settings.register_profile("many", deadline=None, print_blob=True)
hypothesis.settings.load_profile("repeatable")
# One process with eight emulated devices; tests that need more processes or devices
# start their own.
jax.config.update("jax_num_cpu_devices", 8)
# Machine code of a program that runs once need not be fast, here and in the processes
# that tests start. What XLA makes of the program, its collectives and its buffers among
# it, is the same.
jax.config.update("jax_disable_most_optimizations", True)
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
# Three quarters of a compilation are XLA's newer emitter of fused loops, and a third of
# the rest is starting the code generator for each part of a program. JAX 0.12 has no
# other emitter, and is no faster with one part.
_FAST_COMPILATION = (
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)
_HAS_OLD_EMITTER = jax.__version_info__ < (0, 12)
os.environ["XLA_FLAGS"] = _FAST_COMPILATION if _HAS_OLD_EMITTER else ""
# These run the code of optax, flax and others, which adds numbers of two dtypes.
_STANDARD_PROMOTION = {
    "test_aot",
    "test_benchmarks",
    "test_benchmarks_faults",
    "test_benchmarks_reshard",
    "test_check_step",
    "test_cli",
    "test_cli_errors",
    "test_cli_files",
    "test_code",
    "test_conformance_eformer",
    "test_conformance_flax",
    "test_conformance_t5x",
    "test_constrain_step",
    "test_demo",
    "test_docs",
    "test_first_day",
    "test_follow",
    "test_follow_leaves",
    "test_foreign_trees",
    "test_held",
    "test_hf_presets",
    "test_hidden_state",
    "test_hosts",
    "test_interop_flax",
    "test_jit",
    "test_launchers",
    "test_messages",
    "test_minilm",
    "test_name_axes",
    "test_presets",
    "test_pages_on_explicit_axes",
    "test_recipes",
    "test_replan",
    "test_search",
    "test_solvers",
    "test_suggestions",
}


def pytest_collection_finish():
    """No collection of garbage has to walk over modules and tests, or often."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 1000)
    gc.enable()


@pytest.fixture
def getkey():
    return eqx.internal.GetKey()


@pytest.fixture
def as_users_run_it():
    """Without the type checks that the tests put round every function, which would come
    first.
    """
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True, scope="session")
def _temporary_folder(tmp_path_factory: pytest.TempPathFactory):
    """What examples and processes leave among the temporary files goes where pytest
    removes it.
    """
    with pytest.MonkeyPatch.context() as patched:
        folder = str(tmp_path_factory.mktemp("temporary"))
        patched.setattr(tempfile, "tempdir", folder)
        patched.setenv("TMPDIR", folder)
        yield


@pytest.fixture(autouse=True, scope="module")
def _promotion(request: pytest.FixtureRequest):
    """Elsewhere a sum of two dtypes is an error, so that the package relies on no
    promotion that a user may forbid.
    """
    name = request.module.__name__.rpartition(".")[2]
    with jax.numpy_dtype_promotion(
        "standard" if name in _STANDARD_PROMOTION else "strict"
    ):
        yield


@pytest.fixture(autouse=True, scope="module")
def _bounded_memory():
    """Compiled programs serve later modules until the process has held 3 GiB; then each
    module drops its own.
    """
    yield
    if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 3 * 2**20:
        jax.clear_caches()
        gc.collect()
