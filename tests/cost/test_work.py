"""The work of one device, from the text of partitioned programs."""

import jax
import jax.numpy as jnp

from shardfx import MeshSpec
from shardfx.cost._work import work_of
from tests.programs import device_program, parse_hlo


def work(step, *args, mesh=None, dims=None):
    mesh = MeshSpec(mesh or {"data": 2})
    module = device_program(step, args, platform="gpu", mesh=mesh, dims=dims)
    return work_of(module)


X = jax.ShapeDtypeStruct((64, 32), "float32")
W = jax.ShapeDtypeStruct((32, 16), "float32")


def test_products_loops_and_shards():
    whole = work(jnp.dot, X, W)
    assert whole.flops == 2 * 64 * 32 * 16
    expected = 4 * (64 * 32 + 32 * 16 + 64 * 16)
    assert whole.bytes == expected
    mesh = {"data": 4, "model": 2}
    dims = [(("data",), ()), ((), ("model",))]
    cut = work(
        jnp.dot,
        X,
        W,
        mesh=mesh,
        dims=dims,
    )
    assert cut.flops == whole.flops / 8
    looped = work(lambda x, w: jax.lax.scan(lambda c, _: (c, c @ w), x, length=5), X, W)
    assert looped.flops == 5 * whole.flops


def test_lookups_count_what_they_name_and_results_are_written():
    table = jax.ShapeDtypeStruct((1000, 8), "float32")
    rows = jax.ShapeDtypeStruct((10,), "int32")
    lookup = work(lambda table, rows: table[rows], table, rows)
    assert lookup.flops == 0
    assert lookup.bytes < 4 * 1000 * 8
    actual = work(lambda x: x + 1, X).bytes
    assert actual == 2 * 4 * 64 * 32


def test_a_loop_without_known_trips_is_noted():
    n = jax.ShapeDtypeStruct((), "int32")
    loop = work(
        lambda x, n: jax.lax.fori_loop(0, n, lambda _, y: jnp.tanh(y) + 1, x), X, n
    )
    assert loop.notes == ("the trips of a loop are not known and count once",)
    assert work(jnp.dot, X, W).notes == ()


def test_an_operand_in_parts_is_as_long_as_the_other():
    text = """HloModule m

ENTRY %main (x: f32[16,32], w: f32[32,16]) -> f32[64,16] {
  %x = f32[16,32]{1,0} parameter(0)
  %w = f32[32,16]{1,0} parameter(1)
  %parts = (f32[SHARD]{1,0}, f32[SHARD]{1,0}) collective-permute(%x), channel_id=1, source_target_pairs={{0,1},{1,0}}
  ROOT %dot = f32[64,16]{1,0} dot(%parts, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
    for shard in ("16,32", "64,8"):
        flops = work_of(parse_hlo(text.replace("SHARD", shard))).flops
        assert flops == 2 * 64 * 32 * 16
