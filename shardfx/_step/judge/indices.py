"""Lookups in arrays that are cut: embeddings, `take_along_axis`, and sums by index.

The partitioner subtracts each device's offset from the indices, looks up what it can,
and masks what is another device's. Each step is half of a meaning, and the select by the
mask is the end: the devices have terms of the lookup.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..hlo_text import Instruction, arrays_in
from .cuts import Cut
from .forms import attribute, numbers, reducer_of
from .held import (
    NOWHERE,
    Axis,
    Context,
    Held,
    product_of_terms,
    require_finished,
)
from .joining import form_in, joined_cut
from .matching import are_same, matched_operands, placed
from .values import Node
from .verdict import Unjudged, Wrong


class Clamped(NamedTuple):
    """Indices that are clamped to [0, high], a number for each column, and then perhaps
    to each device's `low` and `last`, arrays (devices, columns).
    """

    high: tuple[int, ...]
    low: np.ndarray | None = None
    last: np.ndarray | None = None


class Shifted(NamedTuple):
    """Indices minus each device's offset: an array (devices, columns). `high` is the
    bound to which they were clamped before; `None` if they were not.
    """

    offsets: np.ndarray
    high: tuple[int, ...] | None
    low: np.ndarray | None = None
    last: np.ndarray | None = None


class Side(NamedTuple):
    """Whether indices are below ("LT") or above ("GT") each device's limit."""

    direction: str
    limits: np.ndarray
    high: tuple[int, ...] | None


class Outside(NamedTuple):
    """Whether indices are outside of each device's [low, high]."""

    low: np.ndarray
    high: np.ndarray


class Fetched(NamedTuple):
    """Elements looked up by shifted indices; they are right where the indices are
    between `low` and `high`.

    - `indices`: the number of the indices' value.
    - `axes`: the axes of the indices at the dimensions of the result.
    """

    indices: int
    axes: tuple[Axis | None, ...]
    low: np.ndarray
    high: np.ndarray


IDIOMS = frozenset(
    "broadcast reshape transpose copy convert select reduce gather scatter tuple"
    " get-tuple-element clamp subtract compare or and add".split()
)


def columns_of(known: np.ndarray | None, held: Held) -> np.ndarray | None:
    """Known numbers as an array (devices, columns), where the columns are the last
    dimension of `held`.
    """
    if known is None or known.dtype.kind not in "iub":
        return None
    if any(size != 1 for size in known.shape[1:-1]):
        return None
    if known.ndim == 1:
        return known.reshape(-1, 1)
    columns = held.shape[-1]
    return np.broadcast_to(known.reshape(len(known), -1), (len(known), columns)).astype(
        np.int64
    )


def indexed(
    context: Context, instruction: Instruction, operands: Sequence[Held]
) -> Held | None:
    """A step of a lookup in an array that is cut; `None` if it is none."""
    opcode = instruction.opcode
    index = next((one for one in operands if one.root != NOWHERE), None)
    if index is None:
        return None
    if opcode == "clamp" and operands[1].idiom is None:
        return _clamped(operands)
    if opcode == "clamp" and isinstance(operands[1].idiom, Clamped):
        return _clamped_on_device(operands)
    if opcode == "subtract" and operands[1].root == NOWHERE:
        return _shifted(operands)
    if opcode == "compare" and operands[1].known is not None:
        return _side(instruction, operands)
    if opcode == "or":
        return _outside(operands)
    if opcode == "select":
        return _ended(context, operands)
    if opcode in ("convert", "copy") and isinstance(
        operands[0].idiom, Clamped | Fetched
    ):
        return operands[0]
    if any(operand.idiom is not None for operand in operands):
        raise Unjudged("a lookup that is not finished")
    return None


def _clamped(operands: Sequence[Held]) -> Held | None:
    low, index, high = operands
    limits = columns_of(high.known, index)
    if low.known is None or low.known.any() or limits is None or index.root < 0:
        return None
    if (limits != limits[:1]).any():
        return None
    idiom = Clamped(tuple(limits[0].tolist()))
    return dataclasses.replace(index, idiom=idiom, known=None)


