"""The device groups of each step of a Redistribution, and the way in which shards are divided and joined.

Everything is computed from layouts alone, with devices numbered by their position in the source's mesh. The same
functions divide and join NumPy arrays and traced ones.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from .layout import StepLayout, piece_index
from .lower_bound import Holdings
from .splits import End, coordinates, levels


@dataclasses.dataclass(frozen=True, eq=False)
class AllToAll:
    """An all-to-all within groups of devices. `groups[i]` lists the members of a group in the order of the parts that
    they receive.

    **Arguments:**

    - `groups`: an integer array of shape `(groups, members)`.
    - `sizes`: the sizes of the factors that move, major first; their product is the number of members.
    - `splits`: for each dimension of the shard, the moving factors that will shard it, major-most first.
    - `joins`: for each dimension of the shard, the moving factors that sharded it before, major-most first.
    """

    groups: np.ndarray
    sizes: tuple[int, ...]
    splits: tuple[tuple[int, ...], ...]
    joins: tuple[tuple[int, ...], ...]


def groups_of(layout: StepLayout, factors: tuple[int, ...], like: StepLayout) -> np.ndarray:
    """The groups of devices that differ in `factors` only: one group a row, its members in the factors' order."""
    where = coordinates(layout, like)
    others = tuple(axis for axis in range(len(layout.sizes)) if axis not in factors)
    member = piece_index(layout.sizes, where, factors)
    group = piece_index(layout.sizes, where, others)
    members = math.prod(layout.sizes[factor] for factor in factors)
    return np.lexsort((member, group)).reshape(-1, members)


def all_to_all(source: StepLayout, target: StepLayout, like: StepLayout) -> AllToAll:
    """The all-to-all that leads from `source` to `target`, two layouts on one mesh with equally many shards."""
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
    """A shard divided into one part for each member of its group, the parts along a new first dimension."""
    shape, front = [], []
    for size, factors in zip(piece.shape, how.splits, strict=True):
        count = math.prod(how.sizes[factor] for factor in factors)
        front += [len(shape)] if factors else []
        shape += [count, size // count] if factors else [size]
    rest = [axis for axis in range(len(shape)) if axis not in front]
    # Whole dimensions are split first, then the factors are brought into order: reshaping a shard to all factors at
    # once takes one more copy on TPUs, whose tiles do not fit such small dimensions.
    parts = piece.reshape(shape).transpose((*front, *rest))
    parts = parts.reshape((math.prod(how.sizes), *parts.shape[len(front) :]))
    order = [factor for factors in how.splits for factor in factors]
    apart = parts.reshape((*[how.sizes[factor] for factor in order], *parts.shape[1:]))
    axes = (*np.argsort(order).tolist(), *range(len(order), len(apart.shape)))
    return apart.transpose(axes).reshape(parts.shape)


def join(parts: Any, how: AllToAll) -> Any:
    """The shard made of the parts that came from each member of the group: the inverse of `split`."""
    sizes = parts.shape[1:]
    parts = parts.reshape((*how.sizes, *sizes))
    order, shape = [], []
    for dim, factors in enumerate(how.joins):
        order += [*factors, len(how.sizes) + dim]
        shape.append(sizes[dim] * math.prod(how.sizes[factor] for factor in factors))
    return parts.transpose(order).reshape(shape)


def starts(source: StepLayout, target: StepLayout, like: StepLayout) -> np.ndarray:
    """For each device and dimension, the number of the part of its shard that a slice keeps: an array of shape
    `(devices, rank)`.
    """
    where = coordinates(target, like)
    parts = [
        piece_index(target.sizes, where, axes) % (count // had)
        for axes, count, had in zip(target.dims, target.counts, source.counts, strict=True)
    ]
    return np.stack(parts, axis=1)


def gathered(source: StepLayout, target: StepLayout, like: StepLayout) -> list[tuple[int, np.ndarray]]:
    """The dimensions that an all-gather joins, each with its groups."""
    return [
        (dim, groups_of(source, have[len(axes) :], like))
        for dim, (have, axes) in enumerate(zip(source.dims, target.dims, strict=True))
        if have != axes
    ]


def permutation(source: StepLayout, target: StepLayout, like: StepLayout) -> np.ndarray:
    """For each device, the device whose shard it receives."""
    ends = (End(end, coordinates(end, like)) for end in (source, target))
    return senders(*ends)


def senders(source: End, target: End) -> np.ndarray:
    """For each device, the device that sends it its shard: itself if it has the shard, else the nearest one.

    **Arguments:**

    - `source`, `target`: the layouts before and after, with equal counts along every dimension.

    **Returns:**

    A permutation of the devices, numbered by their position in the source's mesh.
    """
    have, want = (Holdings(end).numbers(end.layout.dims) for end in (source, target))
    sender = np.where(have == want, np.arange(len(have)), -1)
    span = int(max(have.max(), want.max())) + 1
    for _, group in levels(source):
        free = np.setdiff1d(np.arange(len(have)), sender)
        without = np.flatnonzero(sender < 0)
        _match(sender, without, (group * span + want)[without], free, (group * span + have)[free])
    return sender


def _match(sender: np.ndarray, without: np.ndarray, wanted: np.ndarray, free: np.ndarray, held: np.ndarray) -> None:
    """Pairs the k-th device without a sender that needs a shard with the k-th free device that holds the shard."""
    without, wanted = _ranked(without, wanted)
    free, held = _ranked(free, held)
    pair = len(sender) + 1
    _, here, there = np.intersect1d(
        wanted * pair + _rank_among_equals(wanted),
        held * pair + _rank_among_equals(held),
        assume_unique=True,
        return_indices=True,
    )
    sender[without[here]] = free[there]


def _ranked(who: np.ndarray, what: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(what, kind="stable")
    return who[order], what[order]


def _rank_among_equals(ascending: np.ndarray) -> np.ndarray:
    return np.arange(len(ascending)) - np.searchsorted(ascending, ascending, side="left")
