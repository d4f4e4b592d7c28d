"""The order in which XLA runs the operations of a body, to hold little at a time."""

import heapq
from collections.abc import Callable, Collection, Sequence


# An operation that makes this many times what it reads waits for its first reader.
_SMALL = 16


def listed(
    reads: Sequence[frozenset[int]], makes: Sequence[tuple[int, ...]], bytes_of: Callable[[int], int]
) -> list[int]:
    """The order of XLA's list scheduler: of what can run, the operation that frees most is next.

    `ListMemoryScheduler` in `xla/hlo/transforms/hlo_memory_scheduler.cc`, November 2026: the priority is the bytes
    freed less the bytes made, then the number of readers. What reads nothing that the body makes, such as the zeros
    that a loop starts from, runs right before its first reader.

    **Arguments:**

    - `reads`: the arrays that each operation reads.
    - `makes`: the arrays that it makes, each made once.
    - `bytes_of`: of an array.
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
    """What runs before each operation, and whether an operation reads next to nothing that the body makes."""
    maker = {value: at for at, values in enumerate(makes) for value in values}
    read = {value for values in reads for value in values}
    before = [sorted({maker[value] for value in values if value in maker}) for values in reads]
    is_first: list[bool] = []
    for at, values in enumerate(reads):
        taken = _SMALL * sum(bytes_of(value) for value in values if value in maker)
        is_first.append(taken <= sum(map(bytes_of, makes[at])) and not read.isdisjoint(makes[at]))
    return before, is_first


def _waits(before: Sequence[Sequence[int]], is_first: Sequence[bool]) -> list[set[int]]:
    """The operations that must have run before one can; those that wait for it themselves aside."""
    found: list[set[int]] = []
    for own in before:
        found.append({one for one in own if not is_first[one]}.union(*(found[one] for one in own if is_first[one])))
    return found


def _needed(at: int, before: Sequence[Sequence[int]], is_first: Sequence[bool], done: Collection[int]) -> list[int]:
    """The operations that must run right before one, since they wait for their first reader."""
    found: list[int] = []
    for one in before[at]:
        if is_first[one] and one not in done and one not in found:
            found += [other for other in (*_needed(one, before, is_first, done), one) if other not in found]
    return found
