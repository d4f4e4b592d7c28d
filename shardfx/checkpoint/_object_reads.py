"""Reads of arrays from the objects of a store: ranges that are near each other are one
request, and a budget bounds the bytes of all requests under way.
"""

import concurrent.futures
import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._ground.errors import CheckpointError
from .._ground.text import quoted
from ._object_faults import ShortError
from ._objects import ObjectPlace
from ._reader import Read, copy_parts, memory_in_place


READ_LIMIT_BYTES = 2**30
# The most bytes of a request, and of a call of `read`. An array that is a little larger
# than the largest span is one request, too.
_REQUEST_BYTES = 24 * 2**20
# An answer takes more memory than its bytes until it is copied (TensorStore 0.1.86,
# measured).
_MEMORY_PER_BYTE = 1.75
# The largest span that is read into temporary memory, with its bytes, and a request.
LEAST_LIMIT_BYTES = 64 * 2**20


class ObjectRange(NamedTuple):
    """A range of bytes of an object, and the memory of the same size that it fills.
    `path` is that of the array.
    """

    file: str
    offset: int
    memory: np.ndarray
    path: str

    @property
    def stop(self) -> int:
        return self.offset + self.memory.size


class Request(NamedTuple):
    """A range of an object that is read at once, and the pieces that it fills."""

    start: int
    stop: int
    pieces: Sequence[ObjectRange]

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def pieces_of(read: Read, memories: Sequence[np.ndarray]) -> Iterator[ObjectRange]:
    """Yields the byte ranges of an object that a read needs, each with the memory that
    it fills: one for each run of the read's span, or for each of `memories`, which are
    filled one after the other.

    A span of several runs has one every `span.step` bytes, each of `span.run_bytes`.
    """
    span = read.span
    if span.runs > 1:
        # A span of several runs fills one memory.
        (memory,) = memories
        memories = list(memory.reshape(span.runs, span.run_bytes))
    offset = read.entry.offset + span.offset
    for memory in memories:
        yield ObjectRange(
            file=read.entry.file,
            offset=offset,
            memory=memory,
            path=read.entry.path,
        )
        offset += span.step if span.runs > 1 else memory.size


def requests_of(pieces: Sequence[ObjectRange], gap_bytes: int) -> Iterator[Request]:
    """Yields the requests that read all pieces. Gaps of fewer than `gap_bytes` are read
    too, as long as a request has at most 24 MiB.
    """
    # The pieces of the next request, and the range that they take.
    request_pieces: list[ObjectRange] = []
    start = stop = 0
    for piece in sorted(pieces, key=lambda piece: (piece.file, piece.offset)):
        if request_pieces:
            is_other_file = piece.file != request_pieces[0].file
            is_behind_gap = piece.offset - stop >= max(gap_bytes, 1)
            is_too_long = piece.stop - start > _REQUEST_BYTES
            if is_other_file or is_behind_gap or is_too_long:
                yield Request(start=start, stop=stop, pieces=request_pieces)
                request_pieces = []
        if not request_pieces:
            start = stop = piece.offset
        request_pieces.append(piece)
        stop = max(stop, piece.stop)
    if request_pieces:
        yield Request(start=start, stop=stop, pieces=request_pieces)


@dataclasses.dataclass
class ObjectFiles:
    """The objects of one load, with the operations of `Files`.

    **Arguments:**

    - `place`: their place.
    - `limit_bytes`: the limit for the bytes of all requests under way.
    - `gap_bytes`: shorter gaps are read too.
    - `copier`: the thread that copies.
    - `batch_bytes`: the bytes that one call of `read` should read.
    """

    place: ObjectPlace
    limit_bytes: int
    gap_bytes: int
    copier: concurrent.futures.Executor
    batch_bytes: int = _REQUEST_BYTES
    _reserved_bytes: int = 0
    _changed: threading.Condition = dataclasses.field(
        default_factory=threading.Condition
    )

    def read(self, reads: Sequence[Read]) -> int:
        """Reads bytes of objects into the memory of `reads`, and returns the number of
        bytes.
        """
        pieces: list[ObjectRange] = []
        scratch: list[tuple[Read, np.ndarray]] = []
        for read in reads:
            # Elements that change their order or their dtype take a copy.
            memories = memory_in_place(read)
            if memories is None:
                memory = np.empty(read.span.nbytes, np.uint8)
                memories = [memory]
                scratch.append((read, memory))
            pieces += pieces_of(read, memories)
        requests = list(requests_of(pieces, self.gap_bytes))
        answer_bytes = sum(request.nbytes for request in requests)
        scratch_bytes = sum(memory.size for _, memory in scratch)
        nbytes = scratch_bytes + int(_MEMORY_PER_BYTE * answer_bytes)
        if nbytes > self.limit_bytes and len(reads) > 1:
            half = len(reads) // 2
            return self.read(reads[:half]) + self.read(reads[half:])
        with self._reserved(min(nbytes, self.limit_bytes)):
            self._answer(requests)
            for read, memory in scratch:
                copy_parts(read, memory)
        return sum(read.span.nbytes for read in reads)

    @contextlib.contextmanager
    def _reserved(self, nbytes: int) -> Iterator[None]:
        """A context in which `nbytes` of the limit are taken. Entering it waits."""
        with self._changed:
            most_bytes = self.limit_bytes - nbytes
            self._changed.wait_for(lambda: self._reserved_bytes <= most_bytes)
            self._reserved_bytes += nbytes
        try:
            yield
        finally:
            with self._changed:
                self._reserved_bytes -= nbytes
                self._changed.notify_all()

    def _answer(self, requests: Sequence[Request]) -> None:
        """Sends all requests, and copies each answer to the memory of its pieces.

        Raises `CheckpointError` for an object that ends within a request.
        """
        keys = [self.place.key_of(request.pieces[0].file) for request in requests]
        futures = [
            self.place.begin_read(key, request.start, request.stop)
            for key, request in zip(keys, requests, strict=True)
        ]
        for number, (key, request) in enumerate(zip(keys, requests, strict=True)):
            try:
                answer = self.place.answer(futures[number], key)
            except ShortError as error:
                raise CheckpointError(
                    f"{self.place.what(key)} ends before byte {request.stop}, within"
                    f" array {quoted(request.pieces[-1].path)} or one near it; it is"
                    " truncated. Copy the whole file."
                ) from error
            futures[number] = None
            # TensorStore's bytes and Python's are there at once for one request only.
            # In one thread, since `malloc` keeps freed memory for each thread.
            self.copier.submit(_copy_in, answer, request).result()
            del answer


def _copy_in(answer: Any, request: Request) -> None:
    """Copies the answer of TensorStore to the memory of the request's pieces."""
    data = np.frombuffer(answer.value, np.uint8)
    for piece in request.pieces:
        begin = piece.offset - request.start
        piece.memory[:] = data[begin : begin + piece.memory.size]


@contextlib.contextmanager
def open_objects(
    place: ObjectPlace,
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
            place=place,
            limit_bytes=read_limit_bytes,
            gap_bytes=gap_bytes,
            copier=copier,
        )
