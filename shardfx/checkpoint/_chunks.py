"""The files of a zarr array's chunks: what they are called, and whether reading one takes more memory than it may.

tensorstore unpacks gzip, zlib, bz2 and zstd only as far as a chunk is long. But it takes a file as a whole, and unpacks
blosc to the length that the file claims; both are looked at here before it does.
"""

import dataclasses
import itertools as it
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from .._ground.boxes import Box
from .._ground.errors import CheckpointError
from .._ground.text import quoted


# A chunk that cannot be packed takes a little more than its own size.
_MORE_BYTES = 2**20
# A shard is a file of many chunks with a table of them, which may be larger than they are.
_SHARD_BYTES = 2**30
# blosc begins with 4 bytes of versions and flags, then the size of what it unpacks to.
BEGIN_BYTES = 8


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkFiles:
    """How an array's chunks are called, and how they are packed.

    **Arguments:**

    - `prefix`, `separator`: the chunk (1, 2) is called `c/1/2` for "c" and "/", and `1.2` for "" and ".".
    - `is_blosc`: whether they are packed by blosc.
    - `is_sharded`: whether each is a file of several.
    """

    prefix: str = ""
    separator: str = "."
    is_blosc: bool = False
    is_sharded: bool = False

    def name(self, chunk: tuple[int, ...]) -> str:
        return self.separator.join([*([self.prefix] if self.prefix else []), *map(str, chunk)]) or "0"


def chunk_files(content: dict[str, Any], driver: str) -> ChunkFiles:
    """The chunks of the array that this metadata describes."""
    if driver == "zarr":
        packed = content.get("compressor")
        separator = content.get("dimension_separator")
        is_blosc = isinstance(packed, dict) and packed.get("id") == "blosc"
        return ChunkFiles("", separator if separator in (".", "/") else ".", is_blosc)
    names = [codec.get("name") for codec in content.get("codecs") or () if isinstance(codec, dict)]
    encoding = content.get("chunk_key_encoding")
    encoding = encoding if isinstance(encoding, dict) else {}
    is_old, more = encoding.get("name") == "v2", encoding.get("configuration")
    separator = more.get("separator") if isinstance(more, dict) else None
    if separator not in (".", "/"):
        separator = "." if is_old else "/"
    return ChunkFiles("" if is_old else "c", separator, "blosc" in names, "sharding_indexed" in names)


def require_bounded(
    what: str, look: Callable[[str], tuple[int, bytes]], files: ChunkFiles, own_bytes: int, touched: Iterable[Any]
) -> None:
    """Raises if a chunk would take more memory than its own size explains.

    **Arguments:**

    - `what`: the array's name, for messages.
    - `look`: gives the size of the chunk of a name, and how it begins; an `OSError` or a `KeyError` if it is missing.
    - `own_bytes`: of a chunk, unpacked.
    - `touched`: the numbers of the chunks that are to be read.
    """
    limit_bytes = max(2 * own_bytes, _SHARD_BYTES) if files.is_sharded else 2 * own_bytes + _MORE_BYTES
    for chunk in dict.fromkeys(touched):
        name = files.name(chunk)
        try:
            size, begin = look(name)
        except (OSError, KeyError):
            continue  # a missing chunk is for the reader to say
        if size > limit_bytes:
            raise _unbounded(what, name, f"has {size} bytes", own_bytes)
        claimed = int.from_bytes(begin[4:BEGIN_BYTES], "little") if files.is_blosc else 0
        if claimed > own_bytes:
            raise _unbounded(what, name, f"claims to unpack to {claimed} bytes", own_bytes)


def touched_by(chunks: Sequence[int], boxes: Iterable[Box]) -> Iterator[tuple[int, ...]]:
    """The chunks of this shape that the boxes touch, by their numbers along each dimension."""
    for box in boxes:
        pairs = zip(box, chunks, strict=True)
        yield from it.product(*[range(start // size, -(-stop // size)) for (start, stop), size in pairs])


def look_in(directory: str, name: str) -> tuple[int, bytes]:
    """The size of a chunk's file, and how it begins."""
    with open(os.path.join(directory, name), "rb") as file:
        return os.fstat(file.fileno()).st_size, file.read(BEGIN_BYTES)


def _unbounded(what: str, name: str, claim: str, own_bytes: int) -> CheckpointError:
    return CheckpointError(
        f"array {quoted(what)}: the chunk {quoted(name)} {claim}, and a chunk of it has {own_bytes}; it is damaged, or "
        "forged to take all memory. Nothing was read; copy the checkpoint again."
    )
