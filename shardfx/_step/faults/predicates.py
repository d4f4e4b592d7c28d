"""What the predicate of a fault says of an array of a plan, or of an operation of a
step.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jax.extend.mlir.dialects import stablehlo

from ..factors import Operation, StepValue
from .records import ArrayPredicate, OperationPredicate


# The mesh axes of each dimension.
AxesByDim = Sequence[Sequence[str]]
# The longest window of a convolution.
_WINDOW = 11


class ArrayCut(NamedTuple):
    """The two main dimensions of an array, by the mesh axes that shard each."""

    first: frozenset[str]
    second: frozenset[str]


class ShardedArray(NamedTuple):
    """An array of an operation: its shape, and the mesh axes of each dimension."""

    shape: tuple[int, ...]
    cuts: AxesByDim


def matches_array(
    predicate: ArrayPredicate,
    shape: tuple[int, ...],
    cuts: AxesByDim,
    sizes: Mapping[str, int],
) -> ArrayCut | None:
    """The main dimensions of an array that has the form of the predicate and is sharded
    along both; `None` for another array. It does not read `predicate.alone`, which is
    about several arrays.

    `sizes` has the sizes of the mesh axes.
    """
    if predicate.kind == "square":
        dims = _square(shape)
    else:
        dims = _channels(shape)
    if dims is None:
        return None
    first, second = (_axes_of_several_devices(cuts[dim], sizes) for dim in dims)
    if not first or not second:
        return None
    if len(_unused_axes(cuts, sizes)) < predicate.unused_axes:
        return None
    return ArrayCut(first=first, second=second)


def _axes_of_several_devices(
    cut: Sequence[str],
    sizes: Mapping[str, int],
) -> frozenset[str]:
    """The mesh axes of two or more devices that shard a dimension."""
    return frozenset(axis for axis in cut if sizes[axis] > 1)


def _unused_axes(cuts: AxesByDim, sizes: Mapping[str, int]) -> list[str]:
    """The mesh axes of two or more devices that shard no dimension of an array."""
    used = set(itertools.chain.from_iterable(cuts))
    return [axis for axis, size in sizes.items() if size > 1 and axis not in used]


def _square(shape: tuple[int, ...]) -> tuple[int, int] | None:
    """The last two dimensions of a matrix or a stack of them if they are equal; else
    `None`.
    """
    rank = len(shape)
    if rank in (2, 3) and shape[-1] == shape[-2]:
        return rank - 2, rank - 1
    return None


def _channels(shape: tuple[int, ...]) -> tuple[int, int] | None:
    """The channel dimensions of a kernel: the first two or the last two, where all
    others are one size, and that a window's.
    """
    rank = len(shape)
    for dims in ((0, 1), (rank - 2, rank - 1)):
        windows = [size for dim, size in enumerate(shape) if dim not in dims]
        is_equal = len(set(windows)) == 1
        if len(windows) > 1 and is_equal and 1 < windows[0] <= _WINDOW:
            return dims
    return None


def matches_operation(
    predicate: OperationPredicate,
    operation: Operation,
    values: Sequence[StepValue],
    cuts: Mapping[int, AxesByDim],
    sizes: Mapping[str, int],
) -> bool:
    """Whether the arrays of an operation are sharded as the predicate says.

    `values` are the arrays of the step. `cuts` has the mesh axes of each dimension of
    an array, by the array's number, and `sizes` the sizes of the mesh axes.
    """
    arrays: list[ShardedArray] = []
    for number in (*operation.ins, *operation.outs):
        shape = values[number].shape
        unsharded = [()] * len(shape)
        arrays.append(ShardedArray(shape=shape, cuts=cuts[number] or unsharded))
    cuts_of_first = arrays[0].cuts if arrays else ()
    if len(_unused_axes(cuts_of_first, sizes)) < predicate.unused_axes:
        return False
    if predicate.sharded == "unevenly":
        return any(_is_uneven(array, sizes) for array in arrays)
    if operation.dimension_numbers is None:
        return False

    dims = stablehlo.ConvDimensionNumbers(operation.dimension_numbers)
    image = arrays[0]
    kernel = arrays[1]
    if predicate.sharded == "channels":
        shards_in = _shard_count(
            kernel.cuts[dims.kernel_input_feature_dimension], sizes
        )
        shards_out = _shard_count(
            kernel.cuts[dims.kernel_output_feature_dimension], sizes
        )
        return shards_in > 1 and shards_out > 1
    if predicate.sharded == "groups":
        # The gradient of a kernel is a convolution whose batch dimension has the
        # channels, and whose feature dimension has the rows of the batch. A grouped one
        # has a smaller batch dimension in its result.
        batch_size = image.shape[dims.input_batch_dimension]
        is_grouped = arrays[-1].shape[dims.output_batch_dimension] < batch_size
        shards_of_rows = _shard_count(image.cuts[dims.input_feature_dimension], sizes)
        return is_grouped and shards_of_rows > 1
    # The predicate is about "windows".
    windows = dims.input_spatial_dimensions
    return any(_shard_count(image.cuts[dim], sizes) > 1 for dim in windows)


def _is_uneven(array: ShardedArray, sizes: Mapping[str, int]) -> bool:
    """Whether the shards of some dimension of an array do not divide it."""
    for size, cut in zip(array.shape, array.cuts, strict=True):
        if size % _shard_count(cut, sizes):
            return True
    return False


def _shard_count(cut: Sequence[str], sizes: Mapping[str, int]) -> int:
    """The number of shards into which mesh axes divide a dimension."""
    return math.prod(_axis_size(axis, sizes) for axis in cut)


def _axis_size(axis: str, sizes: Mapping[str, int]) -> int:
    """The size of a mesh axis, or of a sub-axis in Shardy's notation, "fsdp:(1)2"."""
    if ":" not in axis:
        return sizes[axis]
    _, _, size = axis.rpartition(")")
    return int(size)
