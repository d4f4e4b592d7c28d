"""One array of a checkpoint as an index lists it, in a file or in a store of chunks,
and casts of its values.
"""

import dataclasses
import functools as ft
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .._convert import as_bits
from .._ground.boxes import Box
from .._ground.copying import copy
from .._ground.errors import CheckpointError
from .._ground.spec import DType, bits
from .._ground.text import quoted


# The bits of an element of tensors that have several elements in a byte, by the name of
# the dtype in safetensors.
PACKED_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


class ArrayPart(NamedTuple):
    """A part of an array that is stored in several: a box of the array, and the file
    and the offset of the box's bytes.
    """

    box: Box
    file: str
    offset: int


@dataclasses.dataclass(frozen=True, slots=True)
class FileArray:
    """One array of a checkpoint whose bytes are contiguous in a file, as in
    safetensors, or in several parts that are each contiguous.

    **Arguments:**

    - `path`: the name of the array in the checkpoint, such as `layers/0/weight` or
      `model.layers.0.weight`.
    - `shape`, `dtype`: the shape and dtype of the array in JAX. `dtype` is `None` if
      JAX lacks it.
    - `file`: the real path of the file.
    - `stored`: the name of the dtype in the checkpoint.
    - `offset`: the position of the array's first byte in the file.
    - `parts`: the parts of an array that `save` wrote to a store in several parts; `()`
      for other arrays.
    """

    __module__ = "shardfx.checkpoint"

    path: str
    shape: tuple[int, ...]
    dtype: DType
    file: str
    stored: str
    offset: int
    parts: tuple[ArrayPart, ...] = ()

    @property
    def nbytes(self) -> int | None:
        """The number of bytes of the array in the file; `None` if JAX lacks its dtype."""
        if self.stored in PACKED_BITS:
            return math.prod(self.shape) * PACKED_BITS[self.stored] // 8
        return _nbytes(self.shape, self.dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class StoreArray:
    """One array of a checkpoint that is stored in chunks: a zarr directory, or a part
    of an OCDBT database.

    **Arguments:**

    - `path`: the name of the array in the checkpoint.
    - `shape`, `dtype`: the shape and dtype of the array in JAX. `dtype` is `None` if
      JAX lacks it.
    - `file`: the real path of the directory of the array or of the database.
    - `stored`: the name of the dtype in the checkpoint.
    - `chunks`: the shape of a chunk, which is the smallest part that can be read.
    - `driver`: the name of the tensorstore driver that reads the array.
    - `key`: the array's key in the database; `None` for a zarr directory.
    - `group`: the prefix under which an eformer index of version 2 lists the array;
      `None` in other checkpoints.
    """

    __module__ = "shardfx.checkpoint"

    path: str
    shape: tuple[int, ...]
    dtype: DType
    file: str
    stored: str
    chunks: tuple[int, ...]
    driver: str
    key: str | None = None
    group: str | None = None

    @property
    def nbytes(self) -> int | None:
        """The number of bytes of the array, uncompressed; `None` if JAX lacks its
        dtype.
        """
        return _nbytes(self.shape, self.dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class ListedArray:
    """One array that an eformer index lists and whose directory holds no array. It can
    be planned, but not loaded.

    **Arguments:**

    - `path`: the name of the array in the index.
    - `shape`, `dtype`: the shape and dtype of the array in the index; `None` if the
      index has none.
    - `file`: the real path of the directory.
    - `stored`: the name of the dtype in the index.
    - `group`: the prefix under which the index lists the array.
    """

    __module__ = "shardfx.checkpoint"

    path: str
    shape: tuple[int, ...] | None
    dtype: DType
    file: str
    stored: str
    group: str | None = None

    @property
    def nbytes(self) -> int | None:
        """The number of bytes of the array; `None` if the index lacks its shape or
        dtype.
        """
        if self.shape is None:
            return None
        return _nbytes(self.shape, self.dtype)


# One array of a checkpoint, as an index lists it.
ArrayEntry = FileArray | StoreArray | ListedArray


def itemsize(dtype: object) -> int:
    """The number of bytes of one element on the host: 1 for `int4`, 8 for a threefry
    PRNG key.
    """
    return -(-bits(dtype) // 8)


def _nbytes(shape: tuple[int, ...], dtype: object) -> int | None:
    if dtype is None:
        return None
    return math.prod(shape) * itemsize(dtype)


@ft.lru_cache(maxsize=256)
def may_change(stored: Any, to: Any) -> bool:
    """Whether a cast from the dtype `stored` to the dtype `to` may change a value.

    Rounding between floating-point dtypes does not count as a change.
    """
    if jnp.issubdtype(to, jnp.bool_):
        return not jnp.issubdtype(stored, jnp.bool_)
    if jnp.issubdtype(stored, jnp.integer):
        least = int(jnp.iinfo(stored).min)
        most = int(jnp.iinfo(stored).max)
        if jnp.issubdtype(to, jnp.integer):
            return not jnp.iinfo(to).min <= least <= most <= jnp.iinfo(to).max
        if not jnp.issubdtype(to, jnp.inexact):
            return False
        # A floating-point dtype has all integers up to this one, and so does a complex
        # one of two such numbers.
        exact_most = 2 ** (jnp.finfo(to).nmant + 1)
        return max(-least, most) > exact_most
    if jnp.issubdtype(stored, jnp.complexfloating):
        return not jnp.issubdtype(to, jnp.complexfloating)
    return bool(
        jnp.issubdtype(stored, jnp.floating) and jnp.issubdtype(to, jnp.integer)
    )


def fill(view: np.ndarray, values: np.ndarray, name: str) -> None:
    """Casts `values` to the dtype of `view`, and writes them into `view`.

    Raises `CheckpointError`, with the array's name `name`, if a cast from or to an
    integer dtype changes a value.
    """
    if view.dtype == values.dtype:
        # As integers, since NumPy copies those faster than JAX's dtypes.
        copy(as_bits(view), as_bits(values))
        return
    is_checked = may_change(values.dtype, view.dtype) and values.size > 0
    # As in JAX, a value too large for a smaller floating-point dtype becomes infinite
    # without an error.
    with np.errstate(over="ignore", invalid="ignore"):
        if is_checked and jnp.issubdtype(view.dtype, jnp.integer):
            _require_range(view.dtype, values, name)
        copy(view, values)
        changed = None
        if is_checked:
            changed = _changed(view, values)
    if changed is not None and changed.any():
        raise CheckpointError(
            f"array {quoted(name)} holds {values[changed][0]}, which is no number of"
            f" {view.dtype}; plan a dtype that has it. Nothing is rounded to an"
            " integer, and no integer is rounded."
        )


def _require_range(dtype: object, values: np.ndarray, name: str) -> None:
    """Raises `CheckpointError` if a value is out of the range of the integer dtype
    `dtype`, or NaN. There is at least one value.
    """
    as_number = float
    if jnp.issubdtype(values.dtype, jnp.integer):
        as_number = int
    low = as_number(values.min())
    high = as_number(values.max())
    least = int(jnp.iinfo(dtype).min)
    most = int(jnp.iinfo(dtype).max)
    # With this comparison NaN is out of range, since each comparison with it is false.
    if not (least <= low and high <= most):
        value = low
        if least <= low:
            value = high
        raise CheckpointError(
            f"array {quoted(name)} holds {value}, and {dtype}"
            f" goes from {least} to {most}; plan a wider dtype for it. 64-bit ones need"
            ' `jax.config.update("jax_enable_x64", True)`.'
        )


def _changed(view: np.ndarray, values: np.ndarray) -> np.ndarray | None:
    """A mask of the elements of `values` that differ from their casts, which are in
    `view`.

    It is `None` for casts between integers, for which the range of the values is
    checked instead.
    """
    if jnp.issubdtype(values.dtype, jnp.floating):
        in_float64 = values.astype(np.float64)
        return np.asarray(in_float64 != view.astype(np.float64))
    if jnp.issubdtype(view.dtype, jnp.bool_):
        return np.asarray(view.astype(values.dtype) != values)
    if jnp.issubdtype(view.dtype, jnp.integer):
        return None
    # If the integer dtype lacks the number, the result of the cast back depends on the
    # machine. Of a complex number that was an integer, the imaginary part is 0.
    floats = np.real(view).astype(np.float64)
    most = int(jnp.iinfo(values.dtype).max)
    top = 2.0 ** most.bit_length()
    is_in_range = (floats >= -top) & (floats < top)
    return np.asarray(~is_in_range | (floats.astype(values.dtype) != values))
