"""TPU topologies on a machine without a TPU, from the libtpu wheel: devices and meshes
to compile programs for.
"""

import math
from typing import Any

from jax.experimental import topologies
from jax.sharding import Mesh

from .. import chips
from .._ground.errors import MeshError
from ..topology import MeshSpec


def devices_of(target: str, *, num_slices: int = 1) -> tuple[Any, ...]:
    """The devices of a TPU topology, with the coordinates, processes and kind that
    libtpu has for them.

    **Arguments:**

    - `target`: a topology, such as `"v5p:8x8x8"`, `"tpu:v5e:16x16"` or `"v5e-8"`; see
      [`shardfx.chips.parse_slice`][].
    - `num_slices`: the number of such slices, connected by the data-center network.

    **Returns:**

    The devices. Programs can be compiled for a mesh of these devices, but they hold no
    arrays.

    **Raises:**

    `MeshError` for a slice that does not exist or that libtpu does not know, or if the
    wheel is not installed (`pip install "shardfx[aot]"`). `TPU_SKIP_MDS_QUERY=1` and
    `JAX_PLATFORMS=cpu` in the environment keep libtpu quiet.

    !!! Example

        ```py
        from shardfx.interop import tpu

        assert len(tpu.devices_of("v5p:4x4x4")) == 64
        ```
    """
    name = chips.parse_slice(target).name.removeprefix("tpu:")
    options = {} if num_slices == 1 else {"num_slices": num_slices}
    try:
        topology = topologies.get_topology_desc(name, platform="tpu", **options)
    except RuntimeError as error:
        fix = (
            "Write it as `v5p:8x8x8`, and install libtpu with `pip install"
            ' "shardfx[aot]"`'
        )
        if "lockfile" in str(error):
            fix = (
                "Another process holds libtpu: wait, or set"
                " ALLOW_MULTIPLE_LIBTPU_LOAD=1 before JAX starts"
            )
        raise MeshError(
            f"there is no description of the TPU topology {name!r}: {error}. {fix}."
        ) from error
    return tuple(topology.devices)


def mesh_of(target: str, mesh: MeshSpec) -> Mesh:
    """The mesh of a TPU topology's devices, in the order that
    [`shardfx.MeshSpec.build`][] chooses.

    Plan on this mesh, then compile ahead of time:
    `jax.jit(step, ...).lower(*plan.structs).compile()` runs the TPU's own compiler, so
    its memory analysis is the TPU's.

    **Arguments:**

    - `target`: the topology of one slice, such as `"v5p:8x8x8"` or `"v5e-8"`.
    - `mesh`: the axes of the mesh; one size may be -1. The number of slices follows
      from its `dcn`.

    **Returns:**

    A Mesh of all devices of the topology.

    **Raises:**

    `MeshError` for a slice that does not exist or that libtpu does not know, if the
    wheel is not installed, or if the mesh would not use every device.

    !!! Example

        ```py
        from shardfx import MeshSpec
        from shardfx.interop import tpu

        mesh = tpu.mesh_of("v5e:4x4", MeshSpec({"data": -1, "tensor": 4}))
        assert mesh.shape == {"data": 4, "tensor": 4}
        ```
    """
    mesh = MeshSpec.of(mesh)
    return mesh.build(devices_of(target, num_slices=math.prod(mesh.dcn_sizes)))
