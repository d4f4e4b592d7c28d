"""Reads from files into host buffers, directly into place where the order of bytes allows it."""

import contextlib
import ctypes
import functools as ft
import math
import os
import queue
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._ground.boxes import Box, slices
from .._ground.errors import CheckpointError
from .._ground.spec import DType
from .._ground.text import quoted
from ._entry import FileArray, fill
from ._files import FilePlace, opened
from ._spans import Part, Span, spans


# A process should read only the bytes of its own shards. Small gaps are read too if skipping them takes ten times as
# long.
GAP_BYTES = 64
# The largest span that must be copied, and the largest that is read into its place, which is the length of a good task.
COPY_BYTES = 4 * 1024 * 1024
RUN_BYTES = 16 * 1024 * 1024
# POSIX guarantees at least 16 buffers per call; Linux allows 1024.
_MOST_BUFFERS = min(1000, os.sysconf("SC_IOV_MAX"))
# Python has no other way to make a bytearray that is not zeroed first.
_uninitialised = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_char_p, ctypes.c_ssize_t)(
    ("PyByteArray_FromStringAndSize", ctypes.pythonapi)
)


def memory_to_fill(nbytes: int) -> np.ndarray:
    """Uninitialised memory for arrays that are read."""
    # NumPy asks for huge pages. Touching them the first time costs three times as much on virtual machines whose host
    # takes back large free blocks of the guest. This memory is from `malloc`, and a process that loads again gets
    # memory that it has touched.
    return np.frombuffer(_uninitialised(None, nbytes), np.uint8)


class FilePiece(NamedTuple):
    """Bytes of an array that have the same order in the file as in memory.

    **Arguments:**

    - `file`, `path`: those of the array.
    - `offset`, `nbytes`: the position in the file and the number of the bytes.
    - `into`: the memory that they fill, one after the other.
    """

    file: str
    path: str
    offset: int
    nbytes: int
    into: list[np.ndarray]


class Files:
    """The open files of one load, and the scratch memory of its tasks."""

    def __init__(self, where: FilePlace, names: Sequence[str], tasks: int):
        self._where, self._names, self._tasks = where, names, tasks
        self._descriptors: dict[str, int] = {}
        self._scratch: queue.SimpleQueue[np.ndarray] = queue.SimpleQueue()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Files":
        with contextlib.ExitStack() as stack:
            for name in self._names:
                self._descriptors[name] = stack.enter_context(opened(self._where, name))
            self._stack = stack.pop_all()
        for _ in range(self._tasks):
            self._scratch.put(np.empty(COPY_BYTES, np.uint8))
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        # After an error no further file is read, and the first error is raised.
        self._stack.__exit__(kind, error, traceback)

    def read(self, entry: FileArray, todo: Sequence[Span], boxes: Sequence[Box], targets: Sequence[np.ndarray]) -> int:
        """Reads spans of an array into `targets`, which have the shapes of `boxes`, and returns the number of bytes
        read.
        """
        descriptor = self._descriptors[entry.file]
        scratch = self._scratch.get()
        try:
            for span in todo:
                views = [targets[part.number][slices(part.where, boxes[part.number])] for part in span.parts]
                if span.is_direct and all(view.dtype == entry.dtype and view.flags.c_contiguous for view in views):
                    _read(descriptor, [view.reshape(-1).view(np.uint8) for view in views], span, entry)
                    continue
                memory = scratch if span.nbytes <= len(scratch) else np.empty(span.nbytes, np.uint8)
                _read(descriptor, [memory[: span.nbytes]], span, entry)
                for view, part in zip(views, span.parts, strict=True):
                    fill(view, _part_in(memory, entry.dtype, part, span.strides), entry.path)
        finally:
            self._scratch.put(scratch)
        return sum(span.nbytes for span in todo)

    def read_alike(self, entries: Sequence[FileArray]) -> np.ndarray:
        """Arrays of one shape and dtype, stacked along a new first dimension."""
        first = entries[0]
        size = first.dtype.itemsize * math.prod(first.shape)
        stacked = np.empty((len(entries), size), np.uint8)
        order = sorted(range(len(entries)), key=lambda at: (entries[at].file, entries[at].offset))
        rows = [(entries[at], stacked[at]) for at in order]
        self.read_pieces([FilePiece(one.file, one.path, one.offset, size, [row]) for one, row in rows])
        return stacked.reshape(-1).view(first.dtype).reshape(len(entries), *first.shape)

    def read_pieces(self, pieces: Iterable[FilePiece]) -> int:
        """Reads pieces directly into place, with one call for pieces that follow each other in a file."""
        run: list[FilePiece] = []
        buffers_in_run = nbytes = 0
        for piece in pieces:
            goes_on = run and piece.file == run[-1].file and piece.offset == run[-1].offset + run[-1].nbytes
            if run and (not goes_on or buffers_in_run + len(piece.into) > _MOST_BUFFERS):
                nbytes += self._read_run(run)
                run, buffers_in_run = [], 0
            run.append(piece)
            buffers_in_run += len(piece.into)
        return nbytes + (self._read_run(run) if run else 0)

    def _read_run(self, run: Sequence[FilePiece]) -> int:
        into = [memory.reshape(-1).view(np.uint8) for piece in run for memory in piece.into if memory.size]
        first, nbytes = run[0], sum(piece.nbytes for piece in run)
        reached = _fill(self._descriptors[first.file], into, first.offset, nbytes)
        if reached < nbytes:
            end = first.offset + reached
            cut = next(piece for piece in run if piece.offset + piece.nbytes > end)
            raise _cut_off(first.file, end, cut.path)
        return nbytes


