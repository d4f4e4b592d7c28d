"""One array of a checkpoint as an index has it: in a file, or in a store of chunks."""

import dataclasses
import math
from typing import Any

from .._ground.spec import bits
from ._chunks import ChunkFiles


@dataclasses.dataclass(frozen=True, slots=True)
class FileArray:
    """One array of a checkpoint whose bytes lie together in a file, as in safetensors.

    **Arguments:**

    - `path`: its name in the checkpoint, as in `layers/0/weight` or `model.layers.0.weight`.
    - `shape`, `dtype`: what it is in JAX. `dtype` is `None` where JAX lacks it.
    - `file`: the real path of the file.
    - `stored`: the dtype in the words of the checkpoint.
    - `offset`: where the array starts, counted from the file's first byte.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    file: str
    stored: str
    offset: int

    @property
    def nbytes(self) -> int | None:
        """How many bytes the array has; `None` where JAX lacks its dtype."""
        return _nbytes(self.shape, self.dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class StoreArray:
    """One array of a checkpoint that is cut into chunks: a directory of zarr's, or a part of an OCDBT database.

    **Arguments:**

    - `path`: its name in the checkpoint.
    - `shape`, `dtype`: what it is in JAX. `dtype` is `None` where JAX lacks it.
    - `file`: the real path of the array's directory, or of the database's.
    - `stored`: the dtype in the words of the checkpoint.
    - `chunks`: the shape of a chunk: what is read at once.
    - `driver`: which tensorstore driver reads it.
    - `key`: in a database, the key of the array.
    - `group`: in an eformer index of version 2, the prefix under which it is listed.
    - `files`: how its chunks are called and packed.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    file: str
    stored: str
    chunks: tuple[int, ...]
    driver: str
    key: str | None = None
    group: str | None = None
    files: ChunkFiles = ChunkFiles()

    @property
    def nbytes(self) -> int | None:
        """How many bytes the array has, uncompressed; `None` where JAX lacks its dtype."""
        return _nbytes(self.shape, self.dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class ListedArray:
    """One array that an eformer index lists, and whose directory holds no array. It can be planned, and not loaded.

    **Arguments:**

    - `path`, `shape`, `dtype`: what the index says; `None` where it does not.
    - `file`: the real path of the directory.
    - `stored`: the dtype in the words of the index.
    - `group`: the prefix under which it is listed.
    """

    path: str
    shape: tuple[int, ...] | None
    dtype: Any
    file: str
    stored: str
    group: str | None = None

    @property
    def nbytes(self) -> int | None:
        """How many bytes the array has, if the index says its shape and dtype."""
        return None if self.shape is None else _nbytes(self.shape, self.dtype)


ArrayEntry = FileArray | StoreArray | ListedArray


def itemsize(dtype: Any) -> int:
    """Bytes of one element on the host: 1 for `int4`, 8 for a threefry PRNG key."""
    return -(-bits(dtype) // 8)


def _nbytes(shape: tuple[int, ...], dtype: Any) -> int | None:
    return None if dtype is None else math.prod(shape) * itemsize(dtype)
