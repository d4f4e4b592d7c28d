"""The files of a zarr array's chunks: their names, and a check that reading one does not take more memory than its size
explains.

tensorstore unpacks gzip, zlib, bz2 and zstd only up to the length of a chunk. But it reads a file as a whole, and it
unpacks blosc to the length that the file claims, also in the chunks of a shard. So this module checks all of them
before tensorstore reads.
"""

import dataclasses
import itertools as it
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
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
# A blosc buffer begins with 4 bytes of versions and flags, then the unpacked size.
_CLAIM = slice(4, 8)
# The table of a shard has the offset and the length of each chunk, or this number twice for a chunk that is not stored.
_NOT_STORED = 2**64 - 1

# A function that reads a range of a chunk's file, and the size of the file.
Reader = Callable[[int, int], bytes]


@dataclasses.dataclass(frozen=True, slots=True)
class InnerChunks:
    """The blosc-compressed chunks inside a shard, and the table of their positions.

    **Arguments:**

    - `shape`: the shape of such a chunk.
    - `is_last`: whether the table ends the file; else it begins it.
    - `dtype`: the dtype of the table's numbers, with their byte order; `None` for a table that cannot be read here.
    - `check_bytes`: bytes of the table's checksum, which follows the numbers.
    """

    shape: tuple[int, ...]
    is_last: bool
    dtype: str | None
    check_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkFiles:
    """The names and the compression of an array's chunks.

    **Arguments:**

    - `prefix`, `separator`: the chunk (1, 2) is called `c/1/2` for "c" and "/", and `1.2` for "" and ".".
    - `is_blosc`: whether they are packed by blosc.
    - `is_sharded`: whether each is a file of several.
    - `inner`: the chunks inside a shard, if blosc compressed them.
    """

    prefix: str
    separator: str
    is_blosc: bool
    is_sharded: bool = False
    inner: InnerChunks | None = None

    def name(self, chunk: tuple[int, ...]) -> str:
        return self.separator.join([*([self.prefix] if self.prefix else []), *map(str, chunk)]) or "0"


def chunk_files(metadata: dict[str, Any]) -> ChunkFiles:
    """The chunk files of an array with this metadata, as tensorstore understands it."""
    if "codecs" not in metadata:
        is_blosc = member(metadata, "compressor", "id") == "blosc"
        return ChunkFiles("", metadata["dimension_separator"], is_blosc)
    codecs, encoding = _codecs(metadata["codecs"]), metadata["chunk_key_encoding"]
    prefix, separator = ("", ".") if encoding["name"] == "v2" else ("c", "/")
    separator = member(encoding, "configuration", "separator") or separator
    inner = _inner(codecs["sharding_indexed"]) if "sharding_indexed" in codecs else None
    return ChunkFiles(prefix, separator, "blosc" in codecs, "sharding_indexed" in codecs, inner)


def _codecs(listed: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The codecs in zarr3 metadata by name, with their configurations."""
    return {codec["name"]: codec.get("configuration", {}) for codec in listed}


def _inner(shards: dict[str, Any]) -> InnerChunks | None:
    packed, table = _codecs(shards["codecs"]), _codecs(shards["index_codecs"])
    if "sharding_indexed" in packed:
        deeper = _inner(packed["sharding_indexed"])
        return None if deeper is None else dataclasses.replace(deeper, dtype=None)
    if "blosc" not in packed:
        return None
    dtype = ">u8" if member(table, "bytes", "endian") == "big" else "<u8"
    is_readable, is_last = set(table) <= {"bytes", "crc32c"}, shards["index_location"] == "end"
    return InnerChunks(tuple(shards["chunk_shape"]), is_last, dtype if is_readable else None, 4 * ("crc32c" in table))


def require_bounded(
    what: str,
    look: Callable[[str], tuple[int, Reader]],
    files: ChunkFiles,
    chunk: Sequence[int],
    itemsize: int,
    touched: Iterable[tuple[int, ...]],
) -> None:
    """Raises if a chunk would take more memory than its own size explains.

    **Arguments:**

    - `what`: the array's name, for messages.
    - `look`: gives the size of the file of a name, and what reads it; an `OSError` or a `KeyError` if it is missing.
    - `chunk`, `itemsize`: the shape of a chunk, and the bytes of a value.
    - `touched`: the numbers of the chunks that are to be read.
    """
    own_bytes = math.prod(chunk) * itemsize
    limit_bytes = max(2 * own_bytes, _SHARD_BYTES) if files.is_sharded else 2 * own_bytes + _MORE_BYTES
    for numbers in dict.fromkeys(touched):
        name = files.name(numbers)
        try:
            size, read = look(name)
        except (OSError, KeyError):
            continue  # the reader reports a missing chunk
        if size > limit_bytes:
            raise _unbounded(what, name, f"has {size} bytes", own_bytes)
        if files.is_blosc:
            _require_true(what, name, read(0, _CLAIM.stop), own_bytes)
        if files.inner is not None:
            inner_bytes = math.prod(files.inner.shape) * itemsize
            for begin in _begins(what, name, size, read, files.inner, chunk):
                _require_true(what, name, read(begin, begin + _CLAIM.stop), inner_bytes)


def _require_true(what: str, name: str, begin: bytes, own_bytes: int) -> None:
    claimed = int.from_bytes(begin[_CLAIM], "little")
    if claimed > own_bytes:
        raise _unbounded(what, name, f"claims to unpack to {claimed} bytes", own_bytes)


def _begins(what: str, name: str, size: int, read: Reader, inner: InnerChunks, chunk: Sequence[int]) -> Iterator[int]:
    """The positions in a shard's file at which its chunks begin."""
    if inner.dtype is None:
        raise CheckpointError(
            f"array {quoted(what)}: the shard {quoted(name)} holds chunks packed by blosc behind a table that is "
            "packed or nested itself, so that their sizes cannot be checked before they are unpacked. Write the array "
            'with `index_codecs` of "bytes" and "crc32c", or with another compressor.'
        )
    count = math.prod(-(-whole // max(part, 1)) for whole, part in zip(chunk, inner.shape, strict=True))
    start = size - 16 * count - inner.check_bytes if inner.is_last else 0
    if start < 0:
        return  # the reader reports a file that is too short for its table
    table = np.frombuffer(read(start, start + 16 * count), inner.dtype)
    yield from (int(begin) for begin in table[0::2] if int(begin) < min(size, _NOT_STORED))


def touched_by(chunks: Sequence[int], boxes: Iterable[Box]) -> Iterator[tuple[int, ...]]:
    """The chunks of this shape that overlap the boxes, by their numbers along each dimension."""
    for box in boxes:
        pairs = zip(box, chunks, strict=True)
        yield from it.product(*[range(start // size, -(-stop // size)) for (start, stop), size in pairs])


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
