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
    slices = step_layout.slice_numbers(refine(src, dst)[0].layout)
    held = pieces(array, src, src)
    nbytes = pieces(array, dst, src)[0].nbytes
    bytes_of = [held[0].nbytes, nbytes]
    wire = 0
    for step in plan.steps:
        before = held
        held = simulate(array, held, step, src)
        wire += step.wire_bytes
        for mine, right in zip(held, pieces(array, step.target, src), strict=True):
            np.testing.assert_array_equal(mine, right)
        expected = math.ceil(crossing(step, src, slices, before[0].nbytes))
        assert step.dcn_bytes == expected
        assert step.peak_bytes == before[0].nbytes + held[0].nbytes
        assert step.peak_bytes <= 2 * max(bytes_of)
    for mine, right in zip(held, pieces(array, dst, src), strict=True):
        np.testing.assert_array_equal(mine, right)
    assert plan.lower_bound_bytes <= plan.wire_bytes <= wire
    assert (plan.wire_bytes > 0) == (plan.lower_bound_bytes > 0)
    peak_bytes = [step.peak_bytes for step in plan.steps]
    expected = max(peak_bytes, default=max(bytes_of))
    assert plan.peak_bytes == expected
    return plan


def crossing(step, like: StepLayout, recorded: np.ndarray, piece_bytes: int) -> float:
    """Bytes that enter a device from other slices, the mean over devices, counted
    device by device.

    `known` says in which slice each device is by the source's factors.
    """
    # The layouts of steps say what is slow by the account of both ends of the move.
    slices = np.empty(like.size, int)
    slices[step_layout.positions(like, step.source)] = step_layout.slice_numbers(
        step.source
    )
    if step.kind == "slice":
        return 0.0
    if step.kind == "permute":
        return piece_bytes * float(
            np.mean(recorded[permutation(step.source, step.target, like)] != recorded)
        )
    if step.kind == "all_gather":
        members = slices[step_groups.all_gather(step.source, step.target, like).groups]
        # A piece enters a slice once.
        entries = [len(np.unique(row)) - 1 for row in members]
        return float(np.mean(entries)) * piece_bytes
    groups = step_groups.all_to_all(step.source, step.target, like).groups
    members = slices[groups]
    crossings = (members[:, :, None] != members[:, None, :]).sum()
    return float(crossings / groups.size * piece_bytes / groups.shape[1])


def in_slices(sizes: tuple[int, ...], dims, slices: int) -> StepLayout:
    """A layout on a mesh whose slowest axis spans slices of consecutive devices."""
    names = "abcd"[: len(sizes)]
    mesh = MeshSpec(zip(names, sizes, strict=True), dcn={"a": slices})
    spec = P(*[tuple(names[axis] for axis in axes) for axes in dims])
    return layout(mesh, spec, len(dims))