def _clamped_on_device(operands: Sequence[Held]) -> Held | None:
    low, index, last = operands
    assert isinstance(index.idiom, Clamped)
    lows, lasts = columns_of(low.known, index), columns_of(last.known, index)
    if lows is None or lasts is None or index.idiom.low is not None:
        return None
    idiom = Clamped(index.idiom.high, lows, lasts)
    return dataclasses.replace(index, idiom=idiom)


def _bound_of(index: Held) -> tuple[int, ...] | None:
    return index.idiom.high if isinstance(index.idiom, Clamped) else None


def _shifted(operands: Sequence[Held]) -> Held | None:
    index, offset = operands
    offsets = columns_of(offset.known, index)
    if offsets is None or index.root < 0 or not index.is_finished:
        return None
    if index.idiom is not None and not isinstance(index.idiom, Clamped):
        raise Unjudged("a lookup that is not finished")
    idiom = Shifted(offsets, None)
    if isinstance(index.idiom, Clamped):
        idiom = Shifted(offsets, *index.idiom)
    return dataclasses.replace(index, idiom=idiom, known=None)


def _side(instruction: Instruction, operands: Sequence[Held]) -> Held | None:
    index, limit = operands
    limits = columns_of(limit.known, index)
    direction = attribute(instruction, "direction")
    if limits is None or index.root < 0 or direction not in ("LT", "GT"):
        return None
    if index.idiom is not None and not isinstance(index.idiom, Clamped):
        raise Unjudged("a lookup that is not finished")
    if index.idiom is None and limit.root != NOWHERE:
        return None
    idiom = Side(direction, limits, _bound_of(index))
    return dataclasses.replace(index, idiom=idiom, known=None)


def _outside(operands: Sequence[Held]) -> Held:
    sides = {
        operand.idiom.direction: operand
        for operand in operands
        if isinstance(operand.idiom, Side)
    }
    if set(sides) != {"LT", "GT"}:
        raise Unjudged("a lookup that is not finished")
    below, above = sides["LT"], sides["GT"]
    assert isinstance(below.idiom, Side) and isinstance(above.idiom, Side)
    if below.root != above.root or below.axes != above.axes:
        raise Unjudged("a mask of different indices")
    low, high = below.idiom.limits, above.idiom.limits
    if below.idiom.high is not None and below.idiom.high == above.idiom.high:
        # Clamped indices are never outside of the bounds to which they are clamped.
        low = np.maximum(low, 0)
        high = np.minimum(high, np.array(below.idiom.high))
    idiom = Outside(low, high)
    return dataclasses.replace(below, idiom=idiom, known=None)


def any_of_columns(instruction: Instruction, operand: Held) -> Held:
    """Whether any column of the indices is outside: the reduction over the last
    dimension.
    """
    over = numbers(instruction, "dimensions")
    if not isinstance(operand.idiom, Outside) or over != (len(operand.shape) - 1,):
        raise Unjudged("a lookup that is not finished")
    return dataclasses.replace(
        operand, shape=operand.shape[:-1], axes=operand.axes[:-1]
    )


def _ended(context: Context, operands: Sequence[Held]) -> Held:
    """The end of a lookup: zeros where the index is another device's."""
    mask, zero, fetched = operands
    outside, lookup = mask.idiom, fetched.idiom
    if not isinstance(outside, Outside) or not isinstance(lookup, Fetched):
        raise Unjudged("a lookup that is not finished")
    if zero.known is None or zero.known.any():
        raise Unjudged("a lookup with other numbers than zeros elsewhere")
    if mask.root != lookup.indices:
        raise Unjudged("a mask of other indices than those of the lookup")
    for place, axis in enumerate(lookup.axes):
        other = mask.axes[place]
        if axis != other and not (axis is None or other is None):
            raise Unjudged("a mask that lies differently than its indices")
        if axis is not None and other is None and fetched.shape[place] > 1:
            raise Unjudged("a mask that lies differently than its indices")
    if outside.low.shape != lookup.low.shape:
        raise Unjudged("a mask of other columns")
    if (outside.low != lookup.low).any() or (outside.high != lookup.high).any():
        raise Unjudged("a mask of other indices than those that a device holds")
    rows: dict[bytes, int] = {}
    for device in range(context.devices):
        key = lookup.low[device].tobytes()
        rows[key] = rows.get(key, 0) | 1 << device
    masks = tuple(sorted(rows.values()))
    own = None if masks == (context.everywhere,) else masks
    terms = product_of_terms(context.everywhere, own, fetched.terms)
    return dataclasses.replace(fetched, terms=terms, kind="add", idiom=None)


