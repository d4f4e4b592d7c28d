"""Where the devices of a program are: along the axes of its mesh, and in slices."""

from typing import Any

import numpy as np
from jax.sharding import Mesh

from .. import topology
from ..topology._mesh import MeshSpec
from .collective import Collective


class Where:
    """Where the devices of a program are: along the axes of its mesh, and in slices."""

    def __init__(self, spec: MeshSpec | None, mesh: Any, devices: int):
        self.devices, self.names = devices, () if spec is None else spec.axis_names
        sizes = () if spec is None else spec.axis_sizes
        self.coordinates = np.stack(np.unravel_index(np.arange(devices), sizes)) if sizes else np.zeros((0, devices))
        self.apart, self.slices = np.arange(devices), _slice_numbers(spec, mesh, devices)

    def axes(self, collective: Collective) -> tuple[str, ...]:
        """The mesh axes along which the devices of a group differ."""
        where = self.coordinates[:, collective.groups]
        differs = (where != where[:, :, :1]).any(axis=(1, 2))
        return tuple(name for name, own in zip(self.names, differs.tolist(), strict=True) if own)


def _slice_numbers(spec: MeshSpec | None, mesh: Any, devices: int) -> np.ndarray:
    if isinstance(mesh, Mesh):
        found = topology.slices(mesh.devices.ravel().tolist())
        number = {id_: at for at, ids in enumerate(found) for id_ in ids}
        return np.array([number[device] for device in range(devices)])
    if spec is None or max(spec.dcn_sizes, default=1) == 1:
        return np.zeros(devices, dtype=int)
    parts = [size // slices for size, slices in zip(spec.axis_sizes, spec.dcn_sizes, strict=True)]
    where = np.stack(np.unravel_index(np.arange(devices), spec.axis_sizes))
    return np.asarray(np.ravel_multi_index(tuple(where // np.array(parts)[:, None]), spec.dcn_sizes))
