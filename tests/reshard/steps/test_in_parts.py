import functools as ft
import math
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from shardfx._reshard.steps.chunks import Chunks, chunks_on_tpus, in_chunks
from shardfx._reshard.steps.programs import concatenated, run_steps
from shardfx.results import StepLayout
from tests.reshard.steps.step_layouts import redistribute


@st.composite
def layouts(draw, rank: int):
    """The fields of a random layout over eight devices."""
    choices = [(8,), (2, 4), (4, 2), (2, 2, 2)]
    sizes = draw(st.sampled_from(choices))
    dims = []
    for _ in range(rank + 1):
        dims.append([])
    axes = list(range(len(sizes)))
    for axis in draw(st.permutations(axes)):
        dim = draw(st.integers(0, rank))
        dims[dim].append(axis)
    layout_dims = tuple(map(tuple, dims[:rank]))
    return StepLayout(sizes, layout_dims)


class PartedMove(NamedTuple):
    """A move whose shards are `blocks` times the least, in parts of dimension `dim`."""

    blocks: list[int]
    dtype: np.dtype
    src: StepLayout
    dst: StepLayout
    part: int
    dim: int


@st.composite
def moves(draw):
    rank = draw(st.integers(1, 3))
    src = draw(layouts(rank))
    dst = draw(layouts(rank))
    extra = draw(st.lists(st.integers(1, 5), min_size=rank, max_size=rank))
    dtypes = [np.dtype("uint8"), np.dtype("float32"), np.dtype("uint16")]
    dtype = draw(st.sampled_from(dtypes))
    part = draw(st.integers(1, 4))
    dim = draw(st.integers(0, rank - 1))
    return PartedMove(
        blocks=extra,
        dtype=dtype,
        src=src,
        dst=dst,
        part=part,
        dim=dim,
    )


def sharding_of(layout: StepLayout) -> NamedSharding:
    """The sharding of a layout on the eight devices, with an axis for each factor."""
    names = tuple("abc"[: len(layout.sizes)])
    devices = np.array(jax.devices()[:8]).reshape(layout.sizes)
    entries = []
    for axes in layout.dims:
        entries.append(tuple(names[axis] for axis in axes) or None)
    return NamedSharding(Mesh(devices, names), P(*entries))


def moved(
    values: np.ndarray,
    src: StepLayout,
    dst: StepLayout,
    plan: Any,
    chunks: Chunks,
) -> jax.Array:
    """The array after the steps of a plan, part by part; its pieces lie end to end
    along the first dimension.
    """
    sharding = sharding_of(src)
    mesh = sharding.mesh
    step = ft.partial(run_steps, steps=plan.steps, like=src, axes=mesh.axis_names)
    body = ft.partial(in_chunks, move=step, chunks=chunks)
    program = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=sharding.spec,
        out_specs=P(mesh.axis_names),
        check_vma=False,
    )
    placed = jax.device_put(values, sharding)
    jitted = jax.jit(program)
    return jitted(placed)


def assert_moved(
    shape: tuple[int, ...],
    dtype: np.dtype,
    src: StepLayout,
    dst: StepLayout,
    part: int,
    dim: int,
):
    plan = redistribute(shape, 8 * dtype.itemsize, src, dst)
    if not plan.steps:
        return
    first = plan.steps[0].source
    on_the_way = [first, *(step.target for step in plan.steps)]
    block = shape[dim] // math.lcm(*(end.counts[dim] for end in on_the_way))
    # Every element has bits of its own, also where they are those of a NaN (of a small
    # one the CPU would change them).
    numbers = np.arange(math.prod(shape), dtype=np.uint32)
    bits = numbers * np.uint32(2654435761) >> np.uint32(32 - 8 * dtype.itemsize)
    values = bits.astype(f"uint{8 * dtype.itemsize}").view(dtype).reshape(shape)
    shard_shape = dst.shard_shape(shape)
    chunk = min(part, block)
    chunks = Chunks(dim=dim, block=block, chunk=chunk, target_shape=shard_shape)
    array = moved(
        values,
        src=src,
        dst=dst,
        plan=plan,
        chunks=chunks,
    )
    values_by_device = {}
    for device, index in sharding_of(dst).devices_indices_map(shape).items():
        values_by_device[device] = values[index]
    for shard in array.addressable_shards:
        shard_values = np.asarray(shard.data)
        actual = shard_values.tobytes()
        expected = np.ascontiguousarray(values_by_device[shard.device])
        assert actual == expected.tobytes()


