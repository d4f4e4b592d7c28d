"""The suggestion to constrain activations that a compiler would not lay out along the batch."""

import inspect

import jax
import jax.numpy as jnp
import pytest

from shardfx import AxisRules, MeshSpec, PathRules, compile_for, constrain, fit, plan


MESH = MeshSpec({"fsdp": 4, "tensor": 2})
AXES = AxisRules([("batch", "fsdp"), ("embed", "fsdp"), ("mlp", "tensor"), ("vocab", None), ("layers", None)])
NAMES = {
    "table": ("vocab", "embed"),
    "up": ("layers", "embed", "mlp"),
    "down": ("layers", "mlp", "embed"),
}


def _step(*, constrained=False, named=True, tokens=64):
    shapes = {"table": (512, 64), "up": (4, 64, 256), "down": (4, 256, 64)}
    structs = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    params = plan(structs, MESH, names=NAMES, axes=AXES)
    words = jax.ShapeDtypeStruct((64, tokens), jnp.int32)
    by_name = plan(words, MESH, names=("batch", None), axes=AXES)
    by_path = plan(words, MESH, paths=PathRules([(".*", jax.P("fsdp"))]))
    plans = {"params": params, "tokens": by_name if named else by_path}

    def looked_up(params, tokens):
        x = params["table"][tokens]
        return constrain(x, ("batch", None, None), plans["params"]) if constrained else x

    def step(params, tokens):
        def loss(params):
            x = looked_up(params, tokens)
            x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w["up"]) @ w["down"], None), x, weights(params))
            return jnp.mean(x**2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    def weights(params):
        return {name: params[name] for name in ("up", "down")}

    return step, plans, looked_up


def _told(found):
    return [one for one in found.changes if one.what.startswith("constrain the activations")]


def _compiled(step, plans):
    memory = compile_for(step, plans, "cpu", out_shardings=plans["params"]).memory
    sums = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return sums + memory.temp_size_in_bytes


def test_the_constraint_that_is_missing_is_told_with_its_line_and_what_it_saves():
    step, plans, looked_up = _step()
    found = fit(plans, step=step, chip="h100")
    (told,) = _told(found)
    assert told.how.startswith('constrain(x, ("batch", None, None), plan) for f32[64,64,64] of test_constrained.py:')
    (source,) = told.sources
    assert source.line == inspect.getsourcelines(looked_up)[1] + 1 and source.function.endswith("looked_up")
    made, mended, _ = _step(constrained=True)
    after = fit(mended, step=made, chip="h100").peak_bytes
    assert told.peak_bytes == pytest.approx(after, rel=0.05) and after < 0.6 * found.peak_bytes
    # What is told is what the compiler counts, before and after.
    assert found.peak_bytes == pytest.approx(_compiled(step, plans), rel=0.15)
    assert told.peak_bytes == pytest.approx(_compiled(made, mended), rel=0.15)


def test_nothing_is_told_where_activations_lie_along_the_batch_or_the_batch_is_whole():
    step, plans, _ = _step(constrained=True)
    assert not _told(fit(plans, step=step, chip="h100"))
    step, plans, _ = _step()
    whole = plan(plans["tokens"].structs, MESH, paths=PathRules([(".*", jax.P())]))
    assert not _told(fit({**plans, "tokens": whole}, step=step, chip="h100"))


def test_without_names_the_constraint_is_a_spec():
    step, plans, _ = _step(named=False)
    (told,) = _told(fit(plans, step=step, chip="h100"))
    assert told.how.startswith('constrain(x, jax.P("fsdp", None, None), plan) for f32[64,64,64] of')
