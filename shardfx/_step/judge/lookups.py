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
from . import positions
from .forms import attribute, numbers, reducer_of
from .held import (
    NOWHERE,
    Axis,
    Context,
    Held,
    product_of_terms,
)
from .joining import is_zero, limits_of
from .positions import Side
from .verdict import Unjudged


class Clamped(NamedTuple):
    """Indices that are clamped to [0, high], a number for each column, and then perhaps
    to each device's `low` and `last`, arrays (devices, columns); `None` if not.
    """

    high: tuple[int, ...]
    low: np.ndarray | None = None
    last: np.ndarray | None = None


class Shifted(NamedTuple):
    """Indices minus each device's offset: an array (devices, columns). `high`, `low`
    and `last` are the bounds to which they were clamped before, as in `Clamped`; `None`
    if they were not.
    """

    offsets: np.ndarray
    high: tuple[int, ...] | None
    low: np.ndarray | None = None
    last: np.ndarray | None = None


class Outside(NamedTuple):
    """Whether indices are outside of each device's [low, high]: arrays (devices,
    columns). `clamp` has the bound of each column to which they were clamped before.
    """

    low: np.ndarray
    high: np.ndarray
    clamp: tuple[int, ...]


class AnyOutside(NamedTuple):
    """Whether any column of the indices is outside, as in `Outside`."""

    low: np.ndarray
    high: np.ndarray
    clamp: tuple[int, ...]


class Fetched(NamedTuple):
    """Elements looked up by shifted indices; they are right where the indices are
    between `low` and `high`, arrays (devices, columns).

    - `indices`: the number of the indices' value.
    - `axes`: the axes of the indices at the dimensions of the result.
    - `clamp`: the bound of each column to which the indices were clamped before.
    """

    indices: int
    axes: tuple[Axis | None, ...]
    low: np.ndarray
    high: np.ndarray
    clamp: tuple[int, ...]


IDIOMS = frozenset(
    "broadcast reshape transpose copy convert select reduce gather scatter tuple"
    " get-tuple-element clamp subtract compare or and add dynamic-update-slice".split()
)


def viewed(
    instruction: Instruction,
    operand: Held,
    result: Held,
) -> Held:
    """The result of a broadcast, a transpose or a reshape of an operand that is a step
    of a lookup. `result` is what the usual rule makes of it. Raises `Unjudged` if the
    columns of its indices are no longer the last dimension.
    """
    idiom = operand.idiom
    opcode = instruction.opcode
    if isinstance(idiom, Fetched):
        if opcode != "transpose":
            raise Unjudged(f"a {opcode} within a lookup")
        order = numbers(instruction, "dimensions")
        axes = tuple(idiom.axes[dim] for dim in order)
        return dataclasses.replace(result, idiom=idiom._replace(axes=axes))
    if isinstance(idiom, Clamped | Shifted | Side | Outside) and not _are_alike(idiom):
        _require_last_dim_kept(instruction, operand, result)
    return result


def _are_alike(idiom: "Clamped | Shifted | Side | Outside") -> bool:
    """Whether all columns of indices have the same limits, so that it does not matter
    which dimension has them.
    """
    for limits in idiom:
        if isinstance(limits, np.ndarray) and (limits != limits[:, :1]).any():
            return False
        if isinstance(limits, tuple) and len(set(limits)) > 1:
            return False
    return True


def _require_last_dim_kept(
    instruction: Instruction,
    operand: Held,
    result: Held,
) -> None:
    """Raises `Unjudged` if a view does not leave the columns of indices, its operand's
    last dimension, in the last place.
    """
    is_kept = operand.shape[-1:] == result.shape[-1:]
    if instruction.opcode != "reshape":
        dims = numbers(instruction, "dimensions")
        ranks = (len(operand.shape), len(result.shape))
        if instruction.opcode == "transpose":
            is_kept = dims[-1:] == (ranks[0] - 1,)
        else:
            is_kept = dims[-1:] == (ranks[1] - 1,)
    if not is_kept:
        raise Unjudged(f"a {instruction.opcode} of the columns of indices")


def numbers_by_column(table: np.ndarray | None, held: Held) -> np.ndarray | None:
    """The known numbers `table` as an array of shape (devices, columns), where the
    columns are the last dimension of `held`. `None` if they are no integers or
    predicates, or change along another dimension.
    """
    if table is None or table.dtype.kind not in "iub":
        return None
    if any(size != 1 for size in table.shape[1:-1]):
        return None
    if table.ndim == 1:
        return table.reshape(-1, 1)
    columns = held.shape[-1]
    return np.broadcast_to(table.reshape(len(table), -1), (len(table), columns)).astype(
        np.int64
    )


