"""Computes the part of an array or a batch that a process owns, from the HostGrid
alone.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence

from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, Sharding

from .._ground.boxes import box_slices, holders_by_box, shard_boxes
from .._ground.errors import MeshError, SpecError, check_type, whole_number
from .._ground.misuse import called
from .._ground.spec import (
    UNCONSTRAINED,
    entries_at,
    entries_of,
    entry_axes,
    shards_over,
)
from .._plan import sizes_of_shape
from ._grid import HostGrid


@dataclasses.dataclass(frozen=True)
class LocalChunk:
    """The part of an array that a process owns.

    **Arguments:**

    - `slices`: a `slice(start, stop)` for each dimension.
    - `replica_id`: the number of the process among the processes that own these
      elements. The chunks with `replica_id` 0 hold every element once.

    !!! Example

        ```python
        import numpy as np
        from shardfx import hosts

        chunk = hosts.LocalChunk((slice(2, 4), slice(0, 3)), replica_id=0)
        assert np.ones((8, 3))[chunk.slices].shape == (2, 3)
        ```
    """

    __module__ = "shardfx.hosts"

    slices: tuple[slice, ...]
    replica_id: int


@dataclasses.dataclass(frozen=True)
class DataLayout:
    """The shard of the data that a process loads.

    **Arguments:**

    - `batch_size`: the number of rows in the global batch.
    - `shard_id`: the number of the shard that this process loads.
    - `num_shards`: the number of shards into which the processes divide the data.
    - `is_first_host_in_replica_set`: whether no process with a lower number loads the
      same shard.

    !!! Example

        ```python
        from shardfx import hosts, MeshSpec

        grid = hosts.regular_grid(MeshSpec({"data": 8}), {"data": 4})
        layout = hosts.data_layout(64, "data", grid, 2)
        rows_of_this_process = layout.batch_size // layout.num_shards
        assert rows_of_this_process == 16 and layout.is_first_host_in_replica_set
        ```
    """

    __module__ = "shardfx.hosts"

    batch_size: int
    shard_id: int
    num_shards: int
    is_first_host_in_replica_set: bool


def local_chunk(
    shape: Sequence[int],
    spec: PartitionSpec,
    grid: HostGrid,
    process_index: int,
) -> LocalChunk:
    """The part of an array that a process's devices hold.

    **Arguments:**

    - `shape`: the shape of the whole array.
    - `spec`: the sharding of the array.
    - `grid`: the division of the mesh among the processes; see
      [`shardfx.hosts.grid_of`][].
    - `process_index`: the number of any process.

    **Returns:**

    The part as slices, and the number of the replica.

    **Raises:**

    `SpecError` if the spec does not fit the shape or the mesh, or if its mesh axes do
    not divide a dimension. `MeshError` if the process's part is no contiguous range;
    [`shardfx.hosts.owned`][] then lists its ranges.

    !!! Example

        ```python
        from jax.sharding import PartitionSpec as P
        from shardfx import hosts

        grid = hosts.HostGrid(
            {"data": 8, "model": 4}, {"data": 4}, [(0, 0), (2, 0), (1, 0), (3, 0)]
        )
        chunk = hosts.local_chunk((128, 16), P("data", "model"), grid, 1)
        assert chunk == hosts.LocalChunk((slice(64, 96), slice(0, 16)), 0)
        ```
    """
    if not isinstance(spec, PartitionSpec):
        raise SpecError(
            f"`spec` is a PartitionSpec, not {spec!r:.80}; write"
            ' `PartitionSpec("data")`, or `sharding.spec`.'
        )
    shape = sizes_of_shape(shape)
    entries = entries_of(spec)
    if any(entry is UNCONSTRAINED for entry in entries):
        raise SpecError(
            f"{spec} leaves a dimension unconstrained, so nobody knows who owns it;"
            " name its axes, or None."
        )
    if any(entry_axes(entry) for entry in entries[len(shape) :]):
        raise SpecError(
            f"{spec} has {len(entries)} entries, but the array has shape {shape}; give"
            " one per dimension."
        )
    axes = [entry_axes(entry) for entry in entries_at(spec, len(shape))]
    replica = replica_id(itertools.chain(*axes), grid, process_index)
    ranges = (
        _local_range(
            dim=dim,
            size=shape[dim],
            axes=dim_axes,
            grid=grid,
            process_index=process_index,
        )
        for dim, dim_axes in enumerate(axes)
    )
    return LocalChunk(tuple(ranges), replica)


def shard_id(axes: str | Iterable[str], grid: HostGrid, process_index: int) -> int:
    """The number of a process's shard, in an array that is sharded over `axes`.

    **Arguments:**

    - `axes`: one mesh axis, or several in order. The number of the shard varies fastest
      along the last one.
    - `grid`: the division of the mesh among the processes.
    - `process_index`: the number of the process.

    **Returns:**

    A number from 0, below the number of processes along the axes. All elements of a
    process count as one shard.

    **Raises:**

    `MeshError` for an unknown or repeated axis, for a `set` of axes, and for a process
    that does not exist.

    !!! Example

        ```python
        from shardfx import hosts, MeshSpec

        grid = hosts.regular_grid(
            MeshSpec({"replica": 2, "data": 8}), {"replica": 2, "data": 2}
        )
        assert [hosts.shard_id(("data", "replica"), grid, p) for p in range(4)] == [0, 2, 1, 3]
        ```
    """
    names = _axes(axes, grid)
    process = whole_number(process_index)
    if process is None or not 0 <= process < grid.process_count:
        raise MeshError(
            f"there is no process {process_index!r:.80}; use one of 0 to"
            f" {grid.process_count - 1}, such as `jax.process_index()`."
        )
    chunk_ids = grid.chunk_ids[process]
    chunks = dict(zip(grid.axis_names, chunk_ids, strict=True))
    number = 0
    for axis in names:
        number = number * grid.num_chunks[axis] + chunks[axis]
    return number


def replica_id(axes: str | Iterable[str], grid: HostGrid, process_index: int) -> int:
    """The number of a process's replica, in an array that is sharded over `axes`.

    **Arguments:**

    - `axes`: one mesh axis, or several.
    - `grid`: the division of the mesh among the processes.
    - `process_index`: the number of the process.

    **Returns:**

    The position of the process along all other axes, as one number from 0. The last of
    these axes varies fastest.

    **Raises:**

    The errors of [`shardfx.hosts.shard_id`][].

    !!! Example

        ```python
        from shardfx import hosts, MeshSpec

        mesh = MeshSpec({"replica": 2, "data": 8})
        grid = hosts.regular_grid(mesh, {"replica": 2, "data": 2})
        assert [hosts.replica_id("data", grid, process) for process in range(4)] == [0, 0, 1, 1]
        ```
    """
    sharded_axes = _axes(axes, grid)
    return shard_id(
        [name for name in grid.axis_names if name not in sharded_axes],
        grid,
        process_index,
    )


def data_layout(
    batch_size: int | None,
    axes: str | Iterable[str] | None,
    grid: HostGrid,
    process_index: int,
) -> DataLayout:
    """The shard of the data that a process loads, for batches that are sharded over
    `axes`.

    **Arguments:**

    - `batch_size`: the number of rows in the global batch; `None` for one row per
      device along `axes`.
    - `axes`: the mesh axes of the batch dimension, in order; `None` or `()` if every
      process loads the whole batch.
    - `grid`: the division of the mesh among the processes.
    - `process_index`: the number of any process.

    **Returns:**

    The layout. Shards are numbered in the order of `axes`. If that order interleaves
    the rows of processes, the rows of a shard are not adjacent in the global batch, and
    [`shardfx.hosts.local_chunk`][] raises.

    **Raises:**

    `MeshError` if the batch size is no positive multiple of the number of devices along
    `axes`. The errors of [`shardfx.hosts.shard_id`][].

    !!! Example

        ```python
        from shardfx import hosts, MeshSpec

        grid = hosts.regular_grid(MeshSpec({"data": 8, "tensor": 2}), {"data": 4})
        layout = hosts.data_layout(64, "data", grid, 3)
        assert (layout.shard_id, layout.num_shards) == (3, 4)
        ```
    """
    names = () if axes is None else _axes(axes, grid)
    devices = math.prod(grid.axis_sizes[name] for name in names)
    rows = devices if batch_size is None else whole_number(batch_size)
    if rows is None or rows < 1 or rows % devices:
        raise MeshError(
            f"a batch of {batch_size!r:.80} rows cannot be sharded over the {devices}"
            f" devices along {names}; use a positive multiple of {devices}, or `None` for"
            f" {devices}."
        )
    chunk_counts = (grid.num_chunks[name] for name in names)
    return DataLayout(
        batch_size=rows,
        shard_id=shard_id(names, grid, process_index),
        num_shards=math.prod(chunk_counts),
        is_first_host_in_replica_set=replica_id(names, grid, process_index) == 0,
    )


@called("owned(shape, sharding, process_index)")
def owned(
    shape: Sequence[int],
    sharding: Sharding,
    process_index: int,
) -> tuple[LocalChunk, ...]:
    """The parts of an array that a process's devices hold, for devices in any order.

    **Arguments:**

    - `shape`: the shape of the whole array.
    - `sharding`: the sharding of the array, on a mesh of devices.
    - `process_index`: the number of any process.

    **Returns:**

    A chunk for each different shard, ordered by the starts of their slices. Over all
    processes, the chunks with `replica_id` 0 hold every element once.

    **Raises:**

    `MeshError` for a sharding on an abstract mesh; `SpecError` for no sharding, and for
    a spec that is longer than the shape.

    !!! Example

        ```python
        import jax
        from jax.sharding import NamedSharding, PartitionSpec as P
        from shardfx import hosts, MeshSpec

        sharding = NamedSharding(
            MeshSpec({"data": 2, "tensor": 4}).build(jax.devices()), P("data")
        )
        chunks = hosts.owned((6, 5), sharding, 0)
        assert [chunk.slices for chunk in chunks] == [
            (slice(0, 3), slice(0, 5)),
            (slice(3, 6), slice(0, 5)),
        ]
        ```
    """
    fix = "write `owned(shape, sharding, process_index)`"
    check_type(
        what="sharding",
        value=sharding,
        expected=Sharding,
        error=SpecError,
        fix=fix,
    )
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        raise MeshError(
            f"{sharding.spec} is on an abstract mesh, whose devices belong to no"
            " process; give a sharding on devices, as those of"
            " `plan.on(plan.mesh.build(jax.devices()))`, or call"
            " `hosts.local_chunk(shape, spec, grid, process_index)`."
        )
    sizes = sizes_of_shape(shape)
    if isinstance(sharding, NamedSharding):
        entries = entries_of(sharding.spec)
        if any(entry_axes(entry) for entry in entries[len(sizes) :]):
            raise SpecError(
                f"{sharding.spec} has {len(entries)} entries, but the array has shape"
                f" {sizes}; give one per dimension."
            )
    box_by_device = shard_boxes(sharding, sizes)
    devices_by_box = holders_by_box(box_by_device.items())
    chunks = []
    for box, devices in sorted(devices_by_box.items()):
        processes = sorted({device.process_index for device in devices})
        if process_index in processes:
            replica = processes.index(process_index)
            chunks.append(LocalChunk(box_slices(box), replica))
    return tuple(chunks)


def _local_range(
    dim: int,
    size: int,
    axes: tuple[str, ...],
    grid: HostGrid,
    process_index: int,
) -> slice:
    """The range of the dimension `dim`, with `size` elements sharded over `axes`, that
    a process's devices hold.

    Raises `SpecError` if the axes do not divide the dimension, `MeshError` if the
    devices hold several ranges.
    """
    devices = shards_over(axes, grid.axis_sizes)
    if size % devices:
        raise SpecError(
            f"dim {dim} of size {size} is not divisible by the {devices} devices along"
            f" {axes}; pad it to {-(-size // devices) * devices}, or shard it over axes"
            f" whose product divides {size}."
        )
    # A process owns one range if it has one device along each axis before the last one
    # that several processes share.
    shared_axes = [axis for axis in axes if grid.num_chunks[axis] > 1]
    if shared_axes:
        last_shared = shared_axes[-1]
        for axis in axes[: axes.index(last_shared)]:
            if grid.num_chunks[axis] == grid.axis_sizes[axis]:
                continue
            raise MeshError(
                f"dim {dim} is sharded over {axes}, and a process has several devices"
                f" along `{axis}` but not all along `{last_shared}`, so it owns several"
                " ranges of rows; list them with `hosts.owned(shape, sharding,"
                " process_index)`."
            )
    rows = size // shards_over(axes, grid.num_chunks)
    start = shard_id(axes, grid, process_index) * rows
    return slice(start, start + rows)


def _axes(axes: str | Iterable[str], grid: HostGrid) -> tuple[str, ...]:
    """The mesh axes in `axes` as a tuple. Raises `MeshError` for unknown or repeated
    axes, and for a set.
    """
    if isinstance(axes, set | frozenset):
        raise MeshError(
            f"mesh axes {sorted(axes, key=str)} came in a set, which has no order; pass"
            " a tuple."
        )
    check_type(
        what="grid",
        value=grid,
        expected=HostGrid,
        error=MeshError,
        fix="make one with `hosts.grid_of(mesh)`",
    )
    if not isinstance(axes, Iterable):
        raise MeshError(
            f"mesh axes are a name or a tuple of names, not {axes!r:.80}; the mesh has"
            f" {grid.axis_names}."
        )
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    for name in names:
        if name not in grid.axis_names:
            raise MeshError(
                f"the mesh has no axis {name!r}, but {grid.axis_names}; use one of"
                " those."
            )
    if len(set(names)) < len(names):
        raise MeshError(
            f"a mesh axis occurs twice in {names}; each shards one dimension once."
        )
    return names
