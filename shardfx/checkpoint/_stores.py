"""Arrays in chunks: zarr directories and OCDBT databases.

This module reads their JSON metadata, and tensorstore reads their values.
"""

import math
import os
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from .._ground.boxes import Box, box_slices, volume
from .._ground.errors import CheckpointError
from .._ground.spec import DType
from .._ground.text import printable, quoted
from ._chunk_sizes import require_bounded
from ._entry import StoreArray, fill, itemsize, may_change
from ._files import (
    is_shape,
    is_sizes,
    member,
    parsed_json,
    read_json,
)
from ._place import Place


# The treatment of a missing chunk: an error, or the array's fill value.
MissingChunks = Literal["raise", "fill"]

OCDBT_MANIFEST = "manifest.ocdbt"
_CACHE_BYTES = 128 * 2**20
# Chunks up to this size may be larger than their array; larger chunks must be about as
# large as it.
_CHUNK_BYTES = 2**30
_WIDEST_BYTES = 16
# A part of tensorstore's error for a missing chunk that it should not fill with zeros.
_MISSING = "is missing"
METADATA = {".zarray": "zarr", "zarr.json": "zarr3"}
_GRID = ("chunk_grid", "configuration", "chunk_shape")
_DTYPES = (
    *(
        "bool",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "int4",
        "uint4",
    ),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *(
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e4m3b11fnuz",
        "float8_e8m0fnu",
    ),
    *("float8_e3m4", "float8_e4m3"),
)
_NAMED: dict[str, Any] = {name: jnp.dtype(name) for name in _DTYPES}
# In zarr 2 the byte order precedes the kind and the size: "<f4", or "|b1" if there is
# none.
_NAMED |= {
    np.dtype(name).str: np.dtype(name)
    for name in _DTYPES
    if np.dtype(name).kind in "biufc"
}
_NAMED |= {
    text.replace("<", ">"): dtype for text, dtype in _NAMED.items() if text[0] == "<"
}


def dtype_named(text: str) -> DType:
    """The dtype that zarr or eformer metadata names; `None` if JAX lacks it."""
    # Never `np.dtype(text)`, since NumPy evaluates parts of the text.
    return _NAMED.get(text)


def zarr_entries(place: Place) -> tuple[StoreArray, ...]:
    """The zarr arrays of version 2 or 3 in a checkpoint's directory and below it, in
    the order of `place.directories()`.
    """
    entries = []
    for name, directory_path in place.directories():
        entry = entry_in(place, name, directory_path)
        if entry is not None:
            entries.append(entry)
    return tuple(entries)


def entry_in(place: Place, path: str, directory: str) -> StoreArray | None:
    """The zarr array in `directory`, with the name `path`; `None` if the directory has
    no array's metadata.
    """
    for name, driver in METADATA.items():
        file = os.path.join(directory, name)
        if place.has_file(file):
            relative = os.path.relpath(file, place.directory)
            file_path = place.inside(relative)
            entry = _zarr_entry(
                path=path,
                file=directory,
                key=None,
                content=read_json(place, file_path),
                driver=driver,
                shown_name=quoted(file_path),
            )
            if entry is not None:
                return entry
    return None


def _zarr_entry(
    path: str,
    file: str,
    key: str | None,
    content: Any,
    driver: str,
    shown_name: str,
) -> StoreArray | None:
    """The zarr array that the JSON metadata `content` describes; `None` for the
    metadata of a group.

    `path`, `file`, `key` and `driver` become the fields of the result with these names.
    `shown_name` is the name of the metadata in errors.
    """
    if driver == "zarr3" and member(content, "node_type") == "group":
        return None
    shape = member(content, "shape")
    if driver == "zarr":
        stored = member(content, "dtype")
        chunks = member(content, "chunks")
    else:
        stored = member(content, "data_type")
        chunks = member(content, *_GRID)
    are_sizes = is_shape(shape) and is_sizes(chunks)
    if not are_sizes or len(chunks) != len(shape) or not all(chunks):
        raise CheckpointError(
            f"{shown_name} describes no zarr array: its shape and chunks must be lists"
            " of as many sizes, and their product below 2**59."
        )
    if not isinstance(stored, str):
        stored = str(stored)[:80]
    return StoreArray(
        path=path,
        shape=tuple(shape),
        dtype=dtype_named(stored),
        file=file,
        stored=stored,
        chunks=tuple(chunks),
        driver=driver,
        key=key,
    )


