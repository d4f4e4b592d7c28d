"""Tensors with several elements in a byte, as safetensors stores 4 and 6 bits.

JAX's arrays on the host have one element in a byte, so such a tensor is read as bytes
and unpacked. The first of two elements is in the lower half of a byte, as in PyTorch's
`float4_e2m1fn_x2`.
"""

import dataclasses
import math

import numpy as np

from .._convert import strides_of
from .._ground.boxes import Box, box_shape, volume
from ._entry import PACKED_BITS, FileArray


def is_packed(entry: object) -> bool:
    """Whether a stored array has several elements in a byte."""
    return isinstance(entry, FileArray) and entry.stored in PACKED_BITS


def raw_entry(entry: FileArray) -> FileArray:
    """The entry of the bytes of a packed tensor, as uint8.

    Its last dimension counts the bytes of a row if each row fills whole bytes;
    otherwise it has one dimension.
    """
    return dataclasses.replace(
        entry,
        shape=_raw_shape(entry),
        dtype=np.dtype(np.uint8),
        stored="U8",
    )


def _raw_shape(entry: FileArray) -> tuple[int, ...]:
    bits_each = PACKED_BITS[entry.stored]
    if _has_whole_rows(entry):
        row_bytes = entry.shape[-1] * bits_each // 8
        return (*entry.shape[:-1], row_bytes)
    nbytes = math.prod(entry.shape) * bits_each // 8
    return (nbytes,)


def _has_whole_rows(entry: FileArray) -> bool:
    """Whether each row of a packed tensor begins at a byte."""
    if not entry.shape:
        return False
    return entry.shape[-1] * PACKED_BITS[entry.stored] % 8 == 0


def raw_box(entry: FileArray, box: Box) -> Box:
    """The bytes that hold a box of a tensor with two elements in a byte."""
    if _has_whole_rows(entry):
        start, stop = box[-1]
        return (*box[:-1], _bytes_of(start, stop))
    first, stop = _flat_range(entry, box)
    return (_bytes_of(first, stop),)


def _bytes_of(start: int, stop: int) -> tuple[int, int]:
    """The bytes that hold a range of elements, two in each byte."""
    return start // 2, -(-stop // 2)


def _flat_range(entry: FileArray, box: Box) -> tuple[int, int]:
    """The positions of the first element of a box, and after its last, in row-major
    order.
    """
    if not volume(box):
        return 0, 0
    first = 0
    last = 0
    strides = strides_of(entry.shape)
    for (start, stop), stride in zip(box, strides, strict=True):
        first += start * stride
        last += (stop - 1) * stride
    return first, last + 1


def unpacked(raw: np.ndarray, entry: FileArray, box: Box) -> np.ndarray:
    """The elements of a box of the packed tensor `entry`, from the bytes `raw` that
    `raw_box` names. A byte has two elements, the first in its lower half.
    """
    low = raw & 15
    high = raw >> 4
    elements = np.stack([low, high], axis=-1).reshape(*raw.shape[:-1], -1)
    shape = box_shape(box)
    if _has_whole_rows(entry):
        # A box that begins at an odd element begins in the middle of a byte.
        start = box[-1][0] % 2
        chosen = elements[..., start : start + shape[-1]]
    else:
        # The position of each element of the box among those of the bytes.
        first, _ = _flat_range(entry, box)
        positions = np.full(shape, first % 2)
        for dim, stride in enumerate(strides_of(entry.shape)):
            steps = np.arange(shape[dim]) * stride
            other_dims = [1] * (len(shape) - dim - 1)
            positions += steps.reshape(-1, *other_dims)
        chosen = elements[positions]
    return np.ascontiguousarray(chosen).reshape(shape).view(entry.dtype)
