import dataclasses
import heapq
import itertools as it
import math
import random
from collections import Counter

import numpy as np
import pytest
from _devices import chips, objects
from hypothesis import assume, given, settings, strategies as st
from jax.sharding import AbstractMesh, Mesh, PartitionSpec as P

from benchmarks._pairs import all_layouts, every_layout
from benchmarks._simulate import pieces, simulate
from shardfx import MeshSpec
from shardfx._ground.errors import MeshError
from shardfx._reshard.shardings import layout
from shardfx._reshard.steps.groups import all_gather, all_to_all
from shardfx._reshard.steps.layout import (
    StepLayout,
    missing_share,
    positions,
    slice_numbers,
)
from shardfx._reshard.steps.redistribution import path_along, permutation, redistribute
from shardfx._reshard.steps.search import Problem, explore
from shardfx._reshard.steps.splits import refine


CATALOGUE = every_layout(16)


def check(shape: tuple[int, ...], src: StepLayout, dst: StepLayout):
    """Runs the plan and compares what is held after every step with the definition of
    the step's layout.
    """
    array = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    plan = redistribute(shape, 64, src, dst)
    slices = slice_numbers(refine(src, dst)[0].layout)
    held = pieces(array, src, src)
    bytes_of = [held[0].nbytes, pieces(array, dst, src)[0].nbytes]
    wire = 0
    for step in plan.steps:
        before = held
        held = simulate(array, held, step, src)
        wire += step.wire_bytes
        for mine, right in zip(held, pieces(array, step.target, src), strict=True):
            np.testing.assert_array_equal(mine, right)
        assert step.dcn_bytes == math.ceil(
            crossing(step, src, slices, before[0].nbytes)
        )
        assert step.peak_bytes == before[0].nbytes + held[0].nbytes
        assert step.peak_bytes <= 2 * max(bytes_of)
    for mine, right in zip(held, pieces(array, dst, src), strict=True):
        np.testing.assert_array_equal(mine, right)
    assert plan.lower_bound_bytes <= plan.wire_bytes <= wire
    assert (plan.wire_bytes > 0) == (plan.lower_bound_bytes > 0)
    assert plan.peak_bytes == max(
        [step.peak_bytes for step in plan.steps], default=max(bytes_of)
    )
    return plan


def crossing(step, like: StepLayout, recorded: np.ndarray, piece_bytes: int) -> float:
    """Bytes that enter a device from other slices, the mean over devices, counted
    device by device.

    `known` says in which slice each device is by the source's factors.
    """
    # The layouts of steps say what is slow by the account of both ends of the move.
    slices = np.empty(like.size, int)
    slices[positions(like, step.source)] = slice_numbers(step.source)
    if step.kind == "slice":
        return 0.0
    if step.kind == "permute":
        return piece_bytes * float(
            np.mean(recorded[permutation(step.source, step.target, like)] != recorded)
        )
    if step.kind == "all_gather":
        members = slices[all_gather(step.source, step.target, like).groups]
        # A piece enters a slice once.
        entries = [len(np.unique(row)) - 1 for row in members]
        return float(np.mean(entries)) * piece_bytes
    groups = all_to_all(step.source, step.target, like).groups
    members = slices[groups]
    crossings = (members[:, :, None] != members[:, None, :]).sum()
    return float(crossings / groups.size * piece_bytes / groups.shape[1])


def lower_bound(shape: tuple[int, ...], src: StepLayout, dst: StepLayout) -> float:
    """What devices need and do not have, counted element by element; in bytes of 64-bit
    elements.
    """
    array = np.arange(math.prod(shape)).reshape(shape)
    have = pieces(array, src, src)
    want = pieces(array, dst, src)
    return 8 * float(
        np.mean([np.setdiff1d(w, h).size for h, w in zip(have, want, strict=True)])
    )


def test_a_pure_gather_is_one_collective():
    """On a torus it uses the links of all its axes at the same time."""
    for src in CATALOGUE:
        whole = dataclasses.replace(src, dims=((), ()))
        kinds = [step.kind for step in check((16, 32), src, whole).steps]
        assert kinds == ["all_gather"] * (src.shard_count > 1)
    dims = ((0,), (1,))
    near = StepLayout((2, 8), dims)
    far = dataclasses.replace(near, weights=(10.0, 1.0))
    for src, count in ((near, 1), (far, 2)):
        whole = dataclasses.replace(src, dims=((), ()))
        assert len(check((16, 32), src, whole).steps) == count