def ocdbt_entries(place: Place) -> tuple[StoreArray, ...]:
    """The zarr arrays in the OCDBT database of a checkpoint's directory, by key."""
    import tensorstore as ts

    place.require_plain_tree(place.directory)
    with place.opened(place.inside(OCDBT_MANIFEST)) as file:
        # From now on the file must not change. In a store, a read begins that.
        file.read(1, 0)
    try:
        seconds = place.timeout(0)
        opening = ts.KvStore.open(ocdbt(place, place.directory))
        store = opening.result(timeout=seconds)
        listing = store.list().result(timeout=seconds)
        keys = sorted(key.decode() for key in listing)
        reads = []
        for key in keys:
            path, _, name = key.rpartition("/")
            if name in METADATA:
                reads.append((path, name, key, store.read(key)))
        entries = []
        for path, name, key, read in reads:
            shown_name = f"{quoted(key)} in {place.directory!r}"
            value = read.result(timeout=seconds).value
            entry = _zarr_entry(
                path=path,
                file=place.directory,
                key=path,
                content=parsed_json(value, shown_name),
                driver=METADATA[name],
                shown_name=shown_name,
            )
            if entry is not None:
                entries.append(entry)
    except (ValueError, OSError) as error:
        raise unreadable(place.directory, error) from error
    return tuple(entries)


