import dataclasses
import math
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class ArrayEntry:
    """One array of a checkpoint, as its headers describe it.

    **Arguments:**

    - `path`: its name in the checkpoint, as in `layers/0/weight` or `model.layers.0.weight`.
    - `shape`: `None` where the checkpoint does not say.
    - `dtype`: the dtype that it has in JAX; `None` where that lacks it, or where the checkpoint does not say.
    - `file`: the real path of the file, or of the array's directory.
    - `stored`: the dtype in the words of the checkpoint.
    - `offset`: in safetensors, where the array starts, counted from the file's first byte.
    - `chunks`: in stores of chunks, the shape of a chunk: what is read at once.
    - `group`: in an eformer index of version 2, the prefix under which it is listed.
    - `key`: in a database, the key of the array.
    - `driver`: which tensorstore driver reads it.
    """

    path: str
    shape: tuple[int, ...] | None
    dtype: Any
    file: str
    stored: str
    offset: int | None = None
    chunks: tuple[int, ...] | None = None
    group: str | None = None
    key: str | None = None
    driver: str | None = None

    @property
    def nbytes(self) -> int | None:
        """How many bytes the array has, uncompressed."""
        if self.shape is None or self.dtype is None:
            return None
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize
