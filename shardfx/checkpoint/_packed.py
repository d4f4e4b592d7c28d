"""Tensors with several elements in a byte, as safetensors stores 4 and 6 bits.

JAX's arrays on the host have one element in a byte, so such a tensor is read as bytes
and unpacked. The first of two elements is in the lower half of a byte, as in PyTorch's
`float4_e2m1fn_x2`.
"""

import dataclasses
import math

import numpy as np

from .._ground.boxes import Box
from ._entry import PACKED_BITS, FileArray


def is_packed(entry: object) -> bool:
    """Whether a stored array has several elements in a byte."""
    return isinstance(entry, FileArray) and entry.stored in PACKED_BITS


def raw_entry(entry: FileArray) -> FileArray:
    """The entry of the bytes of a packed tensor, as uint8.

    If rows are whole bytes, their last dimension is shorter, else there is one row.
    """
    return dataclasses.replace(
        entry, shape=_raw_shape(entry), dtype=np.dtype(np.uint8), stored="U8"
    )


def _raw_shape(entry: FileArray) -> tuple[int, ...]:
    each = PACKED_BITS[entry.stored]
    if _has_whole_rows(entry):
        return (*entry.shape[:-1], entry.shape[-1] * each // 8)
    return (math.prod(entry.shape) * each // 8,)


def _has_whole_rows(entry: FileArray) -> bool:
    each = PACKED_BITS[entry.stored]
    return bool(entry.shape) and entry.shape[-1] * each % 8 == 0


def raw_box(entry: FileArray, box: Box) -> Box:
    """The bytes that hold a box of a tensor with two elements in a byte."""
    if _has_whole_rows(entry):
        start, stop = box[-1]
        return (*box[:-1], (start // 2, -(-stop // 2)))
    ((first, last),) = _flat_range(entry, box)
    return ((first // 2, -(-last // 2)),)


def _flat_range(entry: FileArray, box: Box) -> tuple[tuple[int, int]]:
    """The positions of the first element of a box, and after its last, in row-major
    order.
    """
    low = [start for start, _ in box]
    high = [stop - 1 for _, stop in box]
    if not all(start < stop for start, stop in box):
        return ((0, 0),)
    first = int(np.ravel_multi_index(low, entry.shape)) if box else 0
    last = int(np.ravel_multi_index(high, entry.shape)) if box else 0
    return ((first, last + 1),)


def unpacked(raw: np.ndarray, entry: FileArray, box: Box) -> np.ndarray:
    """The elements of a box, from the bytes of `raw_box`."""
    halves = np.stack([raw & 15, raw >> 4], axis=-1).reshape(*raw.shape[:-1], -1)
    shape = [stop - start for start, stop in box]
    if _has_whole_rows(entry):
        start = box[-1][0] % 2
        chosen = halves[..., start : start + shape[-1]]
    else:
        ((first, _),) = _flat_range(entry, box)
        strides = np.cumprod([1, *entry.shape[:0:-1]])[::-1] if box else []
        where = np.zeros(shape, int)
        for dim, stride in enumerate(strides):
            steps = np.arange(shape[dim]) * int(stride)
            where += steps.reshape(-1, *[1] * (len(shape) - dim - 1))
        chosen = halves[where + first % 2]
    return np.ascontiguousarray(chosen).reshape(shape).view(entry.dtype)
