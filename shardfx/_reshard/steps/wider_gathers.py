"""All-gathers over more rings of a torus.

Where a sub-axis replicates an array before an all-gather, devices can slice their
shards along it, which sends nothing, and gather along it too. A device then receives
more bytes, but over the links of more rings.
"""

import dataclasses
import itertools as it
from collections.abc import Sequence

from .groups import groups_of
from .layout import Counts, StepLayout, product_of
from .paths import Path, PathStep, step_between
from .times import TorusTimes


def with_wider_gathers(path: Path, divisible_counts: Counts, times: TorusTimes) -> Path:
    """Returns `path` with each all-gather over more sub-axes where that is faster by
    `times`. `divisible_counts` has a number for each dimension, which the number of
    shards along it must divide.
    """
    # Devices are numbered in the mesh order of the layout before the move.
    like = path[0].source
    steps: list[PathStep] = []
    for step in path:
        if step.kind != "all_gather":
            steps.append(step)
            continue
        wider = _widened(step, like, divisible_counts, times)
        if wider.source != step.source:
            source = step.source
            if steps and steps[-1].kind == "slice":
                source = steps.pop().source
            steps.append(step_between("slice", source, wider.source, like))
        steps.append(wider)
    return tuple(steps)


def _widened(
    gather: PathStep,
    like: StepLayout,
    divisible_counts: Counts,
    times: TorusTimes,
) -> PathStep:
    """Returns the fastest all-gather that ends as `gather` does, from a layout that is
    sharded further; `gather` itself if none is faster. Mesh axes are added one by one.
    Each time the axis is taken with which the busiest link carries the fewest bytes.
    """
    fastest = gather
    while True:
        least_share = times.of_step(fastest).link_share
        wider = fastest
        for sub_axes in _unused_by_axis(fastest.source, like, times).values():
            source = _finer(fastest, sub_axes, divisible_counts)
            if source is None:
                continue
            candidate = step_between("all_gather", source, gather.target, like)
            candidate_share = times.of_step(candidate).link_share
            if candidate_share < least_share:
                least_share = candidate_share
                wider = candidate
        if wider is fastest:
            return fastest
        fastest = wider


def _unused_by_axis(
    layout: StepLayout,
    like: StepLayout,
    times: TorusTimes,
) -> dict[tuple[int, ...], list[int]]:
    """The sub-axes inside a TPU slice that shard no dimension of `layout`, by the mesh
    axes along which they lie.
    """
    weights = layout.weights or (1.0,) * len(layout.sizes)
    used = set(it.chain.from_iterable(layout.dims))
    unused: dict[tuple[int, ...], list[int]] = {}
    for sub_axis, (size, weight) in enumerate(zip(layout.sizes, weights, strict=True)):
        if sub_axis not in used and size > 1 and weight <= 1:
            groups = groups_of(layout, (sub_axis,), like)
            axes = tuple(times.axes_across(groups))
            unused.setdefault(axes, []).append(sub_axis)
    return unused


def _finer(
    gather: PathStep,
    added: Sequence[int],
    divisible_counts: Counts,
) -> StepLayout | None:
    """The layout before `gather`, sharded over the sub-axes `added` too. `None` if they
    divide no dimension. The dimensions along which it gathers are tried first.
    """
    layout = gather.source
    dims = list(layout.dims)
    gathered_first = sorted(
        range(len(dims)), key=lambda dim: dims[dim] == gather.target.dims[dim]
    )
    for sub_axis in added:
        for dim in gathered_first:
            longer = (*dims[dim], sub_axis)
            if divisible_counts[dim] % product_of(layout.sizes, longer) == 0:
                dims[dim] = longer
                break
        else:
            return None
    return dataclasses.replace(layout, dims=tuple(dims))
