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
_SHARDING_CODEC = "sharding_indexed"
# A blosc buffer begins with 4 bytes of versions and flags, then the unpacked size.
_UNPACKED_SIZE_BYTES = slice(4, 8)
# The table of a shard has the offset and the length of each chunk, or 2**64 - 1 twice
# for a chunk that is not stored. No file is as long as this.
_NOT_STORED_OFFSET = 2**63


class _StoredValue(NamedTuple):
    """A value of a database that was read whole, with the operations of `OpenFile`."""

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
    - `chunk_shape`, `chunk_bytes`: the shape of a chunk, and its bytes, unpacked.
    - `itemsize`: the bytes of an element.
    - `codecs`: the configuration of each codec by its name.
    """

    path: str
    chunk_shape: tuple[int, ...]
    chunk_bytes: int
    itemsize: int
    codecs: Mapping[str, Mapping[str, Any]]

    @property
    def limit_bytes(self) -> int:
        """The most bytes that a stored chunk may have."""
        if _SHARDING_CODEC in self.codecs:
            return max(2 * self.chunk_bytes, _SHARD_BYTES)
        return 2 * self.chunk_bytes + _MORE_BYTES


def require_bounded(
    place: Place,
    array: Any,
    entry: StoreArray,
    boxes: Sequence[Box],
) -> None:
    """Raises `CheckpointError` if a chunk that `boxes` need takes more memory, when
    unpacked, than its shape allows.

    `array` is the array that tensorstore opened, and `entry` its entry in the index,
    whose `key` is its key in an OCDBT database, or `None` for a zarr directory.
    """
    # tensorstore must read what was checked here, so it is told how to interpret the
    # metadata.
    metadata = array.spec().to_json()["metadata"]
    if entry.key is not None and "'blosc'" not in repr(metadata):
        # A database knows the length of each chunk, and reads no more of its files.
        return
    # The configuration of each codec by its name; zarr 2 has one codec at most.
    codecs: Mapping[str, Mapping[str, Any]]
    codecs = {member(metadata, "compressor", "id"): {}}
    if "codecs" in metadata:
        codecs = _codecs(metadata["codecs"])
    each_bytes = itemsize(entry.dtype)
    bounds = _Bounds(
        path=entry.path,
        chunk_shape=entry.chunks,
        chunk_bytes=math.prod(entry.chunks) * each_bytes,
        itemsize=each_bytes,
        codecs=codecs,
    )

    def check(name: str) -> None:
        """Checks the stored chunk `name`: a value of the database, or a file."""
        # The reader reports a missing chunk.
        with contextlib.suppress(OSError, KeyError, MissingError):
            if entry.key is not None:
                value = array.kvstore.read(name).result().value
                _check_chunk(bounds, name, _StoredValue(value))
                return
            path = os.path.join(entry.file, name)
            with place.chunk(path) as file:
                _check_chunk(bounds, name, file)

    names = dict.fromkeys(_chunk_names(metadata, entry.chunks, boxes))
    place.each(check, names)


def _check_chunk(bounds: _Bounds, name: str, file: OpenFile) -> None:
    """Raises `CheckpointError` if the stored chunk `name`, in `file`, is larger than
    `bounds` allow, or if a blosc buffer in it claims to unpack to more.

    A chunk without blosc is safe by its size alone: tensorstore unpacks the other
    codecs only up to the length of a chunk. `bounds.limit_bytes` bounds what is stored,
    and `bounds.chunk_bytes` what it is unpacked to.
    """
    file_text = f"array {quoted(bounds.path)}: the chunk {quoted(name)}"
    size = file.known_size
    if size is not None and size > bounds.limit_bytes:
        raise _forged_chunk(file_text, f"has {size} bytes", bounds.chunk_bytes)
    if size is None and file.read(1, bounds.limit_bytes):
        raise _forged_chunk(
            file_text, f"has over {bounds.limit_bytes} bytes", bounds.chunk_bytes
        )
    buffers = [(0, bounds.chunk_bytes)] if "blosc" in bounds.codecs else []
    if _SHARDING_CODEC in bounds.codecs:
        sharding = bounds.codecs[_SHARDING_CODEC]
        inner_bytes = math.prod(sharding["chunk_shape"]) * bounds.itemsize
        offsets = _buffer_offsets(file_text, file, sharding, bounds.chunk_shape)
        buffers = [(offset, inner_bytes) for offset in offsets]
    # A buffer of blosc: where it begins, and the most bytes that it may unpack to.
    for offset, most_bytes in buffers:
        head = file.read(_UNPACKED_SIZE_BYTES.stop, offset)
        claimed = int.from_bytes(head[_UNPACKED_SIZE_BYTES], "little")
        if claimed > most_bytes:
            raise _forged_chunk(
                file_text, f"claims to unpack to {claimed} bytes", most_bytes
            )


def _forged_chunk(file_text: str, claim: str, chunk_bytes: int) -> CheckpointError:
    """The error for a file `file_text` that makes a claim, such as "has 9 bytes", which
    a chunk of `chunk_bytes` bytes cannot fulfil.
    """
    return CheckpointError(
        f"{file_text} {claim}, and a chunk of it has {chunk_bytes}; it is damaged, or"
        " forged to take all memory. Nothing was read; copy the checkpoint again."
    )


def _chunk_names(
    metadata: Mapping[str, Any],
    chunk_shape: Sequence[int],
    boxes: Sequence[Box],
) -> Iterator[str]:
    """The names of the files of the chunks that `boxes` overlap: `c/1/2`, or `1.2` in
    zarr 2. A name may come several times.

    `metadata` is the array's zarr metadata, and `chunk_shape` the shape of a chunk.
    """
    first_parts: list[str] = []
    separator = metadata.get("dimension_separator") or "."
    if "chunk_key_encoding" in metadata:
        encoding = metadata["chunk_key_encoding"]
        default_separator = "."
        if encoding["name"] != "v2":
            first_parts = ["c"]
            default_separator = "/"
        separator = member(encoding, "configuration", "separator") or default_separator
    for box in boxes:
        ranges_of_numbers = [
            range(start // size, -(-stop // size))
            for (start, stop), size in zip(box, chunk_shape, strict=True)
        ]
        for chunk_numbers in it.product(*ranges_of_numbers):
            # An array without dimensions has one chunk; zarr 2 names it "0".
            yield separator.join([*first_parts, *map(str, chunk_numbers)]) or "0"


def _codecs(listed: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The configuration of each codec by the codec's name. `listed` is the list of
    codecs in zarr3 metadata.
    """
    return {codec["name"]: codec.get("configuration", {}) for codec in listed}