def test_every_step_puts_every_piece_where_its_layout_says():
    rng = np.random.default_rng(0)
    for _ in range(150):
        src, dst = (CATALOGUE[index] for index in rng.integers(len(CATALOGUE), size=2))
        plan = check((16, 32), src, dst)
        assert plan.lower_bound_bytes == math.ceil(lower_bound((16, 32), src, dst))


@pytest.mark.parametrize("sizes", [((2, 4, 3), (3, 4, 2)), ((2, 2, 3), (3, 2, 2))])
def test_a_local_slice_moves_nothing_for_any_factors(sizes):
    pair_count = 0
    for src, dst in it.product(*map(all_layouts, sizes)):
        if not missing_share(*refine(src, dst)):
            pair_count += 1
            assert {step.kind for step in check((144, 24), src, dst).steps} <= {"slice"}
    assert pair_count > 50


@st.composite
def ends(draw, count: int, rank: int):
    """The fields of a random layout over `count` devices."""
    sizes = []
    remaining = count
    while remaining > 1:
        sizes.append(
            draw(
                st.sampled_from(
                    [size for size in range(2, remaining + 1) if remaining % size == 0]
                )
            )
        )
        remaining //= sizes[-1]
    if draw(st.booleans()):
        sizes.insert(draw(st.integers(0, len(sizes))), 1)
    dims = [[] for _ in range(rank)]
    for axis in draw(st.permutations(list(range(len(sizes))))):
        dim = draw(st.integers(0, rank))
        if dim < rank:
            dims[dim].append(axis)
    order = (
        random.Random(draw(st.integers(0, 9))).sample(range(count), count)
        if draw(st.booleans())
        else range(count)
    )
    weights = (
        [draw(st.sampled_from([1.0, 1.0, 10.0])) for _ in sizes]
        if draw(st.booleans())
        else ()
    )
    return tuple(sizes), tuple(map(tuple, dims)), tuple(order), tuple(weights)


@st.composite
def moves(draw):
    """An array's spare room per dimension and two layouts over the same devices, ranks
    0 to 4.
    """
    few = [1, 2, 3, 4, 6, 8, 9, 10, 12, 14, 15, 16, 18, 20, 21, 24, 30, 36]
    many = [192, 288, 384, 480]
    count = draw(st.sampled_from(few + 2 * many))
    rank = 2 if count in many else draw(st.integers(0, 4))
    spare = (
        [1] * rank
        if count in many
        else [draw(st.sampled_from([0, 1, 1, 1, 2, 3])) for _ in range(rank)]
    )
    return spare, draw(ends(count, rank)), draw(ends(count, rank))


@given(moves())
@settings(max_examples=150, deadline=None)
def test_any_ranks_factors_orders_and_empty_dimensions(move):
    spare = move[0]
    src = StepLayout(*move[1])
    dst = StepLayout(*move[2])
    # The least shape that both ends divide leaves no room for a detour.
    shape = tuple(
        math.lcm(a, b) * spare_factor
        for a, b, spare_factor in zip(src.counts, dst.counts, spare, strict=True)
    )
    assume(math.prod(shape) <= 5000)
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
            StepLayout((10, 3), ((), (0,)), tuple(range(30))),
            StepLayout((5, 2, 3), ((1, 2), ()), tuple(range(30))[::-1]),
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
    plan = check(
        (16,) * rank,
        StepLayout(sizes, src, tuple(range(devices))),
        StepLayout(sizes, dst, order),
    )
    assert [step.kind for step in plan.steps] == ["all_gather"]
    assert plan.wire_bytes == plan.lower_bound_bytes


def test_gathers_along_factors_of_two_meshes_stay_two():
    # The meshes differ in which of two neighbours is first, and in which axis has which
    # name.
    ours = [
        StepLayout((2, 2, 2), (axes,), (0, 1, 2, 3, 4, 5, 6, 7))
        for axes in ((0, 1, 2), (0, 1))
    ]
    theirs = [
        StepLayout((2, 2, 2), (axes,), (1, 0, 4, 5, 2, 3, 6, 7))
        for axes in ((1, 0), (1,))
    ]
    path = path_along(ours, theirs)
    assert [(step.kind, step.source, step.target) for step in path] == [
        ("all_gather", *ours),
        ("all_gather", *theirs),
    ]


