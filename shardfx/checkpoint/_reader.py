"""Reads and writes of byte ranges between files and host memory, without a copy where
the order of bytes allows it.
"""

import contextlib
import ctypes
import dataclasses
import functools as ft
import os
import queue
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._ground.boxes import Box
from .._ground.errors import CheckpointError
from .._ground.spec import DType
from .._ground.text import quoted
from ._entry import FileArray, fill
from ._files import GAP_BYTES, FilePlace, opened
from ._spans import Part, Span, spans
from ._table import FileTable


# The largest span that is copied, and the largest that is read in place, in bytes.
COPY_BYTES = 4 * 1024 * 1024
RUN_BYTES = 16 * 1024 * 1024
# POSIX guarantees at least 16 buffers per call; Linux allows 1024.
_MOST_BUFFERS = min(1000, os.sysconf("SC_IOV_MAX"))
# Python has no other way to make a bytearray that is not zeroed first.
_uninitialised_bytearray = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_char_p, ctypes.c_ssize_t
)(("PyByteArray_FromStringAndSize", ctypes.pythonapi))


def memory_to_fill(nbytes: int) -> np.ndarray:
    """A new vector of bytes, which are not set to 0."""
    # NumPy asks for huge pages. The first access to one costs three times as much on
    # virtual machines whose host takes back large free blocks. From `malloc`, a process
    # that loads again gets memory that it has used before.
    return np.frombuffer(_uninitialised_bytearray(None, nbytes), np.uint8)


class ByteRange(NamedTuple):
    """A contiguous range of an open file, and the memory that it is read into or
    written from.

    `memory` has arrays of bytes that together have the size of the range, in its order.
    `entry` is the array that is read, for errors.
    """

    descriptor: int
    offset: int
    nbytes: int
    memory: Sequence[np.ndarray]
    entry: FileArray | None = None


class Read(NamedTuple):
    """The read of one span of the array `entry`. `targets` has the memory to fill for
    each box of the array.
    """

    entry: FileArray
    span: Span
    targets: Sequence[np.ndarray]


def reads_of(
    entry: FileArray,
    spans: Iterable[Span],
    targets: Sequence[np.ndarray],
) -> list[Read]:
    """The reads of spans of a stored array into the memory `targets`."""
    reads = []
    for span in spans:
        read = Read(
            entry=entry,
            span=span,
            targets=targets,
        )
        reads.append(read)
    return reads


def memory_in_place(read: Read) -> list[np.ndarray] | None:
    """The memory that the bytes of a span fill as they are, one vector after the other;
    `None` if the elements have another order or dtype in their targets.

    A part of a span is what the span has of one box: `part.number` is that of the box
    and its target, and `part.index` the place of the elements in the target.
    """
    entry, span, targets = read
    views = [targets[part.number][part.index] for part in span.parts]
    if not span.is_direct or not all(
        [view.dtype == entry.dtype and view.flags.c_contiguous for view in views]
    ):
        return None
    return [flat(view) for view in views]


def copy_parts(read: Read, memory: np.ndarray) -> None:
    """Copies the parts of a span to their targets. `memory` has the bytes of the span."""
    entry, span, targets = read
    for part in span.parts:
        values = elements_of_part(memory, entry.dtype, part, span.strides)
        fill(targets[part.number][part.index], values, entry.path)


class RowsOfRead(NamedTuple):
    """The rows of a block that go to one vector of memory.

    - `arrays`: the arrays, each of `nbytes` bytes.
    - `starts`: the position of each in the bytes of the block.
    - `memory`, `offsets`: the vector of bytes, and the position of each row in it.
    """

    arrays: FileTable
    nbytes: int
    starts: np.ndarray
    memory: np.ndarray
    offsets: np.ndarray


class RowBlock(NamedTuple):
    """A range of bytes of the file `file` that is read at once, and the rows in it."""

    file: str
    start: int
    nbytes: int
    rows: Sequence[RowsOfRead]


