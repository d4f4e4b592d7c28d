"""Many arrays of one kind that are parts of a larger array, such as the experts of a
stack: they differ in their positions, so their memory is found for all at once.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from .._ground.boxes import Box, box_shape, box_start, whole_box
from .pieces import Piece, hull, shifted
from .values import strided_boxes, strides_of


class RowsInBox(NamedTuple):
    """Small arrays that lie whole in one box of a larger array, each as a vector of the
    box's memory.

    - `box_number`: the number of the box.
    - `numbers`: the numbers of the small arrays.
    - `offsets`: the position of the first element of each in the memory.
    """

    box_number: int
    numbers: np.ndarray
    offsets: np.ndarray


def rows_of_alike(
    first: Piece,
    positions: np.ndarray,
    shape: tuple[int, ...],
    boxes: Sequence[Box],
) -> Iterator[RowsInBox]:
    """Yields, for each box of a larger array, the small arrays that lie whole in it and
    the position of each in the box's row-major memory, in elements. A small array is
    left out if it is in several boxes, or if its elements are in another order there.

    **Arguments:**

    - `first`: the piece that copies the first small array, whole, to the larger array.
    - `positions`: the position of each small array in the larger array, the first
      included, as an array of shape (arrays, rank). All other fields of their pieces
      are those of `first`.
    - `shape`: the shape of each small array.
    - `boxes`: boxes of the larger array.
    """
    rank = len(first.target)
    small_shape = box_shape(hull(first))
    # The position behind the last element of each small array, for each dimension.
    array_stops = positions + np.array(small_shape, np.int64)
    # For each small array, the number of boxes that have a part of it.
    box_counts = np.zeros(len(positions), int)
    # For each box, whether each small array is inside.
    is_inside = []
    for box in boxes:
        intervals = np.array(box, np.int64)
        bounds = intervals.reshape(rank, 2)
        box_starts = bounds[:, 0]
        box_stops = bounds[:, 1]
        overlaps = (positions < box_stops) & (array_stops > box_starts)
        box_counts += overlaps.all(-1)
        fits = (positions >= box_starts) & (array_stops <= box_stops)
        is_inside.append(fits.all(-1))

    for number, box in enumerate(boxes):
        is_whole_here = is_inside[number] & (box_counts == 1)
        numbers = np.flatnonzero(is_whole_here)
        if not len(numbers):
            continue
        start = np.array(box_start(box), np.int64)
        distance = (start - np.array(first.target, np.int64)).tolist()
        # All pieces write in the same order: the first one, moved to the box's start,
        # shows it.
        if not _is_in_order(shifted(first, distance), box, shape):
            continue
        strides = np.array(strides_of(box_shape(box)), np.int64)
        offsets = (positions[numbers] - start) @ strides
        yield RowsInBox(box_number=number, numbers=numbers, offsets=offsets)


def _is_in_order(piece: Piece, box: Box, shape: tuple[int, ...]) -> bool:
    """Whether a piece at the start of `box` writes an array of shape `shape` without
    gaps, its elements in their own order.
    """
    # The parts of the small array that are one strided copy into the box's memory.
    parts = list(strided_boxes(piece, box))
    if len(parts) != 1 or parts[0].source != whole_box(shape):
        return False
    row_major = strides_of(shape)
    for size, stride, expected in zip(shape, parts[0].strides, row_major, strict=True):
        if size != 1 and stride != expected:
            return False
    return True
