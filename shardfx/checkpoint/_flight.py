"""Reads in flight from files into arrays: the boxes that are read at once, and a limit for their bytes."""

import concurrent.futures
import dataclasses
import functools as ft
import itertools as it
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from .._ground.boxes import Box, boxes_here
from .._ground.copying import buffers
from .._ground.errors import CheckpointError
from .._ground.text import printable
from ._entry import FileArray
from ._reader import FilePiece, memory_to_fill, spans_of
from ._spans import Span
from ._wanted import WantedLeaf, box_bytes


_STAGING_BYTES = 2**30


def is_final(sharding: Sharding) -> bool:
    """Whether the host memory that a shard is read into becomes the array's own memory."""
    return all(device.platform == "cpu" for device in sharding.addressable_devices)


def moved(filled: np.ndarray, devices: Sequence[object], sharding: Sharding) -> list[Any]:
    """A box in host memory, transferred to each of the devices that hold it."""
    kind = sharding.memory_kind
    return [jax.device_put(filled, SingleDeviceSharding(device, memory_kind=kind)) for device in devices]


@dataclasses.dataclass(frozen=True)
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

    @property
    def staging_bytes(self) -> int:
        """The bytes in transfer to devices at once, if all boxes are read at once."""
        return 0 if self.is_final else sum(self.sizes)

    def alone(self, number: int) -> "Kind":
        """The same kind with one of the boxes only."""
        part = slice(number, number + 1)
        return Kind(self.boxes[part], self.devices[part], self.shapes[part], self.sizes[part], self.is_final)


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """Some boxes of one leaf, which are read at once.

    **Arguments:**

    - `number`: the number of the leaf.
    - `leaf`, `kind`: the leaf, and the boxes of it that are read.
    - `nbytes`: bytes of the boxes.
    - `direct`: an array in a file, and the reads that fill the boxes as they are there; `None` where none do.
    """

    number: int
    leaf: WantedLeaf
    kind: Kind
    nbytes: int
    direct: tuple[FileArray, tuple[Span, ...]] | None = None


def units_of(leaves: Sequence[WantedLeaf], asked_limit: int | None) -> tuple[list[Unit], int]:
    """The units of leaves in the order of the files, and the limit for bytes in transfer at once."""
    known: dict[object, Kind] = {}
    kinds = [_kind(leaf, known) for leaf in leaves]
    limit = _limit(leaves, kinds, asked_limit)
    numbers = sorted(range(len(leaves)), key=lambda number: _position(leaves[number]))
    return [unit for number in numbers for unit in _units(number, leaves[number], kinds[number], limit)], limit


def _position(leaf: WantedLeaf) -> tuple[str, int]:
    if not leaf.entries:  # the value consists of constants only
        return "", 0
    entry = leaf.entries[0]
    return entry.file, entry.offset if isinstance(entry, FileArray) else 0


def _kind(leaf: WantedLeaf, known: dict[object, Kind]) -> Kind:
    key = (leaf.shape, leaf.dtype, leaf.sharding)
    found = known.get(key)
    if found is None:
        holders: dict[Box, tuple[Any, ...]] = {}
        for device, box in boxes_here(leaf.sharding, leaf.shape).items():
            holders[box] = (*holders.get(box, ()), device)
        shapes = tuple(tuple(stop - start for start, stop in box) for box in holders)
        sizes = tuple(box_bytes(box, leaf.dtype) for box in holders)
        found = known[key] = Kind(tuple(holders), tuple(holders.values()), shapes, sizes, is_final(leaf.sharding))
    return found


def _limit(leaves: Sequence[WantedLeaf], kinds: Sequence[Kind], asked: int | None) -> int:
    largest, path = 0, ""
    for leaf, kind in zip(leaves, kinds, strict=True):
        if not kind.is_final and max(kind.sizes, default=0) > largest:
            largest, path = max(kind.sizes), leaf.path
    if asked is None:
        return max(_STAGING_BYTES, largest)
    if asked < largest:
        raise CheckpointError(
            f"`memory_limit_bytes={asked}` is less than one shard of leaf `{path}`, {largest} bytes; allow at least "
            "that, or cut the leaf over more devices."
        )
    return asked


@ft.lru_cache(maxsize=256)
def _direct(shape: tuple[int, ...], itemsize: int, boxes: tuple[Box, ...]) -> tuple[Span, ...] | None:
    spans = spans_of(shape, itemsize, boxes, True)
    is_direct = all(span.is_direct and span.runs == 1 for span in spans)
    is_whole = all(part.where == boxes[part.number] for span in spans for part in span.parts)
    return spans if is_direct and is_whole else None


