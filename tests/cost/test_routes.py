"""Routes of permutes on a torus, worked by hand and beside a walk of each message."""

import collections
import dataclasses
import itertools as it
import math

import pytest
from hypothesis import given, strategies as st

from shardfx import MeshSpec, chips
from shardfx.chips import _routes as routes
from shardfx.chips._chip import Ring
from shardfx.cost import Traffic, TrafficRow, seconds


def ring_of(size, closed):
    ring = Ring(size, closed)
    return routes.torus_of((size,), (1,), [(ring,)])


@pytest.mark.parametrize(
    ("pairs", "size", "closed", "messages", "hops"),
    [
        # To the next device, around the ring: each link has one message.
        ([(n, (n + 1) % 8) for n in range(8)], 8, True, 1, 1),
        # On a line the last message goes back over all links.
        ([(n, (n + 1) % 8) for n in range(8)], 8, False, 1, 7),
        # Three on: each link is passed by three messages.
        ([(n, (n + 3) % 8) for n in range(8)], 8, True, 3, 3),
        # Opposite: half of each of 8 messages goes over 4 links either way.
        ([(n, (n + 4) % 8) for n in range(8)], 8, True, 2, 4),
        # A line turned around: all of one half cross its middle.
        ([(n, 7 - n) for n in range(8)], 8, False, 4, 7),
        ([(0, 0)], 4, True, 0, 0),
    ],
)
def test_rings_and_lines(pairs, size, closed, messages, hops):
    ring = ring_of(size, closed)
    expected = routes.Route(messages, hops)
    assert routes.route_of(pairs, ring) == expected


def test_a_transposed_square_goes_around_corners():
    line = Ring(4, closed=False)
    torus = routes.torus_of((4, 4), (1, 1), [(line,), (line,)])
    pairs = []
    for a, b in it.product(range(4), repeat=2):
        pairs.append((4 * a + b, 4 * b + a))
    # Along `a` first: column 3 brings three messages over the link from row 2 to 3.
    expected = routes.Route(messages=3, hops=6)
    assert routes.route_of(pairs, torus) == expected


def test_messages_between_slices_pass_no_link():
    line = Ring(4, closed=False)
    torus = routes.torus_of((8,), (2,), [(line,)])
    slices_of_devices = torus.slices.tolist()
    assert slices_of_devices == [0, 0, 0, 0, 1, 1, 1, 1]
    across = routes.route_of([(0, 4), (3, 7)], torus)
    nothing = routes.Route(messages=0, hops=0)
    assert across == nothing
    within = routes.route_of([(0, 3), (1, 2), (4, 7)], torus)
    expected = routes.Route(messages=2, hops=3)
    assert within == expected


def walked(pairs, rings):
    """The messages on the busiest link, walked message by message."""
    sizes = []
    for ring in rings:
        sizes.append(ring.size)
    loads = collections.defaultdict[tuple[object, ...], float](float)
    for sender, receiver in pairs:
        place = list(coordinates(sender, sizes))
        target = coordinates(receiver, sizes)
        for dim, ring in enumerate(rings):
            walks_of_dim = walks(place[dim], target[dim], ring)
            for share, direction, length in walks_of_dim:
                for step in range(length):
                    node = list(place)
                    moved = place[dim] + direction * step
                    node[dim] = moved % ring.size
                    loads[dim, direction, tuple(node)] += share
            place[dim] = target[dim]
    busiest = max(loads.values(), default=0)
    return busiest


def walks(start, end, ring):
    """The shares of a message, with the direction and the length of each."""
    forward = (1, (end - start) % ring.size)
    backward = (-1, (start - end) % ring.size)
    if ring.closed and forward[1] == backward[1]:
        return [(0.5, *forward), (0.5, *backward)]
    if ring.closed:
        goes_forward = forward[1] < backward[1]
    else:
        goes_forward = end > start
    if goes_forward:
        return [(1, *forward)]
    return [(1, *backward)]


def coordinates(number, sizes):
    places = []
    for size in reversed(sizes):
        places.insert(0, number % size)
        number //= size
    return places


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.data())
def test_routes_are_those_of_messages_that_walk(sizes, data):
    # Rings from four chips on, as in the study of link loads.
    rings = []
    for size in sizes:
        rings.append(Ring(size, closed=size >= 4))
    rings_of_axes = [(ring,) for ring in rings]
    torus = routes.torus_of(sizes, [1] * len(sizes), rings_of_axes)
    last = math.prod(sizes) - 1
    device = st.integers(0, last)
    messages = st.tuples(device, device)
    lists_of_pairs = st.lists(messages, min_size=1, max_size=12)
    pairs = data.draw(lists_of_pairs)
    actual = routes.route_of(pairs, torus)
    expected = walked(pairs, rings)
    assert actual.messages == expected


def permute(pairs, wire_bytes, calls=1):
    row = TrafficRow(
        kind="collective-permute",
        wire_bytes=wire_bytes,
        dcn_bytes=0,
        calls=calls,
        dtype="f32",
        group_size=2,
        axes=("x",),
        source=None,
        stack=(),
        leaf=None,
        pairs=pairs,
    )
    return Traffic(rows=(row,), devices=8, axes=("x",))


def test_a_permute_takes_its_busiest_link_and_its_hops():
    v5p = chips.find("v5p")
    chip = dataclasses.replace(v5p, link_bytes_per_second=1e9, hop_seconds=1e-6)
    mesh = MeshSpec({"x": 8})
    far_pairs = []
    for n in range(8):
        far_pairs.append((n, (n + 3) % 8))
    far = tuple(far_pairs)
    traffic = permute(far, 10**6)
    estimate = seconds(traffic, chip, mesh, slice="1x1x8")
    expected = 3 * 1e6 / 1e9 + 3e-6
    assert estimate.seconds == pytest.approx(expected)
    latency = estimate.rows[0].latency_seconds
    assert latency == pytest.approx(3e-6)
    text = str(estimate)
    assert "3 messages on a link, up to 3 hops" in text
    # A single message of 8 MB: each device receives 1 MB in the mean.
    one_message = permute(((0, 1),), 10**6)
    single = seconds(one_message, chip, mesh, slice="1x1x8")
    expected_single = 8e6 / 1e9 + 1e-6
    assert single.seconds == pytest.approx(expected_single)
    # Each of 100 rounds waits for its hops.
    hundred = permute(far, 10**6, calls=100)
    rounds = seconds(hundred, chip, mesh, slice="1x1x8")
    expected_rounds = 3 * 1e6 / 1e9 + 300e-6
    assert rounds.seconds == pytest.approx(expected_rounds)


def test_a_group_of_a_part_of_an_axis_goes_around_no_ring():
    v5p = chips.find("v5p")
    chip = dataclasses.replace(v5p, link_bytes_per_second=1e9, hop_seconds=0.0)
    mesh = MeshSpec({"x": 8})
    traffic = permute((), 10**6)
    row = dataclasses.replace(traffic.rows[0], kind="all-gather")
    for group_size, links in ((8, 2), (4, 1)):
        part = dataclasses.replace(row, group_size=group_size)
        sent = dataclasses.replace(traffic, rows=(part,))
        estimate = seconds(sent, chip, mesh, slice="1x1x8")
        assert estimate.seconds == pytest.approx(1e6 / links / 1e9)
