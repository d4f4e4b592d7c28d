"""The replica groups of each step of a `Redistribution`, and how a device splits and joins its shard in the step.

All functions compute from layouts alone and number devices by their position in the source's mesh. `split` and `join`
work on numpy arrays and on traced arrays.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from .layout import StepLayout, coordinates, piece_index


@dataclasses.dataclass(frozen=True, eq=False)
class AllToAll:
    """An all-to-all within replica groups. `groups[i]` lists the devices of one group, in the order of their shards.

    **Arguments:**

    - `groups`: an integer array of shape `(groups, members)`.
    - `sizes`: the sizes of the factors that move, major first; their product is the number of members.
    - `splits`: for each dimension, the moving factors that shard it after the all-to-all, major first.
    - `joins`: for each dimension, the moving factors that shard it before the all-to-all, major first.
    """

    groups: np.ndarray
    sizes: tuple[int, ...]
    splits: tuple[tuple[int, ...], ...]
    joins: tuple[tuple[int, ...], ...]


def groups_of(layout: StepLayout, factors: tuple[int, ...], like: StepLayout) -> np.ndarray:
    """The replica groups along `factors`: each row lists devices that differ only in these factors, in their order."""
    where = coordinates(layout, like)
    others = tuple(axis for axis in range(len(layout.sizes)) if axis not in factors)
    member = piece_index(layout.sizes, where, factors)
    group = piece_index(layout.sizes, where, others)
    members = math.prod(layout.sizes[factor] for factor in factors)
    return np.lexsort((member, group)).reshape(-1, members)


def all_to_all(source: StepLayout, target: StepLayout, like: StepLayout) -> AllToAll:
    """The all-to-all from layout `source` to `target`, which are over one mesh and have equally many shards."""
    before = {factor: dim for dim, axes in enumerate(source.dims) for factor in axes}
    after = {factor: dim for dim, axes in enumerate(target.dims) for factor in axes}
    moving = tuple(factor for axes in source.dims for factor in axes if before[factor] != after[factor])
    rank = {factor: index for index, factor in enumerate(moving)}
    return AllToAll(
        groups=groups_of(source, moving, like),
        sizes=tuple(source.sizes[factor] for factor in moving),
        splits=tuple(tuple(rank[f] for f in axes if before[f] != dim) for dim, axes in enumerate(target.dims)),
        joins=tuple(tuple(rank[f] for f in axes if after[f] != dim) for dim, axes in enumerate(source.dims)),
    )


def split(piece: Any, how: AllToAll) -> Any:
    """Splits a shard into one chunk per member of the replica group, stacked along a new first dimension."""
    shape, front = [], []
    for size, factors in zip(piece.shape, how.splits, strict=True):
        count = math.prod(how.sizes[factor] for factor in factors)
        front += [len(shape)] if factors else []
        shape += [count, size // count] if factors else [size]
    rest = [axis for axis in range(len(shape)) if axis not in front]
    # The split dimensions move to the front before they are reshaped into factors. Reshaping in place would cost one
    # more copy on TPUs, because the small dimensions do not fill tiles.
    parts = piece.reshape(shape).transpose((*front, *rest))
    parts = parts.reshape((math.prod(how.sizes), *parts.shape[len(front) :]))
    order = [factor for factors in how.splits for factor in factors]
    apart = parts.reshape((*[how.sizes[factor] for factor in order], *parts.shape[1:]))
    axes = (*np.argsort(order).tolist(), *range(len(order), len(apart.shape)))
    return apart.transpose(axes).reshape(parts.shape)


def join(parts: Any, how: AllToAll) -> Any:
    """Joins the chunks received from the members of the replica group into one shard; the inverse of `split`."""
    sizes = parts.shape[1:]
    parts = parts.reshape((*how.sizes, *sizes))
    order, shape = [], []
    for dim, factors in enumerate(how.joins):
        order += [*factors, len(how.sizes) + dim]
        shape.append(sizes[dim] * math.prod(how.sizes[factor] for factor in factors))
    return parts.transpose(order).reshape(shape)


def starts(source: StepLayout, target: StepLayout, like: StepLayout) -> np.ndarray:
    """The index of the chunk of its shard that each device keeps in a slice step, in an array `(devices, rank)`."""
    where = coordinates(target, like)
    parts = [
        piece_index(target.sizes, where, axes) % (count // had)
        for axes, count, had in zip(target.dims, target.counts, source.counts, strict=True)
    ]
    return np.stack(parts, axis=1)


def gathered(source: StepLayout, target: StepLayout, like: StepLayout) -> list[tuple[int, np.ndarray]]:
    """The dimensions along which an all-gather concatenates shards, each with its replica groups."""
    return [
        (dim, groups_of(source, have[len(axes) :], like))
        for dim, (have, axes) in enumerate(zip(source.dims, target.dims, strict=True))
        if have != axes
    ]
