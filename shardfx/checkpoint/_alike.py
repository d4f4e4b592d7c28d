"""Stored arrays of one kind that fill a leaf, such as the experts of a stack: their
reads are planned together, since each array has its own position and nothing else.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .._convert import Piece, rows_of_alike
from .._ground.boxes import Box
from ._entry import FileArray, StoreArray
from ._files import GAP_BYTES
from ._leaves_to_load import LeafToLoad
from ._packed import is_packed
from ._reader import Read, spans_of


# With fewer arrays there is nothing to gain.
_LEAST_ARRAYS = 16


class AlikeReads(NamedTuple):
    """The reads of some arrays of a leaf, and the leaf without their pieces.

    - `reads`: the reads, each of a whole stored array.
    - `rest`: the leaf with the pieces that are still to be read.
    """

    reads: list[Read]
    rest: LeafToLoad


def alike_reads(
    leaf: LeafToLoad, boxes: Sequence[Box], memory: Sequence[np.ndarray]
) -> AlikeReads:
    """The reads of all arrays whose bytes go to one box of the leaf as they are in the
    file. `memory` has an array for each box.
    """
    if leaf.pieces is None or len(leaf.pieces) < _LEAST_ARRAYS:
        return AlikeReads([], leaf)
    entries = {entry.path: entry for entry in leaf.entries}
    reads: list[Read] = []
    rest: list[Piece] = []
    for pieces in _groups(leaf.pieces, entries):
        entry = entries.get(str(pieces[0].value.path))
        if not isinstance(entry, FileArray) or not _is_copied(pieces[0], leaf, entry):
            rest += pieces
            continue
        count = math.prod(entry.shape)
        whole: Box = ((0, count),)
        spans = spans_of((count,), entry.dtype.itemsize, (whole,), True, GAP_BYTES)
        positions = [piece.target for piece in pieces]
        rows = rows_of_alike(pieces[0], positions, entry.shape, boxes, memory)
        for piece, row in zip(pieces, rows, strict=True):
            source = entries[str(piece.value.path)]
            if row is None or not isinstance(source, FileArray):
                rest.append(piece)
            else:
                reads += [Read(source, span, [row]) for span in spans]
    return AlikeReads(reads, dataclasses.replace(leaf, pieces=tuple(rest)))


def _groups(
    pieces: Sequence[Piece], entries: dict[str, FileArray | StoreArray]
) -> list[list[Piece]]:
    """The pieces in groups of one kind: their arrays have equal shape and dtype, and
    they differ in nothing but their position in the leaf.
    """
    groups: dict[object, list[Piece]] = {}
    key: object
    for piece in pieces:
        value, source, _, factors = piece
        entry = entries.get(str(value.path))
        if entry is None:
            key = None
        else:
            # The name of the dtype tells dtypes apart, and is hashed faster.
            kind = (entry.shape, entry.stored, type(entry))
            key = (id(factors), source, value.scale, value.casts, *kind)
        group = groups.get(key)
        if group is None:
            groups[key] = [piece]
        else:
            group.append(piece)
    return list(groups.values())


def _is_copied(piece: Piece, leaf: LeafToLoad, entry: FileArray) -> bool:
    """Whether a piece writes all bytes of its array to the leaf, unchanged."""
    return (
        not is_packed(entry)
        and entry.dtype == leaf.dtype
        and piece.value.scale is None
        and not piece.value.casts
        and not any(piece.source)
        and piece.elements == math.prod(entry.shape)
    )
