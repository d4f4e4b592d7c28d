"""Reshapes of the array of one device, which holds the same value after them: their
dimensions are split and merged.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .cuts import HOLE, Cuts
from .held import Axis, Context, Held, with_all_axes
from .values import groups_of_reshape
from .verdict import Unjudged


class Overflowing(NamedTuple):
    """An idiom: an array whose value has a dimension in several of its own, so that
    sums of their indices may be beyond the value. These positions have the number of
    holes.
    """


class _Part(NamedTuple):
    """A part of a dimension of one device's array: how many positions it has, and what
    they hold; no axis if nothing changes along it.
    """

    length: int
    axis: Axis | None


def local_reshape(context: Context, operand: Held, shape: tuple[int, ...]) -> Held:
    """A reshape to `shape` of the array of one device, which holds the same value after
    it. Axes of dimensions of size 1 that it drops become dropped axes.
    """
    whole_shape: Sequence[int | None] = ()
    if operand.root >= 0:
        whole_shape = context.values.nodes[operand.root].shape
    is_overflowing = False
    axes: list[Axis | None] = [None] * len(shape)
    dropped_axes = list(operand.dropped_axes)
    for sources, targets in groups_of_reshape(operand.shape, shape):
        if not targets:
            axis = operand.axes[sources[0]]
            if axis is not None:
                dropped_axes.append(axis)
            continue
        if not sources:
            continue
        if len(sources) == len(targets) == 1:
            axes[targets[0]] = operand.axes[sources[0]]
            continue
        parts = [_Part(operand.shape[dim], operand.axes[dim]) for dim in sources]
        sizes = [shape[dim] for dim in targets]
        split = _split(context, parts, sizes, whole_shape)
        is_overflowing |= split.is_overflowing
        for target, part in zip(targets, split.parts, strict=True):
            axes[target] = part.axis
    held = dataclasses.replace(
        operand, shape=shape, axes=tuple(axes), dropped_axes=tuple(dropped_axes)
    )
    if is_overflowing:
        if operand.idiom is not None:
            raise Unjudged("a reshape of padding in a lookup")
        held = dataclasses.replace(held, idiom=Overflowing())
    return with_absorbed_axes(context, held)


def with_absorbed_axes(context: Context, held: Held) -> Held:
    """The same with the indices in `dropped_axes` added to an axis along the same
    dimension of the value; where there is none, they become an axis of a free dimension
    of size 1, if that is in the order of the value's dimensions.
    """
    axes = list(held.axes)
    remaining_axes = []
    for axis in held.dropped_axes:
        place = next(
            (
                dim
                for dim, other in enumerate(axes)
                if other is not None and other.dim == axis.dim
            ),
            None,
        )
        if place is None:
            remaining_axes.append(axis)
            continue
        other = axes[place]
        assert other is not None
        dropped_starts = axis.cut.starts[:, :1]
        is_hole = (other.cut.starts == HOLE) | (dropped_starts == HOLE)
        starts = np.where(is_hole, HOLE, other.cut.starts + dropped_starts)
        cut = context.cuts.from_segments(other.cut.lengths, starts, other.cut.step)
        axes[place] = Axis(axis.dim, cut)
    held = dataclasses.replace(
        held, axes=tuple(axes), dropped_axes=tuple(remaining_axes)
    )
    if held.dropped_axes:
        try:
            held = with_all_axes(context, held)
        except Unjudged:
            return held
    return _within(context, held)


def _within(context: Context, held: Held) -> Held:
    """The same with holes in the place of indices beyond the value. An overflowing
    array stays as it is while two of its axes are along one dimension of the value:
    only their sum is an index.
    """
    if not isinstance(held.idiom, Overflowing):
        return held
    value_dims = [axis.dim for axis in held.axes if axis is not None]
    if len(set(value_dims)) < len(value_dims):
        return held
    whole_shape = context.values.nodes[held.root].shape
    axes: list[Axis | None] = []
    for axis in held.axes:
        size = None if axis is None else whole_shape[axis.dim]
        if axis is None or size is None:
            axes.append(axis)
        else:
            axes.append(Axis(axis.dim, context.cuts.within(axis.cut, size)))
    return dataclasses.replace(held, axes=tuple(axes), idiom=None)


class _Parts(NamedTuple):
    """The parts into which dimensions are split, and whether they may hold indices
    beyond the value.
    """

    parts: list[_Part]
    is_overflowing: bool


def _split(
    context: Context,
    parts: list[_Part],
    sizes: list[int],
    whole_shape: Sequence[int | None],
) -> _Parts:
    """The parts of neighbouring dimensions, merged and split into dimensions of these
    sizes. `whole_shape` is the shape of the value. Raises `Unjudged` if they do not
    fit. Works from the innermost dimension outwards.
    """
    cuts = context.cuts
    is_overflowing = False
    remaining = [part for part in parts if part.length != 1 or part.axis is not None]
    split_parts: list[_Part] = []
    for size in reversed(sizes):
        if not remaining:
            raise Unjudged("a reshape that merges different dimensions")
        part = remaining.pop()
        while part.length < size and remaining:
            part = _merged(cuts, remaining.pop(), part)
        if part.length % size:
            raise Unjudged("a reshape that merges different dimensions")
        if part.length == size:
            split_parts.insert(0, part)
            continue
        outer_length = part.length // size
        if part.axis is None:
            split_parts.insert(0, _Part(size, None))
            remaining.append(_Part(outer_length, None))
            continue
        dim, cut = part.axis
        whole_size = whole_shape[dim] if dim < len(whole_shape) else None
        halves = cuts.split(cut, size, whole_size)
        is_overflowing |= halves.is_overflowing
        split_parts.insert(0, _Part(size, Axis(dim, halves.inner)))
        remaining.append(_Part(outer_length, Axis(dim, halves.outer)))
    if remaining:
        raise Unjudged("a reshape that merges different dimensions")
    return _Parts(split_parts, is_overflowing)


def _merged(cuts: Cuts, major: _Part, minor: _Part) -> _Part:
    """Two neighbouring parts as one, of which `major` is the outer one. Raises
    `Unjudged` if they are of different dimensions, or do not continue each other.
    """
    length = major.length * minor.length
    if major.axis is None and minor.axis is None:
        return _Part(length, None)
    if major.axis is None or minor.axis is None or major.axis.dim != minor.axis.dim:
        raise Unjudged("a reshape that merges different dimensions")
    cut = cuts.merged(major.axis.cut, minor.axis.cut)
    return _Part(length, Axis(major.axis.dim, cut))
