import heapq
import itertools as it
import math

import numpy as np
from hypothesis import assume, given, settings, strategies as st

from benchmarks._simulate import pieces, simulate
from shardfx._layout import Layout
from shardfx._redistribute import redistribute


MESHES = ((16,), (4, 4), (2, 8), (8, 2), (2, 2, 4), (4, 2, 2), (2, 4, 2))


def layouts_of(sizes: tuple[int, ...], rank: int = 2) -> list[Layout]:
    """Every layout on one mesh: each axis cuts one dimension or none, in every order."""
    found = []
    for where in it.product(range(rank + 1), repeat=len(sizes)):
        groups = [[axis for axis, dim in enumerate(where) if dim == wanted] for wanted in range(rank)]
        found += [Layout(sizes, dims) for dims in it.product(*map(it.permutations, groups))]
    return found


CATALOGUE = [found for sizes in MESHES for found in layouts_of(sizes)]


def check(shape: tuple[int, ...], src: Layout, dst: Layout):
    """Runs the plan and compares what is held after every step with the definition of the step's layout."""
    array = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    plan = redistribute(shape, 64, src, dst)
    held = pieces(array, src, src)
    bytes_of = [held[0].nbytes, pieces(array, dst, src)[0].nbytes]
    wire = 0
    for step in plan.steps:
        before = held
        held = simulate(array, held, step, src)
        wire += step.wire_bytes
        for mine, right in zip(held, pieces(array, step.target, src), strict=True):
            np.testing.assert_array_equal(mine, right)
        assert step.peak_bytes == before[0].nbytes + held[0].nbytes
        assert step.peak_bytes <= 2 * max(bytes_of)
    for mine, right in zip(held, pieces(array, dst, src), strict=True):
        np.testing.assert_array_equal(mine, right)
    assert plan.lower_bound_bytes <= plan.wire_bytes <= wire
    assert plan.peak_bytes == max([step.peak_bytes for step in plan.steps], default=max(bytes_of))
    return plan


def lower_bound(shape: tuple[int, ...], src: Layout, dst: Layout) -> float:
    """What devices need and do not have, counted element by element; in bytes of 64-bit elements."""
    array = np.arange(math.prod(shape)).reshape(shape)
    have, want = pieces(array, src, src), pieces(array, dst, src)
    return 8 * float(np.mean([np.setdiff1d(w, h).size for h, w in zip(have, want, strict=True)]))


def test_every_step_puts_every_piece_where_its_layout_says():
    rng = np.random.default_rng(0)
    for _ in range(150):
        src, dst = (CATALOGUE[index] for index in rng.integers(len(CATALOGUE), size=2))
        plan = check((16, 32), src, dst)
        assert plan.lower_bound_bytes == math.ceil(lower_bound((16, 32), src, dst))


@st.composite
def ends(draw, count: int, rank: int):
    """The fields of a random layout over `count` devices."""
    sizes, left = [], count
    while left > 1:
        sizes.append(draw(st.sampled_from([size for size in range(2, left + 1) if left % size == 0])))
        left //= sizes[-1]
    if draw(st.booleans()):
        sizes.insert(draw(st.integers(0, len(sizes))), 1)
    dims = [[] for _ in range(rank)]
    for axis in draw(st.permutations(list(range(len(sizes))))):
        dim = draw(st.integers(0, rank))
        if dim < rank:
            dims[dim].append(axis)
    order = draw(st.permutations(list(range(count)))) if draw(st.booleans()) else range(count)
    return tuple(sizes), tuple(map(tuple, dims)), tuple(order)


@st.composite
def moves(draw):
    """An array's spare room per dimension and two layouts over the same devices, ranks 0 to 4."""
    count = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 9, 10, 12, 14, 15, 16, 18, 20, 21, 24, 30, 36]))
    rank = draw(st.integers(0, 4))
    spare = draw(st.lists(st.sampled_from([0, 1, 1, 1, 2, 3]), min_size=rank, max_size=rank))
    return spare, draw(ends(count, rank)), draw(ends(count, rank))


