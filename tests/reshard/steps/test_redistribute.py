import dataclasses
import functools as ft
import itertools as it
import math
import random

import numpy as np
import pytest
from _devices import chips, objects
from hypothesis import assume, given, settings, strategies as st
from jax.sharding import AbstractMesh, Mesh, PartitionSpec as P

from benchmarks._pairs import all_layouts
from benchmarks._simulate import pieces
from shardfx import MeshSpec
from shardfx._reshard.steps.paths import path_along
from shardfx.errors import MeshError
from shardfx.results import StepLayout
from tests.reshard.steps.step_layouts import (
    CATALOGUE,
    check,
    in_slices,
    layout,
    redistribute,
)


def lower_bound(shape: tuple[int, ...], src: StepLayout, dst: StepLayout) -> float:
    """What devices need and do not have, counted element by element; in bytes of 64-bit
    elements.
    """
    elements = np.arange(math.prod(shape))
    array = elements.reshape(shape)
    have = pieces(array, src, src)
    want = pieces(array, dst, src)
    sizes = []
    for h, w in zip(have, want, strict=True):
        sizes.append(np.setdiff1d(w, h).size)
    mean_size = np.mean(sizes)
    return 8 * float(mean_size)


def test_a_pure_gather_is_one_collective():
    """On a torus it uses the links of all its axes at the same time."""
    for src in CATALOGUE:
        whole = dataclasses.replace(src, dims=((), ()))
        steps = check((16, 32), src, whole).steps
        kinds = []
        for step in steps:
            kinds.append(step.kind)
        is_sharded = src.shard_count > 1
        assert kinds == ["all_gather"] * is_sharded
    dims = ((0,), (1,))
    near = StepLayout((2, 8), dims)
    far = dataclasses.replace(near, weights=(10.0, 1.0))
    for src, count in ((near, 1), (far, 2)):
        whole = dataclasses.replace(src, dims=((), ()))
        plan = check((16, 32), src, whole)
        actual = len(plan.steps)
        assert actual == count


def test_every_step_puts_every_piece_where_its_layout_says():
    rng = np.random.default_rng(0)
    for _ in range(150):
        indices = rng.integers(len(CATALOGUE), size=2)
        src, dst = (CATALOGUE[index] for index in indices)
        plan = check((16, 32), src, dst)
        least_bytes = lower_bound((16, 32), src, dst)
        expected = math.ceil(least_bytes)
        assert plan.lower_bound_bytes == expected


@ft.cache
def elements_of(layout: StepLayout) -> np.ndarray:
    """Which elements of an array each of 24 devices holds."""
    array = np.arange(24 * 24).reshape(24, 24)
    is_held = np.zeros((24, array.size), bool)
    for device, piece in enumerate(pieces(array, layout, layout)):
        is_held[device, piece.ravel()] = True
    return is_held


@pytest.mark.parametrize("sizes", [((2, 4, 3), (3, 4, 2)), ((2, 2, 3), (3, 2, 2))])
def test_a_local_slice_moves_nothing_for_any_factors(sizes):
    pair_count = 0
    for src, dst in it.product(*map(all_layouts, sizes)):
        lacks_elements = elements_of(dst) & ~elements_of(src)
        if lacks_elements.any():
            continue
        pair_count += 1
        plan = check((144, 24), src, dst)
        kinds = {step.kind for step in plan.steps}
        assert kinds <= {"slice"}
    assert pair_count > 50


@st.composite
def ends(draw, count: int, rank: int):
    """The fields of a random layout over `count` devices."""
    sizes = []
    remaining = count
    while remaining > 1:
        divisors = []
        for size in range(2, remaining + 1):
            if remaining % size == 0:
                divisors.append(size)
        factors = st.sampled_from(divisors)
        sizes.append(draw(factors))
        remaining //= sizes[-1]
    if draw(st.booleans()):
        position = draw(st.integers(0, len(sizes)))
        sizes.insert(position, 1)
    dims = []
    for _ in range(rank):
        dims.append([])
    axes = list(range(len(sizes)))
    for axis in draw(st.permutations(axes)):
        dim = draw(st.integers(0, rank))
        if dim < rank:
            dims[dim].append(axis)
    if draw(st.booleans()):
        seed = draw(st.integers(0, 9))
        order = random.Random(seed).sample(range(count), count)
    else:
        order = range(count)
    if draw(st.booleans()):
        weights = []
        for _ in sizes:
            weights.append(draw(st.sampled_from([1.0, 1.0, 10.0])))
    else:
        weights = ()
    layout_dims = tuple(map(tuple, dims))
    return StepLayout(
        sizes=tuple(sizes),
        dims=layout_dims,
        order=tuple(order),
        weights=tuple(weights),
    )


