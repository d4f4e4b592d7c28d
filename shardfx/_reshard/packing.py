"""Shardings as values that can be pickled: each device is named by its platform and id."""

from typing import Any, NamedTuple

import numpy as np
from jax.sharding import (
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from .._plan import devices_named


_FIX = (
    "plan the move between plans without devices, `plan_reshard(src.off(), dst.off())`"
)


class PackedNamed(NamedTuple):
    """A NamedSharding on a mesh of devices."""

    devices: list[tuple[str, int]]
    axis_sizes: tuple[int, ...]
    axis_names: tuple[str, ...]
    axis_types: tuple[Any, ...]
    spec: PartitionSpec
    memory_kind: str | None


class PackedSingle(NamedTuple):
    """A SingleDeviceSharding."""

    device: tuple[str, int]
    memory_kind: str | None


def packed(sharding: Sharding) -> Sharding | PackedNamed | PackedSingle:
    """The sharding without devices. One that has none is returned unchanged."""
    if isinstance(sharding, SingleDeviceSharding):
        (device,) = sharding.device_set
        return PackedSingle((device.platform, device.id), sharding.memory_kind)
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        mesh = sharding.mesh
        return PackedNamed(
            devices=[(device.platform, device.id) for device in mesh.devices.flat],
            axis_sizes=mesh.axis_sizes,
            axis_names=mesh.axis_names,
            axis_types=mesh.axis_types,
            spec=sharding.spec,
            memory_kind=sharding.memory_kind,
        )
    return sharding


def unpacked(value: Sharding | PackedNamed | PackedSingle) -> Sharding:
    """The sharding that `packed` took apart. Raises `PlanMismatchError` if this process
    lacks one of its devices.
    """
    if isinstance(value, PackedSingle):
        (device,) = devices_named([value.device], _FIX)
        return SingleDeviceSharding(device, memory_kind=value.memory_kind)
    if isinstance(value, PackedNamed):
        devices = np.array(devices_named(value.devices, _FIX))
        mesh = Mesh(
            devices.reshape(value.axis_sizes),
            value.axis_names,
            axis_types=value.axis_types,
        )
        return NamedSharding(mesh, value.spec, memory_kind=value.memory_kind)
    return value
