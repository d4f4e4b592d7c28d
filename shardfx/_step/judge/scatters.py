"""Scatters, into arrays that are cut too."""

import dataclasses
import functools as ft
import math
from collections.abc import Mapping, Sequence

import numpy as np

from ..hlo_text import Instruction, arrays_in
from .cuts import HOLE, Cut
from .forms import reducer_of
from .held import Context, Held, cut_of, product_of_terms, require_finished
from .indices import (
    LookupDims,
    is_box,
    is_clamped,
    lookup_of,
    places_of_rows,
    require_no_idiom,
    require_whole_columns,
    require_whole_without_index,
    shift_of,
    window_dims,
    without_idiom,
)
from .joining import is_identity, is_zero, joined_cut
from .matching import held_result, judged_match
from .values import Node
from .verdict import Unjudged


# Operations behind which a slice is the same slice.
_UNCHANGED = ("copy", "reshape", "bitcast", "transpose")
# The array into which all devices scatter their part may be taken once or more.
_TAKEN_OFTEN = ("maximum", "minimum")


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
    table, raw_index, updates = operands
    require_finished(raw_index, "an index")
    require_no_idiom(table)
    require_no_idiom(updates)
    if is_clamped(raw_index):
        # What is out of bounds would be written to the last row, and not be dropped.
        raise Unjudged("a scatter at indices that are clamped")
    rule = ft.partial(_scattered, context, instruction, raw_index=raw_index)
    operands = [table, without_idiom(raw_index), updates]
    return judged_match(context, instruction, operands, rule)


def _scattered(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
    value_number: int,
    raw_index: Held,
) -> Held:
    """As `scatter`, as the value `value_number` of the whole program. `operands` are
    the array, the indices and the updates. `raw_index` are the indices with what was
    done to them, and those in `operands` are without it.
    """
    table, index, updates = operands
    node = context.values.nodes[value_number]
    lookup = lookup_of(instruction)
    reducer = reducer_of(context.module, instruction)
    # The dimension of the updates for each dimension of the indices.
    place_of_row = places_of_rows(lookup, len(index.shape), len(updates.shape))
    windows = window_dims(lookup, len(table.shape))
    require_whole_columns(context, index, lookup, node)
    _require_whole_beside_indices(context, table, lookup, node)
    cuts = _cuts_of_table(
        context=context,
        operands=operands,
        node=node,
        lookup=lookup,
        windows=windows,
        place_of_row=place_of_row,
    )
    terms = _terms_over_indices(
        context=context,
        instruction=instruction,
        operands=operands,
        node=node,
        lookup=lookup,
        place_of_row=place_of_row,
    )
    _require_own_rows(
        context=context,
        instruction=instruction,
        table=table,
        raw_index=raw_index,
        lookup=lookup,
        windows=windows,
        node=node,
        cuts=cuts,
    )
    _require_same_sums(table, updates, reducer)
    _require_same_terms(table, updates, reducer, terms)
    held = held_result(context, instruction, operands, cuts, value_number=value_number)
    if terms is None or reducer not in _TAKEN_OFTEN:
        reducer = "add"
    return dataclasses.replace(held, terms=terms, reducer=reducer, scale=updates.scale)


def _require_whole_beside_indices(
    context: Context,
    table: Held,
    lookup: LookupDims,
    node: Node,
) -> None:
    """Raises `Unjudged` if a dimension of the array is cut that has no index, and of
    which the updates of the scatter `node` have a part.
    """
    table_shape = node.operands[0].shape
    update_shape = node.operands[2].shape
    windows = window_dims(lookup, len(table.shape))
    covered_dims = [
        dim
        for place, dim in zip(lookup.offset, windows, strict=True)
        if update_shape[place] == table_shape[dim]
    ]
    require_whole_without_index(
        context=context,
        table=table,
        table_shape=table_shape,
        lookup=lookup,
        covered_dims=covered_dims,
    )


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


def _require_same_terms(
    table: Held,
    updates: Held,
    reducer: str,
    terms: tuple[int, ...] | None,
) -> None:
    """Raises `Unjudged` for a scatter whose updates are unfinished, unless the array
    into which it writes is unfinished alike, or is zeros. `terms` are those of the
    result.
    """
    is_unfinished = terms is not None or updates.scale != 1
    if is_unfinished and reducer in _TAKEN_OFTEN:
        if not table.is_finished or not updates.is_finished:
            raise Unjudged("an unfinished scatter")
    elif is_unfinished and reducer != "add":
        raise Unjudged("an unfinished scatter")
    elif terms is not None or table.terms is not None:
        is_of_sums = table.terms != terms or updates.terms is not None
        if not is_zero(table) and is_of_sums:
            raise Unjudged("a scatter of sums into a finished array")


def _cuts_of_table(
    context: Context,
    operands: Sequence[Held],
    node: Node,
    lookup: LookupDims,
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
    instruction: Instruction,
    operands: Sequence[Held],
    node: Node,
    lookup: LookupDims,
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
            if cut.has_holes:
                _require_no_effect_of_padding(context, instruction, updates, place, cut)
            part = context.cuts.terms(cut, update_shape[place])
            terms = product_of_terms(context.everywhere, terms, part)
        elif updates.shape[place] != update_shape[place]:
            raise Unjudged("a scatter of broadcasts")
    return terms


def _require_no_effect_of_padding(
    context: Context,
    instruction: Instruction,
    updates: Held,
    place: int,
    cut: Cut,
) -> None:
    """Raises `Unjudged` for a scatter of padding, whose indices may be any, unless the
    updates there leave each element as it is. `cut` is that of dimension `place` of the
    updates, and has holes where there is padding.
    """
    reducer = reducer_of(context.module, instruction)
    dtype = arrays_in(instruction.result)[0].dtype
    is_padding_of_updates = cut_of(updates.axes[place]) is cut
    if not is_padding_of_updates or not is_identity(
        updates.fill_number, reducer, dtype
    ):
        raise Unjudged("a scatter of padding")


def _require_own_rows(
    context: Context,
    instruction: Instruction,
    table: Held,
    raw_index: Held,
    lookup: LookupDims,
    windows: Sequence[int],
    node: Node,
    cuts: list[Cut | None],
) -> None:
    """Raises `Unjudged` unless the offsets of the indices are where the parts of the
    array start that devices hold. What falls outside is another device's and is
    dropped. `windows` are the dimensions of the array that the updates have. Sets in
    `cuts` those of dimensions along which nothing changes, such as zeros.
    """
    shifts = shift_of(context, raw_index, len(lookup.start))
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
        if not is_box(context, cut, size):
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


def _is_of_one_row(index: Held, lookup: LookupDims) -> bool:
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
