"""Updates of one row at an index of a dimension that is cut, as of a KV cache.

The partitioner subtracts each device's offset from the index, updates that row of the
shard, and takes the updated shard on the device that has the row:

    is_inside = index >= offset and index < offset + rows
    row = select(is_inside, index - offset, 0)
    select(is_inside, dynamic-update-slice(shard, update, row), shard)

The whole program clamps an index that is out of bounds to the last row; here it is in
no shard. So the index has to be known to be within the bounds.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..hlo_text import Instruction
from .bounds import bounds_of
from .cuts import Cut
from .held import Context, Held, cut_of
from .joining import constant_number, joined_cut
from .matching import held_result, matched_operands
from .values import Node
from .verdict import Unjudged


class Side(NamedTuple):
    """Whether indices are below ("LT"), above ("GT") or not below ("GE") each device's
    limit: an array (devices, columns). `high` is the bound of each column to which they
    were clamped before; `None` if they were not.
    """

    direction: str
    limits: np.ndarray
    high: tuple[int, ...] | None


class Inside(NamedTuple):
    """Whether an index is in each device's rows, from `low` to below `high`: arrays
    (devices,).
    """

    low: np.ndarray
    high: np.ndarray


class Row(NamedTuple):
    """The row of a shard at an index in its rows; 0 on devices that have it not. `low`
    and `high` are as in `Inside`.
    """

    low: np.ndarray
    high: np.ndarray


class Updated(NamedTuple):
    """A shard with another row where an index is in its rows.

    - `written_index`: what devices hold of the index.
    - `low`, `high`: the rows of each device.
    - `shard`: the shard before.
    - `result`: what devices hold once only those that have the row are updated.
    """

    written_index: Held
    low: np.ndarray
    high: np.ndarray
    shard: Held
    result: Held


def both_sides(operands: Sequence[Held]) -> Held | None:
    """The `and` of two sides of one index, or of a mask and `true`; `None` for other
    operands.
    """
    first, other = operands
    for mask, constant in ((first, other), (other, first)):
        if isinstance(mask.idiom, Side | Inside) and constant_number(constant) == 1:
            return mask
    if not isinstance(first.idiom, Side) or not isinstance(other.idiom, Side):
        return None
    if first.shape or not first.is_finished or not is_same_index(first, other):
        return None
    if first.idiom.high is not None or other.idiom.high is not None:
        raise Unjudged("a mask of an index that is clamped otherwise")
    limits = {
        side.direction: side.limits.reshape(-1) for side in (first.idiom, other.idiom)
    }
    if set(limits) != {"GE", "LT"}:
        return None
    inside = Inside(low=limits["GE"], high=limits["LT"])
    return dataclasses.replace(first, idiom=inside)


def chosen_row(operands: Sequence[Held], offsets: np.ndarray | None) -> Held | None:
    """A `select` by the mask `Inside`: a `Row`, or the end of an update. `offsets` is
    what was subtracted from the index that is selected; `None` if nothing was.
    """
    mask, first, other = operands
    inside = mask.idiom
    if not isinstance(inside, Inside):
        return None
    if isinstance(first.idiom, Updated):
        return _end_of_update(mask, first, other)
    if offsets is None or constant_number(other) != 0:
        return None
    if not is_same_index(first, mask):
        return None
    if first.shape or not np.array_equal(offsets.reshape(-1), inside.low):
        return None
    return dataclasses.replace(first, idiom=Row(inside.low, inside.high))


def is_same_index(first: Held, other: Held) -> bool:
    """Whether two arrays come from one index, whatever was done to it: `i[0]` and
    `i[1]` have one value, and differ in the axis that their reshape drops.
    """
    return first.root == other.root and first.dropped_axes == other.dropped_axes


def _end_of_update(mask: Held, updated: Held, other: Held) -> Held | None:
    """The shard after an update on the devices that have the row; `None` unless mask
    and shard are those of the update.
    """
    inside = mask.idiom
    update = updated.idiom
    assert isinstance(inside, Inside) and isinstance(update, Updated)
    shard = update.shard
    is_same_mask = (
        is_same_index(mask, update.written_index)
        and np.array_equal(inside.low, update.low)
        and np.array_equal(inside.high, update.high)
    )
    is_same_shard = (
        other.idiom is None
        and other.root == shard.root
        and other.shape == shard.shape
        and other.axes == shard.axes
        and other.dropped_axes == shard.dropped_axes
        and other.fill == shard.fill
        and other.is_finished
    )
    return update.result if is_same_mask and is_same_shard else None


def update_row(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
) -> Held:
    """A shard with another row, before a mask says which devices have the row. One
    index is a `Row`; the result has the idiom `Updated`.
    """
    shard, update, *index_operands = operands
    row_dims = [
        dim for dim, place in enumerate(index_operands) if isinstance(place.idiom, Row)
    ]
    if len(row_dims) != 1 or any(
        operand.idiom is not None or not operand.is_finished
        for operand in (shard, update)
    ):
        raise Unjudged("an update, at an index that is computed, of several dimensions")
    (along,) = row_dims
    row = index_operands[along].idiom
    assert isinstance(row, Row)
    axis = shard.axes[along]
    if axis is None or update.shape[along] != 1 or not _has_rows(axis.cut, row):
        raise Unjudged("an update of other rows than those of a shard")
    index = dataclasses.replace(index_operands[along], idiom=None)
    indices = [*index_operands[:along], index, *index_operands[along + 1 :]]
    whole_operands = [shard, update, *indices]
    for value_number, expressed_operands in matched_operands(
        context, instruction, whole_operands
    ):
        node = context.values.nodes[value_number]
        if (
            expressed_operands[0].axes != shard.axes
            or expressed_operands[0].root != shard.root
        ):
            continue
        cuts = _cuts_of_updated(context, node, expressed_operands, along)
        if cuts is None:
            continue
        _require_in_bounds(context, index.root, node.operands[0].shape[along])
        result = held_result(
            context, instruction, expressed_operands, cuts, value_number=value_number
        )
        updated = Updated(
            written_index=index, low=row.low, high=row.high, shard=shard, result=result
        )
        return dataclasses.replace(shard, idiom=updated, known_numbers=None)
    raise Unjudged("no update of the whole program has these operands")


def _has_rows(cut: Cut, row: Row) -> bool:
    """Whether the positions of a dimension are the rows of each device."""
    if len(cut.lengths) != 1 or cut.has_holes or (cut.step != 1 and cut.size > 1):
        return False
    starts = cut.starts[:, 0]
    is_low = np.array_equal(starts, row.low)
    return is_low and np.array_equal(starts + cut.size, row.high)


def _cuts_of_updated(
    context: Context,
    node: Node,
    operands: Sequence[Held],
    along: int,
) -> list[Cut | None] | None:
    """The cuts of a shard after the update `node` of one row in dimension `along`;
    `None` if the update does not cover all other dimensions.
    """
    shard = operands[0]
    update = operands[1]
    sizes = node.operands[0].shape
    update_sizes = node.operands[1].shape
    cuts: list[Cut | None] = []
    for dim, axis in enumerate(shard.axes):
        update_axis = update.axes[dim]
        if dim == along:
            if update_sizes[dim] != 1 or not (
                update_axis is None or update_axis.cut.is_first_element
            ):
                return None
            cuts.append(cut_of(axis))
            continue
        if sizes[dim] != update_sizes[dim] or shard.shape[dim] != update.shape[dim]:
            return None
        cut = joined_cut(context, "dynamic-update-slice", dim, [axis, update_axis])
        if cut is not None and cut.has_holes:
            return None
        cuts.append(cut)
    return cuts


def _require_in_bounds(context: Context, index: int, size: int) -> None:
    """Raises `Unjudged` if the index, a value's number, may be beyond a dimension of
    `size`.
    """
    bounds = bounds_of(context.values, index)
    if bounds is None or bounds.low < 0 or bounds.high >= size:
        raise Unjudged(
            "an update at an index of a cut dimension that may be out of bounds: XLA"
            " would lose the update, so clip it before, `jnp.clip(index, 0,"
            f" {size - 1})`"
        )
