"""Moves shards chunk by chunk where the temporaries of a whole move would be large on
TPUs.

TPUs keep arrays in tiles of 8 x 128 elements, and pad them to whole tiles. If an
all-to-all splits a (129, 4160) shard for 64 devices, each (129, 65) chunk takes as much
memory as (136, 128). The compiler holds several such copies.

All steps of a move keep the order of elements within a *block*, a range of a dimension.
The number of blocks along a dimension is the least common multiple of its shard counts
in all layouts of the path. So the first eighth of every block can move first, then the
second, and so on. Temporaries are then an eighth as large.
"""

import dataclasses
import itertools as it
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import lax
from jax.experimental.layout import Layout as MemoryLayout, with_layout_constraint

from .groups import all_to_all
from .redistribution import MoveStep


_TILE = (8, 128)
# The numbers of chunks: for blocks that do not fill tiles, for blocks that do, and for
# three or more dimensions.
_CHUNKS = 8
_CHUNKS_OF_TILES = 2
_CHUNKS_OF_STACKS = 4
# Smaller moves have small temporaries, and more collectives would only take longer.
_SMALL_BYTES = 2**18
# The loop over the blocks of a shard is unrolled by at most this many copies.
_BLOCKS_AT_ONCE = 8


@dataclasses.dataclass(frozen=True)
class Chunks:
    """The chunks in which the shards of an array move, one after another.

    A chunk is the same part of every block along one dimension. For blocks of 8
    elements and chunks of 4, the first chunk of a shard of 16 elements has the elements
    0 to 3 and 8 to 11.

    **Arguments:**

    - `dim`: the dimension that is divided.
    - `block`: the size of a block along the dimension. All steps keep the order of
      elements inside a block.
    - `chunk`: the size along the dimension of a chunk's part of one block; the last
      chunk may be smaller.
    - `target_shape`: the shape of the shard after the move.
    """

    dim: int
    block: int
    chunk: int
    target_shape: tuple[int, ...]

    @property
    def per_block(self) -> int:
        """The number of chunks into which a block is divided."""
        return -(-self.block // self.chunk)


def chunks_on_tpus(
    shape: tuple[int, ...],
    itemsize_bits: int,
    steps: Sequence[MoveStep],
) -> Chunks | None:
    """Returns the chunks in which shards of `shape` move by `steps` on TPUs; `None` if
    whole shards move at once. `itemsize_bits` are the bits of an element.
    """
    # All steps keep the order of elements inside a block, so a chunk is the same part
    # of every block along one dimension.
    blocks = _blocks(shape, steps)
    elements = max(math.prod(shape), math.prod(blocks.target_shape))
    count = _chunk_count(blocks.whole_shape, blocks.sizes, steps)
    if count == 1 or elements * itemsize_bits // 8 < _SMALL_BYTES:
        return None

    def chunk_size(dim: int) -> int:
        """The size along `dim` of a chunk of a block, if `dim` is divided."""
        return -(-blocks.sizes[dim] // count)

    def padding(dim: int) -> tuple[float, int]:
        """The elements that all chunks of a block take if `dim` is divided, padding
        included, and the number of blocks along `dim`.
        """
        block = blocks.sizes[dim]
        chunk = chunk_size(dim)
        chunk_shape = [*blocks.sizes]
        chunk_shape[dim] = chunk
        padded_elements = _best_order(chunk_shape).padded_elements
        # The shard before or after the move, whichever is longer.
        longest = max(shape[dim], blocks.target_shape[dim])
        return padded_elements / chunk * block, longest // block

    # The dimension whose chunks are padded least; of several, the one with the fewest
    # blocks. Blocks of one element cannot be divided.
    dims = [dim for dim in range(len(shape)) if blocks.sizes[dim] > 1]
    if not dims:
        return None
    dim = min(dims, key=padding)
    return Chunks(
        dim=dim,
        block=blocks.sizes[dim],
        chunk=chunk_size(dim),
        target_shape=blocks.target_shape,
    )


def split_into(
    count: int,
    shape: tuple[int, ...],
    steps: Sequence[MoveStep],
) -> Chunks | None:
    """Divides shards of `shape` into at least `count` chunks, which move by `steps` one
    after another. There are fewer chunks if no block is long enough. `None` if all
    blocks have one element.
    """
    blocks = _blocks(shape, steps)
    # The first dimension whose blocks are long enough; else the one of the longest.
    dim = blocks.sizes.index(max(blocks.sizes))
    for candidate_dim, block in enumerate(blocks.sizes):
        if block >= count:
            dim = candidate_dim
            break
    block = blocks.sizes[dim]
    if block < 2:
        return None
    return Chunks(
        dim=dim,
        block=block,
        chunk=max(1, block // count),
        target_shape=blocks.target_shape,
    )


class _Blocks(NamedTuple):
    """The shape of the whole array, the size of its blocks along each dimension, and
    the shape of a shard after the move.
    """

    whole_shape: tuple[int, ...]
    sizes: list[int]
    target_shape: tuple[int, ...]


def _blocks(shape: Sequence[int], steps: Sequence[MoveStep]) -> _Blocks:
    """Returns the shape of the whole array, the size of its blocks along each
    dimension, and the shape of a shard after the move. `shape` is the shape of a shard
    before the move. All steps keep the order of elements inside a block.
    """
    first_counts = steps[0].source.counts
    # Along each dimension, the least common multiple of the shard counts.
    block_counts = first_counts
    for step in steps:
        block_counts = tuple(map(math.lcm, block_counts, step.target.counts))
    whole_shape = tuple(map(operator.mul, shape, first_counts))
    return _Blocks(
        whole_shape=whole_shape,
        sizes=list(map(operator.floordiv, whole_shape, block_counts)),
        target_shape=steps[-1].target.shard_shape(whole_shape),
    )


def _chunk_count(
    whole_shape: tuple[int, ...],
    blocks: Sequence[int],
    steps: Sequence[MoveStep],
) -> int:
    """The number of chunks in which shards move; 1 for whole shards. `whole_shape` is
    the shape of the whole array, and `blocks` the size of a block along each dimension.

    If blocks do not fill tiles, all-to-alls and all-gathers need chunks. Otherwise two
    kinds of moves need them. `_doubles_after_copies` says which moves are of the first
    kind. The second kind has a permutation, ends in an all-to-all, and moves arrays of
    three or more dimensions. For it the compiler holds up to 4.7 times the larger
    shard, and in four chunks 1.6 times.
    """
    kinds = [step.kind for step in steps]
    if not _fill_tiles(blocks):
        if "all_to_all" in kinds or "all_gather" in kinds:
            return _CHUNKS
        return 1
    if len(whole_shape) > 2 and kinds[-1] == "all_to_all" and "permute" in kinds:
        return _CHUNKS_OF_STACKS
    if _doubles_after_copies(whole_shape, steps, kinds):
        return _CHUNKS_OF_TILES
    return 1


def _fill_tiles(blocks: Sequence[int]) -> bool:
    """Whether blocks of these sizes fill whole tiles, whose sizes are those of the last
    two dimensions. A block of one dimension has one size.
    """
    for size, tile_size in zip(reversed(blocks), reversed(_TILE), strict=False):
        if size % tile_size:
            return False
    return True


def _doubles_after_copies(
    whole_shape: tuple[int, ...],
    steps: Sequence[MoveStep],
    kinds: Sequence[str],
) -> bool:
    """Whether a move that ends in an all-gather, which doubles the shard, takes much
    memory on TPUs. The compiler then cannot reuse the memory of the copies that it
    makes around the move's last all-to-all.

    `whole_shape` is the shape of the whole array, and `kinds` has the kind of each of
    the `steps`. The doubled shard must be at least as large as the source's shard. The
    other conditions were found by compiling 388 moves of this kind for a v5p of 4 x 4 x
    4 chips. Of these, 58 took more memory than twice the larger shard. The conditions
    hold for all 58, and for 2 others. A census of 150 other moves added the condition
    on an earlier all-to-all. Of three moves for which it holds, two took 2.5 times the
    larger shard, and one took 1.0 times.
    """
    first_count = steps[0].source.shard_count
    last_count = steps[-1].target.shard_count
    doubles = steps[-1].source.shard_count == 2 * last_count
    ends_in_gather = kinds[-1] == "all_gather"
    if not ends_in_gather or not doubles or last_count > first_count:
        return False
    if "all_to_all" not in kinds:
        return False
    # The last all-to-all, and the kinds of the steps before and after it.
    position = len(kinds) - 1 - kinds[::-1].index("all_to_all")
    step = steps[position]
    earlier = kinds[:position]
    later = kinds[position + 1 :]
    # For each dimension, the sub-axes by which the all-to-all splits it.
    splits = all_to_all(step.source, step.target, step.source).splits
    splits_last_dim_only = not any(splits[:-1])
    if not _reorders_chunks(step):
        return splits_last_dim_only and any(map(_reorders_chunks, steps[:position]))
    if "permute" in later:
        return True
    is_one_tile_wide = step.target.shard_shape(whole_shape)[-1] == _TILE[1]
    follows_copies = bool(earlier) and "permute" not in earlier
    return splits_last_dim_only and (is_one_tile_wide or follows_copies)


def _reorders_chunks(step: MoveStep) -> bool:
    """Whether a step is an all-to-all that sends the chunks of a shard in another order
    than that of the replica group's members.
    """
    if step.kind != "all_to_all":
        return False
    # For each dimension, the sub-axes by which it is split into chunks, as indices in
    # the group's sub-axes. They are the same however devices are numbered.
    splits = all_to_all(step.source, step.target, step.source).splits
    order = list(it.chain.from_iterable(splits))
    return order != sorted(order)


def in_chunks(
    shard: Any,
    move: Callable[[Any], Any],
    chunks: Chunks,
    *,
    as_on_tpus: bool = True,
) -> Any:
    """Returns `move(shard)`, computed by calling `move` with one chunk of the shard
    after another. With `as_on_tpus`, shards are stored in the order of dimensions that
    needs the least memory on TPUs. Arrays in this order are named `stored`.
    """
    # How the shard is stored before and after the move.
    source = _Stored.of(shard.shape, chunks, as_on_tpus)
    target = _Stored.of(chunks.target_shape, chunks, as_on_tpus)

    def with_moved_chunk(stored_target: object, start: object, size: int) -> Any:
        """The shard after the move with one more chunk: the elements `start` to `start
        + size` of each block.
        """
        chunk = _in_order_of_dims(source.chunk_of(stored_source, start, size))
        moved_chunk = move(source.from_stored(chunk))
        stored_chunk = _in_order_of_dims(target.to_stored(moved_chunk))
        with_chunk = target.with_chunk(stored_target, stored_chunk, start, size)
        return _in_order_of_dims(with_chunk)

    def move_chunk(index: Any, stored_target: Any) -> Any:
        """The shard after the move with chunk number `index`."""
        return with_moved_chunk(stored_target, index * chunks.chunk, chunks.chunk)

    stored_source = _in_order_of_dims(source.to_stored(shard))
    stored_shape = [chunks.target_shape[dim] for dim in target.order]
    empty_target = lax.empty(tuple(stored_shape), shard.dtype)
    stored_target = _in_order_of_dims(empty_target)
    # The last chunk of a block may be smaller.
    whole_chunks, last_size = divmod(chunks.block, chunks.chunk)
    stored_target = lax.fori_loop(0, whole_chunks, move_chunk, stored_target)
    if last_size:
        start = whole_chunks * chunks.chunk
        stored_target = with_moved_chunk(stored_target, start, last_size)
    return target.from_stored(stored_target)


@dataclasses.dataclass(frozen=True)
class _Stored:
    """How a shard is stored in memory. `order` is the order of its dimensions, with the
    minor-most last. The dimension at `position` in `order` is divided into chunks. It
    has `block_count` blocks of the size `block`. A chunk has a *strip* of each block.
    """

    order: tuple[int, ...]
    position: int
    block_count: int
    block: int

    @staticmethod
    def of(shape: tuple[int, ...], chunks: Chunks, as_on_tpus: bool) -> "_Stored":
        """Returns how a shard of `shape` is stored. With `as_on_tpus`, it is in the
        order that takes the least TPU memory.
        """
        order = tuple(range(len(shape)))
        if as_on_tpus:
            order = _best_order(shape).order
        return _Stored(
            order=order,
            position=order.index(chunks.dim),
            block_count=shape[chunks.dim] // chunks.block,
            block=chunks.block,
        )

    def to_stored(self, shard: Any) -> Any:
        """A shard, or a chunk of one, with its dimensions in the stored order."""
        return shard.transpose(self.order)

    def from_stored(self, stored: Any) -> Any:
        """The inverse of `to_stored`."""
        return stored.transpose(np.argsort(self.order))

    def chunk_of(self, stored: Any, start: Any, size: int) -> Any:
        """Returns a chunk of the stored shard: the elements `start` to `start + size`
        of each block, concatenated.
        """
        if self.block_count == 1:
            return lax.dynamic_slice_in_dim(stored, start, size, self.position)

        def copy(index: Any, chunk: Any) -> Any:
            """`chunk` with its strip of the block `index`."""
            start_in_shard = index * self.block + start
            start_in_chunk = index * size
            strip = lax.dynamic_slice_in_dim(
                stored, start_in_shard, size, self.position
            )
            return lax.dynamic_update_slice_in_dim(
                chunk, strip, start_in_chunk, self.position
            )

        shape = list(stored.shape)
        shape[self.position] = self.block_count * size
        return self._for_each_block(copy, lax.empty(tuple(shape), stored.dtype))

    def with_chunk(self, stored: object, chunk: Any, start: object, size: int) -> Any:
        """Returns the stored shard with `chunk` in place of the elements `start` to
        `start + size` of each block.
        """

        def copy(index: Any, stored: Any) -> Any:
            """`stored` with the chunk's strip of the block `index`."""
            start_in_chunk = index * size
            start_in_shard = index * self.block + start
            strip = lax.dynamic_slice_in_dim(chunk, start_in_chunk, size, self.position)
            return lax.dynamic_update_slice_in_dim(
                stored, strip, start_in_shard, self.position
            )

        return self._for_each_block(copy, stored)

    def _for_each_block(self, copy: Callable[[Any, Any], Any], out: object) -> Any:
        """Applies `copy` to the index of each block and the result so far, which is
        `out` at first. Returns the last result.
        """
        unroll = min(self.block_count, _BLOCKS_AT_ONCE)
        return lax.fori_loop(0, self.block_count, copy, out, unroll=unroll)


class _Order(NamedTuple):
    """An order of dimensions, and the number of elements that an array stored so takes,
    padding to tiles included.
    """

    padded_elements: int
    order: tuple[int, ...]


def _best_order(shape: Sequence[int]) -> _Order:
    """Finds the order of dimensions in which an array of `shape` takes the fewest
    elements. Of equally good orders, the one nearest to the array's own is taken.
    """
    dims = range(len(shape))
    orders: list[_Order] = []
    for minor in reversed(dims):
        outer = [dim for dim in dims if dim != minor]
        order = (*outer, minor)
        padded_elements = _padded_elements([shape[dim] for dim in order])
        orders.append(_Order(padded_elements=padded_elements, order=order))
    return min(orders, key=lambda candidate: candidate.padded_elements)


def _padded_elements(shape: Sequence[int]) -> int:
    """Returns the number of elements that an array of `shape` takes on a TPU, which
    pads it to tiles. The last dimension is the minor-most one in memory. A shape of
    (129, 65) takes 136 x 128 elements.
    """
    tile_rows, tile_columns = _TILE
    *outer, columns = shape
    padded_columns = -(-columns // tile_columns) * tile_columns
    if not outer:
        return padded_columns
    *stacked, rows = outer
    # Arrays of few rows use tiles of 1, 2 or 4 rows.
    tile_rows = min(tile_rows, 1 << (rows - 1).bit_length())
    padded_rows = -(-rows // tile_rows) * tile_rows
    return math.prod(stacked) * padded_rows * padded_columns


def _in_order_of_dims(x: Any) -> Any:
    """Constrains `x` to be stored in the order of its dimensions, the last one
    minor-most. Otherwise the compiler stores whole shards in the order that suits the
    collectives on chunks, and pads them.
    """
    return with_layout_constraint(x, MemoryLayout(tuple(range(x.ndim))))
