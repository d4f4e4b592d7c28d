"""Device orders: laws over boxes, choices over the hardware that exists, and every
message.
"""

import hashlib
import itertools
import math
from types import SimpleNamespace

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from _devices import chips, objects
from hypothesis import given, settings
from jax.sharding import Mesh

from shardfx import hosts, topology
from shardfx.errors import MeshError


# Kind, bounds, one host's bounds.
HARDWARE = [
    ("TPU v3", (4, 4, 1, 2), (2, 2, 1, 2)),
    ("TPU v4", (4, 4, 8, 1), (2, 2, 1, 1)),
    ("TPU v5 lite", (4, 4, 1, 1), (2, 2, 1, 1)),
    ("TPU v5 lite", (16, 16, 1, 1), (2, 2, 1, 1)),
    ("TPU v5p", (4, 4, 4, 1), (2, 2, 1, 1)),
    ("TPU v5p", (8, 8, 8, 1), (2, 2, 1, 1)),
    ("TPU v6 lite", (16, 16, 1, 1), (2, 2, 1, 1)),
    ("TPU v9", (2, 6, 3, 1), (2, 2, 1, 1)),
]
box_lists = st.lists(st.integers(1, 6), min_size=1, max_size=4)
boxes = box_lists.filter(lambda box: math.prod(box) <= 300)


def hops(path, box, closed):
    """How far successive places are apart, by brute force."""

    def distance(start, end, size, is_ring):
        length = abs(start - end)
        if is_ring:
            return min(length, size - length)
        return length

    pairs = itertools.pairwise(path)
    distances = []
    for a, b in pairs:
        distances.append(sum(map(distance, a, b, box, closed)))
    return distances


def divisors_of(number):
    divisors = []
    for part in range(1, number + 1):
        if number % part == 0:
            divisors.append(part)
    return divisors


def is_permutation(order, bounds):
    columns = np.moveaxis(order, -1, 0)
    places = columns.reshape(len(bounds), -1)
    flat = np.ravel_multi_index(tuple(places), bounds)
    expected = np.arange(math.prod(bounds))
    actual = np.sort(flat)
    return np.array_equal(actual, expected)


@given(st.permutations(range(16)), st.tuples(*[st.integers(0, 5)] * 3))
def test_bounds_and_positions_need_neither_order_nor_origin(order, origin):
    all_devices = chips((2, 2, 2, 2))
    devices = []
    for index in order:
        devices.append(all_devices[index])
    for device in devices:
        moved = np.add(device.coords, origin)
        device.coords = tuple(moved.tolist())
    assert topology.bounds(devices) == (2, 2, 2, 2)
    positions = topology.positions(devices)
    for place, index in np.ndenumerate(positions):
        coordinates = np.subtract(devices[index].coords, origin)
        actual = (
            *coordinates,
            devices[index].core_on_chip,
        )
        assert actual == place


