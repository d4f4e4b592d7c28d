"""Reads of arrays from the objects of a store: ranges that are near each other are one
request, and a budget bounds the bytes of all requests under way.
"""

import concurrent.futures
import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._ground.errors import CheckpointError
from .._ground.text import quoted
from ._entry import FileArray, fill
from ._object_faults import is_past_the_end, stalled
from ._objects import ObjectPlace
from ._reader import Read, flat, part_in


# A run of bytes is read in requests of at least this size, and less than twice it. With
# the request behind its last tensor, an object of 15 MiB and more so takes at most 1.1
# requests per 8 MiB.
_REQUEST_BYTES = 12 * 2**20
# Runs do not become longer by gaps than this.
_RUN_BYTES = 16 * 2**20
READ_LIMIT_BYTES = 2**30
# An answer takes more memory than its bytes until it is copied (TensorStore 0.1.86,
# measured).
_HELD_PER_BYTE = 1.75
# The largest span that is read into temporary memory, with its bytes, and a request.
LEAST_LIMIT_BYTES = 64 * 2**20


class Piece(NamedTuple):
    """Bytes of an object, and the memory that they fill."""

    entry: FileArray
    offset: int
    memory: np.ndarray

    @property
    def stop(self) -> int:
        return self.offset + self.memory.size


class Request(NamedTuple):
    """A range of an object that is read at once, and the pieces that it fills."""

    file: str
    start: int
    stop: int
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class Rest(NamedTuple):
    """A span that was read into temporary memory, to be copied into its targets."""

    read: Read
    memory: np.ndarray


def pieces_of(reads: Sequence[Read]) -> tuple[list[Piece], list[Rest]]:
    """The pieces of all reads, and the spans whose values are copied afterwards, since
    they have another order or dtype in their targets.
    """
    pieces: list[Piece] = []
    rests: list[Rest] = []
    for read in reads:
        entry = read.entry
        span = read.span
        views = [read.targets[part.number][part.index] for part in span.parts]
        is_in_place = span.is_direct and all(
            [view.dtype == entry.dtype and view.flags.c_contiguous for view in views]
        )
        if is_in_place:
            memories = [flat(view) for view in views]
        else:
            temporary = np.empty(span.nbytes, np.uint8)
            rests.append(Rest(read, temporary))
            memories = [temporary]
        offset = entry.offset + span.offset
        if span.runs > 1:
            # A span of several runs fills one memory.
            rows = memories[0].reshape(span.runs, span.run_bytes)
            for number, row in enumerate(rows):
                piece_of_row = Piece(
                    entry=entry,
                    offset=offset + number * span.step,
                    memory=row,
                )
                pieces.append(piece_of_row)
            continue
        for memory in memories:
            whole_piece = Piece(
                entry=entry,
                offset=offset,
                memory=memory,
            )
            pieces.append(whole_piece)
            offset += memory.size
    return [piece for piece in pieces if piece.memory.size], rests


def requests_of(pieces: Sequence[Piece], gap_bytes: int) -> Iterator[Request]:
    """Yields the requests that read all pieces. Gaps of fewer than `gap_bytes` are read
    too.
    """
    run: list[Piece] = []
    stop = 0
    for piece in sorted(pieces, key=lambda piece: (piece.entry.file, piece.offset)):
        if run:
            gap = piece.offset - stop
            is_near = gap <= 0 or (
                gap < gap_bytes and piece.stop - run[0].offset <= _RUN_BYTES
            )
            if piece.entry.file != run[0].entry.file or not is_near:
                yield from _divided(run, stop)
                run = []
        run.append(piece)
        stop = piece.stop if len(run) == 1 else max(stop, piece.stop)
    if run:
        yield from _divided(run, stop)


