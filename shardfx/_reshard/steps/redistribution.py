"""Plans the steps that move an array between two shardings over the same devices, from
integers alone.

The kinds of steps are from Rink et al. 2021 (arXiv 2112.01075). `search` finds the
layouts between the steps.
"""

import dataclasses
import functools as ft
import itertools as it
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal, NamedTuple

import numpy as np

from .layout import (
    Counts,
    FineLayout,
    Shards,
    StepLayout,
    coordinates,
    link_groups,
    missing_share,
    slice_numbers,
)
from .search import Problem, cheapest_route
from .splits import refine


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


@dataclasses.dataclass(frozen=True)
class MoveStep:
    """One collective (or local slice) of a move, along sub-axes of the mesh.

    **Arguments:**

    - `kind`: "slice" (local), "all_to_all", "permute" or "all_gather".
    - `source`, `target`: the layouts before and after the step, over sub-axes (parts of
      mesh axes) of the meshes before
        and after the move. Only a permute or a slice may lead from sub-axes of one mesh
        to sub-axes of the other mesh.
    - `wire_bytes`: the bytes that a device receives, as the mean over devices, rounded
      up.
    - `dcn_bytes`: the bytes among `wire_bytes` that come from another TPU slice (or
      node). If slices do not line up
        with mesh axes, it is an upper bound.
    - `peak_bytes`: the bytes of the shards that a device reads and writes in the step.
    """

    __module__ = "shardfx.results"

    kind: StepKind
    source: StepLayout
    target: StepLayout
    wire_bytes: int
    dcn_bytes: int
    peak_bytes: int


@dataclasses.dataclass(frozen=True)
class Redistribution:
    """The steps that move one array from one layout to another, with their traffic and
    memory.

    **Arguments:**

    - `steps`: the steps in order; none if every device already holds its target shard.
    - `wire_bytes`: the bytes that a device receives in all steps, as the mean over
      devices.
    - `dcn_bytes`: the bytes among `wire_bytes` that come from another TPU slice (or
      node). If slices do not line up
        with mesh axes, it is an upper bound.
    - `peak_bytes`: the most bytes of shards that a device holds at one time.
    - `lower_bound_bytes`: the bytes that a device must receive under any algorithm, as
      the mean over devices.
    """

    steps: tuple[MoveStep, ...]
    wire_bytes: int
    dcn_bytes: int
    peak_bytes: int
    lower_bound_bytes: int


@ft.lru_cache(maxsize=4096)
def redistribute(
    shape: tuple[int, ...], itemsize_bits: int, src: StepLayout, dst: StepLayout
) -> Redistribution:
    """Plans the steps that move one array, with elements of `itemsize_bits`, between
    two layouts over the same devices. In a step a device holds the shard that it reads
    and the one that it writes, at most twice the larger shard of `src` and `dst`. The
    shard counts of both must divide `shape`. The result is cached. Raises `MeshError`
    if the layouts are not over the same devices.
    """
    # The search depends only on which shard counts divide the shape, so leaves of
    # different shapes share cached paths.
    max_counts = tuple(math.gcd(size, src.size) for size in shape)
    path, bound = _planned(max_counts, src, dst)
    return _measured(
        math.prod(shape) * itemsize_bits,
        path,
        bound,
        Fraction(1, min(src.shard_count, dst.shard_count)),
    )


@ft.lru_cache(maxsize=4096)
def _planned(
    max_counts: Counts, src: StepLayout, dst: StepLayout
) -> tuple[Path, Fraction]:
    """Returns a cheap path from layout `src` to layout `dst`, and a lower bound on the
    fraction of the array that a device receives. `max_counts` has a number for each
    dimension, which the number of shards along it must divide.
    """
    source, target = refine(src, dst)
    bound = missing_share(source, target)
    if not bound:  # every device already holds its target shard
        return path_along([source.layout], [target.layout]), bound
    route = cheapest_route(Problem(max_counts, source, target))
    route = route or cheapest_route(Problem(max_counts, *refine(src, dst, prime=True)))
    if route is None:
        raise AssertionError(
            "slices, all-to-alls and all-gathers of prime sub-axes lead everywhere;"
            " please report this move"
        )
    return path_along(*route), bound


def _measured(
    total: int, path: Path, bound: Fraction, larger: Fraction
) -> Redistribution:
    steps = tuple(
        MoveStep(
            *(step.kind, step.source, step.target),
            wire_bytes=_bytes(total * step.wire_share),
            dcn_bytes=_bytes(total * step.dcn_share),
            peak_bytes=sum(
                _bytes(Fraction(total, end.shard_count))
                for end in (step.source, step.target)
            ),
        )
        for step in path
    )
    return Redistribution(
        steps=steps,
        wire_bytes=_bytes(total * sum(step.wire_share for step in path)),
        dcn_bytes=_bytes(total * sum(step.dcn_share for step in path)),
        peak_bytes=max(
            (step.peak_bytes for step in steps), default=_bytes(total * larger)
        ),
        lower_bound_bytes=_bytes(total * bound),
    )


def _bytes(bits: Fraction | int) -> int:
    return math.ceil(Fraction(bits) / 8)


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
        crosses = index == len(before) - 1 and target.shard_count == source.shard_count
        kind = "permute" if crosses else _kind(source, target)
        if (
            steps
            and kind == steps[-1].kind
            and _are_one(kind, steps[-1], source, target)
        ):
            source = steps.pop().source
        step = PathStep(kind, source, target, *_shares(kind, source, target, before[0]))
        if step.wire_share or kind != "permute":
            steps.append(step)
    return tuple(steps)