# The last part of a block of 13 is smaller.
@example(
    PartedMove(
        blocks=[13, 2],
        dtype=np.dtype("float32"),
        src=StepLayout((8,), ((0,), ())),
        dst=StepLayout((8,), ((), (0,))),
        part=5,
        dim=0,
    )
)
@given(moves())
@settings(max_examples=20, deadline=None)
def test_a_move_in_parts_gives_every_device_its_piece(move):
    counts = zip(move.src.counts, move.dst.counts, move.blocks, strict=True)
    sizes = []
    for before, after, size in counts:
        sizes.append(math.lcm(before, after) * size)
    shape = tuple(sizes)
    assert_moved(
        shape,
        dtype=move.dtype,
        src=move.src,
        dst=move.dst,
        part=move.part,
        dim=move.dim,
    )


@pytest.mark.parametrize(
    ("src", "dst", "kinds"),
    [
        (
            StepLayout((8,), ((), (0,))),
            StepLayout((2, 2, 2), ((0,), (2,))),
            ["permute", "all_to_all", "all_gather"],
        ),
        (
            StepLayout((2, 2, 2), ((0, 2), ())),
            StepLayout((4, 2), ((), (0,))),
            ["slice", "all_to_all", "all_gather"],
        ),
        (
            StepLayout((2, 4), ((), (1, 0))),
            StepLayout((2, 2, 2), ((1, 0), ())),
            ["all_to_all", "all_gather"],
        ),
    ],
)
@pytest.mark.parametrize("dim", [0, 1])
def test_what_is_doubled_at_last_comes_in_halves(src, dst, kinds, dim):
    plan = redistribute((64, 128), 32, src, dst)
    steps = plan.steps
    actual = []
    for step in steps:
        actual.append(step.kind)
    assert actual == kinds
    # The least common multiple of all counts is 8, so that blocks are of 8 rows or of
    # 16 columns.
    part = (4, 8)[dim]
    assert_moved((64, 128), np.dtype("float32"), src, dst, part=part, dim=dim)


ROWS = StepLayout((64,), ((0,), ()))
COLUMNS = StepLayout((64,), ((), (0,)))


@pytest.mark.parametrize(
    "shape, bits, src, dst, chunks",
    [
        # A block is 129 x 65. Of 17 x 65 there are 24 x 128 stored, of 129 x 9 there
        # would be 256 x 16.
        (
            (8256, 4160),
            16,
            ROWS,
            COLUMNS,
            Chunks(dim=0, block=129, chunk=17, target_shape=(8256, 65)),
        ),
        ((8192, 8192), 16, ROWS, COLUMNS, None),  # 128 x 128
        ((640, 640), 16, ROWS, COLUMNS, None),  # small
        (
            (8256, 4160),
            16,
            ROWS,
            StepLayout((64,), ((), ())),
            Chunks(dim=1, block=4160, chunk=520, target_shape=(8256, 4160)),
        ),
        # Nothing but a slice.
        (
            (8256, 4160),
            16,
            StepLayout((64,), ((), ())),
            COLUMNS,
            None,
        ),
        ((2**22,), 16, StepLayout((8,), ((0,),)), StepLayout((8,), ((),)), None),
        # The heads are the minor dimension's neighbour, and the minor one is cut no
        # further.
        (
            (5120, 64, 80),
            16,
            StepLayout((64,), ((0,), (), ())),
            StepLayout((64,), ((), (0,), ())),
            Chunks(dim=0, block=80, chunk=10, target_shape=(5120, 1, 80)),
        ),
    ],
)
def test_untiled_pieces_are_split_where_padding_is_least(shape, bits, src, dst, chunks):
    plan = redistribute(shape, bits, src, dst)
    shard_shape = src.shard_shape(shape)
    actual = chunks_on_tpus(shard_shape, bits, plan.steps)
    assert actual == chunks