def require_possible(entries: Iterable[StoreArray], place: Place) -> None:
    """Raises `CheckpointError` for an array with too large chunks, a pipe, or a link
    that leads out of the checkpoint.

    tensorstore checks none of this. It decodes a chunk in memory as a whole, and a
    chunk that exceeds the memory ends the process.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for directory in dict.fromkeys(entry.file for entry in entries):
        place.require_plain_tree(directory)
    for entry in entries:
        element = _WIDEST_BYTES if entry.dtype is None else itemsize(entry.dtype)
        chunk_bytes = math.prod(entry.chunks) * element
        array_bytes = math.prod(entry.shape) * element
        if chunk_bytes > min(memory, max(_CHUNK_BYTES, 2 * array_bytes)):
            raise CheckpointError(
                f"array {quoted(entry.path)} of {array_bytes} bytes claims chunks of"
                f" {entry.chunks}, {chunk_bytes} bytes each; that is more than its own"
                " size"
                f" or than the memory of this machine, {memory} bytes. The metadata in"
                f" {quoted(entry.file)} is damaged or forged."
            )


def ocdbt(place: Place, directory: str, key: str = "") -> dict[str, Any]:
    """The tensorstore spec of a key in the OCDBT database of a directory."""
    path = f"{key}/" if key else ""
    return {"driver": "ocdbt", "base": place.kvstore(directory), "path": path}


def unreadable(what: str, error: Exception) -> CheckpointError:
    """The error for the file named `what`, which a library could not read. It has the
    first line of `error`.
    """
    if isinstance(error, TimeoutError):
        return CheckpointError(
            f"reading {quoted(what)} got no answer in time; the store or the network"
            " stalls. Try again, or give a longer `timeout_seconds`."
        )
    message = str(error) or repr(error)
    text = message.splitlines()[0][:300]
    return CheckpointError(
        f"checkpoint {quoted(what)} cannot be read: {printable(text)}"
    )


def read_into(
    place: Place,
    entry: StoreArray,
    boxes: Sequence[Box],
    targets: Sequence[np.ndarray],
    *,
    missing_chunks: MissingChunks = "raise",
) -> int:
    """Reads `boxes` of an array into `targets`, one array for each box, and casts the
    values to the dtype of each.

    Returns the number of bytes of the targets.
    """
    import tensorstore as ts

    # Chunks that two boxes share are decoded once if they can be kept in memory.
    cache_bytes = 0 if all(_is_aligned(entry, box) for box in boxes) else _CACHE_BYTES
    context = ts.Context({"cache_pool": {"total_bytes_limit": cache_bytes}})
    spec = _spec_of(place, entry) | {
        "fill_missing_data_reads": missing_chunks == "fill"
    }
    try:
        seconds = place.timeout(sum(target.nbytes for target in targets))
        opening = ts.open(spec, open=True, read=True, context=context)
        array = opening.result(timeout=seconds)
        require_bounded(place, array, entry, boxes)
        reads = [
            _begin_read(ts, array, box, target)
            for box, target in zip(boxes, targets, strict=True)
        ]
        for (read, staged), target in zip(reads, targets, strict=True):
            read.result(timeout=seconds)
            if staged is not None:
                fill(target, staged, entry.path)
    except CheckpointError:
        raise
    except (ValueError, OSError) as error:
        if _MISSING in str(error):
            raise CheckpointError(
                f"array {quoted(entry.path)}: a chunk is missing in"
                f" {quoted(entry.file)}. It was lost, and the array with it; or it held"
                " nothing but the fill value, and who wrote it left such chunks out,"
                " which zarr allows. If you know that this is so, load with"
                ' `missing_chunks="fill"`.'
            ) from error
        raise unreadable(f"{entry.file}, array {entry.path}", error) from error
    return sum(target.nbytes for target in targets)


def _spec_of(place: Place, entry: StoreArray) -> dict[str, Any]:
    """The tensorstore spec of an array. It states the array's metadata, so that
    tensorstore raises if they changed.
    """
    kvstore = place.kvstore(entry.file)
    if entry.key is not None:
        kvstore = ocdbt(place, entry.file, entry.key)
    grid: dict[str, Any] = {"chunks": list(entry.chunks)}
    if entry.driver == "zarr3":
        grid = {
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": list(entry.chunks)},
            }
        }
    return {
        "driver": entry.driver,
        "kvstore": kvstore,
        "metadata": {"shape": list(entry.shape)} | grid,
    }


def _begin_read(
    ts: Any,
    array: Any,
    box: Box,
    target: np.ndarray,
) -> tuple[Any, np.ndarray | None]:
    """Starts to read a box of `array` into `target`. Returns the future, and `None` or
    another buffer.

    If a cast to the dtype of `target` may change values, they are read into this other
    buffer instead. The caller then casts and checks them. `ts` is the tensorstore
    module.
    """
    source = array
    if box:
        # tensorstore keeps the indices of the array, and `target` begins at 0.
        source = array[box_slices(box)][ts.d[:].translate_to[0]]
    stored = source.dtype.numpy_dtype
    if may_change(stored, target.dtype):
        staged = np.empty(target.shape, stored)
        staging = ts.array(staged, copy=False)
        return staging.write(source), staged
    if stored != target.dtype:
        source = ts.cast(source, ts.dtype(target.dtype))
    memory = ts.array(target, copy=False)
    return memory.write(source), None


def _is_aligned(entry: StoreArray, box: Box) -> bool:
    return all(
        start % chunk == 0 and (stop % chunk == 0 or stop == size)
        for (start, stop), chunk, size in zip(
            box, entry.chunks, entry.shape, strict=True
        )
    )


def chunk_bytes(entry: StoreArray, box: Box) -> int:
    """The uncompressed bytes of the chunks that a box overlaps, without the parts
    beyond the end of the array.
    """
    count = 1
    for (start, stop), chunk, size in zip(box, entry.chunks, entry.shape, strict=True):
        chunk_start = start // chunk * chunk
        chunk_stop = min(-(-stop // chunk) * chunk, size)
        count *= chunk_stop - chunk_start if stop > start else 0
    return count * np.dtype(entry.dtype).itemsize if volume(box) else 0
