"""All-reduces of which every device keeps a part of its own: reduce-scatters on TPUs, in most groups."""

import math
from collections.abc import Mapping

from .._groups import Numbering, groups_of
from .._hlo_text import HloModule, Instruction
from .._hlo_types import array_of
from .graph import Computation, in_each, users_of


# All chips of these slices reduce along both dimensions at once, and that is not scattered: 4x4, 8x8 and 16x16.
_SQUARES = (16, 64, 256)
# What a tile holds.
_ROWS, _LANES = 8, 128


def scattered(module: HloModule) -> HloModule:
    """The module with an all-reduce that only a slice for each device uses as one reduce-scatter, where TPUs do so."""
    numbering = Numbering(1, module.partitions)
    return in_each(module, lambda _, name, own: _scattered(own, numbering, is_tpu=True))


def always_scattered(module: HloModule) -> HloModule:
    """The module with every all-reduce that only a slice for each device uses as one reduce-scatter."""
    numbering = Numbering(1, module.partitions)
    return in_each(module, lambda _, name, own: _scattered(own, numbering, is_tpu=False))


def _scattered(computation: Computation, numbering: Numbering, *, is_tpu: bool) -> Computation:
    users = users_of(computation)
    slices: dict[str, Instruction] = {}
    for name, own in computation.items():
        if own.opcode == "all-reduce" and len(own.operands) == 1 and len(users[name]) == 1:
            (part,) = users[name]
            if part.opcode == "dynamic-slice" and _is_part(
                own, part, numbering, _is_turned(users, part) if is_tpu else None
            ):
                slices[part.name] = own
    whole = {own.name for own in slices.values()}
    return {
        name: _one(slices[name], own) if name in slices else own
        for name, own in computation.items()
        if name not in whole
    }


def _is_turned(users: Mapping[str, list[Instruction]], part: Instruction) -> bool:
    return bool(users[part.name]) and all(user.opcode == "transpose" for user in users[part.name])


def _is_part(reduction: Instruction, part: Instruction, numbering: Numbering, is_turned: bool | None) -> bool:
    """Whether each device of a group keeps its own part, and the compiler scatters it.

    `is_turned` is about TPUs: whether the part is only read transposed; `None` stands for other platforms.
    """
    groups = groups_of(reduction, "all-reduce", numbering)
    size = groups[0].shape[1]
    if len(groups) != 1 or size == 1:
        return False
    if is_turned is not None and size in _SQUARES and size == numbering.size:
        return False
    before, after = (array_of(one).shape for one in (reduction, part))
    is_equal = math.prod(before) == math.prod(after) * size
    return is_equal and (is_turned is None or _fills_tiles(before, after, is_turned=is_turned))


def _fills_tiles(before: tuple[int, ...], after: tuple[int, ...], *, is_turned: bool) -> bool:
    """Whether a slice takes whole tiles of 8 rows of 128 numbers in a layout that the compiler may choose."""
    cut = next(dim for dim, (old, new) in enumerate(zip(before, after, strict=True)) if old != new)
    if cut < len(before) - 2:
        return math.prod(before[:cut]) == 1  # one piece, whatever its tiles
    lanes = _LANES if len(before) < 3 else _LANES // 2
    is_row = cut < len(before) - 1 or is_turned or any(size % lanes == 0 for size in before[:-1])
    is_wide = cut == len(before) - 1 and after[cut] % _LANES == 0
    return len(before) > 1 and (is_wide or (is_row and after[cut] % _ROWS == 0))


def _one(reduction: Instruction, part: Instruction) -> Instruction:
    return reduction._replace(name=part.name, result=part.result, opcode="reduce-scatter", is_root=part.is_root)
