"""The memory of one device while it runs a partitioned program: live ranges of arrays,
and their dtypes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shardfx import MeshSpec, _step
from shardfx.cost import fit
from shardfx.cost._live import device_memory
from shardfx.cost._live.arrays import list_schedule


def structs(mesh, **shapes):
    """Structs by name, from a shape, a spec, and a dtype (float32 by default)."""

    def struct(shape, spec, dtype=jnp.float32):
        sharding = jax.NamedSharding(MeshSpec(mesh).abstract(), spec)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    return [struct(*shape_and_spec) for shape_and_spec in shapes.values()]


TEXT = """
HloModule made

%body (state: (s32[], f32[8,128], f32[4,8,128], f32[128,128])) -> (s32[], f32[8,128], f32[4,8,128], f32[128,128]) {
  %state = (s32[], f32[8,128], f32[4,8,128], f32[128,128]) parameter(0)
  %turn = s32[] get-tuple-element(%state), index=0
  %x = f32[8,128] get-tuple-element(%state), index=1
  %kept = f32[4,8,128] get-tuple-element(%state), index=2
  %w = f32[128,128] get-tuple-element(%state), index=3
  %one = s32[] constant(1)
  %next = s32[] add(%turn, %one)
  %product = f32[8,128] dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %tanh = f32[8,128] tanh(%product)
  %slice = f32[1,8,128] reshape(%x)
  %zero = s32[] constant(0)
  %stack = f32[4,8,128] dynamic-update-slice(%kept, %slice, %turn, %zero, %zero)
  ROOT %out = (s32[], f32[8,128], f32[4,8,128], f32[128,128]) tuple(%next, %tanh, %stack, %w)
}

%condition (state: (s32[], f32[8,128], f32[4,8,128], f32[128,128])) -> pred[] {
  %state = (s32[], f32[8,128], f32[4,8,128], f32[128,128]) parameter(0)
  %turn = s32[] get-tuple-element(%state), index=0
  %most = s32[] constant(4)
  ROOT %less = pred[] compare(%turn, %most), direction=LT
}

ENTRY %main (x: f32[8,128], w: f32[128,128]) -> f32[4,8,128] {
  %x = f32[8,128] parameter(0)
  %w = f32[128,128] parameter(1)
  %zero = s32[] constant(0)
  %float = f32[] constant(0)
  %zeros = f32[4,8,128] broadcast(%float), dimensions={}
  %given = (s32[], f32[8,128], f32[4,8,128], f32[128,128]) tuple(%zero, %x, %zeros, %w)
  %loop = (s32[], f32[8,128], f32[4,8,128], f32[128,128]) while(%given), condition=%condition, body=%body
  ROOT %stacked = f32[4,8,128] get-tuple-element(%loop), index=2
}
"""


def test_a_loop_carries_its_state_in_place():
    memory = device_memory(_step.parse_hlo(TEXT))
    row = 8 * 128 * 4
    assert memory.arguments == (row, 128 * 128 * 4)
    assert memory.results == (4 * row,)
    # The stack is the result. The loop holds its state beside `x`, and one product: the
    # stack reads the old state.
    assert 2 * row <= memory.temporary_bytes <= 3 * row + 64
    tiled_memory = device_memory(_step.parse_hlo(TEXT), tile=(8, 128))
    assert tiled_memory.arguments == memory.arguments
    assert tiled_memory.peak_bytes >= memory.peak_bytes


def test_the_operation_that_frees_most_runs_next():
    sizes = {
        1: 10,
        2: 10,
        3: 1,
        4: 1,
        5: 0,
    }
    # Two large arrays, each followed by a small one: never both large ones at once.
    reads = [
        frozenset(),
        frozenset(),
        frozenset([1]),
        frozenset([2]),
        frozenset([3, 4]),
    ]
    makes = [(1,), (2,), (3,), (4,), (5,)]
    order = list_schedule(reads, makes, sizes.__getitem__)
    allowed = ([0, 2, 1, 3, 4], [1, 3, 0, 2, 4])
    assert order in allowed


def test_fused_operations_take_no_memory():
    x, w = structs({"data": 4}, x=((4096, 512), P("data")), w=((512, 32), P("data")))
    fitted = fit(lambda x: jnp.sum(jnp.tanh(x) * 2 + x), x, chip="h100")
    assert fitted.peak_bytes - fitted.bytes_of("batch") < 1024
    fitted = fit(lambda x, w: x @ w, x, w, chip="h100")
    assert fitted.bytes_of("copies in other layouts") == 512 * 32 * 4
    (copy,) = [
        array for array in fitted.largest if array.group == "copies in other layouts"
    ]
    assert copy.source is not None
    assert copy.source.file == __file__
    assert copy.what == "f32[512,32]"


def test_loops_and_branches_count_at_their_worst():
    (x,) = structs({"data": 4}, x=((64, 64), P()))

    def step(x):
        def body(carry):
            count, y = carry
            return count + 1, jnp.tanh(y @ y) @ y

        _, y = jax.lax.while_loop(lambda carry: carry[0] < 3, body, (0, x))
        return jax.lax.cond(y[0, 0] > 0, lambda y: (y @ y) @ y, lambda y: y, y)

    fitted = fit(step, x, chip="h100")
    array_bytes = 64 * 64 * 4
    assert fitted.bytes_of("results") == array_bytes
    assert array_bytes <= fitted.bytes_of("activations") <= 4 * array_bytes


def test_many_leaves_and_long_chains_by_elements_are_read_once():
    params = structs({"data": 4}, **{f"w{i}": ((8, 8), P("data")) for i in range(300)})

    def step(params):
        total = sum(jnp.sum(param * param) for param in params)
        norm = jnp.sqrt(total)
        x = jnp.ones((8, 8))
        for _ in range(60):  # each reads the last twice: 2^60 ways to walk back
            x = x * x + x
        return jnp.sum(x @ x) * norm

    fitted = fit(step, params, chip="h100")
    total = sum(row.bytes for row in fitted.rows if row.exact)
    assert total == 4 + 300 * 8 * 8 * 4 // 4


LAYERS = 4
WIDTH = 1024
ROWS = 4096


def test_loop_carries_and_results_keep_their_memory():
    params, batch = structs(
        {"data": 2}, w=((LAYERS, WIDTH, WIDTH), P()), x=((ROWS, WIDTH), P("data"))
    )
    fitted = fit(
        lambda w, x: jax.lax.scan(lambda x, w: (x @ w, x), x, w),
        params,
        batch,
        chip="v5e",
    )
    expected = (LAYERS + 1) * ROWS // 2 * WIDTH * 4
    assert fitted.bytes_of("results") == expected


@pytest.mark.parametrize(
    "shape, dtype, bytes_",
    [
        ((16, 64, 8, 64), jnp.bfloat16, 16 * 8 * 64 * 128 * 2),
        ((32768, 64), jnp.float32, 32768 * 64 * 4),
        ((16, 1, 64, 1024), jnp.bfloat16, 16 * 64 * 1024 * 2),
        ((1, 1024), jnp.int32, 1024 * 4),
        ((64,), jnp.float32, 128 * 4),
        ((), jnp.float32, 4),
        ((0, 3), jnp.float32, 0),
    ],
)
def test_tiles_pad_the_two_dimensions_that_lose_least(shape, dtype, bytes_):
    # The first four are as libtpu lays out arguments for v5e.
    actual = (
        np.prod(_step.padded(shape, (8, 128)), dtype=int) * jnp.dtype(dtype).itemsize
    )
    assert actual == bytes_
    assert _step.padded(shape, None) == shape
