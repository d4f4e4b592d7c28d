"""Writes the tensors of a save to its files: small ones that follow each other as one
block of memory, large ones as they lie.
"""

import concurrent.futures
import contextlib
import itertools as it
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ._entry import fill
from ._leaves import (
    PartRows,
    rows_of_parts,
    shards_of,
)
from ._reader import (
    COPY_BYTES,
    ByteRange,
    copy_rows,
    elements_of_part,
    flat,
    runs_of,
    spans_of,
    transfer,
)
from ._spans import ranges_of


_WORKERS = 4
_SMALL_BYTES = 64 * 1024
# The kind of a write of tensors that are rows of one memory.
_ROWS = "rows"


class Tensors(NamedTuple):
    """Arrays to write to one file, one after the other: the name, the value, the bytes
    and the offset of the first byte of each.
    """

    file: str
    names: Sequence[str]
    values: Sequence[Any]
    sizes: Sequence[int]
    offsets: Sequence[int]

    def between(self, start: int, stop: int) -> "Tensors":
        """The arrays from number `start` to before number `stop`."""
        return Tensors(
            file=self.file,
            names=self.names[start:stop],
            values=self.values[start:stop],
            sizes=self.sizes[start:stop],
            offsets=self.offsets[start:stop],
        )


def begin_writes(
    tensors: Sequence[Tensors],
    is_first: bool,
    afterwards: contextlib.ExitStack,
) -> list[concurrent.futures.Future[int]]:
    """Starts to write this process's shards in threads, and returns futures with the
    number of bytes written.

    The last futures flush the files. Closing `afterwards` waits for the writes that are
    running, and closes the files. The caller does so at the end; if there is an error,
    it first sends the error to the other processes.
    """
    files: dict[str, int] = {}
    for tensors_of_file in tensors:
        file = tensors_of_file.file
        flags = os.O_WRONLY | os.O_CLOEXEC
        files[file] = os.open(file, flags)
        afterwards.callback(os.close, files[file])
    pool = concurrent.futures.ThreadPoolExecutor(_WORKERS, "shardfx-save")
    stop = threading.Event()
    afterwards.callback(pool.shutdown, wait=True, cancel_futures=True)
    afterwards.callback(stop.set)
    writes: list[concurrent.futures.Future[int]] = []
    for tensors_of_file in tensors:
        descriptor = files[tensors_of_file.file]
        sizes = tensors_of_file.sizes
        # Small tensors are written by one task, since each task has a fixed cost.
        for first, last in ranges_of(sizes, COPY_BYTES):
            some_tensors = tensors_of_file.between(first, last)
            write = pool.submit(_write, descriptor, some_tensors, is_first, stop)
            writes.append(write)
    flushes = [pool.submit(_flush, file, tuple(writes)) for file in files.values()]
    return [*writes, *flushes]


def _flush(descriptor: int, writes: Sequence[concurrent.futures.Future[int]]) -> int:
    """Flushes a file to the disk when its writes are done."""
    # The writes started earlier, so this task blocks none of them.
    concurrent.futures.wait(writes)
    os.fsync(descriptor)
    return 0


def _write(
    descriptor: int,
    tensors: Tensors,
    is_first: bool,
    stop: threading.Event,
) -> int:
    """Writes this process's shards of tensors to the file `descriptor`, and returns the
    number of bytes.

    After `stop` is set, nothing more is written.
    """
    written = 0
    for run in runs_of(_ranges(descriptor, tensors, is_first)):
        if not stop.is_set():
            written += transfer(os.pwritev, run)
    return written


