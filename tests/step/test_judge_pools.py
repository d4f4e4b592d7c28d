"""Pools whose windows overlap along cut dimensions, and their gradients: a device takes
the rows of its neighbours that its windows read, and those of the padding.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from judging import programs_of, verdict_of

import shardfx as sfx


PERMUTES = (
    r"( collective-permute\(.*?source_target_pairs=)\{\{(\d),(\d)\},\{(\d),(\d)\}"
)
MESH = sfx.MeshSpec({"data": 2, "height": 2, "other": 2}).abstract()
ROWS = NamedSharding(MESH, P("data", "height"))
IMAGE = jax.ShapeDtypeStruct((4, 16, 16, 4), jnp.float32, sharding=ROWS)


def pooled(x, size: int, stride: int):
    window = (1, size, size, 1)
    strides = (1, stride, stride, 1)
    rows = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, strides, "SAME")
    return jnp.sin(rows)


def gradient(size: int, stride: int, lies=ROWS):
    loss = lambda x: jnp.sum(pooled(x, size, stride))
    return jax.jit(jax.grad(loss), out_shardings=lies)


@pytest.fixture(scope="module")
def programs():
    return programs_of(gradient(3, 2), (IMAGE,))


def test_the_gradient_of_windows_of_three_by_two_is_proved(programs):
    verdict = verdict_of(programs)
    assert verdict.outcome == "proved", verdict
    assert "select-and-scatter" in programs.partitioned


# Rows and columns.
TILES = NamedSharding(MESH, P("data", "height", "other"))
TILED = jax.ShapeDtypeStruct((4, 16, 16, 4), jnp.float32, sharding=TILES)


@pytest.fixture(scope="module")
def in_tiles():
    steps = {
        "pool": jax.jit(lambda x: pooled(x, 3, 2), out_shardings=TILES),
        "gradient": gradient(3, 2, TILES),
    }
    return {name: programs_of(step, (TILED,)) for name, step in steps.items()}


@pytest.mark.parametrize("name", ["pool", "gradient"])
def test_windows_over_rows_and_columns_that_are_cut(in_tiles, name):
    verdict = verdict_of(in_tiles[name])
    assert verdict.outcome == "proved", verdict


def test_their_numbers_are_those_of_one_device():
    mesh = sfx.MeshSpec({"data": 2, "height": 2, "other": 2}).build(jax.devices()[:8])
    x = np.random.default_rng(0).normal(size=TILED.shape).astype(np.float32)
    tiles = NamedSharding(mesh, TILES.spec)
    placed = jax.device_put(x, tiles)
    ours = gradient(3, 2, tiles)(placed)
    whole = jax.grad(lambda x: jnp.sum(pooled(x, 3, 2)))(x)
    np.testing.assert_allclose(ours, whole, atol=1e-6)


@pytest.mark.parametrize("name", ["pool", "gradient"])
@pytest.mark.parametrize(
    "before, after",
    [
        # Padding that a window may select.
        (r"(broadcast\()%constant\S*(\), dimensions=\{\}.*/pad)", r"\1%zero\2"),
        (r"(broadcast\()%constant\S*(\), .*reduce_window_max)", r"\1%zero\2"),
        # Rows and columns beyond the masks.
        (r"s32\[\] constant\(16\)", "s32[] constant(15)"),
        (r"s32\[\] constant\(16\)", "s32[] constant(17)"),
        (r"s32\[\] constant\(17\)", "s32[] constant(18)"),
        # Other rows and columns of neighbours.
        (PERMUTES, r"\1{{\3,\2},{\5,\4}"),
        (r"(slice=\{\[0:2\], )\[0:1\]", r"\1[1:2]"),
    ],
)
def test_another_pool_in_tiles_is_not_proved(in_tiles, name, before, after):
    programs = in_tiles[name]
    text = programs.partitioned.replace(
        "  %partition-id", "  %zero = f32[] constant(0)\n  %partition-id", 1
    )
    assert verdict_of(programs._replace(partitioned=text)).outcome == "proved"
    outcomes = []
    for match in re.finditer(before, text):
        place = match.start()
        changed = text[:place] + re.sub(before, after, text[place:], count=1)
        verdict = verdict_of(programs._replace(partitioned=changed))
        outcomes.append((verdict.outcome, match[0][:60]))
    assert "proved" not in dict(outcomes), outcomes


@pytest.mark.parametrize("size, stride", [(3, 1), (2, 1), (5, 2)])
def test_windows_that_xla_computes_wrongly_are_not_proved(size, stride):
    verdict = sfx.testing.verify(gradient(size, stride), IMAGE)
    assert verdict.outcome != "proved", verdict


@pytest.mark.parametrize(
    "before, after",
    [
        # Other windows, another choice, and another sum.
        (r"(select-and-scatter\(.*stride=)1x2x2x1", r"\g<1>1x1x2x1"),
        (r"(select-and-scatter\(.*window=\{size=)1x3x3x1", r"\g<1>1x2x3x1"),
        (r"direction=GE", "direction=LE"),
        (r"(ROOT %add\S* = f32\[\] )add\(", r"\1subtract("),
        # Padding that a window may select, and a source that adds something.
        (r"f32\[\] constant\(-inf\)", "f32[] constant(0)"),
        (r"f32\[\] constant\(0\)", "f32[] constant(1)"),
        # Other rows: of the device itself, of neighbours, at other places.
        (r"s32\[\] constant\(9\)", "s32[] constant(8)"),
        (r"s32\[\] constant\(17\)", "s32[] constant(18)"),
        (r"slice=\{\[0:2\], \[8:9\]", "slice={[0:2], [7:8]"),
        (PERMUTES, r"\1{{\3,\2},{\5,\4}"),
    ],
)
def test_another_gradient_is_not_proved(programs, before, after):
    text = programs.partitioned
    places = [match.start() for match in re.finditer(before, text)]
    assert places
    for place in places:
        changed = text[:place] + re.sub(before, after, text[place:], count=1)
        assert changed != text
        verdict = verdict_of(programs, changed)
        assert verdict.outcome != "proved", (before, place)