def _kind(source: StepLayout, target: StepLayout) -> StepKind:
    if target.shard_count != source.shard_count:
        return "slice" if target.shard_count > source.shard_count else "all_gather"
    return "all_to_all" if _changed(source, target) else "permute"


def _shares(
    kind: StepKind, source: StepLayout, target: StepLayout, like: StepLayout
) -> tuple[Fraction, Fraction]:
    """Returns the bytes that a device receives in a step, from all devices and from
    devices of other TPU slices. Both are fractions of the array's bytes. Devices are
    numbered in the mesh order of `like`.
    """
    if kind == "slice":
        return Fraction(0), Fraction(0)
    if kind == "permute":
        senders = permutation(source, target, like)
        moved = [
            int((ids[senders] != ids).sum())
            for ids in (np.arange(len(senders)), slice_numbers(like))
        ]
        total = len(senders) * source.shard_count
        return Fraction(moved[0], total), Fraction(moved[1], total)
    sub_axes = _changed(source, target)
    members = math.prod(source.sizes[one] for one in sub_axes)
    near = math.prod(
        source.sizes[one]
        for one in sub_axes
        if not source.weights or source.weights[one] <= 1
    )
    if kind == "all_gather":
        # A shard enters a slice once and is copied inside it.
        return Fraction(members - 1, source.shard_count), Fraction(
            members // near - 1, source.shard_count
        )
    return Fraction(members - 1, members * source.shard_count), Fraction(
        members - near, members * source.shard_count
    )


def _changed(source: StepLayout, target: StepLayout) -> list[int]:
    """Returns the sub-axes that shard different dimensions in the layouts `source` and
    `target`, or that shard a dimension in only one of them.
    """
    places = [
        {f: dim for dim, axes in enumerate(end.dims) for f in axes}
        for end in (source, target)
    ]
    return [f for f in range(len(source.sizes)) if places[0].get(f) != places[1].get(f)]


def _are_one(
    kind: StepKind, earlier: PathStep, source: StepLayout, target: StepLayout
) -> bool:
    """Whether the step `earlier` and a second step of the same kind, from `source` to
    `target`, can be done by one operation.

    Two all-to-alls never can. Two slices always can, and so can two permutations. Two
    all-gathers can if they concatenate along the same dimension, and `earlier` ends in
    the layout `source`. Steps on one mesh do that.
    """
    if kind != "all_gather":
        return kind != "all_to_all"
    if earlier.target != source:
        return False
    pairs = [
        *zip(earlier.source.dims, earlier.target.dims, strict=True),
        *zip(source.dims, target.dims, strict=True),
    ]
    return (
        len(
            {
                index % len(source.dims)
                for index, (have, kept) in enumerate(pairs)
                if have != kept
            }
        )
        == 1
    )


def permutation(source: StepLayout, target: StepLayout, like: StepLayout) -> np.ndarray:
    """Returns for each device the device that sends it its new shard in a permute from
    `source` to `target`.

    A device that already holds its new shard is its own sender. Any other device
    receives its shard from a device that holds it and does not yet send. Of these, one
    over the cheapest links is taken. Devices are numbered in the mesh order of `like`.
    """
    ends = [FineLayout(end, coordinates(end, like)) for end in (source, target)]
    have, want = (Shards(end).numbers(end.layout.dims) for end in ends)
    sender = np.where(have == want, np.arange(len(have)), -1)
    span = int(max(have.max(), want.max())) + 1
    for _, group in link_groups(ends[0]):
        free = np.setdiff1d(np.arange(len(have)), sender)
        without = np.flatnonzero(sender < 0)
        _match(
            sender,
            without,
            (group * span + want)[without],
            free,
            (group * span + have)[free],
        )
    return sender


def _match(
    sender: np.ndarray,
    without: np.ndarray,
    wanted: np.ndarray,
    free: np.ndarray,
    held: np.ndarray,
) -> None:
    """Chooses senders for the devices `without`, which need the shards with the numbers
    `wanted`. Writes them into `sender`, which has an entry for each device. The devices
    `free`, which do not send yet, hold the shards `held`.

    Of the devices that need one shard, the k-th receives it from the k-th of the `free`
    devices that hold it. If fewer devices hold it than need it, the last ones get no
    sender.
    """
    (without, wanted, first), (free, held, second) = (
        _ranked(without, wanted),
        _ranked(free, held),
    )
    pair = len(sender) + 1
    keys = wanted * pair + first, held * pair + second
    _, here, there = np.intersect1d(*keys, assume_unique=True, return_indices=True)
    sender[without[here]] = free[there]


def _ranked(
    devices: np.ndarray, shards: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sorts devices by the number of their shard. Returns the sorted devices, their
    shards, and the position of each device among the devices of the same shard. For
    shards 5, 3, 5 of devices 0, 1, 2 these are [1, 0, 2], [3, 5, 5] and [0, 0, 1].
    """
    order = np.argsort(shards, kind="stable")
    ascending = shards[order]
    return (
        devices[order],
        ascending,
        np.arange(len(shards)) - np.searchsorted(ascending, ascending, side="left"),
    )
