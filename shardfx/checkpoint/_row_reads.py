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
from ._reader import COPY_BYTES, Read, Row, RowBlock, spans_of
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
        spans = spans_of((self.nbytes,), 1, (whole,), True, GAP_BYTES)
        # The memory has the bytes of the arrays, whatever their dtype.
        kind = ArrayKind(
            shape=(self.nbytes,),
            dtype=self.memory.dtype,
            stored="U8",
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
    rest: LeafToLoad


def rows_of_leaf(
    leaf: LeafToLoad,
    boxes: Sequence[Box],
    memory: Sequence[np.ndarray],
) -> LeafRows:
    """The reads of all arrays whose bytes go to one box of the leaf as they are in the
    file. `memory` has an array for each box.
    """
    table = leaf.entries
    if leaf.pieces is None or len(leaf.pieces) < _LEAST_ARRAYS:
        return LeafRows([], leaf)
    if not isinstance(table, FileTable):
        return LeafRows([], leaf)
    grouped = in_columns(leaf.pieces)
    reads: list[RowReads] = []
    rest = grouped.others
    for pieces in grouped.alike:
        arrays = table.with_paths(pieces.paths)
        is_read = np.zeros(len(pieces), bool)
        for kind_number in np.unique(arrays.kind_numbers).tolist():
            numbers = np.flatnonzero(arrays.kind_numbers == kind_number)
            shape = arrays.kinds[kind_number].shape
            if not _are_copied(pieces, numbers, leaf, arrays[numbers[0]]):
                continue
            targets = pieces.targets[numbers]
            for rows in rows_of_alike(pieces.first, targets, shape, boxes):
                members = numbers[rows.numbers]
                is_read[members] = True
                box_memory = memory[rows.box_number].reshape(-1)
                row_reads = RowReads(
                    arrays=arrays.at_positions(members),
                    nbytes=arrays.kinds[kind_number].nbytes,
                    memory=box_memory.view(np.uint8),
                    offsets=rows.offsets * box_memory.itemsize,
                )
                reads.append(row_reads)
        rest += [pieces[number] for number in np.flatnonzero(~is_read).tolist()]
    rest_of_leaf = dataclasses.replace(leaf, pieces=tuple(rest))
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
    files = dict.fromkeys(file for each in reads for file in each.arrays.used_files())
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
    # For each row: the index of its reads, its index in them, and where its bytes start
    # and stop in the file.
    owners = []
    members = []
    for number, each in enumerate(reads):
        is_this_file = np.array([name == file for name in each.arrays.files])
        rows = np.flatnonzero(is_this_file[each.arrays.file_numbers])
        owners.append(np.full(len(rows), number))
        members.append(rows)
    owner = np.concatenate(owners)
    member = np.concatenate(members)
    starts = np.concatenate(
        [each.arrays.offsets[rows] for each, rows in zip(reads, members, strict=True)]
    )
    sizes = np.array([each.nbytes for each in reads], np.int64)
    stops = starts + sizes[owner]

    order = np.argsort(starts, kind="stable")
    first_rows = _first_rows(starts[order], stops[order], gap_bytes)
    for first, last in zip(first_rows, [*first_rows[1:], len(order)], strict=True):
        numbers = order[first:last]
        start = int(starts[numbers[0]])
        rows_of_block = []
        for number in np.unique(owner[numbers]).tolist():
            rows = member[numbers[owner[numbers] == number]]
            each = reads[number]
            arrays = each.arrays.at_positions(rows)
            row = Row(
                arrays=arrays,
                nbytes=each.nbytes,
                starts=arrays.offsets - start,
                memory=each.memory,
                offsets=each.offsets[rows],
            )
            rows_of_block.append(row)
        nbytes = int(stops[numbers].max()) - start
        yield RowBlock(file=file, start=start, nbytes=nbytes, rows=rows_of_block)


def _first_rows(starts: np.ndarray, stops: np.ndarray, gap_bytes: int) -> list[int]:
    """The number of the first row of each block, from the bytes of rows in the order of
    a file.
    """
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
