"""The part of a shard that one device sends to another, its memory, and its division
into smaller parts.
"""

import functools as ft
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..._convert import (
    NOWHERE,
    Arithmetic,
    Factor,
    Piece,
    Value,
    dtypes_of,
    hull,
    iterations,
    once,
    swapped,
)
from ..._ground.boxes import volume
from ..._ground.spec import bits


# The bytes that each sender sends to each receiver, by (sender, receiver).
Links = dict[tuple[int, int], int]


class Block(NamedTuple):
    """The shape and dtype of one device's shard."""

    shape: tuple[int, ...]
    dtype: Any


class ShardPart(NamedTuple):
    """A part of a shard that one device sends to another device, or copies into a shard
    of its own.

    **Arguments:**

    - `sender`, `receiver`: the numbers of the two devices. They are equal if the device
      copies its own elements.
    - `piece`: a strided copy, with positions in the sender's shard and in the
      receiver's shard. A constant has a position only in the receiver's shard. If the
      elements of a quantised array are multiplied by scales, the position in the source
      is that in the whole array, which also tells which scales they need.
    - `bytes`: the bytes sent, if sender and receiver differ.
    - `bits`: the bits of an element in the widest dtype that it has on its way from the
      source to the target.
    """

    sender: int
    receiver: int
    piece: Piece
    bytes: int
    bits: int = 0

    @property
    def memory_bytes(self) -> int:
        """The bytes that the part spans, gaps included, in the source's or the target's
        shard, whichever is more.
        """
        return -(-_extent(self.piece) * self.bits // 8)


def unsent(piece: Piece, elements: int, widths: Sequence[int]) -> ShardPart:
    """A part of a shard of which `elements` are sent, without sender and receiver.
    `widths` are the bits of an element in each dtype that it has on its way.
    """
    sent_bytes = -(-elements * min(widths) // 8)
    return ShardPart(
        sender=-1,
        receiver=-1,
        piece=piece,
        bytes=sent_bytes,
        bits=max(widths),
    )


def sender_cast_count(casts: Sequence[object], dtype: object) -> int:
    """The number of `casts` that the sender applies: those after which elements have
    the fewest bits. The receiver applies the others. For float32 elements (`dtype`) and
    casts to bfloat16 and then to float32, it is 1.
    """
    sizes = [bits(dtype)]
    for to in casts:
        size = sizes[-1]
        if not isinstance(to, Arithmetic):
            size = bits(to)
        sizes.append(size)
    return sizes.index(min(sizes))


def bits_on_the_way(value: Value, dtype: object) -> list[int]:
    """The bits of an element of `dtype` in the source, and after each cast of `value`.
    Operations that are no casts keep the dtype, and have no entry.
    """
    dtypes = [dtype, *dtypes_of(value.casts)]
    return list(map(bits, dtypes))


def sent_bits(value: Value, dtype: object) -> int:
    """The bits of an element of `dtype` when it is sent, after the casts of `value`
    that the sender applies.
    """
    return min(bits_on_the_way(value, dtype))


def _extent(piece: Piece) -> int:
    """The number of elements that a piece spans, gaps included, in the source or in the
    target, whichever is larger.
    """
    return _extent_of(piece.factors, len(piece.source), len(piece.target))


@ft.lru_cache(maxsize=4096)
def _extent_of(factors: tuple[Factor, ...], source_rank: int, target_rank: int) -> int:
    """`_extent` of a piece with these factors, which does not depend on where it
    starts.
    """
    piece = Piece(
        value=Value(None),
        source=(0,) * source_rank,
        target=(0,) * target_rank,
        factors=factors,
    )
    # `hull` is the smallest box of the target; `swapped` exchanges source and target.
    target_extent = volume(hull(piece))
    source_extent = volume(hull(swapped(once(piece))))
    return max(piece.elements, target_extent, source_extent)


def divided(part: ShardPart, most_bytes: int) -> list[ShardPart]:
    """Divides a part into parts of at most `most_bytes` of memory. They are larger only
    if an element would otherwise be sent twice.
    """
    factors = [factor for factor in part.piece.factors if factor.source_dim != NOWHERE]
    if part.memory_bytes <= most_bytes or not factors:
        return [part]

    outer = min(factors, key=lambda factor: _division_order(part.piece, factor))
    iterations_that_fit = max(1, outer.size * most_bytes // part.memory_bytes)
    section_count = max(2, -(-outer.size // iterations_that_fit))
    iterations_per_section = -(-outer.size // section_count)
    bytes_per_iteration = part.bytes / outer.size
    smaller_parts = []
    for start in range(0, outer.size, iterations_per_section):
        stop = min(outer.size, start + iterations_per_section)
        section = part._replace(
            piece=iterations(part.piece, outer, start, stop),
            bytes=math.ceil(bytes_per_iteration * (stop - start)),
        )
        smaller_parts += divided(section, most_bytes)
    return smaller_parts


def _division_order(piece: Piece, factor: Factor) -> tuple[int, int]:
    """A key that orders the factors along which `piece` can be divided: the one whose
    elements have the largest gaps first, since half of its iterations then span the
    fewest elements; of several, the longest, which gives the fewest parts.
    """
    half_size = -(-factor.size // 2)
    half = iterations(piece, factor, start=0, stop=half_size)
    return _extent(half), -factor.size


def least_memory_bytes(part: ShardPart) -> int:
    """The memory, in bytes, of the smallest parts into which a part of a shard can be
    divided.
    """
    repetitions = [
        factor for factor in part.piece.factors if factor.source_dim == NOWHERE
    ]
    one_element = part.piece._replace(factors=tuple(repetitions))
    return part._replace(piece=one_element).memory_bytes
