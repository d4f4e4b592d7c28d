"""The files of a zarr array's chunks: their names, and a check that reading one does not take more memory than its size
explains.

tensorstore unpacks gzip, zlib, bz2 and zstd only up to the length of a chunk. But it reads a file as a whole, and it
unpacks blosc to the length that the file claims, also in the chunks of a shard. So this module checks all of them
before tensorstore reads.
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
from ._files import member


# A chunk that cannot be compressed takes a little more than its own size.
_MORE_BYTES = 2**20
# A shard is a file of many chunks with a table of them, and the table may be larger than the chunks.
_SHARD_BYTES = 2**30
_SHARDS = "sharding_indexed"
# A blosc buffer begins with 4 bytes of versions and flags, then the unpacked size.
_CLAIM = slice(4, 8)
# The table of a shard has the offset and the length of each chunk, or this number twice for a chunk that is not stored.
_NOT_STORED = 2**64 - 1

# A function that reads a range of a chunk's file.
Reader = Callable[[int, int], bytes]


def require_bounded(
    what: str,
    look: Callable[[str], tuple[int, Reader]],
    metadata: Mapping[str, Any],
    chunk: Sequence[int],
    itemsize: int,
    boxes: Sequence[Box],
) -> None:
    """Raises if a chunk would take more memory than its own size explains.

    **Arguments:**

    - `what`: the array's name, for messages.
    - `look`: gives the size of the file of a name, and what reads it; an `OSError` or a `KeyError` if it is missing.
    - `metadata`: the array's metadata as tensorstore understands it.
    - `chunk`, `itemsize`: the shape of a chunk, and the bytes of a value.
    - `boxes`: the boxes of the array that are to be read.
    """
    codecs = _codecs(metadata["codecs"]) if "codecs" in metadata else {member(metadata, "compressor", "id"): {}}
    own_bytes = math.prod(chunk) * itemsize
    limit_bytes = max(2 * own_bytes, _SHARD_BYTES) if _SHARDS in codecs else 2 * own_bytes + _MORE_BYTES
    for name in dict.fromkeys(_names(metadata, chunk, boxes)):
        try:
            size, read = look(name)
        except (OSError, KeyError):
            continue  # the reader reports a missing chunk
        if size > limit_bytes:
            raise _unbounded(what, name, f"has {size} bytes", own_bytes)
        buffers = [(0, own_bytes)] if "blosc" in codecs else []
        if _SHARDS in codecs:
            inner_bytes = math.prod(codecs[_SHARDS]["chunk_shape"]) * itemsize
            buffers += [(begin, inner_bytes) for begin in _begins(what, name, size, read, codecs[_SHARDS], chunk)]
        for begin, most_bytes in buffers:
            claimed = int.from_bytes(read(begin, begin + _CLAIM.stop)[_CLAIM], "little")
            if claimed > most_bytes:
                raise _unbounded(what, name, f"claims to unpack to {claimed} bytes", most_bytes)


def _names(metadata: Mapping[str, Any], chunk: Sequence[int], boxes: Sequence[Box]) -> Iterator[str]:
    """The names of the files of the chunks that overlap the boxes: `c/1/2`, or `1.2` in zarr 2."""
    prefix, separator = [], metadata.get("dimension_separator")
    if "chunk_key_encoding" in metadata:
        encoding = metadata["chunk_key_encoding"]
        prefix, default = ([], ".") if encoding["name"] == "v2" else (["c"], "/")
        separator = member(encoding, "configuration", "separator") or default
    for box in boxes:
        sides = [range(start // size, -(-stop // size)) for (start, stop), size in zip(box, chunk, strict=True)]
        for numbers in it.product(*sides):
            yield (separator or ".").join([*prefix, *map(str, numbers)]) or "0"


def _codecs(listed: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The codecs in zarr3 metadata by name, with their configurations."""
    return {codec["name"]: codec.get("configuration", {}) for codec in listed}


def _begins(
    what: str, name: str, size: int, read: Reader, shards: Mapping[str, Any], chunk: Sequence[int]
) -> list[int]:
    """The positions in a shard's file at which blosc's buffers begin."""
    packed, table = _codecs(shards["codecs"]), _codecs(shards["index_codecs"])
    if "'blosc'" not in repr(shards["codecs"]):
        return []
    if _SHARDS in packed or not set(table) <= {"bytes", "crc32c"}:
        raise CheckpointError(
            f"array {quoted(what)}: the shard {quoted(name)} holds chunks packed by blosc behind a table that is "
            "packed or nested itself, so that their sizes cannot be checked before they are unpacked. Write the array "
            'with `index_codecs` of "bytes" and "crc32c", or with another compressor.'
        )
    count = math.prod(-(-whole // max(part, 1)) for whole, part in zip(chunk, shards["chunk_shape"], strict=True))
    # A checksum of 4 bytes may follow the table, which has 16 bytes for each chunk.
    start = size - 16 * count - 4 * ("crc32c" in table) if shards["index_location"] == "end" else 0
    if start < 0:
        return []  # the reader reports a file that is too short for its table
    dtype = ">u8" if member(table, "bytes", "endian") == "big" else "<u8"
    numbers = np.frombuffer(read(start, start + 16 * count), dtype)
    return [begin for begin in numbers[0::2].tolist() if begin < min(size, _NOT_STORED)]


def look_in(directory: str, name: str) -> tuple[int, Reader]:
    """The size of a chunk's file, and a function that reads from it."""
    path = os.path.join(directory, name)

    def read(start: int, stop: int) -> bytes:
        with open(path, "rb") as file:
            return os.pread(file.fileno(), stop - start, start)

    return os.stat(path).st_size, read


def _unbounded(what: str, name: str, claim: str, own_bytes: int) -> CheckpointError:
    return CheckpointError(
        f"array {quoted(what)}: the chunk {quoted(name)} {claim}, and a chunk of it has {own_bytes}; it is damaged, or "
        "forged to take all memory. Nothing was read; copy the checkpoint again."
    )
