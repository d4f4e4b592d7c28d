"""Arrays in chunks: zarr directories and OCDBT databases. Their metadata is JSON; their values are tensorstore's."""

import dataclasses
import math
import os
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._errors import CheckpointError
from ._entry import ArrayEntry
from ._files import Place, inside, parsed_json, read_json, require_tree_inside


OCDBT_MANIFEST = "manifest.ocdbt"
_CACHE_BYTES = 128 * 2**20
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


def dtype_named(text: str) -> Any:
    """The dtype that a zarr or eformer metadata file names, if JAX has it."""
    # Never `np.dtype(text)`: numpy evaluates parts of what it is given.
    return _NAMED.get(text)


def is_sizes(values: Any) -> bool:
    """Whether `values` is a list of non-negative integers that a 64-bit size can hold."""
    return isinstance(values, list) and len(values) <= 64 and all(type(v) is int and 0 <= v < 2**63 for v in values)


def with_group(entry: ArrayEntry, group: str | None) -> ArrayEntry:
    """`entry`, listed under the prefix `group`."""
    return dataclasses.replace(entry, group=group)


def zarr_entries(where: Place) -> tuple[ArrayEntry, ...]:
    """Every zarr array, version 2 or 3, in or below the directory; by path."""
    found = []
    for directory, directories, files in os.walk(where.directory):
        directories.sort()
        for name in METADATA:
            if name in files:
                path = os.path.relpath(directory, where.directory).replace(os.sep, "/")
                entry = array_entry(where, path, directory, name)
                if entry.shape is not None:
                    found.append(entry)
    return tuple(found)


def array_entry(where: Place, path: str, directory: str, name: str) -> ArrayEntry:
    """The array whose metadata file `name` lies in `directory`; a zarr group has no shape."""
    relative = os.path.relpath(os.path.join(directory, name), where.directory)
    real = inside(where, relative)
    return _described(path, directory, read_json(where, real), METADATA[name], repr(real))


def _described(path: str, file: str, content: Any, driver: str, where: str) -> ArrayEntry:
    if driver == "zarr3" and isinstance(content, dict) and content.get("node_type") == "group":
        return ArrayEntry(path, None, None, file, "group", driver=driver)
    shape, stored, chunks = _fields(content, driver)
    if not is_sizes(shape) or not is_sizes(chunks) or len(chunks) != len(shape) or not all(chunks):
        raise CheckpointError(f"{where} describes no zarr array: its shape and chunks must be lists of as many sizes.")
    if not isinstance(stored, str):
        stored = str(stored)[:80]
    return ArrayEntry(path, tuple(shape), dtype_named(stored), file, stored, chunks=tuple(chunks), driver=driver)


def _fields(content: Any, driver: str) -> tuple[Any, Any, Any]:
    if not isinstance(content, dict):
        return None, None, None
    if driver == "zarr":
        return content.get("shape"), content.get("dtype"), content.get("chunks")
    grid = content.get("chunk_grid")
    configuration = grid.get("configuration") if isinstance(grid, dict) else None
    chunks = configuration.get("chunk_shape") if isinstance(configuration, dict) else None
    return content.get("shape"), content.get("data_type"), chunks


def ocdbt_entries(where: Place) -> tuple[ArrayEntry, ...]:
    """Every zarr array in the OCDBT database of the directory; by key."""
    import tensorstore as ts

    require_tree_inside(where, where.directory)
    try:
        store = ts.KvStore.open(ocdbt(where.directory)).result()
        keys = sorted(key.decode() for key in store.list().result())
        found = []
        for key in keys:
            path, _, name = key.rpartition("/")
            if name in METADATA:
                content = parsed_json(store.read(key).result().value, f"{key!r} in {where.directory!r}")
                entry = _described(path, where.directory, content, METADATA[name], f"{key!r} in {where.directory!r}")
                found.append(dataclasses.replace(entry, key=path))
    except (ValueError, OSError) as error:
        raise unreadable(where.directory, error) from error
    return tuple(entry for entry in found if entry.shape is not None)


def ocdbt(directory: str, key: str = "") -> dict[str, Any]:
    """tensorstore's spec of a key in the database of a directory."""
    base = {"driver": "file", "path": f"{directory}/"}
    return {"driver": "ocdbt", "base": base, "path": f"{key}/" if key else ""}


def unreadable(what: str, error: Exception) -> CheckpointError:
    """The error for what a library could not read; its own text may be many lines long."""
    return CheckpointError(f"checkpoint {what!r} cannot be read: {(str(error) or repr(error)).splitlines()[0][:300]}")


def read_into(entry: ArrayEntry, boxes: Sequence[tuple[tuple[int, int], ...]], targets: Sequence[np.ndarray]) -> int:
    """Fills `targets`, which have the shapes of `boxes`, casting to their dtypes; the number of bytes filled."""
    import tensorstore as ts

    kvstore = {"driver": "file", "path": f"{entry.file}/"} if entry.key is None else ocdbt(entry.file, entry.key)
    # Chunks that two boxes share are decoded once, if they can be kept.
    cache_bytes = 0 if all(_is_aligned(entry, box) for box in boxes) else _CACHE_BYTES
    context = ts.Context({"cache_pool": {"total_bytes_limit": cache_bytes}})
    try:
        array = ts.open({"driver": entry.driver, "kvstore": kvstore}, open=True, read=True, context=context).result()
        if tuple(array.shape) != entry.shape:
            raise CheckpointError(f"array {entry.path!r} has changed its shape since its metadata was read.")
        writes = [_begin_read(ts, array, box, target) for box, target in zip(boxes, targets, strict=True)]
        for write in writes:
            write.result()
    except (ValueError, OSError) as error:
        raise unreadable(f"{entry.file}, array {entry.path}", error) from error
    return sum(target.nbytes for target in targets)


def _begin_read(ts: Any, array: Any, box: tuple[tuple[int, int], ...], target: np.ndarray) -> Any:
    source = array[tuple(slice(start, stop) for start, stop in box)][ts.d[:].translate_to[0]] if box else array
    if source.dtype.numpy_dtype != target.dtype:
        source = ts.cast(source, ts.dtype(target.dtype))
    return ts.array(target, copy=False).write(source)


def _is_aligned(entry: ArrayEntry, box: tuple[tuple[int, int], ...]) -> bool:
    return all(
        start % chunk == 0 and (stop % chunk == 0 or stop == size)
        for (start, stop), chunk, size in zip(box, entry.chunks or (), entry.shape or (), strict=True)
    )


def chunk_bytes(entry: ArrayEntry, box: tuple[tuple[int, int], ...]) -> int:
    """Bytes, uncompressed, of the chunks that a box touches, cut at the end of the array."""
    count = 1
    for (start, stop), chunk, size in zip(box, entry.chunks or (), entry.shape or (), strict=True):
        count *= min(-(-stop // chunk) * chunk, size) - start // chunk * chunk if stop > start else 0
    return count * np.dtype(entry.dtype).itemsize if math.prod(stop - start for start, stop in box) else 0
