"""Calls of the bodies of `shard_map`s."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..collectives import Groups, groups_of
from ..hlo_text import Instruction, arrays_in
from . import manual
from .cuts import Cut
from .elements import expressed
from .forms import numbers
from .held import NOWHERE, Context, Held, Result, cut_of, require_finished, view_of
from .joining import form_in
from .matching import candidates, held_result
from .results import held_of, leaves_of, required_view
from .shardings import cuts_of, cuts_of_part
from .values import Global, ManualCall, PartlyManual, PartlyManualCall, Shards
from .verdict import Unjudged


# Goes through a computation of the program of one device with these arguments.
_Run = Callable[[str, Sequence[Result]], Result]


def called_manually(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Result],
    name: str,
    run: _Run,
) -> "Result | None":
    """The results of the call of the computation `name`, if it is the body of a
    `shard_map`; `None` for other calls. `run` goes through a computation. Raises
    `Unjudged` if the whole program has no call of an equal body with the same shards:
    what a body computes are no values of the whole program.
    """
    values = context.values
    whole_name = name.removesuffix(_PARTITIONED_SUFFIX)
    if whole_name in values.partly_manual_calls:
        return _called_partly(context, operands, name, run)
    if not values.manual_bodies:
        return None
    digests = manual.result_digests(context.module, name)
    for call in values.manual_calls:
        if call.digests != digests or len(call.operands) != len(operands):
            continue
        if all(
            _holds_shards(context, operand, shards)
            for operand, shards in zip(operands, call.operands, strict=True)
        ):
            return _results_of_call(context, instruction, call)
    if whole_name in values.manual_bodies:
        raise Unjudged("the body of a `shard_map` that is no body of the whole program")
    return None


# The end of the name that the partitioner gives a computation.
_PARTITIONED_SUFFIX = "_spmd"


def _holds_shards(context: Context, operand: Result, shards: Shards) -> bool:
    """Whether the operand is the array of `shards`, cut as their sharding says."""
    if not isinstance(operand, Held):
        return False
    try:
        cuts = cuts_of(
            context.cuts, shards.sharding_text, shards.array.shape, operand.shape
        )
    except Unjudged:
        return False
    return _holds_cuts(context, operand, shards.array, cuts)


def _holds_cuts(
    context: Context,
    operand: Result,
    array: Global,
    cuts: Sequence[Cut],
) -> bool:
    """Whether devices hold `array`, whole sums of it, with its dimensions cut as `cuts`
    says.
    """
    if not isinstance(operand, Held):
        return False
    held_array = expressed(context, operand, array)
    if held_array is None or view_of(held_array) != required_view(held_array, array):
        return False
    if (
        not held_array.is_finished
        or held_array.idiom is not None
        or held_array.dropped_axes
    ):
        return False
    for axis, dim, cut in zip(held_array.axes, array.view.dims, cuts, strict=True):
        if axis is None:
            if dim is not None:
                return False
        elif axis.cut is not cut:
            return False
    return True


def _results_of_call(
    context: Context,
    instruction: Instruction,
    call: ManualCall,
) -> Result:
    """What devices hold of the results of a body: the shards of the arrays that the
    whole program makes of them.
    """
    results: list[Result] = []
    for result_number, result_array in enumerate(arrays_in(instruction.result)):
        shape = result_array.shape
        shards = call.results.get(result_number)
        if shards is None:
            # The whole program does not read it.
            results.append(Held(root=NOWHERE, shape=shape, axes=(None,) * len(shape)))
            continue
        cuts = cuts_of(context.cuts, shards.sharding_text, shards.array.shape, shape)
        results.append(held_of(shards.array, shape, cuts))
    return tuple(results) if instruction.result.startswith("(") else results[0]


# Bodies that are manual in some axes only.


def _called_partly(
    context: Context,
    operands: Sequence[Result],
    name: str,
    run: _Run,
) -> Result:
    """The results of the call of the body `name`, which is manual in some axes only:
    `run` judges it with the parts that devices have.
    """
    calls = context.values.partly_manual_calls[name.removesuffix(_PARTITIONED_SUFFIX)]
    for call in calls:
        parts = _parts_taken(context, operands, call)
        if parts is None:
            continue
        results = run(name, parts)
        outside_arrays = [
            _array_of_part(context, result, array)
            for result, array in zip(leaves_of(results), call.results, strict=True)
        ]
        return outside_arrays[0] if isinstance(results, Held) else tuple(outside_arrays)
    raise Unjudged("the body of a `shard_map` that is manual in some axes only")


def _parts_taken(
    context: Context,
    operands: Sequence[Result],
    call: PartlyManualCall,
) -> list[Held] | None:
    """The parts that devices have of the operands of a call; `None` if the operands are
    no arrays of which the call takes parts.
    """
    if len(operands) != len(call.operands):
        return None
    parts: list[Held] = []
    for operand, (part, outside) in zip(operands, call.operands, strict=True):
        if not isinstance(operand, Held):
            return None
        cuts = _cuts_of_both(context, part, outside, operand.shape)
        if not _holds_cuts(context, operand, outside.array, cuts.outside):
            return None
        parts.append(held_of(part, operand.shape, cuts.part))
    return parts


def _array_of_part(context: Context, result: Result, part: Global) -> Result:
    """What devices hold of the array outside of a `shard_map`, of which its body
    returns the part `part`. `result` is what they hold of the part. A part that is not
    used outside is returned as it is.
    """
    outside_arrays = context.values.partly_manual_results.get(part, set())
    if not isinstance(result, Held) or not outside_arrays:
        return result
    if len(outside_arrays) > 1:
        raise Unjudged("a part that is one of several arrays")
    (outside,) = outside_arrays
    cuts = _cuts_of_both(context, part, outside, result.shape)
    if not _holds_cuts(context, result, part, cuts.part):
        raise Unjudged("a part that is none of the whole program's")
    return held_of(outside.array, result.shape, cuts.outside)


class _Cuts(NamedTuple):
    """The cuts of an array, and of the part of it."""

    outside: list[Cut]
    part: list[Cut]


def _cuts_of_both(
    context: Context,
    part: Global,
    outside: PartlyManual,
    local_shape: tuple[int, ...],
) -> _Cuts:
    """The cuts of an array and of its part, as `outside` says how both lie.
    `local_shape` is the shape of their shards, which are the same. Raises `Unjudged` if
    devices of one part do not have what belongs together.
    """
    array = outside.array
    cuts = _Cuts(
        outside=cuts_of(context.cuts, outside.array_sharding, array.shape, local_shape),
        part=cuts_of_part(context.cuts, outside.part_sharding, part.shape, local_shape),
    )
    # Devices of one part have what is at the same distance from its start.
    part_of_device = np.array(
        context.values.parts_by_value.get(part.view.root, range(context.devices))
    )
    for whole_cut, part_cut in zip(cuts.outside, cuts.part, strict=True):
        if whole_cut.has_holes or part_cut.has_holes:
            raise Unjudged("an uneven part of an array")
        distances = whole_cut.starts - part_cut.starts
        for part_number in np.unique(part_of_device):
            of_part = distances[part_of_device == part_number]
            if (of_part != of_part[:1]).any():
                raise Unjudged("devices of one part that hold different ones")
    return cuts


def own_collective(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
) -> Held | None:
    """The result of a collective in a body that is manual in some axes only, if it is
    one of the body itself; `None` if it stays within the devices of each part. Raises
    `Unjudged` for others.
    """
    if len(operands) > 1:
        raise Unjudged("a collective of several arrays of parts")
    (operand,) = operands
    shape = arrays_in(instruction.result)[0].shape
    groups = groups_of(instruction, instruction.opcode, context.devices)
    form = form_in(context, instruction, [operand], shape)
    value_numbers = candidates(context, form, instruction)
    if value_numbers:
        value_number = value_numbers[0]
        require_finished(operand, f"the body's own {instruction.opcode}")
        cuts = _cuts_after_collective(
            context=context,
            instruction=instruction,
            operand=operand,
            groups=groups,
            value_number=value_number,
        )
        return held_result(
            context, instruction, [operand], cuts, value_number=value_number
        )
    part_of_device = np.array(context.values.parts_by_value[operand.root])
    for members_by_group in groups:
        if (
            part_of_device[members_by_group] != part_of_device[members_by_group[:, :1]]
        ).any():
            raise Unjudged(
                "a collective between the parts of a `shard_map` that is none of its body"
            )
    return None


def _cuts_after_collective(
    context: Context,
    instruction: Instruction,
    operand: Held,
    groups: Groups,
    value_number: int,
) -> list[Cut | None]:
    """The cuts of the result of a body's own collective, the value `value_number`. Its
    devices hold the same elements of their parts, and all along the dimensions that it
    changes. `groups` has arrays of shape (groups, members).
    """
    node = context.values.nodes[value_number]
    part_shape = node.operands[0].shape
    shape = arrays_in(instruction.result)[0].shape
    changed_dims = numbers(instruction, "dimensions")
    cuts: list[Cut | None] = []
    for dim, (axis, size) in enumerate(zip(operand.axes, shape, strict=True)):
        cut = cut_of(axis)
        if cut is not None:
            for members_by_group in groups:
                starts = cut.starts[members_by_group]
                if (starts != starts[:, :1]).any():
                    raise Unjudged("a collective of different elements of parts")
        if dim in changed_dims:
            is_whole = cut is None or context.cuts.is_whole(cut, part_shape[dim])
            if not is_whole or operand.shape[dim] != part_shape[dim]:
                raise Unjudged("a collective along a dimension of parts that is cut")
            cut = context.cuts.whole(size)
        cuts.append(cut)
    return cuts
