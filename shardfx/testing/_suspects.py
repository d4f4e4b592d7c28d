"""Suspicious operations in a step's `shard_map`s: sums of equal values, positions that
no index offsets, and results that may differ where `out_specs` say that they do not.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._ground.spec import axes_of_entries, entries_of, entry_axes
from .._step import opened, place_text
from ._tape import Record, ShardMapBody, Tape


_SUMS = ("psum", "psum2", "psum_invariant")
_ALIKE = (*_SUMS, "pmax", "pmin", "pmean", "all_gather", "all_gather_invariant")
_APART = ("ppermute", "all_to_all", "psum_scatter", "reduce_scatter", "axis_index")
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
        for record, reason in _suspicious(tape, body):
            place = place_text(next(iter(record.frames), None))
            texts[f"`{record.primitive}` at {place}: {reason}"] = None
    return tuple(texts)


def _suspicious(tape: Tape, body: ShardMapBody) -> Iterator[tuple[Record, str]]:
    """Yields each suspicious equation of a `shard_map`, with a text that says why."""
    params = body.equation.params
    axes = [axis for axis, size in params["mesh"].shape.items() if size > 1]
    axes_by_operand, axis_by_length = _cuts(body)
    varying = _varying(tape, body, axes_by_operand)
    records = [tape.records[number] for number in body.numbers]
    indexed: set[str] = set()
    for record in records:
        if record.primitive == "axis_index":
            indexed |= record.axes
    for record in records:
        yield from _suspicious_sums(record, axes, varying)
        axis = axis_by_length.get(record.counted)
        if axis in axes and axis not in indexed:
            reason = (
                f"counts from 0 on every device along {axis}, and no axis_index"
                " offsets it"
            )
            yield record, reason

    for number, spec in zip(body.results, params["out_specs"], strict=True):
        unsaid = varying.get(number, Axes()) - _axes_of_spec(spec)
        unsaid_axes = [axis for axis in axes if axis in unsaid]
        if unsaid_axes and number >= 0:
            reason = (
                f"may differ along {', '.join(unsaid_axes)}, and `out_specs` say that"
                " it does not: is a psum missing?"
            )
            yield tape.records[number], reason


def _suspicious_sums(
    record: Record,
    axes: Sequence[str],
    varying: Varying,
) -> Iterator[tuple[Record, str]]:
    """Yields an equation that reduces over devices with the same values, or in a narrow
    dtype, with a text that says so.
    """
    if record.primitive in _ALIKE:
        same = record.axes - _operand_axes(record, varying)
        for axis in axes:
            if axis in same:
                reason = (
                    f"is over {axis}, along which all devices have the same: is it"
                    " doubled?"
                )
                yield record, reason
    is_float = jnp.issubdtype(record.dtype, np.floating)
    is_float_sum = is_float and record.primitive in _SUMS
    if is_float_sum and jnp.finfo(record.dtype).bits < 32:
        yield record, f"adds up in {record.dtype}: its error grows with the devices"


def _cuts(body: ShardMapBody) -> tuple[Varying, dict[int, str]]:
    """The mesh axes that shard each operand of a `shard_map`; and for the size of each
    sharded dimension on a device, a mesh axis that shards it.
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


def _varying(tape: Tape, body: ShardMapBody, axes_by_operand: Varying) -> Varying:
    """For each operand and each equation in the `shard_map` `body`, the mesh axes along
    which the devices may have different values. `axes_by_operand` has them for the
    operands alone. The keys of both dicts are numbers, as in `tape.records`.
    """
    varying = dict(axes_by_operand)
    # An iteration of a loop takes the results of the iteration before it.
    for _ in range(len(body.equation.params["mesh"].shape) + 1):
        for number in body.numbers:
            record = tape.records[number]
            axes = _operand_axes(record, varying)
            if record.primitive in _ALIKE:
                varying[number] = axes - record.axes
                continue
            before = tape.carry_results.get(number, number)
            varying[number] = axes | varying.get(before, Axes())
            if record.primitive in _APART:
                varying[number] |= record.axes
    return varying


def _operand_axes(record: Record, varying: Varying) -> Axes:
    return Axes().union(*(varying.get(operand, Axes()) for operand in record.reads))


def _axes_of_spec(spec: Any) -> Axes:
    return Axes(axes_of_entries(entries_of(spec)))