class _Lookup(NamedTuple):
    """The dimensions of a gather or a scatter, by HLO's names for a gather."""

    offset: tuple[int, ...]
    collapsed: tuple[int, ...]
    start: tuple[int, ...]
    batch: tuple[int, ...]
    index_batch: tuple[int, ...]
    vector: int


def _lookup_of(instruction: Instruction) -> _Lookup:
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
    found = [numbers(instruction, name) for name in names]
    (vector,) = numbers_of_vector(instruction)
    return _Lookup(found[0], found[1], found[2], found[3], found[4], vector)


def numbers_of_vector(instruction: Instruction) -> tuple[int]:
    return (int(attribute(instruction, "index_vector_dim")),)


def _shift_of(context: Context, index: Held, columns: int) -> np.ndarray | None:
    """Each device's offset for each column; `None` for indices without offsets."""
    if isinstance(index.idiom, Shifted):
        return np.broadcast_to(index.idiom.offsets, (context.devices, columns))
    if index.idiom is not None and not isinstance(index.idiom, Clamped):
        raise Unjudged("a lookup that is not finished")
    return None


def _plain(index: Held) -> Held:
    return dataclasses.replace(index, idiom=None)


def gather(
    context: Context, instruction: Instruction, operands: Sequence[Held]
) -> Held:
    require_finished(operands[1], "an index")
    index = operands[1]
    shape = arrays_in(instruction.result)[0].shape
    reason = Unjudged("no gather of the whole program has these operands")
    fault: Wrong | None = None
    operands = [operands[0], _plain(index)]
    for number, seen in matched_operands(context, instruction, operands):
        try:
            return _gathered(
                context, instruction, seen[0], seen[1], index, number, shape
            )
        except Unjudged as error:
            reason = error
        except Wrong as error:
            fault = error if are_same(seen, operands) else fault
    if fault is not None:
        raise fault
    raise reason


def _gathered(
    context: Context,
    instruction: Instruction,
    table: Held,
    index: Held,
    raw: Held,
    number: int,
    shape: tuple[int, ...],
) -> Held:
    node = context.values.nodes[number]
    assert node.instruction is not None
    lookup = _lookup_of(instruction)
    sizes = numbers(instruction, "slice_sizes")
    whole_sizes = numbers(node.instruction, "slice_sizes")
    shift = _shift_of(context, raw, len(lookup.start))
    table_shape = node.operands[0].shape
    cuts: list[Cut | None] = [None] * len(shape)
    index_axes: list[Axis | None] = [None] * len(shape)
    rows = [at for at in range(len(index.shape)) if at != lookup.vector]
    batch = [at for at in range(len(shape)) if at not in lookup.offset]
    _require_whole_columns(context, index, lookup, node)
    for place, row in zip(batch, rows, strict=True):
        axis = index.axes[row]
        cuts[place] = None if axis is None else axis.cut
        index_axes[place] = axis
    for dim, row in zip(lookup.batch, lookup.index_batch, strict=True):
        place = batch[rows.index(row)]
        pair = [table.axes[dim], index.axes[row]]
        cuts[place] = joined_cut(
            context, "gather, along a batch dimension,", place, pair
        )
    gone = lookup.collapsed + lookup.batch
    windows = [at for at in range(len(table.shape)) if at not in gone]
    for place, dim in zip(lookup.offset, windows, strict=True):
        axis = table.axes[dim]
        if whole_sizes[dim] == table_shape[dim] and sizes[dim] == table.shape[dim]:
            cuts[place] = None if axis is None else axis.cut
        elif sizes[dim] == whole_sizes[dim]:
            cuts[place] = context.cuts.whole(sizes[dim])
        else:
            raise Unjudged("a gather of windows that are cut")
    lows, highs, is_cut = _bounds(
        context, table, table_shape, lookup, sizes, whole_sizes, shift
    )
    keyed = form_in(context, instruction, [table, index], shape)
    held = placed(context, keyed, instruction, shape, cuts, number)
    held = dataclasses.replace(
        held, terms=table.terms, kind=table.kind, scale=table.scale
    )
    if not is_cut:
        return held
    limit = raw.idiom.high if isinstance(raw.idiom, Shifted) else None
    wanted = tuple(table_shape[dim] - whole_sizes[dim] for dim in lookup.start)
    if limit is not None and tuple(limit) != wanted and set(limit) != set(wanted):
        raise Unjudged("indices that are clamped otherwise")
    if limit is None:
        raise Unjudged("a lookup by indices that are not clamped")
    assert isinstance(raw.idiom, Shifted)
    if raw.idiom.low is not None and raw.idiom.last is not None:
        if (raw.idiom.low > lows).any() or (raw.idiom.last < highs).any():
            raise Unjudged("indices that are clamped to a part of what a device holds")
    fetched = Fetched(index.root, tuple(index_axes), lows, highs)
    return dataclasses.replace(held, idiom=fetched)


