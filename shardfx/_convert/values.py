"""The numbers of a piece: read, scaled, cast, and written where they belong."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .._ground.boxes import Box, volume
from .._ground.copying import copy
from .casts import is_rounded
from .pieces import NOWHERE, Counted, Piece, Scale, changed, hull, is_only, rows, swapped
from .views import as_bits, source_view, target_view


# A box of an array, by its path.
Read = Callable[[str, Box], np.ndarray]


def fill(memory: np.ndarray, box: Box, piece: Piece, read: Read) -> None:
    """Writes a piece that lies in `box` of the target into memory that holds this box."""
    start = [low for low, _ in box]
    there = target_view(memory, piece, start)
    if piece.value.path is None:
        with np.errstate(over="ignore", invalid="ignore"):
            there[...] = constant(piece)
        return
    first = hull(swapped(piece))
    raw = read(piece.value.path, first)
    if piece.value.scale is not None:
        raw = raw.astype(np.float32) * _scales(piece, first, read)
    write(there, source_view(raw, piece, [low for low, _ in first]), piece)


def write(there: np.ndarray, values: np.ndarray, piece: Piece) -> None:
    """Writes values, cast as the piece says."""
    if there.dtype == values.dtype and is_only(piece.value.casts, there.dtype):
        copy(as_bits(there), as_bits(values))
        return
    # As in JAX, what is too large for a smaller floating-point dtype becomes infinite without a word.
    with np.errstate(over="ignore", invalid="ignore"):
        # What is cast last is cast while it is copied, unless NumPy would cast it in another way.
        for at, to in enumerate(piece.value.casts, 1):
            is_last = at == len(piece.value.casts)
            if not is_last or isinstance(to, Counted) or is_rounded(values.dtype, to):
                values = changed(values, to)
        copy(there, values)


def constant(piece: Piece) -> Any:
    """The number of a piece that no array gives."""
    value = np.asarray(piece.value.number)
    for to in piece.value.casts:
        value = changed(value, to)
    return value


def _scales(piece: Piece, box: Box, read: Read) -> np.ndarray:
    """What each element of a box is multiplied by."""
    scale = piece.value.scale
    assert scale is not None
    blocks = scale_box(box, scale)
    by = read(scale.path, blocks).astype(np.float32)
    places = [
        np.arange(low, high) // each - first
        for (low, high), each, (first, _) in zip(box, scale.block, blocks, strict=True)
    ]
    return by[np.ix_(*places)] if places else by


def scale_box(box: Box, scale: Scale) -> Box:
    """The scales of the elements in a box."""
    return tuple((low // each, -(-high // each)) for (low, high), each in zip(box, scale.block, strict=True))


def chunks(piece: Piece, most: int) -> Iterator[Piece]:
    """A piece in parts whose boxes of the source hold at most so many elements, as far as it can be cut."""
    count = volume(hull(swapped(piece)))
    factors = [f for f in piece.factors if f.source_dim != NOWHERE]
    if count <= most or not factors:
        yield piece
        return
    outer = min(factors, key=lambda f: (f.source_dim, -f.source_step))
    step = max(1, outer.size * most // count)
    for start in range(0, outer.size, step):
        yield from chunks(rows(piece, outer, start, min(outer.size, start + step)), most)