@dataclasses.dataclass(frozen=True)
class Files:
    """The open files of one load: their place, their descriptors by path, a temporary
    array of bytes for each thread, and the bytes that one call of `read` should read.
    """

    place: FilePlace
    descriptors: dict[str, int]
    scratch: queue.SimpleQueue[np.ndarray]
    batch_bytes: int = RUN_BYTES

    def read(self, reads: Sequence[Read]) -> int:
        """Reads bytes from files into the memory of `reads`, and returns the number of
        bytes.
        """
        scratch = self.scratch.get()
        try:
            for run in runs_of(self._in_place(reads, scratch)):
                _read_run(run)
        finally:
            self.scratch.put(scratch)
        return sum([read.span.nbytes for read in reads])

    def read_rows(self, blocks: Sequence[RowBlock]) -> int:
        """Reads blocks of files, and copies their rows to memory. Returns the number of
        bytes.
        """
        scratch = self.scratch.get()
        try:
            for block in blocks:
                memory = scratch[: block.nbytes]
                descriptor = self.descriptors[block.file]
                whole = ByteRange(
                    descriptor=descriptor,
                    offset=block.start,
                    nbytes=block.nbytes,
                    memory=[memory],
                )
                read_bytes = transfer(os.preadv, [whole])
                if read_bytes < block.nbytes:
                    raise _error_for_end_in(block, block.start + read_bytes)
                for rows in block.rows:
                    copy_rows(
                        nbytes=rows.nbytes,
                        source=memory,
                        starts=rows.starts,
                        target=rows.memory,
                        offsets=rows.offsets,
                    )
        finally:
            self.scratch.put(scratch)
        return sum(block.nbytes for block in blocks)

    def _in_place(
        self,
        reads: Sequence[Read],
        scratch: np.ndarray,
    ) -> Iterator[ByteRange]:
        """Yields the byte ranges without gaps that can be read directly into their
        targets. Reads all others itself.

        A range whose elements have another order or dtype in their targets is read into
        `scratch` first, and copied.
        """
        for read in reads:
            entry, span, targets = read
            descriptor = self.descriptors[entry.file]
            offset = entry.offset + span.offset
            if len(targets) == 1 and _is_row(span, entry, targets[0]):
                yield ByteRange(
                    descriptor=descriptor,
                    offset=offset,
                    nbytes=span.run_bytes,
                    memory=[targets[0].view(np.uint8)],
                    entry=entry,
                )
                continue
            memories = memory_in_place(read)
            if memories is None:
                memory = scratch
                if span.nbytes > len(scratch):
                    memory = np.empty(span.nbytes, np.uint8)
                _read_runs(
                    descriptor=descriptor,
                    offset=offset,
                    memory=memory,
                    span=span,
                    entry=entry,
                )
                copy_parts(read, memory)
            elif span.runs == 1:
                yield ByteRange(
                    descriptor=descriptor,
                    offset=offset,
                    nbytes=span.run_bytes,
                    memory=memories,
                    entry=entry,
                )
            else:
                # A direct span of several runs has one part.
                _read_runs(
                    descriptor=descriptor,
                    offset=offset,
                    memory=memories[0],
                    span=span,
                    entry=entry,
                )


def _is_row(span: Span, entry: FileArray, target: np.ndarray) -> bool:
    """Whether a span fills the vector `target` with its bytes as they are in the file."""
    return (
        span.runs == 1
        and span.is_direct
        and target.ndim == 1
        and target.nbytes == span.run_bytes
        and target.dtype == entry.dtype
        and target.flags.c_contiguous
    )


@contextlib.contextmanager
def open_files(place: FilePlace, names: Iterable[str], threads: int) -> Iterator[Files]:
    """A context in which the named files are open, for reads in `threads` threads."""
    scratch = queue.SimpleQueue[np.ndarray]()
    for _ in range(threads):
        scratch.put(np.empty(COPY_BYTES, np.uint8))
    with contextlib.ExitStack() as stack:
        descriptors = {}
        for name in names:
            descriptors[name] = stack.enter_context(opened(place, name))
        yield Files(
            place=place,
            descriptors=descriptors,
            scratch=scratch,
        )


# A model has many layers of the same shapes.
@ft.lru_cache(maxsize=256)
def spans_of(
    shape: tuple[int, ...],
    itemsize: int,
    boxes: tuple[Box, ...],
    in_place: bool,
    gap_bytes: int = GAP_BYTES,
) -> tuple[Span, ...]:
    """The spans (bytes of one read), of bounded size, to read or write for `boxes` of
    an array. Gaps of fewer than `gap_bytes` are read too.

    `in_place` is whether the boxes have the dtype and the order of the file, so that no
    bytes are copied.
    """
    run_bytes = COPY_BYTES
    if in_place:
        run_bytes = RUN_BYTES
    return tuple(
        spans(
            shape,
            itemsize,
            boxes,
            gap_bytes=gap_bytes,
            run_bytes=run_bytes,
            copy_bytes=COPY_BYTES,
        )
    )


def elements_of_part(
    memory: np.ndarray,
    dtype: DType,
    part: Part,
    strides: tuple[int, ...],
) -> np.ndarray:
    """The elements of one part of a span, as a view of `memory`, which holds the span's
    bytes.

    `dtype` is the dtype of the elements, and `strides` are those of the span.
    """
    return np.ndarray(part.shape, dtype, memory.data, part.offset, strides)


def flat(view: np.ndarray) -> np.ndarray:
    """A view of a contiguous array as a vector of bytes."""
    return view.reshape(-1).view(np.uint8)


def runs_of(ranges: Iterable[ByteRange]) -> Iterator[list[ByteRange]]:
    """Yields groups of byte ranges that are adjacent in a file. One system call reads
    or writes a group.
    """
    run: list[ByteRange] = []
    buffer_count = run_nbytes = 0
    for byte_range in ranges:
        if run:
            end = run[-1].offset + run[-1].nbytes
            is_full = (
                buffer_count + len(byte_range.memory) > _MOST_BUFFERS
                or run_nbytes + byte_range.nbytes > RUN_BYTES
            )
            if (
                is_full
                or byte_range.offset != end
                or byte_range.descriptor != run[-1].descriptor
            ):
                yield run
                run = []
                buffer_count = 0
                run_nbytes = 0
        run.append(byte_range)
        buffer_count += len(byte_range.memory)
        run_nbytes += byte_range.nbytes
    if run:
        yield run


