"""The savings of the changes that `fit` suggests, against the compiler's count."""

import dataclasses
import inspect
import re

import jax
import jax.numpy as jnp
import pytest

from benchmarks._cost_suggestions import CHIP, MESH, changed, on_host, peak
from shardfx import PathRules, filter_jit, plan
from shardfx.cost import fit


@pytest.fixture(scope="module")
def before():
    fitted = fit(*changed(), chip=CHIP)
    return fitted, peak(*changed())


def suggestions(fitted, words):
    """The suggested changes that contain some words."""
    return [change for change in fitted.changes if words in change.what]


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
    fitted, compiled = before
    assert fitted.peak_bytes == pytest.approx(compiled, rel=0.05)
    (suggestion,) = suggestions(fitted, words)
    after = peak(*changed(**change))
    assert suggestion.peak_bytes == pytest.approx(after, rel=0.12)
    saved_bytes = compiled - after
    assert suggestion.saves_bytes == pytest.approx(saved_bytes, abs=0.1 * compiled)
    if words == "recompute":
        fitted_after = fit(*changed(**change), chip=CHIP)
        assert not suggestions(fitted_after, words)


@pytest.mark.skipif(
    jax.__version_info__ < (0, 10),
    reason="XLA of JAX 0.9 partitions no program that moves arrays to the host",
)
def test_a_state_on_the_host_needs_the_told_memory(before):
    fitted, _ = before
    (suggestion,) = suggestions(fitted, "host memory")
    jitted, params, opt, batch = changed()
    step = inspect.unwrap(jitted)

    def moved(params, opt, batch):
        placed = jax.device_put(opt, jax.memory.Space.Device)
        new_params, new_opt = step(params, placed, batch)
        return new_params, jax.device_put(new_opt, jax.memory.Space.Host)

    opt_on_host = jax.tree.map(on_host, opt)
    after = fit(moved, params, opt_on_host, batch, chip=CHIP)
    assert after.bytes_of("optimizer") == 0
    assert "in host memory" in str(after)
    # What the optimizer returns goes back to the host and is no result on the device.
    assert after.bytes_of("results") <= after.bytes_of("parameters")
    assert suggestion.peak_bytes == pytest.approx(after.peak_bytes, rel=0.15)
    assert "jax.device_put" in suggestion.how


def test_a_decode_step_shows_its_cache():
    rules = PathRules.parse("w->replicate, .*->data")

    def laid(tree):
        return plan(tree, MESH, paths=rules, unused="allow").structs

    struct = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    params = laid({"w": struct})
    struct = jax.ShapeDtypeStruct((8, 128, 64), jnp.bfloat16)
    cache = laid(dict.fromkeys(("keys", "values"), struct))
    struct = jax.ShapeDtypeStruct((8, 64), jnp.bfloat16)
    token = laid({"token": struct})["token"]

    def decode(params, cache, token, index):
        x = token @ params["w"]
        row = x[:, None]
        updated = {}
        for name, rows in cache.items():
            updated[name] = jax.lax.dynamic_update_slice(rows, row, (0, index, 0))
        scores = jnp.einsum("bd,btd->bt", x, updated["keys"])
        weights = jax.nn.softmax(scores)
        return jnp.einsum("bt,btd->bd", weights, updated["values"]), updated

    args = (params, cache, token, jax.ShapeDtypeStruct((), jnp.int32))
    cache_shardings = jax.tree.map(lambda struct: struct.sharding, cache)
    outs = (None, cache_shardings)
    donating = filter_jit(decode, out_shardings=outs, donate="cache")
    fitted = fit(donating, *args, chip="h100")
    whole = 2 * 2 * 128 * 64 * 2
    assert fitted.bytes_of("KV cache") == whole
    assert fitted.bytes_of("parameters") == 64 * 64 * 2
    assert fitted.bytes_of("results") < 1024  # the cache is updated in place
    assert fitted.peak_bytes < 1.2 * (whole + 64 * 64 * 2) + 4096
    twice = fit(filter_jit(decode, out_shardings=outs), *args, chip="h100")
    assert twice.bytes_of("results") >= whole
    (suggestion,) = suggestions(twice, "donate")
    assert '"cache"' in suggestion.how


UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20}


def test_a_verdict_that_is_close_says_so(before):
    fitted, _ = before
    least, most = fitted.expected_bytes
    assert least < fitted.peak_bytes < most

    def on_chip_of(usable_bytes: int):
        chip = dataclasses.replace(CHIP, usable_hbm_bytes=usable_bytes)
        return dataclasses.replace(fitted, chip=chip)

    near = on_chip_of((fitted.peak_bytes + most) // 2)
    assert near.fits
    assert near.is_close
    assert "`compile_for(" in str(near)
    assert "MAY OR MAY NOT fit: as foreseen, it fits tiny" in str(near)
    over = on_chip_of((fitted.peak_bytes + least) // 2)
    assert "MAY OR MAY NOT fit: as foreseen, it does not fit tiny" in str(over)
    match = re.search(r"Foreseen: expect (\S+) (\w+) to (\S+) (\w+)\.", str(over))
    assert match is not None
    shown_least, least_unit, shown_most, most_unit = match.groups()
    assert float(shown_least) * UNITS[least_unit] == pytest.approx(least, rel=0.05)
    assert float(shown_most) * UNITS[most_unit] == pytest.approx(most, rel=0.05)
    far = on_chip_of(most)
    assert far.fits
    assert not far.is_close
    assert "MAY" not in str(far)
    never = on_chip_of(least - 1)
    assert not never.fits
    assert not never.is_close
    assert "MAY" not in str(never)
    assert not dataclasses.replace(near, basis="compiled").is_close
    compiled = dataclasses.replace(near, basis="compiled")
    assert compiled.expected_bytes == (fitted.peak_bytes, fitted.peak_bytes)