def _require_whole_columns(
    context: Context, index: Held, lookup: _Lookup, node: Node
) -> None:
    """Raises `Unjudged` if the dimension with the columns of the indices is cut."""
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
    lookup: _Lookup,
    sizes: tuple[int, ...],
    whole_sizes: tuple[int, ...],
    shift: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray, bool]:
    """The first and last index that each device looks up itself, for each column, and
    whether a column's dimension is cut.
    """
    columns = len(lookup.start)
    lows = np.zeros((context.devices, columns), np.int64)
    highs = np.zeros((context.devices, columns), np.int64)
    is_cut = False
    for column, dim in enumerate(lookup.start):
        axis, size = table.axes[dim], table_shape[dim]
        offsets = np.zeros(context.devices, np.int64)
        if shift is not None:
            offsets = shift[:, column]
        is_full = sizes[dim] == table.shape[dim] and whole_sizes[dim] == size
        is_whole = table.shape[dim] == size and (
            axis is None or context.cuts.is_whole(axis.cut, size)
        )
        starts = np.zeros(context.devices, np.int64)
        if not is_whole and not is_full:
            if axis is None or len(axis.cut.lengths) != 1 or axis.cut.has_holes:
                raise Unjudged("a lookup in a dimension in pieces")
            starts = axis.cut.starts[:, 0]
            is_cut = True
            if sizes[dim] != 1 or whole_sizes[dim] != 1:
                raise Unjudged("a lookup of windows across parts")
        if (starts != offsets).any():
            if shift is None:
                raise Unjudged("a lookup, by plain indices, in a dimension that is cut")
            raise Unjudged("a lookup by indices with other offsets than the table's")
        lows[:, column] = starts
        highs[:, column] = starts + table.shape[dim] - sizes[dim]
    return lows, highs, is_cut


def scatter(
    context: Context, instruction: Instruction, operands: Sequence[Held]
) -> Held:
    if len(operands) != 3:
        raise Unjudged("a scatter of several arrays")
    require_finished(operands[1], "an index")
    index = operands[1]
    reason = Unjudged("no scatter of the whole program has these operands")
    fault: Wrong | None = None
    operands = [operands[0], _plain(index), operands[2]]
    for number, seen in matched_operands(context, instruction, operands):
        try:
            return _scattered(context, instruction, seen, index, number)
        except Unjudged as error:
            reason = error
        except Wrong as error:
            fault = error if are_same(seen, operands) else fault
    if fault is not None:
        raise fault
    raise reason


