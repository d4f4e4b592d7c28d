"""The reduce-scatters that the compiler for GPUs makes of all-reduces.

XLA's partitioner reduces a whole array and then lets each device slice its shard. XLA's
compiler for GPUs sends the shards alone: `reduce_scatter_creator.cc` in xla/service,
November 2026.
"""

import dataclasses
import math

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
    reduce-scatter stands where the slice was, under its name.
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
            if _is_own_shard(instruction, reader, partitions):
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


def _is_own_shard(reduction: Instruction, reader: Instruction, partitions: int) -> bool:
    """Whether an instruction slices the result of an all-reduce into one shard for each
    device of a replica group.
    """
    if reader.opcode != "dynamic-slice" or len(reduction.operands) != 1:
        return False
    groups = groups_of(reduction, reduction.opcode, partitions)
    # An array has a row for each replica group of one group_size.
    group_size = groups[0].shape[1]
    if len(groups) != 1 or group_size == 1:
        return False
    whole_elements = math.prod(array_of(reduction).shape)
    return whole_elements == math.prod(array_of(reader).shape) * group_size
