"""The reads of a load that are in progress, and what each of them fills."""

import collections
import concurrent.futures
import itertools as it
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, Sharding, SingleDeviceSharding

from .._ground.boxes import Box, box_shape, boxes_here, holders_by_box
from .._ground.copying import buffers
from .._ground.errors import CheckpointError, PlanMismatchError
from .._ground.text import printable
from ._entry import FileArray, StoreArray
from ._leaves_to_load import LeafToLoad, box_bytes
from ._reader import Progress, memory_to_fill


_STAGING_BYTES = 2**30


def is_on_cpu(sharding: Sharding) -> bool:
    """Whether all devices of a sharding are CPUs. A load then reads shards directly
    into the memory of the array.
    """
    return all(device.platform == "cpu" for device in sharding.addressable_devices)


def moved(
    filled: np.ndarray,
    devices: Sequence[object],
    sharding: Sharding,
) -> list[Any]:
    """Copies one shard from host memory to each of `devices`, and returns the
    single-device arrays.

    They get the memory kind of `sharding`, the sharding of the whole array.
    """
    kind = sharding.memory_kind
    return [
        jax.device_put(filled, SingleDeviceSharding(device, memory_kind=kind))
        for device in devices
    ]


class Kind(NamedTuple):
    """The shards of a leaf that this process loads. Leaves with equal shape, dtype and
    sharding share one `Kind`.

    **Arguments:**

    - `boxes`: the boxes of this process's shards.
    - `devices`: for each box, the devices that hold it.
    - `shapes`, `sizes`: for each box, its shape and its bytes.
    - `is_on_cpu`: whether the bytes are read directly into the memory of the array,
      without a copy to a device.
    """

    boxes: tuple[Box, ...]
    devices: tuple[tuple[Any, ...], ...]
    shapes: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    is_on_cpu: bool


class Unit(NamedTuple):
    """The boxes of one leaf that are loaded together. For a leaf that exceeds the
    memory limit, a unit has one box.

    **Arguments:**

    - `number`: the position of the leaf in the plan.
    - `leaf`, `kind`: the leaf, and the boxes to load.
    - `nbytes`: the number of bytes of the boxes.
    """

    number: int
    leaf: LeafToLoad
    kind: Kind
    nbytes: int

    @property
    def staging_bytes(self) -> int:
        """The bytes of host memory that the boxes occupy until they are copied to
        devices; 0 on CPUs.
        """
        if self.kind.is_on_cpu:
            return 0
        return self.nbytes


def units_of(
    leaves: Sequence[LeafToLoad],
    asked_limit: int | None,
) -> tuple[list[Unit], int]:
    """The units of all leaves, in the order of their positions in the files, and the
    memory limit in bytes.

    `asked_limit` is the limit that the caller of `load` gave, if any. Raises
    `CheckpointError` if a shard exceeds it.
    """
    kinds: dict[object, Kind] = {}
    whole = [_unit(number, leaf, kinds) for number, leaf in enumerate(leaves)]
    staged = [(0, "")]
    for unit in whole:
        if not unit.kind.is_on_cpu:
            largest_bytes = max(unit.kind.sizes, default=0)
            staged.append((largest_bytes, unit.leaf.path))
    largest, path = max(staged)
    if asked_limit is not None and asked_limit < largest:
        raise CheckpointError(
            f"`memory_limit_bytes={asked_limit}` is less than one shard of leaf"
            f" `{path}`, {largest} bytes; allow at least that, or cut the leaf over"
            " more devices."
        )
    limit = asked_limit
    if limit is None:
        limit = max(_STAGING_BYTES, largest)
    units = []
    for unit in sorted(
        whole, key=lambda unit: [position(entry) for entry in unit.leaf.entries[:1]]
    ):
        if unit.staging_bytes <= limit:
            units.append(unit)
            continue
        kind = unit.kind
        for box, devices, shape, nbytes in zip(
            kind.boxes, kind.devices, kind.shapes, kind.sizes, strict=True
        ):
            kind_of_box = Kind(
                boxes=(box,),
                devices=(devices,),
                shapes=(shape,),
                sizes=(nbytes,),
                is_on_cpu=False,
            )
            units.append(unit._replace(kind=kind_of_box, nbytes=nbytes))
    return units, limit


def position(entry: FileArray | StoreArray) -> tuple[str, int]:
    """The file of a stored array and the position of its first byte in it, by which
    leaves are ordered; 0 for an array in chunks.
    """
    offset = 0
    if isinstance(entry, FileArray):
        offset = entry.offset
    return entry.file, offset


