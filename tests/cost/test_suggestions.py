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
        changes = fit(*changed(**change), chip=CHIP).changes
        assert not [one for one in changes if words in one.what]


def test_a_state_on_the_host_needs_the_told_memory(before):
    found, _ = before
    (told,) = [one for one in found.changes if "host memory" in one.what]
    jitted, params, opt, batch = changed()
    step = inspect.unwrap(jitted)

    def moved(params, opt, batch):
        placed = jax.device_put(opt, jax.memory.Space.Device)
        new, opt = step(params, placed, batch)
        return new, jax.device_put(opt, jax.memory.Space.Host)

    after = fit(moved, params, jax.tree.map(on_host, opt), batch, chip=CHIP)
    assert after.bytes_of("optimizer") == 0
    assert "in host memory" in str(after)
    # What the optimizer returns goes back to the host and is no result on the device.
    assert after.bytes_of("results") <= after.bytes_of("parameters")
    assert told.peak_bytes == pytest.approx(after.peak_bytes, rel=0.15)
    assert "jax.device_put" in told.how


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
    assert found.bytes_of("KV cache") == whole
    assert found.bytes_of("parameters") == 64 * 64 * 2
    assert found.bytes_of("results") < 1024  # the cache is updated in place
    assert found.peak_bytes < 1.2 * (whole + 64 * 64 * 2) + 4096
    twice = fit(filter_jit(decode, out_shardings=outs), *args, chip="h100")
    assert twice.bytes_of("results") >= whole
    (told,) = [one for one in twice.changes if "donate" in one.what]
    assert '"cache"' in told.how


UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20}


def test_a_verdict_that_is_close_says_so(before):
    found, _ = before
    least, most = found.expected_bytes
    assert least < found.peak_bytes < most

    def on_chip_of(usable_bytes: int):
        chip = dataclasses.replace(CHIP, usable_hbm_bytes=usable_bytes)
        return dataclasses.replace(found, chip=chip)

    near = on_chip_of((found.peak_bytes + most) // 2)
    assert near.fits
    assert near.is_close
    assert "`compile_for(" in str(near)
    assert "MAY OR MAY NOT fit: as foreseen, it fits tiny" in str(near)
    over = on_chip_of((found.peak_bytes + least) // 2)
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
    assert compiled.expected_bytes == (found.peak_bytes, found.peak_bytes)
