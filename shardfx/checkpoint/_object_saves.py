"""Saves to a store: data objects first, then one small object that makes the step
exist.

A store has no rename. So the arrays are written as safetensors files below
`data-SECONDS-TOKEN/`, a name that no other save has, and the index of the set names
them. The index is written with the condition that there is none. A save that is killed
before leaves a directory of data that no index names.

An array that is spread over processes, or larger than a file, is written in parts, each
a tensor of its own. The metadata of a file says which part of which array it is.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._ground.boxes import Box, box_shape, box_start, slices, volume, whole_box
from .._ground.errors import CheckpointError
from .._ground.text import quoted
from . import _safetensors as safetensors
from ._coordination import SaveProcesses
from ._entry import fill
from ._leaves import BoxValues, Leaves, shards_of
from ._objects import ObjectPlace
from ._parts import FILES_KEY, PARTS_KEY, PLAN_FILE_KEY, SET_INDEX, SavedPart
from ._saved_content import SavedContent, array_bytes
from ._spans import grouped
from ._staging import PLAN


# An object is held in memory while it is sent.
OBJECT_BYTES = 32 * 2**20
# The largest object that S3 takes in one request.
_MOST_OBJECT_BYTES = 5 * 2**30
_WORKERS = 8
_CLEANUP_SECONDS = 5.0


class SavedPiece(NamedTuple):
    """A part of an array to write, its dtype and its values."""

    part: SavedPart
    dtype: Any
    values: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.part.size

    @property
    def nbytes(self) -> int:
        return self.values.size * self.dtype.itemsize

    @property
    def tensor(self) -> str:
        """The name of the piece in its file."""
        if self.part.is_whole:
            return self.part.path
        return f"{self.part.path}#{','.join(map(str, self.part.start))}"


def saved_pieces(
    leaves: Leaves,
    is_first: bool,
    most_bytes: int,
) -> Iterator[SavedPiece]:
    """Yields the pieces of all arrays that this process writes, each of at most
    `most_bytes`.
    """
    for path, value in leaves.arrays:
        shape = tuple(value.shape)
        dtype = np.dtype(value.dtype)
        shards = shards_of(value, is_first)
        if 0 in shape:
            # All shards are empty, and the first process writes one of them.
            if not is_first:
                continue
            shards = iter([(whole_box(shape), np.empty(shape, dtype))])
        for box, values in shards:
            for inner in _parts_of_box(box, dtype.itemsize, most_bytes):
                part = SavedPart(
                    path=path,
                    shape=shape,
                    start=box_start(inner),
                    size=box_shape(inner),
                )
                yield SavedPiece(
                    part=part,
                    dtype=dtype,
                    values=values[slices(inner, box)],
                )


def _parts_of_box(box: Box, itemsize: int, most_bytes: int) -> Iterator[Box]:
    """Yields parts of a box of at most `most_bytes`, or of one element. The box is
    divided along its first dimension with more than one element, so that each part is
    contiguous in it.
    """
    nbytes = volume(box) * itemsize
    dims = [dim for dim, size in enumerate(box_shape(box)) if size > 1]
    if nbytes <= most_bytes or not dims:
        yield box
        return
    dim = dims[0]
    low, high = box[dim]
    step = max(1, most_bytes * (high - low) // nbytes)
    for start in range(low, high, step):
        inner = (*box[:dim], (start, min(start + step, high)), *box[dim + 1 :])
        yield from _parts_of_box(inner, itemsize, most_bytes)


def body_of(
    tensors: Sequence[tuple[str, Any]],
    shards: Iterable[Iterable[BoxValues]],
    metadata: Mapping[str, str],
) -> bytes:
    """The content of a safetensors file. `tensors` are pairs of a name and a value with
    a shape and a dtype, and `shards` has the boxes of each with their values.
    """
    header, offsets = safetensors.write_header(tensors, dict(metadata))
    sizes = [array_bytes(value) for _, value in tensors]
    body = bytearray(len(header) + sum(sizes))
    body[: len(header)] = header
    for (name, value), offset, boxes in zip(tensors, offsets, shards, strict=True):
        whole = np.ndarray(value.shape, value.dtype, body, offset)
        for box, values in boxes:
            fill(whole[slices(box, whole_box(value.shape))], values, name)
    return bytes(body)


@dataclasses.dataclass
class ObjectSave:
    """The part of one process in a save to a store. `write` runs in a thread of its
    own.

    **Arguments:**

    - `place`: the checkpoint.
    - `data`: the directory of its data.
    - `process`, `is_first`: the number of the process, and whether it writes what all
      processes have.
    - `content`: what is saved.
    - `most_bytes`: the most bytes of arrays in an object.
    - `advance`: is called with the bytes of each object that is there.
    - `files`: the names of the files of the process, each with those of its arrays.
    - `stop`: whether no further object is to be written.
    """

    place: ObjectPlace
    data: str
    process: int
    is_first: bool
    content: SavedContent
    most_bytes: int
    advance: Callable[[int], None]
    files: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    stop: threading.Event = dataclasses.field(default_factory=threading.Event)

    def key(self, name: str) -> str:
        """The key of the file `name` of the checkpoint in the store."""
        return self.place.address.below(name).path

    def write(self) -> int:
        """Writes all pieces of this process, and returns the number of their bytes."""
        written_bytes = 0
        with concurrent.futures.ThreadPoolExecutor(_WORKERS, "shardfx-put") as pool:
            for upload in self._uploads(pool):
                nbytes = upload.result()
                self.advance(nbytes)
                written_bytes += nbytes
        return written_bytes

    def _uploads(
        self,
        pool: concurrent.futures.Executor,
    ) -> Iterator[concurrent.futures.Future[int]]:
        """Yields the uploads of all files. The next one begins when the first of those
        under way is done.
        """
        leaves = self.content.leaves
        pieces = saved_pieces(leaves, self.is_first, self.most_bytes)
        groups = grouped(pieces, lambda piece: piece.nbytes, self.most_bytes)
        if self.is_first and not leaves.arrays:
            # A file has the metadata.
            groups = iter([[]])
        under_way = collections.deque[concurrent.futures.Future[int]]()
        for number, group in enumerate(groups):
            if len(under_way) == _WORKERS:
                yield under_way.popleft()
            if self.stop.is_set():
                break
            nbytes = sum(piece.nbytes for piece in group)
            # The size in the name is that of what a killed save left.
            file = f"{self.process:05}-{number:05}-{nbytes}.safetensors"
            name = f"{self.data}/{file}"
            self.files[name] = [piece.part.path for piece in group]
            under_way.append(pool.submit(self._put, name, group))
        yield from under_way

    def _put(self, name: str, pieces: Sequence[SavedPiece]) -> int:
        """Writes one file with these pieces, and returns the number of their bytes. The
        metadata says of which array each tensor, with the name `piece.tensor`, is a
        part.
        """
        paths = [piece.part.path for piece in pieces]
        dtype_names = self.content.leaves.dtype_names
        metadata_of_dtypes = safetensors.metadata_of_dtypes(paths, dtype_names)
        metadata = {**self.content.metadata, **metadata_of_dtypes}
        parts = {
            piece.tensor: piece.part.to_json()
            for piece in pieces
            if not piece.part.is_whole
        }
        if parts:
            metadata[PARTS_KEY] = json.dumps(parts)
        tensors = [(piece.tensor, piece) for piece in pieces]
        shards = [[(whole_box(piece.shape), piece.values)] for piece in pieces]
        self.place.write(self.key(name), body_of(tensors, shards, metadata))
        return sum(piece.nbytes for piece in pieces)

    def commit(self, texts: Mapping[int, str]) -> bool:
        """Writes the index, which makes the step exist. `texts` has `files` of each
        process as JSON. Returns `False` if another saver was faster.

        Raises `CheckpointError` if data is gone.
        """
        files: dict[str, list[str]] = {}
        for process in sorted(texts):
            files |= json.loads(texts[process])
        self._require_there(files)
        # An array in parts is in several files.
        weight_map = {path: "" for path, _ in self.content.leaves.arrays}
        for file, paths in files.items():
            for path in paths:
                weight_map[path] = weight_map[path] or file
        metadata: dict[str, Any] = {
            "total_size": self.content.nbytes,
            FILES_KEY: list(files),
        }
        if self.content.plan_text is not None:
            name = f"{self.data}/{PLAN}"
            metadata[PLAN_FILE_KEY] = name
            self.place.write(self.key(name), self.content.plan_text.encode())
        index = {"metadata": metadata, "weight_map": weight_map}
        data = json.dumps(index, indent=1).encode()
        return self.place.write_new(self.key(SET_INDEX), data)

    def _require_there(self, files: Iterable[str]) -> None:
        """Raises `CheckpointError` if an object that was written is gone, as `clean`
        may have removed it.
        """
        names = list(files)
        # A listing may lag behind, a read does not.
        are_there = self.place.each(
            lambda name: self.place.holds(self.key(name)), names
        )
        if not all(are_there):
            name = names[are_there.index(False)]
            raise CheckpointError(
                f"saving to {self.place.directory!r}: the object {quoted(name)} was"
                " removed while the save was under way, as by `clean` with a short"
                " time; nothing was changed. Save again."
            )

    def remove(self) -> None:
        """Removes the data of a save that failed, if the store answers."""
        seconds = min(self.place.timeout_seconds, _CLEANUP_SECONDS)
        place = ObjectPlace(self.place.address, seconds)
        with contextlib.suppress(CheckpointError):
            place.delete_below(self.key(self.data))


def _require_absent(place: ObjectPlace, key: str, fix: str) -> None:
    """Raises `CheckpointError` with a fix if the object that makes a checkpoint exist
    is there.
    """
    if place.holds(key):
        raise CheckpointError(
            f"{place.directory!r} exists, and nothing was changed; {fix}, or remove it"
            " first."
        )


def _error_for_other_writer(place: ObjectPlace) -> CheckpointError:
    """The error for a checkpoint that another writer has made in the meantime."""
    return CheckpointError(
        f"{place.directory!r} appeared while this was saving, from another writer, and"
        " stays as it is; save to another name."
    )


def save_objects(
    place: ObjectPlace,
    processes: SaveProcesses,
    afterwards: contextlib.ExitStack,
    content: SavedContent,
    overwrite: bool,
    file_bytes: int,
    token: str,
    advance: Callable[[int], None],
) -> None:
    """Writes a checkpoint to a store, together with the other processes.

    `afterwards` is closed at the end of the save, once the other processes know of an
    error. `file_bytes` is the most bytes of an object, `token` is a text that no other
    save has, and `advance` is called with the bytes of each object that is there.
    """
    if place.address.name.endswith(".safetensors"):
        _save_file(place, processes, content, overwrite)
        return
    if not 0 < file_bytes <= _MOST_OBJECT_BYTES:
        raise CheckpointError(
            f"`file_bytes={file_bytes}` is no size of an object: one request takes from"
            f" 1 to {_MOST_OBJECT_BYTES} bytes; leave it out for {OBJECT_BYTES}."
        )
    save = ObjectSave(
        place=place,
        data=f"data-{int(processes.began_at)}-{token}",
        process=processes.me,
        is_first=processes.is_first,
        content=content,
        most_bytes=file_bytes,
        advance=advance,
    )
    index_key = save.key(SET_INDEX)
    processes.run_on_first(
        lambda: _require_absent(place, index_key, "save to a new name")
    )
    # It removes what was written, and is closed after the pool, when this process
    # writes no more objects.
    cleanup = contextlib.ExitStack()
    afterwards.push(cleanup)
    if processes.is_first:
        # What cannot be removed now is found by `left_over`.
        cleanup.callback(save.remove)
    pool = concurrent.futures.ThreadPoolExecutor(1, "shardfx-save")
    afterwards.callback(pool.shutdown, wait=True, cancel_futures=True)
    afterwards.callback(save.stop.set)

    def commit(texts: Mapping[int, str]) -> None:
        # If the answer to the index is lost, it may be there, and needs its data.
        removal = cleanup.pop_all()
        if not save.commit(texts):
            removal.close()
            raise _error_for_other_writer(place)

    processes.finish(
        futures=[pool.submit(save.write)],
        advance=lambda _: None,
        total_bytes=content.nbytes,
        commit=commit,
        text_of_process=lambda: json.dumps(save.files),
    )


def _save_file(
    place: ObjectPlace,
    processes: SaveProcesses,
    content: SavedContent,
    overwrite: bool,
) -> None:
    """Writes all arrays as one object, whose name ends in `.safetensors`."""
    key = place.address.path
    if len(processes.members) > 1 or content.nbytes > _MOST_OBJECT_BYTES:
        raise CheckpointError(
            f"{place.directory!r} would be one object with {content.nbytes} bytes,"
            f" which one process writes, up to {_MOST_OBJECT_BYTES} bytes; save to a"
            " directory: leave out `.safetensors`."
        )
    if not overwrite:
        _require_absent(place, key, "pass `overwrite=True` to replace it")
    arrays = content.leaves.arrays
    paths = [path for path, _ in arrays]
    dtype_names = content.leaves.dtype_names
    metadata_of_dtypes = safetensors.metadata_of_dtypes(paths, dtype_names)
    metadata = {**content.metadata, **metadata_of_dtypes}
    if content.plan_text is not None:
        metadata[safetensors.PLAN_KEY] = content.plan_text

    def write(_: Mapping[int, str]) -> None:
        shards = [shards_of(value, True) for _, value in arrays]
        body = body_of(arrays, shards, metadata)
        if overwrite:
            place.write(key, body)
        elif not place.write_new(key, body):
            raise _error_for_other_writer(place)

    processes.finish([], lambda _: None, 0, write)
