"""The sizes of stored chunks, checked before tensorstore reads them.

tensorstore unpacks gzip, zlib, bz2 and zstd only up to the length of a chunk. But it
reads a file as a whole, and it unpacks blosc to the length that the file claims.
"""

import itertools as it
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .._ground.boxes import Box
from .._ground.errors import CheckpointError
from .._ground.text import quoted
from ._entry import StoreArray, itemsize
from ._files import member


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


def ocdbt(directory: str, key: str = "") -> dict[str, Any]:
    """The tensorstore spec of a key in the OCDBT database of a directory."""
    base = {"driver": "file", "path": f"{directory}/"}
    return {"driver": "ocdbt", "base": base, "path": f"{key}/" if key else ""}


def require_bounded(
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
