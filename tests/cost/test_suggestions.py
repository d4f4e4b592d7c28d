"""The savings of the changes that `fit` suggests, against the compiler's count."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import pytest

from benchmarks._cost_suggestions import CHIP, MESH, changed, on_host, peak
from shardfx import PathRules, chips, filter_jit, plan
from shardfx.cost import fit


@pytest.fixture(scope="module")
def before():
    return fit(*changed(), chip=CHIP), peak(*changed())


@pytest.mark.parametrize(
    "words, change",
    [
        ("donate", {"donate": ("params", "opt")}),
        ("ZeRO-1", {"over": "data"}),
        ("ZeRO-3", {"over": "data", "cut": True}),
        ("half the batch", {"halved": True}),
        ("recompute", {"remat": True}),
    ],
)
def test_a_change_saves_what_the_compiler_saves(before, words, change):
    found, compiled = before
    assert found.peak_bytes == pytest.approx(compiled, rel=0.05)
    (told,) = [one for one in found.changes if words in one.what]
    after = peak(*changed(**change))
    assert told.peak_bytes == pytest.approx(after, rel=0.12)
    assert told.saves_bytes == pytest.approx(compiled - after, abs=0.1 * compiled)
    if words == "recompute":
        assert not [
            one
            for one in fit(*changed(**change), chip=CHIP).changes
            if words in one.what
        ]


def test_a_state_on_the_host_needs_the_told_memory(before):
    found, _ = before
    (told,) = [one for one in found.changes if "host memory" in one.what]
    jitted, params, opt, batch = changed()
    step = inspect.unwrap(jitted)

    def moved(params, opt, batch):
        new, opt = step(params, jax.device_put(opt, jax.memory.Space.Device), batch)
        return new, jax.device_put(opt, jax.memory.Space.Host)

    after = fit(moved, params, jax.tree.map(on_host, opt), batch, chip=CHIP)
    assert after.bytes_of("optimizer") == 0 and "in host memory" in str(after)
    # What the optimizer returns goes back to the host and is no result on the device.
    assert after.bytes_of("results") <= after.bytes_of("parameters")
    assert told.peak_bytes == pytest.approx(after.peak_bytes, rel=0.15)
    assert "jax.device_put" in told.how


def test_a_decode_step_shows_its_cache():
    rules = PathRules.parse("w->replicate, .*->data")

    def laid(tree):
        return plan(tree, MESH, paths=rules, unused="allow").structs

    params = laid({"w": jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)})
    cache = laid(
        dict.fromkeys(
            ("keys", "values"), jax.ShapeDtypeStruct((8, 128, 64), jnp.bfloat16)
        )
    )
    token = laid({"token": jax.ShapeDtypeStruct((8, 64), jnp.bfloat16)})["token"]

    def decode(params, cache, token, index):
        x = token @ params["w"]
        cache = {
            name: jax.lax.dynamic_update_slice(one, x[:, None], (0, index, 0))
            for name, one in cache.items()
        }
        scores = jax.nn.softmax(jnp.einsum("bd,btd->bt", x, cache["keys"]))
        return jnp.einsum("bt,btd->bd", scores, cache["values"]), cache

    args = (params, cache, token, jax.ShapeDtypeStruct((), jnp.int32))
    outs = (None, jax.tree.map(lambda one: one.sharding, cache))
    found = fit(
        filter_jit(decode, out_shardings=outs, donate="cache"), *args, chip="h100"
    )
    whole = 2 * 2 * 128 * 64 * 2
    assert (
        found.bytes_of("KV cache") == whole
        and found.bytes_of("parameters") == 64 * 64 * 2
    )
    assert found.bytes_of("results") < 1024  # the cache is updated in place
    assert found.peak_bytes < 1.2 * (whole + 64 * 64 * 2) + 4096
    twice = fit(filter_jit(decode, out_shardings=outs), *args, chip="h100")
    assert twice.bytes_of("results") >= whole
    (told,) = [one for one in twice.changes if "donate" in one.what]
    assert '"cache"' in told.how


def test_a_verdict_that_is_close_says_so(before):
    found, _ = before
    near = dataclasses.replace(
        found,
        chip=dataclasses.replace(CHIP, usable_hbm_bytes=int(1.1 * found.peak_bytes)),
    )
    assert (
        near.fits
        and near.is_close
        and "That is close for an estimate; `compile_for(" in str(near)
    )
    assert "MAY OR MAY NOT fit: as estimated, it fits tiny" in str(
        near
    ) and "Expect " in str(near)
    over = dataclasses.replace(
        found,
        chip=dataclasses.replace(CHIP, usable_hbm_bytes=int(0.9 * found.peak_bytes)),
    )
    assert "MAY OR MAY NOT fit: as estimated, it does not fit tiny" in str(over)
    assert not found.is_close and "close" not in str(found).split("largest")[0]
    far = dataclasses.replace(found, chip=chips.find("h100"))
    assert far.fits and not far.is_close and "MAY" not in str(far)
    assert not dataclasses.replace(near, basis="compiled").is_close