def _ranges(descriptor: int, tensors: Tensors, is_first: bool) -> Iterator[ByteRange]:
    """Yields this process's shards of tensors, as `_ranges_of_tensor` does. Small
    tensors that follow each other are put together in memory.
    """
    part_rows = list(rows_of_parts(tensors.values, is_first))
    small_rows = [rows for rows in part_rows if rows.nbytes < _SMALL_BYTES]
    memory = _memory_with_rows(small_rows, tensors)
    kinds = _kinds_of_writes(tensors, small_rows, is_first)
    # Large rows by the number of their tensor.
    large_rows: dict[int, np.ndarray] = {}
    for rows in part_rows:
        if rows.nbytes >= _SMALL_BYTES:
            for number, start in zip(rows.numbers, rows.starts, strict=True):
                large_rows[int(number)] = rows.memory[start : start + rows.nbytes]

    start = 0
    for kind, group in it.groupby(kinds):
        stop = start + len(list(group))
        offset = tensors.offsets[start]
        nbytes = sum(tensors.sizes[start:stop])
        if kind == _ROWS:
            position = offset - tensors.offsets[0]
            block = memory[position : position + nbytes]
            yield ByteRange(
                descriptor=descriptor, offset=offset, nbytes=nbytes, memory=[block]
            )
        elif kind is not None:
            block = np.concatenate(tensors.values[start:stop], axis=None)
            yield ByteRange(
                descriptor=descriptor,
                offset=offset,
                nbytes=nbytes,
                memory=[flat(block)],
            )
        else:
            for number in range(start, stop):
                if number in large_rows:
                    offset_of_row = tensors.offsets[number]
                    row = large_rows[number]
                    yield ByteRange(
                        descriptor=descriptor,
                        offset=offset_of_row,
                        nbytes=row.size,
                        memory=[row],
                    )
                else:
                    yield from _ranges_of_tensor(descriptor, tensors, number, is_first)
        start = stop


def _kinds_of_writes(
    tensors: Tensors,
    small_rows: Sequence[PartRows],
    is_first: bool,
) -> list[str | None]:
    """For each tensor, the kind of its write: `_ROWS`, or the name of the dtype of a
    small NumPy array; `None` for a tensor that is written for itself. Tensors of one
    kind that follow each other are written as one block of memory.
    """
    kinds: list[str | None] = [None] * len(tensors.values)
    for rows in small_rows:
        for number in rows.numbers.tolist():
            kinds[number] = _ROWS
    if not is_first:
        return kinds
    for number, value in enumerate(tensors.values):
        if isinstance(value, np.ndarray) and 0 < tensors.sizes[number] < _SMALL_BYTES:
            kinds[number] = value.dtype.str + value.dtype.name
    return kinds


def _memory_with_rows(part_rows: Sequence[PartRows], tensors: Tensors) -> np.ndarray:
    """Memory for the bytes from the first tensor to the last, with those tensors filled
    in that are rows of `part_rows`: each row is one whole tensor. The other bytes are
    uninitialised. Empty if there is no row.
    """
    if not part_rows:
        return np.empty(0, np.uint8)
    memory = np.empty(sum(tensors.sizes), np.uint8)
    all_offsets = np.array(tensors.offsets, np.int64)
    offsets = all_offsets - tensors.offsets[0]
    for rows in part_rows:
        copy_rows(
            nbytes=rows.nbytes,
            source=rows.memory,
            starts=rows.starts,
            target=memory,
            offsets=offsets[rows.numbers],
        )
    return memory


def _ranges_of_tensor(
    descriptor: int,
    tensors: Tensors,
    number: int,
    is_first: bool,
) -> Iterator[ByteRange]:
    """Yields this process's shards of the tensor `number`, as byte ranges of the file
    `descriptor` with the bytes to write.
    """
    name = tensors.names[number]
    value = tensors.values[number]
    dtype = value.dtype
    shards = list(shards_of(value, is_first))
    boxes = tuple([box for box, _ in shards])
    values = [shard for _, shard in shards]
    # The gaps between the boxes are never written, since another process may have
    # written them already.
    for span in spans_of(
        shape=tuple(value.shape),
        itemsize=dtype.itemsize,
        boxes=boxes,
        in_place=True,
        gap_bytes=1,
    ):
        views = [values[part.number][part.index] for part in span.parts]
        start = tensors.offsets[number] + span.offset
        is_one_run = span.is_direct and span.runs == 1
        if is_one_run and all(
            [view.flags.c_contiguous and view.dtype == dtype for view in views]
        ):
            if span.nbytes < _SMALL_BYTES:
                # Copying small shards costs less than one buffer for each.
                views = [np.concatenate(views, axis=None)]
            memories = [flat(view) for view in views]
            yield ByteRange(
                descriptor=descriptor, offset=start, nbytes=span.nbytes, memory=memories
            )
            continue
        memory = np.empty(span.nbytes, np.uint8)
        for view, part in zip(views, span.parts, strict=True):
            part_memory = elements_of_part(memory, dtype, part, span.strides)
            fill(part_memory, view, name)
        for run in range(span.runs):
            row = memory[run * span.run_bytes : (run + 1) * span.run_bytes]
            run_start = start + run * span.step
            yield ByteRange(
                descriptor=descriptor,
                offset=run_start,
                nbytes=span.run_bytes,
                memory=[row],
            )
