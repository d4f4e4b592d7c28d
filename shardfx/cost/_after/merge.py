"""Computations of HLO as graphs, and the merges that compilers make in them: of equal instructions, of gathers, of dead
instructions.
"""

import collections
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping

from .._collective import KINDS, Groups, groups_of
from .._hlo_text import HloModule, Instruction, index_of, root_of
from .._live.program import reached


Computation = dict[str, Instruction]

# Two instructions that differ only in metadata or channel are equal.
_OWN = re.compile(
    r", (?:metadata|frontend_attributes|backend_config)=\{(?:[^{}\"]|\"(?:[^\"\\]|\\.)*\"|\{[^{}]*\})*\}"
    r"|, channel_id=\d+"
)
_GROUPS = re.compile(
    r"replica_groups=(?:\{(?:\{[\d,]*\},?)*\}|\[[^\]]*\]<=\[[^\]]*\](?:T\([\d,]*\))?|mesh\[[^{]*\{[^}]*\})"
)
_REDUCER = re.compile(r"to_apply=%?[\w.\-]+")


def users_of(computation: Computation) -> dict[str, list[Instruction]]:
    """The instructions that read each instruction, in the order of the text."""
    users: dict[str, list[Instruction]] = collections.defaultdict(list)
    for instruction in computation.values():
        for operand in dict.fromkeys(instruction.operands):
            users[operand].append(instruction)
    return users


def with_operands(instruction: Instruction, operands: tuple[str, ...]) -> Instruction:
    """A copy of an instruction with other operands."""
    return instruction._replace(operands=operands, inside=", ".join(f"%{name}" for name in operands))


def renamed(instruction: Instruction, names: Mapping[str, str]) -> Instruction:
    """The instruction with each operand in `names` replaced by its new name."""
    if names.keys().isdisjoint(instruction.operands):
        return instruction
    return with_operands(instruction, tuple(names.get(operand, operand) for operand in instruction.operands))


def in_each(module: HloModule, rewrite: Callable[[HloModule, str, Computation], Computation]) -> HloModule:
    """The module with `rewrite` applied to each computation, callees first. A rewrite may replace other computations
    too.
    """
    copied = dict(module.computations)
    made = dataclasses.replace(module, computations=copied)
    for name in (*copied,):
        copied[name] = rewrite(made, name, copied[name])
    return made


def loops_of(module: HloModule, computation: Computation) -> Iterator[tuple[Instruction, str, Computation]]:
    """The loops of a computation whose initial value is a tuple, each with its body's name and its body."""
    for instruction in (*computation.values(),):
        start = computation.get(instruction.operands[0]) if instruction.opcode == "while" else None
        if start is not None and start.opcode == "tuple":
            body = dict(instruction.called)["body"]
            if root_of(module.computations[body]).opcode == "tuple":
                yield instruction, body, module.computations[body]


def carried(body: Computation) -> dict[str, int]:
    """The index of each `get-tuple-element` of the body's parameter, by instruction name."""
    parameters = {name for name, own in body.items() if own.opcode == "parameter"}
    return {
        name: index
        for name, own in body.items()
        if (index := index_of(own)) is not None and own.operands[0] in parameters
    }


def without_names(instruction: Instruction) -> str:
    """The attributes of an instruction without its metadata, channel and other names."""
    return _OWN.sub("", instruction.attributes)


class Details:
    """The attributes of a module's collectives, with replica groups written as lists whatever form the text has."""

    def __init__(self, module: HloModule):
        self.devices = module.partitions
        self.known: dict[str, Groups] = {}

    def of(self, instruction: Instruction) -> str:
        """The attributes in which two different collectives differ."""
        details = without_names(instruction)
        found = _GROUPS.search(details)
        return details if found is None else details.replace(found[0], _listed(self.groups(instruction)))

    def of_sum(self, instruction: Instruction) -> str:
        """The attributes in which two different reductions differ, without the name of the computation that adds."""
        return _REDUCER.sub("", self.of(instruction))

    def groups(self, instruction: Instruction) -> Groups:
        """The replica groups of a collective."""
        found = _GROUPS.search(instruction.attributes)
        key = found[0] if found else instruction.name
        if key not in self.known:
            self.known[key] = groups_of(instruction, instruction.opcode, self.devices)
        return self.known[key]


def with_groups(instruction: Instruction, groups: Groups) -> Instruction:
    """The collective with other replica groups."""
    return instruction._replace(
        attributes=_GROUPS.sub(f"replica_groups={_listed(groups)}", instruction.attributes, count=1)
    )


def _listed(groups: Groups) -> str:
    rows = sorted(sorted(row) for own in groups for row in own.tolist())
    return "{" + ",".join("{" + ",".join(map(str, row)) + "}" for row in rows) + "}"


_ACTS = frozenset("parameter send recv infeed outfeed custom-call rng while conditional call after-all".split())
# These have effects beside their results.
_STAYS = frozenset(
    "parameter send send-done recv recv-done infeed outfeed custom-call rng-get-and-update-state after-all "
    "conditional while call".split()
)
_GATHERS = ("all-gather", "collective-permute")
# Equal gathers are not merged if the first and all its users are more than this many operations further from the end
# than the second.
_FAR = 100


def without_equals(module: HloModule) -> HloModule:
    """The module where instructions with equal opcodes, operands and attributes are merged. Collectives stay as they
    are.
    """
    return in_each(module, lambda _, name, own: _merged(own, _is_local, lambda first, other: True, without_names))