def _units(number: int, leaf: WantedLeaf, kind: Kind, limit: int) -> Iterator[Unit]:
    if kind.staging_bytes > limit:
        for one in map(kind.alone, range(len(kind.boxes))):
            yield Unit(number, leaf, one, sum(one.sizes))
        return
    entry, direct = leaf.entries[0] if leaf.entries else None, None
    if leaf.pieces is None and isinstance(entry, FileArray) and entry.dtype == leaf.dtype:
        spans = _direct(leaf.shape, leaf.dtype.itemsize, kind.boxes)
        direct = None if spans is None else (entry, spans)
    yield Unit(number, leaf, kind, sum(kind.sizes), direct)


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
# For one leaf: the boxes of this process, and the memory of each.
Filled = tuple[tuple[Box, ...], list[np.ndarray]]
_MOST_OPEN = 256


@dataclasses.dataclass
class _Group:
    """Units in flight, the memory of each, and the number of their unfinished tasks."""

    units: list[tuple[Unit, list[np.ndarray]]]
    staging_bytes: int
    left: int


class Flight:
    """The groups that are being read. They start in order while the limit allows, and end as their reads finish.

    Values that have arrived are, by leaf, in `filled` if their memory becomes the array's, otherwise in `placed`, on
    devices.
    """

    def __init__(self, pool: concurrent.futures.Executor, limit: int, bar: Progress, leaf_count: int):
        self._pool, self._limit, self._bar = pool, limit, bar
        self._open: dict[concurrent.futures.Future[int], _Group] = {}
        self._staging_bytes = 0
        self.filled: list[Filled] = [((), [])] * leaf_count
        self.placed: dict[int, list[jax.Array]] = {}

    def admit(
        self,
        units: list[Unit],
        tasks_of: Callable[[Unit, list[np.ndarray]], Iterator[Task]],
        read_pieces: Callable[[Iterable[FilePiece]], int],
    ) -> None:
        """Starts to read units, after waiting until they fit into the limit."""
        coming = sum(unit.kind.staging_bytes for unit in units)
        while self._open and (self._staging_bytes + coming > self._limit or len(self._open) > _MOST_OPEN):
            self._land_one()
        wanted = [(shape, unit.leaf.dtype) for unit in units for shape in unit.kind.shapes]
        # Large values get separate blocks: `malloc` serves blocks below 32 MiB from memory that was touched before.
        together = [wanted] if len(units) > 1 else [[one] for one in wanted]
        memory = iter([one for some in together for one in buffers(some, memory_to_fill)])
        pairs = [(unit, list(it.islice(memory, len(unit.kind.boxes)))) for unit in units]
        tasks: list[Task] = []
        for unit, filled in pairs:
            if unit.direct is None:
                tasks += tasks_of(unit, filled)
        if any(unit.direct is not None for unit in units):
            tasks.append(lambda: read_pieces(_pieces(pairs)))
        if len(units) > 1:
            tasks = [_in_turn(tasks)]
        group = _Group(pairs, coming, len(tasks))
        self._staging_bytes += coming
        self._open.update((self._pool.submit(task), group) for task in tasks)
        if not tasks:
            self._finish(group)

    def land(self) -> None:
        """Waits until every read that started has finished."""
        while self._open:
            self._land_one()

    def _land_one(self) -> None:
        done, _ = concurrent.futures.wait(self._open, return_when=concurrent.futures.FIRST_COMPLETED)
        for future in done:
            group = self._open.pop(future)
            self._bar.advance(future.result())
            group.left -= 1
            if not group.left:
                self._finish(group)

    def _finish(self, group: _Group) -> None:
        on_devices = []
        for unit, memory in group.units:
            if unit.leaf.dtype.kind == "b":
                _check_bools(unit, memory)
            if unit.kind.is_final:
                self.filled[unit.number] = (unit.kind.boxes, memory)
                continue
            # This memory is temporary: it must be free before more is admitted.
            for filled, devices in zip(memory, unit.kind.devices, strict=True):
                placed = moved(filled, devices, unit.leaf.sharding)
                self.placed.setdefault(unit.number, []).extend(placed)
                on_devices += placed
        jax.block_until_ready(on_devices)
        self._staging_bytes -= group.staging_bytes
        group.units.clear()


def _pieces(pairs: Sequence[tuple[Unit, list[np.ndarray]]]) -> Iterator[FilePiece]:
    """The reads of units whose bytes have the same order in the file as in memory."""
    for unit, memory in pairs:
        if unit.direct is not None:
            entry, spans = unit.direct
            for span in spans:
                into = [memory[part.number] for part in span.parts]
                yield FilePiece(entry.file, entry.path, entry.offset + span.offset, span.nbytes, into)


def _in_turn(tasks: list[Task]) -> Task:
    return lambda: sum(task() for task in tasks)


def _check_bools(unit: Unit, memory: list[np.ndarray]) -> None:
    if any(filled.view(np.uint8).max(initial=0) > 1 for filled in memory):
        raise CheckpointError(
            f"leaf `{printable(unit.leaf.path)}`: a boolean in the checkpoint is neither 0 nor 1; the file is damaged."
        )