def grid(*sizes: int) -> StepLayout:
    """An array whose dimensions are cut by an axis each."""
    dims = []
    for axis in range(len(sizes)):
        dims.append((axis,))
    dims = tuple(dims)
    return StepLayout(sizes, dims)


@pytest.mark.parametrize(
    "shape, src, dst, chunks",
    [
        # A permutation, an all-to-all of 16 in another order into pieces of one tile's
        # width, and a gather of two.
        (
            (8192, 8192),
            grid(16, 4),
            StepLayout((4, 2, 8), ((), (2, 0))),
            Chunks(dim=0, block=512, chunk=256, target_shape=(8192, 256)),
        ),
        # The same, two tiles wide: the compiler finds room.
        ((8192, 16384), grid(16, 4), StepLayout((4, 2, 8), ((), (2, 0))), None),
        # The permutation comes after the all-to-all.
        (
            (8192, 8192),
            StepLayout((4, 16), ((1, 0), ())),
            StepLayout((2, 2, 8, 2), ((0,), (2, 1))),
            Chunks(dim=0, block=128, chunk=64, target_shape=(4096, 512)),
        ),
        # Parts in the order in which they lie.
        (
            (8192, 8192),
            StepLayout((64,), ((0,), ())),
            StepLayout((32, 2), ((), (0,))),
            None,
        ),
        # The source's piece is twice the target's.
        (
            (8192, 8192),
            StepLayout((16, 4), ((0,), ())),
            StepLayout((4, 2, 8), ((), (2, 0))),
            None,
        ),
        ((128, 8192), grid(16, 4), StepLayout((4, 2, 8), ((), (2, 0))), None),  # small
    ],
)
def test_tiled_pieces_are_halved_before_a_doubling_gather(shape, src, dst, chunks):
    plan = redistribute(shape, 32, src, dst)
    steps = plan.steps
    shard_shape = src.shard_shape(shape)
    actual = chunks_on_tpus(shard_shape, 32, steps)
    assert actual == chunks


def test_all_to_all_after_a_permutation_comes_in_four():
    shape = (192, 768, 640)
    dims = ((0, 1), (2,), ())
    src = StepLayout((2, 8, 4), dims)
    dims = ((1,), (0,), ())
    dst = StepLayout((8, 8), dims)
    plan = redistribute(shape, 32, src, dst)
    kinds = []
    for step in plan.steps:
        kinds.append(step.kind)
    assert kinds == ["permute", "all_to_all"]
    shard_shape = src.shard_shape(shape)
    chunks = chunks_on_tpus(shard_shape, 32, plan.steps)
    assert chunks is not None
    parts = -(-chunks.block // chunks.chunk)
    assert parts == 4


@pytest.mark.parametrize("counts", [(2, 3), (1, 6), (6, 1), (2, 1, 3), (2, 3, 2)])
def test_shards_are_concatenated_as_they_are_joined(counts):
    members = math.prod(counts)
    rank = len(counts)
    shard_shape = (4, 5, 6)[:rank]
    shards = np.arange(members * math.prod(shard_shape))
    shards = shards.reshape(members, *shard_shape)
    # The chunks along a dimension come to stand in front of it.
    chunks = shards.reshape(*counts, *shard_shape)
    order = []
    joined_shape = []
    for dim in range(rank):
        order += [dim, rank + dim]
        joined_shape.append(counts[dim] * shard_shape[dim])
    expected = chunks.transpose(order).reshape(joined_shape)
    result = concatenated(jax.numpy.asarray(shards), counts)
    np.testing.assert_array_equal(result, expected)
