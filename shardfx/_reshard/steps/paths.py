"""The steps along the layouts of a route, and what devices receive in each.

A route is found by `search`. Successive steps that one operation can do are one step.
"""

import itertools as it
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal, NamedTuple

import numpy as np

from .groups import dim_of_sub_axis
from .layout import (
    FineLayout,
    Shards,
    StepLayout,
    device_coordinates,
    link_groups,
    slice_numbers,
)


StepKind = Literal["slice", "all_to_all", "permute", "all_gather"]


class PathStep(NamedTuple):
    """One step of a path between two layouts. `wire_share` is the bytes that a device
    receives from other devices, and `dcn_share` those among them from other TPU slices.
    Both are fractions of the array's bytes, as means over devices.
    """

    kind: StepKind
    source: StepLayout
    target: StepLayout
    wire_share: Fraction
    dcn_share: Fraction


# The steps from one layout to another.
Path = tuple[PathStep, ...]


def path_along(before: Sequence[StepLayout], after: Sequence[StepLayout]) -> Path:
    """Returns the steps that lead through the layouts `before`, over sub-axes of the
    source's mesh, and then through the layouts `after`, over sub-axes of the target's
    mesh.

    The step from one mesh to the other is a permutation, or a slice if each device
    already holds its next shard. Successive steps of one kind are merged if one
    operation can do both.
    """
    pairs = [*it.pairwise(before), (before[-1], after[0]), *it.pairwise(after)]
    steps: list[PathStep] = []
    for index, (source, target) in enumerate(pairs):
        # The two meshes number their sub-axes differently, so the step between them may
        # be any permutation.
        is_crossing = index == len(before) - 1
        if is_crossing and target.shard_count == source.shard_count:
            kind = "permute"
        else:
            kind = _kind(source, target)
        if steps and kind == steps[-1].kind and _are_one(steps[-1], source, target):
            source = steps.pop().source
        step = step_between(kind, source, target, like=before[0])
        # A permutation that moves nothing is no step.
        if step.wire_share or kind != "permute":
            steps.append(step)
    return tuple(steps)


def step_between(
    kind: StepKind,
    source: StepLayout,
    target: StepLayout,
    like: StepLayout,
) -> PathStep:
    """The step of the given kind from `source` to `target`, with the bytes that a device
    receives. Devices are numbered in the mesh order of `like`.
    """
    wire_share, dcn_share = _shares(kind, source, target, like)
    return PathStep(
        kind=kind,
        source=source,
        target=target,
        wire_share=wire_share,
        dcn_share=dcn_share,
    )


def _kind(source: StepLayout, target: StepLayout) -> StepKind:
    """The kind of the step between two layouts over the same sub-axes."""
    if target.shard_count > source.shard_count:
        return "slice"
    if target.shard_count < source.shard_count:
        return "all_gather"
    return "all_to_all" if _changed(source, target) else "permute"


class _Shares(NamedTuple):
    """The bytes that a device receives in a step, from all devices (`wire`) and from
    devices of other TPU slices (`dcn`). Both are fractions of the array's bytes.
    """

    wire: Fraction
    dcn: Fraction


