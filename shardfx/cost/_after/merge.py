"""Computations of HLO as graphs, and the merge of equal all-gathers that the TPU's
compiler makes in them.

The merge follows `xla/service/spmd/schedule_aware_collective_ops_cse.cc`.
"""

import functools as ft
import re
from collections.abc import Mapping, Sequence

from ..._step import KINDS, Groups, HloModule, Instruction, groups_of
from .._live.narrow import narrow_values
from .._live.program import Uses, program_of


# The instructions of a computation, by name.
Computation = dict[str, Instruction]

# Two instructions that differ only in metadata or channel are equal.
_OWN = re.compile(
    r", (?:metadata|frontend_attributes|backend_config)=\{(?:[^{}\"]|\"(?:[^\"\\]|\\.)*\"|\{[^{}]*\})*\}"
    r"|, channel_id=\d+"
)
_GROUPS = re.compile(
    r"replica_groups=(?:\{(?:\{[\d,]*\},?)*\}|\[[^\]]*\]<=\[[^\]]*\](?:T\([\d,]*\))?|mesh\[[^{]*\{[^}]*\})"
)


def users_of(computation: Computation) -> dict[str, list[Instruction]]:
    """For the name of each instruction, the instructions that read its result, in the
    order of the text.
    """
    users: dict[str, list[Instruction]] = {name: [] for name in computation}
    for instruction in computation.values():
        for operand in dict.fromkeys(instruction.operands):
            users[operand].append(instruction)
    return users


def with_operands(instruction: Instruction, operands: Sequence[str]) -> Instruction:
    """A copy of `instruction` that reads the results of the instructions named in
    `operands`.
    """
    return instruction._replace(
        operands=(*operands,), inside=", ".join(f"%{name}" for name in operands)
    )


def renamed(instruction: Instruction, names: Mapping[str, str]) -> Instruction:
    """A copy of `instruction` with each operand that is a key of `names` replaced by
    the name in `names`.
    """
    if names.keys().isdisjoint(instruction.operands):
        return instruction
    return with_operands(
        instruction, [names.get(operand, operand) for operand in instruction.operands]
    )


class Rewritten:
    """An HLO module that a pass rewrites, one computation after another; a computation
    comes after those that it calls. The functions of a pass get it as `known`, with the
    next computation. It also caches the replica groups.
    """

    def __init__(self, module: HloModule):
        self.module = module
        self.known: dict[str, Groups] = {}

    def details(self, instruction: Instruction) -> str:
        """The attributes of a collective without metadata and channel, and with replica
        groups as lists of devices. XLA may merge two collectives if these attributes,
        their opcodes and their operands are equal.
        """
        details = _OWN.sub("", instruction.attributes)
        found = _GROUPS.search(details)
        return (
            details
            if found is None
            else details.replace(found[0], _listed(self.groups(instruction)))
        )

    def groups(self, instruction: Instruction) -> Groups:
        found = _GROUPS.search(instruction.attributes)
        key = found[0] if found else instruction.name
        if key not in self.known:
            self.known[key] = groups_of(
                instruction, instruction.opcode, self.module.partitions
            )
        return self.known[key]

    @ft.cached_property
    def narrow(self) -> set[int]:
        """The `id(...)` of each collective instruction that can send bfloat16 instead
        of float32: in all calls of its computation, only matrix products at the default
        precision read its result.
        """
        program = program_of(self.module)
        values = narrow_values(program)
        sent = [op for op in Uses(program).ops if op.opcode in KINDS]
        wide = {id(op.instruction) for op in sent if not values.issuperset(op.makes)}
        return {id(op.instruction) for op in sent} - wide


def with_groups(instruction: Instruction, groups: Groups) -> Instruction:
    return instruction._replace(
        attributes=_GROUPS.sub(_listed(groups), instruction.attributes, count=1)
    )


def _listed(groups: Groups) -> str:
    rows = sorted(sorted(row) for own in groups for row in own.tolist())
    return (
        "replica_groups={"
        + ",".join("{" + ",".join(map(str, row)) + "}" for row in rows)
        + "}"
    )


# The height of an instruction is the longest distance to one without users. Two equal
# all-gathers are not merged if the heights of the first and of all its users exceed the
# height of the second by more than this.
_FAR = 100


def gathered_once(known: Rewritten, computation: Computation) -> Computation:
    """A copy of `computation` in which equal all-gathers are merged into the first of
    them, as XLA merges them. Two all-gathers are merged only if the instructions that
    read their results are close to each other. Equal permutes are always merged.
    """
    computation = _gather_for_each_user(computation)
    users = users_of(computation)
    # The height of each instruction, as XLA counts it.
    heights: dict[str, int] = {}
    for name in reversed(computation):
        heights[name] = max((heights[user.name] + 1 for user in users[name]), default=0)
    lowest = {
        name: min([height, *(heights[user.name] for user in users[name])])
        for name, height in heights.items()
    }
    kept: Computation = {}
    names: dict[str, str] = {}
    equals: dict[tuple[str, ...], list[str]] = {}
    for name, own in computation.items():
        made = renamed(own, names)
        if made.opcode in ("all-gather", "collective-permute") and not made.is_root:
            others = equals.setdefault(
                (made.opcode, made.result, made.inside, known.details(made)), []
            )
            most = heights[name] + (
                _FAR if made.opcode == "all-gather" else len(computation)
            )
            if near := next((other for other in others if lowest[other] <= most), None):
                lowest[near] = min(lowest[near], lowest[name])
                names[name] = near
                continue
            others.append(name)
        kept[name] = made
    return kept


def _gather_for_each_user(computation: Computation) -> Computation:
    """A copy of `computation` in which each reader of an all-gather has an all-gather
    of its own. The TPU's partitioner makes all-gathers in this way.
    """
    users = users_of(computation)
    made: Computation = {}
    for name, own in computation.items():
        names: dict[str, str] = {}
        for operand in dict.fromkeys(own.operands):
            if (
                computation[operand].opcode == "all-gather"
                and users[operand][0].name != name
            ):
                names[operand] = f"{operand}.for.{name}"
                made[names[operand]] = computation[operand]._replace(
                    name=names[operand]
                )
        made[name] = renamed(own, names)
    return made
