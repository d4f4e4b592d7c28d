"""The sizes of stored chunks, checked before tensorstore reads them.

tensorstore unpacks gzip, zlib, bz2 and zstd only up to the length of a chunk. But it
reads a file as a whole, and it unpacks blosc to the length that the file claims.
"""

import contextlib
import itertools as it
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._ground.boxes import Box
from .._ground.errors import CheckpointError
from .._ground.text import quoted
from ._entry import StoreArray, itemsize
from ._files import member
from ._place import MissingError, OpenFile, Place


# A chunk that cannot be compressed takes a little more than its own size.
_MORE_BYTES = 2**20
# A shard is a file of many chunks with a table of them, and the table may be larger
# than the chunks.
_SHARD_BYTES = 2**30
_SHARDS = "sharding_indexed"
# A blosc buffer begins with 4 bytes of versions and flags, then the unpacked size.
_CLAIM = slice(4, 8)
# The table of a shard has the offset and the length of each chunk, or 2**64 - 1 twice
# for a chunk that is not stored. No file is as long as this.
_NO_OFFSET = 2**63


class _Stored(NamedTuple):
    """A value of a database that was read, with the operations of an open file."""

    value: bytes

    @property
    def known_size(self) -> int:
        return len(self.value)

    def read(self, count: int, offset: int) -> bytes:
        return self.value[offset : offset + count]

    def tail(self, count: int) -> bytes:
        return self.value[-count:]


class _Bounds(NamedTuple):
    """The limits of an array's stored chunks.

    - `path`: the array's path.
    - `chunk`, `nbytes`: the shape of a chunk, and its bytes, unpacked.
    - `itemsize`: the bytes of an element.
    - `codecs`: the configuration of each codec by its name.
    """

    path: str
    chunk: tuple[int, ...]
    nbytes: int
    itemsize: int
    codecs: Mapping[str, Mapping[str, Any]]

    @property
    def limit_bytes(self) -> int:
        """The most bytes that a stored chunk may have."""
        if _SHARDS in self.codecs:
            return max(2 * self.nbytes, _SHARD_BYTES)
        return 2 * self.nbytes + _MORE_BYTES


def require_bounded(
    place: Place,
    array: Any,
    entry: StoreArray,
    boxes: Sequence[Box],
) -> None:
    """Raises `CheckpointError` if a chunk that `boxes` need takes more memory, when
    unpacked, than its shape allows.

    `array` is the array that tensorstore opened.
    """
    # tensorstore must read what was checked here, so it is told how to interpret the
    # metadata.
    metadata = array.spec().to_json()["metadata"]
    if entry.key is not None and "'blosc'" not in repr(metadata):
        return  # a database reads parts of its own files
    codecs: Mapping[str, Mapping[str, Any]]
    codecs = {member(metadata, "compressor", "id"): {}}
    if "codecs" in metadata:
        codecs = _codecs(metadata["codecs"])
    each_bytes = itemsize(entry.dtype)
    bounds = _Bounds(
        path=entry.path,
        chunk=entry.chunks,
        nbytes=math.prod(entry.chunks) * each_bytes,
        itemsize=each_bytes,
        codecs=codecs,
    )

    def check(name: str) -> None:
        # The reader reports a missing chunk.
        with contextlib.suppress(OSError, KeyError, MissingError):
            if entry.key is not None:
                value = array.kvstore.read(name).result().value
                _check_chunk(bounds, name, _Stored(value))
                return
            path = os.path.join(entry.file, name)
            with place.chunk(path) as file:
                _check_chunk(bounds, name, file)

    names = dict.fromkeys(_names(metadata, entry.chunks, boxes))
    place.each(check, names)


def _check_chunk(bounds: _Bounds, name: str, file: OpenFile) -> None:
    what = f"array {quoted(bounds.path)}: the chunk {quoted(name)}"
    size = file.known_size
    if size is not None and size > bounds.limit_bytes:
        raise _forged(what, f"has {size} bytes", bounds.nbytes)
    if size is None and file.read(1, bounds.limit_bytes):
        raise _forged(what, f"has over {bounds.limit_bytes} bytes", bounds.nbytes)
    buffers = [(0, bounds.nbytes)] if "blosc" in bounds.codecs else []
    if _SHARDS in bounds.codecs:
        shards = bounds.codecs[_SHARDS]
        inner_bytes = math.prod(shards["chunk_shape"]) * bounds.itemsize
        begins = _begins(what, file, shards, bounds.chunk)
        buffers = [(begin, inner_bytes) for begin in begins]
    for begin, most_bytes in buffers:
        head = file.read(_CLAIM.stop, begin)
        claimed = int.from_bytes(head[_CLAIM], "little")
        if claimed > most_bytes:
            raise _forged(what, f"claims to unpack to {claimed} bytes", most_bytes)


def _forged(what: str, claim: str, chunk_bytes: int) -> CheckpointError:
    return CheckpointError(
        f"{what} {claim}, and a chunk of it has {chunk_bytes}; it is damaged, or forged"
        " to take all memory. Nothing was read; copy the checkpoint again."
    )


def _names(
    metadata: Mapping[str, Any],
    chunk: Sequence[int],
    boxes: Sequence[Box],
) -> Iterator[str]:
    """The names of the files of the chunks that `boxes` overlap: `c/1/2`, or `1.2` in
    zarr 2.

    `metadata` is the array's zarr metadata, and `chunk` the shape of a chunk.
    """
    prefix: list[str] = []
    separator = metadata.get("dimension_separator") or "."
    if "chunk_key_encoding" in metadata:
        encoding = metadata["chunk_key_encoding"]
        default = "."
        if encoding["name"] != "v2":
            prefix = ["c"]
            default = "/"
        separator = member(encoding, "configuration", "separator") or default
    for box in boxes:
        sides = [
            range(start // size, -(-stop // size))
            for (start, stop), size in zip(box, chunk, strict=True)
        ]
        for numbers in it.product(*sides):
            yield separator.join([*prefix, *map(str, numbers)]) or "0"


def _codecs(listed: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The configuration of each codec by the codec's name. `listed` is the list of
    codecs in zarr3 metadata.
    """
    return {codec["name"]: codec.get("configuration", {}) for codec in listed}


def _begins(
    what: str,
    file: OpenFile,
    shards: Mapping[str, Any],
    chunk: Sequence[int],
) -> list[int]:
    """The offsets of blosc's buffers in a zarr3 shard, a file of many chunks with a
    table of their offsets.

    `shards` is the configuration of zarr3's sharding codec, and `chunk` the shape of
    the shard. `what` is the name of the file in errors.
    """
    packed = _codecs(shards["codecs"])
    table = _codecs(shards["index_codecs"])
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
    # The table has 16 bytes for each chunk. A checksum of 4 bytes may follow it.
    table_bytes = 16 * count
    if "crc32c" in table:
        table_bytes += 4
    if shards["index_location"] == "end":
        data = file.tail(table_bytes)
    else:
        data = file.read(table_bytes, 0)
    if len(data) < table_bytes:
        return []  # the reader reports a file that is too short for its table
    dtype = "<u8"
    if member(table, "bytes", "endian") == "big":
        dtype = ">u8"
    numbers = np.frombuffer(data, dtype, 2 * count)
    return [begin for begin in numbers[0::2].tolist() if begin < _NO_OFFSET]
