"""Arrays in chunks: zarr directories, OCDBT databases, and the lists of such arrays
that eformer and Orbax write.

This module reads their JSON metadata, and tensorstore reads their values. tensorstore
unpacks gzip, zlib, bz2 and zstd only up to the length of a chunk. But it reads a file
as a whole, and it unpacks blosc to the length that the file claims. So this module
checks the sizes of all files before tensorstore reads them.
"""

import dataclasses
import itertools as it
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from .._ground.boxes import Box
from .._ground.errors import CheckpointError
from .._ground.spec import DType
from .._ground.text import printable, quoted
from ._entry import ListedArray, StoreArray, fill, itemsize, may_change
from ._files import (
    FilePlace,
    inside,
    is_shape,
    is_sizes,
    member,
    opened,
    parsed_json,
    read_json,
    require_plain_tree,
)


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


# A chunk that cannot be compressed takes a little more than its own size.
_MORE_BYTES = 2**20
# A shard is a file of many chunks with a table of them, and the table may be larger
# than the chunks.
_SHARD_BYTES = 2**30
_SHARDS = "sharding_indexed"
# A blosc buffer begins with 4 bytes of versions and flags, then the unpacked size.
_CLAIM = slice(4, 8)
# The table of a shard has the offset and the length of each chunk, or this number twice
# for a chunk that is not stored.
_NOT_STORED = 2**64 - 1


def dtype_named(text: str) -> DType:
    """The dtype that zarr or eformer metadata names; `None` if JAX lacks it."""
    # Never `np.dtype(text)`, since NumPy evaluates parts of the text.
    return _NAMED.get(text)


def zarr_entries(where: FilePlace) -> tuple[StoreArray, ...]:
    """The zarr arrays of version 2 or 3 in a checkpoint's directory and below it, by
    path.
    """
    found = []
    for directory, directories, _ in os.walk(where.directory):
        directories.sort()
        path = os.path.relpath(directory, where.directory).replace(os.sep, "/")
        found.append(entry_in(where, path, directory))
    return tuple(entry for entry in found if entry is not None)


def entry_in(where: FilePlace, path: str, directory: str) -> StoreArray | None:
    """The zarr array in `directory`, with the name `path`; `None` if the directory has
    no array's metadata.
    """
    for name, driver in METADATA.items():
        file = os.path.join(directory, name)
        if os.path.isfile(file):
            real = inside(where, os.path.relpath(file, where.directory))
            found = _described(
                path, directory, None, read_json(where, real), driver, quoted(real)
            )
            if found is not None:
                return found
    return None


def _described(
    path: str, file: str, key: str | None, content: Any, driver: str, where: str
) -> StoreArray | None:
    """The zarr array that the JSON metadata `content` describes; `None` for the
    metadata of a group.

    `path`, `file`, `key` and `driver` become the fields of the result with these names.
    `where` is the name of the metadata in errors.
    """
    if driver == "zarr3" and member(content, "node_type") == "group":
        return None
    keys = ("dtype", ("chunks",)) if driver == "zarr" else ("data_type", _GRID)
    shape, stored, chunks = (
        member(content, "shape"),
        member(content, keys[0]),
        member(content, *keys[1]),
    )
    if (
        not is_shape(shape)
        or not is_sizes(chunks)
        or len(chunks) != len(shape)
        or not all(chunks)
    ):
        raise CheckpointError(
            f"{where} describes no zarr array: its shape and chunks must be lists of as"
            " many sizes, and their product below 2**59."
        )
    if not isinstance(stored, str):
        stored = str(stored)[:80]
    return StoreArray(
        path,
        tuple(shape),
        dtype_named(stored),
        file,
        stored,
        tuple(chunks),
        driver,
        key,
    )


def ocdbt_entries(where: FilePlace) -> tuple[StoreArray, ...]:
    """The zarr arrays in the OCDBT database of a checkpoint's directory, by key."""
    import tensorstore as ts

    require_plain_tree(where, where.directory)
    with opened(where, inside(where, OCDBT_MANIFEST)):
        # From now on the file must not change.
        pass
    try:
        store = ts.KvStore.open(ocdbt(where.directory)).result()
        keys = sorted(key.decode() for key in store.list().result())
        parts = [(key, key.rpartition("/")) for key in keys]
        reads = [
            (path, name, key, store.read(key))
            for key, (path, _, name) in parts
            if name in METADATA
        ]
        found = []
        for path, name, key, read in reads:
            place_of = f"{quoted(key)} in {where.directory!r}"
            content = parsed_json(read.result().value, place_of)
            found.append(
                _described(
                    path, where.directory, path, content, METADATA[name], place_of
                )
            )
    except (ValueError, OSError) as error:
        raise unreadable(where.directory, error) from error
    return tuple(entry for entry in found if entry is not None)


