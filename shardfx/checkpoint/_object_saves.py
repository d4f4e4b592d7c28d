"""Saves to a store: data objects first, then one small object that makes the step exist.

A store has no rename. So the arrays are written as safetensors files below
`data-SECONDS-TOKEN/`, a name that no other save has, and the index of the set names
them. The index is written with the condition that there is none. A save that is killed
before leaves a directory of data that no index names.

An array that is spread over processes, or larger than a file, is written in parts, each
a tensor of its own. The metadata of a file says which part of which array it is.
"""

import concurrent.futures
import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._ground.boxes import Box, box_shape, box_start, slices, volume
from .._ground.errors import CheckpointError
from .._ground.text import quoted
from . import _safetensors as safetensors
from ._address import Address
from ._coordination import SaveProcesses
from ._entry import fill
from ._leaves import Leaves, shards_of
from ._objects import ObjectPlace
from ._parts import FILES_KEY, PARTS_KEY, PLAN_FILE_KEY, SET_INDEX, SavedPart
from ._staging import PLAN


# An object is held in memory while it is sent.
OBJECT_BYTES = 32 * 2**20
# The largest object that S3 takes in one request.
_MOST_OBJECT_BYTES = 5 * 2**30
_WORKERS = 8
_CLEANUP_SECONDS = 5.0


class SavedPiece(NamedTuple):
    """A part of an array to write: the array's name and dtype, the part, its values."""

    name: str
    dtype: Any
    part: SavedPart
    values: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.values.size * self.dtype.itemsize

    @property
    def tensor(self) -> str:
        """The name of the piece in its file."""
        if self.part.is_whole:
            return self.name
        return f"{self.name}#{','.join(map(str, self.part.start))}"


class Target(NamedTuple):
    """The place of a save in a store: its address, and the directory of its data."""

    place: ObjectPlace
    data: str

    def key(self, name: str) -> str:
        return self.place.address.below(name).path

    @property
    def index_key(self) -> str:
        """The key of the object that makes the step exist."""
        return self.key(SET_INDEX)


def _require_absent(target: Target, key: str) -> None:
    """Raises `CheckpointError` if the object that makes a checkpoint exist is there."""
    if target.place.read(key, 0, 1) is not None:
        raise CheckpointError(
            f"{target.place.directory!r} exists, and nothing was changed; save to a new"
            " name, or remove it first."
        )


def _require_object_bytes(file_bytes: int) -> None:
    """Raises `CheckpointError` if objects may become larger than stores take."""
    if not 0 < file_bytes <= _MOST_OBJECT_BYTES:
        raise CheckpointError(
            f"`file_bytes={file_bytes}` is no size of an object: one request takes from"
            f" 1 to {_MOST_OBJECT_BYTES} bytes; leave it out for {OBJECT_BYTES}."
        )


def saved_pieces(
    leaves: Leaves,
    is_first: bool,
    most_bytes: int,
) -> Iterator[SavedPiece]:
    """Yields the pieces of all arrays that this process writes, each of at most
    `most_bytes`.
    """
    for name, value in leaves.arrays:
        shape = tuple(value.shape)
        dtype = np.dtype(value.dtype)
        if not np.prod(shape, dtype=object):
            if is_first:
                part = SavedPart(
                    path=name,
                    shape=shape,
                    start=(0,) * len(shape),
                    size=shape,
                )
                yield SavedPiece(
                    name=name,
                    dtype=dtype,
                    part=part,
                    values=np.empty(shape, dtype),
                )
            continue
        for box, values in shards_of(value, is_first):
            for inner in _divided(box, dtype.itemsize, most_bytes):
                part = SavedPart(
                    path=name,
                    shape=shape,
                    start=box_start(inner),
                    size=box_shape(inner),
                )
                yield SavedPiece(
                    name=name,
                    dtype=dtype,
                    part=part,
                    values=values[slices(inner, box)],
                )


