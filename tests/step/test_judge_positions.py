"""Updates of one row at an index of a dimension that is cut: proved where the index is
within the bounds, and no other program in the place of a right one.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P
from judging import programs_of, verdict_of, whole_program_of

import shardfx as sfx
from shardfx._step.judge.bounds import bounds_of


MESH = sfx.MeshSpec({"data": 2, "fsdp": 2, "tensor": 2}).abstract()


def struct(shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(MESH, P(*spec)))


CACHE = struct((4, 16, 8), "data", "tensor")
ROW = struct((4, 1, 8), "data")
INDEX = struct((), dtype=jnp.int32)


def written(cache, row, index):
    return lax.dynamic_update_slice(cache, row, (0, index, 0))


def clipped(cache, row, index):
    return written(cache, row, jnp.clip(index, 0, 15))


def test_a_row_at_a_clipped_index_is_proved():
    assert sfx.testing.verify(clipped, CACHE, ROW, INDEX).outcome == "proved"


def test_a_row_at_a_remainder_is_proved():
    def ring(cache, row, index):
        return written(cache, row, (index % 16).astype(jnp.int32))

    index = struct((), dtype=jnp.uint32)
    assert sfx.testing.verify(ring, CACHE, ROW, index).outcome == "proved"


def test_two_caches_and_their_gradients_are_proved():
    def loss(keys, values, key, value, q, index):
        keys = clipped(keys, key, index)
        values = clipped(values, value, index)
        scores = jnp.einsum("bk,bsk->bs", q, keys)
        weights = jax.nn.softmax(jnp.where(jnp.arange(16) <= index, scores, -1e9))
        elements = jnp.sin(jnp.einsum("bs,bsk->bk", weights, values))
        return jnp.sum(elements)

    argnums = (0, 1, 2, 3, 4)
    step = jax.grad(loss, argnums=argnums)
    q = struct((4, 8), "data")
    verdict = sfx.testing.verify(step, CACHE, CACHE, ROW, ROW, q, INDEX)
    assert verdict.outcome == "proved", verdict


@pytest.mark.parametrize("last", [None, 16])
def test_an_index_that_may_be_out_of_bounds_is_not_judged(last):
    # XLA loses the update of a row beyond the last, which JAX clamps.
    def step(cache, row, index):
        if last is not None:
            index = jnp.clip(index, 0, last)
        return written(cache, row, index)

    verdict = sfx.testing.verify(step, CACHE, ROW, INDEX)
    assert verdict.outcome == "not judged"
    assert "`jnp.clip(index, 0, 15)`" in verdict.unjudged[0].reason


def window(x, indices):
    return lax.dynamic_slice_in_dim(x, indices[1], 4, axis=1)


def mapped_window(x, indices):
    take = lambda row, index: lax.dynamic_slice_in_dim(row, index, 4)
    return jax.vmap(take)(x, indices)


@pytest.mark.parametrize("function", [window, mapped_window])
@pytest.mark.parametrize("spec", [P(None, "tensor"), P(("data", "fsdp"), "tensor")])
def test_a_sharded_window_is_judged_where_its_index_is_clipped(function, spec):
    # XLA's simplifier makes one slice of the window and of each device's part, and
    # clamps its start to the size of the part.
    x = struct((4, 8))
    indices = struct((4,), dtype=jnp.int32)
    result = NamedSharding(MESH, spec)
    step = jax.jit(function, out_shardings=result)
    verdict = sfx.testing.verify(step, x, indices)
    assert verdict.outcome == "not judged"
    assert "`jnp.clip(index, 0, 4)`" in verdict.unjudged[0].reason

    def clipped_step(x, indices):
        return function(x, jnp.clip(indices, 0, 4))

    step = jax.jit(clipped_step, out_shardings=result)
    assert sfx.testing.verify(step, x, indices).outcome == "proved"


def test_rows_at_any_indices_are_proved():
    # Whole rows start at 0, whatever the indices are.
    def rows(x, indices):
        return x[indices]

    x = struct((16, 8))
    indices = struct((4,), dtype=jnp.int32)
    step = jax.jit(rows, out_shardings=NamedSharding(MESH, P("data", "tensor")))
    assert sfx.testing.verify(step, x, indices).outcome == "proved"


def test_a_part_beside_a_slice_at_any_index_is_proved():
    def row(x, index):
        return lax.dynamic_index_in_dim(x, index, 1, keepdims=False)

    x = struct((4, 8, 8))
    step = jax.jit(row, out_shardings=NamedSharding(MESH, P("data", "tensor")))
    assert sfx.testing.verify(step, x, INDEX).outcome == "proved"


def test_one_row_is_not_scattered_into_a_part_of_a_whole_array():
    # XLA's simplifier makes one slice of the part and of the row, so that devices
    # without the row read, and write, a row of another part.
    rows = NamedSharding(MESH, P("tensor"))

    def step(x, index, row):
        x = lax.with_sharding_constraint(x, rows)
        return x.at[index].set(row)

    jitted = jax.jit(step, out_shardings=rows)
    index = struct((1,), dtype=jnp.int32)
    row = struct((1, 4))
    verdict = sfx.testing.verify(jitted, struct((16, 4)), index, row)
    assert verdict.outcome == "not judged"
    assert "constrain the array to one sharding" in verdict.unjudged[0].reason

    x = struct((16, 4), "tensor")
    assert sfx.testing.verify(jitted, x, index, row).outcome == "proved"
    indices = struct((2,), dtype=jnp.int32)
    two_rows = struct((2, 4))
    verdict = sfx.testing.verify(jitted, struct((16, 4)), indices, two_rows)
    assert verdict.outcome == "proved"


@pytest.fixture(scope="module")
def programs():
    return programs_of(clipped, (CACHE, ROW, INDEX))


@pytest.mark.parametrize(
    "before, after",
    [
        # A device that has other rows, or one row less or more.
        (r"constant\(8\)", "constant(4)"),
        (r"direction=GE", "direction=GT"),
        (r"direction=LT", "direction=LE"),
        (r"direction=GE", "direction=LT"),
        # The other mask, another row, another shard.
        (r"select\((%\S+), (%dynamic-update\S+), (%\S+)\)", r"select(\1, \3, \2)"),
        (r"subtract\((%\S+), (%\S+)\)", r"subtract(\2, \1)"),
        (r"( select\(%and[^,]*, %subtract[^,]*), %\S+\)", r"\1, %one)"),
        (r"(dynamic-update-slice\(%\S+ %\S+) (%\S+), (%\S+), ", r"\1 \3, \2, "),
        (r"maximum\(", "minimum("),
    ],
)
def test_another_update_is_not_proved(programs, before, after):
    text = programs.partitioned
    changed, count = re.subn(before, after, text, count=1)
    assert count == 1, text
    assert changed != text, text
    one = "\n  %one = s32[] constant(1)\n  %partition-id = "
    changed = changed.replace("\n  %partition-id = ", one)
    assert verdict_of(programs, changed).outcome != "proved"


def select(i):
    return jnp.where(i < 5, jnp.clip(i, 1, 3), 8)


def never(i):
    return jnp.where(jnp.clip(i, 0, 3) < 5, jnp.clip(i, 1, 3), 8)


def sum_step(i):
    return jnp.clip(i, -3, 4) + jnp.clip(2 * i, 1, 5)


def difference(i):
    return jnp.clip(i, -3, 4) - jnp.clip(2 * i, 1, 5)


def wrapping(i):
    return jnp.clip(i, 0, 2**31 - 1) + 5


def narrow(i):
    return jnp.clip(i, 0, 300).astype(jnp.int8)


INDICES = {
    "clip": lambda i: jnp.clip(i, 2, 9),
    "remainder": lambda i: i % 7,
    "remainder of a clip": lambda i: jnp.clip(i, 0, 99) % 7,
    "select": select,
    "never": never,
    "sum": sum_step,
    "difference": difference,
    "wrapping": wrapping,
    "narrow": narrow,
    "minimum": lambda i: jnp.minimum(i, 6),
    "slice": lambda i: lax.slice(jnp.clip(i, 2, 9), (3,), (7,)),
    "element": lambda i: lax.dynamic_slice(jnp.clip(i, 2, 9), (i[0],), (2,)),
    "both": lambda i: jnp.concatenate([jnp.clip(i, 2, 9), jnp.clip(i, -4, 1)]),
}


@pytest.mark.parametrize("name", INDICES)
def test_bounds_hold_of_all_numbers(name):
    numbers = np.arange(-300, 300, dtype=np.int32)
    numbers = np.concatenate([numbers, [2**31 - 1, 2**31 - 3, -(2**31)]]).astype("i4")
    computed = jax.jit(INDICES[name])(numbers)
    lowered = jax.jit(INDICES[name]).lower(numbers)
    text = lowered.as_text("hlo")
    whole = whole_program_of(text)
    bounds = bounds_of(whole.values, whole.results[0].view.root)
    assert bounds is not None
    assert bounds.low <= computed.min()
    assert computed.max() <= bounds.high
    expected = {
        "clip": (2, 9),
        "remainder of a clip": (0, 6),
        "never": (1, 3),
        "sum": (-2, 9),
        "difference": (-8, 3),
        "slice": (2, 9),
        "element": (2, 9),
        "both": (-4, 9),
    }
    if name in expected:
        assert bounds == expected[name]
