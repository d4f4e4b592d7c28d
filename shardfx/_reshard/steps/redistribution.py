"""Plans the steps from one layout to another with little traffic and bounded memory, without any devices.

The steps are those of Rink et al. 2021 (arXiv 2112.01075); the search is a bidirectional A* over them.
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
    End,
    Holdings,
    StepLayout,
    coordinates,
    levels,
    missing_share,
    slice_numbers,
)
from .search import Problem, cheapest_route
from .splits import refine


StepKind = Literal["slice", "all_to_all", "permute", "all_gather"]


class PathStep(NamedTuple):
    """One step of a path, with the bytes that a device receives in it.

    Both fractions are means over devices, relative to the bytes of the whole array.

    **Arguments:**

    - `kind`: the collective; see `MoveStep`.
    - `source`, `target`: the layouts before and after.
    - `wire_share`: the fraction received from all other devices.
    - `dcn_share`: the fraction received from devices of other slices.
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
    """One collective (or local slice) of a move, along factors of the mesh axes.

    **Arguments:**

    - `kind`: "slice" (local), "all_to_all", "permute" or "all_gather".
    - `source`, `target`: the layouts before and after, on meshes whose axes are factors of the given mesh
        axes; the two differ in their mesh only where a permute or a slice leads from one factorisation to another.
    - `wire_bytes`: the bytes that a device receives, as the mean over devices, rounded up.
    - `dcn_bytes`: the bytes among `wire_bytes` that come from another slice (or node). An upper bound if slices do not
        line up with mesh axes.
    - `peak_bytes`: the bytes of the shards that a device reads and writes in the step.
    """

    kind: StepKind
    source: StepLayout
    target: StepLayout
    wire_bytes: int
    dcn_bytes: int
    peak_bytes: int


@dataclasses.dataclass(frozen=True)
class Redistribution:
    """The steps that move one array from one layout to another, with their traffic and memory.

    **Arguments:**

    - `steps`: in order; empty if every device already holds its target shard.
    - `wire_bytes`: the bytes that a device receives over all steps, as the mean over devices, rounded up.
    - `dcn_bytes`: the bytes among `wire_bytes` that come from another slice (or node). An upper bound if slices do not
        line up with mesh axes.
    - `peak_bytes`: the most bytes of shards that a device holds at one time.
    - `lower_bound_bytes`: the bytes that a device must receive under any algorithm, as the mean over devices: its
        target shard without the elements that it already holds.
    """

    steps: tuple[MoveStep, ...]
    wire_bytes: int
    dcn_bytes: int
    peak_bytes: int
    lower_bound_bytes: int


@ft.lru_cache(maxsize=4096)
def redistribute(shape: tuple[int, ...], itemsize_bits: int, src: StepLayout, dst: StepLayout) -> Redistribution:
    """Plans the steps that move one array between two layouts with little traffic and bounded memory.

    A step reads one shard and writes one. It holds at most twice the larger shard of the two layouts.

    **Arguments:**

    - `shape`: the shape of the whole array. Every dimension must divide into the shards of both layouts.
    - `itemsize_bits`: bits per element.
    - `src`, `dst`: layouts over the same devices, made by `layout`.

    **Returns:**

    The `Redistribution`, from a bounded cache where the same move was planned before.

    **Raises:**

    `MeshError` if the two layouts are not over the same devices.
    """
    # The search depends only on which shard counts divide the shape, so leaves of different shapes share cached paths.
    room = tuple(math.gcd(size, src.size) for size in shape)
    path, bound = _planned(room, src, dst)
    return _measured(math.prod(shape) * itemsize_bits, path, bound, Fraction(1, min(src.pieces, dst.pieces)))


@ft.lru_cache(maxsize=4096)
def _planned(room: tuple[int, ...], src: StepLayout, dst: StepLayout) -> tuple[Path, Fraction]:
    """The path, and the least fraction of the array that a device receives on any path."""
    source, target = refine(src, dst)
    bound = missing_share(source, target)
    if not bound:  # every device already holds its target shard
        return path_along([source.layout], [target.layout]), bound
    route = cheapest_route(Problem(room, source, target))
    route = route or cheapest_route(Problem(room, *refine(src, dst, prime=True)))
    if route is None:
        raise AssertionError(
            "slices, all-to-alls and gathers of prime factors lead everywhere; please report this move"
        )
    return path_along(*route), bound


def _measured(total: int, path: Path, bound: Fraction, larger: Fraction) -> Redistribution:
    steps = tuple(
        MoveStep(
            *(step.kind, step.source, step.target),
            wire_bytes=_bytes(total * step.wire_share),
            dcn_bytes=_bytes(total * step.dcn_share),
            peak_bytes=sum(_bytes(Fraction(total, end.pieces)) for end in (step.source, step.target)),
        )
        for step in path
    )
    return Redistribution(
        steps=steps,
        wire_bytes=_bytes(total * sum(step.wire_share for step in path)),
        dcn_bytes=_bytes(total * sum(step.dcn_share for step in path)),
        peak_bytes=max((step.peak_bytes for step in steps), default=_bytes(total * larger)),
        lower_bound_bytes=_bytes(total * bound),
    )


def _bytes(bits: Fraction | int) -> int:
    return math.ceil(Fraction(bits) / 8)