def _unit(number: int, leaf: LeafToLoad, kinds: dict[object, Kind]) -> Unit:
    key = (leaf.shape, leaf.dtype, leaf.sharding)
    kind = kinds.get(key)
    if kind is None:
        if isinstance(leaf.sharding, NamedSharding) and isinstance(
            leaf.sharding.mesh, AbstractMesh
        ):
            raise PlanMismatchError(
                "the plan has no devices, so there is nowhere to load to; put it on"
                " some: `plan.on(plan.mesh.build(jax.devices()))`."
            )
        holders = holders_by_box(boxes_here(leaf.sharding, leaf.shape).items())
        shapes = tuple(map(box_shape, holders))
        sizes = tuple(box_bytes(box, leaf.dtype) for box in holders)
        kind = Kind(
            boxes=tuple(holders),
            devices=tuple(map(tuple, holders.values())),
            shapes=shapes,
            sizes=sizes,
            is_on_cpu=is_on_cpu(leaf.sharding),
        )
        kinds[key] = kind
    return Unit(
        number=number,
        leaf=leaf,
        kind=kind,
        nbytes=sum(kind.sizes),
    )


# Reads some bytes, and returns their number.
Task = Callable[[], int]
# Units that are read at once, and the memory of the boxes of each.
Group = list[tuple[Unit, list[np.ndarray]]]


class Flight:
    """The reads of a load that are in progress. A limit bounds the bytes in host memory
    that are not yet on devices.

    `filled` maps the position of a leaf on CPUs to its boxes and their memory. `placed`
    maps the position of any other leaf to its arrays on single devices. Positions are
    those in the plan.

    **Arguments:**

    - `pool`: the threads that read.
    - `limit`: the limit in bytes.
    - `bar`: the progress line.
    """

    def __init__(self, pool: concurrent.futures.Executor, limit: int, bar: Progress):
        self._pool = pool
        self._limit = limit
        self._bar = bar
        self._open = collections.deque[
            tuple[Group, int, list[concurrent.futures.Future[int]]]
        ]()
        self._staging_bytes = 0
        self.filled: dict[int, tuple[tuple[Box, ...], list[np.ndarray]]] = {}
        self.placed: dict[int, list[jax.Array]] = {}

    def admit(
        self,
        units: Sequence[Unit],
        tasks_of: Callable[[Group], Sequence[Task]],
    ) -> None:
        """Waits until `units` fit into the memory limit, and starts the reads that
        `tasks_of` makes for them.
        """
        coming = sum(unit.staging_bytes for unit in units)
        while self._open and self._staging_bytes + coming > self._limit:
            self._land_first()
        arrays = []
        for unit in units:
            for shape in unit.kind.shapes:
                arrays.append((shape, unit.leaf.dtype))
        # Large values get separate blocks: `malloc` serves blocks below 32 MiB from
        # memory that was touched before.
        blocks = [arrays] if len(units) > 1 else [[array] for array in arrays]
        memory: list[np.ndarray] = []
        for block in blocks:
            memory += buffers(block, memory_to_fill)
        memory_of_boxes = iter(memory)
        group = []
        for unit in units:
            box_count = len(unit.kind.boxes)
            unit_memory = list(it.islice(memory_of_boxes, box_count))
            group.append((unit, unit_memory))
        self._staging_bytes += coming
        futures = [self._pool.submit(task) for task in tasks_of(group)]
        self._open.append((group, coming, futures))

    def land(self) -> None:
        """Waits until all reads are finished."""
        while self._open:
            self._land_first()

    def _land_first(self) -> None:
        group, staging_bytes, tasks = self._open.popleft()
        for task in tasks:
            self._bar.advance(task.result())
        on_devices = []
        for unit, memory in group:
            if unit.leaf.dtype.kind == "b" and any(
                filled.view(np.uint8).max(initial=0) > 1 for filled in memory
            ):
                raise CheckpointError(
                    f"leaf `{printable(unit.leaf.path)}`: a boolean in the checkpoint"
                    " is neither 0 nor 1; the file is damaged."
                )
            if unit.kind.is_on_cpu:
                self.filled[unit.number] = (unit.kind.boxes, memory)
                continue
            # This memory is temporary: it must be free before more is admitted.
            for filled, devices in zip(memory, unit.kind.devices, strict=True):
                on_devices += (placed := moved(filled, devices, unit.leaf.sharding))
                self.placed.setdefault(unit.number, []).extend(placed)
        jax.block_until_ready(on_devices)
        self._staging_bytes -= staging_bytes
