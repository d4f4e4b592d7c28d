"""The links of a torus that collectives use.

A message of a permute goes along one dimension of the torus after another, the shorter
way around a ring. If both ways are equally long, half of it goes each way.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from ._chip import Ring


# The links that limit a collective, as `Collective.links` of `_step` says them.
LinkUse = Literal["rings", "middle", "one"]


def links_of(use: LinkUse, rings: Sequence[Ring]) -> float:
    """The links over which a chip receives the bytes of a collective, at the rate of
    one link each. The replica groups span the dimensions `rings` of the torus. `use` is
    what limits the collective: one link, the middle of the longest ring, or all links.
    """
    if not rings or use == "one":
        return 1.0
    if use == "middle":
        # An all-to-all: each of n devices receives B bytes, half of them from the other
        # side of the longest ring. In each direction n / 2 * B / 2 bytes cross its
        # middle, where a ring has two links and a line has one. So B takes n B / (4
        # links) seconds at the speed of a link. Other dimensions multiply both the
        # devices and the links.
        longest = longest_of(rings)
        return 4 * longest.links / longest.size
    return float(sum(ring.links for ring in rings))


def rings_spanned(rings: Sequence[Ring], members: int) -> list[Ring]:
    """The dimensions that a replica group of `members` devices spans, which are those
    of its mesh axes. A group of a part of an axis does not go around its ring.
    """
    if members < math.prod(ring.size for ring in rings):
        return [ring._replace(closed=False) for ring in rings]
    return list(rings)


def longest_of(rings: Sequence[Ring]) -> Ring:
    """The dimension whose middle limits an all-to-all."""
    return max(rings, key=lambda ring: ring.size / ring.links)


class Torus(NamedTuple):
    """The place of each device of a mesh in its slice.

    - `rings`: the dimensions of the torus, or parts of them, that mesh axes span.
    - `coordinates`: one row for each position in the mesh, with its place on each ring.
    - `slices`: the number of each position's slice.
    """

    rings: tuple[Ring, ...]
    coordinates: np.ndarray
    slices: np.ndarray


def torus_of(
    sizes: Sequence[int],
    slice_counts: Sequence[int],
    rings: Sequence[Sequence[Ring]],
) -> Torus:
    """The place of each device of a mesh with axes of the given `sizes`. For each axis,
    `slice_counts` has the number of slices and `rings` the dimensions that it spans.
    """
    # For each mesh axis, the index of each device along it.
    index_along_axes = np.indices(sizes).reshape(len(sizes), -1)
    device_count = math.prod(sizes)
    slices = np.zeros(device_count, np.int64)
    all_rings: list[Ring] = []
    columns: list[np.ndarray] = []
    axes = zip(sizes, slice_counts, rings, index_along_axes, strict=True)
    for size, slice_count, rings_of_axis, index in axes:
        size_in_slice = size // slice_count
        slice_along_axis, index_in_slice = np.divmod(index, size_in_slice)
        slices = slices * slice_count + slice_along_axis

        ring_sizes = [ring.size for ring in rings_of_axis]
        if not ring_sizes:
            continue
        all_rings += rings_of_axis
        # The cores of one chip have one place: the number of its devices on this axis.
        devices_of_chip = size_in_slice // math.prod(ring_sizes)
        chips = index_in_slice // devices_of_chip
        columns += np.unravel_index(chips, ring_sizes)

    coordinates = np.zeros((device_count, 0), np.int64)
    if columns:
        coordinates = np.stack(columns, axis=1)
    return Torus(rings=tuple(all_rings), coordinates=coordinates, slices=slices)


class Route(NamedTuple):
    """The route of the messages of one permute inside the slices: how many messages
    pass the busiest link, and the hops of the longest way.
    """

    messages: float
    hops: int


class _WaysAround(NamedTuple):
    """The ways of messages around one ring: for each message the hops forward and
    backward, and the part of it that goes forward.
    """

    forward: np.ndarray
    backward: np.ndarray
    forward_share: np.ndarray


def route_of(pairs: Sequence[tuple[int, int]], torus: Torus) -> Route:
    """The route of messages of equal size between `pairs` of a sender and a receiver,
    which are positions in the mesh. Messages between slices are left out. The others
    go along one dimension of the torus after another. A message has the load 1, which
    two ways of equal length share.
    """
    positions = np.array(pairs, np.int64).reshape(-1, 2)
    senders = positions[:, 0]
    receivers = positions[:, 1]
    is_inside = torus.slices[senders] == torus.slices[receivers]
    senders = senders[is_inside]
    receivers = receivers[is_inside]
    slices = torus.slices[senders]
    # Where each message is, and where it goes.
    places = torus.coordinates[senders]
    target_places = torus.coordinates[receivers]
    ring_sizes = [ring.size for ring in torus.rings]
    slice_count = int(torus.slices.max()) + 1
    loads_shape = (slice_count, *ring_sizes)

    busiest = 0.0
    hops = np.zeros(len(senders), np.int64)
    for dim, ring in enumerate(torus.rings):
        ways = _ways_around(ring, target_places[:, dim] - places[:, dim])
        directions = (
            (1, ways.forward, ways.forward_share),
            (-1, ways.backward, 1 - ways.forward_share),
        )
        for direction, lengths, shares in directions:
            # The messages that pass each link that leaves a node in this direction.
            loads = np.zeros(loads_shape)
            longest = int(lengths[shares > 0].max(initial=0))
            for step in range(longest):
                passes = (shares > 0) & (lengths > step)
                nodes = places[passes]
                nodes[:, dim] = (nodes[:, dim] + direction * step) % ring.size
                np.add.at(loads, (slices[passes], *nodes.T), shares[passes])
            busiest = max(busiest, float(loads.max()))
        steps = np.where(ways.forward_share > 0, ways.forward, ways.backward)
        hops += steps * ring.stride
        # All messages have arrived along this dimension.
        places[:, dim] = target_places[:, dim]
    return Route(messages=busiest, hops=int(hops.max(initial=0)))


def _ways_around(ring: Ring, distances: np.ndarray) -> _WaysAround:
    """The ways of messages to nodes of a ring that are `distances` further. On a ring
    that is not closed there is one way; its other entry means nothing.
    """
    forward = distances % ring.size
    backward = -distances % ring.size
    if ring.closed:
        is_shorter = forward < backward
        is_equal = forward == backward
        forward_share = np.select([is_shorter, is_equal], [1.0, 0.5], 0)
    else:
        forward_share = np.where(distances > 0, 1.0, 0.0)
    return _WaysAround(
        forward=forward,
        backward=backward,
        forward_share=forward_share,
    )
