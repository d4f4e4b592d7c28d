"""Computations of a parsed module as graphs: users, rewriting by name, and what tells collectives apart."""

import collections
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping

from .._collective import Groups, groups_of
from .._hlo_text import HloModule, Instruction
from .._hlo_types import index_of, root_of


Computation = dict[str, Instruction]

# Metadata and channels do not tell two instructions apart.
_OWN = re.compile(
    r", (?:metadata|frontend_attributes|backend_config)=\{(?:[^{}\"]|\"(?:[^\"\\]|\\.)*\"|\{[^{}]*\})*\}"
    r"|, channel_id=\d+"
)
_GROUPS = re.compile(
    r"replica_groups=(?:\{(?:\{[\d,]*\},?)*\}|\[[^\]]*\]<=\[[^\]]*\](?:T\([\d,]*\))?|mesh\[[^{]*\{[^}]*\})"
)
_REDUCER = re.compile(r"to_apply=%?[\w.\-]+")


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
    if names.keys().isdisjoint(instruction.operands):
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


def without_names(instruction: Instruction) -> str:
    """The attributes of an instruction but those that only name it."""
    return _OWN.sub("", instruction.attributes)


class Details:
    """The attributes of a module's collectives, with the groups as lists whatever form the text has."""

    def __init__(self, module: HloModule):
        self.devices = module.partitions
        self.known: dict[str, Groups] = {}

    def of(self, instruction: Instruction) -> str:
        """The attributes that tell a collective from another."""
        details = without_names(instruction)
        found = _GROUPS.search(details)
        return details if found is None else details.replace(found[0], _listed(self.groups(instruction)))

    def of_sum(self, instruction: Instruction) -> str:
        """The attributes that tell a reduction from another, but for the name of what adds."""
        return _REDUCER.sub("", self.of(instruction))

    def groups(self, instruction: Instruction) -> Groups:
        """The devices that exchange with each other."""
        found = _GROUPS.search(instruction.attributes)
        key = found[0] if found else instruction.name
        if key not in self.known:
            self.known[key] = groups_of(instruction, instruction.opcode, self.devices)
        return self.known[key]


def with_groups(instruction: Instruction, groups: Groups) -> Instruction:
    """The collective among other devices."""
    return instruction._replace(
        attributes=_GROUPS.sub(f"replica_groups={_listed(groups)}", instruction.attributes, count=1)
    )


def _listed(groups: Groups) -> str:
    rows = sorted(sorted(row) for own in groups for row in own.tolist())
    return "{" + ",".join("{" + ",".join(map(str, row)) + "}" for row in rows) + "}"
