"""The box of a mesh that each process has, as integers."""

import math
import operator
import types
from collections.abc import Iterable, Mapping, Sequence

import equinox as eqx
import numpy as np
from jax.sharding import Mesh

from .._ground.errors import MeshError, check_type
from ..topology import MeshSpec


class HostGrid(eqx.Module):
    """The division of a mesh among the processes of a job: a box of the mesh for each
    process, all of one shape.

    A box is a range of positions along each mesh axis. A HostGrid contains no devices,
    so each process can compute the part of any other process. `axis_names` are the mesh
    axes, and `chunk_ids` has for each process the index of its box along each axis.

    !!! Example

        ```python
        from shardfx import hosts

        grid = hosts.HostGrid(
            {"data": 8, "model": 4}, {"data": 4}, [(0, 0), (2, 0), (1, 0), (3, 0)]
        )
        assert grid.process_count == 4 and grid.axis_sizes["data"] == 8
        ```
    """

    __module__ = "shardfx.hosts"

    axis_names: tuple[str, ...] = eqx.field(static=True)
    chunk_ids: tuple[tuple[int, ...], ...] = eqx.field(static=True)
    _sizes: tuple[int, ...] = eqx.field(static=True)
    _chunks: tuple[int, ...] = eqx.field(static=True)

    def __init__(
        self,
        axis_sizes: Mapping[str, int],
        num_chunks: Mapping[str, int],
        chunk_ids: Iterable[Sequence[int]],
    ):
        """**Arguments:**

        - `axis_sizes`: the number of devices along each mesh axis, in the mesh's order.
        - `num_chunks`: the number of boxes along each axis; 1 for axes that are not in
          it.
        - `chunk_ids`: the index of each process's box along each axis, by process
          index. `(2, 0)` is the third box along the first axis.

        **Raises:**

        `MeshError` if the processes do not divide the mesh evenly, or if their parts do
        not cover the mesh once.
        """
        unknown = [name for name in num_chunks if name not in axis_sizes]
        if unknown:
            raise MeshError(
                f"`num_chunks` names `{unknown[0]}`, but the mesh has"
                f" {tuple(axis_sizes)}; drop it."
            )
        self.axis_names = tuple(axis_sizes)
        self.chunk_ids = tuple(tuple(map(int, ids)) for ids in chunk_ids)
        self._sizes = tuple(map(int, axis_sizes.values()))
        self._chunks = tuple(int(num_chunks.get(name, 1)) for name in self.axis_names)

    def __check_init__(self):
        """Raises `MeshError` unless each process has one box, and the boxes cover the
        mesh once. `_chunks` is the number of boxes along each axis.
        """
        for name, size, chunks in zip(
            self.axis_names, self._sizes, self._chunks, strict=True
        ):
            if chunks < 1 or size < 1 or size % chunks:
                raise MeshError(
                    f"{chunks} processes cannot share the {size} devices of mesh axis"
                    f" `{name}` evenly; use a divisor of {size}."
                )
        for process, ids in enumerate(self.chunk_ids):
            if len(ids) != len(self._chunks) or not all(
                map(operator.contains, map(range, self._chunks), ids)
            ):
                raise MeshError(
                    f"process {process} has chunk {ids}; it needs one index for each"
                    f" axis of {self.axis_names}, below {self._chunks}."
                )
        process_count = len(self.chunk_ids)
        distinct_count = len(set(self.chunk_ids))
        chunk_count = math.prod(self._chunks)
        if distinct_count < process_count or process_count != chunk_count:
            raise MeshError(
                f"{process_count} processes have {distinct_count} different chunks, but"
                f" {dict(self.num_chunks)} makes {chunk_count}; give each chunk to one"
                " process."
            )

    @property
    def axis_sizes(self) -> Mapping[str, int]:
        """The number of devices along each mesh axis, in order; read-only."""
        return types.MappingProxyType(
            dict(zip(self.axis_names, self._sizes, strict=True))
        )

    @property
    def num_chunks(self) -> Mapping[str, int]:
        """The number of processes along each mesh axis, in order; read-only."""
        return types.MappingProxyType(
            dict(zip(self.axis_names, self._chunks, strict=True))
        )

    @property
    def process_count(self) -> int:
        """The number of processes."""
        return len(self.chunk_ids)


