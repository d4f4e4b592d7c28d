"""Computations put in the place of their calls, as compilers do before anything that looks at users."""

import dataclasses
import re

from .._hlo_text import HloModule, Instruction
from .._hlo_types import index_of
from .graph import Computation, renamed, root_of


_RUNS = ("while", "conditional")


def inlined(module: HloModule) -> HloModule:
    """The module with the instructions of each called computation in the place of the call."""
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
    """Adds the instructions of a called computation, and returns the name of its result."""
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
    """A loop or conditional with bodies that no other has: what a pass does to one is not done to another."""
    if instruction.opcode not in _RUNS:
        return instruction
    attributes = instruction.attributes
    for _, name in instruction.called:
        copied = {key: _with_own_bodies(module, own, suffix) for key, own in module[name].items()}
        module[f"{name}.of.{suffix}"] = copied
        attributes = re.sub(rf"%?{re.escape(name)}(?![\w.\-])", f"%{name}.of.{suffix}", attributes)
    return instruction._replace(attributes=attributes)
