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
from ._entry import FileArray
from ._leaves_to_load import LeafToLoad, box_bytes
from ._reader import Progress, memory_to_fill


_STAGING_BYTES = 2**30


def is_on_cpu(sharding: Sharding) -> bool:
    """Whether all devices of a sharding are CPUs. A load then reads shards directly
    into the memory of the array.
    """
    return all(device.platform == "cpu" for device in sharding.addressable_devices)


def copies_on_devices(
    shard: np.ndarray,
    devices: Sequence[object],
    sharding: Sharding,
) -> list[Any]:
    """Copies one shard from host memory to each of `devices`, and returns the
    single-device arrays.

    They get the memory kind of `sharding`, the sharding of the whole array.
    """
    memory_kind = sharding.memory_kind
    return [
        jax.device_put(shard, SingleDeviceSharding(device, memory_kind=memory_kind))
        for device in devices
    ]


class LeafShards(NamedTuple):
    """The shards of a leaf that this process loads. Leaves with equal shape, dtype and
    sharding share one `LeafShards`.

    **Arguments:**

    - `boxes`: the boxes of this process's shards, each once.
    - `devices`: for each box, the devices that hold it.
    - `shapes`, `sizes`: for each box, its shape and its bytes.
    - `are_on_cpu`: whether the bytes are read directly into the memory of the array,
      without a copy to a device.
    """

    boxes: tuple[Box, ...]
    devices: tuple[tuple[Any, ...], ...]
    shapes: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    are_on_cpu: bool


class Unit(NamedTuple):
    """The shards of one leaf that are loaded together. For a leaf that exceeds the
    memory limit, a unit has one shard.

    **Arguments:**

    - `leaf_number`: the position of the leaf in the plan.
    - `leaf`, `shards`: the leaf, and its shards to load.
    - `nbytes`: the number of bytes of the shards.
    """

    leaf_number: int
    leaf: LeafToLoad
    shards: LeafShards
    nbytes: int

    @property
    def staging_bytes(self) -> int:
        """The bytes of host memory that the shards occupy until they are copied to
        devices; 0 on CPUs.
        """
        if self.shards.are_on_cpu:
            return 0
        return self.nbytes


def units_of(
    leaves: Sequence[LeafToLoad],
    asked_limit_bytes: int | None,
) -> tuple[list[Unit], int]:
    """The units of all leaves, in the order of their positions in the files, and the
    memory limit in bytes. A unit is the shards of one leaf that are loaded together:
    all of them, or one if all exceed the limit.

    `asked_limit_bytes` is the limit that the caller of `load` gave, if any. Raises
    `CheckpointError` if a shard exceeds it.
    """
    shards_by_kind: dict[object, LeafShards] = {}
    units_of_leaves = [
        _unit_of_leaf(leaf_number, leaf, shards_by_kind)
        for leaf_number, leaf in enumerate(leaves)
    ]
    limit_bytes = _limit_bytes(units_of_leaves, asked_limit_bytes)
    units = []
    for unit in sorted(units_of_leaves, key=_first_position):
        if unit.staging_bytes <= limit_bytes:
            units.append(unit)
            continue
        shards = unit.shards
        for box, devices, shape, nbytes in zip(
            shards.boxes, shards.devices, shards.shapes, shards.sizes, strict=True
        ):
            one_shard = LeafShards(
                boxes=(box,),
                devices=(devices,),
                shapes=(shape,),
                sizes=(nbytes,),
                are_on_cpu=False,
            )
            units.append(unit._replace(shards=one_shard, nbytes=nbytes))
    return units, limit_bytes


def _limit_bytes(units: Sequence[Unit], asked_limit_bytes: int | None) -> int:
    """The memory limit of a load: the one that is asked for, or by default 1 GiB or the
    largest shard that is copied to a device. Raises `CheckpointError` if such a shard
    exceeds the limit that is asked for.
    """
    largest_bytes = 0
    largest_path = ""
    for unit in units:
        nbytes = max(unit.shards.sizes, default=0)
        if not unit.shards.are_on_cpu and nbytes > largest_bytes:
            largest_bytes = nbytes
            largest_path = unit.leaf.path
    if asked_limit_bytes is None:
        return max(_STAGING_BYTES, largest_bytes)
    if asked_limit_bytes < largest_bytes:
        raise CheckpointError(
            f"`memory_limit_bytes={asked_limit_bytes}` is less than one shard of leaf"
            f" `{largest_path}`, {largest_bytes} bytes; allow at least that, or cut the"
            " leaf over more devices."
        )
    return asked_limit_bytes


def _first_position(unit: Unit) -> list[tuple[str, int]]:
    """The file of the first stored array of a unit, and its position in the file, by
    which units are ordered; empty for a leaf that is made of no stored array.
    """
    positions = []
    for entry in unit.leaf.entries[:1]:
        # An array in chunks has no position in one file.
        offset = 0
        if isinstance(entry, FileArray):
            offset = entry.offset
        positions.append((entry.file, offset))
    return positions


