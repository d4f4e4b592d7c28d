"""Lookups in arrays whose shards are padded, as a vocabulary of 50,257 rows."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from judging import programs_of, verdict_of

import shardfx as sfx


MESH = sfx.MeshSpec({"data": 2, "tensor": 4}).abstract()
ROWS = NamedSharding(MESH, P("tensor"))


def struct(shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(MESH, P(*spec)))


def loss(table, tokens):
    # Ten rows on four devices: the last has one row, and two of padding.
    table = jax.lax.with_sharding_constraint(jnp.sin(table), ROWS)
    return jnp.sum(jnp.cos(table[tokens]))


TABLE = struct((10, 8))
TOKENS = struct((16,), "data", dtype=jnp.int32)


@pytest.fixture(scope="module")
def programs():
    return programs_of(jax.grad(loss), (TABLE, TOKENS))


def test_an_embedding_of_padded_shards_is_proved(programs):
    verdict = verdict_of(programs)
    assert verdict.outcome == "proved", verdict


@pytest.mark.parametrize(
    "before, after",
    [
        # Other rows of each device, and other bounds of the indices.
        (r"constant\(\{0, 1, 2, 3(.*?)\}\)", r"constant({2, 1, 0, 3\1})"),
        (r"constant\(\{0, 3, 6, 9\}\)", "constant({3, 0, 6, 9})"),
        (r"s32\[\] constant\(2\)", "s32[] constant(1)"),
        (r"s32\[\] constant\(2\)", "s32[] constant(3)"),
        (r"constant\(\{9\}\)", "constant({8})"),
        (r"constant\(\{9\}\)", "constant({10})"),
        # Rows that another device has, and a sum that is left out.
        (r"direction=GT", "direction=GE"),
        (r"direction=LT", "direction=LE"),
        (r"subtract\((%\S+), (%\S+)\)", r"add(\1, \2)"),
        (r"= (f32\[8,8\]\S*) all-reduce\((%[\w.]+)\).*", r"= \1 copy(\2)"),
        (r"= (f32\[3,8\]\S*) all-reduce\((%[\w.]+)\).*", r"= \1 copy(\2)"),
    ],
)
def test_another_lookup_is_not_proved(programs, before, after):
    text = programs.partitioned
    changed, count = re.subn(before, after, text, count=1)
    assert count == 1 and changed != text, text
    assert verdict_of(programs, changed).outcome != "proved"


def kernel_gradient(image, cotangent):
    """A gradient whose first position of the kernel is zero: it reads padding alone."""

    def convolved(x, w):
        numbers = ("NHC", "HIO", "NHC")
        return jax.lax.conv_general_dilated(
            x, w, (3,), [(1, 1)], dimension_numbers=numbers
        )

    def loss(w, x, cotangent):
        return jnp.sum(convolved(x, w) * cotangent)

    mesh = sfx.MeshSpec({"data": 4, "tensor": 2}).abstract()

    def struct(shape, spec):
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    kernel = struct((2, 8, 6), P("tensor"))
    step = jax.jit(jax.grad(loss), out_shardings=kernel.sharding)
    arrays = (kernel, struct((16, 2, 8), image), struct((16, 1, 6), cotangent))
    return programs_of(step, arrays)


@pytest.mark.parametrize(
    "image, cotangent",
    [
        (P(None, None, "tensor"), P("data")),
        (P(), P()),
        (P("data"), P("data")),
    ],
)
def test_a_device_whose_taps_read_padding_alone_has_zeros(image, cotangent):
    verdict = verdict_of(kernel_gradient(image, cotangent))
    assert verdict.outcome == "proved", verdict


@pytest.mark.parametrize(
    "before, after",
    [
        # Rows of another device, of no device, and of all.
        (r"constant\(\{0, 1\}\)", "constant({1, 0})"),
        (r"constant\(\{0, 1, 0, 1,", "constant({1, 1, 0, 1,"),
        (r"source_target_pairs=\{\{0,1\}", "source_target_pairs={{1,0}"),
        (r"direction=GE", "direction=LT"),
        (r"= (f32\[1,8,6\]\S*) all-reduce\((%[\w.\-]+)\).*", r"= \1 copy(\2)"),
    ],
)
def test_another_gradient_of_a_kernel_is_not_proved(before, after):
    programs = kernel_gradient(P("data"), P("data"))
    changed, count = re.subn(before, after, programs.partitioned, count=1)
    assert count == 1 and changed != programs.partitioned, programs.partitioned
    assert verdict_of(programs, changed).outcome != "proved"


# No padding.
NONE = (0, 0, 0)


def test_devices_that_hold_padding_alone_are_not_accused():
    # Two rows over four devices: the others have zeros, as if a sum were unfinished.
    mesh = sfx.MeshSpec({"a": 4, "b": 2}).abstract()
    cut = NamedSharding(mesh, P(None, "a", "b"))

    def step(x):
        hold = lambda array: jax.lax.with_sharding_constraint(array, cut)
        pad = lambda array, *rows: jax.lax.pad(array, 0.0, [NONE, rows, NONE])
        first = pad(x[:, 1:], 0, 1, 0)
        second = pad(x[:, :1], 1, 0, 1)
        return jnp.sin(hold(hold(first) + hold(second)))

    rows = NamedSharding(mesh, P(("b", "a")))
    x = jax.ShapeDtypeStruct((8, 2, 4), jnp.float32, sharding=rows)
    verdict = sfx.testing.verify(step, x)
    assert verdict.outcome == "not judged", verdict
    assert "of zeros on others" in str(verdict)
