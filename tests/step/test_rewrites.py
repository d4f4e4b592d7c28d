import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

from shardfx import MeshSpec
from shardfx.cost import estimate


MESH = MeshSpec({"data": 4, "model": 4}).abstract()


def struct(shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(MESH, P(*spec)))


def sent(step, *args):
    return sorted(
        (row.kind, row.axes, row.wire_bytes)
        for row in estimate(step, *args, compiler="tpu").rows
    )


# What libtpu sends for each was read off the program that it compiles for v5e:4x4.
def test_each_device_sends_its_own_largest_values():
    step = jax.jit(
        lambda x: lax.top_k(x, 16), out_shardings=NamedSharding(MESH, P("data"))
    )
    part = 64 * 16 * 4 * 3
    assert (
        sent(step, struct((256, 8192), "data", "model"))
        == [("all-gather", ("model",), part)] * 2
    )


@pytest.mark.parametrize("shape", [(256, 1024), (16, 16, 8192)])
def test_many_of_the_values_are_sorted_where_rows_are_whole(shape):
    kinds = {
        kind
        for kind, _, _ in sent(
            lambda x: lax.top_k(x, 64),
            struct(shape, "data", *[None] * (len(shape) - 2)),
        )
    }
    assert not kinds
    cut = struct(shape, "data", *[None] * (len(shape) - 2), "model")
    assert "all-to-all" in {
        kind for kind, _, _ in sent(lambda x: lax.top_k(x, 64), cut)
    }


@pytest.mark.parametrize(
    "transform",
    [
        jnp.fft.fft,
        jnp.fft.rfft,
        jnp.fft.rfft2,
        lambda x: jnp.fft.irfft(lax.complex(x, x)),
    ],
)
def test_transforms_of_whole_rows_send_nothing(transform):
    assert sent(transform, struct((16, 32, 32), "data")) == []


def test_a_transform_over_sharded_rows_is_two_products():
    step = jax.jit(jnp.fft.rfft, out_shardings=NamedSharding(MESH, P("data")))
    found = sent(step, struct((16, 128), "data", "model"))
    assert found == [("all-reduce", ("model",), 4 * 128 * 4 * 3 // 2)] * 2


def test_complex_numbers_are_multiplied_in_three_products():
    left, right = (
        struct((64, 32), None, "model", dtype=jnp.complex64),
        struct((32, 16), "model", dtype=jnp.complex64),
    )
    step = jax.jit(jnp.dot, out_shardings=NamedSharding(MESH, P()))
    assert (
        sent(step, left, right)
        == [("all-reduce", ("model",), 64 * 16 * 4 * 3 // 2)] * 3
    )


def test_rows_of_an_index_are_seen_as_rows():
    cache, places = struct((32, 96, 8), "data"), struct((32,), "data", dtype=jnp.int32)
    step = lambda cache, places, new: cache.at[jnp.arange(32), places].set(new)
    assert sent(step, cache, places, struct((32, 8), "data")) == []


@pytest.mark.parametrize(
    "roll, kinds",
    [
        (
            lambda x: jnp.roll(x[1], 1, 0),
            {"all-reduce": 384, "collective-permute": 256},
        ),
        (lambda x: jnp.roll(x[1], 1, 1), {"collective-permute": 128}),
        (lambda x: jnp.roll(x, 1, 1), {"collective-permute": 2304}),
        (
            lambda x: jnp.roll(x[3], (2, -3), (0, 1)),
            {"all-reduce": 768, "collective-permute": 896},
        ),
    ],
)
def test_a_rolled_stack_sends_the_larger_part(roll, kinds):
    found = estimate(
        jax.jit(roll), struct((9, 128, 256), None, "data", "model"), compiler="tpu"
    )
    assert found.by("kind") == kinds
    assert all(
        row.source is not None and row.source.function.endswith("<lambda>")
        for row in found.rows
    )
