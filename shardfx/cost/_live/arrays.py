"""Which values of a program occupy memory as arrays, and the order in which XLA schedules operations to hold few bytes
at a time.
"""

import heapq
import math
from collections.abc import Callable, Collection, Iterator, Sequence

from .._hlo_text import CONSTANTS, ELEMENTWISE, PIECES, PRODUCTS, VIEWS
from .program import Body, LiveOp, OpenedProgram, Uses


class Arrays:
    """Which values of a program XLA writes to memory as arrays, after fusion.

    On TPUs, products are fusions too. On GPUs and CPUs, libraries compute them, and these read arrays.
    """

    def __init__(self, program: OpenedProgram, *, tpu: bool):
        self.program, self.uses, self.tpu = program, Uses(program), tpu
        self.maker, self.home = self.uses.maker, self.uses.home
        self.known: dict[int, bool] = {}
        self.sources: dict[int, frozenset[int]] = {}

    def is_array(self, value: int) -> bool:
        """Whether a value is an array in memory. Parameters and loop-carried values always are."""
        if value not in self.known:
            self.known[value] = self._is_array(value)
        return self.known[value]

    def _is_array(self, value: int) -> bool:
        op = self.maker.get(value)
        if op is None or value in self.uses.results:
            return True
        if op.opcode in CONSTANTS or (op.opcode == "broadcast" and not self.program.buffers[op.reads[0]].shape):
            return any(self.needs_memory(user, at) for user, at, _ in self.uses.users.get(value, ()))
        if not self.program.buffers[value].shape:
            return True  # a scalar is computed once before the array that reads it
        if self.is_one_hot(op):
            return any(not self.fuses(user, at) for user, at, _ in self.readers(value))
        if op.opcode in VIEWS or op.opcode in PIECES or op.opcode in ELEMENTWISE:
            home = self.home[value]
            return any(
                body is not home
                or self.needs_memory(user, at)
                or (op.opcode in ELEMENTWISE and not self.fuses(user, at))
                for user, at, body in self.readers(value)
            )
        return True

    def is_one_hot(self, op: LiveOp) -> bool:
        """Whether a scatter writes one element into each row of a constant. XLA turns such a scatter into a comparison
        with an iota.
        """
        if op.opcode != "scatter":
            return False
        operand, *_, updates = (self.program.buffers[value].shape for value in op.reads)
        into = self.maker.get(op.reads[0])
        is_constant = into is not None and into.opcode == "broadcast"
        return is_constant and math.prod(updates) * max(operand, default=1) <= math.prod(operand)

    def readers(self, value: int) -> Iterator[tuple[LiveOp, int, Body]]:
        """The operations that read a value, directly or through views that are not arrays themselves."""
        for user, at, body in self.uses.users.get(value, ()):
            if user.opcode in VIEWS and not self.is_array(user.makes[0]):
                yield from self.readers(user.makes[0])
            else:
                yield user, at, body

    def read_for(self, value: int) -> frozenset[int]:
        """The arrays that are read to compute a value. For a value that is an array this is the value itself."""
        if self.is_array(value):
            return frozenset([value])
        if value not in self.sources:
            self.sources[value] = frozenset().union(*map(self.read_for, self.maker[value].reads))
        return self.sources[value]

    def reads(self, op: LiveOp) -> set[int]:
        """The arrays that an operation and its bodies read."""
        found = {source for value in op.reads for source in self.read_for(value)}
        for body in op.bodies:
            for value in body.results:
                found |= self.read_for(value)
            for inner in body.ops:
                if inner.bodies or any(map(self.is_array, inner.makes)):
                    found |= self.reads(inner)
        return found

    def fuses(self, op: LiveOp, at: int) -> bool:
        """Whether an operation computes its operand number `at` in its own fusion, so that the operand
        needs no memory.
        """
        if op.opcode == "dynamic-update-slice":
            return at > 0
        return (
            op.opcode in ELEMENTWISE
            or op.opcode in VIEWS
            or op.opcode in PIECES
            or op.opcode == "reduce"
            or (self.tpu and op.opcode in PRODUCTS)
            or self.is_one_hot(op)
        )

    def needs_memory(self, op: LiveOp, at: int) -> bool:
        """Whether operand number `at` must be an array even if it is a view, a slice or a constant."""
        if op.opcode == "dynamic-update-slice":
            return at == 0
        if op.opcode == "scatter":
            return not self.is_one_hot(op)
        return op.opcode in ("while", "conditional", "sort", "custom-call") or op.opcode.startswith(
            ("all-", "reduce-scatter", "collective-", "ragged-all")
        )


