"""`filter_jit(check=...)`: once for each program, before it first runs."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import shardfx as sfx
from shardfx import MeshSpec, filter_jit
from shardfx.errors import RefusedError, UnjudgedWarning


MESH = MeshSpec({"data": 2, "tensor": 4}).build(jax.devices())
ROWS = NamedSharding(MESH, P("data"))
COLUMNS = NamedSharding(MESH, P(None, "tensor"))
X = jnp.arange(64.0).reshape(8, 8)


def passing(seen):
    """A check that passes everything, and says what it saw."""
    return lambda traced: seen.append([array.struct for array in traced.arrays])


def test_a_program_is_checked_once():
    seen = []
    double = filter_jit(lambda x: 2 * x, in_shardings=ROWS, check=passing(seen))
    for _ in range(3):
        assert np.array_equal(double(X), 2 * X)
    shardings = [[struct.sharding for struct in structs] for structs in seen]
    assert shardings == [[ROWS]]


@pytest.mark.parametrize(
    "other",
    [
        jnp.ones((16, 8)),
        X.astype(jnp.bfloat16),
        jax.device_put(X, ROWS),
        jax.device_put(X, COLUMNS),
    ],
    ids=["shape", "dtype", "rows", "columns"],
)
def test_another_type_or_sharding_is_another_program(other):
    seen = []
    double = filter_jit(lambda x: 2 * x, check=passing(seen))
    for _ in range(2):
        for x in (X, other):
            assert np.array_equal(double(x), 2 * x)
    assert len(seen) == 2


def test_another_static_argument_is_another_program():
    seen = []
    scaled = filter_jit(lambda x, by: x * by, check=passing(seen))
    for by in (2, 3, 2, 2.0):
        scaled(X, by)
    assert len(seen) == 3


def test_numpy_arrays_and_those_of_the_function_are_arguments():
    seen = []
    linear = eqx.nn.Linear(8, 8, key=jax.random.key(0))
    apply: Any = filter_jit(jax.vmap(linear), check=passing(seen))
    for _ in range(2):
        apply(np.ones((4, 8), np.float32))
    shapes = [[struct.shape for struct in structs] for structs in seen]
    expected = [[(4, 8)]]
    assert shapes == expected or shapes == [[(8, 8), (8,), (4, 8)]]


def test_a_false_answer_refuses_the_program_each_time():
    ran = []

    class Verdict:
        def __bool__(self):
            return False

        def __str__(self):
            return "the sum at train.py:7 is wrong"

    def step(x):
        jax.debug.callback(lambda: ran.append(1))
        return x + 1

    step = filter_jit(step, donate="all", check=lambda traced: Verdict())
    for _ in range(2):
        with pytest.raises(RefusedError, match="nothing ran.*\nthe sum at train.py:7"):
            step(X)
    jax.effects_barrier()
    assert ran == []
    assert not X.is_deleted()
    with pytest.raises(RefusedError, match=r"program of `.*\.step`"):
        step.lower(X).compile()(X)


def test_what_a_check_raises_is_raised_unchanged():
    def check(traced):
        raise KeyError("my own")

    with pytest.raises(KeyError, match="my own"):
        filter_jit(lambda x: x, check=check)(X)


@pytest.mark.parametrize("answer", [None, True, "proved", 1])
def test_none_and_what_is_true_pass(answer):
    actual = filter_jit(lambda x: x + 1, check=lambda traced: answer)(X)[0, 0]
    assert actual == 1


def test_a_compiled_stage_is_checked_before_it_first_runs():
    seen = []
    double = filter_jit(lambda x: 2 * x, check=passing(seen))
    compiled = double.lower(X).compile()
    assert seen == []
    for _ in range(2):
        compiled(X)
    assert len(seen) == 1


def test_inside_another_program_nothing_is_checked():
    seen = []
    double = filter_jit(lambda x: 2 * x, check=passing(seen))
    assert np.array_equal(
        jax.jit(lambda x: double(x) + double(jnp.ones(3)).sum())(X), 2 * X + 6
    )
    total = jax.grad(lambda x: double(x).sum())(X).sum()
    assert total == 128
    assert seen == []


def test_a_check_is_for_decorators_and_methods_too():
    seen = []

    class Model(eqx.Module):
        scale: jax.Array

        @filter_jit(check=passing(seen))
        def apply(self, x):
            return x * self.scale

    for scale in (2.0, 3.0):
        applied = Model(jnp.array(scale)).apply(X)[0, 1]
        assert applied == scale
    assert len(seen) == 1


class Partly:
    """A verdict about a program of which only a part is judged."""

    def __init__(self, caution):
        self.caution = caution


def assert_here(warning):
    """Asserts that a warning names a line of this file. Where jaxtyping checks the calls
    of shardfx, a frame of its own is around each of them.
    """
    if not hasattr(filter_jit, "__wrapped__"):
        assert warning.filename == __file__


def test_a_caution_is_a_warning_once_for_each_program():
    double = filter_jit(lambda x: 2 * x, check=lambda traced: Partly("2 are unknown"))
    with pytest.warns(UnjudgedWarning, match="and 2 are unknown") as warned:
        for _ in range(3):
            assert np.array_equal(double(X), 2 * X)
    assert len(warned) == 1
    assert_here(warned[0])
    with pytest.warns(UnjudgedWarning):
        double(X[:4])


def test_a_caution_without_text_is_no_warning():
    double = filter_jit(lambda x: 2 * x, check=lambda traced: Partly(""))
    assert np.array_equal(double(X), 2 * X)


def test_a_caution_that_is_an_error_lets_nothing_run():
    double = filter_jit(lambda x: 2 * x, check=lambda traced: Partly("2 are unknown"))
    for _ in range(2):
        with pytest.raises(UnjudgedWarning):
            double(X)


def test_verify_warns_of_what_it_does_not_judge():
    def updated(cache, row, start):
        return jax.lax.dynamic_update_slice(cache, row, (start, 0))

    checked = filter_jit(updated, check=sfx.testing.verify)
    args = (jax.device_put(X, ROWS), jnp.ones((1, 8)), jnp.array(3))
    with pytest.warns(UnjudgedWarning) as warned:
        for _ in range(2):
            np.testing.assert_array_equal(checked(*args), X.at[3].set(1))
    (warning,) = warned
    assert_here(warning)
    verdict = sfx.testing.verify(updated, *args)
    text = str(warning.message)
    assert text.endswith(verdict.caution)
    count = verdict.operations - verdict.judged_operations
    assert f"{count} of its {verdict.operations} operations are not judged" in text
    unjudged_bytes = verdict.bytes - verdict.judged_bytes
    assert f"{unjudged_bytes:,} of {verdict.bytes:,} bytes" in text
    assert f"{verdict.unjudged[0]}" in text
    assert "may be out of bounds" in text
    assert "check_step(step, *args)" in text


def test_verify_is_silent_about_a_program_that_it_proves():
    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    args = (jax.device_put(X, COLUMNS), jax.device_put(X, ROWS))
    step = filter_jit(jax.value_and_grad(loss), check=sfx.testing.verify)
    step(*args)
    verdict = sfx.testing.verify(jax.value_and_grad(loss), *args)
    assert verdict.outcome == "proved"
    assert verdict.caution == ""
