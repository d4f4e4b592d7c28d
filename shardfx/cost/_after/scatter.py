"""All-reduces of which every device keeps its own part, and gathers of parts too small for a TPU to gather."""

import math
import re
from collections.abc import Mapping

from .._groups import Numbering, groups_of
from .._hlo_text import HloModule, Instruction
from .._hlo_types import Array, array_of
from .graph import Computation, in_each, users_of


# All chips of these slices reduce along both dimensions at once, and that is not scattered: 4x4, 8x8 and 16x16.
_SQUARES = (16, 64, 256)
_NUMBER = re.compile(r"\d+")
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


def summed_parts(module: HloModule) -> HloModule:
    """The module with gathers of one-dimensional parts that fill no lanes as all-reduces of parts among zeros."""
    return in_each(module, lambda _, name, own: {key: _summed(one, own) for key, one in own.items()})


def _summed(gather: Instruction, computation: Computation) -> Instruction:
    part = math.prod(array_of(computation[gather.operands[0]]).shape) if gather.opcode == "all-gather" else 0
    is_row = part % _LANES and max(array_of(gather).shape) == math.prod(array_of(gather).shape)
    return gather._replace(opcode="all-reduce") if is_row else gather


def _scattered(computation: Computation, numbering: Numbering, *, is_tpu: bool) -> Computation:
    users = users_of(computation)
    slices: dict[str, Instruction] = {}
    for name, own in computation.items():
        if own.opcode == "all-reduce" and len(own.operands) == 1 and len(users[name]) == 1:
            (part,) = users[name]
            order = _order(users, part) if is_tpu else None
            if part.opcode == "dynamic-slice" and _is_part(own, part, numbering, order):
                slices[part.name] = own
    whole = {own.name for own in slices.values()}
    return {
        name: _one(slices[name], own) if name in slices else own
        for name, own in computation.items()
        if name not in whole
    }


def _order(users: Mapping[str, list[Instruction]], part: Instruction) -> tuple[int, ...]:
    """The order of a slice's dimensions: that of the transposes which alone read it, or its own."""
    orders = {own.attributes.partition("}")[0] if own.opcode == "transpose" else "" for own in users[part.name]}
    dims = tuple(map(int, _NUMBER.findall(orders.pop()))) if len(orders) == 1 else ()
    return dims or tuple(range(len(array_of(part).shape)))


def _is_part(reduction: Instruction, part: Instruction, numbering: Numbering, order: tuple[int, ...] | None) -> bool:
    """Whether each device of a group keeps its own part, and the compiler scatters it.

    `order` is about TPUs: of the dimensions as they lie in memory; `None` stands for other platforms.
    """
    groups = groups_of(reduction, "all-reduce", numbering)
    size = groups[0].shape[1]
    if len(groups) != 1 or size == 1:
        return False
    if order is not None and size in _SQUARES and size == numbering.size:
        return False
    dtype, before = array_of(reduction)
    after = array_of(part).shape
    is_equal = math.prod(before) == math.prod(after) * size
    if order is None or not is_equal:
        return is_equal
    return _fills_tiles(dtype, tuple(before[dim] for dim in order), tuple(after[dim] for dim in order))


def _fills_tiles(dtype: str, before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Whether a slice takes whole tiles in the layout that the compiler chooses: that with the least padding.

    By 58 programs of one product each, in float32 and bfloat16, and of two to four dimensions.
    """
    cut = next(dim for dim, (old, new) in enumerate(zip(before, after, strict=True)) if old != new)
    if cut < len(before) - 2:
        return math.prod(before[:cut]) == 1  # one piece, whatever its tiles
    if len(before) < 2:
        return False
    packed = 32 // Array(dtype, ()).bits
    rows, lanes = after[-2:]
    if cut == len(before) - 2 or _padded(lanes, rows) < _padded(rows, lanes):
        return after[cut] % (_ROWS * packed) == 0
    return after[cut] % (_LANES * packed) == 0


def _padded(rows: int, lanes: int) -> int:
    return -(-rows // _ROWS) * -(-lanes // _LANES)


def _one(reduction: Instruction, part: Instruction) -> Instruction:
    return reduction._replace(name=part.name, result=part.result, opcode="reduce-scatter", is_root=part.is_root)
