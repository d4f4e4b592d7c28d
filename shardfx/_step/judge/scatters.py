"""Scatters, into arrays that are cut too."""

import dataclasses
import functools as ft
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

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
    require_same_order,
    require_whole_columns,
    require_whole_without_index,
    shift_of,
    window_dims,
    without_idiom,
)
from .joining import is_identity, is_zero, joined_cut
from .matching import held_result, judged_match
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


class _Write(NamedTuple):
    """A scatter of the program of one device, and that of the whole program which it
    may be a part of.

    - `table`, `updates`: what devices hold of the array into which they write, and of
      what they write.
    - `indices`: what they hold of the indices, before these were shifted.
    - `dims`: the dimensions of all three, by HLO's names.
    - `places`: the dimension of the updates for each dimension of the indices, but that
      of their columns.
    - `window_dims`: the dimensions of the table that the updates have too.
    - `whole_table_shape`, `whole_updates_shape`: the shapes in the whole program.
    """

    table: Held
    indices: Held
    updates: Held
    dims: LookupDims
    places: Mapping[int, int]
    window_dims: Sequence[int]
    whole_table_shape: tuple[int, ...]
    whole_updates_shape: tuple[int, ...]


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
    dims = lookup_of(instruction)
    reducer = reducer_of(context.module, instruction)
    write = _Write(
        table=table,
        indices=index,
        updates=updates,
        dims=dims,
        places=places_of_rows(dims, len(index.shape), len(updates.shape)),
        window_dims=window_dims(dims, len(table.shape)),
        whole_table_shape=node.operands[0].shape,
        whole_updates_shape=node.operands[2].shape,
    )

    require_same_order(instruction, index, dims, node)
    require_whole_columns(context, index, dims, node)
    require_whole_without_index(
        context=context,
        table=table,
        table_shape=write.whole_table_shape,
        lookup=dims,
        covered_dims=[dim for dim in write.window_dims if _is_covered(write, dim)],
    )
    cuts = _cuts_of_table(context, write)
    terms = _terms_over_indices(context, instruction, write)
    shift = shift_of(context, raw_index, len(dims.start))
    cuts = _with_parts(
        context=context,
        instruction=instruction,
        write=write,
        cuts=cuts,
        shift=shift,
    )
    _require_same_sums(table, updates, reducer)
    _require_same_terms(table, updates, reducer, terms)

    held = held_result(context, instruction, operands, cuts, value_number=value_number)
    if terms is None or reducer not in _TAKEN_OFTEN:
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


def _cuts_of_table(context: Context, write: _Write) -> list[Cut | None]:
    """The cuts of the array into which a scatter writes, joined with those of indices
    and updates in the dimensions that they have in common: those of a batch, and those
    of which an update covers all.
    """
    table = write.table
    index = write.indices
    updates = write.updates
    cuts = [cut_of(axis) for axis in table.axes]
    for dim, row in zip(write.dims.batch, write.dims.index_batch, strict=True):
        axes = [table.axes[dim], index.axes[row], updates.axes[write.places[row]]]
        cuts[dim] = joined_cut(context, "scatter, along a batch dimension,", dim, axes)
    for place, dim in zip(write.dims.offset, write.window_dims, strict=True):
        size = write.whole_updates_shape[place]
        if size == write.whole_table_shape[dim]:
            if updates.shape[place] != table.shape[dim]:
                raise Unjudged("a scatter of windows that are cut")
            axes = [table.axes[dim], updates.axes[place]]
            cuts[dim] = joined_cut(context, "scatter, along a window,", dim, axes)
        elif updates.shape[place] != size:
            raise Unjudged("a scatter of windows that are cut")
    return cuts


def _terms_over_indices(
    context: Context,
    instruction: Instruction,
    write: _Write,
) -> tuple[int, ...] | None:
    """The terms of the sum over the indices that are scattered, times those that the
    updates have; `None` if each device scatters whole updates at all indices.
    """
    updates = write.updates
    terms = updates.terms
    for row, place in write.places.items():
        if row in write.dims.index_batch:
            continue
        size = write.whole_updates_shape[place]
        axes = [write.indices.axes[row], updates.axes[place]]
        cut = joined_cut(context, "scatter, along its indices,", place, axes)
        if cut is not None:
            if cut.has_holes:
                _require_no_effect_of_padding(
                    context=context,
                    instruction=instruction,
                    updates=updates,
                    place=place,
                    cut=cut,
                )
            part = context.cuts.terms(cut, size)
            terms = product_of_terms(context.everywhere, terms, part)
        elif updates.shape[place] != size:
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


def _with_parts(
    context: Context,
    instruction: Instruction,
    write: _Write,
    cuts: Sequence[Cut | None],
    shift: np.ndarray | None,
) -> list[Cut | None]:
    """The cuts of the table, from `cuts`, with those of dimensions along which nothing
    changes, such as those of zeros: each device has the part at the offsets of its
    indices. `shift` is what was subtracted from the indices, an array (devices,
    columns); `None` if nothing was.

    Raises `Unjudged` unless the offsets are where each device's part starts. What falls
    outside is another device's and is dropped.
    """
    cuts = list(cuts)
    table = write.table
    for column, dim in enumerate(write.dims.start):
        if _is_covered(write, dim):
            continue
        size = write.whole_table_shape[dim]
        offsets = np.zeros(context.devices, np.int64)
        if shift is not None:
            offsets = shift[:, column]
        if table.axes[dim] is None:
            cuts[dim] = _part_at(context, offsets, table.shape[dim], size)
        cut = cuts[dim]
        assert cut is not None
        if dim in write.window_dims and not context.cuts.is_whole(cut, size):
            raise Unjudged("a scatter of windows across parts")
        if not is_box(context, cut, size):
            raise Unjudged("a scatter into a dimension in pieces")
        starts = cut.starts[:, 0]
        if shift is None and starts.any():
            raise Unjudged("a scatter, by plain indices, into a dimension that is cut")
        if (starts != offsets).any():
            raise Unjudged("a scatter by indices with other offsets than the array's")
        if starts.any() and _is_of_one_row(write):
            _require_no_slice_before(context, instruction)
    return cuts


def _is_covered(write: _Write, dim: int) -> bool:
    """Whether each update covers all of dimension `dim` of the table."""
    if dim not in write.window_dims:
        return False
    place = write.dims.offset[write.window_dims.index(dim)]
    return write.whole_updates_shape[place] == write.whole_table_shape[dim]


def _part_at(
    context: Context,
    offsets: np.ndarray,
    local_size: int,
    size: int,
) -> Cut:
    """The cut of a dimension of `size` of which each device has the part of
    `local_size` at its offset. Raises `Unjudged` if the parts overlap, or do not cover
    the dimension.
    """
    if local_size == size:
        return context.cuts.whole(size)
    indices = offsets[:, None] + np.arange(local_size)
    cut = context.cuts.from_indices(np.where(indices < size, indices, HOLE))
    context.cuts.terms(cut, size)
    return cut


def _is_of_one_row(write: _Write) -> bool:
    """Whether the indices are those of one window."""
    shape = write.indices.shape
    sizes = [size for dim, size in enumerate(shape) if dim != write.dims.vector]
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