def binary(end: StepLayout) -> StepLayout:
    """`end` with every axis split into factors of 2."""
    start = np.cumsum([0, *[size.bit_length() - 1 for size in end.sizes]])
    dims = tuple(
        tuple(f for axis in axes for f in range(start[axis], start[axis + 1]))
        for axes in end.dims
    )
    return StepLayout((2,) * int(start[-1]), dims)


def steps_from(dims, factors: int, slow: int):
    """Every layout that one slice, gather or all-to-all of factors of 2 leads to, with
    what it costs.
    """
    share = 2.0 ** -sum(map(len, dims))
    for dim, axes in enumerate(dims):
        for factor in set(range(factors)) - {axis for axes in dims for axis in axes}:
            yield (*dims[:dim], (*axes, factor), *dims[dim + 1 :]), 0.0
        for position in range(len(axes)):
            far = 2 ** sum(factor < slow for factor in axes[position:])
            cost = share * (DEAR * (far - 1) + 2 ** (len(axes) - position) - far)
            yield (*dims[:dim], axes[:position], *dims[dim + 1 :]), cost
    for lengths in it.product(*[range(len(axes) + 1) for axes in dims]):
        position = [
            axes[: len(axes) - length]
            for axes, length in zip(dims, lengths, strict=True)
        ]
        moving = [
            f
            for axes, length in zip(dims, lengths, strict=True)
            for f in axes[len(axes) - length :]
        ]
        gainers = [dim for dim, length in enumerate(lengths) if not length]
        if not moving or not gainers:
            continue
        near = 2.0 ** -sum(factor < slow for factor in moving)
        cost = share * (DEAR * (1 - near) + near - 2.0 ** -len(moving))
        for order in it.permutations(moving):
            for cuts in it.combinations_with_replacement(
                range(len(order) + 1), len(gainers) - 1
            ):
                after = list(position)
                for dim, first, last in zip(
                    gainers, (0, *cuts), (*cuts, len(order)), strict=True
                ):
                    after[dim] = (*position[dim], *order[first:last])
                yield tuple(after), cost


DEAR = 10


def exhaustive(factors: int, src: StepLayout, dst: StepLayout, slow: int) -> float:
    """The least cost over all sequences of steps in bounded memory, per byte of the
    array.

    Dijkstra over every layout of factors of 2 for two dimensions, of which the first
    `slow` lie between slices.
    """
    where = np.stack(np.unravel_index(np.arange(2**factors), (2,) * factors))
    slices = np.arange(2**factors) >> (factors - slow)
    states = [end.dims for end in all_layouts((2,) * factors)]
    tiles = np.array([_tile(dims, where) for dims in states])
    index = {dims: number for number, dims in enumerate(states)}
    alike = {}
    for number, dims in enumerate(states):
        alike.setdefault(tuple(map(len, dims)), []).append(number)
    first = binary(src).dims
    last = binary(dst).dims
    least = min(sum(map(len, first)), sum(map(len, last)))
    best = {first: 0.0}
    heap = [(0.0, first)]
    while heap:
        cost, now = heapq.heappop(heap)
        if now == last:
            return cost
        if cost > best[now]:
            continue
        ways = [
            step
            for step in steps_from(now, factors, slow)
            if sum(map(len, step[0])) >= least
        ]
        have = tiles[index[now]]
        same = alike[tuple(map(len, now))]
        share = 2.0 ** -sum(map(len, now))
        ways += [
            (states[number], permuted(have, tiles[number], slices) * share)
            for number in same
        ]
        for after, extra in ways:
            if cost + extra < best.get(after, math.inf) - 1e-12:
                best[after] = cost + extra
                heapq.heappush(heap, (cost + extra, after))
    return math.inf


def permuted(have: np.ndarray, want: np.ndarray, slices: np.ndarray) -> float:
    """The cost per device, in pieces, if each gives its piece to one other, in its
    slice where one wants it there.
    """
    lacking = have != want
    if not slices.any():
        return float(lacking.mean())
    expected, target_tiles = (
        Counter(zip(slices[lacking], tiles[lacking], strict=True))
        for tiles in (want, have)
    )
    near = (expected & target_tiles).total()
    return (near + DEAR * (lacking.sum() - near)) / len(have)


