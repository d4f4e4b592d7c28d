"""The sizes that the axes of a mesh may have, and the slices that they span."""

import itertools
import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Int


class MeshSizes(NamedTuple):
    """Tuples of mesh axis sizes, and the slices that each axis spans, as two arrays."""

    sizes: Int[np.ndarray, "sizes axes"]
    slices: Int[np.ndarray, "sizes axes"]


def axis_sizes(devices: int, axes: int) -> Int[np.ndarray, "sizes axes"]:
    """All tuples of `axes` mesh axis sizes above 1 whose product is the number of
    devices.
    """
    divisors = []
    for size in range(2, devices + 1):
        if devices % size == 0:
            divisors.append(size)
    tuples = []
    for first_sizes in itertools.product(divisors, repeat=axes - 1):
        product = math.prod(first_sizes)
        if product < devices and devices % product == 0:
            tuples.append((*first_sizes, devices // product))
    table = np.array(tuples, np.int32)
    return table.reshape(-1, axes)


def sizes_and_slices(devices: int, axes: int, slices: int) -> MeshSizes:
    """All tuples of `axes` mesh axis sizes whose product is the number of devices, and
    the slices that each axis spans. One axis spans all slices. Each other axis spans
    one slice.
    """
    sizes = axis_sizes(devices, axes)
    if slices == 1:
        return MeshSizes(sizes, np.ones_like(sizes))
    rows, spanning = np.nonzero(sizes % slices == 0)
    is_spanning = np.arange(axes) == spanning[:, None]
    counts = np.where(is_spanning, slices, 1)
    spans = counts.astype(np.int32)
    return MeshSizes(sizes[rows], spans)