@st.composite
def moves(draw):
    """An array's spare room per dimension and two layouts over the same devices, ranks
    0 to 4.
    """
    few = [1, 2, 3, 4, 6, 8, 9, 10, 12, 14, 15, 16, 18, 20, 21, 24, 30, 36]
    many = [192, 288, 384, 480]
    counts = few + 2 * many
    count = draw(st.sampled_from(counts))
    if count in many:
        rank = 2
    else:
        rank = draw(st.integers(0, 4))
    if count in many:
        spare = [1] * rank
    else:
        spare = []
        for _ in range(rank):
            spare.append(draw(st.sampled_from([0, 1, 1, 1, 2, 3])))
    src = draw(ends(count, rank))
    dst = draw(ends(count, rank))
    return spare, src, dst


@given(moves())
@settings(max_examples=150, deadline=None)
def test_any_ranks_factors_orders_and_empty_dimensions(move):
    spare, src, dst = move
    # The least shape that both ends divide leaves no room for a detour.
    sizes = []
    for a, b, spare_factor in zip(src.counts, dst.counts, spare, strict=True):
        sizes.append(math.lcm(a, b) * spare_factor)
    shape = tuple(sizes)
    element_count = math.prod(shape)
    assume(element_count <= 5000)
    check(shape, src, dst)


@pytest.mark.parametrize(
    "shape, src, dst",
    [
        (
            (1, 15, 10),
            StepLayout((5, 2, 3), ((), (0, 2), (1,))),
            StepLayout((10, 3), ((), (1,), (0,))),
        ),
        ((12, 15), StepLayout((12, 5), ((0,), (1,))), StepLayout((15, 4), ((), (0,)))),
        (
            (20, 6),
            StepLayout((5, 3, 4), ((2, 0), (1,))),
            StepLayout((2, 3, 10), ((2,), (0, 1))),
        ),
        (
            (6, 10),
            StepLayout(sizes=(10, 3), dims=((), (0,)), order=tuple(range(30))),
            StepLayout(
                sizes=(5, 2, 3), dims=((1, 2), ()), order=tuple(range(30))[::-1]
            ),
        ),
        # Joined factors that dimensions have no room for are taken apart.
        ((12,), StepLayout((12, 16), ((0,),)), StepLayout((32, 6), ((1,),))),
        ((12, 5), StepLayout((12, 16), ((0,), ())), StepLayout((32, 6), ((1,), ()))),
        ((96,), StepLayout((24, 32), ((0,),)), StepLayout((24, 32), ((1,),))),
    ],
)
def test_factors_that_block_each_other_or_have_no_room(shape, src, dst):
    check(shape, src, dst)


@pytest.mark.parametrize(
    "sizes, src, dst, order",
    [
        ((2,), ((0,),), ((),), (1, 0)),
        ((8,), ((0,),), ((),), (3, 4, 5, 7, 0, 2, 6, 1)),
        ((16,), ((0,),), ((),), (1, 0, *range(2, 16))),
        ((2, 4), ((0,), (1,)), ((0,), ()), (3, 1, 2, 0, 7, 5, 6, 4)),
    ],
)
def test_a_gather_needs_no_permute_before_it(sizes, src, dst, order):
    rank = len(src)
    devices = math.prod(sizes)
    order_of_source = tuple(range(devices))
    source = StepLayout(sizes=sizes, dims=src, order=order_of_source)
    target = StepLayout(sizes=sizes, dims=dst, order=order)
    shape = (16,) * rank
    plan = check(
        shape,
        source,
        target,
    )
    kinds = []
    for step in plan.steps:
        kinds.append(step.kind)
    assert kinds == ["all_gather"]
    assert plan.wire_bytes == plan.lower_bound_bytes


def test_gathers_along_factors_of_two_meshes_stay_two():
    # The meshes differ in which of two neighbours is first, and in which axis has which
    # name.
    cases = ((0, 1, 2), (0, 1))
    order_of_ours = (0, 1, 2, 3, 4, 5, 6, 7)
    ours = []
    for axes in cases:
        ours.append(StepLayout(sizes=(2, 2, 2), dims=(axes,), order=order_of_ours))
    cases = ((1, 0), (1,))
    order_of_theirs = (1, 0, 4, 5, 2, 3, 6, 7)
    theirs = []
    for axes in cases:
        theirs.append(StepLayout(sizes=(2, 2, 2), dims=(axes,), order=order_of_theirs))
    path = path_along(ours, theirs)
    actual = []
    for step in path:
        actual.append((step.kind, step.source, step.target))
    expected = [
        ("all_gather", *ours),
        ("all_gather", *theirs),
    ]
    assert actual == expected


@pytest.mark.parametrize("end_number", [0, 1])
def test_slices_that_one_end_alone_knows_of_count_for_both(end_number):
    layout_arguments = [((2, 4, 2), ((2,), (0, 1))), ((16,), ((0,), ()))]
    both = []
    for sizes, dims in layout_arguments:
        both.append(in_slices(sizes, dims, 2))
    layouts = []
    for position, (sizes, dims) in enumerate(layout_arguments):
        layouts.append(
            both[position] if position == end_number else StepLayout(sizes, dims)
        )
    plans = (redistribute((16, 16), 64, *pair) for pair in (both, layouts))
    costs = [(plan.wire_bytes, plan.dcn_bytes) for plan in plans]
    assert costs[0] == costs[1]
    assert costs[0][1] > 0