def _tile(dims, where: np.ndarray) -> np.ndarray:
    number = np.zeros(where.shape[1], int)
    for axes in dims:
        for axis in axes:
            number = number * 2 + where[axis]
    return number


@pytest.mark.parametrize(
    "src, dst",
    [
        (
            StepLayout((16, 2, 2), ((), (2,), (1, 0))),
            StepLayout((2, 32), ((1,), (0,), ())),
        ),
        (
            StepLayout((4, 32, 32), ((), (1, 2), (0,))),
            StepLayout((2, 512, 4), ((1,), (0, 2), ())),
        ),
        (
            StepLayout((16, 16, 16), ((0, 2), (1,), ())),
            StepLayout((1024, 2, 2), ((), (1,), (2, 0))),
        ),
    ],
)
def test_two_exchanges_meet_in_a_finer_layout(src, dst):
    plan = redistribute((65536,) * 3, 16, src, dst)
    assert [step.kind for step in plan.steps] == ["all_to_all", "all_to_all"]
    assert plan.wire_bytes < 2 * plan.lower_bound_bytes


def test_of_equal_paths_the_source_is_permuted_first():
    src = StepLayout((4, 4, 4), ((0, 1, 2), ()))
    dst = StepLayout((16, 4), ((1,), (0,)))
    plan = redistribute((64, 64), 64, src, dst)
    assert [step.kind for step in plan.steps] == ["permute", "all_to_all"]


