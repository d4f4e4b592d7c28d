"""`check_step` of steps that are jitted with `compiler_options`."""

import functools as ft
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from shardfx.testing import check_step, verify
from tests.testing.planted import mesh_of


# Under these options, LLVM takes no number for a NaN, and `x - x` for 0.
FAST_MATH = {
    # These tests run without most optimizations.
    "xla_backend_optimization_level": 2,
    "xla_llvm_disable_expensive_passes": False,
    "xla_cpu_enable_fast_math": True,
    "xla_cpu_fast_math_honor_nans": False,
    "xla_cpu_fast_math_honor_infs": False,
}
QUICK = {"xla_backend_optimization_level": 0}
# The annotations of Equinox leave out what it passes to `jax.jit`.
equinox_jit: Any = eqx.filter_jit


@pytest.fixture(scope="module")
def mesh():
    return mesh_of(jax.devices())


def rows(mesh, *shape):
    sharding = NamedSharding(mesh, P(mesh.axis_names[0]))
    numbers = jnp.arange(float(np.prod(shape)))
    return jax.device_put(numbers.reshape(shape), sharding)


def rows_with_nan(mesh):
    return rows(mesh, 16, 8).at[3, 3].set(jnp.nan)


def sums(x, w):
    hidden = jnp.tanh(x @ w)
    return hidden.sum(0), {"x": x + 1}


def test_a_step_with_compiler_options_is_compared(mesh):
    x = rows(mesh, 16, 8)
    w = jnp.ones((8, 4))
    checked = check_step(jax.jit(sums, compiler_options=QUICK), x, w)
    assert checked, checked
    assert [output.path for output in checked.outputs] == ["0", "1/x"]


def test_a_step_of_equinox_with_options_is_compared(mesh):
    layer = eqx.nn.Linear(8, 4, key=jax.random.key(0))

    def step(layer, x, power):
        return jax.vmap(layer)(x) ** power

    jitted = equinox_jit(step, compiler_options=QUICK)
    x = rows(mesh, 16, 8) / 100
    checked = check_step(jitted, layer, x, 2)
    assert checked, checked


def test_a_wrong_equation_of_a_step_of_equinox_is_found(mesh):
    def wrong(x):
        return jnp.tanh(x) + 1.0

    jitted = equinox_jit(wrong, compiler_options=QUICK)
    checked = check_step(jitted, rows(mesh, 16, 8), reference=jnp.tanh)
    assert not checked
    assert any(frame.function.endswith("wrong") for frame in checked.lines), checked


def test_options_of_equinox_that_change_numbers_are_said(mesh):
    jitted = equinox_jit(lambda x: x - x, compiler_options=FAST_MATH)
    checked = check_step(jitted, rows_with_nan(mesh))
    assert not checked
    assert "xla_cpu_enable_fast_math" in str(checked)


def test_its_static_arguments_and_shardings_count(mesh):
    whole = NamedSharding(mesh, P())

    def step(x, power):
        return x**power

    jitted = jax.jit(
        step, static_argnums=1, out_shardings=whole, compiler_options=QUICK
    )
    assert check_step(jitted, rows(mesh, 16, 8), 2)


def test_the_first_wrong_equation_is_found_without_options(mesh):
    def right(x):
        return jnp.tanh(x)

    def wrong(x):
        return jnp.tanh(x) + 1.0

    jitted = jax.jit(wrong, compiler_options=QUICK)
    checked = check_step(jitted, rows(mesh, 16, 8), reference=right)
    assert not checked
    assert any(frame.function.endswith("wrong") for frame in checked.lines), checked


def test_its_sizes_are_shrunk(mesh):
    sharding = NamedSharding(mesh, P(mesh.axis_names[0]))
    struct = jax.ShapeDtypeStruct((4096, 64), jnp.float32, sharding=sharding)
    shapes = []

    def step(x):
        shapes.append(x.shape)
        return x.sum(1)

    for jit in (jax.jit, equinox_jit):
        shapes.clear()
        jitted = jit(step, compiler_options=QUICK)
        assert check_step(jitted, struct, shrink=True)
        rows_of_last, _ = shapes[-1]
        assert rows_of_last < 4096


