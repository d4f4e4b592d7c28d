"""The values of a program that occupy memory as arrays, and the order in which XLA
schedules operations to use little memory.
"""

import heapq
from collections.abc import Callable, Collection, Sequence

from ..._step import CONSTANTS, ELEMENTWISE, PIECES, PRODUCTS, VIEWS
from .program import FlatProgram, Uses


# The results of these operations are computed in the fusion of the operation that reads
# them, also inside a loop.
_FREE = CONSTANTS | {"broadcast"}
_FUSED = VIEWS | PIECES | ELEMENTWISE


def sources_of(program: FlatProgram, uses: Uses) -> dict[int, frozenset[int]]:
    """For each value, the values in memory from which it is computed. For a value in
    memory, this is only the value.

    XLA fuses elementwise operations, slices, and views such as transposes with the
    operations that read their results, so these results occupy no memory. They do
    occupy memory if a loop reads them, or if a loop or the program returns them.
    Libraries compute matrix products, so the result of an elementwise operation also
    occupies memory if a matrix product reads it.
    """
    sources = {value: frozenset([value]) for value in range(len(program.buffers))}
    for op in uses.ops:
        for value in op.makes if op.opcode in _FUSED | _FREE else ():
            readers = uses.users.get(value, ())
            by_library = PRODUCTS if op.opcode in ELEMENTWISE else ()
            is_read = any(
                body is not uses.home[value] or user.opcode in by_library
                for user, _, body in readers
            )
            is_scalar = not program.buffers[value].shape
            if op.opcode in _FREE or not (
                is_read or is_scalar or value in uses.results
            ):
                sources[value] = frozenset().union(
                    *(sources[read] for read in op.reads)
                )
    return sources


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
    maker = {value: at for at, values in enumerate(makes) for value in values}
    users: dict[int, list[int]] = {}
    for at, values in enumerate(reads):
        for value in values:
            users.setdefault(value, []).append(at)
    before = [{maker[value] for value in values if value in maker} for values in reads]
    followers = [sum(len(users.get(value, ())) for value in values) for values in makes]
    is_first = [
        not own and count > 0 for own, count in zip(before, followers, strict=True)
    ]
    waits = [{one for one in own if not is_first[one]} for own in before]
    left = {value: len(ops) for value, ops in users.items()}
    done: set[int] = set()

    def priority(at: int) -> tuple[int, int, int]:
        freed = sum(
            bytes_of(value)
            for value in reads[at]
            if left[value] == 1 and maker.get(value) in done
        )
        made = sum(map(bytes_of, makes[at]))
        return made - freed, -followers[at], at

    ready = [
        priority(at) for at, own in enumerate(waits) if not own and not is_first[at]
    ]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        at = heapq.heappop(ready)[-1]
        if at in done:
            continue
        firsts = sorted(one for one in before[at] if is_first[one] and one not in done)
        done.update((*firsts, at))
        order += [*firsts, at]
        for value in reads[at]:
            left[value] -= 1
        changed = [user for value in makes[at] for user in users.get(value, ())]
        for user in changed:
            waits[user].discard(at)
        changed += [
            user for value in reads[at] if left[value] == 1 for user in users[value]
        ]
        for user in changed:
            if user not in done and not waits[user] and not is_first[user]:
                heapq.heappush(ready, priority(user))
    return order