def _divided(run: Sequence[Piece], stop: int) -> Iterator[Request]:
    """Yields requests of about equal size that read one run of bytes."""
    start = run[0].offset
    count = max(1, (stop - start) // _REQUEST_BYTES)
    for number in range(count):
        low = start + (stop - start) * number // count
        high = start + (stop - start) * (number + 1) // count
        pieces = []
        for piece in run:
            start_inside = max(low, piece.offset)
            stop_inside = min(high, piece.stop)
            if start_inside < stop_inside:
                rows = slice(start_inside - piece.offset, stop_inside - piece.offset)
                piece_inside = Piece(
                    entry=piece.entry,
                    offset=start_inside,
                    memory=piece.memory[rows],
                )
                pieces.append(piece_inside)
        yield Request(
            file=run[0].entry.file,
            start=low,
            stop=high,
            pieces=tuple(pieces),
        )


class Budget:
    """The bytes of all requests that are under way, which have a limit."""

    def __init__(self, limit_bytes: int):
        self.limit_bytes = limit_bytes
        self._free_bytes = limit_bytes
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def of(self, nbytes: int) -> Iterator[None]:
        """A context in which `nbytes` of the budget are taken. Entering it waits."""
        with self._changed:
            self._changed.wait_for(lambda: self._free_bytes >= nbytes)
            self._free_bytes -= nbytes
        try:
            yield
        finally:
            with self._changed:
                self._free_bytes += nbytes
                self._changed.notify_all()


@dataclasses.dataclass
class ObjectFiles:
    """The objects of one load, with the operations of `Files`.

    `progress_at` is the time of the last answer: a slow network is no stall.
    """

    where: ObjectPlace
    budget: Budget
    gap_bytes: int
    copier: concurrent.futures.Executor
    progress_at: float = dataclasses.field(default_factory=time.monotonic)

    def read(self, reads: Sequence[Read]) -> int:
        """Reads bytes of objects into the memory of `reads`, and returns the number of
        bytes.
        """
        pieces, scratch_copies = pieces_of(reads)
        requests = list(requests_of(pieces, self.gap_bytes))
        scratch_bytes = sum(rest.memory.size for rest in scratch_copies)
        answer_bytes = sum(request.nbytes for request in requests)
        nbytes = scratch_bytes + int(_HELD_PER_BYTE * answer_bytes)
        if nbytes > self.budget.limit_bytes and len(reads) > 1:
            half = len(reads) // 2
            return self.read(reads[:half]) + self.read(reads[half:])
        with self.budget.of(min(nbytes, self.budget.limit_bytes)):
            self._carry_out(requests)
            for rest in scratch_copies:
                _copy_out(rest)
        return sum(read.span.nbytes for read in reads)

    def _carry_out(self, requests: Sequence[Request]) -> None:
        futures = [
            self.where.begin_read(
                self.where.key_of(request.file), request.start, request.stop
            )
            for request in requests
        ]
        for number, request in enumerate(requests):
            result = self._result(request, futures[number])
            futures[number] = None
            # TensorStore's bytes and Python's are there at once for one request only.
            # In one thread, since `malloc` keeps freed memory for each thread.
            self.copier.submit(_copy_in, result, request).result()
            del result

    def _result(self, request: Request, future: Any) -> Any:
        key = self.where.key_of(request.file)
        seconds = self.where.timeout_seconds
        while True:
            try:
                result = future.result(timeout=seconds)
                break
            except TimeoutError:
                if time.monotonic() - self.progress_at > seconds:
                    what = self.where.what(key)
                    raise stalled(what, "reading", seconds) from None
            except (ValueError, OSError, RuntimeError) as error:
                if is_past_the_end(error):
                    raise _cut_off(self.where, request) from error
                raise self.where.fault(key, "reading", error) from error
        self.progress_at = time.monotonic()
        if result.state == "missing":
            raise self.where.missing(key)
        self.where.require_same(key, result.stamp.generation)
        return result


def _copy_in(result: Any, request: Request) -> None:
    data = np.frombuffer(result.value, np.uint8)
    for piece in request.pieces:
        begin = piece.offset - request.start
        piece.memory[:] = data[begin : begin + piece.memory.size]


def _cut_off(where: ObjectPlace, request: Request) -> CheckpointError:
    path = request.pieces[-1].entry.path
    return CheckpointError(
        f"{where.what(where.key_of(request.file))} ends before byte {request.stop},"
        f" within array {quoted(path)} or one near it; it is truncated. Copy the whole"
        " file."
    )


def _copy_out(rest: Rest) -> None:
    entry, span, targets = rest.read
    for part in span.parts:
        values = part_in(rest.memory, entry.dtype, part, span.strides)
        fill(targets[part.number][part.index], values, entry.path)


@contextlib.contextmanager
def open_objects(
    where: ObjectPlace,
    read_limit_bytes: int,
    gap_bytes: int,
) -> Iterator[ObjectFiles]:
    """A context with the objects of one load."""
    if read_limit_bytes < LEAST_LIMIT_BYTES:
        raise CheckpointError(
            f"`read_limit_bytes={read_limit_bytes}` is less than two requests and the"
            f" memory between take; give at least {LEAST_LIMIT_BYTES}."
        )
    with concurrent.futures.ThreadPoolExecutor(1, "shardfx-copy") as copier:
        yield ObjectFiles(
            where=where,
            budget=Budget(read_limit_bytes),
            gap_bytes=gap_bytes,
            copier=copier,
        )
