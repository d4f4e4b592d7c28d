"""The reduce-scatters that the compiler for GPUs makes of all-reduces.

XLA's partitioner reduces a whole array and then lets each device slice its shard. XLA's
compiler for GPUs sends the shards alone: `reduce_scatter_creator.cc` and
`collective_opt_utils.cc` in xla/service, November 2026.
"""

import dataclasses
import math
import re

import numpy as np

from .._ground import opcodes
from .._step import HloModule, Instruction, array_of, groups_of


def with_reduce_scatters(module: HloModule) -> HloModule:
    """The module with a reduce-scatter in place of each all-reduce whose result only a
    slice of the device's own shard reads.
    """
    computations = {
        name: _with_reduce_scatters(computation, module.partitions)
        for name, computation in module.computations.items()
    }
    return dataclasses.replace(module, computations=computations)


def _with_reduce_scatters(
    computation: dict[str, Instruction],
    partitions: int,
) -> dict[str, Instruction]:
    """The instructions of one computation by name, each such all-reduce replaced: the
    reduce-scatter stands where the slice was, under its name. `partitions` is the
    number of devices.
    """
    readers: dict[str, list[Instruction]] = {name: [] for name in computation}
    for instruction in computation.values():
        for operand in dict.fromkeys(instruction.operands):
            readers[operand].append(instruction)

    # The all-reduce that each slice reads, by the slice's name.
    reductions: dict[str, Instruction] = {}
    for name, instruction in computation.items():
        if instruction.opcode == "all-reduce" and len(readers[name]) == 1:
            (reader,) = readers[name]
            if _is_own_shard(instruction, reader, computation, partitions):
                reductions[reader.name] = instruction

    dropped = {reduction.name for reduction in reductions.values()}
    instructions = {
        name: instruction
        for name, instruction in computation.items()
        if name not in dropped
    }
    for name, reduction in reductions.items():
        shard = computation[name]
        instructions[name] = reduction._replace(
            name=name,
            result=shard.result,
            opcode="reduce-scatter",
            is_root=shard.is_root,
        )
    return instructions


def _is_own_shard(
    reduction: Instruction,
    reader: Instruction,
    computation: dict[str, Instruction],
    partitions: int,
) -> bool:
    """Whether an instruction of `computation` slices the result of an all-reduce into
    one shard for each device of a replica group, in the group's order. `partitions` is
    the number of devices.
    """
    if reader.opcode != "dynamic-slice" or len(reduction.operands) != 1:
        return False
    groups = groups_of(reduction, reduction.opcode, partitions)
    # An array has a row for each replica group of one group_size.
    group_size = groups[0].shape[1]
    if len(groups) != 1 or group_size == 1:
        return False
    whole_shape = array_of(reduction).shape
    shard_shape = array_of(reader).shape
    if math.prod(whole_shape) != math.prod(shard_shape) * group_size:
        return False

    dims = range(len(whole_shape))
    split_dims = [dim for dim in dims if whole_shape[dim] != shard_shape[dim]]
    # The pass knows slices of one dimension, or of two that are neighbours.
    if split_dims[-1] - split_dims[0] > 1:
        return False

    shard_numbers = np.zeros(partitions)
    for dim in split_dims:
        shard_size = shard_shape[dim]
        start = reader.operands[1 + dim]
        start_by_device = _numbers(start, computation, partitions)
        if start_by_device is None:
            return False
        shard_count = whole_shape[dim] // shard_size
        shard_numbers = shard_numbers * shard_count + start_by_device / shard_size
    # A row of one group holds its devices in the order of their shards.
    is_right = shard_numbers[groups[0]] == np.arange(group_size)
    return bool(np.all(is_right | np.isnan(shard_numbers[groups[0]])))


_DIGITS = re.compile(r"-?\d+")
# Operations that pass a number on as it is.
_UNCHANGED = opcodes.RESHAPES | {"copy", "convert"}


def _numbers(
    name: str,
    computation: dict[str, Instruction],
    partitions: int,
) -> np.ndarray | None:
    """What an instruction computes of constants and the partition id alone: for the
    partition id and what follows from it, a number for each device; for constants,
    their numbers. `None` for all that XLA's pass does not read, such as an index that
    is an argument of the step.

    XLA leaves out the numbers of long tables, which are NaN here. Only the partitioner
    looks up a number for each device, so they count as right. `name` is the
    instruction's name in `computation`, and `partitions` the number of devices.
    """
    instruction = computation[name]
    opcode = instruction.opcode
    if opcode == "partition-id":
        return np.arange(partitions)
    if opcode in ("constant", "iota"):
        return _constant(instruction)
    if opcode not in (*_UNCHANGED, "multiply", "clamp", "dynamic-slice"):
        return None

    operands = []
    for operand in instruction.operands:
        numbers = _numbers(operand, computation, partitions)
        if numbers is None:
            return None
        operands.append(numbers)
    if opcode == "multiply":
        return np.multiply(*operands)
    if opcode == "clamp":
        least, numbers, most = operands
        return np.clip(numbers, least, most)
    if opcode == "dynamic-slice":
        # A lookup of one number for each device in a table.
        table, index = operands
        if np.any(np.isnan(index)):
            return np.full(partitions, math.nan)
        return np.take(table, index.astype(np.int64), mode="clip")
    (numbers,) = operands
    return numbers


def _constant(instruction: Instruction) -> np.ndarray | None:
    """The numbers of a constant or an iota, NaN if the text leaves them out; `None`
    unless it is an integer or a table of integers.
    """
    array = array_of(instruction)
    if array.dtype[0] not in "su" or len(array.shape) > 1:
        return None
    if instruction.opcode == "iota":
        return np.arange(math.prod(array.shape))
    if "..." in instruction.inside:
        return np.full(array.shape, math.nan)
    digits = _DIGITS.findall(instruction.inside)
    return np.array(digits, np.float64).reshape(array.shape)
