"""The dimensions and the indices of gathers and scatters."""

import dataclasses
import math
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from ..hlo_text import Instruction
from .cuts import HOLE, Cut
from .forms import attribute, numbers
from .held import Context, Held
from .lookups import Clamped, Shifted
from .values import Node
from .verdict import Unjudged


class LookupDims(NamedTuple):
    """The dimensions of a gather or a scatter, by HLO's names for a gather.

    - `offset`: those of the result that follow a window of the operand.
    - `collapsed`: those of the operand along which a window has one element, and which
      the result has not.
    - `start`: the dimension of the operand for each column of the indices.
    - `batch`, `index_batch`: those of the operand and of the indices that are common.
    - `vector`: the dimension of the indices that has their columns.
    """

    offset: tuple[int, ...]
    collapsed: tuple[int, ...]
    start: tuple[int, ...]
    batch: tuple[int, ...]
    index_batch: tuple[int, ...]
    vector: int


def lookup_of(instruction: Instruction) -> LookupDims:
    """The dimensions of a gather or a scatter, from its attributes."""
    is_gather = instruction.opcode == "gather"
    names = (
        (
            "offset_dims",
            "collapsed_slice_dims",
            "start_index_map",
            "operand_batching_dims",
            "start_indices_batching_dims",
        )
        if is_gather
        else (
            "update_window_dims",
            "inserted_window_dims",
            "scatter_dims_to_operand_dims",
            "input_batching_dims",
            "scatter_indices_batching_dims",
        )
    )
    dims_of_names = [numbers(instruction, name) for name in names]
    vector_dim = int(attribute(instruction, "index_vector_dim"))
    return LookupDims(
        offset=dims_of_names[0],
        collapsed=dims_of_names[1],
        start=dims_of_names[2],
        batch=dims_of_names[3],
        index_batch=dims_of_names[4],
        vector=vector_dim,
    )


def places_of_rows(lookup: LookupDims, index_rank: int, rank: int) -> dict[int, int]:
    """For each dimension of the indices but that of their columns, the dimension of the
    windows, an array of `rank` dimensions, that follows it: those of a gather's result
    or of a scatter's updates. The indices have `index_rank` dimensions.
    """
    row_dims = [dim for dim in range(index_rank) if dim != lookup.vector]
    places = [dim for dim in range(rank) if dim not in lookup.offset]
    return dict(zip(row_dims, places, strict=True))


def window_dims(lookup: LookupDims, rank: int) -> list[int]:
    """The dimensions of an array of `rank` dimensions that its windows have too."""
    dropped_dims = lookup.collapsed + lookup.batch
    return [dim for dim in range(rank) if dim not in dropped_dims]


def shift_of(context: Context, index: Held, columns: int) -> np.ndarray | None:
    """What was subtracted from indices on each device: an array (devices, columns).
    `None` if nothing was.
    """
    if isinstance(index.idiom, Shifted):
        return np.broadcast_to(index.idiom.offsets, (context.devices, columns))
    if index.idiom is not None and not isinstance(index.idiom, Clamped):
        raise Unjudged("a lookup that is not finished")
    return None


def is_clamped(index: Held) -> bool:
    """Whether indices are clamped where the whole program does not do so."""
    return isinstance(index.idiom, Clamped | Shifted) and index.idiom.high is not None


def without_idiom(index: Held) -> Held:
    """The indices as a value of the whole program, before they were clamped and
    shifted.
    """
    return dataclasses.replace(index, idiom=None)


def require_no_idiom(array: Held) -> None:
    """Raises `Unjudged` for an array that is a step of another lookup: where its index
    is another device's, it has other elements.
    """
    if array.idiom is not None:
        raise Unjudged("a lookup that is not finished")


def require_whole_columns(
    context: Context,
    index: Held,
    lookup: LookupDims,
    node: Node,
) -> None:
    """Raises `Unjudged` if the dimension of the indices that has their columns is cut:
    a column is the index along one dimension of the array. `node` is the value of the
    lookup.
    """
    if lookup.vector == len(index.shape):
        return
    axis = index.axes[lookup.vector]
    size = node.operands[1].shape[lookup.vector]
    if index.shape[lookup.vector] != size:
        raise Unjudged("a lookup with columns that are cut")
    if axis is not None and not context.cuts.is_whole(axis.cut, size):
        raise Unjudged("a lookup with columns that are cut")


def require_same_order(
    instruction: Instruction,
    index: Held,
    lookup: LookupDims,
    node: Node,
) -> None:
    """Raises `Unjudged` for a lookup or a scatter that says that its indices are
    sorted, where that of the whole program, the value `node`, does not: XLA may then
    compute it wrongly. A single index is sorted.
    """
    assert node.instruction is not None
    if not _is_sorted(instruction) or _is_sorted(node.instruction):
        return
    rows = [size for dim, size in enumerate(index.shape) if dim != lookup.vector]
    if math.prod(rows) > 1:
        raise Unjudged(f"a {instruction.opcode} that says that its indices are sorted")


def _is_sorted(instruction: Instruction) -> bool:
    return attribute(instruction, "indices_are_sorted") == "true"


def require_whole_without_index(
    context: Context,
    table: Held,
    table_shape: tuple[int, ...],
    lookup: LookupDims,
    covered_dims: Collection[int],
) -> None:
    """Raises `Unjudged` if a dimension of the array `table` is cut that has no index:
    the windows start with its first element, which is not that of each device. Windows
    have all of the dimensions `covered_dims`. The array has the shape `table_shape` in
    the whole program.
    """
    for dim, (axis, size) in enumerate(zip(table.axes, table_shape, strict=True)):
        if dim in covered_dims or dim in lookup.start or dim in lookup.batch:
            continue
        is_whole = axis is None or context.cuts.is_whole(axis.cut, size)
        if not is_whole or table.shape[dim] != size:
            raise Unjudged("windows that start with the first element of each device")


def is_box(context: Context, cut: Cut, size: int) -> bool:
    """Whether a cut has one segment of neighbours on each device, and perhaps padding
    beyond the end of the dimension.
    """
    if len(cut.lengths) == 1:
        return not cut.has_holes and (cut.step == 1 or cut.size == 1)
    firsts = cut.starts[:, :1]
    indices = firsts + np.arange(cut.size)
    padded = np.where(indices < size, indices, HOLE)
    has_start = bool((firsts != HOLE).all())
    return has_start and np.array_equal(context.cuts.indices(cut), padded)