def test_devices_without_a_torus_are_processes_by_devices():
    devices = []
    for i in range(6):
        devices.append(SimpleNamespace(id=i, process_index=10 + i // 3))
    backwards = devices[::-1]
    assert topology.bounds(backwards) == (2, 3)
    expected = [[5, 4, 3], [2, 1, 0]]
    positions = topology.positions(devices[::-1])
    assert positions.tolist() == expected
    grid = np.array(jax.devices()).reshape(2, 4)
    actual = topology.bounds(grid)
    assert actual == (1, 8)
    flat = []
    for x in range(2):
        for y in range(3):
            flat.append(SimpleNamespace(coords=(x, y)))
    assert topology.bounds(flat) == (2, 3, 1)
    last = flat[-1]
    actual = topology.coords(last, 0)
    assert actual == (1, 2, 0)


TORUS = (4, 4, 1, 2)
HOST = (2, 2, 1, 2)
SUBMESH = topology.submesh_order
OTHER = [SimpleNamespace(id=i, process_index=i // 2) for i in range(3)]


@pytest.mark.parametrize(
    "function, arguments, message",
    [
        (topology.bounds, [[]], r"there are no devices; pass `jax.devices\(\)`"),
        (
            topology.bounds,
            [[*chips((2, 1, 1, 1)), OTHER[0]]],
            r"different lengths \(\[0, 4\]; 0 is none\)",
        ),
        (topology.bounds, [OTHER], r"different numbers of devices: \[2, 1\]"),
        (
            topology.positions,
            [chips(HOST)[2:]],
            r"6 devices span bounds \(2, 2, 1, 2\), but none sits at \(0, 0, 0, 0\)",
        ),
        (
            topology.positions,
            [chips(HOST, slices=2)],
            r"2 of the 16 .* \(0, 0, 0, 0\); slices are ordered one by one",
        ),
        (
            topology.coords,
            [OTHER[0], 0],
            "`local_device_count` is 0; it must be at least 1",
        ),
        (topology.hybrid_shape, [1, 8, 0], "`processes` is 0; it must be at least 1"),
        (
            topology.torus_order,
            [(2, 2), (2, 3)],
            r"sizes \(2, 3\) have 6 devices, but bounds \(2, 2\) hold 4",
        ),
        (
            topology.torus_order,
            [(2, 2), (4,), (True,)],
            r"`closed` \(True,\) has 1 entries, and there are 2 dimensions",
        ),
        (
            SUBMESH,
            [TORUS, HOST, (3, 1, 1, 2)],
            r"no multiple of 3; use a `submesh` with a .* \[1, 2, 4, 8, 16, 32\]",
        ),
        (
            SUBMESH,
            [(4, 6, 1, 2), HOST, (3, 2, 1, 1)],
            r"boxes of 6 devices that fit are \[\(1, 3, 1, 2\), \(1, 6",
        ),
        (
            SUBMESH,
            [TORUS, HOST, (0, 1, 1, 2)],
            r"`submesh` \(0, 1, 1, 2\) has size 0 in dim 0",
        ),
        (
            SUBMESH,
            [TORUS, (3, 2, 1, 2), (1, 1, 1, 2)],
            r"`host_bounds` \(3, 2, 1, 2\) does not divide .*use a `host_bounds` with",
        ),
        (
            SUBMESH,
            [TORUS, HOST, (4, 1, 1, 1)],
            r"spans dim 0 of .* 1 of 2 cores \(dim 3\); use \(4, 1, 1, 2\)",
        ),
        (
            SUBMESH,
            [(4, 6, 1, 2), HOST, (1, 3, 1, 2)],
            r"`tile_by_host=False`, or one of .* \[\(1, 6, 1, 1\)",
        ),
        (
            SUBMESH,
            [TORUS, HOST, (1, 2)],
            r"`submesh` \(1, 2\) has 2 dimensions, but `bounds`",
        ),
    ],
)
def test_what_is_no_box_is_refused(function, arguments, message):
    with pytest.raises(MeshError, match=message):
        function(*arguments)


def whole(box, bounds):
    whole_sides = []
    for side, bound in zip(box, bounds, strict=True):
        if side == bound:
            whole_sides.append(side)
    return math.prod(whole_sides)


@pytest.mark.parametrize(("kind", "bounds", "host"), HARDWARE)
def test_default_submesh_prefers_cores_then_whole_rings(kind, bounds, host):
    device_count = math.prod(bounds)
    candidates = {}
    for n in range(1, device_count + 1):
        candidates[n] = topology.feasible_submeshes(n, bounds)
    feasible = []
    for n, boxes in candidates.items():
        if boxes:
            feasible.append(n)
    for partitions, boxes in candidates.items():
        if not boxes:
            with pytest.raises(MeshError) as caught:
                topology.default_submesh(kind, partitions, bounds)
            message = str(caught.value)
            advice = f"use `num_partitions` out of {feasible}."
            assert message.endswith(advice)
            continue
        box = topology.default_submesh(kind, partitions, bounds)
        assert math.prod(box) == partitions
        for side, bound in zip(box, bounds, strict=True):
            remainder = bound % side
            assert remainder == 0
        if kind > "TPU v4":  # the others have T5X's table
            most_cores = max(other[3] for other in boxes)
            assert box[3] == most_cores
            whole_sizes = []
            for other in boxes:
                if other[3] == box[3]:
                    whole_sizes.append(whole(other, bounds))
            expected = max(whole_sizes)
            actual = whole(box, bounds)
            assert actual == expected


@pytest.mark.parametrize(
    ("kind", "partitions", "bounds", "expected"),
    [
        ("TPU v5p", 4, (4, 4, 4, 1), (4, 1, 1, 1)),  # a ring
        ("TPU v5p", 16, (4, 4, 16, 1), (4, 4, 1, 1)),  # a torus rather than a ring
        # No ring is whole: the box with a closed walk.
        (
            "TPU v5p",
            4,
            (8, 8, 8, 1),
            (2, 2, 1, 1),
        ),
        ("TPU v5 lite", 16, (16, 16, 1, 1), (16, 1, 1, 1)),
        ("TPU v6 lite", 4, (16, 16, 1, 1), (2, 2, 1, 1)),
        ("TPU7x", 8, (4, 4, 4, 2), (4, 1, 1, 2)),  # cores first
        # The table's (4, 2, 1, 1) does not fit.
        (
            "TPU v4",
            8,
            (2, 2, 2, 1),
            (2, 2, 2, 1),
        ),
        ("TPU v4", 4, (4, 4, 4, 2), (2, 1, 1, 2)),  # the table is for one core per chip
    ],
)
def test_chosen_submeshes(kind, partitions, bounds, expected):
    actual = topology.default_submesh(kind, partitions, bounds)
    assert actual == expected


@pytest.mark.parametrize(("kind", "bounds", "host"), HARDWARE)
@pytest.mark.parametrize("tile", [True, False])
def test_every_submesh_order_is_a_permutation_of_boxes(kind, bounds, host, tile):
    device_count = math.prod(bounds)
    boxes_by_count = []
    for count in divisors_of(device_count)[:8]:
        boxes_by_count.append(topology.feasible_submeshes(count, bounds))
    boxes = itertools.chain.from_iterable(boxes_by_count)
    for box in boxes:
        try:
            order = topology.submesh_order(bounds, host, box, tile_by_host=tile)
        except MeshError as error:
            message = str(error)
            assert "host bounds" in message or "cores (dim 3)" in str(error)
            continue
        assert is_permutation(order, bounds)
        highest = order.max(axis=1)
        lowest = order.min(axis=1)
        extents = highest - lowest + 1
        is_side = extents == np.array(box)
        assert is_side.all()


@pytest.mark.parametrize(("kind", "bounds", "host"), HARDWARE[:4])
def test_host_tiling_gives_each_host_a_box(kind, bounds, host):
    devices = chips(bounds, host, kind)
    grid = topology.positions(devices)
    for box in ((1, 1, 1, bounds[3]), (2, 2, 1, bounds[3])):
        order = topology.submesh_order(bounds, host, box)
        columns = np.moveaxis(order, -1, 0)
        places = tuple(columns)
        numbers = grid[places]
        grid_of_devices = objects(devices)[numbers]
        mesh = Mesh(grid_of_devices, ("data", "model"))
        host_size = math.prod(host)
        expected = math.prod(bounds) // host_size
        grid_of_hosts = hosts.grid_of(mesh)
        assert grid_of_hosts.process_count == expected


@given(st.integers(1, 40), st.integers(1, 16), st.integers(1, 16))
def test_hybrid_shape_uses_every_device(partitions, local, processes):
    try:
        ici, dcn = topology.hybrid_shape(partitions, local, processes)
    except MeshError as error:
        message = str(error)
        assert f"{partitions} partitions do not tile" in message
        parts = str(error).split("use one of ")[1][:-1]
        others = eval(parts)
        assert partitions not in others
        return
    assert math.prod(ici) == local
    assert math.prod(dcn) == processes
    ici_and_dcn = ici[1] * dcn[1]
    assert ici_and_dcn == partitions


@given(boxes, st.lists(st.booleans(), min_size=4, max_size=4))
def test_ring_path_steps_to_neighbours_and_closes_where_it_can(box, closed):
    closed = closed[: len(box)]
    path = topology.ring_path(box, closed).tolist()
    expected = list(np.ndindex(*box))
    places = map(tuple, path)
    assert sorted(places) == expected
    is_open = [False] * len(box)
    for hop in hops(path, box, is_open):
        assert hop == 1
    used = []
    for dim, size in enumerate(box):
        if size > 1:
            used.append(dim)
    even = []
    for dim in used:
        if box[dim] % 2 == 0:
            even.append(dim)
    if (even and len(used) > 1) or any(closed[dim] for dim in even):
        last_step = [path[-1], path[0]]
        actual = hops(last_step, box, closed)
        assert actual == [1]


@settings(max_examples=50)
@given(boxes, st.data())
def test_torus_order_is_a_permutation_and_walks_the_last_axis(box, data):
    size = math.prod(box)
    last_sizes = st.sampled_from(divisors_of(size))
    last = data.draw(last_sizes)
    middle_sizes = st.sampled_from(divisors_of(size // last))
    middle = data.draw(middle_sizes)
    first = size // last // middle
    sizes = (first, middle, last)
    order = topology.torus_order(box, sizes)
    assert is_permutation(order, tuple(box))
    actual = topology.mean_hops(order, 2, box)
    expected = 0.0 if last == 1 else 1.0
    assert actual == expected
    # A second axis takes a dimension of its own.
    bounds = (8, 8, 8, 1)
    order = topology.torus_order(bounds, (128, 2, 2))
    actual = topology.mean_hops(order, 1, bounds)
    assert actual == 1.0


@pytest.mark.parametrize(("kind", "bounds", "host"), HARDWARE)
def test_mean_hops_against_brute_force(kind, bounds, host):
    partitions = 2 * bounds[3]
    submesh = topology.default_submesh(kind, partitions, bounds)
    order = topology.submesh_order(bounds, host, submesh)
    closed = topology.wraps(kind, bounds)
    rows = []
    for row in order.tolist():
        rows.append(hops(row, bounds, closed))
    actual = topology.mean_hops(order, 1, bounds, closed)
    expected = np.mean(rows)
    assert actual == pytest.approx(expected)
    places = np.array([[0, 0], [3, 0], [3, 5]])  # a ring has a short way round
    actual = topology.mean_hops(places, 0, (4, 6), (True, False))
    expected_hops = (1 + 5) / 2
    assert actual == expected_hops


def test_which_dimensions_are_rings():
    actual = topology.wraps("TPU v5p", (4, 6, 8, 1))
    assert actual == (True, False, True, False)
    actual = topology.wraps("TPU v5 lite", (8, 16, 1, 1))
    assert actual == (False, True, False, False)
    actual = topology.wraps("TPU v3", (32, 16, 1, 2))
    assert actual == (True, False, False, False)
    assert topology.wraps("unheard of", (4, 4)) == (False, False)


SMALL = [
    *(
        ("TPU v2", (4, 4, 1, 2)),
        ("TPU v3", (2, 2, 1, 2)),
        ("TPU v4", (2, 2, 4, 1)),
        ("TPU v4 lite", (2, 2, 1, 1)),
    ),
    *(
        ("TPU v5 lite", (2, 4, 1, 1)),
        ("TPU v5 lite", (4, 4, 1, 1)),
        ("TPU v5p", (2, 2, 2, 1)),
    ),
    *(
        ("TPU v5p", (4, 4, 4, 2)),
        ("TPU v6 lite", (4, 2, 1, 1)),
        ("TPU7x", (2, 2, 4, 2)),
    ),
]


def factorings(number, count):
    if count == 1:
        return [(number,)]
    divisors = []
    for n in range(1, number + 1):
        if number % n == 0:
            divisors.append(n)
    all_factorings = []
    for n in divisors:
        for rest in factorings(number // n, count - 1):
            all_factorings.append((n, *rest))
    return all_factorings


@pytest.mark.parametrize(
    ("kind", "bounds"), [*SMALL, *(row[:2] for row in HARDWARE)], ids=str
)
def test_neighbours_on_the_last_axis_are_linked(kind, bounds):
    host = (2, 2, 1, bounds[3])
    devices = chips(bounds, host, kind)
    size = math.prod(bounds)
    every = []
    for count in (1, 2, 3):
        for sizes in factorings(size, count):
            every.append(sizes)
    models = []
    for model in (4, 8, 16):
        if topology.feasible_submeshes(model, bounds):
            models.append((size // model, model))
    choices = every if (kind, bounds) in SMALL else models
    for sizes in choices:
        order = topology.device_order(devices, sizes)
        ids = sorted(device.id for device in order.devices.flat)
        expected = list(range(size))
        assert ids == expected
        split_axes = []
        for i, axis_size in enumerate(sizes):
            if axis_size > 1:
                split_axes.append(i)
        last = max(split_axes)
        assert order.mean_hops is not None, (
            sizes,
            order.method,
        )
        assert order.mean_hops[last] == 1.0, (
            sizes,
            order.method,
        )


def axes_varying(order, axis):
    """The dimensions of the torus along which the devices of one mesh axis differ."""
    axis_size = order.devices.shape[axis]
    last_axis = np.moveaxis(order.devices, axis, -1)
    lines = last_axis.reshape(-1, axis_size)
    line = lines[0]
    places = np.array([topology.coords(device, 1) for device in line])
    extents = np.ptp(places, axis=0)
    varying = np.flatnonzero(extents)
    return tuple(varying.tolist())


@pytest.mark.parametrize(
    ("bounds", "sizes", "dims"),
    [
        # The link between the cores of a chip is the fastest: the last axis has it.
        ((2, 4, 4, 2), (8, 8), [(0, 2), (1, 3)]),
        ((2, 4, 4, 2), (32, 2), [(0, 1, 2), (3,)]),
        ((4, 4, 4, 2), (4, 4, 8), [(2,), (1,), (0, 3)]),
        ((2, 4, 4, 2), (2, 4, 8), [(0,), (2,), (1, 3)]),
        # Cores first would leave nothing whole for the axis of 8.
        ((4, 4, 8, 2), (2, 8, 16), [(3,), (2,), (0, 1)]),
    ],
)
def test_two_cores_of_a_chip_go_to_the_fastest_axis(bounds, sizes, dims):
    devices = chips(bounds, (2, 2, 1, 2), "TPU7x")
    order = topology.device_order(devices, sizes)
    actual = []
    for axis in range(len(sizes)):
        actual.append(axes_varying(order, axis))
    assert actual == dims
    assert order.method == "mesh_utils"


def test_orders_of_two_cores_are_those_of_every_jax():
    """The digest is the same on JAX 0.9, 0.10 and 0.12; JAX's own orders are not."""
    digest = hashlib.sha256()
    for bounds in ((2, 2, 2, 2), (2, 4, 4, 2), (4, 4, 4, 2), (4, 4, 8, 2)):
        devices = chips(bounds, (2, 2, 1, 2), "TPU7x")
        for count in (1, 2, 3):
            for sizes in factorings(len(devices), count):
                order = topology.device_order(devices, sizes)
                ids = []
                for device in order.devices.flat:
                    ids.append(device.id)
                record = repr((bounds, sizes, ids))
                digest.update(record.encode())
    assert digest.hexdigest() == (
        "6ed883f736bb3a9255bfa82d92ccca08b33db5e7466b2970e3089178665f41c4"
    )


@pytest.mark.parametrize(
    ("sizes", "slices", "message"),
    [
        ((8,), (3,), "3 is no divisor of 8"),
        ((4, 2), (2,), "one number for each of the sizes"),
        ((8,), (0,), "0 is no divisor of 8"),
        ((4, 2), (1, -1), "-1 is no divisor of 2"),
    ],
)
def test_slices_that_do_not_divide_the_sizes(sizes, slices, message):
    with pytest.raises(MeshError, match=message):
        topology.device_order(jax.devices(), sizes, slices)
