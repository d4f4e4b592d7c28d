"""The links of a torus that the messages of a permute pass.

A message goes along one dimension of the torus after another, the shorter way around a
ring. If both ways are equally long, half of it goes each way.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..chips._chip import Ring
from ..topology import MeshSpec


class Torus(NamedTuple):
    """The place of each device of a mesh in its slice.

    - `rings`: the dimensions of the torus, or parts of them, that mesh axes span.
    - `coordinates`: one row for each position in the mesh, with its place on each ring.
    - `slices`: the number of each position's slice.
    """

    rings: tuple[Ring, ...]
    coordinates: np.ndarray
    slices: np.ndarray


def torus_of(spec: MeshSpec, axes: Mapping[str, Sequence[Ring]]) -> Torus:
    """The place of each device of the mesh `spec`, whose axes span the rings `axes`."""
    places = np.indices(spec.axis_sizes).reshape(len(spec.axis_sizes), -1)
    slices = np.zeros(spec.size, np.int64)
    rings: list[Ring] = []
    columns: list[np.ndarray] = []
    for number, name in enumerate(spec.axis_names):
        slice_count = spec.dcn_sizes[number]
        inner_size = spec.axis_sizes[number] // slice_count
        slices = slices * slice_count + places[number] // inner_size

        rings_of_axis = axes.get(name, ())
        sizes = [ring.size for ring in rings_of_axis]
        # The cores of one chip have one place.
        devices_of_chip = inner_size // math.prod(sizes)
        chips = places[number] % inner_size // devices_of_chip
        rings += rings_of_axis
        columns += np.unravel_index(chips, sizes) if sizes else ()
    coordinates = np.zeros((spec.size, 0), np.int64)
    if columns:
        coordinates = np.stack(columns, axis=1)
    return Torus(rings=tuple(rings), coordinates=coordinates, slices=slices)


class Route(NamedTuple):
    """The route of the messages of one permute inside the slices: how many messages
    pass the busiest link, and the hops of the longest way.
    """

    messages: float
    hops: int


def route_of(pairs: Sequence[tuple[int, int]], torus: Torus) -> Route:
    """The route of messages of equal size between `pairs` of a sender and a receiver,
    which are positions in the mesh.
    """
    ends = np.array(pairs, np.int64).reshape(-1, 2)
    is_inside = torus.slices[ends[:, 0]] == torus.slices[ends[:, 1]]
    ends = ends[is_inside]
    slices = torus.slices[ends[:, 0]]
    places = torus.coordinates[ends[:, 0]]
    targets = torus.coordinates[ends[:, 1]]
    shape = (int(torus.slices.max()) + 1, *[ring.size for ring in torus.rings])

    busiest = 0.0
    hops = np.zeros(len(ends), np.int64)
    for dim, ring in enumerate(torus.rings):
        distances = targets[:, dim] - places[:, dim]
        forward = distances % ring.size
        backward = -distances % ring.size
        if ring.closed:
            share = np.select([forward < backward, forward == backward], [1.0, 0.5], 0)
        else:
            share = np.where(distances > 0, 1.0, 0.0)
        for direction, lengths, shares in (
            (1, forward, share),
            (-1, backward, 1 - share),
        ):
            loads = np.zeros(shape)
            for step in range(int(lengths[shares > 0].max(initial=0))):
                passes = (shares > 0) & (lengths > step)
                nodes = places[passes]
                nodes[:, dim] = (nodes[:, dim] + direction * step) % ring.size
                np.add.at(loads, (slices[passes], *nodes.T), shares[passes])
            busiest = max(busiest, float(loads.max()))
        hops += np.where(share > 0, forward, backward)
        places[:, dim] = targets[:, dim]
    return Route(messages=busiest, hops=int(hops.max(initial=0)))
