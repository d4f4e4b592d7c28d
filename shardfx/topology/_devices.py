"""Reads devices: their coordinates on a torus, their hosts and their slices."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Int

from .._ground.errors import MeshError
from .._ground.text import together


# A device, or an object with the attributes of one.
Device: TypeAlias = Any

# An array, such as `mesh.devices`, counts as the list of its elements.
Devices: TypeAlias = Sequence[Device] | np.ndarray


def coords(device: Device, local_device_count: int) -> tuple[int, ...]:
    """The position of a device: its coordinates on the torus and its core, or its
    process and its number in the process.

    **Arguments:**

    - `device`: a device or an object with the attributes of one. With `coords` (a TPU)
      no other attribute is needed, and without `core_on_chip` the core is 0. Without
      `coords`, `process_index` and `id` are needed.
    - `local_device_count`: the number of devices of a process; read only for devices
      without `coords`.

    **Returns:**

    `(*coords, core)`, or `(process_index, id % local_device_count)`.

    **Raises:**

    `MeshError` if the device has no coordinates and `local_device_count` is below 1.

    !!! Example

        ```python
        import jax
        from shardfx import topology

        assert topology.coords(jax.devices()[3], 8) == (0, 3)
        ```
    """
    torus_place = _torus_coords(device)
    if torus_place is not None:
        return torus_place
    if local_device_count < 1:
        raise MeshError(
            f"`local_device_count` is {local_device_count}; it must be at least 1"
            " without `coords`."
        )
    return (int(device.process_index), int(device.id) % local_device_count)


def bounds(devices: Devices) -> tuple[int, ...]:
    """The extent of the devices in each direction. The order of the devices and the
    origin do not matter.

    **Arguments:**

    - `devices`: the devices of one slice, or objects with their attributes, as for
      [`shardfx.topology.coords`][].

    **Returns:**

    `(x, y, z, cores)` for devices with three coordinates,
    `(processes, devices per process)` for devices without coordinates.

    **Raises:**

    `MeshError` if there are no devices, if only some have coordinates, or if processes
    have different numbers of devices.

    !!! Example

        ```python
        from types import SimpleNamespace
        from shardfx import topology

        places = [(x, y, 0) for x in range(2, 4) for y in range(4)]
        chips = [SimpleNamespace(coords=place, core_on_chip=0) for place in places]
        assert topology.bounds(chips) == (2, 4, 1, 1)
        ```
    """
    places = _places(listed(devices))
    extents = places.max(axis=0) - places.min(axis=0) + 1
    return tuple(extents.tolist())


def positions(devices: Devices) -> Int[np.ndarray, "..."]:
    """The index in `devices` of the device at each position of the box that the devices
    fill.

    **Arguments:**

    - `devices`: the devices of one slice, or objects with their attributes, in any
      order.

    **Returns:**

    An integer array of shape `bounds(devices)`. On TPUs, entry `[x, y, z, core]` is the
    index of the device at that position, counted from the box's corner. Without
    coordinates, entry `[i, j]` is that of device `j` of process `i`.

    **Raises:**

    `MeshError` if two devices have one position, or if a position within the bounds has
    no device.

    !!! Example

        ```python
        import jax
        from shardfx import topology

        assert topology.positions(jax.devices()).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
        ```
    """
    devices = listed(devices)
    places = _places(devices)
    origin = places.min(axis=0)
    in_box = places - origin
    largest = in_box.max(axis=0) + 1
    extents = tuple(largest.tolist())
    index = tuple(in_box.T)
    counts = np.zeros(extents, np.int64)
    np.add.at(counts, index, 1)
    most = counts.max()
    if most > 1:
        first_most = np.argwhere(counts == most)[0]
        twice = (first_most + origin).tolist()
        raise MeshError(
            f"{most} of the {len(devices)} devices sit at {(*twice,)}; slices are"
            ' ordered one by one (`MeshSpec(..., dcn={"data": 2}).build(devices)`),'
            " and a device is given once."
        )
    if counts.min() < 1:
        first_missing = np.argwhere(counts < 1)[0]
        hole = (first_missing + origin).tolist()
        raise MeshError(
            f"the {len(devices)} devices span bounds {extents}, but none sits at"
            f" {(*hole,)}; pass devices that fill a box without holes."
        )
    index_at = np.empty(extents, np.int64)
    index_at[index] = np.arange(len(devices))
    return index_at


def slices(devices: Devices) -> tuple[tuple[int, ...], ...]:
    """The indices in `devices` of the devices that share a fast network, slice by
    slice, in order of slice index.

    **Arguments:**

    - `devices`: devices, or objects with their attributes. Devices without a
      `slice_index` are in slice 0.

    **Returns:**

    A tuple of indices for each slice.

    !!! Example

        ```python
        from types import SimpleNamespace
        from shardfx import topology

        devices = [SimpleNamespace(slice_index=index) for index in (1, 0, 1, 0)]
        assert topology.slices(devices) == ((1, 3), (0, 2))
        ```
    """
    return _grouped(list(map(_slice_index, listed(devices))))


def _slice_index(device: Device) -> int:
    return int(getattr(device, "slice_index", None) or 0)


def processes(devices: Devices) -> tuple[tuple[int, ...], ...]:
    """For each process, in the order of process indices, the indices in `devices` of
    its devices. GPU nodes are processes here.
    """
    return _grouped([int(device.process_index) for device in listed(devices)])


def listed(devices: Devices) -> list[Device]:
    """The devices as a list. Raises `MeshError` for an argument that has none."""
    if isinstance(devices, np.ndarray):
        return list(devices.flat)
    if isinstance(devices, str):
        raise MeshError(
            f"`devices` must be a sequence of devices, not {devices!r}; write"
            f" `mesh.build(jax.devices({devices!r}))`."
        )
    if not isinstance(devices, Iterable):
        raise MeshError(
            f"`devices` must be a sequence of devices, not {type(devices).__name__};"
            " write `mesh.build(jax.devices())`."
        )
    return list(devices)


def _grouped(keys: list[int]) -> tuple[tuple[int, ...], ...]:
    """The indices of equal keys, in ascending order of the keys."""
    groups = together(range(len(keys)), keys.__getitem__)
    return tuple([tuple(groups[key]) for key in sorted(groups)])


def _places(devices: list[Device]) -> Int[np.ndarray, "devices dims"]:
    """The position of each device: its coordinates on the torus and its core, or its
    process and its number in the process, by id. Raises `MeshError` for devices of
    different kinds, and for processes with different numbers of devices.
    """
    if not devices:
        raise MeshError(
            "there are no devices; pass `jax.devices()`, or those of one slice."
        )
    torus_places = list(map(_torus_coords, devices))
    lengths = sorted({len(place or ()) for place in torus_places})
    if len(lengths) > 1:
        raise MeshError(
            f"the devices have coordinates of different lengths ({lengths}; 0 is none);"
            " order devices of one kind at a time."
        )
    if lengths != [0]:
        return np.array(torus_places, np.int64)
    groups = processes(devices)
    counts = list(map(len, groups))
    if len(set(counts)) > 1:
        raise MeshError(
            f"processes have different numbers of devices: {counts}; pass the same"
            " number of devices of each."
        )
    places = np.empty((len(devices), 2), np.int64)
    for row, group in enumerate(groups):
        by_id = sorted(group, key=lambda index: devices[index].id)
        for column, index in enumerate(by_id):
            places[index] = (row, column)
    return places


def _torus_coords(device: Device) -> tuple[int, ...] | None:
    """The coordinates of a device's chip on the torus, and its core; `None` if it has
    none.
    """
    # JAX's own devices lack these attributes if they have no meaning, so their absence
    # is the test.
    chip_coords = getattr(device, "coords", None)
    if chip_coords is None:
        return None
    core = getattr(device, "core_on_chip", None) or 0
    return (*map(int, chip_coords), int(core))
