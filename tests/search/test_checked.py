import jax
import jax.numpy as jnp
import pytest
from models import MODELS, f32

from shardfx import CostModel, Limits, MeshError, fit_chip, search


def step(p, x):
    def loss(p):
        return jnp.mean((x + jax.nn.relu(x @ p["up"]) @ p["down"]) ** 2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, p, jax.grad(loss)(p))


ARGS = {"up": f32(64, 256), "down": f32(256, 64)}, f32(128, 64)


def test_compiled_programs_send_what_the_search_says():
    found = search(step, *ARGS, devices=8, chip="v5e", keep=4, verify="compile")
    assert found
    for one in found:
        estimate, program = one.checks
        assert (estimate.by, program.by) == ("estimate", "compile")
        assert one.wire_bytes == pytest.approx(estimate.wire_bytes, rel=0.1)
        assert sum(sent for _, sent in program.axis_bytes) == program.wire_bytes
        assert program.memory_bytes is not None and 0 < program.memory_bytes < one.limit_bytes
        assert "by compile:" in str(one)
    assert [one.checks[-1].seconds for one in found] == sorted(one.checks[-1].seconds for one in found)


@pytest.mark.parametrize("name", ["experts", "equinox_mlp"])
def test_programs_of_other_models_compile(name):
    with jax.numpy_dtype_promotion("standard"):
        (best,) = search(*MODELS[name](), devices=8, chip="v5e", keep=1, verify=jax.devices())
    assert best.checks[-1].by == "compile"


def test_measured_steps_fit_a_machine():
    """Times made with known factors give them back."""
    found = search(step, *ARGS, devices=8, chip="v5e", keep=8, limits=Limits(least=(("batch", 2),)))
    measured = [
        (
            one,
            3 * one.compute_seconds + 2 * (one.exposed_seconds + max(0, one.hidden_seconds - one.compute_seconds / 4)),
        )
        for one in found
    ]
    fitted, usual = fit_chip(measured), CostModel()
    assert fitted.compute == pytest.approx(usual.compute / 3, rel=0.05)
    assert fitted.network == pytest.approx(usual.network / 2, rel=0.05)


def test_errors():
    with pytest.raises(MeshError, match=r'`verify="compile"` needs 64 devices, and there are 8; emulate them'):
        search(step, *ARGS, devices=64, chip="v5e", verify="compile")
    with pytest.raises(MeshError, match="`verify` has 8 devices, but the search is for 4; give as many"):
        search(step, *ARGS, devices=4, chip="v5e", verify=jax.devices())
    with pytest.raises(MeshError, match="`fit_chip` got 0 measurements; it needs at least two"):
        fit_chip([])
