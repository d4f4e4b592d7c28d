"""The values of a program that occupy memory as arrays, and the order in which XLA
schedules operations to use little memory.
"""

import heapq
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from ..._ground import opcodes
from .program import FlatOp, FlatProgram, Uses


# The results of these operations are computed in the fusion of the operation that reads
# them, also inside a loop.
_FREE = opcodes.CONSTANTS | {"broadcast"}
_FUSED = opcodes.VIEWS | opcodes.PIECES | opcodes.ELEMENTWISE


def sources_of(program: FlatProgram, uses: Uses) -> dict[int, frozenset[int]]:
    """For each value, the values in memory from which it is computed. For a value in
    memory, this is only the value. Values are numbers; `uses` has the operations that
    make and read them.

    XLA fuses elementwise operations, slices, and views such as transposes with the
    operations that read their results, so these results occupy no memory. They do
    occupy memory if a loop reads them, or if a loop or the program returns them.
    Libraries compute matrix products, so the result of an elementwise operation also
    occupies memory if a matrix product reads it.
    """
    sources = {value: frozenset([value]) for value in range(len(program.buffers))}
    for op in uses.ops:
        is_free = op.opcode in _FREE
        if not is_free and op.opcode not in _FUSED:
            continue
        for value in op.makes:
            if is_free or not _is_stored(value, op, program, uses):
                sources_of_reads = [sources[read] for read in op.reads]
                sources[value] = frozenset().union(*sources_of_reads)
    return sources


def _is_stored(value: int, op: FlatOp, program: FlatProgram, uses: Uses) -> bool:
    """Whether a value occupies memory although XLA can fuse the operation `op` that
    makes it. `uses.home` has the loop's body or branch in which a value is made.
    """
    if value in uses.results or not program.buffers[value].shape:
        return True
    read_by_library = opcodes.PRODUCTS if op.opcode in opcodes.ELEMENTWISE else ()
    for use in uses.reads_of(value):
        if use.body is not uses.home[value] or use.op.opcode in read_by_library:
            return True
    return False


def list_schedule(
    reads: Sequence[frozenset[int]],
    makes: Sequence[Collection[int]],
    bytes_of: Callable[[int], int],
) -> list[int]:
    """The order in which XLA's list scheduler runs operations. The result has their
    positions in `reads` and `makes`. The scheduler is `ListMemoryScheduler` in
    `xla/hlo/transforms/hlo_memory_scheduler.cc`, November 2026.

    `reads` and `makes` have, for each operation, the numbers of the arrays that it
    reads and makes. Each array is made once, and `bytes_of` returns its bytes. Among
    the operations whose operands are computed, the scheduler picks the one that frees
    the most bytes, less the bytes that it makes; of equal ones, the one whose results
    have the most readers. An operation that reads no result of these operations, such
    as the all-gather of a weight, runs right before its first reader.
    """
    return _Scheduler(reads=reads, makes=makes, bytes_of=bytes_of).order()


class _Priority(NamedTuple):
    """The rank of an operation that can run next; the least runs first.

    - `growth_bytes`: the bytes that it makes, less those that it frees.
    - `minus_readers`: the negative number of the readers of its results.
    - `operation`: its number.
    """

    growth_bytes: int
    minus_readers: int
    operation: int


class _Scheduler:
    """The state of `list_schedule`. Operations and arrays are numbers.

    - `maker`, `users`: the operation that makes each array, and those that read it.
    - `makers`: the operations whose results an operation reads, by its number.
    - `reader_counts`: how often its results are read.
    - `is_late`: whether it runs right before its first reader.
    - `awaited`: the makers that have not run yet, without late ones.
    - `unread_counts`: how many operations have still to read each array.
    - `done_operations`: the operations that have run.
    """

    def __init__(
        self,
        reads: Sequence[frozenset[int]],
        makes: Sequence[Collection[int]],
        bytes_of: Callable[[int], int],
    ):
        """The state before the first operation. `reads` and `makes` have the numbers of
        the arrays that each operation reads and makes.
        """
        self.reads = reads
        self.makes = makes
        self.bytes_of = bytes_of
        self.maker: dict[int, int] = {}
        for operation, values in enumerate(makes):
            self.maker.update(dict.fromkeys(values, operation))
        self.users: dict[int, list[int]] = {}
        for operation, values in enumerate(reads):
            for value in values:
                self.users.setdefault(value, []).append(operation)
        self.unread_counts = {value: len(users) for value, users in self.users.items()}
        self.done_operations: set[int] = set()

        self.makers = [self._makers(values) for values in reads]
        self.reader_counts = [len(self._readers(values)) for values in makes]
        self.is_late = [self._is_late(operation) for operation in range(len(makes))]
        self.awaited = [self._awaited(makers) for makers in self.makers]

    def _readers(self, values: Collection[int]) -> list[int]:
        """The operations that read some values, once for each read."""
        readers: list[int] = []
        for value in values:
            readers += self.users.get(value, ())
        return readers

    def _makers(self, values: Collection[int]) -> set[int]:
        return {self.maker[value] for value in values if value in self.maker}

    def _is_late(self, operation: int) -> bool:
        """Whether an operation runs right before its first reader."""
        return self.reader_counts[operation] > 0 and not self.makers[operation]

    def _awaited(self, makers: set[int]) -> set[int]:
        return {maker for maker in makers if not self.is_late[maker]}

    def order(self) -> list[int]:
        """The operations in the order in which they run. It uses up the state.

        A late operation is not in the heap: it runs right before its first reader.
        """
        ready: list[_Priority] = []
        for operation in range(len(self.makes)):
            if self._can_run(operation):
                ready.append(self._priority(operation))
        heapq.heapify(ready)
        order: list[int] = []
        while ready:
            operation = heapq.heappop(ready).operation
            # An operation whose priority changed is in the heap several times.
            if operation in self.done_operations:
                continue
            # All makers that are not late are done.
            late_makers = sorted(self.makers[operation] - self.done_operations)
            next_operations = [*late_makers, operation]
            order += next_operations
            self.done_operations.update(next_operations)
            for user in self._ready_after(operation):
                heapq.heappush(ready, self._priority(user))
        return order

    def _can_run(self, operation: int) -> bool:
        """Whether all makers have run but late ones, and it is no late one itself."""
        return not self.awaited[operation] and not self.is_late[operation]

    def _priority(self, operation: int) -> _Priority:
        """The rank of an operation now: it frees the arrays whose last reader it is, if
        an operation that is done made them.
        """
        freed_bytes = 0
        for value in self.reads[operation]:
            if (
                self.unread_counts[value] == 1
                and self.maker.get(value) in self.done_operations
            ):
                freed_bytes += self.bytes_of(value)
        made_bytes = sum(map(self.bytes_of, self.makes[operation]))
        return _Priority(
            growth_bytes=made_bytes - freed_bytes,
            minus_readers=-self.reader_counts[operation],
            operation=operation,
        )

    def _ready_after(self, operation: int) -> list[int]:
        """Notes that an operation has run. Returns the operations that can run and
        whose priorities that changes.
        """
        for value in self.reads[operation]:
            self.unread_counts[value] -= 1
        users = self._readers(self.makes[operation])
        for user in users:
            self.awaited[user].discard(operation)
        for value in self.reads[operation]:
            # One reader is left. It would free the array, so its priority changes.
            if self.unread_counts[value] == 1:
                users += self.users[value]
        ready = []
        for user in users:
            if user not in self.done_operations and self._can_run(user):
                ready.append(user)
        return ready