def test_layouts_of_meshes_and_specs():
    mesh = AbstractMesh((2, 4), ("a", "b"))
    spec = P("b", ("a",))
    step_layout = layout(mesh, spec, 3)
    dims = ((1,), (0,), ())
    expected = StepLayout((2, 4), dims)
    assert step_layout == expected
    axes = {"a": 2, "b": 4}
    spec_mesh = MeshSpec(axes)
    actual = layout(spec_mesh, P("b", "a"), 3)
    assert actual == step_layout
    dims = ((), (0,))
    expected = StepLayout((2, 4), dims)
    unconstrained = P(P.UNCONSTRAINED, "a")
    assert layout(mesh, unconstrained, 2) == expected
    first = layout(mesh, P("b"), 1)
    assert first is layout(mesh, P("b"), 1)
    assert step_layout.shard_count == 8
    assert step_layout.counts == (4, 2, 1)
    actual = step_layout.shard_shape((8, 8, 8))
    assert actual == (2, 4, 8)


def test_an_axis_that_spans_slices_is_two():
    axes = {"a": 8, "b": 2, "c": 3}
    mesh = MeshSpec(axes, dcn={"a": 2, "b": 2})
    spec = P("b", ("c", "a"))
    actual = layout(mesh, spec, 2)
    sizes = (2, 4, 2, 3)
    dims = ((2,), (3, 0, 1))
    weights = (10.0, 1.0, 10.0, 1.0)
    expected = StepLayout(sizes=sizes, dims=dims, order=None, weights=weights)
    assert actual == expected
    far_mesh = MeshSpec({"a": 8}, dcn={"a": 8})
    actual = layout(far_mesh, P("a"), 1)
    expected = StepLayout(sizes=(8,), dims=((0,),), order=None, weights=(10.0,))
    assert actual == expected


@pytest.mark.parametrize(
    "order, sizes, weights",
    [
        (np.arange(16), (2, 2, 4), (10.0, 1.0, 1.0)),
        (
            np.arange(16).reshape(2, 4, 2).transpose(1, 0, 2).ravel(),
            (4, 2, 2),
            (1.0, 10.0, 1.0),
        ),
        # Where no cut of an axis leaves its parts in one slice each, all of it counts
        # as slow.
        (np.arange(16).reshape(2, 8).T.ravel(), (4, 4), (1.0, 10.0)),
    ],
)
def test_devices_say_in_which_slice_they_are(order, sizes, weights):
    all_devices = objects(chips((4, 2, 1, 1), slices=2))
    devices = all_devices[order]
    mesh = Mesh(devices.reshape(4, 4), ("a", "b"))
    joint_spec = P(("a", "b"))
    end = layout(mesh, joint_spec, 1)
    positions = tuple(range(len(sizes)))
    dims = (positions,)
    ids = tuple(order.tolist())
    expected = StepLayout(
        sizes=sizes, dims=dims, order=ids, weights=weights, network=end.network
    )
    assert end == expected
    flat_grid = objects(chips((4, 4, 1, 1)))
    grid = flat_grid.reshape(4, 4)
    one_slice = Mesh(grid, ("a", "b"))
    end_of_slice = layout(one_slice, P("a"), 1)
    actual = end_of_slice.weights
    assert actual == ()


def test_equal_moves_are_planned_once():
    dims = ((0,), (1,))
    src = StepLayout((2, 4), dims)
    dims = ((), (0,))
    dst = StepLayout((4, 2), dims)
    dims = ((0,), (1,))
    same_source = StepLayout((2, 4), dims)
    first = redistribute((8, 8), 32, src, dst)
    again = redistribute((8, 8), 32, same_source, dst)
    assert first is again
    # Another shape with the same room for cuts shares the path, and only the bytes
    # differ.
    large = redistribute((80, 8), 32, src, dst)
    small = redistribute((8, 8), 32, src, dst)
    wire_bytes = small.wire_bytes
    expected = 10 * wire_bytes
    assert large.wire_bytes == expected


@pytest.mark.parametrize(
    "src, dst, text",
    [
        # The first mesh names no devices, so none are known to be in both.
        (StepLayout((2,), ((0,),)), StepLayout((3,), ((),)), r"sizes \(3,\)\); move"),
        (
            StepLayout(sizes=(2,), dims=((0,),), order=(0, 1)),
            StepLayout(sizes=(2,), dims=((),), order=(1, 2)),
            r"sizes \(2,\)\), and 1 are in both; move",
        ),
    ],
)
def test_meshes_of_other_devices_are_an_error(src, dst, text):
    with pytest.raises(
        MeshError,
        match=r"one has 2 \(axis sizes \(2,\)\) and the other .*" + text,
    ):
        redistribute((6,), 8, src, dst)
