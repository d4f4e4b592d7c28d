"""Many arrays of one kind that are parts of a larger array, such as the experts of a
stack: they differ in their positions, so their memory is found for all at once.
"""

import math
from collections.abc import Sequence

import numpy as np

from .._ground.boxes import Box
from .pieces import Piece, hull, shifted
from .values import strided_boxes, strides_of


def rows_of_alike(
    first: Piece,
    positions: Sequence[tuple[int, ...]],
    shape: tuple[int, ...],
    boxes: Sequence[Box],
    memory: Sequence[np.ndarray],
) -> list[np.ndarray | None]:
    """For each of several small arrays, the vector with its elements in the memory of a
    larger array. It is `None` for an array that is not whole in one box, or whose
    elements are in another order there.

    **Arguments:**

    - `first`: the piece that copies the first small array, whole, to the larger array.
    - `positions`: the position in the larger array of each small array, the first
      included. All other fields of their pieces are those of `first`.
    - `shape`: the shape of each small array.
    - `boxes`, `memory`: boxes of the larger array, and the memory that holds each.
    """
    rank = len(first.target)
    low = np.array(positions, np.int64).reshape(len(positions), rank)
    sizes = [stop - start for start, stop in hull(first)]
    high = low + np.array(sizes, np.int64)
    # The number of boxes that have a part of each small array.
    owners = np.zeros(len(positions), int)
    is_inside = []
    for box in boxes:
        bounds = np.array(box, np.int64).reshape(rank, 2)
        starts = bounds[:, 0]
        stops = bounds[:, 1]
        overlaps = (low < stops) & (high > starts)
        owners += overlaps.all(-1)
        fits = (low >= starts) & (high <= stops)
        is_inside.append(fits.all(-1))

    count = math.prod(shape)
    vectors: list[np.ndarray | None] = [None] * len(positions)
    for number, box in enumerate(boxes):
        numbers = np.flatnonzero(is_inside[number] & (owners == 1))
        if not len(numbers):
            continue
        box_start = np.array([start for start, _ in box], np.int64)
        box_shape = [stop - start for start, stop in box]
        strides = np.array(strides_of(box_shape), np.int64)
        if not _is_in_order(shifted(first, box_start - low[0]), box, shape):
            continue
        offsets = (low[numbers] - box_start) @ strides
        rows = _rows(memory[number].reshape(-1), offsets.tolist(), count)
        for small_array, row in zip(numbers.tolist(), rows, strict=True):
            vectors[small_array] = row
    return vectors


def _is_in_order(piece: Piece, box: Box, shape: tuple[int, ...]) -> bool:
    """Whether a piece at the start of `box` writes an array of shape `shape` without
    gaps, its elements in their own order.
    """
    boxes = list(strided_boxes(piece, box))
    whole = tuple((0, size) for size in shape)
    if len(boxes) != 1 or boxes[0].source != whole:
        return False
    row_major = strides_of(shape)
    for size, stride, expected in zip(shape, boxes[0].strides, row_major, strict=True):
        if size != 1 and stride != expected:
            return False
    return True


def _rows(memory: np.ndarray, offsets: Sequence[int], count: int) -> list[np.ndarray]:
    """The vectors of `count` elements of `memory` that begin at `offsets`."""
    is_matrix = len(memory) % count == 0
    if is_matrix and all(offset % count == 0 for offset in offsets):
        # NumPy makes the rows of a matrix faster than slices of a vector.
        rows = list(memory.reshape(-1, count))
        return [rows[offset // count] for offset in offsets]
    return [memory[offset : offset + count] for offset in offsets]