@pytest.mark.parametrize("devices", [64, 512, 4096])
def test_moves_on_many_devices_are_planned_within_their_bounds(devices):
    rng = np.random.default_rng(devices)
    power = devices.bit_length() - 1
    for _ in range(12):
        rows = []
        for _ in range(2):
            cuts = [
                0,
                *sorted(
                    rng.choice(range(1, power), rng.integers(3), replace=False).tolist()
                ),
                power,
            ]
            dims = [[], [], []]
            for axis in rng.permutation(len(cuts) - 1).tolist():
                dims[rng.integers(3)].append(axis)
            rows.append(
                StepLayout(
                    tuple(2 ** (b - a) for a, b in it.pairwise(cuts)),
                    tuple(map(tuple, dims[:2])),
                )
            )
        plan = redistribute((65536, 65536), 16, *rows)
        bound = 2 * max(2 * 65536**2 // end.shard_count for end in rows)
        assert plan.peak_bytes <= bound
        assert plan.lower_bound_bytes <= plan.wire_bytes <= 2 * plan.lower_bound_bytes
        held = rows[0].counts
        for step in plan.steps:
            assert step.source.counts == held
            held = step.target.counts
        assert held == rows[1].counts


def in_slices(sizes: tuple[int, ...], dims, slices: int) -> StepLayout:
    """A layout on a mesh whose slowest axis spans slices of consecutive devices."""
    names = "abcd"[: len(sizes)]
    mesh = MeshSpec(zip(names, sizes, strict=True), dcn={"a": slices})
    return layout(
        mesh, P(*[tuple(names[axis] for axis in axes) for axes in dims]), len(dims)
    )


@pytest.mark.parametrize(
    "shape, src, dst, prime",
    [
        # The source is cut finely enough only by factors of the dear axis, which seem
        # to lead away from the target.
        (
            (512, 16),
            in_slices((4, 32, 2, 16), [(2,), (3,)], 4),
            in_slices((4, 2, 64, 8), [(0, 1, 2), (3,)], 4),
            False,
        ),
        # All factors are prime and none is shared: the estimates of all layouts between
        # the ends are alike.
        (
            (720,),
            StepLayout((288, 2, 5), ((2,),), tuple(range(2880))),
            StepLayout(
                (36, 4, 20),
                ((0, 2),),
                tuple(np.random.default_rng(0).permutation(2880).tolist()),
            ),
            True,
        ),
    ],
)
def test_some_path_is_soon_found(shape, src, dst, prime):
    most = 500
    path, cost, looked = explore(
        Problem(shape, *refine(src, dst, prime=prime)), most, math.inf
    )
    assert path is not None
    assert cost < math.inf
    assert looked <= 2 * most


@pytest.mark.parametrize("slices", [1, 2, 4])
def test_no_sequence_of_steps_costs_less_on_16_devices(slices):
    rng = np.random.default_rng(slices)
    layouts = [
        in_slices(end.sizes, end.dims, slices)
        for end in CATALOGUE
        if end.sizes[0] % slices == 0
    ]
    for _ in range(20):
        src, dst = (layouts[index] for index in rng.integers(len(layouts), size=2))
        plan = check((16, 16), src, dst)
        cost = plan.wire_bytes + (DEAR - 1) * plan.dcn_bytes
        least = exhaustive(4, src, dst, slices.bit_length() - 1) * 16 * 16 * 8
        assert cost == pytest.approx(least, abs=1 if slices == 1 else DEAR)


@pytest.mark.parametrize("end_number", [0, 1])
def test_slices_that_one_end_alone_knows_of_count_for_both(end_number):
    layout_arguments = [((2, 4, 2), ((2,), (0, 1))), ((16,), ((0,), ()))]
    both = [in_slices(sizes, dims, 2) for sizes, dims in layout_arguments]
    layouts = [
        both[position] if position == end_number else StepLayout(sizes, dims)
        for position, (sizes, dims) in enumerate(layout_arguments)
    ]
    costs = [
        (plan.wire_bytes, plan.dcn_bytes)
        for plan in (redistribute((16, 16), 64, *pair) for pair in (both, layouts))
    ]
    assert costs[0] == costs[1]
    assert costs[0][1] > 0


def test_layouts_of_meshes_and_specs():
    mesh = AbstractMesh((2, 4), ("a", "b"))
    step_layout = layout(mesh, P("b", ("a",)), 3)
    assert step_layout == StepLayout((2, 4), ((1,), (0,), ()))
    assert layout(MeshSpec({"a": 2, "b": 4}), P("b", "a"), 3) == step_layout
    assert layout(mesh, P(P.UNCONSTRAINED, "a"), 2) == StepLayout((2, 4), ((), (0,)))
    assert layout(mesh, P("b"), 1) is layout(mesh, P("b"), 1)
    assert step_layout.shard_count == 8
    assert step_layout.counts == (4, 2, 1)
    assert step_layout.shard_shape((8, 8, 8)) == (2, 4, 8)


def test_an_axis_that_spans_slices_is_two():
    mesh = MeshSpec({"a": 8, "b": 2, "c": 3}, dcn={"a": 2, "b": 2})
    assert layout(mesh, P("b", ("c", "a")), 2) == StepLayout(
        (2, 4, 2, 3), ((2,), (3, 0, 1)), None, (10.0, 1.0, 10.0, 1.0)
    )
    assert layout(MeshSpec({"a": 8}, dcn={"a": 8}), P("a"), 1) == StepLayout(
        (8,), ((0,),), None, (10.0,)
    )


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
    devices = objects(chips((4, 2, 1, 1), slices=2))[order]
    mesh = Mesh(devices.reshape(4, 4), ("a", "b"))
    end = layout(mesh, P(("a", "b")), 1)
    assert end == StepLayout(
        sizes, (tuple(range(len(sizes))),), tuple(order.tolist()), weights
    )
    assert (
        layout(
            Mesh(objects(chips((4, 4, 1, 1))).reshape(4, 4), ("a", "b")), P("a"), 1
        ).weights
        == ()
    )


def test_equal_moves_are_planned_once():
    src = StepLayout((2, 4), ((0,), (1,)))
    dst = StepLayout((4, 2), ((), (0,)))
    assert redistribute((8, 8), 32, src, dst) is redistribute(
        (8, 8), 32, StepLayout((2, 4), ((0,), (1,))), dst
    )
    # Another shape with the same room for cuts shares the path, and only the bytes
    # differ.
    large = redistribute((80, 8), 32, src, dst)
    assert large.wire_bytes == 10 * redistribute((8, 8), 32, src, dst).wire_bytes


@pytest.mark.parametrize(
    "src, dst",
    [
        (StepLayout((2,), ((0,),)), StepLayout((3,), ((),))),
        (StepLayout((2,), ((0,),), (0, 1)), StepLayout((2,), ((),), (1, 2))),
    ],
)
def test_meshes_of_other_devices_are_an_error(src, dst):
    with pytest.raises(
        MeshError,
        match=(
            r"one has 2 \(axis sizes \(2,\)\) and the other .* are in both; move"
            r" between"
        ),
    ):
        redistribute((6,), 8, src, dst)
