"""What leads from each layout of a walk to the next: which steps, and what enters a device in each."""

import dataclasses
import itertools as it
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal, NamedTuple

import numpy as np

from .groups import permutation
from .layout import Layout, slice_numbers


StepKind = Literal["slice", "all_to_all", "permute", "all_gather"]


class Stride(NamedTuple):
    """One step, and what enters a device in it: the mean over devices, as a share of the array.

    **Arguments:**

    - `kind`: what it is; see [`shardfx._redistribute.Step`][].
    - `source`, `target`: the layouts before and after.
    - `wire_share`: all that enters.
    - `dcn_share`: the part of it that comes from other slices.
    """

    kind: StepKind
    source: Layout
    target: Layout
    wire_share: Fraction
    dcn_share: Fraction


@dataclasses.dataclass(frozen=True)
class Walk:
    """The steps from one layout to another."""

    source: Layout
    target: Layout
    steps: tuple[Stride, ...]


def walk(ours: Sequence[Layout], theirs: Sequence[Layout]) -> Walk:
    """The steps along layouts of the source's mesh, then of the target's; a permutation leads from one to the other.

    Or a slice, where every device has what it then holds.

    **Arguments:**

    - `ours`: layouts on the source's factors, from the source on.
    - `theirs`: layouts on the target's factors, to the target.

    **Returns:**

    The Walk, neighbouring steps of one kind joined where they are one operation.
    """
    pairs = [*it.pairwise(ours), (ours[-1], theirs[0]), *it.pairwise(theirs)]
    steps: list[Stride] = []
    for index, (before, after) in enumerate(pairs):
        # From one side to the other any piece may go anywhere, whatever the factors are called.
        crossing = index == len(ours) - 1 and after.pieces == before.pieces
        kind = "permute" if crossing else _kind(before, after)
        if steps and kind == steps[-1].kind and _fusible(kind, steps[-1], before, after):
            before = steps.pop().source
        step = Stride(kind, before, after, *_shares(kind, before, after, ours[0]))
        if step.wire_share or kind != "permute":
            steps.append(step)
    return Walk(ours[0], theirs[-1], tuple(steps))


def _kind(before: Layout, after: Layout) -> StepKind:
    if after.pieces != before.pieces:
        return "slice" if after.pieces > before.pieces else "all_gather"
    return "all_to_all" if _changed(before, after) else "permute"


def _shares(kind: StepKind, before: Layout, after: Layout, like: Layout) -> tuple[Fraction, Fraction]:
    """What enters a device in one step, and what of it comes from another slice."""
    if kind == "slice":
        return Fraction(0), Fraction(0)
    if kind == "permute":
        senders = permutation(before, after, like)
        slices = slice_numbers(like)
        moved = [int((ids[senders] != ids).sum()) for ids in (np.arange(len(senders)), slices)]
        return Fraction(moved[0], len(senders) * before.pieces), Fraction(moved[1], len(senders) * before.pieces)
    factors = _changed(before, after)
    members = math.prod(before.sizes[factor] for factor in factors)
    near = math.prod(before.sizes[factor] for factor in factors if not before.weights or before.weights[factor] <= 1)
    if kind == "all_gather":
        # A piece enters a slice once, and is copied within.
        return Fraction(members - 1, before.pieces), Fraction(members // near - 1, before.pieces)
    return Fraction(members - 1, members * before.pieces), Fraction(members - near, members * before.pieces)


def _changed(before: Layout, after: Layout) -> list[int]:
    places = [{f: dim for dim, axes in enumerate(end.dims) for f in axes} for end in (before, after)]
    return [f for f in range(len(before.sizes)) if places[0].get(f) != places[1].get(f)]


def _fusible(kind: StepKind, earlier: Stride, before: Layout, after: Layout) -> bool:
    """Whether a step and the one before it, of one kind, are one operation.

    Gathers are if they join one dimension, and along factors of one mesh: what a dropped permutation would lead over
    to the other's lies between them.
    """
    if kind != "all_gather":
        return kind != "all_to_all"
    if earlier.target != before:
        return False
    pairs = [*zip(earlier.source.dims, earlier.target.dims, strict=True), *zip(before.dims, after.dims, strict=True)]
    return len({index % len(before.dims) for index, (axes, kept) in enumerate(pairs) if axes != kept}) == 1
