"""Computations of a parsed module as graphs: shapes, users, and rewriting by name."""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping

from .._hlo_text import HloModule, Instruction
from .._hlo_types import index_of, root_of


Computation = dict[str, Instruction]


def users_of(computation: Computation) -> dict[str, list[Instruction]]:
    """The users of each instruction, in the order of the text."""
    users: dict[str, list[Instruction]] = collections.defaultdict(list)
    for instruction in computation.values():
        for operand in dict.fromkeys(instruction.operands):
            users[operand].append(instruction)
    return users


def with_operands(instruction: Instruction, operands: tuple[str, ...]) -> Instruction:
    """The instruction with other operands."""
    return instruction._replace(operands=operands, inside=", ".join(f"%{name}" for name in operands))


def renamed(instruction: Instruction, names: Mapping[str, str]) -> Instruction:
    """The instruction with the operands that have new names under these."""
    if not any(operand in names for operand in instruction.operands):
        return instruction
    return with_operands(instruction, tuple(names.get(operand, operand) for operand in instruction.operands))


def in_each(module: HloModule, rewrite: Callable[[HloModule, str, Computation], Computation]) -> HloModule:
    """The module with each computation rewritten, callees first; a rewrite can replace others."""
    copied = dict(module.computations)
    made = dataclasses.replace(module, computations=copied)
    for name in (*copied,):
        copied[name] = rewrite(made, name, copied[name])
    return made


def loops_of(module: HloModule, computation: Computation) -> Iterator[tuple[Instruction, str, Computation]]:
    """The loops in a computation that begin with a tuple: each with the name of its body, and its body."""
    for instruction in (*computation.values(),):
        start = computation.get(instruction.operands[0]) if instruction.opcode == "while" else None
        if start is not None and start.opcode == "tuple":
            body = dict(instruction.called)["body"]
            if root_of(module.computations[body]).opcode == "tuple":
                yield instruction, body, module.computations[body]


def carried(body: Computation) -> dict[str, int]:
    """The `get-tuple-element`s of a body's parameter, each with its index."""
    parameters = {name for name, own in body.items() if own.opcode == "parameter"}
    return {
        name: index
        for name, own in body.items()
        if (index := index_of(own)) is not None and own.operands[0] in parameters
    }