def require_possible(entries: Iterable[StoreArray], where: FilePlace) -> None:
    """Raises `CheckpointError` for an array with too large chunks, a pipe, or a link
    that leads out of the checkpoint.

    tensorstore checks none of this. It decodes a chunk in memory as a whole, and a
    chunk that exceeds the memory ends the process.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for directory in dict.fromkeys(entry.file for entry in entries):
        require_plain_tree(where, directory)
    for entry in entries:
        each = _WIDEST_BYTES if entry.dtype is None else itemsize(entry.dtype)
        chunk, whole = math.prod(entry.chunks) * each, math.prod(entry.shape) * each
        if chunk > min(memory, max(_CHUNK_BYTES, 2 * whole)):
            raise CheckpointError(
                f"array {quoted(entry.path)} of {whole} bytes claims chunks of"
                f" {entry.chunks}, {chunk} bytes each; that is more than its own size"
                f" or than the memory of this machine, {memory} bytes. The metadata in"
                f" {quoted(entry.file)} is damaged or forged."
            )


def ocdbt(directory: str, key: str = "") -> dict[str, Any]:
    """The tensorstore spec of a key in the OCDBT database of a directory."""
    base = {"driver": "file", "path": f"{directory}/"}
    return {"driver": "ocdbt", "base": base, "path": f"{key}/" if key else ""}


def unreadable(what: str, error: Exception) -> CheckpointError:
    """The error for the file named `what`, which a library could not read. It has the
    first line of `error`.
    """
    text = (str(error) or repr(error)).splitlines()[0][:300]
    return CheckpointError(
        f"checkpoint {quoted(what)} cannot be read: {printable(text)}"
    )


def read_into(
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
    spec = _spec_of(entry) | {"fill_missing_data_reads": missing_chunks == "fill"}
    try:
        array = ts.open(spec, open=True, read=True, context=context).result()
        _require_bounded(ts, array, entry, boxes)
        reads = [
            _begin_read(ts, array, box, target)
            for box, target in zip(boxes, targets, strict=True)
        ]
        for (read, staged), target in zip(reads, targets, strict=True):
            read.result()
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


def _require_bounded(
    ts: Any, array: Any, entry: StoreArray, boxes: Sequence[Box]
) -> None:
    """Raises `CheckpointError` if a chunk that `boxes` need takes more memory, when
    unpacked, than its shape allows.

    `ts` is the tensorstore module, and `array` the array that it opened.
    """
    # tensorstore must read what was checked here, so it is told how to interpret the
    # metadata.
    metadata = array.spec().to_json()["metadata"]
    if entry.key is not None and "'blosc'" not in repr(metadata):
        return  # a database reads parts of its own files
    store = (
        None
        if entry.key is None
        else ts.KvStore.open(ocdbt(entry.file, entry.key)).result()
    )
    codecs = (
        _codecs(metadata["codecs"])
        if "codecs" in metadata
        else {member(metadata, "compressor", "id"): {}}
    )
    own_bytes = math.prod(entry.chunks) * itemsize(entry.dtype)
    limit_bytes = (
        max(2 * own_bytes, _SHARD_BYTES)
        if _SHARDS in codecs
        else 2 * own_bytes + _MORE_BYTES
    )
    for name in dict.fromkeys(_names(metadata, entry.chunks, boxes)):
        try:
            size, read = _look_at(store, entry.file, name)
        except (OSError, KeyError):
            continue  # the reader reports a missing chunk
        what = f"array {quoted(entry.path)}: the chunk {quoted(name)}"
        claims = [(f"has {size} bytes", own_bytes)] if size > limit_bytes else []
        buffers = [(0, own_bytes)] if "blosc" in codecs else []
        if _SHARDS in codecs and not claims:
            inner_bytes = math.prod(codecs[_SHARDS]["chunk_shape"]) * itemsize(
                entry.dtype
            )
            buffers = [
                (begin, inner_bytes)
                for begin in _begins(what, size, read, codecs[_SHARDS], entry.chunks)
            ]
        for begin, most_bytes in buffers:
            claimed = int.from_bytes(read(begin, begin + _CLAIM.stop)[_CLAIM], "little")
            if claimed > most_bytes:
                claims.append((f"claims to unpack to {claimed} bytes", most_bytes))
        if claims:
            raise CheckpointError(
                f"{what} {claims[0][0]}, and a chunk of it has {claims[0][1]}; it is"
                " damaged, or forged to take all memory. Nothing was read; copy the"
                " checkpoint again."
            )


def _look_at(
    store: Any, directory: str, name: str
) -> tuple[int, Callable[[int, int], bytes]]:
    """The size in bytes of the stored chunk `name`, and a function that reads a byte
    range of it.

    The chunk is in the tensorstore key-value store `store`, or a file in `directory` if
    `store` is `None`.
    """
    if store is not None:
        value = store.read(name).result().value
        return len(value), lambda start, stop: value[start:stop]
    path = os.path.join(directory, name)

    def read(start: int, stop: int) -> bytes:
        with open(path, "rb") as file:
            return os.pread(file.fileno(), stop - start, start)

    return os.stat(path).st_size, read


def _names(
    metadata: Mapping[str, Any], chunk: Sequence[int], boxes: Sequence[Box]
) -> Iterator[str]:
    """The names of the files of the chunks that `boxes` overlap: `c/1/2`, or `1.2` in
    zarr 2.

    `metadata` is the array's zarr metadata, and `chunk` the shape of a chunk.
    """
    prefix, separator = [], metadata.get("dimension_separator")
    if "chunk_key_encoding" in metadata:
        encoding = metadata["chunk_key_encoding"]
        prefix, default = ([], ".") if encoding["name"] == "v2" else (["c"], "/")
        separator = member(encoding, "configuration", "separator") or default
    for box in boxes:
        sides = [
            range(start // size, -(-stop // size))
            for (start, stop), size in zip(box, chunk, strict=True)
        ]
        for numbers in it.product(*sides):
            yield (separator or ".").join([*prefix, *map(str, numbers)]) or "0"


def _codecs(listed: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The configuration of each codec by the codec's name. `listed` is the list of
    codecs in zarr3 metadata.
    """
    return {codec["name"]: codec.get("configuration", {}) for codec in listed}