def _divided(box: Box, itemsize: int, most_bytes: int) -> Iterator[Box]:
    """Yields parts of a box of at most `most_bytes`, or of one element."""
    nbytes = volume(box) * itemsize
    if not nbytes:
        return
    if nbytes <= most_bytes:
        yield box
        return
    dim = next((dim for dim, size in enumerate(box_shape(box)) if size > 1), None)
    if dim is None:
        yield box
        return
    low, high = box[dim]
    row_bytes = nbytes // (high - low)
    step = max(1, most_bytes // row_bytes)
    for start in range(low, high, step):
        inner = (*box[:dim], (start, min(start + step, high)), *box[dim + 1 :])
        yield from _divided(inner, itemsize, most_bytes)


def body_of(
    pieces: Sequence[SavedPiece],
    leaves: Leaves,
    metadata: Mapping[str, str],
) -> bytes:
    """The content of a safetensors file with the pieces."""
    extra = dict(metadata)
    kinds = {
        piece.name: leaves.kinds[piece.name]
        for piece in pieces
        if piece.name in leaves.kinds
    }
    if kinds:
        extra[safetensors.DTYPES_KEY] = json.dumps(kinds)
    parts = {
        piece.tensor: piece.part.to_json()
        for piece in pieces
        if not piece.part.is_whole
    }
    if parts:
        extra[PARTS_KEY] = json.dumps(parts)
    rows = [(piece.tensor, _Struct(piece.part.size, piece.dtype)) for piece in pieces]
    header, offsets = safetensors.write_header(rows, extra)
    total = len(header) + sum(piece.nbytes for piece in pieces)
    body = bytearray(total)
    body[: len(header)] = header
    for piece, offset in zip(pieces, offsets, strict=True):
        if piece.nbytes:
            view = np.ndarray(piece.part.size, piece.dtype, body, offset)
            fill(view, piece.values, piece.name)
    return bytes(body)


class _Struct(NamedTuple):
    shape: tuple[int, ...]
    dtype: Any


class Written(NamedTuple):
    """What a process wrote: the names of its files, and the file of each array, or of
    the first part of it.
    """

    files: list[str]
    weight_map: dict[str, str]

    def to_text(self) -> str:
        return json.dumps([self.files, self.weight_map])


class ObjectContent(NamedTuple):
    """What a save writes: arrays, the metadata of each file, the text of the plan, and
    the bytes of all arrays.
    """

    leaves: Leaves
    metadata: Mapping[str, str]
    plan: str | None
    nbytes: int


class ObjectOptions(NamedTuple):
    """How a save writes: a token that no other save has, the arguments of `save`, and a
    function that is called with the bytes of each object that is there.
    """

    token: str
    overwrite: bool
    file_bytes: int | None
    timeout_seconds: float
    advance: Callable[[int], None]


class Writer:
    """Writes the objects of one process. `write` runs in a thread of its own.

    **Arguments:**

    - `target`: the place of the save.
    - `process`: the number of the process.
    - `advance`: is called with the bytes of each object that is there.
    """

    def __init__(self, target: Target, process: int, advance: Callable[[int], None]):
        self._target = target
        self._process = process
        self._advance = advance
        self.stop = threading.Event()
        self.written = Written([], {})

    def write(
        self,
        leaves: Leaves,
        metadata: Mapping[str, str],
        is_first: bool,
        most_bytes: int,
    ) -> int:
        """Writes all pieces of this process, and returns the number of their bytes."""
        pending: list[concurrent.futures.Future[int]] = []
        total = 0
        with concurrent.futures.ThreadPoolExecutor(_WORKERS, "shardfx-put") as pool:
            try:
                for pieces in _groups(leaves, is_first, most_bytes):
                    if self.stop.is_set():
                        break
                    if len(pending) == _WORKERS:
                        total += self._finished(pending.pop(0))
                    number = len(self.written.files)
                    nbytes = sum(piece.nbytes for piece in pieces)
                    # The size in the name is that of what a killed save left.
                    file = f"{self._process:05}-{number:05}-{nbytes}.safetensors"
                    name = f"{self._target.data}/{file}"
                    self.written.files.append(name)
                    for piece in pieces:
                        self.written.weight_map.setdefault(piece.name, name)
                    arguments = (name, pieces, leaves, metadata)
                    pending.append(pool.submit(self._put, *arguments))
                while pending:
                    total += self._finished(pending.pop(0))
            finally:
                # After an error, no further object is begun.
                self.stop.set()
        return total

    def _finished(self, future: concurrent.futures.Future[int]) -> int:
        nbytes = future.result()
        self._advance(nbytes)
        return nbytes

    def _put(
        self,
        name: str,
        pieces: Sequence[SavedPiece],
        leaves: Leaves,
        metadata: Mapping[str, str],
    ) -> int:
        if self.stop.is_set():
            return 0
        self._target.place.write(
            self._target.key(name), body_of(pieces, leaves, metadata)
        )
        return sum(piece.nbytes for piece in pieces)


def _groups(
    leaves: Leaves,
    is_first: bool,
    most_bytes: int,
) -> Iterator[list[SavedPiece]]:
    """Yields the pieces of each file. The first process has at least one file, which
    has the metadata.
    """
    group: list[SavedPiece] = []
    group_bytes = 0
    count = 0
    for piece in saved_pieces(leaves, is_first, most_bytes):
        if group and group_bytes + piece.nbytes > most_bytes:
            yield group
            count += 1
            group = []
            group_bytes = 0
        group.append(piece)
        group_bytes += piece.nbytes
    if group or (is_first and not count):
        yield group


def _commit(target: Target, texts: Mapping[int, str], content: ObjectContent) -> bool:
    """Writes the index, which makes the step exist. `texts` has what each process
    wrote. Returns `False` if another saver was faster.

    Raises `CheckpointError` if data is gone.
    """
    files: list[str] = []
    weight_map: dict[str, str] = {}
    for process in sorted(texts):
        names, own_map = json.loads(texts[process])
        files += names
        for name, file in own_map.items():
            weight_map.setdefault(name, file)
    ordered = {name: weight_map[name] for name, _ in content.leaves.arrays}
    _require_there(target, files)
    metadata: dict[str, Any] = {"total_size": content.nbytes, FILES_KEY: files}
    if content.plan is not None:
        name = f"{target.data}/{PLAN}"
        metadata[PLAN_FILE_KEY] = name
        target.place.write(target.key(name), content.plan.encode())
    index = {"metadata": metadata, "weight_map": ordered}
    data = json.dumps(index, indent=1).encode()
    return target.place.write_new(target.index_key, data)


def _beaten(target: Target) -> CheckpointError:
    return CheckpointError(
        f"{target.place.directory!r} appeared while this was saving, from another"
        " writer, and stays as it is; save to another name."
    )


def _require_there(target: Target, files: Sequence[str]) -> None:
    """Raises `CheckpointError` if an object that was written is gone, as `clean` may
    have removed it.
    """
    place = target.place
    listed = set(place.keys_below(target.key(target.data)))
    # A listing may lag behind, a read does not.
    late = [name for name in files if name.rpartition("/")[2] not in listed]
    gone = [name for name in late if place.read(target.key(name), 0, 1) is None]
    if gone:
        raise CheckpointError(
            f"saving to {place.directory!r}: the object {quoted(gone[0])} was removed"
            " while the save was under way, as by `clean` with a short time; nothing"
            " was changed. Save again."
        )


def save_objects(
    address: Address,
    processes: SaveProcesses,
    afterwards: contextlib.ExitStack,
    content: ObjectContent,
    options: ObjectOptions,
) -> None:
    """Writes a checkpoint to a store, together with the other processes."""
    place = ObjectPlace(address, options.timeout_seconds)
    target = Target(place, f"data-{int(processes.began_at)}-{options.token}")
    # It is closed after the pool, when this process writes no more objects.
    cleanup = contextlib.ExitStack()
    afterwards.push(cleanup)
    pool = concurrent.futures.ThreadPoolExecutor(1, "shardfx-save")
    afterwards.callback(pool.shutdown, wait=True, cancel_futures=True)
    if address.name.endswith(".safetensors"):
        _save_file(
            target=target,
            processes=processes,
            pool=pool,
            content=content,
            options=options,
        )
        return
    most_bytes = OBJECT_BYTES if options.file_bytes is None else options.file_bytes
    _require_object_bytes(most_bytes)
    processes.run_on_first(lambda: _require_absent(target, target.index_key))
    if processes.is_first:
        # What cannot be removed now is found by `left_over`.
        cleanup.callback(_remove_data, target)
    writer = Writer(target, processes.me, options.advance)
    afterwards.callback(writer.stop.set)
    arguments = (content.leaves, content.metadata, processes.is_first, most_bytes)
    writes = [pool.submit(writer.write, *arguments)]

    def commit_once(texts: Mapping[int, str]) -> None:
        # If the answer to the index is lost, it may be there, and needs its data.
        removal = cleanup.pop_all()
        if not _commit(target, texts, content):
            removal.close()
            raise _beaten(target)

    processes.finish(
        writes,
        lambda _: None,
        content.nbytes,
        commit_once,
        lambda: writer.written.to_text(),
    )


def _save_file(
    target: Target,
    processes: SaveProcesses,
    pool: concurrent.futures.Executor,
    content: ObjectContent,
    options: ObjectOptions,
) -> None:
    """Writes all arrays as one object, whose name ends in `.safetensors`."""
    place = target.place
    if len(processes.members) > 1:
        raise CheckpointError(
            f"{place.directory!r} is one object, which several processes cannot write;"
            " save to a directory: leave out `.safetensors`."
        )
    if not options.overwrite:
        _require_absent(target, place.address.path)
    metadata = dict(content.metadata)
    if content.plan is not None:
        metadata[safetensors.PLAN_KEY] = content.plan
    pieces = list(saved_pieces(content.leaves, True, _MOST_OBJECT_BYTES))
    is_whole = all(piece.part.is_whole for piece in pieces)
    if content.nbytes > _MOST_OBJECT_BYTES or not is_whole:
        raise CheckpointError(
            f"{place.directory!r} would be one object with {content.nbytes} bytes, or"
            " with arrays in parts, which stores do not take; save to a directory: leave"
            " out `.safetensors`."
        )

    def write(_: Mapping[int, str]) -> None:
        body = body_of(pieces, content.leaves, metadata)
        if options.overwrite:
            place.write(place.address.path, body)
        elif not place.write_new(place.address.path, body):
            raise _beaten(target)
        options.advance(content.nbytes)

    counted = [pool.submit(lambda: content.nbytes)]
    processes.finish(counted, lambda _: None, content.nbytes, write)


def _remove_data(target: Target) -> None:
    """Removes the data of a save that failed, if the store answers."""
    seconds = min(target.place.timeout_seconds, _CLEANUP_SECONDS)
    place = ObjectPlace(target.place.address, seconds)
    with contextlib.suppress(CheckpointError):
        place.delete_below(target.key(target.data))
