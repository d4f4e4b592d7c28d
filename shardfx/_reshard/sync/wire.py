"""Encodes a part of an array as a row of bytes for the wire, and writes received bytes
into buffers.

A *buffer* is a box of a target array in the memory of a receiving process. The *scales*
of a quantised array are another array, with one number for each block of elements, by
which the elements are multiplied.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..._convert import (
    NOWHERE,
    Factor,
    Piece,
    Read,
    fill,
    hull,
    once,
    source_view,
    strides_of,
    swapped,
    target_view,
    write,
)
from ..._ground.boxes import Box
from ..._ground.spec import bits
from .kinds import SentPiece, Transfer


# The memory of each buffer of a leaf, by number.
Memory = Callable[[int], np.ndarray]


class ShardBytes(NamedTuple):
    """A contiguous range of bytes, which is sent or received without a copy. In the
    sending process, `array` is the path of an array, and `shard` is the number of one
    of its shards. In the receiving process, they are the numbers of a leaf and of one
    of its buffers.
    """

    array: str | int
    shard: int
    start: int
    stop: int


def range_in_shard(one: Transfer, shard: Box) -> tuple[int, int] | None:
    """The first byte, and the byte after the last one, of the part `one` in the shard
    with the box `shard`. `None` if the bytes to send are not a contiguous range of the
    shard's bytes.
    """
    if one.form.value.scale is not None or one.form.casts:
        return None
    start = [at - low for at, (low, _) in zip(one.source, shard, strict=True)]
    digits = [factor[:3] for factor in once(one.piece).factors]
    return _run(one, [stop - low for low, stop in shard], start, digits)


def range_in_buffer(
    one: Transfer, sizes: Sequence[int], dtype: np.dtype
) -> tuple[int, int] | None:
    """The first byte, and the byte after the last one, of the range of a buffer's bytes
    to which the received bytes of the part `one` can be written unchanged. `None` if
    there is none. `sizes` and `dtype` are the buffer's.
    """
    form = one.form
    is_repeated = any(factor.source_dim == NOWHERE for factor in form.factors)
    if (
        is_repeated
        or form.scales
        or form.casts < len(form.value.casts)
        or form.sent != dtype
    ):
        return None
    return _run(
        one,
        sizes,
        one.target,
        [(f.size, f.target_dim, f.target_step) for f in form.factors],
    )


def _run(
    one: Transfer,
    sizes: Sequence[int],
    start: Sequence[int],
    digits: Sequence[tuple[int, int, int]],
) -> tuple[int, int] | None:
    strides = strides_of(sizes)
    expected = strides_of([size for size, _, _ in digits])
    itemsize = one.form.sent.itemsize
    if bits(one.form.sent) < 8 or [strides[dim] * step for _, dim, step in digits] != [
        *expected
    ]:
        return None
    first = (
        sum(at * stride for at, stride in zip(start, strides, strict=True)) * itemsize
    )
    return first, first + one.bytes


def pack(one: Transfer, memory: np.ndarray, read: Read) -> None:
    """Encodes a part of an array as the row of bytes `memory`. `read` returns the
    elements of a box, given the array's path. An element that is needed several times
    is encoded once. Elements are multiplied by scales and cast here if that gives fewer
    bytes.
    """
    form, piece = one.form, once(one.piece)
    value = form.value._replace(
        casts=form.value.casts[: form.casts],
        scale=None if form.scales else form.value.scale,
    )
    factors = [
        Factor(f.size, f.source_dim, f.source_step, dim, 1)
        for dim, f in enumerate(piece.factors)
    ]
    zero, box = (0,) * len(factors), tuple((0, size) for size in one.shape)
    is_narrow = bits(form.sent) < 8
    own = (
        np.empty(one.shape, form.sent)
        if is_narrow
        else _typed(memory[: one.element_bytes], form.sent, one.shape)
    )
    fill(own, box, Piece(value, piece.source, zero, tuple(factors)), read)
    if is_narrow:
        memory[: one.element_bytes] = _packed(own)
    if form.scales and form.value.scale is not None:
        memory[one.element_bytes :] = (
            np.ascontiguousarray(read(form.value.scale.path, one.scale_box))
            .reshape(-1)
            .view(np.uint8)
        )


def unpack(step: SentPiece, memory: np.ndarray, buffer_of: Memory) -> None:
    """Decodes the received bytes in `memory` and writes them into every buffer that
    needs them. `buffer_of` returns the memory of a buffer, given its number.
    """
    one = step.places[0]
    form, raw = one.form, memory[: one.element_bytes]
    values = (
        _unpacked(raw, form.sent, one.shape)
        if bits(form.sent) < 8
        else _typed(raw, form.sent, one.shape)
    )
    read = _reader(one, values, memory[one.element_bytes :]) if form.scales else None
    for place in step.places:
        buffer = buffer_of(place.buffer)
        if read is not None:
            fill(buffer, tuple((0, size) for size in buffer.shape), place.piece, read)
            continue
        repeated = [
            1 if f.source_dim == NOWHERE else f.size for f in place.form.factors
        ]
        target = target_view(buffer, place.piece)
        left = place.form.value._replace(casts=place.form.value.casts[form.casts :])
        write(
            target,
            np.broadcast_to(values.reshape(repeated), target.shape),
            place.piece._replace(value=left),
        )


def _reader(one: Transfer, values: np.ndarray, scales: np.ndarray) -> Read:
    """Returns a function that `fill` calls for elements of an array, with the array's
    path and a box. It returns `scales` for the path of the scales, and `values`, the
    received elements of the part `one`, for any other path.
    """
    piece, scale = once(one.piece), one.form.value.scale
    assert scale is not None and one.form.scales is not None
    box = hull(swapped(piece))
    whole = np.empty([stop - start for start, stop in box], values.dtype)
    source_view(whole, piece, [low for low, _ in box])[...] = values
    sizes = [stop - start for start, stop in one.scale_box]
    by = _typed(scales, one.form.scales, sizes)
    return lambda path, _: by if path == scale.path else whole


def _typed(raw: np.ndarray, dtype: np.dtype, shape: Sequence[int]) -> np.ndarray:
    return np.ndarray(shape, dtype, raw)


def _packed(values: np.ndarray) -> np.ndarray:
    """4-bit numbers as bytes, two numbers to a byte, the first one in the low bits."""
    flat = np.zeros(-(-values.size // 2) * 2, np.uint8)
    flat[: values.size] = values.reshape(-1).view(np.uint8) & 15
    return flat[::2] | flat[1::2] << 4


def _unpacked(raw: np.ndarray, dtype: np.dtype, shape: Sequence[int]) -> np.ndarray:
    flat = np.stack([raw & 15, raw >> 4], axis=1).reshape(-1)[: int(np.prod(shape))]
    return flat.view(dtype).reshape(shape)
