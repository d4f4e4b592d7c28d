"""The attributes by which collectives are equal, with their replica groups in one form."""

import re

from .._groups import Groups, Numbering, groups_of
from .._hlo_text import HloModule, Instruction


# Metadata and channels do not tell two instructions apart.
_OWN = re.compile(
    r", (?:metadata|frontend_attributes|backend_config)=\{(?:[^{}\"]|\"(?:[^\"\\]|\\.)*\"|\{[^{}]*\})*\}"
    r"|, channel_id=\d+"
)
_GROUPS = re.compile(
    r"replica_groups=(?:\{(?:\{[\d,]*\},?)*\}|\[[^\]]*\]<=\[[^\]]*\](?:T\([\d,]*\))?|mesh\[[^{]*\{[^}]*\})"
)
_REDUCER = re.compile(r"to_apply=%?[\w.\-]+")


def without_names(instruction: Instruction) -> str:
    """The attributes of an instruction but those that only name it."""
    return _OWN.sub("", instruction.attributes)


class Details:
    """The attributes of a module's collectives, with the groups as lists whatever form the text has."""

    def __init__(self, module: HloModule):
        self.numbering = Numbering(1, module.partitions)
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
            self.known[key] = groups_of(instruction, instruction.opcode, self.numbering)
        return self.known[key]


def with_groups(instruction: Instruction, groups: Groups) -> Instruction:
    """The collective among other devices."""
    return instruction._replace(
        attributes=_GROUPS.sub(f"replica_groups={_listed(groups)}", instruction.attributes, count=1)
    )


def _listed(groups: Groups) -> str:
    rows = sorted(sorted(row) for own in groups for row in own.tolist())
    return "{" + ",".join("{" + ",".join(map(str, row)) + "}" for row in rows) + "}"
