"""Transfers between the hosts of TPU slices, which a program writes as sends and receives."""

import itertools
import re

import numpy as np

from .._ground.errors import ProgramError
from ._collective import Collective, sent_by
from ._hlo_text import HloModule, Instruction
from ._where import SLICE, Where


# `..._xla_megascale_target={{100000->200000},...},...`: a list of pairs or of groups of devices, named by
# slice * 100000 + device; or `"{1,2}x{0:15}"`, slices x devices, of which those with one number are a group.
_TARGET = re.compile(r'_xla_megascale_target="?(\{.*?\})"?,_xla_megascale_transfer_type="(\w+)"')
_KINDS = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
_PRODUCT = re.compile(r"^\{([\d,:]+)\}x\{([\d,:]+)\}$")


def is_transfer(instruction: Instruction) -> bool:
    """Whether an instruction receives from another slice; what is sent there is received, and counts there."""
    return instruction.opcode == "recv" and "_xla_megascale_target=" in instruction.attributes


def slices_of(module: HloModule) -> int:
    """Over how many slices the transfers of a program go; 1 if it has none."""
    transfers = [
        instruction
        for computation in module.computations.values()
        for instruction in computation.values()
        if is_transfer(instruction)
    ]
    names = {name // SLICE for one in transfers for row in _target(one)[0] for name in row}
    return max(1, max(names, default=1) - min(names, default=1) + 1)


def transfer_of(instruction: Instruction, where: Where) -> Collective:
    """What a transfer does, as a collective between all devices that take part."""
    target, kind = _target(instruction)
    sent = sent_by(instruction, instruction.result)[0]
    numbers = where.numbers(sorted({name for row in target for name in row}))
    rows = [[numbers[name] for name in row] for row in target]
    counts = dict.fromkeys(map(len, rows))
    groups = tuple(np.array([row for row in rows if len(row) == count]) for count in counts)
    return Collective(kind, (sent,), (sent.bytes,), groups)


def _target(instruction: Instruction) -> tuple[list[list[int]], str]:
    """The groups of devices that exchange, by the names that the hosts give them, and what they do."""
    found = _TARGET.search(instruction.attributes)
    if found is None or found[2] not in _KINDS:
        raise ProgramError(f"a transfer between slices does not say what goes whither: {instruction.text:.300}")
    if product := _PRODUCT.match(found[1]):
        slices, devices = (_listed(part) for part in product.groups())
        return [[slice_ * SLICE + device for slice_ in slices] for device in devices], _KINDS[found[2]]
    rows = [[int(name) for name in re.findall(r"\d+", row)] for row in found[1][1:-1].split("},{")]
    return rows, _KINDS[found[2]]


def _listed(text: str) -> list[int]:
    """The numbers in `0:3,8`: 0, 1, 2, 3 and 8."""
    ends = [[int(number) for number in part.split(":")] for part in text.split(",")]
    return list(itertools.chain.from_iterable(range(own[0], own[-1] + 1) for own in ends))