def _buffer_offsets(
    file_text: str,
    file: OpenFile,
    sharding: Mapping[str, Any],
    chunk_shape: Sequence[int],
) -> list[int]:
    """The offsets of blosc's buffers in a zarr3 shard, a file of many chunks with a
    table of their offsets.

    `sharding` is the configuration of zarr3's sharding codec, and `chunk_shape` the
    shape of the shard. `file_text` is the name of the file in errors.
    """
    inner_codecs = _codecs(sharding["codecs"])
    table_codecs = _codecs(sharding["index_codecs"])
    if "'blosc'" not in repr(sharding["codecs"]):
        return []
    if _SHARDING_CODEC in inner_codecs or not set(table_codecs) <= {"bytes", "crc32c"}:
        raise CheckpointError(
            f"{file_text} holds chunks packed by blosc behind a table that is packed or"
            " nested itself, so that their sizes cannot be checked before they are"
            ' unpacked. Write the array with `index_codecs` of "bytes" and "crc32c",'
            " or with another compressor."
        )
    count = math.prod(
        -(-whole // max(part, 1))
        for whole, part in zip(chunk_shape, sharding["chunk_shape"], strict=True)
    )
    # The table has 16 bytes for each chunk. A checksum of 4 bytes may follow it.
    table_bytes = 16 * count
    if "crc32c" in table_codecs:
        table_bytes += 4
    if sharding["index_location"] == "end":
        data = file.tail(table_bytes)
    else:
        data = file.read(table_bytes, 0)
    if len(data) < table_bytes:
        return []  # the reader reports a file that is too short for its table
    dtype = "<u8"
    if member(table_codecs, "bytes", "endian") == "big":
        dtype = ">u8"
    offsets_and_lengths = np.frombuffer(data, dtype, 2 * count)
    return [
        offset
        for offset in offsets_and_lengths[0::2].tolist()
        if offset < _NOT_STORED_OFFSET
    ]
