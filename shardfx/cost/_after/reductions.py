"""Merges of all-reduces that compilers for TPUs make: of several that are added, and of one that another reduces
further.
"""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from .._collective import Groups, groups_of
from .._hlo_text import Array, HloModule, Instruction, array_of
from .merge import Computation, Details, in_each, renamed, users_of, with_groups, with_operands


# Operations that only change the shape of a sum.
_FORMS = ("bitcast", "copy", "reshape", "reverse", "transpose")


def folded(module: HloModule) -> HloModule:
    """The module where an all-reduce of an all-reduce becomes one, over the replica groups of both."""
    details = Details(module)
    return in_each(module, lambda _, name, own: _folded(own, details))


def _folded(computation: Computation, details: Details) -> Computation:
    users = users_of(computation)
    made = dict(computation)
    for name, own in computation.items():
        inner = made.get(own.operands[0]) if own.opcode == "all-reduce" and len(own.operands) == 1 else None
        if inner is None or inner.opcode != "all-reduce" or len(users[inner.name]) != 1 or len(inner.operands) != 1:
            continue
        if computation[inner.operands[0]].opcode == "convolution":
            continue  # sums of convolutions stay apart
        if (joined := _joined(details.groups(inner), details.groups(own))) is not None:
            made[name] = with_groups(with_operands(own, inner.operands), joined)
            del made[inner.name]
    return made


def _joined(inner: Groups, outer: Groups) -> Groups | None:
    """The replica groups that cover both reductions; `None` if the groups of the two do not form a grid."""
    if len(inner) != 1 or len(outer) != 1:
        return None
    member = {device: row for row in inner[0].tolist() for device in row}
    rows = {tuple(sorted(device for one in row for device in member[one])) for row in outer[0].tolist()}
    size = inner[0].shape[1] * outer[0].shape[1]
    if any(len(set(row)) != size for row in rows) or len(rows) * size != len(member):
        return None
    return (np.array(sorted(rows)),)


def added_once(module: HloModule) -> HloModule:
    """The module where a sum of all-reduces over the same devices is one all-reduce of the sum of their operands."""
    details = Details(module)
    return in_each(module, lambda _, name, own: _Adding(own, details).made)


class _Waiting(NamedTuple):
    """A value that is not reduced yet: the postponed reduction, its operand, and a term to add after the reduction."""

    reduction: Instruction
    value: str
    rest: str | None = None


class _Adding:
    """Rewrites one computation. Each reduction is postponed until an instruction other than a sum needs its result."""

    def __init__(self, computation: Computation, details: Details):
        self.computation, self.details, self.users = computation, details, users_of(computation)
        self.made: Computation = {}
        self.names: dict[str, str] = {}
        self.waiting: dict[str, _Waiting] = {}
        for own in computation.values():
            self.put(own)

    def put(self, own: Instruction) -> None:
        waiting = None if own.is_root else self.waits(own)
        if waiting is None:
            for operand in own.operands:
                self.reduce(operand)
            self.made[own.name] = renamed(own, self.names)
            return
        for operand in own.operands:
            self.waiting.pop(operand, None)
        self.waiting[own.name] = waiting
        if len(self.users[own.name]) != 1:
            self.reduce(own.name)

    def waits(self, own: Instruction) -> _Waiting | None:
        """The postponed reduction of an instruction's result; `None` if the instruction needs reduced operands."""
        found = [self.waiting.get(operand) for operand in own.operands]
        if own.opcode == "all-reduce" and len(found) == 1 and found[0] is None and len(self.users[own.name]) == 1:
            return _Waiting(own, self.names.get(own.operands[0], own.operands[0]))
        if own.opcode in _FORMS and found[0] is not None and found[0].rest is None:
            return found[0]._replace(value=self.add(own, (found[0].value,)))
        if own.opcode != "add" or len({*own.operands}) != 2:
            return None
        first, other = found
        if first is not None and other is not None:
            return self.both(own, first, other)
        one, rest = (first, own.operands[1]) if first is not None else (other, own.operands[0])
        if one is None or one.rest is not None or not self.is_scattered(one) or not self.meets_another(own):
            return None
        return one._replace(rest=self.names.get(rest, rest))

    def both(self, own: Instruction, first: _Waiting, other: _Waiting) -> _Waiting | None:
        is_same = self.details.of_sum(first.reduction) == self.details.of_sum(other.reduction)
        if not is_same or (first.rest is not None and other.rest is not None):
            return None
        # The TPU's compiler has added the other sum to the scatter's result before it partitions.
        if self.is_scattered(first) != self.is_scattered(other):
            return None
        return _Waiting(first.reduction, self.add(own, (first.value, other.value)), first.rest or other.rest)

    def is_scattered(self, waiting: _Waiting) -> bool:
        return self.computation[waiting.reduction.operands[0]].opcode == "scatter"

    def meets_another(self, own: Instruction) -> bool:
        """Whether the only user of a sum adds another reduction to it."""
        users = self.users[own.name]
        if len(users) != 1 or users[0].opcode != "add":
            return False
        return any(self.computation[operand].opcode == "all-reduce" for operand in users[0].operands)

    def add(self, own: Instruction, operands: tuple[str, ...]) -> str:
        """Makes an instruction over operands that are not reduced yet, and returns its name."""
        name = f"{own.name}.parts"
        self.made[name] = with_operands(own, operands)._replace(name=name)
        return name

    def reduce(self, name: str) -> None:
        """Makes the postponed reduction of a value, under the value's name."""
        if (waiting := self.waiting.pop(name, None)) is None:
            return
        own, whole = self.computation[name], name if waiting.rest is None else f"{name}.whole"
        reduced = with_operands(waiting.reduction, (waiting.value,))
        self.made[whole] = reduced._replace(name=whole, result=own.result)
        if waiting.rest is not None:
            self.made[name] = with_operands(own, (waiting.rest, whole))