def lookup_step(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
) -> Held | None:
    """A step of a lookup in an array that is cut; `None` if it is none. Raises
    `Unjudged` if an operand is an idiom that the operation does not continue.
    """
    opcode = instruction.opcode
    index = next((operand for operand in operands if operand.root != NOWHERE), None)
    if index is None:
        return None
    if opcode == "clamp" and operands[1].idiom is None:
        return _clamped(operands)
    if opcode == "clamp" and isinstance(operands[1].idiom, Clamped):
        return _clamped_on_device(operands)
    if opcode == "subtract" and operands[1].root == NOWHERE:
        return _shifted(operands)
    if opcode == "compare" and operands[1].known_numbers is not None:
        return _side(instruction, operands)
    if opcode == "and":
        held = positions.both_sides(operands)
        if held is not None:
            return held
    if opcode == "or":
        return _outside(operands)
    if opcode == "select":
        shift = operands[1].idiom
        offsets = None
        if isinstance(shift, Shifted) and shift.high is None:
            offsets = shift.offsets
        held = positions.chosen_row(operands, offsets)
        return _end_of_lookup(context, operands) if held is None else held
    if opcode == "copy" and isinstance(operands[0].idiom, Clamped | Fetched):
        return operands[0]
    if opcode == "convert" and isinstance(operands[0].idiom, Clamped):
        _, highest = limits_of(arrays_in(instruction.result)[0].dtype)
        # The indices would wrap.
        if max(operands[0].idiom.high) > highest:
            raise Unjudged("indices in a type that has not all of them")
        return operands[0]
    if any(operand.idiom is not None for operand in operands):
        raise Unjudged("a lookup that is not finished")
    return None


def _clamped(operands: Sequence[Held]) -> Held | None:
    """Indices clamped between 0 and a number for each column, the same on each device.
    `operands` are those of a `clamp`: the low bounds, the indices and the high bounds.
    `None` if they are not of this kind.
    """
    low, index, high = operands
    limits = numbers_by_column(high.known_numbers, index)
    if (
        low.known_numbers is None
        or low.known_numbers.any()
        or limits is None
        or index.root < 0
        or not index.is_finished
    ):
        return None
    if (limits != limits[:1]).any():
        return None
    idiom = Clamped(tuple(limits[0].tolist()))
    return dataclasses.replace(index, idiom=idiom, known_numbers=None)


def _clamped_on_device(operands: Sequence[Held]) -> Held | None:
    """Clamped indices that are clamped again, to what each device holds. `operands` are
    those of a `clamp`; `None` if their bounds are not known.
    """
    low, index, last = operands
    assert isinstance(index.idiom, Clamped)
    lows = numbers_by_column(low.known_numbers, index)
    lasts = numbers_by_column(last.known_numbers, index)
    if lows is None or lasts is None or index.idiom.low is not None:
        return None
    idiom = Clamped(high=index.idiom.high, low=lows, last=lasts)
    return dataclasses.replace(index, idiom=idiom)


def _clamp_of(index: Held) -> tuple[int, ...] | None:
    """The upper bound of each column to which indices are clamped; `None` if they are
    not.
    """
    return index.idiom.high if isinstance(index.idiom, Clamped) else None


def _shifted(operands: Sequence[Held]) -> Held | None:
    """Indices minus an offset on each device; `None` if the offset is not known."""
    index, offset = operands
    offsets = numbers_by_column(offset.known_numbers, index)
    if offsets is None or index.root < 0 or not index.is_finished:
        return None
    if index.idiom is not None and not isinstance(index.idiom, Clamped):
        raise Unjudged("a lookup that is not finished")
    idiom = Shifted(offsets, None)
    clamped = index.idiom
    if isinstance(clamped, Clamped):
        idiom = Shifted(
            offsets=offsets, high=clamped.high, low=clamped.low, last=clamped.last
        )
    return dataclasses.replace(index, idiom=idiom, known_numbers=None)


