"""Transfers between the hosts of TPU slices, which a program writes as sends and receives."""

import re
from fractions import Fraction

import numpy as np

from .._ground.errors import ProgramError
from .hlo_text import Instruction


# `..._xla_megascale_target={{100000->200000},...},...`: a list of pairs or of groups of devices, named by
# slice * 100000 + device; or `"{1,2}x{0:15}"`, slices x devices.
_TARGET = re.compile(r'_xla_megascale_target="?(\{.*?\})"?,_xla_megascale_transfer_type')
_ARRAY = re.compile(r"\b([a-z]+)(\d*)\[([\d,]*)\]")
_SLICE = 100_000


def is_transfer(instruction: Instruction) -> bool:
    """Whether an instruction receives from another slice; what is sent there is received, and counts there."""
    return instruction.opcode == "recv" and _TARGET.search(instruction.attributes) is not None


def slice_count(instruction: Instruction) -> int:
    """Over how many slices a transfer goes."""
    target = _target(instruction)
    if "}x{" in target:
        return target.partition("}")[0].count(",") + 1
    return len({int(device) // _SLICE for device in re.findall(r"\d+", target)})


def transfer_bytes(instruction: Instruction, devices: int, *, by_slice: bool) -> Fraction:
    """What enters a device in one transfer, the mean over devices; `by_slice` leaves out its own slice's."""
    target, size = _target(instruction), _received_bytes(instruction)
    unit = _SLICE if by_slice else 1
    if "->" in target:
        pairs = re.findall(r"(\d+)->(\d+)", target)
        return size * sum(int(source) // unit != int(goal) // unit for source, goal in pairs) / devices
    if "}x{" in target:
        return size * (slice_count(instruction) - 1) / slice_count(instruction)
    members = np.array([list(map(int, group.split(","))) for group in target[2:-2].split("},{")]) // unit
    others = Fraction(int((members[:, :, None] != members[:, None, :]).sum()), members.size)
    return size * others / members.shape[1]


def _target(instruction: Instruction) -> str:
    found = _TARGET.search(instruction.attributes)
    if found is None:
        raise ProgramError(f"a transfer between slices does not say whither: {instruction.text:.300}")
    return found[1]


def _received_bytes(instruction: Instruction) -> Fraction:
    kind, width, dims = _ARRAY.findall(instruction.result)[0]
    count = 1
    for size in dims.split(","):
        count *= int(size or 1)
    return Fraction((8 if kind == "pred" else int(width)) * count, 8)