# A model has many layers of the same shapes.
@ft.lru_cache(maxsize=32)
def spans_of(
    shape: tuple[int, ...], itemsize: int, boxes: tuple[Box, ...], in_place: bool, gap_bytes: int = GAP_BYTES
) -> tuple[Span, ...]:
    """The reads that fetch `boxes` of an array of this shape from a file."""
    limits = {"run_bytes": RUN_BYTES if in_place else COPY_BYTES, "copy_bytes": COPY_BYTES}
    return tuple(spans(shape, itemsize, boxes, gap_bytes=gap_bytes, **limits))


def copied_out(views: Sequence[np.ndarray], span: Span, dtype: object, path: str) -> np.ndarray:
    """The bytes of a span, copied from arrays that hold its parts, and cast if these have another dtype."""
    memory = np.empty(span.nbytes, np.uint8)
    for view, part in zip(views, span.parts, strict=True):
        fill(_part_in(memory, dtype, part, span.strides), view, path)
    return memory


def _part_in(memory: np.ndarray, dtype: DType, part: Part, strides: tuple[int, ...]) -> np.ndarray:
    """A part as a view of its span's bytes."""
    shape = tuple([stop - start for start, stop in part.where])
    return np.ndarray(shape, dtype, memory.data, part.offset, strides)


def _read(descriptor: int, into: list[Any], span: Span, entry: FileArray) -> None:
    offset = entry.offset + span.offset
    if span.runs == 1:
        _read_run(descriptor, into, offset, span.nbytes, entry)
        return
    # Runs with several parts are never read into place, so there is one block of memory.
    memory, size, preadv = memoryview(into[0]), span.run_bytes, os.preadv
    for number in range(span.runs):
        piece = memory[number * size : (number + 1) * size]
        if preadv(descriptor, [piece], offset) != size:
            _read_run(descriptor, [piece], offset, size, entry)
        offset += span.step


def _read_run(descriptor: int, into: list[Any], offset: int, nbytes: int, entry: FileArray) -> None:
    done = _fill(descriptor, into, offset, nbytes)
    if done < nbytes:
        raise _cut_off(entry.file, offset + done, entry.path)


def _fill(descriptor: int, into: list[Any], offset: int, nbytes: int) -> int:
    """Reads `nbytes` bytes from `offset` on into memory, and returns how many bytes there were."""
    done = os.preadv(descriptor, into, offset) if nbytes else 0
    while 0 < done < nbytes:
        more = os.preadv(descriptor, _rest(into, done), offset + done)
        if not more:
            break
        done += more
    return done


def _cut_off(file: str, end: int, path: str) -> CheckpointError:
    return CheckpointError(
        f"{file!r} ends at byte {end}, within array {quoted(path)}; it was cut off since its header was read. Copy the "
        "whole file."
    )


def _rest(into: list[Any], done: int) -> list[Any]:
    left = []
    for piece in into:
        if done < len(piece):
            left.append(piece[done:])
        done = max(0, done - len(piece))
    return left
