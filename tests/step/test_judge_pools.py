"""The gradient of a pool whose windows overlap along a cut dimension: a device takes the
rows of its neighbours that its windows read, and those of the padding.
"""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from judging import programs_of, verdict_of

import shardfx as sfx


MESH = sfx.MeshSpec({"data": 2, "height": 2, "other": 2}).abstract()
ROWS = NamedSharding(MESH, P("data", "height"))
IMAGE = jax.ShapeDtypeStruct((4, 16, 16, 4), jnp.float32, sharding=ROWS)


def gradient(size: int, stride: int):
    def loss(x):
        window = (1, size, size, 1)
        strides = (1, stride, stride, 1)
        pooled = jax.lax.reduce_window(
            x, -jnp.inf, jax.lax.max, window, strides, "SAME"
        )
        return jnp.sum(jnp.sin(pooled))

    return jax.jit(jax.grad(loss), out_shardings=ROWS)


@pytest.fixture(scope="module")
def programs():
    return programs_of(gradient(3, 2), (IMAGE,))


def test_the_gradient_of_windows_of_three_by_two_is_proved(programs):
    verdict = verdict_of(programs)
    assert verdict.outcome == "proved", verdict
    assert "select-and-scatter" in programs.partitioned


@pytest.mark.parametrize("size, stride", [(3, 1), (2, 1), (5, 2)])
def test_windows_that_xla_computes_wrongly_are_not_proved(size, stride):
    verdict = sfx.testing.verify(gradient(size, stride), IMAGE)
    assert verdict.outcome != "proved", verdict


PERMUTES = (
    r"( collective-permute\(.*?source_target_pairs=)\{\{(\d),(\d)\},\{(\d),(\d)\}"
)


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
