"""Stored arrays of one kind that fill a leaf, such as the experts of a stack, each of
them a row of the leaf's memory: their reads are planned together, as columns.

Small arrays that lie side by side in a file are read at once, and copied to their rows.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from .._convert import AlikePieces, in_columns, rows_of_alike
from .._ground.boxes import Box
from ._entry import FileArray
from ._files import GAP_BYTES
from ._leaves_to_load import LeafToLoad
from ._packed import is_packed
from ._reader import COPY_BYTES, Read, RowBlock, RowsOfRead, spans_of
from ._table import ArrayKind, FileTable


# With fewer arrays there is nothing to gain.
_LEAST_ARRAYS = 16
# To copy larger arrays takes longer than to read each for itself.
_MOST_ROW_BYTES = 64 * 1024


class RowReads(NamedTuple):
    """The reads of stored arrays of one size, each to a row of one vector of memory.

    - `arrays`: the arrays.
    - `nbytes`: the number of bytes of each.
    - `memory`: the vector, of bytes.
    - `offsets`: the position of each row in the vector.
    """

    arrays: FileTable
    nbytes: int
    memory: np.ndarray
    offsets: np.ndarray

    @property
    def are_small(self) -> bool:
        return self.nbytes <= _MOST_ROW_BYTES

    def each(self) -> Iterator[Read]:
        """Yields the reads one by one."""
        whole: Box = ((0, self.nbytes),)
        spans = spans_of(
            shape=(self.nbytes,),
            itemsize=1,
            boxes=(whole,),
            in_place=True,
            gap_bytes=GAP_BYTES,
        )
        # The memory has the bytes of the arrays, whatever their dtype.
        kind = ArrayKind(
            shape=(self.nbytes,),
            dtype=self.memory.dtype,
            stored_name="U8",
            nbytes=self.nbytes,
        )
        kinds = [kind] * len(self.arrays.kinds)
        arrays = dataclasses.replace(self.arrays, kinds=kinds)
        for entry, offset in zip(arrays, self.offsets.tolist(), strict=True):
            row = self.memory[offset : offset + self.nbytes]
            for span in spans:
                yield Read(
                    entry=entry,
                    span=span,
                    targets=[row],
                )


class LeafRows(NamedTuple):
    """The reads of some arrays of a leaf, and the leaf with the other pieces."""

    reads: list[RowReads]
    leaf_with_rest: LeafToLoad


def rows_of_leaf(
    leaf: LeafToLoad,
    boxes: Sequence[Box],
    memory: Sequence[np.ndarray],
) -> LeafRows:
    """The reads of all arrays whose bytes go to one box of the leaf as they are in the
    file, each to a row of the box's memory, and the leaf with the pieces of the others.
    `memory` has an array for each box.
    """
    table = leaf.entries
    if leaf.pieces is None or len(leaf.pieces) < _LEAST_ARRAYS:
        return LeafRows([], leaf)
    if not isinstance(table, FileTable):
        return LeafRows([], leaf)
    # Pieces that differ only in their array and their position, as columns.
    groups = in_columns(leaf.pieces)
    reads: list[RowReads] = []
    other_pieces = groups.others
    for alike_pieces in groups.alike:
        arrays = table.with_paths(alike_pieces.paths)
        is_read = np.zeros(len(alike_pieces), bool)
        for kind_number in np.unique(arrays.kind_numbers).tolist():
            # The positions, among the alike pieces, of those with arrays of this kind.
            numbers = np.flatnonzero(arrays.kind_numbers == kind_number)
            shape = arrays.kinds[kind_number].shape
            if not _are_copied(alike_pieces, numbers, leaf, arrays[numbers[0]]):
                continue
            targets = alike_pieces.targets[numbers]
            for rows_in_box in rows_of_alike(alike_pieces.first, targets, shape, boxes):
                numbers_in_box = numbers[rows_in_box.numbers]
                is_read[numbers_in_box] = True
                box_memory = memory[rows_in_box.box_number].reshape(-1)
                row_reads = RowReads(
                    arrays=arrays.at_positions(numbers_in_box),
                    nbytes=arrays.kinds[kind_number].nbytes,
                    memory=box_memory.view(np.uint8),
                    offsets=rows_in_box.offsets * box_memory.itemsize,
                )
                reads.append(row_reads)
        other_pieces += [
            alike_pieces[number] for number in np.flatnonzero(~is_read).tolist()
        ]
    rest_of_leaf = dataclasses.replace(leaf, pieces=tuple(other_pieces))
    return LeafRows(reads, rest_of_leaf)


def _are_copied(
    pieces: AlikePieces,
    numbers: np.ndarray,
    leaf: LeafToLoad,
    first: FileArray,
) -> bool:
    """Whether the pieces with these numbers write all bytes of their arrays to the
    leaf, unchanged. `first` is the first of the arrays, which are of one kind.
    """
    # `sources` has the element of its array at which each piece begins.
    return (
        not is_packed(first)
        and first.dtype == leaf.dtype
        and not pieces.first.value.casts
        and not pieces.sources[numbers].any()
        and pieces.first.elements == math.prod(first.shape)
    )


def row_blocks(reads: Sequence[RowReads], gap_bytes: int) -> list[RowBlock]:
    """The rows of all reads in blocks of at most `COPY_BYTES` bytes of a file, without
    gaps of `gap_bytes` bytes or more.
    """
    # A dict for its order, which a set has not.
    files: dict[str, None] = {}
    for row_reads in reads:
        files |= dict.fromkeys(row_reads.arrays.used_files())
    blocks = []
    for file in files:
        blocks += _blocks_of_file(file, reads, gap_bytes)
    return blocks


def _blocks_of_file(
    file: str,
    reads: Sequence[RowReads],
    gap_bytes: int,
) -> Iterator[RowBlock]:
    """Yields the blocks of one file: the rows of all reads in it, in the order of their
    bytes, divided at gaps of `gap_bytes` or more and at `COPY_BYTES`.
    """
    # For each row in the file: the number of its `RowReads`, its number in that, and
    # where its bytes start and stop in the file.
    read_numbers_by_read = []
    row_numbers_by_read = []
    starts_by_read = []
    for read_number, row_reads in enumerate(reads):
        is_this_file = np.array([name == file for name in row_reads.arrays.files])
        row_numbers = np.flatnonzero(is_this_file[row_reads.arrays.file_numbers])
        read_numbers_by_read.append(np.full(len(row_numbers), read_number))
        row_numbers_by_read.append(row_numbers)
        starts_by_read.append(row_reads.arrays.offsets[row_numbers])
    read_number_of = np.concatenate(read_numbers_by_read)
    row_number_of = np.concatenate(row_numbers_by_read)
    starts = np.concatenate(starts_by_read)
    sizes = np.array([row_reads.nbytes for row_reads in reads], np.int64)
    stops = starts + sizes[read_number_of]

    order = np.argsort(starts, kind="stable")
    firsts = _first_rows(starts[order], stops[order], gap_bytes)
    for first, last in zip(firsts, [*firsts[1:], len(order)], strict=True):
        in_block = order[first:last]
        start = int(starts[in_block[0]])
        rows_of_block = []
        for read_number in np.unique(read_number_of[in_block]).tolist():
            of_this_read = in_block[read_number_of[in_block] == read_number]
            row_numbers = row_number_of[of_this_read]
            row_reads = reads[read_number]
            arrays = row_reads.arrays.at_positions(row_numbers)
            rows = RowsOfRead(
                arrays=arrays,
                nbytes=row_reads.nbytes,
                starts=arrays.offsets - start,
                memory=row_reads.memory,
                offsets=row_reads.offsets[row_numbers],
            )
            rows_of_block.append(rows)
        nbytes = int(stops[in_block].max()) - start
        yield RowBlock(file=file, start=start, nbytes=nbytes, rows=rows_of_block)


def _first_rows(starts: np.ndarray, stops: np.ndarray, gap_bytes: int) -> list[int]:
    """The number of the first row of each block, from the first byte of each row and
    the byte behind its last. The rows are in the order of the file.
    """
    # The byte behind the last one of a row and of all before it.
    reached = np.maximum.accumulate(stops)
    is_first = np.ones(len(starts), bool)
    gaps = starts[1:] - reached[:-1]
    is_first[1:] = gaps >= gap_bytes
    # Each stretch without gaps is divided into parts of equal size.
    run_numbers = np.cumsum(is_first) - 1
    run_starts = starts[is_first][run_numbers]
    parts = (starts - run_starts) // (COPY_BYTES - _MOST_ROW_BYTES)
    is_first[1:] |= parts[1:] != parts[:-1]
    return np.flatnonzero(is_first).tolist()
