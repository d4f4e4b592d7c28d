"""Steps between layouts, checked beside arrays of element numbers."""

import math

import numpy as np
from jax.sharding import PartitionSpec as P

from benchmarks._pairs import every_layout
from benchmarks._simulate import pieces, simulate
from shardfx import MeshSpec
from shardfx._reshard.shardings import layout
from shardfx._reshard.steps import groups as step_groups, layout as step_layout
from shardfx._reshard.steps.paths import permutation
from shardfx._reshard.steps.redistribution import redistribute
from shardfx._reshard.steps.splits import refine
from shardfx.results import StepLayout


CATALOGUE = every_layout(16)


def check(shape: tuple[int, ...], src: StepLayout, dst: StepLayout):
    """Runs the plan and compares what is held after every step with the definition of
    the step's layout.
    """
    values = np.arange(math.prod(shape), dtype=np.int64)
    array = values.reshape(shape)
    plan = redistribute(shape, 64, src, dst)
    refined_src, _ = refine(src, dst)
    slices = step_layout.slice_numbers(refined_src.layout)
    shards = pieces(array, src, src)
    expected_shards = pieces(array, dst, src)
    larger_bytes = max(shards[0].nbytes, expected_shards[0].nbytes)

    sent_bytes = 0
    for step in plan.steps:
        shards_before = shards
        shards = simulate(array, shards_before, step, src)
        assert_equal_shards(shards, pieces(array, step.target, src))
        bytes_before = shards_before[0].nbytes
        dcn_bytes = crossing(step, src, slices, bytes_before)
        assert step.dcn_bytes == math.ceil(dcn_bytes)
        assert step.peak_bytes == bytes_before + shards[0].nbytes
        assert step.peak_bytes <= 2 * larger_bytes
        sent_bytes += step.wire_bytes

    assert_equal_shards(shards, expected_shards)
    assert plan.lower_bound_bytes <= plan.wire_bytes <= sent_bytes
    assert (plan.wire_bytes > 0) == (plan.lower_bound_bytes > 0)
    peak_bytes = [step.peak_bytes for step in plan.steps]
    assert plan.peak_bytes == max(peak_bytes, default=larger_bytes)
    return plan


def assert_equal_shards(shards, expected_shards):
    for shard, expected in zip(shards, expected_shards, strict=True):
        np.testing.assert_array_equal(shard, expected)


def crossing(step, like: StepLayout, recorded: np.ndarray, piece_bytes: int) -> float:
    """Bytes that enter a device from other slices, the mean over devices, counted
    device by device.

    `recorded` says in which slice each device is by the source's factors.
    """
    if step.kind == "slice":
        return 0.0
    if step.kind == "permute":
        senders = permutation(step.source, step.target, like)
        does_cross = recorded[senders] != recorded
        return piece_bytes * float(np.mean(does_cross))

    # The layouts of steps say what is slow by the account of both ends of the move.
    slices = np.empty(like.size, int)
    positions = step_layout.positions(like, step.source)
    slices[positions] = step_layout.slice_numbers(step.source)
    if step.kind == "all_gather":
        groups = step_groups.all_gather(step.source, step.target, like).groups
        # A piece enters a slice once.
        entries = [len(np.unique(row)) - 1 for row in slices[groups]]
        return float(np.mean(entries)) * piece_bytes

    groups = step_groups.all_to_all(step.source, step.target, like).groups
    _, group_size = groups.shape
    slices_of_members = slices[groups]
    senders = slices_of_members[:, :, None]
    receivers = slices_of_members[:, None, :]
    crossings = (senders != receivers).sum()
    return float(crossings / groups.size * piece_bytes / group_size)


def in_slices(sizes: tuple[int, ...], dims, slices: int) -> StepLayout:
    """A layout on a mesh whose slowest axis spans slices of consecutive devices."""
    names = "abcd"[: len(sizes)]
    mesh = MeshSpec(zip(names, sizes, strict=True), dcn={"a": slices})
    spec = P(*[tuple(names[axis] for axis in axes) for axes in dims])
    return layout(mesh, spec, len(dims))
