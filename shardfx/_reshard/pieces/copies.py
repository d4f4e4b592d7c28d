"""The copies by which the host assembles new shards from old ones: which bytes of an
old shard go to which bytes of a new one. `host` carries them out.
"""

import itertools as it
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..._convert import NOWHERE, strides_of
from ..._ground.boxes import Box, box_shape, volume
from ..._ground.copying import aligned, block_dim
from .shard_part import Block, ShardPart


# New shards of fewer bytes than this in total are assembled in one memory.
_SMALL_BYTES = 1 << 20


class Copy(NamedTuple):
    """A copy of unchanged elements from an old shard to a new one, as strided views of
    both memories.

    **Arguments:**

    - `array`, `shard`: the number of the array that is read, and the number of its
      shard.
    - `shape`: the shape of the two views.
    - `source_start`, `source_strides`: the byte at which the view of the old shard
      starts, and its strides in bytes.
    - `target_start`, `target_strides`: the same for the view of the new shard.
    - `block_dim`: the dimension along which the elements are copied in blocks; `None`
      for a copy without blocks.
    """

    array: int
    shard: int
    shape: tuple[int, ...]
    source_start: int
    source_strides: tuple[int, ...]
    target_start: int
    target_strides: tuple[int, ...]
    block_dim: int | None

    @property
    def elements(self) -> int:
        """The number of copied elements."""
        return math.prod(self.shape)


class HostCopies(NamedTuple):
    """The parts from which the host assembles one new shard. `copies` are copied
    unchanged. The elements of `computed` are cast, constant, or multiplied by the
    scales of a quantised array. With `is_slice`, the new shard is a contiguous part of
    one old shard.
    """

    copies: tuple[Copy, ...]
    computed: tuple[ShardPart, ...]
    is_slice: bool


def host_copies(
    parts: Sequence[ShardPart],
    dtype: Any,
    box: Box,
    shapes: Sequence[Block],
    shard_numbers: Sequence[Mapping[int, int]],
) -> HostCopies:
    """Decides for each part of a new shard whether its elements are copied unchanged or
    computed.

    `dtype` and `box` are those of the new shard. `shapes` has the shape and dtype of a
    shard of each array that is read. `shard_numbers` has a dict for each of these
    arrays: from the number of a device to the number of its shard among this process's
    shards of the array. A part reads the array whose number is its value's `path`.
    """
    copies: list[Copy] = []
    computed: list[ShardPart] = []
    itemsize = np.dtype(dtype).itemsize
    for part in parts:
        value = part.piece.value
        if value.path is None or value.scale is not None:
            computed.append(part)
            continue
        array_number = int(value.path)
        # From here on the sender is the number of a shard.
        shard_number = shard_numbers[array_number][part.sender]
        part = part._replace(sender=shard_number)
        if value.casts or shapes[array_number].dtype != dtype:
            computed.append(part)
            continue
        copy = _copy_of(
            part,
            array_number,
            source_shape=shapes[array_number].shape,
            target_shape=box_shape(box),
            itemsize=itemsize,
        )
        copies.append(copy)
    is_slice = False
    if len(copies) == 1 and not computed:
        (copy,) = copies
        contiguous = strides_of(copy.shape, itemsize)
        is_slice = copy.source_strides == copy.target_strides == contiguous
    return HostCopies(copies=tuple(copies), computed=tuple(computed), is_slice=is_slice)


def joint_copies(
    targets: Sequence[Box],
    copies: Sequence[HostCopies],
    dtype: Any,
) -> tuple[Copy, ...]:
    """The copies that assemble all new shards in one memory, where they lie as
    `shard_starts` says. Copies from one old shard that are evenly spaced in both
    memories are one copy, since a view takes as long to make as copying some KiB.

    `targets` are the boxes of the new shards, and `copies` the parts of each. There are
    no joint copies for shards that are so large that each has a memory of its own.
    """
    if not is_small(targets, dtype):
        return ()
    starts = shard_starts(targets, dtype)
    groups: dict[object, list[Copy]] = {}
    # Behind the starts stand the bytes of the whole memory.
    for start, shard_copies in zip(starts, copies, strict=False):
        for copy in shard_copies.copies:
            strides = (copy.source_strides, copy.target_strides)
            key = (copy.array, copy.shard, copy.shape, strides)
            moved = copy._replace(target_start=start + copy.target_start)
            groups.setdefault(key, []).append(moved)
    fewer_copies: list[Copy] = []
    for group in groups.values():
        fewer_copies += _merged(group)
    return tuple(fewer_copies)


def _merged(copies: Sequence[Copy]) -> Sequence[Copy]:
    """Copies of one shape and equal strides from one old shard, as one copy if they are
    evenly spaced.
    """
    ordered = sorted(copies, key=lambda copy: copy.source_start)
    distances: set[tuple[int, int]] = set()
    for before, after in it.pairwise(ordered):
        source_distance = after.source_start - before.source_start
        target_distance = after.target_start - before.target_start
        distances.add((source_distance, target_distance))
    if len(distances) != 1:
        return copies
    source_step, target_step = distances.pop()
    first = ordered[0]
    shape = (len(ordered), *first.shape)
    source_strides = (source_step, *first.source_strides)
    target_strides = (target_step, *first.target_strides)
    merged = first._replace(
        shape=shape,
        source_strides=source_strides,
        target_strides=target_strides,
        block_dim=block_dim(shape, target_strides, source_strides),
    )
    return [merged]


def is_small(targets: Sequence[Box], dtype: Any) -> bool:
    """Whether all new shards lie in one memory, which takes less time to allocate."""
    elements = sum(map(volume, targets))
    return elements * np.dtype(dtype).itemsize < _SMALL_BYTES


def shard_starts(targets: Sequence[Box], dtype: Any) -> list[int]:
    """The byte at which each new shard starts in the memory of all, and behind them the
    bytes of that memory.
    """
    itemsize = np.dtype(dtype).itemsize
    sizes = [aligned(volume(box) * itemsize) for box in targets]
    return [*it.accumulate(sizes, initial=0)]


def _copy_of(
    part: ShardPart,
    array_number: int,
    source_shape: tuple[int, ...],
    target_shape: tuple[int, ...],
    itemsize: int,
) -> Copy:
    """The copy that makes `part`, whose sender is the number of a shard. The shapes are
    those of the old and of the new shard.
    """
    piece = part.piece
    old_strides = strides_of(source_shape, itemsize)
    new_strides = strides_of(target_shape, itemsize)
    sizes: list[int] = []
    source_steps: list[int] = []
    target_steps: list[int] = []
    for factor in piece.factors:
        sizes.append(factor.size)
        source_steps.append(_stride(old_strides, factor.source_dim, factor.source_step))
        target_steps.append(_stride(new_strides, factor.target_dim, factor.target_step))
    shape = tuple(sizes)
    source_strides = tuple(source_steps)
    target_strides = tuple(target_steps)
    return Copy(
        array=array_number,
        shard=part.sender,
        shape=shape,
        source_start=sum(map(operator.mul, piece.source, old_strides)),
        source_strides=source_strides,
        target_start=sum(map(operator.mul, piece.target, new_strides)),
        target_strides=target_strides,
        block_dim=block_dim(shape, target_strides, source_strides),
    )


def _stride(strides: Sequence[int], dim: int, step: int) -> int:
    """The bytes between two iterations of a loop that moves `step` elements along
    dimension `dim` of an array with these strides.
    """
    return 0 if dim == NOWHERE else strides[dim] * step
