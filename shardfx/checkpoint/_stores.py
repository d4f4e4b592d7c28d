"""Arrays in chunks: zarr directories and OCDBT databases. Their metadata is JSON; their values are tensorstore's."""

import functools as ft
import math
import os
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from .._ground.errors import CheckpointError
from .._ground.spec import DType
from .._ground.text import printable, quoted
from ._chunks import Reader, chunk_files, look_in, require_bounded, touched_by
from ._entry import StoreArray, fill, itemsize, may_change
from ._files import FilePlace, inside, opened, parsed_json, read_json, require_plain_tree
from ._spans import Box


MissingChunks = Literal["raise", "fill"]

OCDBT_MANIFEST = "manifest.ocdbt"
_CACHE_BYTES = 128 * 2**20
# Chunks up to this size may be larger than their array; larger ones must be about as large as it.
_CHUNK_BYTES = 2**30
_WIDEST_BYTES = 16
# In tensorstore's error for a chunk that it should not fill in.
_MISSING = "is missing"
METADATA = {".zarray": "zarr", "zarr.json": "zarr3"}
_DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "int4", "uint4"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz", "float8_e8m0fnu"),
    *("float8_e3m4", "float8_e4m3"),
)
_NAMED: dict[str, Any] = {name: jnp.dtype(name) for name in _DTYPES}
# In zarr 2 a byte order goes before the kind and the size: "<f4", or "|b1" where there is none.
_NAMED |= {np.dtype(name).str: np.dtype(name) for name in _DTYPES if np.dtype(name).kind in "biufc"}
_NAMED |= {text.replace("<", ">"): dtype for text, dtype in _NAMED.items() if text[0] == "<"}


def dtype_named(text: str) -> DType:
    """The dtype that a zarr or eformer metadata file names, if JAX has it."""
    # Never `np.dtype(text)`: numpy evaluates parts of what it is given.
    return _NAMED.get(text)


def is_sizes(values: object) -> bool:
    """Whether `values` is a list of non-negative integers that a 64-bit size can hold."""
    return isinstance(values, list) and len(values) <= 64 and all(type(v) is int and 0 <= v < 2**63 for v in values)


def zarr_entries(where: FilePlace) -> tuple[StoreArray, ...]:
    """Every zarr array, version 2 or 3, in or below the directory; by path."""
    found = []
    for directory, directories, files in os.walk(where.directory):
        directories.sort()
        for name in METADATA:
            if name in files:
                path = os.path.relpath(directory, where.directory).replace(os.sep, "/")
                found.append(array_entry(where, path, directory, name))
    return tuple(entry for entry in found if entry is not None)


def array_entry(where: FilePlace, path: str, directory: str, name: str) -> StoreArray | None:
    """The array whose metadata file `name` lies in `directory`; `None` for a zarr group."""
    relative = os.path.relpath(os.path.join(directory, name), where.directory)
    real = inside(where, relative)
    return _described(path, directory, None, read_json(where, real), METADATA[name], quoted(real))


def _described(path: str, file: str, key: str | None, content: Any, driver: str, where: str) -> StoreArray | None:
    if driver == "zarr3" and isinstance(content, dict) and content.get("node_type") == "group":
        return None
    shape, stored, chunks = _fields(content, driver)
    if not is_sizes(shape) or not is_sizes(chunks) or len(chunks) != len(shape) or not all(chunks):
        raise CheckpointError(f"{where} describes no zarr array: its shape and chunks must be lists of as many sizes.")
    if not isinstance(stored, str):
        stored = str(stored)[:80]
    files = chunk_files(content, driver)
    dtype = dtype_named(stored)
    return StoreArray(path, tuple(shape), dtype, file, stored, tuple(chunks), driver, key, files=files)


def _fields(content: object, driver: str) -> tuple[Any, Any, Any]:
    if not isinstance(content, dict):
        return None, None, None
    if driver == "zarr":
        return content.get("shape"), content.get("dtype"), content.get("chunks")
    grid = content.get("chunk_grid")
    configuration = grid.get("configuration") if isinstance(grid, dict) else None
    chunks = configuration.get("chunk_shape") if isinstance(configuration, dict) else None
    return content.get("shape"), content.get("data_type"), chunks


def ocdbt_entries(where: FilePlace) -> tuple[StoreArray, ...]:
    """Every zarr array in the OCDBT database of the directory; by key."""
    import tensorstore as ts

    require_plain_tree(where, where.directory)
    with opened(where, inside(where, OCDBT_MANIFEST)):
        # Now it is among the files that must not change.
        pass
    try:
        store = ts.KvStore.open(ocdbt(where.directory)).result()
        keys = sorted(key.decode() for key in store.list().result())
        parts = [(key, key.rpartition("/")) for key in keys]
        reads = [(path, name, key, store.read(key)) for key, (path, _, name) in parts if name in METADATA]
        found = []
        for path, name, key, read in reads:
            place_of = f"{quoted(key)} in {where.directory!r}"
            content = parsed_json(read.result().value, place_of)
            found.append(_described(path, where.directory, path, content, METADATA[name], place_of))
    except (ValueError, OSError) as error:
        raise unreadable(where.directory, error) from error
    return tuple(entry for entry in found if entry is not None)


