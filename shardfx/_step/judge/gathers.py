"""Gathers, from arrays that are cut too."""

import dataclasses
import functools as ft
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..hlo_text import Instruction, arrays_in
from .cuts import Cut
from .forms import numbers
from .held import Axis, Context, Held, cut_of, product_of_terms, require_finished
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
from .joining import joined_cut
from .lookups import Clamped, Fetched, Shifted
from .matching import held_result, judged_match
from .verdict import Unjudged, Wrong


def gather(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
) -> Held:
    """The result of a gather. Of a dimension that is cut, each device looks up what it
    has, which an idiom of `lookups.py` masks later.
    """
    table, raw_index = operands
    require_finished(raw_index, "an index")
    require_no_idiom(table)
    rule = ft.partial(_gathered, context, instruction, raw_index=raw_index)
    return judged_match(context, instruction, [table, without_idiom(raw_index)], rule)


class _Lookup(NamedTuple):
    """A gather of the program of one device, and that of the whole program which it may
    be a part of.

    - `table`: what devices hold of the array in which the indices are looked up.
    - `indices`: what they hold of the indices, before these were clamped and shifted.
    - `dims`: the dimensions of both, by HLO's names.
    - `places`: the dimension of the result for each dimension of the indices, but that
      of their columns.
    - `window_sizes`, `whole_window_sizes`: the sizes of a window of the table, on one
      device and in the whole program.
    - `whole_table_shape`: the shape of the table in the whole program.
    - `covered_dims`: the dimensions of the table of which a window has all that a
      device has, and all in the whole program. It has one place along them, whatever
      its index.
    """

    table: Held
    indices: Held
    dims: LookupDims
    places: Mapping[int, int]
    window_sizes: tuple[int, ...]
    whole_window_sizes: tuple[int, ...]
    whole_table_shape: tuple[int, ...]
    covered_dims: Collection[int]


class _Bounds(NamedTuple):
    """The first and the last index that each device looks up itself, arrays (devices,
    columns), and whether a column's dimension is cut.
    """

    low: np.ndarray
    high: np.ndarray
    is_cut: bool


def _gathered(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
    value_number: int,
    raw_index: Held,
) -> Held:
    """As `gather`, as the value `value_number` of the whole program. `operands` are the
    table and the indices. `raw_index` are the indices with what was done to them, such
    as a shift, and those in `operands` are without it.
    """
    table, index = operands
    node = context.values.nodes[value_number]
    assert node.instruction is not None
    rank = len(arrays_in(instruction.result)[0].shape)
    dims = lookup_of(instruction)
    shift = shift_of(context, raw_index, len(dims.start))
    window_sizes = numbers(instruction, "slice_sizes")
    whole_window_sizes = numbers(node.instruction, "slice_sizes")
    whole_table_shape = node.operands[0].shape
    covered_dims = [
        dim
        for dim in window_dims(dims, len(table.shape))
        if window_sizes[dim] == table.shape[dim]
        and whole_window_sizes[dim] == whole_table_shape[dim]
    ]
    lookup = _Lookup(
        table=table,
        indices=index,
        dims=dims,
        places=places_of_rows(dims, len(index.shape), rank),
        window_sizes=window_sizes,
        whole_window_sizes=whole_window_sizes,
        whole_table_shape=whole_table_shape,
        covered_dims=covered_dims,
    )

    require_same_order(instruction, index, dims, node)
    require_whole_columns(context, index, dims, node)
    require_whole_without_index(
        context=context,
        table=table,
        table_shape=whole_table_shape,
        lookup=dims,
        covered_dims=covered_dims,
    )
    cuts = _cuts_of_result(context, lookup, rank)
    bounds = _bounds(context, lookup, shift)
    held = held_result(context, instruction, operands, cuts, value_number=value_number)
    held = held.with_sums_of(table)

    clamp: tuple[int, ...] = ()
    if bounds.is_cut or is_clamped(raw_index):
        clamp = _required_clamp(raw_index, lookup, bounds)
    if not bounds.is_cut:
        return held
    return dataclasses.replace(held, idiom=_fetched(lookup, bounds, clamp, rank))


def _cuts_of_result(context: Context, lookup: _Lookup, rank: int) -> list[Cut | None]:
    """The cuts of the `rank` dimensions of the result: those of the indices, and those
    of the windows. Raises `Unjudged` if a window is cut.
    """
    table = lookup.table
    index = lookup.indices
    cuts: list[Cut | None] = [None] * rank
    for row, place in lookup.places.items():
        cuts[place] = cut_of(index.axes[row])
    for dim, row in zip(lookup.dims.batch, lookup.dims.index_batch, strict=True):
        place = lookup.places[row]
        axes = [table.axes[dim], index.axes[row]]
        cuts[place] = joined_cut(
            context, "gather, along a batch dimension,", place, axes
        )
    dims = window_dims(lookup.dims, len(table.shape))
    for place, dim in zip(lookup.dims.offset, dims, strict=True):
        size = lookup.window_sizes[dim]
        if dim in lookup.covered_dims:
            cuts[place] = cut_of(table.axes[dim])
        elif size == lookup.whole_window_sizes[dim]:
            cuts[place] = context.cuts.whole(size)
        else:
            raise Unjudged("a gather of windows that are cut")
    return cuts