def grid_of(mesh: Mesh) -> HostGrid:
    """The HostGrid of a mesh of devices.

    **Arguments:**

    - `mesh`: a `jax.sharding.Mesh` of all processes' devices.

    **Returns:**

    The division of the mesh among the processes.

    **Raises:**

    `MeshError` if the devices of a process form no box, or if the boxes differ in
    shape; use [`shardfx.hosts.owned`][] for such meshes.

    !!! Example

        ```python
        import jax
        from shardfx import hosts, MeshSpec

        grid = hosts.grid_of(MeshSpec({"data": 4, "tensor": 2}).build(jax.devices()))
        assert dict(grid.num_chunks) == {"data": 1, "tensor": 1}
        ```
    """
    fix = "build one: `spec.build(jax.devices())`, or `regular_grid(spec, num_chunks)`"
    check_type(
        what="mesh",
        value=mesh,
        expected=Mesh,
        error=MeshError,
        fix=fix,
    )
    process_indices = [device.process_index for device in mesh.devices.flat]
    ids_of_processes = np.array(process_indices, np.int64)
    # The process of each position of the mesh.
    process_at = ids_of_processes.reshape(mesh.devices.shape)
    process_count = int(process_at.max()) + 1
    device_counts = np.bincount(process_at.ravel(), minlength=process_count)
    if not device_counts.all():
        process = int(device_counts.argmin())
        _raise_no_box(mesh, f"process {process} has no device in it")
    # The positions of the devices in the mesh, process by process.
    by_process = np.argsort(process_at.ravel(), kind="stable")
    indices = np.unravel_index(by_process, process_at.shape)
    positions = np.stack(indices, axis=-1)
    first_devices = np.cumsum(device_counts) - device_counts
    # The corners of the smallest box around each process's devices.
    lowest = np.minimum.reduceat(positions, first_devices)
    highest = np.maximum.reduceat(positions, first_devices)
    extents = highest - lowest + 1
    has_gaps = extents.prod(axis=1) != device_counts
    is_unlike_first = (extents != extents[0]).any(axis=1)
    without_box = np.flatnonzero(has_gaps | is_unlike_first)
    if len(without_box):
        process = int(without_box[0])
        _raise_no_box(
            mesh,
            f"the {device_counts[process]} devices of process {process} lie within "
            f"{tuple(lowest[process].tolist())} to {tuple(highest[process].tolist())}",
        )
    chunk_counts = (process_at.shape // extents[0]).tolist()
    chunks = dict(zip(mesh.axis_names, chunk_counts, strict=True))
    chunk_ids = (lowest // extents).tolist()
    return HostGrid(axis_sizes=mesh.shape, num_chunks=chunks, chunk_ids=chunk_ids)


def regular_grid(mesh: MeshSpec, num_chunks: Mapping[str, int]) -> HostGrid:
    """The HostGrid of processes that are numbered along a mesh, the last axis fastest.
    It needs no devices.

    **Arguments:**

    - `mesh`: the mesh.
    - `num_chunks`: the number of processes along each axis; 1 for axes that are not in
      it.

    **Returns:**

    The HostGrid of as many processes as the product of `num_chunks`.

    **Raises:**

    `MeshError` if the processes do not divide the mesh.

    !!! Example

        ```python
        from shardfx import hosts, MeshSpec

        mesh = MeshSpec({"data": 8192, "tensor": 8})
        grid = hosts.regular_grid(mesh, {"data": 8192})
        assert hosts.data_layout(65536, "data", grid, 8191).shard_id == 8191
        ```
    """
    mesh = MeshSpec.of(mesh).require_sizes()
    fix = 'write `regular_grid(mesh, {"data": 4})`'
    check_type(
        what="num_chunks",
        value=num_chunks,
        expected=Mapping,
        error=MeshError,
        fix=fix,
    )
    counts = [num_chunks.get(name, 1) for name in mesh.axis_names]
    return HostGrid(
        axis_sizes=mesh.shape, num_chunks=num_chunks, chunk_ids=np.ndindex(*counts)
    )


def _raise_no_box(mesh: Mesh, reason: str) -> None:
    """Raises the error of a mesh whose processes have no equal boxes."""
    raise MeshError(
        f"the processes have no equal boxes of the mesh {MeshSpec.of(mesh)}: {reason};"
        " use `hosts.owned(shape, sharding, process_index)`, or a mesh whose axes keep"
        " each host's devices together."
    )