def path_along(before: Sequence[StepLayout], after: Sequence[StepLayout]) -> Path:
    """The steps of a path that visits the layouts `before`, then the layouts `after`.

    The step from the source's mesh to the target's mesh is a permutation, or a slice if each device already holds its
    next shard.

    **Arguments:**

    - `before`: layouts over the source's factors, beginning with the source.
    - `after`: layouts over the target's factors, ending with the target.

    **Returns:**

    The steps. Neighbouring steps of one kind are merged where one operation can do both.
    """
    pairs = [*it.pairwise(before), (before[-1], after[0]), *it.pairwise(after)]
    steps: list[PathStep] = []
    for index, (source, target) in enumerate(pairs):
        # The two meshes number their factors differently, so the step between them may be any permutation.
        crosses = index == len(before) - 1 and target.pieces == source.pieces
        kind = "permute" if crosses else _kind(source, target)
        if steps and kind == steps[-1].kind and _are_one(kind, steps[-1], source, target):
            source = steps.pop().source
        step = PathStep(kind, source, target, *_shares(kind, source, target, before[0]))
        if step.wire_share or kind != "permute":
            steps.append(step)
    return tuple(steps)


def _kind(source: StepLayout, target: StepLayout) -> StepKind:
    if target.pieces != source.pieces:
        return "slice" if target.pieces > source.pieces else "all_gather"
    return "all_to_all" if _changed(source, target) else "permute"


def _shares(kind: StepKind, source: StepLayout, target: StepLayout, like: StepLayout) -> tuple[Fraction, Fraction]:
    """The fractions of the array that a device receives in one step: in total, and from other slices."""
    if kind == "slice":
        return Fraction(0), Fraction(0)
    if kind == "permute":
        senders = permutation(source, target, like)
        moved = [int((ids[senders] != ids).sum()) for ids in (np.arange(len(senders)), slice_numbers(like))]
        return Fraction(moved[0], len(senders) * source.pieces), Fraction(moved[1], len(senders) * source.pieces)
    factors = _changed(source, target)
    members = math.prod(source.sizes[factor] for factor in factors)
    near = math.prod(source.sizes[factor] for factor in factors if not source.weights or source.weights[factor] <= 1)
    if kind == "all_gather":
        # A shard enters a slice once and is copied inside it.
        return Fraction(members - 1, source.pieces), Fraction(members // near - 1, source.pieces)
    return Fraction(members - 1, members * source.pieces), Fraction(members - near, members * source.pieces)


def _changed(source: StepLayout, target: StepLayout) -> list[int]:
    """The factors that do not shard the same dimension in `target` as in `source`."""
    places = [{f: dim for dim, axes in enumerate(end.dims) for f in axes} for end in (source, target)]
    return [f for f in range(len(source.sizes)) if places[0].get(f) != places[1].get(f)]


def _are_one(kind: StepKind, earlier: PathStep, source: StepLayout, target: StepLayout) -> bool:
    """Whether a step from `source` to `target` and the previous step of the same kind are one operation.

    Two all-to-alls never are; slices and permutations always are. Two gathers are one if they join the same dimension
    and are along factors of the same mesh. Gathers along factors of two meshes become neighbours if the
    permutation between them moves nothing and is left out. Then the first gather's target is not
    the second gather's source.
    """
    if kind != "all_gather":
        return kind != "all_to_all"
    if earlier.target != source:
        return False
    pairs = [*zip(earlier.source.dims, earlier.target.dims, strict=True), *zip(source.dims, target.dims, strict=True)]
    return len({index % len(source.dims) for index, (have, kept) in enumerate(pairs) if have != kept}) == 1


def permutation(source: StepLayout, target: StepLayout, like: StepLayout) -> np.ndarray:
    """For each device, the device that sends it its shard in a permute step.

    It is the device itself if it has that shard, else the nearest free holder. Both layouts have equal counts along
    every dimension.
    """
    ends = [End(end, coordinates(end, like)) for end in (source, target)]
    have, want = (Holdings(end).numbers(end.layout.dims) for end in ends)
    sender = np.where(have == want, np.arange(len(have)), -1)
    span = int(max(have.max(), want.max())) + 1
    for _, group in levels(ends[0]):
        free = np.setdiff1d(np.arange(len(have)), sender)
        without = np.flatnonzero(sender < 0)
        _match(sender, without, (group * span + want)[without], free, (group * span + have)[free])
    return sender


def _match(sender: np.ndarray, without: np.ndarray, wanted: np.ndarray, free: np.ndarray, held: np.ndarray) -> None:
    """Sets senders in place: the k-th device that lacks a shard receives it from the k-th free device that holds this
    shard.
    """
    (without, wanted, first), (free, held, second) = (_ranked(without, wanted), _ranked(free, held))
    pair = len(sender) + 1
    keys = wanted * pair + first, held * pair + second
    _, here, there = np.intersect1d(*keys, assume_unique=True, return_indices=True)
    sender[without[here]] = free[there]


def _ranked(who: np.ndarray, what: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The devices `who` sorted by their shards `what`, the sorted shards, and the rank of each device among those with
    the same shard.
    """
    order = np.argsort(what, kind="stable")
    ascending = what[order]
    return who[order], ascending, np.arange(len(what)) - np.searchsorted(ascending, ascending, side="left")
