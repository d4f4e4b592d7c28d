"""Rewrites of all-reduces that compilers make.

There are three kinds: a sum of all-reduces becomes one all-reduce, an all-reduce moves
out of a loop, and an all-reduce whose result each device slices becomes a
reduce-scatter. `PASSES` in `passes.py` names the file of XLA for each function.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..._step import Array, Groups, Instruction, array_of, index_of, root_of
from .._live.program import reached
from .merge import Computation, Rewritten, renamed, users_of, with_groups, with_operands


def folded(known: Rewritten, computation: Computation) -> Computation:
    """A copy of `computation` without all-reduces of all-reduces. Where an all-reduce
    over {0,1},{2,3} is reduced again over {0,2},{1,3}, one all-reduce over {0,1,2,3}
    replaces the two.
    """
    users = users_of(computation)
    made = dict(computation)
    for name, own in computation.items():
        inner = (
            made.get(own.operands[0])
            if own.opcode == "all-reduce" and len(own.operands) == 1
            else None
        )
        if (
            inner is None
            or inner.opcode != "all-reduce"
            or len(users[inner.name]) != 1
            or len(inner.operands) != 1
        ):
            continue
        if computation[inner.operands[0]].opcode == "convolution":
            continue  # XLA does not combine all-reduces of convolutions
        if (combined := _combined(known.groups(inner), known.groups(own))) is not None:
            made[name] = with_groups(with_operands(own, inner.operands), combined)
            del made[inner.name]
    return made


def _combined(inner: Groups, outer: Groups) -> Groups | None:
    """The replica groups of one all-reduce that replaces an all-reduce over `inner` and
    then one over `outer`. For {0,1},{2,3} and {0,2},{1,3}, it is {0,1,2,3}. `None` if a
    combined group has a device twice, or if combined groups overlap.
    """
    if len(inner) != 1 or len(outer) != 1:
        return None
    member = {device: row for row in inner[0].tolist() for device in row}
    rows = {
        tuple(sorted(device for one in row for device in member[one]))
        for row in outer[0].tolist()
    }
    size = inner[0].shape[1] * outer[0].shape[1]
    if any(len(set(row)) != size for row in rows) or len(rows) * size != len(member):
        return None
    return (np.array(sorted(rows)),)


# The name of the reducer computation, which differs between all-reduces.
_REDUCER = re.compile(r"to_apply=%?[\w.\-]+")
# Operations that only change the shape of a sum.
_RESHAPES = ("bitcast", "copy", "reshape", "reverse", "transpose")


def added_once(known: Rewritten, computation: Computation) -> Computation:
    """A copy of `computation` in which a sum of all-reduces over the same devices
    becomes one all-reduce of the sum.
    """
    return _Reassociation(computation, known).made


class _Pending(NamedTuple):
    """The all-reduce `reduction`, which is not yet in the rewritten computation. It
    will reduce the array named `value`. If there is a `rest`, the array with this name
    will be added to the result.
    """

    reduction: Instruction
    value: str
    rest: str | None = None


class _Reassociation:
    """Rewrites one computation so that all-reduces move after the sums of their
    results.

    An all-reduce stays pending (out of the rewritten computation) while only sums and
    reshapes read its result. It is added before the first other reader.
    """

    def __init__(self, computation: Computation, known: Rewritten):
        self.computation, self.known, self.users = (
            computation,
            known,
            users_of(computation),
        )
        self.made: Computation = {}
        self.names: dict[str, str] = {}
        self.pending: dict[str, _Pending] = {}
        for own in computation.values():
            self.put(own)

    def put(self, own: Instruction) -> None:
        pending = None if own.is_root else self.pending_of(own)
        if pending is None:
            for operand in own.operands:
                self.reduce(operand)
            self.made[own.name] = renamed(own, self.names)
            return
        for operand in own.operands:
            self.pending.pop(operand, None)
        self.pending[own.name] = pending
        if len(self.users[own.name]) != 1:
            self.reduce(own.name)

    def pending_of(self, own: Instruction) -> _Pending | None:
        """The all-reduce that can stay pending after the instruction `own`: `own`
        itself, or one whose result `own` reshapes or adds to another array. `None` if
        there is none.
        """
        found = [self.pending.get(operand) for operand in own.operands]
        if (
            own.opcode == "all-reduce"
            and len(found) == 1
            and found[0] is None
            and len(self.users[own.name]) == 1
        ):
            return _Pending(own, self.names.get(own.operands[0], own.operands[0]))
        if own.opcode in _RESHAPES and found[0] is not None and found[0].rest is None:
            return found[0]._replace(value=self.add(own, (found[0].value,)))
        if own.opcode != "add" or len({*own.operands}) != 2:
            return None
        first, other = found
        if first is not None and other is not None:
            return self.both(own, first, other)
        one, rest = (
            (first, own.operands[1]) if first is not None else (other, own.operands[0])
        )
        if (
            one is None
            or one.rest is not None
            or not self.is_scattered(one)
            or not self.is_added_to_reduction(own)
        ):
            return None
        return one._replace(rest=self.names.get(rest, rest))

    def both(
        self, own: Instruction, first: _Pending, other: _Pending
    ) -> _Pending | None:
        details = {
            _REDUCER.sub("", self.known.details(one.reduction))
            for one in (first, other)
        }
        if len(details) > 1 or (first.rest is not None and other.rest is not None):
            return None
        # Before it partitions, the TPU's compiler makes one scatter of a sum of a
        # scatter and another value.
        if self.is_scattered(first) != self.is_scattered(other):
            return None
        return _Pending(
            first.reduction,
            self.add(own, (first.value, other.value)),
            first.rest or other.rest,
        )

    def is_scattered(self, pending: _Pending) -> bool:
        return self.computation[pending.reduction.operands[0]].opcode == "scatter"

    def is_added_to_reduction(self, own: Instruction) -> bool:
        """Whether only one instruction reads the sum `own`, and adds it to the result
        of an all-reduce.
        """
        users = self.users[own.name]
        if len(users) != 1 or users[0].opcode != "add":
            return False
        return any(
            self.computation[operand].opcode == "all-reduce"
            for operand in users[0].operands
        )

    def add(self, own: Instruction, operands: tuple[str, ...]) -> str:
        """Adds a copy of the instruction `own` that reads the arrays `operands`, and
        returns the name of the copy.
        """
        name = f"{own.name}.parts"
        self.made[name] = with_operands(own, operands)._replace(name=name)
        return name

    def reduce(self, name: str) -> None:
        """Puts the pending all-reduce that computes the array `name` into the rewritten
        computation, if there is one. If `name` is the sum of the all-reduce's result
        and another array, the addition follows the all-reduce.
        """
        if (pending := self.pending.pop(name, None)) is None:
            return
        own, whole = (
            self.computation[name],
            name if pending.rest is None else f"{name}.whole",
        )
        reduced = with_operands(pending.reduction, (pending.value,))
        self.made[whole] = reduced._replace(name=whole, result=own.result)
        if pending.rest is not None:
            self.made[name] = with_operands(own, (pending.rest, whole))


# Operations in a loop that only change the shape or dtype of a sum.
_RESHAPES_IN_LOOPS = ("bitcast", "convert", "reshape", "transpose", "copy")


def summed_after(known: Rewritten, computation: Computation) -> Computation:
    """A copy of `computation` in which an all-reduce moves from the body of a loop to
    after the loop, if the loop only adds the reduced value to a loop-carried array. The
    loop's body in `known.module` changes too.
    """
    computations = known.module.computations
    for loop in [own for own in computation.values() if own.opcode == "while"]:
        name = dict(loop.called)["body"]
        body, read = computations[name], users_of(computation)[loop.name]
        if (
            loop.is_root
            or root_of(body).opcode != "tuple"
            or any(own.opcode != "get-tuple-element" for own in read)
        ):
            continue
        found = {
            own.name: _accumulators(body, own)
            for own in body.values()
            if own.opcode == "all-reduce"
        }
        moved = {name: body[name] for name, indices in found.items() if indices}
        names = {name: own.operands[0] for name, own in moved.items()}
        computations[name] = {
            key: renamed(own, names) for key, own in body.items() if key not in moved
        }
        computation = _reduced_after(
            computation,
            loop,
            {at: own for key, own in moved.items() for at in found[key]},
        )
    return computation


def _reduced_after(
    computation: Computation, loop: Instruction, sums: Mapping[int, Instruction]
) -> Computation:
    """A copy of `computation` in which results of `loop` are reduced after the loop.
    `sums` has the all-reduce of each result, by the result's index.
    """
    made: Computation = {}
    names: dict[str, str] = {}
    for name, own in computation.items():
        made[name] = renamed(own, names)
        index = index_of(own)
        if index is not None and index in sums and own.operands[0] == loop.name:
            reduction = with_operands(sums[index], (name,))
            dtype, shape = (
                reduction.result.partition("[")[0],
                own.result.partition("[")[2],
            )
            names[name] = f"{reduction.name}.after.{name}"
            made[name] = own._replace(is_root=False)
            made[names[name]] = reduction._replace(
                name=names[name], result=f"{dtype}[{shape}", is_root=own.is_root
            )
    return made


def _accumulators(body: Computation, reduction: Instruction) -> tuple[int, ...]:
    """The indices of the loop-carried arrays to which the loop `body` adds the result
    of the all-reduce `reduction`. There are none if another instruction reads that
    result or one of these arrays.
    """
    users, last = users_of(body), root_of(body)

    def readers_of(
        values: Sequence[str], *through: str
    ) -> list[tuple[str, Instruction]]:
        """The instructions that read the values named `values` or reshapes of them,
        each with the name of the value that it reads. Operations with an opcode in
        `through` count as reshapes.
        """
        opcodes = (*_RESHAPES_IN_LOOPS, *through)
        reshaped = reached(
            values,
            lambda value: [
                user.name for user in users[value] if user.opcode in opcodes
            ],
        )
        return [
            (value, user)
            for value in reshaped
            for user in users[value]
            if user.opcode not in opcodes
        ]

    found: list[int] = []
    adds = (
        {user.name: user for _, user in readers_of([reduction.name])}
        if len(reduction.operands) == 1
        else {}
    )
    for name, add in adds.items():
        kept = readers_of([name], "dynamic-update-slice")
        if add.opcode != "add" or [user.name for _, user in kept] != [last.name]:
            return ()
        (value, _), *_ = kept
        index = last.operands.index(value)
        given = [
            own.name
            for own in body.values()
            if index_of(own) == index and body[own.operands[0]].opcode == "parameter"
        ]
        read = {
            user.name
            for _, user in readers_of(given, "dynamic-slice")
            if user.opcode != "dynamic-update-slice"
        }
        if read != {name} or last.operands.count(value) != 1:
            return ()
        found.append(index)
    return tuple(found)


# Reductions over all chips of 4x4, 8x8 and 16x16 slices go along both dimensions at
# once and are not scattered.
_SQUARES = (16, 64, 256)
_NUMBER = re.compile(r"\d+")
# The rows and lanes of a tile.
_ROWS, _LANES = 8, 128


def scattered(
    known: Rewritten, computation: Computation, *, is_tpu: bool
) -> Computation:
    """A copy of `computation` in which a reduce-scatter replaces an all-reduce followed
    by a slice. The slice must take a different shard of the all-reduce's result on each
    device. On TPUs, the shard must also fill whole tiles of the memory layout.
    """
    users = users_of(computation)
    slices: dict[str, Instruction] = {}
    for name, own in computation.items():
        if (
            own.opcode == "all-reduce"
            and len(own.operands) == 1
            and len(users[name]) == 1
        ):
            (shard,) = users[name]
            order = _order(users, shard) if is_tpu else None
            if shard.opcode == "dynamic-slice" and _is_own_slice(
                known, own, shard, order
            ):
                slices[shard.name] = own
    made = {
        name: own for name, own in computation.items() if own not in slices.values()
    }
    for name, reduction in slices.items():
        shard = computation[name]
        made[name] = reduction._replace(
            name=name,
            result=shard.result,
            opcode="reduce-scatter",
            is_root=shard.is_root,
        )
    return made


def summed_parts(known: Rewritten, computation: Computation) -> Computation:
    """A copy of `computation` in which an all-reduce of zero-padded shards replaces
    all-gathers of one-dimensional shards whose size is no multiple of 128, the lanes of
    a TPU.
    """
    made = dict(computation)
    for name, own in computation.items():
        if (
            own.opcode == "all-gather"
            and math.prod(array_of(computation[own.operands[0]]).shape) % _LANES
        ):
            if max(array_of(own).shape) == math.prod(array_of(own).shape):
                made[name] = own._replace(opcode="all-reduce")
    return made


def _order(
    users: Mapping[str, list[Instruction]], shard: Instruction
) -> tuple[int, ...]:
    """The dimensions of the slice `shard` in the order of its memory layout: the order
    to which all its readers transpose it. If there is no such order, the dimensions are
    ascending. `users` has the readers of each instruction.
    """
    orders = {
        own.attributes.partition("}")[0] if own.opcode == "transpose" else ""
        for own in users[shard.name]
    }
    dims = tuple(map(int, _NUMBER.findall(orders.pop()))) if len(orders) == 1 else ()
    return dims or tuple(range(len(array_of(shard).shape)))


def _is_own_slice(
    known: Rewritten,
    reduction: Instruction,
    shard: Instruction,
    order: tuple[int, ...] | None,
) -> bool:
    """Whether each device of a replica group takes a slice of its own from the result
    of the all-reduce `reduction`. A reduce-scatter can then replace the all-reduce and
    the slice `shard`. For a TPU, `order` has the dimensions in the order of the memory
    layout, and the slice must also fill whole tiles. For other devices, `order` is
    `None`.
    """
    groups = known.groups(reduction)
    size = groups[0].shape[1]
    if len(groups) != 1 or size == 1:
        return False
    if order is not None and size in _SQUARES and size == known.module.partitions:
        return False
    dtype, before = array_of(reduction)
    after = array_of(shard).shape
    is_equal = math.prod(before) == math.prod(after) * size
    if order is None or not is_equal:
        return is_equal
    return _fills_tiles(
        dtype, tuple(before[dim] for dim in order), tuple(after[dim] for dim in order)
    )


def _fills_tiles(dtype: str, before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Whether a slice of shape `after`, from an array of shape `before`, fills whole
    tiles of the memory layout. The compiler chooses the layout with the least padding.
    This rule was derived from 58 compiled programs of one matrix product each, in
    float32 and bfloat16, with two to four dimensions.
    """
    cut = next(
        dim
        for dim, (old, new) in enumerate(zip(before, after, strict=True))
        if old != new
    )
    if cut < len(before) - 2:
        # The slice is contiguous, so tiles do not matter.
        return math.prod(before[:cut]) == 1
    if len(before) < 2:
        return False
    packed = 32 // Array(dtype, ()).bits
    rows, lanes = after[-2:]
    if cut == len(before) - 2 or _padded(lanes, rows) < _padded(rows, lanes):
        return after[cut] % (_ROWS * packed) == 0
    return after[cut] % (_LANES * packed) == 0


def _padded(rows: int, lanes: int) -> int:
    return -(-rows // _ROWS) * -(-lanes // _LANES)
