"""Meshes, and the order of devices on real hardware as integers: coordinates, slices,
tori, submeshes.

It may import `_ground` alone. It never starts a backend: callers pass devices, or the
coordinates of devices.
"""

from ._devices import (
    bounds as bounds,
    coords as coords,
    positions as positions,
    slices as slices,
)
from ._mesh import MeshSpec as MeshSpec
from ._order import DeviceOrder as DeviceOrder, device_order as device_order
from ._submesh import (
    default_submesh as default_submesh,
    hybrid_shape as hybrid_shape,
    submesh_order as submesh_order,
)
from ._torus import (
    feasible_submeshes as feasible_submeshes,
    mean_hops as mean_hops,
    ring_path as ring_path,
    torus_order as torus_order,
    wraps as wraps,
)
