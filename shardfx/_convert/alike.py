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
    owners = np.zeros(len(positions), int)
    is_inside = []
    for box in boxes:
        bounds = np.array(box, np.int64).reshape(rank, 2)
        owners += ((low < bounds[:, 1]) & (high > bounds[:, 0])).all(-1)
        is_inside.append(((low >= bounds[:, 0]) & (high <= bounds[:, 1])).all(-1))

    count = math.prod(shape)
    vectors: list[np.ndarray | None] = [None] * len(positions)
    for number, box in enumerate(boxes):
        places = np.flatnonzero(is_inside[number] & (owners == 1))
        if not len(places):
            continue
        begins = np.array([start for start, _ in box], np.int64)
        strides = np.array(strides_of([stop - start for start, stop in box]), np.int64)
        starts = (low[places] - begins) @ strides
        corner = shifted(
            first, [start - at for start, at in zip(begins, low[0], strict=True)]
        )
        if not _is_in_order(corner, box, shape):
            continue
        rows = _rows(memory[number].reshape(-1), starts.tolist(), count)
        for place, row in zip(places.tolist(), rows, strict=True):
            vectors[place] = row
    return vectors


def _is_in_order(piece: Piece, box: Box, shape: tuple[int, ...]) -> bool:
    """Whether a piece at the start of `box` writes an array of shape `shape` without
    gaps, its elements in their own order.
    """
    boxes = list(strided_boxes(piece, box))
    if len(boxes) != 1 or boxes[0].source != tuple((0, size) for size in shape):
        return False
    pairs = zip(shape, boxes[0].strides, strides_of(shape), strict=True)
    return all(size == 1 or stride == wanted for size, stride, wanted in pairs)


def _rows(memory: np.ndarray, starts: Sequence[int], count: int) -> list[np.ndarray]:
    """The vectors of `count` elements of `memory` that begin at `starts`."""
    if len(memory) % count == 0 and not any(start % count for start in starts):
        # NumPy makes the rows of a matrix faster than slices of a vector.
        rows = list(memory.reshape(-1, count))
        return [rows[start // count] for start in starts]
    return [memory[start : start + count] for start in starts]