def _scattered(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
    raw: Held,
    number: int,
) -> Held:
    table, index, updates = operands
    node = context.values.nodes[number]
    lookup = _lookup_of(instruction)
    how = reducer_of(context.module, instruction)
    shape = table.shape
    table_shape, update_shape = node.operands[0].shape, node.operands[2].shape
    terms = updates.terms
    cuts = [None if axis is None else axis.cut for axis in table.axes]
    rows = [at for at in range(len(index.shape)) if at != lookup.vector]
    batch = [at for at in range(len(updates.shape)) if at not in lookup.offset]
    place_of = dict(zip(rows, batch, strict=True))
    _require_whole_columns(context, index, lookup, node)
    for dim, row in zip(lookup.batch, lookup.index_batch, strict=True):
        axes = [table.axes[dim], index.axes[row], updates.axes[place_of[row]]]
        cuts[dim] = joined_cut(context, "scatter, along a batch dimension,", dim, axes)
    gone = lookup.collapsed + lookup.batch
    windows = [at for at in range(len(shape)) if at not in gone]
    for place, dim in zip(lookup.offset, windows, strict=True):
        if update_shape[place] == table_shape[dim]:
            if updates.shape[place] != shape[dim]:
                raise Unjudged("a scatter of windows that are cut")
            axes = [table.axes[dim], updates.axes[place]]
            cuts[dim] = joined_cut(context, "scatter, along a window,", dim, axes)
        elif updates.shape[place] != update_shape[place]:
            raise Unjudged("a scatter of windows that are cut")
    for row, place in place_of.items():
        if row in lookup.index_batch:
            continue
        axes = [index.axes[row], updates.axes[place]]
        cut = joined_cut(context, "scatter, along its indices,", place, axes)
        if cut is not None:
            part = context.cuts.terms(cut, update_shape[place])
            terms = product_of_terms(context.everywhere, terms, part)
        elif updates.shape[place] != update_shape[place]:
            raise Unjudged("a scatter of broadcasts")
    _scatter_bounds(context, table, raw, lookup, windows, node, cuts)
    is_zero = table.known is not None and not table.known.any()
    if (terms is not None or table.terms is not None) and not is_zero:
        if table.terms != terms or updates.terms is not None:
            raise Unjudged("a scatter of sums into a finished array")
    if (terms is not None or updates.scale != 1) and how != "add":
        raise Unjudged("an unfinished scatter")
    keyed = form_in(context, instruction, [table, index, updates], shape)
    held = placed(context, keyed, instruction, shape, cuts, number)
    return dataclasses.replace(held, terms=terms, kind="add", scale=updates.scale)


def _scatter_bounds(
    context: Context,
    table: Held,
    raw: Held,
    lookup: _Lookup,
    windows: Sequence[int],
    node: Node,
    cuts: list[Cut | None],
) -> None:
    """Checks the offsets of the indices against the parts of the array. What falls
    outside is another device's and is dropped.
    """
    shift = _shift_of(context, raw, len(lookup.start))
    table_shape, update_shape = node.operands[0].shape, node.operands[2].shape
    for column, dim in enumerate(lookup.start):
        size = table_shape[dim]
        if dim in windows:
            place = lookup.offset[windows.index(dim)]
            if update_shape[place] == size:
                continue
        offsets = np.zeros(context.devices, np.int64)
        if shift is not None:
            offsets = shift[:, column]
        axis = table.axes[dim]
        if axis is None and table.shape[dim] != size:
            # Zeros fit any part.
            cut = context.cuts.from_starts(offsets, table.shape[dim])
            context.cuts.terms(cut, size)
            cuts[dim] = cut
        elif axis is None:
            cuts[dim] = context.cuts.whole(size)
        cut = cuts[dim]
        assert cut is not None
        if dim in windows and not context.cuts.is_whole(cut, size):
            raise Unjudged("a scatter of windows across parts")
        if len(cut.lengths) != 1 or cut.has_holes:
            raise Unjudged("a scatter into a dimension in pieces")
        starts = cut.starts[:, 0]
        if (starts != offsets).any():
            if shift is None:
                raise Unjudged(
                    "a scatter, by plain indices, into a dimension that is cut"
                )
            raise Unjudged("a scatter by indices with other offsets than the array's")