def _fetched(
    lookup: _Lookup,
    bounds: _Bounds,
    clamp: tuple[int, ...],
    rank: int,
) -> Fetched:
    """The idiom of a result, of `rank` dimensions, that is right on the device that has
    the index. `clamp` is the bound of each column to which the indices are clamped.
    """
    axes: list[Axis | None] = [None] * rank
    for row, place in lookup.places.items():
        axes[place] = lookup.indices.axes[row]
    return Fetched(
        indices=lookup.indices.root,
        axes=tuple(axes),
        low=bounds.low,
        high=bounds.high,
        clamp=clamp,
    )


def _required_clamp(
    raw_index: Held,
    lookup: _Lookup,
    bounds: _Bounds,
) -> tuple[int, ...]:
    """The bound of each column to which indices are clamped. Raises `Unjudged` unless
    that is as the whole program does it, to the last place of a window, and then to no
    less than what a device holds, which is in `bounds`.
    """
    idiom = raw_index.idiom
    is_shifted = isinstance(idiom, Shifted) or not bounds.is_cut
    if not isinstance(idiom, Clamped | Shifted) or idiom.high is None or not is_shifted:
        raise Unjudged("a lookup by indices that are not clamped")
    last_starts = [
        lookup.whole_table_shape[dim] - lookup.whole_window_sizes[dim]
        for dim in lookup.dims.start
    ]
    # Equal bounds are right also where the last dimension is not that of the columns.
    have_one_bound = len({*idiom.high, *last_starts}) == 1
    if list(idiom.high) != last_starts and not have_one_bound:
        raise Unjudged("indices that are clamped otherwise")
    if idiom.low is not None and idiom.last is not None:
        if (idiom.low > bounds.low).any() or (idiom.last < bounds.high).any():
            raise Unjudged("indices that are clamped to a part of what a device holds")
    return idiom.high


def _bounds(context: Context, lookup: _Lookup, shift: np.ndarray | None) -> _Bounds:
    """What each device looks up itself. `shift` is what was subtracted from the
    indices, an array (devices, columns); `None` if nothing was. Raises `Unjudged` if it
    is not where the parts of the table start, or if no device, or several that do not
    count as one, have an element.
    """
    table = lookup.table
    columns = len(lookup.dims.start)
    low = np.zeros((context.devices, columns), np.int64)
    high = np.zeros((context.devices, columns), np.int64)
    is_cut = False
    terms: tuple[int, ...] | None = None
    for column, dim in enumerate(lookup.dims.start):
        starts = np.zeros(context.devices, np.int64)
        if not _is_held_whole(context, lookup, dim):
            cut = _cut_into_boxes(context, lookup, dim)
            starts = cut.starts[:, 0]
            is_cut = True
            # Each element has to be on one device, or on devices that count as one.
            terms_of_dim = context.cuts.terms(cut, lookup.whole_table_shape[dim])
            try:
                terms = product_of_terms(context.everywhere, terms, terms_of_dim)
            except Wrong as error:
                raise Unjudged("a lookup in parts without some elements") from error
        if shift is None and starts.any():
            raise Unjudged("a lookup, by plain indices, in a dimension that is cut")
        if shift is not None and (starts != shift[:, column]).any():
            raise Unjudged("a lookup by indices with other offsets than the table's")
        low[:, column] = starts
        # Of a shard that is padded, no index is in the padding.
        last_of_part = starts + table.shape[dim] - lookup.window_sizes[dim]
        last = lookup.whole_table_shape[dim] - lookup.whole_window_sizes[dim]
        high[:, column] = np.minimum(last_of_part, last)
    return _Bounds(low=low, high=high, is_cut=is_cut)


def _is_held_whole(context: Context, lookup: _Lookup, dim: int) -> bool:
    """Whether each device can place a window along dimension `dim` of the table by the
    whole program's index.
    """
    if dim in lookup.covered_dims:
        return True
    axis = lookup.table.axes[dim]
    size = lookup.whole_table_shape[dim]
    if lookup.table.shape[dim] != size:
        return False
    return axis is None or context.cuts.is_whole(axis.cut, size)


def _cut_into_boxes(context: Context, lookup: _Lookup, dim: int) -> Cut:
    """The cut of dimension `dim` of the table. Raises `Unjudged` unless each device's
    part is one box, and a window one element of it.
    """
    axis = lookup.table.axes[dim]
    if axis is None or not is_box(context, axis.cut, lookup.whole_table_shape[dim]):
        raise Unjudged("a lookup in a dimension in pieces")
    if lookup.window_sizes[dim] != 1 or lookup.whole_window_sizes[dim] != 1:
        raise Unjudged("a lookup of windows across parts")
    return axis.cut