def _begins(
    what: str,
    size: int,
    read: Callable[[int, int], bytes],
    shards: Mapping[str, Any],
    chunk: Sequence[int],
) -> list[int]:
    """The offsets of blosc's buffers in a zarr3 shard, a file of many chunks with a
    table of their offsets.

    `size` is the size of the file in bytes, and `read` reads a byte range of it.
    `shards` is the configuration of zarr3's sharding codec, and `chunk` the shape of
    the shard. `what` is the name of the file in errors.
    """
    packed, table = _codecs(shards["codecs"]), _codecs(shards["index_codecs"])
    if "'blosc'" not in repr(shards["codecs"]):
        return []
    if _SHARDS in packed or not set(table) <= {"bytes", "crc32c"}:
        raise CheckpointError(
            f"{what} holds chunks packed by blosc behind a table that is packed or"
            " nested itself, so that their sizes cannot be checked before they are"
            ' unpacked. Write the array with `index_codecs` of "bytes" and "crc32c",'
            " or with another compressor."
        )
    count = math.prod(
        -(-whole // max(part, 1))
        for whole, part in zip(chunk, shards["chunk_shape"], strict=True)
    )
    # A checksum of 4 bytes may follow the table, which has 16 bytes for each chunk.
    start = (
        size - 16 * count - 4 * ("crc32c" in table)
        if shards["index_location"] == "end"
        else 0
    )
    if start < 0:
        return []  # the reader reports a file that is too short for its table
    dtype = ">u8" if member(table, "bytes", "endian") == "big" else "<u8"
    numbers = np.frombuffer(read(start, start + 16 * count), dtype)
    return [begin for begin in numbers[0::2].tolist() if begin < min(size, _NOT_STORED)]


def _spec_of(entry: StoreArray) -> dict[str, Any]:
    """The tensorstore spec of an array. It states the array's metadata, so that
    tensorstore raises if they changed.
    """
    kvstore = (
        {"driver": "file", "path": f"{entry.file}/"}
        if entry.key is None
        else ocdbt(entry.file, entry.key)
    )
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
    ts: Any, array: Any, box: Box, target: np.ndarray
) -> tuple[Any, np.ndarray | None]:
    """Starts to read a box of `array` into `target`. Returns the future, and `None` or
    another buffer.

    If a cast to the dtype of `target` may change values, they are read into this other
    buffer instead. The caller then casts and checks them. `ts` is the tensorstore
    module.
    """
    source = (
        array[tuple(slice(start, stop) for start, stop in box)][ts.d[:].translate_to[0]]
        if box
        else array
    )
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
        count *= (
            min(-(-stop // chunk) * chunk, size) - start // chunk * chunk
            if stop > start
            else 0
        )
    return (
        count * np.dtype(entry.dtype).itemsize
        if math.prod(stop - start for start, stop in box)
        else 0
    )


EFORMER_INDEX = "tensorstore_index.json"


def eformer_entries(where: FilePlace) -> tuple[StoreArray | ListedArray, ...]:
    """The arrays that an eformer index lists, of all its prefixes, in the index's
    order.

    Version 1 has one list, `arrays`; version 2 has one list per prefix, and may have
    `arrays` too. The index's own field `version` does not tell them apart, since it is
    the version of eformer's package.
    """
    real = inside(where, EFORMER_INDEX)
    content = read_json(where, real)
    if not isinstance(content, dict) or content.get("format") != "tensorstore":
        found = (
            content.get("format")
            if isinstance(content, dict)
            else type(content).__name__
        )
        raise CheckpointError(
            f"Unsupported index format: {str(found)[:80]}, in {real!r}; it must be"
            " 'tensorstore'."
        )
    prefixes = content.get("prefixes", {})
    if not isinstance(prefixes, dict):
        raise CheckpointError(
            f"{real!r}: `prefixes` must map each prefix to a list of arrays."
        )
    entries: list[StoreArray | ListedArray] = []
    for group, rows in [(None, content.get("arrays", [])), *prefixes.items()]:
        if not isinstance(rows, list):
            what = "`arrays`" if group is None else f"prefix {quoted(group)}"
            raise CheckpointError(f"{real!r}: {what} must be a list.")
        entries += [_listed(where, real, group, row) for row in rows]
    return tuple(entries)


def _listed(
    where: FilePlace, real: str, group: str | None, row: object
) -> StoreArray | ListedArray:
    if not isinstance(row, dict) or not isinstance(row.get("path"), str):
        raise CheckpointError(
            f"{real!r} lists {quoted(str(row), 80)}, which has no `path`."
        )
    path, shape, dtype = row["path"], row.get("shape"), row.get("dtype")
    directory = inside(where, path)
    # The array's own metadata decides what a read returns; the index is a copy that may
    # be out of date.
    found = entry_in(where, path, directory)
    if found is not None:
        if shape is not None and list(found.shape) != shape:
            raise CheckpointError(
                f"{real!r} gives {quoted(path)} the shape {str(shape)[:80]}, but its"
                f" own metadata says {found.shape}."
            )
        return dataclasses.replace(found, group=group)
    if shape is not None and not is_shape(shape):
        raise CheckpointError(
            f"{real!r} gives {quoted(path)} the shape {str(shape)[:80]}; it must be a"
            " list of sizes."
        )
    known = dtype_named(dtype) if isinstance(dtype, str) else None
    stored = dtype if isinstance(dtype, str) else "unknown"
    return ListedArray(
        path, None if shape is None else tuple(shape), known, directory, stored, group
    )


ORBAX_METADATA = "_METADATA"
# The files that Orbax writes beside the arrays.
_UNFINISHED = ".orbax-checkpoint-tmp"
_TRACES = ("_CHECKPOINT_METADATA", "_sharding", "array_metadatas", "ocdbt.process_0")
# The types that Orbax gives to values that it stores as arrays. Strings and empty
# containers have others.
_ARRAYS = ("jax.Array", "np.ndarray", "scalar")


def raise_if_no_tree(where: FilePlace, names: list[str]) -> None:
    """Raises `CheckpointError` if Orbax wrote the checkpoint's directory, and it does
    not contain one tree of arrays.

    It may be a training step, which contains several trees, or an incomplete
    checkpoint. `names` are its files.
    """
    require_finished(where)
    items = [
        name
        for name in names
        if os.path.isfile(os.path.join(where.directory, name, ORBAX_METADATA))
    ]
    if items:
        raise CheckpointError(
            f"{where.directory!r} is a step of Orbax's CheckpointManager with the items"
            f" {items[:20]}; name one, as in"
            f" `read_index({os.path.join(where.directory, items[0])!r})`."
        )
    traces = [name for name in names if name in _TRACES]
    if traces:
        raise CheckpointError(
            f"{where.directory!r} is a checkpoint of Orbax, as {quoted(traces[0])}"
            f" shows, without {ORBAX_METADATA}: its save was interrupted, or files were"
            " lost, and nothing says which arrays it had. Copy the whole checkpoint,"
            " or take an earlier step."
        )


def require_finished(where: FilePlace) -> None:
    """Raises `CheckpointError` for a directory with the name that Orbax gives to a save
    until it is complete.
    """
    name = os.path.basename(where.directory)
    if _UNFINISHED in name:
        raise CheckpointError(
            f"{where.directory!r} is a save of Orbax that was not finished, as its name"
            " says; take an earlier step. If you know that it is complete, rename it to"
            f" {name.partition(_UNFINISHED)[0]!r}."
        )


def orbax_entries(where: FilePlace) -> tuple[StoreArray, ...]:
    """The arrays of an Orbax PyTree checkpoint. Their paths are Orbax's keys joined by
    "/".

    Orbax's own reader opens the files that the metadata names before it checks the
    names, so it is not used.
    """
    require_finished(where)
    real = inside(where, ORBAX_METADATA)
    content = read_json(where, real)
    rows = member(content, "tree_metadata")
    if not isinstance(rows, dict):
        raise CheckpointError(
            f"{real!r} has no `tree_metadata` that describes arrays; it is damaged, or"
            " not Orbax's."
        )
    named = [_keys(real, name, row) for name, row in rows.items()]
    if os.path.lexists(os.path.join(where.directory, OCDBT_MANIFEST)):
        entry_of = {entry.key: entry for entry in ocdbt_entries(where)}.get
    else:
        entry_of = lambda name: (
            entry_in(where, name, inside(where, name)) if name else None
        )
    found = [(keys, must, entry_of(".".join(keys))) for keys, must in named]
    names: dict[str, list[str]] = {}
    for keys, must, entry in found:
        if names.setdefault(".".join(keys), keys) != keys and entry is not None:
            raise CheckpointError(
                f"{real!r} names arrays by {keys} and by {names['.'.join(keys)]}, which"
                " Orbax keeps under one name, so one of them was lost when it was"
                " written; rename one of them and save again."
            )
        if must and entry is None:
            raise CheckpointError(
                f"{real!r} names the array {quoted('/'.join(keys))}, but"
                f" {where.directory!r} does not hold it; copy the whole checkpoint."
            )
    return tuple(
        dataclasses.replace(entry, path="/".join(keys))
        for keys, _, entry in found
        if entry is not None
    )


def _keys(real: str, name: str, row: object) -> tuple[list[str], bool]:
    """The keys from the root to a value in Orbax's `tree_metadata`, and whether the
    value must be an array.

    `real` is the path of the metadata file, for errors. `name` and `row` are the
    value's name and metadata.
    """
    keys, value = member(row, "key_metadata"), member(row, "value_metadata")
    names = (
        [key.get("key") for key in keys if isinstance(key, dict)]
        if isinstance(keys, list)
        else []
    )
    texts = [str(key) for key in names if isinstance(key, str | int)]
    if (
        not isinstance(value, dict)
        or not isinstance(keys, list)
        or len(texts) != len(keys)
    ):
        raise CheckpointError(
            f"{real!r}: {quoted(name)} in `tree_metadata` has no keys and value that"
            " Orbax writes."
        )
    return (
        texts,
        value.get("value_type") in _ARRAYS
        and value.get("skip_deserialize") is not True,
    )