def _side(instruction: Instruction, operands: Sequence[Held]) -> Held | None:
    """The comparison of indices with each device's first or last index; `None` if the
    operands are none.
    """
    index, limit = operands
    limits = numbers_by_column(limit.known_numbers, index)
    direction = attribute(instruction, "direction")
    is_index = index.root >= 0 and index.is_finished
    if limits is None or not is_index or direction not in ("LT", "GT", "GE"):
        return None
    if index.idiom is not None and not isinstance(index.idiom, Clamped):
        raise Unjudged("a lookup that is not finished")
    if isinstance(index.idiom, Clamped) and index.idiom.low is not None:
        raise Unjudged("a mask of indices that are clamped on each device")
    if index.idiom is None and limit.root != NOWHERE:
        return None
    idiom = Side(direction=direction, limits=limits, high=_clamp_of(index))
    return dataclasses.replace(index, idiom=idiom, known_numbers=None)


def _outside(operands: Sequence[Held]) -> Held:
    """The `or` of two comparisons: whether indices are below or above what each device
    holds. Raises `Unjudged` for indices that are not clamped, or not alike: one beyond
    the array is another device's by the mask, and the last one by the lookup.
    """
    sides = {
        operand.idiom.direction: operand
        for operand in operands
        if isinstance(operand.idiom, Side)
    }
    if set(sides) != {"LT", "GT"}:
        raise Unjudged("a lookup that is not finished")
    below = sides["LT"]
    above = sides["GT"]
    assert isinstance(below.idiom, Side) and isinstance(above.idiom, Side)
    if not positions.is_same_index(below, above) or below.axes != above.axes:
        raise Unjudged("a mask of different indices")
    clamp = below.idiom.high
    if clamp is None or clamp != above.idiom.high:
        raise Unjudged("a mask of indices that are clamped otherwise")
    # Clamped indices are never outside of the bounds to which they are clamped.
    low = np.maximum(below.idiom.limits, 0)
    high = np.minimum(above.idiom.limits, np.array(clamp))
    idiom = Outside(low=low, high=high, clamp=clamp)
    return dataclasses.replace(below, idiom=idiom, known_numbers=None)


def any_of_columns(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
) -> Held:
    """Whether any column of the indices is outside: the reduction by `or` over the last
    dimension, which starts with false.
    """
    operand, start = operands
    outside = operand.idiom
    over = numbers(instruction, "dimensions")
    if not isinstance(outside, Outside) or over != (len(operand.shape) - 1,):
        raise Unjudged("a lookup that is not finished")
    if reducer_of(context.module, instruction) != "or" or not is_zero(start):
        raise Unjudged("a mask of columns by another reduction than `or`")
    return dataclasses.replace(
        operand,
        shape=operand.shape[:-1],
        axes=operand.axes[:-1],
        idiom=AnyOutside(low=outside.low, high=outside.high, clamp=outside.clamp),
    )


def _end_of_lookup(context: Context, operands: Sequence[Held]) -> Held:
    """The end of a lookup, a select by a mask: zeros where the index is another
    device's. Each device has then a term of the result. Raises `Unjudged` if the mask
    is not that of the indices that were looked up.
    """
    mask, zero, fetched = operands
    outside = mask.idiom
    lookup = fetched.idiom
    is_mask = isinstance(outside, Outside | AnyOutside)
    if not is_mask or not isinstance(lookup, Fetched):
        raise Unjudged("a lookup that is not finished")
    if zero.known_numbers is None or zero.known_numbers.any():
        raise Unjudged("a lookup with other numbers than zeros elsewhere")
    if mask.root != lookup.indices:
        raise Unjudged("a mask of other indices than those of the lookup")
    for place, axis in enumerate(lookup.axes):
        mask_axis = mask.axes[place]
        if axis == mask_axis:
            continue
        if mask_axis is not None or fetched.shape[place] > 1:
            raise Unjudged("a mask that lies differently than its indices")
    if outside.clamp != lookup.clamp:
        raise Unjudged("a mask of indices that are clamped otherwise")
    if outside.low.shape != lookup.low.shape:
        raise Unjudged("a mask of other columns")
    if (outside.low != lookup.low).any() or (outside.high != lookup.high).any():
        raise Unjudged("a mask of other indices than those that a device holds")
    devices_by_low: dict[bytes, int] = {}
    for device in range(context.devices):
        key = lookup.low[device].tobytes()
        devices_by_low[key] = devices_by_low.get(key, 0) | 1 << device
    if fetched.terms is not None and fetched.reducer != "add":
        raise Unjudged(f"a lookup in an unfinished {fetched.reducer}")
    device_masks = tuple(sorted(devices_by_low.values()))
    lookup_terms = None if device_masks == (context.everywhere,) else device_masks
    terms = product_of_terms(context.everywhere, lookup_terms, fetched.terms)
    return dataclasses.replace(fetched, terms=terms, reducer="add", idiom=None)
