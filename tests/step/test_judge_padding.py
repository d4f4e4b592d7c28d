"""Padded dimensions that a reshape splits for an exchange, and another one merges: a
kernel of three rows on two devices, each of which gets two rows.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from judging import programs_of, proved_programs, verdict_of

import shardfx as sfx


HEIGHT = P(None, None, "b")


def conv(x, w):
    return jax.lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW")
    )


def arguments(sizes: dict[str, int], kernel: P) -> tuple[jax.ShapeDtypeStruct, ...]:
    mesh = sfx.MeshSpec(sizes).abstract()
    image = NamedSharding(mesh, HEIGHT)
    return (
        jax.ShapeDtypeStruct((4, 8, 8, 8), jnp.float32, sharding=image),
        jax.ShapeDtypeStruct(
            (8, 8, 3, 3), jnp.float32, sharding=NamedSharding(mesh, kernel)
        ),
    )


@pytest.fixture(scope="module")
def programs():
    return proved_programs(conv, arguments({"b": 2}, P(None, "b")))


def test_the_numbers_of_the_proved_program_are_right():
    mesh = jax.make_mesh((2,), ("b",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 8, 8, 8)).astype(np.float32)
    w = rng.standard_normal((8, 8, 3, 3)).astype(np.float32)
    image = jax.device_put(x, NamedSharding(mesh, HEIGHT))
    kernel = jax.device_put(w, NamedSharding(mesh, P(None, "b")))
    ours = jax.jit(conv)(image, kernel)
    np.testing.assert_allclose(ours, jax.jit(conv)(x, w), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "before, after",
    [
        # Rows behind the padding, and rows of a padding before.
        ("padding=0_0x0_0x0_1x0_0", "padding=0_0x0_0x1_0x0_0"),
        # A mask that covers rows of the kernel.
        ("constant({0, 2})", "constant({2, 2})"),
        ("constant({0, 2})", "constant({0, 3})"),
        ("s32[] constant(3)", "s32[] constant(2)"),
        # Channels and rows exchanged, or of other devices.
        ("dimensions={0,2,1,3,4}", "dimensions={0,3,1,2,4}"),
        ("source_target_pairs={{0,1}}", "source_target_pairs={{1,0}}"),
        ("s32[] constant(-2)", "s32[] constant(-1)"),
        ("constant({0, 4})", "constant({4, 0})"),
    ],
)
def test_another_exchange_of_padding_is_not_proved(programs, before, after):
    text = programs.partitioned
    assert before in text
    assert verdict_of(programs, text.replace(before, after)).outcome != "proved"


def test_replicas_that_are_summed_behind_padding_are_refuted():
    verdict = verdict_of(programs_of(conv, arguments({"a": 4, "b": 2}, P("a", "b"))))
    assert verdict.outcome == "refuted", verdict
    (refutation,) = verdict.refutations
    assert "4 times what it should be" in refutation.fault
    assert refutation.source is not None and refutation.source.function == "conv"


def strided(x, w):
    return jax.lax.conv_general_dilated(
        x, w, (2, 2), "VALID", dimension_numbers=("NCHW", "OIHW", "NCHW")
    )


@pytest.mark.parametrize(
    "sizes, kernel, outcome",
    [
        ({"b": 2}, P("b"), "proved"),
        ({"a": 2, "b": 2}, P("a"), "refuted"),
    ],
)
def test_padding_of_a_kernel_of_one_row_is_followed(sizes, kernel, outcome):
    mesh = sfx.MeshSpec(sizes).abstract()
    x = jax.ShapeDtypeStruct(
        (4, 16, 16, 8), jnp.float32, sharding=NamedSharding(mesh, HEIGHT)
    )
    w = jax.ShapeDtypeStruct(
        (8, 16, 1, 1), jnp.float32, sharding=NamedSharding(mesh, kernel)
    )
    programs = programs_of(strided, (x, w))
    assert re.search(r"pad\(.*padding=0_0x0_0x0_1x0_0", programs.partitioned)
    verdict = verdict_of(programs)
    assert verdict.outcome == outcome, verdict
