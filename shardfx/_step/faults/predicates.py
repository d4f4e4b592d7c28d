"""What the predicate of a fault says of an array of a plan, or of an operation of a
step.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jax.extend.mlir.dialects import stablehlo

from ..factors import Operation, StepValue
from .records import ArrayPredicate, OperationPredicate


# The mesh axes of each dimension.
Cuts = Sequence[Sequence[str]]
# The longest window of a convolution.
_WINDOW = 11


class ArrayCut(NamedTuple):
    """The two main dimensions of an array, by the mesh axes that shard each."""

    first: frozenset[str]
    second: frozenset[str]


class OperationCut(NamedTuple):
    """An array of an operation: its shape, and the mesh axes of each dimension."""

    shape: tuple[int, ...]
    cuts: Cuts


def matches_array(
    predicate: ArrayPredicate,
    shape: tuple[int, ...],
    cuts: Cuts,
    sizes: Mapping[str, int],
) -> ArrayCut | None:
    """The main dimensions of an array that has the form of the predicate and is sharded
    along both; `None` for another array. It does not read `predicate.alone`, which is
    about several arrays.

    `sizes` has the sizes of the mesh axes.
    """
    dims = _square(shape) if predicate.kind == "square" else _channels(shape)
    if dims is None:
        return None
    used = {axis for cut in cuts for axis in cut}
    unused = [axis for axis, size in sizes.items() if size > 1 and axis not in used]
    first, second = (
        frozenset(axis for axis in cuts[dim] if sizes[axis] > 1) for dim in dims
    )
    if not first or not second or len(unused) < predicate.unused_axes:
        return None
    return ArrayCut(first, second)


def _square(shape: tuple[int, ...]) -> tuple[int, int] | None:
    rank = len(shape)
    is_square = rank in (2, 3) and shape[-1] == shape[-2]
    return (rank - 2, rank - 1) if is_square else None


def _channels(shape: tuple[int, ...]) -> tuple[int, int] | None:
    """The channel dimensions of a kernel: the first two or the last two, where all
    others are one size, and that a window's.
    """
    for dims in ((0, 1), (len(shape) - 2, len(shape) - 1)):
        windows = [size for dim, size in enumerate(shape) if dim not in dims]
        is_window = len({*windows}) == 1 and 1 < windows[0] <= _WINDOW
        if len(windows) > 1 and is_window:
            return dims
    return None


def matches_operation(
    predicate: OperationPredicate,
    operation: Operation,
    values: Sequence[StepValue],
    cuts: Mapping[int, Cuts],
    sizes: Mapping[str, int],
) -> bool:
    """Whether the arrays of an operation are sharded as the predicate says.

    `values` are the arrays of the step. `cuts` has the mesh axes of each dimension of
    an array, by the array's number, and `sizes` the sizes of the mesh axes.
    """
    numbers = (*operation.ins, *operation.outs)
    arrays = [
        OperationCut(
            values[number].shape, cuts[number] or [()] * len(values[number].shape)
        )
        for number in numbers
    ]
    used = {axis for cut in arrays[0].cuts for axis in cut} if arrays else set()
    unused = [axis for axis, size in sizes.items() if size > 1 and axis not in used]
    if len(unused) < predicate.unused_axes:
        return False
    if predicate.sharded == "unevenly":
        return any(_is_uneven(array, sizes) for array in arrays)
    if operation.windows is None:
        return False
    found = stablehlo.ConvDimensionNumbers(operation.windows)
    image, kernel = arrays[0], arrays[1]
    if predicate.sharded == "channels":
        channels = (
            found.kernel_input_feature_dimension,
            found.kernel_output_feature_dimension,
        )
        return all(_count(kernel.cuts[dim], sizes) > 1 for dim in channels)
    windows = found.input_spatial_dimensions
    return any(_count(image.cuts[dim], sizes) > 1 for dim in windows)


def _is_uneven(array: OperationCut, sizes: Mapping[str, int]) -> bool:
    pairs = zip(array.shape, array.cuts, strict=True)
    return any(size % _count(cut, sizes) for size, cut in pairs)


def _count(cut: Sequence[str], sizes: Mapping[str, int]) -> int:
    return math.prod(_size(axis, sizes) for axis in cut)


def _size(axis: str, sizes: Mapping[str, int]) -> int:
    """The size of a mesh axis, or of a sub-axis in Shardy's notation, "fsdp:(1)2"."""
    return int(axis.rpartition(")")[2]) if ":" in axis else sizes[axis]
