"""Pieces whose numbers are looked at on the way: read into memory of their own, a few MiB at a time."""

from collections.abc import Sequence

import numpy as np

from .._convert.pieces import Piece, hull, swapped
from .._convert.values import chunks, fill, scale_box
from .._ground.boxes import Box
from . import _stores as stores
from ._entry import FileArray, StoreArray
from ._fetches import Fetch, Gathered
from ._reader import COPY_BYTES, Files, spans_of
from ._stores import MissingChunks
from ._units import Unit
from ._wanted import Wanted


def gather(
    files: Files, unit: Unit, one: Gathered, memory: np.ndarray, gap_bytes: int, missing_chunks: MissingChunks
) -> int:
    """Fills a piece; the number of bytes read."""
    entries = {entry.path: entry for entry in unit.leaf.entries}
    read_bytes = 0

    def read(path: str, box: Box) -> np.ndarray:
        nonlocal read_bytes
        entry = entries[path]
        scratch = np.empty([stop - start for start, stop in box], entry.dtype)
        if isinstance(entry, StoreArray):
            read_bytes += stores.read_into(entry, (box,), [scratch], missing_chunks=missing_chunks)
        else:
            read_bytes += files.read(entry, spans_of(entry, (box,), True, gap_bytes), (box,), [scratch])
        return scratch

    for piece in _chunks(one.piece, entries[one.piece.value.path] if one.piece.value.path else None):
        fill(memory, unit.kind.boxes[one.number], piece, read)
    return read_bytes


def _chunks(piece: Piece, entry: FileArray | StoreArray | None) -> Sequence[Piece]:
    return [piece] if entry is None else list(chunks(piece, max(1, COPY_BYTES // entry.dtype.itemsize)))


def gathered_fetches(leaf: Wanted, gathered: Sequence[Gathered]) -> list[Fetch]:
    """What `gather` reads for these."""
    entries = {entry.path: entry for entry in leaf.entries}
    found = []
    for one in gathered:
        value = one.piece.value
        if value.path is None:
            continue
        for piece in _chunks(one.piece, entries[value.path]):
            box = hull(swapped(piece))
            found.append(Fetch(entries[value.path], (box,), ((one.number, None),)))
            if value.scale is not None:
                by = scale_box(box, value.scale)
                found.append(Fetch(entries[value.scale.path], (by,), ((one.number, None),)))
    return found