def transfer(call: Callable[..., int], run: Sequence[ByteRange]) -> int:
    """Reads or writes adjacent byte ranges by `call`, which is `os.preadv` or
    `os.pwritev`.

    Returns the number of bytes, which is smaller at the end of the file.
    """
    descriptor = run[0].descriptor
    offset = run[0].offset
    remaining = []
    for byte_range in run:
        for memory in byte_range.memory:
            if memory.size:
                remaining.append(memory)
    nbytes = sum([byte_range.nbytes for byte_range in run])
    done_bytes = 0
    while done_bytes < nbytes:
        moved_bytes = call(descriptor, remaining, offset + done_bytes)
        done_bytes += moved_bytes
        if not moved_bytes or done_bytes == nbytes:
            break
        while moved_bytes >= remaining[0].size:
            moved_bytes -= remaining.pop(0).size
        remaining[0] = remaining[0][moved_bytes:]
    return done_bytes


def _read_run(run: Sequence[ByteRange]) -> None:
    end = run[0].offset + transfer(os.preadv, run)
    for byte_range in run:
        if byte_range.offset + byte_range.nbytes > end and byte_range.entry is not None:
            raise _error_for_end(byte_range.entry, end)


def _error_for_end(entry: FileArray, end: int) -> CheckpointError:
    """The error for a file that ends at byte `end`, within an array."""
    return CheckpointError(
        f"{entry.file!r} ends at byte {end}, within array {quoted(entry.path)}; it was"
        " cut off since its header was read. Copy the whole file."
    )


def _error_for_end_in(block: RowBlock, end: int) -> CheckpointError:
    """The error for a file that ends at byte `end`, within a block. It names the first
    array that is not whole.
    """
    cut_entries = []
    for rows in block.rows:
        offsets = rows.arrays.offsets
        numbers = np.flatnonzero(offsets + rows.nbytes > end)
        cut_entries += [rows.arrays[number] for number in numbers[:1].tolist()]
    first_entry = min(cut_entries, key=lambda entry: entry.offset)
    return _error_for_end(first_entry, end)


def copy_rows(
    nbytes: int,
    source: np.ndarray,
    starts: np.ndarray,
    target: np.ndarray,
    offsets: np.ndarray,
) -> None:
    """Copies rows of `nbytes` bytes between vectors of bytes: from each of `starts` in
    `source` to the same of `offsets` in `target`.
    """
    row = np.dtype((np.void, nbytes))

    def at_each_byte(memory: np.ndarray) -> np.ndarray:
        """The rows that begin at each byte of the vector; they overlap."""
        row_count = memory.size - nbytes + 1
        return np.ndarray((row_count,), row, memory.data, 0, (1,))

    at_each_byte(target)[offsets] = at_each_byte(source)[starts]


def _read_runs(
    descriptor: int,
    offset: int,
    memory: np.ndarray,
    span: Span,
    entry: FileArray,
) -> None:
    """Reads the runs of `span` into `memory`, with one system call for each. The first
    run begins at `offset`.

    `entry` is the array that is read, for errors.
    """
    for number in range(span.runs):
        row: Any = memory[number * span.run_bytes : (number + 1) * span.run_bytes]
        # The general case takes longer than a short read.
        if os.preadv(descriptor, [row], offset) != span.run_bytes:
            run = ByteRange(
                descriptor=descriptor,
                offset=offset,
                nbytes=span.run_bytes,
                memory=[row],
                entry=entry,
            )
            _read_run([run])
        offset += span.step


class Progress:
    """A line on a terminal that shows the progress of a load or a save."""

    def __init__(self, verb: str, total_bytes: int, show: bool | None):
        self._verb = verb
        self._total_bytes = total_bytes
        self._done_bytes = 0
        if show is None:
            # It is `None` if a shell's `2>&-` closed it.
            show = sys.stderr is not None and sys.stderr.isatty()
        self._show = show
        self._begin = self._shown = time.monotonic()

    def advance(self, nbytes: int) -> None:
        """Adds `nbytes` to the finished bytes, and rewrites the line at most ten times
        a second.
        """
        self._done_bytes += nbytes
        now = time.monotonic()
        if self._show and now - self._shown > 0.1:
            self._shown = now
            self._write(now)

    def end(self) -> None:
        if self._show:
            self._write(time.monotonic())
            sys.stderr.write("\n")

    def _write(self, now: float) -> None:
        """Writes the line. `now` is the time in seconds of the clock of `_begin`."""
        elapsed = max(now - self._begin, 1e-9)
        rate = self._done_bytes / elapsed / 1e9
        filled = 24 * self._done_bytes // max(self._total_bytes, 1)
        sys.stderr.write(
            f"\r{self._verb} [{'#' * filled:<24}] {self._done_bytes / 1e9:.2f} of"
            f" {self._total_bytes / 1e9:.2f} GB, {rate:.2f} GB/s"
        )
        sys.stderr.flush()