def require_possible(entries: Iterable[StoreArray], where: FilePlace) -> None:
    """Checks what tensorstore would act on without a question: the files it opens, and the size of a chunk.

    A chunk is decoded in memory as a whole, and a size that memory does not have ends the process.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for directory in dict.fromkeys(entry.file for entry in entries):
        require_plain_tree(where, directory)
    for entry in entries:
        each = _WIDEST_BYTES if entry.dtype is None else itemsize(entry.dtype)
        chunk, whole = math.prod(entry.chunks) * each, math.prod(entry.shape) * each
        if chunk > min(memory, max(_CHUNK_BYTES, 2 * whole)):
            raise CheckpointError(
                f"array {quoted(entry.path)} of {whole} bytes claims chunks of {entry.chunks}, {chunk} bytes each; "
                f"that is more than its own size or than the memory of this machine, {memory} bytes. The metadata in "
                f"{quoted(entry.file)} is damaged or forged."
            )


def ocdbt(directory: str, key: str = "") -> dict[str, Any]:
    """tensorstore's spec of a key in the database of a directory."""
    base = {"driver": "file", "path": f"{directory}/"}
    return {"driver": "ocdbt", "base": base, "path": f"{key}/" if key else ""}


def unreadable(what: str, error: Exception) -> CheckpointError:
    """The error for what a library could not read; its own text may be many lines long."""
    text = (str(error) or repr(error)).splitlines()[0][:300]
    return CheckpointError(f"checkpoint {quoted(what)} cannot be read: {printable(text)}")


def read_into(
    entry: StoreArray, boxes: Sequence[Box], targets: Sequence[np.ndarray], *, missing_chunks: MissingChunks = "raise"
) -> int:
    """Fills `targets`, which have the shapes of `boxes`, casting to their dtypes; the number of bytes filled."""
    import tensorstore as ts

    _require_bounded(ts, entry, boxes)
    # Chunks that two boxes share are decoded once, if they can be kept.
    cache_bytes = 0 if all(_is_aligned(entry, box) for box in boxes) else _CACHE_BYTES
    context = ts.Context({"cache_pool": {"total_bytes_limit": cache_bytes}})
    spec = _spec_of(entry) | {"fill_missing_data_reads": missing_chunks == "fill"}
    try:
        array = ts.open(spec, open=True, read=True, context=context).result()
        reads = [_begin_read(ts, array, box, target) for box, target in zip(boxes, targets, strict=True)]
        for (read, staged), target in zip(reads, targets, strict=True):
            read.result()
            if staged is not None:
                fill(target, staged, entry.path)
    except (ValueError, OSError) as error:
        if _MISSING in str(error):
            raise _chunk_is_missing(entry) from error
        raise unreadable(f"{entry.file}, array {entry.path}", error) from error
    return sum(target.nbytes for target in targets)


def _require_bounded(ts: Any, entry: StoreArray, boxes: Sequence[Box]) -> None:
    if entry.key is None:
        look = ft.partial(look_in, entry.file)
    elif entry.files.is_blosc or entry.files.inner is not None:
        store = ts.KvStore.open(ocdbt(entry.file, entry.key)).result()
        look = ft.partial(_look_in_store, store)
    else:
        return  # a database reads parts of its own files
    touched = touched_by(entry.chunks, boxes)
    require_bounded(entry.path, look, entry.files, entry.chunks, itemsize(entry.dtype), touched)


def _look_in_store(store: Any, name: str) -> tuple[int, Reader]:
    value = store.read(name).result().value
    return len(value), lambda start, stop: value[start:stop]


def _spec_of(entry: StoreArray) -> dict[str, Any]:
    """How tensorstore opens an array; metadata that says something else by now is an error."""
    kvstore = {"driver": "file", "path": f"{entry.file}/"} if entry.key is None else ocdbt(entry.file, entry.key)
    chunks = list(entry.chunks)
    if entry.driver == "zarr":
        grid: dict[str, Any] = {"chunks": chunks}
    else:
        grid = {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunks}}}
    return {"driver": entry.driver, "kvstore": kvstore, "metadata": {"shape": list(entry.shape)} | grid}


def _chunk_is_missing(entry: StoreArray) -> CheckpointError:
    return CheckpointError(
        f"array {quoted(entry.path)}: a chunk is missing in {quoted(entry.file)}. It was lost, and the array with it; "
        "or it held nothing but the fill value, and who wrote it left such chunks out, which zarr allows. If you know "
        'that this is so, load with `missing_chunks="fill"`.'
    )


def _begin_read(ts: Any, array: Any, box: Box, target: np.ndarray) -> tuple[Any, np.ndarray | None]:
    """A read under way, and the memory that it goes to, where its values must be looked at before they are cast."""
    source = array[tuple(slice(start, stop) for start, stop in box)][ts.d[:].translate_to[0]] if box else array
    stored = source.dtype.numpy_dtype
    if may_change(stored, target.dtype):
        staged = np.empty(target.shape, stored)
        return ts.array(staged, copy=False).write(source), staged
    if stored != target.dtype:
        source = ts.cast(source, ts.dtype(target.dtype))
    return ts.array(target, copy=False).write(source), None


def _is_aligned(entry: StoreArray, box: Box) -> bool:
    return all(
        start % chunk == 0 and (stop % chunk == 0 or stop == size)
        for (start, stop), chunk, size in zip(box, entry.chunks, entry.shape, strict=True)
    )


def chunk_bytes(entry: StoreArray, box: Box) -> int:
    """Bytes, uncompressed, of the chunks that a box touches, cut at the end of the array."""
    count = 1
    for (start, stop), chunk, size in zip(box, entry.chunks, entry.shape, strict=True):
        count *= min(-(-stop // chunk) * chunk, size) - start // chunk * chunk if stop > start else 0
    return count * np.dtype(entry.dtype).itemsize if math.prod(stop - start for start, stop in box) else 0
