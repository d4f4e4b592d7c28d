"""Units on their way from files into arrays: read in parallel, never more bytes of them at once than a limit."""

import concurrent.futures
import dataclasses
import itertools as it
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import numpy as np

from .._ground.boxes import Box
from .._ground.copying import buffers
from .._ground.errors import CheckpointError
from .._ground.text import printable
from ._reader import FilePiece, memory_to_fill
from ._units import Host, Unit


class Progress:
    """One line on a terminal that says how much has been done."""

    def __init__(self, verb: str, total_bytes: int, show: bool | None):
        self._verb, self._total_bytes, self._done_bytes = verb, total_bytes, 0
        self._show = sys.stderr.isatty() if show is None else show
        self._begin = self._shown = time.monotonic()

    def advance(self, nbytes: int) -> None:
        """Counts `nbytes` more, and rewrites the line ten times a second."""
        self._done_bytes += nbytes
        now = time.monotonic()
        if self._show and now - self._shown > 0.1:
            self._shown = now
            self._write(now)

    def end(self) -> None:
        """Leaves the finished line standing."""
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
# Of one leaf: the boxes that are here, and the memory of each.
Filled = tuple[tuple[Box, ...], list[np.ndarray]]
_MOST_OPEN = 256


@dataclasses.dataclass
class _Group:
    """Units under way, the memory of each, and how many of their tasks are not done."""

    units: list[tuple[Unit, list[np.ndarray]]]
    staging_bytes: int
    left: int


class Flight:
    """The groups being read: admitted in order while they fit, landed as they finish.

    What has landed is, by leaf, in `filled` where the memory is to be the array's, else in `placed`, on devices.
    """

    def __init__(self, pool: concurrent.futures.Executor, limit: int, bar: Progress, host: Host, leaf_count: int):
        self._pool, self._limit, self._bar, self._host = pool, limit, bar, host
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
        """Begins to read units; waits before until they fit."""
        coming = sum(unit.kind.staging_bytes for unit in units)
        while self._open and (self._staging_bytes + coming > self._limit or len(self._open) > _MOST_OPEN):
            self._land_one()
        wanted = [(shape, unit.leaf.dtype) for unit in units for shape in unit.kind.shapes]
        # What is large has memory of its own: a block below 32 MiB is one that `malloc` had touched before.
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
        """Waits until no read is open."""
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
            # The memory is only a stop on the way: it must be gone before more is admitted.
            for filled, devices in zip(memory, unit.kind.devices, strict=True):
                placed = self._host.move(filled, devices, unit.leaf.sharding)
                self.placed.setdefault(unit.number, []).extend(placed)
                on_devices += placed
        jax.block_until_ready(on_devices)
        self._staging_bytes -= group.staging_bytes
        group.units.clear()


def _pieces(pairs: Sequence[tuple[Unit, list[np.ndarray]]]) -> Iterator[FilePiece]:
    """The reads of units whose bytes are in the file as they will be in memory."""
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