def gathered_once(module: HloModule) -> HloModule:
    """The module where equal gathers whose users are near each other are merged, and a far user has a
    gather of its own.
    """
    details = Details(module)
    return in_each(module, lambda _, name, own: _near_merged(_each_own(own), details))


def _each_own(computation: Computation) -> Computation:
    """The computation with one gather for each of its users, as the TPU's partitioner makes them."""
    users = users_of(computation)
    made: Computation = {}
    for name, own in computation.items():
        shared = [operand for operand in dict.fromkeys(own.operands) if _is_shared(computation, users, operand, own)]
        names = {operand: f"{operand}.for.{name}" for operand in shared}
        made |= {new: computation[operand]._replace(name=new) for operand, new in names.items()}
        made[name] = renamed(own, names)
    return made


def _is_shared(
    computation: Computation, users: Mapping[str, list[Instruction]], operand: str, user: Instruction
) -> bool:
    """Whether an operand is an all-gather whose first user is another instruction."""
    is_gather = operand in computation and computation[operand].opcode == "all-gather"
    return is_gather and users[operand][0].name != user.name


def _near_merged(computation: Computation, details: Details) -> Computation:
    heights, users = _heights(computation), users_of(computation)
    lowest = {name: min([heights[name], *(heights[user.name] for user in users[name])]) for name in computation}

    def is_near(first: Instruction, other: Instruction) -> bool:
        if first.opcode != "collective-permute" and lowest[first.name] > heights[other.name] + _FAR:
            return False
        lowest[first.name] = min(lowest[first.name], lowest[other.name])
        return True

    return _merged(computation, lambda one: one.opcode in _GATHERS, is_near, details.of)


def _is_local(instruction: Instruction) -> bool:
    return instruction.opcode not in KINDS and instruction.opcode not in _ACTS


def _merged(
    computation: Computation,
    is_merged: Callable[[Instruction], bool],
    is_near: Callable[[Instruction, Instruction], bool],
    details: Callable[[Instruction], str],
) -> Computation:
    kept: Computation = {}
    names: dict[str, str] = {}
    equals: dict[tuple[str, ...], list[Instruction]] = {}
    for name, own in computation.items():
        made = renamed(own, names)
        if is_merged(made) and not made.is_root:
            others = equals.setdefault((made.opcode, made.result, made.inside, details(made)), [])
            if near := next((other for other in others if is_near(other, made)), None):
                names[name] = near.name
                continue
            others.append(made)
        kept[name] = made
    return kept


def _heights(computation: Computation) -> dict[str, int]:
    """The longest distance from each instruction to one without users, as XLA counts it."""
    users = users_of(computation)
    heights: dict[str, int] = {}
    for name in reversed(computation):
        height = 0
        for user in users[name]:
            height = max(height, heights[user.name]) + 1
        heights[name] = height
    return heights


def without_dead(module: HloModule) -> HloModule:
    """The module without the instructions whose results nothing reads."""
    return in_each(module, lambda _, name, own: _living(own))


def _living(computation: Computation) -> Computation:
    kept = {root_of(computation).name} | {own.name for own in computation.values() if own.opcode in _STAYS}
    kept = {*reached(kept, lambda name: filter(computation.__contains__, computation[name].operands))}
    return {name: own for name, own in computation.items() if name in kept}


_RUNS = ("while", "conditional")


def inlined(module: HloModule) -> HloModule:
    """The module with each call replaced by the instructions of the called computation."""
    called = {_target(own) for each in module.computations.values() for own in each.values() if own.opcode == "call"}
    made: dict[str, Computation] = {}
    for name, own in module.computations.items():
        made[name] = _inlined(made, own)
    return dataclasses.replace(module, computations={name: own for name, own in made.items() if name not in called})


def _target(call: Instruction) -> str:
    return dict(call.called)["to_apply"]


def _inlined(module: dict[str, Computation], computation: Computation) -> Computation:
    made: Computation = {}
    names: dict[str, str] = {}
    for name, own in computation.items():
        index = index_of(own)
        if own.opcode == "call":
            names[name] = _put(module, made, own, names)
        elif index is not None and own.operands[0] in names and made[names[own.operands[0]]].opcode == "tuple":
            names[name] = made[names[own.operands[0]]].operands[index]
        else:
            made[name] = renamed(own, names)
            continue
        if own.is_root:
            made[names[name]] = made[names[name]]._replace(is_root=True)
    return made


def _put(module: dict[str, Computation], made: Computation, call: Instruction, names: dict[str, str]) -> str:
    """Adds the instructions of a called computation to `made`, and returns the name of its result."""
    inner: dict[str, str] = {}
    body = module[_target(call)]
    for one in body.values():
        if one.opcode == "parameter":
            operand = call.operands[int(one.inside)]
            inner[one.name] = names.get(operand, operand)
        else:
            inner[one.name] = f"{one.name}.of.{call.name}"
            own = _with_own_bodies(module, renamed(one, inner), call.name)
            made[inner[one.name]] = own._replace(name=inner[one.name], is_root=False)
    return inner[root_of(body).name]


def _with_own_bodies(module: dict[str, Computation], instruction: Instruction, suffix: str) -> Instruction:
    """A loop or conditional with copies of its bodies, so that a pass can change them for this instruction only."""
    if instruction.opcode not in _RUNS:
        return instruction
    attributes = instruction.attributes
    for _, name in instruction.called:
        copied = {key: _with_own_bodies(module, own, suffix) for key, own in module[name].items()}
        module[f"{name}.of.{suffix}"] = copied
        attributes = re.sub(rf"%?{re.escape(name)}(?![\w.\-])", f"%{name}.of.{suffix}", attributes)
    return instruction._replace(attributes=attributes)
