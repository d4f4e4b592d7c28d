"""Gathers and scatters, in arrays that are cut too."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..hlo_text import Instruction, arrays_in
from .cuts import HOLE, Cut
from .forms import attribute, numbers, reducer_of
from .held import Axis, Context, Held, cut_of, product_of_terms, require_finished
from .joining import form_in, is_zero, joined_cut
from .lookups import Clamped, Fetched, Shifted
from .matching import held_result, judged_match
from .values import Node
from .verdict import Unjudged


# Operations behind which a slice is the same slice.
_UNCHANGED = ("copy", "reshape", "bitcast", "transpose")
# The array into which all devices scatter their part may be taken once or more.
_IDEMPOTENT = ("maximum", "minimum")


class _LookupDims(NamedTuple):
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


def _lookup_of(instruction: Instruction) -> _LookupDims:
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
    return _LookupDims(
        offset=dims_of_names[0],
        collapsed=dims_of_names[1],
        start=dims_of_names[2],
        batch=dims_of_names[3],
        index_batch=dims_of_names[4],
        vector=vector_dim,
    )


def _shift_of(context: Context, index: Held, columns: int) -> np.ndarray | None:
    """What was subtracted from indices on each device: an array (devices, columns).
    `None` if nothing was.
    """
    if isinstance(index.idiom, Shifted):
        return np.broadcast_to(index.idiom.offsets, (context.devices, columns))
    if index.idiom is not None and not isinstance(index.idiom, Clamped):
        raise Unjudged("a lookup that is not finished")
    return None


def _is_clamped(index: Held) -> bool:
    """Whether indices are clamped where the whole program does not do so."""
    return isinstance(index.idiom, Clamped | Shifted) and index.idiom.high is not None


def _without_idiom(index: Held) -> Held:
    """The indices as a value of the whole program, before they were clamped and
    shifted.
    """
    return dataclasses.replace(index, idiom=None)


def _require_no_idiom(array: Held) -> None:
    """Raises `Unjudged` for an array that is a step of another lookup: where its index
    is another device's, it has other elements.
    """
    if array.idiom is not None:
        raise Unjudged("a lookup that is not finished")


def gather(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
) -> Held:
    """The result of a gather. Of a dimension that is cut, each device looks up what it
    has, which an idiom of `lookups.py` masks later.
    """
    require_finished(operands[1], "an index")
    _require_no_idiom(operands[0])
    index = operands[1]
    shape = arrays_in(instruction.result)[0].shape
    operands = [operands[0], _without_idiom(index)]

    def of_match(expressed_operands: Sequence[Held], number: int) -> Held:
        table, indices = expressed_operands
        return _gathered(context, instruction, table, indices, index, number, shape)

    return judged_match(context, instruction, operands, of_match)


def _gathered(
    context: Context,
    instruction: Instruction,
    table: Held,
    index: Held,
    raw_index: Held,
    value_number: int,
    shape: tuple[int, ...],
) -> Held:
    """As `gather`, as the value `value_number` of the whole program, of the shape
    `shape` on one device. `table` is the array in which the indices are looked up.
    `raw_index` are the indices with what was done to them, such as a shift, and `index`
    is without it.
    """
    node = context.values.nodes[value_number]
    assert node.instruction is not None
    lookup = _lookup_of(instruction)
    slice_sizes = numbers(instruction, "slice_sizes")
    whole_slice_sizes = numbers(node.instruction, "slice_sizes")
    offsets = _shift_of(context, raw_index, len(lookup.start))
    table_shape = node.operands[0].shape
    # For each dimension of the result, its cut, and the axis of the indices.
    cuts: list[Cut | None] = [None] * len(shape)
    index_axes: list[Axis | None] = [None] * len(shape)
    # The dimensions that number the windows, in the indices and in the result.
    row_dims = [dim for dim in range(len(index.shape)) if dim != lookup.vector]
    batch_places = [dim for dim in range(len(shape)) if dim not in lookup.offset]
    _require_whole_columns(context, index, lookup, node)
    for place, row in zip(batch_places, row_dims, strict=True):
        axis = index.axes[row]
        cuts[place] = cut_of(axis)
        index_axes[place] = axis
    for dim, row in zip(lookup.batch, lookup.index_batch, strict=True):
        place = batch_places[row_dims.index(row)]
        axes = [table.axes[dim], index.axes[row]]
        cuts[place] = joined_cut(
            context, "gather, along a batch dimension,", place, axes
        )
    dropped_dims = lookup.collapsed + lookup.batch
    window_dims = [dim for dim in range(len(table.shape)) if dim not in dropped_dims]
    for place, dim in zip(lookup.offset, window_dims, strict=True):
        axis = table.axes[dim]
        if (
            whole_slice_sizes[dim] == table_shape[dim]
            and slice_sizes[dim] == table.shape[dim]
        ):
            cuts[place] = cut_of(axis)
        elif slice_sizes[dim] == whole_slice_sizes[dim]:
            cuts[place] = context.cuts.whole(slice_sizes[dim])
        else:
            raise Unjudged("a gather of windows that are cut")
    bounds = _bounds(
        context, table, table_shape, lookup, slice_sizes, whole_slice_sizes, offsets
    )
    form = form_in(context, instruction, [table, index], shape)
    held = held_result(context, form, instruction, shape, cuts, value_number)
    held = held.with_sums_of(table)
    clamp: tuple[int, ...] = ()
    if bounds.is_cut or _is_clamped(raw_index):
        last_starts = [
            table_shape[dim] - whole_slice_sizes[dim] for dim in lookup.start
        ]
        clamp = _required_clamp(raw_index, bounds, last_starts)
    if not bounds.is_cut:
        return held
    fetched = Fetched(index.root, tuple(index_axes), bounds.low, bounds.high, clamp)
    return dataclasses.replace(held, idiom=fetched)


class _Bounds(NamedTuple):
    """The first and the last index that each device looks up itself, arrays (devices,
    columns), and whether a column's dimension is cut.
    """

    low: np.ndarray
    high: np.ndarray
    is_cut: bool


def _required_clamp(
    raw_index: Held,
    bounds: _Bounds,
    last_starts: Sequence[int],
) -> tuple[int, ...]:
    """The bound of each column to which indices are clamped. Raises `Unjudged` unless
    that is as the whole program does it, to `last_starts` for each column, and then to
    no less than what a device holds, which is in `bounds`.
    """
    idiom = raw_index.idiom
    is_shifted = isinstance(idiom, Shifted) or not bounds.is_cut
    if not isinstance(idiom, Clamped | Shifted) or idiom.high is None or not is_shifted:
        raise Unjudged("a lookup by indices that are not clamped")
    # Equal bounds are right also where the last dimension is not that of the columns.
    have_one_bound = len({*idiom.high, *last_starts}) == 1
    if list(idiom.high) != list(last_starts) and not have_one_bound:
        raise Unjudged("indices that are clamped otherwise")
    if idiom.low is not None and idiom.last is not None:
        if (idiom.low > bounds.low).any() or (idiom.last < bounds.high).any():
            raise Unjudged("indices that are clamped to a part of what a device holds")
    return idiom.high


def _require_whole_columns(
    context: Context,
    index: Held,
    lookup: _LookupDims,
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


def _bounds(
    context: Context,
    table: Held,
    table_shape: tuple[int, ...],
    lookup: _LookupDims,
    sizes: tuple[int, ...],
    whole_sizes: tuple[int, ...],
    shift: np.ndarray | None,
) -> _Bounds:
    """What each device looks up itself of a table, which has the shape `table_shape` in
    the whole program. `sizes` and `whole_sizes` are those of the windows on one device
    and in the whole program, and `shift` is what was subtracted from the indices.
    """
    columns = len(lookup.start)
    first_starts = np.zeros((context.devices, columns), np.int64)
    last_starts = np.zeros((context.devices, columns), np.int64)
    is_cut = False
    for column, dim in enumerate(lookup.start):
        axis = table.axes[dim]
        size = table_shape[dim]
        offsets = np.zeros(context.devices, np.int64)
        if shift is not None:
            offsets = shift[:, column]
        is_full = sizes[dim] == table.shape[dim] and whole_sizes[dim] == size
        is_whole = table.shape[dim] == size and (
            axis is None or context.cuts.is_whole(axis.cut, size)
        )
        starts = np.zeros(context.devices, np.int64)
        # A window over all of a dimension has one place, whatever its index.
        if not is_whole and not is_full:
            if axis is None or not _is_box(context, axis.cut, size):
                raise Unjudged("a lookup in a dimension in pieces")
            starts = axis.cut.starts[:, 0]
            is_cut = True
            if sizes[dim] != 1 or whole_sizes[dim] != 1:
                raise Unjudged("a lookup of windows across parts")
        if (starts != offsets).any():
            if shift is None:
                raise Unjudged("a lookup, by plain indices, in a dimension that is cut")
            raise Unjudged("a lookup by indices with other offsets than the table's")
        first_starts[:, column] = starts
        last_starts[:, column] = starts + table.shape[dim] - sizes[dim]
        if is_cut:
            # Of a shard that is padded, no index is in the padding.
            last = size - whole_sizes[dim]
            last_starts[:, column] = np.minimum(last_starts[:, column], last)
    return _Bounds(first_starts, last_starts, is_cut)


def scatter(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
) -> Held:
    """The result of a scatter of one array. What a device scatters of its own part of
    the updates is a term of a sum.
    """
    if len(operands) != 3:
        raise Unjudged("a scatter of several arrays")
    require_finished(operands[1], "an index")
    _require_no_idiom(operands[0])
    _require_no_idiom(operands[2])
    index = operands[1]
    if _is_clamped(index):
        # What is out of bounds would be written to the last row, and not be dropped.
        raise Unjudged("a scatter at indices that are clamped")
    operands = [operands[0], _without_idiom(index), operands[2]]

    def of_match(expressed_operands: Sequence[Held], number: int) -> Held:
        return _scattered(context, instruction, expressed_operands, index, number)

    return judged_match(context, instruction, operands, of_match)


def _scattered(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
    raw_index: Held,
    number: int,
) -> Held:
    """As `scatter`, as the value `number` of the whole program. `operands` are the
    array, the indices and the updates. `raw_index` are the indices with what was done
    to them, and those in `operands` are without it.
    """
    table, index, updates = operands
    node = context.values.nodes[number]
    lookup = _lookup_of(instruction)
    reducer = reducer_of(context.module, instruction)
    row_dims = [dim for dim in range(len(index.shape)) if dim != lookup.vector]
    batch_places = [
        dim for dim in range(len(updates.shape)) if dim not in lookup.offset
    ]
    # The dimension of the updates for each dimension of the indices.
    place_of_row = dict(zip(row_dims, batch_places, strict=True))
    dropped_dims = lookup.collapsed + lookup.batch
    window_dims = [dim for dim in range(len(table.shape)) if dim not in dropped_dims]
    _require_whole_columns(context, index, lookup, node)
    cuts = _cuts_of_table(context, operands, node, lookup, window_dims, place_of_row)
    terms = _terms_over_indices(context, operands, node, lookup, place_of_row)
    _require_own_rows(
        context, instruction, table, raw_index, lookup, window_dims, node, cuts
    )
    _require_same_sums(table, updates, reducer)
    is_unfinished = terms is not None or updates.scale != 1
    if is_unfinished and reducer in _IDEMPOTENT:
        if not table.is_finished or not updates.is_finished:
            raise Unjudged("an unfinished scatter")
    elif is_unfinished and reducer != "add":
        raise Unjudged("an unfinished scatter")
    elif terms is not None or table.terms is not None:
        is_of_sums = table.terms != terms or updates.terms is not None
        if not is_zero(table) and is_of_sums:
            raise Unjudged("a scatter of sums into a finished array")
    form = form_in(context, instruction, [table, index, updates], table.shape)
    held = held_result(context, form, instruction, table.shape, cuts, number)
    if terms is None or reducer not in _IDEMPOTENT:
        reducer = "add"
    return dataclasses.replace(held, terms=terms, reducer=reducer, scale=updates.scale)


def _require_same_sums(table: Held, updates: Held, reducer: str) -> None:
    """Raises `Unjudged` for a scatter into a sum of other shares than those of the
    updates, or of an unfinished reduction that is no sum.
    """
    for array in (table, updates):
        if array.terms is not None and array.reducer != "add":
            raise Unjudged("an unfinished scatter")
    if is_zero(table):
        return
    if table.scale != updates.scale or (reducer != "add" and table.scale != 1):
        raise Unjudged("a scatter of shares of a sum into others")


def _cuts_of_table(
    context: Context,
    operands: Sequence[Held],
    node: Node,
    lookup: _LookupDims,
    windows: Sequence[int],
    place_of_row: Mapping[int, int],
) -> list[Cut | None]:
    """The cuts of the array into which a scatter writes, joined with those of indices
    and updates in the dimensions that they have in common: those of a batch, and those
    of `windows` that an update covers. `place_of_row` has the dimension of the updates
    for each dimension of the indices.
    """
    table, index, updates = operands
    table_shape = node.operands[0].shape
    update_shape = node.operands[2].shape
    cuts = [cut_of(axis) for axis in table.axes]
    for dim, row in zip(lookup.batch, lookup.index_batch, strict=True):
        axes = [table.axes[dim], index.axes[row], updates.axes[place_of_row[row]]]
        cuts[dim] = joined_cut(context, "scatter, along a batch dimension,", dim, axes)
    for place, dim in zip(lookup.offset, windows, strict=True):
        if update_shape[place] == table_shape[dim]:
            if updates.shape[place] != table.shape[dim]:
                raise Unjudged("a scatter of windows that are cut")
            axes = [table.axes[dim], updates.axes[place]]
            cuts[dim] = joined_cut(context, "scatter, along a window,", dim, axes)
        elif updates.shape[place] != update_shape[place]:
            raise Unjudged("a scatter of windows that are cut")
    return cuts


def _terms_over_indices(
    context: Context,
    operands: Sequence[Held],
    node: Node,
    lookup: _LookupDims,
    place_of_row: Mapping[int, int],
) -> tuple[int, ...] | None:
    """The terms of the sum over the indices that are scattered, times those that the
    updates have; `None` if each device scatters whole updates at all indices.
    `place_of_row` has the dimension of the updates for each dimension of the indices.
    """
    _, index, updates = operands
    update_shape = node.operands[2].shape
    terms = updates.terms
    for row, place in place_of_row.items():
        if row in lookup.index_batch:
            continue
        axes = [index.axes[row], updates.axes[place]]
        cut = joined_cut(context, "scatter, along its indices,", place, axes)
        if cut is not None:
            part = context.cuts.terms(cut, update_shape[place])
            terms = product_of_terms(context.everywhere, terms, part)
        elif updates.shape[place] != update_shape[place]:
            raise Unjudged("a scatter of broadcasts")
    return terms


def _require_own_rows(
    context: Context,
    instruction: Instruction,
    table: Held,
    raw_index: Held,
    lookup: _LookupDims,
    windows: Sequence[int],
    node: Node,
    cuts: list[Cut | None],
) -> None:
    """Raises `Unjudged` unless the offsets of the indices are where the parts of the
    array start that devices hold. What falls outside is another device's and is
    dropped. `windows` are the dimensions of the array that the updates have. Sets in
    `cuts` those of dimensions along which nothing changes, such as zeros.
    """
    shifts = _shift_of(context, raw_index, len(lookup.start))
    table_shape = node.operands[0].shape
    update_shape = node.operands[2].shape
    for column, dim in enumerate(lookup.start):
        size = table_shape[dim]
        if dim in windows:
            place = lookup.offset[windows.index(dim)]
            if update_shape[place] == size:
                continue
        offsets = np.zeros(context.devices, np.int64)
        if shifts is not None:
            offsets = shifts[:, column]
        axis = table.axes[dim]
        if axis is None and table.shape[dim] != size:
            # Zeros fit any part.
            indices = offsets[:, None] + np.arange(table.shape[dim])
            indices = np.where(indices < size, indices, HOLE)
            cut = context.cuts.from_indices(indices)
            context.cuts.terms(cut, size)
            cuts[dim] = cut
        elif axis is None:
            cuts[dim] = context.cuts.whole(size)
        cut = cuts[dim]
        assert cut is not None
        if dim in windows and not context.cuts.is_whole(cut, size):
            raise Unjudged("a scatter of windows across parts")
        if not _is_box(context, cut, size):
            raise Unjudged("a scatter into a dimension in pieces")
        starts = cut.starts[:, 0]
        if (starts != offsets).any():
            if shifts is None:
                raise Unjudged(
                    "a scatter, by plain indices, into a dimension that is cut"
                )
            raise Unjudged("a scatter by indices with other offsets than the array's")
        if starts.any() and _is_of_one_row(raw_index, lookup):
            _require_no_slice_before(context, instruction)


def _is_of_one_row(index: Held, lookup: _LookupDims) -> bool:
    """Whether the indices are those of one window."""
    sizes = [size for dim, size in enumerate(index.shape) if dim != lookup.vector]
    return math.prod(sizes) == 1


def _require_no_slice_before(context: Context, instruction: Instruction) -> None:
    """Raises `Unjudged` for a scatter of one row into a part that the device has just
    sliced. XLA reads the row by a slice, of which its simplifier and the slice before
    make one; beyond the part it reads, and writes, a row of another part.
    """
    computation = next(
        computation
        for computation in context.module.computations.values()
        if computation.get(instruction.name) is instruction
    )
    source = computation[instruction.operands[0]]
    while source.opcode in _UNCHANGED:
        source = computation[source.operands[0]]
    if source.opcode == "dynamic-slice":
        raise Unjudged(
            "a scatter of one row into a part of an array: XLA would write a row of"
            " another part, so constrain the array to one sharding from its start on"
        )


def _is_box(context: Context, cut: Cut, size: int) -> bool:
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
