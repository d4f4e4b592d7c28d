"""What the TPU's compiler keeps in bfloat16 although it is written in float32."""

import jax
import jax.numpy as jnp
import pytest

from shardfx import MeshSpec, PathRules, fit, plan


LAYERS, WIDTH, ROWS = 4, 1024, 4096
MESH = MeshSpec({"data": 2})


def _plans(dtype=jnp.float32):
    whole, cut = PathRules.parse(".*->replicate"), PathRules.parse(".*->data")
    params = plan(jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), dtype), MESH, paths=whole)
    return {"params": params, "batch": plan(jax.ShapeDtypeStruct((ROWS, WIDTH), dtype), MESH, paths=cut)}


def _found(layer, chip, dtype=jnp.float32):
    def step(params, batch):
        def loss(params):
            return jnp.sum(jax.lax.scan(lambda x, w: (layer(x, w), None), batch, params)[0].astype(jnp.float32) ** 2)

        return jax.grad(loss)(params)

    return [one.what for one in fit(_plans(dtype), step=step, chip=chip).largest]


def test_what_waits_for_products_waits_in_bfloat16():
    stack = f"[{LAYERS},{ROWS},{WIDTH}] cut -,data,-"
    copy = f"bf16[{LAYERS},{WIDTH},{WIDTH}]"
    on_tpu = _found(lambda x, w: x + x @ w, "v5e")
    assert f"bf16{stack}" in on_tpu and copy in on_tpu
    on_gpu = _found(lambda x, w: x + x @ w, "h100")
    assert f"f32{stack}" in on_gpu and copy not in on_gpu


@pytest.mark.parametrize(
    "layer",
    [
        lambda x, w: x + jax.lax.dot(x, w, precision=jax.lax.Precision.HIGHEST),
        lambda x, w: x + x * jnp.sum(w),
    ],
)
def test_what_is_read_as_it_is_written_is_kept_so(layer):
    assert not any(what.startswith("bf16") for what in _found(layer, "v5e"))


def test_weights_that_a_layer_casts_are_cast_before_the_loop():
    @jax.checkpoint
    def layer(x, w):
        return x + (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(x.dtype)

    copy = f"bf16[{LAYERS},{WIDTH},{WIDTH}]"
    assert copy in _found(layer, "v5e") and copy not in _found(layer, "h100")
    assert not any(what.startswith("f32") for what in _found(lambda x, w: x + x @ w, "v5e", jnp.bfloat16))


def test_what_a_loop_hands_on_and_what_a_step_returns_stay_as_they_are():
    def step(params, batch):
        last, sums = jax.lax.scan(lambda x, w: (x @ w, x), batch, params)
        return sums, last

    found = fit(_plans(), step=step, chip="v5e")
    assert found.bytes_of("results") == (LAYERS + 1) * ROWS // 2 * WIDTH * 4
