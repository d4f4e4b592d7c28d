"""The suggestion to constrain activations that a compiler would not lay out along the batch."""

import inspect

import jax
import jax.numpy as jnp
import pytest

from shardfx import AxisRules, MeshSpec, PathRules, constrain, filter_jit, plan
from shardfx.cost import compile_for, fit


MESH = MeshSpec({"fsdp": 4, "tensor": 2})
AXES = AxisRules([("batch", "fsdp"), ("embed", "fsdp"), ("mlp", "tensor"), ("vocab", None), ("layers", None)])
NAMES = {
    "table": ("vocab", "embed"),
    "up": ("layers", "embed", "mlp"),
    "down": ("layers", "mlp", "embed"),
}


def _step(*, constrained=False, cut=("fsdp",)):
    shapes = {"table": (512, 64), "up": (4, 64, 256), "down": (4, 256, 64)}
    structs = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    params = plan(structs, MESH, names=NAMES, axes=AXES)
    tokens = plan(jax.ShapeDtypeStruct((64, 64), jnp.int32), MESH, paths=PathRules([(".*", jax.P(*cut))]))

    def block(x, w):
        x = x + jnp.tanh(x @ w["up"]) @ w["down"]
        return (constrain(x, ("batch", None, None), params) if constrained else x), None

    def step(params, tok):
        def loss(params):
            layers = {name: params[name] for name in ("up", "down")}
            x, _ = jax.lax.scan(block, params["table"][tok], layers)
            return jnp.mean(x**2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    return (filter_jit(step, out_shardings=params), params.structs, tokens.structs), block


def _told(found):
    return [one for one in found.changes if one.what.startswith("constrain the activations")]


def _compiled(args):
    return compile_for(*args, target="cpu").memory.needed_bytes


def test_the_constraint_that_is_missing_is_told_with_its_line_and_what_it_saves():
    args, block = _step()
    found = fit(*args, chip="h100")
    (told,) = _told(found)
    assert told.how.startswith(
        "constrain(x, jax.P('fsdp', None, None), plan) for the f32[64,64,64] of test_constrained"
    )
    (source,) = told.sources
    assert source.line == inspect.getsourcelines(block)[1] + 1 and source.function.endswith("block")
    mended, _ = _step(constrained=True)
    after = fit(*mended, chip="h100").peak_bytes
    assert told.peak_bytes == pytest.approx(after, rel=0.05) and after < 0.6 * found.peak_bytes
    # What is told is what the compiler counts, before and after.
    assert found.peak_bytes == pytest.approx(_compiled(args), rel=0.2)
    assert told.peak_bytes == pytest.approx(_compiled(mended), rel=0.2)


def test_nothing_is_told_where_activations_lie_along_the_batch_or_the_batch_is_whole():
    assert not _told(fit(*_step(constrained=True)[0], chip="h100"))
    assert not _told(fit(*_step(cut=())[0], chip="h100"))