def _unit_of_leaf(
    leaf_number: int,
    leaf: LeafToLoad,
    shards_by_kind: dict[object, LeafShards],
) -> Unit:
    """The unit of all shards of a leaf on this process's devices. `shards_by_kind` has
    the shards of earlier leaves by shape, dtype and sharding; new ones are added.

    Raises `PlanMismatchError` for a sharding without devices.
    """
    kind = (leaf.shape, leaf.dtype, leaf.sharding)
    shards = shards_by_kind.get(kind)
    if shards is None:
        if isinstance(leaf.sharding, NamedSharding) and isinstance(
            leaf.sharding.mesh, AbstractMesh
        ):
            raise PlanMismatchError(
                "the plan has no devices, so there is nowhere to load to; put it on"
                " some: `plan.on(plan.mesh.build(jax.devices()))`."
            )
        box_by_device = boxes_here(leaf.sharding, leaf.shape)
        devices_by_box = holders_by_box(box_by_device.items())
        shards = LeafShards(
            boxes=tuple(devices_by_box),
            devices=tuple(map(tuple, devices_by_box.values())),
            shapes=tuple(map(box_shape, devices_by_box)),
            sizes=tuple(box_bytes(box, leaf.dtype) for box in devices_by_box),
            are_on_cpu=is_on_cpu(leaf.sharding),
        )
        shards_by_kind[kind] = shards
    return Unit(
        leaf_number=leaf_number,
        leaf=leaf,
        shards=shards,
        nbytes=sum(shards.sizes),
    )


# Reads some bytes, and returns their number.
Task = Callable[[], int]
# Units that are read at once, each with the memory of its shards.
Group = list[tuple[Unit, list[np.ndarray]]]


class _StartedGroup(NamedTuple):
    """A group whose reads have started: its units, its bytes that count for the memory
    limit, and its reads.
    """

    group: Group
    staging_bytes: int
    reads: list[concurrent.futures.Future[int]]


class Flight:
    """The reads of a load that are in progress. A limit bounds the bytes in host memory
    that are not yet on devices.

    `host_memory` has, by the position of a leaf on CPUs, its boxes and their memory.
    `on_devices` has, by the position of any other leaf, its arrays on single devices.
    Positions are those in the plan.

    **Arguments:**

    - `pool`: the threads that read.
    - `limit_bytes`: the limit.
    - `bar`: the progress line.
    """

    def __init__(
        self,
        pool: concurrent.futures.Executor,
        limit_bytes: int,
        bar: Progress,
    ):
        self._pool = pool
        self._limit_bytes = limit_bytes
        self._bar = bar
        self._started = collections.deque[_StartedGroup]()
        self._staging_bytes = 0
        # By the leaf's position in the plan: its boxes and their memory, or its shards.
        self.host_memory: dict[int, tuple[tuple[Box, ...], list[np.ndarray]]] = {}
        self.on_devices: dict[int, list[jax.Array]] = {}

    def start(
        self,
        units: Sequence[Unit],
        tasks_of_group: Callable[[Group], Sequence[Task]],
    ) -> None:
        """Waits until `units` fit into the memory limit, takes memory for their shards,
        and starts the reads that `tasks_of_group` makes for them. It gets each unit
        with the memory of its shards.
        """
        staging_bytes = sum(unit.staging_bytes for unit in units)
        while self._started and self._staging_bytes + staging_bytes > self._limit_bytes:
            self._finish_oldest()
        shapes_and_dtypes = []
        for unit in units:
            for shape in unit.shards.shapes:
                shapes_and_dtypes.append((shape, unit.leaf.dtype))
        # Large values get separate blocks: `malloc` serves blocks below 32 MiB from
        # memory that was touched before.
        blocks = [[shape_and_dtype] for shape_and_dtype in shapes_and_dtypes]
        if len(units) > 1:
            blocks = [shapes_and_dtypes]
        memory: list[np.ndarray] = []
        for block in blocks:
            memory += buffers(block, memory_to_fill)
        memory_of_shards = iter(memory)
        group = []
        for unit in units:
            unit_memory = list(it.islice(memory_of_shards, len(unit.shards.boxes)))
            group.append((unit, unit_memory))
        self._staging_bytes += staging_bytes
        reads = [self._pool.submit(task) for task in tasks_of_group(group)]
        self._started.append(
            _StartedGroup(group=group, staging_bytes=staging_bytes, reads=reads)
        )

    def finish(self) -> None:
        """Waits until all reads are finished."""
        while self._started:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        """Waits for the reads of the oldest group, and copies its shards to devices.
        On CPUs, the memory that was read into becomes that of the arrays. A unit has
        all shards of one leaf, so each leaf is written once.

        Raises `CheckpointError` for a byte of a boolean that is neither 0 nor 1.
        """
        started = self._started.popleft()
        for read in started.reads:
            self._bar.advance(read.result())
        copies = []
        for unit, memory in started.group:
            if unit.leaf.dtype.kind == "b" and any(
                shard.view(np.uint8).max(initial=0) > 1 for shard in memory
            ):
                raise CheckpointError(
                    f"leaf `{printable(unit.leaf.path)}`: a boolean in the checkpoint"
                    " is neither 0 nor 1; the file is damaged."
                )
            shards = unit.shards
            if shards.are_on_cpu:
                self.host_memory[unit.leaf_number] = (shards.boxes, memory)
                continue
            arrays = self.on_devices.setdefault(unit.leaf_number, [])
            for shard, devices in zip(memory, shards.devices, strict=True):
                copies_of_shard = copies_on_devices(shard, devices, unit.leaf.sharding)
                arrays += copies_of_shard
                copies += copies_of_shard
        # The memory of the group must be free before another one starts.
        jax.block_until_ready(copies)
        self._staging_bytes -= started.staging_bytes
