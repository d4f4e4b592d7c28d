"""The links between the devices of a mesh, where they are known.

Bytes say which path is the cheapest only if all links are alike. On a torus an
all-gather receives over all links of its rings at the same time, while the messages of
a permute go from chip to chip, and several of them may pass one link.
"""

from typing import NamedTuple

from ...chips._chip import Ring


class Network(NamedTuple):
    """The torus that connects the devices of a mesh.

    - `rings`: for each mesh axis, the dimensions of the torus that it spans. An axis
      between TPU slices has none.
    - `link_bytes_per_second`: the bandwidth of one link in one direction.
    - `dcn_bytes_per_second`: the bandwidth of one device's part of the network between
      slices.
    - `hop_seconds`: the latency of one hop.
    """

    rings: tuple[tuple[Ring, ...], ...]
    link_bytes_per_second: float
    dcn_bytes_per_second: float
    hop_seconds: float
