"""The form in which the elements of a source array are sent: which casts and products
the sender makes, and which the receiver.

The *scales* of a quantised array are another array, with one number for each block of
elements, by which the elements are multiplied.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ..._convert import Piece, Value, dtypes_of
from ..._ground.spec import bits
from ..pieces.shard_part import sender_cast_count, sent_bits
from .kinds import WireForm


_FLOAT32 = np.dtype("float32")


class Encoding(NamedTuple):
    """How elements of a source array are sent. `value` has the array, its scales and
    its casts, and `path` is the array's path. If the receiver multiplies by the scales,
    `scales` is their dtype, and `casts` is empty. Otherwise `scales` is `None`, and
    elements have the dtype `dtype` before `casts`: float32 if the sender multiplies
    them.
    """

    value: Value
    path: str
    dtype: np.dtype
    casts: tuple[object, ...]
    scales: np.dtype | None


def encoding_of(value: Value, dtypes: Mapping[str, np.dtype]) -> Encoding:
    """How elements of the source in `value` are sent. The receiver multiplies by scales
    if that sends fewer bytes, else the sender does. `dtypes` has the dtypes of sources
    and scales, by path.
    """
    assert value.path is not None
    dtype = dtypes[value.path]
    casts = value.casts
    scales = None
    if value.scale is not None:
        if bits(dtype) < sent_bits(value, _FLOAT32):
            # Elements and scales have fewer bytes than their product, so the receiver
            # multiplies.
            casts = ()
            scales = dtypes[value.scale.path]
        else:
            dtype = _FLOAT32
    return Encoding(
        value=value,
        path=value.path,
        dtype=dtype,
        casts=casts,
        scales=scales,
    )


def form_of(
    encoding: Encoding | None,
    piece: Piece,
    rank: int,
    dtype: np.dtype,
) -> WireForm:
    """The form in which a part of an array, `piece`, is sent. `encoding` says how the
    source's elements are sent; a constant has none, and is not sent. `rank` is the
    number of dimensions of the source, and `dtype` the dtype of the target.
    """
    if encoding is None:
        return WireForm(
            value=piece.value,
            factors=piece.factors,
            source_rank=0,
            sender_casts=0,
            sent_dtype=dtype,
            scales_dtype=None,
        )
    cast_count = sender_cast_count(encoding.casts, encoding.dtype)
    sender_dtypes = [encoding.dtype, *dtypes_of(encoding.casts[:cast_count])]
    return WireForm(
        value=encoding.value,
        factors=piece.factors,
        source_rank=rank,
        sender_casts=cast_count,
        sent_dtype=np.dtype(sender_dtypes[-1]),
        scales_dtype=encoding.scales,
    )
