"""The devices of an array and of those that it is assembled from, each with a number."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from jax.sharding import Sharding

from ..._ground.boxes import Box, holders_by_box
from ..shardings import has_devices
from .assembly import MovedLeaf, shards_of
from .shard_part import Block


# The number that stands for the host, which holds NumPy arrays.
HOST = -1


def shardings_of(leaves: Iterable[MovedLeaf]) -> list[Sharding]:
    """The shardings of the arrays that are not NumPy arrays."""
    return [leaf.sharding for leaf in leaves if leaf.sharding is not None]


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices of an array and of its sources, each with a number.

    In a mesh without devices, ids or positions stand for devices. A NumPy array has the
    device `None`.

    **Arguments:**

    - `have_devices`: whether all shardings are on meshes with devices.
    - `lost`: the lost devices.
    - `target`, `sources`: by device, the boxes of the shards of the array, and of each
      source by its path.
    - `shard_shape`: the shape of one shard of the array.
    - `source_shapes`: for each source, the shape and dtype of one shard.
    - `all`: the devices, without lost devices that hold a source.
    - `numbers`: the position of each device in `all`; `HOST` for `None`.
    """

    have_devices: bool
    lost: set[Any]
    target: dict[Any, Box]
    sources: dict[str, dict[Any, Box]]
    shard_shape: tuple[int, ...]
    source_shapes: dict[str, Block]
    all: tuple[Any, ...]
    numbers: dict[Any, int]

    def remaining(self, shards: Iterable[Any]) -> tuple[Any, ...]:
        """The devices in `shards`, without the host and the lost ones."""
        return tuple(
            device for device in shards if device is not None and device in self.numbers
        )

    def holders(self, path: str) -> dict[Box, list[int]]:
        """The numbers of the devices that hold each box of the source `path`. Lost
        devices are left out.
        """
        numbers_by_box: dict[Box, list[int]] = {}
        for box, devices in holders_by_box(self.sources[path].items()).items():
            numbers_by_box[box] = [
                self.numbers[device] for device in devices if device not in self.lost
            ]
        return numbers_by_box


def devices_of(
    leaf: MovedLeaf,
    sources: Sequence[MovedLeaf],
    lost: Sequence[object],
) -> Devices:
    """Numbers the devices of `leaf` and of `sources`: those of the sources first, in
    the order of each mesh. The host, which holds NumPy arrays, is `None` among devices.
    """
    have_devices = all(map(has_devices, shardings_of([*sources, leaf])))

    def key_of(device: Any) -> Any:
        """The device, or the number that stands for it."""
        if have_devices:
            return device
        # On an abstract mesh a device is its position.
        return getattr(device, "id", device)

    def by_key(boxes: dict[Any, Box]) -> dict[Any, Box]:
        return {key_of(device): box for device, box in boxes.items()}

    lost_keys = {key_of(device) for device in lost}
    target_shards = shards_of(leaf)
    target = by_key(target_shards.boxes)
    source_shapes: dict[str, Block] = {}
    source_shards: dict[str, dict[Any, Box]] = {}
    devices: dict[Any, None] = {}
    for source in sources:
        shards = shards_of(source)
        source_shapes[source.path] = Block(shards.shape, shards.dtype)
        source_shards[source.path] = by_key(shards.boxes)
        for device in source_shards[source.path]:
            if device is not None and device not in lost_keys:
                devices[device] = None
    devices |= dict.fromkeys(target)

    numbers: dict[Any, int] = {None: HOST}
    for number, device in enumerate(devices):
        numbers[device] = number
    return Devices(
        have_devices=have_devices,
        lost=lost_keys,
        target=target,
        sources=source_shards,
        shard_shape=target_shards.shape,
        source_shapes=source_shapes,
        all=tuple(devices),
        numbers=numbers,
    )
