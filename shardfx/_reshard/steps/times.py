"""The time of a path on a torus, by the model of `shardfx.cost.seconds`."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...chips._chip import Ring, hops_across
from ...chips._routes import links_of, rings_spanned, route_of, torus_of
from .groups import all_gather, all_to_all
from .layout import StepLayout, mesh_coordinates
from .network import Network
from .paths import Path, PathStep, permutation


class PathTime(NamedTuple):
    """The parts of a path's time, for arrays of any size.

    - `link_share`: the bytes that pass the busiest link in all steps, as a fraction of
      the array's bytes.
    - `dcn_share`: the bytes that a device receives from other slices, in the same form.
    - `hops`: the hops of all steps.
    """

    link_share: float
    dcn_share: float
    hops: int

    def seconds(self, array_bytes: float, network: Network) -> float:
        """The time for an array of so many bytes."""
        link_seconds = self.link_share * array_bytes / network.link_bytes_per_second
        dcn_seconds = self.dcn_share * array_bytes / network.dcn_bytes_per_second
        return link_seconds + dcn_seconds + self.hops * network.hop_seconds


class TorusTimes:
    """The times of paths that start at a layout over the mesh of `source`, whose
    devices `network` connects.
    """

    def __init__(self, source: StepLayout, network: Network):
        weights = source.weights or (1.0,) * len(source.sizes)
        # The number of slices that each axis spans.
        slice_counts: list[int] = []
        for size, weight in zip(source.sizes, weights, strict=True):
            # Only an axis between slices has a weight above 1.
            slice_counts.append(size if weight > 1 else 1)
        # The layout in whose mesh order devices are numbered.
        self._source = source
        self._network = network
        # The place of each device in the torus.
        self._torus = torus_of(source.sizes, slice_counts, network.rings)

    def of_path(self, path: Path) -> PathTime:
        """The time of all steps of `path`."""
        times = list(map(self.of_step, path))
        return PathTime(
            link_share=sum(time.link_share for time in times),
            dcn_share=sum(time.dcn_share for time in times),
            hops=sum(time.hops for time in times),
        )

    def of_step(self, step: PathStep) -> PathTime:
        """The time of one step. A slice sends nothing. The messages of a permute go
        through the torus one hop after another, and the busiest link counts. An
        all-gather uses all links of its rings alike. An all-to-all is limited by the
        links in the middle of its longest ring.
        """
        if step.kind == "slice":
            return PathTime(link_share=0.0, dcn_share=0.0, hops=0)
        dcn_share = float(step.dcn_share)
        if step.kind == "permute":
            senders = permutation(step.source, step.target, self._source)
            receivers = np.flatnonzero(senders != np.arange(len(senders)))
            pairs = np.stack([senders[receivers], receivers], axis=1)
            route = route_of(pairs.tolist(), self._torus)
            return PathTime(
                link_share=route.messages / step.source.shard_count,
                dcn_share=dcn_share,
                hops=max(1, route.hops),
            )
        if step.kind == "all_gather":
            groups = all_gather(step.source, step.target, self._source).groups
            use = "rings"
        else:
            groups = all_to_all(step.source, step.target, self._source).groups
            use = "middle"
        # The dimensions of the torus that a replica group spans.
        rings: list[Ring] = []
        for axis in self.axes_across(groups):
            rings += self._network.rings[axis]
        rings = rings_spanned(rings, groups.shape[1])
        # An all-gather that the compiler replaces by an all-reduce sends twice as much.
        rounds = 1
        if step.kind == "all_gather" and _becomes_all_reduce(groups, rings):
            rounds = 2
        # What arrives from devices of the same slice.
        near_share = float(step.wire_share - step.dcn_share)
        return PathTime(
            link_share=rounds * near_share / links_of(use, rings),
            dcn_share=dcn_share,
            hops=rounds * max(1, hops_across(rings)),
        )

    def axes_across(self, groups: np.ndarray) -> list[int]:
        """The mesh axes of the source along which the members of a replica group
        differ.
        """
        source = self._source
        coordinates = mesh_coordinates(source.sizes, np.arange(source.size))
        axes: list[int] = []
        for axis, along_axis in enumerate(coordinates):
            members = along_axis[groups]
            if (members != members[:, :1]).any():
                axes.append(axis)
        return axes


def _becomes_all_reduce(groups: np.ndarray, rings: Sequence[Ring]) -> bool:
    """Whether libtpu (0.0.42) replaces an all-gather by an all-reduce of padded shards,
    which sends twice the bytes: over all chips of a torus with three closed dimensions,
    as v5p:4x4x4 and v5p:4x4x8, and neither v5p:2x2x4 nor v5e:8x8.
    """
    is_whole = len(groups) == 1
    return is_whole and len(rings) == 3 and all(ring.closed for ring in rings)
