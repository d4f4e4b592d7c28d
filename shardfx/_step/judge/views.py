"""Views: broadcasts, transposes and reshapes.

A reshape of the whole program has a shape that the program of one device does not show:
`[16, 1, 64]` may be a shard of `[16, 4, 64]` or whole. So the whole program's own
reshapes of the same value are tried. A reshape that is none of them, as the partitioner
writes around an all-to-all, only splits and merges the dimensions of one device.
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..hlo_text import Instruction, arrays_in
from .cuts import Cut
from .elements import expressed
from .forms import Form, numbers
from .held import NOWHERE, Axis, Context, Held, permuted, view_of, with_all_axes
from .local_reshapes import local_reshape
from .matching import candidates
from .values import ViewReshape, groups_of_reshape
from .verdict import Unjudged


# The dimensions in a layout, from minor to major: `{1,0:T(8,128)}`.
_LAYOUT = re.compile(r"\{(\d+(?:,\d+)*)[}:]")


def broadcast(context: Context, instruction: Instruction, operand: Held) -> Held:
    """The result of a broadcast: nothing changes along its new dimensions."""
    shape = arrays_in(instruction.result)[0].shape
    targets = numbers(instruction, "dimensions")
    axes: list[Axis | None] = [None] * len(shape)
    table_shape = [1] * len(shape)
    for source, target in enumerate(targets):
        axes[target] = operand.axes[source]
        if operand.known_numbers is not None:
            table_shape[target] = operand.known_numbers.shape[1 + source]
    table = operand.known_numbers
    if table is not None:
        table = table.reshape(context.devices, *table_shape)
    return dataclasses.replace(
        operand, shape=shape, axes=tuple(axes), known_numbers=table
    )


def transpose(instruction: Instruction, operand: Held) -> Held:
    """The result of a transpose."""
    return permuted(operand, numbers(instruction, "dimensions"))


def reshape(context: Context, instruction: Instruction, operand: Held) -> Held:
    """The result of a reshape: of the whole program's, or the same value with the
    dimensions of one device split and merged.
    """
    shape = arrays_in(instruction.result)[0].shape
    table = _reshaped_known(operand, shape)
    if operand.root == NOWHERE and operand.idiom is None:
        if table is None:
            raise Unjudged("a reshape of numbers of one device's program")
        return Held(
            root=NOWHERE, shape=shape, axes=(None,) * len(shape), known_numbers=table
        )
    if operand.idiom is None:
        held = _global_reshape(context, instruction, operand, shape)
        if held is not None:
            return dataclasses.replace(held, known_numbers=table)
    held = local_reshape(context, operand, shape)
    return dataclasses.replace(held, known_numbers=table)


def bitcast(
    context: Context,
    instruction: Instruction,
    operand: Held,
    source: Instruction,
) -> Held:
    """A bitcast, which leaves the bytes of its operand as they are; `source` is the
    instruction of the operand. In the order of memory it is a reshape. Layouts say
    which transposes lead to that order and back.
    """
    array = arrays_in(instruction.result)[0]
    shape = array.shape
    _require_type_of(source, instruction)
    if _is_in_order(source) and _is_in_order(instruction):
        return reshape(context, instruction, operand)
    source_order = _memory_order(source)
    result_order = _memory_order(instruction)
    linear_shape = tuple(shape[dim] for dim in result_order)
    sizes = ",".join(map(str, linear_shape))
    linear_reshape = instruction._replace(
        result=f"{array.dtype}[{sizes}]", opcode="reshape"
    )
    held = reshape(context, linear_reshape, permuted(operand, source_order))
    return permuted(held, [result_order.index(dim) for dim in range(len(shape))])


def reshape_of_bitcast(instruction: Instruction, source: Instruction) -> Instruction:
    """The reshape that a bitcast is; `source` is the instruction of its operand. Raises
    `Unjudged` if it is none, since it transposes its operand too.
    """
    _require_type_of(source, instruction)
    if not _is_in_order(source) or not _is_in_order(instruction):
        raise Unjudged("a bitcast that transposes a step of a lookup")
    return instruction._replace(opcode="reshape")


def _require_type_of(source: Instruction, instruction: Instruction) -> None:
    """Raises `Unjudged` if a bitcast makes numbers of another type of those of its
    operand, whose instruction is `source`.
    """
    dtype = arrays_in(source.result)[0].dtype
    if dtype != arrays_in(instruction.result)[0].dtype:
        raise Unjudged("a bitcast to another type")


def _is_in_order(instruction: Instruction) -> bool:
    """Whether the last dimension of an array is the minor one, and the first the major
    one.
    """
    order = _memory_order(instruction)
    return tuple(sorted(order)) == order


def _memory_order(instruction: Instruction) -> tuple[int, ...]:
    """The dimensions of an array from major to minor, as its layout says. Arrays
    without a layout have their last dimension as the minor one.
    """
    rank = len(arrays_in(instruction.result)[0].shape)
    layout = _LAYOUT.search(instruction.result)
    if layout is None:
        return tuple(range(rank))
    order = tuple(int(dim) for dim in reversed(layout[1].split(",")))
    if len(order) != rank:
        raise Unjudged("a bitcast with a layout of another rank")
    return order


def _reshaped_known(operand: Held, shape: tuple[int, ...]) -> np.ndarray | None:
    """The known numbers of an operand after a reshape to `shape`; `None` if they are
    not known, or broadcast along some dimensions.
    """
    table = operand.known_numbers
    if table is None:
        return None
    devices = len(table)
    if table.size == devices:
        return table.reshape(devices, *(1,) * len(shape))
    if table.shape[1:] == operand.shape:
        return table.reshape(devices, *shape)
    return None


def _global_reshape(
    context: Context,
    instruction: Instruction,
    operand: Held,
    shape: tuple[int, ...],
) -> Held | None:
    """What devices hold of a reshape of the whole program, whose shape is `shape` on
    one device; `None` if no reshape of the operand's value fits.
    """
    try:
        operand = with_all_axes(context, operand)
    except Unjudged:
        return None
    dims = tuple(dim for dim in view_of(operand).dims if dim is not None)
    for view_reshape in context.values.reshapes_of(
        view_of(operand), instruction.op_name
    ):
        held = _viewed(operand, shape, view_reshape)
        if held is not None:
            return held
    form = Form(key=("reshape", operand.root, dims), dims=(), kept=())
    for value_number in candidates(context, form, instruction):
        held = _fitted(context, operand, shape, value_number)
        if held is not None:
            return held
    return _reshaped_piece(context, instruction, operand, shape)


def _reshaped_piece(
    context: Context,
    instruction: Instruction,
    operand: Held,
    shape: tuple[int, ...],
) -> Held | None:
    """What devices hold of a reshape of a slice in the whole program, from what they
    hold of the sliced value; `None` if there is none of the instruction's name.
    """
    for value_number in context.values.with_name("reshape", instruction.op_name):
        node = context.values.nodes[value_number]
        if node.operands[0].view.root == operand.root:
            continue
        piece = expressed(context, operand, node.operands[0])
        if piece is None or piece.has_holes:
            continue
        held = _fitted(context, piece, shape, value_number)
        if held is not None:
            return held
    return None


def _viewed(
    operand: Held,
    shape: tuple[int, ...],
    view_reshape: ViewReshape,
) -> Held | None:
    """What devices hold after `view_reshape`, a reshape of the whole program that only
    adds or drops dimensions along which nothing changes. Its shape is `shape` on one
    device. `None` if it does not fit the operand.
    """
    source, target = view_reshape
    if len(source.dims) != len(operand.axes) or len(target.dims) != len(shape):
        return None
    if view_of(operand).dims != source.dims:
        return None
    place_by_dim = {dim: place for place, dim in enumerate(source.dims)}
    strides_before = _strides(operand.shape)
    strides_after = _strides(shape)
    axes: list[Axis | None] = []
    for place_after, dim in enumerate(target.dims):
        if dim is None:
            axes.append(None)
            continue
        place = place_by_dim[dim]
        if operand.shape[place] != shape[place_after]:
            return None
        # Repeated elements may stand between those of the dimension before or after.
        is_moved = strides_before[place] != strides_after[place_after]
        if is_moved and operand.shape[place] != 1:
            return None
        axes.append(operand.axes[place])
    return dataclasses.replace(operand, shape=shape, axes=tuple(axes))


def _fitted(
    context: Context,
    operand: Held,
    shape: tuple[int, ...],
    value_number: int,
) -> Held | None:
    """What devices hold of the value `value_number`, a reshape of the whole program,
    after a reshape of its operand on one device to `shape`; `None` if it is not that
    reshape.
    """
    node = context.values.nodes[value_number]
    whole_operand = node.operands[0]
    whole_shape = tuple(size for size in node.shape if size is not None)
    if len(whole_operand.shape) != len(operand.shape) or len(whole_shape) != len(shape):
        return None
    for dim, axis, size in zip(
        whole_operand.view.dims, operand.axes, whole_operand.shape, strict=True
    ):
        if axis is None:
            continue
        # The whole program repeats the elements along another dimension.
        is_repeated = dim is None and size != 1
        if is_repeated or dim not in (None, axis.dim):
            return None
    axes: list[Axis | None] = [None] * len(shape)
    # Dimensions `sources` of the operand become dimensions `targets` of the result.
    for sources, targets in groups_of_reshape(whole_operand.shape, whole_shape):
        local_size = math.prod(operand.shape[dim] for dim in sources)
        if local_size != math.prod(shape[dim] for dim in targets):
            return None
        if not sources or not targets:
            continue
        cuts = [
            _cut_of(
                context, operand.axes[dim], whole_operand.shape[dim], operand.shape[dim]
            )
            for dim in sources
        ]
        if any(cut is None for cut in cuts):
            if len(sources) == len(targets) == 1:
                continue
            return None
        if len(sources) == len(targets) == 1:
            regrouped = [cut for cut in cuts if cut is not None]
        else:
            regrouped = _regrouped(
                context=context,
                cuts=[cut for cut in cuts if cut is not None],
                sizes_before=[whole_operand.shape[dim] for dim in sources],
                sizes_after=[whole_shape[dim] for dim in targets],
                local_sizes_after=[shape[dim] for dim in targets],
            )
            if regrouped is None:
                return None
        for target, cut in zip(targets, regrouped, strict=True):
            axes[target] = Axis(target, cut)
    return dataclasses.replace(
        operand,
        root=value_number,
        shape=shape,
        axes=tuple(axes),
        dropped_axes=(),
        fill=operand.fill_number,
    )


def _cut_of(
    context: Context,
    axis: Axis | None,
    size: int,
    local_size: int,
) -> Cut | None:
    """The cut of a dimension of `size`, of which a device has `local_size`; `None` if
    it has less, and nothing changes along it.
    """
    if axis is not None:
        return axis.cut
    # Of a dimension along which nothing changes, a smaller piece may be any.
    return context.cuts.whole(size) if local_size == size else None


def _regrouped(
    context: Context,
    cuts: Sequence[Cut],
    sizes_before: Sequence[int],
    sizes_after: Sequence[int],
    local_sizes_after: Sequence[int],
) -> list[Cut] | None:
    """The cuts of the dimensions into which a reshape makes a group of others, which
    have these cuts. `sizes_before` and `sizes_after` are the sizes of both in the whole
    value, and `local_sizes_after` those of the result on one device. `None` if the
    result is not cut into segments.

    Each element has a linear index in the group. Its digits in the sizes of the result
    are the indices in the dimensions of the result.
    """
    linear = _linear_indices(context, cuts, sizes_before)
    if linear is None:
        return None
    pieces = _divided(linear.pieces, local_sizes_after)
    if pieces is None:
        return None
    new_cuts: list[Cut] = []
    remainders = linear.firsts
    strides = _strides(sizes_after)
    for piece, size, stride in zip(pieces, sizes_after, strides, strict=True):
        starts = remainders // stride
        remainders = remainders % stride
        cut = _cut_of_digit(context, piece, starts, size, stride)
        if cut is None:
            return None
        new_cuts.append(cut)
    return new_cuts


class _Piece(NamedTuple):
    """Positions of one dimension, and the distance between neighbours."""

    length: int
    step: int


class _LinearIndices(NamedTuple):
    """The linear indices of the elements that devices hold of a group of dimensions:
    that of each device's first element, and how far neighbours are apart in each
    dimension.
    """

    firsts: np.ndarray
    pieces: list[_Piece]


def _linear_indices(
    context: Context,
    cuts: Sequence[Cut],
    sizes: Sequence[int],
) -> _LinearIndices | None:
    """The linear indices of the elements of a group of dimensions that have these cuts
    and, in the whole value, these sizes. `None` if a cut has several segments or holes.
    """
    firsts = np.zeros(context.devices, np.int64)
    pieces: list[_Piece] = []
    for cut, stride in zip(cuts, _strides(sizes), strict=True):
        if len(cut.lengths) != 1 or cut.has_holes:
            return None
        firsts += cut.starts[:, 0] * stride
        pieces.append(_Piece(cut.size, cut.step * stride))
    return _LinearIndices(firsts, pieces)


def _cut_of_digit(
    context: Context,
    piece: _Piece,
    starts: np.ndarray,
    size: int,
    stride: int,
) -> Cut | None:
    """The cut of a dimension of `size`, whose neighbours are `stride` apart in the
    linear index, where devices hold `piece` from the indices `starts` on. `None` if
    positions between two neighbours are held, or positions beyond the dimension.
    """
    step = stride if piece.length == 1 else piece.step
    if step % stride:
        return None
    step //= stride
    lasts = starts + (piece.length - 1) * step
    if (starts < 0).any() or (lasts >= size).any() or (lasts < 0).any():
        return None
    return context.cuts.from_starts(starts, piece.length, step)


def _strides(sizes: Sequence[int]) -> list[int]:
    """How far neighbours are apart in the linear index, for dimensions of these
    sizes.
    """
    strides = [1]
    for size in reversed(sizes[1:]):
        strides.insert(0, strides[0] * size)
    return strides


def _divided(pieces: Sequence[_Piece], sizes: Sequence[int]) -> list[_Piece] | None:
    """The pieces of neighbouring dimensions, merged and split into dimensions of these
    sizes; `None` if they do not fit. Works from the innermost dimension outwards.
    """
    remaining = [piece for piece in pieces if piece.length != 1]
    divided: list[_Piece] = []
    for size in reversed(sizes):
        if size == 1:
            divided.insert(0, _Piece(1, 1))
            continue
        if not remaining:
            return None
        piece = remaining.pop()
        while piece.length < size and remaining:
            outer = remaining[-1]
            if outer.step != piece.step * piece.length:
                return None
            remaining.pop()
            piece = _Piece(outer.length * piece.length, piece.step)
        if piece.length % size:
            return None
        divided.insert(0, _Piece(size, piece.step))
        if piece.length > size:
            remaining.append(_Piece(piece.length // size, piece.step * size))
    return divided if not remaining else None
