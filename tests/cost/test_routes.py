"""Routes of permutes on a torus, worked by hand and beside a walk of each message."""

import collections
import dataclasses
import itertools as it
import math

import pytest
from hypothesis import given, strategies as st

from shardfx import MeshSpec, chips
from shardfx.chips._chip import Ring
from shardfx.cost import Traffic, TrafficRow, seconds
from shardfx.cost._routes import Route, route_of, torus_of


def ring_of(size, closed):
    return torus_of(MeshSpec({"x": size}), {"x": (Ring(size, closed),)})


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
    assert route_of(pairs, ring_of(size, closed)) == Route(messages, hops)


def test_a_transposed_square_goes_around_corners():
    axes = {"a": (Ring(4, closed=False),), "b": (Ring(4, closed=False),)}
    torus = torus_of(MeshSpec({"a": 4, "b": 4}), axes)
    pairs = [(4 * a + b, 4 * b + a) for a, b in it.product(range(4), repeat=2)]
    # Along `a` first: column 3 brings three messages over the link from row 2 to 3.
    assert route_of(pairs, torus) == Route(messages=3, hops=6)


def test_messages_between_slices_pass_no_link():
    spec = MeshSpec({"x": 8}, dcn={"x": 2})
    torus = torus_of(spec, {"x": (Ring(4, closed=False),)})
    assert torus.slices.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert route_of([(0, 4), (3, 7)], torus) == Route(messages=0, hops=0)
    assert route_of([(0, 3), (1, 2), (4, 7)], torus) == Route(messages=2, hops=3)


def walked(pairs, rings):
    """The messages on the busiest link, walked message by message."""
    sizes = [ring.size for ring in rings]
    loads = collections.defaultdict[tuple[object, ...], float](float)
    for sender, receiver in pairs:
        place = list(coordinates(sender, sizes))
        target = coordinates(receiver, sizes)
        for dim, ring in enumerate(rings):
            for share, direction, length in walks(place[dim], target[dim], ring):
                for step in range(length):
                    node = list(place)
                    node[dim] = (place[dim] + direction * step) % ring.size
                    loads[dim, direction, tuple(node)] += share
            place[dim] = target[dim]
    return max(loads.values(), default=0)


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
    rings = [Ring(size, closed=size >= 4) for size in sizes]
    names = "xyz"[: len(sizes)]
    spec = MeshSpec(dict(zip(names, sizes, strict=True)))
    rings_by_axis = {name: (ring,) for name, ring in zip(names, rings, strict=True)}
    torus = torus_of(spec, rings_by_axis)
    device = st.integers(0, math.prod(sizes) - 1)
    messages = st.tuples(device, device)
    pairs = data.draw(st.lists(messages, min_size=1, max_size=12))
    assert route_of(pairs, torus).messages == walked(pairs, rings)


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
    far = tuple((n, (n + 3) % 8) for n in range(8))
    estimate = seconds(permute(far, 10**6), chip, mesh, slice="1x1x8")
    assert estimate.seconds == pytest.approx(3 * 1e6 / 1e9 + 3e-6)
    assert estimate.rows[0].latency_seconds == pytest.approx(3e-6)
    assert "3 messages on a link, up to 3 hops" in str(estimate)
    # A single message of 8 MB: each device receives 1 MB in the mean.
    single = seconds(permute(((0, 1),), 10**6), chip, mesh, slice="1x1x8")
    assert single.seconds == pytest.approx(8e6 / 1e9 + 1e-6)
    # Each of 100 rounds waits for its hops.
    rounds = seconds(permute(far, 10**6, calls=100), chip, mesh, slice="1x1x8")
    assert rounds.seconds == pytest.approx(3 * 1e6 / 1e9 + 300e-6)
