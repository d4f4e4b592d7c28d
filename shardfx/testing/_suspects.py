"""Suspicious operations in a step's `shard_map`s: sums of equal values, positions that
no index offsets, and results that may differ where `out_specs` say that they do not.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._ground.spec import axes_of_entries, entries_of, entry_axes
from .._step import Frame, frames_of, is_library, opened, place_text
from ._records import Record, ShardMapBody
from ._tape import Tape


# Sums over devices with one result for all of them.
_WHOLE_SUMS = ("psum", "psum2", "psum_invariant")
# The primitive of `psum_scatter`.
_SCATTERED_SUM = "reduce_scatter"
_SUMS = (*_WHOLE_SUMS, _SCATTERED_SUM)
# Collectives after which all devices along their axes have the same value.
_SAME_RESULTS = (
    *_WHOLE_SUMS,
    "pmax",
    "pmin",
    "pmean",
    "all_gather",
    "all_gather_invariant",
)
# Equations after which each device along their axes has a value of its own.
_OWN_RESULTS = ("ppermute", "all_to_all", _SCATTERED_SUM, "axis_index")
# Mesh axes.
Axes = frozenset[str]
# By the number of an equation, the mesh axes along which the devices may have different
# results.
Varying = Mapping[int, Axes]


def suspects(tape: Tape) -> tuple[str, ...]:
    """A text for each suspicious operation in a step's `shard_map`s with
    `check_vma=False`.

    An example is a `psum` over an axis along which all devices have the same value.
    """
    texts: dict[str, None] = {}
    for body in tape.bodies:
        if body.equation.params["check_vma"]:
            continue
        varying = _varying(tape, body)
        for record, reason in _suspicious_equations(tape, body, varying):
            texts[_suspicion_text(record.primitive, record.frames, reason)] = None
        for number, reason in _suspicious_results(body, varying):
            if number >= 0:
                record = tape.records[number]
                text = _suspicion_text(record.primitive, record.frames, reason)
            else:
                # No equation made the result, so it is an argument of the `shard_map`.
                frames = frames_of(body.equation)
                user_frames = [frame for frame in frames if not is_library(frame)]
                text = _suspicion_text(
                    "shard_map", user_frames, f"an argument of it {reason}"
                )
            texts[text] = None
    return tuple(texts)


def _suspicion_text(primitive: str, frames: Sequence[Frame], reason: str) -> str:
    """The text of a suspicious operation: its primitive, its source line and the
    reason.
    """
    place = place_text(next(iter(frames), None))
    return f"`{primitive}` at {place}: {reason}"


def _suspicious_equations(
    tape: Tape,
    body: ShardMapBody,
    varying: Varying,
) -> Iterator[tuple[Record, str]]:
    """Yields each suspicious equation of a `shard_map`, with a text that says why.
    `varying` has, by an equation's number, the mesh axes along which its result may
    differ between devices.
    """
    axes = _axes_of_mesh(body)
    _, axis_by_length = _operand_shardings(body)
    records = [tape.records[number] for number in body.numbers]
    indexed_axes: set[str] = set()
    for record in records:
        if record.primitive == "axis_index":
            indexed_axes |= record.axes
    for record in records:
        yield from _suspicious_sums(record, axes, varying)
        # `counted` is the size that an `iota` counts, here that of a sharded dimension
        # on a device; 0 for other primitives.
        axis = axis_by_length.get(record.counted)
        if axis in axes and axis not in indexed_axes:
            reason = (
                f"counts from 0 on every device along {axis}, and no axis_index"
                " offsets it"
            )
            yield record, reason


def _suspicious_results(
    body: ShardMapBody,
    varying: Varying,
) -> Iterator[tuple[int, str]]:
    """Yields the number of each result of a `shard_map` that may differ where
    `out_specs` say that it does not, with a text that says so. `varying` has the mesh
    axes along which a result may differ between devices, by its number.
    """
    axes = _axes_of_mesh(body)
    out_specs = body.equation.params["out_specs"]
    for number, spec in zip(body.results, out_specs, strict=True):
        varying_axes = varying.get(number, Axes()) - _axes_of_spec(spec)
        unsaid_axes = [axis for axis in axes if axis in varying_axes]
        if unsaid_axes:
            reason = (
                f"may differ along {', '.join(unsaid_axes)}, and `out_specs` say that"
                " it does not: is a psum missing?"
            )
            yield number, reason


def _suspicious_sums(
    record: Record,
    axes: Sequence[str],
    varying: Varying,
) -> Iterator[tuple[Record, str]]:
    """Yields an equation that reduces over devices with the same values, or in a narrow
    dtype, with a text that says so. `axes` are those of the mesh, `record.axes` those
    of the reduction, and `varying` those along which values may differ, by number.
    """
    if record.primitive in (*_SAME_RESULTS, _SCATTERED_SUM):
        equal_axes = record.axes - _operand_axes(record, varying)
        for axis in axes:
            if axis in equal_axes:
                reason = (
                    f"is over {axis}, along which all devices have the same: is it"
                    " doubled?"
                )
                yield record, reason
    is_float = jnp.issubdtype(record.dtype, np.floating)
    is_float_sum = is_float and record.primitive in _SUMS
    if is_float_sum and jnp.finfo(record.dtype).bits < 32:
        yield record, f"adds up in {record.dtype}: its error grows with the devices"


def _operand_shardings(body: ShardMapBody) -> tuple[Varying, dict[int, str]]:
    """The mesh axes that shard each operand of a `shard_map`, by the operand's number;
    and for the size of each sharded dimension on a device, a mesh axis that shards it.
    """
    axes_by_operand: dict[int, Axes] = {}
    axis_by_length: dict[int, str] = {}
    jaxpr, _ = opened(body.equation.params["jaxpr"])
    specs = body.equation.params["in_specs"]
    for var, number, spec in zip(jaxpr.invars, body.reads, specs, strict=True):
        axes_by_operand[number] = axes_by_operand.get(number, Axes()) | _axes_of_spec(
            spec
        )
        for size, entry in zip(var.aval.shape, entries_of(spec), strict=False):
            for axis in entry_axes(entry):
                axis_by_length[size] = axis
    return axes_by_operand, axis_by_length


def _varying(tape: Tape, body: ShardMapBody) -> Varying:
    """For each operand and each equation in the `shard_map` `body`, the mesh axes along
    which the devices may have different values. The keys are numbers, as in
    `tape.records`.
    """
    axes_by_operand, _ = _operand_shardings(body)
    varying = dict(axes_by_operand)
    # An iteration of a loop takes the results of the iteration before it. Each pass can
    # carry one more axis around a loop.
    for _ in range(len(body.equation.params["mesh"].shape) + 1):
        for number in body.numbers:
            record = tape.records[number]
            axes = _operand_axes(record, varying)
            if record.primitive in _SAME_RESULTS:
                varying[number] = axes - record.axes
                continue
            carried_over = tape.carry_results.get(number, number)
            varying[number] = axes | varying.get(carried_over, Axes())
            if record.primitive in _OWN_RESULTS:
                varying[number] |= record.axes
    return varying


def _axes_of_mesh(body: ShardMapBody) -> list[str]:
    """The axes of the mesh of a `shard_map` that have more than one device."""
    mesh = body.equation.params["mesh"]
    return [axis for axis, size in mesh.shape.items() if size > 1]


def _operand_axes(record: Record, varying: Varying) -> Axes:
    """The mesh axes along which the devices may have different operands of an equation."""
    return Axes().union(*(varying.get(operand, Axes()) for operand in record.reads))


def _axes_of_spec(spec: Any) -> Axes:
    """The mesh axes that a PartitionSpec names."""
    return Axes(axes_of_entries(entries_of(spec)))
