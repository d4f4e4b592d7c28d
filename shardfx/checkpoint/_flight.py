"""Reads in flight from files into arrays: the boxes that are read at once, and a limit for their bytes."""

import collections
import concurrent.futures
import dataclasses
import itertools as it
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from .._ground.boxes import Box, boxes_here
from .._ground.copying import buffers
from .._ground.errors import CheckpointError
from .._ground.text import printable
from ._entry import FileArray
from ._reader import memory_to_fill
from ._wanted import WantedLeaf, box_bytes


_STAGING_BYTES = 2**30


def is_final(sharding: Sharding) -> bool:
    """Whether the host memory that a shard is read into becomes the array's own memory."""
    return all(device.platform == "cpu" for device in sharding.addressable_devices)


def moved(filled: np.ndarray, devices: Sequence[object], sharding: Sharding) -> list[Any]:
    """A box in host memory, transferred to each of the devices that hold it."""
    kind = sharding.memory_kind
    return [jax.device_put(filled, SingleDeviceSharding(device, memory_kind=kind)) for device in devices]


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """The common properties of leaves of one shape, dtype and sharding. A model has many leaves and few kinds.

    **Arguments:**

    - `boxes`: the boxes of the leaf that this process holds.
    - `devices`: for each box, the devices that hold it.
    - `shapes`, `sizes`: for each box, its shape and its bytes.
    - `is_final`: whether the memory that is read into becomes the array's, so that nothing is on its way to a device.
    """

    boxes: tuple[Box, ...]
    devices: tuple[tuple[Any, ...], ...]
    shapes: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    is_final: bool

    def alone(self, number: int) -> "Kind":
        """The same kind with one of the boxes only."""
        part = slice(number, number + 1)
        return Kind(self.boxes[part], self.devices[part], self.shapes[part], self.sizes[part], self.is_final)


class Unit(NamedTuple):
    """Boxes of one leaf that are read at once.

    **Arguments:**

    - `number`: the number of the leaf.
    - `leaf`, `kind`: the leaf, and the boxes of it that are read.
    - `nbytes`: bytes of the boxes.
    """

    number: int
    leaf: WantedLeaf
    kind: Kind
    nbytes: int

    @property
    def staging_bytes(self) -> int:
        """The bytes that are on their way to devices after the read."""
        return 0 if self.kind.is_final else self.nbytes


def units_of(leaves: Sequence[WantedLeaf], asked_limit: int | None) -> tuple[list[Unit], int]:
    """The units of leaves in the order of the files, and the limit for bytes in transfer at once."""
    known: dict[object, Kind] = {}
    whole = [_unit(number, leaf, known) for number, leaf in enumerate(leaves)]
    staged = [(max(unit.kind.sizes, default=0), unit.leaf.path) for unit in whole if not unit.kind.is_final]
    largest, path = max(staged, default=(0, ""))
    if asked_limit is not None and asked_limit < largest:
        raise CheckpointError(
            f"`memory_limit_bytes={asked_limit}` is less than one shard of leaf `{path}`, {largest} bytes; allow at "
            "least that, or cut the leaf over more devices."
        )
    limit = max(_STAGING_BYTES, largest) if asked_limit is None else asked_limit
    units = []
    for unit in sorted(whole, key=_position):
        if unit.staging_bytes <= limit:
            units.append(unit)
            continue
        for at, nbytes in enumerate(unit.kind.sizes):
            units.append(unit._replace(kind=unit.kind.alone(at), nbytes=nbytes))
    return units, limit


def _position(unit: Unit) -> tuple[str, int]:
    if not unit.leaf.entries:  # the value consists of constants only
        return "", 0
    entry = unit.leaf.entries[0]
    return entry.file, entry.offset if isinstance(entry, FileArray) else 0


def _unit(number: int, leaf: WantedLeaf, known: dict[object, Kind]) -> Unit:
    key = (leaf.shape, leaf.dtype, leaf.sharding)
    kind = known.get(key)
    if kind is None:
        holders: dict[Box, tuple[Any, ...]] = {}
        for device, box in boxes_here(leaf.sharding, leaf.shape).items():
            holders[box] = (*holders.get(box, ()), device)
        shapes = tuple(tuple(stop - start for start, stop in box) for box in holders)
        sizes = tuple(box_bytes(box, leaf.dtype) for box in holders)
        kind = known[key] = Kind(tuple(holders), tuple(holders.values()), shapes, sizes, is_final(leaf.sharding))
    return Unit(number, leaf, kind, sum(kind.sizes))