@given(moves())
@settings(max_examples=150, deadline=None)
def test_any_ranks_factors_orders_and_empty_dimensions(move):
    spare, src, dst = move[0], Layout(*move[1]), Layout(*move[2])
    # The least shape that both ends divide leaves no room for a detour.
    shape = tuple(math.lcm(a, b) * more for a, b, more in zip(src.counts, dst.counts, spare, strict=True))
    assume(math.prod(shape) <= 5000)
    check(shape, src, dst)


def states_of(factors: int, rank: int) -> list[tuple[tuple[int, ...], ...]]:
    return [found.dims for found in layouts_of((2,) * factors, rank)]


def binary(end: Layout) -> Layout:
    """`end` with every axis split into factors of 2."""
    start = np.cumsum([0, *[size.bit_length() - 1 for size in end.sizes]])
    dims = tuple(tuple(f for axis in axes for f in range(start[axis], start[axis + 1])) for axes in end.dims)
    return Layout((2,) * int(start[-1]), dims)


def edge_cost(u, v) -> float:
    """The share of the array that a step between two layouts of factors of 2 costs; without permutations."""
    more, fewer = (sum(map(len, dims)) for dims in (u, v))
    prefixes = [(a[: len(b)] == b, b[: len(a)] == a) for a, b in zip(u, v, strict=True)]
    if more < fewer:
        return 0.0 if all(grows for _, grows in prefixes) else math.inf
    if more > fewer:
        return 2.0**-fewer - 2.0**-more if all(shrinks for shrinks, _ in prefixes) else math.inf
    if not all(grows or shrinks for shrinks, grows in prefixes):
        return math.inf
    lost = sorted(factor for a, b in zip(u, v, strict=True) for factor in a[len(b) :])
    gained = sorted(factor for a, b in zip(u, v, strict=True) for factor in b[len(a) :])
    return (1 - 2.0 ** -len(lost)) * 2.0**-more if lost == gained else math.inf


def exhaustive(factors: int, src: Layout, dst: Layout, rank: int = 2) -> float:
    """The least traffic over all sequences of steps in bounded memory, as a share of the array."""
    states = states_of(factors, rank)
    index = {dims: number for number, dims in enumerate(states)}
    where = np.stack(np.unravel_index(np.arange(2**factors), (2,) * factors))
    tiles = np.array([_tile(dims, where) for dims in states])
    counts = [tuple(map(len, dims)) for dims in states]
    like = {count: [n for n, other in enumerate(counts) if other == count] for count in dict.fromkeys(counts)}
    size = [2.0 ** -sum(map(len, dims)) for dims in states]
    first, last = index[binary(src).dims], index[binary(dst).dims]
    room = 2 * max(size[first], size[last])
    best, heap = {first: 0.0}, [(0.0, first)]
    while heap:
        cost, now = heapq.heappop(heap)
        if now == last:
            return cost
        if cost > best[now]:
            continue
        ways = [(edge_cost(states[now], states[n]), n) for n in range(len(states)) if size[now] + size[n] <= room]
        same = like[counts[now]]
        ways += list(zip((tiles[same] != tiles[now]).mean(axis=1) * size[now], same, strict=True))
        for extra, after in ways:
            if cost + extra < best.get(after, math.inf) - 1e-12:
                best[after] = cost + extra
                heapq.heappush(heap, (cost + extra, after))
    raise AssertionError("the target is always reachable")


def _tile(dims, where: np.ndarray) -> np.ndarray:
    number = np.zeros(where.shape[1], int)
    for axes in dims:
        for axis in axes:
            number = number * 2 + where[axis]
    return number


def test_no_sequence_of_steps_has_less_traffic_on_16_devices():
    rng = np.random.default_rng(1)
    for _ in range(25):
        src, dst = (CATALOGUE[index] for index in rng.integers(len(CATALOGUE), size=2))
        plan = redistribute((16, 16), 64, src, dst)
        assert plan.wire_bytes == math.ceil(exhaustive(4, src, dst) * 16 * 16 * 8)