# An operation whose result is this many times its operands waits until its first reader.
_SMALL = 16


def listed(
    reads: Sequence[frozenset[int]], makes: Sequence[tuple[int, ...]], bytes_of: Callable[[int], int]
) -> list[int]:
    """The order of XLA's list scheduler, which picks the ready operation that frees the most bytes.

    The order of `ListMemoryScheduler` in `xla/hlo/transforms/hlo_memory_scheduler.cc`, November 2026: the priority is
    the bytes freed minus the bytes made, then the number of readers. An operation that reads nothing made in the body,
    such as the zeros that a loop starts from, runs right before its first reader.

    **Arguments:**

    - `reads`: the arrays that each operation reads.
    - `makes`: the arrays that it makes, each made once.
    - `bytes_of`: a function that gives the bytes of an array.
    """
    maker = {value: at for at, values in enumerate(makes) for value in values}
    users: dict[int, list[int]] = {}
    for at, values in enumerate(reads):
        for value in values:
            users.setdefault(value, []).append(at)
    before, is_first = _firsts(reads, makes, bytes_of)
    waits = _waits(before, is_first)
    waiters: dict[int, list[int]] = {}
    for at, own in enumerate(waits):
        for one in own:
            waiters.setdefault(one, []).append(at)
    left = {value: len(ops) for value, ops in users.items()}
    followers = [sum(len(users.get(value, ())) for value in values) for values in makes]
    done: set[int] = set()

    def priority(at: int) -> tuple[int, int, int]:
        freed = sum(bytes_of(value) for value in reads[at] if left[value] == 1 and maker.get(value) in done)
        made = sum(map(bytes_of, makes[at]))
        return made - freed, -followers[at], at

    ready = [priority(at) for at, own in enumerate(waits) if not own and not is_first[at]]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        at = heapq.heappop(ready)[-1]
        if at in done:
            continue
        firsts = _needed(at, before, is_first, done)
        done.update((*firsts, at))
        order += [*firsts, at]
        for value in reads[at]:
            left[value] -= 1
            if left[value] == 1:
                for user in users[value]:
                    if user not in done and not waits[user] and not is_first[user]:
                        heapq.heappush(ready, priority(user))
        for user in waiters.get(at, ()):
            waits[user].discard(at)
            if not waits[user] and not is_first[user]:
                heapq.heappush(ready, priority(user))
    return order


def _firsts(
    reads: Sequence[frozenset[int]], makes: Sequence[tuple[int, ...]], bytes_of: Callable[[int], int]
) -> tuple[list[list[int]], list[bool]]:
    """For each operation, the operations that must run before it, and whether it reads almost nothing that the body
    makes.
    """
    maker = {value: at for at, values in enumerate(makes) for value in values}
    read = {value for values in reads for value in values}
    before = [sorted({maker[value] for value in values if value in maker}) for values in reads]
    is_first: list[bool] = []
    for at, values in enumerate(reads):
        taken = _SMALL * sum(bytes_of(value) for value in values if value in maker)
        is_first.append(taken <= sum(map(bytes_of, makes[at])) and not read.isdisjoint(makes[at]))
    return before, is_first


def _waits(before: Sequence[Sequence[int]], is_first: Sequence[bool]) -> list[set[int]]:
    """For each operation, the operations that must run before it, without those that run only for their
    first reader.
    """
    found: list[set[int]] = []
    for own in before:
        found.append({one for one in own if not is_first[one]}.union(*(found[one] for one in own if is_first[one])))
    return found


def _needed(at: int, before: Sequence[Sequence[int]], is_first: Sequence[bool], done: Collection[int]) -> list[int]:
    """The operations that must run immediately before operation `at`, since they were postponed until their first
    reader.
    """
    found: list[int] = []
    for one in before[at]:
        if is_first[one] and one not in done and one not in found:
            found += [other for other in (*_needed(one, before, is_first, done), one) if other not in found]
    return found