class Progress:
    """One line on a terminal that shows the progress."""

    def __init__(self, verb: str, total_bytes: int, show: bool | None):
        self._verb, self._total_bytes, self._done_bytes = verb, total_bytes, 0
        self._show = sys.stderr.isatty() if show is None else show
        self._begin = self._shown = time.monotonic()

    def advance(self, nbytes: int) -> None:
        """Counts `nbytes` more, and rewrites the line at most ten times a second."""
        self._done_bytes += nbytes
        now = time.monotonic()
        if self._show and now - self._shown > 0.1:
            self._shown = now
            self._write(now)

    def end(self) -> None:
        """Writes the final line."""
        if self._show:
            self._write(time.monotonic())
            sys.stderr.write("\n")

    def _write(self, now: float) -> None:
        rate = self._done_bytes / max(now - self._begin, 1e-9) / 1e9
        filled = 24 * self._done_bytes // max(self._total_bytes, 1)
        sys.stderr.write(
            f"\r{self._verb} [{'#' * filled:<24}] {self._done_bytes / 1e9:.2f} of {self._total_bytes / 1e9:.2f} GB, "
            f"{rate:.2f} GB/s"
        )
        sys.stderr.flush()


Task = Callable[[], int]
# Units that are read at once, and the memory of the boxes of each.
Group = list[tuple[Unit, list[np.ndarray]]]


class Flight:
    """The groups of units that are being read. They start and end in order, and the limit bounds their bytes.

    Values that have arrived are, by leaf, in `filled` if their memory becomes the array's, otherwise in `placed`, on
    devices.
    """

    def __init__(self, pool: concurrent.futures.Executor, limit: int, bar: Progress):
        self._pool, self._limit, self._bar = pool, limit, bar
        self._open = collections.deque[tuple[Group, int, list[concurrent.futures.Future[int]]]]()
        self._staging_bytes = 0
        self.filled: dict[int, tuple[tuple[Box, ...], list[np.ndarray]]] = {}
        self.placed: dict[int, list[jax.Array]] = {}

    def admit(self, units: Sequence[Unit], tasks_of: Callable[[Group], Sequence[Task]]) -> None:
        """Starts to read units, after waiting until they fit into the limit."""
        coming = sum(unit.staging_bytes for unit in units)
        while self._open and self._staging_bytes + coming > self._limit:
            self._land_first()
        wanted = [(shape, unit.leaf.dtype) for unit in units for shape in unit.kind.shapes]
        # Large values get separate blocks: `malloc` serves blocks below 32 MiB from memory that was touched before.
        together = [wanted] if len(units) > 1 else [[one] for one in wanted]
        memory = iter([one for some in together for one in buffers(some, memory_to_fill)])
        group = [(unit, list(it.islice(memory, len(unit.kind.boxes)))) for unit in units]
        self._staging_bytes += coming
        self._open.append((group, coming, [self._pool.submit(task) for task in tasks_of(group)]))

    def land(self) -> None:
        """Waits until every read that started has finished."""
        while self._open:
            self._land_first()

    def _land_first(self) -> None:
        group, staging_bytes, tasks = self._open.popleft()
        for task in tasks:
            self._bar.advance(task.result())
        on_devices = []
        for unit, memory in group:
            if unit.leaf.dtype.kind == "b" and any(filled.view(np.uint8).max(initial=0) > 1 for filled in memory):
                raise CheckpointError(
                    f"leaf `{printable(unit.leaf.path)}`: a boolean in the checkpoint is neither 0 nor 1; the file is "
                    "damaged."
                )
            if unit.kind.is_final:
                self.filled[unit.number] = (unit.kind.boxes, memory)
                continue
            # This memory is temporary: it must be free before more is admitted.
            for filled, devices in zip(memory, unit.kind.devices, strict=True):
                on_devices += (placed := moved(filled, devices, unit.leaf.sharding))
                self.placed.setdefault(unit.number, []).extend(placed)
        jax.block_until_ready(on_devices)
        self._staging_bytes -= staging_bytes