# Reductions over all chips of 4x4, 8x8 and 16x16 slices go along both dimensions at once and are not scattered.
_SQUARES = (16, 64, 256)
_NUMBER = re.compile(r"\d+")
# The rows and lanes of a tile.
_ROWS, _LANES = 8, 128


def scattered(module: HloModule) -> HloModule:
    """The module where an all-reduce is a reduce-scatter if each device only reads its own slice and a TPU would
    scatter it.
    """
    return in_each(module, lambda _, name, own: _scattered(own, module.partitions, is_tpu=True))


def always_scattered(module: HloModule) -> HloModule:
    """The module where an all-reduce is a reduce-scatter if each device only reads its own slice."""
    return in_each(module, lambda _, name, own: _scattered(own, module.partitions, is_tpu=False))


def summed_parts(module: HloModule) -> HloModule:
    """The module where a gather of one-dimensional shards that do not fill a TPU's lanes is an all-reduce of
    zero-padded shards.
    """
    return in_each(module, lambda _, name, own: {key: _summed(one, own) for key, one in own.items()})


def _summed(gather: Instruction, computation: Computation) -> Instruction:
    part = math.prod(array_of(computation[gather.operands[0]]).shape) if gather.opcode == "all-gather" else 0
    is_row = part % _LANES and max(array_of(gather).shape) == math.prod(array_of(gather).shape)
    return gather._replace(opcode="all-reduce") if is_row else gather


def _scattered(computation: Computation, devices: int, *, is_tpu: bool) -> Computation:
    users = users_of(computation)
    slices: dict[str, Instruction] = {}
    for name, own in computation.items():
        if own.opcode == "all-reduce" and len(own.operands) == 1 and len(users[name]) == 1:
            (part,) = users[name]
            order = _order(users, part) if is_tpu else None
            if part.opcode == "dynamic-slice" and _is_part(own, part, devices, order):
                slices[part.name] = own
    whole = {own.name for own in slices.values()}
    return {
        name: _one(slices[name], own) if name in slices else own
        for name, own in computation.items()
        if name not in whole
    }


def _order(users: Mapping[str, list[Instruction]], part: Instruction) -> tuple[int, ...]:
    """The dimension order of a slice: that of the transposes if only transposes read it, else the slice's own."""
    orders = {own.attributes.partition("}")[0] if own.opcode == "transpose" else "" for own in users[part.name]}
    dims = tuple(map(int, _NUMBER.findall(orders.pop()))) if len(orders) == 1 else ()
    return dims or tuple(range(len(array_of(part).shape)))


def _is_part(reduction: Instruction, part: Instruction, devices: int, order: tuple[int, ...] | None) -> bool:
    """Whether the slice is a different part of the reduction on each device of a group, and the compiler scatters it.

    `order` is for TPUs: the dimensions in the order of the memory layout. `None` stands for other platforms.
    """
    groups = groups_of(reduction, "all-reduce", devices)
    size = groups[0].shape[1]
    if len(groups) != 1 or size == 1:
        return False
    if order is not None and size in _SQUARES and size == devices:
        return False
    dtype, before = array_of(reduction)
    after = array_of(part).shape
    is_equal = math.prod(before) == math.prod(after) * size
    if order is None or not is_equal:
        return is_equal
    return _fills_tiles(dtype, tuple(before[dim] for dim in order), tuple(after[dim] for dim in order))


def _fills_tiles(dtype: str, before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Whether a slice covers whole tiles in the memory layout that the compiler chooses, the one with the least
    padding.

    The rule comes from 58 compiled programs of one product each, in float32 and bfloat16, with two to four dimensions.
    """
    cut = next(dim for dim, (old, new) in enumerate(zip(before, after, strict=True)) if old != new)
    if cut < len(before) - 2:
        return math.prod(before[:cut]) == 1  # the slice is contiguous, so tiles do not matter
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
