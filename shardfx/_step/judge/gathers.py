"""Gathers, from arrays that are cut too."""

import dataclasses
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
    require_whole_columns,
    require_whole_without_index,
    shift_of,
    window_dims,
    without_idiom,
)
from .joining import joined_cut
from .lookups import Clamped, Fetched, Shifted
from .matching import held_result, judged_match
from .values import Node
from .verdict import Unjudged, Wrong


def gather(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
) -> Held:
    """The result of a gather. Of a dimension that is cut, each device looks up what it
    has, which an idiom of `lookups.py` masks later.
    """
    require_finished(operands[1], "an index")
    require_no_idiom(operands[0])
    index = operands[1]
    shape = arrays_in(instruction.result)[0].shape
    operands = [operands[0], without_idiom(index)]

    def of_match(expressed_operands: Sequence[Held], number: int) -> Held:
        table, indices = expressed_operands
        return _gathered(
            context=context,
            instruction=instruction,
            table=table,
            index=indices,
            raw_index=index,
            value_number=number,
            shape=shape,
        )

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
    lookup = lookup_of(instruction)
    slice_sizes = numbers(instruction, "slice_sizes")
    whole_slice_sizes = numbers(node.instruction, "slice_sizes")
    offsets = shift_of(context, raw_index, len(lookup.start))
    table_shape = node.operands[0].shape
    places = places_of_rows(lookup, len(index.shape), len(shape))
    require_whole_columns(context, index, lookup, node)
    covered_dims = _covered_dims(context, instruction, table, node)
    cuts = _cuts_of_windows(
        context=context,
        table=table,
        index=index,
        node=node,
        lookup=lookup,
        places=places,
        slice_sizes=slice_sizes,
        rank=len(shape),
    )
    bounds = _bounds(
        context=context,
        table=table,
        table_shape=table_shape,
        lookup=lookup,
        sizes=slice_sizes,
        whole_sizes=whole_slice_sizes,
        covered_dims=covered_dims,
        shift=offsets,
    )
    held = held_result(
        context, instruction, [table, index], cuts, value_number=value_number
    )
    held = held.with_sums_of(table)
    clamp: tuple[int, ...] = ()
    if bounds.is_cut or is_clamped(raw_index):
        last_starts = [
            table_shape[dim] - whole_slice_sizes[dim] for dim in lookup.start
        ]
        clamp = _required_clamp(raw_index, bounds, last_starts)
    if not bounds.is_cut:
        return held
    index_axes: list[Axis | None] = [None] * len(shape)
    for row, place in places.items():
        index_axes[place] = index.axes[row]
    fetched = Fetched(
        indices=index.root,
        axes=tuple(index_axes),
        low=bounds.low,
        high=bounds.high,
        clamp=clamp,
    )
    return dataclasses.replace(held, idiom=fetched)


def _covered_dims(
    context: Context,
    instruction: Instruction,
    table: Held,
    node: Node,
) -> list[int]:
    """The dimensions of a table of which each window of a gather, the value `node`, has
    all. Raises `Unjudged` for others that have no index, and are cut.
    """
    assert node.instruction is not None
    lookup = lookup_of(instruction)
    slice_sizes = numbers(instruction, "slice_sizes")
    whole_slice_sizes = numbers(node.instruction, "slice_sizes")
    table_shape = node.operands[0].shape
    covered_dims = [
        dim
        for dim in window_dims(lookup, len(table.shape))
        if slice_sizes[dim] == table.shape[dim]
        and whole_slice_sizes[dim] == table_shape[dim]
    ]
    require_whole_without_index(
        context=context,
        table=table,
        table_shape=table_shape,
        lookup=lookup,
        covered_dims=covered_dims,
    )
    return covered_dims


def _cuts_of_windows(
    context: Context,
    table: Held,
    index: Held,
    node: Node,
    lookup: LookupDims,
    places: Mapping[int, int],
    slice_sizes: tuple[int, ...],
    rank: int,
) -> list[Cut | None]:
    """The cuts of the `rank` dimensions of the result of a gather, which is the value
    `node`: those of the indices, and those of the windows of `table`, which have the
    sizes `slice_sizes` on one device. `places` has the dimension of the result for each
    dimension of the indices.
    """
    assert node.instruction is not None
    whole_slice_sizes = numbers(node.instruction, "slice_sizes")
    table_shape = node.operands[0].shape
    cuts: list[Cut | None] = [None] * rank
    for row, place in places.items():
        cuts[place] = cut_of(index.axes[row])
    for dim, row in zip(lookup.batch, lookup.index_batch, strict=True):
        place = places[row]
        axes = [table.axes[dim], index.axes[row]]
        cuts[place] = joined_cut(
            context, "gather, along a batch dimension,", place, axes
        )
    dims = window_dims(lookup, len(table.shape))
    for place, dim in zip(lookup.offset, dims, strict=True):
        is_whole_window = whole_slice_sizes[dim] == table_shape[dim]
        if is_whole_window and slice_sizes[dim] == table.shape[dim]:
            cuts[place] = cut_of(table.axes[dim])
        elif slice_sizes[dim] == whole_slice_sizes[dim]:
            cuts[place] = context.cuts.whole(slice_sizes[dim])
        else:
            raise Unjudged("a gather of windows that are cut")
    return cuts


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


def _bounds(
    context: Context,
    table: Held,
    table_shape: tuple[int, ...],
    lookup: LookupDims,
    sizes: tuple[int, ...],
    whole_sizes: tuple[int, ...],
    covered_dims: Collection[int],
    shift: np.ndarray | None,
) -> _Bounds:
    """What each device looks up itself of a table, which has the shape `table_shape` in
    the whole program. `sizes` and `whole_sizes` are those of the windows on one device
    and in the whole program, which have all of the dimensions `covered_dims`. `shift` is
    what was subtracted from the indices.
    """
    columns = len(lookup.start)
    first_starts = np.zeros((context.devices, columns), np.int64)
    last_starts = np.zeros((context.devices, columns), np.int64)
    is_cut = False
    terms: tuple[int, ...] | None = None
    for column, dim in enumerate(lookup.start):
        axis = table.axes[dim]
        size = table_shape[dim]
        offsets = np.zeros(context.devices, np.int64)
        if shift is not None:
            offsets = shift[:, column]
        is_whole = table.shape[dim] == size and (
            axis is None or context.cuts.is_whole(axis.cut, size)
        )
        starts = np.zeros(context.devices, np.int64)
        # A window over all of a dimension has one place, whatever its index.
        if not is_whole and dim not in covered_dims:
            if axis is None or not is_box(context, axis.cut, size):
                raise Unjudged("a lookup in a dimension in pieces")
            starts = axis.cut.starts[:, 0]
            is_cut = True
            if sizes[dim] != 1 or whole_sizes[dim] != 1:
                raise Unjudged("a lookup of windows across parts")
            # Each element has to be on one device, or on devices that count as one.
            terms_of_dim = context.cuts.terms(axis.cut, size)
            try:
                terms = product_of_terms(context.everywhere, terms, terms_of_dim)
            except Wrong as error:
                raise Unjudged("a lookup in parts without some elements") from error
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
    return _Bounds(low=first_starts, high=last_starts, is_cut=is_cut)