def _shares(
    kind: StepKind,
    source: StepLayout,
    target: StepLayout,
    like: StepLayout,
) -> _Shares:
    """Returns the bytes that a device receives in a step from `source` to `target`, as
    fractions of the array's bytes. Devices are numbered in the mesh order of `like`.
    """
    if kind == "slice":
        return _Shares(wire=Fraction(0), dcn=Fraction(0))
    if kind == "permute":
        return _permutation_shares(source, target, like)

    # The sub-axes along which shards are sent, and the devices of a replica group.
    sub_axes = _changed(source, target)
    members = math.prod(source.sizes[sub_axis] for sub_axis in sub_axes)
    # The members of a replica group in one slice.
    slice_members = math.prod(
        source.sizes[sub_axis]
        for sub_axis in sub_axes
        if not source.weights or source.weights[sub_axis] <= 1
    )
    if kind == "all_gather":
        # A shard enters a slice once and is copied inside it.
        return _Shares(
            wire=Fraction(members - 1, source.shard_count),
            dcn=Fraction(members // slice_members - 1, source.shard_count),
        )
    chunks = members * source.shard_count
    return _Shares(
        wire=Fraction(members - 1, chunks),
        dcn=Fraction(members - slice_members, chunks),
    )


def _permutation_shares(
    source: StepLayout,
    target: StepLayout,
    like: StepLayout,
) -> _Shares:
    """Returns what a device receives in a permutation from `source` to `target`.
    Devices are numbered in the mesh order of `like`.
    """
    senders = permutation(source, target, like)
    devices = np.arange(len(senders))
    slices = slice_numbers(like)
    total = len(senders) * source.shard_count
    return _Shares(
        wire=Fraction(int((devices[senders] != devices).sum()), total),
        dcn=Fraction(int((slices[senders] != slices).sum()), total),
    )


def _changed(source: StepLayout, target: StepLayout) -> list[int]:
    """Returns the sub-axes that shard different dimensions in the layouts `source` and
    `target`, or that shard a dimension in only one of them.
    """
    before = dim_of_sub_axis(source)
    after = dim_of_sub_axis(target)
    sub_axes = range(len(source.sizes))
    return [
        sub_axis for sub_axis in sub_axes if before.get(sub_axis) != after.get(sub_axis)
    ]


def _are_one(earlier: PathStep, source: StepLayout, target: StepLayout) -> bool:
    """Whether the step `earlier` and a second step of the same kind, from `source` to
    `target`, can be done by one operation.

    Two all-to-alls never can. Two slices always can, and so can two permutations. Two
    all-gathers can if `earlier` ends in the layout `source`, as on one mesh, and if
    they concatenate along the same dimension or send over axes of one weight. On a
    torus, one all-gather over two axes uses the links of both at the same time.
    """
    if earlier.kind != "all_gather":
        return earlier.kind != "all_to_all"
    if earlier.target != source:
        return False
    if len({*_changed_dims(earlier.source, target)}) == 1:
        return True
    weights = source.weights
    sub_axes = _changed(earlier.source, target)
    return not weights or len({weights[sub_axis] for sub_axis in sub_axes}) == 1


def _changed_dims(source: StepLayout, target: StepLayout) -> list[int]:
    """The dimensions that are sharded differently in the two layouts."""
    pairs = zip(source.dims, target.dims, strict=True)
    return [dim for dim, (axes, new_axes) in enumerate(pairs) if axes != new_axes]


def permutation(source: StepLayout, target: StepLayout, like: StepLayout) -> np.ndarray:
    """Returns for each device the device that sends it its new shard in a permute from
    `source` to `target`.

    A device that already holds its new shard is its own sender. Any other device
    receives its shard from a device that holds it and does not yet send. Of these, one
    over the cheapest links is taken. Devices are numbered in the mesh order of `like`.
    """
    before = FineLayout(source, device_coordinates(source, like))
    after = FineLayout(target, device_coordinates(target, like))
    holds = Shards(before).numbers(source.dims)
    needs = Shards(after).numbers(target.dims)
    devices = np.arange(len(holds))
    sender = np.where(holds == needs, devices, -1)
    shard_count = int(max(holds.max(), needs.max())) + 1
    # The number of each device's group. A group's devices reach each other at a low cost
    # at first, and at any cost in the end.
    for _, group in link_groups(before):
        # Only devices of one group match: the number of the group is part of the key.
        held_keys = group * shard_count + holds
        needed_keys = group * shard_count + needs
        free = np.setdiff1d(devices, sender)
        without = np.flatnonzero(sender < 0)
        _match(
            sender=sender,
            without=without,
            needed=needed_keys[without],
            free=free,
            held=held_keys[free],
        )
    return sender


def _match(
    sender: np.ndarray,
    without: np.ndarray,
    needed: np.ndarray,
    free: np.ndarray,
    held: np.ndarray,
) -> None:
    """Chooses senders for the devices `without`, which have none and need the shards
    with the numbers `needed`. Writes them into `sender`, which has an entry for each
    device. The devices `free`, which do not send yet, hold the shards `held`.

    Of the devices that need one shard, the k-th receives it from the k-th of the `free`
    devices that hold it. If fewer devices hold it than need it, the last ones get no
    sender.
    """
    receivers = _ranked(without, needed)
    senders = _ranked(free, held)
    # A shard and a rank as one integer: ranks are less than `base`.
    base = len(sender) + 1
    _, receiver_positions, sender_positions = np.intersect1d(
        receivers.shards * base + receivers.ranks,
        senders.shards * base + senders.ranks,
        assume_unique=True,
        return_indices=True,
    )
    sender[receivers.devices[receiver_positions]] = senders.devices[sender_positions]


class _Ranked(NamedTuple):
    """Devices sorted by the number of their shard, their shards, and the position of
    each device among the devices of the same shard.
    """

    devices: np.ndarray
    shards: np.ndarray
    ranks: np.ndarray


def _ranked(devices: np.ndarray, shards: np.ndarray) -> _Ranked:
    """Sorts devices by the number of their shard. For shards 5, 3, 5 of devices 0, 1, 2
    the result has the devices [1, 0, 2], the shards [3, 5, 5] and the ranks [0, 0, 1].
    """
    order = np.argsort(shards, kind="stable")
    ascending = shards[order]
    first_of_shard = np.searchsorted(ascending, ascending, side="left")
    return _Ranked(
        devices=devices[order],
        shards=ascending,
        ranks=np.arange(len(shards)) - first_of_shard,
    )