def test_numbers_that_only_an_option_changes_are_said(mesh):
    jitted = jax.jit(lambda x: x - x, compiler_options=FAST_MATH)
    checked = check_step(jitted, rows_with_nan(mesh))
    assert not checked
    assert checked.outputs[0].at == (3, 3)
    assert "no equation differs without the step's `compiler_options`" in str(checked)
    assert "xla_cpu_enable_fast_math" in str(checked)


@pytest.mark.parametrize("jit", [jax.jit, equinox_jit])
def test_options_are_not_blamed_for_another_reference(mesh, jit):
    def step(x):
        return jnp.tanh(x)

    def other(x):
        return step(x) + 1

    jitted = jit(step, compiler_options=QUICK)
    checked = check_step(jitted, rows(mesh, 16, 8), reference=other)
    assert not checked
    assert "compiler_options" not in str(checked)


def test_a_function_around_a_step_with_options_is_named(mesh):
    jitted = jax.jit(sums, compiler_options=QUICK)
    args = (rows(mesh, 16, 8), jnp.ones((8, 4)))
    message = "can only be passed to top-level"
    for reference in (None, sums):
        with pytest.raises(ValueError, match=message) as caught:
            check_step(lambda x, w: jitted(x, w), *args, reference=reference)
        notes = [note for note in caught.value.__notes__ if "the step calls" in note]
        assert len(notes) == 1
        assert "pass the jitted function itself as the step" in notes[0]


class Layer(eqx.Module):
    """A module whose method is jitted."""

    weight: jax.Array

    def step(self, x):
        return sums(x, self.weight)


def partials(options):
    """Partial functions of a step that is jitted with options, by their kinds."""
    weight = jnp.ones((8, 4)) / 8
    step = lambda w, x: sums(x, w)
    jitted = jax.jit(step, compiler_options=options)
    jitted_by_equinox = equinox_jit(step, compiler_options=options)
    jitted_sums = jax.jit(sums, compiler_options=options)
    method = equinox_jit(Layer.step, compiler_options=options, donate="all")
    return {
        "functools": ft.partial(jitted, weight),
        "jax": jax.tree_util.Partial(jitted, weight),
        "equinox": eqx.Partial(jitted_by_equinox, weight),
        "keyword": ft.partial(jitted_sums, w=weight),
        "method": eqx.Partial(method, Layer(weight)),
    }


@pytest.mark.parametrize("kind", partials(QUICK))
def test_a_partial_function_of_a_step_with_options_is_compared(kind, mesh):
    step = partials(QUICK)[kind]
    x = rows(mesh, 16, 8) / 100
    checked = check_step(step, x)
    assert checked, checked
    # The arrays of the partial function were not donated.
    checked = check_step(step, x)
    assert checked, checked
    assert [output.path for output in checked.outputs] == ["0", "1/x"]
    assert verify(step, x)

    def other(x):
        columns = x.sum(0)
        return columns[:4], {"x": x}

    assert not check_step(step, x, reference=other)


@pytest.mark.parametrize("kind", ["functools", "equinox"])
def test_options_of_a_partial_function_are_said(kind, mesh):
    subtracted = lambda w, x: x - x
    if kind == "functools":
        jitted = jax.jit(subtracted, compiler_options=FAST_MATH)
        step = ft.partial(jitted, 1.0)
    else:
        jitted = equinox_jit(subtracted, compiler_options=FAST_MATH)
        step = eqx.Partial(jitted, jnp.ones(3))
    checked = check_step(step, rows_with_nan(mesh))
    assert not checked
    assert "xla_cpu_enable_fast_math" in str(checked)
